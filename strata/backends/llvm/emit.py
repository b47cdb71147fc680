"""Kernels as LLVM IR: a nest and its schedule become one function `void kernel(ptr arguments, i64 begin, i64 end)`.

`arguments` is a block of pointers to the inputs, then the outputs, then the symbolic sizes as i64. The function does
the points begin … end - 1 of the parallel loops, taken as one flat index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from strata.backends.llvm.builder import Function, Module, Value, constant, vector, vector_constant
from strata.backends.llvm.emit_reduce import Accumulator
from strata.backends.llvm.emit_scalar import Call, emit_scalar
from strata.backends.llvm.registers import (
    Parts,
    component_bytes,
    deinterleave,
    from_memory,
    gather,
    interleave,
    memory_type,
    register_bytes,
    register_type,
    scatter,
    to_memory,
)
from strata.core import Atom, Dim, DType, Symbol, SymExpr, Target, bounds, dim_prod
from strata.kernel import (
    Axis,
    Block,
    Buffer,
    Compute,
    Const,
    Expr,
    Kernel,
    Load,
    MapLoop,
    Reduce,
    ReduceLoop,
    Scalar,
    Scan,
    Schedule,
    Size,
    Store,
    StoreStep,
    linear,
    number_loops,
    parallel_chain,
    row_values,
    turns,
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a vector loop: its bounds, how many points it does at once, and whether its last step is masked."""

    low: Value
    high: Value
    lanes: int
    masked: bool


@dataclass(frozen=True, slots=True)
class Context:
    """The vector loop around the current place: its axis, its lanes and which of them are alive."""

    axis: Axis | None = None
    lanes: int = 1
    mask: str | None = None

    def lanes_of(self, node: Expr) -> int:
        return self.lanes if self.axis is not None and self.axis in node.free else 1


def emit_kernel(module: Module, kernel: Kernel, nest: Block, schedule: Schedule, target: Target) -> str:
    """Adds the function of a kernel to a module and returns its name."""
    _Emitter(module, kernel, nest, schedule, target).emit()
    return kernel.name


