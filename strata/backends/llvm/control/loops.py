"""scan, cond and while as native loops and branches that run the programs of their bodies.

Arguments begin with what running a program takes (dispatch loop, pool, threads, status words, what asks for signals and
how often), then each body's start (see `BoundBody.slots`), then what changes from turn to turn. Rows of a scan are
regions that move by a stride; carries go from one buffer to another and back, the first turn reads the initial values
and the last one of a scan writes the result, so nothing is copied. All counts are arguments: one piece of code serves
every loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from strata.backends.llvm.control.body import BoundBody, GraphBody
from strata.backends.llvm.executor.interrupts import TURNS_BETWEEN
from strata.backends.llvm.executor.thread_pool import native_code
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value
from strata.backends.llvm.ir.native import Workspace, arguments, copy, kernel, number_slots, numbers, while_loop
from strata.backends.llvm.ir.overrides import Holding, NativeCall, NativeOp, Planned, Sizes, Slot, override
from strata.core import Dim, Target
from strata.lir import Lir
from strata.mir import Node

HEAD = 6  # dispatch loop, pool, threads, status, what asks for signals, turns between
NO_LIMIT = (1 << 63) - 1


def _head(*bodies: GraphBody) -> list[Slot]:
    code = native_code()
    walker, ask = (("pointer", code.address(name)) for name in ("program_run", "poll_turn"))
    between = 1 if any(body.native for body in bodies) else TURNS_BETWEEN
    return [walker, ("pool", 0), ("threads", 0), ("status", 0), ask, ("number", between)]


class _Words:
    """A cursor over the argument block."""

    def __init__(self, f: IrFunction, at: Value) -> None:
        self.f, self.at = f, at

    def take(self, type_: str = "i64") -> str:
        value = self.f.load(type_, self.f.address("i64", "%arguments", self.at), 8)
        self.at = self.f.add(self.at, 1)
        return value


class _Runner:
    """Emits the start and the turns of bodies."""

    def __init__(self, f: IrFunction) -> None:
        self.f = f
        self.walker, self.pool, self.threads, self.status, self.ask, self.between = arguments(f, "ppippi")

    def start(self, words: _Words) -> tuple[str, str, str]:
        """Fill a body's table and run what it computes once; returns the table, its program and its number of steps."""
        f = self.f
        table, once, once_steps = words.take("ptr"), words.take("ptr"), words.take()
        steady, steps, pairs = words.take("ptr"), words.take(), words.take()
        first = words.at

        def one(i: str, _: list[str]) -> None:
            pair = _Words(f, f.add(first, f.mul(i, 2)))
            region, value = pair.take(), pair.take()
            f.store("i64", value, f.address("i64", table, region), 8)

        f.loop(0, pairs, 1, (), one)
        words.at = f.add(first, f.mul(pairs, 2))
        self.walk(table, once, once_steps)
        return table, steady, steps

    def walk(self, table: Value, program: Value, steps: Value) -> None:
        typed = (
            ("ptr", program),
            ("ptr", table),
            ("ptr", self.pool),
            ("i64", self.threads),
            ("i64", 0),
            ("i64", steps),
        )
        self.f.call_address("void", self.walker, *typed)

    def is_well(self) -> str:
        return self.f.compare("eq", "i64", self.f.load("i64", self.status, 8), 0)

    def listen(self, turn: Value) -> None:
        """At the end of some turns of a loop: where a signal ends it, the status says so."""
        f = self.f
        low = f.binary("and", "i64", turn, f.sub(self.between, 1))
        f.if_(
            f.compare("eq", "i64", low, 0),
            lambda: f.call_address("void", self.ask, ("ptr", self.pool), ("ptr", self.status)),
        )

    def each(self, words: _Words, count: Value, width: int) -> tuple[Value, int]:
        """The start of a list of `count` records in the arguments; the cursor moves past it."""
        first = words.at
        words.at = self.f.add(first, self.f.mul(count, width))
        return first, width

    def records(self, place: tuple[Value, int], count: Value, body) -> None:  # type: ignore[no-untyped-def]
        f = self.f
        f.loop(0, count, 1, (), lambda i, _: body(_Words(f, f.add(place[0], f.mul(i, place[1])))))


