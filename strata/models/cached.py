"""Decoder graphs with a KV cache: one graph for prefill and decode, of symbolic length, updated in place.

Inputs are the new tokens, how many came before them, and the KV cache: an array of keys and one of values for each
layer. Results are the logits and the caches with the new rows written; one array for a cache's input and its result is
updated in place. Layers without attention carry a state of constant size instead. With a paged KV cache, the keys and
values of all sequences, of any lengths, are in pools of pages; a page table for each sequence says which pages are its
own; the pools are updated in place, too. Pools of 8 bits have a scale for each token and head: a new row is rounded
before it is attended to, so that results do not depend on when it was. Pools of 16 bits are bf16.

A graph whose layout is *fed* is for devices with memory of their own: the tokens that were chosen last stay there, and
a row may take its token from there instead of from the host. Its prompts may be padded: each row says which of its
tokens is the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from strata.core import DType, bf16, f32, i8, i32, i64, sym
from strata.mir import Value, constant
from strata.models.generating.stages import ExpertCut
from strata.models.weights import WeightBuilder, Weights, ops

PAGE: Final = 16  # tokens of a page; results do not depend on where a prompt is cut if it is cut between pages
# of the caches: one length for all, or pages, in f32, of 8 or of 16 bits; those that are fed take tokens on the device
Layout = Literal["plain", "paged", "paged8", "paged16", "fed", "fed8", "fed16"]
ROW: Final = ("slot", "past", "last")  # of a fed graph, for each sequence: where its token is, tokens before, last one


@dataclass(frozen=True)
class Slot:
    """An f32 array that a decoder carries from step to step: a row for each token, or a state of constant size."""

    name: str
    shape: tuple[int, ...]  # of one token's row, or of the state of one sequence
    is_fixed: bool = False
    heads: int = 1  # parts of a row that have a scale each, where rows are of 8 bits

    @property
    def scales(self) -> str:
        """The name of the scales of rows of 8 bits."""
        return f"{self.name}_scales"


def kv_slots(layers: Sequence[int], heads: int, head_dim: int) -> tuple[Slot, ...]:
    """The keys and values of these layers."""
    shape = (heads * head_dim,)
    return tuple(Slot(f"{kind}{i}", shape, heads=heads) for i in layers for kind in ("keys", "values"))


def pooled(slots: Sequence[Slot], layout: Layout) -> dict[str, tuple[tuple[int, ...], DType]]:
    """The pools of a paged KV cache by name: shape of a token's row, and type."""
    found: dict[str, tuple[tuple[int, ...], DType]] = {}
    kind = i8 if _packs(layout) else bf16 if layout.endswith("16") else f32
    for slot in (s for s in slots if not s.is_fixed):
        found[slot.name] = (slot.shape, kind)
        if _packs(layout):
            found[slot.scales] = ((slot.heads,), f32)
    return found


def _packs(layout: Layout) -> bool:
    return layout.endswith("8")


