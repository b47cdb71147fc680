"""Matmuls as data: operands, tiles, k blocks, and how work is split into chunks.

    out[batch, m, n] = epilogue(sum over k of A[batch, m, k] * B[batch, k, n])

A `Contraction` decides the machine code together with the epilogue that is passed beside it; sizes and strides stay
arguments of the code. Its text is complete: equal texts (and epilogues) give equal code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, TypedDict

from strata.backends.llvm.gemm.arith import GemmArithmetic
from strata.backends.llvm.gemm.micro import Layout
from strata.backends.llvm.gemm.pack_a import TilePacker
from strata.backends.llvm.gemm.pack_b import Panels
from strata.core import Dim, DType, Target, c64, c128, dim_max, dim_min, f32, f64, known_le
from strata.kernel import ProductBlocks

_POINTERS: Final = ("a", "b", "out")
_NUMBERS: Final = ("m", "n", "k", "a_row", "a_k", "out_row", "out_column")
_BATCH: Final = ("extent", "a", "b", "out")
UNBOUNDED: Final = 1 << 30
CHUNK_SECONDS: Final = 12e-6  # the least work worth handing out
MOST_CHUNKS: Final = 256  # of a large matmul: sixteen threads end together, and A is read from the second cache
FEW_CHUNKS: Final = 8  # up to which an uneven number of them leaves threads idle for long
FLOPS, BYTES = 100e9, 30e9  # one core's arithmetic and reading, per second; what matters are ratios
# B is fetched ahead where the core's own fetching is slower: not with fewer rows for as many bytes than these,
PREFETCH_ROWS: Final = 6
FAR_BYTES: Final = (4608, 3072)  # except for one and two rows: 64 MB at 38 and 35 GB/s; without, at 30 and 32


@dataclass(frozen=True)
class Contraction:
    """One matmul, ready to be emitted.

    `heights` are the rows of the micro-kernels, tallest first; unless the last is 1, only multiples can be served.
    `k_block` is how much of k is summed before the next column panel is taken, 0 for all of it. Meanwhile the sums wait
    on the stack, or, with `waits_in_output`, in the output, which then shares memory with no operand of the epilogue.
    It is some blocks of rounded sums (`blocks`), or an even part of one, of sums that wait on the stack.
    `streams` lists how many panels are read at once when a chunk has only 1, 2, … rows; 0 where the tiles of `heights`
    do.
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
        """How many steps ahead tiles of this many rows prefetch B."""
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
        """The panels of a chunk: for symbolic sizes, by the rules of `planning`, in whole numbers."""
        if not self.is_open:
            return self.chunk_panels
        panels = dim_max(ceil_div(n, self.panel_columns), 1)
        row = 2 / self.flops  # seconds for one element of B; reading it takes as long as that many rows
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


class EpilogueFields(TypedDict, total=False):
    """What planners are told of an epilogue: fields of `Contraction`."""

    epilogue: str
    epilogue_pointers: tuple[str, ...]
    epilogue_numbers: tuple[str, ...]
