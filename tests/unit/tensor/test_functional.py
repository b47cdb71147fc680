"""Derivatives, batching, control flow and jit of functions on pytrees of tensors."""

from dataclasses import dataclass

import numpy as np
import pytest

import strata as st
from strata.errors import DTypeError, MissingRuleError, OptionError, ShapeError, TraceError
from strata.ops import Extensions

RNG = np.random.default_rng(5)


def loss(params, x, y):
    h = (x @ params["w"] + params["b"]).tanh()
    return ((h - y) ** 2).mean()


def data():
    params = {"w": st.asarray(RNG.standard_normal((3, 2))), "b": st.asarray(RNG.standard_normal(2))}
    return params, st.asarray(RNG.standard_normal((5, 3))), st.asarray(RNG.standard_normal((5, 2)))


def differences(f, x, step=1e-6):
    grad = np.zeros_like(x)
    for i in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[i] += step
        down[i] -= step
        grad[i] = (f(up) - f(down)) / (2 * step)
    return grad


def test_gradient_of_a_dict_of_parameters():
    params, x, y = data()
    value, grads = st.value_and_grad(loss)(params, x, y)
    assert set(grads) == {"w", "b"}
    np.testing.assert_allclose(value.numpy(), loss(params, x, y).numpy())
    expected = differences(lambda w: loss({**params, "w": st.asarray(w)}, x, y).item(), params["w"].numpy())
    np.testing.assert_allclose(grads["w"].numpy(), expected, rtol=1e-6, atol=1e-8)
    _, dx = st.grad(loss, argnums=(0, 1))(params, x, y)
    assert dx.shape == (5, 3)


@dataclass
class Point:
    x: st.Tensor
    y: st.Tensor


def test_gradient_of_a_dataclass_with_aux():
    def f(p):
        return (p.x * p.y).sum(), {"sum": p.x + p.y, "name": "point"}

    p = Point(st.tensor([1.0, 2.0]), st.tensor([3.0, 4.0]))
    grads, aux = st.grad(f, has_aux=True)(p)
    np.testing.assert_array_equal(grads.x.numpy(), [3.0, 4.0])
    np.testing.assert_array_equal(aux["sum"].numpy(), [4.0, 6.0])
    assert aux["name"] == "point"


def test_what_a_function_closes_over_is_constant():
    x = st.tensor(2.0)
    y = x * 3.0
    assert st.grad(lambda v: v * y)(x).item() == 6.0
    assert st.grad(lambda a, b: a * b, argnums=0)(x, x).item() == 2.0


def test_derivatives_nest():
    cube = lambda x: x * x * x
    assert st.grad(st.grad(cube))(2.0).item() == 12.0
    assert st.grad(lambda x: x * st.grad(lambda y: x * y)(3.0))(2.0).item() == 4.0
    np.testing.assert_allclose(st.vmap(st.grad(cube))(st.tensor([1.0, 2.0])).numpy(), [3.0, 12.0])
    np.testing.assert_allclose(st.grad(lambda x: st.vmap(cube)(x).sum())(st.tensor([1.0, 2.0])).numpy(), [3.0, 12.0])


def test_vjp_jvp_hvp():
    x, w = st.tensor([1.0, 2.0]), st.tensor([[1.0, 2.0], [3.0, 4.0]])
    out, pull = st.vjp(lambda a, b: (b @ a).sin(), x, w)
    da, db = pull(st.ones((2,)))
    slope = np.cos(w.numpy() @ x.numpy())
    np.testing.assert_allclose(da.numpy(), w.numpy().T @ slope, rtol=1e-6)
    np.testing.assert_allclose(db.numpy(), np.outer(slope, x.numpy()), rtol=1e-6)
    value, tangent = st.jvp(lambda a: (w @ a).sin(), x, st.tensor([1.0, 0.0]))
    np.testing.assert_allclose(value.numpy(), out.numpy())
    np.testing.assert_allclose(tangent.numpy(), slope * w.numpy()[:, 0], rtol=1e-6)
    np.testing.assert_allclose(st.hvp(lambda a: (a * a).sum(), x, st.tensor([5.0, 7.0])).numpy(), [10.0, 14.0])
    both = st.hvp(lambda a, b: (a * b).sum(), (x, x), (st.ones((2,)), st.zeros((2,))))
    np.testing.assert_allclose(both[1].numpy(), [1.0, 1.0])


