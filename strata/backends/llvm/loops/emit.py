"""Emits a loop nest and its schedule as one LLVM function `void kernel(ptr arguments, i64 begin, i64 end)`.

`arguments` is a block of pointers to the inputs, then the outputs, then the symbolic sizes as i64. The function does
the points begin … end - 1 of the parallel loops, taken as one flat index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from strata.backends.llvm.ir.builder import IrModule, Value
from strata.backends.llvm.ir.registers import register_bytes, register_type
from strata.backends.llvm.loops.loops import LoopSegment
from strata.backends.llvm.loops.software_pipeline import delayed
from strata.backends.llvm.loops.transpose_tiles import TransposeTiles
from strata.backends.llvm.loops.values import Ring
from strata.core import Dim, Target, bounds, dim_prod
from strata.kernel import (
    Compute,
    Expr,
    Kernel,
    LoopBlock,
    MapLoop,
    ReduceLoop,
    Schedule,
    StoreStep,
    combs,
    number_loops,
    parallel_chain,
    row_values,
)

_LINE = 64  # bytes of a cache line


def emit_kernel(module: IrModule, kernel: Kernel, nest: LoopBlock, schedule: Schedule, target: Target) -> str:
    """Adds the function of a kernel to a module and returns its name."""
    LoopEmitter(module, kernel, nest, schedule, target).emit()
    return kernel.name


class LoopEmitter(TransposeTiles):
    """The function of one kernel: its loops, around the values that they compute."""

    def __init__(self, module: IrModule, kernel: Kernel, nest: LoopBlock, schedule: Schedule, target: Target) -> None:
        parameters = (("ptr noalias readonly", "arguments"), ("i64", "begin"), ("i64", "end"))
        self.nest, self.schedule = nest, schedule
        self.turn_of_row: Value = 0  # rows from the first of a chunk: which of its row buffers it has
        self.numbers = number_loops(nest)
        # registers of tiles may have to wait on the stack, in their own lines
        attributes = f"nounwind alignstack({target.vector_bytes})" if schedule.tile is not None else "nounwind"
        self.start(module.function(kernel.name, parameters, attributes=attributes), kernel, target)

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
        if any(self.schedule.is_nontemporal(b.name) for b in self.kernel.outputs):
            f.statement("fence seq_cst")  # such stores are not ordered before what tells others of the end
        f.ret()

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
        if self.schedule.tile is not None:
            self._tiles(chain, self.schedule.tile)
            return
        *outer_loops, last = chain
        width = self.size(last.axis.extent)
        first_row = f.op(f"sdiv i64 %begin, {width}")
        end_row = f.op(f"sdiv i64 {f.add(f.sub('%end', 1), width)}, {width}")

        def row(position: str, _: list[str]) -> None:
            with self._scope(*(loop.axis for loop in outer_loops)):
                self._enter(outer_loops, position)
                start = f.mul(position, width)
                low = f.smax(f.sub("%begin", start), 0)
                high = f.smin(f.sub("%end", start), width)
                self._map(last, low, high)

        f.loop(first_row, end_row, 1, (), row)

    def _enter(self, loops: Sequence[MapLoop], position: Value) -> None:
        """Give nested loops their values at a flat position, and do what they do before the loop inside them."""
        f = self.f
        for loop in reversed(loops[1:]):
            extent = self.size(loop.axis.extent)
            self.first[loop.axis] = f.op(f"srem i64 {position}, {extent}")
            position = f.op(f"sdiv i64 {position}, {extent}")
        if loops:
            self.first[loops[0].axis] = position
        for loop in loops:
            self._steps_before(loop.body)

    def _running_block(self, block: LoopBlock) -> Callable[[list[str]], tuple[Value, ...]]:
        """A block as the body of a loop that carries nothing."""

        def body(_: list[str]) -> tuple[Value, ...]:
            self.block(block)
            return ()

        return body

    def _steps_before(self, block: LoopBlock) -> None:
        """What a block does before the one loop in it that is handed out."""
        for at, step in enumerate(block.steps):
            if isinstance(step, (Compute, ReduceLoop)):
                self._step(step, block.steps[at + 1 :])

    def block(self, block: LoopBlock) -> None:
        axis = self.context.axis
        stores = [s.store for s in block.steps if isinstance(s, StoreStep)]
        groups = combs(stores, axis) if axis is not None and self.context.lanes > 1 and len(stores) > 1 else []
        woven = {store: group for group in groups for store in group}
        for at, step in enumerate(block.steps):
            if isinstance(step, StoreStep) and step.store in woven:
                if step.store is woven[step.store][0]:
                    self.store_comb(woven[step.store])
            else:
                self._step(step, block.steps[at + 1 :])

    def _step(self, step: Compute | StoreStep | MapLoop | ReduceLoop, later: Sequence[object]) -> None:
        match step:
            case Compute(node):
                self.value(node)
            case StoreStep(store):
                self.store(store)
            case MapLoop():
                self._map(step, 0, self.size(step.axis.extent))
            case ReduceLoop():
                before = self.filling
                self._stage(step, later)
                self._reduce(step)
                self.filling = before

    def _map(self, loop: MapLoop, low: Value, high: Value) -> None:
        lanes = self.schedule.lanes(self.numbers[id(loop)])
        if loop.scans:
            self._scan(loop, low, high)
            return
        if lanes == 1 or self.context.axis is not None:
            woven = delayed(self, loop)
            if woven is not None:
                woven.emit(low, high)
            else:
                self._serial(loop.axis, low, high, (), self._running_block(loop.body))
            return
        if self.schedule.exchanged(self.numbers[id(loop)]):
            self._exchange(loop, low, high)
            return
        number = self.numbers[id(loop)]
        for segment in self._aligned_segments(loop, low, high, lanes):
            self._vector(loop.axis, segment, (), self._running_block(loop.body), number)

    def _aligned_segments(
        self, loop: MapLoop, low: Value, high: Value, lanes: int, single: int | None = None
    ) -> list[LoopSegment]:
        """Segments of a map; before non-temporal stores, a first one up to the start of a cache line."""
        f = self.f
        stores = [s.store for s in loop.body.steps if isinstance(s, StoreStep)]
        past = next((s for s in stores if self.schedule.is_nontemporal(s.buffer.name)), None)
        if past is None:
            return self._segments(loop, low, high, lanes, single)
        with self._scope(loop.axis):
            self.first[loop.axis] = low
            pointer = self._pointer(past.buffer, self.at_first(past.index[0]))
        address = f.op(f"ptrtoint ptr {pointer} to i64")
        missing = f.binary("and", "i64", f.op(f"sub i64 0, {address}"), str(_LINE - 1))
        missing = f.op(f"udiv i64 {missing}, {past.buffer.dtype.itemsize}")
        start = f.smin(f.add(low, missing), high)
        self._ask_for_end(pointer, past.buffer.dtype.itemsize, f.sub(high, low))
        masked = self.target.has_avx512
        head = LoopSegment(low, start, min(lanes, single or self._single_lanes(loop)) if masked else 1, masked)
        rest = self._segments(loop, start, high, lanes, single)
        return [head, *(replace(s, past=(past.buffer.name,)) for s in rest)]

    def _ask_for_end(self, pointer: str, itemsize: int, count: Value) -> None:
        """Prefetch the last line of a row while the others are stored by non-temporal stores, if the next row has a
        part of it: what is stored there is joined with what it holds."""
        f = self.f
        end = f.address("i8", pointer, f.mul(count, itemsize))
        over = f.binary("and", "i64", f.op(f"ptrtoint ptr {end} to i64"), str(_LINE - 1))
        f.if_(f.compare("ne", "i64", over, 0), lambda: f.prefetch(end, write=True))

    def _stage(self, loop: ReduceLoop, later: Sequence[object]) -> None:
        """Row buffers for what a reduction computes and later loops need again."""
        if not self.schedule.stages(self.numbers[id(loop)]) or self.context.axis is not None:
            return
        self.reserve(loop, later)
        for node in (n for step in later for n in _kept_for(loop, step)):
            self.rows[node] = loop.axis, self.row_buffer(node, self.turn_of_row)
        self.filling = frozenset(self.fillers.get(id(loop), ()))

    def reserve(self, loop: ReduceLoop, later: Sequence[object], room: int = 0) -> list[Expr]:
        """Memory for what a loop keeps and no loop before it does, with some bytes more. Returns what that is."""
        length = bounds(loop.axis.extent)[1]
        assert length is not None, "only bounded rows are staged"
        made = dict.fromkeys(n for step in later for n in _kept_for(loop, step) if n not in self.memory)
        for node in made:
            size = length + self.target.vector_bytes  # a masked last step stores a whole register
            turns = self._turns(loop, [s for s in later if node in _kept_for(loop, s)])
            count = turns * size + room // register_bytes(node.dtype)
            self.memory[node] = Ring(self.f.alloca(register_type(node.dtype), count), size, turns)
            self.fillers.setdefault(id(loop), set()).add(node)
        return list(made)

    def _turns(self, loop: ReduceLoop, later: Sequence[object]) -> int:
        """Row buffers of a value that a loop keeps: for the rows between it and the last loop that needs the value.
        Where that one goes along with it, its row makes way for the next one step by step."""
        mine, others = self.numbers[id(loop)], [self.numbers[id(s)] for s in later]
        rows = max(self.schedule.rows_behind(n) for n in others) - self.schedule.rows_behind(mine)
        along = all(self.schedule.host(n) == self.schedule.host(mine) for n in others)
        return max(1, rows if along else rows + 1)

    def row_buffer(self, node: Expr, turn: Value) -> str:
        """The buffer that a row has for a staged value."""
        f, ring = self.f, self.memory[node]
        slot = turn % ring.turns if isinstance(turn, int) else f.op(f"urem i64 {turn}, {ring.turns}")
        return f.address(register_type(node.dtype), ring.start, f.mul(slot if ring.turns > 1 else 0, ring.size))


def _kept_for(loop: ReduceLoop, step: object) -> list[Expr]:
    return row_values(loop, step) if isinstance(step, (MapLoop, ReduceLoop)) else []


def points(nest: LoopBlock, schedule: Schedule) -> Dim:
    """How many points the parallel loops have in all, or blocks of points."""
    extents = [loop.axis.extent for loop in parallel_chain(nest)[: schedule.parallel.loops]]
    if schedule.tile is not None:
        extents[-2:] = schedule.tile.blocks(*extents[-2:])
    return dim_prod(extents)
