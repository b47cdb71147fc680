"""Planning of matmuls: tiles, k blocks and chunks for the sizes of a matmul, from measured constants."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Final, Unpack

from strata.backends.llvm.gemm.spec import (
    BYTES,
    CHUNK_SECONDS,
    FEW_CHUNKS,
    MOST_CHUNKS,
    Contraction,
    EpilogueFields,
    blocks_of_rows,
)
from strata.core import DType, Target, f32
from strata.errors import ShapeError
from strata.kernel import ProductBlocks


@dataclass(frozen=True, slots=True)
class TileRule:
    """Micro-kernel sizes for processors with at least this many vector registers, and why these."""

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
STREAMS: Final = 4  # panels at once that share the converting of A
CONVERTED_ROWS: Final = 3  # this many rows of 16 bits are converted once, when they are packed, not for every panel
CHUNK_ROWS: Final = 64  # a panel of B comes from the third-level cache once for this many rows: 7 GB/s at full speed
OPEN_ROWS: Final = 96  # the same where m is open: enough tiles that an even number of blocks leaves none of them empty
A_BLOCK_BYTES: Final = 96 << 10  # a packed block of A, on the stack
SUMS_BYTES: Final = 96 << 10  # sums that wait on the stack
LOOP_CHUNK_SECONDS: Final = 2.5e-6  # CHUNK_SECONDS in a loop: its turns follow each other, so no thread falls asleep
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
REPEATED: Final = 0.002  # how much longer a matmul takes for each further block of rows, or with narrower panels
NARROW_PANELS: Final = 4  # up to this many panels, narrower ones are tried
SOME_ALONE, ALONE = 1.05, 1.5  # time of a chunk some or all of whose panels are read one by one, to one of no such


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