def carried_names(slots: Iterable[Slot], layout: Layout) -> list[str]:
    """What a graph gives after the logits, in this order."""
    packs = _packs(layout)
    return [name for s in slots for name in ((s.name, s.scales) if packs and not s.is_fixed else (s.name,))]


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

    is_cut = False  # at experts, which run beside the graph
    cuts: tuple[ExpertCut, ...] = ()

    def __init__(
        self, name: str, weights: Weights, sizes: CacheSizes, length: int, *, every: bool, layout: Layout = "plain",
        slots: Sequence[Slot] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, weights)
        if slots is None:
            slots = kv_slots(range(sizes.layers), sizes.kv_heads, sizes.head_dim)
        self.slots = {slot.name: slot for slot in slots}
        self.sizes, self.every, self.length, self.layout = sizes, every, length, layout
        paged = layout != "plain"
        self.batch, self.count, self.capacity = sym("B", 1), sym("S", 1, length), sym("P" if paged else "C", 1)
        self.ids = self.graph.input("input_ids", (self.batch, self.count), i32)
        self.last: Value | None = None  # of a padded row of tokens, i64[B]
        if layout.startswith("fed"):
            self._feed()
        else:
            self.past = self.graph.input("past", (self.batch if paged else 1,), i64)
        self.table = self.graph.input("table", (self.batch, sym("N", 1)), i64) if paged else None
        rows = (self.capacity, PAGE) if paged else (self.batch, self.capacity)
        self.carried = {
            name: self.graph.input(name, (*rows, *shape), dtype)
            for name, (shape, dtype) in pooled(slots, layout).items()
        } | {s.name: self.graph.input(s.name, (self.batch, *s.shape), f32) for s in slots if s.is_fixed}
        self._updated: dict[str, Value] = {}
        self._entered: dict[str, Value] = {}  # rows of the new tokens

    def _feed(self) -> None:
        """Positions of each row, and the tokens that it takes from the device: those that are negative."""
        rows = self.graph.input("rows", (self.batch, len(ROW)), i64)
        tokens = self.graph.input("tokens", (sym("M", 1), 1, 1), i32)
        slot, self.past, self.last = (ops.reshape(ops.narrow(rows, 1, at, 1), (self.batch,)) for at in range(len(ROW)))
        known = ops.reshape(ops.take(tokens, slot, axis=0), (self.batch, 1))
        self.ids = ops.where(self.ids < 0, ops.broadcast_to(known, (self.batch, self.count)), self.ids)

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
        self._enter(layer, k, v)
        return self.attend_to(layer, q, window=window, scale=scale, softcap=softcap)

    def attend_to(
        self, layer: int, q: Value, *, window: int | None = None, scale: float | None = None,
        softcap: float | None = None,
    ) -> Value:  # fmt: skip
        """Attention to the keys and values that a layer has entered."""
        fields = dict(
            num_heads=self.sizes.heads, kv_heads=self.kv_heads_of(layer), window=window, scale=scale, softcap=softcap
        )
        names = self._cache_names(layer)
        both = (names[0], names[-1])
        if self.table is None:
            caches = [self._updated[name] for name in both]
            return ops.attention(q, *caches, layout="bsd", causal=True, offset=self.past, **fields)
        pools, new = [self.carried[name] for name in both], [self._entered[name] for name in both]
        scales = [self.carried[self.slots[name].scales] for name in both] if self._packs else []
        found: Value = ops.paged_attention(ops.cast(q, new[0].dtype), *pools, *new, self.table, self.past, *scales,
                                           **fields)  # fmt: skip
        return ops.cast(found, q.dtype)

    def kv_heads_of(self, layer: int) -> int:
        """Heads of the keys and values of a layer."""
        return self.sizes.kv_heads

    @property
    def _packs(self) -> bool:
        return _packs(self.layout)

    def _cache_names(self, layer: int) -> list[str]:
        """Of keys and values; values that are the keys have no cache of their own."""
        return [f"{kind}{layer}" for kind in ("keys", "values") if f"{kind}{layer}" in self.carried]

    def _enter(self, layer: int, k: Value, v: Value) -> None:
        for name, made in zip(self._cache_names(layer), (k, v), strict=False):
            slot, pool = self.slots[name], self.carried[name]
            new = made if self._packs else ops.cast(made, pool.dtype)
            entering = {name: new}
            if self._packs:
                whole, scale = _in_8_bits(new, slot.heads)
                entering = {name: whole, slot.scales: scale}
            self._entered[name] = _from_8_bits(*entering.values()) if self._packs else new
            self._updated |= {at: self._written(self.carried[at], part) for at, part in entering.items()}

    def _written(self, cache: Value, new: Value) -> Value:
        if self.table is not None:
            return ops.paged_update(cache, new, self.table, self.past)
        zero = constant(0, i64)
        found: Value = ops.dynamic_update_slice(cache, new, [zero, ops.reshape(self.past, ()), zero])
        return found

    def gathered(self, layer: int, k: Value, v: Value) -> list[Value]:
        """Keys and values of all tokens, old and new, [B, C, W]; the new ones enter the caches."""
        self._enter(layer, k, v)
        names = self._cache_names(layer)
        if self.table is None:
            return [self._updated[name] for name in names]
        pages = self.table.shape[1]
        at = ops.reshape(ops.iota((pages * PAGE,), 0, i64), (1, pages * PAGE))
        fresh = at - ops.reshape(self.past, (self.batch, 1))  # the number among the new tokens
        is_new = ops.reshape(fresh >= 0, (self.batch, pages * PAGE, 1))
        near = ops.clip(fresh, 0, ops.dim_size(self.count) - 1)
        used = ops.where(at[:, ::PAGE] < ops.reshape(self.past, (self.batch, 1)), self.table, 0)
        found = []
        for name, new in ((name, self._entered[name]) for name in names):
            width = new.shape[-1]
            old = ops.reshape(ops.take(self.carried[name], used, axis=0), (self.batch, pages * PAGE, width))
            if self._packs:
                slot = self.slots[name]
                scales = ops.take(self.carried[slot.scales], used, axis=0)
                old = _from_8_bits(old, ops.reshape(scales, (self.batch, pages * PAGE, slot.heads)))
            wide = ops.broadcast_to(ops.reshape(near, (self.batch, pages * PAGE, 1)), (self.batch, pages * PAGE, width))
            found.append(ops.cast(ops.where(is_new, ops.take_along_axis(new, wide, axis=1), old), f32))
        return found

    def seen(self, keys: Any, window: int | None, *, axes: int = 5) -> Value:
        """Which of so many keys the new tokens see, bool[B|1, 1.., S, keys]: those before them, within a window."""
        at = self.positions
        at = ops.reshape(at, (*((1,) if at.ndim == 1 else (self.batch,)), *(1,) * (axes - 3), self.count, 1))
        distance = at - ops.iota((keys,), 0, i64)
        keep = distance >= 0
        return keep if window is None else ops.logical_and(keep, distance <= window)

    def carry(self, name: str, value: Value) -> None:
        """The next value of a state of constant size, `carried[name]`."""
        self._updated[name] = value

    def asked(self, x: Value) -> Value:
        """The rows [B, S, H] that logits are wanted of: all, or the last."""
        if self.every:
            return x
        if self.last is not None:
            rows = ops.reshape(x, (self.batch * self.count, x.shape[-1]))
            return ops.take(rows, ops.iota((self.batch,), 0, i64) * ops.dim_size(self.count) + self.last, axis=0)
        return ops.reshape(ops.narrow(x, 1, self.count - 1, 1), (self.batch, x.shape[-1]))

    def finish(self, logits: Value) -> None:
        self.graph.outputs(logits, *(self._updated[name] for name in carried_names(self.slots.values(), self.layout)))


