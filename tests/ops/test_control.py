"""scan, cond and while against plain Python loops; the numbered cases are those of the operator specification."""

import numpy as np
import pytest

from strata.core import bf16, f16, f32, f64, i64, sym
from strata.errors import MissingRuleError, OptionError, ShapeError
from strata.mir import (
    Graph,
    Value,
    batch,
    evaluate,
    evaluate_values,
    parse,
    placeholder,
    pullback,
    pushforward,
    toposort,
)
from strata.ops import Cond, ScanOp, cond, dense_solve, scan, scan_backward, scan_carry, while_loop

RNG = np.random.default_rng(7)


def run(values, known):
    single = isinstance(values, Value)
    results = evaluate_values([values] if single else values, known, {})
    return results[0] if single else results


def differences(f, x, step=1e-6):
    """The gradient of a scalar function by central differences."""
    grad = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        grad[i] = (f(up) - f(down)) / (2 * step)
    return grad


def test_30_growth_by_a_tenth():
    init = placeholder("init", f64[3])
    last, _ = scan(lambda c, _: (c + c * 0.1, None), init, length=10)
    np.testing.assert_allclose(run(last, {init: np.ones(3)}), 1.1**10, rtol=1e-12)


def test_31_cumulative_sum_of_xs():
    init, xs = placeholder("init", f64[3]), placeholder("xs", f64[4, 3])
    last, _ = scan(lambda c, x: (c + x, None), init, xs)
    rows = np.arange(1.0, 13.0).reshape(4, 3)
    np.testing.assert_allclose(run(last, {init: np.zeros(3), xs: rows}), rows.sum(0), rtol=1e-12)


def laplacian(n, dt):
    return np.eye(n) + dt * (2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1))


def test_32_backward_euler_with_a_drive():
    m = laplacian(4, 0.1)
    init, xs = placeholder("init", f64[4]), placeholder("xs", f64[5, 4])
    last, _ = scan(lambda c, x: (dense_solve(m, c + x), None), init, xs)
    drive = np.zeros((5, 4))
    drive[0, 1] = 1.0
    state = np.zeros(4)
    for row in drive:
        state = np.linalg.solve(m, state + row)
    np.testing.assert_allclose(run(last, {init: np.zeros(4), xs: drive}), state, rtol=1e-12)


def test_33_34_heat_equation_and_its_trajectory():
    m = laplacian(4, 0.05)
    init = placeholder("init", f64[4])
    last, rows = scan(lambda c, _: (dense_solve(m, c),) * 2, init, length=5)
    pulse = np.array([0.0, 1.0, 0.0, 0.0])
    end, trajectory = run([last, rows], {init: pulse})
    state = pulse
    for row in trajectory:
        state = np.linalg.solve(m, state)
        np.testing.assert_allclose(row, state, rtol=1e-12)
    mass = trajectory.sum(1)
    assert 0 < mass[-1] < 1
    assert np.all(np.diff(mass) <= 0)
    np.testing.assert_array_equal(trajectory[-1], end)


def test_35_gradient_of_a_linear_scan():
    init = placeholder("init", f64[3])
    last, _ = scan(lambda c, _: (c + c * 0.1, None), init, length=5)
    (grad,) = pullback([last.sum()], [Value(ONE.node)], [init])
    np.testing.assert_allclose(run(grad, {init: np.ones(3)}), 1.1**5, rtol=1e-12)


def test_36_gradient_through_three_solves():
    init, m = placeholder("init", f64[4]), placeholder("m", f64[4, 4])
    last, _ = scan(lambda c, _: (dense_solve(m, c), None), init, length=3)
    loss = (last * last).sum()
    grads = pullback([loss], [ONE], [init, m])
    known = {init: RNG.standard_normal(4), m: laplacian(4, 0.3)}
    for leaf, grad in zip((init, m), grads, strict=True):
        expected = differences(lambda a, leaf=leaf: run(loss, known | {leaf: a}), known[leaf])
        np.testing.assert_allclose(run(grad, known), expected, rtol=1e-7, atol=1e-7)


