"""Maxima and sums of exponentials in one loop: `sum exp(x - c)` beside `max x`, where c comes from the maximum.

Rows that are too long to be held are read once instead of twice. Every lane has a maximum and a sum of its own, which
is brought down when the maximum grows; lanes are joined when the loop is over and c is known. Limits keep differences
of infinities out: a lane that has seen nothing but -inf counts from the lowest float, one with inf from the highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.core import f32
from strata.kernel import Compute, Expr, LoopBlock, Reduce, ReduceLoop, Scalar, postorder, substitute_axes

if TYPE_CHECKING:
    from strata.backends.triton.codegen.emit import Lane, TritonEmitter

TOGETHER = 4  # blocks of terms that are looked at before a sum is brought down
_MOST = 3.4028234663852886e38


@dataclass(frozen=True, slots=True)
class SumBeside:
    """A loop that needs not be run: its sum is made beside the maximum of another one."""

    loop: ReduceLoop
    less: Expr  # what is taken off before the exponential

    @property
    def node(self) -> Reduce:
        return self.loop.reduces[0]


def sum_beside(steps: Sequence[object], at: int) -> SumBeside | None:
    """The sum of exponentials that a loop over a maximum can make, of the steps that follow it."""
    first = steps[at]
    if not isinstance(first, ReduceLoop) or not _is_one(first, "max"):
        return None
    highest = first.reduces[0]
    for step in steps[at + 1 :]:
        if isinstance(step, Compute):
            continue
        if not isinstance(step, ReduceLoop) or not _is_one(step, "sum") or step.axis.extent != first.axis.extent:
            return None
        body = highest.body
        if step.axis is not first.axis:
            body = substitute_axes([body], {first.axis: step.axis})[body]
        match step.reduces[0].body:
            case Scalar("exp", (Scalar("sub", (x, less)),)) if x is body and step.axis not in less.free:
                return SumBeside(step, less) if highest in set(postorder((less,))) else None
        return None
    return None


def _is_one(loop: ReduceLoop, kind: str) -> bool:
    """Whether a loop is one reduction of f32, and computes nothing else."""
    if len(loop.reduces) != 1 or not _only_computes(loop.body):
        return False
    node = loop.reduces[0]
    return node.kind == kind and node.dtype is f32 and node.body.dtype is f32 and node.axes == (loop.axis,)


def _only_computes(block: LoopBlock) -> bool:
    return all(isinstance(step, Compute) for step in block.steps)


class SumWithMaximum:
    """The running values of lanes."""

    def __init__(self, e: TritonEmitter, tile: str) -> None:
        self.e = e
        self.best = e.name(f'tl.full({tile}, float("-inf"), tl.float32)', "a")
        self.level = e.name(f"tl.full({tile}, {-_MOST!r}, tl.float32)", "level")
        self.total = e.name(f"tl.full({tile}, 0.0, tl.float32)", "total")

    def term(self, body: str, lane: Lane) -> str:
        return self.e.name(f'tl.where({lane.mask}, {body}, float("-inf"))' if lane.mask else body, "term")

    def add(self, terms: Sequence[str]) -> None:
        """Some terms of every lane: what was added up before is brought down once for all of them."""
        e = self.e
        for term in terms:
            e.write(f"{self.best} = tl.maximum({self.best}, {term}, propagate_nan=tl.PropagateNan.ALL)")
        level = e.name(f"tl.minimum(tl.maximum({self.best}, {-_MOST!r}), {_MOST!r})", "level")
        e.write(f"{self.total} = {self.total} * tl.exp({self.level} - {level})")
        for term in terms:
            e.write(f"{self.total} = {self.total} + tl.exp({term} - {level})")
        e.write(f"{self.level} = {level}")

    def highest(self) -> str:
        return self.e.name(f"{self.e.needs('row_max_float')}({self.best})")

    def sum(self, less: str) -> str:
        return self.e.name(f"tl.sum({self.total} * tl.exp({self.level} - {less}), axis=1, keep_dims=True)")
