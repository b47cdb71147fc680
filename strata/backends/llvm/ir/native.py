"""What hand-written kernels share: signature, arguments, element access, rows along an axis, identity ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, vector
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, Slot, override
from strata.backends.llvm.ir.registers import (
    Parts,
    component_bytes,
    deinterleave,
    from_memory,
    interleave,
    memory_type,
    to_memory,
)
from strata.core import Dim, DType, Target, substitute
from strata.mir import Node

WORKSPACE_ALIGN = 64  # bytes
CHUNK = 1 << 18  # bytes that one point of a copy moves


def kernel(module: IrModule, name: str) -> IrFunction:
    """A function as programs call it."""
    return module.function(name, (("ptr", "arguments"), ("i64", "begin"), ("i64", "end")))


def template(module: IrModule, name: str) -> IrFunction:
    """The same for a template, whose arguments alias nothing else."""
    return module.function(name, (("ptr noalias", "args"), ("i64", "begin"), ("i64", "end")))


def arguments(f: IrFunction, kinds: str) -> list[str]:
    """The first slots of the argument block: `p` for a pointer, `i` for a number."""
    types = {"p": "ptr", "i": "i64"}
    return [f.load(types[kind], f.address("i64", "%arguments", i), 8) for i, kind in enumerate(kinds)]


def each_point(f: IrFunction, body: Callable[[str, list[str]], None]) -> None:
    """The rest of a kernel: `body` for each of the points that a call asks for."""
    f.loop("%begin", "%end", 1, (), body)
    f.ret()


def each_of_slot(f: IrFunction, point: str, count: Value, slots: Value, body: Callable[[str, list[str]], None]) -> None:
    """Of `count` pieces of work that share `slots` places in a workspace, those of one place."""
    first = f.binary("udiv", "i64", f.mul(point, count), slots)
    last = f.binary("udiv", "i64", f.mul(f.add(point, 1), count), slots)
    f.loop(first, last, 1, (), body)


class Workspace:
    """Memory that the calls of one step share: areas one after the other, each at a multiple of 64 bytes."""

    def __init__(self, start: int = 0) -> None:
        self.size = -(-start // WORKSPACE_ALIGN) * WORKSPACE_ALIGN

    def take(self, size: int) -> int:
        """Where an area begins."""
        at = self.size
        self.size += -(-max(size, 1) // WORKSPACE_ALIGN) * WORKSPACE_ALIGN
        return at

    def area(self, size: int) -> Slot:
        """An area as an argument."""
        return "workspace", self.take(size)


def numbers(dims: Sequence[Dim], sizes: Sizes) -> list[int]:
    found = [substitute(d, sizes) for d in dims]
    assert all(isinstance(d, int) for d in found), f"sizes {found} are not bound"
    return [int(d) for d in found]


def number_slots(*values: int) -> list[Slot]:
    return [("number", v) for v in values]


def around(shape: Sequence[Dim], axis: int, sizes: Sizes) -> tuple[int, int, int]:
    """Elements before, along and after an axis."""
    known = numbers(shape, sizes)
    return math.prod(known[:axis]), known[axis], math.prod(known[axis + 1 :])


def load_element(f: IrFunction, dtype: DType, base: Value, index: Value, lanes: int, target: Target) -> Parts:
    """base[index …] of one dtype, in register form."""
    element = memory_type(dtype)
    size = component_bytes(dtype)
    if not dtype.is_complex:
        loaded = f.load(vector(element, lanes), f.address(element, base, index), size)
        return (from_memory(f, dtype, loaded, lanes, target),)
    pair = f.load(vector(element, 2 * lanes), f.address(element, base, f.mul(index, 2)), size)
    return deinterleave(f, element, pair, lanes)


def store_element(
    f: IrFunction, dtype: DType, parts: Parts, base: Value, index: Value, lanes: int, target: Target
) -> None:
    element = memory_type(dtype)
    size = component_bytes(dtype)
    if not dtype.is_complex:
        stored = to_memory(f, dtype, parts[0], lanes, target)
        f.store(vector(element, lanes), stored, f.address(element, base, index), size)
        return
    both = interleave(f, vector(element, lanes), parts, lanes)
    f.store(vector(element, 2 * lanes), both, f.address(element, base, f.mul(index, 2)), size)


def while_loop(
    f: IrFunction,
    carried: Sequence[tuple[str, Value]],
    test: Callable[[list[str]], str],
    body: Callable[[list[str]], Sequence[Value]],
) -> list[str]:
    """Turns of a body while a test of the carried values holds; returns the last values."""
    head, inside, done = f.fresh("head"), f.fresh("body"), f.fresh("done")
    names = ["%" + f.fresh("w") for _ in carried]
    before = f.block
    f.branch(head)
    f.label(head)
    position = len(f._lines)
    f._lines.append("")
    f.branch_if(test(names), inside, done)
    assert f.block == head, "the test of a loop is straight code"
    f.label(inside)
    results = list(body(names))
    last = f.block
    f.branch(head)
    f._lines[position] = "\n".join(
        f"  {name} = phi {type_} [ {start}, %{before} ], [ {result}, %{last} ]"
        for name, (type_, start), result in zip(names, carried, results, strict=True)
    )
    f.label(done)
    return names


def copy(f: IrFunction, to: Value, source: Value, count: Value) -> None:
    """`count` bytes that do not overlap."""
    f.call("void", "llvm.memcpy.p0.p0.i64", ("ptr", to), ("ptr", source), ("i64", count), ("i1", "false"))


def fill_zero(f: IrFunction, to: Value, count: Value) -> None:
    f.call("void", "llvm.memset.p0.i64", ("ptr", to), ("i8", 0), ("i64", count), ("i1", "false"))


def _emit_copy(module: IrModule) -> None:
    f = kernel(module, "copy")
    to, source, size = arguments(f, "ppi")
    start = f.mul("%begin", CHUNK)
    stop = f.smin(f.mul("%end", CHUNK), size)
    copy(f, f.address("i8", to, start), f.address("i8", source, start), f.sub(stop, start))
    f.ret()


def copy_call(to: Slot, source: Slot, size: int) -> NativeCall:
    """A call of `copy`."""
    return NativeCall("copy", (to, source, ("number", size)), -(-size // CHUNK))


@override("barrier")
def _barrier(node: Node, target: Target) -> NativeOp:
    def plan(sizes: Sizes) -> Planned:
        counts = numbers([t.nbytes for t in node.types], sizes)
        return Planned([copy_call(("output", i), ("input", i), size) for i, size in enumerate(counts)])

    return NativeOp("copy", _emit_copy, ("copy",), plan)


@override("concat", whole=True)
def _concat(node: Node, target: Target) -> NativeOp | None:
    """Of very many inputs: as one kernel, each would be a separate loop in the code."""
    op: Any = node.op
    if len(node.inputs) <= op.many:
        return None

    def emit(module: IrModule) -> None:
        """Arguments: where they go, rows, bytes of a row; then of each input: it, bytes of a row, where those begin."""
        f = kernel(module, "concat")
        to, rows, width = arguments(f, "pii")

        def one(i: str, _: list[str]) -> None:
            place = f.add(f.mul(i, 3), 3)
            kinds = ("ptr", "i64", "i64")
            source, size, at = (
                f.load(kind, f.address("i64", "%arguments", f.add(place, j)), 8) for j, kind in enumerate(kinds)
            )
            first = f.address("i8", to, at)

            def row(r: str, _: list[str]) -> None:
                copy(f, f.address("i8", first, f.mul(r, width)), f.address("i8", source, f.mul(r, size)), size)

            f.loop(0, rows, 1, (), row)

        each_point(f, one)

    def plan(sizes: Sizes) -> Planned:
        kinds = [around(x.shape, op.axis, sizes) for x in node.inputs]
        rows, _, behind = kinds[0]
        widths = [count * behind * node.types[0].dtype.itemsize for _, count, _ in kinds]
        slots: list[Slot] = [("output", 0), *number_slots(rows, sum(widths))]
        for i, (width, end) in enumerate(zip(widths, accumulate(widths), strict=True)):
            slots += [("input", i), *number_slots(width, end - width)]
        grain = max(1, CHUNK * len(widths) // max(rows * sum(widths), 1))
        return Planned([NativeCall("concat", slots, len(widths), grain)])

    return NativeOp("concat", emit, ("concat",), plan)
