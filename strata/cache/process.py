"""The disk cache of this process, in the folder that the settings name."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from strata.cache.store import DiskStore
from strata.config import config, default_cache_dir


def default_store() -> DiskStore:
    """The store under `config().cache_dir`."""
    settings = config()
    return _store(settings.cache_dir, settings.cache_limit)


@lru_cache(maxsize=8)
def _store(root: Path, limit: int) -> DiskStore:
    if root == default_cache_dir():
        with suppress(OSError):  # it is ours alone, but may have been made under a loose umask
            found = root.stat()
            if found.st_mode & 0o022:
                os.chmod(root, found.st_mode & 0o755)
    return DiskStore(root / "objects", limit)
