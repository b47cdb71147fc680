"""`strata cache`: the disk cache of compiled code."""

from __future__ import annotations

import re
import time
from argparse import Namespace

from strata.cache import Entry, default_store
from strata.cli import show
from strata.cli.parser import Mistake

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def listing(options: Namespace) -> None:
    """Entries, most recently used first."""
    store = default_store()
    entries = sorted(store.entries(), key=lambda e: -e.used)
    total = sum(e.size for e in entries)
    if options.json:
        shown = [
            {"key": e.key, "size": e.size, "used": e.used, "about": dict(e.about), "trouble": e.trouble}
            for e in entries
        ]
        show.as_json({"folder": str(store.root), "limit": store.limit, "size": total, "entries": shown})
        return
    rows = [(e.key[:12], show.size(e.size), _ago(e.used), f"not used: {e.trouble}" if e.trouble else _about(e))
            for e in entries[: options.limit]]  # fmt: skip
    if rows:
        show.table(("key", ">size", ">used", "about"), rows)
    more = f", {options.limit} shown" if len(entries) > options.limit else ""
    if store.distrust:
        print(f"the cache is off: {store.distrust}")
    print(f"{len(entries)} entries, {show.size(total)} of at most {show.size(store.limit)}, in {store.root}{more}")


def why(options: Namespace) -> None:
    """What the cache knows of a key or a name."""
    from strata.cache import why as reason

    told = reason(options.what)
    if options.json:
        show.as_json({"what": options.what, "why": told.splitlines()})
    else:
        print(told)


def verify(options: Namespace) -> int:
    """Read every entry; those that are damaged, or under another name than their own, are removed."""
    store = default_store()
    good, bad = store.verify()
    reason = store.distrust
    if options.json:
        show.as_json({"good": good, "damaged": bad, **({"off": reason} if reason else {})})
    elif reason:
        print(f"the cache is off: {reason}")
    else:
        print(f"{good} entries are good" + (f", {len(bad)} were damaged or misplaced and removed" if bad else ""))
    return 1 if bad or reason else 0


def prune(options: Namespace) -> None:
    """Remove the least recently used."""
    removed = default_store().prune(read_size(options.to))
    if options.json:
        show.as_json({"removed_bytes": removed})
    else:
        print(f"{show.size(removed)} removed")


def export(options: Namespace) -> None:
    """Copy all entries."""
    from strata.cache import export as copy

    count = copy(options.folder)
    if options.json:
        show.as_json({"entries": count, "folder": options.folder})
    else:
        print(f"{count} entries copied to {options.folder}")


def read_size(text: str) -> int:
    """`500MB` in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?[bB]?)", text.strip())
    unit = match[2].upper() if match else ""
    if not match or (unit + "B" if unit in ("K", "M", "G", "T") else unit) not in _UNITS:
        raise Mistake(f"{text!r} is not a size: write 500MB or 2GB")
    return int(float(match[1]) * _UNITS[unit + "B" if unit in ("K", "M", "G", "T") else unit])


def _about(entry: Entry) -> str:
    """The first words of what the entry says about itself."""
    text = ", ".join(f"{k} {' '.join(str(v).split())}" for k, v in entry.about.items())
    return text if len(text) <= 90 else text[:89] + "…"


def _ago(then: float) -> str:
    seconds = max(0.0, time.time() - then)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"
