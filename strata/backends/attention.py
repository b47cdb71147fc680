"""Where the operands of an attention lie, whatever its layout: strides of batch, head, row and element.

What is attention is found once, in `passes.fuse.find_attention` and by the op; here the op's layout and the views
that a step reads become the numbers that every backend's kernels take.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from strata.core import Dim, TensorType
from strata.lir import Spacing

DROPPED = -1e9  # the score of a dropped key
LOG2E = math.log2(math.e)  # scores of exponentials in base 2 are as many times larger
LOWEST = -(2.0**127)  # that maxima begin with where keys score -inf, in base 2
_VALUES = ("v", "out", "dy", "dv")  # operands whose rows are as wide as values


class HeadStrides(NamedTuple):
    """In elements; 0 along what an operand does not have."""

    batch: Dim
    head: Dim
    row: Dim
    element: Dim


class AttentionPlaces:
    """The strides of inputs, by their number among a step's inputs, and of contiguous outputs, by name."""

    def __init__(
        self, op: Any, inputs: Mapping[str, int], outputs: Mapping[str, TensorType], types: Sequence[TensorType],
        views: Sequence[Spacing],
    ) -> None:  # fmt: skip
        self.op, self.types, self.views, self.outputs = op, types, views, outputs
        self.inputs = {name: at for name, at in inputs.items() if name != "mask" or op.mask != "none"}
        self.sizes = op.sizes(*types[:3])
        self.strides: dict[str, HeadStrides] = {}
        spacing = {name: views[at].strides for name, at in self.inputs.items()}
        spacing |= {name: contiguous(type_.shape) for name, type_ in outputs.items()}
        for name, steps in spacing.items():
            if name == "mask":
                shape = types[inputs["mask"]].shape
                self.strides[name] = HeadStrides(*(0 if d == 1 else s for d, s in zip(shape, steps, strict=True)))
            else:
                wide = self.sizes.value_dim if name in _VALUES else op.head_dim
                self.strides[name] = _axes(op.layout, steps, wide)

    @property
    def is_side_by_side(self) -> bool:
        """Whether the elements of every row are neighbours in memory."""
        return all(s.element == (0 if name == "mask" and s.element == 0 else 1) for name, s in self.strides.items())


def _axes(layout: str, strides: tuple[Dim, ...], dim: Dim) -> HeadStrides:
    match layout:
        case "bhsd":
            b, h, s, d = strides
            return HeadStrides(b, h, s, d)
        case "bshd":
            b, s, h, d = strides
            return HeadStrides(b, h, s, d)
        case "bsd":
            b, s, d = strides
            return HeadStrides(b, d * dim, s, d)
    s, d = strides
    return HeadStrides(0, d * dim, s, d)


def contiguous(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Strides of what lies row by row."""
    strides: list[Dim] = []
    step: Dim = 1
    for d in reversed(shape):
        strides.insert(0, step)
        step = step * d
    return tuple(strides)
