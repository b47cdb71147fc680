"""Programs that went wrong once, as small as they became."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.core import DType, bool_, f8e4m3, f32, f64, i64, u16
from tests.differential.program import Leaf, Program, Ref, Shape, Size, Step


def program(
    *leaves: Leaf, steps: list[Step], outputs: tuple[int, ...] | None = None, n: int = 3, low: int = 0
) -> Program:
    made = len(leaves) + sum(s.count for s in steps)
    return Program((Size("n", n, low, 64),), leaves, tuple(steps), outputs or (made - 1,))


def leaf(dtype: DType, *shape: str | int, style: str = "plain", data: Any = None, param: bool = False) -> Leaf:
    given = None if data is None else np.array(data).astype(dtype.np)
    kind: Shape = tuple(shape) if given is None else given.shape
    return Leaf(kind, dtype, style, 1, param, given)


def exact(name: str, *args: Any, **options: Any) -> Step:
    return Step(name, args, tuple(options.items()), exactness="exact")


V = [Ref(i) for i in range(8)]

REGRESSIONS: dict[str, Program] = {
    "a roll to the left": program(leaf(f32, "n"), steps=[exact("roll", V[0], -1, 0)]),
    "a roll of nothing": program(leaf(f32, "n"), steps=[exact("roll", V[0], 1, 0)], n=0),
    "backwards by two": program(leaf(f64, "n", 2), steps=[exact("getitem", V[0], (slice(None, None, -2),))], n=0),
    "the best of as many": program(
        leaf(f32, "n"), steps=[Step("topk", (V[0], 2, 0), count=2, exactness="decides")], n=2
    ),
    "known ids": program(leaf(f32, "n"), steps=[exact("take", V[0], [2, 0], axis=0)], n=5),
    "ids too far": program(leaf(f32, "n"), steps=[exact("take", V[0], [2, 0], axis=0)], n=2),
    "an update of a parameter": program(leaf(u16, 3, param=True), steps=[exact("use:replaced", V[0], 0)]),
    "each element twice": program(leaf(bool_, "n", 2), steps=[exact("repeat", V[0], 2, 1)]),
    "the mean of nothing": program(leaf(f32, "n", 2), steps=[Step("mean", (V[0],), (("axis", 0),))], n=0),
    "an id into nothing": program(leaf(i64, data=0), leaf(bool_, 0, "n"), steps=[exact("gather", V[1], V[0])], n=0),
    "the least of eight bits": program(leaf(f8e4m3, 3, 2), steps=[exact("min", V[0], axis=0)]),
}  # fmt: skip
