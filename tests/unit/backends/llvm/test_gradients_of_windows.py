"""Gradients of convolutions in their weights and of maximum pools: geometries and targets against the ops' meaning."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata.ops as functions
from strata.backends.llvm.backend import CpuBackend
from strata.core import Target, TensorType, as_dtype, sym
from strata.mir import Graph, Node
from strata.ops import ConvLastBackwardWeight
from strata.ops.conv.pool import PoolBackward
from strata.runtime import CompilePipeline, Session
from strata.transforms import grad

ops: Any = functions
TARGETS = [t for t in map(Target.named, ("host", "avx2", "baseline")) if t.runs_on(Target.host())]


def session_for(target: Target) -> Session:
    session = Session("cpu")
    session.backend = CpuBackend(target)
    return session


def gradient(x: np.ndarray, outputs: int, kernel: tuple[int, ...], **given: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """The op, some dy for it, and the gradient in f64."""
    rank = len(kernel)
    plain: dict[str, Any] = {"stride": (1,) * rank, "padding": ((0, 0),) * rank, "dilation": (1,) * rank, "groups": 1}
    fields = plain | given
    counts = [
        (n + sum(p) - (k - 1) * d - 1) // s + 1
        for n, k, s, p, d in zip(
            x.shape[1:-1], kernel, fields["stride"], fields["padding"], fields["dilation"], strict=True
        )
    ]
    op = ConvLastBackwardWeight(**fields, kernel=kernel)
    dy = np.random.default_rng(1).standard_normal((x.shape[0], *counts, outputs)).astype(x.dtype)
    return op, dy, op.numpy(x.astype(np.float64), dy.astype(np.float64))


SAME = ((1, 1), (1, 1))
CASES: list[tuple[tuple[int, ...], int, tuple[int, ...], dict[str, Any]]] = [
    ((3, 9, 10, 16), 32, (3, 3), {"padding": SAME}),
    ((9, 9, 9, 1), 16, (3, 3), {"padding": SAME}),
    ((2, 15, 13, 3), 20, (5, 5), {"padding": ((2, 2), (2, 2)), "stride": (2, 2)}),
    ((2, 9, 8, 17), 49, (3, 2), {"padding": ((1, 0), (0, 2)), "dilation": (2, 3), "stride": (2, 1)}),
    ((2, 7, 7, 26), 7, (1, 1), {"stride": (3, 2)}),
    ((2, 8, 9, 12), 20, (3, 3), {"groups": 4, "padding": SAME}),
    ((2, 8, 9, 6), 12, (3, 3), {"groups": 6, "padding": SAME}),
    ((2, 8, 9, 35), 35, (3, 3), {"groups": 35, "padding": SAME}),
    ((2, 8, 9, 16), 16, (5, 9), {"groups": 16, "padding": ((2, 2), (4, 4)), "stride": (1, 2)}),
    ((2, 5, 3, 8), 8, (3, 5), {"groups": 8, "padding": ((1, 1), (4, 4)), "dilation": (1, 2)}),
    ((2, 300, 5), 9, (4,), {"padding": ((3, 1),), "stride": (2,)}),
    ((2, 40, 9), 9, (3,), {"groups": 9}),
    ((1, 4, 5, 6, 3), 8, (2, 3, 2), {"padding": ((1, 1), (0, 1), (1, 0)), "stride": (1, 2, 1)}),
    ((1, 9, 9, 4), 4, (3, 3), {"padding": ((-1, -2), (-2, 0))}),
    ((1, 3, 3, 4), 4, (3, 3), {"padding": ((5, 5), (6, 1))}),
    ((1, 1, 1, 1), 1, (1, 1), {}),
]


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
@pytest.mark.parametrize("case", CASES, ids=[f"case{i}" for i in range(len(CASES))])
def test_weight_gradient(case: Any, target: Target, rng: np.random.Generator) -> None:
    shape, outputs, kernel, fields = case
    x = rng.standard_normal(shape).astype(np.float32)
    op, dy, want = gradient(x, outputs, kernel, **fields)
    g = Graph("gradient")
    g.outputs(op(g.input("x", x.shape), g.input("dy", dy.shape)))
    made = session_for(target).compile(g)
    assert not made.host_steps
    assert [s.label for s in made.lir.schedule] == ["conv_last_backward_weight"]
    np.testing.assert_allclose(made.run(x=x, dy=dy)[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float16, 2e-3)])
@pytest.mark.parametrize("groups", [1, 20])
def test_weight_gradient_of_other_types(native: Any, dtype: Any, tolerance: float, groups: int) -> None:
    x = np.random.default_rng(0).standard_normal((2, 9, 8, 20)).astype(dtype)
    op, dy, want = gradient(x, 20, (3, 3), padding=SAME, groups=groups)
    (got,) = native(op, x, dy)
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * abs(want).max())


def test_many_pixels_have_equal_bits_for_every_number_of_threads(native: Any) -> None:
    for shape, outputs, fields in (((16, 28, 28, 16), 32, {}), ((16, 28, 28, 40), 40, {"groups": 40})):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        op, dy, want = gradient(x, outputs, (3, 3), padding=SAME, **fields)
        (got,) = native(op, x, dy)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


def test_symbolic_images_and_sizes(native: Any) -> None:
    n, size = sym("n", 0, 8), sym("size", 3, 40)
    for images, side in ((2, 9), (0, 5), (3, 17)):
        x = np.random.default_rng(0).standard_normal((images, side, side, 6)).astype(np.float32)
        op, dy, want = gradient(x, 8, (3, 3), padding=SAME)
        (got,) = native(op, x, dy, shapes=[(n, size, size, 6), (n, size, size, 8)])
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_gradients_of_a_network_run_in_kernels(rng: np.random.Generator) -> None:
    """Convolution, pooling and their gradients: channels last, nothing by plain loops over all taps and images."""
    g = Graph("net")
    x, w, v = g.input("x", (2, 3, 16, 16)), g.input("w", (8, 3, 3, 3)), g.input("v", (8, 8, 2, 2))
    y = ops.max_pool2d(ops.conv2d(x, w, padding=1).relu(), 2)
    y = ops.conv_transpose2d(y, v, stride=2)
    g.outputs((y * y).sum())
    made = Session("cpu").compile(grad(g, ("w", "v")))
    names = [n.op.name for s in made.lir.schedule for n in s.nodes]
    assert names.count("conv_last_backward_weight") == 2
    assert "conv" not in names
    assert sum(s.label == "pool_backward" for s in made.lir.schedule) == 1
    assert not made.host_steps


POOLS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 8, 9, 20), {"kernel": (2, 2, 1), "stride": (2, 2, 1)}),
    ((2, 8, 8, 16), {"kernel": (2, 2, 1), "stride": (2, 2, 1)}),
    ((2, 9, 8, 70), {"kernel": (3, 3, 1), "stride": (2, 2, 1), "padding": ((1, 1), (1, 0), (0, 0))}),
    ((1, 12, 13, 5), {"kernel": (5, 5, 1), "stride": (1, 2, 1), "padding": ((2, 2), (2, 2), (0, 0))}),
    ((2, 12, 13, 5), {"kernel": (2, 3, 1), "stride": (1, 2, 1), "dilation": (3, 2, 1)}),
    ((3, 11, 12), {"kernel": (3, 3), "stride": (2, 2), "padding": ((1, 1), (1, 1))}),
    ((3, 30), {"kernel": (4,), "stride": (3,), "padding": ((2, 1),)}),
    ((2, 5, 6, 7), {"kernel": (2, 2, 2), "stride": (1, 2, 2)}),
    ((0, 4, 4, 3), {"kernel": (2, 2, 1), "stride": (2, 2, 1)}),
]


@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", POOLS, ids=[f"case{i}" for i in range(len(POOLS))])
def test_pool_gradient(native: Any, case: Any, dtype: Any, kind: str) -> None:
    """Ties, NaN and infinities: the first extreme takes all, and NaN is one."""
    shape, given = case
    rank = len(given["kernel"])
    fields = {"padding": ((0, 0),) * rank, "dilation": (1,) * rank} | given
    op = PoolBackward(**fields, kind=kind)
    rng = np.random.default_rng(0)
    x = np.round(rng.standard_normal(shape)).astype(dtype)
    x.reshape(-1)[::11] = np.nan
    x.reshape(-1)[: x.size // 4] = -np.inf if kind == "max" else np.inf
    pooled = op.pooled(TensorType(as_dtype(dtype), shape))
    dy = rng.integers(-9, 9, pooled.shape).astype(dtype)
    (got,) = native(op, x, dy)
    np.testing.assert_array_equal(got, op.numpy(x, dy))


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
def test_pool_gradient_on_targets(target: Target, rng: np.random.Generator) -> None:
    op = PoolBackward((3, 3, 1), (2, 2, 1), ((1, 1), (1, 1), (0, 0)), (1, 1, 1), "max")
    x = np.round(rng.standard_normal((2, 9, 10, 21)) * 3).astype(np.float32)
    dy = rng.integers(-9, 9, (2, 5, 5, 21)).astype(np.float32)
    g = Graph("pool")
    g.outputs(op(g.input("x", x.shape), g.input("dy", dy.shape)))
    made = session_for(target).compile(g)
    np.testing.assert_array_equal(made.run(x=x, dy=dy)[0], op.numpy(x, dy))


def test_integers_keep_the_general_loops(native: Any) -> None:
    x = np.arange(24, dtype=np.int32).reshape(1, 4, 6) % 7
    op = PoolBackward((2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1), "max")
    dy = np.arange(6, dtype=np.int32).reshape(1, 2, 3)
    (got,) = native(op, x, dy)
    np.testing.assert_array_equal(got, op.numpy(x, dy))


def test_a_transposed_reduction_is_stored_first() -> None:
    """Reading windows across their rows costs more than a copy of what they give."""
    g = Graph("pool")
    x, w = g.input("x", (8, 3, 32, 32)), g.param("w", (16, 3, 3, 3))
    g.outputs(ops.max_pool2d(ops.conv2d(x, w, padding=1), 2).reshape((8, -1)))

    def moves(node: Node) -> bool:
        return node.op.name == "transpose"

    steps = CompilePipeline("cpu").compile(g).lir.schedule
    pools = [s for s in steps if any(n.op.name == "pool_max" for n in s.nodes)]
    assert len(pools) == 1
    assert not any(moves(n) for n in pools[0].nodes)
