"""gpt-oss: attention sinks, windows in every other layer, experts with biases and a clipped gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import real
from strata.models.decoder_config import listed_json, with_defaults
from strata.models.decoders.moe import MoeConfig, MoeGraph, moe_fields, stacked
from strata.models.weights import ops


@dataclass(frozen=True)
class GptOssConfig(MoeConfig):
    """The sizes of a gpt-oss."""

    alpha: float = 1.702
    limit: float = 7.0  # of what comes out of an expert's first matrix


# the rope of a config.json that says nothing about it
ROPE = dict(rope_type="yarn", factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False, rope_theta=150000.0,
            original_max_position_embeddings=4096)  # fmt: skip


def gpt_oss_config(found: dict[str, Any]) -> GptOssConfig:
    if found.get("rope_scaling") is None:
        found = with_defaults(found, rope_parameters=ROPE)
    made = listed_json(with_defaults(found, rms_norm_eps=1e-5, head_dim=64, sliding_window_pattern=2))
    fields = moe_fields(found, made.layers, inner="intermediate_size", alpha=real(found, "swiglu_alpha", 1.702),
                        limit=real(found, "swiglu_limit", 7.0))  # fmt: skip
    return GptOssConfig(**{**vars(made), **fields})


class GptOssGraph(MoeGraph):
    """Builds the graph of a gpt-oss."""

    config: GptOssConfig
    router = "router"

    def attend(
        self, layer: int, q: Value, k: Value, v: Value, *, window: int | None = None, scale: float | None = None,
        softcap: float | None = None,
    ) -> Value:  # fmt: skip
        """Attention in which a score of each head takes part that belongs to no key."""
        c = self.config
        keys, values = self.gathered(layer, k, v)
        count, group = keys.shape[1], c.heads // c.kv_heads
        split = ops.reshape(q, (self.batch, self.count, c.kv_heads, group, c.head_dim))
        rows = (self.batch, c.kv_heads, group * self.count, c.head_dim)
        asked = ops.reshape(ops.transpose(split, (0, 2, 3, 1, 4)), rows)
        past = ops.transpose(ops.reshape(keys, (self.batch, count, c.kv_heads, c.head_dim)), (0, 2, 3, 1))
        scores = ops.reshape(ops.matmul(asked, past), (self.batch, c.kv_heads, group, self.count, count))
        scores = scores * (c.head_dim**-0.5 if scale is None else scale)
        scores = ops.where(self.seen(count, window), scores, -np.inf)
        sink = ops.reshape(self.param(f"layers.{layer}.self_attn.sinks", (c.heads,)), (1, c.kv_heads, group, 1, 1))
        high = ops.maximum(ops.max(scores, -1, keepdims=True), sink)
        shares = ops.exp(scores - high)
        whole = ops.sum(shares, -1, keepdims=True) + ops.exp(sink - high)
        shares = ops.reshape(shares / whole, (self.batch, c.kv_heads, group * self.count, count))
        given = ops.transpose(ops.reshape(values, (self.batch, count, c.kv_heads, c.head_dim)), (0, 2, 1, 3))
        mixed = ops.reshape(ops.matmul(shares, given), (self.batch, c.kv_heads, group, self.count, c.head_dim))
        return ops.reshape(ops.transpose(mixed, (0, 3, 1, 2, 4)), q.shape)

    def expert(self, rows: Value, ids: Value, at: str) -> Value:
        c, name = self.config, f"{at}experts."
        both = self.grouped(rows, ids, f"{name}gate_up_proj", (self.matrix_count, c.hidden, 2 * c.expert_inner))
        both = both + ops.take(
            self.param(f"{name}gate_up_proj_bias", (self.matrix_count, 2 * c.expert_inner)), ids, axis=0
        )
        pairs = ops.reshape(both, (both.shape[0], c.expert_inner, 2))
        gate, up = (ops.reshape(ops.narrow(pairs, 2, i, 1), pairs.shape[:2]) for i in range(2))
        gate, up = ops.minimum(gate, c.limit), ops.clip(up, -c.limit, c.limit)
        inner = (up + 1.0) * gate * ops.sigmoid(gate * c.alpha)
        out = self.grouped(inner, ids, f"{name}down_proj", (self.matrix_count, c.expert_inner, c.hidden))
        return out + ops.take(self.param(f"{name}down_proj_bias", (self.matrix_count, c.hidden)), ids, axis=0)


DECODERS["gpt_oss"] = DecoderFamily(gpt_oss_config, GptOssGraph, stacked(is_wide=True))
