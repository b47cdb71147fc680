"""Decoder graphs with a KV cache: one graph for prefill and decode, of symbolic length, updated in place.

Inputs are the new tokens, how many came before them, and the KV cache: an array of keys and one of values for each
layer. Results are the logits and the caches with the new rows written; one array for a cache's input and its result is
updated in place. With a paged KV cache, the keys and values of all sequences, of any lengths, are in pools of pages; a
page table for each sequence says which pages are its own. Results are then the new rows alone, and whoever owns the
pools writes them to their pages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from strata.core import f32, i32, i64, sym
from strata.mir import Value, constant
from strata.models.weights import WeightBuilder, Weights, ops

PAGE: Final = 16  # tokens of a page; results do not depend on where a prompt is cut if it is cut between pages
Layout = Literal["plain", "paged"]  # of the caches: one length for all, or pages


@dataclass(frozen=True)
class CacheSizes:
    """What decides the size of the caches."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.kv_heads * self.head_dim


class CachedGraph(WeightBuilder):
    """A decoder under construction. `every` gives logits of every new token instead of the last one's."""

    def __init__(
        self, name: str, weights: Weights, sizes: CacheSizes, length: int, *, every: bool, layout: Layout = "plain"
    ) -> None:
        super().__init__(name, weights)
        self.sizes, self.every = sizes, every
        paged = layout == "paged"
        self.batch, self.count, self.capacity = sym("B", 1), sym("S", 1, length), sym("P" if paged else "C", 1)
        self.ids = self.graph.input("input_ids", (self.batch, self.count), i32)
        self.past = self.graph.input("past", (self.batch if paged else 1,), i64)
        self.table = self.graph.input("table", (self.batch, sym("N", 1)), i64) if paged else None
        shape = (self.capacity, PAGE, sizes.width) if paged else (self.batch, self.capacity, sizes.width)
        self.caches = [
            [self.graph.input(f"{kind}{i}", shape, f32) for kind in ("keys", "values")] for i in range(sizes.layers)
        ]
        self._updated: dict[int, list[Value]] = {}

    @property
    def positions(self) -> Value:
        """Of the new tokens, i64[S]; in a paged graph, i64[B, S]."""
        rows = ops.iota((self.count,), 0, i64)
        if self.table is not None:
            return ops.reshape(rows, (1, self.count)) + ops.reshape(self.past, (self.batch, 1))
        return rows + ops.reshape(self.past, ())

    def attend(
        self, layer: int, q: Value, k: Value, v: Value, *, window: int | None = None, scale: float | None = None,
        softcap: float | None = None,
    ) -> Value:  # fmt: skip
        """Attention of the new tokens to themselves and to what came before; their keys and values enter the caches."""
        fields = dict(
            num_heads=self.sizes.heads, kv_heads=self.sizes.kv_heads, window=window, scale=scale, softcap=softcap
        )
        if self.table is not None:
            self._updated[layer] = [k, v]
            return ops.paged_attention(q, *self.caches[layer], k, v, self.table, self.past, **fields)
        zero = constant(0, i64)
        keys, values = (
            ops.dynamic_update_slice(cache, new, [zero, ops.reshape(self.past, ()), zero])
            for cache, new in zip(self.caches[layer], (k, v), strict=True)
        )
        self._updated[layer] = [keys, values]
        return ops.attention(q, keys, values, layout="bsd", causal=True, offset=self.past, **fields)

    def asked(self, x: Value) -> Value:
        """The rows [B, S, H] that logits are wanted of: all, or the last."""
        if self.every:
            return x
        return ops.reshape(ops.narrow(x, 1, self.count - 1, 1), (self.batch, x.shape[-1]))

    def finish(self, logits: Value) -> None:
        self.graph.outputs(logits, *(v for i in range(self.sizes.layers) for v in self._updated[i]))


@dataclass(frozen=True)
class DecoderFamily:
    """How a folder becomes a decoder: config.json to a configuration, weights under the graph's names, the graph."""

    config: Callable[[dict[str, Any]], Any]
    graph: Callable[..., CachedGraph]
    names: Callable[[Weights], Weights]


DECODERS: dict[str, DecoderFamily] = {}  # by the `model_type` of config.json; each family's module enters its own
