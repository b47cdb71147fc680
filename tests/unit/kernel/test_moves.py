"""Signs and choices of 16-bit floats as bits: NaN, infinities and denormals come out as they are."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from strata.backends.llvm.codegen.compile import compile_kernel
from strata.core import DType, bf16, bool_, f16, f32
from strata.kernel import Kernel, KernelBuilder, normalize
from strata.kernel.passes.bitcast_moves import as_bits

ALL = np.arange(1 << 16, dtype=np.uint16)


def signs(dtype: DType) -> Kernel:
    k = KernelBuilder("signs")
    x, y, mask = (k.input(n, t[1 << 16]) for n, t in (("x", dtype), ("y", dtype), ("mask", bool_)))
    k.output("minus", dtype[1 << 16], lambda ix: -x[ix])
    k.output("size", dtype[1 << 16], lambda ix: k.abs(x[ix]))
    k.output("joined", dtype[1 << 16], lambda ix: k.copysign(x[ix], y[ix]))
    k.output("some", dtype[1 << 16], lambda ix: k.select(mask[ix], k.const(1.5, dtype), -k.abs(y[ix])))
    return k.build()


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_signs_and_choices_of_all_numbers(dtype: DType) -> None:
    other = np.random.default_rng(0).permutation(ALL)
    mask = other % 3 == 0
    kernel = signs(dtype)
    assert all(b.dtype.name == "u16" for b in as_bits(normalize(kernel)).outputs)
    minus, size, joined, some = (
        a.view(np.uint16) for a in compile_kernel(kernel)(ALL.view(dtype.np), other.view(dtype.np), mask)
    )
    np.testing.assert_array_equal(minus, ALL ^ 0x8000)
    np.testing.assert_array_equal(size, ALL & 0x7FFF)
    np.testing.assert_array_equal(joined, (ALL & 0x7FFF) | (other & 0x8000))
    number = np.array(1.5, ml_dtypes.bfloat16 if dtype is bf16 else np.float16).view(np.uint16)
    np.testing.assert_array_equal(some, np.where(mask, number, other | 0x8000))


def test_numbers_that_are_compared_stay_floats() -> None:
    k = KernelBuilder("least")
    x, y = (k.input(n, f16[100]) for n in "xy")
    k.output("least", f16[100], lambda ix: k.select(k.lt(x[ix], y[ix]), x[ix], y[ix]))
    k.output("wide", f32[100], lambda ix: (-x[ix]).cast(f32))
    kernel = k.build()
    normal = normalize(kernel)
    assert as_bits(normal) is normal
    arrays = np.random.default_rng(1).standard_normal((2, 100)).astype(np.float16)
    least, wide = compile_kernel(kernel)(*arrays)
    np.testing.assert_array_equal(least, np.minimum(*arrays))
    np.testing.assert_array_equal(wide, -arrays[0].astype(np.float32))
