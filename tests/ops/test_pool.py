"""Pooling against torch and onnx, plain loops, and the tie and padding rules that they do not share."""

import itertools

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch.nn import functional as F  # noqa: N812 - torch's own habit

import strata as st
from strata import ops
from strata.core import TensorType, f32, sym
from strata.errors import OptionError, ShapeError
from strata.mir import Constant, Graph, Value, constant, evaluate_values, placeholder, pullback, pushforward, toposort
from strata.ops.conv.windows import empty_window

RNG = np.random.default_rng(3)


def distinct(*shape: int) -> np.ndarray:
    return RNG.permutation(int(np.prod(shape))).reshape(shape) * 0.37 - 5.0


def run(*values: Value) -> list[np.ndarray]:
    return list(evaluate_values(values, {}, {}))


def close(actual: Value, expected: object, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(run(actual)[0], np.asarray(expected), rtol=tolerance, atol=tolerance)


def check_against_torch(ours, theirs, x: np.ndarray) -> None:
    """Value and gradient."""
    tx, vx = torch.tensor(x, requires_grad=True), constant(x)
    expected, out = theirs(tx), ours(vx)
    close(out, expected.detach())
    ct = RNG.standard_normal(tuple(expected.shape))
    expected.backward(torch.tensor(ct))
    close(pullback([out], [constant(ct)], [vx])[0], tx.grad)


SIZES = (9, 8, 7)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1}, {"stride": 1, "dilation": 2, "padding": 1}, {"stride": 2, "ceil_mode": True},
     {"stride": 3, "padding": 1, "ceil_mode": True, "dilation": 2}],
)  # fmt: skip
def test_max_pool_equals_torch(rank: int, options: dict) -> None:
    x = distinct(2, 3, *SIZES[:rank])
    ours, theirs = getattr(ops, f"max_pool{rank}d"), getattr(F, f"max_pool{rank}d")
    check_against_torch(lambda v: ours(v, 3, **options), lambda t: theirs(t, 3, **options), x)
    values, indices = theirs(torch.tensor(x), 3, **options, return_indices=True)
    ours_values, ours_indices = ours(constant(x), 3, **options, return_indices=True)
    close(ours_values, values)
    close(ours_indices, indices)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1}, {"stride": 2, "padding": 1, "count_include_pad": False},
     {"stride": 2, "ceil_mode": True}, {"stride": 3, "padding": 1, "ceil_mode": True},
     {"stride": 3, "padding": 1, "ceil_mode": True, "count_include_pad": False}, {"divisor_override": 5}],
)  # fmt: skip
def test_avg_pool_equals_torch(rank: int, options: dict) -> None:
    if rank == 1 and "divisor_override" in options:
        pytest.skip("torch has no divisor_override in one dimension")
    ours, theirs = getattr(ops, f"avg_pool{rank}d"), getattr(F, f"avg_pool{rank}d")
    check_against_torch(
        lambda v: ours(v, 3, **options), lambda t: theirs(t, 3, **options), distinct(2, 3, *SIZES[:rank])
    )


@pytest.mark.parametrize("p", [1, 2, 3, 2.5])
def test_lp_pool_equals_torch(p: float) -> None:
    x = np.abs(distinct(2, 3, 7, 6)) + 0.1
    check_against_torch(lambda v: ops.lp_pool2d(v, p, (2, 3), 2), lambda t: F.lp_pool2d(t, p, (2, 3), 2), x)


def test_lp_pool_of_zeros_has_a_zero_derivative() -> None:
    x = constant(np.zeros((1, 1, 4)))
    out = ops.lp_pool1d(x, 3, 2)
    close(pullback([out], [constant(np.ones((1, 1, 2)))], [x])[0], np.zeros((1, 1, 4)))


@pytest.mark.parametrize("kind", ["max", "min", "sum", "prod"])
@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((1, 0), (0, 2)), ((1, 1), (2, 2))])
def test_w13_every_kind_equals_a_loop(kind: str, padding: tuple) -> None:
    x = distinct(2, 5, 6) / 3
    kernel, stride, dilation = (2, 3), (2, 1), (1, 2)
    out = run(getattr(ops, f"{kind}_pool")(constant(x), kernel, stride, padding, dilation))[0]
    function = {"max": max, "min": min, "sum": sum, "prod": np.prod}[kind]
    for n, i, j in np.ndindex(*out.shape):
        cells = []
        for a, b in itertools.product(range(2), range(3)):
            r, c = i * 2 + a - padding[0][0], j + 2 * b - padding[1][0]
            if 0 <= r < 5 and 0 <= c < 6:
                cells.append(x[n, r, c])
        np.testing.assert_allclose(out[n, i, j], function(cells))