def _swap(f: IrFunction, turn: Value, initial: str, a: str, b: str) -> str:
    """Where the carry that enters a turn lies."""
    odd = f.op(f"trunc i64 {turn} to i1")
    later = f.select("i64", odd, a, b)
    return f.select("i64", f.compare("eq", "i64", turn, 0), initial, later)


def _emit_scan(module: IrModule) -> None:
    """Behind the body: length, carries × (in, out, initial, last, a, b, bytes), rows × (region, first, stride)."""
    f = kernel(module, "scan")
    run = _Runner(f)
    words = _Words(f, HEAD)
    table, program, steps = run.start(words)
    length, carries, rows = words.take(), words.take(), words.take()
    carry_list, row_list = run.each(words, carries, 7), run.each(words, rows, 3)
    last = f.sub(length, 1)

    def turn(t: str) -> None:
        def carry(record: _Words) -> None:
            enter, leave, initial, result, a, b = (record.take() for _ in range(6))
            f.store("i64", _swap(f, t, initial, a, b), f.address("i64", table, enter), 8)
            after = f.select("i64", f.compare("eq", "i64", t, last), result, _swap(f, f.add(t, 1), initial, a, b))
            f.store("i64", after, f.address("i64", table, leave), 8)

        def row(record: _Words) -> None:
            region, first, stride = (record.take() for _ in range(3))
            f.store("i64", f.add(first, f.mul(t, stride)), f.address("i64", table, region), 8)

        run.records(carry_list, carries, carry)
        run.records(row_list, rows, row)
        run.walk(table, program, steps)

    def more(state: list[str]) -> str:
        return f.binary("and", "i1", f.compare("slt", "i64", state[0], length), run.is_well())

    def body(state: list[str]) -> list[Value]:
        turn(state[0])
        following = f.add(state[0], 1)
        run.listen(following)
        return [following]

    while_loop(f, [("i64", 0)], more, body)

    def untouched(record: _Words) -> None:
        _, _ = record.take(), record.take()
        initial, result, _, _, size = (record.take(kind) for kind in ("ptr", "ptr", "i64", "i64", "i64"))
        copy(f, result, initial, size)

    f.if_(f.compare("eq", "i64", length, 0), lambda: run.records(carry_list, carries, untouched))
    f.ret()


def _emit_while(module: IrModule) -> None:
    """Behind the starts of test and body: limit, address of the test's result, carries.

    A carry is (its region in the test, in the body, and as a result; initial, last, a, b; bytes).
    """
    f = kernel(module, "while")
    run = _Runner(f)
    words = _Words(f, HEAD)
    test_table, test_program, test_steps = run.start(words)
    table, program, steps = run.start(words)
    limit, flag, carries = words.take(), words.take("ptr"), words.take()
    carry_list = run.each(words, carries, 8)

    def set_tables(t: Value, record: _Words) -> None:
        asked, enter, leave, initial, _, a, b = (record.take() for _ in range(7))
        now = _swap(f, t, initial, a, b)
        f.store("i64", now, f.address("i64", test_table, asked), 8)
        f.store("i64", now, f.address("i64", table, enter), 8)
        f.store("i64", _swap(f, f.add(t, 1), initial, a, b), f.address("i64", table, leave), 8)

    def turn(state: list[str]) -> list[Value]:
        t, _ = state
        run.records(carry_list, carries, lambda record: set_tables(t, record))
        run.walk(test_table, test_program, test_steps)
        holds = f.compare("ne", "i8", f.load("i8", flag, 1), 0)
        goes_on = f.binary("and", "i1", holds, run.is_well())
        f.if_(goes_on, lambda: run.walk(table, program, steps))
        following = f.add(t, f.convert("zext", "i1", goes_on, "i64"))
        run.listen(following)
        return [following, goes_on]

    def more(state: list[str]) -> str:
        ready = f.binary("and", "i1", state[1], f.compare("slt", "i64", state[0], limit))
        return f.binary("and", "i1", ready, run.is_well())

    turns, _ = while_loop(f, [("i64", 0), ("i1", "true")], more, turn)

    def finish(record: _Words) -> None:
        for _ in range(3):
            record.take()
        initial, result, a, b, size = (record.take() for _ in range(5))
        found = f.op(f"inttoptr i64 {_swap(f, turns, initial, a, b)} to ptr")
        copy(f, f.op(f"inttoptr i64 {result} to ptr"), found, size)

    run.records(carry_list, carries, finish)
    f.ret()


