"""Schedules of matmuls: the tiles, chunks, k blocks and prefetches of a template as data, and those next to them.

None of these changes the order in which a sum is added up: what a search finds has the bits of the heuristic's choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from strata.backends.llvm.gemm.planning import for_rows, with_half_tail
from strata.backends.llvm.gemm.spec import Contraction
from strata.core import Dim
from strata.errors import CompileError
from strata.kernel import MatmulTiles

_HEIGHTS = (12, 8, 6, 4, 3)  # rows of tiles that are tried
_VECTORS = (1, 2, 3, 4)
HAND_SECONDS = 0.1e-6  # to hand out a piece of work
_MOST_STACK = 512 << 10  # bytes of a chunk's working memory
_MOST_ROWS, _MOST_PANELS = 1024, 1 << 16


def tiles_of(spec: Contraction) -> MatmulTiles:
    """What a heuristic has chosen."""
    return MatmulTiles(spec.heights[0], spec.vectors, spec.chunk_rows, spec.chunk_panels, spec.k_block, spec.prefetch)


def with_tiles(spec: Contraction, tiles: MatmulTiles, m: Dim | None, n: Dim | None) -> Contraction:
    """The matmul with other tiles; None for m and n where those of a tile must stay, as other things depend on them."""
    if not (0 < tiles.rows <= _MOST_ROWS and 0 < tiles.panels <= _MOST_PANELS and 0 < tiles.height <= max(_HEIGHTS)):
        raise _unfit(tiles)
    try:
        ends = spec.ends_in_registers and not tiles.k_block
        made = replace(spec, prefetch=tiles.prefetch, k_block=tiles.k_block, ends_in_registers=ends)
        if (tiles.height, tiles.vectors) != (spec.heights[0], spec.vectors):
            made = _with_shape(made, tiles, n if m is not None else None)
        if tiles.rows != spec.chunk_rows or made.heights != spec.heights:
            made = _with_rows(made, tiles, m)
        made = replace(made, chunk_panels=tiles.panels)
    except AssertionError:
        raise _unfit(tiles) from None
    if (
        made.stack_bytes > _MOST_STACK
        or tiles_of(made) != tiles
        or (made.joined > 1 and tiles.panels != spec.chunk_panels)
    ):
        raise _unfit(tiles)
    return made


def _with_rows(spec: Contraction, tiles: MatmulTiles, m: Dim | None) -> Contraction:
    """Chunks of other rows, and the heights of tiles that serve what is left of them."""
    if m is None:
        if spec.heights[-1] != 1:
            raise _unfit(tiles)
        return replace(spec, chunk_rows=tiles.rows)
    heights = tuple(h for h in dict.fromkeys((tiles.height, 6, 4, 2, 1)) if h <= tiles.height)
    made = replace(spec, heights=heights, chunk_rows=tiles.rows)
    return for_rows(made, m) if isinstance(m, int) else made


def _with_shape(spec: Contraction, tiles: MatmulTiles, n: Dim | None) -> Contraction:
    """Tiles of another shape: the last panel's tails follow."""
    if n is None or spec.streams or spec.b_rows or spec.a_packed or not 0 < tiles.vectors <= max(_VECTORS):
        raise _unfit(tiles)
    made = replace(spec, vectors=tiles.vectors, tails=tuple(range(1, tiles.vectors + 1)), half_tail=False, heights=(1,))
    if not isinstance(n, int):
        return made
    tail = -(-(n % made.panel_columns) // made.lanes)
    return with_half_tail(replace(made, tails=(tail,) if tail else ()), n)


def _unfit(tiles: MatmulTiles) -> CompileError:
    return CompileError(f"`{tiles}` does not fit this matmul", code="C142")


def near_tiles(tiles: MatmulTiles, registers: int) -> Iterator[MatmulTiles]:
    """Small changes; what does not fit is left to `with_tiles`."""
    for panels in (tiles.panels // 2, tiles.panels * 2, tiles.panels + 1):
        yield replace(tiles, panels=max(1, panels))
    for rows in (tiles.rows // 2, tiles.rows * 2, tiles.rows * 3 // 2):
        whole = max(1, round(rows / tiles.height)) * tiles.height
        yield replace(tiles, rows=whole)
    for block in {0, 128, 256, 512, 2 * tiles.k_block, tiles.k_block // 2 // 8 * 8}:
        yield replace(tiles, k_block=block)
    for ahead in {0, tiles.prefetch // 2, 2 * tiles.prefetch}:
        yield replace(tiles, prefetch=ahead)
    for height in _HEIGHTS:
        for vectors in _VECTORS:
            if height * vectors + vectors + 1 <= registers and 2 * height * vectors >= registers // 2:
                rows = max(1, round(tiles.rows / height)) * height
                yield replace(tiles, height=height, vectors=vectors, rows=rows)


def even_grain(points: int, seconds: float, most: float) -> int:
    """How many points of some `seconds` are handed out together: at most `most` seconds of work, in even halves."""

    def slower_half(grain: int) -> float:
        pieces = -(-points // grain)
        return min(-(-pieces // 2) * grain, points) * seconds + pieces * HAND_SECONDS

    if points * seconds <= most:
        return points
    return min(range(1, max(1, min(int(most / max(seconds, 1e-9)), points)) + 1), key=slower_half)
