"""Kernel IR as Triton text: loops become blocks of lanes.

The outer loops of a nest, whose points are independent, become one axis of points that programs share out: a program
takes a block of them, one lane each. A loop inside it that has no loop of its own goes through its axis in blocks too,
along the second dimension of a tile (points x terms); other loops take one step at a time. Lanes outside of an extent
are masked: they read 0, add what changes nothing, and store nothing. Every result is folded in an order that depends on
sizes and block sizes only.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from strata.backends.triton.codegen.elements import is_small, literal, number, register
from strata.backends.triton.codegen.online import TOGETHER, SumBeside, SumWithMaximum, sum_beside
from strata.backends.triton.codegen.prelude import is_prelude
from strata.backends.triton.codegen.scalars import TritonCall, decoded, emit_scalar, encoded
from strata.backends.triton.schedules.schedule import GpuSchedule, Lanes, TritonRows, known, power_of_two
from strata.core import Dim, DType, bounds, dim_prod, i64, known_le
from strata.kernel import (
    Axis,
    Buffer,
    Compute,
    Const,
    Expr,
    Kernel,
    Load,
    LoopBlock,
    MapLoop,
    Reduce,
    ReduceLoop,
    Scalar,
    Scan,
    Size,
    Store,
    StoreStep,
    identity,
    interval,
    linear,
    postorder,
)

_NARROW = 1 << 31
_TAKEN = frozenset(("tl", "triton", "range", "float", "tile", "batch"))
_SIZE = re.compile(r"n\d+")  # sizes that are arguments
_INDEX = frozenset(("add", "sub", "mul", "neg", "floordiv", "mod", "min", "max"))
_DIVISIONS = frozenset(("floordiv", "mod", "truncdiv", "rem"))
_NONE = 1 << 62  # a place that no argmax has


@dataclass(frozen=True, slots=True)
class Lane:
    """Where an axis stands: text of its value, dimensions of the tile that it spans, and the mask of those inside."""

    text: str
    dims: frozenset[int] = frozenset()
    mask: str = ""


@dataclass
class TritonEmitter:
    """Writes the body of one Triton function."""

    kernel: Kernel
    schedule: GpuSchedule
    shape: tuple[int, ...]  # of a tile: points, or points x terms
    lines: list[str] = field(default_factory=list)
    sizes: dict[Dim, str] = field(default_factory=dict)  # symbolic sizes that are arguments, by name
    helpers: set[str] = field(default_factory=set)
    axes: dict[Axis, Lane] = field(default_factory=dict)
    values: dict[Expr, str] = field(default_factory=dict)
    whole: dict[Axis, Lane] = field(default_factory=dict)  # axes that one block of terms holds
    carries: dict[Scan, str] = field(default_factory=dict)
    depth: int = 1
    count: int = 0
    arguments: dict[str, str] = field(init=False)

    # writing

    def write(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def __post_init__(self) -> None:
        self.arguments = argument_names(self.kernel.buffers)

    def fresh(self, prefix: str = "v") -> str:
        self.count += 1
        made = f"{prefix}{self.count}"
        return self.fresh(prefix) if made in self.arguments.values() else made

    def name(self, text: str, prefix: str = "v") -> str:
        made = self.fresh(prefix)
        self.write(f"{made} = {text}")
        return made

    def needs(self, helper: str) -> str:
        self.helpers.add(helper)
        return helper

    def size(self, dim: Dim) -> str:
        """A size as text: a number, or an argument of the kernel."""
        if isinstance(dim, int):
            return str(dim)
        return self.sizes.setdefault(dim, f"n{len(self.sizes)}")

    @contextmanager
    def indented(self) -> Iterator[None]:
        """A loop's body: values made in it are not known after it."""
        values, whole = dict(self.values), dict(self.whole)
        self.depth += 1
        yield
        self.depth -= 1
        self.values, self.whole = values, whole

    @contextmanager
    def axis(self, axis: Axis, lane: Lane) -> Iterator[None]:
        """Inside, an axis stands at a lane, and nothing is known that was made where it stood elsewhere."""
        before, values = self.axes.get(axis), self.values
        self.values = {n: v for n, v in values.items() if axis not in n.free}
        self.axes[axis] = lane
        yield
        self.values = values
        if before is None:
            del self.axes[axis]
        else:
            self.axes[axis] = before

    def forget(self, axes: Sequence[Axis]) -> None:
        """Drop what was made while axes stood elsewhere."""
        self.values = {n: v for n, v in self.values.items() if not n.free & set(axes)}
        self.whole = {a: lane for a, lane in self.whole.items() if a not in axes}

    # shapes and masks

    def dims(self, *nodes: Expr) -> frozenset[int]:
        return frozenset(d for n in nodes for a in n.free for d in self.axes[a].dims)

    def masks(self, *nodes: Expr) -> list[str]:
        return sorted({self.axes[a].mask for n in nodes for a in n.free if self.axes[a].mask})

    def tile(self, dims: frozenset[int]) -> str:
        return f"[{', '.join(str(n if d in dims else 1) for d, n in enumerate(self.shape))}]"

    def spread(self, lanes: str, dim: int) -> str:
        """A range of lanes along one dimension of a tile."""
        if len(self.shape) == 1:
            return lanes
        at = ", ".join(":" if d == dim else "None" for d in range(len(self.shape)))
        return f"{lanes}[{at}]"

    # expressions

    def value(self, node: Expr) -> str:
        """The name or text of a value; it is written here if it is not known yet."""
        found = self.values.get(node)
        if found is not None:
            return found
        match node:
            case Const(value, dtype):
                return literal(value, dtype) if dtype is i64 else number(value, dtype)  # type: ignore[arg-type]
            case Axis():
                return self.axes[node].text
            case Size(dim):
                return self.size(dim)
            case Scalar("index" | "data", (x,)):
                return self.value(x)
            case Scalar() if self.is_index(node) and node.name in ("add", "sub", "mul"):
                return self.scalar(node)  # addresses stay in one line
        made = self.name(self.made(node))
        self.values[node] = made
        return made

    def typed(self, node: Expr) -> str:
        """A value that is a tensor even where it is a number."""
        return number(node.value, node.dtype) if isinstance(node, Const) else self.value(node)  # type: ignore[arg-type]

    def made(self, node: Expr) -> str:
        match node:
            case Load():
                return self.load(node)
            case Scalar():
                return self.scalar(node)
            case Scan():
                return self.scan(node)
            case _:
                raise AssertionError(f"{node!r} is not made where it is used")

    def is_index(self, node: Expr) -> bool:
        """Whether a value is computed with 32 bits: an i64 made of axes and sizes that is known to fit."""
        match node:
            case Const(value, dtype):
                return dtype is i64 and abs(value) < _NARROW
            case Size(_):
                return False
            case Scalar("index" | "data", (x,)):
                return self.is_index(x)
            case Axis(_, extent):
                return known(extent) < _NARROW
            case Scalar(name, args) if node.dtype is i64 and name in _INDEX:
                low, high = interval(node)
                fits = low is not None and high is not None and bounds(low)[0] > -_NARROW and known(high) < _NARROW
                return fits and all(self.is_index(a) for a in args)
        return False

    def operand(self, node: Expr, *, wide: bool) -> str:
        text = self.value(node)
        if wide and node.dtype is i64 and self.is_index(node) and not isinstance(node, Const):
            return f"{text}.to(tl.int64)"
        return text

    def scalar(self, node: Scalar) -> str:
        name, args = node.name, node.args
        wide = not self.is_index(node) and name not in ("cast", "lt", "le", "gt", "ge", "eq", "ne")
        natural = False
        if name in _DIVISIONS and node.dtype.is_int:
            lows = [interval(a)[0] if node.dtype is i64 else None for a in args]
            natural = lows[0] is not None and lows[1] is not None and known_le(0, lows[0]) and known_le(1, lows[1])
        texts = tuple(self.operand(a, wide=wide) for a in args)
        called = name in ("pow", "gcd") or (name in _DIVISIONS and not natural)  # functions take typed numbers
        if called or all(isinstance(a, (Const, Size)) for a in args) or (name == "select" and node.dtype is i64):
            at = 1 if name == "select" else 0
            texts = (
                texts[:at]
                + tuple(
                    number(a.value, a.dtype) if isinstance(a, Const) else t  # type: ignore[arg-type]
                    for a, t in zip(args[at:], texts[at:], strict=True)
                )
            )
        return emit_scalar(TritonCall(name, texts, tuple(a.dtype for a in args), node.dtype, self.needs, natural))

    def load(self, node: Load) -> str:
        return decoded(self.raw_load(node), node.dtype, self.needs)

    def raw_load(self, node: Load) -> str:
        (index,) = node.index
        conditions = self.masks(index)
        place = self.at(node.buffer, index)
        if node.where is not None:
            where = self.value(node.where)
            conditions.append(where)
            outer = self.dims(node.where)
            if outer - self.dims(index):
                place = f"tl.broadcast_to({place}, {self.tile(self.dims(index, node.where))})"
        if not conditions:
            return f"tl.load({place})"
        return f"tl.load({place}, mask={' & '.join(conditions)}, other=0)"

    def at(self, buffer: Buffer, index: Expr) -> str:
        place = self.value(index)
        name = self.arguments[buffer.name]
        return name if place == "0" else f"{name} + {place}"

    # steps

    def block(self, block: LoopBlock) -> None:
        beside: dict[Expr, tuple[SumBeside, SumWithMaximum]] = {}  # by sums that loops before them have made
        for at, step in enumerate(block.steps):
            match step:
                case Compute(node):
                    self.value(node)
                case ReduceLoop() if step.reduces[0] in beside:
                    found, made = beside[step.reduces[0]]
                    self.values[found.node] = made.sum(self.value(found.less))
                case ReduceLoop():
                    other = sum_beside(block.steps, at)
                    if other is not None and isinstance(self.schedule, TritonRows) and not self.is_whole(step.axis):
                        beside[other.node] = other, self.maximum_loop(step)
                    else:
                        self.reduce_loop(step)
                case MapLoop():
                    self.map_loop(step)
                case StoreStep(store):
                    self.store(store)

    def store(self, store: Store) -> None:
        value = encoded(self.value(store.value), store.buffer.dtype, self.needs)
        if store.value.dtype is i64 and self.is_index(store.value):
            value = f"{value}.to(tl.int64)" if not isinstance(store.value, Const) else number(store.value.value, i64)  # type: ignore[arg-type]
        (index,) = store.index
        place = self.at(store.buffer, index)
        if not self.dims(index):  # a value that is one number may still be a tile of it
            place = f"{place} + tl.full({self.tile(frozenset())}, 0, tl.int32)"
        masks = self.masks(index)
        missing = {d for a in store.axes for d in self.axes[a].dims} - self.dims(index)
        assert not missing, f"a store to {store.buffer.name} writes one place at several points"
        self.write(f"tl.store({place}, {value}{''.join(f', mask={m}' for m in [' & '.join(masks)] if m)})")

    def has_loops(self, block: LoopBlock) -> bool:
        return any(isinstance(s, (MapLoop, ReduceLoop)) for s in block.steps)

    @property
    def row(self) -> int:
        """The dimension of a tile that blocked loops go along."""
        return len(self.shape) - 1

    def terms(self, axis: Axis) -> int:
        """How many terms of a loop are taken at a time."""
        assert isinstance(self.schedule, TritonRows)
        return power_of_two(known(axis.extent), 1, self.schedule.terms)

    def is_whole(self, axis: Axis) -> bool:
        return isinstance(axis.extent, int) and axis.extent <= self.terms(axis)

    @contextmanager
    def blocked(self, axis: Axis) -> Iterator[None]:
        """A loop over blocks of an axis, or its only block."""
        step, extent = self.terms(axis), self.size(axis.extent)
        self.shape = (*self.shape[:-1], step)
        if self.is_whole(axis):
            if axis not in self.whole:
                lane = self.name(self.spread(f"tl.arange(0, {step})", self.row), "r")
                mask = self.name(f"{lane} < {extent}", "m") if axis.extent != step else ""
                self.whole[axis] = Lane(lane, frozenset((self.row,)), mask)
            before = self.axes.get(axis)
            self.axes[axis] = self.whole[axis]
            yield
            self.axes.pop(axis)
            if before is not None:
                self.axes[axis] = before
            return
        start = self.fresh("start")
        stages = getattr(self.schedule, "stages", 1)
        head = f"tl.range(0, {extent}, {step}, num_stages={stages})" if stages > 1 else f"range(0, {extent}, {step})"
        self.write(f"for {start} in {head}:")
        with self.indented():
            lane = self.name(f"{start} + {self.spread(f'tl.arange(0, {step})', self.row)}", "r")
            exact = isinstance(axis.extent, int) and axis.extent % step == 0
            mask = "" if exact else self.name(f"{lane} < {extent}", "m")
            with self.axis(axis, Lane(lane, frozenset((self.row,)), mask)):
                yield

    @contextmanager
    def stepped(self, axis: Axis) -> Iterator[None]:
        """A loop that takes one step of an axis at a time."""
        at = self.fresh("step")
        self.write(f"for {at} in range(0, {self.size(axis.extent)}):")
        with self.indented():
            kind = "tl.int32" if known(axis.extent) < _NARROW else "tl.int64"
            lane = self.name(f"tl.full([], {at}, {kind})", "i")
            with self.axis(axis, Lane(lane)):
                yield

    # reductions

    def reduce_loop(self, loop: ReduceLoop) -> None:
        if self.has_loops(loop.body) or isinstance(self.schedule, Lanes):
            folds = [ReduceFold(self, r, self.tile(self.point_dims)) for r in loop.reduces]
            with self.stepped(loop.axis):
                self.block(loop.body)
                for fold in folds:
                    fold.add(self.typed(fold.node.body), self.axes[loop.axis])
            for fold in folds:
                self.values[fold.node] = fold.finished(rows=False)
            return
        self.shape = (*self.shape[:-1], self.terms(loop.axis))
        tile = self.tile(self.point_dims | {self.row})
        folds = [ReduceFold(self, r, tile, once=self.is_whole(loop.axis)) for r in loop.reduces]
        with self.blocked(loop.axis):
            self.block(loop.body)
            for fold in folds:
                fold.add(self.typed(fold.node.body), self.axes[loop.axis])
        for fold in folds:
            self.values[fold.node] = fold.finished(rows=True)

    def maximum_loop(self, loop: ReduceLoop) -> SumWithMaximum:
        """A maximum, and what a sum of exponentials needs of the same terms."""
        (node,) = loop.reduces
        self.shape = (*self.shape[:-1], self.terms(loop.axis))
        made = SumWithMaximum(self, self.tile(self.point_dims | {self.row}))
        step, extent = self.terms(loop.axis), loop.axis.extent
        many = TOGETHER if known(extent) >= TOGETHER * step else 1
        start = self.fresh("start")
        self.write(f"for {start} in range(0, {self.size(extent)}, {many * step}):")
        exact = isinstance(extent, int) and extent % (many * step) == 0
        with self.indented():
            terms = []
            for i in range(many):
                place = self.spread(f"tl.arange(0, {step})", self.row)
                lane = self.name(f"{start} + {i * step} + {place}" if i else f"{start} + {place}", "r")
                mask = "" if exact else self.name(f"{lane} < {self.size(extent)}", "m")
                with self.axis(loop.axis, Lane(lane, frozenset((self.row,)), mask)):
                    self.block(loop.body)
                    terms.append(made.term(self.typed(node.body), self.axes[loop.axis]))
            made.add(terms)
        self.values[node] = made.highest()
        return made

    @property
    def point_dims(self) -> frozenset[int]:
        """Dimensions of a tile that points are spread over."""
        return frozenset(range(max(1, len(self.shape) - 1)))

    # maps and scans

    def map_loop(self, loop: MapLoop) -> None:
        stepped = self.has_loops(loop.body) or isinstance(self.schedule, Lanes)
        if not stepped:
            self.shape = (*self.shape[:-1], self.terms(loop.axis))
        for scan in loop.scans:
            start = literal(identity(scan.kind, scan.dtype), scan.dtype)
            tile, kind = self.tile(self.point_dims), running(scan.dtype)
            self.carries[scan] = self.name(f"tl.full({tile}, {start}, {kind})", "c")
        if stepped:
            with self.stepped(loop.axis):
                self.block(loop.body)
        else:
            with self.blocked(loop.axis):
                self.block(loop.body)

    def scan(self, node: Scan) -> str:
        """The running reduction in this block or at this step; what comes before it is in its carry."""
        carry, lane = self.carries[node], self.axes[node.axis]
        if not lane.dims:
            after = joined(node.kind, node.dtype, carry, self.value(node.body), self.needs)
            before = self.name(f"{carry} + 0", "b") if node.exclusive else ""
            self.write(f"{carry} = {after}")
            return before or f"{carry} + 0"
        start = literal(identity(node.kind, node.dtype), node.dtype)
        if node.exclusive:  # of what stands one place before
            moved = self.name(f"{lane.text} - 1", "r")
            inside = self.name(f"{lane.mask or f'({lane.text} == {lane.text})'} & ({lane.text} > 0)", "m")
            with self.axis(node.axis, Lane(moved, lane.dims, inside)):
                body = self.typed(node.body)
        else:
            body, inside = self.typed(node.body), lane.mask
        tile = self.tile(self.point_dims | {self.row})
        kind = running(node.dtype)
        block = self.name(f"tl.broadcast_to({body}, {tile}).to({kind})")
        if inside:
            block = self.name(f"tl.where({inside}, {block}, {start}).to({kind})")
        made = self.name(f"{self.scanned(node, block)}.to({kind})")
        whole = self.name(joined(node.kind, node.dtype, carry, made, self.needs))
        last = f"{self.spread(f'tl.arange(0, {self.shape[-1]})', self.row)} == {self.shape[-1] - 1}"
        self.write(f"{carry} = tl.sum(tl.where({last}, {whole}, 0).to({kind}), axis=1, keep_dims=True).to({kind})")
        return f"{whole}.to({register(node.dtype)})"

    def scanned(self, node: Scan, block: str) -> str:
        if node.kind in ("sum", "prod"):
            return f"tl.cum{node.kind}({block}, axis=1)"
        return f"{self.needs(f'scan_{node.kind}_' + ('float' if node.dtype.is_float else 'whole'))}({block})"