def test_vmap_axes():
    xs, y = st.asarray(RNG.standard_normal((4, 3))), st.asarray(RNG.standard_normal(3))
    np.testing.assert_allclose(st.vmap(lambda a, b: a @ b, in_axes=(0, None))(xs, y).numpy(), xs.numpy() @ y.numpy())
    np.testing.assert_allclose(st.vmap(lambda a: a * 2.0, in_axes=1, out_axes=1)(xs).numpy(), xs.numpy() * 2)
    tree = {"a": xs, "b": y}
    out = st.vmap(lambda t: (t["a"] + t["b"], t["b"]), in_axes=({"a": 0, "b": None},), out_axes=(0, None))(tree)
    assert out[0].shape == (4, 3)
    np.testing.assert_array_equal(out[1].numpy(), y.numpy())


@pytest.mark.parametrize("jacobian", [st.jacfwd, st.jacrev])
def test_jacobians(jacobian):
    w, x = RNG.standard_normal((2, 3)), RNG.standard_normal(3)
    j = jacobian(lambda a: {"y": (st.asarray(w) @ a).sin(), "z": a[0]})(st.asarray(x))
    np.testing.assert_allclose(j["y"].numpy(), np.cos(w @ x)[:, None] * w)
    np.testing.assert_allclose(j["z"].numpy(), [1, 0, 0])
    hessian = st.jacfwd(st.jacrev(lambda a: (a * a * a).sum()))(st.asarray(x))
    np.testing.assert_allclose(hessian.numpy(), np.diag(6 * x))


def test_scan_over_trees_inside_grad():
    w, xs = RNG.standard_normal((3, 3)), RNG.standard_normal((6, 3))

    def run(weight, checkpoints=None):
        def step(carry, row):
            h = (carry["h"] @ weight + row["x"]).tanh()
            return {"h": h, "n": carry["n"] + 1}, h.sum()

        carry = {"h": st.zeros((3,), "f64"), "n": st.tensor(0)}
        last, sums = st.scan(step, carry, {"x": st.asarray(xs)}, checkpoints=checkpoints)
        return last["h"].sum() + sums.sum()

    expected = differences(lambda a: run(st.asarray(a)).item(), w)
    for checkpoints in (None, 1, 2, 5):
        grad = st.grad(lambda a, k=checkpoints: run(a, k))(st.asarray(w))
        np.testing.assert_allclose(grad.numpy(), expected, rtol=1e-6, atol=1e-8)


def test_cond_and_while():
    f = lambda x: st.cond(x.sum() > 0.0, lambda v: v * 2.0, lambda v: v.exp(), x)
    np.testing.assert_allclose(f(st.tensor([1.0])).numpy(), [2.0])
    np.testing.assert_allclose(f(st.tensor([-1.0])).numpy(), [np.exp(-1.0)], rtol=1e-6)
    np.testing.assert_allclose(st.grad(lambda x: f(x).sum())(st.tensor([1.0])).numpy(), [2.0])
    np.testing.assert_allclose(st.vmap(f)(st.tensor([[1.0], [0.0]])).numpy(), [[2.0], [1.0]])
    power = lambda x, bound=None: st.while_loop(lambda s: s[0] < 100.0, lambda s: (s[0] * x, s[1] + 1), (x, 0), bound)
    value, steps = power(st.tensor(3.0))
    assert (value.item(), steps.item()) == (243.0, 4)
    assert st.grad(lambda x: power(x, 10)[0])(3.0).item() == 5 * 81.0
    with pytest.raises(MissingRuleError, match="max_iterations"):
        st.grad(lambda x: power(x)[0])(3.0)


