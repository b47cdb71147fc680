"""StableHLO modules as graphs: what JAX exports gives JAX's numbers; what we export comes back as it was."""

# ruff: noqa: E501 - a program a line is a table

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.errors import LowerError, OptionError, ParseError, StrataError
from strata.mir import REGISTRY, Graph, as_tuple, evaluate
from strata.testing.backend_suite import SampleCase, cases, compare
from strata.testing.check import build, type_of

NAMES = [cls.name for cls in REGISTRY.classes() if cls.samples()]
PARTS = [NAMES[i : i + 40] for i in range(0, len(NAMES), 40)]
NO_COUNTERPART = {
    "adjugate",
    "custom",
    "custom_fn",
    "custom_kernel",
    "eigh",
    "svd",
    "pinv",
    "sample",
}  # and what is made of them


def comes_back(case: SampleCase) -> bool:
    """Whether a sample can be exported; then what comes back computes the same."""
    arrays = case.arrays()
    graph, given = Graph("sample"), {f"c{i}": a for i, a in enumerate(arrays)}
    made = as_tuple(build(case.op, case.sample)(*(graph.input(n, type_of(a)) for n, a in given.items())))
    graph.outputs(*made)
    try:
        text = st.stablehlo.export(graph)
    except LowerError:
        return False
    loaded = st.stablehlo.load(text)
    assert [str(x.type) for x in loaded.results] == [str(x.type) for x in graph.results]
    got = evaluate(loaded, {f"arg{i}": a for i, a in enumerate(arrays)})
    for one, want, out in zip(got, evaluate(graph, given, wide=True), made, strict=True):
        compare(one, want, out.type, case.name)
    return True


@pytest.mark.few(2)
@pytest.mark.parametrize("names", PARTS, ids=lambda names: f"{names[0]}..{names[-1]}")
def test_samples_make_the_round_trip(names: list[str]) -> None:
    left_out = [c.op.name for c in some_of(names) if not comes_back(c)]
    assert set(left_out) <= NO_COUNTERPART


def some_of(names: Sequence[str]) -> Iterator[SampleCase]:
    """Two cases of each op; `python -m tests.unit.io.test_stablehlo_load` runs them all."""
    for name in names:
        yield from itertools.islice(cases([REGISTRY[name]]), 2)


# ------------------------------------------------------------------------------------------------------------------ JAX

needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed")
RNG = np.random.default_rng(0)
X, W, B = (RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8, 8), (8,)))
IMAGES = RNG.standard_normal((2, 9, 7, 3)).astype(np.float32)
IDS, WHOLE = np.array([0, 3, 1], np.int32), np.arange(-10, 10, dtype=np.int32)


