"""Bodies of loops and branches on a device: plans whose launches go where the step around them says.

A body is planned like any graph. Its parameters are the values that every turn of a loop sees: what depends on them
alone is computed once before the turns. Its memory is a part of the scratch memory of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from strata.backends.driver import DeviceDriver, Launchable
from strata.backends.recipe import (
    ARENA_ALIGNMENT,
    Action,
    Copy,
    Launch,
    Looped,
    Operand,
    Recipe,
    RecipeMaker,
    RepeatedBlock,
    Sequenced,
    Turns,
    inner_name,
    moved,
    number,
    shared_memory,
)
from strata.core import DType, Table, bool_, floordiv, sym, u8, u16, u32, u64
from strata.kernel import Axis, Buffer, Const, Kernel, Load, Store, apply, size
from strata.lir import Lir, may_take_over
from strata.mir import leaf_name

_WORDS: dict[int, DType] = {1: u8, 2: u16, 4: u32, 8: u64}


class LaunchedCopies:
    """Kernels that copy bytes, clear flags and tell the two sides of a branch apart: launches, so that loops are one
    graph, and guarded like the rest."""

    def __init__(self, driver: DeviceDriver) -> None:
        self.driver = driver

    def rows(self, source: Operand, target: Operand, count: int, width: int, pitches: tuple[int, int]) -> Launch:
        """Rows of `width` bytes, and their distances in bytes at the source and at the target."""
        word = gcd(gcd(width, 8), gcd(*pitches))
        sizes = {"n": count * (width // word), "w": width // word, "a": pitches[0] // word, "b": pitches[1] // word}
        return Launch(self.driver.made(_spread(_WORDS[word])), (source, target), sizes)

    def copy(self, source: Operand, target: Operand, count: int) -> list[Action]:
        """Bytes from one place to another; nothing where both are the same."""
        if source == target or not count:
            return []
        word = gcd(count, 8)
        return [Launch(self.driver.made(_move(_WORDS[word])), (source, target), {"n": count // word})]

    def clear(self, target: Operand, count: int) -> Launch:
        """Bytes, a multiple of 8, that become 0 whatever guards there are."""
        return Launch(self.driver.made(_clear()), (target,), {"n": count // 8}, is_settled=True)

    def sides(self, predicate: Operand, then: Operand, other: Operand) -> Launch:
        """A flag and its opposite."""
        return Launch(self.driver.made(_sides()), (predicate, then, other), {})


def _move(word: DType) -> Kernel:
    n = sym("n", 1)
    x, out, axes = Buffer("x", word, (n,)), Buffer("out", word, (n,)), (Axis("i", n),)
    return Kernel(f"move{8 * word.itemsize}", (x,), (out,), (Store(out, axes, axes, Load(x, axes)),))


def _spread(word: DType) -> Kernel:
    """n words in rows of w, which begin every a words, and come to begin every b."""
    n, w, a, b = (sym(name, 1) for name in "nwab")
    rows = floordiv(n, w)
    x, out, axis = Buffer("x", word, (rows * a,)), Buffer("out", word, (rows * b,)), Axis("i", n)
    row, column = axis // size(w), axis % size(w)
    store = Store(out, (axis,), (row * size(b) + column,), Load(x, (row * size(a) + column,)))
    return Kernel(f"spread{8 * word.itemsize}", (x,), (out,), (store,))


def _clear() -> Kernel:
    out, axis = Buffer("out", u64, (sym("n", 1),)), Axis("i", sym("n", 1))
    return Kernel("clear", (), (out,), (Store(out, (axis,), (axis,), Const(0, u64)),))


def _sides() -> Kernel:
    x, then, other = (Buffer(name, bool_, (1,)) for name in ("x", "then", "other"))
    at = (size(0),)
    value = Load(x, at)
    stores = (Store(then, (), at, value), Store(other, (), at, apply("not", value)))
    return Kernel("sides", (x,), (then, other), stores)


@dataclass(frozen=True)
class BodyLayout:
    """A body for given sizes: what is done once, and each turn; bytes of its scratch memory."""

    once: Recipe | None
    steady: Recipe
    weights: Mapping[str, int]  # where in its memory what is computed once lies
    room: int


class Body:
    """A plan that runs inside of a step."""

    def __init__(self, lir: Lir, made: Sequence[Launchable | None], driver: DeviceDriver) -> None:
        self.lir, self.made, self.driver = lir, made, driver
        self.mover = LaunchedCopies(driver)
        self.is_whole = None not in made
        self._homes = shared_memory(lir, driver.in_place)
        self._once = [(at, s) for at, s in enumerate(lir.schedule) if s.phase == "prologue"]
        self._steps = [(at, s) for at, s in enumerate(lir.schedule) if s.phase != "prologue"]
        self._layouts: Table[tuple[tuple[str, int], ...], BodyLayout] = Table("body layouts")
        self.inputs = [buffer for _, buffer in lir.io.inputs]
        self.params = [leaf_name(x) for x in lir.graph.params]
        self.constants = {
            b.name: lir.constants[b.key] for b in lir.buffers if b.role == "constant" and isinstance(b.key, int)
        }
        self.checks: dict[str, Any] = {}
        for at, one in enumerate(made):
            if one is not None:
                self.checks |= {inner_name(at, name): check for name, check in one.checks.items()}
                self.constants |= {inner_name(at, name): array for name, array in one.constants.items()}

    def bytes_of(self, name: str, sizes: Mapping[str, int]) -> int:
        return number(self.lir.buffer(name).type.nbytes, sizes)

    def takes_over(self, i: int) -> bool:
        """Whether result i may be written where input i lies."""
        name = self.lir.io.inputs[i][0]
        if not may_take_over(self.lir, name, i):
            return False
        result = self.lir.io.outputs[i]
        at = next(n for n, step in enumerate(self.lir.schedule) if result in step.outputs)
        made = self.made[at]
        reads = self.inputs[i] in self.lir.schedule[at].inputs
        return made is not None and (not reads or made.writes_over)

    def is_kept(self, i: int) -> bool:
        """Whether result i is input i as it is."""
        return self.lir.io.outputs[i] == self.inputs[i]

    def layout(self, sizes: Mapping[str, int]) -> BodyLayout:
        return self._layouts.get_or_make(tuple(sorted(sizes.items())), lambda: self._laid_out(sizes))

    def _laid_out(self, sizes: Mapping[str, int]) -> BodyLayout:
        names = [b.name for b in self.lir.buffers if b.role == "weight"]
        once = self._recipe(self._once, names, sizes) if self._once else None
        steady = self._recipe(self._steps, self.lir.io.outputs, sizes)
        room = round_up(max(steady.scratch_bytes, once.scratch_bytes if once is not None else 0))
        weights = {}
        for name in names:
            weights[name] = room
            room += round_up(self.bytes_of(name, sizes))
        return BodyLayout(once, steady, weights, room)

    def _recipe(self, steps: list[Any], results: Sequence[str], sizes: Mapping[str, int]) -> Recipe:
        return RecipeMaker(
            self.lir, steps, self.made, sizes, results=results, homes=self._homes, arena=True, apart=False
        ).make()

    def begin(
        self, sizes: Mapping[str, int], area: Operand, params: Sequence[Operand], kept: Mapping[str, Operand]
    ) -> list[Action]:
        """What is computed once."""
        layout = self.layout(sizes)
        if layout.once is None:
            return []
        known = self._known(layout, area, params, kept)
        return self._placed(layout.once, area, {}, {n: known[n] for n in layout.once.results}, known)

    def turn(
        self,
        sizes: Mapping[str, int],
        area: Operand,
        inputs: Sequence[Operand],
        params: Sequence[Operand],
        results: Sequence[Operand],
        kept: Mapping[str, Operand],
    ) -> list[Action]:
        """One run over inputs, to results."""
        layout = self.layout(sizes)
        known = self._known(layout, area, params, kept)
        given = dict(zip(self.inputs, inputs, strict=True))
        targets: dict[str, Operand] = {}
        copies: list[tuple[str, Operand]] = []
        for name, target in zip(self.lir.io.outputs, results, strict=True):
            if name in layout.steady.results and name not in targets:
                targets[name] = target
            else:
                copies.append((name, target))  # a leaf, or a result that is given twice
        actions = self._placed(layout.steady, area, given, targets, known)
        everything = known | given | targets
        for name, target in copies:
            actions += self.mover.copy(everything[name], target, self.bytes_of(name, sizes))
        return actions

    def _known(
        self, layout: BodyLayout, area: Operand, params: Sequence[Operand], kept: Mapping[str, Operand]
    ) -> dict[str, Operand]:
        found = dict(kept) | dict(zip(self.params, params, strict=True))
        return found | {name: (area[0], area[1] + offset) for name, offset in layout.weights.items()}

    def _placed(
        self,
        recipe: Recipe,
        area: Operand,
        inputs: Mapping[str, Operand],
        results: Mapping[str, Operand],
        known: Mapping[str, Operand],
    ) -> list[Action]:
        """The actions of a recipe where its memory is known; copies are launches."""
        names = (*recipe.inputs, *recipe.results, *recipe.kept)
        places = [inputs.get(n, results.get(n, known.get(n))) for n in names]
        table: dict[Any, Operand] = dict.fromkeys(range(len(recipe.rooms)), area)
        table |= {len(recipe.rooms) + i: place for i, place in enumerate(places) if place is not None}
        actions: list[Action] = []
        for part in recipe.parts:
            match part:
                case Sequenced():
                    for action in part.actions:
                        actions += self._as_launches(moved(action, table))
                case Looped():
                    actions.append(moved(part.loop, table))
                case _:
                    raise AssertionError("bodies have no steps on the host")
        return actions

    def _as_launches(self, action: Action) -> list[Action]:
        return self.mover.copy(action.source, action.target, action.size) if isinstance(action, Copy) else [action]


def round_up(count: int, to: int = ARENA_ALIGNMENT) -> int:
    return -(-count // to) * to


def launches_in(actions: Sequence[Action]) -> int:
    """How much is handed over; a loop inside counts as much as it may be."""
    return sum(64 if isinstance(a, (RepeatedBlock, Turns)) else 1 for a in actions)
