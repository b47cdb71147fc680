"""Matrix ops on stacks by LAPACK, with generated copies around its routines.

LAPACK wants columns one after the other, so matrices are transposed on the way in and out. Each matrix leaves the
status of its routine in the workspace; a last step looks for the first one that failed and reports it (see `status`).
"""

from __future__ import annotations

import math

import numpy as np

from strata.backends.llvm.ir.builder import IrModule, constant
from strata.backends.llvm.ir.native import fill_zero, number_slots
from strata.backends.llvm.ir.overrides import NativeOp, Planned, Sizes, override
from strata.backends.llvm.ir.status import DIVERGED, NOT_POSITIVE, SINGULAR
from strata.backends.llvm.linalg.lapack import routine, work_size
from strata.backends.llvm.linalg.matrices import Matrices, StackPlan, lapack_op, stack_of
from strata.backends.llvm.math import exponentials, logs
from strata.core import Target, broadcast_shapes
from strata.mir import Node

# solving


@override("solve")
def _solve(node: Node, target: Target) -> NativeOp:
    a, b = node.inputs
    dtype, adjoint = a.dtype, node.op.adjoint  # type: ignore[attr-defined]

    def emit(module: IrModule) -> None:
        m = Matrices(module, "factor", dtype, target, "ppppip")
        f = m.f
        source, factors, pivots, infos, n, getrf = m.given

        def factor(i: str, _: str) -> None:
            own = m.at(factors, f.mul(i, f.mul(n, n)))
            m.transpose(own, m.at(source, f.mul(i, f.mul(n, n))), n, n)
            size = m.integer(n)
            info = m.call(getrf, size, size, own, size, f.address("i32", pivots, f.mul(i, n)))
            f.store("i64", info, f.address("i64", infos, i), 8)

        m.run(factor)
        m = Matrices(module, "solve", dtype, target, "ppppppiipi")
        f = m.f
        right, out, factors, pivots, of_a, of_b, n, k, getrs, _ = m.given

        def solve(at: str, columns: str, size: str, count: str) -> None:
            own, swaps = m.at(factors, f.mul(at, f.mul(n, n))), f.address("i32", pivots, f.mul(at, n))
            m.call(getrs, m.letter("C" if adjoint else "N"), size, count, own, size, swaps, columns, size)

        m.run_solve(right, out, (of_a, of_b), (n, k), solve)

    def plan(sizes: Sizes) -> Planned:
        batch_a, n, _ = stack_of(a.shape, sizes)
        batch_b, _, k = stack_of(b.shape, sizes)
        made = StackPlan()
        count, (of_a, of_b) = _broadcast(batch_a, batch_b)
        stack = math.prod(batch_a)
        if count * n * k == 0 or stack == 0:
            return Planned(())
        factors, pivots, infos = (
            made.area(stack * n * n * dtype.itemsize),
            made.area(4 * stack * n),
            made.area(8 * stack),
        )
        given = [("input", 0), factors, pivots, infos, ("number", n), ("pointer", routine("getrf", dtype))]
        made.over("factor", stack, (), given)
        made.check("solve", SINGULAR, infos, batch_a)
        given = [("input", 1), ("output", 0), factors, pivots, ("table", of_a), ("table", of_b), *number_slots(n, k)]
        made.over("solve", count, (n * k * dtype.itemsize,), [*given, ("pointer", routine("getrs", dtype))])
        return made.done()

    return lapack_op(f"solve {adjoint}", dtype, emit, ("factor", "solve"), plan)


def _broadcast(a: list[int], b: list[int]) -> tuple[int, list[np.ndarray]]:
    """The size of the joint stack, and for each of its matrices the one of a and of b."""
    shape = tuple(int(d) for d in broadcast_shapes(tuple(a), tuple(b), what="solve"))
    numbered = [np.arange(math.prod(s)).reshape(s) for s in (a, b)]
    tables = [np.ascontiguousarray(np.broadcast_to(x, shape), np.int64).reshape(-1) for x in numbered]
    return math.prod(shape), tables