def test_w13_a_window_of_padding_only_is_an_error() -> None:
    with pytest.raises(ShapeError) as caught:
        ops.max_pool1d(placeholder("x", f32[1, 1, 4]), 2, padding=2)
    assert caught.value.code == "S309"
    close(ops.sum_pool(constant(np.ones((1, 1, 4))), 2, padding=2), [[[0, 2, 2, 0]]])


def test_the_first_window_of_padding_only() -> None:
    for size, count, kernel, stride, before, dilation in RNG.integers(
        (0, 0, 1, 1, -3, 1), (7, 12, 6, 12, 25, 12), (4000, 6)
    ).tolist():
        places = np.arange(count)[:, None] * stride + np.arange(kernel) * dilation - before
        empty = np.flatnonzero(~((places >= 0) & (places < size)).any(1))
        found = empty_window(size, count, kernel, stride, before, dilation)
        assert found == (int(empty[0]) if empty.size else None), (size, count, kernel, stride, before, dilation)


@pytest.mark.parametrize("dilation", [1, 1 << 31])
def test_the_type_of_a_pool_of_many_windows_takes_no_memory(dilation: int) -> None:
    size, kernel = 1 << 52, 3
    made = ops.max_pool1d(placeholder("x", f32[1, 1, size]), kernel, 1, dilation=dilation)
    assert made.shape == (1, 1, size - (kernel - 1) * dilation)
    with pytest.raises(ShapeError, match=r"window \[0\]"):
        ops.max_pool1d(placeholder("x", f32[1, 1, size]), kernel, 1, padding=3)


def test_case_12_backward_goes_to_the_maxima() -> None:
    x = np.arange(1.0, 17.0).reshape(1, 1, 4, 4)
    dx = run(ops.max_pool_backward(constant(x), constant([[[[0.5, 1.0], [2.0, 4.0]]]], "f64"), 2))[0].ravel()
    assert {i: dx[i] for i in np.flatnonzero(dx)} == {5: 0.5, 7: 1.0, 13: 2.0, 15: 4.0}


def test_the_first_maximum_takes_the_gradient_and_overlaps_add_up() -> None:
    x = constant(np.array([[1.0, 1.0, 1.0, 0.0]]))
    out = ops.max_pool(x, (2,), 1)
    close(pullback([out], [constant(np.array([[1.0, 2.0, 4.0]]))], [x])[0], [[1.0, 2.0, 4.0, 0.0]])
    tangent = pushforward([out], [x], [constant(np.array([[10.0, 20.0, 30.0, 40.0]]))])[0]
    close(tangent, [[10.0, 20.0, 30.0]])
    plane = constant(np.ones((1, 3, 3)))
    out = ops.max_pool(plane, (3, 3), 1, 1)
    gradient = pullback([out], [constant(np.ones((1, 3, 3)))], [plane])[0]
    close(gradient, [[[4.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]])


def test_nan_wins_and_is_found() -> None:
    x = constant(np.array([[0.0, np.nan, 5.0, 1.0]]))
    values, indices = ops.max_pool(x, (2,), 2, return_indices=True)
    close(values, [[np.nan, 5.0]])
    close(indices, [[1, 2]])


# ----------------------------------------------------------------------------------------------------------------- onnx


def reference(op_type: str, x: np.ndarray, outputs: int = 1, **attributes) -> list[np.ndarray]:
    names = ["y", "i"][:outputs]
    node = onnx.helper.make_node(op_type, ["x"], names, **attributes)
    return ReferenceEvaluator(node).run(None, {"x": x})


@pytest.mark.parametrize("mode", ["SAME_UPPER", "VALID"])
def test_onnx_auto_pad(mode: str) -> None:
    x = distinct(1, 2, 6, 7).astype(np.float32)
    (expected,) = reference("MaxPool", x, kernel_shape=[3, 2], strides=[2, 2], auto_pad=mode)
    close(ops.max_pool(constant(x), (3, 2), 2, mode), expected, 1e-6)


def test_onnx_same_lower_pads_before_the_start() -> None:
    x = distinct(1, 2, 6, 7)
    padded = np.pad(x, [(0, 0), (0, 0), (1, 0), (1, 0)], constant_values=-np.inf)
    close(ops.max_pool(constant(x), (3, 2), 2, "SAME_LOWER"), F.max_pool2d(torch.tensor(padded), (3, 2), 2))


def test_onnx_indices_count_through_the_tensor() -> None:
    x = distinct(2, 3, 5, 4).astype(np.float32)
    values, indices = ops.max_pool_with_indices(constant(x), (2, 2), (2, 2))
    flat = run(indices)[0]
    np.testing.assert_array_equal(x.ravel()[flat], run(values)[0])
    columns = run(ops.max_pool_with_indices(constant(x), (2, 2), (2, 2), storage_order=1)[1])[0]
    np.testing.assert_array_equal(x.transpose(0, 1, 3, 2).ravel()[columns], run(values)[0])


def test_onnx_average_with_asymmetric_padding_and_dilation() -> None:
    x = distinct(1, 2, 6, 7).astype(np.float32)
    for include in (0, 1):
        attributes = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 2, 1], "dilations": [2, 1]}
        (expected,) = reference("AveragePool", x, count_include_pad=include, **attributes)
        ours = ops.avg_pool(
            constant(x), (3, 2), (2, 1), ((1, 2), (0, 1)), count_include_pad=bool(include), dilation=(2, 1)
        )
        close(ours, expected, 1e-5)


