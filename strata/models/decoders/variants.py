"""Llama with one or two changes: Ministral 3, Helium, Arcee, Jais 2, Apertus, nanochat, Hunyuan, HyperCLOVA X, others.

Families that differ from Llama only in what a config.json leaves out are here, too: Ministral, Seed-OSS, CWM,
InternLM 3, IQuest-Coder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from strata.core import f32
from strata.errors import FileError
from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import layer_count, mapping, optional_real, real, whole
from strata.models.decoder_config import DecoderConfig, from_json, listed_json, with_defaults
from strata.models.decoders.granite import GraniteConfig, GraniteGraph, granite_factors
from strata.models.decoders.layer_norm import renamed
from strata.models.decoders.moe import MoeConfig, MoeGraph, moe_fields, stacked
from strata.models.llama import LlamaGraph, plain_names
from strata.models.weights import ops

CWM_ROPE = dict(rope_type="llama3", rope_theta=1e6, factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0,
                original_max_position_embeddings=8192)  # fmt: skip
APERTUS_ROPE = dict(rope_type="llama3", rope_theta=1.2e7, factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0,
                    original_max_position_embeddings=8192)  # fmt: skip
MINISTRAL_ROPE = dict(rope_type="yarn", rope_theta=1e6, factor=16.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
                      mscale_all_dim=1.0, original_max_position_embeddings=16384, llama_4_scaling_beta=0.1)  # fmt: skip
APERTUS_NAMES = {"attention_layernorm": "input_layernorm", "feedforward_layernorm": "post_attention_layernorm"}
HUNYUAN_NAMES = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
NANOCHAT_NAMES = {"mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"}
GEMMA_NAMES = {"pre_feedforward_layernorm": "post_attention_layernorm"}


def plain_config(found: dict[str, Any], **defaults: Any) -> DecoderConfig:
    return from_json(with_defaults(found, **{"rms_norm_eps": 1e-5, **defaults}))


def with_rope(found: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Settings with the rope that a family has where a config.json says nothing about it."""
    return found if found.get("rope_scaling") is not None else with_defaults(found, rope_parameters=rope)


def cwm_config(found: dict[str, Any]) -> DecoderConfig:
    """Every fourth layer sees all, from the first on."""
    made = listed_json(with_defaults(with_rope(found, CWM_ROPE), rms_norm_eps=1e-5))
    if found.get("layer_types") is not None or not made.windows:
        return made
    return replace(made, windows=(None, *made.windows[:1] * 3))


def ungated_config(found: dict[str, Any]) -> DecoderConfig:
    eps = 1e-6 if found.get("model_type") == "nanochat" else 1e-5
    return replace(plain_config(found, hidden_act="relu2", rms_norm_eps=eps), is_gated=False)


def jais_config(found: dict[str, Any]) -> DecoderConfig:
    made = from_json(with_defaults(found, layer_norm_eps=1e-5, hidden_act="relu2"))
    return replace(made, norm="layer", is_gated=False)


def helium_config(found: dict[str, Any]) -> DecoderConfig:
    return replace(plain_config(found, rms_norm_eps=1e-8, rope_theta=100000.0), interleaved=True)


def vault_gemma_config(found: dict[str, Any]) -> DecoderConfig:
    """A Gemma 2 without norms behind its blocks."""
    return replace(from_json({**found, "model_type": "gemma2"}), has_outer_norms=False)


class BareGraph(LlamaGraph):
    """Builds the graph of a nanochat: norms have no weights, positions turn the other way, embeddings have a norm."""

    def norm(self, x: Value, name: str, width: int) -> Value:
        found: Value = ops.rms_norm(x, eps=self.config.eps)
        return found

    def placed(self, x: Value, name: str, heads: int, layer: int) -> Value:
        c, (cos, sin) = self.config, self.tables[False]
        found = ops.rope(x, cos, -sin, head_dim=c.head_dim, n_rot=c.rotary_dim, layout="bsd")
        split = ops.reshape(found, (self.batch, self.count, heads, c.head_dim))
        return ops.reshape(self.norm(split, name, c.head_dim), x.shape)

    def embedded(self) -> Value:
        return self.norm(super().embedded(), "embed_norm", self.config.hidden)


