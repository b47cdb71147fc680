"""Checks of an op's rules against each other, generated from its samples.

Each `check_*` raises AssertionError with the op, the sample and the two values that disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from strata.core import ALL_DTYPES, DType, TensorType, as_dtype, f8e4m3, f8e5m2, i4, sym, u4
from strata.errors import StrataError, SymbolError
from strata.kernel import Kernel, KernelBuilder, interpret
from strata.mir import (
    Graph,
    Op,
    Sample,
    Value,
    as_tuple,
    batch,
    evaluate,
    evaluate_values,
    parse,
    placeholder,
    pullback,
    pushforward,
    run_op,
)
from strata.ops import accepts

STEP = 1e-5  # of central differences in f64: truncation and rounding errors are both near 1e-10
BATCH = 3
TINY = (i4, u4, f8e4m3, f8e5m2)  # storage types: ops claim them one by one

Arrays = Sequence[np.ndarray]


def build(cls: type[Op], sample: Sample) -> Op:
    return cls(**sample.fields)


def type_of(array: np.ndarray) -> TensorType:
    return TensorType(as_dtype(array.dtype), array.shape)


def widened(arrays: Arrays) -> list[np.ndarray]:
    """Floats as f64 and complex numbers as c128."""
    wide = []
    for a in arrays:
        dtype = as_dtype(a.dtype)
        wide.append(a.astype(np.float64) if dtype.is_float else a.astype(np.complex128) if dtype.is_complex else a)
    return wide


def single_op_graph(op: Op, types: Sequence[TensorType]) -> Graph:
    """A graph of one op, inputs x0, x1, …"""
    graph = Graph("sample")
    inputs = [graph.input(f"x{i}", t) for i, t in enumerate(types)]
    return graph.outputs(*as_tuple(op(*inputs)))


def feeds(arrays: Arrays) -> dict[str, np.ndarray]:
    return {f"x{i}": a for i, a in enumerate(arrays)}


def check_values(cls: type[Op], sample: Sample) -> None:
    """`infer` and `numpy` agree on shapes and dtypes; half the precision gives nearly the same; nothing is changed."""
    op, arrays = build(cls, sample), sample.arrays()
    graph = single_op_graph(op, [type_of(a) for a in arrays])
    before = [a.copy() for a in arrays]
    results = evaluate(graph, feeds(arrays))
    for array, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, copy, err_msg=f"{cls.name} changed its input on {sample}")
    for value, result in zip(graph.results, results, strict=True):
        assert result.shape == value.shape, (
            f"{cls.name}: infer says {value.type}, numpy gives {result.shape} on {sample}"
        )
        assert as_dtype(result.dtype) is value.dtype, f"{cls.name}: infer says {value.type}, numpy gives {result.dtype}"


def check_text(cls: type[Op], sample: Sample) -> None:
    """The op's text reads back as the same graph."""
    graph = single_op_graph(build(cls, sample), [type_of(a) for a in sample.arrays()])
    again = parse(str(graph))
    assert str(again) == str(graph), f"{cls.name}: text does not round-trip on {sample}:\n{graph}\n{again}"


def check_strided(cls: type[Op], sample: Sample) -> None:
    """Inputs that are not contiguous give the same result."""
    op, arrays = build(cls, sample), sample.arrays()
    graph = single_op_graph(op, [type_of(a) for a in arrays])
    strided = [np.repeat(a, 2, axis=-1)[..., ::2] if a.ndim else a for a in arrays]
    for a, b in zip(evaluate(graph, feeds(arrays)), evaluate(graph, feeds(strided)), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-6, err_msg=f"{cls.name} on strided {sample}")


def check_symbolic(cls: type[Op], sample: Sample) -> None:
    """Inference with a symbol for a size, then bound, equals inference with the size; or says it needs the size."""
    op = build(cls, sample)
    types = [type_of(a) for a in sample.arrays()]
    static = as_tuple(op.infer(*types))
    sizes = {d for t in types for d in t.shape if isinstance(d, int) and d > 1}
    for size in sizes:
        symbol = sym("S", 1)
        symbolic = [t.with_shape([symbol if d == size else d for d in t.shape]) for t in types]
        try:
            inferred = as_tuple(op.infer(*symbolic))
        except (StrataError, SymbolError):
            continue  # the op compares this size with a field, or needs it as a number
        bound = tuple(t.bind({"S": size}) for t in inferred)
        assert bound == static, f"{cls.name} on {sample} with {size} = S: {inferred} binds to {bound}, not {static}"


def derivative_inputs(sample: Sample) -> tuple[list[np.ndarray], list[Value]]:
    arrays = widened(sample.arrays())
    return arrays, [placeholder(f"x{i}", type_of(a)) for i, a in enumerate(arrays)]


