"""DeBERTa v2 and v3: attention to contents and to distances apart, and a convolution beside the first layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import f32, i64
from strata.errors import FileError
from strata.mir import Value
from strata.models.blocks.activations import activated, activation_of
from strata.models.blocks.distances import by_distance, signed_buckets
from strata.models.config_values import MOST_PLACES, names, real, whole
from strata.models.encoders.bert import BERT, GRAPHS, NAMES, BertConfig, BertGraph
from strata.models.encoders.modernbert import labels_tokens
from strata.models.encoders.rotary_bert import HIDDEN
from strata.models.weights import Weights, check_layers, check_shapes, ops, without_prefix

DEBERTA = {
    **BERT, "q": "attention.self.query_proj", "k": "attention.self.key_proj", "v": "attention.self.value_proj",
}  # fmt: skip


@dataclass(frozen=True)
class DebertaConfig(BertConfig):
    """The sizes of a DeBERTa, and which distances it attends to."""

    buckets: int = 0  # of distances on each side; 0: each has its own
    farthest: int = 512
    kinds: tuple[str, ...] = ()  # of "c2p", "p2c"
    shares_keys: bool = False
    has_positions: bool = False
    kernel: int = 0
    groups: int = 1
    kernel_activation: str = "tanh"
    terms: int = 1  # that a score is the sum of, as it is scaled; `kinds` may be left out of it

    @classmethod
    def from_json(cls, found: dict[str, Any], labels: int = 0) -> DebertaConfig:
        """From config.json."""
        hidden, positions = whole(found, "hidden_size"), whole(found, "max_position_embeddings", 512, most=MOST_PLACES)
        kinds = names(found, "pos_att_type")
        farthest, buckets = found.get("max_relative_positions", -1), found.get("position_buckets", -1)
        farthest = farthest if isinstance(farthest, int) and farthest > 0 else positions
        made = cls(
            "deberta-v2", whole(found, "vocab_size"), hidden, whole(found, "num_hidden_layers"),
            whole(found, "num_attention_heads"), whole(found, "intermediate_size", 4 * hidden), positions,
            whole(found, "type_vocab_size", 0, least=0), real(found, "layer_norm_eps", 1e-7),
            activation_of(found), labels, labels_tokens(found), 0, whole(found, "embedding_size", hidden),
            buckets if isinstance(buckets, int) and buckets > 0 else 0, farthest,
            kinds if found.get("relative_attention") else (), bool(found.get("share_att_key")),
            bool(found.get("position_biased_input", True)), whole(found, "conv_kernel_size", 0, least=0),
            whole(found, "conv_groups", 1), activation_of(found, "conv_act", "tanh"),
            1 + sum(kind in kinds for kind in ("c2p", "p2c")),
        )  # fmt: skip
        if made.hidden % made.heads:
            raise FileError(f"the configuration has {made.hidden} features for {made.heads} heads", code="F140")
        return made

    @property
    def span(self) -> int:
        """Buckets of distances on each side."""
        return self.buckets or self.farthest

    def check(self, weights: Weights) -> None:
        plain = without_prefix(weights, ("deberta.",))
        check_layers(self.family, self.layers, plain, DEBERTA["layer"])
        check_shapes(self.family, plain, {
            "embeddings.word_embeddings.weight": (self.vocab, self.embedded),
            "encoder.layer.0.intermediate.dense.weight": (self.inner, self.hidden),
        })  # fmt: skip


class DebertaGraph(BertGraph):
    """Builds the graph of a DeBERTa."""

    config: DebertaConfig

    def __init__(self, config: BertConfig, weights: Weights, name: str = "bert") -> None:
        super().__init__(config, without_prefix(weights, ("deberta.",)), name)
        c = self.config
        kept = ops.reshape(self.mask, (self.batch, 1, 1, self.length))
        self.hidden_tokens = ops.where(kept, ops.zeros((), f32), ops.full((), HIDDEN))
        self.counted = ops.cast(ops.insert_axis(self.mask, -1), f32)
        if not c.kinds:
            return
        table = self.param("encoder.rel_embeddings.weight", (2 * c.span, c.hidden))
        has_norm = self.has("encoder.LayerNorm.weight")
        self.places = self.layer_norm(table, "encoder.LayerNorm", c.hidden, c.eps) if has_norm else table
        gaps = np.arange(1 - c.longest, c.longest)
        bucket = signed_buckets(gaps, c.buckets, c.farthest)
        ids = np.clip(bucket + c.span, 0, 2 * c.span - 1).astype(np.int32)
        self.ids_by_gap = ops.cast(by_distance(self, "distance_ids", ids, self.length), i64)  # [S, S] of i - j

    def embeddings(self, types: Value | None) -> Value:
        c = self.config
        x = self.embedding(self.ids, "embeddings.word_embeddings.weight", c.vocab, c.embedded)
        if c.has_positions:
            places = self.param("embeddings.position_embeddings.weight", (c.positions, c.embedded))
            x = x + ops.narrow(places, 0, 0, self.length)
        if c.types:
            table = self.param("embeddings.token_type_embeddings.weight", (c.types, c.embedded))
            x = x + (table[0] if types is None else ops.take(table, types, axis=0))
        if c.embedded != c.hidden:
            x = self.linear(x, "embeddings.embed_proj", c.hidden, c.embedded)
        return self.layer_norm(x, "embeddings.LayerNorm", c.hidden, c.eps) * self.counted

    def heads(self, x: Value) -> Value:
        c = self.config
        return ops.transpose(
            ops.reshape(x, (*x.shape[:-1], c.heads, c.hidden // c.heads)),
            (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2, x.ndim),
        )

    def mixed(self, q: Value, k: Value, v: Value, at: str) -> Value:
        """Scores of contents, and of contents with distances, in both directions."""
        c = self.config
        size = c.hidden // c.heads
        scale = float(size * c.terms) ** -0.5
        shape = (self.batch, c.heads, self.length, self.length)
        bias = ops.broadcast_to(self.hidden_tokens, shape)
        ids = ops.broadcast_to(self.ids_by_gap, shape) if c.kinds else None
        if "c2p" in c.kinds:
            keys = self.heads(self.linear(self.places, at + self._name("k", "pos_key_proj"), c.hidden, c.hidden))
            scores = ops.matmul(self.heads(q), ops.transpose(keys, (0, 2, 1)))  # [B, H, S, 2 span]
            bias = bias + ops.gather_elements(scores, ids, 3) * scale
        if "p2c" in c.kinds:
            queries = self.heads(self.linear(self.places, at + self._name("q", "pos_query_proj"), c.hidden, c.hidden))
            scores = ops.matmul(self.heads(k), ops.transpose(queries, (0, 2, 1)))
            turned = ops.broadcast_to(ops.transpose(self.ids_by_gap, (1, 0)), shape)
            bias = bias + ops.transpose(ops.gather_elements(scores, turned, 3), (0, 1, 3, 2)) * scale
        return ops.attention(
            q, k, v, bias, num_heads=c.heads, kv_heads=c.heads, mask_kind="bias", scale=scale, layout="bsd"
        )

    def _name(self, role: str, own: str) -> str:
        return DEBERTA[role] if self.config.shares_keys else f"attention.self.{own}"

    def encoded(self, types: Value | None = None) -> Value:
        first = x = self.embeddings(types)
        for i in range(self.config.layers):
            x = self.layer(x, i)
            if i == 0 and self.config.kernel:
                x = self.convolved(first, x)
        return x

    def convolved(self, first: Value, x: Value) -> Value:
        """The first layer with a convolution of the embeddings added."""
        c = self.config
        weight = self.param("encoder.conv.conv.weight", (c.hidden, c.hidden // c.groups, c.kernel))
        bias = self.param("encoder.conv.conv.bias", (c.hidden,))
        near = ops.conv(
            ops.transpose(first, (0, 2, 1)), weight, bias, stride=1, padding=(c.kernel - 1) // 2, groups=c.groups
        )
        near = ops.transpose(near, (0, 2, 1)) * self.counted
        total = x + activated(near, c.kernel_activation)
        return self.layer_norm(total, "encoder.conv.LayerNorm", c.hidden, c.eps) * self.counted


NAMES["deberta-v2"] = DEBERTA
GRAPHS["deberta-v2"] = DebertaGraph
