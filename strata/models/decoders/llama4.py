"""Llama 4 (text): attention in chunks, layers without rotary positions, and experts beside a shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.core import f32, i64
from strata.errors import FileError
from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import layer_count, mapping, of_layers, real, whole, wholes
from strata.models.decoder_config import from_json, with_defaults
from strata.models.decoders.moe import MoeConfig, MoeGraph, moe_fields, stacked
from strata.models.weights import ops


@dataclass(frozen=True)
class Llama4Config(MoeConfig):
    """The sizes of a Llama 4."""

    chunk: int = 0  # tokens that layers with rotary positions see together; 0 is all
    has_head_norm: bool = True
    floor: float = 0.0  # queries of the other layers grow with every so many tokens
    growth: float = 0.1


def llama4_config(found: dict[str, Any]) -> Llama4Config:
    """From config.json of the text model, or of one that sees, too."""
    found = {**mapping(found, "text_config"), "model_type": "llama4_text"} if "text_config" in found else found
    layers = layer_count(found)
    every = whole(found, "no_rope_layer_interval", 4)
    rope_layers = of_layers(found, "no_rope_layers", layers) or [(i + 1) % every != 0 for i in range(layers)]
    kinds = of_layers(found, "layer_types", layers)
    if kinds is not None and [kind == "chunked_attention" for kind in kinds] != [bool(r) for r in rope_layers]:
        raise FileError("the configuration has layer_types in chunks where no_rope_layers says otherwise", code="F140")
    dense = {**found, "intermediate_size": whole(found, "intermediate_size_mlp"), "no_rope_layers": [*rope_layers]}
    made = from_json(with_defaults(dense, rms_norm_eps=1e-5, head_dim=128, rope_theta=500000.0))
    step, named = whole(found, "interleave_moe_layer_step", 1), wholes(found, "moe_layers")
    chosen = range(step - 1, layers, step) if named is None else named
    fields = moe_fields(
        with_defaults(found, num_experts_per_tok=1), layers, inner="intermediate_size",
        shared_inner=whole(found, "intermediate_size"), sparse=tuple(i in chosen for i in range(layers)),
        chunk=whole(found, "attention_chunk_size", 0), has_head_norm=bool(found.get("use_qk_norm", True)),
        floor=real(found, "floor_scale", 8192) if found.get("attn_temperature_tuning", True) else 0.0,
        growth=real(found, "attn_scale", 0.1), interleaved=True,
    )  # fmt: skip
    return Llama4Config(**{**vars(made), **fields})


class Llama4Graph(MoeGraph):
    """Builds the graph of a Llama 4."""

    config: Llama4Config
    router = "router"

    def rotated(self, x: Value, layer: int) -> Value:
        """Rotary positions, then a norm of each head that has no weights."""
        c = self.config
        x = super().rotated(x, layer)
        if not (c.rope_layers[layer] and c.has_head_norm):
            return x
        heads = ops.reshape(x, (self.batch, self.count, x.shape[-1] // c.head_dim, c.head_dim))
        return ops.reshape(ops.rms_norm(heads, eps=c.eps), x.shape)

    def attend(
        self, layer: int, q: Value, k: Value, v: Value, *, window: int | None = None, scale: float | None = None,
        softcap: float | None = None,
    ) -> Value:  # fmt: skip
        c, at = self.config, self.positions
        if not c.rope_layers[layer]:
            if c.floor:
                grown = ops.floor((ops.cast(at, f32) + 1.0) / c.floor)
                q = q * ops.reshape(ops.log1p(grown) * c.growth + 1.0, (-1, self.count, 1))
            return super().attend(layer, q, k, v)
        if not c.chunk or c.chunk >= self.length:
            return super().attend(layer, q, k, v)
        keys, values = self.gathered(layer, k, v)
        first = ops.reshape(at - at % c.chunk, (-1, 1, self.count, 1))  # of the chunk that a token is in
        keep = ops.logical_and(self.seen(keys.shape[1], None, axes=4), ops.iota((keys.shape[1],), 0, i64) >= first)
        fields = dict(num_heads=c.heads, kv_heads=c.kv_heads, mask_kind="custom", layout="bsd")
        found: Value = ops.attention(q, keys, values, keep, **fields)
        return found

    def route(self, logits: Value, layer: int) -> tuple[Value, Value]:
        best, ids = ops.topk(logits, self.config.chosen)
        return ops.sigmoid(best), ids

    def experts_of(self, rows: Value, weights: Value, ids: Value, at: str) -> Value:
        """The weights are those of what experts read."""
        many = self.spread(rows) * ops.reshape(weights, (-1, 1))
        return ops.combine_experts(self.routed(many, ops.reshape(ids, (-1,)), at), weights * 0.0 + 1.0)


DECODERS.update(dict.fromkeys(
    ("llama4_text", "llama4"),
    DecoderFamily(llama4_config, Llama4Graph, stacked({"feed_forward.": "mlp."}, is_wide=True)),
))  # fmt: skip
