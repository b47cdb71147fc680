"""Complex FFTs: a plan for each length, called over groups of sequences.

Many short sequences go through the lanes of `fft` as they are. A long one, or one of few, is split in two: columns
across the lanes, a turn of each element, then rows. A length with a large prime factor becomes a convolution with a
chirp, whose length is a power of two (Bluestein).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from strata.backends.llvm.fft.transforms import RADICES, Mover, TransformEmitter
from strata.backends.llvm.ir.builder import IrModule
from strata.backends.llvm.ir.native import (
    Workspace,
    arguments,
    each_of_slot,
    each_point,
    fill_zero,
    kernel,
    number_slots,
    numbers,
)
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, Slot, override
from strata.core import Target
from strata.mir import Node

SLOTS = 8  # groups that can be in work at a time
LARGEST_PRIME = 61  # factors above make the length a convolution
CHUNK = 1 << 14  # elements that one point of a product takes


def _emit_groups(module: IrModule, form: TransformEmitter) -> None:
    """Groups of sequences: gathered into lanes, transformed, turned where a table says so, scattered."""
    f = kernel(module, "groups")
    given = arguments(f, "ppp" + "iiiiii" + "iii" + "iii" + "ii" + "ppi" + "ppi")
    source, out, workspace, slot_bytes, groups, slots, per_row, lanes, n = given[:9]
    in_outer, in_lane, in_element, out_outer, out_lane, out_element, swap_in, swap_out = given[9:17]
    scale, stages, count, table, twiddles, columns = given[17:]
    move = Mover(f, form)
    width = form.lanes
    factor = f.load(form.real, scale, form.size)

    def slot(point: str, _: list[str]) -> None:
        a = f.address("i8", workspace, f.mul(point, slot_bytes))
        b = f.address("i8", a, f.binary("lshr", "i64", slot_bytes, 1))

        def group(g: str, _: list[str]) -> None:
            outer, lane = f.binary("udiv", "i64", g, per_row), f.mul(f.binary("urem", "i64", g, per_row), width)
            some = f.smin(f.sub(lanes, lane), width)
            at = f.add(f.mul(outer, in_outer), f.mul(lane, in_lane))
            move.gather(a, f.address(form.real, source, f.mul(at, 2)), n, some, in_lane, in_element, swap_in)
            spans = (("ptr", a), ("ptr", b), ("ptr", stages), ("i64", count), ("ptr", table))
            result = f.call("ptr", "passes", *spans)

            def turn() -> None:
                move.twiddle(result, n, f.address(form.real, twiddles, lane), columns)

            f.if_(f.compare("ne", "ptr", twiddles, "null"), turn)
            at = f.add(f.mul(outer, out_outer), f.mul(lane, out_lane))
            move.scatter(
                result, f.address(form.real, out, f.mul(at, 2)), n, some, out_lane, out_element, swap_out, factor
            )

        each_of_slot(f, point, groups, slots, group)

    each_point(f, slot)


def _emit_product(module: IrModule, form: TransformEmitter) -> None:
    """Rows times a table: out[row][j] = source[row][j] · table[j], 0 after the `kept` first. Points are rows."""
    f = kernel(module, "product")
    source, out, table, kept, wide_in, wide_out, swap_in, swap_out, scale = arguments(f, "pppiiiiip")
    real, size = form.real, form.size
    factor = f.load(real, scale, size)

    def row(r: str, _: list[str]) -> None:
        def one(j: str, _: list[str]) -> None:
            start = f.mul(f.add(f.mul(r, wide_in), j), 2)
            re, im = (
                f.load(real, f.address(real, source, f.add(start, p)), size) for p in (swap_in, f.sub(1, swap_in))
            )
            c, s = (f.load(real, f.address(real, table, f.add(f.mul(j, 2), p)), size) for p in range(2))
            products = [f.binary("fmul", real, a, b) for a, b in ((re, c), (im, s), (re, s), (im, c))]
            parts = [f.binary("fsub", real, *products[:2]), f.binary("fadd", real, *products[2:])]
            to = f.mul(f.add(f.mul(r, wide_out), j), 2)
            for part, p in zip(parts, (swap_out, f.sub(1, swap_out)), strict=True):
                f.store(real, f.binary("fmul", real, part, factor), f.address(real, out, f.add(to, p)), size)

        f.loop(0, kept, 1, (), one)
        rest = f.address(real, out, f.mul(f.add(f.mul(r, wide_out), kept), 2))
        empty = f.mul(f.sub(wide_out, kept), 2 * size)
        fill_zero(f, rest, empty)

    each_point(f, row)


def emit_transforms(module: IrModule, form: TransformEmitter) -> None:
    """What the calls of a planner need."""
    form.emit(module)
    _emit_groups(module, form)
    _emit_product(module, form)


# lengths


@lru_cache(maxsize=256)
def factors_of(n: int) -> tuple[int, ...]:
    """Radices of the passes of a length: 8 and 4 for the power of two, then primes."""
    twos = (n & -n).bit_length() - 1
    found = {0: [], 1: [2], 2: [4]}[twos % 3] + [8] * (twos // 3) if twos != 1 else [2]
    if twos >= 4 and twos % 3 == 1:
        found = [4, 4] + [8] * (twos // 3 - 1)
    found.sort(reverse=True)
    rest = n >> twos
    prime = 3
    while rest > 1:
        if prime * prime > rest:
            prime = rest
        while rest % prime == 0:
            found.append(prime)
            rest //= prime
        prime += 2
    return tuple(found)


@lru_cache(maxsize=64)
def stage_tables(n: int, real: str) -> tuple[np.ndarray, np.ndarray]:
    """(stages, numbers): what `passes` reads for a length."""
    stages, parts, top = [], [], 0
    left, s = n, 1
    for radix in factors_of(n):
        m = left // radix
        p, j = np.arange(1, m)[:, None], np.arange(1, radix)[None, :]
        twiddles = _roots(p * j, left)
        roots = _roots(np.arange(radix), radix)
        known = radix in RADICES
        stages.append((radix, radix if known else 0, m, s, top, top + twiddles.size))
        parts += [twiddles] if known else [twiddles, roots]
        top += twiddles.size + (0 if known else roots.size)
        left, s = m, s * radix
    table = np.concatenate([*parts, np.zeros(2)]).astype(real)
    return np.array(stages or [(1, 1, 1, 1, 0, 0)], np.int64), table


def _roots(k: np.ndarray, n: int) -> np.ndarray:
    """e^(-2πi·k/n) as pairs of numbers."""
    angle = -2 * np.pi * (np.asarray(k, np.int64) % n) / n
    return np.stack([np.cos(angle), np.sin(angle)], -1).reshape(-1)


@lru_cache(maxsize=32)
def _twiddles(rows: int, columns: int, real: str, padding: int) -> np.ndarray:
    """e^(-2πi·kj/n) for row k and column j: real parts of a row, then imaginary ones; at the end room for a vector."""
    angle = -2 * np.pi * (np.arange(rows)[:, None] * np.arange(columns)[None, :] % (rows * columns)) / (rows * columns)
    both = np.stack([np.cos(angle), np.sin(angle)], 1).reshape(-1)
    return np.concatenate([both, np.zeros(padding)]).astype(real)


@lru_cache(maxsize=32)
def _chirp(n: int, size: int, real: str) -> tuple[np.ndarray, np.ndarray]:
    """e^(-πi·j²/n), and the transform of its conjugate, wrapped around a power of two."""
    j = np.arange(n, dtype=np.int64)
    chirp = np.exp(-1j * np.pi * (j * j % (2 * n)) / n)
    wrapped = np.zeros(size, np.complex128)
    wrapped[:n] = chirp.conj()
    wrapped[size - n + 1 :] = chirp[1:][::-1].conj()
    pair = (np.stack([z.real, z.imag], -1).reshape(-1).astype(real) for z in (chirp, np.fft.fft(wrapped)))
    first, second = pair
    return first, second


def _split(n: int) -> tuple[int, int] | None:
    """Two factors of a length, as close as its prime factors allow."""
    best = None
    for d in range(2, math.isqrt(n) + 1):
        if n % d == 0:
            best = (d, n // d)
    return best


class Planner(Workspace):
    """Collects the calls of transforms and the memory between them."""

    def __init__(self, form: TransformEmitter) -> None:
        super().__init__()
        self.form, self.real = form, form.dtype.real.np.name
        self.calls: list[NativeCall] = []

    def transform(self, source: Slot, out: Slot, rows: int, n: int, inverse: bool, scale: float) -> None:
        """`rows` sequences of n numbers, one after the other."""
        if max(factors_of(n), default=1) > LARGEST_PRIME:
            self._convolution(source, out, rows, n, inverse, scale)
            return
        width = self.form.lanes
        parts = _split(n)
        large = 2 * n * self.form.plane_bytes > 2 * self.form.target.l2_bytes
        if parts is None or not (large or (2 * rows < width and n >= 4 * width)):
            self._groups(source, out, (1, rows), n, (0, n, 1), (0, n, 1), (inverse, inverse), scale, None)
            return
        low, high = parts
        middle = self.area(rows * n * self.form.dtype.itemsize)
        twiddles = _twiddles(low, high, self.real, width)
        self._groups(source, middle, (rows, high), low, (n, 1, high), (n, 1, high), (inverse, False), 1.0, twiddles)
        self._groups(middle, out, (rows, low), high, (n, high, 1), (n, 1, low), (False, inverse), scale, None)

    def _groups(
        self, source: Slot, out: Slot, outer: tuple[int, int], n: int, into: tuple[int, int, int],
        back: tuple[int, int, int], swap: tuple[bool, bool], scale: float, twiddles: np.ndarray | None,
    ) -> None:  # fmt: skip
        rows, lanes = outer
        per_row = -(-lanes // self.form.lanes)
        groups = rows * per_row
        slots = min(groups, SLOTS)
        size = 2 * n * self.form.plane_bytes
        stages, table = stage_tables(n, self.real)
        memory = self.area(size * slots)
        count = len(factors_of(n))
        turned: Slot = ("table", twiddles) if twiddles is not None else ("pointer", 0)
        self.calls.append(NativeCall("groups", [
            source, out, memory, *number_slots(size, groups, slots, per_row, lanes, n, *into, *back, *swap),
            ("table", np.array([scale], self.real)), ("table", stages), ("number", count), ("table", table), turned,
            ("number", lanes),
        ], slots))  # fmt: skip

    def _convolution(self, source: Slot, out: Slot, rows: int, n: int, inverse: bool, scale: float) -> None:
        size = 1 << (2 * n - 2).bit_length()
        chirp, kernel_ = _chirp(n, size, self.real)
        a, b = (self.area(rows * size * self.form.dtype.itemsize) for _ in range(2))

        def product(
            x: Slot, y: Slot, table: np.ndarray, kept: int, wide: tuple[int, int], swap: tuple[bool, bool], s: float
        ) -> None:
            slots = [x, y, ("table", table), *number_slots(kept, *wide, *swap), ("table", np.array([s], self.real))]
            self.calls.append(NativeCall("product", slots, rows, max(1, CHUNK // size)))

        product(source, a, chirp, n, (n, size), (inverse, False), 1.0)
        self.transform(a, b, rows, size, False, 1.0)
        product(b, a, kernel_, size, (size, size), (False, False), 1.0)
        self.transform(a, b, rows, size, True, 1.0 / size)
        product(b, out, chirp, n, (size, n), (False, inverse), scale)


@override("fft")
def _fft(node: Node, target: Target) -> NativeOp:
    (x,) = node.inputs
    op = node.op
    form = TransformEmitter(x.dtype, target)

    def plan(sizes: Sizes) -> Planned:
        *batch, n = numbers(x.shape, sizes)
        rows = math.prod(batch)
        if rows == 0:
            return Planned(())
        made = Planner(form)
        scale = {"one": 1.0, "by_n": 1.0 / n, "ortho": 1.0 / math.sqrt(n)}[op.scale]  # type: ignore[attr-defined]
        made.transform(("input", 0), ("output", 0), rows, n, op.inverse, scale)  # type: ignore[attr-defined]
        return Planned(made.calls, made.size)

    return NativeOp(f"fft {x.dtype}", lambda module: emit_transforms(module, form), ("groups", "product"), plan)
