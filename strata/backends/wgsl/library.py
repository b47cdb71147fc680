"""Library functions of shaders, as WGSL text: a shader gets the ones it calls.

WGSL lets compilers assume that no number is infinite or NaN: `x != x` may be false for every x, and `x - x` may be 0
where x is infinite. What depends on such numbers is therefore decided from bits.
"""

from __future__ import annotations

import re
from functools import cache

from strata.backends.wgsl.elementary import ELEMENTARY
from strata.backends.wgsl.int64 import WIDE

_FLOATS = """
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }

fn is_inf(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) == 0x7f800000u; }

fn is_finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }

fn sign_bit(x: f32) -> bool { return (bitcast<u32>(x) >> 31u) != 0u; }

fn from_bits(bits: u32) -> f32 { return bitcast<f32>(bits); }

fn not_a_number() -> f32 { return from_bits(0x7fc00000u); }

fn infinity() -> f32 { return from_bits(0x7f800000u); }

fn ne_f(a: f32, b: f32) -> bool { return a != b || is_nan(a) || is_nan(b); }

fn eq_f(a: f32, b: f32) -> bool { return a == b && !is_nan(a) && !is_nan(b); }

fn max_f(a: f32, b: f32) -> f32 { return select(select(b, a, a > b || is_nan(a)), b, is_nan(b) && !is_nan(a)); }

fn min_f(a: f32, b: f32) -> f32 { return select(select(b, a, a < b || is_nan(a)), b, is_nan(b) && !is_nan(a)); }

fn better_max_f(a: f32, b: f32) -> bool { return !is_nan(b) && (a > b || is_nan(a)); }

fn better_min_f(a: f32, b: f32) -> bool { return !is_nan(b) && (a < b || is_nan(a)); }

fn sub_self(a: f32) -> f32 { return select(not_a_number(), 0.0, is_finite(a)); }

fn div_self(a: f32) -> f32 { return select(not_a_number(), 1.0, is_finite(a) && a != 0.0); }

fn sub_from_zero(a: f32) -> f32 { return select(-a, 0.0, a == 0.0); }

fn mul_zero(a: f32, zero: f32) -> f32 {
  return select(not_a_number(), from_bits((bitcast<u32>(a) ^ bitcast<u32>(zero)) & 0x80000000u), is_finite(a));
}

fn copy_sign(a: f32, b: f32) -> f32 {
  return from_bits((bitcast<u32>(a) & 0x7fffffffu) | (bitcast<u32>(b) & 0x80000000u));
}

fn sign_f(x: f32) -> f32 { return select(copy_sign(1.0, x), x, is_nan(x) || x == 0.0); }

fn pow2(n: i32) -> f32 { return from_bits(u32(n + 127) << 23u); }

fn scaled(x: f32, n: i32) -> f32 {
  let half = n / 2;
  return (x * pow2(half)) * pow2(n - half);
}

fn sqrt_f(x: f32) -> f32 { return select(sqrt(x), not_a_number(), x < 0.0); }

fn rsqrt_f(x: f32) -> f32 { return 1.0 / sqrt_f(x); }

fn rem_f(a: f32, b: f32) -> f32 {
  let x = bitcast<u32>(a) & 0x7fffffffu;
  let y = bitcast<u32>(b) & 0x7fffffffu;
  if (x >= 0x7f800000u || y > 0x7f800000u || y == 0u) { return not_a_number(); }
  if (x < y) { return a; }
  var e = i32(max(x >> 23u, 1u));
  let last = i32(max(y >> 23u, 1u));
  var m = select(x & 0x7fffffu, (x & 0x7fffffu) | 0x800000u, x >= 0x800000u);
  let d = select(y & 0x7fffffu, (y & 0x7fffffu) | 0x800000u, y >= 0x800000u);
  loop {
    if (m >= d) { m -= d; }
    if (e == last || m == 0u) { break; }
    m = m << 1u;
    e -= 1;
  }
  if (m == 0u) { return from_bits(bitcast<u32>(a) & 0x80000000u); }
  let shift = min(countLeadingZeros(m) - 8u, u32(e - 1));
  m = m << shift;
  e -= i32(shift);
  let bits = select(m, (u32(e) << 23u) | (m & 0x7fffffu), m >= 0x800000u);
  return from_bits(bits | (bitcast<u32>(a) & 0x80000000u));
}

fn mod_f(a: f32, b: f32) -> f32 {
  let r = rem_f(a, b);
  if (is_nan(r)) { return r; }
  if (r == 0.0) { return copy_sign(0.0, b); }
  if (sign_bit(r) == sign_bit(b)) { return r; }
  return r + b;
}

fn floordiv_f(a: f32, b: f32) -> f32 {
  if (b == 0.0) {
    let sign = from_bits(bitcast<u32>(a) ^ bitcast<u32>(b));
    return select(copy_sign(infinity(), sign), not_a_number(), a == 0.0 || is_nan(a));
  }
  let r = rem_f(a, b);
  if (is_nan(r)) { return r; }
  var q = (a - r) / b;
  if (r != 0.0 && sign_bit(r) != sign_bit(b)) { q -= 1.0; }
  if (q == 0.0) { return copy_sign(0.0, a / b); }
  let near = floor(q);
  return select(near, near + 1.0, q - near > 0.5);
}

fn truncdiv_f(a: f32, b: f32) -> f32 { return trunc(a / b); }

fn i32_of_f(x: f32) -> i32 {
  if (is_nan(x)) { return 0; }
  if (x >= 2147483648.0) { return 2147483647; }
  if (x <= -2147483648.0) { return -2147483647 - 1; }
  return i32(x);
}

fn u32_of_f(x: f32) -> u32 {
  if (is_nan(x) || x <= 0.0) { return 0u; }
  if (x >= 4294967296.0) { return 0xffffffffu; }
  return u32(x);
}

fn rounded(x: f32, bits: i32, least: i32) -> f32 {
  let magnitude = bitcast<u32>(x) & 0x7fffffffu;
  if (magnitude >= 0x7f800000u) { return x; }
  let e = max(i32(magnitude >> 23u) - 127, least);
  return scaled(round(scaled(x, bits - e)), e - bits);
}

fn round_f16(x: f32) -> f32 {
  let r = rounded(x, 10, -14);
  return select(r, copy_sign(infinity(), x), abs(r) > 65504.0);
}

fn round_f8e5m2(x: f32) -> f32 {
  let r = rounded(x, 2, -14);
  return select(r, copy_sign(infinity(), x), abs(r) > 57344.0);
}

fn round_f8e4m3(x: f32) -> f32 {
  let r = rounded(x, 3, -6);
  return select(r, not_a_number(), abs(r) > 448.0 || is_nan(x));
}

fn round_bf16(x: f32) -> f32 { return f32_of_bf16(bf16_of_f32(x)); }

fn bf16_of_f32(x: f32) -> u32 {
  let bits = bitcast<u32>(x);
  if (is_nan(x)) { return (bits >> 16u) | 0x40u; }
  return (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
}

fn f32_of_bf16(bits: u32) -> f32 { return from_bits(bits << 16u); }

fn packed_bits(x: f32, bits: u32, bias: i32) -> u32 {
  let magnitude = bitcast<u32>(x) & 0x7fffffffu;
  let e = i32(magnitude >> 23u) - 127 + bias;
  if (e <= 0) { return u32(scaled(abs(x), i32(bits) + bias - 1)); }
  return (u32(e) << bits) | ((magnitude & 0x7fffffu) >> (23u - bits));
}

fn f16_of_f32(x: f32) -> u32 {
  let sign = (bitcast<u32>(x) >> 16u) & 0x8000u;
  if (is_nan(x)) { return sign | 0x7e00u; }
  let r = round_f16(x);
  if (is_inf(r)) { return sign | 0x7c00u; }
  return sign | packed_bits(r, 10u, 15);
}

fn f32_of_f16(bits: u32) -> f32 {
  let sign = (bits & 0x8000u) << 16u;
  let magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) { return from_bits(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13u)); }
  if (magnitude < 0x400u) { return copy_sign(f32(magnitude) * 5.9604644775390625e-8, from_bits(sign)); }
  return from_bits(sign | ((magnitude << 13u) + 0x38000000u));
}

fn f8e5m2_of_f32(x: f32) -> u32 {
  let sign = (bitcast<u32>(x) >> 24u) & 0x80u;
  if (is_nan(x)) { return sign | 0x7eu; }
  let r = round_f8e5m2(x);
  if (is_inf(r)) { return sign | 0x7cu; }
  return sign | packed_bits(r, 2u, 15);
}

fn f32_of_f8e5m2(bits: u32) -> f32 { return f32_of_f16(bits << 8u); }

fn f8e4m3_of_f32(x: f32) -> u32 {
  let sign = (bitcast<u32>(x) >> 24u) & 0x80u;
  let r = round_f8e4m3(x);
  if (!is_finite(r)) { return sign | 0x7fu; }
  return sign | packed_bits(r, 3u, 7);
}

fn f32_of_f8e4m3(bits: u32) -> f32 {
  let sign = (bits & 0x80u) << 24u;
  let magnitude = bits & 0x7fu;
  if (magnitude == 0x7fu) { return not_a_number(); }
  if (magnitude < 8u) { return copy_sign(f32(magnitude) * 0.001953125, from_bits(sign)); }
  return from_bits(sign | ((magnitude << 20u) + 0x3c000000u));
}
"""

