"""Bounds checks of ids in native code: the first one out of range goes into the status words (see `status`)."""

from __future__ import annotations

import math

from strata.backends.llvm.ir.builder import IrModule
from strata.backends.llvm.ir.native import arguments, copy, kernel, number_slots, numbers
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, override
from strata.backends.llvm.ir.status import OUT_OF_RANGE, code_of
from strata.core import Target
from strata.mir import Node
from strata.ops import CheckedIds

_HEAD = 6  # arguments before the sizes


@override("checked_ids", whole=True)
def _checked_ids(node: Node, target: Target) -> NativeOp:
    ids, op = node.inputs[0], node.op
    assert isinstance(op, CheckedIds)
    sizes, wrap, allowed = op.sizes, op.wrap, op.allowed
    width = ids.dtype.itemsize

    def emit(module: IrModule) -> None:
        """Arguments: ids, where they go, status, their number, code, the number of sizes, sizes…"""
        f = kernel(module, "check_ids")
        source, to, status, count, code, axes = arguments(f, "pppiii")
        only = f.load("i64", f.address("i64", "%arguments", _HEAD), 8) if len(sizes) == 1 else None

        def one(i: str, _: list[str]) -> None:
            given = f.load(f"i{8 * width}", f.address(f"i{8 * width}", source, i), width)
            at = given if width == 8 else f.op(f"sext i32 {given} to i64")
            size = only or f.load("i64", f.address("i64", "%arguments", f.add(f.op(f"srem i64 {i}, {axes}"), _HEAD)), 8)
            low = f.sub(0, size) if wrap else "0"
            bad = f.binary("or", "i1", f.compare("slt", "i64", at, low), f.compare("sge", "i64", at, size))
            if op.kind == "empty":
                bad = f.compare("eq", "i64", size, 0)
            if allowed is not None:
                bad = f.binary("and", "i1", bad, f.compare("ne", "i64", at, allowed))
            free = f.compare("eq", "i64", f.load("i64", status, 8), 0)

            def report() -> None:
                for place, value in enumerate((code, i, at, low, size)):
                    f.store("i64", value, f.address("i64", status, place), 8)

            f.if_(f.binary("and", "i1", bad, free), report)

        f.loop(0, count, 1, (), one)
        copy(f, to, source, f.mul(count, width))
        f.ret()

    def plan(known: Sizes) -> Planned:
        count = math.prod(numbers(ids.shape, known))
        head = number_slots(count, code_of(op.what, OUT_OF_RANGE[op.kind]), len(sizes), *numbers(sizes, known))
        return Planned([NativeCall("check_ids", [("input", 0), ("output", 0), ("status", 0), *head])])

    return NativeOp(
        f"checked_ids {width} {wrap} {allowed} {op.kind == 'empty'} {len(sizes) == 1}", emit, ("check_ids",), plan
    )
