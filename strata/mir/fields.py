"""Type checks of op and block fields that were read from a text."""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints


def require_fields(kind: type, given: Mapping[str, Any]) -> None:
    """Raise TypeError for the first field that is not of the kind that the class declares."""
    hints = _hints(kind)
    for name, value in given.items():
        if name in hints and not _fits(value, hints[name]):
            raise TypeError(f"{name} is {_shown(hints[name])}, got {str(value)[:60]!r}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    try:
        return get_type_hints(kind)
    except NameError:  # a kind that is imported for type checkers alone
        return {}


def _fits(value: Any, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(hint))
    if origin is tuple:
        parts = get_args(hint)
        if not isinstance(value, tuple):
            return False
        if len(parts) == 2 and parts[1] is Ellipsis:
            return all(_fits(x, parts[0]) for x in value)
        return len(value) == len(parts) and all(map(_fits, value, parts))
    if hint is Any or not isinstance(hint, type):
        return True
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint).replace("strata.", "")
