"""Weights of the experts of a layer: one after the other, in parts as files have them, or a few in slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from strata.errors import FileError
from strata.io import GgufTensor, release_pages


class ExpertStack:
    """The matrices of all experts of a layer, each in parts that lie side by side; `whole` copies them into one array.

    Parts are [out, in]. The whole is [E, in, out], or blocks [E, out, in] where all parts are blocks of one kind.
    """

    def __init__(self, name: str, parts: Sequence[Sequence[np.ndarray | GgufTensor]]) -> None:
        shapes = {tuple(part.shape) for row in parts for part in row}
        if len(shapes) > 1:
            raise FileError(f"{name} has experts of the shapes {', '.join(map(str, sorted(shapes)))}", code="F142")
        self.name, self.parts = name, parts
        kinds = {
            (part.kind, part.order is None) if isinstance(part, GgufTensor) and not part.is_plain else None
            for row in parts for part in row
        }  # fmt: skip
        found = kinds.pop()
        self.kind = found[0] if found is not None and found[1] and not kinds else None  # of blocks
        ((rows, width),) = shapes
        sides = (len(parts[0]) * rows, width)
        self.shape = (len(parts), *(sides if self.kind is not None else sides[::-1]))

    def one(self, expert: int) -> np.ndarray:
        """The matrix of one expert, [in, out], or the blocks of its rows."""
        row = [_elements(part, is_blocks=self.kind is not None) for part in self.parts[expert]]
        if len(row) == 1:
            return row[0] if self.kind is not None else row[0].T
        side_by_side = np.concatenate(row)
        for part in row:
            release_pages(part)
        return side_by_side if self.kind is not None else side_by_side.T

    def whole(self) -> np.ndarray | GgufTensor:
        ordered = self._ordered()
        if ordered is not None:
            return ordered
        data = np.stack([self.one(i) for i in range(len(self.parts))])
        return data if self.kind is None else GgufTensor(self.name, self.kind, self.shape, data)

    def _ordered(self) -> GgufTensor | None:
        """Blocks of experts whose columns were put into an order, each expert's into its own."""
        rows = [[part for part in row if isinstance(part, GgufTensor)] for row in self.parts]
        orders = [[part.order for part in row if part.order is not None] for row in rows]
        if any(len(found) != len(row) for found, row in zip(orders, self.parts, strict=True)):
            return None
        if len({part.kind for row in rows for part in row}) > 1:
            return None
        if not all(np.array_equal(order, row[0]) for row in orders for order in row):
            return None
        data = np.stack([np.concatenate([part.data for part in row]) for row in rows])
        shape = (*data.shape[:2], rows[0][0].shape[-1])
        return GgufTensor(self.name, rows[0][0].kind, shape, data, np.stack([row[0] for row in orders]))


def stacked(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Weights with the experts of each layer in one array."""
    return {name: w.whole() if isinstance(w, ExpertStack) else w for name, w in weights.items()}


def _elements(part: np.ndarray | GgufTensor, *, is_blocks: bool) -> np.ndarray:
    if isinstance(part, GgufTensor):
        return part.data if is_blocks else part.dequantize()
    return part


def one_expert(weights: Any, expert: int) -> np.ndarray:
    """What one expert has of the weights of all: a matrix [in, out], the blocks of its rows, or a bias."""
    if isinstance(weights, ExpertStack):
        return weights.one(expert)
    if not isinstance(weights, GgufTensor):
        found: np.ndarray = weights[expert]
        return found
    if weights.is_plain:
        return weights.data.reshape(weights.shape)[expert].T
    return weights.data.reshape(weights.shape[0], weights.shape[1], -1)[expert]


def slots_like(weights: Any, slots: int) -> np.ndarray | GgufTensor:
    """Room for so many of the experts whose weights these are: f32, or blocks of their kind."""
    kind = weights.kind if isinstance(weights, ExpertStack) else None
    if isinstance(weights, GgufTensor) and not weights.is_plain:
        kind = weights.kind
    one = one_expert(weights, 0)
    room = np.zeros((slots, *one.shape), np.float32 if kind is None else np.uint8)
    return room if kind is None else GgufTensor("slots", kind, (slots, *weights.shape[1:]), room)
