"""Stacks of matrices for LAPACK: loops over the stack, copies to and from its layout, calls, error codes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from strata.backends.llvm.ir.builder import IrModule, Value, constant
from strata.backends.llvm.ir.native import (
    Workspace,
    arguments,
    copy,
    each_of_slot,
    kernel,
    number_slots,
    numbers,
    while_loop,
)
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, Slot
from strata.backends.llvm.ir.status import MAX_AXES, code_of
from strata.backends.llvm.linalg.lapack import THREADS_GUARD, thread_functions
from strata.core import Dim, DType, Target

SLOTS = 16  # matrices that can be in work at a time
TILE = 16  # of a matrix that is transposed
REPORT = 4  # words before the sizes of the stack


class Matrices:
    """Emits a loop over the matrices of a stack: a slot of the workspace at a time, so that few are in work at once."""

    def __init__(self, module: IrModule, name: str, dtype: DType, target: Target, kinds: str) -> None:
        self.f = f = kernel(module, name)
        self.dtype, self.target = dtype, target
        self.real = "double" if dtype.real.name == "f64" else "float"
        self.size = dtype.itemsize
        self.align = 8 if self.real == "double" else 4
        self.element = f"<2 x {self.real}>" if dtype.is_complex else self.real
        self.workspace, self.slot_bytes, self.count, self.slots, *self.given = arguments(f, "piiippp" + kinds)
        self.guard, self.read_threads, self.set_threads = self.given[:3]
        self.given = self.given[3:]

    def run(self, body: Callable[[str, str], None]) -> None:
        """body(matrix, its slot of the workspace)."""
        f = self.f

        def slot(point: str, _: list[str]) -> None:
            memory = f.address("i8", self.workspace, f.mul(point, self.slot_bytes))
            each_of_slot(f, point, self.count, self.slots, lambda i, _: body(i, memory))

        self._count_caller(1)
        f.loop("%begin", "%end", 1, (), slot)
        self._count_caller(-1)
        f.ret()

    def run_solve(
        self,
        right: str,
        out: str,
        of: tuple[str, str],
        sizes: tuple[str, str],
        solve: Callable[[str, str, str, str], None],
    ) -> None:
        """Right sides as columns, solved in place: solve(matrix, columns, n, k), whose sizes are addresses.

        `of` are the tables of the matrix and of the right side that each system of the joint stack has.
        """
        f, (n, k) = self.f, sizes

        def one(i: str, columns: str) -> None:
            at, b_at = (f.load("i64", f.address("i64", table, i), 8) for table in of)
            self.transpose(columns, self.at(right, f.mul(b_at, f.mul(n, k))), n, k)
            solve(at, columns, self.integer(n), self.integer(k))
            self.transpose(self.at(out, f.mul(i, f.mul(n, k))), columns, k, n)

        self.run(one)

    def _count_caller(self, change: int) -> None:
        """While anyone is inside, the library runs on the thread that calls it: matrices are what is shared out.

        Its own threads would wait by spinning beside the pool's, and their number would show in the last bits.
        """
        f = self.f

        def locked() -> None:
            def taken(_: list[str]) -> str:
                swap = f.op(f"cmpxchg ptr {self.guard}, i64 0, i64 1 seq_cst seq_cst")
                return f.binary("xor", "i1", f.op(f"extractvalue {{ i64, i1 }} {swap}, 1"), "true")

            while_loop(f, (), taken, lambda _: [])
            users, saved = f.address("i64", self.guard, 1), f.address("i64", self.guard, 2)
            before = f.load("i64", users, 8)
            after = f.add(before, change)
            f.store("i64", after, users, 8)

            def first() -> None:
                threads = f.call_address("i32", self.read_threads)
                f.store("i64", f.convert("sext", "i32", threads, "i64"), saved, 8)
                f.call_address("void", self.set_threads, ("i32", 1))

            def last() -> None:
                threads = f.convert("trunc", "i64", f.load("i64", saved, 8), "i32")
                f.call_address("void", self.set_threads, ("i32", threads))

            f.if_(f.compare("eq", "i64", before if change > 0 else after, 0), first if change > 0 else last)
            f.statement(f"store atomic i64 0, ptr {self.guard} seq_cst, align 8")

        f.if_(f.compare("ne", "ptr", self.set_threads, "null"), locked)

    # elements

    def at(self, base: Value, index: Value) -> str:
        return self.f.address(self.element, base, index)

    def load(self, base: Value, index: Value) -> str:
        return self.f.load(self.element, self.at(base, index), self.align)

    def store(self, value: Value, base: Value, index: Value) -> None:
        self.f.store(self.element, value, self.at(base, index), self.align)

    def number(self, value: float) -> str:
        """A real number as an element."""
        if not self.dtype.is_complex:
            return constant(self.real, value)
        return f"<{self.real} {constant(self.real, value)}, {self.real} {constant(self.real, 0.0)}>"

    def conjugate(self, value: str) -> str:
        if not self.dtype.is_complex:
            return value
        one, minus = constant(self.real, 1.0), constant(self.real, -1.0)
        return self.f.binary("fmul", self.element, value, f"<{self.real} {one}, {self.real} {minus}>")

    def transpose(self, to: Value, source: Value, rows: Value, columns: Value) -> None:
        """to[c · rows + r] = source[r · columns + c]: rows to columns, or back with the sizes swapped."""
        f = self.f

        def tile_row(r0: str, _: list[str]) -> None:
            def tile(c0: str, _: list[str]) -> None:
                def column(c: str, _: list[str]) -> None:
                    def one(r: str, _: list[str]) -> None:
                        self.store(self.load(source, f.add(f.mul(r, columns), c)), to, f.add(f.mul(c, rows), r))

                    f.loop(r0, f.smin(f.add(r0, TILE), rows), 1, (), one)

                f.loop(c0, f.smin(f.add(c0, TILE), columns), 1, (), column)

            f.loop(0, columns, TILE, (), tile)

        f.loop(0, rows, TILE, (), tile_row)

    def each(self, rows: Value, columns: Value, body: Callable[[str, str], None]) -> None:
        f = self.f
        f.loop(0, rows, 1, (), lambda r, _: f.loop(0, columns, 1, (), lambda c, _: body(r, c)) and None)

    def hermitian(self, x: Value, n: Value, r: Value, c: Value) -> str:
        """Element (r, c) of (x + xᴴ) / 2."""
        f = self.f
        total = f.binary(
            "fadd",
            self.element,
            self.load(x, f.add(f.mul(r, n), c)),
            self.conjugate(self.load(x, f.add(f.mul(c, n), r))),
        )
        half = constant(self.real, 0.5)
        return f.binary(
            "fmul", self.element, total, f"<{self.real} {half}, {self.real} {half}>" if self.dtype.is_complex else half
        )

    # routines

    def integer(self, value: Value) -> str:
        """The address of a 32-bit copy."""
        cell = self.f.alloca("i32", 1, 4)
        self.f.store("i32", self.f.convert("trunc", "i64", value, "i32") if isinstance(value, str) else value, cell, 4)
        return cell

    def letter(self, value: str) -> str:
        cell = self.f.alloca("i8", 1, 1)
        self.f.store("i8", ord(value), cell, 1)
        return cell

    def call(self, address: Value, *given: Value) -> str:
        """Runs a routine on addresses; returns its status, the cell of which comes last."""
        info = self.f.alloca("i32", 1, 4)
        self.f.store("i32", 0, info, 4)
        self.f.call_address("void", address, *(("ptr", g) for g in (*given, info)))
        return self.f.convert("sext", "i32", self.f.load("i32", info, 4), "i64")

    def failure(self, info: str) -> str:
        """A status above 0 for every failure: an iteration refuses what is not finite with one below."""
        return self.f.intrinsic("smax", "i64", info, self.f.op(f"sub i64 0, {info}"))


def _emit_check(module: IrModule) -> None:
    """Arguments: status, statuses, their number, code, axes, sizes…; the first status above 0 is reported."""
    f = kernel(module, "check")
    status, infos, count, code, axes = arguments(f, "ppiii")

    def one(i: str, _: list[str]) -> None:
        info = f.load("i64", f.address("i64", infos, i), 8)
        free = f.compare("eq", "i64", f.load("i64", status, 8), 0)
        failed = f.binary("and", "i1", f.compare("sgt", "i64", info, 0), free)

        def report() -> None:
            for at, value in enumerate((code, i, info, axes)):
                f.store("i64", value, f.address("i64", status, at), 8)
            copy(f, f.address("i64", status, REPORT), f.address("i64", "%arguments", 5), f.mul(axes, 8))

        f.if_(failed, report)

    f.loop(0, count, 1, (), one)
    f.ret()


class StackPlan(Workspace):
    """Calls over matrices and the workspace that they share: kept areas, then slots."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[NativeCall] = []

    def over(self, function: str, count: int, slot: Sequence[int], slots: Sequence[Slot]) -> None:
        """A call for each of `count` matrices; `slot` are the sizes of a slot's parts, whose starts are arguments."""
        parts = Workspace()
        starts = [parts.take(part) for part in slot]
        points = min(count, SLOTS)
        memory = self.area(parts.size * points)
        read, write = thread_functions()
        head = [
            memory,
            *number_slots(parts.size, count, points),
            ("table", THREADS_GUARD),
            ("pointer", read),
            ("pointer", write),
        ]
        self.calls.append(NativeCall(function, [*head, *slots, *number_slots(*starts)], points))

    def check(self, op: str, kind: int, infos: Slot, batch: Sequence[int]) -> None:
        sizes = list(batch)[:MAX_AXES]
        slots = [("status", 0), infos, *number_slots(math.prod(batch), code_of(op, kind), len(sizes), *sizes)]
        self.calls.append(NativeCall("check", slots))

    def done(self, keep: Any = None) -> Planned:
        return Planned(self.calls, self.size, keep)


def lapack_op(
    name: str,
    dtype: DType,
    emit: Callable[[IrModule], None],
    functions: tuple[str, ...],
    plan: Callable[[Sizes], Planned],
) -> NativeOp:
    def both(module: IrModule) -> None:
        emit(module)
        _emit_check(module)

    return NativeOp(f"lapack {name} {dtype}", both, (*functions, "check"), plan)


def stack_of(shape: Sequence[Dim], sizes: Sizes) -> tuple[list[int], int, int]:
    *batch, m, n = numbers(shape, sizes)
    return batch, m, n
