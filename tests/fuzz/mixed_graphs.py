"""Random graphs of mixed element types: whole numbers, truth values, narrow floats; ids, orders, windows, loops.

Sizes of 0 and 1 are as likely as others. Floats stay small, so that every path has a finite answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from strata import ops as functions
from strata.core import DType, bf16, bool_, f16, f32, f64, i8, i32, i64, u8
from strata.mir import Graph, Value

ops: Any = functions
WIDE, NARROW = (f32, f32, f64), (f16, bf16)
WHOLE = (i64, i32, u8, i8)
SIZES = (0, 1, 1, 2, 3, 5, 8, 16, 17, 33)


class MixedGraph:
    """A graph under construction, and the arrays that feed it."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.graph = Graph(f"mixed{seed}")
        self.feeds: dict[str, np.ndarray] = {}
        self.floats = WIDE if seed % 4 else (*WIDE, *NARROW)
        self.sizes = [int(s) for s in self.rng.choice(SIZES, 3)]
        self.pool = [self.leaf() for _ in range(3)]

    def leaf(self, dtype: DType | None = None, shape: tuple[int, ...] | None = None) -> Value:
        kind = dtype or self.pick(*self.floats, *WHOLE, bool_)
        if shape is None:
            shape = tuple(int(self.rng.choice(self.sizes)) for _ in range(int(self.rng.integers(0, 4))))
        name = f"x{len(self.feeds)}"
        self.feeds[name] = np.asarray(self.rng.integers(-6, 7, shape) * 0.25).astype(kind.np)
        if kind.is_int:
            low = 0 if kind is u8 else -9
            self.feeds[name] = np.asarray(self.rng.integers(low, 10, shape)).astype(kind.np)
        return self.graph.input(name, shape, kind)

    def pick(self, *values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def axis(self, x: Value) -> int:
        return int(self.rng.integers(x.ndim))

    def small(self, x: Value) -> Value:
        """Floats between -2 and 2, whole numbers as they are."""
        return ops.clip(x, -2.0, 2.0) if x.dtype.is_float else x

    # steps: each takes a value and gives one, or None where it does not fit

    def unary(self, x: Value) -> Value:
        if x.dtype.is_float:
            return getattr(ops, self.pick("tanh", "sin", "square", "negative", "abs", "relu", "floor", "sigmoid"))(x)
        if x.dtype.is_bool:
            return ops.logical_not(x)
        return getattr(ops, self.pick("negative", "abs", "square", "sign", "bitwise_invert"))(x)

    def binary(self, x: Value) -> Value | None:
        y = self.pick(x, *[v for v in self.pool if v.shape == x.shape and v.dtype is x.dtype])
        if x.dtype.is_bool:
            return getattr(ops, self.pick("logical_and", "logical_or", "logical_xor"))(x, y)
        if x.dtype.is_float:
            return self.small(getattr(ops, self.pick("add", "multiply", "subtract", "maximum", "minimum"))(x, y))
        name = self.pick("add", "multiply", "subtract", "maximum", "bitwise_and", "bitwise_xor", "floor_divide")
        return getattr(ops, name)(x, ops.maximum(ops.abs(y), 1) if name == "floor_divide" else y)

    def compare(self, x: Value) -> Value:
        y = self.pick(x, *[v for v in self.pool if v.shape == x.shape and v.dtype is x.dtype])
        return getattr(ops, self.pick("equal", "not_equal") if x.dtype.is_bool else self.pick("less", "greater_equal"))(
            x, y
        )

    def choose(self, x: Value) -> Value:
        tests = [v for v in self.pool if v.dtype.is_bool and v.shape == x.shape]
        test = self.pick(*tests) if tests else ops.equal(x, x)
        return ops.where(test, x, ops.zeros(x.shape, x.dtype))

    def convert(self, x: Value) -> Value:
        to = self.pick(*self.floats, *WHOLE, bool_)
        return ops.cast(self.small(x) if to in WHOLE else x, to)

    def move(self, x: Value) -> Value | None:
        if x.ndim == 0:
            return ops.reshape(x, (1,))
        axis = self.axis(x)
        n = int(x.shape[axis])
        choices: list[Callable[[], Value]] = [
            lambda: ops.flip(x, axis),
            lambda: ops.transpose(x, tuple(self.rng.permutation(x.ndim).tolist())),
            lambda: ops.reshape(x, (-1,)) if int(x.type.size) else ops.flatten(x),
            lambda: ops.concat([x, x], axis),
            lambda: ops.stack([x, x], axis),
            lambda: ops.roll(x, int(self.rng.integers(-3, 4)), axis),
            lambda: ops.narrow(x, axis, n // 3, n - n // 3),
            lambda: ops.pad(x, [(int(self.rng.integers(3)), int(self.rng.integers(3))) for _ in range(x.ndim)]),
            lambda: ops.insert_axis(x, axis),
            lambda: ops.repeat(x, 2, axis),
        ]
        return self.pick(*choices)()

    def reduce(self, x: Value) -> Value | None:
        if x.ndim == 0:
            return None
        axis = self.axis(x)
        keep = bool(self.rng.integers(2))
        if x.dtype.is_bool:
            return getattr(ops, self.pick("any", "all"))(x, axis=axis, keepdims=keep)
        if x.shape[axis] == 0:
            return ops.sum(x, axis=axis, keepdims=keep)
        made = getattr(ops, self.pick("sum", "max", "min"))(x, axis=axis, keepdims=keep)
        return self.small(made)

    def along(self, x: Value) -> Value | None:
        """Functions of a whole axis that keep its length."""
        if x.ndim == 0 or x.dtype.is_bool or x.shape[-1] == 0:
            return None
        axis = self.axis(x)
        if x.shape[axis] == 0:
            return None
        if x.dtype.is_float and self.rng.integers(2):
            return ops.softmax(x, axis=axis)
        return self.small(self.pick(ops.cumsum, ops.sort)(x, axis=axis))

    def order(self, x: Value) -> Value | None:
        if x.ndim == 0 or x.dtype.is_bool or x.shape[-1] == 0 or x.dtype in (bf16, f16):
            return None
        axis = self.axis(x)
        return None if x.shape[axis] == 0 else self.pick(ops.argsort, ops.argmax, ops.argmin)(x, axis=axis)

    def look_up(self, x: Value) -> Value | None:
        """Ids that were computed, into another value."""
        ids = [v for v in self.pool if v.dtype is i64 and v.ndim <= 2]
        if x.ndim == 0 or x.shape[0] == 0 or not ids or int(x.type.size) > 4000:
            return None
        chosen = self.pick(*ids)
        if self.rng.integers(3) == 0 and not x.dtype.is_bool and chosen.ndim == 1 and chosen.shape[0] == x.shape[0]:
            return self.small(ops.scatter_add(x, ops.remainder(chosen, 5), 5))
        return ops.gather(x, chosen)  # ids out of range are clamped

    def product(self, x: Value) -> Value | None:
        if x.ndim != 2 or x.dtype.is_bool or x.dtype in (u8, i8):
            return None
        return self.small(ops.matmul(x, ops.transpose(x)))

    def window(self, x: Value) -> Value | None:
        if x.ndim != 3 or x.dtype not in (f32, f64) or 0 in x.shape:
            return None
        if self.rng.integers(2):
            return ops.max_pool1d(x, 2, stride=1, padding=1)
        channels = int(x.shape[1])
        w = self.leaf(x.dtype, (int(self.rng.integers(1, 5)), channels, int(self.rng.integers(1, 4))))
        return self.small(ops.conv1d(x, w, padding=2))

    def loop(self, x: Value) -> Value | None:
        if x.ndim == 0 or not x.dtype.is_float or x.dtype in (f16, bf16) or x.shape[0] in (0, 1):
            return None
        start = ops.zeros(x.shape[1:], x.dtype)
        carried, rows = ops.scan(lambda c, row: (ops.tanh(c * 0.5 + row), c + row), start, x)
        return self.pick(carried, rows)

    def branch(self, x: Value) -> Value:
        test = ops.equal(ops.sum(ops.cast(ops.abs(x) if not x.dtype.is_bool else x, i64)) % 2, 0)
        return ops.cond(test, lambda a: a, lambda a: ops.where(ops.equal(a, a), a, a), x)

    def update(self, x: Value) -> Value | None:
        if x.ndim == 0 or x.shape[0] == 0:
            return None
        part = ops.narrow(ops.flip(x, 0), 0, 0, 1)
        return ops.dynamic_update_slice(x, part, [int(self.rng.integers(0, int(x.shape[0])))] + [0] * (x.ndim - 1))

    def build(self, length: int = 14) -> tuple[Graph, dict[str, np.ndarray]]:
        steps = (
            self.unary, self.binary, self.compare, self.choose, self.convert, self.move, self.move, self.reduce,
            self.along, self.order, self.look_up, self.product, self.window, self.loop, self.branch, self.update,
        )  # fmt: skip
        for _ in range(length):
            made = self.pick(*steps)(self.pick(*self.pool[-5:], self.pool[0]))
            if made is not None and int(made.type.size) < 20_000:
                self.pool.append(made)
        outputs = [self.pool[-1], self.pick(*self.pool), self.pick(*self.pool)]
        return self.graph.outputs(*outputs), self.feeds


def mixed_graph(seed: int) -> tuple[Graph, dict[str, np.ndarray]]:
    """A random graph, and what to feed it."""
    return MixedGraph(seed).build()
