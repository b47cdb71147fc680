"""A normalized kernel and its schedule as the text of a compute shader."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from strata.backends.wgsl.body import ELEMENTS, WgslBody
from strata.backends.wgsl.library import needed
from strata.backends.wgsl.packed_words import WORD, Words, find_words
from strata.backends.wgsl.schedule import Points, Schedule, WgslRows, choose
from strata.backends.wgsl.tiles import DEPTH, SIDE, TileProduct, WgslTiles, find_product, runs_along
from strata.backends.wgsl.values import TYPES, kind_of, literal, scalar
from strata.core import Dim, bool_
from strata.kernel import (
    Axis,
    Buffer,
    Expr,
    Kernel,
    LoopBlock,
    MapLoop,
    ReduceLoop,
    StoreStep,
    make_nest,
    parallel_chain,
)

FLAG = Buffer("guard flag", bool_, (1,))  # a name that no kernel's text can have
_ENTRY = "        @builtin(local_invocation_index) lane: u32) {\n"
_SHARED = {"b": "u32", "i": "i32", "u": "u32", "f": "f32", "q": "vec2<u32>", "w": "vec2<u32>"}


@dataclass(frozen=True, slots=True)
class Shader:
    """Text, and what a launch has to know: buffers in the order of the bindings, sizes in that of the table after."""

    name: str
    text: str
    buffers: tuple[str, ...]
    written: frozenset[str]
    sizes: tuple[Dim, ...]
    axes: tuple[Dim, ...]  # extents that must not be above the most
    grid: tuple[tuple[tuple[Dim, ...], int], ...]  # extents of loops, and how many of their points go together
    many: int  # of what is left that a workgroup takes
    schedule: Schedule | WgslTiles | Words
    is_guarded: bool = False  # a flag has the binding after all others: where it is not set, nothing is done

    def guarded(self) -> Shader:
        number = len(self.buffers) + bool(self.sizes)
        head, entry, body = self.text.partition(_ENTRY)
        check = (
            "  if (lane == 0u) { guard_word = guard_flag[0]; }\n"
            "  if ((workgroupUniformLoad(&guard_word) & 255u) == 0u) { return; }\n"
        )
        flag = (
            f"@group(0) @binding({number}) var<storage, read> guard_flag: array<u32>;\n"
            "var<workgroup> guard_word: u32;\n"
        )
        return replace(self, text=f"{head}{entry}{check}{body}{flag}", is_guarded=True)


def render(kernel: Kernel, *, halves: bool = False) -> Shader:
    """The shader of one phase; with `halves`, for a GPU that has f16 in memory."""
    return _Renderer(kernel, halves).run()


class _Renderer(WgslBody):
    def __init__(self, kernel: Kernel, halves: bool) -> None:
        self.nest = make_nest(kernel)
        self.product = find_product(self.nest)
        self.schedule: Schedule | WgslTiles | Words = (
            self.product.tiles if self.product is not None else choose(self.nest)
        )
        super().__init__(kernel, self.schedule.size, halves)
        if isinstance(self.schedule, Points):
            self.schedule = find_words(self.nest, self._is_packed) or self.schedule
        self.strips: list[str] = []  # declarations of memory that invocations share

    def run(self) -> Shader:
        chain = parallel_chain(self.nest)[: self.schedule.loops]
        extents = tuple(loop.axis.extent for loop in chain)
        match self.schedule:
            case Points():
                grid: tuple[tuple[tuple[Dim, ...], int], ...] = ((extents, 1),)
                self._entry(chain)
                self._block(self._before(chain))
            case WgslRows():
                grid = ((extents, 1),)
                self._entry(chain)
                self._row(self._before(chain))
            case Words(_, each, many):
                grid = self._by_words(chain, each, many)
            case WgslTiles(_, each):
                assert self.product is not None
                grid = self._tiles(self.product, each, chain)
            case _:
                assert_never(self.schedule)
        written = frozenset(s.buffer.name for s in self.kernel.stores)
        order = [b for b in self.kernel.buffers if b.name in self.used]
        body = "\n".join(self.lines)
        head = [f"// {self.kernel.signature}", f"// schedule: {self.schedule}"]
        if any(map(self._is_half, order)):
            head.append("enable f16;")
        head += [self._binding(n, b, written) for n, b in enumerate(order)]
        if self.sizes:
            rows = -(-len(self.sizes) // 4)
            head.append(f"@group(0) @binding({len(order)}) var<uniform> sizes: array<vec4<i32>, {rows}>;")
        head += [f"var<workgroup> shared_{k}: array<{_SHARED[k]}, {self.schedule.size}>;" for k in self.shared]
        head += self.strips
        main = (
            f"@compute @workgroup_size({self.schedule.size})\n"
            "fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,\n"
            f"{_ENTRY}{body}\n}}\n"
        )
        text = "\n".join([*head, needed(body), main])
        return Shader(
            self.kernel.name, text, tuple(b.name for b in order), written, tuple(self.sizes), tuple(self.extents),
            grid, self.schedule.size if isinstance(self.schedule, (Points, Words)) else 1, self.schedule,
        )  # fmt: skip

    def _binding(self, number: int, buffer: Buffer, written: frozenset[str]) -> str:
        element = "f16" if self._is_half(buffer) else ELEMENTS.get(buffer.dtype.name, "u32")
        if buffer.name not in written:
            return f"@group(0) @binding({number}) var<storage, read> {self._memory(buffer)}: array<{element}>;"
        element = "atomic<u32>" if self._is_packed(buffer) and not self.words else element
        return f"@group(0) @binding({number}) var<storage, read_write> {self._memory(buffer)}: array<{element}>;"

    def _entry(self, chain: list[MapLoop]) -> None:
        """Which point, or row, this is; numbers beyond the last have nothing to do."""
        rows = isinstance(self.schedule, WgslRows)
        number = "group.y * groups.x + group.x"
        self._line(
            f"let point = i32({number});" if rows else f"let point = i32(({number}) * {self.schedule.size}u + lane);"
        )
        total = " * ".join(self._size(loop.axis.extent) for loop in chain) or "1"
        self._line(f"if (point >= {total}) {{ return; }}")
        self._unfold("point", tuple(loop.axis for loop in chain))

    def _before(self, chain: list[MapLoop]) -> LoopBlock:
        """What the blocks around compute, outermost first; gives the block inside."""
        block = self.nest
        for loop in chain:
            for step in block.steps:
                if step is not loop:
                    self._step(step)
            block = loop.body
        return block

    # whole words

    def _by_words(self, chain: list[MapLoop], each: int, many: int) -> tuple[tuple[tuple[Dim, ...], int], ...]:
        """Neighbours along the last loop one after the other, then their words at once."""
        *outer, last = [loop.axis for loop in chain]
        extent = self._size(last.extent)
        self._line(f"let words = ({extent} + {each - 1}) / {each};")
        self._line(f"let point = i32((group.y * groups.x + group.x) * {many}u + lane);")
        total = " * ".join(["words", *(self._size(a.extent) for a in outer)])
        self._line(f"if (point >= {total}) {{ return; }}")
        self._line(f"let first = point % words * {each};")
        self._line("let line = point / words;")
        self._unfold("line", tuple(outer))
        block = self._before(chain)
        stores = [s.store for s in block.steps if isinstance(s, StoreStep)]
        for store in stores:
            if self._is_packed(store.buffer):
                count = each * store.buffer.dtype.itemsize // WORD
                self.words[store] = [self._fresh("word") for _ in range(count)]
                for name in self.words[store]:
                    self._line(f"var {name} = 0u;")
        self.extents[last.extent] = None
        for self.part in range(each):
            place = f"first + {self.part}"
            with self._scope(f"if ({place} < {extent})"):
                self.axes[last] = self._fresh(f"{last.name}_")
                self._line(f"let {self.axes[last]} = {place};")
                self._block(block)
        self.axes[last] = "first"
        for store, names in self.words.items():
            at = self._fresh("at")
            self._line(f"let {at} = {self._address(store.index[0])} / {WORD // store.buffer.dtype.itemsize};")
            for number, name in enumerate(names):
                end = self._size(store.buffer.shape[0])
                guard = f"if (({at} + {number}) * {WORD // store.buffer.dtype.itemsize} < {end}) " if number else ""
                write = f"{self._memory(store.buffer)}[{at} + {number}] = {name};"
                self._line(f"{guard}{{ {write} }}" if guard else write)
        outside = tuple(a.extent for a in outer)
        return ((outside, 1), ((last.extent,), each))

    # matmuls

    def _tiles(self, product: TileProduct, each: int, chain: list[MapLoop]) -> tuple[tuple[tuple[Dim, ...], int], ...]:
        side = SIDE * each
        rows, columns = (" * ".join(self._size(a.extent) for a in axes) for axes in (product.rows, product.columns))
        for name, total in (("rows", rows), ("columns", columns)):
            self._line(f"let {name} = {total};")
            self._line(f"let {name}_tiles = ({name} + {side - 1}) / {side};")
        self._line("let number = i32(group.y * groups.x + group.x);")
        self._line("let first_column = (number % columns_tiles) * " + f"{side};")
        self._line(f"let first_row = (number / columns_tiles % rows_tiles) * {side};")
        self._line("let batch = number / columns_tiles / rows_tiles;")
        total = " * ".join(self._size(a.extent) for a in product.batch) or "1"
        self._line(f"if (batch >= {total}) {{ return; }}")
        self._unfold("batch", product.batch)
        kind = kind_of(product.reduce.body.dtype)
        zero = literal(0, kind)
        self.strips += [f"var<workgroup> {n}: array<{TYPES[kind]}, {side * DEPTH}>;" for n in ("left", "right")]
        names = {(i, j): self._fresh("acc") for i in range(each) for j in range(each)}
        for name in names.values():
            self._line(f"var {name}: {TYPES[kind]} = {zero};")
        self._line(f"let down = i32(lane) / {SIDE};")
        self._line(f"let along = i32(lane) % {SIDE};")
        terms = self._size(product.axis.extent)
        self.extents[product.axis.extent] = None
        with self._scope(f"for (var start = 0; start < {terms}; start += {DEPTH})"):
            self._strip("left", product.left, product.rows, product.axis, "row", side)
            self._strip("right", product.right, product.columns, product.axis, "column", side)
            self._line("workgroupBarrier();")
            with self._scope(f"for (var term = 0; term < {DEPTH}; term += 1)"):
                for i in range(each):
                    self._line(f"let a{i} = left[term * {side} + down + {SIDE * i}];")
                for j in range(each):
                    self._line(f"let b{j} = right[term * {side} + along + {SIDE * j}];")
                for (i, j), name in names.items():
                    term = scalar("mul", kind, product.reduce.dtype, [f"a{i}", f"b{j}"])
                    self._line(f"{name} = {scalar('add', kind, product.reduce.dtype, [name, term])};")
            self._line("workgroupBarrier();")
        for (i, j), name in names.items():
            self._result(product, chain, i, j, name)
        batch = tuple(a.extent for a in product.batch)
        sides = [(tuple(a.extent for a in axes), side) for axes in (product.rows, product.columns)]
        return ((batch, 1), *sides)

    def _strip(self, name: str, factor: Expr, axes: tuple[Axis, ...], axis: Axis, what: str, side: int) -> None:
        """Some terms of some rows (or columns) of a factor, into memory that is shared."""
        before = dict(self.axes)
        with self._scope(f"for (var at = i32(lane); at < {side * DEPTH}; at += {self.schedule.size})"):
            inner = f"at % {DEPTH}", f"at / {DEPTH}"
            term, line = inner if runs_along(factor, axis) else (f"at / {side}", f"at % {side}")
            self._line(f"let term = {term};")
            self._line(f"let line = {line};")
            kind = kind_of(factor.dtype)
            value = self._fresh()
            self._line(f"var {value}: {TYPES[kind]} = {literal(0, kind)};")
            self._line(f"let {what} = first_{what} + line;")
            self._line("let place = start + term;")
            with self._scope(f"if ({what} < {what}s && place < {self._size(axis.extent)})"):
                self._unfold(what, axes)
                self.axes[axis] = "place"
                self._line(f"{value} = {self._value(factor)};")
            self._line(f"{name}[term * {side} + line] = {value};")
        self.axes = before

    def _result(self, product: TileProduct, chain: list[MapLoop], i: int, j: int, name: str) -> None:
        """Everything after the sum, for one of the results of an invocation."""
        before = dict(self.axes)
        row, column = self._fresh("row"), self._fresh("column")
        self._line(f"let {row} = first_row + down + {SIDE * i};")
        self._line(f"let {column} = first_column + along + {SIDE * j};")
        with self._scope(f"if ({row} < rows && {column} < columns)"):
            self._unfold(row, product.rows)
            self._unfold(column, product.columns)
            self.scopes[-1][product.reduce] = name
            for step in self._before(chain).steps:
                if not isinstance(step, ReduceLoop):
                    self._step(step)
        self.axes = before
