"""Schedules of matmuls by measuring on the GPU: `tune="beam"`.

Each matmul of a plan is searched for once on a card, and what was found is kept in the store. Candidates are compiled
on all cores without the card; each has to give the results of the table's schedule before it is timed, and those far
behind the best are not timed again. Other kernels keep the schedules that their sizes choose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from strata.backends.driver import DeviceDriver
from strata.backends.recipe import Launch, number
from strata.backends.triton.codegen.product import find_product
from strata.backends.triton.codegen.render import Rendered, normal_form, render
from strata.backends.triton.launch.workers import compile_ahead
from strata.backends.triton.target import Gpu
from strata.backends.triton.tuning.search import product_candidates
from strata.cache import default_store, digest
from strata.core import Symbol
from strata.errors import StrataError
from strata.kernel import Buffer, Kernel, show_kernel
from strata.lir import Lir

VERSION = "triton-schedules-1"
MOST_BYTES = 8 << 30  # of the arrays that one kernel is tried on
USUAL_SIZE = 1024  # of a symbolic axis
GAIN = 0.02  # by which a schedule has to be better than the table's
LAUNCHES = 10  # timed together
ROUNDS = 5
FAR = 1.5  # times the best so far: such a candidate is timed once


@dataclass(frozen=True, slots=True)
class FoundSchedule:
    """What a search found: the schedule, its time and that of the table's schedule, in seconds."""

    schedule: str
    seconds: float
    before: float
    trials: int


def tuned(
    lir: Lir, driver: DeviceDriver, gpu: Gpu, card: str, progress: Callable[[int, int], None] | None = None
) -> Lir:
    """The plan with a schedule for every matmul; `progress(done, all)` is told."""
    wanted = {name: k for name, k in lir.kernels.items() if can_tune(k, gpu)}
    made: dict[str, Kernel] = {}
    for at, (name, kernel) in enumerate(wanted.items()):
        if progress is not None:
            progress(at, len(wanted))
        found = best_schedule(kernel, driver, gpu, card)
        if found is not None and found.schedule:
            made[name] = replace(kernel, schedule=found.schedule)
    schedule = tuple(
        replace(s, kernel=replace(s.kernel, schedule=made[s.name].schedule)) if s.kernel is not None and s.name in made
        else s for s in lir.schedule
    )  # fmt: skip
    return replace(lir, schedule=schedule)


def can_tune(kernel: Kernel, gpu: Gpu) -> bool:
    """Whether a kernel is a matmul on arrays of a size that can be tried."""
    if kernel.schedule or find_product(normal_form(kernel), gpu) is None:
        return False
    sizes = usual_sizes(kernel)
    needed = [number(b.type.nbytes, sizes) for b in kernel.buffers]
    return all(needed) and sum(needed) <= MOST_BYTES


def best_schedule(kernel: Kernel, driver: DeviceDriver, gpu: Gpu, card: str) -> FoundSchedule | None:
    """From the store, or searched for. None where nothing could be measured."""
    anonymous = replace(kernel, name="kernel")
    text = show_kernel(anonymous)
    key = digest(VERSION, text, gpu.key, card)
    store = default_store()
    kept = store.get(key)
    if kept is None:
        found = search_schedules(anonymous, driver, gpu)
        data = [found.schedule, found.seconds, found.before, found.trials] if found else None
        kept = json.dumps(data).encode()
        store.put(key, kept, {"kind": "schedule", "text": text[:4000], "target": gpu.key, "made by": VERSION})
    read = json.loads(kept)
    return FoundSchedule(*read) if read else None


def search_schedules(kernel: Kernel, driver: DeviceDriver, gpu: Gpu, most: int | None = None) -> FoundSchedule | None:
    """Candidates, measured on the card; the table's schedule is the first of them."""
    product = find_product(normal_form(kernel), gpu)
    assert product is not None
    texts = [str(product.tiles), *(str(t) for t in product_candidates(product.form, product.sums, gpu))]
    trials = {text: render(replace(kernel, schedule=text), gpu) for text in dict.fromkeys(texts[:most])}
    rejected = compile_ahead([p for r in trials.values() for p in r.programs], gpu)
    bench = _CardBench(kernel, driver)
    try:
        times: dict[str, float] = {}
        for text, rendered in trials.items():
            if not any(p.text() in rejected for p in rendered.programs):
                seconds = bench.seconds(rendered, min(times.values(), default=float("inf")))
                if seconds is not None:
                    times[text] = seconds
    finally:
        bench.close()
    first = texts[0]
    if first not in times:
        return None
    best = min(times, key=lambda text: times[text])
    chosen = best if times[best] < times[first] * (1 - GAIN) else first
    return FoundSchedule(chosen, times[chosen], times[first], len(times))


