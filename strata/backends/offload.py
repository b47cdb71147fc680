"""Plans on a device with its own memory: uploads, launches and downloads in schedule order.

A device is given by a `DeviceDriver`; everything that is not about one device is here. Parameters and constants are
uploaded once. Inputs go up, results come down, and every other value takes a buffer of the pool from the step that
makes it to the last one that reads it. Ops that the device does not take run by their NumPy meaning in between: what
they read comes down and what they make goes up only where somebody on the other side asks for it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import numpy as np

from strata.backends.base import Arrays, Backend, Executable, Tell, memory_errors
from strata.core import Dim, Table, TensorType, new_lock, substitute
from strata.errors import OutOfMemoryError, StrataError
from strata.kernel import Buffer, Kernel, show_kernel
from strata.lir import Lir, Step

KEPT_BYTES = 1 << 30  # that a pool holds for later runs
_STEPS = 8  # sizes of the pool between one power of two and the next
_KEPT = ("param", "constant", "weight")  # roles of buffers whose values stay from run to run


class Launchable:
    """A kernel that a driver can launch, and the buffers that it needs beside those of the kernel."""

    def __init__(self, kernel: Kernel, between: Sequence[Buffer] = ()) -> None:
        self.kernel, self.between = kernel, between

    def scratch(self, sizes: Mapping[str, int]) -> list[int]:
        """Bytes of the buffers beside those of the kernel, for sizes of the symbols."""
        return [number(b.type.nbytes, sizes) for b in self.between]

    def named(self, buffers: Sequence[Any]) -> dict[str, Any]:
        """The buffers of a launch, by name."""
        return dict(zip((b.name for b in (*self.kernel.buffers, *self.between)), buffers, strict=True))


def number(dim: Dim, sizes: Mapping[str, int]) -> int:
    value = substitute(dim, sizes)
    assert isinstance(value, int), f"size {dim} is known when a step runs"
    return value


class DeviceDriver(ABC):
    """What is asked of a device. Launches, writes and copies take effect in the order of the calls."""

    in_place: bool = False
    """Whether a kernel may write the buffer that it reads, element by element."""

    def __init__(self) -> None:
        self.lock: AbstractContextManager[Any] = new_lock()  # held by whoever uses the device: one run at a time
        self._made: Table[str, Any] = Table("device kernels")

    def made(self, kernel: Kernel) -> Any:
        """What `make` made of a kernel of the same text."""
        return self._made.get_or_make(show_kernel(kernel), lambda: self.make(kernel))

    @abstractmethod
    def allocate(self, size: int) -> Any:
        """A buffer of at least so many bytes; OutOfMemoryError where there is no room for it."""

    @abstractmethod
    def release(self, buffer: Any) -> None:
        """Give up a buffer: launches that use it may still be under way."""

    @abstractmethod
    def write(self, buffer: Any, array: np.ndarray) -> None:
        """Copy a contiguous array to the start of a buffer. The array may change once this returns."""

    @abstractmethod
    def read(self, buffer: Any, array: np.ndarray) -> None:
        """Fill a contiguous array from the start of a buffer, when all that was asked for before is done."""

    @abstractmethod
    def copy(self, source: Any, target: Any, size: int) -> None:
        """Bytes from the start of one buffer to the start of another."""

    @abstractmethod
    def make(self, kernel: Kernel) -> Any:
        """A Launchable."""

    @abstractmethod
    def launch(self, made: Any, buffers: Sequence[Any], sizes: Mapping[str, int]) -> None:
        """Run a kernel on its inputs, its outputs and its scratch, in this order."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all that was launched; what went wrong there is raised here."""


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


