"""Real FFTs: two real sequences as the real and imaginary part of one complex sequence.

The bins of both come out of one complex transform, since those of real numbers are their own mirrored conjugates. This
is for lengths that `fft` takes in one go; longer ones are in `real_long`, others go through a complex transform.
Which of the three it is depends on the sizes of a run, so that results do not depend on what was known before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from strata.backends.llvm.fft.complex import LARGEST_PRIME, SLOTS, Planner, emit_transforms, factors_of, stage_tables
from strata.backends.llvm.fft.real_long import by_halves, emit_bins
from strata.backends.llvm.fft.transforms import Complex, TransformEmitter, transposed
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant
from strata.backends.llvm.ir.native import arguments, each_of_slot, each_point, fill_zero, kernel, number_slots, numbers
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, Slot, override
from strata.core import Dim, DType, Target, TensorType, c64, c128
from strata.mir import Node, Op

SHORT = 128  # numbers of a sequence that is not worth its own plan, however few there are


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

        each_of_slot(f, point, groups, slots, group)

    each_point(f, slot)


def _length(op: Op, types: Sequence[TensorType]) -> Dim:
    return op.n if op.name == "irfft" else types[0].shape[-1]  # type: ignore[attr-defined]


def _form_of(rows: int, n: int, form: TransformEmitter) -> str:
    """Which functions transform this many sequences: sizes known at compile time and in a run choose alike."""
    suits = n >= 2 and max(factors_of(n)) <= LARGEST_PRIME and n * form.plane_bytes <= form.target.l2_bytes
    if suits and (n <= SHORT or rows >= form.lanes):
        return "pairs"
    return "halves" if n % 2 == 0 and n > SHORT else "complex"


@override("rfft", "irfft", instead_of_parts=lambda op, types, target: True)
def _real(node: Node, target: Target) -> NativeOp:
    (x,) = node.inputs
    op, inverse = node.op, node.op.name == "irfft"
    form = _form(x.dtype, target)
    real, length = form.dtype.real.np.name, _length(op, [x.type])
    known = [d for d in (*x.shape[:-1], length) if isinstance(d, int)]
    forms = (_form_of(math.prod(known[:-1]), known[-1], form),) if len(known) == len(x.shape) else tuple(_FUNCTIONS)

    def plan(sizes: Sizes) -> Planned:
        *batch, n = numbers((*x.shape[:-1], length), sizes)
        rows = math.prod(batch)
        if rows == 0:
            return Planned(())
        scale = {"one": 1.0, "by_n": 1.0 / n, "ortho": 1.0 / math.sqrt(n)}[op.scale]  # type: ignore[attr-defined]
        match _form_of(rows, n, form):
            case "pairs":
                return _in_pairs(form, rows, n, scale)
            case "halves":
                return by_halves(form, rows, n, scale, back=inverse)
            case _:
                return _as_complex(form, rows, n, scale, back=inverse)

    def _in_pairs(form: TransformEmitter, rows: int, n: int, scale: float) -> Planned:
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

    def emit(module: IrModule) -> None:
        if forms == ("pairs",):
            form.emit(module)
        else:
            emit_transforms(module, form)
        for name in forms:
            _FUNCTIONS[name][0](module, form, inverse)

    functions = tuple(dict.fromkeys(f for name in forms for f in _FUNCTIONS[name][1]))
    return NativeOp(f"{op.name} {form.dtype} {' '.join(forms)}", emit, functions, plan)


def _as_complex(form: TransformEmitter, rows: int, n: int, scale: float, *, back: bool) -> Planned:
    """By a complex transform of all n numbers, for lengths that have no shorter way."""
    made = Planner(form)
    whole, turned = (made.area(rows * n * form.dtype.itemsize) for _ in range(2))
    made.calls.append(NativeCall("widened", [("input", 0), whole, *number_slots(n)], rows))
    made.transform(whole, turned, rows, n, back, scale)
    made.calls.append(NativeCall("cut", [turned, ("output", 0), *number_slots(n)], rows))
    return Planned(made.calls, made.size)


def _emit_ends(module: IrModule, form: TransformEmitter, back: bool) -> None:
    """The ways into and out of a complex transform; points are rows. Bins are mirrored, and numbers have no imaginary
    part."""
    real, size = form.real, form.size

    def place(f: IrFunction, start: Value, at: Value, parts: int, part: int = 0) -> str:
        return f.address(real, start, f.add(f.mul(at, parts), part))

    f = kernel(module, "widened")
    source, out, n = arguments(f, "ppi")
    bins = f.add(f.binary("lshr", "i64", n, 1), 1)

    def widen(row: str, _: list[str]) -> None:
        def one(j: str, _: list[str]) -> None:
            to = f.add(f.mul(row, n), j)
            if not back:
                parts = f.load(real, place(f, source, to, 1), size), constant(real, 0)
            else:
                is_kept = f.compare("ult", "i64", j, bins)
                at = f.add(f.mul(row, bins), f.select("i64", is_kept, j, f.sub(n, j)))
                re, im = (f.load(real, place(f, source, at, 2, p), size) for p in range(2))
                parts = re, f.select(real, is_kept, im, f.op(f"fneg {real} {im}"))
            for p, part in enumerate(parts):
                f.store(real, part, place(f, out, to, 2, p), size)

        f.loop(0, n, 1, (), one)

    each_point(f, widen)
    f = kernel(module, "cut")
    source, out, n = arguments(f, "ppi")
    bins = f.add(f.binary("lshr", "i64", n, 1), 1)

    def cut(row: str, _: list[str]) -> None:
        def one(j: str, _: list[str]) -> None:
            to = f.add(f.mul(row, n if back else bins), j)
            for p in range(1 if back else 2):
                value = f.load(real, place(f, source, f.add(f.mul(row, n), j), 2, p), size)
                f.store(real, value, place(f, out, to, 1 if back else 2, p), size)

        f.loop(0, n if back else bins, 1, (), one)

    each_point(f, cut)


# the functions of each form, beside those of complex transforms
_FUNCTIONS: dict[str, tuple[Callable[[IrModule, TransformEmitter, bool], None], tuple[str, ...]]] = {
    "pairs": (_emit, ("real_groups",)),
    "halves": (emit_bins, ("groups", "product", "bins")),
    "complex": (_emit_ends, ("groups", "product", "widened", "cut")),
}
