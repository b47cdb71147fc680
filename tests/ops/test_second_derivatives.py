"""Second derivatives of activations, softmax, norms, losses and fused ops; and first ones in half precision."""

import numpy as np
import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.core import TensorType, as_dtype, bf16
from strata.mir import REGISTRY, Op, Sample, constant, evaluate_values, placeholder, pullback, pushforward
from strata.testing.check import directions, widened

FAMILIES = [
    f"strata.ops.{name}"
    for name in ("activation", "softmax", "norm", "norm_gradients", "losses", "fused", "fused_blocks")
]
STEP = 1e-5

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