class LateHeadNormGraph(LlamaGraph):
    """Builds the graph of a Hunyuan: heads are normalised behind their rotation."""

    def placed(self, x: Value, name: str, heads: int, layer: int) -> Value:
        return self.heads_norm(self.rotated(x, layer), name, heads)


def hunyuan_config(found: dict[str, Any]) -> DecoderConfig:
    """A dynamic rope with an alpha has a larger base, at any length."""
    rope = {**mapping(found, "rope_scaling"), **mapping(found, "rope_parameters")}
    alpha = optional_real(rope, "alpha")
    if alpha is None or (rope.get("rope_type") or rope.get("type")) != "dynamic":
        return plain_config(found)
    theta, size = real(rope, "rope_theta", real(found, "rope_theta", 10000.0)), plain_config(
        {**found, "rope_scaling": None, "rope_parameters": None}).head_dim  # fmt: skip
    wide = theta * alpha ** (size / max(size - 2, 1))
    return plain_config({**found, "rope_scaling": None, "rope_parameters": {"rope_theta": wide}})


class XieluGraph(LlamaGraph):
    """Builds the graph of an Apertus: each layer's activation has two numbers of its own."""

    def feed_forward(self, x: Value, layer: int) -> Value:
        c, at = self.config, f"layers.{layer}.mlp."
        if c.activation != "linear" or not self.has(f"{at}act_fn.alpha_p"):
            return super().feed_forward(x, layer)
        up = self.linear(x, f"{at}up_proj", c.inner, c.hidden)
        rising, falling = (ops.softplus(self.param(f"{at}act_fn.alpha_{part}", (1,))) for part in "pn")
        beta, least = (
            self.param(f"{at}act_fn.{name}", ()) if self.has(f"{at}act_fn.{name}") else usual
            for name, usual in (("beta", 0.5), ("eps", -1e-6))
        )
        low = (ops.expm1(ops.minimum(up, least)) - up) * (falling + beta)
        return self.linear(ops.where(up > 0.0, rising * up * up, low) + beta * up, f"{at}down_proj", c.hidden, c.inner)


def apertus_config(found: dict[str, Any]) -> DecoderConfig:
    """Its usual activation, xielu, is that of its graph."""
    found = with_rope(found, APERTUS_ROPE)
    own = found.get("hidden_act") in (None, "xielu")
    return replace(plain_config({**found, "hidden_act": "linear"} if own else found), is_gated=False)


@dataclass(frozen=True)
class GrowingConfig(DecoderConfig):
    """The sizes of a Ministral 3: queries grow with every so many tokens."""

    growth: float = 0.0
    step: int = 1


def ministral_config(found: dict[str, Any]) -> GrowingConfig:
    found = with_rope(found, MINISTRAL_ROPE)
    rope = {**mapping(found, "rope_scaling"), **mapping(found, "rope_parameters")}
    made = plain_config(found, head_dim=128)
    step = whole(rope, "original_max_position_embeddings", made.positions)
    growth = real(rope, "llama_4_scaling_beta", 0.0, positive=False)
    return GrowingConfig(**{**vars(made), "growth": growth, "step": step})


def mistral3_config(found: dict[str, Any]) -> GrowingConfig:
    """The text model of one that sees, too: a Ministral 3 or a Mistral."""
    inner = mapping(found, "text_config")
    kind = inner.get("model_type", "mistral")
    if kind == "ministral3":
        return ministral_config(inner)
    if kind != "mistral":
        raise FileError(f"the configuration has a text_config of the kind {kind!r:.40}, not mistral or ministral3",
                        code="F144")  # fmt: skip
    return GrowingConfig(**vars(from_json({**inner, "model_type": "mistral"})))


class GrowingGraph(LlamaGraph):
    """Builds the graph of a Ministral 3."""

    config: GrowingConfig

    def attend(self, layer: int, q: Value, k: Value, v: Value, **fields: Any) -> Value:
        c = self.config
        if c.growth:
            steps = ops.floor(ops.cast(self.positions, f32) / float(c.step))
            q = q * ops.reshape(ops.log1p(steps) * c.growth + 1.0, (-1, self.count, 1))
        return super().attend(layer, q, k, v, **fields)


