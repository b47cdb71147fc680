"""Storage of tensors with symbolic sizes: room for the largest size, and the part in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from strata.backends import DeviceArray
from strata.core import TensorType, bounds, here, substitute
from strata.errors import SymbolError
from strata.tensor.data import Handle


def capacity(kind: TensorType) -> int:
    """Elements that a type has at most."""
    size = kind.size
    if isinstance(size, int):
        return size
    high = bounds(size)[1]
    if high is None:
        raise SymbolError(
            f"{kind} has no upper bound, so there is no saying how much memory it takes", code="S155", place=here()
        )
    return high


def bound_view(buffer: Any, kind: TensorType, binding: Mapping[str, int]) -> Any:
    """The front of a flat buffer in the shape that the sizes give."""
    shape = []
    for d in kind.shape:
        size = substitute(d, binding)
        if not isinstance(size, int):
            raise SymbolError(
                f"the tensor cannot be computed while its size {d} has no value", code="S353", place=here()
            )
        shape.append(size)
    if type(buffer) is DeviceArray:
        view = buffer.front(shape)
        view.source = buffer
        return view
    return buffer.reshape(-1)[: int(np.prod(shape, dtype=np.int64))].reshape(shape)


def slices(leaves: Sequence[Handle], binding: Mapping[str, int]) -> dict[str, Any]:
    """The arrays of leaves as inputs of a graph, those with symbolic sizes cut to what the sizes are."""
    return {
        f"d{i}": h.array if h.type.is_static else bound_view(h.storage, h.type, binding) for i, h in enumerate(leaves)
    }
