"""Random graphs: compiled native code equals the interpreter in f64, for the whole pipeline, with each pass off, with
fusion off, for gradients, in double precision and with symbolic sizes. `make fuzz` runs as many as asked, from a seed.
"""

from collections.abc import Callable

import numpy as np
import pytest

from strata import ops
from strata.core import f32, f64, sym
from strata.mir import Graph, Value, evaluate
from strata.passes import PassContext, default_passes
from strata.runtime import CompileOptions, Session
from strata.transforms import vjp

UNARY = ["relu", "tanh", "sigmoid", "exp", "abs", "negative", "square", "sin", "gelu", "silu"]
BINARY = ["add", "subtract", "multiply", "maximum", "minimum"]
PASSES = sorted({p.name for p in default_passes(PassContext())})
TOLERANCE = {"f32": 1e-4, "f64": 1e-9}


def random_graph(
    seed: int, length: int = 14, dtype=f32, *, smooth: bool = False
) -> tuple[Graph, dict[str, np.ndarray]]:
    """A graph of element-wise ops, movements, reductions, softmaxes, norms and products over small tensors."""
    rng = np.random.default_rng(seed)
    g = Graph(f"random{seed}")
    sizes = [int(s) for s in rng.choice([1, 2, 3, 4, 5, 7, 8, 16, 17, 33], 3)]
    feeds: dict[str, np.ndarray] = {}
    pool: list[Value] = []
    for i in range(3):
        shape = tuple(int(rng.choice(sizes)) for _ in range(int(rng.integers(1, 4))))
        declare = g.input if i < 2 else g.param
        pool.append(declare(f"x{i}", shape, dtype))
        feeds[f"x{i}"] = (rng.standard_normal(shape) * 0.5).astype(dtype.np)
    for _ in range(length):
        made = random_step(rng, pool, g, feeds, smooth)
        if made is not None:
            pool.append(made)
    outputs = [pool[-1], pool[int(rng.integers(3, len(pool)))]] if len(pool) > 3 else pool[-1:]
    return g.outputs(*outputs), feeds


