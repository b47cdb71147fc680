"""Gemma 4 (text): wider heads in layers that see all, caches that layers share, inputs of each layer, experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from strata.errors import FileError
from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import layer_count, mapping, of_layers, optional_real, real, whole
from strata.models.decoder_config import RopeConfig, from_json, with_defaults
from strata.models.decoders.moe import MoeConfig, MoeGraph, stacked
from strata.models.shared_caches import SharedConfig, SharedGraph
from strata.models.weights import Weights, check_layers, check_shapes, ops

NAMES = {
    ".experts.": ".mlp.experts.", ".router.proj.": ".mlp.gate.", ".router.scale": ".mlp.gate.scale",
    ".router.per_expert_scale": ".mlp.gate.expert_scale",
}  # fmt: skip


@dataclass(frozen=True)
class Gemma4Config(SharedConfig, MoeConfig):
    """The sizes of a Gemma 4. `head_dim` and `kv_heads` are those of layers with a window."""

    full_dim: int = 2  # of a head, and heads of keys, in layers without one
    full_kv_heads: int = 1
    wide: int = 1  # how many times as wide their feed-forwards are

    def sizes(self, layer: int) -> tuple[int, int]:
        """The width of a head, and how many of keys there are."""
        return (self.full_dim, self.full_kv_heads) if self.window(layer) is None else (self.head_dim, self.kv_heads)

    def check(self, weights: Weights) -> None:
        check_layers(self.family, self.layers, weights, "layers.{}.")
        size, count = self.sizes(0)
        check_shapes(self.family, weights, {
            "embed_tokens.weight": (self.vocab, self.hidden), "layers.0.mlp.up_proj.weight": (self.inner, self.hidden),
            "layers.0.self_attn.q_proj.weight": (self.heads * size, self.hidden),
            "layers.0.self_attn.k_proj.weight": (count * size, self.hidden),
        })  # fmt: skip


def full_sizes(found: dict[str, Any], kinds: list[bool], size: int, count: int) -> tuple[int, int]:
    """The width of heads and the heads of keys of layers without a window, which are the same in all of them."""
    each = mapping(found, "per_layer_config")
    if not each:
        shares = found.get("attention_k_eq_v") and found.get("num_global_key_value_heads") is not None
        return whole(found, "global_head_dim", 512), whole(found, "num_global_key_value_heads") if shares else count
    pairs = set()
    for i, is_full in enumerate(kinds):
        own = mapping(each, str(i))
        pair = (whole(own, "head_dim", size), whole(own, "num_key_value_heads", count))
        if is_full:
            pairs.add(pair)
        elif pair != (size, count):
            raise FileError(f"the configuration has per_layer_config for layer {i}, which has a window", code="F140")
    if len(pairs) > 1:
        raise FileError(f"the configuration has per_layer_config of several sizes: {sorted(pairs)}", code="F140")
    return pairs.pop() if pairs else (size, count)


def proportional(rope: dict[str, Any], size: int) -> RopeConfig:
    """A rope over whole heads, of whose pairs only the first turn."""
    kind = rope.get("rope_type", "proportional")
    if kind not in ("proportional", "default"):
        raise FileError(f"rope scaling {kind!r:.40} of full_attention is not one of default, proportional", code="F140")
    pairs = size // 2
    share = min(real(rope, "partial_rotary_factor", 1.0), 1.0) if kind == "proportional" else 1.0
    turning = int(share * size // 2)
    factor = real(rope, "factor", 1.0) if kind == "proportional" else 1.0
    return RopeConfig(real(rope, "rope_theta", 1e6), divisors=(factor,) * turning + (math.inf,) * (pairs - turning))


def gemma4_config(found: dict[str, Any]) -> Gemma4Config:
    """From config.json of the text model, or of one that sees and hears, too."""
    found = {**mapping(found, "text_config"), "model_type": "gemma4_text"} if "text_config" in found else found
    layers, window = layer_count(found), whole(found, "sliding_window", 512)
    named = of_layers(found, "layer_types", layers)
    full = [n == "full_attention" for n in named] if named else [(i + 1) % 6 == 0 for i in range(layers)]
    full[-1] = True  # whatever is said of the last layer
    size, count = whole(found, "head_dim", 256), whole(found, "num_key_value_heads", 4)
    full_dim, full_count = full_sizes(found, full, size, count)
    ropes = mapping(found, "rope_parameters")
    near, far = (mapping(ropes, f"{kind}_attention") for kind in ("sliding", "full"))
    far = far or {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    if near.get("rope_type", "default") != "default":
        raise FileError(f"rope scaling {near['rope_type']!r:.40} of sliding_attention is not default", code="F140")
    plain = {k: v for k, v in found.items() if k not in ("rope_parameters", "layer_types")}
    if plain.get("use_bidirectional_attention") == "vision":  # among the tokens of an image: texts have none
        del plain["use_bidirectional_attention"]
    made = from_json(with_defaults({**plain, "sliding_window": None}, rms_norm_eps=1e-6, head_dim=size,
                                   num_key_value_heads=count))  # fmt: skip
    has_experts = bool(found.get("enable_moe_block"))
    own = dict(experts=whole(found, "num_experts"), chosen=whole(found, "top_k_experts"),
               expert_inner=whole(found, "moe_intermediate_size")) if has_experts else {}  # fmt: skip
    config = Gemma4Config(**{
        **vars(made), "norm_offset": 0.0, "score_scale": 1.0, "windows": tuple(None if f else window for f in full),
        "rope": proportional(far, full_dim), "local_rope": RopeConfig(real(near, "rope_theta", 10000.0)),
        "logit_cap": optional_real(found, "final_logit_softcapping"), "full_dim": full_dim,
        "full_kv_heads": full_count, "shared": whole(found, "num_kv_shared_layers", 0, least=0),
        "shares_keys": bool(found.get("attention_k_eq_v")), "wide": 2 if found.get("use_double_wide_mlp") else 1,
        "own_width": whole(found, "hidden_size_per_layer_input", 256, least=0), "sparse": (has_experts,) * layers,
        "own_vocab": whole(found, "vocab_size_per_layer_input", 262144), **own,
    })  # fmt: skip
    if config.heads % full_count:
        raise FileError(f"the configuration has {config.heads} heads and {full_count} of keys where all is seen, which "
                        "do not divide them", code="F140")  # fmt: skip
    return config.with_sources()


class Gemma4Graph(SharedGraph, MoeGraph):
    """Builds the graph of a Gemma 4."""

    config: Gemma4Config

    def _rope_tables(self, name: str, rope: Any, length: int) -> tuple[Value, Value]:
        return self.table_rows(name, rope.tables(length, size := self.size_of(name), size))

    def size_of(self, name: str) -> int:
        """The width of the heads that a rope turns."""
        return self.config.head_dim if name == "local_rope" else self.config.full_dim

    def kv_heads_of(self, layer: int) -> int:
        return self.config.sizes(layer)[1]

    def placed(self, x: Value, name: str, heads: int, layer: int) -> Value:
        size, (cos, sin) = self.config.sizes(layer)[0], self.tables[self.config.window(layer) is not None]
        split = ops.reshape(x, (self.batch, self.count, heads, size))
        found: Value = ops.reshape(self.norm(split, name, size), x.shape)
        return ops.rope(found, cos, sin, head_dim=size, n_rot=size, layout="bsd")

    def dense(self, x: Value, layer: int) -> Value:
        c, at = self.config, f"layers.{layer}.mlp."
        inner = c.inner * (c.wide if c.source(layer) != layer else 1)
        gate, up = self.linears(x, [f"{at}gate_proj", f"{at}up_proj"], (inner, inner), c.hidden)
        return self.linear(self.activated(gate) * up, f"{at}down_proj", c.hidden, inner)

    def mixture(self, x: Value, layer: int) -> Value:
        """What the experts of each token make of it; they are chosen by the layer's input without its norm."""
        c, at = self.config, f"layers.{layer}."
        rows = ops.reshape(x, (self.batch * self.count, c.hidden))
        asked = ops.rms_norm(rows, eps=c.eps) * self.param(f"{at}mlp.gate.scale", (c.hidden,)) * c.hidden**-0.5
        shares = ops.softmax(self.linear(asked, f"{at}mlp.gate", c.experts, c.hidden), -1)
        best, ids = ops.topk(shares, c.chosen)
        scale = ops.take(self.param(f"{at}mlp.gate.expert_scale", (c.experts,)), ids, axis=0)
        weights = best / ops.sum(best, -1, keepdims=True) * scale
        found = self.experts_of(
            self.norm(rows, f"{at}pre_feedforward_layernorm_2", c.hidden), weights, ids, f"{at}mlp."
        )
        return self.norm(ops.reshape(found, x.shape), f"{at}post_feedforward_layernorm_2", c.hidden)

    def layer(self, x: Value, number: int) -> Value:
        c, at = self.config, f"layers.{number}."
        mixed = self.attention(self.norm(x, f"{at}input_layernorm", c.hidden), number)
        x = x + self.norm(mixed, f"{at}post_attention_layernorm", c.hidden)
        inner = self.dense(self.norm(x, f"{at}pre_feedforward_layernorm", c.hidden), number)
        if c.sparse[number]:
            inner = self.norm(inner, f"{at}post_feedforward_layernorm_1", c.hidden) + self.mixture(x, number)
        x = x + self.norm(inner, f"{at}post_feedforward_layernorm", c.hidden)
        if c.own_width:
            x = x + self.read_own(x, number)
        return x * self.param(f"{at}layer_scalar", (1,)) if self.has(f"{at}layer_scalar") else x

    def embedded(self) -> Value:
        x = super().embedded()
        if self.config.own_width:
            self.own = self.inputs_of_layers(x)
        return x


DECODERS.update(dict.fromkeys(("gemma4", "gemma4_text"), DecoderFamily(gemma4_config, Gemma4Graph, stacked(NAMES))))
