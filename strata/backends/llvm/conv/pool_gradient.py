"""The gradient of max and min pooling: each window adds its share where its first extreme is.

Trailing axes whose windows are single elements are channels, and vectors run along them; without any, a plane is walked
element by element. A point is one image's (or plane's) block of channels: its windows come in order, so that what
overlapping windows add up to never depends on threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant, with_element
from strata.backends.llvm.ir.native import arguments, each_point, fill_zero, kernel, numbers
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, Slot, override
from strata.backends.llvm.ir.registers import memory_type
from strata.core import DType, Target, f32, f64
from strata.mir import Node

CHANNELS = 64  # of a point
MOST_UNROLLED = 16  # taps of a window that are written out
WINDOWS = 256  # that are worth a thread's while


@dataclass(frozen=True)
class _PoolBackward:
    """What decides the code; windows over the axes that are not channels."""

    dtype: DType
    kind: str
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    has_channels: bool
    target: Target

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def lanes(self) -> int:
        return self.target.lanes(self.dtype.itemsize) if self.has_channels else 1

    @property
    def is_disjoint(self) -> bool:
        """No element is in two windows."""
        reach = [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]
        return all(s >= r for s, r in zip(self.stride, reach, strict=True))

    @property
    def key(self) -> str:
        fields = (self.dtype, self.kind, self.kernel, self.stride, self.dilation, self.has_channels)
        return f"pool backward {' '.join(map(str, fields))}"

    def emit(self, module: IrModule) -> None:
        _Emitter(self, kernel(module, "pool_backward")).emit()

    def slots(self, sizes: list[int], counts: list[int], lows: list[int], channels: int, fills: int) -> list[Slot]:
        """Of x, dy, out, channels, channels of a point, whether to fill with zeros; sizes, counts and padding."""
        head: list[Slot] = [("input", 0), ("input", 1), ("output", 0)]
        rest = [channels, min(channels, CHANNELS), fills, *sizes, *counts, *lows]
        return [*head, *(("number", v) for v in rest)]


class _Emitter:
    def __init__(self, spec: _PoolBackward, f: IrFunction) -> None:
        self.spec, self.f, rank = spec, f, spec.rank
        self.x, self.dy, self.out, self.channels, self.width, self.fills, *rest = arguments(f, "pppiii" + "iii" * rank)
        self.sizes, self.counts, self.lows = rest[:rank], rest[rank : 2 * rank], rest[2 * rank :]
        self.element = memory_type(spec.dtype)
        self.pixels, self.windows = self._product(self.sizes), self._product(self.counts)

    def _product(self, values: list[str]) -> Value:
        total: Value = 1
        for v in values:
            total = self.f.mul(total, v)
        return total

    def emit(self) -> None:
        f = self.f
        blocks = f.op(f"udiv i64 {f.sub(f.add(self.channels, self.width), 1)}, {self.width}")

        def point(p: str, _: list[str]) -> None:
            image, block = f.op(f"udiv i64 {p}, {blocks}"), f.op(f"urem i64 {p}, {blocks}")
            first = f.mul(block, self.width)
            count = f.smin(f.sub(self.channels, first), self.width)
            start = f.add(f.mul(f.mul(image, self.pixels), self.channels), first)
            x, out = (f.address(self.element, base, start) for base in (self.x, self.out))
            dy = f.address(self.element, self.dy, f.add(f.mul(f.mul(image, self.windows), self.channels), first))
            f.if_(f.compare("ne", "i64", self.fills, 0), lambda: self._clear(out, count))
            self._each_window(lambda at, number: self._window(x, dy, out, count, at, number))

        each_point(f, point)

    def _clear(self, out: str, count: Value) -> None:
        f, size = self.f, self.spec.dtype.itemsize

        def one(pixel: str, _: list[str]) -> None:
            fill_zero(f, f.address(self.element, out, f.mul(pixel, self.channels)), f.mul(count, size))

        whole = f.compare("eq", "i64", count, self.channels)
        f.if_(
            whole,
            lambda: fill_zero(f, out, f.mul(f.mul(self.pixels, self.channels), size)),
            lambda: f.loop(0, self.pixels, 1, [], one),
        )

    def _each_window(self, body: Callable[[list[Value], Value], None]) -> None:
        """In order: body(position, number)."""
        f = self.f

        def nested(axis: int, at: list[Value], number: Value) -> None:
            if axis == self.spec.rank:
                body(at, number)
                return

            def one(i: str, _: list[str]) -> None:
                nested(axis + 1, [*at, i], f.add(f.mul(number, self.counts[axis]), i))

            f.loop(0, self.counts[axis], 1, [], one)

        nested(0, [], 0)

    def _window(self, x: str, dy: str, out: str, count: Value, at: list[Value], number: Value) -> None:
        f, spec = self.f, self.spec
        corners = [f.sub(f.mul(i, s), low) for i, s, low in zip(at, spec.stride, self.lows, strict=True)]
        share = f.mul(number, self.channels)

        def channel(c: str, _: list[str]) -> None:
            mask = f.mask_below(spec.lanes, f.sub(count, c)) if spec.lanes > 1 else None

            def work(mask: str | None) -> None:
                shared = self._load(dy, f.add(share, c), mask)
                self._spread(corners, c, x, out, shared, mask)

            if mask is None:
                work(None)
            else:
                full = f.compare("sle", "i64", f.add(c, spec.lanes), count)
                f.if_(full, lambda: work(None), lambda: work(mask))

        f.loop(0, count, spec.lanes, [], channel)

    def _spread(self, corners: list[Value], c: str, x: str, out: str, share: str, mask: str | None) -> None:
        """A window's share to its first extreme: written out where no tap is outside, or else by loops."""
        f, spec = self.f, self.spec
        if prod(spec.kernel) > MOST_UNROLLED:
            self._by_loops(corners, c, x, out, share, mask)
            return
        inside = "true"
        for axis, corner in enumerate(corners):
            reach = (spec.kernel[axis] - 1) * spec.dilation[axis]
            low = f.compare("sge", "i64", corner, 0)
            high = f.compare("slt", "i64", f.add(corner, reach), self.sizes[axis])
            inside = f.binary("and", "i1", inside, f.binary("and", "i1", low, high))
        f.if_(
            inside,
            lambda: self._unrolled(corners, c, x, out, share, mask),
            lambda: self._by_loops(corners, c, x, out, share, mask),
        )

    def _unrolled(self, corners: list[Value], c: str, x: str, out: str, share: str, mask: str | None) -> None:
        places = []
        for tap in product(*map(range, self.spec.kernel)):
            places.append(self._place(corners, list(tap), c))
        state: list[Value] = []
        for number, place in enumerate(places):
            state = self._better(number, self._load(x, place, mask), state)
        for number, place in enumerate(places):
            self._give(number, str(state[1]), place, out, share, mask)

    def _by_loops(self, corners: list[Value], c: str, x: str, out: str, share: str, mask: str | None) -> None:
        f, spec = self.f, self.spec
        ranges = [self._taps_inside(axis, corner) for axis, corner in enumerate(corners)]
        types = [self._type, with_element(self._type, "i32")]

        def nested(
            axis: int, taps: list[Value], number: Value, carried: list[Value], body: Callable[..., list[Value]]
        ) -> list[Value]:
            if axis == spec.rank:
                return body(taps, number, carried)
            low, high = ranges[axis]

            def one(i: str, inner: list[str]) -> list[Value]:
                following = f.add(f.mul(number, spec.kernel[axis]), i)
                return nested(axis + 1, [*taps, i], following, list(inner), body)

            return list(f.loop(low, high, 1, list(zip(types, carried, strict=False)), one))

        def compare(taps: list[Value], number: Value, carried: list[Value]) -> list[Value]:
            return self._better(number, self._load(x, self._place(corners, taps, c), mask), carried)

        start: list[Value] = ["zeroinitializer", constant(types[1], -1)]
        _, best = nested(0, [], 0, start, compare)

        def give(taps: list[Value], number: Value, carried: list[Value]) -> list[Value]:
            self._give(number, str(best), self._place(corners, taps, c), out, share, mask)
            return carried

        nested(0, [], 0, [], give)

    @property
    def _type(self) -> str:
        return memory_type(self.spec.dtype, self.spec.lanes)

    def _taps_inside(self, axis: int, corner: Value) -> tuple[Value, Value]:
        """The first tap along an axis that is inside, and the one after the last."""
        f, dilation, size = self.f, self.spec.dilation[axis], self.spec.kernel[axis]
        low = f.op(f"sdiv i64 {f.smax(f.sub(dilation - 1, corner), 0)}, {dilation}")
        high = f.op(f"sdiv i64 {f.smax(f.add(f.sub(self.sizes[axis], corner), dilation - 1), 0)}, {dilation}")
        return low, f.smin(high, size)

    def _place(self, corners: list[Value], taps: list[Value], c: Value) -> Value:
        f = self.f
        pixel: Value = 0
        for axis, (corner, tap) in enumerate(zip(corners, taps, strict=True)):
            at = f.add(corner, f.mul(tap, self.spec.dilation[axis]))
            pixel = f.add(f.mul(pixel, self.sizes[axis]), at)
        return f.add(f.mul(pixel, self.channels), c)

    def _load(self, base: str, index: Value, mask: str | None) -> str:
        f, size = self.f, self.spec.dtype.itemsize
        place = f.address(self.element, base, index)
        return f.load(self._type, place, size, mask)

    def _splat(self, number: Value) -> str:
        type_ = with_element(self._type, "i32")
        if isinstance(number, int):
            return constant(type_, number)
        narrow = self.f.convert("trunc", "i64", number, "i32")
        return self.f.splat(type_, narrow) if self.spec.lanes > 1 else narrow

    def _better(self, number: Value, value: str, state: list[Value]) -> list[Value]:
        """The best value so far and its tap; the first one wins against equals, and NaN against all others."""
        f, type_ = self.f, self._type
        taps, flag = with_element(type_, "i32"), with_element(type_, "i1")
        if not state:
            return [value, self._splat(number)]
        best, tap = state
        # unordered: also true where either is NaN
        beats = f.compare("ugt" if self.spec.kind == "max" else "ult", type_, value, best)
        wins = f.binary("and", flag, beats, f.compare("ord", type_, best, best))
        none = f.compare("slt", taps, tap, constant(taps, 0))
        wins = f.binary("or", flag, wins, none)
        return [f.select(type_, wins, value, best), f.select(taps, wins, self._splat(number), tap)]

    def _give(self, number: Value, best: str, place: Value, out: str, share: str, mask: str | None) -> None:
        f, type_, size = self.f, self._type, self.spec.dtype.itemsize
        mine = f.compare("eq", with_element(type_, "i32"), best, self._splat(number))
        value = f.select(type_, mine, share, constant(type_, 0))
        to = f.address(self.element, out, place)
        if not self.spec.is_disjoint:
            old = self._load(out, place, mask)
            value = f.select(type_, mine, f.binary("fadd", type_, old, share), old)
        f.store(type_, value, to, size, mask)