def room_for(size: int) -> int:
    """A size rounded up, so that values of about one size can use each other's buffers."""
    if size <= 256:
        return 256
    step = 1 << max(0, (size - 1).bit_length() - 1 - (_STEPS.bit_length() - 1))
    return -(-size // step) * step


class OffloadBackend(Backend):
    """Plans over a driver."""

    def __init__(self, driver: DeviceDriver) -> None:
        self.driver, self.pool = driver, BufferPool(driver)

    def launchable(self, step: Step) -> Launchable | None:
        """What runs a step of one op, over its inputs and outputs; None where that is the host."""
        return None

    def compile(self, lir: Lir) -> OffloadExecutable:
        return OffloadExecutable(lir, self)


class OffloadExecutable(Executable):
    """A plan on a device. Runs take turns, as the device does them in one order anyway."""

    observes_steps = True

    def __init__(self, lir: Lir, backend: OffloadBackend) -> None:
        driver = backend.driver
        self.driver, self.pool = driver, backend.pool
        super().__init__(lir, driver.lock)
        with driver.lock:
            kernels = {name: driver.made(kernel) for name, kernel in lir.kernels.items()}
            self.made: list[Any] = [
                kernels[s.name] if s.kernel is not None else backend.launchable(s) for s in lir.schedule
            ]
        self._steps = [(at, s) for at, s in enumerate(lir.schedule) if s.phase != "prologue"]
        self._on_device: dict[str, Any] = {}  # of the values that stay, uploaded when a step first asks
        self._shared: set[str] = set()  # of these, those that a clone reads, too
        self._homes = _homes(lir, driver.in_place)
        self._last = _last_reads(lir)

    def is_host_step(self, at: int, step: Step) -> bool:
        return self.made[at] is None

    def hold(self, name: str, array: np.ndarray) -> None:
        self._drop(name)
        super().hold(name, array)

    def forget(self) -> None:
        super().forget()
        for buffer in self.lir.buffers:
            if buffer.role == "weight":
                self._drop(buffer.name)

    def _drop(self, name: str) -> None:
        """Give up a value that stayed; a buffer that is shared goes with the last that knows it."""
        self.values.pop(name, None)
        buffer = self._on_device.pop(name, None)
        if buffer is not None and name not in self._shared:
            self.driver.release(buffer)
        self._shared.discard(name)

    def part(self, other: Self) -> None:
        """Kernels and what is uploaded are shared."""
        super().part(other)
        self._on_device = dict(other._on_device)
        other._shared = other._shared | other._on_device.keys()
        self._shared = set(other._shared)

    def run(self, inputs: Arrays, outputs: Arrays, binding: Mapping[str, int], threads: int | None = None) -> None:
        self.run_observed(inputs, outputs, binding, threads, None)

    def run_observed(
        self, inputs: Arrays, outputs: Arrays, binding: Mapping[str, int], threads: int | None, tell: Tell | None
    ) -> None:
        """Where somebody is told, each step is waited for."""
        with self.driver.lock, memory_errors():
            if not self.is_prepared:
                self._prepare()
            arrays = {buffer: a for (_, buffer), a in zip(self.lir.io.inputs, inputs, strict=True)}
            run = _Run(self, binding, arrays)
            try:
                for at, step in self._steps:
                    begin = time.perf_counter_ns()
                    run.step(at, step)
                    if tell is not None:
                        self.driver.finish()
                        tell(at, begin, time.perf_counter_ns(), [], run.array)
                    for name in self._last.get(at, ()):
                        run.drop(name)
                run.fetch(self.lir.io.outputs, outputs)
                self.driver.finish()
            finally:
                run.close()

    def _prepare(self) -> None:
        """Compute what depends on parameters only; it stays on the device."""
        run = _Run(self, {}, {})
        try:
            for at, step in self.prologue:
                run.step(at, step)
            for b in self.lir.buffers:
                if b.role == "weight":
                    run.keep(b.name)
        finally:
            run.close()
        self.is_prepared = True


class _Run:
    """The values of one run: on the host, on the device, or on both."""

    def __init__(
        self, executable: OffloadExecutable, binding: Mapping[str, int], inputs: dict[str, np.ndarray]
    ) -> None:
        self.owner, self.binding = executable, binding
        self.lir, self.driver, self.pool = executable.lir, executable.driver, executable.pool
        self.hosted = executable.values | inputs
        self.devices: dict[str, Any] = dict(executable._on_device)
        self.taken: dict[str, tuple[Any, int]] = {}  # buffers of the pool, by the name whose memory it is
        self.users: Counter[str] = Counter()  # names that live in each of them

    def step(self, at: int, step: Step) -> None:
        try:
            if self.owner.made[at] is None:
                self._on_host(step)
            else:
                self._on_device(step, self.owner.made[at])
        except StrataError as error:
            if error.place is None and step.nodes:
                error.place = step.nodes[0].origin.place
            raise

    def _on_host(self, step: Step) -> None:
        results = self.owner.run_host(step, [self.array(name) for name in step.inputs], self.binding)
        for name, result in zip(step.outputs, results, strict=True):
            self.hosted[name] = np.ascontiguousarray(result).reshape(np.shape(result))

    def _on_device(self, step: Step, made: Any) -> None:
        reads = [self.buffer(name) for name in step.inputs]
        starts = dict(step.updates)
        writes = []
        for name in step.outputs:
            source = self.buffer(starts[name]) if name in starts else None
            target = self._take(name)
            if source is not None and source is not target:
                self.driver.copy(source, target, self._bytes(name))
            writes.append(target)
        scratch = [self.pool.take(size) for size in made.scratch(self.binding)]
        try:
            self.driver.launch(made, [*reads, *writes, *(buffer for buffer, _ in scratch)], self.binding)
        finally:
            for buffer, room in scratch:
                self.pool.give(buffer, room)

    def _kind(self, name: str) -> TensorType:
        return self.lir.buffer(name).type.bind(self.binding)

    def _bytes(self, name: str) -> int:
        return number(self.lir.buffer(name).type.nbytes, self.binding)

    def buffer(self, name: str) -> Any:
        """The value on the device; it goes up if it is not there."""
        found = self.devices.get(name)
        if found is not None:
            return found
        array = self.hosted[name]
        if self.lir.buffer(name).role in _KEPT:
            made = self.owner._on_device.get(name)
            if made is None:
                made = self.driver.allocate(room_for(array.nbytes))
                self.driver.write(made, array)
                self.owner._on_device[name] = made
            self.devices[name] = made
            return made
        made = self._take(name)
        self.driver.write(made, array)
        return made

    def _take(self, name: str) -> Any:
        """Memory for a value that is about to be made."""
        home = self.owner._homes.get(name, name)
        if home not in self.taken:
            self.taken[home] = self.pool.take(max(self._bytes(name), self._bytes(home)))
        self.users[home] += 1
        self.devices[name] = self.taken[home][0]
        return self.devices[name]

    def array(self, name: str) -> np.ndarray:
        """The value on the host; it comes down if it is not there."""
        if name not in self.hosted:
            kind = self._kind(name)
            made = np.empty(kind.static_shape, kind.dtype.np)
            self.driver.read(self.devices[name], made)
            self.hosted[name] = made
        return self.hosted[name]

    def fetch(self, names: Sequence[str], arrays: Arrays) -> None:
        """Put results where the caller wants them."""
        pairs = list(zip(names, arrays, strict=True))
        here = [(name, array) for name, array in pairs if name in self.hosted]
        self.owner.fill([array for _, array in here], [self.hosted[name] for name, _ in here])
        for name, array in pairs:
            if name not in self.hosted:
                self.driver.read(self.devices[name], array)

    def drop(self, name: str) -> None:
        """Nothing reads the value any more."""
        self.hosted.pop(name, None)
        if name in self.devices:
            del self.devices[name]
            home = self.owner._homes.get(name, name)
            self.users[home] -= 1
            if not self.users[home]:
                self.pool.give(*self.taken.pop(home))

    def keep(self, name: str) -> None:
        """Leave a value to the runs that follow."""
        home = self.owner._homes.get(name, name)
        if home in self.taken:
            self.owner._on_device[name] = self.taken.pop(home)[0]
        else:
            self.owner.values[name] = self.hosted[name]

    def close(self) -> None:
        for buffer, room in self.taken.values():
            self.pool.give(buffer, room)
        self.taken.clear()


def _homes(lir: Lir, in_place: bool) -> dict[str, str]:
    """Whose memory a value takes over, where that is not its own: updates change it where it is.

    A device whose kernels cannot read and write one buffer still does updates in place, which do not read what they
    change."""
    found: dict[str, str] = {}
    for step in lir.schedule:
        reads = {found.get(name, name) for name in step.inputs}
        for name in step.outputs:
            base = lir.buffer(name).alias
            taken = {found.get(other, other) for other in step.outputs if other != name and other in found}
            if base is None or base in taken or (not in_place and base in reads):
                continue
            source = dict(step.updates).get(name)
            if in_place or (source is not None and found.get(source, source) == base):
                found[name] = base
    return found


def _last_reads(lir: Lir) -> dict[int, list[str]]:
    """Values whose last reader is a step, or which it makes for nobody: buffers of the arena and of inputs."""
    last: dict[str, int] = {}
    for at, step in enumerate(lir.schedule):
        for name in (*step.read_buffers, *step.outputs):
            last[name] = at
    found: dict[int, list[str]] = {}
    results = set(lir.io.outputs)
    for name, at in last.items():
        if lir.buffer(name).role in ("scratch", "input") and name not in results:
            found.setdefault(at, []).append(name)
    return found
