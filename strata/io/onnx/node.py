"""NodeView: one ONNX node as its handler sees it: inputs in the form it asks for, and attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import Dim, here
from strata.errors import ArgumentError, DTypeError, FileError, ShapeError
from strata.io.onnx.dtypes import TEXT, numpy_dtype
from strata.io.onnx.items import Host, Item, Labels, Sizes
from strata.kinds import shown
from strata.mir import Value

if TYPE_CHECKING:
    from strata.io.onnx.trace import OnnxTracer


class NodeView:
    """One node. `n[0]` is its first input as a graph value, None where it is absent."""

    def __init__(self, tracer: OnnxTracer, proto: Any, items: Sequence[Item | None], version: int) -> None:
        self.tracer = tracer
        self.proto = proto
        self.items = items
        self.version = version
        attributes = getattr(proto, "attribute", None)
        if attributes is None:
            raise ArgumentError(f"NodeView: proto is a node of a model, got {shown(proto)}", code="O101", place=here())
        self._attributes = {a.name: a for a in attributes if tracer.has_attribute(a)}

    @property
    def op_type(self) -> str:
        return str(self.proto.op_type)

    @property
    def label(self) -> str:
        """How a reader's errors begin; which node it is, the tracer adds."""
        return self.op_type

    # inputs

    def __len__(self) -> int:
        return len(self.items)

    def has(self, i: int) -> bool:
        return i < len(self.items) and self.items[i] is not None

    def item(self, i: int) -> Item:
        if not self.has(i):
            raise FileError(f"{self.label} needs input {i}, which is absent", code="F504")
        found = self.items[i]
        assert found is not None
        return found

    def __getitem__(self, i: int) -> Any:
        """An input as a graph value; None where it is absent."""
        return self.tracer.value(self.item(i)) if self.has(i) else None

    def values(self) -> list[Value]:
        return [self.tracer.value(self.item(i)) for i in range(len(self.items))]

    def array(self, i: int) -> np.ndarray:
        """An input as an array; computed now where it depends on data."""
        return self.tracer.array(self.item(i))

    def optional_array(self, i: int) -> np.ndarray | None:
        return self.array(i) if self.has(i) else None

    def dims(self, i: int) -> tuple[Dim, ...]:
        """An input as a flat list of sizes."""
        item = self.item(i)
        if isinstance(item, Sizes):
            return item.flat
        return self.ints(i)

    def ints(self, i: int) -> tuple[int, ...]:
        """An input as a flat list of whole numbers."""
        array = self.array(i)
        if array.dtype.kind not in "iub":
            raise DTypeError(f"{self.label}: input {i} must be integers, it is {array.dtype}", code="D500")
        return tuple(int(v) for v in array.reshape(-1))

    def scalar(self, i: int, default: Any = None) -> Any:
        """An input that is one number, as Python's; the default where it is absent."""
        if not self.has(i):
            return default
        array = self.array(i)
        if array.size != 1:
            raise ShapeError(
                f"{self.label}: input {i} must be one number, it has shape {list(array.shape)}", code="S500"
            )
        return array.reshape(()).item()

    def shape(self, i: int) -> tuple[Dim, ...]:
        item = self.item(i)
        if isinstance(item, (Host, Sizes)):
            return item.array.shape
        if isinstance(item, Labels):
            return item.value.shape
        return self.tracer.value(item).shape

    def ndim(self, i: int) -> int:
        return len(self.shape(i))

    def np_dtype(self, i: int) -> np.dtype[Any]:
        item = self.item(i)
        if isinstance(item, Host):
            return item.array.dtype
        if isinstance(item, Sizes):
            return np.dtype(np.int64)
        if isinstance(item, Labels):
            return TEXT
        return self.tracer.value(item).dtype.np

    def is_fixed(self, i: int) -> bool:
        """Whether an input is known without looking at data of a run."""
        return not self.has(i) or (isinstance(self.items[i], Host) and self.items[i].fixed)  # type: ignore[union-attr]

    def room(self, count: Dim, width: int = 8, what: str = "elements") -> None:
        """Refuse to make an array of the host with this many elements of some bytes where there is no room for it."""
        if isinstance(count, int):
            if count < 0:
                raise ShapeError(f"{self.label}: {count} {what}", code="S500")
            self.tracer.limits.require_room(count * width, f"{self.label}: an array of {count:,} {what}")

    # outputs

    def wants(self, i: int) -> bool:
        """Whether output i has a name, so that someone may use it."""
        return i < len(self.proto.output) and bool(self.proto.output[i])

    @property
    def num_outputs(self) -> int:
        return len(self.proto.output)

    # attributes

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute as Python's value: numbers, text, tuples of them, arrays, graphs.

        A float is one of 32 bits, also where it is left out: a file that says 0.01 has the same numbers as one that
        says nothing.
        """
        found = self._attributes.get(name)
        if found is None:
            return float(np.float32(default)) if isinstance(default, float) else default
        return self.tracer.attribute(found)

    def has_attr(self, name: str) -> bool:
        return name in self._attributes

    def dtype_attr(self, name: str, default: int | None = None) -> np.dtype[Any] | None:
        number = self.attr(name, default)
        return None if number is None else numpy_dtype(int(number))

    def choice(self, name: str, default: str, allowed: Sequence[str]) -> str:
        found = str(self.attr(name, default))
        if found not in allowed:
            raise FileError(f"{self.label}: {name} is {found!r}, not one of {', '.join(allowed)}", code="F504")
        return found

    def axis(self, name: str = "axis", default: int | None = None, *, of: int = 0) -> int:
        """An axis attribute, non-negative."""
        return self.place(self.attr(name, default), self.ndim(of), name)

    def place(self, axis: Any, rank: int | None = None, name: str = "axis") -> int:
        """A non-negative axis; there are as many as the first input has, unless a rank is given."""
        rank = self.ndim(0) if rank is None else rank
        if not isinstance(axis, int) or not -rank <= axis < max(rank, 1):
            raise ShapeError(f"{self.label}: {name} {axis} does not exist in {rank} dimensions", code="S500")
        return axis % max(rank, 1)
