"""Transforms of graphs by name: their signatures, values against NumPy and finite differences, and mistakes."""

import numpy as np
import pytest

from strata.core import f64, i64, sym
from strata.errors import DTypeError, OptionError, ShapeError, StrataError, TraceError, UnknownNameError
from strata.mir import Graph, evaluate, parse
from strata.ops import ScanOp, cond, layer_norm, scan
from strata.transforms import checkpoint, grad, grad_with_loss, hvp, jacfwd, jacrev, jvp, value_and_grad, vjp, vmap

RNG = np.random.default_rng(3)


def mlp(size=4):
    g = Graph("mlp")
    x = g.input("x", f64[3, size])
    w, b = g.param("w", f64[size, 2]), g.param("b", f64[2])
    return g.outputs(((x @ w + b).tanh() * 1.5).sum())


def feeds(g):
    return {n: RNG.standard_normal(g.leaf(n).shape) for n in (*g.input_names, *g.param_names)}


def test_grad_with_loss_has_the_loss_and_a_seed():
    g = mlp()
    both = grad_with_loss(g, wrt=["w", "x"])
    assert both.name == "mlp_grad"
    assert both.input_names == ("x", "d_output")
    assert both.param_names == ("w", "b")
    data = feeds(g)
    loss, dw, dx = evaluate(both, data | {"d_output": 2.0})
    np.testing.assert_allclose(loss, evaluate(g, data)[0])
    slope = 2.0 * 1.5 * (1 - np.tanh(data["x"] @ data["w"] + data["b"]) ** 2)
    np.testing.assert_allclose(dw, data["x"].T @ slope)
    np.testing.assert_allclose(dx, slope @ data["w"].T)
    (only,) = evaluate(grad(g, wrt="w"), data | {"d_output": 2.0})
    np.testing.assert_array_equal(only, dw)


def test_all_parameters_by_default_and_text_round_trip():
    g = value_and_grad(mlp())
    assert g.input_names == ("x",)
    assert len(g.results) == 3
    assert str(parse(str(g))) == str(g)


def test_no_path_gives_zeros():
    g = Graph("two")
    x, _ = g.input("x", f64[2]), g.input("y", f64[3])
    g.outputs(x.sum())
    _, dy = evaluate(grad(g, wrt=["x", "y"]), {"x": np.ones(2), "y": np.ones(3), "d_output": 1.0})
    np.testing.assert_array_equal(dy, np.zeros(3))
    out, tangent = evaluate(jvp(g, ["y"]), {"x": np.ones(2), "y": np.ones(3), "tangent_y": np.ones(3)})
    assert (out, tangent) == (2.0, 0.0)


def test_jvp_names_tangents_after_their_inputs():
    g = mlp()
    forward = jvp(g, ["w"])
    assert forward.name == "mlp_jvp"
    assert forward.input_names == ("x", "tangent_w")
    data = feeds(g)
    v = RNG.standard_normal((4, 2))
    out, tangent = evaluate(forward, data | {"tangent_w": v})
    (dw,) = evaluate(grad(g, "w"), data | {"d_output": 1.0})
    np.testing.assert_allclose(tangent, (dw * v).sum())
    np.testing.assert_allclose(out, evaluate(g, data)[0])
    twice = jvp(forward, ["w"])
    assert twice.input_names == ("x", "tangent_w", "tangent_w_2")


def test_80_hvp_of_a_sum_of_squares():
    g = Graph("squares")
    g.outputs((g.input("x", f64[4]) ** 2).sum())
    product = hvp(g, ["x"])
    assert product.name == "squares_hvp"
    assert product.input_names == ("x", "d_output", "tangent_x")
    x, v = RNG.standard_normal(4), RNG.standard_normal(4)
    loss, gradient, along, hv = evaluate(product, {"x": x, "d_output": 1.0, "tangent_x": v})
    np.testing.assert_allclose(loss, (x**2).sum())
    np.testing.assert_allclose(gradient, 2 * x)
    np.testing.assert_allclose(along, (2 * x * v).sum())
    np.testing.assert_allclose(hv, 2 * v)


def test_44_vmap_with_shared_parameters():
    g = Graph("affine")
    x, w, b = g.input("x", f64[3]), g.param("w", f64[3, 2]), g.param("b", f64[2])
    g.outputs((x @ w + b).sum(), b * 2.0)
    data = {"x": RNG.standard_normal((4, 3)), "w": RNG.standard_normal((3, 2)), "b": RNG.standard_normal(2)}
    rows, shared = evaluate(vmap(g, ["x"], 4), data)
    np.testing.assert_allclose(rows, (data["x"] @ data["w"] + data["b"]).sum(1), rtol=1e-12)
    np.testing.assert_array_equal(shared, np.tile(data["b"] * 2, (4, 1)))
    assert vmap(g, "x", 4).name == "affine_vmap"


