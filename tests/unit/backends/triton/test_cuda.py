"""The launcher of the `cuda` device, over a `cuda.core` that is NumPy: memory is real, kernels are interpreted.

What a GPU does is not shown here; that the right code is launched on the right memory in the right order is.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.backends.offload import OffloadBackend
from strata.backends.recipe import Copy
from strata.backends.resident import HOMES
from strata.backends.triton.backend import TritonBackend
from strata.backends.triton.codegen.render import render
from strata.backends.triton.launch import cuda
from strata.backends.triton.launch.calls import PreparedLaunch
from strata.backends.triton.launch.cuda import CudaDriver
from strata.backends.triton.launch.launches import SHORT, LaunchSequence
from strata.backends.triton.tuning import tune
from strata.core import f32, sym
from strata.errors import DeviceError, OutOfMemoryError, RunError
from strata.kernel import parse_kernel
from strata.lir import plan
from strata.mir import Graph, evaluate
from strata.ops import attention, gelu, matmul, reduce_sum, sort
from tests.fake_cuda import FakeCalls, FakeCore, driver_of, fake_binary

COPY = """kernel @copy(x: f32[8]) -> out: f32[8] {
  axis i in 8
  %0 = x[i]
  store out[i] = %0 over i
}"""


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


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
    assert core.currents  # whoever comes first makes the device its own


def test_layers_that_are_alike_load_their_programs_once(core: FakeCore) -> None:
    g = Graph("layers")
    x = g.input("x", f32[2, 8, 24, 16])
    for _ in range(4):
        x = attention(x, x, x, layout="bhsd")
    g.outputs(x)
    asked: list[str] = []

    def compiler(program: Any, gpu: Any) -> Any:
        asked.append(program.name)
        return fake_binary(program, gpu)

    driver = CudaDriver(core=core, calls=FakeCalls(core), compiler=compiler)
    backend = TritonBackend("layers", driver.gpu, driver)
    lir = plan(g, whole=backend.runs_whole, views=backend.reads_views)
    made = backend.compile(lir)
    assert [s.name for s in lir.schedule] == ["attention"] * 4
    assert asked == ["attention"]
    del made
    gc.collect()
    assert not driver._loaded, "programs end with the plans that have them"


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
    buffers = driver.allocate(64), driver.allocate(64)
    a, b = map(driver.place, buffers)
    first, second = np.arange(8, dtype=np.float32), np.full(8, 9, np.float32)
    driver.write(a, first)
    driver.launch(made, [a, b], {})
    driver.write(a, second)  # the launch comes before it
    got = np.empty(8, np.float32)
    driver.read(b, got)
    np.testing.assert_array_equal(got, first)
    driver.copy(a, b, 32)
    driver.release(buffers[0])  # after the copy
    driver.read(b, got)
    np.testing.assert_array_equal(got, second)
    driver.write(b, np.empty((0, 3), np.float32))
    driver.read(b, np.empty(0, np.float32))
    driver.copy(b, b, 0)


def test_memory_that_runs_out_is_an_error_with_a_name() -> None:
    driver = driver_of(FakeCore(memory=1000))
    held = driver.allocate(600)
    with pytest.raises(OutOfMemoryError, match="600 bytes on Fake H200 do not fit"):
        driver.allocate(600)
    driver.release(held)
    driver.allocate(600)


def test_copies_through_pinned_memory_wait_for_nothing_else(core: FakeCore) -> None:
    """What is read later is what was there when it was asked for; pinned memory is used again."""
    driver = driver_of(core)
    buffer = driver.allocate(1 << 17)
    place = driver.place(buffer)
    first = np.arange(1 << 15, dtype=np.int32)
    driver.write(place, first)
    found = np.empty_like(first)
    wait = driver.read_later(place, found)
    driver.write(place, first + 1)
    assert "sync" not in core.log
    wait()
    np.testing.assert_array_equal(found, first)
    np.testing.assert_array_equal(first, np.arange(1 << 15))
    for _ in range(3):
        driver.read_later(place, found)()
    np.testing.assert_array_equal(found, first + 1)
    calls: Any = driver.calls
    assert len(calls.staged) <= 2
    assert core.log.count("await") == 4


def test_a_large_array_goes_up_in_pieces_and_pinned_memory_has_a_limit(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = driver_of(core)
    array = np.arange((9 << 20) // 4 + 5, dtype=np.int32)
    buffer = driver.allocate(array.nbytes)
    place = driver.place(buffer)
    busy: Any = driver.calls
    monkeypatch.setattr(busy, "is_done", lambda event: "await" in core.log)  # other work, until somebody waits
    driver.write(place, array)
    assert core.log == ["up 4194304", "up 4194304", f"up {array.nbytes - (8 << 20)}"]
    for _ in range(40):
        driver.write(place, array)
    assert sum(x.size for x in busy.staged) <= 256 << 20
    assert "sync" not in core.log
    found = np.empty_like(array)
    driver.read(place, found)
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("count", [3, 1 << 20, (3 << 20) + 7])
def test_zeros_are_made_on_the_device(core: FakeCore, count: int) -> None:
    home = OffloadBackend(driver_of(core), "fake").home
    made = home.zeros(np.dtype(np.uint8), (count,))
    HOMES.remove(home)
    assert not made.numpy().any()
    assert made.shape == (count,)


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
    driver.make(kernel).load()
    assert [(a[0], a[1], a[3]) for a in asked] == [(8, 64 << 10, 0)]
    driver._made.clear()
    with pytest.raises(RunError, match="65536 bytes of shared memory"):
        driver.make(kernel).load()


@pytest.mark.parametrize(("gpus", "number", "reason"), [(0, 0, "there is no GPU"), (2, 2, "there are 2 GPUs")])
def test_a_gpu_that_is_not_there(gpus: int, number: int, reason: str) -> None:
    with pytest.raises(DeviceError, match=f"is not available: {reason}") as found:
        CudaDriver(number, core=FakeCore(gpus), calls=object(), compiler=fake_binary)
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


def prepared(key: str, *operands: tuple[int, int]) -> PreparedLaunch:
    patches = [(i, *operand) for i, operand in enumerate(operands)]
    return PreparedLaunch(key, 0, (1,), 32, 0, [0] * len(operands), patches)


class Log:
    """Calls that are only written down."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def launch(self, launch: PreparedLaunch, stream: int) -> None:
        self.lines.append(f"{launch.entry}{list(launch.arguments)}")

    def copy(self, source: int, target: int, size: int, stream: int) -> None:
        self.lines.append(f"copy {source} {target} {size}")

    def graph(self, launches: list[PreparedLaunch]) -> Any:
        self.lines.append(f"graph of {len(launches)}")
        return SimpleNamespace(
            set=lambda at: self.lines.append(f"set {launches[at].entry}{list(launches[at].arguments)}"),
            launch=lambda stream: self.lines.append("launch"),
        )


