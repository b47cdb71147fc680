"""Every scalar function in every type, on awkward numbers, through Triton's interpreter against the NumPy meaning.

TRITON_INTERPRET=1 python -m tests.backends.triton_scalars          half a minute
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from strata.backends.triton.launch.interpreter import InterpreterDriver
from strata.core import ALL_DTYPES, DType, bool_
from strata.kernel import SCALARS, Axis, Buffer, Kernel, Load, Scalar, ScalarFunction, Store, interpret
from strata.testing.backend_suite import TOLERANCE

NUMBERS = (
    0.0, -0.0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 0.1, 0.25, 0.3, 0.7, 1e-3, 10, 20, 50, 88, 100, 127.5, 200, 255.5, 1000.25,
    65504, 1e10, 1e20, 1e30, 2.0**31, 2.0**32, 2.0**63, 1e-20, 1e-30, 1.13, 4.7, 0.9, float("inf"),
)  # fmt: skip
WHOLE = (0, 1, 2, 3, 5, 7, 8, 31, 32, 63, 64, 100)
NEAR_ZERO = {"gelu": 1e-6, "erfc": 1e-14, "lgamma": 1e-14}  # absolute: what is lost where terms cancel


def numbers(dtype: DType) -> np.ndarray:
    if dtype.is_bool:
        return np.array([False, True])
    if dtype.is_complex:  # what infinities become is up to the way it is computed
        parts = np.array([0, 1, -1, 0.5, 2.5, -3, 1e-3, 20])
        return (parts[:, None] + 1j * parts).astype(dtype.np).ravel()
    if dtype.is_float:
        with np.errstate(all="ignore"):
            return np.array([*NUMBERS, *(-x for x in NUMBERS), np.nan]).astype(dtype.np)
    if dtype.bits == 4:
        low = -8 if dtype.kind == "int" else 0
        return np.arange(low, low + 16).astype(np.int8).astype(dtype.np)
    limits = np.iinfo(dtype.np)
    ends = (limits.min, limits.min + 1, limits.max - 1, limits.max, *([-1, -2, -3, -7] if limits.min else []))
    return np.array([*WHOLE, *ends], dtype.np)


def forms(function: ScalarFunction) -> Iterator[tuple[tuple[DType, ...], DType]]:
    """Types of operands and of the result."""
    for dtype in ALL_DTYPES:
        if not function.takes(dtype) or (function.result == "complex" and dtype.bits < 32):
            continue
        kinds = (bool_, dtype, dtype) if function.name == "select" else (dtype,) * function.arity
        if function.result != "given":
            yield kinds, function.result_dtype(kinds, None)
            continue
        for result in ALL_DTYPES:
            same = function.takes(result) and result.itemsize == dtype.itemsize
            if function.name == "cast" or same:
                yield kinds, result


def operands(kinds: tuple[DType, ...]) -> list[np.ndarray]:
    found = [numbers(kind) for kind in kinds]
    if len(found) == 2:
        return [side.ravel().copy() for side in np.meshgrid(*found)]
    count = max(map(len, found)) * (3 if len(found) > 1 else 1)
    return [np.resize(np.roll(a, 5 * at), count) for at, a in enumerate(found)]


def kernel_of(name: str, kinds: tuple[DType, ...], result: DType, count: int) -> Kernel:
    """Buffers have the names of values in the text, which must not matter."""
    axis = Axis("i", count)
    inputs = tuple(Buffer(f"x{at + 1}", kind, (count,)) for at, kind in enumerate(kinds))
    out = Buffer("tl", result, (count,))
    value = Scalar(name, tuple(Load(b, (axis,)) for b in inputs), result)
    return Kernel("k", inputs, (out,), (Store(out, (axis,), (axis,), value),))


def launched(driver: InterpreterDriver, kernel: Kernel, arrays: list[np.ndarray], like: np.ndarray) -> np.ndarray:
    buffers = [driver.allocate(max(8, a.nbytes)) for a in (*arrays, like)]
    for buffer, array in zip(buffers, arrays, strict=False):
        driver.write(buffer, array)
    driver.launch(driver.make(kernel), buffers, {})
    made = np.empty_like(like)
    driver.read(buffers[-1], made)
    return made


def wrong(name: str, got: np.ndarray, want: np.ndarray, dtype: DType) -> np.ndarray:
    """Where results differ: by more than their type's precision, in NaN, or in the sign of zero."""
    if dtype.is_complex:
        with np.errstate(all="ignore"):
            near = np.abs(got - want) <= TOLERANCE[dtype.name] * np.maximum(1, np.abs(want))
        return ~near & np.isfinite(want)
    if not dtype.is_float:
        return got.astype(np.int8) != want.astype(np.int8) if dtype.bits == 4 else got != want
    g, w = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(all="ignore"):
        least = NEAR_ZERO.get(name, 0) + float(np.finfo(np.float32).tiny if dtype.bits >= 32 else 1e-4)
        close = (np.isnan(g) & np.isnan(w)) | (g == w) | (np.abs(g - w) <= TOLERANCE[dtype.name] * np.abs(w) + least)
        signs = (g == 0) & (w == 0) & (np.signbit(g) != np.signbit(w)) & (name not in ("min", "max"))
    return ~close | signs


def main(names: list[str]) -> int:
    driver, count, bad = InterpreterDriver(), 0, 0
    for name, function in SCALARS.items():
        for kinds, result in forms(function) if not names or name in names else ():
            arrays = operands(kinds)
            kernel = kernel_of(name, kinds, result, len(arrays[0]))
            want = interpret(kernel, arrays)[0]
            got = launched(driver, kernel, arrays, want)
            where = np.flatnonzero(wrong(name, got, want, result))
            count, bad = count + 1, bad + bool(where.size)
            for at in where[:3]:
                given = ", ".join(str(a[at]) for a in arrays)
                print(f"{name}({given}) of {kinds[-1]} is {got[at]}, not {want[at]}", file=sys.stderr)
    print(f"{count} scalar functions in Triton's interpreter, {bad} wrong")
    return min(1, bad) if count else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