def clova_config(found: dict[str, Any]) -> GraniteConfig:
    """As Granite, whose logits are divided by a factor, and scores not by the width of heads."""
    made = from_json(found)
    factors = granite_factors(with_defaults(found, attention_multiplier=made.head_dim**-0.5))
    factors["logit_divisor"] = 1 / factors["logit_divisor"]
    return GraniteConfig(**{**vars(made), **factors})


class ClovaGraph(GraniteGraph):
    """Builds the graph of a HyperCLOVA X: a Granite with norms behind its blocks."""

    def layer(self, x: Value, number: int) -> Value:
        c, at = self.config, f"layers.{number}."
        for before, block, behind in (
            ("input_layernorm", LlamaGraph.attention, "post_norm1"),
            ("post_attention_layernorm", LlamaGraph.feed_forward, "post_norm2"),
        ):
            found = block(self, self.norm(x, f"{at}{before}", c.hidden), number)
            if self.has(f"{at}{behind}.weight"):
                found = self.norm(found, f"{at}{behind}", c.hidden)
            x = x + found * c.residual_scale
        return x


def hunyuan_moe_config(found: dict[str, Any]) -> MoeConfig:
    """Each layer has as many experts as the others, and chooses as many."""
    counts = {}
    for key in ("num_experts", "moe_topk"):
        given = found.get(key)
        if isinstance(given, list) and any(n != given[0] for n in given):
            raise FileError(f"the configuration has {key} = {given!s:.60}, layers have the same number", code="F140")
        counts[key] = given[0] if isinstance(given, list) and given else given
    made, inner = hunyuan_config(found), whole(found, "intermediate_size")
    layer_count(found)
    fields = moe_fields({**found, "num_experts": counts["num_experts"] or 1,
                         "num_experts_per_tok": counts["moe_topk"] or 1}, made.layers, inner="intermediate_size",
                        shared_inner=inner)  # fmt: skip
    return MoeConfig(**{**vars(made), **fields})


class HunyuanMoeGraph(LateHeadNormGraph, MoeGraph):
    """Builds the graph of a Hunyuan with experts."""

    shared = "shared_mlp"


for _kind in ("ministral", "seed_oss", "internlm3", "iquestcoder"):
    DECODERS[_kind] = DecoderFamily(
        plain_config if _kind in ("internlm3", "iquestcoder") else from_json, LlamaGraph, plain_names
    )
DECODERS["cwm"] = DecoderFamily(cwm_config, LlamaGraph, plain_names)
DECODERS["helium"] = DecoderFamily(helium_config, LlamaGraph, plain_names)
DECODERS["arcee"] = DecoderFamily(ungated_config, LlamaGraph, plain_names)
DECODERS["jais2"] = DecoderFamily(jais_config, LlamaGraph, plain_names)
DECODERS["vaultgemma"] = DecoderFamily(vault_gemma_config, LlamaGraph, renamed(GEMMA_NAMES))
DECODERS["nanochat"] = DecoderFamily(ungated_config, BareGraph, renamed(NANOCHAT_NAMES))
DECODERS["hunyuan_v1_dense"] = DecoderFamily(hunyuan_config, LateHeadNormGraph, renamed(HUNYUAN_NAMES))
DECODERS["hunyuan_v1_moe"] = DecoderFamily(
    hunyuan_moe_config, HunyuanMoeGraph, stacked({**HUNYUAN_NAMES, "mlp.gate.wg.": "mlp.gate."})
)
DECODERS["apertus"] = DecoderFamily(apertus_config, XieluGraph, renamed(APERTUS_NAMES))
DECODERS["ministral3"] = DecoderFamily(ministral_config, GrowingGraph, plain_names)
DECODERS["mistral3"] = DecoderFamily(mistral3_config, GrowingGraph, plain_names)
DECODERS["hyperclovax"] = DecoderFamily(clova_config, ClovaGraph, plain_names)