_INTEGERS = """
fn floordiv_i(a: i32, b: i32) -> i32 {
  if (b == 0) { return 0; }
  if (b == -1) { return -a; }
  let q = a / b;
  return select(q, q - 1, q * b != a && ((a < 0) != (b < 0)));
}

fn mod_i(a: i32, b: i32) -> i32 {
  if (b == 0 || b == -1) { return 0; }
  let r = a % b;
  return select(r, r + b, r != 0 && ((r < 0) != (b < 0)));
}

fn truncdiv_i(a: i32, b: i32) -> i32 {
  if (b == 0) { return 0; }
  if (b == -1) { return -a; }
  return a / b;
}

fn rem_i(a: i32, b: i32) -> i32 {
  if (b == 0 || b == -1) { return 0; }
  return a % b;
}

fn div_u(a: u32, b: u32) -> u32 {
  if (b == 0u) { return 0u; }
  return a / b;
}

fn mod_u(a: u32, b: u32) -> u32 {
  if (b == 0u) { return 0u; }
  return a % b;
}

fn shl_i(a: i32, b: i32, bits: i32) -> i32 {
  if (b < 0 || b >= bits) { return 0; }
  return a << u32(b);
}

fn shr_i(a: i32, b: i32, bits: i32) -> i32 {
  if (b < 0 || b >= bits) { return a >> 31u; }
  return a >> u32(b);
}

fn shl_u(a: u32, b: u32, bits: u32) -> u32 {
  if (b >= bits) { return 0u; }
  return a << b;
}

fn shr_u(a: u32, b: u32, bits: u32) -> u32 {
  if (b >= bits) { return 0u; }
  return a >> b;
}

fn pow_u(a: u32, b: u32) -> u32 {
  var result = 1u;
  var base = a;
  var rest = b;
  loop {
    if (rest == 0u) { break; }
    if ((rest & 1u) != 0u) { result *= base; }
    base *= base;
    rest = rest >> 1u;
  }
  return result;
}

fn pow_i(a: i32, b: i32) -> i32 {
  if (b >= 0) { return bitcast<i32>(pow_u(bitcast<u32>(a), bitcast<u32>(b))); }
  if (a == 1) { return 1; }
  if (a == -1) { return select(1, -1, (b & 1) != 0); }
  return 0;
}

fn gcd_u(a: u32, b: u32) -> u32 {
  var x = a;
  var y = b;
  loop {
    if (y == 0u) { break; }
    let r = x % y;
    x = y;
    y = r;
  }
  return x;
}

fn gcd_i(a: i32, b: i32) -> i32 { return bitcast<i32>(gcd_u(bitcast<u32>(abs(a)), bitcast<u32>(abs(b)))); }
"""


@cache
def functions() -> dict[str, str]:
    """Every function by name."""
    text = f"{_FLOATS}\n{_INTEGERS}\n{ELEMENTARY}\n{WIDE}"
    parts = re.split(r"\n(?=fn )", text.replace("\n\n", "\n"))
    return {m[1]: part.strip() for part in parts if (m := re.match(r"fn (\w+)", part.strip()))}


@cache
def _uses(name: str) -> tuple[str, ...]:
    body = functions()[name].partition("(")[2]
    return called(body)


def called(text: str) -> tuple[str, ...]:
    """Names of library functions that a text calls."""
    return tuple(n for n in dict.fromkeys(re.findall(r"\b([a-z]\w*)\(", text)) if n in functions())


def needed(text: str) -> str:
    """The functions that a text needs, in the order of the library."""
    found: set[str] = set()
    stack: list[str] = list(called(text))
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack += _uses(name)
    return "\n".join(part for name, part in functions().items() if name in found)