def test_a_sequence_becomes_one_graph_whose_addresses_are_set() -> None:
    calls = Log()
    sequence = LaunchSequence(calls, [prepared(key, (at % 2, 8 * at)) for at, key in enumerate("abcde")])
    sequence.play([100, 200], 1)
    assert calls.lines == ["a[100]", "b[208]", "c[116]", "d[224]", "e[132]"]
    calls.lines.clear()
    assert sequence.play([100, 200], 1) == 1
    assert calls.lines == ["graph of 5", "launch"]
    calls.lines.clear()
    sequence.play([100, 200], 1)
    sequence.play([100, 300], 1)
    assert sorted(calls.lines) == ["launch", "launch", "set b[308]", "set d[324]"]


def test_a_graph_whose_addresses_were_set_in_part_is_set_whole_the_next_time() -> None:
    calls = Log()
    sequence = LaunchSequence(calls, [prepared(key, (at % 2, 8 * at)) for at, key in enumerate("abcde")])
    for _ in range(2):
        sequence.play([100, 200], 1)
    graph = sequence.parts[0]._graph  # type: ignore[union-attr]
    whole, count = graph.set, iter(range(5))

    def interrupted(at: int) -> None:
        if next(count) == 1:
            raise KeyboardInterrupt
        whole(at)

    graph.set = interrupted
    with pytest.raises(KeyboardInterrupt):
        sequence.play([300, 400], 1)
    graph.set = whole
    calls.lines.clear()
    sequence.play([100, 200], 1)
    assert sorted(calls.lines) == [
        "launch",
        *(f"set {text}" for text in ("a[100]", "b[208]", "c[116]", "d[224]", "e[132]")),
    ]


def test_short_sequences_are_launched_and_copies_of_memory_to_itself_are_none() -> None:
    calls = Log()
    few = [prepared(str(n), (0, 0)) for n in range(SHORT)]
    sequence = LaunchSequence(calls, [*few, Copy((0, 8), (1, 0), 4), Copy((0, 0), (2, 0), 4)])
    for _ in range(3):
        assert sequence.play([100, 200, 100], 1) == 0
    assert calls.lines == [*(f"{n}[100]" for n in range(SHORT)), "copy 108 200 4"] * 3


