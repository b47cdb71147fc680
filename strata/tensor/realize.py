"""Realization: the one way from expressions to arrays."""

from __future__ import annotations

from collections.abc import Sequence

from strata.backends import DeviceArray, DeviceHome
from strata.mir import Value
from strata.tensor.copies import LAZY_COPIES, make_copies
from strata.tensor.data import Handle, LooseHandle, handle_of, remember
from strata.tensor.lazy_cache import run_values
from strata.tensor.placement import has_place


def realize_values(values: Sequence[Value]) -> list[Handle]:
    """Storage for each value: expressions that are not realized yet run together, as one program for a device."""
    if LAZY_COPIES:
        make_copies(values, realize_value)
    handles = [handle_of(v) for v in values]
    wanted = {v: None for v, h in zip(values, handles, strict=True) if h is None}
    if wanted:
        made = dict(zip(wanted, _run(list(wanted)), strict=True))
        handles = [made[v] if h is None else h for v, h in zip(values, handles, strict=True)]
    return handles  # type: ignore[return-value]


def realize_value(value: Value) -> Handle:
    """Storage for one value."""
    if LAZY_COPIES:
        make_copies([value], realize_value)
    return handle_of(value) or _run([value])[0]


def realize_at(value: Value, home: DeviceHome) -> Handle:
    """Storage for an expression without leaves in the memory of a device."""
    return _run([value], home)[0]


def _run(wanted: list[Value], home: DeviceHome | None = None) -> list[Handle]:
    arrays, binding = run_values(wanted) if home is None else run_values(wanted, home)
    handles: list[Handle] = []
    for value, array in zip(wanted, arrays, strict=True):
        goes_anywhere = not has_place(value)  # equal expressions may be used on other devices
        kind = LooseHandle if goes_anywhere and type(array) is not DeviceArray else Handle
        handle = kind(array, value.type if value.type.is_static or binding else None, binding or None)
        if kind is LooseHandle or not goes_anywhere:
            remember(value, handle)
        handles.append(handle)
    return handles
