"""Every function of the Array API standard beside NumPy, which has the same names: values, shapes and element types."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.errors import OptionError, ShapeError

RNG = np.random.default_rng(11)
X = RNG.standard_normal((3, 4)).astype("f4")
Y = RNG.standard_normal((3, 4)).astype("f4")
UNIT, ABOVE = np.tanh(X), np.abs(X) + 1.5
N = RNG.integers(-9, 9, (3, 4))
M = RNG.integers(1, 5, (3, 4))
B, C = X > 0, Y > 0
Z = (X + 1j * Y).astype("c8")
V = RNG.standard_normal(3)
S = RNG.standard_normal((2, 3, 3))
P = S @ S.transpose(0, 2, 1) + np.eye(3)

Case = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **options: Any) -> Case:
    return args, options


EACH = {
    "abs acos asin atan atanh": [call(UNIT)], "acosh": [call(ABOVE)], "log log10 log1p log2 sqrt": [call(ABOVE)],
    "asinh ceil cos cosh exp expm1 floor isfinite isinf isnan negative positive reciprocal round sign signbit sin sinh "
    "square tan tanh trunc": [call(X)],
    "conj imag real": [call(Z)],
    "bitwise_invert": [call(N), call(B)], "logical_not": [call(B)],
    "add atan2 copysign divide equal greater greater_equal hypot less less_equal logaddexp maximum minimum multiply "
    "nextafter not_equal subtract": [call(X, Y)],
    "floor_divide remainder bitwise_left_shift bitwise_right_shift": [call(M + 7, M)],
    "pow": [call(ABOVE, Y)], "bitwise_and bitwise_or bitwise_xor": [call(N, M), call(B, C)],
    "logical_and logical_or logical_xor": [call(B, C)],
    "clip": [call(X, -0.5, 0.5), call(N, max=3)], "where": [call(B, X, Y)],
    "all any": [call(B), call(B, axis=0), call(B, axis=1, keepdims=True)],
    "argmax argmin": [call(X), call(X, axis=1), call(X, axis=0, keepdims=True)],
    "max mean min prod sum": [call(X), call(X, axis=0), call(X, axis=(0, 1), keepdims=True)],
    "std var": [call(X), call(X, axis=1, correction=1), call(X, axis=0, keepdims=True)],
    "count_nonzero": [call(N), call(N, axis=0), call(N, axis=1, keepdims=True)],
    "cumulative_sum cumulative_prod": [call(X, axis=1), call(V, include_initial=True), call(N, axis=0, dtype="int64")],
    "argsort sort": [call(X), call(X, axis=0), call(V, descending=True)], "searchsorted": [call(np.sort(V), V)],
    "nonzero": [call(N)], "unique_values": [call(N)],
    "isin": [call(N, M), call(N, M, invert=True)], "diff": [call(X), call(X, axis=0, n=2)],
    "broadcast_to": [call(V, (2, 3))], "broadcast_arrays": [call(V, V[:, None])],
    "broadcast_shapes": [call((3, 1), (1, 4), (4,))], "concat stack": [call([X, Y], axis=1), call([X, Y])],
    "expand_dims": [call(X, axis=1)], "squeeze": [call(X[None], axis=0)], "flip": [call(X), call(X, axis=1)],
    "moveaxis": [call(S, 0, 2)], "permute_dims": [call(S, (2, 0, 1))], "repeat": [call(X, 2, axis=1)],
    "reshape": [call(X, (2, 6))], "roll": [call(X, 1), call(X, (1, 2), axis=(0, 1))], "tile": [call(X, (2, 1))],
    "unstack": [call(X), call(X, axis=1)], "take": [call(X, np.array([2, 0]), axis=0)],
    "take_along_axis": [call(X, np.array([[1], [0], [3]]), axis=1)],
    "matmul": [call(X, Y.T)], "matrix_transpose": [call(S)], "tensordot": [call(X, Y, axes=2), call(X, Y.T, axes=1)],
    "vecdot": [call(X, Y), call(Z, Z)], "meshgrid": [call(V, V[:2]), call(V, V[:2], indexing="ij")],
    "tril triu": [call(X), call(X, k=1)], "arange": [call(5), call(2, 9, 3)], "asarray": [call(X), call([1, 2])],
    "linspace": [call(0.0, 1.0, 5), call(0.0, 1.0, 4, endpoint=False)], "eye": [call(3, 4, k=1)],
    "full": [call((2, 3), 7)], "full_like": [call(X, 7)], "ones zeros": [call((2, 3))],
    "ones_like zeros_like": [call(X)],
    "astype": [call(X, "f8")], "from_dlpack": [call(X)],
    "linalg.cholesky linalg.det linalg.inv linalg.slogdet linalg.eigvalsh linalg.svdvals linalg.pinv": [call(P)],
    "linalg.trace linalg.diagonal linalg.matrix_transpose": [call(S)], "linalg.cross": [call(S, S[::-1].copy())],
    "linalg.matmul": [call(S, P)], "linalg.matrix_norm": [call(S), call(S, ord=1)], "linalg.matrix_power": [call(S, 3)],
    "linalg.matrix_rank": [call(P)], "linalg.outer": [call(V, V)], "linalg.solve": [call(P, S)],
    "linalg.tensordot": [call(X, Y)], "linalg.vecdot": [call(X, Y)],
    "linalg.vector_norm": [call(X), call(X, axis=1, ord=1), call(X, keepdims=True)],
    "fft.fft fft.ifft": [call(Z), call(Z, axis=0, norm="ortho")], "fft.fftn fft.ifftn": [call(Z)],
    "fft.rfft fft.rfftn": [call(X)], "fft.irfft fft.irfftn": [call(Z)], "fft.hfft": [call(Z)], "fft.ihfft": [call(X)],
    "fft.fftfreq fft.rfftfreq": [call(7), call(8, d=0.5)], "fft.fftshift fft.ifftshift": [call(X), call(X, axes=0)],
}  # fmt: skip
CASES = {name: cases for names, cases in EACH.items() for name in names.split()}

# Of these there are tests elsewhere, or no values that NumPy decides: what an empty array holds, and decompositions
# that are known up to a sign or an order.
ELSEWHERE = {
    "can_cast", "empty", "empty_like", "finfo", "iinfo", "isdtype", "result_type", "unique_all", "unique_counts",
    "unique_inverse", "__array_namespace_info__", "linalg.eig", "linalg.eigh", "linalg.eigvals", "linalg.qr",
    "linalg.svd",
}  # fmt: skip


def functions() -> set[str]:
    spaces = {"": st.xp, "linalg.": st.xp.linalg, "fft.": st.xp.fft}
    return {
        prefix + name
        for prefix, space in spaces.items()
        for name in (space.__all__ if hasattr(space, "__all__") else dir(space))
        if isinstance(getattr(space, name), FunctionType) and hasattr(found(np, prefix.rstrip(".")), name)
    }


def found(space: Any, name: str) -> Callable[..., Any]:
    for part in filter(None, name.split(".")):
        space = getattr(space, part)
    return space  # type: ignore[no-any-return]


def given(x: Any) -> Any:
    if isinstance(x, np.ndarray):
        return st.asarray(x)
    return [given(v) for v in x] if isinstance(x, list) and isinstance(x[0], np.ndarray) else x


def parts(x: Any) -> list[np.ndarray]:
    is_shape = isinstance(x, tuple) and all(isinstance(v, int) for v in x)
    return [np.asarray(v) for v in x] if isinstance(x, (tuple, list)) and not is_shape else [np.asarray(x)]


def by_numpy(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if options.pop("descending", False):
        return -np.sort(-args[0]) if name == "sort" else np.argsort(-args[0])
    made = found(np, name)(*args, **options)
    return np.sort(made) if name == "unique_values" else made  # in any order


def test_every_function_has_values() -> None:
    assert functions() - ELSEWHERE - set(CASES) == set()


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_numpy(name: str) -> None:
    for args, options in CASES[name]:
        made = parts(found(st.xp, name)(*map(given, args), **{k: given(v) for k, v in options.items()}))
        wanted = parts(by_numpy(name, args, dict(options)))
        assert [x.shape for x in made] == [x.shape for x in wanted]
        for x, y in zip(made, wanted, strict=True):
            assert x.dtype.kind == y.dtype.kind
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["cumulative_sum", "cumulative_prod"])
def test_a_running_sum_needs_an_axis_that_exists(name: str) -> None:
    run = getattr(st.xp, name)
    for axis in (2, -3):
        with pytest.raises(ShapeError, match=f"axis {axis} does not exist in 2 dimensions"):
            run(st.ones((2, 3)), axis=axis)
    with pytest.raises(OptionError, match="an axis is needed in 2 dimensions"):
        run(st.ones((2, 3)))