@override("triangular_solve")
def _triangular_solve(node: Node, target: Target) -> NativeOp:
    a, b = node.inputs
    dtype, op = a.dtype, node.op
    upper, transpose, unit = op.upper, op.transpose, op.unit_diagonal  # type: ignore[attr-defined]

    def emit(module: IrModule) -> None:
        m = Matrices(module, "triangular", dtype, target, "ppppppiipi")
        f = m.f
        source, right, out, infos, of_a, of_b, n, k, trtrs, _ = m.given

        def solve(at: str, columns: str, size: str, count: str) -> None:
            # rows read as columns are the transpose: the other triangle, and the other form of the system
            letters = [
                m.letter("L" if upper else "U"),
                m.letter("N" if transpose else "T"),
                m.letter("U" if unit else "N"),
            ]
            info = m.call(trtrs, *letters, size, count, m.at(source, f.mul(at, f.mul(n, n))), size, columns, size)
            f.store("i64", info, f.address("i64", infos, at), 8)

        m.run_solve(right, out, (of_a, of_b), (n, k), solve)

    def plan(sizes: Sizes) -> Planned:
        batch_a, n, _ = stack_of(a.shape, sizes)
        batch_b, _, k = stack_of(b.shape, sizes)
        made = StackPlan()
        count, (of_a, of_b) = _broadcast(batch_a, batch_b)
        if count * n * k == 0:
            return Planned(())
        infos = made.area(8 * math.prod(batch_a))
        given = [
            ("input", 0),
            ("input", 1),
            ("output", 0),
            infos,
            ("table", of_a),
            ("table", of_b),
            *number_slots(n, k),
        ]
        made.over("triangular", count, (n * k * dtype.itemsize,), [*given, ("pointer", routine("trtrs", dtype))])
        made.check("triangular_solve", SINGULAR, infos, batch_a)
        return made.done()

    return lapack_op(f"triangular {upper} {transpose} {unit}", dtype, emit, ("triangular",), plan)


# factorizations


@override("cholesky")
def _cholesky(node: Node, target: Target) -> NativeOp:
    (x,) = node.inputs

    def emit(module: IrModule) -> None:
        m = Matrices(module, "cholesky", x.dtype, target, "pppip")
        f = m.f
        source, out, infos, n, potrf = m.given

        def factor(i: str, _: str) -> None:
            start = f.mul(i, f.mul(n, n))
            own, matrix = m.at(out, start), m.at(source, start)

            def row(r: str, _: list[str]) -> None:
                f.loop(
                    0,
                    f.add(r, 1),
                    1,
                    (),
                    lambda c, _: m.store(m.hermitian(matrix, n, r, c), own, f.add(f.mul(r, n), c)),
                )
                rest = f.add(r, 1)
                fill_zero(f, m.at(own, f.add(f.mul(r, n), rest)), f.mul(f.sub(n, rest), m.size))

            f.loop(0, n, 1, (), row)
            size = m.integer(n)
            # rows read as columns hold the conjugate, whose upper factor read as rows is L
            info = m.call(potrf, m.letter("U"), size, own, size)
            f.store("i64", info, f.address("i64", infos, i), 8)

        m.run(factor)

    def plan(sizes: Sizes) -> Planned:
        batch, n, _ = stack_of(x.shape, sizes)
        made, count = StackPlan(), math.prod(batch)
        if count * n == 0:
            return Planned(())
        infos = made.area(8 * count)
        given = [("input", 0), ("output", 0), infos, ("number", n), ("pointer", routine("potrf", x.dtype))]
        made.over("cholesky", count, (), given)
        made.check("cholesky", NOT_POSITIVE, infos, batch)
        return made.done()

    return lapack_op("cholesky", x.dtype, emit, ("cholesky",), plan)