def test_onnx_lp_and_global_pools() -> None:
    x = distinct(2, 3, 5, 4).astype(np.float32)
    attributes = {"kernel_shape": [2, 3], "strides": [2, 1], "pads": [1, 0, 0, 1]}
    close(
        ops.lp_pool(constant(x), 2, (2, 3), (2, 1), padding=((1, 0), (0, 1))),
        reference("LpPool", x, p=2, **attributes)[0],
        1e-5,
    )
    close(ops.global_avg_pool(constant(x)), reference("GlobalAveragePool", x)[0], 1e-5)
    close(ops.global_max_pool(constant(x)), reference("GlobalMaxPool", x)[0], 1e-5)
    close(ops.global_lp_pool(constant(x), 3), (np.abs(x) ** 3).sum((2, 3), keepdims=True) ** (1 / 3), 1e-5)


# --------------------------------------------------------------------------------------------- adaptive, unpool, shapes


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3, (4, 5, 3), (None, 2, 7)])
def test_adaptive_pools_equal_torch(rank: int, size) -> None:
    if isinstance(size, tuple):
        size = size[:rank]
        if rank == 1 and size == (None,):
            return
    x = distinct(2, 3, *SIZES[:rank])
    for name in ("adaptive_avg_pool", "adaptive_max_pool"):
        ours, theirs = getattr(ops, f"{name}{rank}d"), getattr(F, f"{name}{rank}d")
        check_against_torch(lambda v, f=ours: f(v, size), lambda t, f=theirs: f(t, size), x)
    values, indices = getattr(F, f"adaptive_max_pool{rank}d")(torch.tensor(x), size, return_indices=True)
    ours_values, ours_indices = ops.adaptive_max_pool(constant(x), size, return_indices=True)
    close(ours_values, values)
    close(ours_indices, indices)


def test_max_unpool_equals_torch() -> None:
    x = distinct(2, 3, 6, 8)
    pooled, indices = F.max_pool2d(torch.tensor(x), 2, return_indices=True)
    expected = F.max_unpool2d(pooled, indices, 2)
    close(ops.max_unpool2d(constant(pooled.numpy()), constant(indices.numpy()), 2), expected)
    wide = F.max_unpool2d(pooled, indices, 2, output_size=(7, 8))
    close(ops.max_unpool2d(constant(pooled.numpy()), constant(indices.numpy()), 2, output_size=(7, 8)), wide)