def programs() -> dict[str, tuple[Callable[..., Any], Sequence[np.ndarray]]]:
    import jax
    from jax import lax
    from jax import numpy as jnp

    def mixed(x: Any, w: Any, b: Any, i: Any) -> Any:
        s = lax.cumsum(jax.nn.softmax(jax.nn.gelu(x @ w + b), -1), 1)
        k = lax.fori_loop(0, 3, lambda _, a: a * 2 + 1, jnp.take(s, i, axis=0))
        q = lax.cond(k.sum() > 0, lambda a: a + 1, lambda a: a - 1, k)
        return lax.top_k(q, 2), jnp.sort(q, 1), jnp.where(q > 0, q, 0)

    def conv(**more: Any) -> Callable[..., Any]:
        names = ("NHWC", "HWIO", "NHWC")
        return lambda a, k: lax.conv_general_dilated(
            a, k, **{"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": names} | more
        )

    def pooled(a: Any) -> Any:
        return lax.reduce_window(a, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")

    weights = RNG.standard_normal((3, 3, 3, 4)).astype(np.float32)
    deep = RNG.standard_normal((3, 3, 1, 6)).astype(np.float32)
    grouped = conv(feature_group_count=3)
    key = np.array([0, 3], np.uint32)
    return {
        "mixed": (mixed, (X, W, B, IDS)),
        "gradient": (jax.grad(lambda x, w, b: jnp.mean(jax.nn.log_softmax(jax.nn.relu(x @ w + b)) ** 2), (0, 1, 2)), (X, W, B)),
        "arguments of extremes": (lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 0), jnp.argsort(x, -1)), (X,)),
        "convolution": (conv(window_strides=(2, 1), padding=((1, 1), (0, 2)), rhs_dilation=(1, 2)), (IMAGES, weights)),
        "transposed convolution": (lambda a, k: lax.conv_transpose(a, k, (2, 2), "SAME"), (IMAGES, weights)),
        "gradients of a depth-wise one": (jax.grad(lambda a, k: jnp.sin(grouped(a, k)).sum(), (0, 1)), (IMAGES, deep)),
        "pools": (lambda a: (pooled(a), lax.reduce_window(a, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")), (IMAGES,)),
        "gradient of a pool": (jax.grad(lambda a: jnp.sin(pooled(a)).sum()), (IMAGES,)),
        "scatters": (lambda x, i: [jnp.asarray(x).at[i].add(1.0), jnp.asarray(x).at[:, i].set(2.0), jnp.asarray(x).at[i, i].mul(3.0), jnp.asarray(x).at[i + 2].max(0.0)], (X, IDS)),
        "gathers": (lambda x, i: (x[i, i], x[:, i], x[i][:, i], jnp.take_along_axis(x, x.argsort(1), 1), jnp.asarray(x)[i - 9]), (X, IDS)),
        "scan": (lambda x, w: lax.scan(lambda c, a: (jnp.tanh(c @ w + a), c.sum()), jnp.zeros(8), x), (X, W)),
        "random numbers": (lambda k: (jax.random.uniform(k, (5,)), jax.random.normal(k, (4, 3)), jax.random.randint(k, (6,), 0, 10), jax.random.permutation(k, 7)), (key,)),
        "factorisations": (lambda a: (jnp.linalg.cholesky(a @ a.T + 8 * jnp.eye(8)), jax.scipy.linalg.solve_triangular(jnp.tril(a) + 8 * jnp.eye(8), a, lower=True), jnp.linalg.eigh(a + a.T)[0], jnp.linalg.svd(a)[1]), (W,)),
        "triangles": (lambda a: (lax.linalg.lu(a), jax.scipy.linalg.lu(a[:5]), jnp.linalg.solve(a, a[:, :2]), jnp.linalg.det(a), lax.linalg.lu(a.reshape(4, 4, 4)[:, :, :3])), (W,)),
        "reflections": (lambda a: (jnp.linalg.qr(a), jnp.linalg.qr(a[:, :3]), jnp.linalg.qr(a[:3]), jnp.linalg.qr(a[:, :3], mode="complete"), jnp.linalg.qr(jnp.asarray(a).at[1:, 0].set(0.0)), jnp.linalg.qr(a.reshape(4, 4, 4)), jnp.linalg.qr(a + 1j * a.T)), (W,)),
        "transforms": (lambda a: (jnp.fft.fft(a), jnp.fft.rfft(a), jnp.fft.irfft(jnp.fft.rfft(a)), jnp.fft.fft2(a)), (X,)),
        "functions": (lambda a: (jax.scipy.special.erf(a), jax.scipy.special.erfinv(jnp.tanh(a)), lax.lgamma(jnp.abs(a)), jnp.cbrt(a), jnp.round(a), jnp.sinh(a), jnp.arcsinh(a), jnp.floor(a), jnp.log1p(jnp.abs(a)), jnp.isfinite(a), jnp.sign(a)), (X,)),
        "integers": (lambda a: (a // 3, a % 3, a << 2, a >> 1, lax.shift_right_logical(a, jnp.full_like(a, 3)), lax.population_count(a), lax.clz(a), a & 5, ~a, lax.div(a, jnp.full_like(a, -2)), lax.rem(a, jnp.full_like(a, -3))), (WHOLE,)),
        "slices": (lambda x, i: (lax.dynamic_slice(x, (i[0], i[1]), (2, 3)), lax.dynamic_update_slice(x, jnp.ones((2, 2)), (i[1], i[0])), jnp.pad(x, ((1, 2), (0, 3)), constant_values=7.0), jnp.flip(x, 1), jnp.roll(x, 2, 1)), (X, IDS)),
        "branches": (lambda i, x: lax.switch(i[1], [lambda a: a + 1, lambda a: a * 2, lambda a: -a], x), (IDS, X)),
        "a loop": (lambda x: lax.while_loop(lambda s: s[0].sum() < 100, lambda s: (s[0] * 1.5 + 1, s[1] + 1), (jnp.abs(x), 0)), (X,)),
        "sort by two keys": (lambda a, b: lax.sort((a, b), dimension=1, num_keys=2), (np.round(X).astype(np.int32), W[:4])),
        "contractions": (lambda a, b: (jnp.einsum("ij,kj->ik", a, b), jnp.einsum("bij,bjk->bik", a.reshape(2, 2, 8), b.reshape(2, 8, 4))), (X, W)),
        "narrow sums": (lambda a, b: lax.dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32), (X, W)),
        "running": (lambda a: (lax.cummax(a, axis=0), lax.cumprod(a, axis=1), lax.cumsum(a, axis=1, reverse=True), lax.cumlogsumexp(a, axis=1)), (X,)),
        "complex": (lambda a: (jnp.abs(a + 1j * a), (a + 2j * a) * (a - 1j), jnp.real(jnp.exp(1j * a)), jnp.tanh(a + 2j * a[::-1])), (X,)),
        "widths of bits": (lambda a, i: (lax.bitcast_convert_type(a, jnp.uint8), lax.bitcast_convert_type(a, jnp.int16), lax.bitcast_convert_type(i.astype(jnp.uint8).reshape(5, 4), jnp.int32), lax.bitcast_convert_type(i.astype(jnp.int16).reshape(2, 5, 2), jnp.float32)), (X, WHOLE)),
        "reductions": (lambda a: (jnp.any(a > 1, 1), jnp.all(a < 3), jnp.prod(a, 0), jnp.max(a), a.min(1), jnp.var(a, 0), jnp.median(a, 1)), (X,)),
    }  # fmt: skip


PROGRAMS = (
    "mixed", "gradient", "arguments of extremes", "convolution", "transposed convolution", "gradients of a depth-wise one",
    "pools", "gradient of a pool", "scatters", "gathers", "scan", "random numbers", "factorisations", "triangles", "reflections", "transforms",
    "functions", "integers", "slices", "branches", "a loop", "sort by two keys", "contractions", "narrow sums", "running",
    "complex", "widths of bits", "reductions",
)  # fmt: skip


def agree(got: Sequence[np.ndarray], wanted: Any) -> None:
    import jax

    for one, want in zip(got, map(np.asarray, jax.tree.leaves(wanted)), strict=True):
        assert (one.shape, one.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(one, want, rtol=3e-5, atol=3e-5)


@pytest.mark.few(9)
@needs_jax
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_jax_exports_gives_the_same(name: str) -> None:
    import jax
    from jax import export

    function, arrays = programs()[name]
    text = export.export(jax.jit(function))(*arrays).mlir_module()
    compiled = st.Session("cpu").compile(st.stablehlo.load(text))
    agree(compiled.run({f"arg{i}": a for i, a in enumerate(arrays)}), function(*arrays))


@needs_jax
def test_every_program_is_listed() -> None:
    assert tuple(programs()) == PROGRAMS


@needs_jax
@pytest.mark.parametrize("form", ["text", "exported", "bytecode"])
def test_open_sizes_stay_open(form: str) -> None:
    import jax
    from jax import export
    from jax import numpy as jnp

    def function(x: Any, y: Any) -> Any:
        return jnp.concatenate([x, y]), x + y, x.reshape(-1), jnp.arange(x.shape[0]), x[:-1], jnp.cumsum(x, 0), x @ y.T

    (batch,) = export.symbolic_shape("batch")
    kind: Any = jax.ShapeDtypeStruct((batch, 8), np.float32)  # type: ignore[no-untyped-call]
    exported = export.export(jax.jit(function))(kind, kind)
    source: Any = {"text": exported.mlir_module(), "exported": exported, "bytecode": exported.mlir_module_serialized}[
        form
    ]
    graph = st.stablehlo.load(source)
    assert len(graph.symbols()) == 1, "both inputs have one size"
    assert form != "exported" or set(graph.symbols()) == {"batch"}
    compiled = st.Session("cpu").compile(graph)
    for rows in (1, 4, 7):
        x = RNG.standard_normal((rows, 8)).astype(np.float32)
        agree(compiled.run(arg0=x, arg1=-x), function(x, -x))


@needs_jax
def test_a_loaded_function_is_differentiated_and_saved(tmp_path: Path) -> None:
    import jax
    from jax import export
    from jax import numpy as jnp

    def loss(x: Any, w: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    (tmp_path / "loss.mlir").write_text(export.export(jax.jit(loss))(X, W).mlir_module(), "utf-8")
    graph = st.stablehlo.load(tmp_path / "loss.mlir")
    gradient = st.transforms.grad(graph, wrt=["arg1"])
    agree(st.Session("cpu").compile(gradient).run(arg0=X, arg1=W, d_output=np.float32(1)), jax.grad(loss, 1)(X, W))
    st.Session("cpu").compile(graph).save(tmp_path / "loss.strata")
    agree(st.load_compiled(tmp_path / "loss.strata").run(arg0=X, arg1=W), loss(X, W))


# ------------------------------------------------------------------------------------------------------------- bad input

GOOD = """
module @m {
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.tanh %arg0 : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("module @m {\n}\n", ParseError),
        (GOOD.replace("stablehlo.tanh", "stablehlo.all_reduce"), LowerError),
        (GOOD.replace("stablehlo.tanh %arg0", "stablehlo.tanh %nothing"), LowerError),
        (GOOD.replace("tensor<4xf32>\n    return", "tensor<4xf32\n    return"), ParseError),
        (GOOD.replace("@main", "@other"), OptionError),
        (GOOD[: len(GOOD) // 2], ParseError),
        (b"ML\xefR nothing", StrataError),
        (b"\xff\xfe\x00", OptionError),
        (7, StrataError),
    ],
)
def test_what_cannot_be_read_is_told(text: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind) as told:
        st.stablehlo.load(text)
    assert isinstance(told.value, StrataError)


def test_a_function_by_name() -> None:
    graph = st.stablehlo.load(GOOD.replace("@main", "@other"), name="other")
    (y,) = evaluate(graph, {"arg0": X[0, :4]})
    np.testing.assert_allclose(y, np.tanh(X[0, :4]), rtol=1e-6)


def test_a_mutated_text_is_read_or_told() -> None:
    """Texts with a piece taken out or doubled: only errors of ours."""
    g = st.Graph("g")
    x = g.input("x", (4, 8))
    g.outputs((x @ g.input("w", (8, 3))).softmax(-1).sort(-1).cumsum(0))
    text = st.stablehlo.export(g)
    rng = np.random.default_rng(1)
    for _ in range(300):
        at, length = rng.integers(0, len(text)), rng.integers(1, 12)
        changed = text[:at] + (text[at : at + length] * 2 if rng.random() < 0.4 else "") + text[at + length :]
        with contextlib.suppress(StrataError):
            st.stablehlo.load(changed)


if __name__ == "__main__":
    print(sum(map(comes_back, cases())), "samples make the round trip")