def directions(arrays: Arrays, seed: int = 1) -> list[np.ndarray | None]:
    """A random direction for each input that has derivatives."""
    rng = np.random.default_rng(seed)
    found: list[np.ndarray | None] = []
    for a in arrays:
        if a.dtype.kind == "f":
            found.append(rng.standard_normal(a.shape))
        elif a.dtype.kind == "c":
            found.append(rng.standard_normal(a.shape) + 1j * rng.standard_normal(a.shape))
        else:
            found.append(None)
    return found


def check_jvp(cls: type[Op], sample: Sample) -> None:
    """The tangent equals a central difference in f64."""
    op = build(cls, sample)
    arrays, inputs = derivative_inputs(sample)
    tangents = directions(arrays)
    outs = as_tuple(op(*inputs))
    names = [None if t is None else placeholder(f"t{i}", type_of(t)) for i, t in enumerate(tangents)]
    douts = pushforward(outs, inputs, names)
    known: dict[Value, Any] = dict(zip(inputs, arrays, strict=True))
    known |= {n: t for n, t in zip(names, tangents, strict=True) if n is not None}
    types = [x.type for x in outs]

    def shifted(step: float) -> tuple[np.ndarray, ...]:
        moved = [a if t is None else a + step * t for a, t in zip(arrays, tangents, strict=True)]
        return run_op(op, moved, types)

    for out, dout, up, down in zip(outs, douts, shifted(STEP), shifted(-STEP), strict=True):
        if not out.dtype.is_inexact:
            assert dout is None, f"{cls.name}: a {out.type} output has a tangent"
            continue
        expected = (up - down) / (2 * STEP)
        actual = np.zeros(out.type.static_shape) if dout is None else evaluate_values([dout], known, {})[0]
        scale = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
        np.testing.assert_allclose(
            actual, expected, rtol=sample.rtol, atol=sample.rtol * scale, err_msg=f"jvp of {cls.name} on {sample}"
        )


def check_vjp(cls: type[Op], sample: Sample) -> None:
    """⟨ct, J·dx⟩ = ⟨Jᵀ·ct, dx⟩."""
    op = build(cls, sample)
    arrays, inputs = derivative_inputs(sample)
    tangents = directions(arrays)
    outs = as_tuple(op(*inputs))
    cotangents = directions([np.zeros(x.type.static_shape, x.dtype.np) for x in outs], seed=2)
    names = [None if t is None else placeholder(f"t{i}", type_of(t)) for i, t in enumerate(tangents)]
    ct_names = [None if c is None else placeholder(f"c{i}", type_of(c)) for i, c in enumerate(cotangents)]
    known: dict[Value, Any] = dict(zip(inputs, arrays, strict=True))
    known |= {n: t for n, t in zip(names, tangents, strict=True) if n is not None}
    known |= {n: c for n, c in zip(ct_names, cotangents, strict=True) if n is not None}
    douts = pushforward(outs, inputs, names)
    grads = pullback(outs, ct_names, inputs)
    forward = sum(_pair(c, d, known) for c, d in zip(ct_names, douts, strict=True))
    reverse = sum(_pair(g, n, known) for g, n in zip(grads, names, strict=True))
    scale = sum(_size(g, n, known) for g, n in zip(grads, names, strict=True))
    assert abs(forward - reverse) <= 1e-9 * max(1.0, scale), (
        f"vjp of {cls.name} on {sample}: {reverse} against jvp {forward}"
    )


def _pair(a: Value | None, b: Value | None, known: dict[Value, Any]) -> float:
    """The real inner product in which gradients of complex numbers are taken with respect to the conjugate."""
    if a is None or b is None:
        return 0.0
    x, y = evaluate_values([a, b], known, {})
    return float(np.sum(np.real(np.conj(x) * y))) * (2.0 if np.iscomplexobj(x) else 1.0)


def _size(a: Value | None, b: Value | None, known: dict[Value, Any]) -> float:
    if a is None or b is None:
        return 0.0
    x, y = evaluate_values([a, b], known, {})
    return float(np.sum(np.abs(x) * np.abs(y)))


def check_vmap(cls: type[Op], sample: Sample) -> None:
    """vmap equals a Python loop, for each input batched alone and for all of them."""
    op = build(cls, sample)
    rows = [_varied(sample, i) for i in range(BATCH)]
    count = len(rows[0])
    plain = [placeholder(f"x{i}", type_of(a)) for i, a in enumerate(rows[0])]
    outs = as_tuple(op(*plain))
    subsets = {(i,) for i in range(count)} | {tuple(range(count))} if count else {()}
    for subset in sorted(subsets):
        stacked = {plain[i]: placeholder(f"b{i}", _stack_type(rows[0][i])) for i in subset}
        known: dict[Value, np.ndarray] = {plain[i]: rows[0][i] for i in range(count) if i not in subset}
        known |= {stacked[plain[i]]: np.stack([r[i] for r in rows]) for i in subset}
        results = evaluate_values(batch(outs, stacked, BATCH), known, {})
        for row in range(BATCH):
            arrays = [rows[row][i] if i in subset else rows[0][i] for i in range(count)]
            expected = run_op(op, arrays, [x.type for x in outs])
            for got, want in zip(results, expected, strict=True):
                tolerance = 1e-9 if got.dtype in (np.float64, np.complex128) else 1e-5
                np.testing.assert_allclose(
                    got[row],
                    want,
                    rtol=tolerance,
                    atol=tolerance,
                    err_msg=f"vmap of {cls.name} over {subset} on {sample}",
                )


