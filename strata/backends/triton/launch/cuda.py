"""NVIDIA GPUs through `cuda.core` (0.5 and later): the only module that uses it.

Memory comes from the device's stream-ordered pool. Everything happens on the default stream, which is also that of
PyTorch and CuPy unless they are told otherwise: arrays go back and forth without waiting. A launch is a Triton binary
with its buffers, sizes and the memory that Triton may ask for. Nothing is imported before a device is asked for.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from strata.backends.driver import DeviceDriver
from strata.backends.recipe import Copy, Launch, number
from strata.backends.resident import DeviceArray
from strata.backends.triton.codegen.grid import MOST
from strata.backends.triton.codegen.render import Rendered, TritonProgram, render
from strata.backends.triton.launch.calls import DriverCalls, PreparedLaunch
from strata.backends.triton.launch.compile import INSTALL, Binary, compile_program, is_installed
from strata.backends.triton.launch.launchable import LaunchableKernel
from strata.backends.triton.launch.launches import LaunchSequence
from strata.backends.triton.target import Gpu
from strata.core import as_dtype, device_capsule, foreign_memory, here
from strata.errors import DeviceError, OutOfMemoryError, RunError, ShapeError
from strata.kernel import Kernel

NEEDS = f"{INSTALL}, on a machine with an NVIDIA GPU and its driver"
_PLAIN_SHARED = 48 << 10  # bytes of shared memory that a kernel may use without asking
_MOST_PROGRAMS = (1 << 31) - 1, MOST, MOST  # of a grid along its dimensions
_CUDA = 2  # of DLPack's kinds of devices
_STAGED = range((32 << 10) + 1, (64 << 20) + 1)  # bytes of an array that goes up through pinned memory, without a wait
_PIECE = 4 << 20  # bytes of it at a time
_MOST_PINNED = 256 << 20  # bytes; whoever needs more waits for what is under way
_ALIGNED = 16  # bytes that addresses are multiples of, as kernels are told

Compiler = Callable[[TritonProgram, Gpu], Binary]


def count() -> int:
    """How many GPUs there are; 0 where a package, the driver or a GPU is missing."""
    try:
        return len(_core().Device.get_all_devices()) if is_installed() else 0
    except Exception:  # noqa: BLE001 - whatever a broken driver raises, there is no GPU to use
        return 0


class CudaDriver(DeviceDriver):
    """One GPU as plans use it. Places are addresses."""

    has_parts = True
    has_arena = True
    has_guards = True

    def __init__(
        self, number: int = 0, *, core: Any = None, calls: Any = None, compiler: Compiler = compile_program
    ) -> None:
        super().__init__()
        self._core = core or _core(number)
        if core is None and not is_installed():
            raise _missing(number, "there is no triton package")
        self.device, self.stream = _opened(self._core, number)
        major, minor = self.device.compute_capability
        self.gpu = Gpu.named(f"sm_{10 * major + minor}")
        self.calls = calls or DriverCalls(overlaps=self.gpu.overlaps)
        self._context = self.calls.context()
        self._handle = int(self.stream.handle)
        self.dlpack_device = (_CUDA, int(self.device.device_id))
        self.replays = 0
        self._compiler = compiler
        self._foreign: list[Any] = []  # owners of other libraries' memory that was used since the last event
        self._used: deque[tuple[int, list[Any]]] = deque()  # and before, with the event that ends their use
        self._ended: deque[int] = deque()  # streams on which others used memory that has come back
        self._events: list[int] = []
        self._loaded: WeakValueDictionary[Any, _Entry] = WeakValueDictionary()
        self._staging = _Staging(self)
        self._torch_types: dict[Any, np.dtype[Any]] = {}
        self._is_alone = len(self._core.Device.get_all_devices()) == 1  # nobody makes another GPU current
        self._current = _Current()

    @property
    def description(self) -> str:
        """The GPU, its architecture and the driver."""
        return f"{self.device.name}, {self.gpu}, CUDA {'.'.join(map(str, self.calls.version()))}"

    # memory

    def allocate(self, size: int) -> Any:
        with self._asking(f"{size} bytes on {self.device.name}"):
            return _Memory(self.device.memory_resource.allocate(size, stream=self.stream))

    def release(self, buffer: _Memory) -> None:
        with self._asking("giving memory back"):
            self._after_ended()
            buffer.buffer.close(self.stream)  # when the stream is there

    def place(self, buffer: _Memory) -> int:
        return buffer.address

    def part(self, place: int, offset: int) -> int:
        return place + offset

    def write(self, buffer: int, array: np.ndarray) -> None:
        """From pageable memory: the driver has copied the array before the call returns."""
        if not array.nbytes:
            return
        with self._asking("copying to the GPU"):
            self._after_ended()
            if array.nbytes in _STAGED:
                for at in range(0, array.nbytes, _PIECE):
                    self._write_staged(buffer + at, array.ctypes.data + at, min(_PIECE, array.nbytes - at))
                return
            source = self._core.Buffer.from_handle(array.ctypes.data, array.nbytes, owner=array)
            source.copy_to(self._memory(buffer, array.nbytes), stream=self.stream)
            if self.calls.is_known(array.ctypes.data):  # pinned by another library: the driver reads it later
                self.stream.sync()

    def _write_staged(self, target: int, source: int, size: int) -> None:
        stage = self._staging.take(size)
        ctypes.memmove(stage.address, source, size)
        self.calls.up(stage.address, target, size, self._handle)
        stage.event = self._event()
        self.calls.record(stage.event, self._handle)
        self._staging.give(stage)

    def read(self, buffer: int, array: np.ndarray) -> None:
        if not array.nbytes:
            return
        with self._asking("copying from the GPU"):
            self._after_ended()
            target = self._core.Buffer.from_handle(array.ctypes.data, array.nbytes, owner=array)
            self._memory(buffer, array.nbytes).copy_to(target, stream=self.stream)
            self.stream.sync()

    def read_later(self, buffer: int, array: np.ndarray) -> Callable[[], None]:
        """Through pinned memory: nothing waits before the call that this gives."""
        if not array.nbytes:
            return lambda: None
        with self._asking("copying from the GPU"):
            self._after_ended()
            stage = self._staging.take(array.nbytes)
            self.calls.down(buffer, stage.address, array.nbytes, self._handle)
            stage.event = self._event()
            self.calls.record(stage.event, self._handle)
        return _Download(self, stage, array)

    def copy(self, source: int, target: int, size: int) -> None:
        if size:
            with self._asking("copying on the GPU"):
                self._after_ended()
                self.calls.copy(source, target, size, self._handle)

    def _memory(self, place: int, size: int) -> Any:
        return self._core.Buffer.from_handle(place, size, owner=self)

    def total_bytes(self) -> int:
        with self._asking("memory"):
            return int(self.calls.free_and_total()[1])

    # arrays of others

    def adopt(self, x: Any) -> tuple[int, np.dtype[Any], tuple[int, ...], Any] | None:
        """Another library's array on this GPU: what that library has under way comes first."""
        if type(x).__module__.partition(".")[0] == "torch":
            return self._from_torch(x)
        where = getattr(x, "__dlpack_device__", None)
        if where is None:
            return self._from_interface(x)
        if tuple(map(int, where())) != self.dlpack_device:
            return None
        with self._asking("taking an array of another library"):
            found = foreign_memory(x, self._handle)
            if found is None:
                return None
            if not found.is_dense or found.address % _ALIGNED:
                return self._in_order(x)
        self._foreign.append(found.owner)
        return found.address, found.dtype, found.shape, found.owner

    def _from_torch(self, x: Any) -> tuple[int, np.dtype[Any], tuple[int, ...], Any] | None:
        """A tensor of PyTorch: what DLPack would say, in a tenth of the time."""
        place = x.device
        if place.type != "cuda" or place.index != self.dlpack_device[1]:
            return None
        dtype = self._torch_types.get(x.dtype)
        if dtype is None:
            dtype = self._torch_types[x.dtype] = as_dtype(str(x.dtype).removeprefix("torch.")).np
        address = x.data_ptr()
        if address % _ALIGNED or not x.is_contiguous() or x.is_conj() or x.is_neg():
            return self._from_torch(
                x.resolve_conj().resolve_neg().clone(memory_format=sys.modules["torch"].contiguous_format)
            )
        stream = sys.modules["torch"].cuda.current_stream(place.index).cuda_stream
        if stream:  # not the default one, which is ours
            self._after(stream)
            self._foreign.append(x)
        return address, dtype, tuple(x.shape), x

    def before(self, stream: int) -> None:
        """What comes next on another stream waits for what was asked for here."""
        if stream not in (0, self._handle):
            event = self._event()
            self.calls.record(event, self._handle)
            self.calls.wait(stream, event)
            self._events.append(event)

    def _in_order(self, x: Any) -> tuple[int, np.dtype[Any], tuple[int, ...], Any] | None:
        """A copy that CuPy itself makes, of an array that is not dense, or lies in the middle of words."""
        library = type(x).__module__.partition(".")[0]
        if library != "cupy":
            raise ShapeError(f"a {library} array is not contiguous", code="S190", place=here())
        return self.adopt(sys.modules["cupy"].array(x, order="C", copy=True))

    def _from_interface(self, x: Any) -> tuple[int, np.dtype[Any], tuple[int, ...], Any] | None:
        """An array that has `__cuda_array_interface__` only."""
        found = getattr(x, "__cuda_array_interface__", None)
        if found is None:
            return None
        if found.get("strides") is not None or found["data"][0] % _ALIGNED:
            raise ShapeError("an array of another library is not contiguous", code="S190", place=here())
        other = found.get("stream")
        if other not in (None, 1, self._handle):
            self._after(int(other))
        self._foreign.append(x)
        return int(found["data"][0]), np.dtype(found["typestr"]), tuple(found["shape"]), x

    def dlpack(self, x: DeviceArray, stream: Any, options: Mapping[str, Any]) -> Any:
        other = self._handle if stream in (None, 0, 1) else int(stream)
        with self._asking("giving an array to another library"):
            if other != -1:
                self.before(other)
        owner = _Lent(x, self, other) if other not in (-1, self._handle) else x
        return device_capsule(x.place, x.dtype, x.shape, self.dlpack_device, owner)

    def cuda_interface(self, x: DeviceArray) -> dict[str, Any]:
        return {
            "shape": x.shape, "typestr": x.dtype.str, "data": (x.place, False), "strides": None, "version": 3,
            "stream": self._handle,
        }  # fmt: skip

    def submit(self) -> None:
        """Memory of others is kept until what uses it is done."""
        if self._foreign:
            owners, self._foreign = self._foreign, []
            event = self._event()
            self.calls.record(event, self._handle)
            self._used.append((event, owners))
        while self._used and self.calls.is_done(self._used[0][0]):
            self._events.append(self._used.popleft()[0])

    def _event(self) -> int:
        return self._events.pop() if self._events else int(self.calls.event())

    def _after(self, other: int) -> None:
        """What comes on our stream waits for another stream."""
        event = self._event()
        try:
            self.calls.record(event, other)
            self.calls.wait(self._handle, event)
        finally:
            self._events.append(event)

    def _after_ended(self) -> None:
        """Memory that others used on streams of their own has come back: what comes next waits for those streams. It
        is for whoever holds the lock: nobody may launch between a stream that is taken here and the wait for it."""
        while self._ended:
            try:
                self._after(self._ended.popleft())
            except RunError:  # the stream is gone, while its work may be under way
                self.device.sync()

    # kernels

    def make(self, kernel: Kernel) -> _Loaded:
        return self.make_rendered(render(kernel, self.gpu))

    def make_rendered(self, rendered: Rendered) -> _Loaded:
        return _Loaded(rendered, self)

    def load(self, program: TritonProgram) -> _Entry:
        """A program on the GPU: one for all layers that have it, while one of them is there."""
        key = program.text(), program.name, program.schedule, program.buffers, program.sizes, program.grid
        found = self._loaded.get(key)
        if found is None:
            found = self._loaded[key] = self._load(program)
        return found

    def _load(self, program: TritonProgram) -> _Entry:
        binary = self._compiler(program, self.gpu)
        with self._asking(f"loading kernel {program.name}"):
            code = self._core.ObjectCode.from_cubin(binary.code)
            function = code.get_kernel(binary.entry)
            if binary.shared_bytes > _PLAIN_SHARED:
                self._allow_shared(function, binary.shared_bytes)
            return _Entry(code, self.calls.function(int(function.handle)), binary)

    def _allow_shared(self, function: Any, size: int) -> None:
        driver = importlib.import_module("cuda.bindings.driver")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, size, function.handle, self.device.device_id)
        if int(status):
            raise RunError(f"{self.device.name} has no {size} bytes of shared memory for a program", code="X140")

    def launch(self, made: _Loaded, buffers: Sequence[Any], sizes: Mapping[str, int]) -> None:
        action = Launch(made, tuple((i, 0) for i in range(len(buffers))), sizes)
        self.play(self.record([action]), buffers)

    def record(self, actions: Sequence[Launch | Copy]) -> LaunchSequence:
        made: list[PreparedLaunch | Copy] = []
        for action in actions:
            made += [action] if isinstance(action, Copy) else self._prepared(action)
        return LaunchSequence(self.calls, made)

    def _prepared(self, action: Launch) -> list[PreparedLaunch]:
        kernel: _Loaded = action.made
        count = len(kernel.kernel.buffers) + len(kernel.between)
        made = []
        for program, chosen, numbers, grid in kernel.launches(action.operands[:count], action.sizes):
            entry = kernel.entries[program.name]
            if any(n > most for n, most in zip(grid, _MOST_PROGRAMS, strict=False)):
                raise RunError(f"kernel {program.name}: {prod(grid)} programs are more than a GPU takes", code="X140")
            spare = [0] * (entry.binary.arguments - len(chosen) - len(numbers))
            patches = [(i, *operand) for i, operand in enumerate(chosen)]
            if entry.binary.scratch_bytes:
                patches.append((len(chosen) + len(numbers), *action.operands[count]))
            arguments = [*(0 for _ in chosen), *numbers, *spare]
            binary = entry.binary
            made.append(
                PreparedLaunch(entry, entry.function, grid, binary.threads, binary.shared_bytes, arguments, patches)
            )
        return made

    def play(self, recorded: LaunchSequence, places: Sequence[Any]) -> None:
        with self._asking("launching kernels"):
            self._after_ended()
            self.replays += recorded.play(places, self._handle)

    def player(self, recorded: LaunchSequence) -> Callable[[Sequence[Any]], None]:
        launches = recorded.launches
        if launches is None:
            return super().player(recorded)
        calls, stream, ended, current = self.calls, self._handle, self._ended, self._current
        steps = tuple((x.arguments, x.patches, calls.launcher(x, stream)) for x in launches)

        def play(places: Sequence[Any]) -> None:
            if ended or not current.is_sure:
                self.play(recorded, places)
                return
            for arguments, patches, launch in steps:
                for i, base, offset in patches:
                    arguments[i] = places[base] + offset
                status = launch()
                if status:
                    with self._asking("launching kernels"):
                        calls.check(status)

        return play

    def finish(self) -> None:
        with self._asking("running kernels"):
            self.stream.sync()

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Errors of the driver are errors of strata. A thread that asks first makes the device its own."""
        if self.calls.context() != self._context:
            self.device.set_current()
        self._current.is_sure = self._is_alone
        try:
            yield
        except (DeviceError, ShapeError, OutOfMemoryError):
            raise
        except RunError as error:
            raise RunError(f"{what}: {error.summary}", code=error.code, place=here()) from error
        except Exception as error:
            reason = _line(error)
            if "OUT_OF_MEMORY" in str(error).upper().replace(" ", "_"):
                raise OutOfMemoryError(f"{what} do not fit: {reason}", place=here()) from error
            raise RunError(f"{what}: {reason}", code="X140", place=here()) from error


class _Current(threading.local):
    """Whether the GPU is known to be the current one of a thread, so that nobody has to ask."""

    is_sure = False


class _Memory:
    """A buffer and its address, which takes a microsecond to ask for."""

    __slots__ = ("address", "buffer")

    def __init__(self, buffer: Any) -> None:
        self.buffer, self.address = buffer, int(buffer.handle)


class _Stage:
    """Pinned memory of the host, and the event after which it may be used again."""

    __slots__ = ("address", "event", "size")

    def __init__(self, address: int, size: int) -> None:
        self.address, self.size, self.event = address, size, 0


class _Staging:
    """Pinned memory that copies go through: of each size as many pieces as were under way at once, up to a limit."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._free: dict[int, deque[_Stage]] = {}
        self._pinned = 0  # bytes

    def take(self, size: int) -> _Stage:
        room = 1 << max(12, (size - 1).bit_length())
        waiting = self._free.setdefault(room, deque())
        calls = self._driver.calls
        if waiting and waiting[0].event and self._pinned + room > _MOST_PINNED:
            calls.await_event(waiting[0].event)
        if waiting and (not waiting[0].event or calls.is_done(waiting[0].event)):
            found = waiting.popleft()
            if found.event:
                self._driver._events.append(found.event)
                found.event = 0
            return found
        self._pinned += room
        return _Stage(calls.pinned(room), room)

    def give(self, stage: _Stage) -> None:
        self._free[stage.size].append(stage)


