"""Shared weights: each loaded once, and freed with its last user."""

from __future__ import annotations

from threading import Lock
from typing import Any

import numpy as np

from strata.errors import OptionError, UnknownNameError


class WeightRegistry:
    """Shared arrays by name. A name is registered once; others may be tied to it; pinned arrays cannot be dropped."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._tied: dict[str, str] = {}
        self._pins: dict[str, int] = {}
        self._adapters: dict[str, tuple[str, ...]] = {}
        self._lock = Lock()

    def register(self, name: str, array: Any, *, adapter: str | None = None) -> np.ndarray:
        """Keep an array under a name; the same one again changes nothing, another is refused."""
        given = np.asarray(array)
        with self._lock:
            if name in self._tied:
                raise OptionError(f"weights: {name!r} is tied to {self._tied[name]!r}", code="O614")
            known = self._arrays.get(name)
            if known is None:
                known = self._arrays[name] = given
            elif known is not given and not _equal(known, given):
                raise OptionError(
                    f"weights: {name!r} is {known.dtype}{list(known.shape)} already, and other numbers than this one",
                    code="O614",
                )
            if adapter is not None:
                self._adapters[adapter] = tuple(dict.fromkeys((*self._adapters.get(adapter, ()), name)))
            return known

    def tie(self, name: str, to: str) -> None:
        """Let a name stand for the array of another, which is not tied itself."""
        with self._lock:
            if to in self._tied:
                raise OptionError(f"weights: {to!r} is itself tied to {self._tied[to]!r}", code="O614")
            if to not in self._arrays:
                raise self._unknown(to)
            if name in self._arrays:
                raise OptionError(f"weights: {name!r} has an array of its own", code="O614")
            self._tied[name] = to

    def pin(self, name: str) -> np.ndarray:
        """The array of a name, held until `release` is called as often."""
        with self._lock:
            own = self._own(name)
            self._pins[own] = self._pins.get(own, 0) + 1
            return self._arrays[own]

    def release(self, name: str) -> None:
        """Hold it no longer."""
        with self._lock:
            own = self._own(name)
            if not self._pins.get(own):
                raise OptionError(f"weights: {name!r} is released and was not pinned", code="O614")
            self._pins[own] -= 1

    def drop(self, name: str) -> None:
        """Forget an array and all names that are tied to it; a name that is tied, only itself."""
        with self._lock:
            if self._tied.pop(name, None) is not None:
                return
            own = self._own(name)
            if self._pins.get(own):
                raise OptionError(f"weights: {name!r} is pinned {self._pins[own]} times", code="O614")
            del self._arrays[own]
            self._tied = {n: to for n, to in self._tied.items() if to != own}
            left = {a: tuple(n for n in names if n != own) for a, names in self._adapters.items()}
            self._adapters = {a: names for a, names in left.items() if names}

    def __contains__(self, name: str) -> bool:
        return name in self._arrays or name in self._tied

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[self._own(name)]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._arrays, *self._tied)

    @property
    def adapters(self) -> dict[str, tuple[str, ...]]:
        """The names that belong to each adapter."""
        return dict(self._adapters)

    @property
    def total_bytes(self) -> int:
        """Of all arrays, each once however many names it has."""
        return sum(a.nbytes for a in self._arrays.values())

    def _own(self, name: str) -> str:
        own = self._tied.get(name, name)
        if own not in self._arrays:
            raise self._unknown(name)
        return own

    def _unknown(self, name: str) -> UnknownNameError:
        return UnknownNameError(f"weights: there is no {name!r}", code="N602")


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """The same bits: NaNs count, too."""
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
