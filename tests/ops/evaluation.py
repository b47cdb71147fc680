"""What tests of op families share: functions of values evaluated on arrays, once and twice differentiated."""

from collections.abc import Callable

import numpy as np

from strata.core import TensorType, as_dtype
from strata.mir import Value, evaluate_values, placeholder, pullback


def leaf(name: str, array: np.ndarray) -> Value:
    return placeholder(name, TensorType(as_dtype(array.dtype), array.shape))


def run(fn: Callable[..., Value], *arrays: np.ndarray) -> np.ndarray:
    """A function of values, evaluated on arrays."""
    inputs = [leaf(f"x{i}", a) for i, a in enumerate(arrays)]
    return evaluate_values([fn(*inputs)], dict(zip(inputs, arrays, strict=True)), {})[0]


def gradients(fn: Callable[..., Value], arrays: list[np.ndarray], ct: np.ndarray) -> list[np.ndarray | None]:
    """The cotangents of all arguments."""
    inputs, seed = [leaf(f"x{i}", a) for i, a in enumerate(arrays)], leaf("ct", ct)
    grads = pullback([fn(*inputs)], [seed], inputs)
    known = dict(zip(inputs, arrays, strict=True)) | {seed: ct}
    return [None if g is None else evaluate_values([g], known, {})[0] for g in grads]


def hessian_product(
    fn: Callable[[Value], Value], array: np.ndarray, ct: np.ndarray, v: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """d/dx ⟨grad(x), v⟩ by rules, and by central differences of the gradient."""
    x, seed, direction = leaf("x", array), leaf("ct", ct), leaf("v", v)
    (grad,) = pullback([fn(x)], [seed], [x])
    (second,) = pullback([grad], [direction], [x])
    known = {x: array, seed: ct, direction: v}
    step = 1e-6

    def shifted(sign: int) -> np.ndarray:
        total = np.zeros_like(array)
        for at in np.ndindex(array.shape):
            moved = array.copy()
            moved[at] += sign * step
            total[at] = np.sum(evaluate_values([grad], {x: moved, seed: ct}, {})[0] * v)
        return total

    return evaluate_values([second], known, {})[0], (shifted(1) - shifted(-1)) / (2 * step)
