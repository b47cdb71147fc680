"""A `cuda.core` and a driver library that are NumPy: memory is real, kernels are interpreted, for tests of `cuda`."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from strata.backends.triton.backend import TritonBackend
from strata.backends.triton.codegen.render import TritonProgram
from strata.backends.triton.launch.calls import PreparedLaunch
from strata.backends.triton.launch.compile import Binary
from strata.backends.triton.launch.cuda import CudaDriver
from strata.backends.triton.target import Gpu
from strata.core import solve_for, substitute
from strata.errors import RunError
from strata.kernel import interpret

PROGRAMS: dict[str, TritonProgram] = {}


def fake_binary(program: TritonProgram, gpu: Gpu) -> Binary:
    """Code that says what it is the code of, with two more pointers as Triton has them."""
    key = str(len(PROGRAMS))
    PROGRAMS[key] = program
    code = json.dumps({"entry": program.name, "key": key}).encode()
    return Binary(code, program.name, 32 * program.warps, 64 << 10 if "big" in program.name else 128,
                  len(program.signature) + 2)  # fmt: skip


class FakeBuffer:
    def __init__(self, core: FakeCore, handle: int, size: int, memory: Any = None) -> None:
        self.core, self.handle, self.size, self.memory = core, handle, size, memory

    def copy_to(self, target: FakeBuffer, *, stream: Any) -> None:
        assert self.size == target.size, "copies take whole buffers"
        stream.do(f"copy {self.size}", lambda: ctypes.memmove(target.handle, self.handle, self.size))

    def close(self, stream: Any) -> None:
        assert self.memory is not None, "only memory of the device is given back"
        self.core.live.pop(self.handle)
        stream.do("free", lambda: None)

    def __del__(self) -> None:
        if self.memory is not None:  # memory that nobody closed ends with its buffer
            self.core.live.pop(self.handle, None)


class FakeStream:
    def __init__(self, core: FakeCore) -> None:
        self.core = core

    handle = 1

    def do(self, what: str, action: Callable[[], Any]) -> None:
        self.core.log.append(what)
        action()

    def sync(self) -> None:
        self.core.log.append("sync")
        if self.core.broken:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered\nmore")


class FakeGraph:
    """Launches with the arguments that they had when they were set."""

    def __init__(self, calls: FakeCalls, launches: list[PreparedLaunch]) -> None:
        self.calls, self.launches = calls, launches
        self.set_arguments = [tuple(x.arguments) for x in launches]

    def set(self, at: int) -> None:
        self.calls.core.log.append("patch")
        self.set_arguments[at] = tuple(self.launches[at].arguments)

    def launch(self, stream: int) -> None:
        self.calls.core.log.append(f"graph of {len(self.launches)}")
        for launch, arguments in zip(self.launches, self.set_arguments, strict=True):
            self.calls.execute(launch, arguments)


class FakeCalls:
    """As much of the driver's library as launching takes."""

    def __init__(self, core: FakeCore) -> None:
        self.core = core
        self.waits: list[tuple[Any, ...]] = []
        self.events = 0
        self.staged: list[np.ndarray] = []

    def context(self) -> int:
        return 1 if self.core.currents else 0

    def function(self, kernel: int) -> int:
        return kernel

    def free_and_total(self) -> tuple[int, int]:
        return self.core.room - sum(a.size for a in self.core.live.values()), self.core.room

    def launch(self, prepared: PreparedLaunch, stream: int) -> None:
        program = PROGRAMS[str(prepared.head[0])]
        self.core.log.append(f"launch {program.name}")
        self.execute(prepared, tuple(prepared.arguments))

    def launcher(self, prepared: PreparedLaunch, stream: int) -> Callable[[], int]:
        def launch() -> int:
            self.launch(prepared, stream)
            return 0

        return launch

    def check(self, status: int) -> None:
        assert not status

    def execute(self, prepared: PreparedLaunch, arguments: tuple[int, ...]) -> None:
        program = PROGRAMS[str(prepared.head[0])]
        assert len(arguments) == len(program.signature) + 2
        assert arguments[-2:] == (0, 0)
        assert prepared.head[4] == 32 * program.warps
        execute(self.core, program, prepared.head[1:4], arguments)

    def copy(self, source: int, target: int, size: int, stream: int) -> None:
        self.core.log.append(f"copy {size}")
        ctypes.memmove(target, source, size)

    def up(self, source: int, target: int, size: int, stream: int) -> None:
        self.core.log.append(f"up {size}")
        ctypes.memmove(target, source, size)

    def down(self, source: int, target: int, size: int, stream: int) -> None:
        self.core.log.append(f"down {size}")
        ctypes.memmove(target, source, size)

    def pinned(self, size: int) -> int:
        self.staged.append(np.zeros(size, np.uint8))
        return int(self.staged[-1].ctypes.data)

    def is_known(self, address: int) -> bool:
        return any(a <= address < a + size for a, size in self.core.pinned)

    def await_event(self, event: int) -> None:
        self.core.log.append("await")

    def graph(self, launches: list[PreparedLaunch]) -> FakeGraph:
        return FakeGraph(self, launches)

    def event(self) -> int:
        self.events += 1
        return self.events

    def record(self, event: int, stream: int) -> None:
        if stream in self.core.gone:
            raise RunError("CUDA_ERROR_INVALID_HANDLE (400)", code="X140")
        self.waits.append(("record", event, stream))

    def wait(self, stream: int, event: int) -> None:
        self.waits.append(("wait", stream, event))

    def is_done(self, event: int) -> bool:
        return True