def _emit_cond(module: IrModule) -> None:
    """The predicate's address, words to the second body, then both bodies."""
    f = kernel(module, "cond")
    run = _Runner(f)
    words = _Words(f, HEAD)
    predicate, second = words.take("ptr"), words.take()
    holds = f.compare("ne", "i8", f.load("i8", predicate, 1), 0)
    branch = _Words(f, f.select("i64", holds, HEAD + 2, second))
    table, program, steps = run.start(branch)
    run.walk(table, program, steps)
    f.ret()


def _emit_walk(module: IrModule) -> None:
    """Behind the head: one body."""
    f = kernel(module, "walk")
    run = _Runner(f)
    run.walk(*run.start(_Words(f, HEAD)))
    f.ret()


def walked(body_for: Callable[[Sizes], GraphBody]) -> NativeOp:
    """An op whose step walks the program of a body, which may be made when the sizes are known."""

    def plan(sizes: Sizes) -> Planned:
        body = body_for(sizes)
        bound = body.bind_body(sizes, 0)
        ends = [(region, ("input", i)) for i, region in enumerate(bound.inputs)]
        ends += [(region, ("output", i)) for i, region in enumerate(bound.results)]
        return Planned([NativeCall("walk", [*_head(body), *bound.slots(ends)])], bound.end, (bound, body))

    return NativeOp("walk", _emit_walk, ("walk",), plan)


def _native_bodies(plans: Sequence[Lir], target: Target, *, in_loop: bool = True) -> list[GraphBody] | None:
    """The bodies of an op; None where one has a step that runs in Python."""
    bodies = [GraphBody(lir, target, in_loop=in_loop) for lir in plans]
    return None if any(b.host_steps for b in bodies) else bodies


def _holding(bodies: list[GraphBody], first: int) -> Holding:
    """For bodies whose parameters begin at input `first`."""

    def hold(number: int, array: np.ndarray) -> None:
        for body in bodies:
            if 0 <= number - first < len(body.lir.graph.params):
                body.hold_param(number - first, array)

    held = frozenset.intersection(*(frozenset(first + i for i in body.held_params) for body in bodies))
    return Holding(hold, held, lambda: sum(body.packed_bytes for body in bodies))


def _again(
    make: Callable[[Node, list[GraphBody]], NativeOp], node: Node, bodies: list[GraphBody]
) -> Callable[[], NativeOp]:
    """How an op is made again, with bodies that hold what these hold at that time."""
    return lambda: make(node, [body.clone() for body in bodies])


def _bytes(shape: tuple[Dim, ...], itemsize: int, sizes: Sizes) -> int:
    return math.prod(numbers(shape, sizes)) * itemsize


@override("scan", bodies=True)
def _scan(node: Node, target: Target, plans: Sequence[Lir]) -> NativeOp | None:
    made = _native_bodies(plans, target)
    return None if made is None else _scan_of(node, made)


