"""FFT code for many sequences at once, one in each vector lane.

A group of sequences is brought to memory as planes, [element][re, im][lane], transformed there by autosorting passes
of small radices between two buffers, and taken out again. Twiddle factors are scalars for all lanes, read from a
table. An inverse transform is a forward one with real and imaginary parts swapped on the way in and out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector
from strata.backends.llvm.ir.native import fill_zero
from strata.backends.llvm.ir.registers import deinterleave, interleave
from strata.core import DType, Target

RADICES = (2, 3, 4, 5, 8)  # with passes of their own; 0 stands for the general one
Complex = tuple[str, str]


@dataclass(frozen=True)
class TransformEmitter:
    """What decides the code: the type of a component and how many lanes there are."""

    dtype: DType  # complex
    target: Target

    @property
    def real(self) -> str:
        return "double" if self.dtype.real.itemsize == 8 else "float"

    @property
    def size(self) -> int:
        return self.dtype.real.itemsize

    @property
    def lanes(self) -> int:
        return max(2, self.target.lanes(self.size))

    @property
    def type(self) -> str:
        return vector(self.real, self.lanes)

    @property
    def plane_bytes(self) -> int:
        """Of one element of a group."""
        return 2 * self.lanes * self.size

    def emit(self, module: IrModule) -> None:
        for radix in (*RADICES, 0):
            _Pass(module, self, radix).emit()
        _emit_passes(module, self)


class ComplexArithmetic:
    """Complex arithmetic on pairs of vectors."""

    def __init__(self, f: IrFunction, form: TransformEmitter) -> None:
        self.f, self.form, self.type = f, form, form.type

    def load(self, base: Value, element: Value) -> Complex:
        f, form = self.f, self.form
        at = f.address(form.type, base, f.mul(element, 2))
        return f.load(form.type, at, form.size), f.load(form.type, f.address(form.type, at, 1), form.size)

    def store(self, value: Complex, base: Value, element: Value) -> None:
        f, form = self.f, self.form
        at = f.address(form.type, base, f.mul(element, 2))
        f.store(form.type, value[0], at, form.size)
        f.store(form.type, value[1], f.address(form.type, at, 1), form.size)

    def factor(self, table: Value, index: Value) -> Complex:
        """A complex scalar of a table in every lane."""
        f, form = self.f, self.form
        at = f.address(form.real, table, f.mul(index, 2))
        parts = [f.load(form.real, f.address(form.real, at, i), form.size) for i in range(2)]
        return f.splat(form.type, parts[0]), f.splat(form.type, parts[1])

    def add(self, a: Complex, b: Complex) -> Complex:
        return tuple(self.f.binary("fadd", self.type, x, y) for x, y in zip(a, b, strict=True))  # type: ignore[return-value]

    def sub(self, a: Complex, b: Complex) -> Complex:
        return tuple(self.f.binary("fsub", self.type, x, y) for x, y in zip(a, b, strict=True))  # type: ignore[return-value]

    def scale(self, a: Complex, factor: float) -> Complex:
        c = constant(self.type, factor)
        return tuple(self.f.binary("fmul", self.type, x, c) for x in a)  # type: ignore[return-value]

    def fused(self, a: Complex, factor: float, b: Complex) -> Complex:
        """a · factor + b."""
        return tuple(self._fma(x, constant(self.type, factor), y) for x, y in zip(a, b, strict=True))  # type: ignore[return-value]

    def minus_i(self, a: Complex) -> Complex:
        return a[1], self.f.op(f"fneg {self.type} {a[0]}")

    def mul(self, a: Complex, b: Complex) -> Complex:
        f = self.f
        cross = f.op(f"fneg {self.type} {f.binary('fmul', self.type, a[1], b[1])}")
        return self._fma(a[0], b[0], cross), self._fma(a[0], b[1], f.binary("fmul", self.type, a[1], b[0]))

    def mul_add(self, a: Complex, b: Complex, c: Complex) -> Complex:
        f = self.f
        minus = f.op(f"fneg {self.type} {a[1]}")
        return self._fma(minus, b[1], self._fma(a[0], b[0], c[0])), self._fma(a[1], b[0], self._fma(a[0], b[1], c[1]))

    def _fma(self, a: str, b: str, c: str) -> str:
        if self.form.target.has_fma:
            return self.f.fma(self.type, a, b, c)
        return self.f.binary("fadd", self.type, self.f.binary("fmul", self.type, a, b), c)

    # small transforms, in natural order

    def transform(self, a: list[Complex]) -> list[Complex]:
        return {2: self._two, 3: self._three, 4: self._four, 5: self._five, 8: self._eight}[len(a)](a)

    def _two(self, a: list[Complex]) -> list[Complex]:
        return [self.add(*a), self.sub(*a)]

    def _three(self, a: list[Complex]) -> list[Complex]:
        total = self.add(a[1], a[2])
        middle = self.fused(total, -0.5, a[0])
        side = self.scale(self.minus_i(self.sub(a[1], a[2])), math.sqrt(3) / 2)
        return [self.add(a[0], total), self.add(middle, side), self.sub(middle, side)]

    def _four(self, a: list[Complex]) -> list[Complex]:
        even, odd = self._two([a[0], a[2]]), self._two([a[1], a[3]])
        turned = self.minus_i(odd[1])
        return [
            self.add(even[0], odd[0]),
            self.add(even[1], turned),
            self.sub(even[0], odd[0]),
            self.sub(even[1], turned),
        ]

    def _five(self, a: list[Complex]) -> list[Complex]:
        sums = [self.add(a[1], a[4]), self.add(a[2], a[3])]
        gaps = [self.minus_i(self.sub(a[1], a[4])), self.minus_i(self.sub(a[2], a[3]))]
        out = [self.add(a[0], self.add(*sums))]
        cos, sin = ([f(2 * math.pi * k / 5) for k in (1, 2)] for f in (math.cos, math.sin))
        first = self.fused(sums[1], cos[1], self.fused(sums[0], cos[0], a[0]))
        second = self.fused(sums[1], cos[0], self.fused(sums[0], cos[1], a[0]))
        turn_first = self.fused(gaps[1], sin[1], self.scale(gaps[0], sin[0]))
        turn_second = self.fused(gaps[1], -sin[0], self.scale(gaps[0], sin[1]))
        return [
            *out,
            self.add(first, turn_first),
            self.add(second, turn_second),
            self.sub(second, turn_second),
            self.sub(first, turn_first),
        ]

    def _eight(self, a: list[Complex]) -> list[Complex]:
        f, root = self.f, math.sqrt(0.5)
        even = self._four([self.add(a[k], a[k + 4]) for k in range(4)])
        u = [self.sub(a[k], a[k + 4]) for k in range(4)]
        plus, minus = (f.binary(op, self.type, u[1][0], u[1][1]) for op in ("fadd", "fsub"))
        u[1] = self.scale((plus, f.op(f"fneg {self.type} {minus}")), root)  # times (1 - i)/√2
        u[2] = self.minus_i(u[2])
        plus, minus = f.binary("fadd", self.type, u[3][0], u[3][1]), f.binary("fsub", self.type, u[3][1], u[3][0])
        u[3] = self.scale((minus, f.op(f"fneg {self.type} {plus}")), root)  # times (-1 - i)/√2
        odd = self._four(u)
        return [x for pair in zip(even, odd, strict=True) for x in pair]


class _Pass:
    """Of (x, y, m, s, twiddles, r, roots): y[q + s(rp + j)] = w^(pj) · Σ_k x[q + s(p + mk)] · e^(-2πi·jk/r)."""

    def __init__(self, module: IrModule, form: TransformEmitter, radix: int) -> None:
        parameters = (
            ("ptr", "x"),
            ("ptr", "y"),
            ("i64", "m"),
            ("i64", "s"),
            ("ptr", "twiddles"),
            ("i64", "r"),
            ("ptr", "roots"),
        )
        self.f = module.function(f"pass{radix}", parameters, linkage="internal")
        self.radix, self.form = radix, form
        self.math = ComplexArithmetic(self.f, form)

    def emit(self) -> None:
        f = self.f
        self._columns(0, turned=False)
        f.loop(1, "%m", 1, (), lambda p, _: self._columns(p, turned=True))
        f.ret()

    def _columns(self, p: Value, *, turned: bool) -> None:
        f, radix = self.f, self.radix or "%r"
        source = f.mul("%s", p)
        to = f.mul(f.mul("%s", radix), p)
        gap = f.mul("%s", "%m")
        table = f.mul(f.sub(p, 1), f.sub(radix, 1)) if turned else 0

        def column(q: str, _: list[str]) -> None:
            if not self.radix:
                self._general(f.add(source, q), f.add(to, q), gap, table, turned)
                return
            values = [self.math.load("%x", f.add(f.add(source, q), f.mul(gap, k))) for k in range(self.radix)]
            results = self.math.transform(values)
            for j, result in enumerate(results):
                apart = turned and j > 0
                value = self.math.mul(result, self.math.factor("%twiddles", f.add(table, j - 1))) if apart else result
                self.math.store(value, "%y", f.add(f.add(to, q), f.mul("%s", j)))

        f.loop(0, "%s", 1, (), column)

    def _general(self, source: Value, to: Value, gap: Value, table: Value, turned: bool) -> None:
        """A sum of r products for each of r results; roots holds e^(-2πi·k/r)."""
        f, math_ = self.f, self.math
        zero = constant(self.form.type, 0.0)

        def result(j: str, _: list[str]) -> None:
            def term(k: str, state: list[str]) -> list[str]:
                x = math_.load("%x", f.add(source, f.mul(gap, k)))
                re, im = math_.mul_add(x, math_.factor("%roots", state[2]), (state[0], state[1]))
                further = f.add(state[2], j)
                return [re, im, f.select("i64", f.compare("sge", "i64", further, "%r"), f.sub(further, "%r"), further)]

            carried: list[tuple[str, Value]] = [(self.form.type, zero), (self.form.type, zero), ("i64", 0)]
            re, im, _at = f.loop(0, "%r", 1, carried, term)
            value: Complex = (re, im)
            if turned:
                turn = math_.factor("%twiddles", f.add(table, f.sub(f.smax(j, 1), 1)))
                first = f.compare("eq", "i64", j, 0)
                moved = math_.mul(value, turn)
                value = tuple(
                    f.select(self.form.type, first, a, b, uniform=True) for a, b in zip(value, moved, strict=True)
                )  # type: ignore[assignment]
            math_.store(value, "%y", f.add(to, f.mul("%s", j)))

        f.loop(0, "%r", 1, (), result)


def _emit_passes(module: IrModule, form: TransformEmitter) -> None:
    """`ptr passes(a, b, stages, count, table)`; a stage is radix, its pass, m, s, and where twiddles and roots are."""
    parameters = (("ptr", "a"), ("ptr", "b"), ("ptr", "stages"), ("i64", "count"), ("ptr", "table"))
    f = module.function("passes", parameters, "ptr", linkage="internal")

    def stage(i: str, state: list[str]) -> list[str]:
        record = f.address("i64", "%stages", f.mul(i, 6))
        radix, code, m, s, twiddles, roots = (f.load("i64", f.address("i64", record, k), 8) for k in range(6))
        tables = [("ptr", f.address(form.real, "%table", at)) for at in (twiddles, roots)]
        given = (("ptr", state[0]), ("ptr", state[1]), ("i64", m), ("i64", s), tables[0], ("i64", radix), tables[1])
        for one in (*RADICES, 0):

            def run(one: int = one) -> None:
                f.call("void", f"pass{one}", *given)

            f.if_(f.compare("eq", "i64", code, one), run)
        return [state[1], state[0]]

    result, _ = f.loop(0, "%count", 1, (("ptr", "%a"), ("ptr", "%b")), stage)
    f.ret("ptr", result)


class Mover:
    """Emits the way of a group between memory, with strides for lanes and for elements, and planes."""

    def __init__(self, f: IrFunction, form: TransformEmitter) -> None:
        self.f, self.form = f, form
        self.math = ComplexArithmetic(f, form)

    def choose(
        self, lanes: Value, lane_stride: Value, element_stride: Value, n: Value, way: Callable[[str], None]
    ) -> None:
        """Calls way("turned" | "even" | "single") under the condition that each needs."""
        f, width = self.f, self.form.lanes
        full = f.compare("eq", "i64", lanes, width)
        even = f.binary("and", "i1", full, f.compare("eq", "i64", lane_stride, 1))
        turned = f.binary("and", "i1", full, f.compare("eq", "i64", element_stride, 1))
        turned = f.binary("and", "i1", turned, f.compare("eq", "i64", f.binary("and", "i64", n, width // 2 - 1), 0))
        f.if_(even, lambda: way("even"), lambda: f.if_(turned, lambda: way("turned"), lambda: way("single")) and None)

    def gather(
        self, planes: Value, base: Value, n: Value, lanes: Value, lane_stride: Value, element_stride: Value, swap: Value
    ) -> None:
        f, form = self.f, self.form
        width, real, wide = form.lanes, form.real, vector(form.real, 2 * form.lanes)
        parts = [swap, f.sub(1, swap)]  # where re and im go

        def put(value: str, element: Value, part: int) -> None:
            f.store(form.type, value, f.address(form.type, planes, f.add(f.mul(element, 2), parts[part])), form.size)

        def way(kind: str) -> None:
            if kind == "even":

                def row(e: str, _: list[str]) -> None:
                    at = f.address(real, base, f.mul(f.mul(e, element_stride), 2))
                    for part, value in enumerate(deinterleave(f, real, f.load(wide, at, form.size), width)):
                        put(value, e, part)

                f.loop(0, n, 1, (), row)
            elif kind == "turned":

                def tile(e: str, _: list[str]) -> None:
                    rows = []
                    for lane in range(width):
                        at = f.add(f.mul(lane_stride, lane), e)
                        rows.append(f.load(form.type, f.address(real, base, f.mul(at, 2)), form.size))
                    for i, value in enumerate(transposed(f, form.type, rows)):
                        put(value, f.add(e, i // 2), i % 2)

                f.loop(0, n, width // 2, (), tile)
            else:
                fill_zero(f, planes, f.mul(n, form.plane_bytes))

                def lane_(lane: str, _: list[str]) -> None:
                    def one(e: str, _: list[str]) -> None:
                        at = f.add(f.mul(lane, lane_stride), f.mul(e, element_stride))
                        for part in range(2):
                            value = f.load(real, f.address(real, base, f.add(f.mul(at, 2), part)), form.size)
                            cell = f.add(f.mul(f.add(f.mul(e, 2), parts[part]), width), lane)
                            f.store(real, value, f.address(real, planes, cell), form.size)

                    f.loop(0, n, 1, (), one)

                f.loop(0, lanes, 1, (), lane_)

        self.choose(lanes, lane_stride, element_stride, n, way)

    def scatter(
        self, planes: Value, base: Value, n: Value, lanes: Value, lane_stride: Value, element_stride: Value,
        swap: Value, scale: Value,
    ) -> None:  # fmt: skip
        f, form = self.f, self.form
        width, real, wide = form.lanes, form.real, vector(form.real, 2 * form.lanes)
        parts = [swap, f.sub(1, swap)]
        factor = f.splat(form.type, scale)

        def get(element: Value, part: int) -> str:
            at = f.address(form.type, planes, f.add(f.mul(element, 2), parts[part]))
            return f.binary("fmul", form.type, f.load(form.type, at, form.size), factor)

        def way(kind: str) -> None:
            if kind == "even":

                def row(e: str, _: list[str]) -> None:
                    both = interleave(f, form.type, (get(e, 0), get(e, 1)), width)
                    f.store(wide, both, f.address(real, base, f.mul(f.mul(e, element_stride), 2)), form.size)

                f.loop(0, n, 1, (), row)
            elif kind == "turned":

                def tile(e: str, _: list[str]) -> None:
                    columns = [get(f.add(e, i // 2), i % 2) for i in range(width)]
                    for lane, value in enumerate(transposed(f, form.type, columns)):
                        at = f.add(f.mul(lane_stride, lane), e)
                        f.store(form.type, value, f.address(real, base, f.mul(at, 2)), form.size)

                f.loop(0, n, width // 2, (), tile)
            else:

                def lane_(lane: str, _: list[str]) -> None:
                    def one(e: str, _: list[str]) -> None:
                        at = f.add(f.mul(lane, lane_stride), f.mul(e, element_stride))
                        for part in range(2):
                            cell = f.add(f.mul(f.add(f.mul(e, 2), parts[part]), width), lane)
                            value = f.load(real, f.address(real, planes, cell), form.size)
                            value = f.binary("fmul", real, value, scale)
                            f.store(real, value, f.address(real, base, f.add(f.mul(at, 2), part)), form.size)

                    f.loop(0, n, 1, (), one)

                f.loop(0, lanes, 1, (), lane_)

        self.choose(lanes, lane_stride, element_stride, n, way)

    def twiddle(self, planes: Value, n: Value, table: Value, columns: Value) -> None:
        """Element e times table[e][lane …]; a row of the table is `columns` real parts, then as many imaginary ones."""
        f, form = self.f, self.form

        def row(e: str, _: list[str]) -> None:
            at = f.address(form.real, table, f.mul(f.mul(e, columns), 2))
            factor = (f.load(form.type, at, form.size), f.load(form.type, f.address(form.real, at, columns), form.size))
            self.math.store(self.math.mul(self.math.load(planes, e), factor), planes, e)

        f.loop(0, n, 1, (), row)


def transposed(f: IrFunction, type_: str, rows: list[str]) -> list[str]:
    """Columns of a square of vectors, by interleaving rows that are half the square apart."""
    width = len(rows)
    low = [i // 2 + (width if i % 2 else 0) for i in range(width)]
    high = [i + width // 2 for i in low]
    for _ in range(width.bit_length() - 1):
        pairs = [(rows[i], rows[i + width // 2]) for i in range(width // 2)]
        rows = [f.shuffle(type_, a, b, picks) for a, b in pairs for picks in (low, high)]
    return rows
