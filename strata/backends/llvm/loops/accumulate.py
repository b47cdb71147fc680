"""Accumulators: how a reduction starts, takes a value, joins lanes and ends. The order depends on the extent alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata.backends.llvm.ir.builder import IrFunction, constant, vector, vector_constant
from strata.backends.llvm.ir.registers import Parts, register_type
from strata.backends.llvm.math.scalars import combine
from strata.core import DType, Target, i64
from strata.kernel import identity


@dataclass(frozen=True, slots=True)
class Accumulator:
    """One running reduction over values of a type; argmax and argmin carry the best value and its position.

    A position of -1 stands for all places so far, none of which has better than the worst value.
    """

    f: IrFunction
    kind: str
    dtype: DType
    target: Target
    positions: DType = i64  # as they are carried: i32 where the extent allows
    leaves_nan: bool = False  # a maximum or minimum of the other values
    keeps_sign: bool = False  # a sum of one term is that term, though it be -0.0

    @property
    def is_argument(self) -> bool:
        return self.kind in ("argmax", "argmin")

    @property
    def ends_early(self) -> bool:
        """Whether one value can decide the result."""
        return self.kind in ("any", "all")

    def may_change(self, state: str, lanes: int) -> str:
        """Whether no value so far has decided it, as an i1."""
        type_ = f"i{lanes}"
        bits = self.f.convert("bitcast", vector("i1", lanes), state, type_) if lanes > 1 else state
        return self.f.compare("eq", type_, bits, 0 if self.kind == "any" else -1)

    @property
    def parts(self) -> int:
        """Registers carried."""
        return 2 if self.is_argument or self.dtype.is_complex else 1

    @property
    def takes_products(self) -> bool:
        """Sums of products are fused, rounding once per term."""
        return self.kind == "sum" and self.dtype.is_float and self.target.has_fma

    def _types(self, lanes: int) -> tuple[str, ...]:
        first = register_type(self.dtype, lanes)
        if self.is_argument:
            return first, register_type(self.positions, lanes)
        return (first,) * self.parts

    def typed(self, state: Sequence[str], lanes: int) -> list[tuple[str, str]]:
        return list(zip(self._types(lanes), state, strict=True))

    def start(self, lanes: int) -> list[tuple[str, str]]:
        """Types and first values of what a loop carries."""
        types = self._types(lanes)
        if self.is_argument:
            worst = identity(self.kind[3:], self.dtype)
            return [(types[0], constant(types[0], worst)), (types[1], constant(types[1], -1))]
        keeps_sign = self.keeps_sign and self.kind == "sum" and self.dtype.is_inexact
        first = constant(types[0], -0.0 if keeps_sign else identity(self.kind, self.dtype))
        if self.dtype.is_complex:
            return [(types[0], first), (types[1], constant(types[1], -0.0 if keeps_sign else 0.0))]
        return [(types[0], first)]

    def step(
        self, state: Parts, value: Parts, lanes: int, mask: str | None, position: Parts | None = None
    ) -> list[str]:
        if position is not None:
            made = self._better(state, (value[0], position[0]), lanes, later=True)
        else:
            made = self._combined(state, value, lanes)
        return self._kept(state, made, lanes, mask)

    def _combined(self, state: Parts, value: Parts, lanes: int) -> Parts:
        if not self.leaves_nan:
            return combine(self.f, self.kind, self.dtype, lanes, state, value, self.target)
        type_ = register_type(self.dtype, lanes)
        better = self.f.compare("ogt" if self.kind == "max" else "olt", type_, value[0], state[0])
        return (self.f.select(type_, better, value[0], state[0]),)

    def step_product(self, state: Parts, a: Parts, b: Parts, lanes: int, mask: str | None) -> list[str]:
        made = (self.f.fma(register_type(self.dtype, lanes), a[0], b[0], state[0]),)
        return self._kept(state, made, lanes, mask)

    def _kept(self, state: Parts, made: Parts, lanes: int, mask: str | None) -> list[str]:
        if mask is None:
            return list(made)
        types = self._types(lanes)
        return [self.f.select(t, mask, new, old) for t, new, old in zip(types, made, state, strict=True)]

    def _better(self, old: Parts, new: Parts, lanes: int, *, later: bool) -> Parts:
        """The better of two (value, position) pairs: NaN is best, and of equals the one at the smaller position."""
        f = self.f
        value_type, position_type = self._types(lanes)
        flag = vector("i1", lanes)
        predicate = ("s" if self.dtype.kind == "int" else "u") + ("gt" if self.kind == "argmax" else "lt")

        def beats(a: str, b: str) -> str:
            more = f.compare(predicate, value_type, a, b)  # of floats: or one of them is NaN
            return f.binary("and", flag, more, f.compare("ord", value_type, b, b)) if self.dtype.is_float else more

        wins = beats(new[0], old[0])
        if not later:
            earlier = f.compare("ult", position_type, new[1], old[1])  # -1 is later than any
            kept = f.binary("xor", flag, beats(old[0], new[0]), constant(flag, 1))
            wins = f.binary("or", flag, wins, f.binary("and", flag, earlier, kept))
        return f.select(value_type, wins, new[0], old[0]), f.select(position_type, wins, new[1], old[1])

    def join(self, a: Parts, b: Parts, lanes: int) -> Parts:
        """Two partial results into one."""
        if self.is_argument:
            return self._better(a, b, lanes, later=False)
        return self._combined(a, b, lanes)

    def from_zero(self, state: Parts, lanes: int) -> Parts:
        """What a sum would have come to from zero, which starts from -0.0: adding to that changes nothing."""
        if self.kind != "sum" or not self.dtype.is_inexact:
            return state
        return self.join(tuple(v for _, v in self.start(lanes)), state, lanes)

    def narrow(self, state: Parts, lanes: int, to: int) -> Parts:
        """Fewer lanes, by joining halves."""
        while lanes > to:
            half = lanes // 2
            low, high = [], []
            for type_, part in zip(self._types(lanes), state, strict=True):
                if half == 1:
                    low.append(self.f.extract(type_, part, 0))
                    high.append(self.f.extract(type_, part, 1))
                else:
                    low.append(self.f.shuffle(type_, part, "poison", range(half)))
                    high.append(self.f.shuffle(type_, part, "poison", range(half, lanes)))
            state = self.join(tuple(low), tuple(high), half)
            lanes = half
        return state

    def prefix(self, value: Parts, lanes: int, *, exclusive: bool) -> tuple[Parts, Parts]:
        """In each lane, what all lanes up to it join to; and in every lane, what all of them do.

        Rounds double the runs that are done: the upper half of a run takes in the last lane of its lower half."""
        empty = tuple(v for _, v in self.start(lanes))
        by = 1
        while by < lanes:
            picks = [lane - lane % (2 * by) + by - 1 for lane in range(lanes)]
            is_upper = [lane % (2 * by) >= by for lane in range(lanes)]
            if self.kind == "sum":  # adding what a sum of nothing is, to the others, is less than choosing
                picks = [pick if is_upper[lane] else lanes + lane for lane, pick in enumerate(picks)]
                value = self.join(self._picked(value, lanes, picks, empty), value, lanes)
            else:
                last = self._picked(value, lanes, picks)
                upper = vector_constant("i1", list(map(int, is_upper)))
                value = self._chosen(upper, self.join(last, value, lanes), value, lanes)
            by *= 2
        whole = self._picked(value, lanes, [lanes - 1] * lanes)
        if exclusive:
            value = self._picked(empty, lanes, [0, *range(lanes, 2 * lanes - 1)], value)
        return value, whole

    def _chosen(self, mask: str, a: Parts, b: Parts, lanes: int) -> Parts:
        return tuple(self.f.select(t, mask, x, y) for (t, x), y in zip(self.typed(a, lanes), b, strict=True))

    def _picked(self, parts: Parts, lanes: int, picks: Sequence[int], others: Parts | None = None) -> Parts:
        """Lanes of a register; from the number of lanes on, of another one."""
        beside = ["poison"] * len(parts) if others is None else others
        return tuple(self.f.shuffle(t, p, o, picks) for (t, p), o in zip(self.typed(parts, lanes), beside, strict=True))

    def finish(self, state: Parts, lanes: int) -> Parts:
        """The result; for argmax and argmin, the position, 0 over nothing."""
        if not self.is_argument:
            return tuple(state)
        type_ = register_type(self.positions, lanes)
        first = self.f.intrinsic("smax", type_, state[1], constant(type_, 0))
        return (first if self.positions is i64 else self.f.convert("sext", type_, first, register_type(i64, lanes)),)
