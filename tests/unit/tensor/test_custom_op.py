"""custom_op with the text of a kernel, or a graph: part of the program, checked, differentiable, stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.config import using
from strata.core import Target
from strata.errors import (
    CompileError,
    DTypeError,
    IndexRangeError,
    MissingRuleError,
    OptionError,
    ParseError,
    ShapeError,
    StrataError,
    VerifyError,
)
from strata.kernel import parse_kernel

SOFTMAX = """kernel @soft(x: f32[R, C]) -> y: f32[R, C] {
  size C in 1..   # of a row
  size R in 0..
  axis i in R
  axis j in C
  axis k in C
  %0 = x[i, j]
  %1 = x[i, k]
  %2 = max %1 over k
  %3 = sub(%0, %2)
  %4 = exp(%3)
  %5 = sub(%1, %2)
  %6 = exp(%5)
  %7 = sum %6 over k
  %8 = div(%4, %7)
  store y[i, j] = %8 over i, j
}"""
WEAVE = """kernel @weave(a: f32[N], b: f32[N]) -> y: f32[2*N] {
  size N in 0..
  axis i in N
  %0 = a[i]
  %1 = b[i]
  %2 = mul(i, 2)
  %3 = add(%2, 1)
  store y[%2] = %0 over i
  store y[%3] = %1 over i
}"""
LOOKUP = """kernel @lookup(table: f32[V, D], ids: i64[N]) -> y: f32[N, D] {
  size D in 0..
  size N in 0..
  size V in 0..
  axis i in N
  axis d in D
  %0 = ids[i]
  %1 = table[%0, d]
  store y[i, d] = %1 over i, d
}"""
MATMUL = """kernel @product(a: f32[M, K], b: f32[K, N]) -> y: f32[M, N] {
  size K in 0..
  size M in 0..
  size N in 0..
  axis i in M
  axis j in N
  axis k in K
  %0 = a[i, k]
  %1 = b[k, j]
  %2 = mul(%0, %1)
  %3 = sum %2 over k
  store y[i, j] = %3 over i, j
}"""
PARTS = """kernel @parts(x: f32[N], n: i32[]) -> low: f32[N], total: f64[], place: i64[] {
  size N in 1..
  axis i in N
  axis j in N
  %0 = x[i]
  %1 = n[]
  %2 = cast.f32(%1)
  %3 = min(%0, %2)
  %4 = x[j]
  %5 = cast.f64(%4)
  %6 = sum %5 over j
  %7 = argmax %4 over j
  store low[i] = %3 over i
  store total[] = %6
  store place[] = %7
}"""
COUNT = """kernel @count() -> y: f32[N] {
  size N in 0..
  axis i in N
  %0 = cast.f32(i)
  store y[i] = %0 over i
}"""
PAD = """kernel @pad(x: f32[N, 3]) -> y: f32[N + 2, 3] {
  size N in 0..
  axis i in N + 2
  axis c in 3
  %0 = sub(i, 1)
  %1 = ge(%0, 0)
  %2 = lt(%0, (N))
  %3 = and(%1, %2)
  %4 = x[%0, c] where %3
  store y[i, c] = %4 over i, c
}"""
HALF = """kernel @half(x: f16[N]) -> y: f16[] {
  size N in 0..
  axis i in N
  %0 = x[i]
  %1 = cast.f32(%0)
  %2 = sum %1 over i
  %3 = cast.f16(%2)
  store y[] = %3
}"""
RUNNING = """kernel @running(x: f32[R, N]) -> y: f32[R, N] {
  size N in 0..
  size R in 0..
  axis r in R
  axis i in N
  axis j in N
  %0 = x[r, j]
  %1 = scan sum %0 over j through i
  store y[r, i] = %1 over r, i
}"""
TUNED = SOFTMAX.replace(
    "  axis k in C\n", "  axis k in C\n  schedule parallel 1 grain 4; vectorise 1 by 8; nontemporal y\n"
)
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True, initial=-np.inf))
    return (e / e.sum(-1, keepdims=True)).astype(np.float32)


def weave(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.stack([a, b], -1).reshape(-1)


def parts(x: np.ndarray, n: np.ndarray) -> tuple[Any, ...]:
    return np.minimum(x, n.astype(np.float32)), x.astype(np.float64).sum(), np.int64(x.argmax())


def half(x: np.ndarray) -> Any:
    return x.astype(np.float32).sum().astype(np.float16)


def pad(x: np.ndarray) -> np.ndarray:
    return np.pad(x, ((1, 1), (0, 0)))


CASES: dict[str, tuple[str, Any, list[tuple[np.ndarray, ...]]]] = {
    "softmax": (SOFTMAX, softmax, [(normal(3, 5),), (normal(1, 1),), (normal(0, 4),), (normal(33, 130),)]),
    "scheduled": (TUNED, softmax, [(normal(3, 5),), (normal(1, 1),), (normal(1, 40),), (normal(9, 64),)]),
    "weave": (WEAVE, weave, [(normal(n), normal(n)) for n in (0, 1, 2, 17, 1000)]),
    "lookup": (LOOKUP, lambda t, i: t[i], [(normal(4, 3), np.array([3, 0, 0])), (normal(1, 9), np.zeros(0, np.int64))]),
    "matmul": (MATMUL, lambda a, b: a @ b, [(normal(9, 8), normal(8, 33)), (normal(1, 0), normal(0, 2))]),
    "parts": (PARTS, parts, [(normal(n), np.array(0, np.int32)) for n in (1, 7, 100)]),
    "pad": (PAD, pad, [(normal(n, 3),) for n in (0, 1, 40)]),
    "half": (HALF, half, [(np.full(n, 9, np.float16),) for n in (0, 1, 600, 3001)]),  # 2049 + 1 is 2048 in f16
    "running": (RUNNING, lambda x: x.cumsum(-1), [(normal(2, 9),), (normal(3, 1),), (normal(2, 0),)]),
}  # fmt: skip


def graph_of(text: str, arrays: tuple[np.ndarray, ...], *, symbolic: bool, around: bool) -> st.Graph:
    """The op on inputs of a graph, perhaps with element-wise ops around it, and symbols where the text has some."""
    g = st.Graph("g")
    values = []
    for b, a in zip(parse_kernel(text).inputs, arrays, strict=True):
        dims: list[Any] = list(a.shape)
        for at, d in enumerate(b.shape):
            if symbolic and not isinstance(d, int):
                dims[at] = st.sym(f"s{d}", 1 if f"size {d} in 1" in text else 0, 4096)
        values.append(g.input(b.name, tuple(dims), str(b.dtype)))
    given = [x * 2 / 2 if around and x.dtype.is_float else x for x in values]
    made = st.custom_op(text)(*given)
    outs = made if isinstance(made, tuple) else (made,)
    return g.outputs(*((y + y if around else y) for y in outs))


@pytest.mark.few(48)
@pytest.mark.parametrize("around", [False, True], ids=["alone", "fused"])
@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("device", ["cpu", "cpu:avx2", "cpu:baseline", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_what_they_say(name: str, device: str, symbolic: bool, around: bool) -> None:
    level = device.partition(":")[2]
    if level and not Target.named(level).runs_on(Target.host()):
        pytest.skip(f"this processor has no {level}")
    text, reference, inputs = CASES[name]
    for arrays in inputs:
        g = graph_of(text, arrays, symbolic=symbolic, around=around)
        assert st.parse(str(g)) == g
        c = st.Session(device).compile(g)
        if device != "reference":
            assert not c.host_steps
        feeds = {b.name: a for b, a in zip(parse_kernel(text).inputs, arrays, strict=True)}
        expected = reference(*arrays)
        for got, one in zip(c.run(feeds), expected if isinstance(expected, tuple) else (expected,), strict=True):
            want = np.asarray(one + one if around else one)
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        for threads in (1, 2, 7) if device == "cpu" else ():
            with using(num_threads=threads):
                again = st.Session(device).compile(g).run(feeds)
            for a, b in zip(again, c.run(feeds), strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_body_that_goes_through_its_outputs_is_fused() -> None:
    x = normal(6, 16)
    g = st.Graph("g")
    g.outputs(st.custom_op(SOFTMAX)(g.input("x", (6, 16)) * 2.0) + 1.0)
    c = st.Session("cpu").compile(g)
    assert [s.label for s in c.lir.schedule] == ["multiply + soft + add"]
    np.testing.assert_allclose(c.run(x=x)[0], softmax(2 * x) + 1, rtol=1e-6)
    assert "multiply + soft + add" in str(c.explain())


@pytest.mark.parametrize("text", [TUNED, WEAVE], ids=["schedule", "stores"])
def test_a_body_with_a_schedule_or_other_stores_is_a_kernel_of_its_own(text: str) -> None:
    kernel = parse_kernel(text)
    g = st.Graph("g")
    shape = (6, 16) if kernel.name == "soft" else (6,)
    values = [g.input(b.name, shape) + 1.0 for b in kernel.inputs]
    g.outputs(st.custom_op(text)(*values) * 2.0)
    c = st.Session("cpu").compile(g)
    assert kernel.name in [s.label for s in c.lir.schedule]
    (own,) = [s.kernel for s in c.lir.schedule if s.label == kernel.name]
    assert own is not None
    assert own.schedule == kernel.schedule.replace("nontemporal y", "nontemporal out0")
    assert not c.host_steps
    assert f"{kernel.name} is a separate step" in str(c.explain())


def test_a_product_is_found_in_a_kernel() -> None:
    """What is a product of matrices takes the template of one."""
    from strata.backends.llvm.gemm.match import find_matmul

    g = st.Graph("g")
    g.outputs((st.custom_op(MATMUL)(g.input("a", (64, 48)), g.param("b", (48, 32))) + 1.0).relu())
    (kernel,) = st.CompilePipeline("cpu").compile(g).lir.kernels.values()
    assert find_matmul(kernel) is not None


def test_sizes_that_no_input_shows_are_keywords() -> None:
    count = st.custom_op(COUNT)
    np.testing.assert_array_equal(count(N=5).numpy(), np.arange(5, dtype=np.float32))
    g = st.Graph("g")
    n = st.sym("n", 0, 100)
    x = g.input("x", (n,))
    outs = st.ops.CustomKernel(st.ops.kernel_text(COUNT), (("N", n),))()
    g.outputs(x + outs[0])
    (out,) = st.Session("cpu").compile(g).run(x=np.ones(7, np.float32))
    np.testing.assert_array_equal(out, np.arange(7) + 1)
    result = st.CompilePipeline("cpu").compile(g).specialize({"n": 3})
    assert not result.has_dynamic_dims


def test_derivatives_are_rules_of_the_user() -> None:
    x, w = st.tensor(normal(3, 5)), st.tensor(normal(3, 5))
    soft = st.custom_op(
        SOFTMAX,
        vjp=lambda x, out, ct: (out * (ct - (ct * out).sum(axis=-1, keepdims=True)),),
        jvp=lambda x, out, dx: out * (dx[0] - (dx[0] * out).sum(axis=-1, keepdims=True)),
    )

    def plain(a: Any) -> Any:
        return st.softmax(a, axis=-1)

    close: Any = lambda a, b: np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)
    close(st.grad(lambda a: (soft(a) * w).sum())(x), st.grad(lambda a: (plain(a) * w).sum())(x))
    close(st.jvp(soft, x, w)[1], st.jvp(plain, x, w)[1])
    rows = st.tensor(normal(4, 3, 5))
    close(st.vmap(soft)(rows), plain(rows))
    close(st.vmap(st.grad(lambda a: (soft(a) * w).sum()))(rows), st.vmap(st.grad(lambda a: (plain(a) * w).sum()))(rows))
    close(st.jit(lambda a: soft(a * 2) + 1)(x), plain(x * 2) + 1)


def test_derivatives_may_be_graphs() -> None:
    g = st.Graph("product")
    x, y = g.input("x", (3,)), g.input("n", (3,), "i32")
    body = g.outputs(x * y.cast("f32"))
    back = st.Graph("back")
    bx, by, ct = back.input("x", (3,)), back.input("n", (3,), "i32"), back.input("d_output", (3,))
    back.outputs(ct * by.cast("f32") * 10.0 + bx * 0.0)
    ahead = st.Graph("ahead")
    _, ay, dx = ahead.input("x", (3,)), ahead.input("n", (3,), "i32"), ahead.input("tangent_0", (3,))
    ahead.outputs(dx * ay.cast("f32") * 20.0)
    f = st.custom_op(body, vjp=back, jvp=ahead)
    a, n = st.tensor([1.0, 2.0, 3.0]), st.tensor(np.array([1, 2, 3], np.int32))
    np.testing.assert_array_equal(f(a, n).numpy(), [1, 4, 9])
    np.testing.assert_array_equal(st.grad(lambda a: f(a, n).sum())(a).numpy(), [10, 20, 30])
    np.testing.assert_array_equal(st.jvp(lambda a: f(a, n), a, st.ones((3,)))[1].numpy(), [20, 40, 60])
    bad = st.Graph("bad")
    bad.outputs(bad.input("x", (3,)) + bad.input("y", (3,), "i32").cast("f32") + bad.input("other", (3,)))
    with pytest.raises(OptionError, match="has an input 'other'; known: primal_output, d_output"):
        st.grad(lambda a: st.custom_op(body, vjp=bad)(a, n).sum())(a)


def test_vmap_over_some_inputs() -> None:
    table, ids = normal(4, 3), np.array([[0, 1], [3, 2], [1, 1]])
    rows = st.vmap(st.custom_op(LOOKUP), in_axes=(None, 0))(table, ids)
    np.testing.assert_array_equal(rows.numpy(), table[ids])
    a, b = normal(3, 4), normal(3, 4)
    woven = st.vmap(st.custom_op(WEAVE))(a, b)
    np.testing.assert_array_equal(woven.numpy(), np.stack([a, b], -1).reshape(3, -1))


def test_without_a_rule_a_derivative_is_an_error() -> None:
    product = st.custom_op(MATMUL)
    with pytest.raises(MissingRuleError, match="the custom op 'product' has no vjp rule"):
        st.grad(lambda a: product(a, normal(2, 2)).sum())(normal(2, 2))
    flat = st.custom_op(MATMUL, differentiable=False)
    np.testing.assert_array_equal(st.grad(lambda a: flat(a, normal(2, 2)).sum() + a.sum())(normal(2, 2)).numpy(), 1)


def test_a_bundle_holds_the_kernel(tmp_path: Path) -> None:
    g = st.Graph("g")
    x = g.input("x", (st.sym("n", 1, 100), 8))
    g.outputs(st.custom_op(SOFTMAX)(x), st.custom_op(WEAVE)(x[0], x[0] + 1.0), st.custom_op(TUNED)(x))
    c = st.Session("cpu").compile(g)
    c.save(tmp_path / "m.strata")
    again = st.load_compiled(tmp_path / "m.strata")
    a = normal(9, 8)
    for got, want in zip(again.run(x=a), c.run(x=a), strict=True):
        np.testing.assert_array_equal(got, want)
    assert not again.host_steps


def test_the_kernel_is_part_of_every_key() -> None:
    def key(text: str) -> tuple[str, str]:
        g = st.Graph("g")
        g.outputs(st.custom_op(text)(g.input("x", (4, 8))))
        return st.CompilePipeline("cpu").compile(g).lir.fingerprint(), str(g)

    a, b = key(SOFTMAX), key(SOFTMAX.replace("exp(%3)", "exp2(%3)"))
    assert a[0] != b[0]
    assert a[1] != b[1]
    assert key(SOFTMAX) == a
    assert key("# spaces and comments do not matter\n" + SOFTMAX) == a


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_an_index_out_of_range(device: str) -> None:
    table, good, bad = normal(4, 3), np.array([0, 3]), np.array([9, -2])
    g = st.Graph("g")
    g.outputs(st.custom_op(LOOKUP)(g.input("t", (4, 3)), g.input("i", (2,), "i64")) * 2.0)
    (out,) = st.Session(device).compile(g).run(t=table, i=bad)
    np.testing.assert_array_equal(out, table[[3, 0]] * 2, err_msg="it is clamped, as in a gather")
    with using(check_indices=True):
        c = st.Session(device).compile(g)
        np.testing.assert_array_equal(c.run(t=table, i=good)[0], table[good] * 2)
        for _ in range(2):
            with pytest.raises(IndexRangeError, match=r"id 9 is outside 0\.\.3"):
                c.run(t=table, i=bad)
        with pytest.raises(IndexRangeError, match=r"index 9 is outside 0\.\.3"):
            st.evaluate(g, {"t": table, "i": bad})


A = normal(2, 3)
MISTAKES: list[tuple[Any, type[StrataError], str]] = [
    (lambda: st.custom_op(SOFTMAX)(A, A), OptionError, r"soft: takes x: f32\[R, C\], got 2 inputs"),
    (lambda: st.custom_op(SOFTMAX)(A.astype("f8")), DTypeError, r"x: f32\[R, C\] is given f64\[2, 3\]"),
    (lambda: st.custom_op(SOFTMAX)(A[0]), ShapeError, r"x: f32\[R, C\] is given f32\[3\]"),
    (lambda: st.custom_op(SOFTMAX)(A[:, :0]), ShapeError, r"C is 0 \(axis 1 of x\), outside 1\.\."),
    (lambda: st.custom_op(MATMUL)(A, A), ShapeError, "axis 0 of b must be K = 3, it is 2"),
    (lambda: st.custom_op(PAD)(A[:, :2]), ShapeError, "axis 1 of x must be 3, it is 2"),
    (st.custom_op(COUNT), OptionError, "no input shows the size N"),
    (lambda: st.custom_op(COUNT)(M=2), OptionError, "no size is called 'M'; it has N"),
    (lambda: st.custom_op(COUNT)(N=-2), OptionError, "N=-2 is not a size"),
    (lambda: st.custom_op(COUNT)(N=2.5), OptionError, r"N=2\.5 is not a size"),
    (lambda: st.custom_op("hello"), ParseError, "line 1: expected `kernel"),
    (lambda: st.custom_op(SOFTMAX.replace("exp(%3)", "gcd(%3, %3)")), VerifyError, "gcd does not take f32"),
    (lambda: st.custom_op(SOFTMAX.replace("store y[i, j]", "store y[j, i]")), VerifyError, "a store to y"),
    (lambda: st.custom_op(TUNED.replace("vectorise 1", "vectorise 9")), CompileError, "vectorise 9 by 8"),
    (lambda: st.custom_op(TUNED.replace("by 8", "by 7")), CompileError, "lanes are a power of two"),
    (lambda: st.custom_op(SOFTMAX, infer=lambda x: x), OptionError, "infer is not taken with a kernel"),
    (lambda: st.custom_op(SOFTMAX, name="a b"), OptionError, "'a b' cannot name a kernel"),
    (lambda: st.custom_op(SOFTMAX, vjp=lambda x, out, ct: ct, differentiable=False), OptionError, "not differentiable"),
    (lambda: st.custom_op(3), OptionError, "takes a function, the text of a kernel or a graph, got int"),
    (lambda: st.custom_op(lambda x: x, vjp=st.Graph("g")), OptionError, "of a Python function is a function"),
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(MISTAKES)))
def test_mistakes(at: int) -> None:
    call, error, message = MISTAKES[at]
    with pytest.raises(error, match=message) as caught:
        call()
    assert "test_custom_op.py:" in str(caught.value), "the user's line"
