"""How a kernel's machine code is called, as data kept beside it: a warm start needs no analysis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.core import Dim, SizeReader, SizeWriter, Symbol
from strata.kernel import Expr, Kernel, Load, Reduce, Scan

if TYPE_CHECKING:
    from strata.backends.llvm.conv.match import ConvPlan
    from strata.backends.llvm.conv.match_nchw import PlanesPlan
    from strata.backends.llvm.gemm.match import MatrixPlan, Slot

    ProductPlan = MatrixPlan | ConvPlan | PlanesPlan
_LINE = 64
OTHER = "kernel_other"


@dataclass(frozen=True, slots=True)
class LoopUsage:
    """Generated loops: buffers and sizes in the order of the arguments, and the parallel space.

    Loops that come `before` leave in scratch memory, named with its bytes, what these loops read."""

    buffers: tuple[str, ...]
    symbols: tuple[Symbol, ...]
    points: Dim
    grain: int
    before: tuple[LoopUsage, ...] = ()
    scratch: tuple[tuple[str, Dim], ...] = ()

    @property
    def functions(self) -> tuple[str, ...]:
        """In the order in which they run."""
        return (*(f"kernel_{n}" for n in range(len(self.before))), "kernel")

    @property
    def scratch_bytes(self) -> Dim:
        return self.scratch_offset(len(self.scratch))

    def scratch_offset(self, number: int) -> Dim:
        """Where a piece of scratch memory begins: each on its own cache line."""
        total: Dim = 0
        for _, count in self.scratch[:number]:
            total = total + (count + _LINE - 1) // _LINE * _LINE
        return total

    def to_text(self) -> str:
        writer = SizeWriter()
        words = self._words(writer)
        return json.dumps(["loops", writer.rows, *words])

    def _words(self, writer: SizeWriter) -> list[Any]:
        before = [loops._words(writer) for loops in self.before]
        scratch = [[name, writer.add(count)] for name, count in self.scratch]
        return [_sizes(self.symbols), self.buffers, writer.add(self.points), self.grain, before, scratch]


@dataclass(frozen=True, slots=True)
class MatmulUsage:
    """A matmul or convolution: one function packs the second factor, or it is packed once, or not; one multiplies.

    Loops for `few` rows take its place where there are no more: then it has no points, else they have none. So does an
    `other` matmul of the same factor, for sizes that ask for another way."""

    factor: str  # the second one, as the kernel calls its buffer
    itemsize: int  # of its packed elements
    layout: str  # factors packed alike share one packed copy
    packed_elements: Dim
    pack_arguments: tuple[Slot, ...]
    pack_points: Dim
    arguments: tuple[Slot, ...]
    points: Dim
    symbols: tuple[Symbol, ...]
    reads_factor: bool  # as it is, too: elsewhere than in the sum
    grains: tuple[int, int] = (1, 1)  # points of packing and of multiplying that are handed out together
    joined: int = (
        1  # points that may be handed out together where there are few threads: they are then done in one pass
    )
    few: LoopUsage | None = None
    taken: Dim = 1  # 1 where this one runs, 0 where another one or `few` does; weights may be packed before
    other: MatmulUsage | None = None

    def grain(self, threads: int) -> int:
        """Points of the matmul that are handed out together; which do not change a bit of its results."""
        if self.joined == 1 or not isinstance(self.points, int):
            return self.grains[1]
        return max(1, min(self.joined, -(-self.points // threads)))

    @property
    def is_packed(self) -> bool:
        """Whether the second factor is read packed; otherwise it is read in place."""
        return any(kind == "packed" for kind, _ in self.arguments)

    @property
    def functions(self) -> tuple[str, ...]:
        own = ("kernel", "kernel_pack") if self.is_packed else ("kernel",)
        few = self.few.functions if self.few is not None else ()
        beside = [f"kernel_few{name.removeprefix('kernel')}" for name in few]
        other = self.other.functions if self.other is not None else ()
        return (*own, *beside, *(f"{OTHER}{name.removeprefix('kernel')}" for name in other))

    @property
    def ways(self) -> tuple[tuple[str, MatmulUsage], ...]:
        """This one and the other one, each with the name of its function."""
        return (("kernel", self), *(() if self.other is None else ((OTHER, self.other),)))

    @property
    def packed_bytes(self) -> Dim:
        """Of the packed factor, with room for reads past its end."""
        return self.packed_elements * self.itemsize + 256 if self.is_packed else 0

    @staticmethod
    def of(plan: ProductPlan) -> MatmulUsage:
        """The calls of a planned template."""
        factor, kernel = plan.matrix.b.buffer, plan.matrix.kernel
        return MatmulUsage(
            factor, plan.spec.b.itemsize, plan.layout, plan.packed_elements(),
            tuple(plan.pack_arguments()), plan.pack_points(), tuple(plan.arguments()), plan.points(),
            tuple(kernel.symbols().values()), factor in _outside_sums(kernel),
        )  # fmt: skip

    def to_text(self) -> str:
        sizes = SizeWriter()
        words = self._words(sizes)
        return json.dumps(["product", sizes.rows, *words])

    def _words(self, sizes: SizeWriter) -> list[Any]:
        words = [
            _sizes(self.symbols), self.factor, self.itemsize, self.layout, sizes.add(self.packed_elements),
            [_written_slot(s, sizes) for s in self.pack_arguments], sizes.add(self.pack_points),
            [_written_slot(s, sizes) for s in self.arguments], sizes.add(self.points), self.reads_factor, self.grains,
            self.joined, self.few._words(sizes) if self.few is not None else None,
        ]  # fmt: skip
        if self.taken == 1:
            return words
        return [*words, sizes.add(self.taken), None if self.other is None else self.other._words(sizes)]


Usage = LoopUsage | MatmulUsage


def read_usage(text: str) -> Usage:
    """What `to_text` wrote."""
    kind, rows, *words = json.loads(text)
    size = SizeReader(rows)
    if kind == "loops":
        return _read_loops(size, *words)
    return _read_product(size, words)


def _read_product(size: SizeReader, words: list[Any]) -> MatmulUsage:
    symbols, factor, itemsize, layout, elements, pack, pack_points, arguments, points, reads_factor, *grains = words
    (pack_grain, grain), joined, few, *ways = grains
    taken, other = ways or (1, None)
    return MatmulUsage(
        factor, itemsize, layout, size(elements), tuple(_read_slot(s, size) for s in pack), size(pack_points),
        tuple(_read_slot(s, size) for s in arguments), size(points), _read_symbols(symbols), reads_factor is True,
        (pack_grain, grain), joined, None if few is None else _read_loops(size, *few), size(taken) if ways else 1,
        None if other is None else _read_product(size, other),
    )  # fmt: skip


def _read_loops(
    size: SizeReader, symbols: list[Any], buffers: list[str], points: Any, grain: int, before: list[Any], scratch: Any
) -> LoopUsage:
    pieces = tuple((name, size(count)) for name, count in scratch)
    earlier = tuple(_read_loops(size, *words) for words in before)
    return LoopUsage(tuple(buffers), _read_symbols(symbols), size(points), grain, earlier, pieces)


def _sizes(symbols: Sequence[Symbol]) -> list[list[Any]]:
    return [[s.name, s.lo, s.hi] for s in symbols]


def _read_symbols(rows: Sequence[Sequence[Any]]) -> tuple[Symbol, ...]:
    return tuple(Symbol(name, lo, hi) for name, lo, hi in rows)


def _written_slot(slot: Slot, sizes: SizeWriter) -> list[Any]:
    kind, value = slot
    if kind == "buffer":
        return [kind, [value[0], sizes.add(value[1])]]
    return [kind, sizes.add(value) if kind == "number" else value]


def _read_slot(slot: list[Any], size: SizeReader) -> Slot:
    kind, value = slot
    if kind == "buffer":
        return kind, (value[0], size(value[1]))
    return kind, size(value) if kind == "number" else value


def _outside_sums(kernel: Kernel) -> set[str]:
    """Buffers that a kernel reads elsewhere than in what it sums up."""
    found: set[str] = set()
    seen: set[Expr] = set()
    stack = list(kernel.roots)
    while stack:
        e = stack.pop()
        if e in seen or isinstance(e, (Reduce, Scan)):
            continue
        seen.add(e)
        if isinstance(e, Load):
            found.add(e.buffer.name)
        stack += e.inputs
    return found