class _Emitter:
    def __init__(self, module: Module, kernel: Kernel, nest: Block, schedule: Schedule, target: Target) -> None:
        parameters = (("ptr noalias readonly", "arguments"), ("i64", "begin"), ("i64", "end"))
        self.nest, self.schedule = nest, schedule
        self.numbers = number_loops(nest)
        self.start(module.function(kernel.name, parameters), kernel, target)

    def start(self, f: Function, kernel: Kernel, target: Target) -> None:
        """The state of an emitter that has emitted nothing yet."""
        self.f, self.kernel, self.target = f, kernel, target
        self.context = Context()
        self.values: dict[Expr, Parts] = {}  # registers of the current context
        self.first: dict[Expr, Value] = {}  # i64 values at the first lane, for addresses
        self.wide: dict[tuple[Expr, int], Parts] = {}
        self.pointers: dict[str, str] = {}
        self.sizes: dict[str, Value] = {}
        self.rows: dict[Expr, tuple[Axis, str]] = {}  # row buffers of staged values
        self.fillers: dict[int, set[Expr]] = {}  # id of a loop -> the staged values that it computes
        self.filling: frozenset[Expr] = frozenset()  # the staged values that the current loop computes
        self.tiles: dict[Expr, list[Parts]] = {}  # turned loads, by step of the tiled loop
        self.turn = 0
        self.running: dict[Scan, tuple[Accumulator, Parts]] = {}
        self.dummy = ""

    def emit(self) -> None:
        f = self.f
        for slot, buffer in enumerate(self.kernel.buffers):
            address = f.address("ptr", "%arguments", slot)
            self.pointers[buffer.name] = f.load("ptr", address, 8, flags=", !invariant.load !{}")
        base = len(self.kernel.buffers)
        for slot, name in enumerate(self.kernel.symbols()):
            self.sizes[name] = f.load("i64", f.address("i64", "%arguments", base + slot), 8)
        chain = parallel_chain(self.nest)[: self.schedule.parallel.loops]
        self._parallel(chain)
        f.ret()

    # sizes

    def size(self, dim: Dim) -> Value:
        """A size as an i64 value."""
        if not isinstance(dim, SymExpr):
            return int(dim)
        key = str(dim)
        if key not in self.sizes:
            total: Value = 0
            for monomial, coefficient in dim.terms:
                product: Value = coefficient
                for atom in monomial:
                    product = self.f.mul(self._size_atom(atom), product)
                total = self.f.add(total, product)
            return total
        return self.sizes[key]

    def _size_atom(self, atom: Atom) -> Value:
        if isinstance(atom, Symbol):
            return self.sizes[atom.name]
        a, b = self.size(atom.a), self.size(atom.b)
        match atom.kind:
            case "min":
                return self.f.smin(a, b)
            case "max":
                return self.f.smax(a, b)
            case "floordiv":
                return self.f.op(f"sdiv i64 {a}, {b}")
            case _:
                return self.f.op(f"srem i64 {a}, {b}")

    # loops

    def _parallel(self, chain: list[MapLoop]) -> None:
        """The handed-out loops: whole rows of the last one, and parts of a row at both ends of the range."""
        f = self.f
        if not chain:
            self.block(self.nest)
            return
        for loop, outer in zip(chain, [self.nest, *(c.body for c in chain)], strict=False):
            if loop is chain[0]:
                self._steps_before(outer)
        if len(chain) == 1:
            self._map(chain[0], "%begin", "%end")
            return
        *outer_loops, last = chain
        width = self.size(last.axis.extent)
        first_row = f.op(f"sdiv i64 %begin, {width}")
        end_row = f.op(f"sdiv i64 {f.add(f.sub('%end', 1), width)}, {width}")

        def row(position: str, _: list[str]) -> None:
            with self._scope(*(loop.axis for loop in outer_loops)):
                rest: Value = position
                for loop in reversed(outer_loops[1:]):
                    extent = self.size(loop.axis.extent)
                    self.first[loop.axis] = f.op(f"srem i64 {rest}, {extent}")
                    rest = f.op(f"sdiv i64 {rest}, {extent}")
                self.first[outer_loops[0].axis] = rest
                for loop in outer_loops:
                    self._steps_before(loop.body)
                start = f.mul(position, width)
                low = f.smax(f.sub("%begin", start), 0)
                high = f.smin(f.sub("%end", start), width)
                self._map(last, low, high)

        f.loop(first_row, end_row, 1, (), row)

    def _steps_before(self, block: Block) -> None:
        for step in block.steps:
            if isinstance(step, Compute):
                self.value(step.node)

    def block(self, block: Block) -> None:
        for at, step in enumerate(block.steps):
            match step:
                case Compute(node):
                    self.value(node)
                case StoreStep(store):
                    self.store(store)
                case MapLoop():
                    self._map(step, 0, self.size(step.axis.extent))
                case ReduceLoop():
                    self._stage(step, block.steps[at + 1 :])
                    self._reduce(step)
                    self.filling = frozenset()

    @contextmanager
    def _scope(self, *axes: Axis) -> Iterator[None]:
        """Inside, the axes have new values, and what depends on them is forgotten; at the end, all of it is."""
        before = self.values, self.first, self.wide, self.context
        bound = frozenset(axes)
        self.values = {n: v for n, v in self.values.items() if not (n.free & bound)}
        self.first = {n: v for n, v in self.first.items() if not (n.free & bound)}
        self.wide = {k: v for k, v in self.wide.items() if not (k[0].free & bound)}
        try:
            yield
        finally:
            self.values, self.first, self.wide, self.context = before

    def _map(self, loop: MapLoop, low: Value, high: Value) -> None:
        lanes = self.schedule.lanes(self.numbers[id(loop)])
        if loop.scans:
            self._scan(loop, low, high)
            return
        if self.schedule.tile(self.numbers[id(loop)]) > 1:
            self._tile(loop, low, high)
            return
        if lanes == 1 or self.context.axis is not None:
            self._serial(loop.axis, low, high, (), lambda _: (self.block(loop.body), ())[1])
            return
        for segment in self._segments(loop, low, high, lanes):
            self._vector(loop.axis, segment, (), lambda _: (self.block(loop.body), ())[1])

    def _tile(self, loop: MapLoop, low: Value, high: Value) -> None:
        """Squares of both loops, each turned in registers; what is left goes the plain way."""
        f, by = self.f, self.schedule.tile(self.numbers[id(loop)])
        inner = next(s for s in loop.body.steps if isinstance(s, MapLoop))
        loads = [s.node for s in inner.body.steps if isinstance(s, Compute) and isinstance(s.node, Load)]
        turned = [n for n in loads if isinstance(n, Load) and turns(n, loop.axis, inner.axis)]
        middle = f.add(low, f.round_down(f.sub(high, low), by))
        whole, *rest = self._segments(inner, 0, self.size(inner.axis.extent), by)

        def square(first: str) -> None:
            with self._scope(loop.axis):
                self.first[loop.axis] = first
                self.tiles = {n: self._turned(n, inner.axis, by) for n in turned}
            each(first)
            self.tiles = {}

        def each(first: str) -> None:
            for self.turn in range(by):
                with self._scope(loop.axis):
                    self.first[loop.axis] = f.add(first, self.turn)
                    self._steps_before(loop.body)
                    self.block(inner.body)

        def column(first: str, _: list[str]) -> None:
            self._vector(inner.axis, whole, (), lambda _: (square(first), ())[1])
            for segment in rest:
                self._vector(inner.axis, segment, (), lambda _: (each(first), ())[1])

        f.loop(low, middle, by, (), column)
        self._serial(loop.axis, middle, high, (), lambda _: (self.block(loop.body), ())[1])

    def _turned(self, node: Load, axis: Axis, by: int) -> list[Parts]:
        """A square of a strided load: rows loaded whole, then interleaved into columns."""
        f = self.f
        stride = self.size(linear(node.index[0]).terms[axis])
        start = self.at_first(node.index[0])
        rows = [
            self._read(node.dtype, self._pointer(node.buffer, f.add(start, f.mul(stride, lane))), by, None)
            for lane in range(by)
        ]
        type_ = register_type(node.dtype, by)
        low = [lane // 2 + (lane % 2) * by for lane in range(by)]
        high = [by // 2 + pick for pick in low]
        count = by
        while count > 1:
            half = by // 2
            rows = [
                tuple(f.shuffle(type_, a, b, picks) for a, b in zip(rows[n], rows[n + half], strict=True))
                for n in range(half)
                for picks in (low, high)
            ]
            count //= 2
        return rows

    def _scan(self, loop: MapLoop, low: Value, high: Value) -> None:
        """A loop in order, with running reductions carried along."""
        accumulators = [Accumulator(self.f, s.kind, s.dtype, self.target) for s in loop.scans]
        widths = [self.context.lanes_of(s) for s in loop.scans]
        carried = [c for a, n in zip(accumulators, widths, strict=True) for c in a.start(n)]

        def body(values: list[str]) -> list[Value]:
            before = self.running
            shares = _shares(accumulators, values)
            self.running = dict(zip(loop.scans, zip(accumulators, shares, strict=True), strict=True))
            self.block(loop.body)
            following = [part for scan in loop.scans for part in self.running[scan][1]]
            self.running = before
            return list(following)

        self._serial(loop.axis, low, high, carried, body)

    def _advance(self, scan: Scan, lanes: int) -> Parts:
        accumulator, state = self.running[scan]
        following = tuple(accumulator.step(state, self.widened(scan.body, lanes), lanes, self.context.mask))
        self.running[scan] = accumulator, following
        return state if scan.exclusive else following

    def _serial(
        self,
        axis: Axis,
        low: Value,
        high: Value,
        carried: Sequence[tuple[str, Value]],
        body: Callable[[list[str]], Sequence[Value]],
    ) -> list[str]:
        def inside(index: str, values: list[str]) -> Sequence[Value]:
            with self._scope(axis):
                self.first[axis] = index
                if self.context.axis is axis:  # a loop over the same axis inside a vector loop: lanes mean nothing here
                    self.context = Context()
                return body(values)

        return self.f.loop(low, high, 1, carried, inside)

    def _vector(
        self,
        axis: Axis,
        segment: Segment,
        carried: Sequence[tuple[str, Value]],
        body: Callable[[list[str]], Sequence[Value]],
    ) -> list[str]:
        f = self.f

        def inside(index: str, values: list[str]) -> Sequence[Value]:
            with self._scope(axis):
                self.first[axis] = index
                mask = None
                if segment.masked:
                    ids = vector("i32", segment.lanes)
                    left = f.op(f"trunc i64 {f.smin(f.sub(segment.high, index), segment.lanes)} to i32")
                    iota = vector_constant("i32", range(segment.lanes))
                    mask = f.compare("ult", ids, iota, f.splat(ids, left))
                self.context = Context(axis, segment.lanes, mask)
                return body(values)

        return f.loop(segment.low, segment.high, segment.lanes, carried, inside)

    def _segments(self, loop: MapLoop | ReduceLoop, low: Value, high: Value, lanes: int) -> list[Segment]:
        """The range by whole steps, then what is left: masked where that is cheap, else by ones."""
        f = self.f
        single = min(lanes, self._single_lanes(loop))
        segments: list[Segment] = []
        widths = [lanes] if self.target.has_avx512 or single == lanes else [lanes, single]
        for width in widths:
            middle = f.add(low, f.round_down(f.sub(high, low), width))
            if middle != low:
                segments.append(Segment(low, middle, width, False))
            low = middle
        if low != high:
            masked = self.target.has_avx512
            segments.append(Segment(low, high, single if masked else 1, masked))
        return segments

    def _single_lanes(self, loop: MapLoop | ReduceLoop) -> int:
        """Lanes that fill one register with the widest element that the loop touches."""
        widest = 1
        stack = [loop.body]
        nodes: list[Expr] = list(loop.reduces) if isinstance(loop, ReduceLoop) else []
        while stack:
            for step in stack.pop().steps:
                match step:
                    case Compute(node):
                        nodes.append(node)
                    case StoreStep(store):
                        nodes.append(store.value)
                    case MapLoop():
                        stack.append(step.body)
                    case ReduceLoop():
                        nodes += step.reduces
                        stack.append(step.body)
        widest = max((register_bytes(n.dtype) for n in nodes), default=4)
        return self.target.lanes(widest)

    def _stage(self, loop: ReduceLoop, later: Sequence[object]) -> None:
        """Row buffers for what a reduction computes and later loops need again."""
        if not self.schedule.stages(self.numbers[id(loop)]) or self.context.axis is not None:
            return
        nodes = [n for step in later if isinstance(step, (MapLoop, ReduceLoop)) for n in row_values(loop, step)]
        length = bounds(loop.axis.extent)[1]
        assert length is not None, "only bounded rows are staged"
        for node in nodes:
            if node not in self.rows:
                # a masked last step stores a whole register
                size = length + self.target.vector_bytes
                self.rows[node] = loop.axis, self.f.alloca(register_type(node.dtype), size)
                self.fillers.setdefault(id(loop), set()).add(node)
        self.filling = frozenset(self.fillers.get(id(loop), ()))

    def _reduce(self, loop: ReduceLoop) -> None:
        accumulators = [Accumulator(self.f, r.kind, r.body.dtype, self.target) for r in loop.reduces]
        lanes = self.schedule.lanes(self.numbers[id(loop)])
        high = self.size(loop.axis.extent)
        if lanes == 1 or self.context.axis is not None:
            results = self._serial_reduce(loop, accumulators, high)
        else:
            results = self._vector_reduce(loop, accumulators, high, lanes)
        for reduce, parts in zip(loop.reduces, results, strict=True):
            self.values[reduce] = parts

    def _serial_reduce(self, loop: ReduceLoop, accumulators: list[Accumulator], high: Value) -> list[Parts]:
        widths = [self.context.lanes_of(r) for r in loop.reduces]
        carried = [c for a, n in zip(accumulators, widths, strict=True) for c in a.start(n)]

        def body(values: list[str]) -> list[Value]:
            return self._accumulate(loop, accumulators, widths, values)

        final = self._serial(loop.axis, 0, high, carried, body)
        return [a.finish(p, n) for a, p, n in zip(accumulators, _shares(accumulators, final), widths, strict=True)]

    def _accumulate(
        self, loop: ReduceLoop, accumulators: list[Accumulator], widths: list[int], values: Sequence[str]
    ) -> list[Value]:
        """The body of a reduction loop; returns the next values of all accumulators."""
        self.block(loop.body)
        following: list[Value] = []
        for reduce, accumulator, width, state in zip(
            loop.reduces, accumulators, widths, _shares(accumulators, values), strict=True
        ):
            mask = self.context.mask if width > 1 else None
            if accumulator.is_argument:
                position = self.widened(loop.axis, width)
                following += accumulator.step(state, self.widened(reduce.body, width), width, mask, position)
            elif accumulator.takes_products and _is_product(reduce.body, self.values):
                assert isinstance(reduce.body, Scalar)
                a, b = (self.widened(x, width) for x in reduce.body.args)
                following += accumulator.step_product(state, a, b, width, mask)
            else:
                following += accumulator.step(state, self.widened(reduce.body, width), width, mask)
        return following

    def _vector_reduce(self, loop: ReduceLoop, accumulators: list[Accumulator], high: Value, lanes: int) -> list[Parts]:
        current: list[Parts] = []
        width = 0
        for segment in self._segments(loop, 0, high, lanes):
            n = segment.lanes
            if not current:
                states = [a.start(n) for a in accumulators]
            else:
                narrowed = [a.narrow(s, width, n) for a, s in zip(accumulators, current, strict=True)]
                states = [a.typed(s, n) for a, s in zip(accumulators, narrowed, strict=True)]
            carried = [c for s in states for c in s]
            widths = [n] * len(accumulators)
            final = self._vector(
                loop.axis,
                segment,
                carried,
                lambda v, w=widths: self._accumulate(loop, accumulators, w, v),  # type: ignore[misc]
            )
            current, width = _shares(accumulators, final), n
        if not current:
            current, width = [tuple(str(v) for _, v in a.start(1)) for a in accumulators], 1
        return [a.finish(a.narrow(s, width, 1), 1) for a, s in zip(accumulators, current, strict=True)]

    # values

    def value(self, node: Expr) -> Parts:
        """Registers of a node: as many lanes as the context has if it varies there, else one."""
        found = self.values.get(node)
        if found is None:
            found = self._make(node)
            self.values[node] = found
        return found

    def widened(self, node: Expr, lanes: int) -> Parts:
        """Registers with the given number of lanes."""
        have = self.context.lanes_of(node)
        if have == lanes:
            return self.value(node)
        if isinstance(node, Const):
            return self._constant(node, lanes)
        key = (node, lanes)
        if key not in self.wide:
            type_ = register_type(node.dtype, lanes)
            self.wide[key] = tuple(self.f.splat(type_, part) for part in self.value(node))
        return self.wide[key]

    def _constant(self, node: Const, lanes: int) -> Parts:
        type_ = register_type(node.dtype, lanes)
        if node.dtype.is_complex:
            value = complex(node.value)
            return constant(type_, value.real), constant(type_, value.imag)
        return (constant(type_, node.value),)  # type: ignore[arg-type]

    def _make(self, node: Expr) -> Parts:
        lanes = self.context.lanes_of(node)
        if node in self.tiles:
            return self.tiles[node][self.turn]
        if node in self.rows and node not in self.filling:
            axis, pointer = self.rows[node]
            address = self.f.address(register_type(node.dtype), pointer, self.first[axis])
            return (self.f.load(register_type(node.dtype, lanes), address, register_bytes(node.dtype)),)
        made = self._compute(node, lanes)
        if node in self.filling:
            axis, pointer = self.rows[node]
            address = self.f.address(register_type(node.dtype), pointer, self.first[axis])
            self.f.store(register_type(node.dtype, lanes), made[0], address, register_bytes(node.dtype))
        return made

    def _compute(self, node: Expr, lanes: int) -> Parts:
        match node:
            case Const():
                return self._constant(node, 1)
            case Size(dim):
                return (str(self.size(dim)),)
            case Axis():
                return self._axis(node, lanes)
            case Load():
                return self._load(node, lanes)
            case Scalar(name, args):
                made = tuple(self.widened(a, lanes) for a in args)
                dtypes = tuple(a.dtype for a in args)
                return emit_scalar(Call(self.f, self.target, name, made, dtypes, node.dtype, lanes))
            case Scan():
                return self._advance(node, lanes)
            case Reduce():
                raise AssertionError(f"{node!r} is used before the loop that computes it")
        raise AssertionError(node)

    def _axis(self, axis: Axis, lanes: int) -> Parts:
        first = self.first[axis]
        if lanes == 1:
            return (str(first),)
        type_ = vector("i64", lanes)
        return (self.f.binary("add", type_, self.f.splat(type_, first), vector_constant("i64", range(lanes))),)

    def at_first(self, node: Expr) -> Value:
        """An i64 node at the first lane."""
        if isinstance(node, Const):
            return int(node.value.real)
        if isinstance(node, Size):
            return self.size(node.dim)
        if node in self.first:
            return self.first[node]
        if self.context.lanes_of(node) == 1 and not _is_index(node):
            return self.value(node)[0]
        assert isinstance(node, Scalar)
        args = [self.at_first(a) for a in node.args]
        match node.name:
            case "add":
                made = self.f.add(*args)
            case "sub":
                made = self.f.sub(*args)
            case "mul":
                made = self.f.mul(*args)
            case _:
                parts = tuple((str(a),) for a in args)
                dtypes = tuple(a.dtype for a in node.args)
                (made,) = emit_scalar(Call(self.f, self.target, node.name, parts, dtypes, node.dtype, 1))
        self.first[node] = made
        return made

    def _stride(self, address: Expr) -> int | None:
        """Elements from one lane to the next where that is one constant; None where lanes go anywhere."""
        axis = self.context.axis
        if axis is None or axis not in address.free or self.context.lanes == 1:
            return 0
        terms = linear(address).terms
        step = terms.get(axis, 0)
        if any(axis in atom.free for atom in terms if atom is not axis) or not isinstance(step, int):
            return None
        return step

    def _load(self, node: Load, lanes: int) -> Parts:
        (address,) = node.index
        stride = self._stride(address)
        if stride == 1:
            return self._load_contiguous(node, lanes)
        if lanes == 1 or (stride == 0 and (node.where is None or self.context.lanes_of(node.where) == 1)):
            return self._load_one(node)
        return self._load_gather(node, lanes)

    def _load_one(self, node: Load) -> Parts:
        f, dtype = self.f, node.dtype
        pointer = self._pointer(node.buffer, self.at_first(node.index[0]))
        if node.where is not None:
            pointer = f.select("ptr", self.value(node.where)[0], pointer, self._nowhere())
        parts = self._read(dtype, pointer, 1, None)
        if node.where is None:
            return parts
        type_ = register_type(dtype)
        condition = self.value(node.where)[0]
        return tuple(f.select(type_, condition, p, constant(type_, 0)) for p in parts)

    def _load_contiguous(self, node: Load, lanes: int) -> Parts:
        pointer = self._pointer(node.buffer, self.at_first(node.index[0]))
        mask = self.context.mask
        if node.where is not None:
            mask = self._both(mask, self.widened(node.where, lanes)[0], lanes)
        return self._read(node.dtype, pointer, lanes, mask)

    def _load_gather(self, node: Load, lanes: int) -> Parts:
        f, dtype = self.f, node.dtype
        mask = self.context.mask
        if node.where is not None:
            mask = self._both(mask, self.widened(node.where, lanes)[0], lanes)
        alive = mask or constant(vector("i1", lanes), 1)
        offsets = self.widened(node.index[0], lanes)[0]
        element = memory_type(dtype)
        step = 2 if dtype.is_complex else 1
        if step == 2:
            offsets = f.binary("mul", vector("i64", lanes), offsets, constant(vector("i64", lanes), 2))
        parts = []
        for at in range(step):
            base = f.address(element, self.pointers[node.buffer.name], at)
            pointers = f.op(f"getelementptr {element}, ptr {base}, <{lanes} x i64> {offsets}")
            loaded = gather(f, vector(element, lanes), pointers, component_bytes(dtype), alive)
            parts.append(from_memory(f, dtype.real if dtype.is_complex else dtype, loaded, lanes, self.target))
        return tuple(parts)

    def _both(self, a: str | None, b: str, lanes: int) -> str:
        return b if a is None else self.f.binary("and", vector("i1", lanes), a, b)

    def _pointer(self, buffer: Buffer, index: Value) -> str:
        element = memory_type(buffer.dtype)
        if buffer.dtype.is_complex:
            index = self.f.mul(index, 2)
        return self.f.address(element, self.pointers[buffer.name], index)

    def _nowhere(self) -> str:
        """Readable memory for loads that are switched off."""
        if not self.dummy:
            self.dummy = self.f.alloca("i8", 64)
        return self.dummy

    def _read(self, dtype: DType, pointer: str, lanes: int, mask: str | None) -> Parts:
        f = self.f
        count = lanes * (2 if dtype.is_complex else 1)
        type_, align = memory_type(dtype, count), component_bytes(dtype)
        if mask is None:
            loaded = f.load(type_, pointer, align)
        else:
            alive = self._doubled(mask, lanes) if dtype.is_complex else mask
            loaded = f.masked_load(type_, pointer, align, alive)
        if dtype.is_complex:
            return deinterleave(f, memory_type(dtype), loaded, lanes)
        return (from_memory(f, dtype, loaded, lanes, self.target),)

    def _doubled(self, mask: str, lanes: int) -> str:
        return self.f.shuffle(vector("i1", lanes), mask, "poison", [lane // 2 for lane in range(2 * lanes)])

    def store(self, store: Store) -> None:
        (address,) = store.index
        f, dtype, axis = self.f, store.buffer.dtype, self.context.axis
        lanes = self.context.lanes if axis is not None else 1
        stride = self._stride(address)
        parts = self.widened(store.value, 1 if stride == 0 else lanes)
        lanes = 1 if stride == 0 else lanes
        component = dtype.real if dtype.is_complex else dtype
        stored = tuple(to_memory(f, component, p, lanes, self.target) for p in parts)
        if stride is not None and stride in (0, 1):
            pointer = self._pointer(store.buffer, self.at_first(address))
            self._write(dtype, stored, pointer, lanes, store.buffer.name)
            return
        offsets = self.widened(address, lanes)[0]
        element = memory_type(dtype)
        if dtype.is_complex:
            offsets = f.binary("mul", vector("i64", lanes), offsets, constant(vector("i64", lanes), 2))
        alive = self.context.mask or constant(vector("i1", lanes), 1)
        for at, part in enumerate(stored):
            base = f.address(element, self.pointers[store.buffer.name], at)
            pointers = f.op(f"getelementptr {element}, ptr {base}, <{lanes} x i64> {offsets}")
            scatter(f, vector(element, lanes), part, pointers, component_bytes(dtype), alive)

    def _write(self, dtype: DType, parts: Parts, pointer: str, lanes: int, name: str) -> None:
        f = self.f
        value, count, mask = parts[0], lanes, self.context.mask if lanes > 1 else None
        if dtype.is_complex:
            value = interleave(f, memory_type(dtype, lanes), parts, lanes)
            count = 2 * lanes
            mask = self._doubled(mask, lanes) if mask else None
        type_, align = memory_type(dtype, count), component_bytes(dtype)
        if mask is not None:
            f.masked_store(type_, value, pointer, align, mask)
        else:
            f.store(type_, value, pointer, align, nontemporal=self.schedule.is_nontemporal(name))


def _shares(accumulators: list[Accumulator], values: Sequence[str]) -> list[Parts]:
    """Loop-carried values dealt out to the accumulators they belong to."""
    result, at = [], 0
    for accumulator in accumulators:
        result.append(tuple(values[at : at + accumulator.parts]))
        at += accumulator.parts
    return result


def _is_product(node: Expr, known: dict[Expr, Parts]) -> bool:
    return isinstance(node, Scalar) and node.name == "mul"


def _is_index(node: Expr) -> bool:
    return isinstance(node, Scalar) and node.name in ("add", "sub", "mul", "floordiv", "mod", "min", "max", "neg")


def points(kernel: Kernel, nest: Block, schedule: Schedule) -> Dim:
    """How many points the parallel loops have in all."""
    return dim_prod([loop.axis.extent for loop in parallel_chain(nest)[: schedule.parallel.loops]])
