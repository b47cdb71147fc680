"""How matrix products are cut into chunks: even shares for two and sixteen threads, few chunks, open row counts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from strata.backends.llvm.gemm.planning import plan_contraction
from strata.backends.llvm.gemm.spec import Contraction
from strata.backends.llvm.gemm.tiles import even_grain
from strata.core import Target, substitute, sym
from strata.mir import Graph
from strata.runtime import Session

HOST = Target.host()
KINDS = [HOST, *map(Target.named, ("baseline", "avx2", "avx512"))]


def test_short_chunks_are_handed_out_together() -> None:
    assert even_grain(64, 0.6e-6, 4e-6) == 4  # sixteen pieces of 2.4 µs
    assert even_grain(1, 1.0, 4e-6) == even_grain(24, 12e-6, 4e-6) == 1
    assert even_grain(8, 0.1e-6, 4e-6) == 8  # not worth a second thread
    for points, each in itertools.product((2, 3, 12, 63, 64, 100, 1000), (0.1e-6, 0.5e-6, 1e-6, 3e-6)):
        grain = even_grain(points, each, 4e-6)
        assert grain * each <= 4.1e-6
        half = ((points + grain - 1) // grain + 1) // 2 * grain
        assert points * each <= 4e-6 or half * each <= points * each / 2 + 4e-6


def test_fresh_products_on_sixteen_threads() -> None:
    """How many pieces a program has for a number of threads."""
    g = Graph("products")
    x, w = g.input("x", (1, 4096)), g.input("w", (4096, 4096))
    g.outputs(x @ w)
    executable: Any = Session("cpu").compile(g)._executable
    (native,) = executable.kernels.values()
    product = native.product
    assert [-(-product.points // product.grain(threads)) for threads in (1, 2, 4, 16)] == [1, 2, 4, 8]


def test_chunks_that_pack_a_are_wide_but_enough_for_all_threads() -> None:
    for m, n, k in ((1024, 256, 1024), (256, 1024, 1024), (784, 512, 128), (64, 64, 64), (4096, 4096, 4096)):
        spec = plan_contraction(m, n, k, HOST, a_unit_k=False)
        count, packed = spec.chunk_count(m, n), -(-n // (spec.panel_columns * spec.chunk_panels))
        assert count <= 64
        assert m * n * k < 1 << 22 or count >= 8
        assert packed * 96 <= max(n, 96)


@pytest.mark.parametrize("m", [1, 8])
def test_few_chunks_keep_two_threads_busy(m: int) -> None:
    for n, k in itertools.product((512, 768, 1000, 1024, 1536, 2048), (256, 512, 1024)):
        spec = plan_contraction(m, n, k, HOST)
        chunks = spec.chunk_count(m, n)
        assert isinstance(chunks, int)
        panels = -(-n // spec.panel_columns)
        longest = -(-chunks // 2) * spec.chunk_panels  # of two threads
        assert chunks == 1 or longest <= 1.35 * panels / 2, (n, k, chunks, spec.chunk_panels)


def longest_share(spec: Contraction, m: int, n: int, threads: int) -> float:
    """The work of the thread that has the most, where each takes the next chunk when it is done: 1 is an even share."""
    rows, columns = spec.chunk_rows, spec.chunk_panels * spec.panel_columns
    whole = -(-n // spec.lanes) * spec.lanes
    busy = [0] * threads
    for row, column in itertools.product(range(0, m, rows), range(0, whole, columns)):
        busy[busy.index(min(busy))] += min(rows, m - row) * min(columns, whole - column)
    return max(busy) * threads / (m * whole)


@pytest.mark.parametrize("target", KINDS, ids=str)
def test_chunks_are_enough_for_many_threads(target: Target) -> None:
    """Two threads end together, and sixteen nearly, where there is work for them."""
    for m, n, k in (
        (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (128, 384, 384), (128, 1536, 384), (128, 384, 1536),
        (8, 4096, 4096), (64, 64, 4096), (8, 64, 4096), (48, 333, 768), (333, 333, 333), (2048, 128, 128),
        (64, 1000, 2048), (1000, 1000, 100), (32, 4096, 1024), (100, 768, 768), (1, 4096, 4096),
    ):  # fmt: skip
        spec = plan_contraction(m, n, k, target, m_exact=True, n_exact=True)
        assert spec.chunk_count(m, n) == -(-m // spec.chunk_rows) * -(-n // (spec.chunk_panels * spec.panel_columns))
        assert longest_share(spec, m, n, 2) <= 1.03, (m, n, k)
        if m * n * k >= 512**3:
            assert longest_share(spec, m, n, 16) <= 1.15, (m, n, k)


def test_open_rows_make_as_many_chunks_as_exact_ones() -> None:
    """Within a factor of two, where a panel more or less to a chunk makes one, for few and many rows, thin and wide."""
    kinds = [HOST, Target.named("avx2"), Target.named("avx512")]
    for n, k, target in itertools.product((64, 384, 1536, 4096, 32000), (64, 384, 1536, 4096), kinds):
        spec = plan_contraction(4096, n, k, target, fewest_rows=1, is_open=True)
        for m, batch in itertools.product((1, 3, 4, 16, 40, 64, 100, 128, 512, 1000, 4096), (1, 12)):
            exact = plan_contraction(m, n, k, target, batch=batch)
            wanted, found = exact.chunk_count(m, n, batch), spec.chunk_count(m, n, batch, k)
            assert wanted / 2 <= found <= 2 * wanted, (m, n, k, batch, wanted, found)
            together = max(spec.streams)
            few = m > 1 or n <= 4 * spec.panel_columns
            assert few or spec.panels_of_chunk(m, n, k, batch) % together == 0


@pytest.mark.parametrize("target", KINDS, ids=str)
def test_blocks_of_rows_are_even(target: Target) -> None:
    """Few of them are an even number, known ahead or when rows are known; all have rows."""
    size = sym("m", 1)
    spec = plan_contraction(4096, 300, 64, target, fewest_rows=1, is_open=True)
    count, height = spec.row_blocks(size), spec.heights[0]
    for m in (*range(1, 1200), 2000, 4095, 4096):
        blocks = spec.row_blocks(m)
        assert isinstance(blocks, int)
        assert blocks == substitute(count, {"m": m})
        assert blocks % 2 == 0 or blocks == 1 or blocks > 8
        rows = min(-(-m // (blocks * height)) * height, spec.chunk_rows)
        assert (blocks - 1) * rows < m <= blocks * rows
    square = plan_contraction(256, 256, 256, target, m_exact=True, n_exact=True).row_blocks(256)
    assert square == 4 or (square == 5 and target.has_avx2 and not target.has_avx512)  # even with its panels
