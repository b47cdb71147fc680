"""64-bit integers in WGSL, which has none: pairs of 32-bit words, the lower one first."""

from __future__ import annotations

WIDE = """
fn i64_of_i32(x: i32) -> vec2<u32> { return vec2<u32>(bitcast<u32>(x), bitcast<u32>(x >> 31u)); }

fn u64_of_u32(x: u32) -> vec2<u32> { return vec2<u32>(x, 0u); }

fn is_negative(a: vec2<u32>) -> bool { return (a.y >> 31u) != 0u; }

fn is_zero(a: vec2<u32>) -> bool { return (a.x | a.y) == 0u; }

fn add64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  let low = a.x + b.x;
  return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}

fn sub64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}

fn neg64(a: vec2<u32>) -> vec2<u32> { return vec2<u32>(0u - a.x, select(~a.y, 0u - a.y, a.x == 0u)); }

fn abs64(a: vec2<u32>) -> vec2<u32> { return select(a, neg64(a), is_negative(a)); }

fn mul_wide(a: u32, b: u32) -> vec2<u32> {
  let al = a & 0xffffu;
  let ah = a >> 16u;
  let bl = b & 0xffffu;
  let bh = b >> 16u;
  let low = al * bl;
  let middle = ah * bl + (low >> 16u);
  let cross = al * bh + (middle & 0xffffu);
  return vec2<u32>((cross << 16u) | (low & 0xffffu), ah * bh + (middle >> 16u) + (cross >> 16u));
}

fn mul64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  let low = mul_wide(a.x, b.x);
  return vec2<u32>(low.x, low.y + a.x * b.y + a.y * b.x);
}

fn eq64(a: vec2<u32>, b: vec2<u32>) -> bool { return a.x == b.x && a.y == b.y; }

fn lt_u64(a: vec2<u32>, b: vec2<u32>) -> bool { return a.y < b.y || (a.y == b.y && a.x < b.x); }

fn lt_i64(a: vec2<u32>, b: vec2<u32>) -> bool {
  return bitcast<i32>(a.y) < bitcast<i32>(b.y) || (a.y == b.y && a.x < b.x);
}

fn min_u64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(a, b, lt_u64(b, a)); }

fn max_u64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(a, b, lt_u64(a, b)); }

fn min_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(a, b, lt_i64(b, a)); }

fn max_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return select(a, b, lt_i64(a, b)); }

fn sign_i64(a: vec2<u32>) -> vec2<u32> {
  if (is_zero(a)) { return a; }
  return i64_of_i32(select(1, -1, is_negative(a)));
}

fn sign_u64(a: vec2<u32>) -> vec2<u32> { return vec2<u32>(select(1u, 0u, is_zero(a)), 0u); }

fn shl64(a: vec2<u32>, n: u32) -> vec2<u32> {
  if (n == 0u) { return a; }
  if (n >= 32u) { return vec2<u32>(0u, a.x << (n - 32u)); }
  return vec2<u32>(a.x << n, (a.y << n) | (a.x >> (32u - n)));
}

fn shr_u64_by(a: vec2<u32>, n: u32) -> vec2<u32> {
  if (n == 0u) { return a; }
  if (n >= 32u) { return vec2<u32>(a.y >> (n - 32u), 0u); }
  return vec2<u32>((a.x >> n) | (a.y << (32u - n)), a.y >> n);
}

fn shr_i64_by(a: vec2<u32>, n: u32) -> vec2<u32> {
  let high = bitcast<i32>(a.y);
  if (n == 0u) { return a; }
  if (n >= 32u) { return vec2<u32>(bitcast<u32>(high >> (n - 32u)), bitcast<u32>(high >> 31u)); }
  return vec2<u32>((a.x >> n) | (a.y << (32u - n)), bitcast<u32>(high >> n));
}

fn is_shift(b: vec2<u32>) -> bool { return b.y == 0u && b.x < 64u; }

fn shl_64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  if (!is_shift(b)) { return vec2<u32>(0u, 0u); }
  return shl64(a, b.x);
}

fn shr_u64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  if (!is_shift(b)) { return vec2<u32>(0u, 0u); }
  return shr_u64_by(a, b.x);
}

fn shr_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  if (!is_shift(b)) { return shr_i64_by(a, 63u); }
  return shr_i64_by(a, b.x);
}

fn divide64(a: vec2<u32>, b: vec2<u32>) -> vec4<u32> {
  if (a.y == 0u && b.y == 0u) { return vec4<u32>(a.x / b.x, 0u, a.x % b.x, 0u); }
  var q = vec2<u32>(0u, 0u);
  var r = vec2<u32>(0u, 0u);
  for (var i = 63; i >= 0; i -= 1) {
    let top = (r.y >> 31u) != 0u;
    r = shl64(r, 1u);
    r.x = r.x | (shr_u64_by(a, u32(i)).x & 1u);
    q = shl64(q, 1u);
    if (top || !lt_u64(r, b)) {
      r = sub64(r, b);
      q.x = q.x | 1u;
    }
  }
  return vec4<u32>(q, r);
}

fn div_u64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  if (is_zero(b)) { return b; }
  return divide64(a, b).xy;
}

fn mod_u64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  if (is_zero(b)) { return b; }
  return divide64(a, b).zw;
}

fn truncdiv_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  if (is_zero(b)) { return b; }
  let q = divide64(abs64(a), abs64(b)).xy;
  return select(q, neg64(q), is_negative(a) != is_negative(b));
}

fn rem_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  if (is_zero(b)) { return b; }
  let r = divide64(abs64(a), abs64(b)).zw;
  return select(r, neg64(r), is_negative(a));
}

fn floordiv_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  if (is_zero(b)) { return b; }
  let q = truncdiv_i64(a, b);
  let inexact = !eq64(mul64(q, b), a);
  return select(q, sub64(q, vec2<u32>(1u, 0u)), inexact && is_negative(a) != is_negative(b));
}

fn mod_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  if (is_zero(b)) { return b; }
  let r = rem_i64(a, b);
  return select(r, add64(r, b), !is_zero(r) && is_negative(r) != is_negative(b));
}

fn pow_u64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  var result = vec2<u32>(1u, 0u);
  var base = a;
  var rest = b;
  loop {
    if (is_zero(rest)) { break; }
    if ((rest.x & 1u) != 0u) { result = mul64(result, base); }
    base = mul64(base, base);
    rest = shr_u64_by(rest, 1u);
  }
  return result;
}

fn pow_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  if (!is_negative(b)) { return pow_u64(a, b); }
  if (eq64(a, vec2<u32>(1u, 0u))) { return a; }
  if (eq64(a, vec2<u32>(0xffffffffu, 0xffffffffu))) { return select(vec2<u32>(1u, 0u), a, (b.x & 1u) != 0u); }
  return vec2<u32>(0u, 0u);
}

fn gcd_u64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
  var x = a;
  var y = b;
  loop {
    if (is_zero(y)) { break; }
    let r = divide64(x, y).zw;
    x = y;
    y = r;
  }
  return x;
}

fn gcd_i64(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> { return gcd_u64(abs64(a), abs64(b)); }

fn f32_of_u64(a: vec2<u32>) -> f32 {
  if (a.y == 0u) { return f32(a.x); }
  let shift = 32u - countLeadingZeros(a.y);
  let kept = shr_u64_by(a, shift);
  let lost = !is_zero(sub64(a, shl64(kept, shift)));
  return scaled(f32(kept.x | select(0u, 1u, lost)), i32(shift));
}

fn f32_of_i64(a: vec2<u32>) -> f32 {
  let x = f32_of_u64(abs64(a));
  return select(x, -x, is_negative(a));
}

fn u64_of_f(x: f32) -> vec2<u32> {
  if (is_nan(x) || x < 1.0) { return vec2<u32>(0u, 0u); }
  if (x >= 18446744073709551616.0) { return vec2<u32>(0xffffffffu, 0xffffffffu); }
  let bits = bitcast<u32>(x);
  let e = i32(bits >> 23u) - 150;
  let m = vec2<u32>((bits & 0x7fffffu) | 0x800000u, 0u);
  if (e >= 0) { return shl64(m, u32(e)); }
  return shr_u64_by(m, u32(-e));
}

fn i64_of_f(x: f32) -> vec2<u32> {
  if (x >= 9223372036854775808.0) { return vec2<u32>(0xffffffffu, 0x7fffffffu); }
  if (x <= -9223372036854775808.0) { return vec2<u32>(0u, 0x80000000u); }
  let m = u64_of_f(abs(x));
  return select(m, neg64(m), x < 0.0);
}
"""
