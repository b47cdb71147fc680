"""Whole programs through Triton's interpreter against the oracle: sizes that are symbols, gradients, attention, draws.

TRITON_INTERPRET=1 python -m tests.backends.triton_programs          a minute
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from strata import ops
from strata.backends import register_backend
from strata.backends.triton.backend import interpreted
from strata.core import bf16, f16, f32, f64, i8, i64, sym, u32, u64
from strata.mir import Graph, Value, evaluate
from strata.runtime import Session
from strata.transforms import grad_with_loss
from tests.differential.draw import draw_program
from tests.differential.paths import check
from tests.fuzz.pattern_graphs import pattern_graph

DEVICE = "triton_interpreter"
SIZES = ((1, 300, 40), (17, 1, 33), (33, 70, 65), (130, 129, 64), (8, 16, 8), (0, 5, 3), (3, 0, 4))
RNG = np.random.default_rng(11)


def normal(*shape: int) -> np.ndarray:
    return (0.5 * RNG.standard_normal(shape)).astype(np.float32)


def run(graph: Graph, given: dict[str, np.ndarray]) -> list[np.ndarray]:
    compiled = Session(DEVICE).compile(graph)
    for name in graph.param_names:
        compiled.set_param(name, given[name])
    return compiled.run({k: v for k, v in given.items() if k in graph.input_names})


def agree(graph: Graph, given: dict[str, np.ndarray], close: float = 1e-4) -> list[np.ndarray]:
    """Runs a program and compares it with its meaning in f64."""
    found = run(graph, given)
    with np.errstate(all="ignore"):
        wanted = evaluate(graph, given, wide=True)
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        if got.dtype.kind in "iub":
            np.testing.assert_array_equal(got, want)
        else:
            scale = max(1.0, float(np.max(np.abs(want), initial=0)))
            np.testing.assert_allclose(got.astype(want.dtype), want, rtol=close, atol=close * scale)
    return found


def block(x: Value, weights: dict[str, Value]) -> Value:
    """A decoder block of width 32 with four heads."""
    h = ops.layer_norm(x, weights["g"], weights["b"])
    q, k, v = (ops.matmul(h, weights[name]) for name in ("wq", "wk", "wv"))
    x = x + ops.matmul(ops.attention(q, k, v, num_heads=4, causal=True), weights["wo"])
    h = ops.layer_norm(x, weights["g"], weights["b"])
    return x + ops.matmul(ops.gelu(ops.matmul(h, weights["up"])), weights["down"])


SHAPES = {"g": (32,), "b": (32,), "wq": (32, 32), "wk": (32, 32), "wv": (32, 32), "wo": (32, 32),
          "up": (32, 64), "down": (64, 32)}  # fmt: skip


def decoder(batch: Any, length: Any) -> Graph:
    g = Graph("decoder")
    x = g.input("x", f32[batch, length, 32])
    weights = {name: g.param(name, f32[shape]) for name, shape in SHAPES.items()}
    return g.outputs(block(x, weights))


def weights_of() -> dict[str, np.ndarray]:
    return {name: normal(*shape) for name, shape in SHAPES.items()}


def a_decoder_for_every_size() -> None:
    graph, weights = decoder(sym("B", 1), sym("T", 1)), weights_of()
    compiled = Session(DEVICE).compile(graph)
    assert not compiled.host_steps
    for name, array in weights.items():
        compiled.set_param(name, array)
    for batch, length in ((1, 1), (2, 5), (3, 17), (1, 40)):
        x = normal(batch, length, 32)
        (want,) = evaluate(decoder(batch, length), weights | {"x": x}, wide=True)
        np.testing.assert_allclose(compiled.run({"x": x})[0], want, rtol=1e-4, atol=1e-4)


def a_training_step() -> None:
    g = Graph("loss")
    x, target = g.input("x", f32[2, 6, 32]), g.input("target", f32[2, 6, 32])
    weights = {name: g.param(name, f32[shape]) for name, shape in SHAPES.items()}
    g.outputs(ops.mean(ops.square(block(x, weights) - target)))
    agree(
        grad_with_loss(g, tuple(SHAPES)),
        weights_of() | {"x": normal(2, 6, 32), "target": normal(2, 6, 32), "d_output": np.float32(1)},
    )


def attention_takes_its_scale_and_softcap() -> None:
    """Each changes the result, and every result is the oracle's."""
    seen = []
    given = {name: normal(1, 9, 16) for name in ("q", "k", "v")}
    for options in (
        {},
        {"scale": 0.7},
        {"softcap": 0.8},
        {"scale": 0.7, "softcap": 0.8},
        {"window": 3, "causal": True},
    ):
        g = Graph("attention")
        q, k, v = (g.input(name, f32[1, 9, 16]) for name in "qkv")
        seen += agree(g.outputs(ops.attention(q, k, v, num_heads=2, **options)), given)
    for at, one in enumerate(seen):
        for other in seen[:at]:
            assert np.abs(one - other).max() > 1e-3


