"""Schedules of matmuls and attention by measuring on the GPU: `tune="beam"`.

Each of a plan is searched for once on a card, and what was found is kept in the store. Candidates are compiled on all
cores without the card; each has to give the results of the table's schedule before it is timed, and those far behind
the best are not timed again. Other kernels keep the schedules that their sizes choose.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np

from strata.backends.driver import DeviceDriver
from strata.backends.recipe import Launch, number
from strata.backends.triton.codegen.attention import render_attention, takes_attention
from strata.backends.triton.codegen.attention_backward import BESIDE, render_backward, takes_backward
from strata.backends.triton.codegen.product import find_product
from strata.backends.triton.codegen.render import Rendered, normal_form, render
from strata.backends.triton.launch.workers import compile_ahead
from strata.backends.triton.target import Gpu
from strata.backends.triton.tuning.search import attention_candidates, product_candidates
from strata.cache import default_store, digest
from strata.core import Symbol, TensorType
from strata.errors import StrataError
from strata.kernel import Kernel
from strata.lir import Lir, Step

VERSION = "triton-schedules-2"
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


@dataclass(frozen=True)
class Search:
    """What schedules are tried for: the memory that it reads and writes, and how it is rendered; "" is the table's."""

    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    candidates: Callable[[], Iterable[str]]
    render: Callable[[str], Rendered]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that symbols are tried with."""
        found: dict[str, Symbol] = {}
        for kind in (*self.inputs, *self.outputs):
            found |= kind.symbols()
        return {name: _usual(symbol) for name, symbol in sorted(found.items())}

    @property
    def fits(self) -> bool:
        """Whether it is on arrays of a size that can be tried."""
        sizes = self.sizes
        needed = [number(kind.nbytes, sizes) for kind in (*self.inputs, *self.outputs)]
        return all(needed) and sum(needed) <= MOST_BYTES


def _usual(symbol: Symbol) -> int:
    return max(symbol.lo, USUAL_SIZE if symbol.hi is None else min(symbol.hi, USUAL_SIZE))


def search_of(kernel: Kernel, gpu: Gpu) -> Search | None:
    """Of a kernel that is a matmul."""
    anonymous = replace(kernel, name="kernel")
    product = None if kernel.schedule else find_product(normal_form(anonymous), gpu)
    if product is None:
        return None

    def candidates() -> Iterator[str]:
        return map(str, product_candidates(product.form, product.sums, gpu))

    inputs, outputs = (tuple(b.type for b in buffers) for buffers in (kernel.inputs, kernel.outputs))
    found = Search(inputs, outputs, candidates, lambda text: render(replace(anonymous, schedule=text), gpu))
    return found if found.fits else None


def searches_of(step: Step, lir: Lir, gpu: Gpu) -> list[Callable[[list[str]], Search]]:
    """Of a step that is attention: one search, or for gradients one for each of two programs, after each other. They
    take what was found before them."""
    if step.kernel is not None or step.schedule or step.views is None:
        return []
    node, views = step.nodes[0], step.views
    op, types = node.op, [x.type for x in node.inputs]
    is_backward = takes_backward(op, types)
    if not is_backward and not takes_attention(op, types):
        return []
    inputs, outputs = (tuple(lir.buffer(n).type for n in names) for names in (step.inputs, step.outputs))
    sizes = op.sizes(*types[:3])  # type: ignore[attr-defined]
    width = max(op.head_dim, sizes.value_dim)  # type: ignore[attr-defined]

    def candidates() -> Iterator[str]:
        return map(str, attention_candidates(sizes.queries, width, types[0].dtype.bits))

    def forward(found: list[str]) -> Search:
        return Search(inputs, outputs, candidates, lambda text: render_attention(node, views, gpu, text))

    def backward(found: list[str]) -> Search:
        before = list(found)
        return Search(inputs, outputs, candidates, lambda text: render_backward(node, views, gpu, [*before, text]))

    made: list[Callable[[list[str]], Search]] = [backward, backward] if is_backward else [forward]
    return made if made[0]([]).fits else []


def tuned(
    lir: Lir, driver: DeviceDriver, gpu: Gpu, card: str, progress: Callable[[int, int], None] | None = None
) -> Lir:
    """The plan with a schedule for every matmul and every attention; `progress(done, all)` is told."""
    kernels = {name: search for name, k in lir.kernels.items() if (search := search_of(k, gpu)) is not None}
    steps = {at: searches for at, s in enumerate(lir.schedule) if (searches := searches_of(s, lir, gpu))}
    total, done = len(kernels) + sum(map(len, steps.values())), 0

    def searched(search: Search) -> str:
        nonlocal done
        if progress is not None:
            progress(done, total)
        done += 1
        found = best_schedule(search, driver, gpu, card)
        return found.schedule if found is not None else ""

    made = {name: text for name, search in kernels.items() if (text := searched(search))}
    schedule = list(lir.schedule)
    for at, s in enumerate(schedule):
        if s.kernel is not None and s.name in made:
            schedule[at] = replace(s, kernel=replace(s.kernel, schedule=made[s.name]))
    for at, searches in steps.items():
        texts: list[str] = []
        for make in searches:
            texts.append(searched(make(texts)))
        if any(texts):
            schedule[at] = replace(schedule[at], schedule=BESIDE.join(texts))
    return replace(lir, schedule=tuple(schedule))


def best_schedule(search: Search, driver: DeviceDriver, gpu: Gpu, card: str) -> FoundSchedule | None:
    """From the store, or searched for. None where nothing could be measured."""
    text = f"{search.inputs} {search.outputs}\n{search.render('')}"
    key = digest(VERSION, text, gpu.key, card)
    store = default_store()
    kept = store.get(key)
    if kept is None:
        found = search_schedules(search, driver, gpu)
        data = [found.schedule, found.seconds, found.before, found.trials] if found else None
        kept = json.dumps(data).encode()
        store.put(key, kept, {"kind": "schedule", "text": text[:4000], "target": gpu.key, "made by": VERSION})
    read = json.loads(kept)
    return FoundSchedule(*read) if read else None


def search_schedules(search: Search, driver: DeviceDriver, gpu: Gpu, most: int | None = None) -> FoundSchedule | None:
    """Candidates, measured on the card; the table's schedule is the first of them."""
    texts = ["", *search.candidates()][:most]
    trials: dict[str, Rendered] = {}
    seen: set[str] = set()  # blocks that are cut down to what there is may be the same
    for text in texts:
        made = search.render(text)
        if str(made) not in seen:
            seen.add(str(made))
            trials[text] = made
    rejected = compile_ahead([p for r in trials.values() for p in r.programs], gpu)
    bench = _CardBench(search, driver)
    try:
        times: dict[str, float] = {}
        for text, made in trials.items():
            if not any(p.text() in rejected for p in made.programs):
                seconds = bench.seconds(made, min(times.values(), default=float("inf")))
                if seconds is not None:
                    times[text] = seconds
    finally:
        bench.close()
    if "" not in times:
        return None
    best = min(times, key=lambda text: times[text])
    chosen = best if times[best] < times[""] * (1 - GAIN) else ""
    return FoundSchedule(chosen, times[chosen], times[""], len(times))


