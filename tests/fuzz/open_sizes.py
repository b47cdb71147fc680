"""Random programs over a size that may be known or not: the same bits come out, whatever was known when it was made.

A program is drawn from a seed as a function of its inputs, none of whose decisions depends on the value of the size. It
is then compiled with the size as a symbol, with and without bounds, with its value, and by `jit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from strata import ops as functions
from strata.core import Dim, DType, as_dtype

ops: Any = functions
SIZES = (0, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 32, 33, 64, 65, 100, 130)
WIDTHS = (1, 2, 3, 4, 5, 8, 13, 16, 17, 24, 33, 64, 70, 128, 200)
DTYPES = ("f32", "f32", "f32", "f64", "f16", "bf16")
UNARY = ("relu", "tanh", "sigmoid", "exp", "abs", "negative", "square", "sin", "gelu", "silu")
BINARY = ("add", "subtract", "multiply", "maximum", "minimum")


class OpenProgram:
    """A program whose inputs have the shapes that `shapes` gives for a size."""

    def __init__(self, seed: int, length: int = 5) -> None:
        self.seed, self.length = seed, length
        rng = np.random.default_rng(seed)
        self.dtype: DType = as_dtype(str(rng.choice(DTYPES)))
        self.width = int(rng.choice(WIDTHS))
        self.middle = int(rng.choice((1, 2, 3, 4, 8)))
        self.taken: list[bool] = []
        self.forms = [int(rng.integers(5)) for _ in range(2)]

    def shapes(self, n: Dim) -> dict[str, tuple[Dim, ...]]:
        kinds: tuple[tuple[Dim, ...], ...] = (
            (n, self.width), (self.width, n), (n,), (self.middle, n, self.width), (n, self.middle, self.width),
        )  # fmt: skip
        inputs = {f"x{i}": kinds[form] for i, form in enumerate(self.forms)}
        return {**inputs, "w": (self.width, 9), "v": (self.width,)}

    def feeds(self, n: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(self.seed + 1)
        return {
            name: np.asarray(rng.standard_normal(shape)).astype(self.dtype.np) for name, shape in self.shapes(n).items()
        }

    def __call__(self, x0: Any, x1: Any, w: Any, v: Any, n: Any = None) -> Any:
        rng = np.random.default_rng(self.seed + 2)
        pool = [x0, x1]
        for at in range(self.length):
            x = pool[int(rng.integers(len(pool)))] if rng.integers(3) else pool[-1]
            made = self.step(rng, x, pool, w, v)
            if len(self.taken) <= at:
                self.taken.append(made is not None)  # the first time, with the size as a symbol that is like no number
            if made is not None and self.taken[at]:
                pool.append(made)
        return pool[-1], pool[max(2, len(pool) - 2)] if len(pool) > 2 else pool[0]

    def step(self, rng: np.random.Generator, x: Any, pool: list[Any], w: Any, v: Any) -> Any:
        axis = int(rng.integers(x.ndim)) if x.ndim else 0
        keep, turn = bool(rng.integers(2)), int(rng.integers(1 << 30))
        name = str(rng.choice(UNARY)), str(rng.choice(BINARY)), str(rng.choice(("sum", "mean", "var", "std", "max")))
        other = pool[turn % len(pool)]
        last = x.ndim > 0 and (isinstance(x.shape[-1], int) or x.ndim > 1)
        choices: list[Callable[[], Any]] = [
            lambda: getattr(ops, name[0])(x * 0.5),
            lambda: getattr(ops, name[1])(x, other) if x.ndim == other.ndim and x.shape == other.shape else None,
            lambda: getattr(ops, name[1])(x, x * 0.3),
            lambda: self.reduced(name[2], x, axis, keep),
            lambda: self.reduced(name[2], x, axis, True),
            lambda: self.reduced(name[2], x * x, -1, keep) if x.ndim else None,
            lambda: ops.sum(x) if x.ndim else None,
            lambda: ops.sum(x, axis=(0, x.ndim - 1)) if x.ndim > 1 else None,
            lambda: ops.cumsum(x, axis=axis) if x.ndim else None,
            lambda: ops.softmax(x, axis=axis) if x.ndim else None,
            lambda: ops.logsumexp(x, axis=axis) if x.ndim else None,
            lambda: ops.layer_norm(x, axis=axis, eps=1e-2) if x.ndim else None,
            lambda: ops.layer_norm(x, eps=1e-2) if x.ndim else None,
            lambda: ops.rms_norm(x, eps=1e-2) if x.ndim else None,
            lambda: (x - ops.mean(x, axis=axis, keepdims=True)) * 0.7 if x.ndim else None,
            lambda: ops.transpose(x, tuple(rng.permutation(x.ndim).tolist())) if x.ndim > 1 else None,
            lambda: ops.reshape(x, (-1,)) if x.ndim > 1 else None,
            lambda: ops.matmul(x, w) if last and x.shape[-1] == self.width else None,
            lambda: x * v if last and x.shape[-1] == self.width else None,
            lambda: ops.matmul(x, ops.swapaxes(x, -1, -2)) * 0.1 if x.ndim > 1 else None,
            lambda: ops.matmul(ops.swapaxes(x, -1, -2), x) * 0.1 if x.ndim > 1 else None,
            lambda: self.attention(x) if x.ndim > 1 else None,
            lambda: ops.flip(x, axis) if x.ndim else None,
            lambda: ops.concat([x, x * 0.5], axis=axis) if x.ndim else None,
            lambda: ops.prod(ops.tanh(x) + 1.0, axis=axis, keepdims=keep) if x.ndim else None,
            lambda: ops.cumprod(ops.tanh(x) * 0.1 + 1.0, axis=axis) if x.ndim else None,
            lambda: ops.cast(ops.cast(x, "f64"), x.dtype) if x.ndim else None,
        ]
        return choices[turn % len(choices)]()

    def reduced(self, name: str, x: Any, axis: int, keep: bool) -> Any:
        if not x.ndim:
            return None
        if name in ("max", "var", "std", "mean"):
            one = ops.concat(
                [x, ops.ones((*x.shape[: axis % x.ndim], 1, *x.shape[axis % x.ndim + 1 :]), x.dtype)], axis
            )
            return getattr(ops, name)(one, axis=axis, keepdims=keep)  # never over nothing
        return getattr(ops, name)(x, axis=axis, keepdims=keep)

    def attention(self, x: Any) -> Any:
        scores = ops.matmul(x, ops.swapaxes(x, -1, -2)) * 0.3
        return ops.matmul(ops.softmax(scores, axis=-1), x)
