"""The launcher of the `cuda` device, over a `cuda.core` that is NumPy: memory is real, kernels are interpreted.

What a GPU does is not shown here; that the right code is launched on the right memory in the right order is.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.backends.offload import OffloadBackend
from strata.backends.triton import cuda
from strata.backends.triton.compile import Binary
from strata.backends.triton.cuda import CudaDriver
from strata.backends.triton.launches import SHORT, KernelLaunch, Launches
from strata.backends.triton.render import TritonProgram
from strata.backends.triton.target import Gpu
from strata.core import TABLES, f32, substitute, sym
from strata.errors import DeviceError, OutOfMemoryError, RunError
from strata.kernel import interpret, parse_kernel
from strata.lir import plan
from strata.mir import Graph, evaluate
from strata.ops import gelu, matmul, reduce_sum, sort

PROGRAMS: dict[str, TritonProgram] = {}
COPY = """kernel @copy(x: f32[8]) -> out: f32[8] {
  axis i in 8
  %0 = x[i]
  store out[i] = %0 over i
}"""


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


class FakeStream:
    def __init__(self, core: FakeCore) -> None:
        self.core = core

    def do(self, what: str, action: Callable[[], Any]) -> None:
        self.core.log.append(what)
        action()

    def sync(self) -> None:
        self.core.log.append("sync")
        if self.core.broken:
            raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered\nmore")


class FakeGraphBuilder:
    def __init__(self, core: FakeCore) -> None:
        self.core = core
        self.actions: list[tuple[str, Callable[[], Any]]] = []
        self.state = "new"

    def begin_building(self) -> FakeGraphBuilder:
        self.state = "building"
        return self

    def do(self, what: str, action: Callable[[], Any]) -> None:
        assert self.state == "building"
        self.actions.append((what, action))

    def end_building(self) -> FakeGraphBuilder:
        self.state = "built"
        return self

    def complete(self) -> Any:
        assert self.state == "built"

        def launch(stream: Any) -> None:
            self.core.log.append(f"graph of {len(self.actions)}")
            for _, action in self.actions:
                action()

        return SimpleNamespace(launch=launch)


class FakeCore:
    """As much of `cuda.core` as the driver uses."""

    def __init__(self, gpus: int = 1, memory: int = 1 << 30) -> None:
        self.log: list[str] = []
        self.live: dict[int, np.ndarray] = {}
        self.room, self.broken = memory, False
        self.Buffer = SimpleNamespace(from_handle=lambda ptr, size, owner=None: FakeBuffer(self, ptr, size))
        self.ObjectCode = SimpleNamespace(from_cubin=self.load)
        self.Device = SimpleNamespace(get_all_devices=lambda: tuple(self.device(i) for i in range(gpus)))
        self.LaunchConfig = SimpleNamespace
        self.currents = 0

    def device(self, number: int) -> Any:
        return SimpleNamespace(
            device_id=number, name="Fake H200", compute_capability=(9, 0), set_current=self.use,
            create_stream=lambda: FakeStream(self), create_graph_builder=lambda: FakeGraphBuilder(self),
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
        return SimpleNamespace(get_kernel=lambda name: SimpleNamespace(name=name, key=about["key"], handle=7))

    def launch(self, stream: Any, config: Any, function: Any, *arguments: int) -> None:
        program = PROGRAMS[function.key]
        assert len(arguments) == len(program.signature) + 2
        assert arguments[-2:] == (0, 0)
        assert config.block == (32 * program.warps, 1, 1)
        assert len(config.grid) == 3
        stream.do(f"launch {program.name}", lambda: execute(self, program, config.grid, arguments))


def execute(core: FakeCore, program: TritonProgram, grid: tuple[int, ...], arguments: tuple[int, ...]) -> None:
    """The meaning of a program's kernel on memory that is live."""
    count = len(program.buffers)
    sizes = {str(d): n for d, n in zip(program.sizes, arguments[count:-2], strict=True)}
    wanted = tuple(substitute(d, sizes) for d in program.grid)
    assert grid[: len(wanted)] == wanted
    arrays = {}
    for buffer, address in zip(program.buffers, arguments, strict=False):
        assert address in core.live, f"{buffer.name} is not on the device"
        (elements,) = (substitute(d, sizes) for d in buffer.shape)
        size = elements * buffer.dtype.itemsize  # type: ignore[operator]
        arrays[buffer.name] = core.live[address][:size].view(buffer.dtype.np)
    names = {b.name for b in program.buffers}
    kernel = program.kernel
    inputs = [arrays[b.name].copy() if b.name in names else np.zeros(0, b.dtype.np) for b in kernel.inputs]
    results = interpret(kernel, inputs, sizes, [arrays[b.name] for b in kernel.outputs])
    for buffer, result in zip(kernel.outputs, results, strict=True):
        arrays[buffer.name][...] = result


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