class FakeCore:
    """As much of `cuda.core` as the driver uses."""

    def __init__(self, gpus: int = 1, memory: int = 1 << 30) -> None:
        self.log: list[str] = []
        self.live: dict[int, np.ndarray] = {}
        self.room, self.broken = memory, False
        self.gone: set[int] = set()  # streams that others have destroyed
        self.pinned: list[tuple[int, int]] = []  # memory of the host that another library has pinned
        self.Buffer = SimpleNamespace(from_handle=lambda ptr, size, owner=None: FakeBuffer(self, ptr, size))
        self.ObjectCode = SimpleNamespace(from_cubin=self.load)
        self.Device = SimpleNamespace(get_all_devices=lambda: tuple(self.device(i) for i in range(gpus)))
        self.LaunchConfig = SimpleNamespace
        self.currents = 0

    def device(self, number: int) -> Any:
        return SimpleNamespace(
            device_id=number, name="Fake H200", compute_capability=(9, 0), set_current=self.use,
            default_stream=FakeStream(self), sync=lambda: self.log.append("sync device"),
            memory_resource=SimpleNamespace(allocate=self.allocate),
        )  # fmt: skip

    def use(self) -> None:
        self.currents += 1

    def allocate(self, size: int, *, stream: Any) -> FakeBuffer:
        assert isinstance(stream, FakeStream)
        if sum(a.size for a in self.live.values()) + size > self.room:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: The API call failed because it was unable to allocate")
        memory = np.full(size, 0xA5, np.uint8)
        self.live[memory.ctypes.data] = memory
        return FakeBuffer(self, memory.ctypes.data, size, memory)

    def load(self, code: bytes) -> Any:
        about = json.loads(code)
        return SimpleNamespace(get_kernel=lambda name: SimpleNamespace(name=name, handle=int(about["key"])))

    def memory(self, address: int, size: int) -> np.ndarray:
        """Bytes anywhere in memory that is live."""
        for start, whole in self.live.items():
            if start <= address and address + size <= start + whole.size:
                return whole[address - start : address - start + size]
        raise AssertionError(f"{size} bytes at {address} are not on the device")


def execute(core: FakeCore, program: TritonProgram, grid: tuple[int, ...], arguments: tuple[int, ...]) -> None:
    """The meaning of a program's kernel on memory that is live."""
    count = len(program.buffers)
    sizes: dict[str, int] = {}
    for d, bits in zip(program.sizes, arguments[count:-2], strict=True):
        n = bits - ((bits >> 63) << 64)  # a sign and 63 bits
        found = solve_for(d, n)  # the kernel is interpreted by its symbols
        sizes |= {str(d): n} if found is None else dict([found])
    wanted = tuple(substitute(d, sizes) for d in program.grid)
    assert grid[: len(wanted)] == wanted
    arrays = {}
    for buffer, address in zip(program.buffers, arguments, strict=False):
        (elements,) = (substitute(d, sizes) for d in buffer.shape)
        assert isinstance(elements, int), f"{program.name} is not told the size of {buffer.name}"
        size = elements * buffer.dtype.itemsize
        arrays[buffer.name] = core.memory(address, size).view(buffer.dtype.np)
    if program.is_guarded and not arrays[program.buffers[0].name][0]:
        return
    names = {b.name for b in program.buffers}
    kernel = program.kernel
    inputs = [arrays[b.name].copy() if b.name in names else np.zeros(0, b.dtype.np) for b in kernel.inputs]
    results = interpret(kernel, inputs, sizes, [arrays[b.name] for b in kernel.outputs])
    for buffer, result in zip(kernel.outputs, results, strict=True):
        arrays[buffer.name][...] = result


def driver_of(core: FakeCore) -> CudaDriver:
    return CudaDriver(core=core, calls=FakeCalls(core), compiler=fake_binary)


def fake_backend(core: FakeCore, name: str = "fake_cuda") -> TritonBackend:
    """The `cuda` backend over a core that is NumPy."""
    driver = driver_of(core)
    return TritonBackend(name, driver.gpu, driver)
