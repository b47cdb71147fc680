"""Random graphs: compiled native code equals the interpreter, for the whole pipeline and with passes switched off."""

import numpy as np
import pytest

from strata import ops
from strata.mir import Graph, Value, evaluate
from strata.runtime import CompileOptions, Session

UNARY = ["relu", "tanh", "sigmoid", "exp", "abs", "negative", "square", "sin", "gelu", "silu"]
BINARY = ["add", "subtract", "multiply", "maximum", "minimum"]


def random_graph(seed: int, length: int = 14) -> tuple[Graph, dict[str, np.ndarray]]:
    """A graph of element-wise ops, movements, reductions, softmaxes and products over small tensors."""
    rng = np.random.default_rng(seed)
    g = Graph(f"random{seed}")
    sizes = [int(s) for s in rng.choice([1, 2, 3, 4, 5, 7, 8, 16, 17, 33], 3)]
    feeds: dict[str, np.ndarray] = {}
    pool: list[Value] = []
    for i in range(3):
        shape = tuple(int(rng.choice(sizes)) for _ in range(int(rng.integers(1, 4))))
        declare = g.input if i < 2 else g.param
        pool.append(declare(f"x{i}", shape))
        feeds[f"x{i}"] = (rng.standard_normal(shape) * 0.5).astype(np.float32)
    for _ in range(length):
        made = random_step(rng, pool)
        if made is not None:
            pool.append(made)
    outputs = [pool[-1], pool[int(rng.integers(3, len(pool)))]] if len(pool) > 3 else pool[-1:]
    return g.outputs(*outputs), feeds


def random_step(rng: np.random.Generator, pool: list[Value]) -> Value | None:
    x = pool[int(rng.integers(len(pool)))]
    y = pool[int(rng.integers(len(pool)))]
    axis = int(rng.integers(x.ndim)) if x.ndim else 0
    kind = rng.choice(["unary", "binary", "reduce", "move", "softmax", "matmul", "where"])
    match kind:
        case "unary":
            return getattr(ops, str(rng.choice(UNARY)))(x * 0.5)
        case "binary" if x.shape == y.shape or not y.ndim:
            return getattr(ops, str(rng.choice(BINARY)))(x, y)
        case "binary" if x.ndim and y.ndim and x.shape[-1] == y.shape[-1] and (x.ndim == 1 or y.ndim == 1):
            return getattr(ops, str(rng.choice(BINARY)))(x, y)
        case "reduce" if x.ndim:
            return getattr(ops, str(rng.choice(["mean", "max", "sum"])))(x, axis=axis, keepdims=bool(rng.integers(2))) * 0.3
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
        case "matmul" if x.ndim == 2:
            return ops.matmul(x, ops.transpose(x)) * 0.1 if rng.integers(2) else ops.matmul(ops.transpose(x), x) * 0.1
        case "where":
            return ops.where(x > 0, x, x * 0.1)
    return None


def check_seed(seed: int, options: CompileOptions | None = None) -> None:
    graph, feeds = random_graph(seed)
    compiled = Session("cpu").compile(graph, options)
    compiled.set_params({n: feeds[n] for n in graph.param_names})
    results = compiled.run({n: feeds[n] for n in graph.input_names})
    for got, want in zip(results, evaluate(graph, feeds, wide=True), strict=True):
        scale = max(1.0, float(np.max(np.abs(want), initial=0.0)))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * scale, err_msg=f"seed {seed}\n{graph}\n{compiled.lir}")


@pytest.mark.parametrize("seed", range(60))
def test_compiled_equals_interpreter(seed: int) -> None:
    check_seed(seed)


@pytest.mark.parametrize("seed", range(60, 75))
def test_without_optimisation(seed: int) -> None:
    check_seed(seed, CompileOptions(passes="decompose"))
