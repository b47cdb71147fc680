"""Every scalar function on every dtype it takes: generated code, interpreter and NumPy agree."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from strata.backends.llvm.codegen.compile import compile_kernel, emit_text, lower
from strata.backends.llvm.jit.isolate import is_unusual
from strata.core import (
    ALL_DTYPES,
    DType,
    Target,
    bf16,
    bool_,
    c64,
    c128,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i4,
    i8,
    i16,
    i32,
    i64,
    u4,
    u8,
    u16,
    u32,
    u64,
)  # fmt: skip
from strata.kernel import SCALARS, Kernel, KernelBuilder, Schedule, Vectorise, apply, interpret
from tests.groups import check_all

FLOATS = (f8e4m3, f8e5m2, bf16, f16, f32, f64)
INTS = (i8, i16, i32, i64, u8, u16, u32, u64)
COMPLEX = (c64, c128)
TARGETS = [name for name in ("host", "avx2", "baseline") if Target.named(name).runs_on(Target.host())]
ARITHMETIC = ("add", "sub", "mul")
INTEGER = ("floordiv", "truncdiv", "mod", "rem", "min", "max", "neg", "abs", "sign", "pow", "fma")
BITS = ("and", "or", "xor", "not", "shl", "shr")
TESTS = ("eq", "ne", "lt", "le", "gt", "ge")
ON_COMPLEX = (
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "conj",
    "abs",
    "real",
    "imag",
    "eq",
    "ne",
    "exp",
    "log",
    "sqrt",
    "isnan",
)
SPECIAL = ("cast", "bitcast", "select", "complex")


def dtypes_of(name: str) -> tuple[DType, ...]:
    if name == "gcd":
        return INTS
    if name in BITS:
        return (*INTS, bool_) if not name.startswith("sh") else INTS
    if name in ("eq", "ne"):
        return (*FLOATS, *INTS, bool_, *COMPLEX)
    if name in TESTS:
        return (*FLOATS, *INTS)
    base = (*FLOATS, *INTS) if name in (*ARITHMETIC, *INTEGER, "floor", "ceil", "trunc", "round") else FLOATS
    return (*base, *COMPLEX) if name in ON_COMPLEX else base


CASES = [(name, dtype) for name in SCALARS if name not in SPECIAL for dtype in dtypes_of(name)
         if not (name in ("real", "imag", "conj") and not dtype.is_complex)]  # fmt: skip
NARROW = {"asin": 1, "acos": 1, "atanh": 1}
SIZES = {"gelu": 0.2}  # x Φ(x), on the left a difference of larger numbers: test_vector_math knows its limit


def inputs(name: str, dtype: DType, count: int, length: int = 1003) -> list[Any]:
    rng = np.random.default_rng(len(name))
    made = []
    for n in range(count):
        if dtype.is_bool:
            array = rng.integers(0, 2, length).astype(np.bool_)
        elif dtype.is_int:
            low, high = (-9 if dtype.kind == "int" else 0), 10
            array = rng.integers(low, high, length).astype(dtype.np)
            info = np.iinfo(dtype.np)
            array[:4] = [info.min, info.max, 0, 1]
            if name.startswith("sh") and n:
                array = rng.integers(0, dtype.bits, length).astype(dtype.np)
            elif n:
                array = np.roll(array, 7)
        elif dtype.is_complex:
            array = (rng.normal(size=length) + 1j * rng.normal(size=length)).astype(dtype.np)
        else:
            array = rng.normal(size=length) * NARROW.get(name, 3)
            array[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0.5]
            array = np.roll(array, 3 * n).astype(dtype.np)
        made.append(array)
    return made


def kernel_of(name: str, dtype: DType, arrays: list[Any]) -> Kernel:
    k = KernelBuilder("k")
    views = [k.input(f"x{n}", dtype[len(a),]) for n, a in enumerate(arrays)]
    result = apply(name, *(v[k.axes((len(arrays[0]),))[0]] for v in views)).dtype
    k.output("y", result[len(arrays[0]),], lambda ix: apply(name, *(v[ix[0]] for v in views)))
    return k.build()


def run(name: str, dtype: DType, target: str) -> tuple[Any, Any]:
    arrays = inputs(name, dtype, SCALARS[name].arity)
    kernel = kernel_of(name, dtype, arrays)
    return compile_kernel(kernel, Target.named(target))(*arrays)[0], interpret(kernel, arrays)[0]


@pytest.mark.parametrize("target", ["host", "avx512", "avx2", "baseline"])
def test_no_function_needs_a_process_of_its_own(target: str) -> None:
    """Instructions that are not known to be there would take one: give `isolate.KNOWN` the features that they need."""
    level = Target.named(target)
    if level.triple != Target.host().triple:
        return  # everything is unusual there
    strange = set[str]()
    for name, dtype in CASES:
        kernel = kernel_of(name, dtype, inputs(name, dtype, SCALARS[name].arity))
        if is_unusual(emit_text([lower(kernel, level)], level), level):
            strange.add(f"{name} of {dtype}")
    assert not strange


def compare(got: Any, wanted: Any, size: float = 1e-2) -> None:
    """Up to the spacing of numbers of the type; `size` is that of numbers near zero."""
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, wanted)
        return
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    spacing = {2: 2.0**-7, 1: 2.0**-2}.get(got.dtype.itemsize, 0)
    if got.dtype == np.float16:
        spacing = 2.0**-10
    tolerance = spacing or (1e-13 if got.dtype in (np.float64, np.complex128) else 1e-6)
    np.testing.assert_allclose(got.astype(wide), np.asarray(wanted).astype(wide), rtol=tolerance, atol=tolerance * size)


# one type of each kind is enough away from the host
AWAY = (f16, f32, f64, i32, u8, bool_, c64)
NAMES = list(dict.fromkeys(name for name, _ in CASES))


@pytest.mark.few(68)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_function(name: str, target: str) -> None:
    def check(dtype: DType) -> None:
        compare(*run(name, dtype, target), SIZES.get(name, 1e-2))

    some = [d for n, d in CASES if n == name and (target == "host" or d in AWAY)]
    check_all((str(dtype), partial(check, dtype)) for dtype in some)


@pytest.mark.few(61)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [name for name in NAMES if (name, f32) in CASES or (name, c64) in CASES])
def test_bits_do_not_depend_on_the_width_of_vectors(name: str, target: str) -> None:
    some = [d for n, d in CASES if n == name and d in ((f32, f64, c64) if target == "host" else (f32,))]
    check_all((str(dtype), partial(check_widths, name, dtype, target)) for dtype in some)


def check_widths(name: str, dtype: DType, target: str) -> None:
    arrays = inputs(name, dtype, SCALARS[name].arity)
    kernel = kernel_of(name, dtype, arrays)
    widths = [Schedule(()), *(Schedule((Vectorise(0, lanes),)) for lanes in (2, 4, 16, 64))]
    (first, *others) = (compile_kernel(kernel, Target.named(target), way)(*arrays)[0] for way in widths)
    for other in others:
        equal = (other == first) | ((other != other) & (first != first))  # any NaN
        assert equal.all(), (other[~equal], first[~equal])
        np.testing.assert_array_equal(np.signbit(other.real[equal]), np.signbit(first.real[equal]))


@pytest.mark.few(19)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", ALL_DTYPES)
def test_cast_to_every_type(source: DType, target: str) -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate(
        [rng.normal(size=500) * 50, [0, -0.0, 1, -1, 0.5, 2.5, 3.5, -2.5, 1e10, -1e10, 300, 70000, 480]]
    )
    if source.is_inexact:
        values = np.concatenate([values, [np.nan, np.inf, -np.inf, 1e-6, 6e-8, 3e-8, 1e-40, 65519.9, 65520.1]])
    with np.errstate(all="ignore"):
        if source.is_bool:
            array = values > 0
        elif source.is_int and source.bits < 64:
            array = np.clip(values, *((-8, 7) if source is i4 else (0, 15) if source is u4 else _limits(source)))
            array = array.astype(np.int64).astype(source.np)
        else:
            array = np.maximum(values, 0).astype(source.np) if source is u64 else values.astype(source.np)
    for dtype in ALL_DTYPES:
        k = KernelBuilder("k")
        x = k.input("x", source[len(array),])
        k.output("y", dtype[len(array),], lambda ix, x=x, dtype=dtype: x[ix[0]].cast(dtype))
        kernel = k.build()
        (got,) = compile_kernel(kernel, Target.named(target))(array)
        (wanted,) = interpret(kernel, [array])
        wide = (
            np.complex128
            if dtype.is_complex
            else np.float64
            if dtype.is_float
            else np.int64
            if dtype.bits == 4
            else dtype.np
        )
        np.testing.assert_array_equal(got.astype(wide), wanted.astype(wide), err_msg=f"{source} to {dtype}")


def _limits(dtype: DType) -> tuple[int, int]:
    info = np.iinfo(dtype.np)
    return int(info.min), int(info.max)


def test_bitcast_and_select_and_complex() -> None:
    n = 37
    k = KernelBuilder("k")
    x, y = k.input("x", f32[n,]), k.input("y", f32[n,])
    k.output("bits", i32[n,], lambda ix: k.bitcast(x[ix[0]], i32))
    k.output("picked", f32[n,], lambda ix: k.select(x[ix[0]] > y[ix[0]], x[ix[0]], y[ix[0]]))
    k.output("pair", c64[n,], lambda ix: k.complex(x[ix[0]], y[ix[0]]))
    kernel = k.build()
    a, b = np.random.default_rng(0).normal(size=(2, n)).astype(np.float32)
    bits, picked, pair = compile_kernel(kernel)(a, b)
    np.testing.assert_array_equal(bits, a.view(np.int32))
    np.testing.assert_array_equal(picked, np.maximum(a, b))
    np.testing.assert_array_equal(pair, a + 1j * b)


@pytest.mark.parametrize("target", [*TARGETS, "32 bytes of host", "16 bytes of host"])
@pytest.mark.parametrize("dtype", [f16, bf16, f8e4m3, f8e5m2], ids=str)
@pytest.mark.parametrize("source", [f32, f64], ids=str)
def test_small_floats_round_as_ml_dtypes(source: DType, dtype: DType, target: str) -> None:
    """Normal numbers of all sizes, denormals, ties, what is next to the largest, zeros, infinities, NaN; odd counts."""
    rng = np.random.default_rng(0)
    spread = rng.normal(size=4000) * np.exp2(np.arange(4000) % 40 - 25)
    tiny = rng.normal(size=1000) * np.exp2(-126.0 - np.arange(1000) % 26)
    ties = (np.arange(1, 600) * 128 + 64) * np.exp2(-149.0 + np.arange(599) % 9)
    edges = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3.39e38, 3.4e38, -3.4e38, 65519.0, 65520.0, 65536.0, 1e-45])
    values = np.concatenate([spread, tiny, ties, -ties, edges]).astype(np.float32).astype(source.np)
    if source is f64:  # next to numbers of f32, where rounding twice would be wrong
        values = np.concatenate([np.nextafter(values, np.inf), values, np.nextafter(values, -np.inf), [1e300, -1e39]])
    n = values.size
    k = KernelBuilder("k")
    x = k.input("x", source[n,])
    k.output("y", dtype[n,], lambda ix: x[ix[0]].cast(dtype))
    width, _, level = target.rpartition(" bytes of ")
    on = Target.named(level)
    (got,) = compile_kernel(k.build(), replace(on, vector_bytes=int(width or on.vector_bytes)))(values)
    assert got.dtype == dtype.np
    with np.errstate(all="ignore"):
        wanted = _exactly(values, dtype)
    whole = f"u{dtype.itemsize}"
    nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(got.view(whole)[~nan], wanted.view(whole)[~nan])


def _exactly(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Rounded once: from f64 through the f32 next to it that is odd, unless it is exact."""
    if values.dtype == np.float32:
        return values.astype(dtype.np)
    near = values.astype(np.float32)
    away = np.abs(near.astype(np.float64)) > np.abs(values)
    down = (near.view(np.uint32) - away.astype(np.uint32)).view(np.float32)
    exact = (near == values) | np.isnan(values)
    odd = (down.view(np.uint32) | np.uint32(1)).view(np.float32)
    return np.where(exact, near, odd).astype(dtype.np)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_division_of_whole_numbers(dtype: DType, target: str) -> None:
    """All bytes; of wider types the ends, numbers of all sizes, multiples and their neighbours."""
    rng = np.random.default_rng(0)
    low, high = (int(v) for v in (np.iinfo(dtype.np).min, np.iinfo(dtype.np).max))
    ends = list(range(low, high + 1)) if dtype.bits == 8 else [low, low + 1, high, high - 1, 0, 1, 2, 3, 7, high // 2]
    ends += [-1, -2, -7] if low < 0 and dtype.bits > 8 else []
    a, b = (v.ravel() for v in np.meshgrid(np.array(ends, dtype.np), np.array(ends, dtype.np)))
    shifts = rng.integers(0, dtype.bits, (2, 5000)).astype(dtype.np)
    any_size = rng.integers(low, high, (2, 5000), dtype.np, endpoint=True) >> shifts
    factor, other = rng.integers(1, 1 << (dtype.bits // 2 - 1), (2, 5000)).astype(dtype.np)
    beside = factor * other + rng.integers(0, 2, 5000).astype(dtype.np) - (1 if low < 0 else 0)
    x = np.concatenate([a, any_size[0], beside]).astype(dtype.np)
    y = np.concatenate([b, any_size[1], other]).astype(dtype.np)
    x, y = x[y != 0], y[y != 0]
    for name, wanted in (("floordiv", np.floor_divide), ("mod", np.remainder), ("rem", np.fmod)):
        k = KernelBuilder("k")
        u, v = (k.input(n, dtype[x.size,]) for n in "xy")
        k.output("z", dtype[x.size,], lambda ix, u=u, v=v, name=name: apply(name, u[ix[0]], v[ix[0]]))
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(compile_kernel(k.build(), Target.named(target))(x, y)[0], wanted(x, y))