def test_control_flow_nests_in_every_transform():
    rng = np.random.default_rng(7)  # its own: steps of 1e-6 are small enough for these numbers, not for any
    xs, starts = rng.standard_normal((4, 5)), rng.uniform(0.5, 1.5, 4)

    def step(c, x):
        grown = st.while_loop(lambda v: v < 2.0, lambda v: v * 1.7 + 0.1, c, 6)
        return st.cond(x > 0.0, lambda v: v.sin() + x, lambda v: v * x, grown), c

    def f(start, row):
        last, seen = st.scan(step, start, row, checkpoints=2)
        return last * last + seen.sum()

    def plain(start, row):
        c, total = start, 0.0
        for x in row:
            total += c
            count = 0
            while c.real < 2.0 and count < 6:
                c, count = c * 1.7 + 0.1, count + 1
            c = np.sin(c) + x if x.real > 0 else c * x
        return c * c + total

    def slopes(g, x):
        """Derivatives by a tiny imaginary step: exact also where the function is steep."""
        parts = np.eye(x.size).reshape(x.size, *x.shape) * 1e-30j
        return np.array([g(x + part).imag / 1e-30 for part in parts]).reshape(x.shape)

    both = st.vmap(st.value_and_grad(f, argnums=(0, 1)))(st.asarray(starts), st.asarray(xs))
    values, (d_starts, d_xs) = both
    mapped = st.grad(lambda s: st.vmap(f)(s, st.asarray(xs)).sum())(st.asarray(starts))
    np.testing.assert_allclose(mapped.numpy(), d_starts.numpy(), rtol=1e-10)
    for i in range(4):
        np.testing.assert_allclose(values.numpy()[i], plain(starts[i], xs[i]), rtol=1e-12)
        slope = slopes(lambda s, i=i: plain(s, xs[i]), starts[i : i + 1].reshape(()))
        np.testing.assert_allclose(d_starts.numpy()[i], slope, rtol=1e-9)
        rows = slopes(lambda r, i=i: plain(starts[i], r), xs[i])
        np.testing.assert_allclose(d_xs.numpy()[i], rows, rtol=1e-9)
    hv = st.hvp(lambda s: f(s, st.asarray(xs[0])), st.asarray(starts[0]), st.ones((), "f64"))
    slope = st.grad(lambda s: f(s, st.asarray(xs[0])))
    step_size = 1e-6
    expected = (slope(st.asarray(starts[0] + step_size)).item() - slope(st.asarray(starts[0] - step_size)).item()) / (
        2 * step_size
    )
    np.testing.assert_allclose(hv.item(), expected, rtol=1e-5)


def branched(x):
    return st.cond(x > 0, st.sqrt, lambda a: a * 2.0, x)


def looped(x):
    return st.while_loop(lambda s: s > 1.0, lambda s: st.sqrt(s - 1.0), x, max_iter=4)


def branched_in_a_loop(x):
    rows = st.arange(3, dtype="f32")
    return st.scan(lambda c, r: (st.cond(c > 0, st.log, lambda a: a, c), r), x, rows)[0]


@pytest.mark.parametrize("f", [branched, looped, branched_in_a_loop])
def test_what_a_row_does_not_take_has_no_part_in_its_gradient(f):
    """A root of what is negative, in rows that go the other way or have ended, is no number."""
    xs = np.array([-1.0, 0.0, 0.5, 1.0, 2.0, 5.0, 17.0, 300.0], np.float32)
    alone = np.array([st.grad(f)(st.tensor(x)).numpy() for x in xs])
    assert np.isfinite(alone).all()
    for made in (
        st.vmap(st.grad(f)),
        st.grad(lambda x: st.vmap(f)(x).sum()),
        st.jit(st.grad(lambda x: st.vmap(f)(x).sum())),
    ):
        np.testing.assert_allclose(made(st.tensor(xs)).numpy(), alone, rtol=1e-6)


