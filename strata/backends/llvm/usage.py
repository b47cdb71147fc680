"""How the machine code of a kernel is called, as data that is kept beside it: a warm start needs no analysis."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.backends.llvm.conv_first_steps import PlanesPlan
from strata.backends.llvm.conv_steps import ConvPlan
from strata.backends.llvm.matrix import MatrixPlan, Slot
from strata.core import Dim, Symbol, parse_dim

ProductPlan = MatrixPlan | ConvPlan | PlanesPlan
_LINE = 64


@dataclass(frozen=True, slots=True)
class Loops:
    """Generated loops: buffers and sizes in the order of the arguments, and the parallel space.

    Loops that come `before` leave in scratch memory, named with its bytes, what these loops read."""

    buffers: tuple[str, ...]
    symbols: tuple[Symbol, ...]
    points: Dim
    grain: int
    before: tuple[Loops, ...] = ()
    scratch: tuple[tuple[str, Dim], ...] = ()

    @property
    def functions(self) -> tuple[str, ...]:
        """In the order in which they run."""
        return (*(f"kernel_{n}" for n in range(len(self.before))), "kernel")

    @property
    def scratch_bytes(self) -> Dim:
        return self.scratch_offset(len(self.scratch))

    def scratch_offset(self, number: int) -> Dim:
        """Where a piece of scratch memory begins: each on a cache line of its own."""
        total: Dim = 0
        for _, count in self.scratch[:number]:
            total = total + (count + _LINE - 1) // _LINE * _LINE
        return total

    def to_text(self) -> str:
        return json.dumps(["loops", *self._words()])

    def _words(self) -> list[Any]:
        before = [loops._words() for loops in self.before]
        scratch = [[name, _written(count)] for name, count in self.scratch]
        return [_sizes(self.symbols), self.buffers, _written(self.points), self.grain, before, scratch]


@dataclass(frozen=True, slots=True)
class Product:
    """A product or convolution: one function packs the second factor, or it is packed once, or not; one multiplies."""

    factor: str  # the second one, as the kernel calls its buffer
    itemsize: int  # of its packed elements
    layout: str  # factors packed alike share one packed copy
    packed_elements: Dim
    pack_arguments: tuple[Slot, ...]
    pack_points: Dim
    arguments: tuple[Slot, ...]
    points: Dim
    symbols: tuple[Symbol, ...]

    @property
    def is_packed(self) -> bool:
        """Whether the second factor is read packed; otherwise it is read where it lies."""
        return any(kind == "packed" for kind, _ in self.arguments)

    @property
    def functions(self) -> tuple[str, ...]:
        return ("kernel", "kernel_pack") if self.is_packed else ("kernel",)

    @property
    def packed_bytes(self) -> Dim:
        """Of the packed factor, with room for reads past its end."""
        return self.packed_elements * self.itemsize + 256 if self.is_packed else 0

    @staticmethod
    def of(plan: ProductPlan) -> Product:
        """The calls of a planned template."""
        return Product(
            plan.matrix.b.buffer, plan.spec.b.itemsize, plan.layout, plan.packed_elements(),
            tuple(plan.pack_arguments()), plan.pack_points(), tuple(plan.arguments()), plan.points(),
            tuple(plan.matrix.kernel.symbols().values()),
        )  # fmt: skip

    def to_text(self) -> str:
        return json.dumps([
            "product", _sizes(self.symbols), self.factor, self.itemsize, self.layout, _written(self.packed_elements),
            [_written_slot(s) for s in self.pack_arguments], _written(self.pack_points),
            [_written_slot(s) for s in self.arguments], _written(self.points),
        ])  # fmt: skip


Usage = Loops | Product


def read_usage(text: str) -> Usage:
    """What `to_text` wrote."""
    kind, sizes, *rest = json.loads(text)
    symbols = {name: Symbol(name, lo, hi) for name, lo, hi in sizes}
    found = tuple(symbols.values())
    if kind == "loops":
        return _read_loops(sizes, *rest)
    factor, itemsize, layout, elements, pack, pack_points, arguments, points = rest
    return Product(
        factor, itemsize, layout, _read(elements, symbols), tuple(_read_slot(s, symbols) for s in pack),
        _read(pack_points, symbols), tuple(_read_slot(s, symbols) for s in arguments), _read(points, symbols), found,
    )  # fmt: skip


def _read_loops(
    sizes: list[list[Any]], buffers: list[str], points: int | str, grain: int, before: list[Any], scratch: list[Any]
) -> Loops:
    symbols = {name: Symbol(name, lo, hi) for name, lo, hi in sizes}
    pieces = tuple((name, _read(count, symbols)) for name, count in scratch)
    earlier = tuple(_read_loops(*words) for words in before)
    return Loops(tuple(buffers), tuple(symbols.values()), _read(points, symbols), grain, earlier, pieces)


def _sizes(symbols: tuple[Symbol, ...]) -> list[list[Any]]:
    return [[s.name, s.lo, s.hi] for s in symbols]


def _written(dim: Dim) -> int | str:
    return dim if isinstance(dim, int) else str(dim)


def _read(value: int | str, symbols: Mapping[str, Symbol]) -> Dim:
    return value if isinstance(value, int) else parse_dim(value, symbols)


def _written_slot(slot: Slot) -> list[Any]:
    kind, value = slot
    if kind == "buffer":
        return [kind, [value[0], _written(value[1])]]
    return [kind, _written(value) if kind == "number" else value]


def _read_slot(slot: list[Any], symbols: Mapping[str, Symbol]) -> Slot:
    kind, value = slot
    if kind == "buffer":
        return kind, (value[0], _read(value[1], symbols))
    return kind, _read(value, symbols) if kind == "number" else value