@override("qr")
def _qr(node: Node, target: Target) -> NativeOp:
    (x,) = node.inputs
    dtype = x.dtype

    def emit(module: IrModule) -> None:
        m = Matrices(module, "qr", dtype, target, "pppiiiippiii")
        f = m.f
        source, q, r, rows, columns, k, lwork, geqrf, orgqr, _, tau_at, work_at = m.given

        def factor(i: str, own: str) -> None:
            tau, work = f.address("i8", own, tau_at), f.address("i8", own, work_at)
            m.transpose(own, m.at(source, f.mul(i, f.mul(rows, columns))), rows, columns)
            sizes = [m.integer(v) for v in (rows, columns, k, f.smax(rows, 1), lwork)]
            m.call(geqrf, sizes[0], sizes[1], own, sizes[3], tau, work, sizes[4])
            upper = m.at(r, f.mul(i, f.mul(k, columns)))

            def one(a: str, b: str) -> None:
                value = m.load(own, f.add(f.mul(b, rows), a))
                kept = f.select(m.element, f.compare("sle", "i64", a, b), value, m.number(0.0), uniform=True)
                m.store(kept, upper, f.add(f.mul(a, columns), b))

            m.each(k, columns, one)
            m.call(orgqr, sizes[0], sizes[2], sizes[1], own, sizes[3], tau, work, sizes[4])
            m.transpose(m.at(q, f.mul(i, f.mul(rows, k))), own, k, rows)

        m.run(factor)

    def plan(sizes: Sizes) -> Planned:
        batch, rows, columns = stack_of(x.shape, sizes)
        k = rows if node.op.complete else columns  # type: ignore[attr-defined]
        made, count = StackPlan(), math.prod(batch)
        if count * rows * k == 0:
            return Planned(())
        lead = max(rows, 1)
        lwork = max(
            work_size("geqrf", dtype, "", (rows, columns, lead))[0],
            work_size("orgqr", dtype, "", (rows, k, columns, lead))[0],
            1,
        )
        given = [("input", 0), ("output", 0), ("output", 1), *number_slots(rows, columns, k, lwork)]
        given += [("pointer", routine("geqrf", dtype)), ("pointer", routine("orgqr", dtype))]
        item = dtype.itemsize
        made.over("qr", count, (rows * max(k, columns) * item, columns * item, lwork * item), given)
        return made.done()

    return lapack_op("qr", dtype, emit, ("qr",), plan)


@override("lu")
def _lu(node: Node, target: Target) -> NativeOp:
    (x,) = node.inputs
    dtype = x.dtype

    def emit(module: IrModule) -> None:
        m = Matrices(module, "lu", dtype, target, "ppppiiipiii")
        f = m.f
        source, p, low, up, rows, columns, k, getrf, _, swaps_at, order_at = m.given

        def factor(i: str, own: str) -> None:
            swaps, order = f.address("i8", own, swaps_at), f.address("i8", own, order_at)
            m.transpose(own, m.at(source, f.mul(i, f.mul(rows, columns))), rows, columns)
            sizes = [m.integer(v) for v in (rows, columns, f.smax(rows, 1))]
            f.if_(
                f.compare("sgt", "i64", k, 0), lambda: m.call(getrf, sizes[0], sizes[1], own, sizes[2], swaps) and None
            )
            f.loop(0, rows, 1, (), lambda r, _: f.store("i64", r, f.address("i64", order, r), 8))

            def swap(r: str, _: list[str]) -> None:
                other = f.sub(f.convert("sext", "i32", f.load("i32", f.address("i32", swaps, r), 4), "i64"), 1)
                cells = [f.address("i64", order, r), f.address("i64", order, other)]
                values = [f.load("i64", cell, 8) for cell in cells]
                f.store("i64", values[1], cells[0], 8)
                f.store("i64", values[0], cells[1], 8)

            f.loop(0, k, 1, (), swap)
            permutation = m.at(p, f.mul(i, f.mul(rows, rows)))
            fill_zero(f, permutation, f.mul(f.mul(rows, rows), m.size))

            def one(r: str, _: list[str]) -> None:
                at = f.load("i64", f.address("i64", order, r), 8)
                m.store(m.number(1.0), permutation, f.add(f.mul(at, rows), r))

            f.loop(0, rows, 1, (), one)
            lower, upper = m.at(low, f.mul(i, f.mul(rows, k))), m.at(up, f.mul(i, f.mul(k, columns)))

            def below(a: str, b: str) -> None:
                value = m.load(own, f.add(f.mul(b, rows), a))
                rest = f.select(m.element, f.compare("eq", "i64", a, b), m.number(1.0), m.number(0.0), uniform=True)
                m.store(
                    f.select(m.element, f.compare("sgt", "i64", a, b), value, rest, uniform=True),
                    lower,
                    f.add(f.mul(a, k), b),
                )

            def above(a: str, b: str) -> None:
                value = m.load(own, f.add(f.mul(b, rows), a))
                kept = f.select(m.element, f.compare("sle", "i64", a, b), value, m.number(0.0), uniform=True)
                m.store(kept, upper, f.add(f.mul(a, columns), b))

            m.each(rows, k, below)
            m.each(k, columns, above)

        m.run(factor)

    def plan(sizes: Sizes) -> Planned:
        batch, rows, columns = stack_of(x.shape, sizes)
        k, made, count = min(rows, columns), StackPlan(), math.prod(batch)
        if count == 0:
            return Planned(())
        outputs = [("output", i) for i in range(3)]
        given = [("input", 0), *outputs, *number_slots(rows, columns, k), ("pointer", routine("getrf", dtype))]
        made.over("lu", count, (rows * columns * dtype.itemsize, 4 * k, 8 * rows), given)
        return made.done()

    return lapack_op("lu", dtype, emit, ("lu",), plan)