def test_checkpoint_gives_the_same_gradient():
    f = lambda x: (x.exp().sin() * x).sum()
    x = st.asarray(RNG.standard_normal(4))
    np.testing.assert_array_equal(st.grad(st.checkpoint(f))(x).numpy(), st.grad(f)(x).numpy())


def test_custom_vjp_in_both_forms():
    @st.custom_vjp
    def clipped(x, limit):
        return x

    clipped.defvjp(lambda args, out, ct: (ct.clip(-args[1], args[1]), None))
    x = st.tensor([1.0, 2.0])
    np.testing.assert_array_equal(st.grad(lambda a: (clipped(a, 3.0) * 10.0).sum())(x).numpy(), [3.0, 3.0])
    np.testing.assert_array_equal(clipped(x, 3.0).numpy(), [1.0, 2.0])

    @st.custom_vjp
    def log1pexp(x):
        return (1.0 + x.exp()).log()

    log1pexp.defvjp(lambda x: (log1pexp(x), x.exp()), lambda e, ct: (ct * (1.0 - 1.0 / (1.0 + e)),))
    np.testing.assert_allclose(st.grad(log1pexp)(0.0).item(), 0.5)
    np.testing.assert_allclose(st.vmap(st.grad(log1pexp))(st.zeros((2,))).numpy(), [0.5, 0.5])


def test_custom_jvp():
    @st.custom_jvp
    def f(x, y):
        return x * y

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0] * 100.0))
    out, tangent = st.jvp(f, (st.tensor(2.0), st.tensor(3.0)), (st.tensor(1.0), st.tensor(1.0)))
    assert (out.item(), tangent.item()) == (6.0, 100.0)
    assert st.grad(f)(2.0, 3.0).item() == 3.0


def test_custom_functions_do_not_close_over_traced_tensors():
    def outer(w):
        @st.custom_vjp
        def f(x):
            return x * w

        return f(st.tensor(2.0))

    with pytest.raises(TraceError, match="pass it as an argument"):
        st.grad(outer)(3.0)


def test_custom_op_on_arrays():
    calls = []

    def my_exp(x):
        calls.append(x.shape)
        return np.exp(x)

    with Extensions().active():
        f = st.custom_op(vjp=lambda x, out, ct: (ct * out,), jvp=lambda x, out, dx: dx[0] * out)(my_exp)
    x = st.tensor([0.0, 1.0])
    np.testing.assert_allclose(st.grad(lambda a: f(a).sum())(x).numpy(), np.exp([0, 1]), rtol=1e-6)
    np.testing.assert_allclose(st.jvp(f, x, st.ones((2,)))[1].numpy(), np.exp([0, 1]), rtol=1e-6)
    np.testing.assert_allclose(st.vmap(f)(st.zeros((3, 2))).numpy(), np.ones((3, 2)))
    assert calls