def test_43_vmap_of_a_solve():
    a, b = placeholder("a", f64[3, 3]), placeholder("b", f64[3])
    rows, right = placeholder("rows", f64[4, 3, 3]), placeholder("right", f64[4, 3])
    known = {rows: RNG.standard_normal((4, 3, 3)) + 3 * np.eye(3), right: RNG.standard_normal((4, 3))}
    (out,) = batch([dense_solve(a, b)], {a: rows, b: right}, 4)
    expected = [np.linalg.solve(m, v) for m, v in zip(known[rows], known[right], strict=True)]
    np.testing.assert_allclose(run(out, known), expected, rtol=1e-12)


ONE = Graph("one").constant(1.0, "f64")


@pytest.mark.parametrize("checkpoints", [None, 1, 2, 3])
def test_37_38_gradients_with_xs_and_constants(checkpoints):
    init, xs, m = placeholder("init", f64[3]), placeholder("xs", f64[4, 3]), placeholder("m", f64[3, 3])
    last, ys = scan(lambda c, x: ((m @ (c + x)).tanh(), c * x), init, xs, checkpoints=checkpoints)
    loss = last.sum() + (ys * ys).sum()
    grads = pullback([loss], [ONE], [init, xs, m])
    known = {init: RNG.standard_normal(3), xs: RNG.standard_normal((4, 3)), m: RNG.standard_normal((3, 3))}
    for leaf, grad in zip((init, xs, m), grads, strict=True):
        expected = differences(lambda a, leaf=leaf: run(loss, known | {leaf: a}), known[leaf])
        np.testing.assert_allclose(run(grad, known), expected, rtol=1e-7, atol=1e-7)


def test_39_checkpoints_do_not_change_the_gradient():
    init = placeholder("init", f64[3])
    grads = []
    for count in (None, 2):
        last, _ = scan(lambda c, _: (c * 1.05, None), init, length=6, checkpoints=count)
        grads.append(run(pullback([last.sum()], [ONE], [init])[0], {init: np.ones(3)}))
    np.testing.assert_array_equal(*grads)


def tanh_body():
    g = Graph("body")
    c, x = g.input("carry", f64[3]), g.input("x", f64[3])
    return g.outputs((c * 1.3 + x).tanh())


def tanh_body_vjp():
    g = Graph("body_vjp")
    c, x, d = g.input("carry", f64[3]), g.input("x", f64[3]), g.input("d_output", f64[3])
    out = (c * 1.3 + x).tanh()
    return g.outputs(*pullback([out], [d], [c, x]))


