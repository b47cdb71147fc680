"""The registry of handlers: which function reads which ONNX operator, from which opset version on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from strata.errors import OptionError

if TYPE_CHECKING:
    from strata.io.onnx.node import NodeView

Handler = Callable[["NodeView"], Any]
HandlerT = TypeVar("HandlerT", bound=Handler)
ONNX_DOMAINS = ("", "ai.onnx")

# what ONNX took over from com.microsoft as it was, and since when
SAME_AS_STANDARD = {"GatherND": 11, "GridSample": 16, "Pad": 11, "Range": 11, "Trilu": 14}

# Nodes that are never evaluated while reading: they draw numbers, or do their own thing with what is known.
NEVER_FOLDED = {
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial", "Dropout",
    "If", "Loop", "Scan", "SequenceMap",
}  # fmt: skip

_TABLE: dict[tuple[str, str], list[tuple[int, Handler]]] = {}


def reads(op_type: str, *, since: int = 1, domain: str = "") -> Callable[[HandlerT], HandlerT]:
    """Register the reader of an op from opset `since` on, until a later registration takes over."""

    def wrap(fn: HandlerT) -> HandlerT:
        versions = _TABLE.setdefault((domain, op_type), [])
        if any(known == since for known, _ in versions):
            raise OptionError(f"{domain or 'ai.onnx'}.{op_type} since {since} is registered twice", code="O500")
        versions.append((since, fn))
        versions.sort(key=lambda entry: entry[0])
        return fn

    return wrap


def lookup(domain: str, op_type: str, version: int) -> Handler | None:
    """The reader of an op in an opset, or None."""
    domain = "" if domain in ONNX_DOMAINS else domain
    versions = _TABLE.get((domain, op_type))
    if not versions:
        is_same = domain == "com.microsoft" and op_type in SAME_AS_STANDARD
        return lookup("", op_type, SAME_AS_STANDARD[op_type]) if is_same else None
    at = bisect_right([since for since, _ in versions], version)
    return versions[max(at - 1, 0)][1]


def known_ops(domain: str = "") -> list[str]:
    """The operators of a domain that are read."""
    same = SAME_AS_STANDARD if domain == "com.microsoft" else {}
    return sorted({*(name for where, name in _TABLE if where == domain), *same})
