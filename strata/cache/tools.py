"""Inspecting the disk cache: what is in it, why something was compiled again, whether it is intact."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strata.cache.process import default_store
from strata.cache.store import DiskStore, Entry
from strata.errors import FileError


class Listing(tuple[Entry, ...]):
    """Entries, newest use first; printed, a table."""

    __slots__ = ()

    @property
    def bytes(self) -> int:
        return sum(e.size for e in self)

    def __str__(self) -> str:
        lines = [f"{len(self)} entries, {self.bytes:,} bytes", f"{'key':<12} {'bytes':>10} {'last used':<19}  what"]
        for e in self:
            used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(e.used))
            lines.append(f"{e.key[:12]:<12} {e.size:>10,} {used}  {describe(e.about)}{_not_used(e)}")
        return "\n".join(lines)


def ls(store: DiskStore | None = None) -> Listing:
    """Everything in the cache."""
    return Listing(sorted((store or default_store()).entries(), key=lambda e: -e.used))


def describe(about: Mapping[str, Any]) -> str:
    """An entry in a line."""
    text = str(about.get("text", "")).partition("\n")[0]
    named = text or str(about.get("name", ""))
    return f"{about.get('kind', 'entry')} {named}".strip()


def _not_used(entry: Entry) -> str:
    return f" (not used: {entry.trouble})" if entry.trouble else ""


def why(what: str, store: DiskStore | None = None) -> str:
    """Why something is, or is not, taken from the cache: a key or the beginning of one, or a name of a kernel or plan.

    Entries for the same thing differ in what their keys are made of: text, target, version, settings.
    """
    place = store or default_store()
    entries = list(place.entries())
    found = [e for e in entries if e.key.startswith(what)] if _is_hex(what) else []
    found = found or [e for e in entries if what in describe(e.about)]
    events = [e for e in place.events if e.what == "off" or e.key.startswith(what) or what in describe(e.about)]
    lines = [
        f"{e.when}: {e.what} {e.key[:12]} {describe(e.about)}{f' ({e.reason})' if e.reason else ''}" for e in events
    ]
    if not found:
        return "\n".join(
            [*lines, f"nothing in the cache is called {what!r}: it was never compiled here, or was pruned"]
        )
    for entry in sorted(found, key=lambda e: -e.used)[:20]:
        lines.append(f"{entry.key[:12]}: {describe(entry.about)}{_not_used(entry)}")
        lines += [f"    {k}: {v}" for k, v in entry.about.items() if k not in ("kind", "text", "name")]
    lines += differences([e for e in found if not e.trouble])
    return "\n".join(lines)


def differences(entries: list[Entry]) -> list[str]:
    """What sets entries of one text apart: the cause of a compile although the same thing is there."""
    by_text: dict[str, list[Entry]] = {}
    for e in entries:
        by_text.setdefault(describe(e.about), []).append(e)
    lines = []
    for text, group in by_text.items():
        if len(group) > 1:
            fields = sorted(
                {k for e in group for k in e.about if len({str(o.about.get(k)) for o in group}) > 1} - {"kind"}
            )
            cause = ", ".join(fields) or "the version of the code generator or a setting"
            lines.append(f"{len(group)} entries for {text}: they differ in {cause}")
    return lines


def verify(store: DiskStore | None = None) -> tuple[int, list[str]]:
    """Read everything: the number of good entries, and the names of the others, which are removed: damaged ones, and
    those of another name."""
    return (store or default_store()).verify()


def prune(limit: int | None = None, store: DiskStore | None = None) -> int:
    """Remove the least recently used entries until the rest fits the limit; returns the bytes removed."""
    return (store or default_store()).prune(limit)


def export(destination: str | Path, store: DiskStore | None = None) -> int:
    """Copy the cache to a folder that another machine can use as its own; returns the number of entries."""
    target = Path(destination)
    if target.exists() and not target.is_dir():
        raise FileError(f"{str(destination)!r} is not a folder", code="F406")
    return (store or default_store()).export(target / "objects")


def _is_hex(text: str) -> bool:
    return 0 < len(text) <= 64 and all(c in "0123456789abcdef" for c in text)
