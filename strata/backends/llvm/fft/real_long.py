"""Long real FFTs: n real numbers as n/2 complex ones.

With Z the transform of those, and h their number, the bins of the sequence are
    X[k] = ½ (Z[k] + conj Z[h - k]) - ½ i e^(-πik/h) (Z[k] - conj Z[h - k]),
so those at k and at h - k come from the same two numbers. The way back is
    Z[k] = ½ (X[k] + conj X[h - k]) + ½ i e^(πik/h) (X[k] - conj X[h - k]).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from strata.backends.llvm.fft.complex import Planner
from strata.backends.llvm.fft.transforms import Complex, TransformEmitter
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, vector
from strata.backends.llvm.ir.native import arguments, each_point, kernel, number_slots
from strata.backends.llvm.ir.overrides import NativeCall, Planned
from strata.backends.llvm.ir.registers import deinterleave, interleave

CHUNK = 1 << 12  # pairs of bins that one point takes


class _Bins:
    """Emits the way from Z to the bins, or back; a row of both starts at an address."""

    def __init__(
        self, f: IrFunction, form: TransformEmitter, source: Value, out: Value, half: Value, scale: str, *, back: bool
    ) -> None:
        self.f, self.form, self.source, self.out, self.half, self.back = f, form, source, out, half, back
        self.scale = f.binary("fmul", form.real, scale, constant(form.real, 0.5))

    def pairs(self, k: Value, twiddles: Value, lanes: int) -> None:
        """The bins k … k + lanes - 1 and their mirrors; twiddles are e^(-πik/h), as pairs of numbers from k = 0 on."""
        f, type_ = self.f, vector(self.form.real, lanes)
        mirror = f.sub(f.sub(self.half, k), lanes - 1)
        zr, zi = self._load(self.source, k, lanes)
        mr, mi = self._turned(self._load(self.source, mirror, lanes), lanes)
        c, s = self._load(twiddles, k, lanes)
        er, ei = f.binary("fadd", type_, zr, mr), f.binary("fsub", type_, zi, mi)
        gap, total = f.binary("fsub", type_, zr, mr), f.binary("fadd", type_, zi, mi)
        # -i e^(-πik/h) (gap + i total); on the way back, i e^(πik/h) (…)
        if self.back:
            c = f.op(f"fneg {type_} {c}")
        tr = self._sum(type_, c, total, f.binary("fmul", type_, s, gap))
        ti = self._sum(type_, s, total, f.op(f"fneg {type_} {f.binary('fmul', type_, c, gap)}"))
        self._store((f.binary("fadd", type_, er, tr), f.binary("fadd", type_, ei, ti)), k, lanes)
        other = f.binary("fsub", type_, er, tr), f.binary("fsub", type_, ti, ei)
        self._store(self._turned(other, lanes), mirror, lanes)

    def ends(self) -> None:
        """The first bin and the last one, which are real, are the sum and the difference of the parts of Z[0]."""
        f, real = self.f, self.form.real
        a, b = self._load(self.source, 0, 1)
        if self.back:
            b, _ = self._load(self.source, self.half, 1)
        total, gap = f.binary("fadd", real, a, b), f.binary("fsub", real, a, b)
        if self.back:
            self._store((total, gap), 0, 1)
            return
        for value, k in ((total, 0), (gap, self.half)):
            self._store((f.binary("fadd", real, value, value), constant(real, 0.0)), k, 1)

    def middle(self) -> None:
        """The bin that is its own mirror, where there is one."""
        f, real = self.f, self.form.real
        k = f.binary("lshr", "i64", self.half, 1)
        zr, zi = self._load(self.source, k, 1)
        minus = f.op(f"fneg {real} {zi}")
        self._store((f.binary("fadd", real, zr, zr), f.binary("fadd", real, minus, minus)), k, 1)

    def _sum(self, type_: str, a: str, b: str, c: str) -> str:
        f = self.f
        return (
            f.fma(type_, a, b, c)
            if self.form.target.has_fma
            else f.binary("fadd", type_, f.binary("fmul", type_, a, b), c)
        )

    def _load(self, base: Value, k: Value, lanes: int) -> Complex:
        f, form = self.f, self.form
        at = f.address(form.real, base, f.mul(k, 2))
        if lanes == 1:
            return f.load(form.real, at, form.size), f.load(form.real, f.address(form.real, at, 1), form.size)
        re, im = deinterleave(f, form.real, f.load(vector(form.real, 2 * lanes), at, form.size), lanes)
        return re, im

    def _store(self, value: Complex, k: Value, lanes: int) -> None:
        f, form = self.f, self.form
        type_ = vector(form.real, lanes)
        factor = f.splat(type_, self.scale) if lanes > 1 else self.scale
        re, im = (f.binary("fmul", type_, part, factor) for part in value)
        at = f.address(form.real, self.out, f.mul(k, 2))
        if lanes == 1:
            f.store(form.real, re, at, form.size)
            f.store(form.real, im, f.address(form.real, at, 1), form.size)
            return
        f.store(vector(form.real, 2 * lanes), interleave(f, type_, (re, im), lanes), at, form.size)

    def _turned(self, value: Complex, lanes: int) -> Complex:
        if lanes == 1:
            return value
        type_ = vector(self.form.real, lanes)
        re, im = (self.f.shuffle(type_, part, "poison", range(lanes - 1, -1, -1)) for part in value)
        return re, im


def emit_bins(module: IrModule, form: TransformEmitter, back: bool) -> None:
    """Points are chunks of pairs, row by row."""
    f = kernel(module, "bins")
    source, out, twiddles, scale, half, chunks = arguments(f, "ppppii")
    factor = f.load(form.real, scale, form.size)
    pairs = f.binary("lshr", "i64", f.sub(half, 1), 1)

    def point(p: str, _: list[str]) -> None:
        row, chunk = f.binary("udiv", "i64", p, chunks), f.binary("urem", "i64", p, chunks)
        widths = (f.add(half, 1), half) if back else (half, f.add(half, 1))
        from_ = f.address(form.real, source, f.mul(f.mul(row, widths[0]), 2))
        to = f.address(form.real, out, f.mul(f.mul(row, widths[1]), 2))
        work = _Bins(f, form, from_, to, half, factor, back=back)
        low = f.add(f.mul(chunk, CHUNK), 1)
        high = f.smin(f.add(low, CHUNK), f.add(pairs, 1))
        whole = f.add(low, f.round_down(f.sub(high, low), form.lanes))
        f.loop(low, whole, form.lanes, (), lambda k, _: work.pairs(k, twiddles, form.lanes))
        f.loop(whole, high, 1, (), lambda k, _: work.pairs(k, twiddles, 1))

        def alone() -> None:
            work.ends()
            f.if_(f.compare("eq", "i64", f.binary("and", "i64", half, 1), 0), work.middle)

        f.if_(f.compare("eq", "i64", chunk, 0), alone)

    each_point(f, point)


@lru_cache(maxsize=16)
def _twiddles(half: int, real: str) -> np.ndarray:
    angle = -np.pi * np.arange((half - 1) // 2 + 1) / half
    return np.stack([np.cos(angle), np.sin(angle)], -1).reshape(-1).astype(real)


def by_halves(form: TransformEmitter, rows: int, n: int, scale: float, *, back: bool) -> Planned:
    """rfft or irfft of an even number of numbers in a row."""
    half = n // 2
    made = Planner(form)
    middle = made.area(rows * half * form.dtype.itemsize)
    chunks = max(1, -(-((half - 1) // 2) // CHUNK))
    factor = np.array([2 * scale if back else scale], made.real)
    given = [("table", _twiddles(half, made.real)), ("table", factor), *number_slots(half, chunks)]
    if back:
        made.calls.append(NativeCall("bins", [("input", 0), middle, *given], rows * chunks))
        made.transform(middle, ("output", 0), rows, half, True, 1.0)
    else:
        made.transform(("input", 0), middle, rows, half, False, 1.0)
        made.calls.append(NativeCall("bins", [middle, ("output", 0), *given], rows * chunks))
    return Planned(made.calls, made.size)