def test_105_vmap_aligns_ranks_and_negative_axes():
    g = Graph("g")
    x, y = g.input("x", f64[3, 4]), g.input("y", f64[4])
    g.outputs(x + y, x.softmax(axis=-1))
    x0, y0 = RNG.standard_normal((3, 4)), RNG.standard_normal((3, 4))
    total, soft = evaluate(vmap(g, ["y"], 3), {"x": x0, "y": y0})
    np.testing.assert_allclose(total, x0[None] + y0[:, None])
    xs = RNG.standard_normal((3, 3, 4))
    _, soft = evaluate(vmap(g, ["x"], 3), {"x": xs, "y": y0[0]})
    e = np.exp(xs - xs.max(-1, keepdims=True))
    np.testing.assert_allclose(soft, e / e.sum(-1, keepdims=True))


def test_vmap_over_a_symbolic_batch():
    batch = sym("B", 1, 8)
    g = vmap(mlp(), ["x"], batch)
    data = feeds(mlp())
    rows = evaluate(g, data | {"x": RNG.standard_normal((5, 3, 4))})[0]
    assert rows.shape == (5,)


def test_vjp_of_several_outputs():
    g = Graph("pair")
    x, ids = g.input("x", f64[2]), g.input("ids", i64[2])
    g.outputs(x * 2.0, ids + 1, x * x)
    back = vjp(g, ["x"])
    assert back.input_names == ("x", "ids", "d_output_0", "d_output_2")
    data = {"x": np.array([1.0, 2.0]), "ids": np.array([0, 1]), "d_output_0": np.ones(2), "d_output_2": np.ones(2)}
    *_, dx = evaluate(back, data)
    np.testing.assert_allclose(dx, 2 + 2 * data["x"])


@pytest.mark.parametrize("transform", [jacfwd, jacrev])
def test_jacobians(transform):
    g = Graph("g")
    x, w = g.input("x", f64[3]), g.param("w", f64[3, 2])
    g.outputs((x @ w).sin(), x * x)
    data = {"x": RNG.standard_normal(3), "w": RNG.standard_normal((3, 2))}
    yx, yw, zx, zw = evaluate(transform(g, ["x", "w"]), data)
    slope = np.cos(data["x"] @ data["w"])
    np.testing.assert_allclose(yx, slope[:, None] * data["w"].T)
    np.testing.assert_allclose(yw, np.einsum("j,i,jk->jik", slope, data["x"], np.eye(2)))
    np.testing.assert_allclose(zx, np.diag(2 * data["x"]))
    assert zw.shape == (3, 3, 2)
    assert not zw.any()


def test_checkpoint_keeps_the_value_and_computes_again():
    g = mlp()
    data = feeds(g)
    again = grad_with_loss(checkpoint(g), ["w", "x"])
    for a, b in zip(
        evaluate(again, data | {"d_output": 1.0}),
        evaluate(grad_with_loss(g, ["w", "x"]), data | {"d_output": 1.0}),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)
    assert [n.op.name for n in again.nodes()].count("barrier") == 1


