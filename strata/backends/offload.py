"""Plans on a device with its own memory: what is launched, in the order of the schedule.

A device is given by a `DeviceDriver`; everything that is not about one device is here. Parameters and constants are
uploaded once, and one copy serves all programs that hold the same array. A run takes arrays of the host, which go up,
and arrays that are on the device already, and leaves its results there: nothing waits until somebody reads one. Ops
that the device does not take run by their NumPy meaning in between: what they read comes down and what they make goes
up only where somebody on the other side asks for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from strata.backends.base import Arrays, Backend, Entry, Executable, Tell, memory_errors
from strata.backends.bodies import Body
from strata.backends.checks import CHECKS, CheckedValue, RunCheck
from strata.backends.driver import DeviceDriver, Launchable
from strata.backends.entry import entry_of
from strata.backends.loops import KINDS
from strata.backends.pool import OffloadHome
from strata.backends.recipe import (
    HostStep,
    Looped,
    Recipe,
    RecipeMaker,
    RepeatedBlock,
    Sequenced,
    Turns,
    append_actions,
    inner_name,
    shared_memory,
)
from strata.backends.resident import DeviceArray
from strata.core import Table, here
from strata.errors import DeviceError, MemoryLimitError, OutOfMemoryError, StrataError
from strata.lir import Lir, Step, may_take_over
from strata.mir import Constant, Leaf, Op


class OffloadBackend(Backend):
    """Plans over a driver."""

    def __init__(self, driver: DeviceDriver, name: str | None = None) -> None:
        self.driver = driver
        self.home: OffloadHome = OffloadHome(name or self.name or "device", driver)

    def launchable(self, step: Step) -> Launchable | None:
        """What runs a step of one op, over its inputs and outputs; None where that is the host."""
        return None

    def made_steps(self, lir: Lir) -> list[Launchable | None]:
        """What runs each step of a plan; None where that is the host."""
        kernels = {name: self.driver.made(kernel) for name, kernel in lir.kernels.items()}
        return [kernels[s.name] if s.kernel is not None else self._made_step(s) for s in lir.schedule]

    def _made_step(self, step: Step) -> Launchable | None:
        if step.name in CHECKS and self.capabilities.runs_bodies:
            return CheckedValue(step.nodes[0], self.driver)
        if not step.bodies or step.name not in KINDS or not (self.driver.has_parts and self.driver.has_guards):
            return self.launchable(step)
        bodies = [Body(lir, self.made_steps(lir), self.driver) for lir in step.bodies]
        return KINDS[step.name](step.nodes[0], bodies) if all(body.is_whole for body in bodies) else None

    def takes_bodies(self, op: Op) -> bool:
        """Whether a loop or a branch runs on the device: all that is inside of it does."""
        if op.name not in KINDS or not self.capabilities.runs_bodies:
            return False
        nodes = (node for nested in op.nested() for node in nested.graph.nodes())
        return all(isinstance(n.op, (Leaf, Constant)) or self.takes(n.op, [x.type for x in n.inputs]) for n in nodes)

    def compile(self, lir: Lir) -> OffloadExecutable:
        return OffloadExecutable(lir, self)


class OffloadExecutable(Executable):
    """A plan on a device. Runs take turns in asking; the device does them in one order anyway."""

    observes_steps = True
    home: OffloadHome

    def __init__(self, lir: Lir, backend: OffloadBackend) -> None:
        driver = backend.driver
        self.driver, self.home = driver, backend.home
        super().__init__(lir, driver.lock)
        with driver.lock:
            self.made: list[Any] = backend.made_steps(lir)
            self.checks: dict[str, RunCheck] = {}
            for at, made in enumerate(self.made):
                if made is not None:
                    made.load()
                    self.checks |= {inner_name(at, name): check for name, check in made.checks.items()}
                    self.values |= {inner_name(at, name): array for name, array in made.constants.items()}
        self._steps = [(at, s) for at, s in enumerate(lir.schedule) if s.phase != "prologue"]
        self._on_device: dict[str, DeviceArray] = {}  # of the values that stay, uploaded when a step first asks
        self._version: object = object()  # of the values that stay
        self._homes = shared_memory(lir, driver.in_place)
        self._recipes: Table[Any, Recipe] = Table("device recipes")
        self.resident_entry: Entry | None = None
        self._limit: int | None = None
        self._over: dict[tuple[str, int], bool] = {}  # by input and output, where one takes over the other

    def is_host_step(self, at: int, step: Step) -> bool:
        return self.made[at] is None

    def hold(self, name: str, array: Any) -> None:
        self._drop(name)
        super().hold(name, array)
        if isinstance(array, DeviceArray):
            self._on_device[name] = array

    def forget(self) -> None:
        was_prepared = self.is_prepared
        super().forget()
        for buffer in self.lir.buffers if was_prepared else ():
            if buffer.role == "weight":
                self._drop(buffer.name)

    def _drop(self, name: str) -> None:
        """Give up a value that stayed: its memory goes back with the last that knows it."""
        self.values.pop(name, None)
        self._on_device.pop(name, None)
        self._changed()

    def _changed(self) -> None:
        """Values that stay are others, or elsewhere."""
        self._version, self.resident_entry = object(), None

    def part(self, other: Self) -> None:
        """Kernels and what is uploaded are shared."""
        super().part(other)
        self._on_device = dict(other._on_device)
        self._changed()
        self._recipes = Table("device recipes")

    # memory

    @property
    def scratch_bytes(self) -> int | None:
        """Of the arena, for a plan of fixed sizes."""
        return None if self.lir.has_dynamic_dims else self._recipe({}).scratch_bytes

    def limit_scratch(self, limit: int) -> None:
        self._limit = limit
        if not self.lir.has_dynamic_dims:
            self._check_limit(self._recipe({}))

    def _check_limit(self, recipe: Recipe) -> None:
        if self._limit is not None and recipe.scratch_bytes > self._limit:
            raise MemoryLimitError(
                f"{self.lir.name!r} needs {recipe.scratch_bytes:,} bytes of scratch memory on {self.home.name}, "
                f"the limit is {self._limit:,}", code="C200", place=here(),
            )  # fmt: skip

    def takes_over(self, name: str, output: int) -> bool:
        """Whether an output may be written where an input lies."""
        found = self._over.get((name, output))
        if found is None:
            found = self._over[name, output] = self._may_take_over(name, output)
        return found

    def _may_take_over(self, name: str, output: int) -> bool:
        if not may_take_over(self.lir, name, output):
            return False
        source, result = dict(self.lir.io.inputs)[name], self.lir.io.outputs[output]
        at = next(i for i, step in enumerate(self.lir.schedule) if result in step.outputs)
        made = self.made[at]
        reads = source in self.lir.schedule[at].inputs
        return made is not None and (not reads or self.driver.in_place or made.writes_over)

    # running

    def run(self, inputs: Arrays, outputs: Arrays, binding: Mapping[str, int], threads: int | None = None) -> None:
        self.run_observed(inputs, outputs, binding, threads, None)

    def run_observed(
        self, inputs: Arrays, outputs: Arrays, binding: Mapping[str, int], threads: int | None, tell: Tell | None
    ) -> None:
        """Where somebody is told, each step is waited for."""
        with self.driver.lock, memory_errors():
            made = self._run(inputs, binding, {}, tell, at_once=True)
            here = [(a, m) for a, m in zip(outputs, made, strict=True) if not isinstance(m, DeviceArray)]
            self.fill([a for a, _ in here], [m for _, m in here])
            for array, result in zip(outputs, made, strict=True):
                if isinstance(result, DeviceArray):
                    self.driver.read(result.place, array)
            self.driver.finish()

    def run_resident(
        self, inputs: Sequence[Any], binding: Mapping[str, int], over: Mapping[int, DeviceArray] | None = None
    ) -> list[DeviceArray]:
        with self.driver.lock, memory_errors():
            made = self._run(inputs, binding, over or {}, None, at_once=False)
            self.driver.submit()
            if self.resident_entry is None and not binding and not any(c.waits for c in self.checks.values()):
                self.resident_entry = entry_of(self, self._recipe(binding), self.lir.io.outputs)
            return [m if isinstance(m, DeviceArray) else self.home.upload(m, self.lir.name) for m in made]

    def _recipe(self, binding: Mapping[str, int], *, apart: bool = False) -> Recipe:
        key = (*binding.items(), apart)
        found = self._recipes.peek(key)
        return found or self._recipes.get_or_make(key, lambda: self._made_recipe(binding, apart))

    def _made_recipe(self, binding: Mapping[str, int], apart: bool) -> Recipe:
        recipe = RecipeMaker(
            self.lir, self._steps, self.made, binding, results=self.lir.io.outputs, homes=self._homes,
            arena=self.driver.has_arena, apart=apart,
        ).make_whole()  # fmt: skip
        self._check_limit(recipe)
        return recipe

    def _run(
        self,
        inputs: Sequence[Any],
        binding: Mapping[str, int],
        over: Mapping[int, DeviceArray],
        tell: Tell | None,
        *,
        at_once: bool,
    ) -> list[Any]:
        """Results, on the device or, where the host made them, there; the lock is held. What is ensured is looked at
        now with `at_once`, or where a run waits for it."""
        if not self.is_prepared:
            self._prepare()
        recipe = self._recipe(binding, apart=tell is not None)
        run = _Run(self, recipe, binding, inputs)
        targets = {self.lir.io.outputs[i]: array for i, array in over.items()}
        try:
            made = run.go(targets, tell)
            self._check(recipe, at_once=at_once)
        except OutOfMemoryError as error:
            raise self._named(error, recipe) from error
        finally:
            run.close()
        seen: set[str] = set()
        results = []
        for name in self.lir.io.outputs:
            result = made.get(name)
            if result is None:
                result = run.leaf(name)
            elif name in seen:  # each result has its own memory
                result = result.copy()
            seen.add(name)
            results.append(result)
        return results

    def _check(self, recipe: Recipe, *, at_once: bool) -> None:
        """Raise the first error that the device noted. Where nothing waits, the home looks when something is read."""
        found = self.noted(recipe)
        if at_once or any(check.waits for check, _ in found):
            self.home.raise_noted(found)
        elif found:
            self.home.expect(found)

    def noted(self, recipe: Recipe) -> list[tuple[RunCheck, DeviceArray]]:
        """What a recipe ensures, and the memory in which a failure is noted."""
        return [(self.checks[name], self._kept_array(name)) for name in recipe.kept if name in self.checks]

    def _named(self, error: OutOfMemoryError, recipe: Recipe) -> OutOfMemoryError:
        """The error, with the plan's largest buffers."""
        kept = [(n, a.nbytes) for n, a in self._on_device.items()]
        results = [(n, int(t.nbytes)) for n, t in zip(recipe.results, recipe.result_types, strict=True)]
        largest = sorted([("scratch", recipe.scratch_bytes), *kept, *results], key=lambda pair: -pair[1])[:3]
        error.operands = (
            f"{self.lir.name!r} takes {recipe.scratch_bytes:,} bytes of scratch memory; largest: "
            + ", ".join(f"{name} {size:,}" for name, size in largest),
        )  # fmt: skip
        error.fix = error.fix or "smaller batches, or st.memory(device) to see who holds memory"
        return error

    def _prepare(self) -> None:
        """Compute what depends on parameters only; it stays on the device."""
        weights = [b.name for b in self.lir.buffers if b.role == "weight"]
        recipe = RecipeMaker(
            self.lir, self.prologue, self.made, {}, results=weights, homes=self._homes, arena=self.driver.has_arena,
            apart=False,
        ).make_whole()  # fmt: skip
        run = _Run(self, recipe, {}, [None] * len(self.lir.io.inputs))
        try:
            made = run.go({}, None)
            self._check(recipe, at_once=True)
            for name in weights:
                if name in made and isinstance(made[name], DeviceArray):
                    self._on_device[name] = made[name]
                elif name in made:
                    self.values[name] = made[name]
        finally:
            run.close()
        read = {n for _, step in self._steps for n in step.read_buffers} | set(self.lir.io.outputs)
        for name in set(recipe.kept) - read:  # nothing but what was computed now reads it
            self._on_device.pop(name, None)
        self._changed()
        self.is_prepared = True

    def kept_place(self, name: str) -> Any:
        """Where a value is that stays."""
        return self._kept_array(name).place

    def _kept_array(self, name: str) -> DeviceArray:
        found = self._on_device.get(name)
        if found is None:
            found = self._on_device[name] = self.home.shared(self.values[name], self.lir.name)
        return found