@pytest.mark.parametrize("per_step", [True, False])
def test_40_backward_by_hand_from_two_checkpoints(per_step):
    init, xs = placeholder("init", f64[3]), placeholder("xs", f64[4, 3])
    up = placeholder("up", f64[4, 3] if per_step else f64[3])
    full = scan_carry(tanh_body(), init, xs=[xs], length=4, trajectory=True)
    kept = placeholder("kept", f64[2, 3])
    known = {init: RNG.standard_normal(3), xs: RNG.standard_normal((4, 3)), up: RNG.standard_normal(up.shape)}
    known[kept] = run(full, known)[[1, 3]]
    whole = scan_backward(tanh_body_vjp(), init, full, up, [xs], length=4)
    segments = scan_backward(tanh_body_vjp(), init, kept, up, [xs], length=4, checkpoints=2, body=tanh_body())
    by_rule = pullback([full if per_step else scan_carry(tanh_body(), init, xs=[xs], length=4)], [up], [init, xs])
    for a, b, c in zip(run(whole, known), run(segments, known), run(by_rule, known), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
        np.testing.assert_allclose(a, c, rtol=1e-12)


def test_40_checkpoints_need_the_forward_body():
    init, xs = placeholder("init", f64[3]), placeholder("xs", f64[4, 3])
    with pytest.raises(OptionError, match="need the forward body"):
        scan_backward(tanh_body_vjp(), init, xs, init, [xs], length=4, checkpoints=2)


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_41_42_vmap_of_a_scan_and_of_its_gradient(checkpoints):
    init, xs = placeholder("init", f64[3]), placeholder("xs", f64[4, 3])
    last, _ = scan(lambda c, x: (c + x, None), init, xs, checkpoints=checkpoints)
    rows, starts = placeholder("rows", f64[3, 4, 3]), placeholder("starts", f64[3, 3])
    data = {starts: RNG.standard_normal((3, 3)), rows: RNG.standard_normal((3, 4, 3))}
    (out,) = batch([last], {init: starts, xs: rows}, 3)
    np.testing.assert_allclose(run(out, data), data[starts] + data[rows].sum(1), rtol=1e-12)
    (grad,) = pullback([last.sum()], [ONE], [init])
    (batched,) = batch([grad], {init: starts, xs: rows}, 3)
    np.testing.assert_array_equal(run(batched, data), np.ones((3, 3)))


def test_vmap_keeps_checkpoints():
    init, starts = placeholder("init", f64[3]), placeholder("starts", f64[2, 3])
    last, _ = scan(lambda c, _: (c.tanh(), None), init, length=6, checkpoints=2)
    (out,) = batch([last], {init: starts}, 2)
    assert out.node.op.checkpoints == 2


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("count", range(1, 11))
def test_104_every_number_of_checkpoints_on_a_nonlinear_body(count, reverse):
    length = 10
    init, xs, w = placeholder("init", f64[3]), placeholder("xs", f64[length, 3]), placeholder("w", f64[3, 3])

    def body(c, x):
        new = (c @ w + x).tanh()
        return new, new * c

    data = {init: RNG.standard_normal(3), xs: RNG.standard_normal((length, 3)), w: RNG.standard_normal((3, 3))}
    found = []
    for checkpoints in (None, count):
        last, ys = scan(body, init, xs, checkpoints=checkpoints, reverse=reverse)
        loss = last.sum() + ys.sum()
        found.append((run([last, ys], data), run(pullback([loss], [ONE], [init, xs, w]), data)))
    state, rows = data[init], np.empty((length, 3))
    for t in reversed(range(length)) if reverse else range(length):
        new = np.tanh(state @ data[w] + data[xs][t])
        rows[t] = new * state
        state = new
    for (last, ys), _ in found:
        np.testing.assert_array_equal(last, state)
        np.testing.assert_array_equal(ys, rows)
    (_, plain), (_, segmented) = found
    for a, b in zip(plain, segmented, strict=True):
        np.testing.assert_array_equal(a, b)


def saved_rows(values, carry):
    """How many rows shaped like the carry the forward scans of a gradient hand to its backward scans."""
    scans = [n for n in toposort(values) if isinstance(n.op, ScanOp)]
    handed = {x for n in scans for x in n.inputs if isinstance(x.node.op, ScanOp) and x.index >= x.node.op.num_carry}
    return sum(x.shape[0] for x in handed if x.shape[1:] == carry)


@pytest.mark.parametrize("count", [1, 3, 7, 40])
def test_saved_carries_are_one_a_checkpoint(count):
    length = 40
    init = placeholder("init", f64[5])
    last, _ = scan(lambda c, _: ((c * 1.1).tanh(), None), init, length=length, checkpoints=count)
    (grad,) = pullback([last.sum()], [ONE], [init])
    assert saved_rows([grad], (5,)) == count


def test_a_linear_body_saves_nothing():
    init = placeholder("init", f64[5])
    last, _ = scan(lambda c, _: (c * 1.1, None), init, length=8)
    (grad,) = pullback([last.sum()], [ONE], [init])
    assert saved_rows([grad], (5,)) == 0


def test_a_carry_that_never_changes_is_not_saved_for_each_step():
    c, k = placeholder("c", f64[2]), placeholder("k", f64[5])
    (last, _), _ = scan(lambda s, _: ((s[0].tanh() * s[1].sum(), s[1]), None), (c, k), length=8)
    grads = pullback([last.sum()], [ONE], [c, k])
    assert saved_rows(grads, (5,)) == 0
    assert saved_rows(grads, (2,)) == 8
    known = {c: RNG.standard_normal(2), k: RNG.standard_normal(5)}
    for leaf, grad in zip((c, k), grads, strict=True):
        expected = differences(lambda a, leaf=leaf: run(last.sum(), known | {leaf: a}), known[leaf])
        np.testing.assert_allclose(run(grad, known), expected, rtol=1e-6, atol=1e-8)


def test_the_backward_pass_is_one_sweep():
    init, xs, ys = placeholder("init", f64[3]), placeholder("xs", f64[4, 3]), placeholder("ys", f64[4, 3])
    last, out = scan(lambda c, r: ((c * r[0] + r[1]).tanh(), c), init, (xs, ys))
    grads = pullback([last.sum() + out.sum()], [ONE], [init, xs, ys])
    sweeps = [n for n in toposort(grads) if isinstance(n.op, ScanOp) and n.op.reverse]
    assert len(sweeps) == 1


def test_several_carries_as_a_dict_and_no_ys():
    init = {"a": placeholder("a", f64[2]), "n": placeholder("n", i64[()])}
    last, ys = scan(lambda c, _: ({"a": c["a"] * 2.0, "n": c["n"] + 1}, None), init, length=3)
    assert ys is None
    a, n = run([last["a"], last["n"]], {init["a"]: np.ones(2), init["n"]: np.array(0)})
    np.testing.assert_array_equal(a, [8.0, 8.0])
    assert n == 3


@pytest.mark.parametrize("reverse", [False, True])
def test_no_steps(reverse):
    init, xs = placeholder("init", f64[3]), placeholder("xs", f64[0, 3])
    last, ys = scan(lambda c, x: ((c + x).tanh(), c), init, xs, reverse=reverse)
    end, rows = run([last, ys], {init: np.ones(3), xs: np.ones((0, 3))})
    np.testing.assert_array_equal(end, np.ones(3))
    assert rows.shape == (0, 3)
    grads = pullback([last.sum()], [ONE], [init, xs])
    d_init, d_xs = run(grads, {init: np.ones(3), xs: np.ones((0, 3))})
    np.testing.assert_array_equal(d_init, np.ones(3))
    assert d_xs.shape == (0, 3)


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_symbolic_length(checkpoints):
    steps = sym("L", 2, 64)
    g = Graph("rnn")
    init, xs, w = g.input("init", f64[3]), g.input("xs", f64[steps, 3]), g.input("w", f64[3, 3])
    last, ys = scan(lambda c, x: ((c @ w + x).tanh(), c), init, xs, checkpoints=checkpoints)
    g.outputs(last, ys, *pullback([last.sum() + ys.sum()], [ONE], [init, xs, w]))
    assert str(parse(str(g))) == str(g)
    for length in (2, 5):
        data = {
            "init": RNG.standard_normal(3),
            "xs": RNG.standard_normal((length, 3)),
            "w": RNG.standard_normal((3, 3)),
        }
        for a, b in zip(evaluate(g, data), evaluate(g.bind({"L": length}), data), strict=True):
            np.testing.assert_array_equal(a, b)
        assert evaluate(g, data)[1].shape == (length, 3)


@pytest.mark.parametrize("dtype", [f16, bf16, f32])
def test_narrow_floats_round_at_every_step_as_a_loop_of_ops_does(dtype):
    init, xs = placeholder("init", dtype[3]), placeholder("xs", dtype[6, 3])
    last, ys = scan(lambda c, x: ((c * 1.3 + x).sin(), c * c), init, xs)
    known = {init: RNG.standard_normal(3).astype(dtype.np), xs: RNG.standard_normal((6, 3)).astype(dtype.np)}
    carry, rows = init, []
    for t in range(6):
        rows.append(carry * carry)
        carry = (carry * 1.3 + xs[t]).sin()
    end, stacked, *expected = run([last, ys, carry, *rows], known)
    assert end.dtype == dtype.np
    np.testing.assert_array_equal(end, expected[0])
    np.testing.assert_array_equal(stacked, np.stack(expected[1:]))
    wide = evaluate_values([last], {k: v.astype(np.float64) for k, v in known.items()}, {}, wide=True)[0]
    assert wide.dtype == np.float64


def test_outer_values_become_inputs_of_the_body():
    init, w, x = placeholder("init", f64[3]), placeholder("w", f64[3, 3]), placeholder("x", f64[3])
    last, _ = scan(lambda c, _: (c @ w.exp() + x, None), init, length=3)
    node = last.node
    assert node.op.num_consts == 2
    assert {v.node.op.name for v in node.inputs[1:]} == {"exp", "input"}, (
        "what no step changes is computed once, outside"
    )


def test_scans_nest_and_differentiate_twice():
    init, w = placeholder("init", f64[2]), placeholder("w", f64[2, 2])

    def outer(c, _):
        inner, rows = scan(lambda s, _: ((s @ w).tanh(), s * s), c, length=3)
        return inner, rows.sum()

    last, ys = scan(outer, init, length=2)
    loss = last.sum() + ys.sum()
    (grad,) = pullback([loss], [ONE], [w])
    direction = placeholder("v", f64[2, 2])
    (product,) = pushforward([grad], [w], [direction])
    known = {init: RNG.standard_normal(2), w: RNG.standard_normal((2, 2)), direction: RNG.standard_normal((2, 2))}

    def gradient(a):
        return run(grad, known | {w: a})

    step = 1e-6
    expected = (gradient(known[w] + step * known[direction]) - gradient(known[w] - step * known[direction])) / (
        2 * step
    )
    np.testing.assert_allclose(run(product, known), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        gradient(known[w]), differences(lambda a: run(loss, known | {w: a}), known[w]), rtol=1e-6, atol=1e-7
    )


def test_81_branches_and_their_gradient():
    p, x, y = placeholder("p", f64[()]), placeholder("x", f64[3]), placeholder("y", f64[3])
    out = cond(p > 0.0, lambda a: (a * y).sum(), lambda a: a.exp().sum(), x)
    grads = pullback([out], [ONE], [x, y])
    known = {x: RNG.standard_normal(3), y: RNG.standard_normal(3)}
    for sign in (1.0, -1.0):
        data = known | {p: np.array(sign)}
        value, dx, dy = run([out, *grads], data)
        taken = sign > 0
        np.testing.assert_allclose(value, (data[x] * data[y]).sum() if taken else np.exp(data[x]).sum())
        np.testing.assert_allclose(dx, data[y] if taken else np.exp(data[x]))
        np.testing.assert_allclose(dy, data[x] if taken else np.zeros(3))


def test_only_the_taken_branch_runs_and_its_work_stays_inside():
    p, x = placeholder("p", f64[()]), placeholder("x", f64[3])
    before = x.sin()
    out = cond(p > 0.0, before.exp, lambda: before)
    assert isinstance(out.node.op, Cond)
    assert out.node.inputs[1:] == (before,), "sin is older than the branch, exp belongs to it"


def test_a_batched_predicate_chooses_row_by_row():
    p, x = placeholder("p", f64[()]), placeholder("x", f64[2])
    out = cond(p > 0.0, lambda a: a.log(), lambda a: a * 2.0, x)
    (grad,) = pullback([out.sum()], [ONE], [x])
    ps, xs = placeholder("ps", f64[3]), placeholder("xs", f64[3, 2])
    known = {ps: np.array([1.0, -1.0, 2.0]), xs: np.array([[1.0, 2.0], [0.0, -3.0], [4.0, 5.0]])}
    value, slope = run(batch([out, grad], {p: ps, x: xs}, 3), known)
    np.testing.assert_allclose(value[[0, 2]], np.log(known[xs][[0, 2]]))
    np.testing.assert_allclose(value[1], known[xs][1] * 2)
    np.testing.assert_allclose(slope[1], [2.0, 2.0])


def test_108_two_carries_and_a_count_that_depends_on_the_data():
    x = placeholder("x", i64[()])

    def collatz(state):
        n, steps = state
        half = n.trunc_divide(2)
        return (half * 2).equal(n).where(half, n * 3 + 1), steps + 1

    last, steps = while_loop(lambda s: s[0] > 1, collatz, (x, 0))
    for start, expected in ((6, 8), (27, 111), (1, 0)):
        end, count = run([last, steps], {x: np.array(start)})
        assert (end, count) == (1, expected)


def test_81_while_gradient_needs_a_bound():
    x = placeholder("x", f64[()])
    for bound in (None, 20):
        out = while_loop(lambda v: v < 100.0, lambda v: v * v + 1.0, x, bound)
        if bound is None:
            with pytest.raises(MissingRuleError, match="max_iterations"):
                pullback([out], [ONE], [x])
            (tangent,) = pushforward([out], [x], [ONE])
            forward = run(tangent, {x: np.array(1.5)})
        else:
            (grad,) = pullback([out], [ONE], [x])
            np.testing.assert_allclose(run(grad, {x: np.array(1.5)}), forward)
    np.testing.assert_allclose(forward, differences(lambda a: run(out, {x: a}), np.array(1.5)), rtol=1e-6)


def test_a_while_loop_with_rows_that_end_at_different_times():
    x, xs = placeholder("x", f64[()]), placeholder("xs", f64[4])
    out = while_loop(lambda v: v < 100.0, lambda v: v * 3.0, x)
    starts = np.array([1.0, 200.0, 50.0, 0.5])
    (rows,) = batch([out], {x: xs}, 4)
    np.testing.assert_allclose(run(rows, {xs: starts}), [run(out, {x: s}) for s in starts])


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda c, xs: scan(lambda c, x: (c.sum(), None), c, xs),
            ShapeError,
            r"carry 0 goes in as f64\[3\] and comes out as f64\[\]",
        ),
        (
            lambda c, xs: scan(lambda c, x: ((c, c), None), c, xs),
            OptionError,
            r"carry goes in as \* and comes out as \(\*, \*\)",
        ),
        (lambda c, xs: scan(lambda c, x: c, c, xs), OptionError, r"must return \(carry, y\)"),
        (lambda c, xs: scan(lambda c, x: (c, None), c), OptionError, "length must be given"),
        (lambda c, xs: scan(lambda c, x: (c, None), c, xs, length=5), ShapeError, "4 and 5 steps"),
        (lambda c, xs: scan(lambda c, x: (c, None), c, xs, checkpoints=5), OptionError, "5 checkpoints for 4 steps"),
        (lambda c, xs: scan(lambda c, x: (c, None), c, c.sum()), ShapeError, "leading axis"),
        (lambda c, xs: cond(c, lambda: c, lambda: c), ShapeError, r"one value, got bool\[3\]"),
        (lambda c, xs: cond(c.sum(), lambda: c, lambda: xs), ShapeError, r"f64\[3\] and f64\[4, 3\]"),
        (lambda c, xs: cond(c.sum(), lambda: c, lambda: (c, c)), OptionError, r"give \* and \(\*, \*\)"),
        (lambda c, xs: while_loop(lambda s: s.sum() > 0, lambda s: xs, c), ShapeError, "comes out as"),
    ],
)
def test_mistakes(build, error, message):
    with pytest.raises(error, match=message):
        build(placeholder("c", f64[3]), placeholder("xs", f64[4, 3]))
