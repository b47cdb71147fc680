"""2D pooling: windows over the last two axes, vectors along the pixels of a row.

    out[*planes, y, x] = epilogue(maximum, minimum or sum over v, u of in[*planes, s·y + d·v - low, s·x + d·u - low])

A tile is one vector of pixels of a few neighbouring lines. Of every line of the input below it, what its pixels see
along the line becomes one register; windows join those of their lines. So each element joins in once for all the lines
of a tile. Where windows share no lines, these are joined first. Neither order depends on tiles. What lies in the
padding is the value that changes nothing. Kernels are found by what they compute: one such reduction, with anything
after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Final

from strata.backends.llvm.conv.lines import every, in_tiles, lanes_inside, seen
from strata.backends.llvm.conv.match import SUMS, epilogue_of
from strata.backends.llvm.gemm.match import FinishedSums, planned
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value, constant
from strata.backends.llvm.ir.native import each_point
from strata.backends.llvm.ir.registers import memory_type, to_memory
from strata.backends.llvm.jit.calling_convention import LoopUsage
from strata.backends.llvm.loops.accumulate import Accumulator
from strata.backends.llvm.loops.values import Context, Values
from strata.core import Dim, Target, dim_max, dim_min, dim_prod, f32
from strata.errors import CompileError
from strata.kernel import (
    Axis,
    Buffer,
    Const,
    Expr,
    Kernel,
    Load,
    PoolTiles,
    Reduce,
    Scalar,
    Scan,
    groups_of,
    identity,
    linear,
    postorder,
)

LINES: Final = (8, 4, 2, 1)  # of tiles
MOST_STRIDE: Final = 8  # along a line: vectors that one is picked from
MOST_TAPS: Final = 8  # along a line: more are read faster one axis after the other
CHUNK_PIXELS: Final = 8 << 10  # that are worth handing out
FEWEST_CHUNKS: Final = 16
NARROW: Final = 4  # pixels of a line below which vectors along it are mostly empty
SHORT_EPILOGUE: Final = 600  # characters of its text up to which an epilogue is written out for every line of a tile
KINDS: Final = ("max", "min", "sum")


@dataclass(frozen=True, slots=True)
class Slide:
    """How a window goes along one axis: in[stride · place + dilation · tap + start]."""

    taps: int
    stride: int
    dilation: int
    start: Dim


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A kernel as a pool, and its tiles. A chunk is `planes` by `lines`."""

    kernel: Kernel
    epilogue: Kernel | None  # the kernel with the pooled values as an input, in normal form; None: they are stored
    kind: str
    source: Buffer
    down: Slide
    along: Slide
    target: Target
    planes: int
    lines: int
    heights: tuple[int, ...]

    @property
    def out(self) -> Buffer:
        return self.kernel.stores[0].buffer

    @property
    def is_down_first(self) -> bool:
        """Windows share no lines: those of each are joined before anything is picked along them."""
        return self.down.stride >= self.down.taps

    @property
    def is_narrow(self) -> Dim:
        """1 where rows are too short for vectors along them, else 0: symbolic where their length is."""
        return dim_max(0, dim_min(1, NARROW - self.out.shape[-1]))

    @property
    def usage(self) -> LoopUsage:
        """How its machine code is called."""
        buffers = tuple(b.name for b in self.kernel.buffers)
        blocks = -(-dim_prod(self.out.shape[:-2]) // self.planes) * -(-self.out.shape[-2] // self.lines)
        return LoopUsage(buffers, tuple(self.kernel.symbols().values()), blocks, 1)


def plan_pool(kernel: Kernel, target: Target, chosen: PoolTiles | None = None) -> PoolPlan | None:
    """A kernel as a pool over the planes of an f32 array, in chunks that were chosen or by a heuristic; or None."""
    if len(kernel.stores) != 1 or not target.has_avx2:  # others read lanes under a mask one by one
        return None
    (store,) = kernel.stores
    if store.buffer.dtype is not f32 or len(store.axes) < 2 or tuple(store.index) != tuple(store.axes):
        return None
    (pooled, *others) = [e for e in postorder([store.value]) if isinstance(e, (Reduce, Scan))] or (None,)
    if others or not isinstance(pooled, Reduce) or pooled.dtype is not f32 or 0 in store.buffer.shape:
        return None
    load = windowed(pooled)
    if load is None or load.buffer.shape[:-2] != store.buffer.shape[:-2]:
        return None
    if any(not is_at(i, a) for i, a in zip(load.index[:-2], store.axes[:-2], strict=True)):
        return None
    windows = [[a for a in pooled.axes if a in i.free] for i in load.index[-2:]]
    down, along = (slide_along(*where) for where in zip(load.index[-2:], store.axes[-2:], windows, strict=True))
    missing = [a for a in pooled.axes if a not in (*windows[0], *windows[1]) and a.extent != 1]
    if down is None or along is None or missing or set(windows[0]) & set(windows[1]):
        return None
    few = planned(store.buffer.shape[-1]) < NARROW or (along.stride > 4 and down.stride < down.taps)
    # loops do as well; for a sum, whether it has a border after its lines does not count, as that may be open
    apart = along.stride >= along.taps and along.start == 0
    plain = down.taps == 1 and (apart if pooled.kind == "sum" else load.where is None)
    if few or plain or along.stride > MOST_STRIDE or max(down.taps, along.taps) > MOST_TAPS:
        return None
    epilogue = epilogue_of(kernel, store, pooled)
    if epilogue is not None and (not epilogue.stores[0].axes or len(repr(epilogue.stores[0].value)) > SHORT_EPILOGUE):
        return None
    *lead, height, last = store.buffer.shape
    width = planned(last)
    tiles = _tiles(prod(map(planned, lead)), height, width, chosen)
    if target.splits_vectors and 0 < width % target.lanes(4) <= target.lanes(4) // 2:
        target = replace(target, vector_bytes=target.vector_bytes // 2)  # as fast, and fewer idle lanes
    return PoolPlan(kernel, epilogue, pooled.kind, load.buffer, down, along, target, *tiles)


def _tiles(planes: int, height: Dim, width: int, chosen: PoolTiles | None) -> tuple[int, int, tuple[int, ...]]:
    """Planes and lines of a chunk, and lines of tiles, tallest first."""
    count = planned(height)
    even = next((h for h in range(LINES[0], LINES[0] // 2, -1) if count % h == 0), LINES[0])
    heights = (even, *(h for h in LINES if h < even))
    together = max(1, min(CHUNK_PIXELS // max(1, count * width), -(-planes // FEWEST_CHUNKS)))
    lines = count if together > 1 else min(count, max(even, CHUNK_PIXELS // max(1, width) // even * even))
    if chosen is not None:
        together, lines = chosen.planes, chosen.lines
        if not (together > 0 and 0 < lines <= count and (together == 1 or lines == count)):
            raise CompileError(f"`{chosen}` does not fit this pool", code="C142")
    if lines != height:
        return together, lines, heights
    needed, left = [], lines
    for h in heights:
        needed += [h] if left >= h else []
        left %= h
    return together, lines, tuple(needed)


def windowed(pooled: Reduce) -> Load | None:
    """What a pool reads: elements of windows, and outside of the array what changes nothing."""
    if pooled.kind not in KINDS or (pooled.is_rounded and len(groups_of(pooled)) < len(pooled.axes)):
        return None  # sums over whole planes are sums of rows
    body = pooled.body
    if isinstance(body, Scalar) and body.name == "select":
        inside, body, fill = body.args
        if not isinstance(fill, Const) or fill.value != identity(pooled.kind, f32):
            return None
        if not isinstance(body, Load) or body.where is not inside or not _is_inside(inside, body):
            return None
    elif isinstance(body, Load) and body.where is not None:
        return None
    return body if isinstance(body, Load) and body.dtype is f32 and len(body.index) >= 2 else None


def _is_inside(condition: Expr, load: Load) -> bool:
    """Whether a condition says of some indices of a load that they lie in the array, and nothing else."""
    if not isinstance(condition, Scalar):
        return False
    if condition.name == "and":
        return all(_is_inside(x, load) for x in condition.args)
    place, limit = condition.args if len(condition.args) == 2 else (condition, condition)
    sizes = [size for i, size in zip(load.index, load.buffer.shape, strict=True) if i is place]
    bound = linear(limit)
    if not sizes or not bound.is_constant:
        return False
    return bound.constant == 0 if condition.name == "ge" else condition.name == "lt" and bound.constant in sizes


def is_at(index: Expr, axis: Axis) -> bool:
    return index is axis or (axis.extent == 1 and isinstance(index, Const) and index.value == 0)


def slide_along(index: Expr, axis: Axis, taps: list[Axis]) -> Slide | None:
    """The window along an axis, where an index is stride · axis + dilation · tap + start."""
    form = linear(index)
    if len(taps) > 1 or any(a is not axis and a not in taps for a in form.terms):
        return None
    stride = form.terms.get(axis, 1 if axis.extent == 1 else 0)
    dilation, count = (form.terms[taps[0]], taps[0].extent) if taps else (1, 1)
    if not (isinstance(stride, int) and isinstance(dilation, int) and isinstance(count, int)):
        return None
    return Slide(count, stride, dilation, form.constant) if min(stride, dilation, count) > 0 else None


def emit_pool(module: IrModule, plan: PoolPlan) -> str:
    """Adds the kernel `void (ptr arguments, i64 begin, i64 end)` and returns its name."""
    parameters = (("ptr noalias readonly", "arguments"), ("i64", "begin"), ("i64", "end"))
    f = module.function(plan.kernel.name, parameters)
    driver = _Pool(f, plan)
    each_point(f, lambda chunk, _: driver.chunk(chunk))
    return plan.kernel.name


class _Finished(FinishedSums):
    """What comes after the pooled values of a vector of pixels."""

    def __init__(self, pool: _Pool, epilogue: Kernel, plane: Value, column: Value, mask: str) -> None:
        self.start(pool.f, epilogue, pool.plan.target)
        self.pointers, self.sizes = dict(pool.pointers), dict(pool.sizes)
        (store,) = epilogue.stores
        self.context = Context(store.axes[-1], pool.lanes, mask) if pool.lanes > 1 else Context()
        self.place(store, dim_prod(pool.plan.out.shape[-2:]), plane, column)

    def finished(self, value: str) -> str:
        """The values to store."""
        result = self.kernel.stores[0].value
        sums = next(e for e in postorder([result]) if isinstance(e, Load) and e.buffer.name == SUMS)
        self.values[sums] = (value,)
        (made,) = self.widened(result, self.context.lanes)
        return to_memory(self.f, result.dtype, made, self.context.lanes, self.target)


class _Pool:
    """The function of a pool."""

    def __init__(self, f: IrFunction, plan: PoolPlan) -> None:
        self.f, self.plan = f, plan
        kernel = plan.kernel
        self.pointers = {
            b.name: f.load("ptr", f.address("ptr", "%arguments", i), 8) for i, b in enumerate(kernel.buffers)
        }
        base = len(kernel.buffers)
        self.sizes: dict[str, Value] = {
            name: f.load("i64", f.address("i64", "%arguments", base + i), 8) for i, name in enumerate(kernel.symbols())
        }
        self.lanes = plan.target.lanes(4)
        self.type = memory_type(f32, self.lanes)
        self.joins = Accumulator(f, plan.kind, f32, plan.target)
        self.nothing = constant(self.type, identity(plan.kind, f32))
        sizes = Values()
        sizes.start(f, kernel, plan.target)
        sizes.sizes = self.sizes
        self.height, self.width = (sizes.size(d) for d in plan.source.shape[-2:])
        self.lines, self.columns = (sizes.size(d) for d in plan.out.shape[-2:])
        self.count = sizes.size(dim_prod(plan.out.shape[:-2]))
        self.top, self.left = (sizes.size(s.start) for s in (plan.down, plan.along))
        self.outside = f.alloca("float", self._reach())
        f.fill("float", self.outside, self._reach(), constant("float", identity(plan.kind, f32)))

    def _reach(self) -> int:
        """Elements of a line that the pixels of a vector may read."""
        along = self.plan.along
        return (self.lanes + 1) * along.stride + along.taps * along.dilation

    def chunk(self, index: str) -> None:
        f, plan = self.f, self.plan
        parts = f.ceil_div(self.lines, plan.lines)
        group, part = f.divided(index, parts)
        top = f.mul(part, plan.lines)
        first = f.mul(group, plan.planes)
        end = f.smin(f.add(first, plan.planes), self.count)
        bottom = f.smin(f.add(top, plan.lines), self.lines)
        f.loop(first, end, 1, [], lambda plane, _: self._plane(plane, top, bottom))

    def _plane(self, plane: str, top: Value, bottom: Value) -> None:
        f = self.f
        source = f.address("float", self.pointers[self.plan.source.name], f.mul(plane, f.mul(self.height, self.width)))

        def column(at: str, _: list[str]) -> None:
            mask = f.mask_below(self.lanes, f.sub(self.columns, at))
            start = f.add(f.mul(at, self.plan.along.stride), self.left)
            masks = {away: lanes_inside(f, self.lanes, f.add(start, away), self.width) for away in self._reads()}

            def tile(line: str, count: int) -> None:
                for i, value in enumerate(self._pooled(source, line, start, masks, count)):
                    self._put(value, plane, f.add(line, i), at, mask)

            in_tiles(f, top, bottom, self.plan.heights, tile)

        f.loop(0, self.columns, self.lanes, [], column)

    def _reads(self) -> list[int]:
        """Vectors of a line that pixels see, by their distance from the first tap."""
        along = self.plan.along
        firsts = {away - away % along.stride for away in range(0, along.taps * along.dilation, along.dilation)}
        return sorted(first + part * self.lanes for first in firsts for part in range(along.stride))

    def _pooled(self, source: str, line: str, start: Value, masks: dict[int, str], count: int) -> list[str]:
        """The windows of a vector of pixels, of neighbouring lines."""
        f, down = self.f, self.plan.down
        first = f.add(f.mul(line, down.stride), self.top)
        result: list[dict[int, str]] = [{} for _ in range(count)]
        for away, users in seen(count, down.taps, down.stride, down.dilation).items():
            y = f.add(first, away)
            place = f.address("float", source, f.add(f.mul(y, self.width), start))
            exists = f.compare("ult", "i64", y, self.height)
            row = self._read(f.select("ptr", exists, place, self.outside), masks)
            if not self.plan.is_down_first:
                row = {0: self._along(row)}
            for window, _ in users:
                before = result[window]
                result[window] = {at: self._join(before[at], v) if before else v for at, v in row.items()}
        pooled = [self._along(r) if self.plan.is_down_first else r[0] for r in result]
        return [self.joins.from_zero((value,), self.lanes)[0] for value in pooled]

    def _read(self, place: str, masks: dict[int, str]) -> dict[int, str]:
        """The vectors of a line that pixels see."""
        f = self.f
        return {
            away: f.load(self.type, f.address("float", place, away), 4, mask, self.nothing)
            for away, mask in masks.items()
        }

    def _join(self, a: str, b: str) -> str:
        return self.joins.join((a,), (b,), self.lanes)[0]

    def _along(self, read: dict[int, str]) -> str:
        """What the pixels of a vector see of a line, joined."""
        f, along = self.f, self.plan.along
        total = ""
        for away in range(0, along.taps * along.dilation, along.dilation):
            over = away % along.stride
            parts = [read[away - over + part * self.lanes] for part in range(along.stride)]
            seen = every(f, self.type, parts, over)
            total = self._join(total, seen) if total else seen
        return total

    def _put(self, value: str, plane: str, line: Value, at: str, mask: str) -> None:
        f, out = self.f, self.plan.out
        column = f.add(f.mul(line, self.columns), at)
        if self.plan.epilogue is not None:
            value = _Finished(self, self.plan.epilogue, plane, column, mask).finished(value)
        place = f.add(f.mul(plane, f.mul(self.lines, self.columns)), column)
        f.store(self.type, value, f.address("float", self.pointers[out.name], place), 4, mask)
