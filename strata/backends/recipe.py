"""Recipes: a plan for one set of sizes as launches and copies over numbered memory.

The numbers stand for the scratch memory of a run, its inputs, its results and what stays from run to run. A recipe is
made once; a run says where these are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from strata.core import Dim, substitute
from strata.lir import ArenaBlock, Lir, Step, pack

ARENA_ALIGNMENT = 256  # bytes: of what GPUs read at once
SLACK = 1 / 16  # of an arena: a recipe is made while somebody waits for the first run of its sizes
KEPT = ("param", "constant", "weight")  # roles of buffers whose values stay from run to run
_STEPS = 8  # sizes of the pool between one power of two and the next

Operand = tuple[Any, int]  # which memory, by its number or as a `MovingRow`, and at how many bytes in it


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel over operands: inputs, outputs and scratch."""

    made: Any
    operands: tuple[Operand, ...]
    sizes: Mapping[str, int]
    is_settled: bool = False  # it has a guard, which says whether it does anything, or it runs in any case


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes from one operand to another; nothing where both are the same memory."""

    source: Operand
    target: Operand
    size: int


@dataclass(eq=False, slots=True)
class MovingRow:
    """Memory that moves on between the blocks of a `RepeatedBlock`."""

    source: Operand
    stride: int  # bytes from one block to the next
    number: int = -1  # of the memory, once all of a recipe is known


@dataclass(slots=True)
class RepeatedBlock:
    """A block of turns of a long loop, again and again: the host hands it over, and waits for nothing."""

    block: list[Action]
    count: int
    rows: list[MovingRow]
    made: dict[str, Any] = field(default_factory=dict)

    def lists(self) -> dict[str, list[Action]]:
        return {"block": self.block}


@dataclass(slots=True)
class Turns:
    """A loop whose end the device finds. A turn has a flag that guards its launches, and the turn sets the next one:
    the host hands over blocks of turns, reads the flags behind each, and so learns how many turns there were."""

    start: list[Action]
    block: list[Action]
    again: list[Action]  # between two blocks
    tail: list[Action]  # what the limit leaves behind whole blocks
    even: list[Action]  # at the end, by the number of turns
    odd: list[Action]
    turns: int  # of a block
    limit: int | None
    flags: Operand
    made: dict[str, Any] = field(default_factory=dict)

    def lists(self) -> dict[str, list[Action]]:
        return {name: getattr(self, name) for name in ("start", "block", "again", "tail", "even", "odd")}


Action = Launch | Copy | RepeatedBlock | Turns


@dataclass(slots=True)
class Sequenced:
    """Actions that follow each other on the device, and what the driver has made of them."""

    at: int  # the first step
    actions: list[Launch | Copy]
    made: Any = None


@dataclass(frozen=True, slots=True)
class Looped:
    """A loop that the host drives."""

    at: int
    loop: RepeatedBlock | Turns


@dataclass(frozen=True, slots=True)
class HostStep:
    """A step by its NumPy meaning, and where the device wants what it makes."""

    at: int
    step: Step
    uploads: tuple[tuple[str, Operand], ...]


Part = Sequenced | Looped | HostStep


@dataclass(slots=True)
class Recipe:
    """All of a run. Memory is numbered: scratch blocks, inputs, results, kept values."""

    rooms: tuple[int, ...]  # bytes of the scratch blocks
    inputs: tuple[str, ...]
    needed: tuple[int, ...]  # inputs that are read on the device
    results: tuple[str, ...]  # buffers that the device makes for the caller, and their numbers of bytes
    result_types: tuple[Any, ...]
    kept: tuple[str, ...]
    places: Mapping[str, Operand]
    parts: tuple[Part, ...]
    rows: int = 0  # numbers behind all others, for memory that moves
    kept_places: Any = None  # of the last run, with the version of the values that they are of

    def result_base(self) -> int:
        return len(self.rooms) + len(self.inputs)

    @property
    def scratch_bytes(self) -> int:
        return sum(self.rooms)


class RecipeMaker:
    """Makes the recipe of some steps of a plan."""

    def __init__(
        self,
        lir: Lir,
        steps: Sequence[tuple[int, Step]],
        made: Sequence[Any],
        binding: Mapping[str, int],
        *,
        results: Sequence[str],
        homes: Mapping[str, str],
        arena: bool,
        apart: bool,
    ) -> None:
        """`results` are buffers to make for the caller; `apart` keeps each step by itself."""
        self.lir, self.steps, self.binding = lir, steps, KnownSizes(binding)
        self.made: dict[int, Any] = {at: None if made[at] is None else made[at].at(self.binding) for at, _ in steps}
        self.homes, self.arena, self.apart = homes, arena, apart
        self._sizes: dict[Any, int] = {}  # bytes, by type
        self.inputs = tuple(buffer for _, buffer in lir.io.inputs)
        on_device = {n for at, s in steps if made[at] is not None for n in (*s.read_buffers, *s.outputs)}
        is_made = {n for _, s in steps for n in s.outputs}
        self.results = tuple(dict.fromkeys(n for n in results if n in on_device and n in is_made))
        outer = {*self.inputs, *self.results}
        inner = on_device - outer
        self.kept = tuple(dict.fromkeys(b.name for b in lir.buffers if b.name in inner and b.role in KEPT))
        self.scratch = inner - set(self.kept)
        self.kept += tuple(inner_name(at, n) for at, m in self.made.items() if m is not None for n in m.constants)
        self.on_device = on_device

    def make(self) -> Recipe:
        rooms, scratch = self._scratch()
        places: dict[str, Operand] = {}
        for name, block in scratch.items():
            places[name] = block
        base = len(rooms)
        for group in (self.inputs, self.results, self.kept):
            places.update({name: (base + i, 0) for i, name in enumerate(group)})
            base += len(group)
        types = tuple(self.lir.buffer(n).type.bind(self.binding) for n in self.results)
        needed = tuple(i for i, n in enumerate(self.inputs) if n in self.on_device)
        parts = tuple(self._parts(places))
        return Recipe(tuple(rooms), self.inputs, needed, self.results, types, self.kept, places, parts)

    def make_whole(self) -> Recipe:
        """A recipe that is run as it is, and not as a part of another one."""
        recipe = self.make()
        base = recipe.result_base() + len(recipe.results) + len(recipe.kept)
        parts, recipe.rows = number_rows(recipe.parts, base)
        recipe.parts = tuple(parts)
        return recipe

    def _bytes(self, name: str) -> int:
        kind = self.lir.buffer(name).type
        found = self._sizes.get(kind)
        if found is None:
            found = self._sizes[kind] = number(kind.nbytes, self.binding)
        return found

    def _lives(self) -> list[ArenaBlock]:
        """Scratch memory, by the name whose memory it is, from the first to the last step that uses it."""
        sizes: dict[str, int] = {}
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for at, step in self.steps:
            for name in (*step.read_buffers, *step.outputs):
                if name in self.scratch:
                    home = self.homes.get(name, name)
                    sizes[home] = max(sizes.get(home, 0), self._bytes(name))
                    first.setdefault(home, at)
                    last[home] = at
        lives = [ArenaBlock(n, max(sizes[n], 1), first[n], last[n]) for n in sizes]
        for at, made in self.made.items():
            if made is not None:
                beside = made.scratch(self.binding)
                lives += [ArenaBlock(_beside(at, i), max(size, 1), at, at) for i, size in enumerate(beside)]
        return lives

    def _scratch(self) -> tuple[list[int], dict[str, Operand]]:
        """Blocks of scratch memory, and where values are in them: at planned offsets, or in a block each at a time."""
        lives = self._lives()
        if self.arena:
            rounded = [ArenaBlock(b.name, _round_up(b.size), b.birth, b.death) for b in lives]
            offsets, total = pack(rounded, SLACK) if rounded else ({}, 0)
            rooms, found = [total] if total else [], {n: (0, offset) for n, offset in offsets.items()}
        else:
            rooms, found = _blocks(lives)
        for name in self.scratch:
            home = self.homes.get(name, name)
            if home != name:
                found[name] = found[home]
        return rooms, found

    def _parts(self, places: Mapping[str, Operand]) -> list[Part]:
        parts: list[Part] = []
        for at, step in self.steps:
            if self.made[at] is None:
                wanted = tuple((n, places[n]) for n in step.outputs if n in self.on_device)
                parts.append(HostStep(at, step, wanted))
            else:
                append_actions(parts, self._actions(at, step, places), at, apart=self.apart)
        return parts

    def _actions(self, at: int, step: Step, places: Mapping[str, Operand]) -> list[Action]:
        made = self.made[at]
        starts = dict(step.updates)
        actions: list[Action] = [
            Copy(places[starts[name]], places[name], self._bytes(name))
            for name in step.outputs
            if name in starts and places[starts[name]] != places[name]
        ]
        beside = [places[_beside(at, i)] for i in range(len(made.scratch(self.binding)))]
        operands = [places[n] for n in (*step.inputs, *step.outputs)]
        kept = {name: places[inner_name(at, name)] for name in made.constants}
        return actions + made.actions((*operands, *beside), self.binding, kept)


def inner_name(at: int, name: str) -> str:
    """The name of a constant inside of a step."""
    return f"{at}.{name}"


def append_actions(parts: list[Any], actions: Iterable[Action], at: int, *, apart: bool = False) -> None:
    """Put actions behind parts; those that follow each other on the device are one, a step by itself with `apart`."""
    for action in actions:
        if isinstance(action, (RepeatedBlock, Turns)):
            parts.append(Looped(at, action))
            continue
        last = parts[-1] if parts else None
        if not isinstance(last, Sequenced) or (apart and last.at != at):
            last = Sequenced(at, [])
            parts.append(last)
        last.actions.append(action)


def moved(action: Action, table: Mapping[Any, Operand]) -> Action:
    """An action on other memory: `table` says where what has a number lies."""

    def place(operand: Operand) -> Operand:
        found = table.get(operand[0])
        return operand if found is None else (found[0], found[1] + operand[1])

    match action:
        case Launch():
            return replace(action, operands=tuple(map(place, action.operands)))
        case Copy():
            return Copy(place(action.source), place(action.target), action.size)
        case RepeatedBlock():
            rows = {row: MovingRow(place(row.source), row.stride) for row in action.rows}
            inner = {**table, **{old: (new, 0) for old, new in rows.items()}}
            return RepeatedBlock([moved(a, inner) for a in action.block], action.count, list(rows.values()))
        case Turns():
            lists: Any = {name: [moved(a, table) for a in some] for name, some in action.lists().items()}
            return replace(action, flags=place(action.flags), made={}, **lists)


def guarded(action: Action, guard: Operand) -> Action:
    """An action that does nothing unless a flag is set."""
    match action:
        case Launch():
            if action.is_settled:
                return action
            return Launch(action.made.guarded(), (guard, *action.operands), action.sizes, is_settled=True)
        case Copy():
            raise AssertionError("copies inside of loops and branches are launches")
        case RepeatedBlock():
            return replace(action, block=[guarded(a, guard) for a in action.block], made={})
        case Turns():
            lists: Any = {name: [guarded(a, guard) for a in some] for name, some in action.lists().items()}
            return replace(action, made={}, **lists)


def number_rows(parts: Sequence[Part], first: int) -> tuple[list[Part], int]:
    """Parts in which memory that moves has numbers, from one on, and how many there are."""
    found: dict[Any, Operand] = {}

    def collect(actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, RepeatedBlock):
                for row in action.rows:
                    found[row] = (first + len(found), 0)
            if isinstance(action, (RepeatedBlock, Turns)):
                for some in action.lists().values():
                    collect(some)

    collect(part.loop for part in parts if isinstance(part, Looped))
    if not found:
        return list(parts), 0
    return [Looped(p.at, _numbered(p.loop, found)) if isinstance(p, Looped) else p for p in parts], len(found)


def _numbered(action: Action, found: Mapping[Any, Operand]) -> Any:
    """The same with numbers for rows."""

    def place(operand: Operand) -> Operand:
        return (found[operand[0]][0], operand[1]) if operand[0] in found else operand

    match action:
        case RepeatedBlock():
            rows = [MovingRow(place(row.source), row.stride, found[row][0]) for row in action.rows]
            return RepeatedBlock([_numbered(a, found) for a in action.block], action.count, rows)
        case Turns():
            lists: Any = {name: [_numbered(a, found) for a in some] for name, some in action.lists().items()}
            return replace(action, flags=place(action.flags), **lists)
        case _:
            return moved(action, found)


def _beside(at: int, i: int) -> str:
    """The name of memory that a kernel needs beside its buffers."""
    return f"{at}#{i}"


def _round_up(size: int) -> int:
    return -(-size // ARENA_ALIGNMENT) * ARENA_ALIGNMENT


def _blocks(lives: Sequence[ArenaBlock]) -> tuple[list[int], dict[str, Operand]]:
    """Whole blocks, one after the other used by values of about one size: for devices that bind buffers."""
    rooms: list[int] = []
    found: dict[str, Operand] = {}
    free: dict[int, list[int]] = {}
    ending: list[tuple[int, int]] = []  # step and block
    for life in sorted(lives, key=lambda b: b.birth):
        for end in [e for e in ending if e[0] < life.birth]:
            ending.remove(end)
            free.setdefault(rooms[end[1]], []).append(end[1])
        room = room_for(life.size)
        waiting = free.get(room)
        if waiting:
            block = waiting.pop()
        else:
            block = len(rooms)
            rooms.append(room)
        found[life.name] = (block, 0)
        ending.append((life.death, block))
    return rooms, found


def room_for(size: int) -> int:
    """A size rounded up, so that values of about one size can use each other's buffers."""
    if size <= 256:
        return 256
    step = 1 << max(0, (size - 1).bit_length() - 1 - (_STEPS.bit_length() - 1))
    return -(-size // step) * step


class KnownSizes(dict[str, int]):
    """Sizes of symbols, and what was computed from them: steps of one program ask for the same again and again."""

    __slots__ = ("numbers",)

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__(sizes)
        self.numbers: dict[Dim, int] = {}


def number(dim: Dim, sizes: Mapping[str, int]) -> int:
    if type(dim) is int:
        return dim
    numbers = sizes.numbers if type(sizes) is KnownSizes else {}
    value = numbers.get(dim)
    if value is None:
        found = substitute(dim, sizes)
        assert isinstance(found, int), f"size {dim} is known when a step runs"
        value = numbers[dim] = found
    return value


def shared_memory(lir: Lir, in_place: bool) -> dict[str, str]:
    """Whose memory a value takes over, where that is not its own: updates change it where it is.

    A device whose kernels cannot read and write one buffer still does updates in place, which do not read what they
    change."""
    found: dict[str, str] = {}
    for step in lir.schedule:
        reads = {found.get(name, name) for name in step.inputs}
        for name in step.outputs:
            base = lir.buffer(name).alias
            taken = {found.get(other, other) for other in step.outputs if other != name and other in found}
            if base is None or base in taken or (not in_place and base in reads):
                continue
            source = dict(step.updates).get(name)
            if in_place or (source is not None and found.get(source, source) == base):
                found[name] = base
    return found
