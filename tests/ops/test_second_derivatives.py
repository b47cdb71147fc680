"""Second derivatives of every op, by three ways; gradients in batches; and first ones in half precision."""

from functools import partial

import numpy as np
import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.core import TensorType, as_dtype, bf16
from strata.errors import RunError
from strata.mir import (
    REGISTRY,
    Op,
    Sample,
    Value,
    as_tuple,
    batch,
    constant,
    evaluate_values,
    placeholder,
    pullback,
    pushforward,
)
from strata.testing.check import directions, widened
from tests.groups import check_all

FAMILIES = [
    f"strata.ops.{name}"
    for name in (
        *("elementwise.activation", "reduce.softmax", "nn.norm", "nn.norm_gradients"),
        *("nn.losses", "nn.fused", "nn.fused_blocks"),
    )
]
STEP = 1e-5
BATCH = 3
SINGULAR = "det-5"  # the derivative of its derivative needs an inverse


def has_derivatives(sample: Sample) -> bool:
    """Real inputs, and some."""
    arrays = sample.arrays()
    return sample.grad and all(a.size for a in arrays) and not any(a.dtype.kind == "c" for a in arrays)


def samples_of(cls: type[Op]) -> dict[str, Sample]:
    """Those that have derivatives twice."""
    named = {f"{cls.name}-{i}": sample for i, sample in enumerate(cls.samples())}
    return {name: sample for name, sample in named.items() if has_derivatives(sample) and name != SINGULAR}


EVERY = [cls for cls in REGISTRY.classes() if cls.differentiable and samples_of(cls)]
CASES = [
    pytest.param(cls, sample, id=f"{cls.name}-{i}")
    for cls in REGISTRY.classes()
    if cls.__module__ in FAMILIES and cls.differentiable and not cls.multi_output
    for i, sample in enumerate(cls.samples())
    if sample.grad and all(a.size for a in sample.arrays())
]


def gradient_of(cls: type[Op], sample: Sample, arrays: list[np.ndarray]):
    inputs = [placeholder(f"x{i}", TensorType(as_dtype(a.dtype), a.shape)) for i, a in enumerate(arrays)]
    out = cls(**sample.fields)(*inputs)
    ct = np.cos(np.arange(out.type.size)).reshape(out.shape)
    return inputs, pullback([out], [constant(ct, out.dtype)], inputs)


@pytest.mark.parametrize(("cls", "sample"), CASES)
def test_hessian_products_equal_differences_of_gradients(cls: type[Op], sample: Sample) -> None:
    arrays = widened(sample.arrays())
    moves = directions(arrays)
    inputs, grads = gradient_of(cls, sample, arrays)
    wrt = [x for x, t in zip(inputs, moves, strict=True) if t is not None]
    tangents = [constant(t) for t in moves if t is not None]
    kept = [g for g in grads if g is not None]
    products = pushforward(kept, wrt, tangents)

    def at(step: float) -> tuple[np.ndarray, ...]:
        moved = [a if t is None else a + step * t for a, t in zip(arrays, moves, strict=True)]
        return evaluate_values(kept, dict(zip(inputs, moved, strict=True)), {})

    known = dict(zip(inputs, arrays, strict=True))
    for product, up, down in zip(products, at(STEP), at(-STEP), strict=True):
        want = (up - down) / (2 * STEP)
        got = np.zeros_like(want) if product is None else evaluate_values([product], known, {})[0]
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6 * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize(("cls", "sample"), CASES)
def test_gradients_in_half_precision_have_their_dtype_and_nearly_their_value(cls: type[Op], sample: Sample) -> None:
    rounded = [a.astype(bf16.np) if a.dtype.kind == "f" else a for a in sample.arrays()]
    inputs, grads = gradient_of(cls, sample, rounded)
    wide = [a.astype(np.float64) if as_dtype(a.dtype) is bf16 else a for a in rounded]
    exact_inputs, exact = gradient_of(cls, sample, wide)
    for x, g, e in zip(inputs, grads, exact, strict=True):
        assert (g is None) == (e is None)
        if g is None or e is None:
            continue
        assert g.type == x.type
        (got,) = evaluate_values([g], dict(zip(inputs, rounded, strict=True)), {})
        (want,) = evaluate_values([e], dict(zip(exact_inputs, wide, strict=True)), {})
        scale = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=0.05, atol=0.05 * scale)


