"""Small expressions run as NumPy calls, since compiling them would not pay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import Place
from strata.errors import ShapeError, StrataError
from strata.mir import Node, Op, computed_in
from strata.ops import Custom
from strata.tensor.structure_key import Outline


@dataclass(frozen=True, slots=True)
class InterpretedCall:
    """One op: where its inputs are, where its outputs go, and what their types are."""

    op: Op
    numpy: Callable[..., Any]
    inputs: tuple[int, ...]
    first: int
    dtypes: tuple[np.dtype[Any], ...]
    shapes: tuple[tuple[int, ...], ...]
    widen: tuple[Any, ...] | None  # a dtype to compute in for each input, or None; None: all stay as they are
    place: Place | None
    dead: tuple[int, ...]  # slots that nothing reads afterwards
    is_foreign: bool  # a user's code, which may keep the arrays that it gives


class Interpreter:
    """The calls of one outline, in order."""

    def __init__(self, program: Outline) -> None:
        last: dict[int, int] = {}
        for at, (inputs, _) in enumerate(program.node_slots):
            last.update(dict.fromkeys(inputs, at))
        keep = {*program.roots, *program.leaf_slots}
        dying: dict[int, list[int]] = {}
        for slot, at in last.items():
            if slot not in keep:
                dying.setdefault(at, []).append(slot)
        self.size, self.roots, self.leaf_slots = program.size, program.roots, tuple(program.leaf_slots)
        self.calls = [
            _call(node, inputs, first, tuple(dying.get(at, ())))
            for at, (node, (inputs, first)) in enumerate(zip(program.nodes, program.node_slots, strict=True))
        ]

    def run(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        table: list[Any] = [None] * self.size
        for slot, array in zip(self.leaf_slots, arrays, strict=True):
            table[slot] = array
        with np.errstate(all="ignore"):
            for call in self.calls:
                _run(call, table)
        return [contiguous(table[r]) for r in self.roots]


def _run(call: InterpretedCall, table: list[Any]) -> None:
    inputs = [table[i] for i in call.inputs]
    if call.widen is not None:
        inputs = [x if wide is None else x.astype(wide) for x, wide in zip(inputs, call.widen, strict=True)]
    try:
        made = call.numpy(*inputs)
    except StrataError as error:
        if error.place is None:
            error.place = call.place
        raise
    if call.is_foreign:
        made = tuple(np.array(out) for out in made)
    if type(made) is not tuple:
        table[call.first] = _typed(call, made, 0)
    else:
        for i, out in enumerate(made):
            table[call.first + i] = _typed(call, out, i)
    for slot in call.dead:
        table[slot] = None


def _typed(call: InterpretedCall, out: Any, i: int) -> np.ndarray:
    array = out if type(out) is np.ndarray else np.asarray(out)
    if array.shape != call.shapes[i]:
        raise ShapeError(
            f"{call.op.name}: infer says {list(call.shapes[i])}, numpy gives {list(array.shape)}", code="S108"
        )
    return array if array.dtype is call.dtypes[i] else array.astype(call.dtypes[i], copy=False)


def contiguous(array: np.ndarray) -> np.ndarray:
    """The array, copied if its elements are not in order."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _call(node: Node, inputs: tuple[int, ...], first: int, dead: tuple[int, ...]) -> InterpretedCall:
    dtypes = tuple(t.dtype.np for t in node.types)
    shapes = tuple(t.static_shape for t in node.types)
    widen = tuple(computed_in(node.op, x.dtype) for x in node.inputs)
    some = widen if any(w is not None for w in widen) else None
    is_foreign = isinstance(node.op, Custom)
    return InterpretedCall(
        node.op, node.op.numpy, inputs, first, dtypes, shapes, some, node.origin.place, dead, is_foreign
    )