def _varied(sample: Sample, i: int) -> list[np.ndarray]:
    """Inputs for one batch row: other draws, and given floats scaled a little."""
    arrays = []
    for given, a in zip(sample.inputs, sample.arrays(seed=i), strict=True):
        fixed = isinstance(given, np.ndarray) and a.dtype.kind in "fc"
        arrays.append(a * (1 + 0.125 * i) if fixed else a)
    return widened(arrays) if sample.grad else [a.astype(b.dtype) for a, b in zip(arrays, sample.arrays(), strict=True)]


def _stack_type(array: np.ndarray) -> TensorType:
    return TensorType(as_dtype(array.dtype), (BATCH, *array.shape))


def claimed_dtypes(cls: type[Op]) -> list[DType]:
    """The dtypes that an op claims for its first input."""
    claim = cls.dtypes
    if isinstance(claim, tuple):
        return list(claim)
    return [t for t in ALL_DTYPES if accepts(claim, t) and t not in TINY]


def check_dtypes(cls: type[Op], sample: Sample) -> None:
    """Every claimed dtype is accepted and gives what the wide evaluation gives, within its precision."""
    arrays = sample.arrays()
    if not arrays:
        return
    op, first = build(cls, sample), as_dtype(arrays[0].dtype)
    for dtype in claimed_dtypes(cls):
        if dtype.is_complex != first.is_complex or dtype.is_bool != first.is_bool or dtype.is_int != first.is_int:
            continue
        cast = [a.astype(dtype.np) if as_dtype(a.dtype) is first else a for a in arrays]
        graph = single_op_graph(op, [type_of(a) for a in cast])
        wide = evaluate(graph, feeds(cast), wide=True)
        for got, want, out in zip(evaluate(graph, feeds(cast)), wide, graph.results, strict=True):
            tolerance = {16: 3e-2, 32: 1e-4, 64: 1e-4}.get(min(dtype.bits, out.dtype.bits), 0.3)
            if out.dtype.is_inexact:
                np.testing.assert_allclose(
                    got.astype(want.dtype),
                    want,
                    rtol=tolerance,
                    atol=tolerance,
                    err_msg=f"{cls.name} in {dtype} on {sample}",
                )


def lower_alone(op: Op, types: Sequence[TensorType]) -> Kernel:
    """The kernel of one op on buffers."""
    own = op.own_kernel(*types)
    if own is not None:
        return own
    k = KernelBuilder(op.name)
    inputs = [k.input(f"in{i}", t) for i, t in enumerate(types)]
    outs = as_tuple(op.infer(*types))
    for i, out in enumerate(outs):
        k.output(f"out{i}", out, lambda index, i=i: as_tuple(op.lower(k, index, *inputs))[i])  # type: ignore[misc]
    return k.build()


def check_lower(cls: type[Op], sample: Sample) -> None:
    """The op's kernel, interpreted, equals its NumPy meaning."""
    op, arrays = build(cls, sample), sample.arrays()
    types = [type_of(a) for a in arrays]
    outs = as_tuple(op.infer(*types))
    expected = run_op(op, arrays, outs)
    for got, want in zip(interpret(lower_alone(op, types), arrays), expected, strict=True):
        assert got.dtype == want.dtype
        low = want.dtype.itemsize <= 2 and want.dtype.kind not in "iub"
        tolerance = 2e-2 if low else 1e-5
        kind = np.complex128 if want.dtype.kind == "c" else np.float64
        np.testing.assert_allclose(
            got.astype(kind),
            want.astype(kind),
            rtol=tolerance,
            atol=tolerance,
            err_msg=f"kernel of {cls.name} on {sample}",
        )


def checks_for(cls: type[Op], sample: Sample) -> dict[str, Callable[[type[Op], Sample], None]]:
    """The checks that apply to a sample."""
    table: dict[str, Callable[[type[Op], Sample], None]] = {
        "values": check_values, "text": check_text, "strided": check_strided, "symbolic": check_symbolic,
        "vmap": check_vmap,
    }  # fmt: skip
    if cls.lower is not Op.lower and cls.has_rule("lower"):
        table["lower"] = check_lower
    if cls.differentiable and sample.grad:
        table |= {"jvp": check_jvp, "vjp": check_vjp}
    return table


def check_op(cls: type[Op]) -> None:
    """All checks on all samples of one op."""
    samples = cls.samples()
    assert samples, f"{cls.name} has no samples"
    for sample in samples:
        for check in checks_for(cls, sample).values():
            check(cls, sample)
    check_dtypes(cls, samples[0])