@pytest.mark.parametrize("checkpoints", [None, 2, 3])
def test_a_forward_scan_runs_once(checkpoints):
    g = Graph("rnn")
    init, xs, w = g.input("init", f64[3]), g.input("xs", f64[8, 3]), g.param("w", f64[3, 3])
    last, ys = scan(lambda c, x: ((c @ w + x).tanh(), c * 2.0), init, xs, checkpoints=checkpoints)
    g.outputs(last.sum() + ys.sum())
    both = grad_with_loss(g, ["init", "xs", "w"])
    scans = [n.op for n in both.nodes() if isinstance(n.op, ScanOp)]
    runs = 2 if checkpoints == 3 else 1  # segments of 3, 3 and 2 steps
    assert [s.reverse for s in scans].count(False) == runs
    assert [s.reverse for s in scans].count(True) == runs
    data = feeds(g)
    loss, *grads = evaluate(both, data | {"d_output": 1.0})
    np.testing.assert_array_equal(loss, evaluate(g, data)[0])
    plain = evaluate(grad_with_loss(parse(str(g).replace(f"checkpoints = {checkpoints}", "checkpoints = None")),
                                    ["init", "xs", "w"]), data | {"d_output": 1.0})  # fmt: skip
    for a, b in zip(grads, plain[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_a_gradient_computes_no_more_than_what_was_asked_for():
    g = Graph("rnn")
    init, xs, w = g.input("init", f64[3]), g.input("xs", f64[8, 3]), g.param("w", f64[3, 3])
    last, ys = scan(lambda c, x: ((c @ w + x).tanh(), c * 2.0), init, xs)
    g.outputs(cond(last.sum() > 0.0, last.sum, ys.sum))
    for name, outputs in (("init", 1), ("w", 2), ("xs", 2)):
        (sweep,) = [n for n in grad(g, [name]).nodes() if isinstance(n.op, ScanOp) and n.op.reverse]
        assert len(sweep.types) == outputs, f"the carry's cotangent, and that of {name}"
    data = feeds(g)
    whole = evaluate(grad(g, ["init", "w", "xs"]), data | {"d_output": 1.0})
    for i, name in enumerate(("init", "w", "xs")):
        np.testing.assert_array_equal(evaluate(grad(g, [name]), data | {"d_output": 1.0})[0], whole[i])


def attention_block(tokens=5, width=6):
    """Softmax attention, layer norm and an MLP, from primitives."""
    g = Graph("block")
    x = g.input("x", f64[tokens, width])
    wq, wk, wv = (g.param(n, f64[width, width]) for n in ("wq", "wk", "wv"))
    gamma, beta = g.param("gamma", f64[width]), g.param("beta", f64[width])
    w1, w2 = g.param("w1", f64[width, 8]), g.param("w2", f64[8, width])
    q, k, v = x @ wq, x @ wk, x @ wv
    scores = (q @ k.T) * width**-0.5
    e = (scores - scores.max(axis=-1, keepdims=True)).exp()
    h = x + (e / e.sum(axis=-1, keepdims=True)) @ v
    centred = h - h.mean(axis=-1, keepdims=True)
    normed = centred / ((centred * centred).mean(axis=-1, keepdims=True) + 1e-5).sqrt() * gamma + beta
    out = normed + (normed @ w1).gelu() @ w2
    return g.outputs((out * out * out).mean())


def test_80_hvp_of_attention_norm_and_mlp_equals_finite_differences():
    g = attention_block()
    wrt = ["x", *g.param_names]
    data = {n: RNG.standard_normal(g.leaf(n).shape) * 0.5 for n in wrt}
    v = {n: RNG.standard_normal(g.leaf(n).shape) for n in wrt}
    gradient = grad(g, wrt)
    outs = evaluate(hvp(g, wrt), data | {"d_output": 1.0} | {f"tangent_{n}": v[n] for n in wrt})
    products = outs[len(outs) - len(wrt) :]
    step = 1e-5
    up, down = (
        evaluate(gradient, {n: data[n] + sign * step * v[n] for n in wrt} | {"d_output": 1.0}) for sign in (1, -1)
    )
    for name, hv, a, b in zip(wrt, products, up, down, strict=True):
        np.testing.assert_allclose(hv, (a - b) / (2 * step), rtol=1e-6, atol=1e-6, err_msg=name)


def test_79_gradients_of_a_feed_forward_layer_equal_central_differences():
    g = Graph("ffn")
    x, w1, b1 = g.input("x", f64[3, 4]), g.param("w1", f64[4, 6]), g.param("b1", f64[6])
    w2, b2, gamma, beta = (
        g.param("w2", f64[6, 4]),
        g.param("b2", f64[4]),
        g.param("gamma", f64[4]),
        g.param("beta", f64[4]),
    )
    out = layer_norm(x + (x @ w1 + b1).gelu() @ w2 + b2, gamma, beta)
    g.outputs((out * out * out).mean())
    wrt = ["x", *g.param_names]
    data = {n: RNG.standard_normal(g.leaf(n).shape) for n in wrt}
    step = 1e-5
    for name, found in zip(wrt, evaluate(grad(g, wrt), data | {"d_output": 1.0}), strict=True):
        for at in np.ndindex(found.shape):
            moved = np.zeros(found.shape)
            moved[at] = step
            up, down = (evaluate(g, data | {name: data[name] + sign * moved})[0] for sign in (1, -1))
            np.testing.assert_allclose(found[at], (up - down) / (2 * step), rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: grad(g, ["v"]), UnknownNameError, "has no input or parameter 'v'"),
        (lambda g: grad(g, ["w", "w"]), OptionError, "'w' is named twice"),
        (lambda g: grad(g, ["ids"]), DTypeError, r"'ids' is i64\[2\], and derivatives exist for floats only"),
        (grad, OptionError, "has 2 outputs, a loss is one"),
        (lambda g: grad("text"), TraceError, "takes a Graph, got str"),
        (lambda g: grad(Graph("empty")), TraceError, "has no outputs yet"),
        (lambda g: jvp(g, ["nothing"]), UnknownNameError, "nothing"),
        (lambda g: jvp(g, []), OptionError, "nothing to differentiate"),
        (lambda g: vmap(g, ["x"], -1), OptionError, "-1 is not a batch size"),
        (lambda g: vmap(g, [], 3), OptionError, "name at least one"),
        (lambda g: vmap(g, ["q"], 3), UnknownNameError, "'q'"),
        (lambda g: value_and_grad(g.returning(g.results[0]), ["w"]), OptionError, r"one float, it is f64\[2\]"),
    ],
)
def test_mistakes(call, error, message):
    g = Graph("g")
    x, ids, w = g.input("x", f64[3]), g.input("ids", i64[2]), g.param("w", f64[3, 2])
    g.outputs(x @ w, ids)
    with pytest.raises(error, match=message):
        call(g)


def test_a_seed_of_the_wrong_shape_is_named():
    g = grad(mlp(), "w")
    with pytest.raises(ShapeError, match="d_output"):
        evaluate(g, feeds(mlp()) | {"d_output": np.ones(3)})
    assert issubclass(ShapeError, StrataError)