class _CardBench:
    """One kernel on arrays of its own: candidates are checked against the first one and timed."""

    def __init__(self, kernel: Kernel, driver: DeviceDriver) -> None:
        self.kernel, self.driver = kernel, driver
        self.sizes = usual_sizes(kernel)
        self.held: list[Any] = []
        random = np.random.default_rng(0)
        self.places = []
        for buffer in kernel.inputs:
            place = self._room(number(buffer.type.nbytes, self.sizes))
            driver.write(place, _values(buffer, self.sizes, random))
            self.places.append(place)
        self.outputs = [self._room(number(b.type.nbytes, self.sizes)) for b in kernel.outputs]
        most = max(number(b.type.nbytes, self.sizes) for b in kernel.outputs)
        self.spoiled = self._room(most)
        driver.write(self.spoiled, np.full(most, 0xFF, np.uint8))
        self.expected: list[np.ndarray] | None = None

    def _room(self, size: int) -> Any:
        self.held.append(self.driver.allocate(max(256, size)))
        return self.driver.place(self.held[-1])

    def seconds(self, rendered: Rendered, best: float) -> float | None:
        """The least time of a launch; None where the card refuses it or its results differ."""
        driver = self.driver
        try:
            made = driver.make_rendered(rendered)  # type: ignore[attr-defined]
            scratch = [self._room(size) for size in made.scratch(self.sizes)]
            places = [*self.places, *self.outputs, *scratch]
            for buffer, place in zip(self.kernel.outputs, self.outputs, strict=True):  # it has to write all of them
                driver.copy(self.spoiled, place, number(buffer.type.nbytes, self.sizes))
            driver.launch(made, places, self.sizes)
            driver.finish()
            if not self._agrees():
                return None
            action = Launch(made, tuple((i, 0) for i in range(len(places))), self.sizes)
            recorded = driver.record([action] * LAUNCHES)
            least = float("inf")
            for _ in range(ROUNDS):
                begin = perf_counter()
                driver.play(recorded, places)
                driver.finish()
                least = min(least, (perf_counter() - begin) / LAUNCHES)
                if least > FAR * best:
                    break
        except StrataError:
            return None
        return least

    def _agrees(self) -> bool:
        made = []
        for buffer, place in zip(self.kernel.outputs, self.outputs, strict=True):
            made.append(np.empty(_shape(buffer, self.sizes), buffer.dtype.np))
            self.driver.read(place, made[-1])
        if self.expected is None:
            self.expected = made
        return all(map(_is_near, made, self.expected))

    def close(self) -> None:
        for buffer in self.held:
            self.driver.release(buffer)


def usual_sizes(kernel: Kernel) -> dict[str, int]:
    """Sizes that a kernel of symbolic ones is tried on."""

    def usual(symbol: Symbol) -> int:
        return max(symbol.lo, USUAL_SIZE if symbol.hi is None else min(symbol.hi, USUAL_SIZE))

    return {name: usual(symbol) for name, symbol in kernel.symbols().items()}


def _shape(buffer: Buffer, sizes: Mapping[str, int]) -> Sequence[int]:
    return [number(d, sizes) for d in buffer.shape]


def _values(buffer: Buffer, sizes: Mapping[str, int], random: np.random.Generator) -> np.ndarray:
    shape, dtype = _shape(buffer, sizes), buffer.dtype
    if dtype.is_float:
        return random.standard_normal(shape, np.float32).astype(dtype.np)
    return random.integers(0, 2, shape).astype(dtype.np)


def _is_near(made: np.ndarray, expected: np.ndarray) -> bool:
    """Equal but for the order of sums."""
    if made.dtype.kind in "biu":
        return bool(np.array_equal(made, expected))
    a, b = made.astype(np.float64), expected.astype(np.float64)
    limit = 2e-2 if made.dtype.itemsize < 4 else 1e-4
    return bool(np.abs(a - b).max(initial=0.0) <= limit * max(1.0, np.abs(b).max(initial=0.0)))