@pytest.mark.parametrize("shape", [None, (2, 3, 7, 9)])
def test_onnx_max_unpool(shape: tuple | None) -> None:
    x = distinct(2, 3, 6, 8).astype(np.float32)
    pooled, indices = (run(v)[0] for v in ops.max_pool_with_indices(constant(x), (2, 2), (2, 2)))
    feeds = {"x": pooled, "i": indices} | ({} if shape is None else {"s": np.array(shape)})
    node = onnx.helper.make_node("MaxUnpool", list(feeds), ["y"], kernel_shape=[2, 2], strides=[2, 2])
    expected = ReferenceEvaluator(node).run(None, feeds)[0]
    ours = ops.onnx_max_unpool(constant(pooled), constant(indices), shape, kernel_shape=(2, 2), strides=(2, 2))
    close(ours, expected)


def test_symbolic_sizes() -> None:
    x = placeholder("x", TensorType(f32, (sym("N"), 3, sym("S", 4), 8)))
    out = ops.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
    assert str(out.type) == "f32[N, 3, (S - 1) // 2 + 1, 4]"
    assert pullback([out], [out], [x])[0].type == x.type
    array = distinct(2, 3, 9, 8).astype(np.float32)
    got = evaluate_values([out], {x: array}, {"N": 2, "S": 9})[0]
    np.testing.assert_allclose(got, F.avg_pool2d(torch.tensor(array), 3, 2, 1, count_include_pad=False), rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        (lambda x: ops.max_pool2d(x, 9), ShapeError, "S302"),
        (lambda x: ops.max_pool2d(x, (2, 2, 2)), OptionError, "O241"),
        (lambda x: ops.max_pool2d(x, 0), OptionError, "O240"),
        (lambda x: ops.avg_pool2d(x, 2, padding="same"), OptionError, "O242"),
        (lambda x: ops.avg_pool2d(x, 2, divisor_override=0), OptionError, "O244"),
        (lambda x: ops.lp_pool2d(x, 0.5, 2), OptionError, "O245"),
        (lambda x: ops.adaptive_avg_pool2d(x, 0), OptionError, "O246"),
    ],
)
def test_mistakes(call, error: type[Exception], code: str) -> None:
    with pytest.raises(error) as caught:
        call(placeholder("x", f32[1, 1, 4, 4]))
    assert caught.value.code == code


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_sums_of_windows_do_not_overflow(dtype: str, device: str) -> None:
    """Means and norms of half precision are taken in f32, on every device."""
    g = st.Graph("g")
    x = g.input("x", (1, 2, 16, 16), dtype)
    g.outputs(
        x.avg_pool2d(8), x.avg_pool2d(8, padding=2, count_include_pad=False), x.avg_pool2d(8, divisor_override=64),
        x.lp_pool2d(2, 4), x.global_lp_pool(2), x.global_avg_pool(),
    )  # fmt: skip
    data = np.full((1, 2, 16, 16), 2048, np.float32).astype(x.dtype.np)
    results = st.Session(device).compile(g).run(x=data)
    for got, want in zip(results, (2048, 2048, 2048, 8192, 32768, 2048), strict=True):
        assert got.dtype == x.dtype.np
        np.testing.assert_array_equal(got.astype(np.float32), want)


def test_cells_of_large_windows_are_counted_without_listing_them() -> None:
    """As many pairs of windows and taps as these would take 80 GB."""
    g = Graph("large")
    x = g.input("x", f32[1, 1, 200_000])
    y = ops.avg_pool1d(x, 100_001, 1, padding=50_000, count_include_pad=False)
    cells = next(n.op.data.array for n in toposort([y]) if isinstance(n.op, Constant) and n.op.data.array.size > 1)
    at = np.arange(200_000)
    wanted = np.minimum(at + 50_000, 199_999) - np.maximum(at - 50_000, 0) + 1
    assert np.array_equal(np.sort(cells.reshape(-1)), np.sort(wanted))


def test_rows_of_windows_take_any_batch(rng):
    """The batch of im2col may be a symbol: it is what the array has when it runs."""
    g = Graph("windows")
    g.outputs(ops.im2col(g.input("x", (sym("n", 0, 8), 2, 5, 4)), (3, 2), padding=1))
    compiled = st.Session("cpu").compile(g)
    for count in (0, 1, 3):
        x = rng.standard_normal((count, 2, 5, 4)).astype(np.float32)
        (out,) = compiled.run(x=x)
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        want = [
            padded[n, :, i : i + 3, j : j + 2].reshape(-1) for n in range(count) for i in range(5) for j in range(5)
        ]
        np.testing.assert_array_equal(out, np.array(want, np.float32).reshape(count * 25, 12))
