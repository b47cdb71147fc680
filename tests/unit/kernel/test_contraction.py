"""Contractions: the axes of a matmul by role, factors as matrices in memory, and sums in parts."""

import numpy as np
import pytest

from strata import ops
from strata.core import bf16, f32
from strata.kernel import find_contraction, interpret, matrix_view, normalize, parse_kernel, split_terms
from strata.lir import plan
from strata.mir import Graph

MATMUL = """kernel @k(a: f32[3, 5, 8], b: f32[8, 6], c: f32[6]) -> y: f32[3, 5, 6] {
  axis i in 3
  axis j in 5
  axis n in 6
  axis k in 8
  %0 = a[i, j, k]
  %1 = b[k, n]
  %2 = mul(%0, %1)
  %3 = sum %2 over k
  %4 = c[n]
  %5 = add(%3, %4)
  store y[i, j, n] = %5 over i, j, n
}"""
HALVES = """kernel @k(q: bf16[2, 5, 8], w: bf16[2, 6, 8]) -> y: f32[2, 5, 6] {
  axis b in 2
  axis m in 5
  axis n in 6
  axis k in 8
  %0 = q[b, m, k]
  %1 = cast.f32(%0)
  %2 = w[b, n, k]
  %3 = cast.f32(%2)
  %4 = mul(%1, %3)
  %5 = sum %4 over k
  store y[b, m, n] = %5 over b, m, n
}"""
VECTOR = """kernel @k(a: f32[8], b: f32[8, 6]) -> y: f32[6] {
  axis n in 6
  axis k in 8
  %0 = a[k]
  %1 = b[k, n]
  %2 = mul(%0, %1)
  %3 = sum %2 over k
  store y[n] = %3 over n
}"""


def names(axes) -> list[str]:
    return [a.name for a in axes]


def test_axes_have_roles():
    form = find_contraction(normalize(parse_kernel(MATMUL)))
    assert form is not None
    assert (len(form.batch), len(form.rows), len(form.columns)) == (0, 1, 1)  # i and j are one axis of rows
    assert form.extents == (1, 15, 6, 8)
    form = find_contraction(normalize(parse_kernel(HALVES)))
    assert form is not None
    assert (names(form.batch), names(form.rows), names(form.columns)) == (["b"], ["m"], ["n"])


def test_a_vector_has_no_rows():
    form = find_contraction(normalize(parse_kernel(VECTOR)))
    assert form is not None
    assert (form.rows, form.extents) == ((), (1, 1, 6, 8))


def test_factors_are_narrow_under_casts_and_matrices_in_memory():
    form = find_contraction(normalize(parse_kernel(HALVES)))
    assert form is not None
    factors = form.sums[0].narrowed(bf16)
    assert factors is not None
    left = matrix_view(factors[0], form.rows, form.sums[0].terms)
    right = matrix_view(factors[1], form.columns, form.sums[0].terms)
    assert left is not None
    assert right is not None
    assert (left.load.buffer.name, left.step, left.is_turned) == ("q", 8, False)
    assert (right.load.buffer.name, right.step, right.is_turned) == ("w", 8, False)
    assert left.start is not None
    plain = find_contraction(normalize(parse_kernel(MATMUL)))
    assert plain is not None
    turned = matrix_view(plain.sums[0].right, plain.columns, plain.sums[0].terms)
    assert turned is not None
    assert (turned.start, turned.step, turned.is_turned) == (None, 6, True)


@pytest.mark.parametrize("text", [MATMUL, HALVES, VECTOR])
@pytest.mark.parametrize("parts", [2, 4])
def test_sums_in_parts(text: str, parts: int, rng):
    kernel = parse_kernel(text)
    arrays = [rng.standard_normal(b.shape).astype(b.dtype.np) for b in kernel.inputs]
    form = find_contraction(normalize(kernel))
    assert form is not None
    phases = split_terms(form, parts)
    known = {b.name: a.reshape(-1) for b, a in zip(kernel.inputs, arrays, strict=True)}
    shapes = {b.name: b.shape for b in (*form.kernel.buffers, *phases.scratch)}
    for phase in phases.kernels:
        made = interpret(phase, [known[b.name].reshape(shapes[b.name]) for b in phase.inputs])
        known |= {b.name: m.reshape(-1) for b, m in zip(phase.outputs, made, strict=True)}
    (expected,) = interpret(kernel, arrays)
    np.testing.assert_allclose(known["y"].reshape(expected.shape), expected, rtol=1e-5, atol=1e-5)


def test_other_sums_are_none():
    text = VECTOR.replace("mul(%0, %1)", "add(%0, %1)")
    assert find_contraction(normalize(parse_kernel(text))) is None


def test_axes_of_terms_that_go_on_where_others_end_are_one():
    graph = Graph("heads")
    x = ops.reshape(ops.transpose(graph.input("x", f32[3, 1, 4]), (1, 0, 2)), (1, 12))
    graph.outputs(ops.matmul(x, graph.input("w", f32[12, 6])))
    (kernel,) = plan(graph).kernels.values()
    form = find_contraction(normalize(kernel))
    assert form is not None
    (one,) = form.sums
    assert [a.extent for a in one.terms] == [12]
    rng = np.random.default_rng(0)
    given = [rng.standard_normal([int(d) for d in b.shape]).astype(np.float32) for b in kernel.inputs]
    parts = split_terms(form, 3)
    (wanted,) = interpret(kernel, given)
    flat = {b.name: a.reshape([int(d) for d in b.shape]) for b, a in zip(form.kernel.inputs, given, strict=True)}
    made = interpret(parts.kernels[0], [flat[b.name] for b in parts.kernels[0].inputs])
    flat |= {b.name: a for b, a in zip(parts.scratch, made, strict=True)}
    (found,) = interpret(parts.kernels[1], [flat[b.name] for b in parts.kernels[1].inputs])
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=1e-5)


@pytest.mark.parametrize(("index", "count"), [("m, h, d", 1), ("m, d, h", 2)])
def test_axes_that_a_factor_steps_over_stay_apart(index: str, count: int):
    sizes = ", ".join({"m": "2", "h": "3", "d": "4"}[letter] for letter in index.split(", "))
    text = f"""kernel @k(a: f32[{sizes}], b: f32[3, 4, 6]) -> y: f32[2, 6] {{
  axis m in 2
  axis n in 6
  axis h in 3
  axis d in 4
  %0 = a[{index}]
  %1 = b[h, d, n]
  %2 = mul(%0, %1)
  %3 = sum %2 over h, d
  store y[m, n] = %3 over m, n
}}"""
    form = find_contraction(normalize(parse_kernel(text)))
    assert form is not None
    assert len(form.sums[0].terms) == count
