"""Decoders that give vectors of texts: Qwen3-Embedding, E5-Mistral, and EmbeddingGemma, whose tokens see both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.core import bool_, i32, i64, sym
from strata.errors import FileError
from strata.mir import Value, constant
from strata.models.decoder_config import DecoderConfig
from strata.models.decoders import MODULES, decoder_family
from strata.models.encoders.bert import GRAPHS
from strata.models.llama import LlamaGraph, plain_names
from strata.models.weights import WeightBuilder, Weights, ops

LONGEST = 8192  # tokens of a text that are planned for, where a model could take more


@dataclass(frozen=True)
class EmbeddingConfig:
    """A decoder under the names that encoders have for their sizes."""

    decoder: DecoderConfig
    looks_ahead: bool = False  # tokens see those behind them, too
    family: str = "embedding"
    types: int = 0
    labels: int = 0
    is_per_token: bool = False

    @property
    def hidden(self) -> int:
        return self.decoder.hidden

    @property
    def vocab(self) -> int:
        return self.decoder.vocab

    @property
    def longest(self) -> int:
        """Tokens that there are positions for."""
        return min(self.decoder.positions, LONGEST)

    @classmethod
    def from_json(cls, found: dict[str, Any], labels: int = 0) -> EmbeddingConfig:
        """From config.json of a decoder; heads with labels are not those of decoders."""
        kind = str(found.get("model_type"))
        looks = bool(found.get("use_bidirectional_attention"))
        of = decoder_family(kind)
        if of.graph is not LlamaGraph or labels:
            raise FileError(f"load: decoders of the kind {kind!r} do not give vectors of texts here", code="F144")
        return cls(of.config({**found, "use_bidirectional_attention": None}), looks)

    def check(self, weights: Weights) -> None:
        """Refuse weights that are not those of this configuration."""
        self.decoder.check(plain_names(weights))


def is_embedding(found: Mapping[str, Any], *, has_pooling: bool) -> bool:
    """Whether a folder's decoder is there for vectors: it says how tokens are pooled, or they see both sides."""
    return str(found.get("model_type")) in MODULES and (has_pooling or found.get("use_bidirectional_attention") is True)


class EmbeddingGraph(LlamaGraph):
    """Builds the graph of a decoder over whole texts: there is no cache, and nothing behind the last norm."""

    def __init__(self, config: EmbeddingConfig, weights: Weights, name: str) -> None:
        WeightBuilder.__init__(self, name, plain_names(weights))
        c = self.config = config.decoder
        self.batch, self.count = sym("B", 1), sym("S", 1, config.longest)
        self.length: Any = self.count
        self.ids = self.graph.input("input_ids", (self.batch, self.count), i32)
        self.mask = self.graph.input("attention_mask", (self.batch, self.count), bool_)
        self.tables = {False: self._rope_tables("rope", c.rope, config.longest)}
        local = c.local_rope
        self.tables[True] = self._rope_tables("local_rope", local, config.longest) if local else self.tables[False]
        row, column = (ops.reshape(self.positions, shape) for shape in ((self.count, 1), (1, self.count)))
        self._distance, self._looks_ahead = row - column, config.looks_ahead
        self._kept = ops.reshape(self.mask, (self.batch, 1, 1, self.count))

    @property
    def positions(self) -> Value:
        """Of the tokens, i64[S]."""
        found: Value = ops.iota((self.count,), 0, i64)
        return found

    def attend(
        self, layer: int, q: Value, k: Value, v: Value, *, window: int | None = None, scale: float | None = None,
        softcap: float | None = None,
    ) -> Value:  # fmt: skip
        """Attention among the tokens that count: a window that looks both ways is half as wide each way."""
        c, keep = self.config, self._kept
        if window is not None and self._looks_ahead:
            near = ops.abs(self._distance) <= constant((window + 1) // 2, i64)
            keep = ops.logical_and(keep, ops.reshape(near, (1, 1, self.count, self.count)))
        elif not self._looks_ahead:
            seen = self._distance >= 0
            if window is not None:
                seen = ops.logical_and(seen, self._distance <= constant(window, i64))
            keep = ops.logical_and(keep, ops.reshape(seen, (1, 1, self.count, self.count)))
        found: Value = ops.attention(
            q, k, v, keep, num_heads=c.heads, kv_heads=c.kv_heads, mask_kind="custom", layout="bsd", scale=scale,
            softcap=softcap,
        )  # fmt: skip
        return found

    def encoded(self, types: Value | None = None) -> Value:
        """Hidden states behind the last norm; there are no types of tokens."""
        x = self.embedded()
        for i in range(self.config.layers):
            x = self.layer(x, i)
        return self.norm(x, "norm", self.config.hidden)


GRAPHS["embedding"] = EmbeddingGraph
