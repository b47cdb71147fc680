"""Fields of a JSON body, taken one by one: each has its kind and its bounds, and what is left over is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from strata.errors import RequestError

# what clients send along and no answer depends on
IGNORED: Final = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "reasoning_effort", "verbosity", "prediction",
)  # fmt: skip
# what is understood as long as it asks for nothing: its value then
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "suffix": ("",), "modalities": (["text"],), "functions": ([],), "function_call": ("none", "auto"),
    "audio": ({},), "web_search_options": ({},), "truncate": (False,), "truncation": ("disabled",),
}  # fmt: skip


def wrong(message: str, name: str | None = None, reason: str = "invalid_value") -> RequestError:
    """A request that cannot be answered; `name` is the field that is to blame, `reason` the protocol's word for it."""
    error = RequestError(f"request: {message}", code="O620")
    error.field, error.reason = name, reason
    return error


class Fields:
    """Fields of a JSON body, taken one by one; what is left over at the end was not understood."""

    def __init__(
        self, body: Any, where: str = "", ignored: Sequence[str] = IGNORED, called: Mapping[str, str] | None = None
    ) -> None:  # fmt: skip
        """`called` are names of fields that clients have others for."""
        self._where, self._called = where, called or {}
        if not isinstance(body, Mapping):
            raise wrong(f"{where or 'the body'} is {kind_of(body)}, an object is needed", where or None, "invalid_type")
        self._left = {str(k): v for k, v in body.items() if v is not None and k not in ignored}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def path(self, name: str) -> str:
        name = self._called.get(name, name)
        return f"{self._where}.{name}" if self._where else name

    def any(self, name: str, default: Any = None) -> Any:
        return self._left.pop(name, default)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        found = self._left.pop(name, default)
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not least <= found <= most:
            path = self.path(name)
            raise wrong(f"{path} is a number from {least:g} to {most:g}, got {shown(found)}", path, "invalid_value")
        return float(found)

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        found = self._left.pop(name, default)
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= most:
            path = self.path(name)
            raise wrong(f"{path} is a whole number from {least} to {most}, got {shown(found)}", path, "invalid_value")
        return found

    def flag(self, name: str, default: bool = False) -> bool:
        found = self._left.pop(name, default)
        if not isinstance(found, bool):
            raise wrong(f"{self.path(name)} is true or false, got {shown(found)}", self.path(name), "invalid_type")
        return found

    def name(self, name: str) -> str | None:
        found = self._left.pop(name, None)
        if found is not None and not isinstance(found, str):
            raise wrong(f"{self.path(name)} is a name, got {shown(found)}", self.path(name), "invalid_type")
        return found

    def object(self, name: str) -> dict[str, Any]:
        found = self._left.pop(name, {})
        if not isinstance(found, Mapping):
            raise wrong(f"{self.path(name)} is an object, got {shown(found)}", self.path(name), "invalid_type")
        return dict(found)

    def finish(self) -> None:
        for name, value in self._left.items():
            path = self.path(name)
            if name not in NEUTRAL:
                raise wrong(f"there is no field {path!r}", path, "unknown_parameter")
            if value not in NEUTRAL[name]:
                raise wrong(f"{path} = {shown(value)} is not supported", path, "unsupported_parameter")


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "nothing"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else type(value).__name__)


def shown(value: Any) -> str:
    """A value in a message, cut where it is long."""
    if isinstance(value, str) and len(value) > 60:
        value = value[:60]
        return repr(value)[:57] + "..."
    if isinstance(value, (list, dict)) and len(value) > 60:
        return f"{kind_of(value)} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
