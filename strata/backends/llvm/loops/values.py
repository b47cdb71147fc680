"""Values inside a kernel: expressions in registers, sizes, loads and stores (non-temporal where that pays).

A vector loop around the place gives it a context; a value that varies along that loop has as many lanes as the context,
any other has one and is spread over the lanes where they meet.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.backends.llvm.ir.builder import IrFunction, Value, constant, vector, vector_constant
from strata.backends.llvm.ir.float_ops import VectorMath
from strata.backends.llvm.ir.registers import (
    Parts,
    columns_of,
    component_bytes,
    deinterleave,
    from_memory,
    gather,
    interleave,
    memory_type,
    picked,
    register_bytes,
    register_type,
    scatter,
    to_memory,
    woven,
)
from strata.backends.llvm.ir.saturate import rounded_to_code
from strata.backends.llvm.loops.accumulate import Accumulator
from strata.backends.llvm.math.exponentials import exp_below
from strata.backends.llvm.math.scalars import ScalarCall, emit_scalar
from strata.core import Atom, Dim, DType, Symbol, SymExpr, Target, known_le
from strata.errors import CompileError
from strata.kernel import (
    SPREADS,
    Axis,
    Buffer,
    Const,
    Expr,
    Kernel,
    Load,
    Reduce,
    Scalar,
    Scan,
    Schedule,
    Size,
    Store,
    code_of,
    is_below,
    linear,
    need_no_nan,
    postorder,
)

_LINE = 64  # bytes of a cache line
_BLOCK = 64 << 10  # bytes that are prefetched while as many are worked on: a part of any core's own cache
_STREAMS = 4  # runs of a block that are prefetched side by side


@dataclass(frozen=True, slots=True)
class Context:
    """The vector loop around the current place: its axis, its lanes, which of them are alive, and its number.

    Stores to `past` are non-temporal (they bypass the caches): they start at multiples of a cache line."""

    axis: Axis | None = None
    lanes: int = 1
    mask: str | None = None
    loop: int = -1
    past: tuple[str, ...] = ()

    def lanes_of(self, node: Expr) -> int:
        return self.lanes if self.axis is not None and self.axis in node.free else 1


@dataclass(frozen=True, slots=True)
class Ring:
    """A ring of row buffers of one value: where they are, elements from one to the next, how many."""

    start: str
    size: int
    turns: int


class Values:
    """What a place in a kernel knows: registers by expression, pointers, sizes, and the vector loop around it."""

    schedule = Schedule()

    def start(self, f: IrFunction, kernel: Kernel, target: Target) -> None:
        """The state of an emitter that has emitted nothing yet."""
        self.f, self.kernel, self.target = f, kernel, target
        self.leave_nan = need_no_nan(kernel)
        self.context = Context()
        self.values: dict[Expr, Parts] = {}  # registers of the current context
        self.first: dict[Expr, Value] = {}  # i64 values at the first lane, for addresses
        self.wide: dict[tuple[Expr, int], Parts] = {}
        self.loads: dict[tuple[object, ...], Load] | None = None  # by buffer and index, when somebody asks
        self.pointers: dict[str, str] = {}
        self.sizes: dict[str, Value] = {}
        self.rows: dict[Expr, tuple[Axis, str]] = {}  # row buffers of staged values
        self.memory: dict[Expr, Ring] = {}  # where row buffers are
        self.fillers: dict[int, set[Expr]] = {}  # id of a loop -> the staged values that it computes
        self.filling: frozenset[Expr] = frozenset()  # the staged values that the current loop computes
        self.replaced: dict[Expr, Parts] | None = None  # what row buffers had where the current step fills them
        self.tiles: dict[Expr, list[Parts]] = {}  # turned loads, by step of the tiled loop
        self.turn = 0
        self.running: dict[Scan, tuple[Accumulator, Parts]] = {}
        self.scan_lanes = 0  # of the state of running reductions along the vector loop
        self.scan_bases: dict[Scan, Parts] = {}  # what came before the block that a running sum is in
        self.dummy = ""

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
        # Rounded down, as everywhere else: processors round towards 0, and trap at a divisor of 0.
        b = b if known_le(1, atom.b) else self.f.smax(b, 1)
        rest: Value = self.f.op(f"srem i64 {a}, {b}")
        if not known_le(0, atom.a):  # it has the sign of a
            rest = self.f.op(f"srem i64 {self.f.add(rest, b)}, {b}")
        return rest if atom.kind == "mod" else self.f.op(f"sdiv i64 {self.f.sub(a, rest)}, {b}")

    def _advance(self, scan: Scan, lanes: int) -> Parts:
        accumulator, state = self.running[scan]
        if self.context.axis is scan.axis and lanes > 1:
            return self._advance_lanes(scan, lanes)
        mask = self.context.mask if lanes > 1 else None  # one state for all lanes is always needed
        following = tuple(accumulator.step(state, self.widened(scan.body, lanes), lanes, mask))
        self.running[scan] = accumulator, following
        made, base = state if scan.exclusive else following, self.scan_bases.get(scan)
        return made if base is None else accumulator.join(base, made, lanes)

    def _advance_lanes(self, scan: Scan, lanes: int) -> Parts:
        """A running reduction over the lanes of its own loop, one register after the other."""
        f, mask, width = self.f, self.context.mask, self.scan_lanes
        accumulator, state = self.running[scan]
        value = self.widened(scan.body, lanes)
        if mask is not None:
            empty = accumulator.start(lanes)
            value = tuple(f.select(t, mask, v, e) for (t, e), v in zip(empty, value, strict=True))
        found = []
        for first in range(0, lanes, width):
            picks = range(first, first + width)
            typed = accumulator.typed(value, lanes)
            part = value if width == lanes else tuple(f.shuffle(t, v, "poison", picks) for t, v in typed)
            local, whole = accumulator.prefix(part, width, exclusive=scan.exclusive)
            made = accumulator.join(state, local, width)
            base = self.scan_bases.get(scan)
            found.append(made if base is None else accumulator.join(base, made, width))
            state = accumulator.join(state, whole, width)
        self.running[scan] = accumulator, state
        while len(found) > 1:  # side by side again
            found = [
                tuple(
                    f.shuffle(t, a, b, range(2 * width))
                    for (t, a), b in zip(accumulator.typed(x, width), y, strict=True)
                )
                for x, y in zip(found[::2], found[1::2], strict=True)
            ]
            width *= 2
        return found[0]

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
            type_, align = register_type(node.dtype, lanes), register_bytes(node.dtype)
            address = self.f.address(register_type(node.dtype), pointer, self.first[axis])
            if self.replaced is not None:
                self.replaced[node] = (self.f.load(type_, address, align),)
            self.f.store(type_, made[0], address, align)
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
            case Scalar("exp", (x,)) if is_below(x) and (math := self._math(node, lanes)).has_tables:
                return (exp_below(math, self.widened(x, lanes)[0]),)
            case Scalar("cast") if lanes > 1 and (code := code_of(node)) is not None:
                return (rounded_to_code(self.f, code, self.widened(code.x, lanes)[0], lanes),)
            case Scalar(name, args):
                made = tuple(self.widened(a, lanes) for a in args)
                dtypes = tuple(a.dtype for a in args)
                return emit_scalar(ScalarCall(self.f, self.target, name, made, dtypes, node.dtype, lanes))
            case Scan():
                return self._advance(node, lanes)
            case Reduce():
                raise AssertionError(f"{node!r} is used before the loop that computes it")
        raise AssertionError(node)

    def _math(self, node: Expr, lanes: int) -> VectorMath:
        return VectorMath(self.f, register_type(node.dtype, lanes), self.target)

    def _axis(self, axis: Axis, lanes: int) -> Parts:
        if axis not in self.first:
            raise CompileError(f"axis {axis.name} is used outside the loop over it", code="C130")
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
                (made,) = emit_scalar(ScalarCall(self.f, self.target, node.name, parts, dtypes, node.dtype, 1))
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
        if stride == -1:
            return self._load_backwards(node, lanes)
        if stride is not None and stride in SPREADS and node.where is None and not node.dtype.is_complex:
            return self._load_spread(node, lanes, stride)
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
        index = self.at_first(node.index[0])
        pointer = self._pointer(node.buffer, index)
        mask = self.context.mask
        if node.where is not None:
            mask = self._both(mask, self.widened(node.where, lanes)[0], lanes)
        elif mask is None and self.schedule.streams(node.buffer.name, self.context.loop):
            self._ask_ahead(node.buffer, index, lanes)
        return self._read(node.dtype, pointer, lanes, mask)

    def _load_backwards(self, node: Load, lanes: int) -> Parts:
        """Elements side by side, the last one first."""
        pointer = self._pointer(node.buffer, self.f.sub(self.at_first(node.index[0]), lanes - 1))
        mask = self.context.mask
        if node.where is not None:
            mask = self._both(mask, self.widened(node.where, lanes)[0], lanes)
        if mask is not None:
            mask = self._reversed(vector("i1", lanes), mask)
        type_ = register_type(node.dtype, lanes)
        return tuple(self._reversed(type_, part) for part in self._read(node.dtype, pointer, lanes, mask))

    def _reversed(self, type_: str, value: str) -> str:
        return self.f.shuffle(type_, value, "poison", range(self.context.lanes - 1, -1, -1))

    def _load_spread(self, node: Load, lanes: int, stride: int) -> Parts:
        """Elements that are a few apart, from whole registers; nothing after the last element is read."""
        f, first, element = self.f, self.at_first(node.index[0]), memory_type(node.dtype)
        type_, align, mask = vector(element, lanes), component_bytes(node.dtype), self.context.mask
        row = self._whole_row(node, stride) if mask is None else None
        if row is not None:
            start, place = row
            if (start, -lanes) not in self.wide:
                pointer = self._pointer(node.buffer, self.at_first(start.index[0]))
                whole = [f.load(type_, f.address(element, pointer, r * lanes), align) for r in range(stride)]
                self.wide[start, -lanes] = columns_of(f, type_, whole)
            return (from_memory(f, node.dtype, self.wide[start, -lanes][place], lanes, self.target),)
        starts = [r * lanes for r in range(stride)]
        if mask is None:
            starts = [min(at, (lanes - 1) * (stride - 1)) for at in starts]  # none ends after the last element
        loaded = []
        for at in starts:
            pointer = self._pointer(node.buffer, f.add(first, at))
            if mask is None:
                loaded.append(f.load(type_, pointer, align))
                continue
            bits = vector("i1", lanes)
            wanted = [divmod(at + lane, stride) for lane in range(lanes)]
            alive = f.shuffle(bits, mask, "zeroinitializer", [lanes if rest else place for place, rest in wanted])
            loaded.append(f.load(type_, pointer, align, alive))
        places = []
        for lane in range(lanes):
            register = min(lane * stride // lanes, stride - 1)
            places.append((register, lane * stride - starts[register]))
        return (from_memory(f, node.dtype, picked(f, type_, loaded, places), lanes, self.target),)

    def _whole_row(self, node: Load, stride: int) -> tuple[Load, int] | None:
        """The load at the start of a row and the place of this one in it, where every element of the row is loaded."""
        form = linear(node.index[0])
        if not isinstance(form.constant, int) or stride & (stride - 1):
            return None
        place = form.constant % stride
        if self.loads is None:
            found = [n for n in postorder(self.kernel.roots) if isinstance(n, Load) and n.where is None]
            self.loads = {_spot(n, 0): n for n in found}
        row = [self.loads.get(_spot(node, j - place)) for j in range(stride)]
        return (row[0], place) if row[0] is not None and None not in row else None

    def _ask_for(self, buffer: Buffer, index: Value, lanes: int, cache: int) -> None:
        """Prefetch elements from a place on."""
        start = self._pointer(buffer, index)
        for at in range(0, lanes * buffer.dtype.itemsize, _LINE):
            self.f.prefetch(self.f.address("i8", start, at), locality=4 - cache)

    def _ask_ahead(self, buffer: Buffer, index: Value, lanes: int) -> None:
        """Prefetch lines of the next block of memory into the core's own cache.

        As many as are read here, but in another order: a block is fetched as `_STREAMS` runs side by side, each of
        which the processor recognises and follows on its own. One run alone keeps too few reads under way.
        """
        f = self.f
        step = lanes * buffer.dtype.itemsize
        lines = max(1, step // _LINE)
        offset = f.mul(index, buffer.dtype.itemsize)
        run = _BLOCK // _STREAMS
        block = f.add(f.binary("and", "i64", str(offset), str(-_BLOCK)), _BLOCK)
        within = f.binary("and", "i64", f.op(f"lshr i64 {offset}, {_STREAMS.bit_length() - 1}"), str(run - _LINE))
        place = f.add(block, within)
        if lines < _STREAMS:  # this step takes some of the runs, the next steps the others
            turn = f.op(f"lshr i64 {offset}, {(lines * _LINE).bit_length() - 1}")
            turn = f.binary("and", "i64", turn, str(_STREAMS // lines - 1))
            place = f.add(place, f.mul(turn, lines * run))
        for line in range(lines):
            at = f.add(place, (line % _STREAMS) * run + (line // _STREAMS) * _LINE)
            f.prefetch(f.address("i8", self.pointers[buffer.name], at), locality=2)

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
        loaded = f.load(type_, pointer, align, self._doubled(mask, lanes) if mask and dtype.is_complex else mask)
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
            mask = self.context.mask if lanes > 1 else None
            self._write(dtype, stored, pointer, lanes, mask, past=store.buffer.name in self.context.past)
            return
        if stride == -1:
            pointer = self._pointer(store.buffer, f.sub(self.at_first(address), lanes - 1))
            mask = self.context.mask and self._reversed(vector("i1", lanes), self.context.mask)
            turned = tuple(self._reversed(memory_type(component, lanes), part) for part in stored)
            self._write(dtype, turned, pointer, lanes, mask)
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

    def store_comb(self, comb: tuple[Store, ...]) -> None:
        """Stores that fill their buffer without gaps along the vector loop, interleaved."""
        f, lanes = self.f, self.context.lanes
        dtype = comb[0].buffer.dtype
        stored = [to_memory(f, dtype, self.widened(s.value, lanes)[0], lanes, self.target) for s in comb]
        type_, align = memory_type(dtype, lanes), component_bytes(dtype)
        start = self.at_first(comb[0].index[0])
        for number, part in enumerate(woven(f, type_, stored)):
            pointer = self._pointer(comb[0].buffer, f.add(start, number * lanes))
            mask = self.context.mask
            if mask is not None:
                alive = [(number * lanes + lane) // len(comb) for lane in range(lanes)]
                mask = f.shuffle(vector("i1", lanes), mask, "poison", alive)
            f.store(type_, part, pointer, align, mask)

    def _write(
        self, dtype: DType, parts: Parts, pointer: str, lanes: int, mask: str | None, *, past: bool = False
    ) -> None:
        f = self.f
        value, count = parts[0], lanes
        if dtype.is_complex:
            value = interleave(f, memory_type(dtype, lanes), parts, lanes)
            count = 2 * lanes
            mask = self._doubled(mask, lanes) if mask else None
        type_, align = memory_type(dtype, count), component_bytes(dtype)
        if mask is None and past and lanes > 1:
            f.store(type_, value, pointer, min(_LINE, count * align), nontemporal=True)
        else:
            f.store(type_, value, pointer, align, mask)


def _spot(load: Load, further: int) -> tuple[object, ...]:
    """Where a load reads, or some elements further, for comparisons."""
    form = linear(load.index[0])
    return load.buffer, frozenset(form.terms.items()), form.constant + further


def _is_index(node: Expr) -> bool:
    return isinstance(node, Scalar) and node.name in ("add", "sub", "mul", "floordiv", "mod", "min", "max", "neg")