def test_copies_of_memory_to_itself_do_not_cut_a_graph() -> None:
    calls = Log()
    actions: list[PreparedLaunch | Copy] = []
    for n in range(4):
        actions += [prepared(str(n), (0, 8 * n)), Copy((1, 0), (2, 0), 4)]
    sequence = LaunchSequence(calls, actions)
    for _ in range(2):
        sequence.play([100, 200, 200], 1)
    assert calls.lines == ["0[100]", "1[108]", "2[116]", "3[124]", "graph of 4", "launch"]
    calls.lines.clear()
    sequence.play([100, 200, 300], 1)
    assert calls.lines == [line for n in range(4) for line in (f"{n}[{100 + 8 * n}]", "copy 200 300 4")]


USES = {
    "write": lambda driver, a, b: driver.write(driver.place(a), np.zeros(8, np.float32)),
    "staged": lambda driver, a, b: driver.write(driver.place(a), np.zeros(1 << 16, np.uint8)),
    "read": lambda driver, a, b: driver.read(driver.place(a), np.zeros(8, np.float32)),
    "read later": lambda driver, a, b: driver.read_later(driver.place(a), np.zeros(8, np.float32)),
    "copy": lambda driver, a, b: driver.copy(driver.place(a), driver.place(b), 32),
    "release": lambda driver, a, b: driver.release(a),
    "launch": lambda driver, a, b: driver.launch(
        driver.make(parse_kernel(COPY)), [driver.place(a), driver.place(b)], {}
    ),
}


@pytest.mark.parametrize("use", USES)
def test_memory_that_comes_back_from_another_stream_is_used_behind_it(core: FakeCore, use: str) -> None:
    driver = driver_of(core)
    buffers = [driver.allocate(1 << 16) for _ in range(2)]
    waits = driver.calls.waits
    lent = cuda._Lent(None, driver, 7)  # type: ignore[arg-type] # an array that a library used on stream 7
    USES[use](driver, *buffers)
    assert ("record", 1, 7) not in waits, "it is still used there, by whoever has it"
    waits.clear()
    buffers = [driver.allocate(1 << 16) for _ in range(2)]
    del lent
    USES[use](driver, *buffers)
    (_, event, _), (_, stream, awaited) = waits[:2]
    assert waits[0] == ("record", event, 7)
    assert waits[1] == ("wait", stream, event) == ("wait", 1, awaited)


def test_a_stream_that_is_gone_has_the_device_waited_for(core: FakeCore) -> None:
    driver = driver_of(core)
    buffer = driver.allocate(64)
    core.gone.add(7)
    lent = cuda._Lent(None, driver, 7)  # type: ignore[arg-type]
    del lent
    driver.write(driver.place(buffer), np.zeros(8, np.float32))
    assert core.log == ["sync device", "copy 32"]
    driver.write(driver.place(buffer), np.zeros(8, np.float32))
    assert core.log.count("sync device") == 1


def test_an_array_in_pinned_memory_may_change_when_a_write_returns(core: FakeCore) -> None:
    """The driver copies from there by itself, later; pageable memory it copies before it returns."""
    driver = driver_of(core)
    place = driver.place(driver.allocate(64))
    array = np.arange(8, dtype=np.float32)
    driver.write(place, array)
    assert core.log == ["copy 32"]
    core.pinned.append((array.ctypes.data, array.nbytes))
    driver.write(place, array)
    assert core.log == ["copy 32", "copy 32", "sync"]


def test_pinned_memory_of_a_read_that_nobody_waits_for_is_used_again(core: FakeCore) -> None:
    driver = driver_of(core)
    place = driver.place(driver.allocate(64))
    array = np.zeros(8, np.float32)
    for _ in range(5):
        driver.read_later(place, array)  # as the last step of a text whose end came before
    assert len(driver.calls.staged) == 1
    wait = driver.read_later(place, array)
    wait()
    wait()
    other = driver.read_later(place, array), driver.read_later(place, array)
    assert len({driver.calls.staged[n].ctypes.data for n in range(len(driver.calls.staged))}) == 2
    for wait in other:
        wait()


def test_a_schedule_that_writes_nothing_is_none_that_a_search_takes(
    core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the schedule before it wrote is not there any more."""
    driver, kernel = driver_of(core), parse_kernel(COPY)
    search = tune.Search((f32[8],), (f32[8],), lambda: (), lambda text: render(kernel))
    bench = tune._CardBench(search, driver)
    assert bench.seconds(search.render(""), float("inf")) is not None
    monkeypatch.setattr(driver, "launch", lambda *_: None)
    assert bench.seconds(search.render(""), float("inf")) is None
    bench.close()
    assert not core.live
