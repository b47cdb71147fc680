"""Elementary functions in WGSL to a few ulp: its built-in ones promise less.

`sin` may be off by 2^-11, `log` by 2^-21. Polynomials here are least-squares fits on Chebyshev points, reweighted until
the largest relative error is as small as it gets in f32 (1e-7 or less). No step relies on exact cancellation that a
compiler may rewrite: arguments are split by masking bits.
"""

from __future__ import annotations

from collections.abc import Sequence


def _horner(x: str, coefficients: Sequence[float]) -> str:
    """A polynomial, its highest coefficient first."""
    text = repr(coefficients[0])
    for c in coefficients[1:]:
        text = f"({text} * {x} + {c!r})"
    return text


_EXP = _horner("r", (0.0001985812996281311, 0.0013934493, 0.008333362, 0.041666456, 0.16666667, 0.5))
_EXPM1 = _horner(
    "x", (2.48500637098914e-05, 0.0001998733205255121, 0.001388911, 0.008333113, 0.041666664, 0.16666667, 0.5)
)
_LOG = _horner("z", (0.23372503, 0.28549242, 0.40000135, 0.6666667))
_SIN = _horner("z", (2.724633759498829e-06, -0.00019840057939291, 0.008333332, -0.16666667))
_COS = _horner("z", (2.4545079213567078e-05, -0.001388829, 0.041666664))
_ASIN = _horner("z", (0.03380983, 0.017075947, 0.031116435, 0.04459802, 0.07500099, 0.16666666))
_ATAN = _horner("z", (-0.06454819, 0.10744796, -0.14264078, 0.19999544, -0.3333333))
_SINH = _horner("z", (2.8066504000889836e-06, 0.00019838058506138623, 0.008333339, 0.16666667))
_TANH = _horner("z", (0.0022695481, -0.00832323, 0.021762516, -0.053958464, 0.133333, -0.33333334))
_ASINH = _horner("z", (0.0099527305, -0.02053712, 0.030158482, -0.044630233, 0.074999735, -0.16666667))
_ATANH = _horner("z", (0.15483063, 0.042128414, 0.097132325, 0.11056763, 0.14287844, 0.19999973, 0.33333334))
_ERF = _horner(
    "z",
    (-9.641515134717338e-06, 0.0001125694761867635, -0.0008482828852720559, 0.0052209455, -0.0268654, 0.11283782,
     -0.37612638, 1.1283792),
)  # fmt: skip
_ERFC = _horner(  # erfc(x) exp(x²) / t of t = 1 / (1 + x / 2), from 0.9 on
    "t",
    (-0.065342754, 0.2031717, -0.1672585, -0.051055863, 0.019902613, 0.069764294, 0.18021385, 0.24621718, 0.28214726,
     0.2820929),
)  # fmt: skip