def samples_are_drawn_by_their_probabilities() -> None:
    g = Graph("greedy")
    logits = g.input("logits", f32[5, 7])
    given = {"logits": normal(5, 7) * 4}
    (drawn,) = agree(g.outputs(ops.sample(logits, greedy=True)), given)
    np.testing.assert_array_equal(drawn, given["logits"].argmax(1))
    rows, chances = 4000, np.array([0.5, 0.25, 0.125, 0.125], np.float32)
    counts = []
    for seed in (1, 1, 2):  # one key draws one sequence, another key another
        g = Graph("draw")
        logits = g.input("logits", f32[rows, 4])
        given = {"logits": np.broadcast_to(np.log(chances), (rows, 4)).copy()}
        (drawn,) = run(g.outputs(ops.sample(logits, ops.random.key(seed))), given)
        counts.append(drawn)
        share = np.bincount(drawn.ravel(), minlength=4) / rows
        np.testing.assert_allclose(share, chances, atol=4 * np.sqrt(0.25 / rows))
    np.testing.assert_array_equal(counts[0], counts[1])
    assert (counts[0] != counts[2]).mean() > 0.3


def products_of_every_type_and_shape() -> None:
    for dtype, close in ((f32, 1e-5), (f64, 1e-12), (f16, 4e-3), (bf16, 3e-2)):
        for rows, terms, columns in (
            (1, 300, 40),
            (17, 1, 33),
            (33, 70, 65),
            (130, 129, 64),
            (8, 16, 8),
            (0, 5, 3),
            (3, 0, 4),
        ):
            g = Graph("product")
            x, y = g.input("x", dtype[rows, terms]), g.input("y", dtype[columns, terms])
            g.outputs(ops.relu(ops.matmul(x, ops.transpose(y, (1, 0)))))
            given = {"x": normal(rows, terms).astype(dtype.np), "y": normal(columns, terms).astype(dtype.np)}
            agree(g, given, close)
    g = Graph("whole")
    x, y = g.input("x", (33, 70), "i8"), g.input("y", (70, 20), "i8")
    g.outputs(ops.matmul(ops.cast(x, "i32"), ops.cast(y, "i32")))
    agree(
        g, {name: RNG.integers(-128, 128, shape).astype(np.int8) for name, shape in (("x", (33, 70)), ("y", (70, 20)))}
    )


