"""Random graphs of what passes look for: dense layers, gates, residuals with norms, attention, branches, updates."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata import ops as functions
from strata.core import f32
from strata.mir import Graph, Value, constant

ops: Any = functions
ACTIVATIONS = ("gelu", "silu", "relu", "tanh", "exp", "sigmoid")
WIDTHS = (4, 8, 9, 16, 17, 32)


class PatternGraph:
    """A graph under construction over rows [batch, rows, width], and the arrays that feed it."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.graph = Graph(f"pattern{seed}")
        self.feeds: dict[str, np.ndarray] = {}
        self.shape = (int(self.rng.choice([1, 2, 3])), int(self.rng.choice([1, 2, 5, 8, 17])))
        self.pool = [self.leaf(self.graph.input, *self.shape, self.width()) for _ in range(2)]

    def width(self) -> int:
        return int(self.rng.choice(WIDTHS))

    def leaf(self, declare: Any, *shape: int) -> Value:
        name = f"{declare.__name__[0]}{len(self.feeds)}"
        self.feeds[name] = (self.rng.standard_normal(shape) * (0.5 if len(shape) != 2 else 0.2)).astype(np.float32)
        return declare(name, shape, f32)

    def weight(self, *shape: int) -> Value:
        return self.leaf(self.graph.param, *shape)

    def pick(self, *values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def some(self) -> Value:
        return self.pool[int(self.rng.integers(len(self.pool)))]

    def activation(self, x: Value) -> Value:
        return getattr(ops, str(self.rng.choice(ACTIVATIONS)))(x * 0.5)

    # patterns: each takes rows and gives rows

    def dense(self, x: Value) -> Value:
        n = self.width()
        y = x @ self.weight(int(x.shape[-1]), n)
        y = y + self.weight(n) if self.rng.integers(3) else y
        return self.activation(y) if self.rng.integers(3) else y

    def projections(self, x: Value) -> Value:
        """Products of one left side, apart from each other."""
        made = [x @ self.weight(int(x.shape[-1]), 8) + self.weight(8) for _ in range(int(self.rng.integers(2, 4)))]
        if self.rng.integers(2):
            return ops.concat([self.activation(m) for m in made], axis=-1)
        return sum(made[1:], made[0])

    def gate(self, x: Value) -> Value:
        """Gated layers in every spelling, some with readers that keep the parts apart."""
        n = self.width()
        if self.rng.integers(2):
            both = x @ self.weight(int(x.shape[-1]), 2 * n)
            up, gate = ops.narrow(both, -1, 0, n), ops.narrow(both, -1, n, n)
        else:
            up, gate = (x @ self.weight(int(x.shape[-1]), n) for _ in range(2))
        if self.rng.integers(2):
            up, gate = gate, up
        gated = ops.silu(gate)
        made = up * gated if self.rng.integers(2) else gated * up
        return made + self.pick(up, gate, gated) if not self.rng.integers(4) else made

    def residual(self, x: Value) -> Value:
        y = self.activation(x) + self.pick(x, self.weight(int(x.shape[-1])))
        norm = self.pick(ops.layer_norm, ops.rms_norm)
        scales = [self.weight(int(x.shape[-1])) for _ in range(int(self.rng.integers(1, 3)))]
        made = norm(y, *scales, eps=1e-2)
        return made + y if not self.rng.integers(3) else made

    def flat_norm(self, x: Value) -> Value:
        normed = ops.rms_norm(x, self.weight(int(x.shape[-1])), eps=1e-2)
        flat = ops.reshape(normed, (self.shape[0] * self.shape[1], int(x.shape[-1])))
        return ops.reshape(self.activation(flat), x.shape)

    def attention(self, x: Value) -> Value:
        """A block by its primitives, or by the op."""
        n = 8
        if self.rng.integers(2):
            whole = x @ self.weight(int(x.shape[-1]), 3 * n) + self.weight(3 * n)
            q, k, v = (ops.narrow(whole, -1, i * n, n) for i in range(3))
            width = self.pick(n, int(x.shape[-1]))
            return ops.attention(q, k, v, num_heads=2, layout="bsd") @ self.weight(n, width) + self.weight(width)
        q, k, v = (x @ self.weight(int(x.shape[-1]), n) for _ in range(3))
        if self.rng.integers(2):
            return ops.attention(q, k, v, num_heads=2, layout="bsd") @ self.weight(n, n)
        scores = q @ ops.transpose(k, (0, 2, 1)) * (1.0 / n**0.5)
        return ops.softmax(scores, axis=-1) @ v

    def branch(self, x: Value) -> Value:
        test = ops.sum(x) > 0.0
        return ops.cond(test, lambda a: ops.exp(a * 0.3), ops.sin, x)

    def recurrence(self, x: Value) -> Value:
        """A cell over the rows, or over the first of them alone."""
        n = self.width()
        w, u = self.weight(int(x.shape[-1]), n), self.weight(n, n)
        rows = ops.transpose(x, (1, 0, 2))
        rows = ops.narrow(rows, 0, 0, 1) if self.rng.integers(2) else rows

        def cell(state: Value, row: Value) -> tuple[Value, Value]:
            made = ops.tanh(row @ w + state @ u)
            return made, made

        _, states = ops.scan(cell, ops.zeros((self.shape[0], n)), rows)
        return ops.broadcast_to(ops.transpose(states, (1, 0, 2)), (*self.shape, n))

    def update(self, x: Value) -> Value:
        """Rows of one value written into another."""
        rows = int(self.rng.integers(1, self.shape[1] + 1))
        part = ops.narrow(self.activation(x), 1, 0, rows)
        at = int(self.rng.integers(0, self.shape[1] - rows + 1))
        return ops.dynamic_update_slice(self.pick(x, ops.sin(x)), part, [0, at, 0])

    def parts(self, x: Value) -> Value:
        """Slices of one product that go different ways over the same rows."""
        n = self.width()
        whole = x @ self.weight(int(x.shape[-1]), 3 * n)
        a, b, c = (ops.narrow(whole, -1, i * n, n) for i in range(3))
        self.pool += [ops.tanh(a), ops.sin(b)]
        return ops.cos(c)

    def broadcast(self, x: Value) -> Value:
        """Operands of every broadcast form."""
        width = int(x.shape[-1])
        other = self.pick((width,), (1, width), (self.shape[1], 1), (self.shape[0], 1, 1), (1, 1, 1))
        return self.pick(ops.add, ops.multiply, ops.maximum)(x, self.weight(*other))

    def folded(self, x: Value) -> Value:
        """Algebra that simplifies, constants that fold, and one that a kernel computes once."""
        row = constant(self.rng.standard_normal(int(x.shape[-1])).astype(np.float32))
        number = ops.gelu(row) + ops.relu(row) * 2.0
        return self.pick(
            x * 1.0 + 0.0,
            ops.negative(ops.negative(x)),
            ops.transpose(ops.transpose(x, (0, 2, 1)), (0, 2, 1)),
            x * number,
        )

    def build(self, length: int = 6) -> tuple[Graph, dict[str, np.ndarray]]:
        steps = (
            self.dense, self.projections, self.gate, self.residual, self.flat_norm, self.attention, self.branch,
            self.recurrence, self.update, self.parts, self.broadcast, self.folded,
        )  # fmt: skip
        for _ in range(length):
            self.pool.append(steps[int(self.rng.integers(len(steps)))](self.some()))
        self.graph.input("unused", (2,), f32)
        self.feeds["unused"] = np.zeros(2, np.float32)
        return self.graph.outputs(self.pool[-1], self.some()), self.feeds


def pattern_graph(seed: int) -> tuple[Graph, dict[str, np.ndarray]]:
    """A random graph, and what to feed it."""
    return PatternGraph(seed).build()
