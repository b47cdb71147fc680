"""The store of this process, in the folder that the settings name."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from strata.cache.store import DiskStore
from strata.config import config


def default_store() -> DiskStore:
    """The store under `config().cache_dir`."""
    settings = config()
    return _store(settings.cache_dir, settings.cache_limit)


@lru_cache(maxsize=8)
def _store(root: Path, limit: int) -> DiskStore:
    return DiskStore(root / "objects", limit)
