"""Mixtral, Qwen2 and 3 MoE, OLMoE, MiniMax-M2, Granite MoE: Llama-like decoders with mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import optional_real, whole, wholes
from strata.models.decoder_config import listed_json, with_defaults
from strata.models.decoders.granite import GraniteConfig, GraniteGraph, granite_factors
from strata.models.decoders.moe import MoeConfig, MoeGraph, moe_fields, stacked
from strata.models.weights import ops

MIXTRAL_NAMES = {"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
GRANITE_NAMES = {
    "block_sparse_moe.input_linear": "mlp.experts.gate_up_proj", "block_sparse_moe.router.layer": "mlp.gate",
    "block_sparse_moe.output_linear": "mlp.experts.down_proj", "shared_mlp.": "mlp.shared_expert.",
}  # fmt: skip


def mixtral_config(found: dict[str, Any]) -> MoeConfig:
    made = listed_json(with_defaults(found, rms_norm_eps=1e-5))
    fields = moe_fields(found, made.layers, inner="intermediate_size")
    return MoeConfig(**{**vars(made), **fields})


def sparse_layers(found: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers have experts: every n-th one, without those that are named."""
    step, plain = whole(found, "decoder_sparse_step", 1), wholes(found, "mlp_only_layers") or ()
    return tuple(i not in plain and (i + 1) % step == 0 for i in range(layers))


def qwen_config(found: dict[str, Any]) -> MoeConfig:
    """From config.json of a Qwen2 or 3 MoE."""
    second = found.get("model_type") == "qwen2_moe"
    made = listed_json(found)
    if second and made.windows and not found.get("layer_types"):  # of the first layers every other one has a window
        last, window = whole(found, "max_window_layers", 28, least=0), whole(found, "sliding_window")
        sees = tuple(window if i % 2 == 0 and i < last else None for i in range(made.layers))
        made = replace(made, windows=sees)
    fields = moe_fields(
        found, made.layers, renormalize=bool(found.get("norm_topk_prob", False)),
        shared_inner=whole(found, "shared_expert_intermediate_size") if second else 0,
        sparse=sparse_layers(found, made.layers),
    )  # fmt: skip
    return MoeConfig(**{**vars(made), **fields})


@dataclass(frozen=True)
class OlmoeConfig(MoeConfig):
    """The sizes of an OLMoE."""

    clip: float | None = None


def minimax_config(found: dict[str, Any]) -> OlmoeConfig:
    """From config.json of a MiniMax-M2, which may say how many features of a head are rotated."""
    usual: dict[str, Any] = dict(head_dim=128, num_key_value_heads=8, num_experts_per_tok=8, rope_theta=5e6)
    found = with_defaults(found, **usual)
    if found.get("rotary_dim") is not None:
        found = with_defaults(found, partial_rotary_factor=whole(found, "rotary_dim") / whole(found, "head_dim"))
    made = listed_json(found)
    return OlmoeConfig(**{**vars(made), **moe_fields(found, made.layers, inner="intermediate_size", score="sigmoid")})


def olmoe_config(found: dict[str, Any]) -> OlmoeConfig:
    made = listed_json(with_defaults(found, rms_norm_eps=1e-5))
    fields = moe_fields(found, made.layers, inner="intermediate_size", clip=optional_real(found, "clip_qkv"),
                        renormalize=bool(found.get("norm_topk_prob", False)))  # fmt: skip
    return OlmoeConfig(**{**vars(made), **fields})


class OlmoeGraph(MoeGraph):
    """Builds the graph of an OLMoE: queries and keys are normalised across all heads, then clipped."""

    config: OlmoeConfig

    def heads_norm(self, x: Value, name: str, heads: int) -> Value:
        return self.clipped(self.norm(x, name, heads * self.config.head_dim))

    def projected(self, x: Value, layer: int) -> list[Value]:
        q, k, v = super().projected(x, layer)
        return [q, k, self.clipped(v)]

    def clipped(self, x: Value) -> Value:
        clip = self.config.clip
        return x if clip is None else ops.clip(x, -clip, clip)


@dataclass(frozen=True)
class GraniteMoeConfig(MoeConfig, GraniteConfig):
    """The sizes of a Granite MoE."""


def granite_moe_config(found: dict[str, Any]) -> GraniteMoeConfig:
    made = listed_json(found)
    fields = moe_fields(found, made.layers, inner="intermediate_size",
                        shared_inner=whole(found, "shared_intermediate_size", 0, least=0))  # fmt: skip
    return GraniteMoeConfig(**{**vars(made), **granite_factors(found), **fields})


class GraniteMoeGraph(GraniteGraph, MoeGraph):
    """Builds the graph of a Granite MoE; its shared expert has one matrix for gate and up."""

    config: GraniteMoeConfig

    def shared_expert(self, rows: Value, at: str) -> Value:
        c, name = self.config, f"{at}shared_expert."
        both = self.linear(rows, f"{name}input_linear", 2 * c.shared_inner, c.hidden)
        gate, up = (ops.narrow(both, -1, i * c.shared_inner, c.shared_inner) for i in range(2))
        return self.linear(self.activated(gate) * up, f"{name}output_linear", c.hidden, c.shared_inner)


DECODERS["mixtral"] = DecoderFamily(mixtral_config, MoeGraph, stacked(MIXTRAL_NAMES))
DECODERS.update(dict.fromkeys(("qwen2_moe", "qwen3_moe"), DecoderFamily(qwen_config, MoeGraph, stacked())))
MINIMAX_NAMES = {".e_score_correction_bias": ".gate.e_score_correction_bias", **MIXTRAL_NAMES}
DECODERS["minimax_m2"] = DecoderFamily(minimax_config, OlmoeGraph, stacked(MINIMAX_NAMES))
DECODERS["olmoe"] = DecoderFamily(olmoe_config, OlmoeGraph, stacked())
DECODERS.update(dict.fromkeys(
    ("granitemoe", "granitemoeshared"), DecoderFamily(granite_moe_config, GraniteMoeGraph, stacked(GRANITE_NAMES))
))  # fmt: skip
