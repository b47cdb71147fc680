"""Decoders that mix attention with layers of constant state: Jamba, Bamba, Granite 4 (hybrid), LFM2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.errors import FileError
from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily, Slot, kv_slots
from strata.models.config_values import of_layers, real, whole, wholes
from strata.models.decoder_config import listed_json, with_defaults
from strata.models.decoders.mixtral import GRANITE_NAMES, GraniteMoeConfig, GraniteMoeGraph, granite_moe_config
from strata.models.decoders.moe import MoeConfig, MoeGraph, moe_fields, stacked
from strata.models.decoders.recurrent import RecurrentGraph, step_limits
from strata.models.weights import Weights, check_layers, check_shapes, ops

NAMES = {"feed_forward.": "mlp.", "pre_ff_layernorm": "post_attention_layernorm", "final_layernorm": "norm"}
LFM2_NAMES = {
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj",
    "operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "embedding_norm": "norm",
    "self_attn.out_proj": "self_attn.o_proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm",
}  # fmt: skip


@dataclass(frozen=True)
class HybridConfig(MoeConfig):
    """The sizes of a decoder some of whose layers have no attention."""

    attends: tuple[bool, ...] = ()  # which layers have attention
    states: tuple[tuple[str, tuple[int, ...]], ...] = ()  # what each of the others carries
    kernel: int = 4
    state: int = 1
    rank: int = 1  # of time steps, in the first Mamba
    state_heads: int = 1  # in the second
    groups_of_state: int = 1
    mixed: int = 1  # features of the mixer
    limits: tuple[float, float] = (0.0, math.inf)

    @property
    def slots(self) -> tuple[Slot, ...]:
        found: list[Slot] = []
        for i, has in enumerate(self.attends):
            if has:
                found += kv_slots([i], self.kv_heads, self.head_dim)
            else:
                found += [Slot(f"{kind}{i}", shape, is_fixed=True) for kind, shape in self.states]
        return tuple(found)

    def check(self, weights: Weights) -> None:
        check_layers(self.family, self.layers, weights, "layers.{}.")
        keys = [f"layers.{i}.self_attn.k_proj.weight" for i, has in enumerate(self.attends) if has]
        check_shapes(self.family, weights, {
            "embed_tokens.weight": (self.vocab, self.hidden),
            **{name: (self.kv_heads * self.head_dim, self.hidden) for name in keys[:1] if name in weights},
        })  # fmt: skip


@dataclass(frozen=True)
class GraniteHybridConfig(HybridConfig, GraniteMoeConfig):
    """The sizes of a Granite 4."""


def second_mamba(found: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    """The fields of layers with the mixer of Mamba-2."""
    inner, heads = int(real(found, "mamba_expand", 2.0) * hidden), whole(found, "mamba_n_heads", 128)
    state, groups = whole(found, "mamba_d_state", 256), whole(found, "mamba_n_groups", 1)
    kernel = whole(found, "mamba_d_conv", 4, least=2)
    if inner % heads or heads % groups:
        raise FileError(f"the configuration has {inner} features and {groups} groups for {heads} heads", code="F140")
    states = (("conv", (kernel - 1, inner + 2 * groups * state)), ("state", (heads, inner // heads, state)))
    return dict(mixed=inner, state_heads=heads, state=state, groups_of_state=groups, kernel=kernel, states=states,
                limits=step_limits(found))  # fmt: skip


def jamba_config(found: dict[str, Any]) -> HybridConfig:
    made = listed_json(found)
    period, offset = whole(found, "attn_layer_period", 8), whole(found, "attn_layer_offset", 4, least=0)
    every, first = whole(found, "expert_layer_period", 2), whole(found, "expert_layer_offset", 1, least=0)
    inner, state = int(real(found, "mamba_expand", 2.0) * made.hidden), whole(found, "mamba_d_state", 16)
    kernel, rank = whole(found, "mamba_d_conv", 4, least=2), found.get("mamba_dt_rank", "auto")
    count = whole(found, "num_experts", 16)
    fields = moe_fields(
        found, made.layers, inner="intermediate_size", renormalize=False, rope_layers=(False,) * made.layers,
        sparse=tuple(count > 1 and i % every == first for i in range(made.layers)),
        attends=tuple(i % period == offset for i in range(made.layers)), mixed=inner, state=state, kernel=kernel,
        rank=-(-made.hidden // 16) if rank == "auto" else whole(found, "mamba_dt_rank"),
        states=(("conv", (kernel - 1, inner)), ("state", (inner, state))),
    )  # fmt: skip
    return HybridConfig(**{**vars(made), **fields})


def bamba_config(found: dict[str, Any]) -> HybridConfig:
    made = listed_json(with_defaults(found, rms_norm_eps=1e-5, partial_rotary_factor=0.5))
    kinds, named = of_layers(found, "layer_types", made.layers), wholes(found, "attn_layer_indices") or ()
    has = tuple(k in ("attention", "full_attention") for k in kinds) if kinds else tuple(
        i in named for i in range(made.layers))  # fmt: skip
    own = dict(sparse=(False,) * made.layers, attends=has, **second_mamba(found, made.hidden))
    return HybridConfig(**{**vars(made), **own})


def granite_hybrid_config(found: dict[str, Any]) -> GraniteHybridConfig:
    count = whole(found, "num_local_experts", 0, least=0)
    settings = found if count else {**found, "num_local_experts": 1, "num_experts_per_tok": 1}
    made = granite_moe_config(settings)
    kinds = of_layers(found, "layer_types", made.layers) or ["mamba"] * made.layers
    own = dict(
        attends=tuple(k in ("attention", "full_attention") for k in kinds), sparse=(bool(count),) * made.layers,
        rope_layers=() if found.get("position_embedding_type") == "rope" else (False,) * made.layers,
        **second_mamba(found, made.hidden),
    )  # fmt: skip
    return GraniteHybridConfig(**{**vars(made), **own})


def lfm2_config(found: dict[str, Any]) -> HybridConfig:
    """From config.json. The width of feed-forwards may be what is left after rounding."""
    found = with_defaults(found, norm_eps=1e-5, tie_word_embeddings=True, rope_theta=1e6)
    inner = whole(found, "block_ff_dim", whole(found, "intermediate_size"))
    if found.get("block_auto_adjust_ff_dim", True):
        step = whole(found, "block_multiple_of", 256)
        inner = -(-int(real(found, "block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3)) // step) * step
    made = listed_json({**found, "intermediate_size": inner})
    kinds, named = of_layers(found, "layer_types", made.layers), wholes(found, "full_attn_idxs")
    has = [k == "full_attention" for k in kinds] if kinds else [named is None or i in named for i in range(made.layers)]
    kernel = whole(found, "conv_L_cache", 3, least=2)
    own = dict(sparse=(False,) * made.layers, attends=tuple(has), kernel=kernel,
               states=(("conv", (kernel - 1, made.hidden)),))  # fmt: skip
    return HybridConfig(**{**vars(made), **own})


class HybridGraph(MoeGraph, RecurrentGraph):
    """Builds the graph of a Jamba: the mixer of the first Mamba."""

    config: HybridConfig
    router = "router"

    def attention(self, x: Value, layer: int) -> Value:
        return super().attention(x, layer) if self.config.attends[layer] else self.mixer(x, layer)

    def mixer(self, x: Value, layer: int) -> Value:
        c, at = self.config, f"layers.{layer}.mamba."

        def normal(y: Value, name: str) -> Value:
            return self.norm(y, name, int(y.shape[-1]))

        return self.channels_mixed(x, at, layer, c.mixed, c.state, c.rank, c.kernel, c.activation, normal)


class BambaGraph(HybridGraph):
    """Builds the graph of a Bamba: the mixer of Mamba-2."""

    def mixer(self, x: Value, layer: int) -> Value:
        c, at = self.config, f"layers.{layer}.mamba."
        heads = c.state_heads
        found, gate = self.heads_mixed(
            x, at, layer, heads, c.mixed // heads, c.state, c.groups_of_state, c.kernel, c.limits, c.activation
        )
        y = self.gated_norm(found, ops.silu(gate), f"{at}norm", c.groups_of_state, c.eps)
        return self.linear(y, f"{at}out_proj", c.hidden, c.mixed)


class GraniteHybridGraph(GraniteMoeGraph, BambaGraph):
    """Builds the graph of a Granite 4: every layer has a shared expert, some models have others beside it."""

    config: GraniteHybridConfig
    router = "gate"

    def feed_forward(self, x: Value, layer: int) -> Value:
        c = self.config
        if c.sparse[layer]:
            return super().feed_forward(x, layer)
        rows = ops.reshape(x, (self.batch * self.count, c.hidden))
        return ops.reshape(self.shared_expert(rows, f"layers.{layer}.mlp."), x.shape) * c.residual_scale


class Lfm2Graph(HybridGraph):
    """Builds the graph of an LFM2: a short convolution between two gates."""

    def mixer(self, x: Value, layer: int) -> Value:
        c, at = self.config, f"layers.{layer}.conv."
        packed = self.linear(x, f"{at}in_proj", 3 * c.hidden, c.hidden)
        before, behind, value = (ops.narrow(packed, -1, i * c.hidden, c.hidden) for i in range(3))
        y = behind * self.short_conv(before * value, f"{at}conv", f"conv{layer}", c.kernel)
        return self.linear(y, f"{at}out_proj", c.hidden, c.hidden)


DECODERS["jamba"] = DecoderFamily(jamba_config, HybridGraph, stacked(NAMES))
DECODERS["bamba"] = DecoderFamily(bamba_config, BambaGraph, stacked(NAMES))
DECODERS["lfm2"] = DecoderFamily(lfm2_config, Lfm2Graph, stacked(LFM2_NAMES))
DECODERS["granitemoehybrid"] = DecoderFamily(granite_hybrid_config, GraniteHybridGraph, stacked(GRANITE_NAMES))