class TestJit:
    def test_one_trace_for_each_signature(self):
        traces = []

        @st.jit
        def f(x, scale=2.0, *, flip=False):
            traces.append(x.shape)
            return {"y": (-x if flip else x) * scale, "name": "f"}

        for _ in range(3):
            out = f(st.ones((2,)))
        np.testing.assert_array_equal(out["y"].numpy(), [2.0, 2.0])
        assert out["name"] == "f"
        f(np.ones(2, np.float32))
        assert traces == [(2,)]
        f(st.ones((3,)))
        f(st.ones((2,)), 3.0)
        np.testing.assert_array_equal(f(st.ones((2,)), flip=True)["y"].numpy(), [-2.0, -2.0])
        assert traces == [(2,), (3,), (2,), (2,)]
        assert len(f.variants) == 4

    def test_results_are_realized_and_closures_are_read_once(self):
        w = st.tensor([1.0, 2.0])
        f = st.jit(lambda x: x * w.exp())
        out = f(st.ones((2,)))
        assert out.is_realized
        np.testing.assert_allclose(out.numpy(), np.exp([1, 2]), rtol=1e-6)
        assert [n.op.name for n in f.graph(st.ones((2,))).nodes()] == ["input", "param", "multiply"]

    def test_inside_grad_and_around_it(self):
        f = st.jit(lambda x: (x * x).sum())
        np.testing.assert_array_equal(st.grad(f)(st.tensor([1.0, 2.0])).numpy(), [2.0, 4.0])
        np.testing.assert_array_equal(st.jit(st.grad(f))(st.tensor([1.0, 2.0])).numpy(), [2.0, 4.0])
        assert st.grad(lambda a: st.jit(lambda: a * 3.0)())(1.0).item() == 3.0

    def test_variants_are_bounded(self):
        f = st.jit(lambda x: x + 1.0, max_variants=1, on_miss="error")
        f(st.ones((2,)))
        with pytest.raises(TraceError, match=r"has its 1 variants.*f32\[3\]; it has f32\[2\]"):
            f(st.ones((3,)))
        g = st.jit(lambda x: x + 1.0, max_variants=1, on_miss="interpret")
        g(st.ones((2,)))
        np.testing.assert_array_equal(g(st.ones((3,))).numpy(), [2, 2, 2])
        assert len(g.variants) == 1
        h = st.jit(lambda x: x + 1.0, max_variants=1)
        h(st.ones((2,)))
        h(st.ones((3,)))
        assert [k[1][0].shape for k in h.variants] == [(3,)]

    def test_static_arguments(self):
        f = st.jit(lambda x, op: getattr(x, op)(), static_argnums=(1,))
        np.testing.assert_allclose(f(st.zeros((2,)), "exp").numpy(), [1, 1])
        np.testing.assert_allclose(f(st.zeros((2,)), "sin").numpy(), [0, 0])
        with pytest.raises(TraceError, match="neither a tensor nor hashable"):
            st.jit(lambda x, s: x)(st.ones((2,)), bytearray(b"x"))
        with pytest.raises(OptionError, match="on_miss"):
            st.jit(lambda x: x, on_miss="explode")


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: st.grad(lambda x: x * 2.0)(st.ones((3,))), ShapeError, r"must return one float, it returns f32\[3\]"),
        (lambda: st.grad(lambda x: x.sum())(st.arange(3)), DTypeError, r"i64\[3\] leaf"),
        (lambda: st.grad(lambda x: x, argnums=2)(1.0), OptionError, "argument 2 does not exist"),
        (lambda: st.grad(3), OptionError, "takes a function, got int"),
        (lambda: st.grad(lambda x: x, has_aux=True)(1.0), OptionError, r"must return \(result, aux\)"),
        (lambda: st.jvp(lambda x: x, st.ones((2,)), st.ones((3,))), ShapeError, r"must be f32\[2\], got f32\[3\]"),
        (lambda: st.vjp(lambda x: x, st.ones((2,)))[1]((st.ones((2,)),)), OptionError, "structure"),
        (lambda: st.vmap(lambda x, y: x)(st.ones((2,)), st.ones((3,))), ShapeError, "batch sizes differ"),
        (lambda: st.vmap(lambda x: x, in_axes=None)(st.ones((2,))), OptionError, "needs an axis"),
        (lambda: st.vmap(lambda x: x, in_axes=(0, 0))(st.ones((2,))), OptionError, "2 entries for 1 argument"),
        (lambda: st.vmap(lambda x: x)(1.0), ShapeError, r"axis 0 does not exist in f32\[\]"),
        (lambda: st.grad(lambda x: x)("text"), TraceError, "a str is not a tensor"),
    ],
)
def test_mistakes(act, error, message):
    with pytest.raises(error, match=message):
        act()
