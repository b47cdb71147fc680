"""Programs that turn and reshape values along sizes of 1, and sum or multiply what comes of it, with their gradients.

What has one element lies anywhere in memory: a program whose sizes are known sees that, one with symbols does not.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from strata.core import bf16, f16, f32, f64
from tests.differential.program import Leaf, Program, Ref, Shape, Size, Step

PATHS = ("reference", "graph", "symbolic", "specialised", "bucketed", "bits")
KINDS = (f32, f32, f32, f64, bf16, f16)


class _Drawing:
    """Steps on values whose shapes are known: a number and the names of sizes for each axis."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 11])
        self.dtype = KINDS[self.rng.integers(len(KINDS))]
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.seed = seed

    def leaf(self, shape: Shape) -> int:
        is_param = self.rng.random() < 0.2 and all(isinstance(s, int) for s in shape)
        self.leaves.append(Leaf(shape, self.dtype, "plain", self.seed * 7 + len(self.leaves), is_param))
        return len(self.leaves) - 1


def turned_program(seed: int) -> Program:
    """A program of one or two sizes, at least one of which is 1."""
    d = _Drawing(seed)
    rng = d.rng
    names = ("n", "m")[: 1 + int(rng.random() < 0.4)]
    numbers = [int(rng.choice([1, 2, 3, 4, 5, 8, 17, 40])) for _ in range(4 - len(names))]
    numbers = [k if prod(numbers) < 4000 else min(k, 5) for k in numbers]
    start: list[str | int] = [*names, *numbers]
    start = [start[i] for i in rng.permutation(len(start))]
    twin = rng.random() < 0.3
    first = d.leaf(tuple(start))
    second = d.leaf(tuple(start)) if twin else None
    weights: list[int] = []  # leaves are numbered before steps
    shape: list[tuple[int, tuple[str, ...]]] = [(1, (s,)) if isinstance(s, str) else (s, ()) for s in start]
    plan: list[tuple[str, tuple[Any, ...]]] = []  # a name, and the arguments behind the value

    def turn() -> None:
        order = [int(i) for i in rng.permutation(len(shape))]
        plan.append(("transpose", (tuple(order),)))
        shape[:] = [shape[i] for i in order]

    def merge() -> None:
        if len(shape) < 2:
            return
        at = int(rng.integers(len(shape) - 1))
        plan.append(("use:merge", (at,)))
        (a, s), (b, t) = shape[at : at + 2]
        shape[at : at + 2] = [(a * b, (*s, *t))]

    def split() -> None:
        where = [i for i, (_, s) in enumerate(shape) if s]
        if len(where) != 1:
            return
        at = where[0]
        k, s = shape[at]
        parts = [p for p in range(2, k + 1) if k % p == 0]
        if not parts:
            return
        part = int(rng.choice(parts))
        halves = [(part, ()), (k // part, s)]
        if rng.random() < 0.5:
            halves.reverse()
        shape[at : at + 1] = halves
        wanted = tuple(-1 if t else j for j, t in shape)
        plan.append(("reshape", (wanted,)))

    for _ in range(int(rng.integers(2, 6))):
        (turn, merge, split, turn, merge)[int(rng.integers(5))]()
    axis = int(rng.integers(len(shape)))
    ends: list[str] = ["sum", "sum", "mean", "softmax", "var", "cumsum", "logsumexp", "product", "rows", "max"]
    if len(shape) > 1:
        ends += ["sums", "gram", "layered"]
        if not shape[-1][1]:
            ends += ["matmul"] * 3
    if len(shape) > 2 and not shape[-2][1]:
        ends += ["batched"]
    if len(shape) == 3 and not shape[-2][1]:
        ends += ["conv1d"]
    end = str(rng.choice(ends))
    if end == "matmul":
        weights.append(d.leaf((shape[-1][0], int(rng.choice([1, 2, 7, 16])))))
    if end == "batched":
        weights.append(d.leaf((shape[-2][0], int(rng.choice([1, 3, 16])))))
    if end == "conv1d":
        weights.append(d.leaf((int(rng.choice([1, 3, 8])), shape[-2][0], 1 + 2 * int(rng.integers(2)))))
    at = len(d.leaves)

    def step(name: str, *args: Any, exactness: str = "approximate", **options: Any) -> int:
        nonlocal at
        d.steps.append(Step(name, args, tuple(options.items()), exactness=exactness))
        at += 1
        return at - 1

    def pipeline(v: int) -> int:
        for name, args in plan:
            v = step(name, Ref(v), *args, exactness="exact")
        return v

    if rng.random() < 0.5:
        first = step(str(rng.choice(["sin", "exp", "tanh", "square"])), Ref(first))
    if second is not None and rng.random() < 0.5:
        first, second = step("multiply", Ref(first), Ref(second)), None
    v = pipeline(first)
    if second is not None:
        v = step(str(rng.choice(["multiply", "add"])), Ref(v), Ref(pipeline(second)))
    r = Ref(v)
    if end in ("sum", "mean", "max", "logsumexp", "var", "softmax", "cumsum"):
        v = step(end, r, axis=axis)
    elif end == "sums":
        axes = tuple(sorted(int(i) for i in rng.choice(len(shape), 2, replace=False)))
        v = step("sum", r, axis=axes)
    elif end == "product":
        v = step("sum", Ref(step("multiply", r, r)))
    elif end == "rows":
        v = step("sum", Ref(step("sum", Ref(step("multiply", r, r)), axis=axis)))
    elif end == "gram":
        v = step("matmul", r, Ref(step("swapaxes", r, -1, -2, exactness="exact")))
    elif end == "layered":
        v = step("multiply", Ref(step("subtract", r, Ref(step("mean", r, axis=axis, keepdims=True)))), r)
    elif end == "matmul":
        v = step("matmul", r, Ref(weights[0]))
    elif end == "batched":
        v = step("matmul", Ref(step("swapaxes", r, -1, -2, exactness="exact")), Ref(weights[0]))
    else:
        v = step("conv1d", r, Ref(weights[0]), padding=1)
    if rng.random() < 0.4 and end != "sums":
        v = step("sum", Ref(v), axis=-1) if end != "product" and (len(shape) > 1 or end in ("softmax", "cumsum")) else v
    values = [1, *(int(rng.choice([1, 1, 3, 17])) for _ in names[1:])]
    sizes = tuple(Size(n, value, int(rng.random() < 0.7), 64) for n, value in zip(names, values, strict=True))
    return Program(sizes, tuple(d.leaves), tuple(d.steps), (v,), seed)
