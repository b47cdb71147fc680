"""Rotary embeddings against plain loops, and their tables against the published rules."""

import math

import numpy as np
import pytest

from strata import ops
from strata.core import TensorType, as_dtype, f32
from strata.errors import OptionError, ShapeError
from strata.mir import evaluate_values, placeholder, pushforward
from strata.ops.nn.rope import RopeScaling, rope_frequencies, rope_tables

RNG = np.random.default_rng(3)


def run(fn, *arrays):
    inputs = [placeholder(f"x{i}", TensorType(as_dtype(a.dtype), a.shape)) for i, a in enumerate(arrays)]
    return evaluate_values([fn(*inputs)], dict(zip(inputs, arrays, strict=True)), {})[0]


def loop(x, cos, sin, d, n_rot, interleaved=False):
    """[B, S, h·D] by the formula."""
    out = x.copy()
    half = n_rot // 2
    for b, s, h, i in np.ndindex(x.shape[0], x.shape[1], x.shape[2] // d, half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, c = x[b, s, h * d + first], x[b, s, h * d + second]
        out[b, s, h * d + first] = a * cos[s, i] - c * sin[s, i]
        out[b, s, h * d + second] = c * cos[s, i] + a * sin[s, i]
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("n_rot", [4, 8])
def test_formula_in_every_layout(n_rot, interleaved) -> None:
    x = RNG.standard_normal((2, 5, 24))
    cos, sin = rope_tables(9, 8, n_rot=n_rot, dtype="f64")
    assert cos.shape == (9, 4)  # the row pitch is D/2 whatever n_rot is
    want = loop(x, cos, sin, 8, n_rot, interleaved)
    options = {"n_rot": n_rot, "interleaved": interleaved}
    np.testing.assert_allclose(run(lambda *v: ops.rope(*v, **options), x, cos, sin), want, rtol=1e-12)
    np.testing.assert_allclose(run(lambda *v: ops.rope(*v, **options), x[0], cos, sin), want[0], rtol=1e-12)
    heads, wanted = x.reshape(2, 5, 3, 8), want.reshape(2, 5, 3, 8)
    np.testing.assert_allclose(
        run(lambda *v: ops.rope(*v, layout="bshd", **options), heads, cos, sin), wanted, rtol=1e-12
    )
    major = run(lambda *v: ops.rope(*v, layout="bhsd", **options), heads.transpose(0, 2, 1, 3), cos, sin)
    np.testing.assert_allclose(major, wanted.transpose(0, 2, 1, 3), rtol=1e-12)


def test_rotation_by_the_negative_angle_undoes_it() -> None:
    x = RNG.standard_normal((2, 5, 16))
    cos, sin = rope_tables(5, 8, dtype="f64")
    back = run(lambda *v: ops.rope_backward(ops.rope(*v), *v[1:]), x, cos, sin)
    np.testing.assert_allclose(back, x, rtol=1e-12)


def test_tangent_turns_the_same_way() -> None:
    x, t = placeholder("x", f32[3, 4]), placeholder("t", f32[3, 4])
    cos, sin = rope_tables(3, 4)
    (dy,) = pushforward([ops.rope(x, cos, sin)], [x], [t])
    assert dy.same_as(ops.rope(t, cos, sin))


def test_batch_tables_and_offsets() -> None:
    x = RNG.standard_normal((2, 3, 8))
    cos, sin = rope_tables(10, 4, dtype="f64")
    rows = np.array([2, 5])
    want = np.stack([loop(x[i : i + 1], cos[rows[i] :], sin[rows[i] :], 4, 4)[0] for i in range(2)])
    tables = [np.stack([t[r : r + 3] for r in rows]) for t in (cos, sin)]
    np.testing.assert_allclose(run(ops.rope, x, *tables), want, rtol=1e-12)
    np.testing.assert_allclose(run(lambda *v: ops.rope(*v, offset=2), x, cos, sin)[0], want[0], rtol=1e-12)
    np.testing.assert_allclose(run(lambda *v: ops.rope(*v[:3], offset=v[3]), x, cos, sin, rows), want, rtol=1e-12)
    ids = rows[:, None] + np.arange(3)
    np.testing.assert_allclose(run(lambda *v: ops.rope(*v[:3], positions=v[3]), x, cos, sin, ids), want, rtol=1e-12)


def test_short_table_is_an_error() -> None:
    x = placeholder("x", f32[2, 6, 8])
    cos, sin = rope_tables(5, 8)
    with pytest.raises(ShapeError, match="has 5 rows for 6 tokens"):
        ops.rope(x, cos, sin)
    with pytest.raises(ShapeError, match="has no row 6"):
        ops.rope(x, *rope_tables(6, 8), offset=1)
    with pytest.raises(OptionError, match="needs a layout"):
        ops.rope(placeholder("x", f32[2, 6, 2, 8]), cos, sin)
    with pytest.raises(OptionError, match="not an even number"):
        ops.rope(x, *rope_tables(6, 8), n_rot=3)


def test_case_97_axial_rope_of_a_batch_equals_single_items() -> None:
    x = RNG.standard_normal((3, 12, 16))
    options = {"end_x": 3, "end_y": 2, "head_dim": 8, "num_heads": 2, "repeat_factor": 2}
    whole = run(lambda v: ops.axial_rope2d(v, **options), x)
    for i in range(3):
        np.testing.assert_array_equal(run(lambda v: ops.axial_rope2d(v, **options), x[i : i + 1])[0], whole[i])


def test_linear_and_ntk_frequencies() -> None:
    plain = rope_frequencies(8, 1e4)
    np.testing.assert_allclose(plain, [1e4 ** (-i / 4) for i in range(4)])
    np.testing.assert_allclose(RopeScaling("linear", 4.0).frequencies(8, 1e4, 0)[0], plain / 4)
    stretched = RopeScaling("ntk", 4.0).frequencies(8, 1e4, 0)[0]
    assert stretched[0] == 1.0
    np.testing.assert_allclose(stretched[-1], plain[-1] / 4)  # the slowest pair is interpolated in full
    grown = RopeScaling("dynamic", 2.0, original_length=100).frequencies(8, 1e4, 50)[0]
    np.testing.assert_allclose(grown, plain)


def test_llama3_frequencies() -> None:
    rule = RopeScaling("llama3", 8.0, original_length=8192, low_freq_factor=1.0, high_freq_factor=4.0)
    got, factor = rule.frequencies(128, 5e5, 0)
    assert factor == 1.0
    for rate, result in zip(rope_frequencies(128, 5e5), got, strict=True):
        wave = 2 * math.pi / rate
        if wave < 8192 / 4:
            want = rate
        elif wave > 8192 / 1:
            want = rate / 8
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            want = (1 - smooth) * rate / 8 + smooth * rate
        assert math.isclose(result, want, rel_tol=1e-12)


def test_yarn_frequencies() -> None:
    rule = RopeScaling("yarn", 4.0, original_length=4096)
    got, factor = rule.frequencies(64, 1e4, 0)
    plain = rope_frequencies(64, 1e4)
    assert math.isclose(factor, 0.1 * math.log(4) + 1)
    np.testing.assert_allclose(got[:5], plain[:5])  # fast pairs are left alone
    np.testing.assert_allclose(got[-5:], plain[-5:] / 4)  # slow pairs are interpolated
    assert np.all(np.diff(got / plain) <= 1e-12)
    cos, _ = rope_tables(2, 64, scaling=rule)
    np.testing.assert_allclose(cos[0], factor, rtol=1e-6)
