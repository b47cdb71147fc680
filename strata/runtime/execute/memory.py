"""Result memory: blocks that are reused when the last array over them is gone.

Fresh pages are slow to touch for the first time: a training step that returns its updated weights would spend most of
its time in page faults. So large results are laid over recycled blocks, huge pages where the system has them.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from strata.arguments import public
from strata.backends import Executable
from strata.core import HUGE_PAGE, bounds, new_pages, new_rlock
from strata.errors import SymbolError
from strata.lir import Lir, memory_report

SMALL = 32 << 10  # bytes below which NumPy's own allocator is as good
KEEP = 512 << 20  # bytes of free blocks kept in all
NEIGHBOURS = 256 << 10  # bytes from which blocks lie side by side, up to a huge page
REGION = 8 << 20  # bytes that they share


class BlockPool:
    """Free blocks by size class: sizes are rounded up to an eighth of a power of two, so that near ones share."""

    def __init__(self, keep: int = KEEP) -> None:
        self._free: dict[int, list[MemoryBlock]] = {}
        self._held = 0
        self._keep = keep
        self._lock = new_rlock()  # an array may end while it is held
        self._kinds: dict[int, Any] = {}  # of leases, by size class
        self._region = new_pages(1)[:0]  # what is left of memory that blocks share

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An array with arbitrary contents."""
        count = dtype.itemsize
        for d in shape:
            count *= d
        if count < SMALL:
            return np.empty(shape, dtype)
        return self._lease(size_class(count), shape, dtype)

    def maker(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Callable[..., np.ndarray]:
        """What `empty` does for arrays of this size, without working out the size again."""
        count = dtype.itemsize * math.prod(shape)
        return np.empty if count < SMALL else partial(self._lease, size_class(count))

    def _lease(self, size: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """An array over a block. Of all ways to say what its memory belongs to, this one takes the least time."""
        block = self._take(size)
        kind = self._kinds.get(size)
        if kind is None:
            kind = self._kinds[size] = _lease_of(self, size)
        base = kind.from_address(block.address)
        base.block = block
        return np.ndarray(shape, dtype, base)

    def _take(self, size: int) -> MemoryBlock:
        with self._lock:
            blocks = self._free.get(size)
            if blocks:
                self._held -= size
                return blocks.pop()
        return self._new(size)

    def _new(self, size: int) -> MemoryBlock:
        """A separate block; or, where that is too short for a huge page, a place next to others in one."""
        if not NEIGHBOURS <= size < HUGE_PAGE:
            return MemoryBlock(new_pages(size))
        with self._lock:
            if len(self._region) < size:
                self._region = new_pages(REGION)
            memory, self._region = self._region[:size], self._region[size:]
        return MemoryBlock(memory)

    def give(self, block: MemoryBlock, size: int) -> None:
        with self._lock:
            if self._held + size <= self._keep:
                self._free.setdefault(size, []).append(block)
                self._held += size


def size_class(count: int) -> int:
    step = max(4096, 1 << (count.bit_length() - 4))
    return -(-count // step) * step


def _lease_of(pool: BlockPool, size: int) -> Any:
    """The type of what is the base of every array over a block: gives the block back when no array is left."""

    def end(lease: Any) -> None:
        pool.give(lease.block, size)

    return type("Lease", (ctypes.c_char * size,), {"__del__": end})


class MemoryBlock:
    """Memory and where it is."""

    __slots__ = ("address", "memory")

    def __init__(self, memory: np.ndarray) -> None:
        self.memory = memory
        self.address = memory.__array_interface__["data"][0]


RESULTS = BlockPool()
Maker = tuple[Callable[..., np.ndarray], tuple[int, ...], "np.dtype[Any]"]


def makers_of(kinds: Iterable[Any]) -> tuple[Maker, ...]:
    """For each output: how its array is made, its shape and dtype."""
    made = []
    for kind in kinds:
        shape, dtype = kind.static_shape, kind.dtype.np
        made.append((RESULTS.maker(shape, dtype), shape, dtype))
    return tuple(made)


@public
class MemoryReport(str):
    """The memory of a compiled graph in bytes; as text, peak, lower bound and the life of every scratch buffer.

    With symbolic sizes the numbers are those at the upper bounds, None where a size has none.
    """

    __slots__ = ("constants", "inputs", "lower_bound", "outputs", "packed", "params", "scratch", "workspace")

    scratch: int | None  # exactly what one run needs at a time: the plan's arena, and the workspace
    workspace: int | None  # what kernels take beside the plan's buffers, such as packed operands
    lower_bound: int | None  # no plan could need less
    params: int | None
    constants: int
    packed: int  # copies of parameters in the order that kernels read
    inputs: int | None
    outputs: int | None

    @classmethod
    def of(cls, lir: Lir, executable: Executable) -> MemoryReport:
        try:
            placement = lir.placement()
            text = memory_report(lir)
            workspace = executable.workspace_bytes
            scratch = None if workspace is None else placement.arena_size + workspace
            lower = placement.lower_bound
            if workspace:
                text += f"\nand {workspace:,} bytes of workspace for kernels"
        except SymbolError as error:
            text, scratch, lower, workspace = f"unbounded: {error.summary}", None, None, None
        if executable.scratch_bytes is not None:  # planned by whoever compiled the modules
            scratch, lower, workspace = executable.scratch_bytes, executable.scratch_bytes, 0
            text = (
                f"{scratch:,} bytes of scratch memory, as the device's compiler reports it, {len(lir.schedule)} steps"
            )
        made = cls(text)
        made.scratch, made.lower_bound, made.workspace = scratch, lower, workspace
        made.params = _total(lir, "param", "weight")
        made.constants = sum(a.nbytes for a in lir.constants)
        made.packed = executable.packed_bytes
        made.inputs, made.outputs = _total(lir, "input"), _total(lir, "result")
        return made

    def fits_in(self, budget: int) -> int:
        """How many bytes are missing for one run, all counted once; 0 where the budget is enough."""
        parts = (self.scratch, self.params, self.constants, self.packed, self.inputs, self.outputs)
        if any(part is None for part in parts):
            raise SymbolError("a size without an upper bound needs no fixed amount of memory: bind it", code="S155")
        return max(0, sum(part for part in parts if part is not None) - budget)


def _total(lir: Lir, *roles: str) -> int | None:
    total = 0
    for buffer in lir.buffers:
        if buffer.role in roles:
            high = bounds(buffer.type.nbytes)[1]
            if high is None:
                return None
            total += high
    return total
