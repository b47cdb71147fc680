"""Checked numbers of a model's configuration: sizes are positive integers, factors are finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from strata.errors import FileError

MOST_LAYERS = 1 << 14
MOST = (1 << 31) - 1  # of a size: ids and positions are counted in 32 bits
MOST_PLACES = 1 << 20  # of a table that is made for them


def whole(found: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1, most: int = MOST) -> int:
    """A whole number; `default` where the key is missing or null."""
    value = found.get(key)
    if value is None:
        if default is None:
            raise FileError(f"the configuration has no {key}", code="F140")
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not least <= value <= most:
        raise FileError(
            f"the configuration has {key} = {_shown(value)}, a whole number from {least} to {most} is needed",
            code="F140",
        )
    return value


def real(found: Mapping[str, Any], key: str, default: float | None = None, *, positive: bool = True) -> float:
    """A finite number; `default` where the key is missing or null."""
    value = found.get(key)
    if value is None:
        if default is None:
            raise FileError(f"the configuration has no {key}", code="F140")
        return default
    if not _is_number(value) or not abs(value) < 1e30 or (positive and value <= 0):
        kind = "a number above 0" if positive else "a number"
        raise FileError(f"the configuration has {key} = {_shown(value)}, {kind} is needed", code="F140")
    return float(value)


def optional_real(found: Mapping[str, Any], key: str) -> float | None:
    """A finite number above 0, or None where the key is missing or null."""
    return None if found.get(key) is None else real(found, key)


def reals(found: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """A list of finite numbers above 0."""
    value = found.get(key)
    if not isinstance(value, list) or not all(_is_number(x) and 0 < x < 1e30 for x in value):
        raise FileError(
            f"the configuration has {key} = {_shown(value)}, a list of numbers above 0 is needed", code="F140"
        )
    return tuple(map(float, value))


def layer_count(found: Mapping[str, Any]) -> int:
    """The number of layers, which is not so large that a list of them would be a load."""
    count = whole(found, "num_hidden_layers")
    if count > MOST_LAYERS:
        raise FileError(f"the configuration has num_hidden_layers = {count}, the most is {MOST_LAYERS}", code="F140")
    return count


def wholes(found: Mapping[str, Any], key: str) -> tuple[int, ...] | None:
    """A list of whole numbers, such as those of layers; None where the key is missing or null."""
    value = found.get(key)
    if value is not None and not (isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)):
        raise FileError(
            f"the configuration has {key} = {_shown(value)}, a list of whole numbers is needed", code="F140"
        )
    return None if value is None else tuple(value)


def of_layers(found: Mapping[str, Any], key: str, layers: int) -> Sequence[Any] | None:
    """A list with an entry for each layer; None where the key is missing, null or empty."""
    value = found.get(key)
    if not value:
        return None
    if not isinstance(value, list) or len(value) != layers:
        count = len(value) if isinstance(value, list) else _shown(value)
        raise FileError(f"the configuration has {key} of {count} entries for {layers} layers", code="F140")
    return value


def mapping(found: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Settings inside the settings; none where the key is missing or null."""
    value = found.get(key)
    if value is not None and not isinstance(value, dict):
        raise FileError(f"the configuration has {key} = {_shown(value)}, settings by name are needed", code="F140")
    return value or {}


def text(found: Mapping[str, Any], key: str, default: str) -> str:
    value = found.get(key)
    if value is not None and not isinstance(value, str):
        raise FileError(f"the configuration has {key} = {_shown(value)}, a name is needed", code="F140")
    return value or default


def names(found: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of names, or a text with bars between them; none where the key is missing or null."""
    value = found.get(key)
    listed = value.split("|") if isinstance(value, str) else value or []
    if not isinstance(listed, list) or not all(isinstance(x, str) for x in listed):
        raise FileError(f"the configuration has {key} = {_shown(value)}, a list of names is needed", code="F140")
    return tuple(listed)


def refuse(found: Mapping[str, Any], *keys: str) -> None:
    """Refuse settings that change results and are not read: they are missing, null or false."""
    key = next((key for key in keys if found.get(key)), None)
    if key is not None:
        raise FileError(f"the configuration has {key} = {_shown(found[key])}, which is not known here", code="F140")


def _is_number(value: Any) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]} …"
