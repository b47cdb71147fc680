"""Plans on a device with memory of its own, over a device that is NumPy and the interpreter of kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from strata.backends.driver import DeviceDriver, Launchable
from strata.backends.offload import OffloadBackend
from strata.backends.pool import BufferPool
from strata.backends.recipe import room_for
from strata.core import dim_prod, f32, i32, substitute, sym
from strata.errors import OutOfMemoryError
from strata.kernel import Kernel, KernelBuilder, interpret
from strata.lir import Step, plan
from strata.mir import Graph, Node, evaluate
from strata.ops import (
    add,
    dynamic_update_slice,
    exp,
    gelu,
    matmul,
    mul,
    neg,
    reduce_sum,
    sin,
    softmax,
    transpose,
)
from strata.passes import FusionLimits


class Made(Launchable):
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def scratch(self, sizes: Mapping[str, int]) -> Sequence[int]:
        return (8,)


class NumpyDriver(DeviceDriver):
    """Buffers are bytes that start as garbage; kernels are interpreted."""

    def __init__(self, *, in_place: bool = False, memory: int | None = None) -> None:
        super().__init__()
        self.in_place = in_place
        self.memory = memory
        self.live: dict[int, np.ndarray] = {}
        self.log: list[str] = []
        self.peak = 0

    def allocate(self, size: int) -> np.ndarray:
        used = sum(b.size for b in self.live.values())
        if self.memory is not None and used + size > self.memory:
            raise OutOfMemoryError(f"{size} bytes do not fit")
        made = np.full(size, 0xA5, np.uint8)
        self.live[id(made)] = made
        self.peak = max(self.peak, used + size)
        return made

    def release(self, buffer: np.ndarray) -> None:
        del self.live[id(buffer)]

    def write(self, buffer: np.ndarray, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        self.log.append("write")
        buffer[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)

    def read(self, buffer: np.ndarray, array: np.ndarray) -> None:
        self.log.append("read")
        array[...] = np.frombuffer(buffer.tobytes()[: array.nbytes], array.dtype).reshape(array.shape)

    def copy(self, source: np.ndarray, target: np.ndarray, size: int) -> None:
        self.log.append("copy")
        target[:size] = source[:size]

    def make(self, kernel: Kernel) -> Made:
        return Made(kernel)

    def launch(self, made: Made, buffers: Sequence[np.ndarray], sizes: Mapping[str, int]) -> None:
        self.log.append("launch")
        kernel = made.kernel
        assert len(buffers) == len(kernel.buffers) + 1
        count = len(kernel.inputs)
        if not self.in_place:
            assert not {id(b) for b in buffers[:count]} & {id(b) for b in buffers[count:]}
        arrays = []
        for declared, buffer in zip(kernel.buffers, buffers, strict=False):
            assert id(buffer) in self.live
            shape = [substitute(d, sizes) for d in declared.shape]
            size = dim_prod(shape) * declared.dtype.itemsize
            assert isinstance(size, int)
            arrays.append(buffer[:size].view(declared.dtype.np).reshape(shape))  # type: ignore[arg-type]
        results = interpret(kernel, [a.copy() for a in arrays[:count]], sizes, arrays[count:])
        for array, result in zip(arrays[count:], results, strict=True):
            array[...] = result

    def finish(self) -> None:
        self.log.append("finish")


def executable(graph: Graph, driver: NumpyDriver, whole: Callable[[Node], bool] | None = None, **options: Any) -> Any:
    return OffloadBackend(driver).compile(plan(graph, whole=whole, **options))


def run(made: Any, *inputs: np.ndarray, **sizes: int) -> list[np.ndarray]:
    kinds = [made.lir.buffer(name).type.bind(sizes) for name in made.lir.io.outputs]
    outputs = [np.empty(k.static_shape, k.dtype.np) for k in kinds]
    made.run(inputs, outputs, sizes)
    return outputs


def layer() -> Graph:
    g = Graph("layer")
    x, w, b = g.input("x", f32[4, 8]), g.param("w", f32[8, 6]), g.param("b", f32[6])
    return g.outputs(gelu(matmul(x, w) + b))


RNG = np.random.default_rng(3)
X = RNG.standard_normal((4, 8)).astype(np.float32)
W = RNG.standard_normal((8, 6)).astype(np.float32)
B = RNG.standard_normal(6).astype(np.float32)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_layer_uploads_its_parameters_once(in_place: bool) -> None:
    driver = NumpyDriver(in_place=in_place)
    made = executable(layer(), driver)
    made.set_param("w", W)
    made.set_param("b", B)
    (first,) = run(made, X)
    (want,) = evaluate(layer(), {"x": X, "w": W, "b": B})
    np.testing.assert_allclose(first, want, rtol=1e-5, atol=1e-6)
    writes = driver.log.count("write")
    held = len(driver.live)
    (again,) = run(made, X)
    np.testing.assert_array_equal(again, first)
    assert driver.log.count("write") == writes + 1  # the input
    assert len(driver.live) == held  # buffers are used again
    assert made.host_steps == []


def test_a_new_parameter_is_used_by_the_next_run() -> None:
    made = executable(layer(), NumpyDriver())
    for value in (W, W * 2, np.zeros_like(W)):
        made.set_param("w", value)
        made.set_param("b", B)
        (got,) = run(made, X)
        np.testing.assert_allclose(got, evaluate(layer(), {"x": X, "w": value, "b": B})[0], rtol=1e-5, atol=1e-5)


def test_what_depends_on_parameters_only_is_computed_when_they_are_set() -> None:
    g = Graph("fold")
    x, w = g.input("x", f32[4, 8]), g.param("w", f32[8, 6])
    g.outputs(matmul(x, exp(w)))
    driver = NumpyDriver()
    made = executable(g, driver)
    for value in (W, -W):
        made.set_param("w", value)
        for _ in range(2):
            np.testing.assert_allclose(run(made, X)[0], evaluate(g, {"x": X, "w": value})[0], rtol=1e-5, atol=1e-5)
    assert driver.log.count("launch") == 6


def test_host_steps_are_named_and_cross_over_only_where_needed() -> None:
    g = Graph("mixed")
    x = g.input("x", f32[4, 8])
    a = exp(x * 2.0)
    b = sin(exp(a))
    g.outputs(reduce_sum(b, axes=(1,)), a)
    driver = NumpyDriver()
    made = executable(g, driver, lambda node: node.op.name in ("exp", "sin"))
    assert made.host_steps == ["exp", "exp", "sin"]
    got = run(made, X)
    for one, want in zip(got, evaluate(g, {"x": X}), strict=True):
        np.testing.assert_allclose(one, want, rtol=1e-5)
    assert driver.log.count("write") == 2  # x, and what sin made
    assert driver.log.count("read") == 2  # what exp reads, and the sum


def test_a_device_may_have_kernels_of_its_own_for_steps() -> None:
    """A step of one op runs on the device where there is a launchable for it."""
    g = Graph("own")
    x = g.input("x", f32[4, 8])
    g.outputs(exp(sin(x)))
    k = KernelBuilder("sine")
    given = k.input("in0", f32[4, 8])
    k.output("out0", f32[4, 8], lambda index: k.sin(given[index]))
    driver = NumpyDriver()
    lir = plan(g, whole=lambda node: node.op.name == "sin")

    class Own(OffloadBackend):
        name = "own"

        def launchable(self, step: Step) -> Made | None:
            return Made(k.build()) if step.name == "sin" else None

    made = Own(driver).compile(lir)
    assert made.host_steps == []
    np.testing.assert_allclose(run(made, X)[0], np.exp(np.sin(X)), rtol=1e-6)
    assert driver.log.count("launch") == 2


def test_updates_start_from_what_they_change_and_leave_inputs_alone() -> None:
    g = Graph("update")
    cache, new, at = g.input("cache", f32[6, 3]), g.input("new", f32[2, 3]), g.input("at", i32[()])
    zero = g.constant(np.int32(0))
    first = dynamic_update_slice(cache, new, (at, zero))
    second = dynamic_update_slice(first, mul(new, new), (zero, zero))
    g.outputs(add(second, second), cache)
    arrays = [X.reshape(-1)[:18].reshape(6, 3).copy(), X[:2, :3].copy(), np.array(3, np.int32)]
    want = evaluate(g, dict(zip(("cache", "new", "at"), arrays, strict=True)))
    copies = []
    for in_place in (False, True):
        driver = NumpyDriver(in_place=in_place)
        for got, one in zip(run(executable(g, driver), *arrays), want, strict=True):
            np.testing.assert_allclose(got, one, rtol=1e-6)
        copies.append(driver.log.count("copy"))
    assert copies == [1, 1]  # the input is copied, what was made here is changed where it is


def test_symbolic_sizes_are_launch_arguments() -> None:
    n = sym("n", 0)
    g = Graph("rows")
    x = g.input("x", f32[n, 8])
    g.outputs(softmax(x, axis=1), transpose(x, (1, 0)))
    driver = NumpyDriver()
    made = executable(g, driver)
    for rows in (4, 0, 1, 9):
        array = RNG.standard_normal((rows, 8)).astype(np.float32)
        for got, want in zip(run(made, array, n=rows), evaluate(g, {"x": array}), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_results_that_are_leaves_or_given_twice() -> None:
    g = Graph("leaves")
    x = g.input("x", f32[4, 8])
    w = g.param("w", f32[8, 6])
    y = neg(x)
    g.outputs(x, y, w, y, g.constant(np.float32(3)))
    made = executable(g, NumpyDriver())
    made.set_param("w", W)
    for got, want in zip(run(made, X), (X, -X, W, -X, np.float32(3)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_memory_is_used_again_within_a_run_and_short_memory_is_an_error() -> None:
    g = Graph("chain")
    x = g.input("x", f32[64, 64])
    for _ in range(6):
        x = transpose(neg(x), (1, 0))
    g.outputs(x)
    big = RNG.standard_normal((64, 64)).astype(np.float32)
    driver = NumpyDriver()
    made = executable(g, driver, limits=FusionLimits(max_steps=1))
    np.testing.assert_array_equal(run(made, big)[0], big)
    assert driver.peak <= 4 * big.nbytes + 4096
    small = executable(g, NumpyDriver(memory=2 * big.nbytes), limits=FusionLimits(max_steps=1))
    with pytest.raises(OutOfMemoryError):
        run(small, big)
    assert run(made, big)[0].shape == (64, 64)


def test_waiting_buffers_make_room_for_others() -> None:
    driver = NumpyDriver(memory=4096)
    pool = BufferPool(driver)
    buffer, room = pool.take(3000)
    pool.give(buffer, room)
    assert pool.free_bytes == room
    other, _ = pool.take(2000)
    assert other.size >= 2000
    assert pool.free_bytes == 0


def test_a_pool_keeps_no_more_than_it_may() -> None:
    driver = NumpyDriver()
    pool = BufferPool(driver, kept_bytes=1000)
    pairs = [pool.take(600) for _ in range(3)]
    for buffer, room in pairs:
        pool.give(buffer, room)
    assert len(driver.live) == 1


@pytest.mark.parametrize("size", [0, 1, 256, 257, 1000, 4096, 4097, 10**6, 10**9 + 7])
def test_room_is_enough_and_not_much_more(size: int) -> None:
    assert max(size, 1) <= room_for(size) <= max(256, size * 9 // 8 + 1)
    assert room_for(size) % 4 == 0
    assert room_for(room_for(size)) == room_for(size)


def test_many_threads_share_one_executable() -> None:
    made = executable(layer(), NumpyDriver())
    made.set_param("w", W)
    made.set_param("b", B)
    arrays = [RNG.standard_normal((4, 8)).astype(np.float32) for _ in range(16)]
    alone = [run(made, a)[0] for a in arrays]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda a: run(made, a)[0], arrays))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)


def test_observers_see_every_step() -> None:
    made = executable(layer(), NumpyDriver())
    made.set_param("w", W)
    made.set_param("b", B)
    out = np.empty((4, 6), np.float32)
    seen: list[np.ndarray] = []

    def tell(at: int, begin: int, end: int, spans: Sequence[Any], read: Callable[[str], np.ndarray]) -> None:
        assert end >= begin
        seen.append(read(made.lir.schedule[at].outputs[0]))

    made.run_observed([X], [out], {}, None, tell)
    np.testing.assert_array_equal(seen[-1], out)


def test_clones_share_what_is_uploaded_until_it_is_set() -> None:
    g = Graph("prepared")
    x, w, b = g.input("x", f32[4, 8]), g.param("w", f32[8, 6]), g.param("b", f32[6])
    g.outputs(matmul(x, exp(w)) + b)
    weights = [RNG.standard_normal((8, 6)).astype(np.float32) for _ in range(3)]
    biases = [RNG.standard_normal(6).astype(np.float32) for _ in range(3)]
    driver = NumpyDriver()
    first = executable(g, driver)

    def check(made: Any, w: np.ndarray, b: np.ndarray) -> None:
        np.testing.assert_allclose(run(made, X)[0], evaluate(g, {"x": X, "w": w, "b": b})[0], rtol=1e-4, atol=1e-4)

    first.set_param("w", weights[0])
    first.set_param("b", biases[0])
    check(first, weights[0], biases[0])
    driver.log.clear()
    second = first.clone()
    check(second, weights[0], biases[0])
    assert driver.log.count("write") == 1  # the input
    second.set_param("w", weights[1])
    check(first, weights[0], biases[0])
    check(second, weights[1], biases[0])
    first.set_param("b", biases[1])
    first.set_param("w", weights[2])
    check(first, weights[2], biases[1])
    check(second, weights[1], biases[0])
    second.set_param("b", biases[2])
    check(first, weights[2], biases[1])
    check(second, weights[1], biases[2])


def test_a_host_result_that_is_a_view_of_what_another_result_is_written_over() -> None:
    g = Graph("view")
    x = g.input("x", f32[4, 8])
    part = x[1:3]
    g.outputs(add(x, reduce_sum(part, axes=(0,))), part)
    made = executable(g, NumpyDriver(), whole=lambda node: node.op.name == "slice")
    assert made.host_steps == ["slice"]
    given, some = X.copy(), np.empty((2, 8), np.float32)
    made.run([given], [given, some], {})
    np.testing.assert_array_equal(some, X[1:3])
    np.testing.assert_allclose(given, X + X[1:3].sum(axis=0), rtol=1e-6)
