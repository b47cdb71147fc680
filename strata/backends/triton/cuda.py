"""NVIDIA GPUs through `cuda.core` (0.5 and later): the only module that uses it.

Memory comes from the device's stream-ordered pool, everything happens on one stream, and a launch is a Triton binary
with its buffers, sizes and the memory that Triton may ask for (none of these kernels does). Nothing is imported before
a device is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from strata.backends.offload import DeviceDriver
from strata.backends.triton.compile import INSTALL, Binary, compile_program, is_installed
from strata.backends.triton.launchable import LaunchableKernel
from strata.backends.triton.launches import KernelLaunch, Launches
from strata.backends.triton.render import TritonProgram
from strata.backends.triton.target import Gpu
from strata.core import here
from strata.errors import DeviceError, OutOfMemoryError, RunError
from strata.kernel import Kernel

NEEDS = f"{INSTALL}, on a machine with an NVIDIA GPU and its driver"
_PLAIN_SHARED = 48 << 10  # bytes of shared memory that a kernel may use without asking
_MOST_PROGRAMS = (1 << 31) - 1  # of a grid along its first dimension

Compiler = Callable[[TritonProgram, Gpu], Binary]


def count() -> int:
    """How many GPUs there are; 0 where a package, the driver or a GPU is missing."""
    try:
        return len(_core().Device.get_all_devices()) if is_installed() else 0
    except Exception:  # noqa: BLE001 - whatever a broken driver raises, there is no GPU to use
        return 0


class CudaDriver(DeviceDriver):
    """One GPU as plans use it."""

    def __init__(self, number: int = 0, *, core: Any = None, compiler: Compiler = compile_program) -> None:
        super().__init__()
        self._core = core or _core(number)
        if core is None and not is_installed():
            raise _missing(number, "there is no triton package")
        self.device, self.stream = _opened(self._core, number)
        major, minor = self.device.compute_capability
        self.gpu = Gpu.named(f"sm_{10 * major + minor}")
        self._compiler = compiler
        self._queue = Launches(self.stream, self._captured)

    # memory

    def allocate(self, size: int) -> Any:
        with self._asking(f"{size} bytes on {self.device.name}"):
            return self.device.memory_resource.allocate(size, stream=self.stream)

    def release(self, buffer: Any) -> None:
        with self._asking("giving memory back"):
            if self._queue.touches(address_of(buffer)):
                self._queue.flush()
            buffer.close(self.stream)  # when the stream is there

    def write(self, buffer: Any, array: np.ndarray) -> None:
        """From pageable memory: the driver has copied the array before the call returns."""
        if not array.nbytes:
            return
        with self._asking("copying to the GPU"):
            if self._queue.touches(address_of(buffer)):
                self._queue.flush()
            source = self._core.Buffer.from_handle(array.ctypes.data, array.nbytes, owner=array)
            source.copy_to(self._part(buffer, array.nbytes), stream=self.stream)

    def read(self, buffer: Any, array: np.ndarray) -> None:
        if not array.nbytes:
            return
        with self._asking("copying from the GPU"):
            self._queue.flush()
            target = self._core.Buffer.from_handle(array.ctypes.data, array.nbytes, owner=array)
            self._part(buffer, array.nbytes).copy_to(target, stream=self.stream)
            self.stream.sync()

    def copy(self, source: Any, target: Any, size: int) -> None:
        if not size:
            return
        places = address_of(source), address_of(target)
        parts = self._part(source, size), self._part(target, size)
        self._queue.add(
            KernelLaunch(("copy", *places, size), frozenset(places), lambda on: parts[0].copy_to(parts[1], stream=on))
        )

    def _part(self, buffer: Any, size: int) -> Any:
        """The first bytes of a buffer: copies take whole ones."""
        if buffer.size == size:
            return buffer
        return self._core.Buffer.from_handle(address_of(buffer), size, owner=buffer)

    # kernels

    def make(self, kernel: Kernel) -> _Loaded:
        return _Loaded(kernel, self)

    def load(self, program: TritonProgram) -> _Entry:
        """A program on the GPU."""
        binary = self._compiler(program, self.gpu)
        with self._asking(f"loading kernel {program.name}"):
            code = self._core.ObjectCode.from_cubin(binary.code)
            function = code.get_kernel(binary.entry)
            if binary.shared_bytes > _PLAIN_SHARED:
                self._allow_shared(function, binary.shared_bytes)
        return _Entry(code, function, binary)

    def _allow_shared(self, function: Any, size: int) -> None:
        driver = importlib.import_module("cuda.bindings.driver")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, size, function.handle, self.device.device_id)
        if int(status):
            raise RunError(f"{self.device.name} has no {size} bytes of shared memory for a program", code="X140")

    def launch(self, made: _Loaded, buffers: Sequence[Any], sizes: Mapping[str, int]) -> None:
        for program, chosen, numbers, grid in made.launches(buffers, sizes):
            entry = made.entries[program.name]
            if grid[0] > _MOST_PROGRAMS:
                raise RunError(f"kernel {program.name}: {grid[0]} programs are more than a GPU takes", code="X140")
            spare = [0] * (entry.binary.arguments - len(chosen) - len(numbers))
            places = tuple(address_of(b) for b in chosen)
            config = self._core.LaunchConfig(
                grid=(*grid, 1, 1)[:3], block=(entry.binary.threads, 1, 1), shmem_size=entry.binary.shared_bytes
            )
            arguments = [*places, *numbers, *spare]
            self._queue.add(
                KernelLaunch(
                    (id(entry), grid, places, tuple(numbers)),
                    frozenset(places),
                    lambda on, config=config, entry=entry, arguments=arguments: self._core.launch(  # type: ignore[misc]
                        on, config, entry.function, *arguments
                    ),
                )
            )

    def finish(self) -> None:
        with self._asking("running kernels"):
            self._queue.flush()
            self.stream.sync()

    @property
    def replays(self) -> int:
        """How often a sequence of launches was done as one graph."""
        return self._queue.replays

    def _captured(self, calls: Sequence[KernelLaunch]) -> Callable[[], None]:
        builder = self.device.create_graph_builder()
        builder.begin_building()
        for call in calls:
            call.do(builder)
        graph = builder.end_building().complete()
        return lambda: graph.launch(self.stream)

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Errors of the driver are errors of strata. A thread that asks first makes the device its own."""
        self.device.set_current()
        try:
            yield
        except (DeviceError, RunError, OutOfMemoryError):
            raise
        except Exception as error:
            reason = _line(error)
            if "OUT_OF_MEMORY" in str(error).upper().replace(" ", "_"):
                raise OutOfMemoryError(f"{what} do not fit: {reason}", place=here()) from error
            raise RunError(f"{what}: {reason}", code="X140", place=here()) from error


class _Entry:
    """A loaded program; the code stays as long as its function."""

    def __init__(self, code: Any, function: Any, binary: Binary) -> None:
        self.code, self.function, self.binary = code, function, binary


class _Loaded(LaunchableKernel):
    """A kernel whose programs are on the GPU."""

    def __init__(self, kernel: Kernel, driver: CudaDriver) -> None:
        super().__init__(kernel)
        self.entries = {p.name: driver.load(p) for p in self.rendered.programs}


def _opened(core: Any, number: int) -> tuple[Any, Any]:
    """A GPU and a stream on it."""
    try:
        found = core.Device.get_all_devices()
        if number < len(found):
            found[number].set_current()
            return found[number], found[number].create_stream()
    except Exception as error:
        raise _missing(number, _line(error)) from error
    raise _missing(number, f"there are {len(found)} GPUs" if found else "there is no GPU")


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def address_of(buffer: Any) -> int:
    return int(buffer.handle)


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
