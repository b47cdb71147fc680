"""LFM2 with experts: short convolutions and attention, and a router whose biases only choose."""

from __future__ import annotations

from typing import Any

from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import real, whole
from strata.models.decoder_config import with_defaults
from strata.models.decoders.hybrid import LFM2_NAMES, HybridConfig, Lfm2Graph, lfm2_config
from strata.models.decoders.moe import moe_fields, stacked

NAMES = {
    **LFM2_NAMES, "feed_forward.expert_bias": "mlp.gate.e_score_correction_bias", "feed_forward.": "mlp.",
    ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj.",
}  # fmt: skip


def lfm2_moe_config(found: dict[str, Any]) -> HybridConfig:
    """From config.json. The first layers have no experts."""
    usual = dict(num_key_value_heads=8, num_experts_per_tok=4, num_experts=32, moe_intermediate_size=1792)
    found = with_defaults(found, **usual)
    made = lfm2_config({**found, "block_auto_adjust_ff_dim": False, "block_ff_dim": None})
    dense = whole(found, "num_dense_layers", 2, least=0)
    fields = moe_fields(
        found, made.layers, sparse=tuple(i >= dense for i in range(made.layers)), score="sigmoid",
        renormalize=bool(found.get("norm_topk_prob", True)), routed_scale=real(found, "routed_scaling_factor", 1.0),
    )  # fmt: skip
    return HybridConfig(**{**vars(made), **fields})


class Lfm2MoeGraph(Lfm2Graph):
    """Builds the graph of an LFM2 with experts."""

    router = "gate"


DECODERS["lfm2_moe"] = DecoderFamily(lfm2_moe_config, Lfm2MoeGraph, stacked(NAMES))
