"""Real FFTs: two real sequences as the real and imaginary part of one complex sequence.

The bins of both come out of one complex transform, since those of real numbers are their own mirrored conjugates. This
is for lengths that `fft` takes in one go; longer ones are in `real_long`, others stay compositions of a complex
transform.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from strata.backends.llvm.fft.complex import LARGEST_PRIME, SLOTS, factors_of, stage_tables
from strata.backends.llvm.fft.real_long import long_real
from strata.backends.llvm.fft.transforms import Complex, TransformEmitter, transposed
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant
from strata.backends.llvm.ir.native import arguments, fill_zero, kernel, number_slots, numbers
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, Slot, override
from strata.core import Dim, DType, Target, TensorType, c64, c128
from strata.mir import Node, Op

SHORT = 128  # numbers of a sequence that is not worth a plan of its own, however few there are


def _form(dtype: DType, target: Target) -> TransformEmitter:
    return TransformEmitter(dtype if dtype.is_complex else c128 if dtype.itemsize == 8 else c64, target)


class _Pairs:
    """Emits the way of pairs of rows between memory and planes. Rows of a group are 2 · lanes, or `some`, fewer."""

    def __init__(self, f: IrFunction, form: TransformEmitter) -> None:
        self.f, self.form, self.lanes = f, form, form.lanes

    def plane(self, planes: Value, element: Value, part: int) -> str:
        return self.f.address(self.form.type, planes, self.f.add(self.f.mul(element, 2), part))

    def put(self, value: str, planes: Value, element: Value, part: int) -> None:
        self.f.store(self.form.type, value, self.plane(planes, element, part), self.form.size)

    def get(self, planes: Value, element: Value, part: int) -> str:
        return self.f.load(self.form.type, self.plane(planes, element, part), self.form.size)

    def square(self, base: Value, width: Value, which: int, start: Value) -> list[str]:
        """Numbers from `start` on of the first (which = 0) or second row of each pair, a vector for each number."""
        f, form = self.f, self.form
        rows = [
            f.load(form.type, f.address(form.real, base, f.add(f.mul(width, 2 * lane + which), start)), form.size)
            for lane in range(self.lanes)
        ]
        return transposed(f, form.type, rows)

    def store_square(self, columns: list[str], base: Value, width: Value, which: int, start: Value) -> None:
        f, form = self.f, self.form
        for lane, value in enumerate(transposed(f, form.type, columns)):
            at = f.address(form.real, base, f.add(f.mul(width, 2 * lane + which), start))
            f.store(form.type, value, at, form.size)

    def tiles(
        self, some: Value, count: Value, step: int, tile: Callable[[Value], None], single: Callable[[], None]
    ) -> None:
        """Tiles of `step` where a group is full; the last one starts early enough to be full. Else `single`."""
        f = self.f
        full = f.compare("eq", "i64", some, 2 * self.lanes)
        full = f.binary("and", "i1", full, f.compare("sge", "i64", count, step))

        def whole() -> None:
            f.loop(0, f.round_down(count, step), step, (), lambda i, _: tile(i))
            ragged = f.compare("ne", "i64", f.binary("and", "i64", count, step - 1), 0)
            f.if_(ragged, lambda: tile(f.sub(count, step)))

        f.if_(full, whole, single)

    def cells(self, some: Value, body: Callable[[str, str, int], None]) -> None:
        """body(row of the group, its lane, first or second of its pair) for every row there is."""
        f = self.f

        def pair(lane: str, _: list[str]) -> None:
            for which in range(2):
                row = f.add(f.mul(lane, 2), which)
                f.if_(f.compare("slt", "i64", row, some), lambda row=row, which=which: body(str(row), lane, which))  # type: ignore[misc]

        f.loop(0, self.lanes, 1, (), pair)


def _emit_forward(work: _Pairs, planes: Value, base: Value, n: Value, some: Value) -> None:
    """Real rows to planes."""
    f, form = work.f, work.form

    def tile(start: Value) -> None:
        for which in range(2):
            for i, value in enumerate(work.square(base, n, which, start)):
                work.put(value, planes, f.add(start, i), which)

    def single() -> None:
        fill_zero(f, planes, f.mul(n, form.plane_bytes))

        def row(r: str, lane: str, which: int) -> None:
            def one(e: str, _: list[str]) -> None:
                value = f.load(form.real, f.address(form.real, base, f.add(f.mul(r, n), e)), form.size)
                cell = f.add(f.mul(f.add(f.mul(e, 2), which), work.lanes), lane)
                f.store(form.real, value, f.address(form.real, planes, cell), form.size)

            f.loop(0, n, 1, (), one)

        work.cells(some, row)

    work.tiles(some, n, work.lanes, tile, single)


def _emit_bins(work: _Pairs, planes: Value, base: Value, n: Value, bins: Value, some: Value, scale: str) -> None:
    """Planes of a transform to the bins of both rows of a pair."""
    f, form = work.f, work.form
    factor = f.splat(form.type, f.binary("fmul", form.real, scale, constant(form.real, 0.5)))
    width = f.mul(bins, 2)

    def both(k: Value) -> tuple[Complex, Complex]:
        mirror = f.select("i64", f.compare("eq", "i64", k, 0), 0, f.sub(n, k))
        zr, zi = (work.get(planes, k, part) for part in range(2))
        wr, wi = (work.get(planes, mirror, part) for part in range(2))
        sums = [f.binary("fadd", form.type, zr, wr), f.binary("fsub", form.type, zi, wi)]
        gaps = [f.binary("fadd", form.type, zi, wi), f.binary("fsub", form.type, wr, zr)]
        first, second = ([f.binary("fmul", form.type, v, factor) for v in pair] for pair in (sums, gaps))
        return (first[0], first[1]), (second[0], second[1])

    def tile(start: Value) -> None:
        pairs = [both(f.add(start, i)) for i in range(work.lanes // 2)]
        for which in range(2):
            columns = [part for pair in pairs for part in pair[which]]
            work.store_square(columns, base, width, which, f.mul(start, 2))

    def single() -> None:
        stack = f.alloca(form.type, 4)

        def one(k: str, _: list[str]) -> None:
            for i, value in enumerate(v for pair in both(k) for v in pair):
                f.store(form.type, value, f.address(form.type, stack, i), form.size)

            def row(r: str, lane: str, which: int) -> None:
                for part in range(2):
                    value = f.load(
                        form.real, f.address(form.real, stack, f.add(lane, (2 * which + part) * work.lanes)), form.size
                    )
                    at = f.add(f.add(f.mul(r, width), f.mul(k, 2)), part)
                    f.store(form.real, value, f.address(form.real, base, at), form.size)

            work.cells(some, row)

        f.loop(0, bins, 1, (), one)

    work.tiles(some, bins, work.lanes // 2, tile, single)


def _emit_backward(work: _Pairs, planes: Value, base: Value, n: Value, bins: Value, some: Value) -> None:
    """Bins of pairs of rows to planes, real and imaginary parts swapped: the transform is an inverse."""
    f, form = work.f, work.form
    width = f.mul(bins, 2)
    zero = constant(form.type, 0.0)

    def merge(k: Value, first: Sequence[str], second: Sequence[str]) -> None:
        own = f.compare("eq", "i64", k, 0)
        own = f.binary(
            "or", "i1", own, f.compare("eq", "i64", f.mul(k, 2), n)
        )  # bins that are their own mirror are real
        (re1, im1), (re2, im2) = first, second
        im1, im2 = (f.select(form.type, own, zero, im, uniform=True) for im in (im1, im2))
        work.put(f.binary("fadd", form.type, im1, re2), planes, k, 0)
        work.put(f.binary("fsub", form.type, re1, im2), planes, k, 1)
        mirror = f.select("i64", f.compare("eq", "i64", k, 0), 0, f.sub(n, k))
        work.put(f.binary("fsub", form.type, re2, im1), planes, mirror, 0)
        work.put(f.binary("fadd", form.type, re1, im2), planes, mirror, 1)

    def tile(start: Value) -> None:
        rows = [work.square(base, width, which, f.mul(start, 2)) for which in range(2)]
        for i in range(work.lanes // 2):
            merge(f.add(start, i), rows[0][2 * i : 2 * i + 2], rows[1][2 * i : 2 * i + 2])

    def single() -> None:
        stack = f.alloca(form.type, 4)
        fill_zero(f, stack, 4 * work.lanes * form.size)

        def one(k: str, _: list[str]) -> None:
            def row(r: str, lane: str, which: int) -> None:
                for part in range(2):
                    at = f.add(f.add(f.mul(r, width), f.mul(k, 2)), part)
                    value = f.load(form.real, f.address(form.real, base, at), form.size)
                    cell = f.address(form.real, stack, f.add(lane, (2 * which + part) * work.lanes))
                    f.store(form.real, value, cell, form.size)

            work.cells(some, row)
            parts = [f.load(form.type, f.address(form.type, stack, i), form.size) for i in range(4)]
            merge(k, parts[:2], parts[2:])

        f.loop(0, bins, 1, (), one)

    work.tiles(some, bins, work.lanes // 2, tile, single)


def _emit_numbers(work: _Pairs, planes: Value, base: Value, n: Value, some: Value, scale: str) -> None:
    """Planes of an inverse transform, parts swapped, to real rows."""
    f, form = work.f, work.form
    factor = f.splat(form.type, scale)

    def tile(start: Value) -> None:
        for which in range(2):
            columns = [work.get(planes, f.add(start, i), 1 - which) for i in range(work.lanes)]
            columns = [f.binary("fmul", form.type, c, factor) for c in columns]
            work.store_square(columns, base, n, which, start)

    def single() -> None:
        def row(r: str, lane: str, which: int) -> None:
            def one(e: str, _: list[str]) -> None:
                cell = f.add(f.mul(f.add(f.mul(e, 2), 1 - which), work.lanes), lane)
                value = f.load(form.real, f.address(form.real, planes, cell), form.size)
                value = f.binary("fmul", form.real, value, scale)
                f.store(form.real, value, f.address(form.real, base, f.add(f.mul(r, n), e)), form.size)

            f.loop(0, n, 1, (), one)

        work.cells(some, row)

    work.tiles(some, n, work.lanes, tile, single)


def _emit(module: IrModule, form: TransformEmitter, inverse: bool) -> None:
    """Groups of 2 · lanes rows: paired up, transformed, taken apart. Points are slots of the workspace."""
    form.emit(module)
    f = kernel(module, "real_groups")
    source, out, workspace, slot_bytes, groups, slots, rows, n, scale, stages, count, table = arguments(
        f, "pppiiiiippip"
    )
    work = _Pairs(f, form)
    factor = f.load(form.real, scale, form.size)
    bins = f.add(f.binary("lshr", "i64", n, 1), 1)
    wide_in, wide_out = (f.mul(bins, 2), n) if inverse else (n, f.mul(bins, 2))

    def slot(point: str, _: list[str]) -> None:
        a = f.address("i8", workspace, f.mul(point, slot_bytes))
        b = f.address("i8", a, f.binary("lshr", "i64", slot_bytes, 1))
        first = f.binary("udiv", "i64", f.mul(point, groups), slots)
        last = f.binary("udiv", "i64", f.mul(f.add(point, 1), groups), slots)

        def group(g: str, _: list[str]) -> None:
            row = f.mul(g, 2 * work.lanes)
            some = f.smin(f.sub(rows, row), 2 * work.lanes)
            base = f.address(form.real, source, f.mul(row, wide_in))
            if inverse:
                _emit_backward(work, a, base, n, bins, some)
            else:
                _emit_forward(work, a, base, n, some)
            spans = (("ptr", a), ("ptr", b), ("ptr", stages), ("i64", count), ("ptr", table))
            result = f.call("ptr", "passes", *spans)
            to = f.address(form.real, out, f.mul(row, wide_out))
            if inverse:
                _emit_numbers(work, result, to, n, some, factor)
            else:
                _emit_bins(work, result, to, n, bins, some, factor)

        f.loop(first, last, 1, (), group)

    f.loop("%begin", "%end", 1, (), slot)
    f.ret()


def _length(op: Op, types: Sequence[TensorType]) -> Dim:
    return op.n if op.name == "irfft" else types[0].shape[-1]  # type: ignore[attr-defined]


def _in_one_go(op: Op, types: Sequence[TensorType], target: Target) -> bool:
    """Whether the length suits, and enough rows are known, or nothing is known of them; short ones are no work."""
    n, form = _length(op, types), _form(types[0].dtype, target)
    if not isinstance(n, int) or n < 2 or max(factors_of(n)) > LARGEST_PRIME:
        return False
    rows = [d for d in types[0].shape[:-1] if isinstance(d, int)]
    is_known = len(rows) == len(types[0].shape) - 1
    enough = n <= SHORT or not is_known or math.prod(rows) >= form.lanes
    return n * form.plane_bytes <= target.l2_bytes and enough


def _by_halves(op: Op, types: Sequence[TensorType]) -> bool:
    """Whether the sequence is as good as half as many complex numbers."""
    n = _length(op, types)
    return isinstance(n, int) and n % 2 == 0 and n > SHORT


def _is_whole(op: Op, types: Sequence[TensorType], target: Target) -> bool:
    return _in_one_go(op, types, target) or _by_halves(op, types)


@override("rfft", "irfft", instead_of_parts=_is_whole)
def _real(node: Node, target: Target) -> NativeOp | None:
    (x,) = node.inputs
    op, inverse = node.op, node.op.name == "irfft"
    if not _is_whole(op, [x.type], target):
        return None
    form = _form(x.dtype, target)
    n = _length(op, [x.type])
    assert isinstance(n, int)
    if not _in_one_go(op, [x.type], target):
        return long_real(node, form, n)

    def plan(sizes: Sizes) -> Planned:
        rows = math.prod(numbers(x.shape[:-1], sizes))
        if rows == 0:
            return Planned(())
        real = form.dtype.real.np.name
        scale = {"one": 1.0, "by_n": 1.0 / n, "ortho": 1.0 / math.sqrt(n)}[op.scale]  # type: ignore[attr-defined]
        groups = -(-rows // (2 * form.lanes))
        slots, size = min(groups, SLOTS), 2 * n * form.plane_bytes
        stages, table = stage_tables(n, real)
        given: list[Slot] = [("input", 0), ("output", 0), ("workspace", 0), *number_slots(size, groups, slots, rows, n)]
        given += [
            ("table", np.array([scale], real)),
            ("table", stages),
            ("number", len(factors_of(n))),
            ("table", table),
        ]
        return Planned([NativeCall("real_groups", given, slots)], size * slots)

    return NativeOp(f"{op.name} {form.dtype}", lambda module: _emit(module, form, inverse), ("real_groups",), plan)
