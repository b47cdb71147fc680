"""The memory of a device over its driver: a pool of buffers, and arrays in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from strata.backends.base import memory_errors
from strata.backends.driver import DeviceDriver
from strata.backends.recipe import room_for
from strata.backends.resident import DeviceArray, DeviceBlock, DeviceHome
from strata.core import drop_refused_capsules
from strata.errors import OutOfMemoryError

_FIRST_ZEROS = 1 << 20  # bytes that the host writes of an array of zeros
KEPT_BYTES = 1 << 30  # that a pool holds for later runs


class BufferPool:
    """Buffers that wait for the next step that needs one of their size."""

    def __init__(self, driver: DeviceDriver, kept_bytes: int = KEPT_BYTES) -> None:
        self.driver = driver
        self._kept_bytes = kept_bytes
        self._free: dict[int, list[Any]] = {}
        self._free_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    def take(self, size: int) -> tuple[Any, int]:
        """A buffer and the bytes that it has, to be given back with it."""
        room = room_for(size)
        free = self._free.get(room)
        if free:
            self._free_bytes -= room
            return free.pop(), room
        try:
            return self.driver.allocate(room), room
        except OutOfMemoryError:
            if not self._free_bytes:
                raise
            self.clear()
            return self.driver.allocate(room), room

    def give(self, buffer: Any, room: int) -> None:
        if self._free_bytes + room > self._kept_bytes:
            self.driver.release(buffer)
            return
        self._free.setdefault(room, []).append(buffer)
        self._free_bytes += room

    def clear(self) -> None:
        """Release what waits."""
        for buffers in self._free.values():
            for buffer in buffers:
                self.driver.release(buffer)
        self._free.clear()
        self._free_bytes = 0


class OffloadHome(DeviceHome):
    """The memory of a device over its driver: buffers of a pool, which come back when the last array over them goes."""

    records = True

    def __init__(self, name: str, driver: DeviceDriver) -> None:
        super().__init__(name)
        self.driver, self.pool = driver, BufferPool(driver)
        # Buffers that somebody has, by identity. The cycle collector may find a block and its buffer at once, and ends
        # both: a buffer that is known here is not for it to end.
        self._out: dict[int, Any] = {}
        self._noted: dict[
            Any, tuple[Any, DeviceArray]
        ] = {}  # by place, so that a program that runs again is in it once
        self.ledger.lock = driver.lock
        self.dlpack_device = driver.dlpack_device

    @property
    def cached(self) -> int:
        return self.pool.free_bytes

    def total_bytes(self) -> int | None:
        return self.driver.total_bytes()

    def sweep(self) -> None:
        if self.ledger.returned:
            for buffer, room in self.ledger.drain():
                self._pooled(buffer, room)

    def take(self, size: int, who: str) -> tuple[Any, int]:
        """A buffer for somebody and its bytes; the driver's lock is held."""
        self.sweep()
        self.check_room(room_for(size), who)
        try:
            buffer, room = self._taken(size)
        except OutOfMemoryError as error:
            raise self.short(size, who, error.summary) from error
        self._out[id(buffer)] = buffer
        self.ledger.add(room, who)
        return buffer, room

    def _taken(self, size: int) -> tuple[Any, int]:
        try:
            return self.pool.take(size)
        except OutOfMemoryError:
            if not drop_refused_capsules():
                raise
            self.sweep()
            return self.pool.take(size)

    def put_back(self, buffer: Any, room: int, who: str) -> None:
        """Take back what has ended; the driver's lock is held."""
        self.ledger.ended(room, who)
        self._pooled(buffer, room)

    def _pooled(self, buffer: Any, room: int) -> None:
        del self._out[id(buffer)]
        self.pool.give(buffer, room)

    def give(self, buffer: Any, room: int, who: str) -> None:
        self.ledger.returned.append((buffer, room, who))

    def empty(self, dtype: np.dtype[Any], shape: Sequence[int], who: str = "tensors") -> DeviceArray:
        with self.driver.lock:
            buffer, room = self.take(prod(shape) * dtype.itemsize, who)
            block = DeviceBlock(buffer, room, who, self.ledger.returned.append)
            return DeviceArray(self, dtype, tuple(shape), self.driver.place(buffer), block)

    def upload(self, array: np.ndarray, who: str = "tensors") -> DeviceArray:
        with self.driver.lock, memory_errors():
            made = self.empty(array.dtype, array.shape, who)
            self.driver.write(made.place, np.ascontiguousarray(array))
            return made

    def write(self, x: DeviceArray, array: np.ndarray) -> None:
        with self.driver.lock:
            self.driver.write(x.place, np.ascontiguousarray(array))

    def zeros(self, dtype: np.dtype[Any], shape: Sequence[int], who: str = "tensors") -> DeviceArray:
        """Filled on the device, by copies that double what is done."""
        if not self.driver.has_arena or prod(shape) * dtype.itemsize <= _FIRST_ZEROS:
            return super().zeros(dtype, shape, who)
        with self.driver.lock, memory_errors():
            made = self.empty(dtype, shape, who)
            self.driver.write(made.place, np.zeros(_FIRST_ZEROS, np.uint8))
            done, size = _FIRST_ZEROS, made.nbytes
            while done < size:
                step = min(done, size - done)
                self.driver.copy(made.place, self.driver.part(made.place, done), step)
                done += step
            return made

    def later(self, x: DeviceArray) -> Callable[[], np.ndarray]:
        made = np.empty(x.shape, x.dtype)
        with self.driver.lock:
            wait = self.driver.read_later(x.place, made)
            noted = [(check, words, *self._noted_later(words)) for check, words in self._taken_notes()]

        def found() -> np.ndarray:
            wait()
            for check, words, numbers, known in noted:
                known()
                if numbers[0]:
                    self.write(words, np.zeros_like(numbers))
                    raise check.error(numbers)
            return made

        return found

    def _noted_later(self, words: DeviceArray) -> tuple[np.ndarray, Callable[[], None]]:
        numbers = np.empty(words.shape, words.dtype)
        return numbers, self.driver.read_later(words.place, numbers)

    def download(self, x: DeviceArray, out: np.ndarray | None = None) -> np.ndarray:
        made = np.empty(x.shape, x.dtype) if out is None else out
        with self.driver.lock:
            self.driver.read(x.place, made)
            if self._noted:
                self.raise_noted(self._taken_notes())
        return made

    # conditions that a run does not wait for

    def expect(self, noted: Iterable[tuple[Any, DeviceArray]]) -> None:
        """Look at memory in which a run notes failures when something is next read; the driver's lock is held."""
        for check, words in noted:
            self._noted[words.place] = (check, words)

    def _taken_notes(self) -> list[tuple[Any, DeviceArray]]:
        found, self._noted = list(self._noted.values()), {}
        return found

    def raise_noted(self, noted: Iterable[tuple[Any, DeviceArray]]) -> None:
        """Raise the first error that was noted, and forget all of them; the driver's lock is held."""
        failed = []
        for check, words in noted:
            numbers = np.empty(words.shape, words.dtype)
            self.driver.read(words.place, numbers)
            if numbers[0]:
                self.driver.write(words.place, np.zeros_like(numbers))
                failed.append(check.error(numbers))
        if failed:
            raise failed[0]

    def copied(self, x: DeviceArray) -> DeviceArray:
        with self.driver.lock:
            made = self.empty(x.dtype, x.shape)
            self.driver.copy(x.place, made.place, x.nbytes)
            self.driver.submit()
            return made

    def assign(self, target: DeviceArray, source: DeviceArray) -> None:
        with self.driver.lock:
            self.driver.copy(source.place, target.place, target.nbytes)
            self.driver.submit()

    def front(self, x: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
        return DeviceArray(self, x.dtype, shape, x.place, x.block)

    def adopt(self, x: Any) -> DeviceArray | None:
        with self.driver.lock:
            found = self.driver.adopt(x)
        return None if found is None else DeviceArray(self, found[1], found[2], found[0], found[3])

    def dlpack(self, x: DeviceArray, stream: Any, options: dict[str, Any]) -> Any:
        with self.driver.lock:
            capsule = self.driver.dlpack(x, stream, options)
        return super().dlpack(x, stream, options) if capsule is None else capsule

    def cuda_interface(self, x: DeviceArray) -> dict[str, Any]:
        found = self.driver.cuda_interface(x)
        return super().cuda_interface(x) if found is None else found

    def before(self, stream: int) -> None:
        with self.driver.lock:
            self.driver.before(stream)

    def wait(self) -> None:
        with self.driver.lock:
            self.driver.finish()
            self.raise_noted(self._taken_notes())
