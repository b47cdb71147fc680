"""What a device with its own memory brings: buffers, copies, kernels and their launches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import numpy as np

from strata.backends.recipe import Action, Copy, Launch, Operand, number
from strata.backends.resident import DeviceArray
from strata.core import Table, new_rlock
from strata.kernel import Buffer, Kernel, show_kernel


class Launchable:
    """A kernel that a driver can launch, and the buffers that it needs beside those of the kernel."""

    writes_over: bool = False
    """Whether it may write an output where it reads an input at the same places."""
    constants: Mapping[str, np.ndarray] = MappingProxyType({})
    """What it reads beside its inputs, by its own names."""
    checks: Mapping[str, Any] = MappingProxyType({})
    """Of these, words that are not 0 after a run that fails, each with a `RunCheck`."""

    def __init__(self, kernel: Kernel, between: Sequence[Buffer] = ()) -> None:
        self.kernel, self.between = kernel, between

    def load(self) -> None:
        """Be ready to be launched: what cannot be compiled is told now."""

    def at(self, sizes: Mapping[str, int]) -> Launchable:
        """What is launched for sizes of the symbols."""
        return self

    def actions(
        self, operands: tuple[Operand, ...], sizes: Mapping[str, int], kept: Mapping[str, Operand]
    ) -> list[Action]:
        """What is done on inputs, outputs and scratch; `kept` says where its constants are."""
        return [Launch(self, operands, sizes)]

    def guarded(self) -> Launchable:
        """The same kernel with one more input before the others, a flag: where it is not set, nothing is done."""
        raise NotImplementedError

    def scratch(self, sizes: Mapping[str, int]) -> Sequence[int]:
        """Bytes of the buffers beside those of the kernel, for sizes of the symbols."""
        return [number(b.type.nbytes, sizes) for b in self.between]

    def named(self, buffers: Sequence[Any]) -> dict[str, Any]:
        """The buffers of a launch, by name."""
        return dict(zip((b.name for b in (*self.kernel.buffers, *self.between)), buffers, strict=True))


class OpenStep(Launchable):
    """A step whose kernels are made when its sizes are known; those of the last few sizes are kept."""

    def __init__(self, make: Callable[[Mapping[str, int]], Launchable]) -> None:
        self._make = make
        self._made: Table[Any, Launchable] = Table("open device steps")

    def at(self, sizes: Mapping[str, int]) -> Launchable:
        return self._made.get_or_make(tuple(sorted(sizes.items())), lambda: self._make(sizes))


class DeviceDriver(ABC):
    """What is asked of a device. Launches, writes and copies take effect in the order of the calls."""

    in_place: bool = False
    """Whether a kernel may write the buffer that it reads, element by element."""
    has_parts: bool = False
    """Whether kernels take memory inside of a buffer, from a multiple of `alignment` bytes on."""
    alignment: int = 16
    has_arena: bool = False
    """Whether scratch memory is one buffer with planned offsets, in which memory is also copied."""
    has_guards: bool = False
    """Whether kernels can be guarded by a flag in memory: branches and loops then run without values coming down."""

    def __init__(self) -> None:
        self.lock: AbstractContextManager[Any] = new_rlock()  # held by whoever uses the device: one run at a time
        self._made: Table[str, Any] = Table("device kernels")

    def made(self, kernel: Kernel) -> Any:
        """What `make` made of a kernel of the same text."""
        return self._made.get_or_make(show_kernel(kernel), lambda: self.make(kernel))

    @abstractmethod
    def allocate(self, size: int) -> Any:
        """A buffer of at least this many bytes; OutOfMemoryError where there is no room for it."""

    @abstractmethod
    def release(self, buffer: Any) -> None:
        """Give up a buffer: launches that use it may still be under way."""

    def place(self, buffer: Any) -> Any:
        """What all calls below take for the memory of a buffer."""
        return buffer

    def part(self, place: Any, offset: int) -> Any:
        """Memory from some bytes on, for a device that has parts."""
        assert not offset
        return place

    @abstractmethod
    def write(self, buffer: Any, array: np.ndarray) -> None:
        """Copy a contiguous array to the start of a buffer. The array may change once this returns."""

    @abstractmethod
    def read(self, buffer: Any, array: np.ndarray) -> None:
        """Fill a contiguous array from the start of a buffer, when all that was asked for before is done."""

    def read_later(self, buffer: Any, array: np.ndarray) -> Callable[[], None]:
        """As `read`, of the contents after everything asked for until now; the call that it returns waits for that."""
        self.read(buffer, array)
        return lambda: None

    @abstractmethod
    def copy(self, source: Any, target: Any, size: int) -> None:
        """Bytes from the start of one buffer to the start of another."""

    @abstractmethod
    def make(self, kernel: Kernel) -> Any:
        """A Launchable."""

    @abstractmethod
    def launch(self, made: Any, buffers: Sequence[Any], sizes: Mapping[str, int]) -> None:
        """Run a kernel on its inputs, its outputs and its scratch, in this order."""

    def record(self, actions: Sequence[Launch | Copy]) -> Any:
        """Whatever makes `play` quicker for actions that come again and again."""
        return actions

    def play(self, recorded: Any, places: Sequence[Any]) -> None:
        """Do actions in their order, on numbered memory."""
        for action in recorded:
            match action:
                case Launch():
                    operands = [self.part(places[base], offset) for base, offset in action.operands]
                    self.launch(action.made, operands, action.sizes)
                case Copy():
                    source, target = (self.part(places[b], offset) for b, offset in (action.source, action.target))
                    if source is not target:
                        self.copy(source, target, action.size)

    def player(self, recorded: Any) -> Callable[[Sequence[Any]], None]:
        """`play` of what was recorded, as quick as it can be."""
        return lambda places: self.play(recorded, places)

    def submit(self) -> None:  # noqa: B027 - most devices begin at once
        """Let the device begin with what was asked for, without waiting."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for everything that was launched, and raise what went wrong there."""

    # memory that others share

    def adopt(self, x: Any) -> tuple[Any, np.dtype[Any], tuple[int, ...], Any] | None:
        """Place, dtype, shape and owner of another library's array that is in this memory; None where it is not."""
        return None

    dlpack_device: tuple[int, int] = (0, 0)

    def before(self, stream: int) -> None:  # noqa: B027 - most devices have no streams
        """What comes next on another library's stream waits for what was asked for here."""

    def dlpack(self, x: DeviceArray, stream: Any, options: Mapping[str, Any]) -> Any:
        """A DLPack capsule of an array that comes after all that was asked for; None where there is no DLPack."""
        return None

    def cuda_interface(self, x: DeviceArray) -> dict[str, Any] | None:
        """What `__cuda_array_interface__` says; None where the memory is not CUDA's."""
        return None

    def total_bytes(self) -> int | None:
        """What the device has; None where there is no saying."""
        return None