def argument_names(buffers: Sequence[Buffer]) -> dict[str, str]:
    """Buffers by the names that they have in the text, where some names mean something else already."""
    names: dict[str, str] = {}
    for buffer in buffers:
        name = re.sub(r"\W", "_", buffer.name)
        while keyword.iskeyword(name) or name in _TAKEN or _SIZE.fullmatch(name) or is_prelude(name):
            name += "_"
        while name in names.values():
            name += "_"
        names[buffer.name] = name
    return names


def running(dtype: DType) -> str:
    """The type that a sum of a type is kept in."""
    if dtype.is_int and dtype.bits < 32:
        return "tl.int32"
    return "tl.float32" if is_small(dtype) else register(dtype)


def joined(kind: str, dtype: DType, a: str, b: str, needs: Callable[[str], str]) -> str:
    """One step of a reduction."""
    if kind in ("sum", "prod"):
        return f"{a} {'+' if kind == 'sum' else '*'} {b}"
    if kind in ("all", "any"):
        return f"{a} {'&' if kind == 'all' else '|'} {b}"
    return emit_scalar(TritonCall(kind, (a, b), (dtype, dtype), dtype, needs))


class ReduceFold:
    """A reduction while its terms come: a tile of running values, one or more for each result."""

    def __init__(self, emitter: TritonEmitter, node: Reduce, tile: str, *, once: bool = False) -> None:
        self.e, self.node, self.tile = emitter, node, tile
        self.dtype = node.body.dtype
        self.picks = node.kind in ("argmax", "argmin")
        kind = {"argmax": "max", "argmin": "min"}.get(node.kind, node.kind)
        start = identity(kind, self.dtype)
        self.start = literal(start, self.dtype)
        self.kind = kind
        made = running(self.dtype) if kind in ("sum", "prod") else register(self.dtype)
        self.type = made
        self.is_only = once and not self.picks  # there is one block of terms: it is what is folded
        self.best = "" if self.is_only else emitter.name(f"tl.full({tile}, {self.start}, {made})", "a")
        self.place = emitter.name(f"tl.full({tile}, {_NONE}, tl.int64)", "p") if self.picks else ""

    def add(self, body: str, lane: Lane) -> None:
        e = self.e
        if self.picks:
            better = f"({self.place} == {_NONE}) | ({body} {'>' if self.kind == 'max' else '<'} {self.best})"
            if self.dtype.is_bool:
                sides = f"{body}.to(tl.int32) {'>' if self.kind == 'max' else '<'} {self.best}.to(tl.int32)"
                better = f"({self.place} == {_NONE}) | ({sides})"
            if self.dtype.is_float:
                better += f" | (({body} != {body}) & ({self.best} == {self.best}))"
            found = e.name(f"({better}) & {lane.mask}" if lane.mask else better, "m")
            e.write(f"{self.best} = tl.where({found}, {body}, {self.best})")
            e.write(f"{self.place} = tl.where({found}, {lane.text}, {self.place}).to(tl.int64)")
            return
        term = body
        if self.type != register(self.dtype):
            term = f"{term}.to({self.type})"
        if self.is_only:
            term = f"tl.broadcast_to({term}, {self.tile})"
        if lane.mask:
            term = f"tl.where({lane.mask}, {term}, {self.start}).to({self.type})"
        if self.is_only:
            self.best = e.name(term, "a")
            return
        joint = joined(self.kind, self.dtype, self.best, term, e.needs)
        e.write(f"{self.best} = {joint}")

    def finished(self, *, rows: bool) -> str:
        """The result; `rows` says that its running values lie along the rows of a tile."""
        e, kind = self.e, "float" if self.dtype.is_float else "whole"
        result = register(self.node.dtype)
        if self.picks:
            place = self.place
            if rows:
                whole = f"{self.best}.to(tl.int32)" if self.dtype.is_bool else self.best
                best = e.name(f"{e.needs(f'row_{self.kind}_{kind}')}({whole})")
                same = f"({whole} == {best})"
                if self.dtype.is_float:
                    same = f"({same} | (({whole} != {whole}) & ({best} != {best})))"
                place = e.name(f"tl.min(tl.where({same}, {place}, {_NONE}), axis=1, keep_dims=True)")
            return e.name(f"tl.where({place} == {_NONE}, 0, {place}).to(tl.int64)")
        best = self.best
        if not rows:
            return e.name(f"{best}.to({result})") if self.type != result else best
        match self.kind:
            case "sum":
                made = f"tl.sum({best}, axis=1, keep_dims=True).to({result})"
            case "prod":
                made = f"{e.needs('row_prod')}({best}).to({result})"
            case "max" | "min":
                made = f"{e.needs(f'row_{self.kind}_{kind}')}({best})"
            case _:
                fold = "min" if self.kind == "all" else "max"
                made = f"(tl.{fold}({best}.to(tl.int32), axis=1, keep_dims=True) != 0)"
        return e.name(made)