class _Run:
    """One run: its scratch memory, and values on the host."""

    def __init__(
        self, owner: OffloadExecutable, recipe: Recipe, binding: Mapping[str, int], inputs: Sequence[Any]
    ) -> None:
        self.owner, self.recipe, self.binding = owner, recipe, binding
        self.driver, self.home = owner.driver, owner.home
        self.inputs = list(inputs)
        self.hosted: dict[str, np.ndarray] = {}
        self.taken: list[tuple[Any, int]] = []
        self.places: list[Any] = []
        self.made: dict[str, Any] = {}

    def go(self, over: Mapping[str, DeviceArray], tell: Tell | None) -> dict[str, Any]:
        """Everything that the recipe says. Gives results by name; what the host made is on the host."""
        recipe, driver, home, who = self.recipe, self.driver, self.home, self.owner.lir.name
        places = self.places
        for room in recipe.rooms:
            self.taken.append(home.take(room, who))
            places.append(driver.place(self.taken[-1][0]))
        for _ in self.inputs:
            places.append(None)
        first = len(recipe.rooms)
        for i in recipe.needed:
            places[first + i] = self._uploaded(i).place
        for name, kind in zip(recipe.results, recipe.result_types, strict=True):
            target = over.get(name)
            if target is None:
                target = home.empty(kind.dtype.np, kind.shape, who)
            self.made[name] = target
            places.append(target.place)
        places.extend(self._kept())
        places.extend([None] * recipe.rows)
        for part in recipe.parts:
            begin = time.perf_counter_ns() if tell is not None else 0
            self._do(part)
            if tell is not None:
                driver.finish()
                tell(part.at, begin, time.perf_counter_ns(), [], self.array)
        results = set(self.owner.lir.io.outputs) | {b.name for b in self.owner.lir.buffers if b.role == "weight"}
        for name in results & self.hosted.keys():
            self.made.setdefault(name, self.hosted[name])
        return self.made

    def _kept(self) -> list[Any]:
        recipe, owner = self.recipe, self.owner
        known = recipe.kept_places
        if known is None or known[0] is not owner._version:
            places = [owner.kept_place(name) for name in recipe.kept]
            known = recipe.kept_places = (owner._version, places)
        found: list[Any] = known[1]
        return found

    def _uploaded(self, i: int) -> DeviceArray:
        given = self.inputs[i]
        if type(given) is DeviceArray:
            if given.home is not self.home:
                raise DeviceError(
                    f"an input is on {given.home.name!r}, the program runs on {self.home.name!r}", code="E103",
                    place=here(),
                )  # fmt: skip
            return given
        made = self.inputs[i] = self.home.upload(given, self.owner.lir.name)
        self.hosted[self.recipe.inputs[i]] = given
        return made

    def _do(self, part: Any) -> None:
        match part:
            case HostStep():
                self._on_host(part)
            case Looped(loop=RepeatedBlock() as loop):
                self._repeat(loop)
            case Looped(loop=Turns() as loop):
                self._turn(loop)
            case Sequenced():
                if part.made is None:
                    part.made = self.driver.record(part.actions)
                self.driver.play(part.made, self.places)

    def _all(self, loop: RepeatedBlock | Turns, which: str) -> None:
        """One of the lists of actions of a loop."""
        parts = loop.made.get(which)
        if parts is None:
            parts = loop.made[which] = []
            append_actions(parts, loop.lists()[which], 0)
        for part in parts:
            self._do(part)

    def _repeat(self, loop: RepeatedBlock) -> None:
        for number in range(loop.count):
            for row in loop.rows:
                base, offset = row.source
                self.places[row.number] = self.driver.part(self.places[base], offset + number * row.stride)
            self._all(loop, "block")

    def _turn(self, loop: Turns) -> None:
        self._all(loop, "start")
        done = 0
        while loop.limit is None or done < loop.limit:
            left = loop.turns if loop.limit is None else min(loop.turns, loop.limit - done)
            self._all(loop, "block" if left == loop.turns else "tail")
            flags = np.empty((left + 1, self.driver.alignment), np.uint8)
            base, offset = loop.flags
            self.driver.read(self.driver.part(self.places[base], offset), flags)
            done += int(np.count_nonzero(flags[:left, 0]))
            if not flags[left, 0]:
                break
            self._all(loop, "again")
        self._all(loop, "odd" if done % 2 else "even")

    def _on_host(self, part: HostStep) -> None:
        step = part.step
        try:
            results = self.owner.run_host(step, [self.array(name) for name in step.inputs], self.binding)
        except StrataError as error:
            if error.place is None and step.nodes:
                error.place = step.nodes[0].origin.place
            raise
        for name, result in zip(step.outputs, results, strict=True):
            self.hosted[name] = np.ascontiguousarray(result).reshape(np.shape(result))
        for name, (base, offset) in part.uploads:
            self.driver.write(self.driver.part(self.places[base], offset), self.hosted[name])

    def array(self, name: str) -> np.ndarray:
        """The value on the host; it comes down if it is not there."""
        found = self.hosted.get(name)
        if found is None:
            found = self.hosted[name] = self._fetched(name)
        return found

    def _fetched(self, name: str) -> np.ndarray:
        if name in self.recipe.inputs:
            given = self.inputs[self.recipe.inputs.index(name)]
            return given.numpy() if isinstance(given, DeviceArray) else given
        kept = self.owner.values.get(name)
        if isinstance(kept, np.ndarray):
            return kept
        if kept is None:
            kept = self.owner._on_device.get(name)
        if kept is not None:
            found: np.ndarray = kept.numpy()
            return found
        kind = self.owner.lir.buffer(name).type.bind(self.binding)
        made = np.empty(kind.static_shape, kind.dtype.np)
        base, offset = self.recipe.places[name]
        self.driver.read(self.driver.part(self.places[base], offset), made)
        return made

    def leaf(self, name: str) -> Any:
        """A result that no step makes, in its own memory where it is on the device."""
        if name in self.recipe.inputs:
            given = self.inputs[self.recipe.inputs.index(name)]
            return given.copy() if isinstance(given, DeviceArray) and name not in self.hosted else self.array(name)
        found = self.owner._on_device.get(name)
        return self.array(name) if found is None else found.copy()

    def close(self) -> None:
        """Scratch memory goes back: later runs come later on the device, too."""
        for buffer, room in self.taken:
            self.home.give(buffer, room, self.owner.lir.name)
        self.taken.clear()
