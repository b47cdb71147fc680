"""Realization: the one way from expressions to arrays."""

from __future__ import annotations

from collections.abc import Sequence

from strata.mir import Value
from strata.tensor.data import Handle, handle_of, remember
from strata.tensor.lazy_cache import run_values


def realize_values(values: Sequence[Value]) -> list[Handle]:
    """Storage for each value: expressions that are not realized yet run together, as one program."""
    handles = [handle_of(v) for v in values]
    wanted = {v: None for v, h in zip(values, handles, strict=True) if h is None}
    if wanted:
        made = dict(zip(wanted, _run(list(wanted)), strict=True))
        handles = [made[v] if h is None else h for v, h in zip(values, handles, strict=True)]
    return handles  # type: ignore[return-value]


def realize_value(value: Value) -> Handle:
    """Storage for one value."""
    return handle_of(value) or _run([value])[0]


def _run(wanted: list[Value]) -> list[Handle]:
    arrays, binding = run_values(wanted)
    handles = [Handle(a, x.type if x.type.is_static or binding else None, binding or None)
               for x, a in zip(wanted, arrays, strict=True)]  # fmt: skip
    for value, handle in zip(wanted, handles, strict=True):
        remember(value, handle)
    return handles