def place_points(emitter: TritonEmitter, axes: Sequence[Axis], program: str, block: int, dim: int, prefix: str) -> None:
    """Lanes of a block of points that are spread over axes, the last of them innermost."""
    total = dim_prod([a.extent for a in axes])
    narrow = known(total) < _NARROW - block
    first = f"{program} * {block}" if narrow else f"{program}.to(tl.int64) * {block}"
    point = emitter.name(f"{first} + {emitter.spread(f'tl.arange(0, {block})', dim)}", prefix)
    exact = isinstance(total, int) and total % block == 0
    mask = "" if exact else emitter.name(f"{point} < {emitter.size(total)}", "m")
    dims = frozenset((dim,))
    rest = point
    for at in range(len(axes) - 1, -1, -1):
        if at == 0:
            emitter.axes[axes[at]] = Lane(rest, dims, mask)
            break
        extent = emitter.size(axes[at].extent)
        emitter.axes[axes[at]] = Lane(emitter.name(f"{rest} % {extent}", "i"), dims, mask)
        rest = emitter.name(f"{rest} // {extent}", "i")


def reads_along(kernel: Kernel, points: Sequence[Axis], terms: Sequence[Axis]) -> bool:
    """Whether elements of neighbouring points, not of neighbouring terms, lie side by side in what most axes read."""
    votes: dict[int, int] = {}
    for node in postorder(kernel.roots):
        if isinstance(node, Load):
            steps = linear(node.index[0]).terms
            vote = sum(steps.get(a) == 1 for a in points[-1:]) - sum(steps.get(a) == 1 for a in terms)
            size = len(node.free & {*points, *terms})
            votes[size] = votes.get(size, 0) + vote
    return bool(votes) and votes[max(votes)] > 0


def across(kernel: Kernel, points: Sequence[Axis]) -> Axis | None:
    """The axis that a load without loops is contiguous along, where that is not the last one: a transpose."""
    for node in postorder(kernel.roots):
        if isinstance(node, Load) and node.where is None:
            steps = linear(node.index[0]).terms
            if steps.get(points[-1], 0) not in (0, 1):
                for axis in points[:-1]:
                    if steps.get(axis) == 1:
                        return axis
    return None