def random_step(
    rng: np.random.Generator, pool: list[Value], g: Graph, feeds: dict[str, np.ndarray], smooth: bool
) -> Value | None:
    x = pool[int(rng.integers(len(pool)))]
    y = pool[int(rng.integers(len(pool)))]
    axis = int(rng.integers(x.ndim)) if x.ndim else 0
    kind = rng.choice(["unary", "binary", "reduce", "move", "softmax", "matmul", "where", "norm", "dense", "attention"])
    unary = [u for u in UNARY if not smooth or u not in ("relu", "abs")]
    binary = [b for b in BINARY if not smooth or b not in ("maximum", "minimum")]
    match kind:
        case "unary":
            return getattr(ops, str(rng.choice(unary)))(x * 0.5)
        case "binary" if x.shape == y.shape or not y.ndim:
            return getattr(ops, str(rng.choice(binary)))(x, y)
        case "binary" if x.ndim and y.ndim and x.shape[-1] == y.shape[-1] and (x.ndim == 1 or y.ndim == 1):
            return getattr(ops, str(rng.choice(binary)))(x, y)
        case "reduce" if x.ndim:
            reduction = str(rng.choice(["mean", "sum"] if smooth else ["mean", "max", "sum"]))
            return getattr(ops, reduction)(x, axis=axis, keepdims=bool(rng.integers(2))) * 0.3
        case "move" if x.ndim > 1:
            return [
                lambda: ops.transpose(x, [int(p) for p in rng.permutation(x.ndim)]),
                lambda: ops.reshape(x, (-1,)),
                lambda: ops.flip(x, axis),
                lambda: ops.concat([x, x], axis=axis) if x.type.size < 4096 else x,
                lambda: ops.narrow(x, axis, 0, max(1, x.shape[axis] // 2)),
            ][int(rng.integers(5))]()
        case "softmax" if x.ndim:
            return ops.softmax(x, axis=axis)
        case "norm" if x.ndim:
            return (ops.layer_norm if rng.integers(2) else ops.rms_norm)(x, axis=axis, eps=1e-2)
        case "matmul" if x.ndim == 2:
            return ops.matmul(x, ops.transpose(x)) * 0.1 if rng.integers(2) else ops.matmul(ops.transpose(x), x) * 0.1
        case "dense" if x.ndim >= 2 and x.type.size < 4096:
            name = f"w{len(g.params)}"
            w = g.param(name, (x.shape[-1], int(rng.choice([8, 9, 16]))), x.dtype)
            feeds[name] = (rng.standard_normal(w.shape) * 0.2).astype(x.dtype.np)
            return x @ w
        case "attention" if x.ndim == 3:
            scores = ops.matmul(x, ops.transpose(x, (0, 2, 1))) * 0.3
            return ops.matmul(ops.softmax(scores, axis=-1), x)
        case "where" if not smooth:
            return ops.where(x > 0, x, x * 0.1)
    return None


def check(graph: Graph, feeds: dict[str, np.ndarray], options: CompileOptions | None = None, note: str = "") -> None:
    """Compile, run and compare with the interpreter in f64."""
    compiled = Session("cpu").compile(graph, options)
    compiled.set_params({n: feeds[n] for n in graph.param_names})
    results = compiled.run({n: feeds[n] for n in graph.input_names})
    for got, want in zip(results, evaluate(graph, feeds, wide=True), strict=True):
        close = TOLERANCE[graph.results[0].dtype.name]
        scale = max(1.0, float(np.max(np.abs(want), initial=0.0)))
        np.testing.assert_allclose(
            got, want, rtol=close, atol=close * scale, err_msg=f"{note}\n{graph}\n{compiled.lir}"
        )


def check_seed(seed: int, options: CompileOptions | None = None) -> None:
    check(*random_graph(seed), options, f"seed {seed} {options}")


def check_double(seed: int) -> None:
    check(*random_graph(seed, dtype=f64), note=f"seed {seed} f64")


def check_gradient(seed: int) -> None:
    """The gradient of a random graph, in f64: forward and backward through one pipeline."""
    graph, feeds = random_graph(seed, length=8, dtype=f64, smooth=True)
    backward = vjp(graph, list(graph.input_names))
    rng = np.random.default_rng(seed)
    seeds = {
        x.node.op.key: rng.standard_normal(x.shape) for x in backward.inputs if x.node.op.key.startswith("d_output")
    }
    check(backward, {**feeds, **seeds}, note=f"seed {seed} gradient")


def symbolic_step(rng: np.random.Generator, x: Value, y: Value, w: Value) -> Value:
    """A value with the rows of x and y, which may be a symbol."""
    choices: list[Callable[[], Value]] = [
        lambda: getattr(ops, str(rng.choice(UNARY)))(x * 0.5),
        lambda: x * y,
        lambda: x + y,
        lambda: ops.softmax(x, axis=-1),
        lambda: ops.layer_norm(x, eps=1e-2),
        lambda: x @ w * 0.3,
        lambda: ops.mean(x, axis=-1, keepdims=True) + y,
        lambda: ops.softmax(x, axis=0),
        lambda: ops.concat([x, y], axis=0)[: x.shape[0]],
    ]
    return choices[int(rng.integers(len(choices)))]()


def check_symbolic(seed: int) -> None:
    """A leading symbolic size, run at several sizes by one compile."""
    rng = np.random.default_rng(seed)
    width = int(rng.choice([4, 8, 17]))
    g = Graph(f"symbolic{seed}")
    rows = sym("N", 1, 64)
    pool = [g.input("x", (rows, width)), g.input("y", (rows, width))]
    w = g.param("w", (width, width))
    for _ in range(8):
        x, y = (pool[int(rng.integers(len(pool)))] for _ in range(2))
        pool.append(symbolic_step(rng, x, y, w))
    graph = g.outputs(pool[-1], pool[-2])
    compiled = Session("cpu").compile(graph)
    weights = (rng.standard_normal((width, width)) * 0.3).astype(np.float32)
    compiled.set_params({"w": weights})
    for count in (1, 2, 7, 33, 64):
        feeds = {n: (rng.standard_normal((count, width)) * 0.5).astype(np.float32) for n in ("x", "y")}
        for got, want in zip(compiled.run(feeds), evaluate(graph, {**feeds, "w": weights}, wide=True), strict=True):
            np.testing.assert_allclose(
                got, want, rtol=1e-4, atol=1e-4, err_msg=f"seed {seed} N={count}\n{graph}\n{compiled.lir}"
            )


def check_everything(seed: int) -> None:
    """One seed through every way of compiling it."""
    check_seed(seed)
    check_seed(seed, CompileOptions(fusion=False))
    check_seed(seed, CompileOptions(exact=False))
    check_seed(
        seed,
        CompileOptions(skip_passes=(PASSES[seed % len(PASSES)],))
        if PASSES[seed % len(PASSES)] != "decompose"
        else None,
    )
    check_double(seed)
    check_gradient(seed)
    check_symbolic(seed)


@pytest.mark.parametrize("seed", range(60))
def test_compiled_equals_interpreter(seed: int) -> None:
    check_seed(seed)


@pytest.mark.parametrize("seed", range(60, 75))
def test_without_optimisation(seed: int) -> None:
    check_seed(seed, CompileOptions(passes="decompose"))


@pytest.mark.parametrize("skipped", PASSES)
def test_without_each_pass(skipped: str) -> None:
    for seed in range(100, 104):
        check_seed(seed, CompileOptions(skip_passes=(skipped,)))


@pytest.mark.parametrize("seed", range(200, 208))
def test_without_fusion(seed: int) -> None:
    check_seed(seed, CompileOptions(fusion=False))


@pytest.mark.parametrize("seed", range(300, 308))
def test_with_inexact_rules(seed: int) -> None:
    check_seed(seed, CompileOptions(exact=False))


@pytest.mark.parametrize("seed", range(400, 412))
def test_double_precision(seed: int) -> None:
    check_double(seed)


@pytest.mark.parametrize("seed", range(500, 515))
def test_gradients(seed: int) -> None:
    check_gradient(seed)


@pytest.mark.parametrize("seed", range(600, 610))
def test_symbolic_sizes(seed: int) -> None:
    check_symbolic(seed)


@pytest.mark.parametrize("seed", [409, 1051, 5129, 20185])
def test_seeds_that_failed_once(seed: int) -> None:
    """A sum computed again inside a sum; views of size one; rows with gaps; a product under a broadcast."""
    check_everything(seed)