def _scan_of(node: Node, bodies: list[GraphBody]) -> NativeOp:
    op = node.op
    graph, carries, consts = op.body, op.num_carry, op.num_consts  # type: ignore[attr-defined]
    first = carries + consts
    varies = len(graph.inputs) > consts
    (body,) = bodies

    def plan(sizes: Sizes) -> Planned:
        (length,) = numbers([op.length], sizes)  # type: ignore[attr-defined]
        bound = body.bind_body(sizes, 0)
        layout = Workspace(bound.end)
        moving = bound.inputs if varies else ()
        shared = bound.params if varies else bound.inputs
        fixed = [(region, ("input", carries + i)) for i, region in enumerate(shared)]
        records: list[Slot] = []
        for i in range(carries):
            kind = graph.results[i].type
            size = _bytes(kind.shape, kind.dtype.itemsize, sizes)
            places: list[Slot] = [
                ("input", i),
                ("output", i),
                layout.area(size),
                layout.area(size),
            ]
            records += [*number_slots(moving[i], bound.results[i]), *places, ("number", size)]
        rows = [(region, "input", first + i, graph.inputs[first + i]) for i, region in enumerate(moving[carries:])]
        rows += [(bound.results[i], "output", i, x) for i, x in enumerate(graph.results) if i >= carries]
        for region, kind, number, x in rows:
            stride = _bytes(x.type.shape, x.dtype.itemsize, sizes)
            start = (length - 1) * stride if op.reverse and length else 0  # type: ignore[attr-defined]
            where: Slot = (f"{kind}_at", (number, start))
            records += [("number", region), where, ("number", -stride if op.reverse else stride)]  # type: ignore[attr-defined]
        slots = [*_head(body), *bound.slots(fixed), *number_slots(length, carries, len(rows)), *records]
        return Planned([NativeCall("scan", slots)], layout.size, (bound, body))

    holding = _holding(bodies, carries) if varies else None
    return NativeOp("scan", _emit_scan, ("scan",), plan, holding, _again(_scan_of, node, bodies))


@override("while", bodies=True)
def _while(node: Node, target: Target, plans: Sequence[Lir]) -> NativeOp | None:
    made = _native_bodies(plans, target)
    return None if made is None else _while_of(node, made)


def _while_of(node: Node, bodies: list[GraphBody]) -> NativeOp:
    op = node.op
    carries, limit = op.num_carry, op.max_iterations  # type: ignore[attr-defined]
    test, body = bodies

    def shared(bound: BoundBody) -> list[tuple[int, Slot]]:
        regions = bound.params if carries else bound.inputs
        return [(region, ("input", carries + i)) for i, region in enumerate(regions)]

    def plan(sizes: Sizes) -> Planned:
        asked = test.bind_body(sizes, 0)
        turned = body.bind_body(sizes, asked.end)
        layout = Workspace(turned.end)
        flag: Slot = ("workspace", layout.take(8))
        records: list[Slot] = []
        for i in range(carries):
            size = _bytes(node.types[i].shape, node.types[i].dtype.itemsize, sizes)
            places: list[Slot] = [
                ("input", i),
                ("output", i),
                layout.area(size),
                layout.area(size),
            ]
            records += [*number_slots(asked.inputs[i], turned.inputs[i], turned.results[i]), *places, ("number", size)]
        slots = [
            *_head(*bodies),
            *asked.slots([*shared(asked), (asked.results[0], flag)]),
            *turned.slots(shared(turned)),
        ]
        slots += [("number", NO_LIMIT if limit is None else limit), flag, ("number", carries), *records]
        return Planned([NativeCall("while", slots)], layout.size, (asked, turned, bodies))

    holding = _holding(bodies, carries) if carries else None
    return NativeOp("while", _emit_while, ("while",), plan, holding, _again(_while_of, node, bodies))


@override("cond", bodies=True)
def _cond(node: Node, target: Target, plans: Sequence[Lir]) -> NativeOp | None:
    made = _native_bodies(plans, target, in_loop=False)
    if made is None:
        return None

    def plan(sizes: Sizes) -> Planned:
        bound = [body.bind_body(sizes, 0) for body in made]  # only one of them runs: they share the workspace
        branches = []
        for one in bound:
            ends = [(region, ("input", i + 1)) for i, region in enumerate(one.inputs)]
            ends += [(region, ("output", i)) for i, region in enumerate(one.results)]
            branches.append(one.slots(ends))
        second = HEAD + 2 + len(branches[0])
        slots = [*_head(*made), ("input", 0), ("number", second), *branches[0], *branches[1]]
        return Planned([NativeCall("cond", slots)], max(one.end for one in bound), (bound, made))

    return NativeOp("cond", _emit_cond, ("cond",), plan)
