"""Collectives among processes or threads: all-reduce, all-gather and their relatives.

A `Group` is one member's view of all. Whatever carries the bytes (`Transport`), results have the same bits: sums are
taken in the order of the members' ranks, never in the order in which messages come.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from strata.arguments import public

if TYPE_CHECKING:
    from strata.distributed.group import Group, Transport
    from strata.distributed.sockets import SocketTransport, connect
    from strata.distributed.threads import ThreadTransport, local_groups, run_members

_PLACES = {
    "Group": "group", "Transport": "group", "SocketTransport": "sockets", "connect": "sockets",
    "ThreadTransport": "threads", "local_groups": "threads", "run_members": "threads",
}  # fmt: skip
__all__ = ["Group", "SocketTransport", "ThreadTransport", "Transport", "connect", "local_groups", "run_members"]


def __getattr__(name: str) -> Any:
    """A part is loaded when it is first used."""
    if name not in _PLACES:
        raise AttributeError(f"strata.distributed has no name {name!r}")
    value = globals()[name] = public(getattr(import_module(f"{__name__}.{_PLACES[name]}"), name))
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