@override("pool_backward", whole=True)
def pool_backward(node: Node, target: Target) -> NativeOp | None:
    """The kernel for a node's types."""
    op: Any = node.op
    x, dy = (v.type for v in node.inputs)
    if x.dtype is not dy.dtype or x.dtype not in (f32, f64):
        return None
    rank = len(op.kernel)
    single = [(k, s, p) == (1, 1, (0, 0)) for k, s, p in zip(op.kernel, op.stride, op.padding, strict=True)]
    while rank > 1 and single[rank - 1]:
        rank -= 1
    lead = x.ndim - len(op.kernel)
    spec = _PoolBackward(
        x.dtype, op.kind, op.kernel[:rank], op.stride[:rank], op.dilation[:rank], rank < len(op.kernel), target
    )

    def plan(bound: Sizes) -> Planned:
        shape, pooled = numbers(x.shape, bound), numbers(dy.shape, bound)
        lows = numbers([low for low, _ in op.padding[:rank]], bound)
        sizes, counts = shape[lead : lead + rank], pooled[lead : lead + rank]
        images, channels = prod(shape[:lead]), prod(shape[lead + rank :])
        if 0 in shape:
            return Planned(())
        # windows side by side that leave nothing out write every element
        tiles = zip(sizes, counts, lows, spec.kernel, spec.stride, spec.dilation, strict=True)
        covers = spec.is_disjoint and all((s == k and d == 1 and c * s - low >= n) for n, c, low, k, s, d in tiles)
        slots = spec.slots(sizes, counts, lows, channels, 0 if covers else 1)
        width = min(channels, CHANNELS)
        grain = max(1, WINDOWS // max(1, prod(counts) * -(-width // spec.lanes)))
        return Planned((NativeCall("pool_backward", slots, images * -(-channels // width), grain),))

    return NativeOp(spec.key, spec.emit, ("pool_backward",), plan)