def gradients_of(cls: type[Op], sample: Sample, arrays: list[np.ndarray]) -> tuple[list[Value], list[Value | None]]:
    """Of a weighted sum of all outputs that are real numbers."""
    inputs = [placeholder(f"x{i}", TensorType(as_dtype(a.dtype), a.shape)) for i, a in enumerate(arrays)]
    outs = [x for x in as_tuple(cls(**sample.fields)(*inputs)) if x.dtype.is_float]
    weights = [constant(np.cos(np.arange(x.type.size)).reshape(x.shape), x.dtype) for x in outs]
    return inputs, list(pullback(outs, weights, inputs))


@pytest.mark.parametrize("cls", EVERY, ids=lambda c: c.name)
def test_hessian_products_are_the_same_forwards_backwards_and_by_differences(cls: type[Op]) -> None:
    check_all((name, partial(check_hessian_products, cls, sample)) for name, sample in samples_of(cls).items())


def check_hessian_products(cls: type[Op], sample: Sample) -> None:
    arrays = widened(sample.arrays())
    moves = directions(arrays)
    inputs, grads = gradients_of(cls, sample, arrays)
    kept = [(x, g, t) for x, g, t in zip(inputs, grads, moves, strict=True) if g is not None and t is not None]
    slopes, along = [g for _, g, _ in kept], [constant(t) for _, _, t in kept]
    wrt = [x for x, _, _ in kept]
    forward, backward = pushforward(slopes, wrt, along), pullback(slopes, along, wrt)

    def at(step: float) -> tuple[np.ndarray, ...]:
        moved = {x: a + step * t for x, a, t in zip(inputs, arrays, moves, strict=True) if x in wrt}
        return evaluate_values(slopes, dict(zip(inputs, arrays, strict=True)) | moved, {})

    known = dict(zip(inputs, arrays, strict=True))
    for a, b, up, down in zip(forward, backward, at(STEP), at(-STEP), strict=True):
        want = (up - down) / (2 * STEP)
        first, second = (np.zeros_like(want) if p is None else evaluate_values([p], known, {})[0] for p in (a, b))
        scale = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(first, want, rtol=1e-5, atol=1e-5 * scale)
        np.testing.assert_allclose(second, first, rtol=1e-8, atol=1e-9 * scale)


def test_the_second_derivative_of_a_determinant_says_that_it_needs_an_inverse() -> None:
    (sample,) = [s for i, s in enumerate(REGISTRY["det"].samples()) if f"det-{i}" == SINGULAR]
    arrays = widened(sample.arrays())
    (x,), (slope,) = gradients_of(REGISTRY["det"], sample, arrays)
    assert slope is not None
    (product,) = pushforward([slope], [x], [constant(np.ones(x.type.static_shape))])
    assert product is not None
    with pytest.raises(RunError, match="singular"):
        evaluate_values([product], {x: arrays[0]}, {})


@pytest.mark.parametrize("cls", EVERY, ids=lambda c: c.name)
def test_gradients_in_a_batch_are_those_of_each_row(cls: type[Op]) -> None:
    check_all((name, partial(check_batches, cls, sample)) for name, sample in samples_of(cls).items())


def check_batches(cls: type[Op], sample: Sample) -> None:
    arrays = widened(sample.arrays())
    moves = directions(arrays)
    inputs, grads = gradients_of(cls, sample, arrays)
    slopes = [g for g in grads if g is not None]
    rows = [[a if t is None else a + 1e-3 * i * t for a, t in zip(arrays, moves, strict=True)] for i in range(BATCH)]
    stacked = {x: placeholder(f"b{i}", TensorType(x.dtype, (BATCH, *x.shape))) for i, x in enumerate(inputs)}
    given = {stacked[x]: np.stack([row[i] for row in rows]) for i, x in enumerate(inputs)}
    together = evaluate_values(batch(slopes, stacked, BATCH), given, {})
    for i, row in enumerate(rows):
        alone = evaluate_values(slopes, dict(zip(inputs, row, strict=True)), {})
        for got, want in zip(together, alone, strict=True):
            np.testing.assert_allclose(got[i], want, rtol=1e-9, atol=1e-9 * max(1.0, float(np.abs(want).max())))
