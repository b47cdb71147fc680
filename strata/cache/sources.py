"""The version of this package: digests of its folders, computed once for each state of their files.

What a file holds is told by its size and two times: of the last change that it claims, as Python tells it for the
modules that it has compiled, and that the system noted, since files of many packages and images all claim the same. A
digest of what files hold is then kept in the store, and a later process reads none of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from strata.cache.process import default_store
from strata.cache.store import digest

PACKAGE = str(Path(__file__).parents[1])
SETTLED_SECONDS = 2  # a file that changed a moment ago may change again without its time telling


def version_of(*folders: str) -> str:
    """A digest of the code in some folders of the package."""
    found = _sources()[0]
    return digest(*(found[folder] for folder in folders))


def last_change() -> float:
    """When a file of the package changed last, in seconds."""
    return _sources()[1]


@cache
def _sources() -> tuple[Mapping[str, str], float]:
    """Digests by folder, and the time of the last change."""
    files = sorted(_files(PACKAGE))
    newest = max((change for _, _, change, _ in files), default=0) / 1e9
    if time.time() - newest < SETTLED_SECONDS:
        return _digests(files), newest
    key = digest("sources", PACKAGE, json.dumps(files))
    store = default_store()
    kept = _read(store.get(key))
    if kept is None:
        with store.making(key):  # another process may make it meanwhile
            kept = _read(store.get(key))
            if kept is None:
                kept = _digests(files)
                store.put(key, json.dumps(kept).encode(), {"kind": "sources"})
    return kept, newest


def _files(folder: str) -> Iterator[tuple[str, int, int, int]]:
    """Modules below a folder: path, size, and times of change in nanoseconds, claimed and noted."""
    with os.scandir(folder) as found:
        for entry in found:
            if entry.name.endswith(".py"):
                state = entry.stat()
                yield entry.path, state.st_size, state.st_mtime_ns, state.st_ctime_ns
            elif "." not in entry.name and entry.name != "__pycache__" and entry.is_dir():
                yield from _files(entry.path)


def _digests(files: list[tuple[str, int, int, int]]) -> dict[str, str]:
    parts: dict[str, list[bytes]] = {}
    for path, *_ in files:
        name = os.path.relpath(path, PACKAGE)
        parts.setdefault(name.split(os.sep)[0], []).extend((name.encode(), Path(path).read_bytes()))
    return {folder: digest(*held) for folder, held in parts.items()}


def _read(payload: bytes | None) -> dict[str, str] | None:
    found: Any = json.loads(payload) if payload is not None else None
    return found if isinstance(found, dict) else None