class _CardBench:
    """Candidates on arrays of their own, checked against the first one and timed."""

    def __init__(self, search: Search, driver: DeviceDriver) -> None:
        self.search, self.driver = search, driver
        self.sizes = search.sizes
        self.held: list[Any] = []
        random = np.random.default_rng(0)
        self.places = []
        for kind in search.inputs:
            place = self._room(number(kind.nbytes, self.sizes))
            driver.write(place, _values(kind, self.sizes, random))
            self.places.append(place)
        self.outputs = [self._room(number(kind.nbytes, self.sizes)) for kind in search.outputs]
        most = max(number(kind.nbytes, self.sizes) for kind in search.outputs)
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
            for kind, place in zip(self.search.outputs, self.outputs, strict=True):  # it has to write all of them
                driver.copy(self.spoiled, place, number(kind.nbytes, self.sizes))
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
        for kind, place in zip(self.search.outputs, self.outputs, strict=True):
            made.append(np.empty(_shape(kind, self.sizes), kind.dtype.np))
            self.driver.read(place, made[-1])
        if self.expected is None:
            self.expected = made
        return all(map(_is_near, made, self.expected))

    def close(self) -> None:
        for buffer in self.held:
            self.driver.release(buffer)


def _shape(kind: TensorType, sizes: Mapping[str, int]) -> Sequence[int]:
    return [number(d, sizes) for d in kind.shape]


def _values(kind: TensorType, sizes: Mapping[str, int], random: np.random.Generator) -> np.ndarray:
    shape, dtype = _shape(kind, sizes), kind.dtype
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
