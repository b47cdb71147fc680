"""Arrays that live in a device's memory: buffers, homes, and what is known about memory in use.

A `DeviceHome` is the memory of one device. A `DeviceArray` is a dense array in it: it is given back when the last
reference goes, on any thread, and reading it waits for what makes it. Nothing else waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from strata.core import drop_refused_capsules, here, new_rlock
from strata.errors import BufferTypeError, OutOfMemoryError

HOMES: list[DeviceHome] = []  # that this process has; while there is none, nobody has to ask where an array is
_GENERAL = "tensors"  # who holds memory that no program holds


class DeviceName(str):
    """The name of a device: the first of a kind has its number or not, `cuda` is `cuda:0`."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and _plain(self) == _plain(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(_plain(self))


def _plain(name: str) -> str:
    return str.removesuffix(name, ":0")


class DeviceBlock:
    """Memory of a home. It goes back when nothing refers to it: without a call of the device, so from any thread."""

    __slots__ = ("__weakref__", "buffer", "give", "room", "who")

    def __init__(self, buffer: Any, room: int, who: str, give: Any) -> None:
        self.buffer, self.room, self.who, self.give = buffer, room, who, give

    def __del__(self) -> None:
        self.give((self.buffer, self.room, self.who))


class DeviceArray:
    """A dense array in the memory of a device. `numpy()` copies it out, when all that was asked for before is done."""

    __slots__ = ("__weakref__", "block", "dtype", "home", "place", "shape", "source")

    def __init__(
        self, home: DeviceHome, dtype: np.dtype[Any], shape: tuple[int, ...], place: Any, block: Any, source: Any = None
    ) -> None:
        self.home, self.dtype, self.shape = home, dtype, shape
        self.place = place  # what kernels are given
        self.block = block  # what owns the memory
        self.source = source  # the host array that it is the copy of, where others may share the copy

    @property
    def device(self) -> DeviceName:
        return self.home.name

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def numpy(self) -> np.ndarray:
        """A copy on the host."""
        return self.home.download(self)

    def copy(self) -> DeviceArray:
        return self.home.copied(self)

    def front(self, shape: Sequence[int]) -> DeviceArray:
        """The first elements in another shape, in the same memory."""
        return self.home.front(self, tuple(shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        return self.home.dlpack(self, stream, options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.home.dlpack_device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.home.cuda_interface(self)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeviceArray({self.dtype.name}{list(self.shape)}, {self.device!r})"


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a device in bytes, as this process uses it."""

    device: str
    in_use: int
    """Of arrays, parameters and scratch memory that somebody holds."""
    peak: int
    """The most that was in use at once."""
    cached: int
    """Kept for later by the device's pool, and given up when memory is short."""
    limit: int | None
    """What may be in use at most; None where there is no saying."""
    programs: dict[str, int] = field(default_factory=dict)
    """Bytes in use by who holds them: programs by name, and `tensors`."""

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" of {self.limit:,}"
        head = f"{self.device}: {self.in_use:,}{limit} bytes in use, {self.peak:,} at most, {self.cached:,} cached"
        return "\n".join([head, *(f"  {size:>15,}  {name}" for name, size in self.programs.items())])


class Ledger:
    """Who holds how much. Blocks come back through a queue, since they end on any thread."""

    def __init__(self) -> None:
        self.lock = new_rlock()
        self.returned: deque[tuple[Any, int, str]] = deque()
        self.by: Counter[str] = Counter()
        self.in_use = self.peak = 0

    def add(self, room: int, who: str) -> None:
        self.by[who] += room
        self.in_use += room
        self.peak = max(self.peak, self.in_use)

    def drain(self) -> list[tuple[Any, int]]:
        """What has come back since the last time; the lock is held."""
        made = []
        while self.returned:
            buffer, room, who = self.returned.popleft()
            self.ended(room, who)
            made.append((buffer, room))
        return made

    def ended(self, room: int, who: str) -> None:
        self.in_use -= room
        self.by[who] -= room
        if not self.by[who]:
            del self.by[who]


class DeviceHome(ABC):
    """The memory of one device."""

    dlpack_device: tuple[int, int] = (0, 0)
    records: bool = False
    """Whether a program needs no compiling for sizes of its symbols, and is quicker where they come again."""

    def __init__(self, name: str) -> None:
        self.name = DeviceName(name)
        self.ledger = Ledger()
        self.limit: int | None = None  # bytes that may be in use; None: all that the device has
        self._copies: WeakValueDictionary[Any, DeviceArray] = WeakValueDictionary()
        HOMES.append(self)

    @abstractmethod
    def empty(self, dtype: np.dtype[Any], shape: Sequence[int], who: str = _GENERAL) -> DeviceArray:
        """An array whose elements do not matter."""

    @abstractmethod
    def upload(self, array: np.ndarray, who: str = _GENERAL) -> DeviceArray:
        """A copy of a host array, which may change once this returns."""

    @abstractmethod
    def download(self, x: DeviceArray, out: np.ndarray | None = None) -> np.ndarray:
        """A copy on the host, or in an array that is contiguous and of the same type."""

    @abstractmethod
    def copied(self, x: DeviceArray) -> DeviceArray: ...

    @abstractmethod
    def assign(self, target: DeviceArray, source: DeviceArray) -> None:
        """Make the elements of an array those of another of its type."""

    @abstractmethod
    def front(self, x: DeviceArray, shape: tuple[int, ...]) -> DeviceArray: ...

    @abstractmethod
    def wait(self) -> None:
        """Until all that was asked for is done."""

    def write(self, x: DeviceArray, array: np.ndarray) -> None:
        """Make the elements of an array those of one on the host, of its type."""
        self.assign(x, self.upload(array))

    def zeros(self, dtype: np.dtype[Any], shape: Sequence[int], who: str = _GENERAL) -> DeviceArray:
        return self.upload(np.zeros(shape, dtype), who)

    def later(self, x: DeviceArray) -> Callable[[], np.ndarray]:
        """What an array holds after all that was asked for until now, as a call: where it can, only that one waits."""
        found = self.download(x)
        return lambda: found

    def shared(self, array: np.ndarray, who: str = _GENERAL) -> DeviceArray:
        """A copy of an array that does not change: one for all who ask, while somebody has it."""
        key = (array.__array_interface__["data"][0], array.dtype.str, array.dtype.name, array.shape)
        with self.ledger.lock:
            found = self._copies.get(key)
            if found is None:
                found = self.upload(array, who)
                found.source = array  # its address is nobody else's while the copy lives
                self._copies[key] = found
        return found

    def adopt(self, x: Any) -> DeviceArray | None:
        """The array of another library without a copy, where it is in this memory; None where it is not."""
        return None

    def dlpack(self, x: DeviceArray, stream: Any, options: dict[str, Any]) -> Any:
        raise BufferTypeError(
            f"{self.name} has no DLPack: its memory is not shared with other libraries", code="D402", place=here(),
            fix="x.to('cpu')",
        )  # fmt: skip

    def cuda_interface(self, x: DeviceArray) -> dict[str, Any]:
        raise AttributeError(f"memory of {self.name} is not CUDA memory")

    def before(self, stream: int) -> None:  # noqa: B027 - most memory has no streams
        """What comes next on another library's stream waits for what was asked for here."""

    # about it

    @property
    def cached(self) -> int:
        return 0

    def total_bytes(self) -> int | None:
        """What the device has; None where it does not say."""
        return None

    def memory(self) -> MemoryUse:
        drop_refused_capsules()
        with self.ledger.lock:
            self.sweep()
            holders = dict(self.ledger.by.most_common())
            return MemoryUse(
                self.name, self.ledger.in_use, self.ledger.peak, self.cached, self.limit or self.total_bytes(), holders
            )

    def check_room(self, size: int, who: str) -> None:
        """Refuse what would be more than may be in use; the ledger's lock is held."""
        if self.limit is not None and self.ledger.in_use + size > self.limit:
            raise self.short(size, who, f"the limit is {self.limit:,}")

    def short(self, size: int, who: str, reason: str) -> OutOfMemoryError:
        """The error for memory that is not there, with those who hold most."""
        most = ", ".join(f"{name} {held:,}" for name, held in self.ledger.by.most_common(3))
        held = f"{self.ledger.in_use:,} bytes are in use" + (f": {most}" if most else "")
        return OutOfMemoryError(f"{size:,} bytes for {who!r} on {str(self.name)!r}: {reason}; {held}", place=here())

    def sweep(self) -> None:
        """Take back what has ended; the ledger's lock is held."""
        self.ledger.drain()