@override("det", "slogdet")
def _determinant(node: Node, target: Target) -> NativeOp:
    (x,) = node.inputs
    dtype = x.dtype
    logarithm = node.op.name == "slogdet"

    def emit(module: IrModule) -> None:
        m = Matrices(module, "determinant", dtype, target, "pppipii")
        f = m.f
        source, out, log, n, getrf, _, swaps_at = m.given
        parts = 2 if dtype.is_complex else 1
        real = m.real
        math_ = exponentials.VectorMath(f, real, target)

        def pair(value: str) -> list[str]:
            return [f.extract(m.element, value, i) for i in range(2)] if parts == 2 else [value]

        def product(a: list[str], b: list[str]) -> list[str]:
            if parts == 1:
                return [f.binary("fmul", real, a[0], b[0])]
            cross = [[f.binary("fmul", real, p, q) for q in b] for p in a]
            return [f.binary("fsub", real, cross[0][0], cross[1][1]), f.binary("fadd", real, cross[0][1], cross[1][0])]

        def one(i: str, own: str) -> None:
            swaps = f.address("i8", own, swaps_at)
            m.transpose(own, m.at(source, f.mul(i, f.mul(n, n))), n, n)
            size, lead = m.integer(n), m.integer(f.smax(n, 1))
            info = m.call(getrf, size, size, own, lead, swaps)

            def step(r: str, state: list[str]) -> list[str]:
                *sign, total = state
                pivot = pair(m.load(own, f.add(f.mul(r, n), r)))
                swap = f.convert("sext", "i32", f.load("i32", f.address("i32", swaps, r), 4), "i64")
                same = f.compare("eq", "i64", swap, f.add(r, 1))
                flip = f.select(real, same, constant(real, 1.0), constant(real, -1.0))
                if logarithm:
                    size_ = exponentials.hypot(math_, *pivot) if parts == 2 else math_.abs(pivot[0])
                    total = f.binary("fadd", real, total, logs.log(math_, size_))
                    pivot = [f.binary("fdiv", real, p, size_) for p in pivot]
                return [*product(sign, [f.binary("fmul", real, p, flip) for p in pivot]), total]

            carried = [(real, constant(real, 1.0)), *[(real, constant(real, 0.0))] * parts]
            *sign, total = f.loop(0, n, 1, carried, step)
            singular = f.compare("sgt", "i64", info, 0)
            sign = [f.select(real, singular, constant(real, 0.0), s) for s in sign]
            value = sign[0]
            if parts == 2:
                value = f.insert(m.element, f.insert(m.element, "poison", sign[0], 0), sign[1], 1)
            m.store(value, out, i)
            if logarithm:
                total = f.select(real, singular, constant(real, -math.inf), total)
                f.store(real, total, f.address(real, log, i), m.align)

        m.run(one)

    def plan(sizes: Sizes) -> Planned:
        batch, n, _ = stack_of(x.shape, sizes)
        made, count = StackPlan(), math.prod(batch)
        if count == 0:
            return Planned(())
        given = [
            ("input", 0),
            ("output", 0),
            ("output", 1 if logarithm else 0),
            ("number", n),
            ("pointer", routine("getrf", dtype)),
        ]
        made.over("determinant", count, (n * n * dtype.itemsize, 4 * n), given)
        return made.done()

    return lapack_op(node.op.name, dtype, emit, ("determinant",), plan)


# spectra


