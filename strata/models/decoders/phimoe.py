"""Phi-3.5 MoE: layer norms, biases, and a router that compares experts with the best one only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from strata.errors import FileError
from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import mapping, real
from strata.models.decoder_config import listed_json, with_defaults
from strata.models.decoders.mixtral import MIXTRAL_NAMES
from strata.models.decoders.moe import MoeConfig, MoeGraph, moe_fields, stacked
from strata.models.weights import ops


@dataclass(frozen=True)
class PhiMoeConfig(MoeConfig):
    """The sizes of a Phi-3.5 MoE."""

    jitter: float = 0.01  # experts further behind the best one than twice this share of it do not count


def phimoe_config(found: dict[str, Any]) -> PhiMoeConfig:
    """From config.json. Its rotary tables are multiplied by numbers for short and for long contexts."""
    made = listed_json(with_defaults(found, rms_norm_eps=1e-5, rope_theta=1e6))
    rope = {**mapping(found, "rope_scaling"), **mapping(found, "rope_parameters")}
    if made.rope.long_factors:
        sizes = [real(rope, key, 1.0) for key in ("short_mscale", "long_mscale")]
        made = replace(made, rope=replace(made.rope, table_factor=sizes[0], long_table_factor=sizes[1]))
    jitter = real(found, "router_jitter_noise", 0.01, positive=False)
    if jitter < 0:
        raise FileError(f"the configuration has router_jitter_noise = {jitter}, which is negative", code="F140")
    own = dict(jitter=jitter, norm="layer")
    config = PhiMoeConfig(**{**vars(made), **moe_fields(found, made.layers, inner="intermediate_size"), **own})
    if config.chosen != 2:
        raise FileError(f"the configuration has num_experts_per_tok = {config.chosen}, this router has 2", code="F140")
    return config


class PhiMoeGraph(MoeGraph):
    """Builds the graph of a Phi-3.5 MoE."""

    config: PhiMoeConfig
    router = "router"

    def route(self, logits: Value, layer: int) -> tuple[Value, Value]:
        first, best = self.share_of_best(logits, logits)
        taken = ops.one_hot(ops.reshape(best, (-1,)), self.config.experts) > 0
        second, next_best = self.share_of_best(ops.where(taken, -np.inf, logits), logits)
        return ops.concat([first, second], -1), ops.concat([best, next_best], -1)

    def share_of_best(self, left: Value, logits: Value) -> tuple[Value, Value]:
        """The best of those that are left, and its share among those near it; both [M, 1]."""
        high, ids = ops.topk(left, 1)
        is_far = (high - logits) / ops.maximum(ops.abs(logits), high) > 2 * self.config.jitter
        shares = ops.softmax(ops.where(is_far, -np.inf, left), -1)
        return ops.take_along_axis(shares, ids), ids


DECODERS["phimoe"] = DecoderFamily(
    phimoe_config, PhiMoeGraph, stacked({"block_sparse_moe.gate.": "mlp.router.", **MIXTRAL_NAMES})
)
