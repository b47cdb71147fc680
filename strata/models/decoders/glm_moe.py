"""GLM-4.5, dots.llm1, Solar Open, K-EXAONE and ERNIE 4.5 MoE: Llama-like attention, experts as in DeepSeek V3."""

from __future__ import annotations

from typing import Any

from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import of_layers, real, whole
from strata.models.decoder_config import listed_json, with_defaults
from strata.models.decoders.moe import MoeConfig, MoeGraph, Named, moe_fields, stacked
from strata.models.decoders.olmo import exaone_config
from strata.models.weights import Weights, np

BIAS = "mlp.gate.e_score_correction_bias"


def glm_moe_config(found: dict[str, Any]) -> MoeConfig:
    """From config.json of a GLM-4.5 or a dots.llm1."""
    is_glm = found.get("model_type") == "glm4_moe"
    made = listed_json(with_defaults(found, rms_norm_eps=1e-5, partial_rotary_factor=0.5) if is_glm else found)
    dense = whole(found, "first_k_dense_replace", int(is_glm), least=0)
    fields = moe_fields(
        found, made.layers, sparse=tuple(i >= dense for i in range(made.layers)), score="sigmoid",
        shared_inner=whole(found, "moe_intermediate_size") * whole(found, "n_shared_experts", 1),
        renormalize=bool(found.get("norm_topk_prob", is_glm)), routed_scale=real(found, "routed_scaling_factor", 1.0),
        groups=whole(found, "n_group", 1), chosen_groups=whole(found, "topk_group", 1),
    )  # fmt: skip
    return MoeConfig(**{**vars(made), **fields})


def solar_config(found: dict[str, Any]) -> MoeConfig:
    """A GLM-4.5 all of whose layers have experts, and whose heads are rotated whole."""
    usual = dict(head_dim=128, num_key_value_heads=8, num_experts_per_tok=8, n_routed_experts=128, rope_theta=1e6,
                 intermediate_size=whole(found, "moe_intermediate_size", 1280), rms_norm_eps=1e-5)  # fmt: skip
    own = dict(first_k_dense_replace=0, norm_topk_prob=found.get("norm_topk_prob", True))
    return glm_moe_config({**with_defaults(found, **usual), **own})


def exaone_moe_config(found: dict[str, Any]) -> MoeConfig:
    """As EXAONE 4, only layers with a window have rotary positions."""
    usual = dict(num_experts=64, num_experts_per_tok=8, moe_intermediate_size=1024)
    found = with_defaults(found, **usual)
    made = exaone_config(found)
    kinds, dense = of_layers(found, "mlp_layer_types", made.layers), whole(found, "first_k_dense_replace", 1, least=0)
    sparse = tuple(k == "sparse" for k in kinds) if kinds else tuple(i >= dense for i in range(made.layers))
    fields = moe_fields(
        found, made.layers, sparse=sparse, score="sigmoid", routed_scale=real(found, "routed_scaling_factor", 2.5),
        shared_inner=whole(found, "moe_intermediate_size") * whole(found, "num_shared_experts", 1),
        renormalize=bool(found.get("norm_topk_prob", True)), groups=whole(found, "n_group", 1),
        chosen_groups=whole(found, "topk_group", 1),
    )  # fmt: skip
    return MoeConfig(**{**vars(made), **fields})


def ernie_moe_config(found: dict[str, Any]) -> MoeConfig:
    made = listed_json(with_defaults(found, rms_norm_eps=1e-5, tie_word_embeddings=True, rope_theta=500000.0))
    first, step = whole(found, "moe_layer_start_index", 1, least=0), whole(found, "moe_layer_interval", 1)
    last = found.get("moe_layer_end_index", -1)
    last = made.layers - 1 if last in (-1, None) else whole(found, "moe_layer_end_index", least=0)
    shared = whole(found, "moe_num_shared_experts", 2, least=0)
    fields = moe_fields(
        with_defaults(found, moe_k=6), made.layers, interleaved=True,
        sparse=tuple((i + 1) % step == 0 and first <= i <= last for i in range(made.layers)),
        shared_inner=whole(found, "moe_intermediate_size") * shared,
    )  # fmt: skip
    return MoeConfig(**{**vars(made), **fields})


def ernie_names(weights: Weights) -> Named:
    """One bias for each expert, without the axis in front of it."""
    found = stacked({"mlp.moe_statics.": "mlp.gate."})(weights)
    for name, tensor in found.items():
        if name.endswith(BIAS) and isinstance(tensor, np.ndarray):
            found[name] = tensor.reshape(-1)
    return found


class GlmMoeGraph(MoeGraph):
    """Builds the graph of these."""

    shared = "shared_experts"


DECODERS.update(dict.fromkeys(("glm4_moe", "dots1"), DecoderFamily(glm_moe_config, GlmMoeGraph, stacked())))
DECODERS["solar_open"] = DecoderFamily(solar_config, GlmMoeGraph, stacked())
DECODERS["exaone_moe"] = DecoderFamily(exaone_moe_config, GlmMoeGraph, stacked({"mlp.e_score_correction_bias": BIAS}))
DECODERS["ernie4_5_moe"] = DecoderFamily(ernie_moe_config, GlmMoeGraph, ernie_names)
