"""Views: chains of movement ops as index maps into the value they start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from strata.core import Dim, divide_exactly, substitute
from strata.mir import Constant, Input, Node, Param, Value

RUN = 8  # elements side by side of a matmul that has been moved: fewer would leave most lanes of vectors empty
VIEWS = ("transpose", "reshape", "broadcast_to", "slice", "fence")  # movements that can be read in place


@dataclass(frozen=True, slots=True)
class Spacing:
    """Elements of a buffer at a start and a stride for each axis, all in elements."""

    start: Dim
    strides: tuple[Dim, ...]


def read_view(array: np.ndarray, spacing: Spacing, shape: tuple[Dim, ...], binding: Mapping[str, int]) -> np.ndarray:
    """The elements of an array that a view reads, in place."""
    sizes = [substitute(d, binding) for d in (*shape, spacing.start, *spacing.strides)]
    numbers = [d for d in sizes if isinstance(d, int)]
    assert len(numbers) == len(sizes), "every size is known when a step runs"
    dims, start, strides = numbers[: len(shape)], numbers[len(shape)], numbers[len(shape) + 1 :]
    if 0 in dims:
        return np.empty(dims, array.dtype)
    flat = np.ascontiguousarray(array).reshape(-1)[start:]
    plain = flat.view(f"u{flat.itemsize}") if flat.dtype.isbuiltin == 2 else flat  # NumPy reads no foreign type by name
    made = np.lib.stride_tricks.as_strided(plain, dims, [s * array.itemsize for s in strides], writeable=False)
    return made.view(array.dtype)


def view_strides(value: Value, base: Value | None = None) -> Spacing | None:
    """Where a chain of movements reads the value it starts from (or `base`, on the way); None if not evenly."""
    from strata.lir.traits import traits

    chain: list[Node] = []
    while value != base and value.node.op.name in VIEWS:
        chain.append(value.node)
        value = value.node.inputs[0]
    if value != base and not isinstance(value.node.op, (Input, Param, Constant)) and traits(value.node).moves:
        return None
    start: Dim = 0
    shape, strides = value.shape, contiguous_strides(value.shape)
    for node in reversed(chain):
        op, out = node.op, node.types[0].shape
        match op.name:
            case "fence":
                pass
            case "transpose":
                strides = tuple(strides[p] for p in op.perm)  # type: ignore[attr-defined]
            case "slice":
                for first, stride in zip(op.start, strides, strict=True):  # type: ignore[attr-defined]
                    start = start + stride * first
                strides = tuple(s * step for s, step in zip(strides, op.step, strict=True))  # type: ignore[attr-defined]
            case "broadcast_to":
                lead = len(out) - len(shape)
                strides = (0,) * lead + tuple(
                    0 if a != b else s for a, b, s in zip(shape, out[lead:], strides, strict=True)
                )
            case _:
                found = reshaped_strides(shape, strides, out)
                if found is None:
                    return None
                strides = found
        shape = out
    if shape and shape[-1] == 1:
        strides = (*strides[:-1], 1)  # never stepped along, and contiguous to those who ask
    return Spacing(start, strides)


def turns(node: Node) -> bool:
    """Whether an op moves the last axis to another place."""
    order: tuple[int, ...] = getattr(node.op, "perm", ()) if node.op.name == "transpose" else ()
    return len(order) > 0 and order[-1] != len(order) - 1


def has_runs(value: Value) -> bool:
    """Whether a view has the elements of its last axis next to each other."""
    spacing = view_strides(value)
    return spacing is not None and (spacing.strides[-1] == 1 or value.shape[-1] == 1)


def keeps_runs(value: Value, products: Mapping[Value, Node]) -> bool:
    """Whether the rows or the columns of a matmul lie one after the other where it has been moved to.

    Where only a few elements do, as after a shuffle of pixels, the matmul would be many of a few columns each. What
    is put between, or has sizes that are not known, is taken to lie well."""
    from strata.lir.traits import traits

    if not all(isinstance(d, int) for d in value.shape) or 0 in value.shape:
        return True
    places = np.arange(min(RUN, prod(int(d) for d in value.shape)))
    while not traits(value.node).contracts:
        node, op = value.node, value.node.op
        value = next((x for x in node.inputs if x in products), node.inputs[0])
        shape = [int(d) for d in node.types[0].shape]
        match op.name:
            case "transpose":
                at = np.unravel_index(places, shape)
                back = dict(zip(op.perm, at, strict=True))  # type: ignore[attr-defined]
                places = np.ravel_multi_index([back[p] for p in range(len(shape))], [int(d) for d in value.shape])
            case "reshape" | "fence":
                pass
            case _ if not op.elementwise:
                return True
    if value.ndim < 2:
        return True
    rows, columns = int(value.shape[-2]), int(value.shape[-1])
    for step, length in ((1, columns), (columns, rows)):
        if np.array_equal(places[:length], places[0] + step * np.arange(min(length, len(places)))):
            return True
    return False


def contiguous_strides(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    strides: list[Dim] = []
    step: Dim = 1
    for d in reversed(shape):
        strides.insert(0, step)
        step = step * d
    return tuple(strides)


def reshaped_strides(
    shape: tuple[Dim, ...], strides: tuple[Dim, ...], target: tuple[Dim, ...]
) -> tuple[Dim, ...] | None:
    """Strides under another shape, by matching runs of axes with equal products; None if elements must move."""
    source = [(d, s) for d, s in zip(shape, strides, strict=True) if d != 1]
    result: list[Dim] = []
    wanted = [d for d in target if d != 1]
    while source and wanted:
        group, product = [source.pop(0)], wanted.pop(0)
        sizes, total = [product], group[0][0]
        while total != product:
            ratio_up, ratio_down = divide_exactly(product, total), divide_exactly(total, product)
            if ratio_up is not None and source:
                group.append(source.pop(0))
                total = total * group[-1][0]
            elif ratio_down is not None and wanted:
                sizes.append(wanted.pop(0))
                product = product * sizes[-1]
            else:
                return None
        if any(a[1] != b[0] * b[1] for a, b in pairwise(group)):
            return None
        inner = group[-1][1]
        result += [inner * d for d in contiguous_strides(tuple(sizes))]
    if source or wanted:
        return None
    steps = iter(result)
    return tuple(next(steps) if d != 1 else 0 for d in target)