class _Download:
    """A copy to an array of the host that is under way. Its pinned memory goes back even if nobody waits for it."""

    def __init__(self, driver: CudaDriver, stage: _Stage, array: np.ndarray) -> None:
        self._driver, self._array = driver, array
        self._stage: _Stage | None = stage

    def __call__(self) -> None:
        stage = self._stage
        if stage is None:
            return
        with self._driver._asking("copying from the GPU"):
            self._driver.calls.await_event(stage.event)
        ctypes.memmove(self._array.ctypes.data, stage.address, self._array.nbytes)
        self._end()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            self._driver._staging.give(stage)  # used again when its event is over


class _Entry:
    """A loaded program; the code stays as long as its function."""

    def __init__(self, code: Any, function: int, binary: Binary) -> None:
        self.code, self.function, self.binary = code, function, binary


class _Lent:
    """An array that another library uses on a stream of its own: what comes next here waits for that stream."""

    def __init__(self, array: DeviceArray, driver: CudaDriver, stream: int) -> None:
        self.array, self.driver, self.stream = array, driver, stream

    def __del__(self) -> None:
        self.driver._ended.append(self.stream)


class _Loaded(LaunchableKernel):
    """A kernel whose programs are on the GPU."""

    def __init__(self, rendered: Rendered, driver: CudaDriver) -> None:
        super().__init__(rendered)
        self.driver = driver

    def load(self) -> None:
        _ = self.entries  # none, where a kernel has no elements

    def again(self, rendered: Rendered) -> _Loaded:
        return _Loaded(rendered, self.driver)

    @cached_property
    def entries(self) -> dict[str, _Entry]:
        return {p.name: self.driver.load(p) for p in self.rendered.all_programs}

    @cached_property
    def _descriptors(self) -> list[TritonProgram]:
        return [p for p in self.rendered.all_programs if self.entries[p.name].binary.scratch_bytes]

    def scratch(self, sizes: Mapping[str, int]) -> Sequence[int]:
        """Beside its own buffers, memory for descriptors of the copy engine: its programs run one after the other."""
        found = list(super().scratch(sizes))
        if self._descriptors:
            rooms = [
                self.entries[p.name].binary.scratch_bytes * prod(number(d, sizes) for d in p.grid)
                for p in self._descriptors
            ]
            found.append(max(rooms))
        return found


def _opened(core: Any, number: int) -> tuple[Any, Any]:
    """A GPU and a stream on it."""
    try:
        found = core.Device.get_all_devices()
        if number < len(found):
            found[number].set_current()
            return found[number], found[number].default_stream
    except Exception as error:
        raise _missing(number, _line(error)) from error
    raise _missing(number, f"there are {len(found)} GPUs" if found else "there is no GPU")


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _core(number: int = 0) -> Any:
    """The package; nothing of it is loaded before a GPU is asked for."""
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        raise _missing(number, "there is no cuda.core package")
    try:
        return importlib.import_module("cuda.core")
    except ImportError as error:
        raise _missing(number, _line(error)) from error


def _missing(number: int, reason: str) -> DeviceError:
    name = f"cuda:{number}" if number else "cuda"
    return DeviceError(f"device {name!r} is not available: {reason}", code="E101", place=here(), fix=NEEDS)
