"""Qwen3-Next and Qwen3.5 (text): gated delta nets in most layers, gated attention in others, small experts or none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from strata.errors import FileError
from strata.mir import Value
from strata.models.blocks.activations import activated
from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import mapping, of_layers, whole
from strata.models.decoder_config import listed_json, with_defaults
from strata.models.decoders.hybrid import HybridConfig, HybridGraph
from strata.models.decoders.mixtral import sparse_layers
from strata.models.decoders.moe import moe_fields, stacked
from strata.models.weights import ops


@dataclass(frozen=True)
class Qwen3NextConfig(HybridConfig):
    """The sizes of a Qwen3-Next."""

    key_heads: int = 1  # of delta nets
    value_heads: int = 1
    key_dim: int = 1
    value_dim: int = 1


def qwen3_next_config(found: dict[str, Any]) -> Qwen3NextConfig:
    made = listed_json(with_defaults(found, partial_rotary_factor=0.25, head_dim=256))
    kinds = of_layers(found, "layer_types", made.layers)
    has = [k == "full_attention" for k in kinds] if kinds else [(i + 1) % 4 == 0 for i in range(made.layers)]
    key_heads, value_heads = (whole(found, f"linear_num_{kind}_heads") for kind in ("key", "value"))
    key_dim, value_dim = (whole(found, f"linear_{kind}_head_dim") for kind in ("key", "value"))
    kernel = whole(found, "linear_conv_kernel_dim", 4, least=2)
    if value_heads % key_heads:
        raise FileError(f"the configuration has {value_heads} value heads for {key_heads} key heads", code="F140")
    mixed = 2 * key_heads * key_dim + value_heads * value_dim
    fields = moe_fields(
        found, made.layers, renormalize=bool(found.get("norm_topk_prob", True)),
        shared_inner=whole(found, "shared_expert_intermediate_size"), sparse=sparse_layers(found, made.layers),
        attends=tuple(has), states=(("conv", (kernel - 1, mixed)), ("state", (value_heads, key_dim, value_dim))),
        kernel=kernel, key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim,
        norm_offset=1.0, mixed=mixed,
    )  # fmt: skip
    return Qwen3NextConfig(**{**vars(made), **fields})


class Qwen3NextGraph(HybridGraph):
    """Builds the graph of a Qwen3-Next."""

    config: Qwen3NextConfig
    router = "gate"

    def projected(self, x: Value, layer: int) -> list[Value]:
        """Queries, keys and values; a gate lies beside each head's query."""
        c, at = self.config, f"layers.{layer}.self_attn."
        wide, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
        both, k, v = self.linears(x, [f"{at}{p}_proj" for p in "qkv"], (2 * wide, narrow, narrow), c.hidden)
        pairs = ops.reshape(both, (self.batch, self.count, c.heads, 2, c.head_dim))
        q, gate = (ops.reshape(ops.narrow(pairs, 3, i, 1), (self.batch, self.count, wide)) for i in range(2))
        self._gate = ops.sigmoid(gate)
        return [q, k, v]

    def attend(self, layer: int, q: Value, k: Value, v: Value, **fields: Any) -> Value:
        return super().attend(layer, q, k, v, **fields) * self._gate

    def mixer(self, x: Value, layer: int) -> Value:
        c, at = self.config, f"layers.{layer}.linear_attn."
        rows, share, (mixed, z, b, a) = (self.batch, self.count), c.value_heads // c.key_heads, self.delta_inputs(x, at)
        mixed = activated(self.short_conv(mixed, f"{at}conv1d", f"conv{layer}", c.kernel), c.activation)
        wide = c.key_heads * c.key_dim
        q, k = (self.of_value_heads(ops.narrow(mixed, -1, i * wide, wide), share) for i in range(2))
        v = ops.reshape(ops.narrow(mixed, -1, 2 * wide, c.value_heads * c.value_dim),
                        (*rows, c.value_heads, c.value_dim))  # fmt: skip
        decay = -ops.exp(self.param(f"{at}A_log", (c.value_heads,))) * ops.softplus(
            a + self.param(f"{at}dt_bias", (c.value_heads,))
        )
        found = self.delta_scan(q, k, v, decay, ops.sigmoid(b), f"state{layer}")
        normal = ops.rms_norm(found, self.param(f"{at}norm.weight", (c.value_dim,)), eps=c.eps)
        y = ops.reshape(normal, (*rows, c.value_heads * c.value_dim)) * ops.silu(z)
        return self.linear(y, f"{at}out_proj", c.hidden, c.value_heads * c.value_dim)

    def delta_inputs(self, x: Value, at: str) -> tuple[Value, Value, Value, Value]:
        """What a delta net reads: queries, keys and values in one, gates of results, of writes, and of decays."""
        c, rows, share = self.config, (self.batch, self.count), self.config.value_heads // self.config.key_heads
        sizes = (c.key_dim, c.key_dim, share * c.value_dim, share * c.value_dim)
        packed = self.linear(x, f"{at}in_proj_qkvz", c.key_heads * sum(sizes), c.hidden)
        packed = ops.reshape(packed, (*rows, c.key_heads, sum(sizes)))
        parts = [ops.narrow(packed, 3, sum(sizes[:i]), n) for i, n in enumerate(sizes)]
        flat = [ops.reshape(part, (*rows, c.key_heads * n)) for part, n in zip(parts, sizes, strict=True)]
        rates = self.linear(x, f"{at}in_proj_ba", 2 * c.value_heads, c.hidden)
        rates = ops.reshape(rates, (*rows, c.key_heads, 2 * share))
        b, a = (ops.reshape(ops.narrow(rates, 3, i * share, share), (*rows, c.value_heads)) for i in range(2))
        return ops.concat(flat[:3], -1), flat[3], b, a

    def of_value_heads(self, x: Value, share: int) -> Value:
        """Keys or queries of unit length, one for each value head."""
        c, rows = self.config, (self.batch, self.count)
        heads = ops.reshape(x, (*rows, c.key_heads, 1, c.key_dim))
        heads = heads * ops.rsqrt(ops.sum(heads * heads, -1, keepdims=True) + 1e-6)
        wide = ops.broadcast_to(heads, (*rows, c.key_heads, share, c.key_dim))
        return ops.reshape(wide, (*rows, c.value_heads, c.key_dim))