def driver_of(core: FakeCore) -> CudaDriver:
    return CudaDriver(core=core, compiler=fake_binary)


def run(made: Any, inputs: list[np.ndarray], binding: Mapping[str, int] | None = None) -> list[np.ndarray]:
    kinds = [made.lir.buffer(n).type.bind(binding or {}) for n in made.lir.io.outputs]
    outputs = [np.empty(k.static_shape, k.dtype.np) for k in kinds]
    made.run(inputs, outputs, binding or {})
    return outputs


RNG = np.random.default_rng(5)


def layers(rows: Any = 6, depth: int = 6) -> Graph:
    g = Graph("layers")
    x = g.input("x", f32[rows, 16])
    for n in range(depth):
        x = gelu(matmul(x, g.param(f"w{n}", f32[16, 16])))
    return g.outputs(x)


def weights(depth: int = 6) -> dict[str, np.ndarray]:
    return {f"w{n}": (0.3 * RNG.standard_normal((16, 16))).astype(np.float32) for n in range(depth)}


def test_the_second_run_is_one_graph(core: FakeCore) -> None:
    driver = driver_of(core)
    made = OffloadBackend(driver).compile(plan(layers()))
    values = weights()
    for name, array in values.items():
        made.set_param(name, array)
    for time in range(4):
        x = RNG.standard_normal((6, 16)).astype(np.float32)
        core.log.clear()
        (got,) = run(made, [x])
        np.testing.assert_allclose(got, evaluate(layers(), {"x": x} | values)[0], rtol=1e-4, atol=1e-5)
        launches = [line for line in core.log if line.startswith(("launch", "graph"))]
        steps = len(made.lir.schedule)
        assert launches == ([f"graph of {steps}"] if time else ["launch k0"] * steps)
    assert driver.replays == 3
    assert core.currents > 4  # any thread may come


def test_sizes_that_change_are_launched_one_by_one(core: FakeCore) -> None:
    driver = driver_of(core)
    made = OffloadBackend(driver).compile(plan(layers(sym("R", 1, 64))))
    values = weights()
    for name, array in values.items():
        made.set_param(name, array)
    for rows in (3, 1, 7, 64, 5):
        x = RNG.standard_normal((rows, 16)).astype(np.float32)
        (got,) = run(made, [x], {"R": rows})
        np.testing.assert_allclose(got, evaluate(layers(rows), {"x": x} | values)[0], rtol=1e-4, atol=1e-5)


