"""Where nodes come from: the user's line, the HIR block, the pass. Never part of a node's identity."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from strata.core import Place, here

if TYPE_CHECKING:
    from strata.mir.ir import Node


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node came from: the user's line, the HIR block, the pass that made it, the function that was called."""

    place: Place | None = None
    block: str | None = None
    made_by: str | None = None
    called: str | None = None


_NOWHERE = Origin()
_origin: ContextVar[Origin | None] = ContextVar("strata_origin", default=None)
calling: ContextVar[str | None] = ContextVar("strata_calling", default=None)  # the front-end function at work


class origin:  # noqa: N801 - used as a function; a class, since passes enter one for every node
    """Nodes made inside take what is given here; what is not given comes from the enclosing context."""

    __slots__ = ("_given", "_token")

    def __init__(
        self,
        place: Place | None = None,
        block: str | None = None,
        made_by: str | None = None,
        called: str | None = None,
    ) -> None:
        self._given = place, block, made_by, called

    def __enter__(self) -> None:
        place, block, made_by, called = self._given
        outer = _origin.get() or _NOWHERE
        self._token = _origin.set(
            Origin(place or outer.place, block or outer.block, made_by or outer.made_by, called or outer.called)
        )

    def __exit__(self, *_: object) -> None:
        _origin.reset(self._token)


def origin_of(node: Node, made_by: str | None = None) -> origin:
    """Nodes made inside stand in for `node` and inherit its origin."""
    known = node.origin
    return origin(known.place, known.block, made_by or known.made_by, known.called)


@lru_cache(4096)
def _at(place: Place | None, called: str | None) -> Origin:
    return Origin(place=place, called=called)


def current_origin() -> Origin:
    known = _origin.get()
    if known is None:
        return _at(here(), calling.get())
    return known if known.place is not None else replace(known, place=here(), called=known.called or calling.get())