def qwen3_5_config(found: dict[str, Any]) -> Qwen3NextConfig:
    """From config.json of the text model, or of one that sees, too; one without experts has none."""
    family = str(found.get("model_type")).removesuffix("_text") + "_text"
    found = mapping(found, "text_config") or found
    has_experts = "moe" in family
    sizes = dict(linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128)
    usual = dict(num_key_value_heads=2 if has_experts else 4, **sizes)
    if has_experts:
        usual |= dict(num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
                      shared_expert_intermediate_size=512)  # fmt: skip
        return qwen3_next_config(with_defaults({**found, "model_type": family, "intermediate_size": 1}, **usual))
    none = dict(num_experts=1, num_experts_per_tok=1, moe_intermediate_size=1, shared_expert_intermediate_size=1)
    made = qwen3_next_config({**with_defaults({**found, "model_type": family}, **usual), **none})
    return replace(made, sparse=(False,) * made.layers, shared_inner=0)


class Qwen35Graph(Qwen3NextGraph):
    """Builds the graph of a Qwen3.5, whose delta nets have a matrix for each of their inputs."""

    def delta_inputs(self, x: Value, at: str) -> tuple[Value, Value, Value, Value]:
        c = self.config
        wide, count = c.value_heads * c.value_dim, c.value_heads
        sizes = {"qkv": 2 * c.key_heads * c.key_dim + wide, "z": wide, "b": count, "a": count}
        mixed, z, b, a = (self.linear(x, f"{at}in_proj_{part}", size, c.hidden) for part, size in sizes.items())
        return mixed, z, b, a


QWEN35 = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
DECODERS.update(dict.fromkeys(QWEN35, DecoderFamily(qwen3_5_config, Qwen35Graph, stacked())))
DECODERS["qwen3_next"] = DecoderFamily(qwen3_next_config, Qwen3NextGraph, stacked())
