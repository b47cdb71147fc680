"""The schedules that a search tries for a Triton kernel: tiles of matmuls, blocks of attention.

Every candidate is legal for its kernel, so that the only questions left are whether it compiles, whether it gives the
results of the first one, and how long it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from strata.backends.triton.codegen.product import TileSum, can_split, descriptor_views
from strata.backends.triton.schedules.schedule import AttentionBlocks, TritonTiles, fitted_tiles, known
from strata.backends.triton.target import Gpu
from strata.core import Dim
from strata.kernel import ContractionForm

# rows, columns, terms, warps, stages
_TILES_16 = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 4, 4), (128, 128, 64, 8, 3),
    (128, 128, 128, 8, 3), (64, 256, 64, 4, 4), (64, 128, 64, 4, 4), (64, 128, 128, 4, 3), (64, 64, 64, 4, 5),
    (64, 64, 128, 4, 4), (128, 64, 64, 4, 4), (128, 64, 128, 4, 3), (32, 128, 128, 4, 4), (32, 64, 128, 4, 4),
    (32, 64, 256, 4, 3), (16, 128, 128, 4, 4), (16, 64, 256, 4, 4), (16, 64, 128, 4, 5), (16, 32, 256, 4, 4),
    (16, 32, 512, 4, 3), (16, 16, 256, 4, 4), (16, 16, 512, 4, 3), (16, 32, 128, 4, 6), (16, 64, 512, 8, 2),
    (16, 32, 256, 4, 3), (16, 64, 128, 4, 3), (16, 128, 64, 4, 6), (16, 32, 128, 4, 4),
)  # fmt: skip
_TILES_32 = (
    (64, 64, 32, 4, 3), (128, 64, 32, 4, 3), (64, 128, 32, 4, 3), (128, 128, 32, 8, 3), (128, 128, 16, 8, 4),
    (32, 64, 32, 4, 3), (32, 32, 32, 4, 3), (64, 64, 16, 4, 4),
)  # fmt: skip
_PARTS = (2, 4, 7, 8, 11, 16)  # 7 and 11 are in the sizes of many decoders: 14336, 5632
_PROCESSORS = 132
_MOST_PROGRAMS = 8 * _PROCESSORS  # of a split matmul: more parts than this gain nothing


def product_candidates(form: ContractionForm, sums: Sequence[TileSum], gpu: Gpu) -> Iterator[TritonTiles]:
    """Tiles that are not mostly empty, by pointers or descriptors, in parts where there are few."""
    batch, rows, columns, terms = form.extents
    dtype = sums[0].dtype
    seen: set[TritonTiles] = set()
    for numbers in _TILES_32 if dtype.bits >= 32 else _TILES_16:
        tiles = fitted_tiles(TritonTiles(*numbers), rows, columns, terms, dtype.bits)
        if tiles.rows < numbers[0] // 2 or tiles.columns < numbers[1] // 2 or len(sums) * tiles.columns > 256:
            continue
        if tiles.rows < 64 and known(rows) >= 4 * tiles.rows:
            continue
        if tiles.columns < 64 and known(rows) > 2 * tiles.rows:
            continue
        count = -(-known(rows) // tiles.rows) * -(-known(columns) // tiles.columns)
        grouped = replace(tiles, group=8) if known(rows) > 2 * tiles.rows else tiles
        found = [grouped]
        if tiles.rows >= 64 and descriptor_views(form, tuple(sums), tiles, gpu) is not None:
            found.append(replace(grouped, descriptors=True))
            if not form.batch and count > _PROCESSORS:
                found.append(replace(grouped, descriptors=True, persistent=_PROCESSORS))
        programs = count * known(batch)
        for parts in _PARTS:
            splits = programs < 2 * _PROCESSORS and _PROCESSORS // 2 <= programs * parts <= _MOST_PROGRAMS
            if splits and can_split(form, parts * tiles.terms):
                found.append(replace(found[-1], parts=parts, persistent=0))
        for one in found:
            if one not in seen:
                seen.add(one)
                yield one


def attention_candidates(queries: Dim, width: int, bits: int) -> Iterator[AttentionBlocks]:
    """Blocks of query rows and keys."""
    if known(queries) <= 16:
        for keys in (32, 64, 128):
            for segment in (128, 256, 512, 1024):
                for stages in (3, 4):
                    yield AttentionBlocks(16, keys, 4, stages, segment)
        return
    if bits >= 32:
        for rows, keys, warps in ((64, 32, 4), (32, 32, 4), (64, 64, 8), (128, 32, 8)):
            yield AttentionBlocks(rows, keys, warps, 2)
        return
    for rows, keys in ((128, 128), (128, 64), (64, 64), (64, 128), (128, 32), (64, 32)):
        for warps in (4, 8):
            for stages in (2, 3, 4):
                held = stages * keys * width * 2 * bits // 8 + rows * width * bits // 8
                if held <= 227 << 10 and (warps == 4 or rows * keys >= 64 * 128):
                    yield AttentionBlocks(rows, keys, warps, stages)
