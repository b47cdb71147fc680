"""Where tensors live: the device of an expression, and the error for operands on two.

A tensor lives where its elements are, or will be: where the tensors are that it is computed from. Arrays of NumPy go
wherever the tensors are that they are used with. While no device with its own memory is in use, nothing is asked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from strata.backends import HOMES, DeviceArray, DeviceHome, DeviceName, backend_for
from strata.config import config
from strata.core import here
from strata.errors import DeviceError
from strata.mir import Input, Node, Param, Value
from strata.tensor.data import CopyTo, Data, Handle, LooseHandle, handle_of

HOST = DeviceName("cpu")
_known: WeakKeyDictionary[Node, DeviceName | None] = WeakKeyDictionary()
_tracing = threading.local()


@contextmanager
def tracing() -> Iterator[None]:
    """Held while a function is traced: tensors that are made there become part of its program, wherever that runs."""
    before = getattr(_tracing, "depth", 0)
    _tracing.depth = before + 1
    try:
        yield
    finally:
        _tracing.depth = before


def is_tracing() -> bool:
    return bool(getattr(_tracing, "depth", 0))


def home_of(device: Any) -> DeviceHome | None:
    """The memory of a device; None where that is the host's."""
    return backend_for(str(device)).home


def default_home() -> DeviceHome | None:
    """Where new tensors go, if not to the host."""
    device = config().device
    return None if device == "cpu" or is_tracing() else home_of(device)


def handle_device(handle: Handle) -> DeviceName | None:
    """Where a handle's elements are; None for those that go anywhere."""
    array = handle._array
    if type(array) is DeviceArray:
        return array.home.name
    return None if type(handle) is LooseHandle else HOST


def device_of(value: Value) -> DeviceName | None:
    """Where an expression is computed; None where nothing says so. Operands on two devices are an error."""
    if not HOMES:
        return None
    inputs = value.node.inputs
    if inputs:
        for x in inputs:  # arrays of the host, as a rule: told without a call
            op = x.node.op
            if type(op) is not Data or type(op.handle) is not Handle or type(op.handle._array) is DeviceArray:
                break
        else:
            return HOST
    found = _leaf_device(value)
    if found is not _UNKNOWN:
        return found
    stack = [value.node]
    while stack:
        node = stack[-1]
        if node in _known:
            stack.pop()
            continue
        waiting = [x.node for x in node.inputs if _leaf_device(x) is _UNKNOWN]
        if waiting:
            stack += waiting
            continue
        stack.pop()
        _known[node] = _one(node.op.name, [_leaf_device(x) for x in node.inputs])
    return _known[value.node]


_UNKNOWN: Any = object()


def _leaf_device(x: Value) -> Any:
    op = x.node.op
    if type(op) is Data:
        return handle_device(op.handle)
    if type(op) is CopyTo:
        return DeviceName(op.device)
    if isinstance(op, (Input, Param)) or not x.node.inputs:
        return None
    if x.node in _known:
        return _known[x.node]
    held = handle_of(x)
    return _UNKNOWN if held is None else handle_device(held)


def has_place(value: Value) -> bool:
    """Whether an expression is computed from a tensor that is somewhere, be it on the host."""
    stack, seen = [value.node], set()
    while stack:
        node = stack.pop()
        if type(node.op) is Data:
            if type(node.op.handle) is not LooseHandle:
                return True
        elif node not in seen:
            seen.add(node)
            stack += [x.node for x in reversed(node.inputs)]
    return False


def _one(what: str, places: Iterable[DeviceName | None]) -> DeviceName | None:
    found: DeviceName | None = None
    for place in places:
        if place is not None:
            if found is not None and place != found:
                raise two_devices(what, found, place)
            found = place
    return found


def two_devices(what: str, first: DeviceName, second: DeviceName) -> DeviceError:
    target = first if first != "cpu" else second
    return DeviceError(
        f"{what}: operands are on {str(first)!r} and on {str(second)!r}", code="E103", place=here(),
        fix=f"move the other one: y.to({str(target)!r})",
    )  # fmt: skip


def common_home(what: str, arrays: Iterable[tuple[Handle, Any]]) -> DeviceHome | None:
    """The memory that arrays are in, of handles that are used together; None where that is the host's."""
    found: DeviceHome | None = None
    hosted = False
    for handle, array in arrays:
        if type(array) is DeviceArray:
            if found is not None and array.home is not found:
                raise two_devices(what, found.name, array.home.name)
            found = array.home
        elif type(handle) is not LooseHandle:
            hosted = True
    if found is not None and hosted:
        raise two_devices(what, found.name, HOST)
    return found
