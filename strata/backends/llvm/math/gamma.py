"""lgamma as vector code: f32 is computed in f64, f64 by libm."""

from __future__ import annotations

import math

from strata.backends.llvm.ir.builder import lanes_of, suffix
from strata.backends.llvm.ir.float_ops import VectorMath, library
from strata.backends.llvm.math.logs import log

_ZERO = 1e-13  # no number of f32 but 1 and 2 has a result as near to 0
_SHIFT = 8  # from where Stirling's series with the terms below has 53 bits
# the coefficients of 1/z, 1/z³ …: Bernoulli numbers over 2k (2k - 1)
_STIRLING = (
    0.08333333333333333, -0.002777777777777778, 0.0007936507936507937, -0.0005952380952380953,
    0.0008417508417508417, -0.0019175269175269176, 0.00641025641025641, -0.029550653594771242,
)  # fmt: skip
# sin(π t) / t in t², |t| ≤ ½
_SINE = (
    3.141592653589793, -5.167712780049969, 2.550164039877294, -0.5992645293187382, 0.0821458865698926,
    -0.007370430478762461, 0.0004662996887731736, -2.1903185420805378e-05, 7.69472732830679e-07,
)  # fmt: skip


def lgamma(m: VectorMath, x: str) -> str:
    """log |Γ(x)|. Below 0 it is that of the reflection Γ(x) Γ(-x) = -π / (x sin πx)."""
    if m.bits == 64 or not m.target.has_fma:
        return library("lgamma", m, x)
    f, wide = m.f, m.doubled()
    z = f.convert("fpext", m.type, m.abs(x), wide.type)
    positive = _of_positive(wide, z)
    negative = m.test("olt", x, m.c(0.0))
    some = negative
    if lanes_of(m.type) > 1:
        some = f.call("i1", f"llvm.vector.reduce.or.{suffix(m.flag)}", (m.flag, negative))

    def reflected() -> list[str]:
        left = wide.sub(z, f.intrinsic("roundeven", wide.type, z))
        sine = wide.abs(wide.mul(left, wide.polynomial(wide.mul(left, left), _SINE)))
        turned = wide.sub(log(wide, wide.div(wide.c(math.pi), wide.mul(z, sine))), positive)
        return [wide.select(negative, turned, positive)]

    made = f.if_(some, reflected, lambda: [positive], (wide.type,))[0]
    made = wide.select(wide.test("olt", wide.abs(made), wide.c(_ZERO)), wide.c(0.0), made)
    far = m.test("oeq", m.abs(x), m.c(math.inf))
    return m.select(far, m.c(math.inf), f.convert("fptrunc", wide.type, made, m.type))


def _of_positive(m: VectorMath, z: str) -> str:
    """Stirling's series, small numbers first moved up: Γ(z) = Γ(z + 8) / (z (z + 1) … (z + 7))."""
    small = m.test("olt", z, m.c(float(_SHIFT)))
    w = m.select(small, m.add(z, m.c(float(_SHIFT))), z)
    # in pairs: (z + i) (z + 7 - i) = z² + 7z + i (7 - i)
    base = m.mul(z, m.add(z, m.c(_SHIFT - 1.0)))
    product = base
    for i in range(1, _SHIFT // 2):
        product = m.mul(product, m.add(base, m.c(float(i * (_SHIFT - 1 - i)))))
    inverse = m.div(m.c(1.0), w)
    series = m.mul(inverse, m.polynomial(m.mul(inverse, inverse), _STIRLING))
    tail = m.add(series, m.c(0.5 * math.log(2 * math.pi)))
    # (w - ½) log w - w, less the logarithm of the product
    moved = m.select(small, log(m, product), m.c(0.0))
    return m.add(m.sub(m.mul(m.sub(w, m.c(0.5)), m.sub(log(m, w), m.c(1.0))), moved), m.sub(tail, m.c(0.5)))