@override("eigh")
def _eigh(node: Node, target: Target) -> NativeOp:
    (x,) = node.inputs
    dtype = x.dtype

    def emit(module: IrModule) -> None:
        m = Matrices(module, "eigh", dtype, target, "ppppiiiipiiii")
        f = m.f
        source, values, vectors, infos, n, lwork, lreal, lwhole, syevd, _, work_at, real_at, whole_at = m.given

        def one(i: str, own: str) -> None:
            work, real, whole = (f.address("i8", own, at) for at in (work_at, real_at, whole_at))
            matrix = m.at(source, f.mul(i, f.mul(n, n)))
            m.each(n, n, lambda c, r: m.store(m.hermitian(matrix, n, r, c), own, f.add(f.mul(c, n), r)))
            size = m.integer(n)
            spectrum = f.address(m.real, values, f.mul(i, n))
            middle = [real, m.integer(lreal)] if dtype.is_complex else []
            letters = [m.letter("V"), m.letter("L")]
            info = m.call(
                syevd, *letters, size, own, size, spectrum, work, m.integer(lwork), *middle, whole, m.integer(lwhole)
            )
            f.store("i64", m.failure(info), f.address("i64", infos, i), 8)
            m.transpose(m.at(vectors, f.mul(i, f.mul(n, n))), own, n, n)

        m.run(one)

    def plan(sizes: Sizes) -> Planned:
        batch, n, _ = stack_of(x.shape, sizes)
        made, count = StackPlan(), math.prod(batch)
        if count * n == 0:
            return Planned(())
        work = work_size("syevd", dtype, "VL", (n, n))
        infos = made.area(8 * count)
        given = [
            ("input", 0),
            ("output", 0),
            ("output", 1),
            infos,
            *number_slots(n, *work),
            ("pointer", routine("syevd", dtype)),
        ]
        item = dtype.itemsize
        made.over("eigh", count, (n * n * item, work[0] * item, work[1] * dtype.real.itemsize, 4 * work[2]), given)
        made.check("eigh", DIVERGED, infos, batch)
        return made.done()

    return lapack_op("eigh", dtype, emit, ("eigh",), plan)


@override("svd")
def _svd(node: Node, target: Target) -> NativeOp:
    (x,) = node.inputs
    dtype, full = x.dtype, node.op.full_matrices  # type: ignore[attr-defined]

    def emit(module: IrModule) -> None:
        m = Matrices(module, "svd", dtype, target, "pppppiiiiipiiiiii")
        f = m.f
        source, u, s, vh, infos, rows, columns, wide, high, lwork, gesdd, *places = m.given

        def one(i: str, own: str) -> None:
            left, right, work, real, whole = (f.address("i8", own, at) for at in places[1:])
            m.transpose(own, m.at(source, f.mul(i, f.mul(rows, columns))), rows, columns)
            sizes = [m.integer(v) for v in (rows, columns, high, lwork)]
            values = f.address(m.real, s, f.mul(i, f.smin(rows, columns)))
            middle = [real] if dtype.is_complex else []
            letter = m.letter("A" if full else "S")
            spans = [own, sizes[0], values, left, sizes[0], right, sizes[2], work, sizes[3]]
            info = m.call(gesdd, letter, sizes[0], sizes[1], *spans, *middle, whole)
            f.store("i64", m.failure(info), f.address("i64", infos, i), 8)
            m.transpose(m.at(u, f.mul(i, f.mul(rows, wide))), left, wide, rows)
            m.transpose(m.at(vh, f.mul(i, f.mul(high, columns))), right, columns, high)

        m.run(one)
        m = Matrices(module, "eye", dtype, target, "pi")
        f = m.f
        out, n = m.given

        def eye(i: str, _: str) -> None:
            own = m.at(out, f.mul(i, f.mul(n, n)))
            fill_zero(f, own, f.mul(f.mul(n, n), m.size))
            f.loop(0, n, 1, (), lambda r, _: m.store(m.number(1.0), own, f.add(f.mul(r, n), r)))

        m.run(eye)

    def plan(sizes: Sizes) -> Planned:
        batch, rows, columns = stack_of(x.shape, sizes)
        made, count, k = StackPlan(), math.prod(batch), min(rows, columns)
        wide, high = (rows, columns) if full else (k, k)
        if count == 0:
            return Planned(())
        if k == 0:
            for output, n in ((0, wide), (2, high)):
                if n:
                    made.over("eye", count, (), [("output", output), ("number", n)])
            return made.done()
        work = work_size("gesdd", dtype, "A" if full else "S", (rows, columns, rows, rows, high))
        infos, item = made.area(8 * count), dtype.itemsize
        given = [
            ("input", 0),
            *(("output", i) for i in range(3)),
            infos,
            *number_slots(rows, columns, wide, high, work[0]),
        ]
        parts = (rows * columns * item, rows * wide * item, high * columns * item, work[0] * item,
                 work[1] * dtype.real.itemsize, 4 * work[2])  # fmt: skip
        made.over("svd", count, parts, [*given, ("pointer", routine("gesdd", dtype))])
        made.check("svd", DIVERGED, infos, batch)
        return made.done()

    return lapack_op(f"svd {full}", dtype, emit, ("svd", "eye"), plan)
