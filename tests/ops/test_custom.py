"""Functions with their own derivatives, and ops that run user code."""

import numpy as np
import pytest

from strata import ops
from strata.core import TensorType, bool_, c64, f16, f32, f64, i32, i64
from strata.errors import MissingRuleError, OptionError, ShapeError, UnknownNameError
from strata.mir import Graph, batch, evaluate, evaluate_values, parse, placeholder, pullback, pushforward
from strata.ops import Custom, Extension, Extensions, custom, custom_fn, extensions
from strata.runtime import Session
from strata.transforms import grad_with_loss, jvp, vmap

F32 = f32[3]


def body(build, *names, kind=f64[1]):
    g = Graph("body")
    return g.outputs(*build(*(g.input(n, kind) for n in names)))


def apply_to(fn, *names, kind=f64[1]):
    g = Graph("main")
    outs = fn(*(g.input(n, kind) for n in names))
    return g.outputs(*(outs if isinstance(outs, tuple) else (outs,)))


def test_55_forward():
    plus = custom_fn(body(lambda x: [x + 1.0], "x", kind=f64[3]))
    (out,) = evaluate(apply_to(plus, "x", kind=f64[3]), {"x": np.array([10.0, 20.0, 30.0])})
    np.testing.assert_array_equal(out, [11.0, 21.0, 31.0])


def test_56_identity_with_a_doubled_gradient():
    double = custom_fn(
        body(lambda x: [x], "x"), backward=body(lambda x, out, ct: [ct * 2.0], "x", "primal_output", "d_output")
    )
    loss, dx = evaluate(grad_with_loss(apply_to(double, "x"), ["x"]), {"x": np.array([7.0]), "d_output": np.ones(1)})
    assert (loss, dx) == (7.0, 2.0)


def test_57_product_with_its_own_gradient():
    product = custom_fn(
        body(lambda a, b: [a * b], "a", "b"),
        backward=body(lambda a, b, out, ct: [ct * b, ct * a], "a", "b", "primal_output", "d_output"),
    )
    g = grad_with_loss(apply_to(product, "a", "b"), ["a", "b"])
    loss, da, db = evaluate(g, {"a": np.array([3.0]), "b": np.array([5.0]), "d_output": np.ones(1)})
    assert (loss, da, db) == (15.0, 5.0, 3.0)
    assert str(parse(str(g))) == str(g)


def test_58_identity_with_a_doubled_tangent():
    double = custom_fn(body(lambda x: [x], "x"), tangent=body(lambda x, t: [t * 2.0], "x", "tangent_0"))
    y, t = evaluate(jvp(apply_to(double, "x"), ["x"]), {"x": np.array([7.0]), "tangent_x": np.ones(1)})
    assert (y, t) == (7.0, 2.0)
    loss, dx = evaluate(grad_with_loss(apply_to(double, "x"), ["x"]), {"x": np.array([7.0]), "d_output": np.ones(1)})
    assert (loss, dx) == (7.0, 1.0), "a mode without a rule differentiates the forward graph"


def test_59_two_outputs_of_different_types():
    pair = custom_fn(body(lambda x: [x * x, (x * 2.0).cast(i64)], "x", kind=f64[3]))
    square, twice = evaluate(apply_to(pair, "x", kind=f64[3]), {"x": np.array([1.0, 2.0, 3.0])})
    np.testing.assert_array_equal(square, [1.0, 4.0, 9.0])
    np.testing.assert_array_equal(twice, [2, 4, 6])
    assert twice.dtype == np.int64


def test_vmap_keeps_the_users_gradient():
    double = custom_fn(
        body(lambda x: [x], "x"), backward=body(lambda x, out, ct: [ct * 2.0], "x", "primal_output", "d_output")
    )
    g = grad_with_loss(vmap(apply_to(double, "x"), ["x"], 3), ["x"])
    _, dx = evaluate(g, {"x": np.ones((3, 1)), "d_output": np.ones((3, 1))})
    np.testing.assert_array_equal(dx, np.full((3, 1), 2.0))


@pytest.mark.parametrize(
    ("backward", "message"),
    [
        (lambda: body(lambda x, ct: [ct], "x", "d_output"), "must declare an input 'primal_output'"),
        (lambda: body(lambda x, out: [out], "x", "primal_output"), "must declare an input 'd_output'"),
        (lambda: body(lambda x, o, c, z: [z], "x", "primal_output", "d_output", "z"), "'z' that has no meaning"),
        (lambda: body(lambda x, o, c: [c, c], "x", "primal_output", "d_output"), r"must give \[f64\[1\]\]"),
        (lambda: body(lambda x, o, c: [c], "x", "primal_output", "d_output", kind=f64[2]), "must take"),
    ],
)
def test_bad_backward_graphs(backward, message):
    with pytest.raises(ShapeError, match=message):
        apply_to(custom_fn(body(lambda x: [x], "x"), backward=backward()), "x")