def _in_8_bits(x: Value, heads: int) -> tuple[Value, Value]:
    """Rows [B, S, W] as integers with a scale [B, S, heads]."""
    batch, count, width = x.shape
    parts = ops.reshape(x, (batch, count, heads, width.__index__() // heads))
    scale = ops.reduce_max(ops.abs(parts), axis=-1) * (1 / 127)
    by = ops.reshape(ops.where(scale == 0.0, 1.0, scale), (batch, count, heads, 1))
    whole = ops.cast(ops.clip(ops.round(parts / by), -127.0, 127.0), i8)
    return ops.reshape(whole, (batch, count, width)), scale


def _from_8_bits(whole: Value, scale: Value) -> Value:
    (batch, count, width), heads = whole.shape, scale.shape[-1].__index__()
    parts = ops.cast(ops.reshape(whole, (batch, count, heads, width.__index__() // heads)), f32)
    found: Value = ops.reshape(parts * ops.reshape(scale, (batch, count, heads, 1)), (batch, count, width))
    return found


@dataclass(frozen=True)
class DecoderFamily:
    """How a folder becomes a decoder: config.json to a configuration, weights under the graph's names, the graph."""

    config: Callable[[dict[str, Any]], Any]
    graph: Callable[..., CachedGraph]
    names: Callable[[Weights], Weights]


DECODERS: dict[str, DecoderFamily] = {}  # by the `model_type` of config.json; each family's module enters its own
