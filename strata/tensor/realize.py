"""The one door from expressions to arrays."""

from __future__ import annotations

from collections.abc import Sequence

from strata.mir import Value
from strata.tensor.data import Handle, handle_of, remember
from strata.tensor.schedule import run_values


def realize_values(values: Sequence[Value]) -> list[Handle]:
    """Storage for each value: expressions that are not realized yet run together, as one program."""
    handles = [handle_of(v) for v in values]
    if None in handles:
        wanted = list(dict.fromkeys(v for v, h in zip(values, handles, strict=True) if h is None))
        arrays, binding = run_values(wanted)
        for value, array in zip(wanted, arrays, strict=True):
            remember(value, Handle(array, value.type if binding else None, binding or None))
        handles = [handle_of(v) for v in values]
    return [h for h in handles if h is not None]