def clip_extension(**rules):
    return Extension("clip01", infer=lambda x, attrs: x, execute=lambda x, attrs: np.clip(x, 0, 1), **rules)


def test_an_op_that_runs_user_code():
    with Extensions().active() as known:
        known.register(clip_extension(vjp=lambda x, out, ct, attrs: (ct * ((x > 0.0) & (x < 1.0)).cast(x.dtype),)))
        x = placeholder("x", F32)
        y = custom("clip01", x)
        (grad,) = pullback([y], [x], [x])
        out, dx = evaluate_values([y, grad], {x: np.float32([-1, 0.5, 2])}, {})
        np.testing.assert_array_equal(out, np.float32([0, 0.5, 1]))
        np.testing.assert_array_equal(dx, np.float32([0, 0.5, 0]))
        (rows,) = batch([y], {x: placeholder("xs", f32[2, 3])}, 2)
        assert rows.shape == (2, 3), "without a vmap rule the rows run one after the other"
        with pytest.raises(MissingRuleError, match="'clip01' has no jvp rule"):
            pushforward([y], [x], [x])
    assert "clip01" not in extensions()
    with pytest.raises(UnknownNameError, match="no custom op is named 'clip01'"):
        custom("clip01", x)


@pytest.mark.parametrize("dtype", [f64, f16, i32])
def test_user_code_runs_in_the_dtype_of_the_graph(dtype):
    seen = []

    def twice(x, attrs):
        seen.append(x.dtype)
        return x + x

    with Extensions().active() as known:
        known.register(Extension("twice", infer=lambda x, attrs: x, execute=twice))
        g = Graph("main")
        g.outputs(custom("twice", g.input("x", dtype[3])))
        (out,) = Session("cpu").compile(g).run(x=np.array([1, 2, 3], dtype.np))
    assert seen == [np.dtype(np.float32 if dtype is f16 else dtype.np)]  # halves are computed with as f32
    assert out.dtype == dtype.np
    np.testing.assert_array_equal(out, [2, 4, 6])


def test_attributes_outputs_and_dtypes_of_user_ops():
    def split(x, flag, z, attrs):
        assert (x.dtype, flag.dtype, z.dtype) == (np.int64, np.bool_, np.complex64)
        return x + len(attrs), z * 2

    with Extensions().active() as known:
        known.register(Extension("split", infer=lambda x, flag, z, attrs: (x, TensorType(c64, z.shape)), execute=split))
        g = Graph("main")
        x, flag, z = g.input("x", i64[2]), g.input("flag", bool_[2]), g.input("z", c64[2])
        a, b = custom("split", x, flag, z, attrs=b"\x01\xff")
        g.outputs(a, b)
        assert str(parse(str(g))) == str(g)
        first, second = evaluate(
            parse(str(g)), {"x": np.array([1, 2]), "flag": np.array([True, False]), "z": np.complex64([1j, 1])}
        )
        np.testing.assert_array_equal(first, [3, 4])
        np.testing.assert_array_equal(second, [2j, 2])


@pytest.mark.parametrize("dtype", [f32, f64, i32])
def test_packed_results_are_cut(dtype):
    """Several results as one vector: x² and 2x, one behind the other."""
    with Extensions().active() as known:
        known.register(
            Extension(
                "packed",
                infer=lambda x, attrs: TensorType(x.dtype, (2 * x.shape[0],)),
                execute=lambda x, attrs: np.concatenate([x * x, 2 * x]),
            )
        )
        g = Graph("main")
        both = custom("packed", g.input("x", dtype[3]))
        g.outputs(ops.narrow(both, 0, 0, 3), ops.narrow(both, 0, 3, 3))
        x = np.array([1, 2, 3], dtype.np)
        for made in (evaluate(g, {"x": x}), Session("cpu").compile(g).run(x=x)):
            np.testing.assert_array_equal(made[0], [1, 4, 9])
            np.testing.assert_array_equal(made[1], [2, 4, 6])
            assert {a.dtype for a in made} == {dtype.np}


def test_registering_again_warns_and_wrong_counts_are_named():
    known = Extensions()
    known.register(clip_extension(num_inputs=1))
    with pytest.warns(UserWarning, match="registered again"):
        known.register(clip_extension(num_inputs=1))
    x = placeholder("x", F32)
    with pytest.raises(OptionError, match="clip01 takes 1 input, got 2"):
        Custom(known["clip01"])(x, x)


def test_an_op_without_derivative_on_purpose():
    extension = clip_extension(differentiable=False)
    x = placeholder("x", F32)
    (y,) = Custom(extension)(x)
    assert pullback([y], [x], [x]) == [None]
    assert pushforward([y], [x], [x]) == [None]