ELEMENTARY = f"""
fn exp_near(r: f32) -> f32 {{ return {_EXP} * r * r + r + 1.0; }}

fn exp_f(x: f32) -> f32 {{
  if (is_nan(x)) {{ return x; }}
  if (x > 88.722839) {{ return infinity(); }}
  if (x < -104.0) {{ return 0.0; }}
  let n = round(x * 1.44269504);
  let r = (x - n * 0.693359375) + n * 2.12194440e-4;
  return scaled(exp_near(r), i32(n));
}}

fn exp2_f(x: f32) -> f32 {{
  if (is_nan(x)) {{ return x; }}
  if (x >= 128.0) {{ return infinity(); }}
  if (x < -150.0) {{ return 0.0; }}
  let n = round(x);
  return scaled(exp_near((x - n) * 0.69314718), i32(n));
}}

fn expm1_f(x: f32) -> f32 {{
  if (abs(x) > 0.5 || is_nan(x)) {{ return exp_f(x) - 1.0; }}
  return x + {_EXPM1} * x * x;
}}

fn log_parts(x: f32) -> vec2<f32> {{
  var bits = bitcast<u32>(x);
  var e = 0.0;
  if (bits < 0x800000u) {{
    let m = bits << (countLeadingZeros(bits) - 8u);
    e = -f32(countLeadingZeros(bits) - 8u) - 149.0 + 150.0 - 127.0;
    bits = (m & 0x7fffffu) | 0x3f800000u;
  }} else {{
    e = f32(i32(bits >> 23u) - 127);
    bits = (bits & 0x7fffffu) | 0x3f800000u;
  }}
  var m = from_bits(bits);
  if (m > 1.41421356) {{
    m *= 0.5;
    e += 1.0;
  }}
  return vec2<f32>(m, e);
}}

fn log_near(f: f32) -> f32 {{
  let s = f / (2.0 + f);
  let z = s * s;
  let p = {_LOG} * z;
  return 2.0 * s + s * p;
}}

fn log_f(x: f32) -> f32 {{
  if (is_nan(x) || x < 0.0) {{ return not_a_number(); }}
  if ((bitcast<u32>(x) & 0x7fffffffu) == 0u) {{ return -infinity(); }}
  if (is_inf(x)) {{ return x; }}
  let p = log_parts(x);
  return p.y * 0.693359375 + (log_near(p.x - 1.0) - p.y * 2.12194440e-4);
}}

fn log2_f(x: f32) -> f32 {{
  if (is_nan(x) || x < 0.0) {{ return not_a_number(); }}
  if ((bitcast<u32>(x) & 0x7fffffffu) == 0u) {{ return -infinity(); }}
  if (is_inf(x)) {{ return x; }}
  let p = log_parts(x);
  return p.y + log_near(p.x - 1.0) * 1.44269504;
}}

fn log1p_f(x: f32) -> f32 {{
  if (abs(x) < 0.3) {{ return select(log_near(x), x, x == 0.0); }}
  return log_f(1.0 + x);
}}

fn pow_f(x: f32, y: f32) -> f32 {{
  if (y == 0.0 || x == 1.0) {{ return 1.0; }}
  if (is_nan(x) || is_nan(y)) {{ return not_a_number(); }}
  let whole = is_inf(y) || floor(y) == y;
  let odd = is_finite(y) && whole && abs(y) < 16777216.0 && (u32(abs(y)) & 1u) != 0u;
  let a = abs(x);
  let sign = select(1.0, -1.0, odd && sign_bit(x));
  if (a == 0.0) {{ return select(sign * 0.0, sign * infinity(), y < 0.0); }}
  if (is_inf(y)) {{
    if (a == 1.0) {{ return 1.0; }}
    return select(0.0, infinity(), (a > 1.0) == (y > 0.0));
  }}
  if (is_inf(a)) {{ return select(sign * infinity(), sign * 0.0, y < 0.0); }}
  if (x < 0.0 && !whole) {{ return not_a_number(); }}
  let p = log_parts(a);
  let f = log_near(p.x - 1.0);
  let fh = from_bits(bitcast<u32>(f) & 0xfffff000u);
  let yh = from_bits(bitcast<u32>(y) & 0xfffff000u);
  let yl = y - yh;
  let rough = y * (p.y + f * 1.44269504);
  if (rough > 130.0) {{ return sign * infinity(); }}
  if (rough < -152.0) {{ return sign * 0.0; }}
  let n = round(rough);
  let main = (yh * p.y - n) + yl * p.y;
  let rest = yh * fh + (yl * fh + y * (f - fh));
  return sign * scaled(exp_f(main * 0.69314718 + rest), i32(n));
}}

fn two_over_pi(at: i32) -> u32 {{
  switch at {{
    case 0: {{ return 0u; }}
    case 1: {{ return 0xa2f9836eu; }}
    case 2: {{ return 0x4e441529u; }}
    case 3: {{ return 0xfc2757d1u; }}
    case 4: {{ return 0xf534ddc0u; }}
    case 5: {{ return 0xdb629599u; }}
    case 6: {{ return 0x3c439041u; }}
    default: {{ return 0xfe5163abu; }}
  }}
}}

fn window(at: i32, bits: u32) -> u32 {{
  if (bits == 0u) {{ return two_over_pi(at); }}
  return (two_over_pi(at) << bits) | (two_over_pi(at + 1) >> (32u - bits));
}}

fn reduced(x: f32) -> vec2<f32> {{
  if (abs(x) < 30000.0) {{
    let n = round(x * 0.636619772);
    let r = ((x - n * 1.5703125) - n * 4.8351287841796875e-4) - n * 3.1385570764541626e-7;
    return vec2<f32>(r - n * 6.0771005065061922e-11, f32(i32(n) & 3));
  }}
  let bits = bitcast<u32>(x) & 0x7fffffffu;
  let e = i32(bits >> 23u) - 150 + 30;
  let m = (bits & 0x7fffffu) | 0x800000u;
  let word = e >> 5u;
  let shift = u32(e & 31);
  let low = mul_wide(window(word + 2, shift), m);
  let middle = mul_wide(window(word + 1, shift), m);
  let high = window(word, shift) * m;
  let second = middle.x + low.y;
  let first = high + middle.y + select(0u, 1u, second < low.y);
  let quadrant = (first + 0x20000000u) >> 30u;
  let fraction = vec2<u32>(second, first - (quadrant << 30u));
  let negative = (fraction.y >> 31u) != 0u;
  let magnitude = select(fraction, neg64(fraction), negative);
  var r = f32_of_u64(magnitude) * 3.4061215800e-19;
  if (negative) {{ r = -r; }}
  if (x < 0.0) {{ return vec2<f32>(-r, f32((4u - (quadrant & 3u)) & 3u)); }}
  return vec2<f32>(r, f32(quadrant & 3u));
}}

fn sin_near(r: f32) -> f32 {{
  let z = r * r;
  return r + r * z * {_SIN};
}}

fn cos_near(r: f32) -> f32 {{
  let z = r * r;
  return 1.0 - 0.5 * z + z * z * {_COS};
}}

fn sin_f(x: f32) -> f32 {{
  if (!is_finite(x)) {{ return not_a_number(); }}
  if (x == 0.0) {{ return x; }}
  let p = reduced(x);
  let q = i32(p.y);
  let s = select(sin_near(p.x), cos_near(p.x), (q & 1) != 0);
  return select(s, -s, q >= 2);
}}

fn cos_f(x: f32) -> f32 {{
  if (!is_finite(x)) {{ return not_a_number(); }}
  let p = reduced(x);
  let q = i32(p.y);
  let s = select(cos_near(p.x), sin_near(p.x), (q & 1) != 0);
  return select(s, -s, q == 1 || q == 2);
}}

fn tan_f(x: f32) -> f32 {{
  if (!is_finite(x)) {{ return not_a_number(); }}
  if (x == 0.0) {{ return x; }}
  let p = reduced(x);
  let s = sin_near(p.x);
  let c = cos_near(p.x);
  return select(s / c, -c / s, (i32(p.y) & 1) != 0);
}}

fn asin_near(x: f32) -> f32 {{
  let z = x * x;
  return x + x * z * {_ASIN};
}}

fn asin_f(x: f32) -> f32 {{
  let a = abs(x);
  if (is_nan(x) || a > 1.0) {{ return not_a_number(); }}
  if (a <= 0.5) {{ return asin_near(x); }}
  return copy_sign(1.57079633 - 2.0 * asin_near(sqrt(0.5 * (1.0 - a))), x);
}}

fn acos_f(x: f32) -> f32 {{
  let a = abs(x);
  if (is_nan(x) || a > 1.0) {{ return not_a_number(); }}
  if (a <= 0.5) {{ return 1.57079633 - asin_near(x); }}
  let y = 2.0 * asin_near(sqrt(0.5 * (1.0 - a)));
  return select(y, 3.14159265 - y, x < 0.0);
}}

fn atan_near(x: f32) -> f32 {{
  let z = x * x;
  return x + x * z * {_ATAN};
}}

fn atan_f(x: f32) -> f32 {{
  if (is_nan(x)) {{ return x; }}
  let a = abs(x);
  if (a > 2.41421356) {{ return copy_sign(1.57079633 - atan_near(1.0 / a), x); }}
  if (a > 0.41421356) {{ return copy_sign(0.785398163 + atan_near((a - 1.0) / (a + 1.0)), x); }}
  return atan_near(x);
}}

fn atan2_f(y: f32, x: f32) -> f32 {{
  if (is_nan(x) || is_nan(y)) {{ return not_a_number(); }}
  let a = abs(y);
  let b = abs(x);
  var angle = 0.0;
  if (is_inf(y) && is_inf(x)) {{
    angle = 0.785398163;
  }} else if (a > b) {{
    angle = 1.57079633 - atan_f(b / a);
  }} else if (b > 0.0) {{
    angle = atan_f(a / b);
  }}
  if (sign_bit(x)) {{ angle = 3.14159265 - angle; }}
  return copy_sign(angle, y);
}}

fn sinh_f(x: f32) -> f32 {{
  let a = abs(x);
  if (a <= 1.0) {{
    let z = x * x;
    return x + x * z * {_SINH};
  }}
  let w = exp_f(0.5 * a);
  return copy_sign((0.5 * w) * w - (0.5 / w) / w, x);
}}

fn cosh_f(x: f32) -> f32 {{
  let w = exp_f(0.5 * abs(x));
  return (0.5 * w) * w + (0.5 / w) / w;
}}

fn tanh_f(x: f32) -> f32 {{
  if (is_nan(x)) {{ return x; }}
  let a = abs(x);
  if (a > 0.625) {{
    if (a > 10.0) {{ return copy_sign(1.0, x); }}
    return copy_sign(1.0 - 2.0 / (exp_f(2.0 * a) + 1.0), x);
  }}
  let z = x * x;
  return x + x * z * {_TANH};
}}

fn asinh_f(x: f32) -> f32 {{
  let a = abs(x);
  if (a <= 0.5) {{
    let z = x * x;
    return x + x * z * {_ASINH};
  }}
  if (a > 4096.0 || is_nan(x)) {{ return copy_sign(log_f(a) + 0.69314718, x); }}
  return copy_sign(log_f(a + sqrt(a * a + 1.0)), x);
}}

fn acosh_f(x: f32) -> f32 {{
  if (is_nan(x) || x < 1.0) {{ return not_a_number(); }}
  if (x > 4096.0) {{ return log_f(x) + 0.69314718; }}
  let d = x - 1.0;
  return log1p_f(d + sqrt(d * (x + 1.0)));
}}

fn atanh_f(x: f32) -> f32 {{
  let a = abs(x);
  if (is_nan(x) || a > 1.0) {{ return not_a_number(); }}
  if (a == 1.0) {{ return copy_sign(infinity(), x); }}
  if (a <= 0.5) {{
    let z = x * x;
    return x + x * z * {_ATANH};
  }}
  return copy_sign(0.5 * log_f((1.0 + a) / (1.0 - a)), x);
}}

fn erf_near(x: f32) -> f32 {{
  let z = x * x;
  return x * {_ERF};
}}

fn erfc_far(x: f32) -> f32 {{
  if (x > 10.1) {{ return 0.0; }}
  let t = 1.0 / (1.0 + 0.5 * x);
  let h = from_bits(bitcast<u32>(x) & 0xfffff000u);
  return t * {_ERFC} * exp_f(-h * h) * exp_f(-(x - h) * (x + h));
}}

fn erf_f(x: f32) -> f32 {{
  if (is_nan(x)) {{ return x; }}
  let a = abs(x);
  if (a < 0.95) {{ return erf_near(x); }}
  return copy_sign(1.0 - erfc_far(a), x);
}}

fn erfc_f(x: f32) -> f32 {{
  if (is_nan(x)) {{ return x; }}
  if (abs(x) < 0.95) {{ return 1.0 - erf_near(x); }}
  let y = erfc_far(abs(x));
  return select(y, 2.0 - y, x < 0.0);
}}

fn gelu_f(x: f32) -> f32 {{
  if (is_inf(x)) {{ return select(x, not_a_number(), x < 0.0); }}
  return 0.5 * x * erfc_f(-0.707106781 * x);
}}

fn sigmoid_f(x: f32) -> f32 {{
  if (is_nan(x)) {{ return x; }}
  let e = exp_f(-abs(x));
  return select(1.0 / (1.0 + e), e / (1.0 + e), x < 0.0);
}}

fn lgamma_positive(x: f32) -> f32 {{
  var y = x;
  var p = 1.0;
  loop {{
    if (y >= 8.0) {{ break; }}
    p *= y;
    y += 1.0;
  }}
  let z = 1.0 / y;
  let s = z * (0.083333333 - z * z * (0.0027777778 - z * z * 7.9365079e-4));
  return ((y - 0.5) * log_f(y) - y) + 0.918938533 + s - log_f(p);
}}

fn lgamma_f(x: f32) -> f32 {{
  if (is_nan(x)) {{ return x; }}
  if (is_inf(x)) {{ return infinity(); }}
  if (x > 0.0) {{ return lgamma_positive(x); }}
  if (floor(x) == x) {{ return infinity(); }}
  let f = x - floor(x);
  return 1.14472989 - log_f(abs(sin_f(3.14159265 * min(f, 1.0 - f)))) - lgamma_positive(1.0 - x);
}}
"""