def test_host_steps_see_what_was_launched(core: FakeCore) -> None:
    g = Graph("mixed")
    x = g.input("x", f32[40])
    g.outputs(reduce_sum(sort(x * 2, axis=0) * 3, axes=(0,)), x + 1)
    driver = driver_of(core)
    made = OffloadBackend(driver).compile(plan(g, whole=lambda n: n.op.name == "sort"))
    array = RNG.standard_normal(40).astype(np.float32)
    assert made.host_steps
    for got, want in zip(run(made, [array]), evaluate(g, {"x": array}), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_memory_that_a_waiting_launch_reads_is_not_overwritten(core: FakeCore) -> None:
    driver = driver_of(core)
    made = driver.make(parse_kernel(COPY))
    a, b = driver.allocate(64), driver.allocate(64)
    first, second = np.arange(8, dtype=np.float32), np.full(8, 9, np.float32)
    driver.write(a, first)
    driver.launch(made, [a, b], {})
    driver.write(a, second)  # the launch comes before it
    got = np.empty(8, np.float32)
    driver.read(b, got)
    np.testing.assert_array_equal(got, first)
    driver.copy(a, b, 32)
    driver.release(a)  # after the copy
    driver.read(b, got)
    np.testing.assert_array_equal(got, second)
    driver.write(b, np.empty((0, 3), np.float32))
    driver.read(b, np.empty(0, np.float32))
    driver.copy(b, b, 0)


def test_memory_that_runs_out_is_an_error_with_a_name() -> None:
    driver = driver_of(FakeCore(memory=1000))
    driver.allocate(600)
    with pytest.raises(OutOfMemoryError, match="600 bytes on Fake H200 do not fit"):
        driver.allocate(600)


def test_what_fails_on_the_device_is_an_error_with_a_code(core: FakeCore) -> None:
    driver = driver_of(core)
    core.broken = True
    with pytest.raises(RunError, match=r"running kernels: CUDA_ERROR_ILLEGAL_ADDRESS.* \[X140\]"):
        driver.finish()


def test_shared_memory_beyond_the_usual_is_asked_for(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)
    bindings = SimpleNamespace(
        CUfunction_attribute=attribute, cuKernelSetAttribute=lambda *a: (asked.append(a), (len(asked) - 1,))[1]
    )
    monkeypatch.setattr(cuda.importlib, "import_module", lambda name: {"cuda.bindings.driver": bindings}[name])
    kernel = parse_kernel(COPY.replace("@copy", "@big"))
    driver = driver_of(core)
    driver.make(kernel)
    assert asked == [(8, 64 << 10, 7, 0)]
    driver._made.clear()
    with pytest.raises(RunError, match="65536 bytes of shared memory"):
        driver.make(kernel)


@pytest.mark.parametrize(("gpus", "number", "reason"), [(0, 0, "there is no GPU"), (2, 2, "there are 2 GPUs")])
def test_a_gpu_that_is_not_there(gpus: int, number: int, reason: str) -> None:
    with pytest.raises(DeviceError, match=f"is not available: {reason}") as found:
        CudaDriver(number, core=FakeCore(gpus), compiler=fake_binary)
    assert "pip install" in str(found.value.fix)


def test_a_driver_that_is_not_there(core: FakeCore) -> None:
    def broken() -> None:
        raise RuntimeError('"cuda" is an NVIDIA driver library and can only be found via system search.')

    core.Device.get_all_devices = broken
    with pytest.raises(DeviceError, match="is an NVIDIA driver library"):
        driver_of(core)


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DeviceError, match=r"there is no cuda.core package") as found:
        CudaDriver(0)
    assert "pip install 'strata[cuda]'" in str(found.value.fix)
    assert cuda.count() == 0


def test_sequences_are_captured_when_they_come_again() -> None:
    log: list[str] = []
    queue = Launches("stream", lambda calls: lambda: log.append(f"graph {[c.key for c in calls]}"))

    def add(*keys: str) -> None:
        for key in keys:
            queue.add(KernelLaunch(key, frozenset((ord(key[0]),)), lambda on, key=key: log.append(f"{key} on {on}")))

    add("a", "b")
    assert queue.touches(ord("a"))
    assert not queue.touches(ord("c"))
    queue.flush()
    assert log == ["a on stream", "b on stream"]
    for _ in range(3):
        add(*"abcde"[: SHORT + 1])
        queue.flush()
    assert log[2:] == [f"{key} on stream" for key in "abcd"] + ["graph ['a', 'b', 'c', 'd']"] * 2
    most = TABLES["cuda graphs"].capacity
    for n in range(2 * most):  # what is kept is bounded
        add(*(f"{c}{n}" for c in "abcd"))
        queue.flush()
    assert len(queue._seen) == most
