"""Matmuls as data: operands, tiles, k blocks, and how work is split into chunks.

    out[batch, m, n] = epilogue(sum over k of A[batch, m, k] * B[batch, k, n])

A `Contraction` decides the machine code together with the epilogue that is passed beside it; sizes and strides stay
arguments of the code. Its text is complete: equal texts (and epilogues) give equal code.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypedDict, Unpack

from strata.backends.llvm.gemm.arith import GemmArithmetic
from strata.backends.llvm.gemm.micro import Layout
from strata.backends.llvm.gemm.pack_a import TilePacker
from strata.backends.llvm.gemm.pack_b import Panels
from strata.core import Dim, DType, Target, c64, c128, dim_max, dim_min, f32, f64, known_le
from strata.errors import ShapeError
from strata.kernel import ProductBlocks

_POINTERS: Final = ("a", "b", "out")
_NUMBERS: Final = ("m", "n", "k", "a_row", "a_k", "out_row", "out_column")
_BATCH: Final = ("extent", "a", "b", "out")
UNBOUNDED: Final = 1 << 30


CHUNK_SECONDS: Final = 12e-6  # the least work worth handing out


@dataclass(frozen=True)
class Contraction:
    """One matmul, ready to be emitted.

    `heights` are the rows of the micro-kernels, tallest first; unless the last is 1, only multiples can be served.
    `k_block` is how much of k is summed before the next column panel is taken, 0 for all of it. Meanwhile the sums wait
    on the stack, or, with `waits_in_output`, in the output, which then shares memory with no operand of the epilogue.
    It is some blocks of rounded sums (`blocks`), or an even part of one, of sums that wait on the stack.
    `streams` lists, for 1, 2, … rows, how many panels are read at once when a chunk has only so many rows; 0 where the
    tiles of `heights` do.
    """

    target: Target
    a: DType = f32
    b: DType = f32  # as packed
    out: DType = f32
    accumulator: DType = f32
    is_complex: bool = False  # the types above are those of one component
    is_pair: bool = False  # two matmuls of one A: the packed B holds both matrices, the epilogue takes both sums
    by_twos: bool = True  # bf16 may be multiplied and summed in pairs of k's
    heights: tuple[int, ...] = (6, 4, 2, 1)
    vectors: int = 2
    tails: tuple[int, ...] = (1, 2)  # vectors that the last, narrower panel can have
    half_tail: bool = False  # half of its last vector is enough; there is one tail then
    b_rows: bool = False  # B is read in place, a row of columns for each k; otherwise it is packed
    a_packed: bool = False
    a_runs: int = 0  # runs of k in a row of A that are found through a table of addresses; 0: A is a matrix
    k_block: int = 0
    blocks: ProductBlocks | None = None  # that rounded sums are made of; None: one
    waits_in_output: bool = True
    ends_in_registers: bool = False  # whole tiles of the tallest height go through the epilogue from there
    chunk_rows: int = 96
    chunk_panels: int = 8
    joined: int = 1  # neighbouring chunks, of the only block of rows, that are computed in one pass
    columns_first: bool = False  # chunks go down the rows of their columns, then to the next columns
    chunk_seconds: float = CHUNK_SECONDS  # what a chunk is to take at least
    is_open: bool = False  # the panels of a chunk are an argument
    streams: tuple[int, ...] = ()
    prefetch: int = 0  # steps ahead that tall tiles prefetch B
    is_far: bool = False  # B comes from memory: tiles of a row or two prefetch it, too
    batch_rank: int = 0
    unit_columns: bool = True  # the output's columns are next to each other
    epilogue: str = ""  # its text; "" stores the sums
    epilogue_pointers: tuple[str, ...] = ()
    epilogue_numbers: tuple[str, ...] = ()
    beside_output: tuple[str, ...] = ()  # epilogue pointers that are read at the output's own offsets: fetched ahead
    load_numbers: tuple[str, ...] = ()  # sizes that only the addresses of A need

    def __post_init__(self) -> None:
        assert not self.half_tail or len(self.tails) == 1
        assert list(self.heights) == sorted(self.heights, reverse=True)
        assert self.k_block % 8 == 0
        if self.k_block and self.blocks is not None:
            within = self.blocks.terms % self.k_block == 0 and self.b_rows and not self.waits_in_output
            assert not self.blocks.run
            assert self.k_block % self.blocks.terms == 0 or within
        assert self.k_block or not self.a_packed
        assert not self.waits_in_output or (self.out is self.accumulator and self.unit_columns)
        assert not ((self.a_packed or self.a_runs) and self.streams)
        assert not (self.a_runs and self.k_block)
        assert not (self.is_complex and self.epilogue)
        assert not self.is_pair or (self.epilogue and not self.waits_in_output and not self.a_runs)
        assert not self.b_rows or not (self.is_pair or self.is_complex or self.a_runs)
        assert not self.ends_in_registers or not (self.k_block or self.is_pair or self.is_complex)
        assert not self.is_open or not (self.k_block or self.a_runs or self.is_complex)

    @cached_property
    def arithmetic(self) -> GemmArithmetic:
        """Element types inside the micro-kernel: a packed A is already converted, except for the byte dot."""
        arithmetic = GemmArithmetic(self.a, self.b, self.accumulator, self.target, self.by_twos)
        return replace(arithmetic, a=self.accumulator) if self.a_packed and arithmetic.group == 1 else arithmetic

    @property
    def parts(self) -> int:
        """Real numbers in one element: complex matrices are read as real ones with twice the columns and k's."""
        return 2 if self.is_complex else 1

    @cached_property
    def layout(self) -> Layout:
        return "pointers" if self.a_runs else "packed" if self.a_packed else "rows"

    @cached_property
    def lanes(self) -> int:
        return self.arithmetic.lanes

    @cached_property
    def parts_of_block(self) -> int:
        """Blocks of k that one block of sums is made of, where it is made of several; else 0."""
        if self.blocks is None or not self.k_block:
            return 0
        return self.blocks.terms // self.k_block if self.k_block < self.blocks.terms else 0

    @property
    def flops(self) -> float:
        """What one core computes in a second."""
        return FLOPS * self.arithmetic.group

    @cached_property
    def panel_columns(self) -> int:
        return self.lanes * self.vectors

    @property
    def stores_directly(self) -> bool:
        """Full tiles go from registers to the output."""
        waits = self.k_block and not self.waits_in_output
        return not (self.epilogue or waits) and self.out is self.accumulator and self.unit_columns

    def element(self, component: DType) -> DType:
        """The type of an element of a matrix whose components have a type."""
        return {f32: c64, f64: c128}[component] if self.is_complex else component

    def panels(self, source: DType | None = None) -> Panels:
        """How B is packed, from elements of `source`."""
        source = source or self.element(self.b)
        arithmetic = self.arithmetic
        return Panels(source, self.b, self.lanes, self.vectors, arithmetic.group, self.target, arithmetic.head)

    @property
    def tile_packer(self) -> TilePacker:
        """How A is packed."""
        arithmetic = self.arithmetic
        return TilePacker(self.element(self.a), arithmetic.a, arithmetic.group, self.target)

    def ahead(self, rows: int, streams: int) -> int:
        """How many steps ahead tiles of so many rows prefetch B."""
        if self.b_rows and self.k_block:
            return self.prefetch
        if rows * self.accumulator.itemsize >= PREFETCH_ROWS * self.b.itemsize:
            return self.prefetch if streams == 1 else 0
        if not self.is_far or rows > len(FAR_BYTES):
            return 0
        return FAR_BYTES[rows - 1] // (streams * self.vectors * self.arithmetic.b_bytes)

    @cached_property
    def pointers(self) -> tuple[str, ...]:
        return (*_POINTERS, *self.epilogue_pointers)

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        batch = tuple(f"batch{axis}_{part}" for axis in range(self.batch_rank) for part in _BATCH)
        row = ("b_k",) if self.b_rows else ()
        chunks = ("chunk_panels",) if self.is_open else ()
        return (*_NUMBERS, *row, *chunks, *batch, *self.load_numbers, *self.epilogue_numbers)

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """The argument block, eight bytes a name: pointers, then sizes and strides in elements."""
        return (*self.pointers, *self.numbers)

    def slot(self, name: str) -> int:
        return self.slots.index(name)

    def panels_of_chunk(self, m: Dim, n: Dim, k: Dim, batch: Dim = 1) -> Dim:
        """The panels of a chunk: for symbolic sizes, by the rules of `_with_chunks`, in whole numbers."""
        if not self.is_open:
            return self.chunk_panels
        panels = dim_max(ceil_div(n, self.panel_columns), 1)
        row = 2 / self.flops  # seconds for one element of B; reading it takes as long as so many rows
        least = int(self.chunk_seconds / (row * self.panel_columns * self.matrices))
        cost = dim_max(k, 1) * dim_max(dim_min(m, self.chunk_rows), round(self.b.itemsize / BYTES / row))
        chunks = panels * batch * dim_max(self.row_blocks(m), 1)
        count = dim_max((2 * least + cost) // (2 * cost), (chunks + MOST_CHUNKS // 2) // MOST_CHUNKS)
        count = dim_min(dim_max(count, 1), panels)
        parts = ceil_div(panels, count)
        even = ceil_div(panels, parts + dim_min(parts - 1, 1) * (parts % 2))  # an even number of chunks, or one
        # a single row may be read as several panels at once
        together = max(self.streams) if self.streams and not known_le(panels, 4) else 1
        if together == 1:
            return even
        step = dim_max(dim_min((2 - m) * together, together), 1)
        return dim_max(even // step, 1) * step

    def chunk_count(self, m: Dim, n: Dim, batch: Dim = 1, k: Dim = 1) -> Dim:
        """How many chunks there are; k matters for symbolic sizes only."""
        columns = self.panels_of_chunk(m, n, k, batch) * self.panel_columns
        return batch * self.row_blocks(m) * ceil_div(n * self.parts, columns)

    def row_blocks(self, m: Dim) -> Dim:
        """Blocks of rows; where chunks are cut when m is known, an even number of them."""
        return blocks_of_rows(m, self.chunk_rows) if self.is_open else ceil_div(m, self.chunk_rows)

    @property
    def matrices(self) -> int:
        """How many B's there are for one A."""
        return 2 if self.is_pair else 1

    @property
    def stack_bytes(self) -> int:
        """Working memory that one running chunk keeps on its thread's stack."""
        block = self.chunk_rows * self.k_block if self.a_packed else 0
        sums = self.tile_elements * (2 if self.parts_of_block else self.matrices)
        return (block + sums) * self.accumulator.itemsize + self.chunk_rows * self.a_runs * 8

    @property
    def tile_elements(self) -> int:
        """Sums that wait for the epilogue: a tile, the chunk's part of the last, narrower panel, or all of them."""
        widest = max((rows * streams for rows, streams in enumerate(self.streams, 1)), default=0)
        return max(self.chunk_rows * self.sums_columns, widest * self.panel_columns)

    @property
    def sums_columns(self) -> int:
        on_stack = self.k_block and not self.waits_in_output
        return self.panel_columns * (self.chunk_panels * self.joined if on_stack else 1)

    @property
    def name(self) -> str:
        """A name for the kernel; specs that differ only in the epilogue's text need the caller's own."""
        kind = f"{self.a}_{self.b}_{self.out}" + ("_complex" if self.is_complex else "")
        return f"gemm_{kind}_{self.heights[0]}x{self.panel_columns}" + ("_packed" if self.a_packed else "")

    def __str__(self) -> str:
        parts = [
            f"contract {self.a} * {self.b} -> {self.accumulator} -> {self.out}",
            f"tile {_slashed(self.heights)} x {self.lanes}*{self.vectors} tails {_slashed(self.tails) or 'none'}"
            + (" half" if self.half_tail else ""),
            f"a {self.layout}" + (f" {self.a_runs} runs" if self.a_runs else ""),
            *(["b rows"] if self.b_rows else []),
            f"k_block {self.k_block or 'all'}" + ("" if self.waits_in_output else " on stack"),
            *([f"sums of {self.blocks}"] if self.blocks is not None else []),
            f"chunk {self.chunk_rows} rows {'open' if self.is_open else self.chunk_panels} panels",
            f"batch_rank {self.batch_rank}",
        ]
        parts += [f"streams {_slashed(self.streams)}"] if self.streams else []
        parts += [f"prefetch {self.prefetch}"] if self.prefetch else []
        parts += ["far"] if self.is_far else []
        parts += ["ends in registers"] if self.ends_in_registers else []
        parts += ["complex"] if self.is_complex else []
        parts += ["pair"] if self.is_pair else []
        parts += [] if self.by_twos else ["single k"]
        parts += ["columns first"] if self.columns_first else []
        parts += [f"joins {self.joined}"] if self.joined > 1 else []
        parts += [] if self.unit_columns else ["scattered columns"]
        operands = ", ".join((*self.epilogue_pointers, *self.epilogue_numbers))
        parts += [f"epilogue({operands}) {{{self.epilogue}}}"] if self.epilogue else []
        parts += [f"ahead {', '.join(self.beside_output)}"] if self.beside_output else []
        return "; ".join(parts)


def ceil_div(value: Dim, unit: Dim) -> Dim:
    return (value + (unit - 1)) // unit


def blocks_of_rows(m: Dim, most: int) -> Dim:
    """Blocks that m rows are cut into: where they are few, an even number of them, as two threads share them evenly."""
    count = ceil_div(m, most)
    is_several = dim_min(dim_max(count - 1, 0), 1)
    is_few = dim_min(dim_max(FEW_CHUNKS + 1 - count, 0), 1)
    return count + (count % 2) * is_several * is_few


def _slashed(numbers: tuple[int, ...]) -> str:
    return "/".join(map(str, numbers))


@dataclass(frozen=True, slots=True)
class TileRule:
    """Micro-kernel sizes for processors with at least so many vector registers, and why these."""

    registers: int
    has_fma: bool
    heights: tuple[int, ...]
    vectors: int
    streams: tuple[int, ...]
    reason: str


TILE_RULES: Final = (
    TileRule(
        32, True, (8, 4, 2, 1), 3, (1, 1, 1, 1, 1, 1, 1),
        "24 sums, 3 of B and 1 of A: 28 registers. Eight rows at most: A is read in place, and more rows of a "
        "power-of-two stride fall into one set of an 8-way cache (12x2: 101 GFLOP/s at 1024^3, 8x3: 114). One row's "
        "3 sums take 192 bytes in the 4 cycles of an addition, more than the second cache gives; a single stream "
        "comes from memory as fast as several or faster (28.7 GB/s, 4 streams: 27.2)",
    ),
    TileRule(16, True, (6, 4, 2, 1), 2, (4, 2, 1, 1, 1), "12 sums, 2 of B, 1 of A: 15 of 16 registers"),
    TileRule(16, False, (4, 2, 1), 2, (4, 2, 1), "8 sums, 2 of B, 1 of A, and the products that are not fused"),
)  # fmt: skip
# how far ahead B is fetched into the second cache, in bytes as wide as the sums: from memory, 8 x 4096 x 4096 takes
# 3.3 ms without, 2.7 with a third of it into the first cache, 2.45 with this; no cost where B is in a cache
PREFETCH_BYTES: Final = 9216
PREFETCH_ROWS: Final = 6  # with fewer rows for as many bytes, the core's own fetching is faster,
FAR_BYTES: Final = (4608, 3072)  # except for one and two rows: 64 MB at 38 and 35 GB/s; without, at 30 and 32
STREAMS: Final = 4  # panels at once that share the converting of A
CONVERTED_ROWS: Final = 3  # so many rows of 16 bits are converted once, while they are packed, and not for every panel
CHUNK_ROWS: Final = 64  # a panel of B comes from the third-level cache once for so many rows: 7 GB/s at full speed
OPEN_ROWS: Final = 96  # the same where m is open: so many tiles that an even number of blocks leaves none of them empty
A_BLOCK_BYTES: Final = 96 << 10  # a packed block of A, on the stack
SUMS_BYTES: Final = 96 << 10  # sums that wait on the stack
LOOP_CHUNK_SECONDS: Final = 2.5e-6  # the same in a loop: its turns follow each other, so that no thread falls asleep
PACK_SECONDS: Final = 0.15e-9  # to pack one element of A
PACKED_ROWS: Final = 48  # rows of the smallest chunk that packs A
ROWS_IN_PLACE: Final = 512  # rows up to which packing B is worth avoiding
PANEL_IN_PLACE: Final = 256 << 10  # bytes of a panel that is read in place
ROW_PIECE: Final = 2 << 10  # bytes of a row that is read in place, at least; few threads take several pieces at once
SHORT_EPILOGUE: Final = 600  # characters of its text up to which an epilogue may be written out for every vector
FEW_PRODUCTS: Final = 256  # of a sum, up to which that is worth the code
PANELS_IN_PLACE: Final = 4  # that few rows of A read at once, of
B_ROWS_IN_PLACE: Final = (
    32  # rows of B: 1 x 1024 x 1024 takes 64 µs, with 8 rows and 2 panels 70; 8 x 1024 x 1024: 175, 225
)
FAR_ROWS_IN_PLACE, FAR_PANELS_IN_PLACE = 8, 2  # that come from memory: 64 MB in 2.4 ms, with 32 rows in 2.9
MOST_CHUNKS: Final = 256  # of a large matmul: sixteen threads end together, and A is read from the second cache
FEW_CHUNKS: Final = 8  # up to which an uneven number of them leaves threads idle for long
REPEATED: Final = 0.002  # so much longer takes a matmul for each block of rows more, or with narrower panels
NARROW_PANELS: Final = 4  # up to so many panels, narrower ones are tried
SOME_ALONE, ALONE = 1.05, 1.5  # time of a chunk some or all of whose panels are read one by one, to one of no such
FLOPS, BYTES = 100e9, 30e9  # one core's arithmetic and reading, per second; what matters are ratios


class EpilogueFields(TypedDict, total=False):
    """What planners are told of an epilogue: fields of `Contraction`."""

    epilogue: str
    epilogue_pointers: tuple[str, ...]
    epilogue_numbers: tuple[str, ...]


def plan_contraction(
    m: int,
    n: int,
    k: int,
    target: Target,
    *,
    a: DType = f32,
    b: DType | None = None,
    out: DType | None = None,
    accumulator: DType | None = None,
    batch: int = 1,
    batch_rank: int = 0,
    fewest_rows: int | None = None,
    is_open: bool = False,
    m_exact: bool = False,
    n_exact: bool = False,
    a_unit_k: bool = True,
    unit_columns: bool = True,
    in_place: bool = False,
    is_pair: bool = False,
    chunk_seconds: float = CHUNK_SECONDS,
    **ending: Unpack[EpilogueFields],
) -> Contraction:
    """Tiles, blocks and chunks for sizes, or for their upper bounds where they are symbolic.

    `fewest_rows` is the least m to serve well (m itself unless given); with `is_open`, chunks are cut when m is known,
    where A can be read in place; `m_exact` and `n_exact` leave out code that other sizes would need; `a_unit_k` says
    that A's rows are contiguous in k; `in_place`, that an epilogue operand may share memory with the output; `is_pair`,
    that there are two B's; `chunk_seconds` is the least that a chunk takes.
    """
    if min(m, n, k, batch) < 0:
        raise ShapeError(f"matmul: negative size in m={m}, n={n}, k={k}, batch={batch}", code="S103")
    is_complex = a.is_complex
    if is_complex:
        a, b, out, accumulator, n, k = a.real, a.real, a.real, a.real, 2 * n, 2 * k
    accumulator = accumulator or a.accumulator
    out = out or accumulator
    rule = _tile_rule(target)
    fewest = m if fewest_rows is None else min(fewest_rows, m)
    streams = rule.streams
    if a is not accumulator:
        streams = tuple(min(STREAMS, rule.heights[0] // rows) for rows in range(1, rule.heights[0]))
    spec = Contraction(
        target, a, b or a, out, accumulator, is_complex, is_pair, k > 1, heights=rule.heights, vectors=rule.vectors,
        tails=tuple(range(1, rule.vectors + 1)), streams=streams if fewest <= len(streams) else (),
        waits_in_output=out is accumulator and unit_columns and not in_place and not is_pair,
        blocks=ProductBlocks.of_matmul(k, 2 if is_complex else 1) if accumulator.is_float else None,
        batch_rank=batch_rank, unit_columns=unit_columns, chunk_seconds=chunk_seconds, **ending,
    )  # fmt: skip
    spec = replace(
        spec,
        prefetch=PREFETCH_BYTES // (spec.panel_columns * accumulator.itemsize),
        is_far=batch * n * k * spec.b.itemsize * spec.matrices > target.l3_bytes,
    )
    converts = a.is_float and a.bits == 16 and spec.arithmetic.group == 1
    if converts and not is_open and fewest >= CONVERTED_ROWS and n > 2 * spec.panel_columns:
        a_unit_k = False
    if is_open and a_unit_k and not is_complex:
        rows = -(-max(m, 1) // rule.heights[0]) * rule.heights[0]
        spec = replace(spec, is_open=True, chunk_rows=min(OPEN_ROWS, rows))
    elif a_unit_k:
        spec = _with_chunks(spec, m, n, k, batch, max(fewest, 1), m_exact)
    else:
        spec = _with_packed_chunks(spec, m, n, k, batch)
    if m_exact:
        spec = with_even_tiles(spec, m) if m <= spec.chunk_rows else for_rows(spec, m)
    if n_exact:
        tail = -(-(n % spec.panel_columns) // spec.lanes)
        spec = replace(spec, tails=(tail,) if tail else ())
    if a_unit_k:
        return spec
    # the micro-kernel reads consecutive k's: other layouts are packed, a block of k at a time
    row_bytes = spec.chunk_rows * accumulator.itemsize
    unit = spec.blocks.terms if spec.blocks is not None else 8
    block = max(unit, min(A_BLOCK_BYTES // row_bytes, 512) // unit * unit)
    panels = spec.chunk_panels
    if not spec.waits_in_output:
        panels = min(panels, max(1, SUMS_BYTES // (row_bytes * spec.panel_columns * spec.matrices)))
    return replace(spec, a_packed=True, k_block=block, streams=(), chunk_panels=panels)


def with_ending(spec: Contraction, k: int) -> Contraction:
    """Sums of few products are not stored and loaded again before a short epilogue: that takes about 8 more steps."""
    short = 0 < len(spec.epilogue) <= SHORT_EPILOGUE and k <= FEW_PRODUCTS
    plain = spec.unit_columns and not (spec.k_block or spec.is_pair or spec.is_complex)
    return replace(spec, ends_in_registers=short and plain)


def _tile_rule(target: Target) -> TileRule:
    return next(r for r in TILE_RULES if target.vector_registers >= r.registers and target.has_fma >= r.has_fma)


def with_half_tail(spec: Contraction, n: int) -> Contraction:
    """For exactly n columns: where the processor computes whole vectors in halves, one half of the last may do."""
    left = n % spec.panel_columns
    plain = spec.a is spec.b is spec.accumulator and spec.accumulator.is_float and not (spec.is_complex or spec.a_runs)
    is_enough = 0 < left % spec.lanes <= spec.lanes // 2
    taken = plain and is_enough and spec.target.splits_vectors and len(spec.tails) == 1
    return replace(spec, half_tail=True) if taken else spec


def in_rows(spec: Contraction, m: int, n: int, k: int, batch: int = 1) -> Contraction | None:
    """The matmul with a B that is not packed, whose rows are contiguous, where that is as fast.

    Packing takes about as long as multiplying five rows. A panel of rows that lie apart comes from the second-level
    cache, however often it is read. The last vector of a row may begin in the panel before, but not before the row.
    """
    last = -(-(n % spec.panel_columns) // spec.lanes) * spec.lanes
    if spec.b is not spec.accumulator or spec.arithmetic.group > 1 or spec.is_pair or spec.is_complex or n < last:
        return None
    if 0 < m <= spec.heights[0] and not (spec.a_packed or spec.is_open):
        return _few_in_rows(spec, m, n, k, batch)
    if m <= ROWS_IN_PLACE and k * spec.panel_columns * spec.b.itemsize <= PANEL_IN_PLACE:
        return replace(spec, b_rows=True, streams=())
    return None


def _few_in_rows(spec: Contraction, m: int, n: int, k: int, batch: int) -> Contraction:
    """All of B is read once: some of its rows side by side, the next ones prefetched meanwhile.

    The sums wait on the stack: in the output, threads would take lines at the ends of their columns from each other.
    """
    most = FAR_PANELS_IN_PLACE if spec.is_far else PANELS_IN_PLACE
    streams = min(most, _tile_rule(spec.target).heights[0] // m, n // spec.panel_columns)
    panels, row_bytes = max(1, -(-n // spec.panel_columns)), n * spec.b.itemsize
    chunks = max(row_bytes // ROW_PIECE, 2) if batch == 1 else max(row_bytes // (4 * ROW_PIECE), 1)
    chunks = max(1, min(chunks, panels, round(k * row_bytes / BYTES / spec.chunk_seconds)))
    chunks = max(chunks // 2 * 2, 1)
    waiting = max(1, SUMS_BYTES // (m * spec.panel_columns * spec.accumulator.itemsize))
    wide = min(-(-panels // chunks), waiting)
    return replace(
        spec, b_rows=True, chunk_panels=wide, joined=waiting // wide if spec.batch_rank == 0 else 1,
        waits_in_output=False, ends_in_registers=False, k_block=FAR_ROWS_IN_PLACE if spec.is_far else B_ROWS_IN_PLACE,
        prefetch=8, streams=(*(0 for _ in range(m - 1)), streams) if streams > 1 else (),
    )  # fmt: skip


def with_even_tiles(spec: Contraction, m: int) -> Contraction:
    """Tiles for the m rows of a single chunk: as few as it takes, nearly even, and the first hardly waits for B."""
    tallest = spec.heights[0]
    tiles = max(1, -(-m // tallest))
    height = max(m, 1) if tiles == 1 else max(-(-m // tiles), 3 * tallest // 4)
    last = m % height
    streams = spec.streams[m - 1] if 0 < m <= len(spec.streams) else 0
    return replace(
        spec, heights=(height, last) if last else (height,), chunk_rows=tiles * height,
        streams=(*(0 for _ in range(m - 1)), streams) if streams > 1 else (),
    )  # fmt: skip


def for_rows(spec: Contraction, m: int) -> Contraction:
    """Only the heights that m rows need."""
    needed = set()
    for rows in {min(m, spec.chunk_rows), m % spec.chunk_rows}:
        left = rows
        for height in spec.heights:
            needed |= {height} if left >= height else set()
            left %= height
    heights = tuple(h for h in spec.heights if h in needed) or spec.heights[-1:]
    return replace(spec, heights=heights, streams=())


def _with_chunks(spec: Contraction, m: int, n: int, k: int, batch: int, fewest: int, is_exact: bool) -> Contraction:
    """Even blocks of rows, and as many panels as make a chunk worth its handing out."""
    fewest_blocks = max(1, -(-m // CHUNK_ROWS))
    if not is_exact or batch > 1:
        return _with_blocks(spec, m, n, k, batch, fewest, fewest_blocks)
    most = min(m // spec.heights[0], int(2.0 * m * n * k / spec.flops / spec.chunk_seconds))
    blocks = {fewest_blocks, max(1, int(blocks_of_rows(m, CHUNK_ROWS)))}
    blocks |= {b for b in (*range(fewest_blocks, fewest_blocks + 6), 2 * fewest_blocks) if b <= most}
    made = [_with_blocks(spec, m, n, k, batch, fewest, count) for count in sorted(blocks)]
    if m <= spec.heights[0] and spec.panel_columns < n <= NARROW_PANELS * spec.panel_columns:
        made += [_with_blocks(_narrower(spec), m, n, k, batch, fewest, 1)]
    # reading B once more, or narrower panels, has to be worth it
    return min(made, key=lambda one: _slower_half(one, m, n) * (1 + REPEATED * made.index(one)))


def _narrower(spec: Contraction) -> Contraction:
    """Panels of one vector less."""
    vectors = spec.vectors - 1
    ahead = spec.prefetch * spec.vectors // vectors
    return replace(spec, vectors=vectors, tails=tuple(range(1, vectors + 1)), prefetch=ahead)


def _slower_half(spec: Contraction, m: int, n: int) -> float:
    """The work of the slower one of two threads that go through the chunks from both ends."""
    rows, columns, lanes = spec.chunk_rows, spec.chunk_panels * spec.panel_columns, spec.lanes
    whole = -(-n // lanes) * lanes  # what is past the end is multiplied too
    work = [
        (min(column + columns, whole) - column) * min(rows, m - row)
        for row in range(0, m, rows)
        for column in range(0, whole, columns)
    ]
    halves = itertools.accumulate(work)
    return min((max(half, m * whole - half) for half in halves), default=0)


def _with_blocks(spec: Contraction, m: int, n: int, k: int, batch: int, fewest: int, row_blocks: int) -> Contraction:
    height = spec.heights[0]
    rows = -(-max(1, -(-m // row_blocks)) // height) * height
    panels = max(1, -(-n // spec.panel_columns))
    served = min(rows, fewest)
    elements = spec.panel_columns * k * spec.matrices
    cost = max(2 * served * elements / spec.flops, spec.b.itemsize * elements / BYTES) + 1e-9
    total = cost * panels * batch * max(1, -(-fewest // rows))
    wanted = max(spec.chunk_seconds, total / MOST_CHUNKS)
    step = max(spec.streams, default=1) if fewest == 1 and panels > 4 else 1
    count = max(1, min(panels, round(wanted / cost)))
    chunks = -(-panels // count)
    if 1 < chunks <= FEW_CHUNKS and row_blocks * batch == 1:
        return replace(spec, chunk_rows=rows, chunk_panels=_even_panels(panels, chunks, step))
    count = -(-panels // chunks)  # as even as the number of chunks allows
    return replace(spec, chunk_rows=rows, chunk_panels=max(1, round(count / step)) * step)


def _even_panels(panels: int, chunks: int, step: int) -> int:
    """The panels of a chunk that keep two threads busy to the end, and four if possible.

    There are to be that many chunks, to twice as many; `step` panels are best read at once.
    """

    def slowness(count: int) -> float:
        made = -(-panels // count)
        two, four = (-(-made // threads) * count * threads / panels for threads in (2, 4))
        return two * math.sqrt(four) * (1 if count % step == 0 else SOME_ALONE if count > step else ALONE)

    wanted = [-(-panels // n) for n in range(chunks, 2 * chunks + 1)]
    return min([*wanted, *(max(count // step, 1) * step for count in wanted)], key=slowness)


def _with_packed_chunks(spec: Contraction, m: int, n: int, k: int, batch: int) -> Contraction:
    """Each chunk packs its rows of A: wide chunks pack less, many chunks keep all threads busy to the end."""
    height, panels = spec.heights[0], max(1, -(-n // spec.panel_columns))
    work = 2 * m * panels * spec.panel_columns * k * batch / spec.flops
    best, choice = math.inf, spec
    for row_blocks in range(max(1, -(-m // CHUNK_ROWS)), max(1, -(-m // PACKED_ROWS)) + 1):
        rows = -(-max(1, -(-m // row_blocks)) // height) * height
        for column_blocks in range(1, panels + 1):
            wide = -(-panels // column_blocks)
            count = batch * -(-m // rows) * -(-panels // wide)
            seconds = work + m * k * batch * -(-panels // wide) * PACK_SECONDS
            if count > MOST_CHUNKS and count > batch:
                break
            if seconds / count < spec.chunk_seconds and count > batch:
                break
            uneven = math.prod(-(-count // threads) * threads / count for threads in (2, 4, 8, 16)) ** (1 / 4)
            if seconds * uneven < best * 0.99:
                best, choice = seconds * uneven, replace(spec, chunk_rows=rows, chunk_panels=wide)
    return choice