def long_reductions_and_scans() -> None:
    """Rows that no block holds, in one piece and in parts; NaN and ties in them."""
    for shape in ((2, 5000), (40000,), (5000, 3), (3, 9001)):
        g = Graph("long")
        x = g.input("x", f32[shape])
        axes = (len(shape) - 1,)
        g.outputs(
            ops.sum(x, axis=axes), ops.max(x, axis=axes), ops.argmax(x, axis=axes[0]),
            ops.cumsum(x, axis=axes[0]), ops.softmax(x, axis=axes[0]), ops.sum(ops.abs(x)),
            ops.prod(ops.sign(x), axis=0),
        )  # fmt: skip
        array = np.round(normal(*shape), 2)
        agree(g, {"x": array})
        array.reshape(-1)[array.size // 2] = np.nan
        g = Graph("nan")
        x = g.input("x", f32[shape])
        g.outputs(ops.max(x, axis=axes), ops.min(x, axis=axes), ops.argmin(x, axis=axes[0]))
        agree(g, {"x": array})


def exponentials_of_long_rows() -> None:
    """Rows that are not held at once: a maximum and a sum in one loop, with infinities, NaN and one of each alone."""
    inf, nan = float("inf"), float("nan")
    rows = 20 * RNG.standard_normal((11, 9000)).astype(np.float32)
    rows[1, 1:], rows[2, :], rows[3, 5], rows[4, 8999], rows[5, 100:] = -inf, -inf, inf, nan, -inf
    rows[6], rows[7, ::2], rows[8], rows[9, :5000] = -3e38, 3e38, 3e38, -1000
    for build in (lambda x: ops.softmax(x, axis=-1), lambda x: ops.logsumexp(x, axis=-1), ops.log_softmax):
        for kind in (f32, bf16):
            g = Graph("rows")
            x = g.input("x", kind[rows.shape])
            g.outputs(build(x))
            given = {"x": rows.astype(kind.np)}
            (found,) = run(g, given)
            with np.errstate(all="ignore"):
                (wanted,) = evaluate(g, given)
            close = 1e-5 if kind is f32 else 1e-2
            np.testing.assert_allclose(found.astype(np.float32), wanted.astype(np.float32), rtol=close, atol=close)


def ids_far_and_near() -> None:
    g = Graph("ids")
    table, ids = g.input("table", f32[50, 24]), g.input("ids", i64[sym("N", 0)])
    picked = ops.gather(table, ids, axis=0)
    g.outputs(picked * 2, ops.scatter_add(picked, ids, 50))
    for count in (0, 1, 37):
        agree(g, {"table": normal(50, 24), "ids": RNG.integers(0, 50, count)})
    for dtype in (f32, bf16):  # many rows, most of which no id names
        g = Graph("rows")
        x, ids = g.input("x", dtype[sym("N", 0), 20]), g.input("ids", i64[sym("N", 0)])
        g.outputs(ops.scatter_add(x * 2, ids, 300))
        for count in (0, 1, 40, 1100):
            given = {"x": normal(count, 20).astype(dtype.np), "ids": RNG.integers(250, 270, count)}
            agree(g, given, 1e-5 if dtype is f32 else 2e-2)
    given["ids"][100:] = 255  # more in a row than are looked at together
    agree(g, given, 6e-2)
    given["x"][3, 2] = np.inf  # stays in its row
    assert np.argwhere(~np.isfinite(run(g, given)[0].astype(np.float32))).tolist() == [[given["ids"][3], 2]]


def sorts_and_running_extremes() -> None:
    """Rows of one run and of several, of sizes that are known, and that are not."""
    x = np.round(normal(3, 70), 1)  # many are equal
    x[0, ::9], x[0, 1::20] = np.nan, np.inf
    for shape in ((3, 70), (sym("R", 1), sym("N", 5))):
        g = Graph("sorted")
        value = g.input("x", f32[shape])
        best, worst = ops.topk(value, 4), ops.topk(value, 3, largest=False)
        extremes = (*ops.cummax(value, 1), *ops.cummin(value, 1))
        g.outputs(ops.sort(value), ops.argsort(value, descending=True), *best, *worst, *extremes)
        exactly(g, {"x": x})
    long = np.round(normal(1, 2051), 1)
    g = Graph("merged")
    g.outputs(*ops.topk(g.input("x", f32[1, sym("N", 5)]), 9))
    exactly(g, {"x": long})


def orders_along_any_axis() -> None:
    """The phases of a sort may be split once more, each with scratch of its own: before the last axis they are."""
    for dtype in (u64, u32, i8):
        for shape, axis in (((33, 16), 0), ((5, 15, 15), 1), ((33, 16), 1)):
            g = Graph("columns")
            value = g.input("x", dtype[shape])
            g.outputs(ops.argsort(value, axis=axis), ops.sort(value, axis=axis))
            exactly(g, {"x": RNG.integers(0, 100, shape).astype(dtype.np)})


def exactly(g: Graph, given: dict[str, np.ndarray]) -> None:
    """Nothing runs on the host, and the results have no rounding."""
    compiled = Session(DEVICE).compile(g)
    assert not compiled.host_steps
    for got, want in zip(compiled.run(given), evaluate(g, given), strict=True):
        np.testing.assert_array_equal(got, want)


def transposes_and_windows() -> None:
    """Tiles that are read across, with tails; f16 windows with borders."""
    x, w = normal(3, 45, 70), normal(9, 5, 3, 3)
    n = sym("N", 1)
    for shape in ((3, 45, 70), (3, n, 70)):
        g = Graph("turned")
        value = g.input("x", f32[shape])
        g.outputs(ops.transpose(value, (0, 2, 1)) * 2, ops.transpose(value, (2, 1, 0)) + 1)
        agree(g, {"x": x})
    g = Graph("windows")
    value, weight = g.input("x", f16[2, 5, 9, 11]), g.input("w", f16[9, 5, 3, 3])
    g.outputs(ops.relu(ops.conv(value, weight, padding=1)))
    agree(g, {"x": normal(2, 5, 9, 11).astype(np.float16), "w": w.astype(np.float16)}, 4e-3)


def random_graphs() -> None:
    for seed in range(0, 60, 3):
        check(draw_program(seed), ["triton"])
        if seed < 12:
            agree(*pattern_graph(seed))


PROGRAMS: tuple[Callable[[], None], ...] = (
    a_decoder_for_every_size,
    a_training_step,
    attention_takes_its_scale_and_softcap,
    samples_are_drawn_by_their_probabilities,
    products_of_every_type_and_shape,
    long_reductions_and_scans,
    exponentials_of_long_rows,
    ids_far_and_near,
    sorts_and_running_extremes,
    orders_along_any_axis,
    transposes_and_windows,
    random_graphs,
)


def main(names: list[str]) -> int:
    register_backend(DEVICE, interpreted())
    chosen = [p for p in PROGRAMS if not names or p.__name__ in names]
    for program in chosen:
        program()
        print(f"{program.__name__.replace('_', ' ')}: agrees")
    print(f"{len(chosen)} programs in Triton's interpreter agree")
    return 0 if chosen else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
