"""Compiled programs have the same bits with sizes as symbols, with bounds, bound, as numbers, and by `jit`; on any
number of threads. A few seeds are fixed, a few are drawn afresh: a failure prints its own."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.config import using
from strata.core import Dim, as_dtype
from strata.errors import ShapeError
from strata.mir import Graph
from strata.runtime import CompileOptions, Session
from tests.backends.guard_pages import DEVICES
from tests.fuzz.open_sizes import SIZES, OpenProgram, ops

FRESH = 4


def graph_of(program: OpenProgram, n: Dim) -> Graph:
    g = Graph("open")
    values = [
        (g.input if name.startswith("x") else g.param)(name, shape, program.dtype)
        for name, shape in program.shapes(n).items()
    ]
    return g.outputs(*program(*values))


def run(compiled: Any, feeds: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    compiled.set_params({name: feeds[name] for name in ("w", "v")})
    return tuple(map(np.asarray, compiled.run({name: feeds[name] for name in ("x0", "x1")})))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether arrays are equal bit by bit; any NaN is as good as another."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    wide = [np.asarray(x, np.float64) for x in (a, b)]
    both = np.isnan(wide[0]) & np.isnan(wide[1])
    bits = [np.where(both, 0.0, x).view(np.uint64) for x in wide]
    return bool(np.array_equal(bits[0], bits[1]))


def check_open(seed: int, sizes: Sequence[int] | None = None, *, device: str = "cpu") -> None:
    program = OpenProgram(seed)
    rng = np.random.default_rng(seed)
    wanted = list(sizes) if sizes is not None else [int(n) for n in rng.choice(SIZES, 3, replace=False)]
    session = Session(device)
    graph = graph_of(program, st.sym("n", 0))
    first = session.compile(graph)
    bounded = session.compile(graph_of(program, st.sym("n", 0, 256)))
    by_threads = {}
    for threads in (1, 2, 4):
        with using(num_threads=threads):
            by_threads[threads] = Session(device).compile(graph_of(program, st.sym("n", 0)))
    for n in wanted:
        feeds = program.feeds(n)
        try:
            static = session.compile(graph_of(program, n))
        except ShapeError:
            assert n == 0  # a norm over nothing: refused where that is known
            continue
        others = {
            "bounded": bounded,
            "bound": session.compile(graph_of(program, st.sym("n", 0)), CompileOptions(dim_binding={"n": n})),
            "static": static,
        }
        results = run(first, feeds)
        for name, other in others.items():
            for at, (got, want) in enumerate(zip(run(other, feeds), results, strict=True)):
                assert same_bits(got, want), f"seed {seed}, n = {n}: result {at} of the {name} program\n{graph}"
        for threads, compiled in by_threads.items():
            with using(num_threads=threads):
                again = run(compiled, feeds)
            assert all(map(same_bits, again, results)), f"seed {seed}, n = {n}: {threads} threads\n{graph}"


@pytest.mark.few(8)
@pytest.mark.parametrize("seed", range(24))
def test_what_is_known_changes_no_bit(seed: int) -> None:
    check_open(seed)


@pytest.mark.parametrize("turn", range(FRESH))
def test_fresh_seeds(turn: int) -> None:
    check_open(secrets.randbelow(1 << 31))


@pytest.mark.parametrize("seed", [126, 135, 136, 164, 312, 425, 437, 526])
def test_seeds_that_differed_once(seed: int) -> None:
    """Views of size one; products that were fused; narrow floats; few rows; a flat sum cut in two; unrolled windows."""
    check_open(seed, (2, 3, 8, 17, 64))


NORMS = {
    "mean": lambda x: ops.mean(x, axis=-1),
    "variance": lambda x: ops.var(x, axis=-1),
    "normalised": lambda x: (
        (x - ops.mean(x, axis=-1, keepdims=True)) / ops.sqrt(ops.var(x, axis=-1, keepdims=True) + 1e-5)
    ),
    "layer_norm": ops.layer_norm,
    "softmax": ops.softmax,
    "cumsum": lambda x: ops.cumsum(x, axis=-1),
    "columns": lambda x: ops.sum(x, axis=0),
    "all": lambda x: ops.sum(x * x),
    "gram": lambda x: ops.matmul(x, ops.transpose(x)),
}


@pytest.mark.few(9)
@pytest.mark.parametrize("width", [1, 3, 8, 40])
@pytest.mark.parametrize("name", NORMS)
def test_short_rows(name: str, width: int, rng: np.random.Generator) -> None:
    def compiled(n: Dim) -> Any:
        g = Graph(name)
        return Session("cpu").compile(g.outputs(NORMS[name](g.input("x", (n, width), "f32"))))

    open_ = compiled(st.sym("n", 1))
    for n in (1, 2, 3, 8, 13, 33, 130, 5000):
        x = rng.standard_normal((n, width)).astype(np.float32)
        (got,), (want,) = open_.run(x=x), compiled(n).run(x=x)
        assert same_bits(np.asarray(got), np.asarray(want)), n


# what is computed, and the shapes of what it is computed from: 0 is the size that is open
ONES: dict[str, tuple[Any, ...]] = {
    "a matrix times a column": (ops.matmul, (40, 70), (70, 0)),
    "a row times a matrix": (ops.matmul, (0, 70), (70, 40)),
    "a row times a column": (ops.matmul, (0, 70), (70, 0)),
    "a row times a matrix that lies along": (lambda x, y: ops.matmul(x, ops.transpose(y)), (0, 70), (40, 70)),
    "a column that lies along": (lambda x, y: ops.matmul(x, ops.transpose(y)), (40, 70), (0, 70)),
    "a vector times columns": (ops.matmul, (70,), (70, 0)),
    "rows times a vector": (ops.matmul, (0, 70), (70,)),
    "columns of an einsum": (lambda x, y: ops.einsum("ij,jk->ik", x, y), (40, 70), (70, 0)),
    "a gram product": (lambda x: ops.matmul(x, ops.transpose(x)), (3, 0)),
    "squares": (lambda x: ops.sum(x * x), (7, 0)),
    "a product of all": (lambda x: ops.prod(ops.cos(x) + 1.0), (4, 0, 5)),
    "a sum that keeps planes": (lambda x: ops.sum(x, axis=(0, 1), keepdims=True), (4, 5, 0)),
    "a variance of planes": (lambda x: ops.var(x, axis=(0, 1)), (4, 5, 0)),
    "a variance around": (lambda x: ops.var(x, axis=(0, 1)), (4, 0, 5)),
    "means of columns": (lambda x: x - ops.mean(x, axis=0, keepdims=True), (7, 0)),
    "a flat sum": (lambda x: ops.sum(ops.reshape(x, (-1,))), (7, 0, 3)),
}


@pytest.mark.parametrize("name", ONES)
def test_axes_of_few_elements(name: str, rng: np.random.Generator) -> None:
    """An axis of one element is an axis, known or not: it decides over the order of sums like any other."""
    fn, *shapes = ONES[name]

    def compiled(n: Dim) -> Any:
        g = Graph("ones")
        sized = [tuple(n if d == 0 else d for d in shape) for shape in shapes]
        return Session("cpu").compile(g.outputs(fn(*(g.input(f"x{i}", s, "f32") for i, s in enumerate(sized)))))

    open_ = compiled(st.sym("n", 1))
    for n in (1, 2, 3, 13, 17):
        feeds = {f"x{i}": rng.standard_normal([d or n for d in s]).astype(np.float32) for i, s in enumerate(shapes)}
        (got,), (want,) = open_.run(feeds), compiled(n).run(feeds)
        assert same_bits(np.asarray(got), np.asarray(want)), n


DRAWN = {
    **{name: getattr(ops, name) for name in ("tanh", "atan", "sigmoid", "log", "exp", "sin", "erf", "rsqrt")},
    "hypot": lambda x: ops.hypot(x, x + 1.0),
    "power": lambda x: ops.power(x, 1.7),
    "sum": ops.sum,
    "mean": ops.mean,
    "std": ops.std,
    "softmax": ops.softmax,
    "logcumsumexp": lambda x: ops.logcumsumexp(x, axis=0),
}


@pytest.mark.parametrize("name", DRAWN)
def test_what_is_constant_changes_no_bit(name: str) -> None:
    """Random numbers of a known key are constants where their count is known."""

    def compiled(n: Dim) -> Any:
        g = Graph("drawn")
        x = g.input("x", (n,), "f32")
        return Session("cpu").compile(g.outputs(DRAWN[name](ops.random.uniform(ops.random.key(7), x.shape)), x))

    open_ = compiled(st.sym("n", 1))
    for n in (1, 2, 3, 4, 8, 17, 40, 64):
        x = np.zeros(n, np.float32)
        (got, _), (want, _) = open_.run(x=x), compiled(n).run(x=x)
        assert same_bits(np.asarray(got), np.asarray(want)), n


def attends(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    scores = ops.matmul(q, ops.swapaxes(k, -1, -2)) * 0.3
    return ops.matmul(ops.softmax(scores if mask is None else scores + mask, axis=-1), v)


def attends_where(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = ops.matmul(q, ops.swapaxes(k, -1, -2)) / 1.7
    return ops.matmul(ops.softmax(ops.where(mask > 0, scores, -3e4), axis=-1), v)


def attends_across(q: Any, k: Any, v: Any) -> Any:
    return ops.transpose(attends(*(ops.transpose(x, (0, 2, 1, 3)) for x in (q, k, v))), (0, 2, 1, 3))


# queries, keys, values and perhaps a mask: 0 is the size that is open
ATTENTIONS: dict[str, tuple[Any, ...]] = {
    "heads of open width": (attends, (2, 9, 0), (2, 7, 0), (2, 7, 0)),
    "keys of open width": (attends, (2, 9, 0), (2, 7, 0), (2, 7, 5)),
    "values of open width": (attends, (2, 3, 9, 8), (2, 3, 7, 8), (2, 3, 7, 0)),
    "an open number of heads": (attends, (2, 0, 9, 8), (2, 0, 7, 8), (2, 0, 7, 8)),
    "heads behind tokens": (attends_across, (2, 9, 0, 8), (2, 7, 0, 8), (2, 7, 0, 8)),
    "all of one size": (attends, (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
    "one set of keys": (attends, (0, 9, 8), (1, 7, 8), (1, 7, 8)),
    "one set of queries": (attends, (1, 9, 8), (0, 7, 8), (0, 7, 8)),
    "keys for all heads": (attends, (2, 0, 9, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "a mask for each": (attends, (1, 9, 8), (1, 7, 8), (1, 7, 8), (0, 9, 7)),
    "a mask for each head": (attends, (2, 0, 9, 8), (2, 0, 7, 8), (2, 0, 7, 8), (0, 9, 7)),
    "a mask that adds rows": (attends, (2, 1, 8), (2, 7, 8), (2, 7, 8), (0, 7)),
    "a mask of keys": (attends_where, (2, 9, 0), (2, 7, 0), (2, 7, 0), (1, 7)),
    "a mask of open keys": (attends_where, (2, 9, 8), (2, 0, 8), (2, 0, 8), (1, 0)),
}  # fmt: skip


@pytest.mark.few(14)
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_of_open_heads(name: str, dtype: str, rng: np.random.Generator) -> None:
    """Attention is found whatever is known of its sizes, also where an axis of one element is spread."""
    fn, *shapes = ATTENTIONS[name]

    def compiled(n: Dim, device: str = "cpu") -> Any:
        g = Graph("attention")
        sized = [tuple(n if d == 0 else d for d in shape) for shape in shapes]
        return Session(device).compile(g.outputs(fn(*(g.input(f"x{i}", s, dtype) for i, s in enumerate(sized)))))

    open_ = compiled(st.sym("n", 0))
    for n in (0, 1, 2, 5, 8, 17):
        feeds = {f"x{i}": rng.standard_normal([d or n for d in s]) for i, s in enumerate(shapes)}
        feeds = {name: x.astype(as_dtype(dtype).np) for name, x in feeds.items()}
        (got,), (want,) = open_.run(feeds), compiled(n).run(feeds)
        assert same_bits(np.asarray(got), np.asarray(want)), n
        (meant,) = compiled(n, "reference").run(feeds)
        near = 1e-5 if dtype in ("f32", "f64") else 0.05
        np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(meant, np.float64), near, near)


def test_jit_and_its_buckets(rng: np.random.Generator) -> None:
    def f(x: st.Tensor) -> st.Tensor:
        return st.softmax(st.layer_norm(x)).cumsum(axis=-1).mean(axis=0)

    plain, bucketed = st.jit(f), st.jit(f, buckets={0: {0: [16, 64, 256]}})
    open_ = st.jit(f, max_variants=1, on_miss="bucket")
    for n in (3, 7, 13, 17, 33, 100):  # a square has no open form: it is interpreted
        x = rng.standard_normal((n, 8)).astype(np.float32)
        want = plain(x).numpy()
        assert same_bits(bucketed(x).numpy(), want)
        assert same_bits(open_(x).numpy(), want)


@pytest.mark.parametrize("count", [255, 256, 257, 4096, 16384, 16385, 100_003, 400_000])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_long_sums(count: int, dtype: str, rng: np.random.Generator) -> None:
    """Split over threads or not, in blocks or not."""
    x = rng.standard_normal(count).astype(as_dtype(dtype).np)
    results = []
    for shape in ((st.sym("n", 0),), (st.sym("n", 0, 1 << 20),), (count,)):
        g = Graph("long")
        compiled = Session("cpu").compile(g.outputs(ops.sum(g.input("x", shape, dtype))))
        results.append(np.asarray(compiled.run(x=x)[0]))
    assert all(same_bits(results[0], r) for r in results[1:])


@pytest.mark.parametrize("columns", [1, 2, 5, 64, 300])
def test_long_columns(columns: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3000, columns)).astype(np.float32)
    results = []
    for shape in ((st.sym("m", 0), st.sym("n", 0)), (3000, st.sym("n", 0)), (3000, columns)):
        g = Graph("columns")
        compiled = Session("cpu").compile(g.outputs(ops.sum(g.input("x", shape, "f32"), axis=0)))
        results.append(np.asarray(compiled.run(x=x)[0]))
    assert all(same_bits(results[0], r) for r in results[1:])


@pytest.mark.parametrize("shape", [(32, 3, 5000), (256, 4, 1024), (2, 3, 70_000), (5, 2, 40_000)])
def test_sums_around_a_kept_axis(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """Statistics of channels: with known sizes, each sum of an inner axis may be a thread's."""
    x = rng.standard_normal(shape).astype(np.float32)
    results = []
    for sizes in (tuple(map(st.sym, "mcn")), (shape[0], st.sym("c"), shape[2]), shape):
        g = Graph("channels")
        compiled = Session("cpu").compile(g.outputs(ops.var(g.input("x", sizes, "f32"), axis=(0, 2))))
        results.append(np.asarray(compiled.run(x=x)[0]))
    assert all(same_bits(results[0], r) for r in results[1:])
    np.testing.assert_allclose(results[0], x.astype(np.float64).var((0, 2)), rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["cumsum", "mean", "layer_norm"])
def test_bounds_of_a_row_change_no_bit(name: str, device: str, rng: np.random.Generator) -> None:
    """On every instruction set: in blocks or not, under masks or one by one."""

    def compiled(*shape: Dim) -> Any:
        g = Graph(name)
        return Session(device).compile(g.outputs(NORMS[name](g.input("x", shape, "f32"))))

    rows = st.sym("n", 1)
    several = [
        compiled(rows, st.sym("m", 1)),
        compiled(rows, st.sym("m", 1, 512)),
        compiled(rows, st.sym("m", 1, 6000)),
    ]
    for length in (5, 13, 31, 50, 100, 130, 300):
        x = rng.standard_normal((4, length)).astype(np.float32)
        want = np.asarray(compiled(4, length).run(x=x)[0])
        assert all(same_bits(np.asarray(c.run(x=x)[0]), want) for c in several), length
