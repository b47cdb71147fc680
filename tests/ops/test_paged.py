"""Attention over pages: the bits of attention over one array, wherever the pages lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata import ops
from strata.config import using
from strata.core import DType, f32, f64, i64, sym
from strata.errors import DTypeError, IndexRangeError, ShapeError
from strata.mir import Graph, evaluate
from strata.runtime import CompiledGraph, Session

PAGE = 16


def paged(device: str, dim: int, heads: int, shared: int, page: int = PAGE, **fields: Any) -> CompiledGraph:
    g = Graph("paged")
    b, s, p, n = sym("B", 1), sym("S", 1), sym("P", 1), sym("N", 1)
    wide, narrow = heads * dim, heads // shared * dim
    q = g.input("q", (b, s, wide), f32)
    k, v = (g.input(name, (p, page, narrow), f32) for name in "kv")
    x, y = (g.input(name, (b, s, narrow), f32) for name in ("new_k", "new_v"))
    table, past = g.input("table", (b, n), i64), g.input("past", (b,), i64)
    y = ops.paged_attention(q, k, v, x, y, table, past, num_heads=heads, kv_heads=heads // shared, **fields)
    return Session(device).compile(g.outputs(y))


def dense(device: str, dim: int, heads: int, shared: int, **fields: Any) -> CompiledGraph:
    g = Graph("dense")
    b, s, c = sym("B", 1), sym("S", 1), sym("C", 1)
    q = g.input("q", (b, s, heads * dim), f32)
    k, v = (g.input(name, (b, c, heads // shared * dim), f32) for name in "kv")
    past = g.input("past", (b,), i64)
    y = ops.attention(
        q, k, v, num_heads=heads, kv_heads=heads // shared, layout="bsd", causal=True, offset=past, **fields
    )
    return Session(device).compile(g.outputs(y))


def arrays(
    rng: np.random.Generator,
    past: list[int],
    count: int,
    width: int,
    queries: int,
    *,
    scattered: bool,
    page: int = PAGE,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The same numbers in pages and one behind the other. Pages that nobody has hold NaN, and so do rows behind."""
    rows = -(-(max(past) + count) // page)
    pages = rows * len(past) + 3
    numbers = rng.permutation(pages) if scattered else np.arange(pages)
    table = numbers[: rows * len(past)].reshape(len(past), rows).astype(np.int64)
    pools = np.full((2, pages, page, width), np.nan, np.float32)
    whole = np.zeros((2, len(past), rows * page, width), np.float32)
    new = rng.standard_normal((2, len(past), count, width)).astype(np.float32)
    for b, at in enumerate(past):
        whole[:, b, :at] = rng.standard_normal((2, at, width))
        whole[:, b, at : at + count] = new[:, b]
        for j in range(at):
            pools[:, table[b, j // page], j % page] = whole[:, b, j]
    q = rng.standard_normal((len(past), count, queries)).astype(np.float32)
    at = np.array(past, np.int64)
    first = {"q": q, "k": pools[0], "v": pools[1], "new_k": new[0], "new_v": new[1], "table": table, "past": at}
    return first, {"q": q, "k": whole[0], "v": whole[1], "past": at}


@pytest.mark.few(7)
@pytest.mark.parametrize("device", ["cpu", "cpu:avx2", "cpu:baseline"])
@pytest.mark.parametrize(
    ("dim", "heads", "shared", "fields"),
    [
        (64, 4, 1, {}), (16, 4, 4, {"softcap": 4.0}), (32, 6, 3, {"window": 20}), (24, 2, 1, {}),
        (16, 16, 1, {"scale": 0.3}), (8, 2, 2, {"window": 600}), (5, 2, 1, {}),
    ],
)  # fmt: skip
def test_pages_have_the_bits_of_one_array(
    device: str, dim: int, heads: int, shared: int, fields: dict[str, Any], rng: np.random.Generator
) -> None:
    one, other = paged(device, dim, heads, shared, **fields), dense(device, dim, heads, shared, **fields)
    width, wide = heads // shared * dim, heads * dim
    for past in ([0], [1, 0, 15], [16, 17, 31, 32], [100, 3], [700, 511, 512, 20]):
        for count in (1, 2, 4, 5, 21):
            for scattered in (False, True):
                pages, whole = arrays(rng, past, count, width, wide, scattered=scattered)
                assert np.array_equal(one.run(pages)[0], other.run(whole)[0]), (past, count, scattered)


@pytest.mark.parametrize("page", [1, 2, 8, 64, 512, 3, 48])
def test_pages_of_other_lengths(page: int, rng: np.random.Generator) -> None:
    one, other = paged("cpu", 16, 4, 2, page), dense("cpu", 16, 4, 2)
    for past in ([0, 5], [70, 130]):
        for count in (1, 7):
            pages, whole = arrays(rng, past, count, 32, 64, scattered=True, page=page)
            found, wanted = one.run(pages)[0], other.run(whole)[0]
            if page not in (3, 48):  # of which no whole number makes a block of keys: there pages are laid together
                assert np.array_equal(found, wanted)
            assert np.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_meaning_is_that_of_a_loop(rng: np.random.Generator) -> None:
    one = paged("cpu", 16, 4, 2, window=9)
    for past, count in (([0, 20], 1), ([33, 4], 6)):
        feeds, _ = arrays(rng, past, count, 32, 64, scattered=True)
        (wanted,) = evaluate(one.source, {n: np.nan_to_num(a) for n, a in feeds.items()})
        assert np.allclose(one.run(feeds)[0], wanted, rtol=1e-4, atol=1e-5)


def test_threads_change_no_bit(rng: np.random.Generator) -> None:
    one = paged("cpu", 64, 4, 2)
    feeds, _ = arrays(rng, [700, 90, 1300], 1, 128, 256, scattered=True)
    found = []
    for threads in (1, 2, 7):
        with using(num_threads=threads):
            found.append(one.run(feeds)[0])
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


@pytest.mark.parametrize("sizes", ["symbolic", "static"])
@pytest.mark.parametrize(("dtype", "page"), [(f32, 16), (f32, 3), (f64, 16)], ids=["native", "laid together", "f64"])
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_pages_and_tokens_that_do_not_exist(device: str, dtype: DType, page: int, sizes: str) -> None:
    """Always the same error; what stands in the table behind the tokens in use is not looked at."""
    shown = Feeds(page, dtype)
    graph = shown.graph(symbolic=sizes == "symbolic")

    def run(**changed: Any) -> np.ndarray:
        return Session(device).compile(graph).run({**shown.arrays, **changed})[0]

    expected = run()
    assert np.isfinite(expected).all()
    assert np.array_equal(run(table=np.array([[4, 0, -5], [2, 10**12, 9]])), expected)
    for number in (-1, 5, 10**12):
        with pytest.raises(IndexRangeError, match=f"page {number} is not among the 5 pages") as caught:
            run(table=np.array([[4, number, 0], [2, 0, 0]]))
        assert caught.value.code == "I230"
    for number in (-1, 3 * page, 10**12):
        with pytest.raises(IndexRangeError, match=f"{number} tokens come before .* room for {3 * page - 1} ") as caught:
            run(past=np.array([number, 2]))
        assert caught.value.code == "I231"


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("page", [16, 3])
def test_sizes_of_nothing(device: str, page: int) -> None:
    shown = Feeds(page, f32)
    program = Session(device).compile(shown.graph(symbolic=True))
    none = {name: a[:0] for name, a in shown.arrays.items()}
    pools = {"k": shown.arrays["k"], "v": shown.arrays["v"]}
    for feeds in (none, {**none, **pools}):
        assert program.run(feeds)[0].shape == (0, 1, 32)
    unread = {name: a[:, :0] for name, a in shown.arrays.items() if a.ndim == 3 and name not in pools}
    assert program.run({**shown.arrays, **unread})[0].shape == (2, 0, 32)
    with pytest.raises(IndexRangeError, match="room for -1"):
        program.run({**shown.arrays, "table": np.zeros((2, 0), np.int64)})
    with pytest.raises(IndexRangeError, match="not among the 0 pages"):
        program.run({**shown.arrays, "k": none["k"], "v": none["v"]})


class Feeds:
    """Two sequences of one and two pages, of a pool of five."""

    def __init__(self, page: int, dtype: DType) -> None:
        rng = np.random.default_rng(3)
        draw = {"q": (2, 1, 32), "k": (5, page, 32), "v": (5, page, 32), "new_k": (2, 1, 32), "new_v": (2, 1, 32)}
        self.arrays = {name: rng.standard_normal(shape).astype(dtype.np) for name, shape in draw.items()}
        self.arrays |= {"table": np.array([[4, 0, 0], [2, 0, 0]]), "past": np.array([page + 1, 2])}
        self.page, self.dtype = page, dtype

    def graph(self, *, symbolic: bool) -> Graph:
        b, s, p, n = (sym(name, 0) for name in "BSPN") if symbolic else (2, 1, 5, 3)
        shapes: dict[str, tuple[Any, ...]] = {
            "q": (b, s, 32),
            "k": (p, self.page, 32),
            "v": (p, self.page, 32),
            "new_k": (b, s, 32),
        }
        shapes |= {"new_v": (b, s, 32), "table": (b, n), "past": (b,)}
        g = Graph("paged")
        inputs = [g.input(x, shapes[x], i64 if x in ("table", "past") else self.dtype) for x in shapes]
        return g.outputs(ops.paged_attention(*inputs, num_heads=2))


def test_mistakes() -> None:
    g = Graph("g")
    q, pool, new = g.input("q", f32[2, 1, 8]), g.input("pool", f32[4, 16, 8]), g.input("new", f32[2, 1, 8])
    table, past = g.input("table", i64[2, 3]), g.input("past", i64[2])
    wide = g.input("wide", f64[2, 1, 8])
    ops.paged_attention(q, pool, pool, new, new, table, past, num_heads=2)
    with pytest.raises(ShapeError, match="values is"):
        ops.paged_attention(q, pool, g.input("other", f32[4, 8, 8]), new, new, table, past, num_heads=2)
    with pytest.raises(ShapeError, match="keys is"):
        ops.paged_attention(q, pool, pool, new, new, table, past, num_heads=2, kv_heads=1)
    with pytest.raises(DTypeError, match="not equal floats"):
        ops.paged_attention(q, pool, pool, wide, new, table, past, num_heads=2)
    with pytest.raises(DTypeError, match="i64"):
        ops.paged_attention(q, pool, pool, new, new, table, new[:, 0, 0], num_heads=2)


# ------------------------------------------------------------------------------------------------------ rows that enter


def updated(device: str, dtype: DType = f32) -> CompiledGraph:
    g = Graph("updated")
    b, s, p, n = sym("B", 1), sym("S", 1), sym("P", 1), sym("N", 1)
    pool, new = g.input("pool", (p, PAGE, 8), dtype), g.input("new", (b, s, 8), dtype)
    table, past = g.input("table", (b, n), i64), g.input("past", (b,), i64)
    return Session(device).compile(g.outputs(ops.paged_update(pool, new, table, past)))


@pytest.mark.parametrize("device", ["cpu", "reference", "xla"])
def test_new_rows_go_to_their_pages_and_nothing_else_changes(device: str, rng: np.random.Generator) -> None:
    graph = updated(device)
    for past, count in (([0, 15, 40], 1), ([3, 16], 33), ([0], 16)):
        table = rng.permutation(20)[: 5 * len(past)].reshape(len(past), 5).astype(np.int64)
        pool = rng.standard_normal((20, PAGE, 8)).astype(np.float32)
        new = rng.standard_normal((len(past), count, 8)).astype(np.float32)
        want = pool.copy()
        for b, first in enumerate(past):
            for i in range(count):
                want[table[b, (first + i) // PAGE], (first + i) % PAGE] = new[b, i]
        feeds = {"pool": pool, "new": new, "table": table, "past": np.array(past, np.int64)}
        assert np.array_equal(graph.run(feeds)[0], want)
        if device == "cpu":
            graph.run_into(feeds, [pool])  # in place
            assert np.array_equal(pool, want)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_rows_without_a_place_are_errors(device: str) -> None:
    graph = updated(device)
    right = {"pool": np.zeros((4, PAGE, 8), np.float32), "new": np.zeros((1, 2, 8), np.float32),
             "table": np.array([[1, 9]]), "past": np.array([13])}  # fmt: skip
    graph.run(right)  # the second page is not needed
    for name, value, message in (("past", 15, "page"), ("past", 31, "tokens"), ("past", -1, "tokens")):
        with pytest.raises(IndexRangeError, match=message):
            graph.run({**right, name: np.array([value])})
    with pytest.raises(ShapeError, match="a pool has pages"):
        ops.paged_update(np.zeros((0, 4, 8), "f"), np.zeros((1, 1, 8), "f"), np.zeros((1, 1), "i8"), np.zeros(1, "i8"))
