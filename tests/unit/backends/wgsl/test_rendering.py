"""What shaders are made from, without a GPU: the table, the library, ranges of integers, legality, schedules."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from strata import ops
from strata.backends.wgsl.backend import shader_text
from strata.backends.wgsl.bounds import MOST, Bounds
from strata.backends.wgsl.legal import can_lower
from strata.backends.wgsl.library import called, functions, needed
from strata.backends.wgsl.phases import phases_of
from strata.backends.wgsl.render import render
from strata.backends.wgsl.values import FUNCTIONS, HELD, has_function, literal
from strata.core import ALL_DTYPES, DType, Target, f32, f64, i32, i64, sym, u8
from strata.kernel import (
    SCALARS,
    Axis,
    Buffer,
    Const,
    Expr,
    Kernel,
    KernelBuilder,
    Load,
    apply,
    interpret,
    verify_kernel,
)
from strata.lir import parse_module, plan
from strata.mir import REGISTRY, Graph

HELD_TYPES = [t for t in ALL_DTYPES if t.name in HELD]


@pytest.mark.parametrize("name", SCALARS)
def test_the_table_has_every_function_for_every_type_that_is_held(name: str) -> None:
    if name in ("conj", "real", "imag", "complex"):
        assert not any(has_function(name, t) for t in HELD_TYPES)
        return
    for dtype in HELD_TYPES:
        if SCALARS[name].takes(dtype):
            assert has_function(name, dtype), f"{name} of {dtype}"


def test_the_table_only_calls_functions_that_there_are() -> None:
    known = {"abs", "floor", "ceil", "trunc", "round", "min", "max", "sign", "fma"}  # of WGSL itself
    for name, forms in FUNCTIONS.items():
        for text in forms.values():
            made = {word for word in text.replace("(", " ( ").split() if word.isidentifier()}
            calls = {w for w in made if f"{w}(" in text.replace(" ", "")} - known
            assert calls <= set(functions()), f"{name}: {calls}"


def test_a_shader_gets_what_its_functions_call() -> None:
    text = needed("let x = gelu_f(y);")
    for name in ("gelu_f", "erfc_f", "exp_f", "is_nan", "infinity", "from_bits"):
        assert f"fn {name}(" in text
    assert "fn sin_f(" not in text
    assert not needed("let x = y + 1.0;")
    for part in functions().values():
        assert part.count("{") == part.count("}")
    assert called("sin_f(cos(x))") == ("sin_f",)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (True, "b", "true"), (-3, "i", "i32(-3)"), (-(1 << 31), "i", "i32(-2147483648)"), (7, "u", "7u"),
        (float("nan"), "f", "not_a_number()"), (float("-inf"), "f", "(-infinity())"), (-0.0, "f", "(-0.0)"),
        (0.5, "f", "5.0e-01"), (1e-45, "f", "from_bits(1u)"), (-1, "q", "vec2<u32>(4294967295u, 4294967295u)"),
        (1 << 63, "w", "vec2<u32>(0u, 2147483648u)"),
    ],
)  # fmt: skip
def test_literals(value: float, kind: str, text: str) -> None:
    assert literal(value, kind) == text


def test_integers_that_fit_32_bits() -> None:
    i, n = Axis("i", 100), Axis("n", sym("n", 0))
    ids = Load(Buffer("ids", i64, (100,)), (i,))
    known = Bounds()
    small: list[Expr] = [i * 7 + 3, n + n, ids % 9, apply("min", apply("max", ids, 0), 50), Const(-5, i64) * i]
    wide: list[Expr] = [ids, ids + 1, i * (1 << 40), n * n * 64, Const(1 << 31, i64), apply("max", ids, 0)]
    for node in small:
        assert known.fits(node), node
    for node in wide:
        assert not known.fits(node), node
    assert known.range(n) == (0, MOST - 1)
    assert known.range(apply("mul", ids % (1 << 40), ids % (1 << 40))) is None  # it may wrap around


@pytest.mark.parametrize("dtype", HELD_TYPES, ids=str)
def test_ops_on_held_types_lower(dtype: DType) -> None:
    op = REGISTRY["equal"]()
    assert can_lower(op, (dtype[4], dtype[4]))


def test_ops_that_do_not_lower() -> None:
    exp = REGISTRY["exp"]()
    assert can_lower(exp, (f32[3],))
    assert not can_lower(exp, (f64[3],))
    g = Graph("g")
    cast = ops.cast(g.input("x", f32[3]), f64).node.op
    assert not can_lower(cast, (f32[3],))  # what it makes is not held


def _kernel(extents: tuple[int, ...], value: object, dtype: DType = f32) -> Kernel:
    k = KernelBuilder("k")
    x = k.input("in0", dtype[extents])
    k.output("out0", dtype[extents], lambda index: value(k, x, index))  # type: ignore[operator]
    return k.build()


def test_schedules() -> None:
    def row(k: KernelBuilder, x: object, index: tuple[Expr, ...]) -> Expr:
        total = k.reduce("sum", (x.shape[1],), lambda j: x[index[0], j])  # type: ignore[attr-defined, index]
        return x[index] / total  # type: ignore[index]

    def chosen(kernel: Kernel) -> list[str]:
        return [str(render(phase).schedule) for phase in phases_of(kernel).kernels]

    assert chosen(_kernel((1000,), lambda k, x, index: x[index] * 2)) == ["points 1 by 64"]
    assert chosen(_kernel((10, 20), row)) == ["points 1 by 64"]
    assert chosen(_kernel((10, 100), row)) == ["rows 1 by 64"]
    assert chosen(_kernel((10, 1000), row)) == ["rows 1 by 256"]


def _in_turn(kernel: Kernel, *arrays: np.ndarray) -> list[np.ndarray]:
    """The phases of a kernel, interpreted one after the other."""
    known = {b.name: a.reshape(-1) for b, a in zip(kernel.inputs, arrays, strict=True)}
    for phase in phases_of(kernel).kernels:
        verify_kernel(phase)
        start = [known.get(b.name, np.zeros(b.type.static_shape, b.dtype.np)) for b in phase.outputs]
        results = interpret(phase, [known[b.name] for b in phase.inputs], None, start)
        known |= {b.name: r for b, r in zip(phase.outputs, results, strict=True)}
    return [known[b.name].reshape(b.type.static_shape) for b in kernel.outputs]


@pytest.mark.parametrize("count", [2048, 2500, 2501])
@pytest.mark.parametrize("kind", ["sum", "max", "prod"])
@pytest.mark.parametrize("exclusive", [False, True])
def test_long_running_reductions_are_done_in_blocks(count: int, kind: str, exclusive: bool) -> None:
    k = KernelBuilder("k")
    x = k.input("in0", i64[3, count])

    def value(index: tuple[Expr, ...]) -> Expr:
        row, at = index
        return k.scan(kind, count, lambda j: x[row, j], at, exclusive=exclusive) * 2 + at

    k.output("out0", i64[3, count], value)
    kernel = k.build()
    array = np.random.default_rng(count).integers(-5, 1 << 20, (3, count))
    assert len(phases_of(kernel).kernels) == (3 if count == 2500 else 4)
    np.testing.assert_array_equal(_in_turn(kernel, array)[0], interpret(kernel, [array])[0])


def test_sums_that_every_point_needs_are_done_first() -> None:
    kernel = _kernel((500,), lambda k, x, index: x[index] / k.reduce("sum", (500,), lambda j: x[j]))
    array = np.random.default_rng(0).random(500).astype(np.float32)
    assert len(phases_of(kernel).kernels) == 2
    np.testing.assert_allclose(_in_turn(kernel, array)[0], array / array.sum(), rtol=1e-6)


def test_the_text_of_a_plan_reads_back() -> None:
    g = Graph("g")
    g.outputs(ops.exp(g.input("x", f32[3])) + 1.0)
    made = plan(g, Target.shaders())
    assert "wgsl" in str(made)
    assert parse_module(str(made)) == made


def test_names_of_users_cannot_clash_with_the_language() -> None:
    k = KernelBuilder("k")
    x, y = k.input("sizes", u8[5]), k.input("var", i32[5])
    k.output("lane", i32[5], lambda index: x[index].cast(i32) + y[index])
    text = shader_text(k.build())
    assert "buffer0" in text
    assert "buffer2[" in text
    assert "> var: " not in text


def test_the_package_is_imported_when_the_device_is_asked_for() -> None:
    program = (
        "import sys, strata as st, strata.backends.wgsl.backend; assert 'wgpu' not in sys.modules; "
        "st.Session('cpu'); assert 'wgpu' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
