"""The selective scan and the gated delta rule against plain loops; state, second derivatives and half precision."""

import numpy as np
import pytest

from strata import ops
from strata.core import TensorType, as_dtype, f32, f64
from strata.errors import ShapeError
from strata.mir import Graph, evaluate, evaluate_values, placeholder, pullback, pushforward
from strata.transforms import grad

RNG = np.random.default_rng(11)


def inputs_for(arrays):
    return [placeholder(f"x{i}", TensorType(as_dtype(a.dtype), a.shape)) for i, a in enumerate(arrays)]


def run(fn, *arrays):
    xs = inputs_for(arrays)
    outs = fn(*xs)
    return evaluate_values(outs if isinstance(outs, tuple) else [outs], dict(zip(xs, arrays, strict=True)), {})


def scan_arrays(b=1, s=4, h=3, n=2):
    return [
        RNG.standard_normal((b, s, h)), RNG.uniform(0.01, 0.1, (b, s, h)), -RNG.uniform(0.1, 1, (h, n)),
        RNG.standard_normal((b, s, n)), RNG.standard_normal((b, s, n)),
    ]  # fmt: skip


def delta_arrays(b=2, s=5, h=2, n=3):
    q, k, v = (RNG.standard_normal((b, s, h, n)) for _ in range(3))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return [q, k, v, -RNG.uniform(0, 1, (b, s, h)), RNG.uniform(0, 1, (b, s, h))]


def test_case_5_selective_scan_equals_the_naive_recurrence() -> None:
    x, delta, a, b, c = arrays = scan_arrays(b=2)
    want = np.zeros_like(x)
    for row, ch in np.ndindex(2, 3):
        state = [0.0, 0.0]
        for t in range(4):
            for i in range(2):
                state[i] = (
                    np.exp(delta[row, t, ch] * a[ch, i]) * state[i] + delta[row, t, ch] * b[row, t, i] * x[row, t, ch]
                )
            want[row, t, ch] = sum(c[row, t, i] * state[i] for i in range(2))
    np.testing.assert_allclose(run(ops.selective_scan, *arrays)[0], want, rtol=1e-12)
    xs = inputs_for(arrays)
    parts = ops.selective_scan(*xs).node.op.decompose(*xs)
    np.testing.assert_allclose(evaluate_values([parts], dict(zip(xs, arrays, strict=True)), {})[0], want, rtol=1e-12)


def test_case_78_delta_rule_equals_the_scalar_recurrence() -> None:
    q, k, v, g, beta = arrays = delta_arrays()
    out, last = run(ops.gated_delta_net, *arrays)
    for b, h in np.ndindex(2, 2):
        s = np.zeros((3, 3))  # every batch row starts from zero
        for t in range(5):
            s = s * np.exp(g[b, t, h])
            for j in range(3):
                d = beta[b, t, h] * (v[b, t, h, j] - sum(s[i, j] * k[b, t, h, i] for i in range(3)))
                for i in range(3):
                    s[i, j] += k[b, t, h, i] * d
            want = [sum(s[i, j] * q[b, t, h, i] for i in range(3)) / np.sqrt(3) for j in range(3)]
            np.testing.assert_allclose(out[b, t, h], want, rtol=1e-10)
        np.testing.assert_allclose(last[b, h], s, rtol=1e-10)


def test_carried_state_continues_the_sequence() -> None:
    arrays = delta_arrays()
    whole, end = run(ops.gated_delta_net, *arrays)
    first, middle = run(ops.gated_delta_net, *(a[:, :2] for a in arrays))
    second, last = run(ops.gated_delta_net, *(a[:, 2:] for a in arrays), middle)
    np.testing.assert_allclose(np.concatenate([first, second], 1), whole, rtol=1e-12)
    np.testing.assert_allclose(last, end, rtol=1e-12)


@pytest.mark.parametrize(
    ("fn", "arrays"), [(ops.selective_scan, scan_arrays()), (ops.gated_delta_net, delta_arrays(1, 3, 1, 2))]
)
def test_second_derivative_against_differences(fn, arrays) -> None:
    xs = inputs_for(arrays)
    ts = [placeholder(f"t{i}", x.type) for i, x in enumerate(xs)]
    y = fn(*xs)
    y = y[0] if isinstance(y, tuple) else y
    grads = pullback([y], [y * y], xs)
    moves = [RNG.standard_normal(a.shape) for a in arrays]
    known = dict(zip(xs, arrays, strict=True))
    got = evaluate_values(pushforward(grads, xs, ts), known | dict(zip(ts, moves, strict=True)), {})
    step = 1e-5
    sides = [
        evaluate_values(grads, {x: a + s * m for x, a, m in zip(xs, arrays, moves, strict=True)}, {})
        for s in (step, -step)
    ]
    for value, up, down in zip(got, *sides, strict=True):
        np.testing.assert_allclose(value, (up - down) / (2 * step), rtol=1e-6, atol=1e-7)


def test_mistakes() -> None:
    x = placeholder("x", f32[1, 4, 3])
    with pytest.raises(ShapeError, match="delta is f32"):
        ops.selective_scan(
            x, placeholder("d", f32[1, 4, 2]), *(placeholder("s", t) for t in (f32[3, 2], f32[1, 4, 2], f32[1, 4, 2]))
        )
    q, g = placeholder("q", f64[1, 4, 2, 3]), placeholder("g", f64[1, 4, 2])
    with pytest.raises(ShapeError, match="state is f64"):
        ops.gated_delta_net(q, q, q, g, g, placeholder("s", f64[1, 2, 3, 4]))


def test_the_delta_rule_is_differentiated_step_by_step() -> None:
    """The op is taken apart first: its gradient is that of the loop."""
    arrays = delta_arrays(b=1, s=3, h=1, n=2)
    g = Graph("rule")
    inputs = [g.input(n, f64[a.shape]) for n, a in zip("qkvgb", arrays, strict=True)]
    out, last = ops.gated_delta_net(*inputs)
    g.outputs((out * g.constant(RNG.standard_normal((1, 3, 1, 2)))).sum() + last.sum())
    gradient = grad(g, list("qkvgb"))
    names = {n.op.name for n in gradient.nodes()}
    assert "scan" in names
    assert "gated_delta_net" not in names
    data, step = dict(zip("qkvgb", arrays, strict=True)), 1e-5
    for name, found in zip("qkvgb", evaluate(gradient, data | {"d_output": 1.0}), strict=True):
        for at in np.ndindex(found.shape):
            moved = np.zeros(found.shape)
            moved[at] = step
            up, down = (evaluate(g, data | {name: data[name] + sign * moved})[0] for sign in (1, -1))
            np.testing.assert_allclose(found[at], (up - down) / (2 * step), rtol=1e-6, atol=1e-8, err_msg=name)
