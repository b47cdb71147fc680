"""Where nodes come from: the user's line, the HIR block, the pass. Kept beside a node, never part of its identity."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from strata.core import Place, here

if TYPE_CHECKING:
    from strata.mir.ir import Node


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node came from: the user's line, the HIR block, the pass that made it."""

    place: Place | None = None
    block: str | None = None
    made_by: str | None = None


_origin: ContextVar[Origin | None] = ContextVar("strata_origin", default=None)


@contextmanager
def origin(place: Place | None = None, block: str | None = None, made_by: str | None = None) -> Iterator[None]:
    """Nodes made inside take what is given here; what is not given comes from the enclosing context."""
    outer = _origin.get() or Origin()
    token = _origin.set(Origin(place or outer.place, block or outer.block, made_by or outer.made_by))
    try:
        yield
    finally:
        _origin.reset(token)


@contextmanager
def origin_of(node: Node, made_by: str | None = None) -> Iterator[None]:
    """Nodes made inside stand in for `node` and inherit its origin."""
    with origin(node.origin.place, node.origin.block, made_by or node.origin.made_by):
        yield


def current_origin() -> Origin:
    known = _origin.get()
    if known is None:
        return Origin(place=here())
    return known if known.place is not None else replace(known, place=here())
