"""The memory planner: offsets for scratch buffers such that buffers alive at once never overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strata.core import Dim, bounds, substitute
from strata.errors import MemoryLimitError, SymbolError
from strata.lir.ir import ALIGNMENT, Lir, LirBuffer, Placement


@dataclass(frozen=True, slots=True)
class ArenaBlock:
    """Bytes needed from one step to another, both included."""

    name: str
    size: int
    birth: int
    death: int


def place(lir: Lir, binding: Mapping[str, Dim] | None) -> Placement:
    """Place the scratch buffers of a plan for sizes, or for the upper bounds of the symbols when none are given."""
    scratch = [b for b in lir.buffers if b.role == "scratch"]
    mode, step = lir.memory.mode, lir.memory.alignment
    own = scratch if mode == "off" else [b for b in scratch if b.alias is None]
    blocks = [ArenaBlock(b.name, round_up(byte_size(b, binding), step), b.birth, b.death) for b in own]
    if mode == "arena":
        offsets, total = pack(blocks)
    else:
        offsets, total = _in_slots(blocks, [b.type.dtype.name for b in own] if mode == "remap" else None)
    for b in scratch:
        if b.name not in offsets:
            assert b.alias is not None
            offsets[b.name] = offsets[b.alias]
    return Placement(offsets, total, lower_bound(blocks), sum(b.size for b in blocks))


class SizeClasses:
    """Placements of a plan whose sizes change from run to run: sizes that round up to the same powers of two share one.

    To place some hundred buffers takes as long as many a run. Where a class needs more than `most` bytes, and where a
    buffer would be larger than in its class, sizes have a placement of their own.
    """

    def __init__(self, lir: Lir, most: int) -> None:
        self._lir, self._most = lir, most
        self._scratch = [b for b in lir.buffers if b.role == "scratch"]
        self._classes: dict[tuple[tuple[str, int], ...], tuple[Placement, list[int]] | None] = {}

    def placement(self, binding: Mapping[str, int]) -> Placement:
        """Offsets for these sizes."""
        rounded = {name: self._rounded(name, size) for name, size in binding.items()}
        key = tuple(sorted(rounded.items()))
        if key not in self._classes:
            found = place(self._lir, rounded)
            sizes = [byte_size(b, rounded) for b in self._scratch]
            self._classes[key] = (found, sizes) if found.arena_size <= self._most else None
        shared = self._classes[key]
        if shared is None or any(byte_size(b, binding) > n for b, n in zip(self._scratch, shared[1], strict=True)):
            return place(self._lir, binding)
        return shared[0]

    def _rounded(self, name: str, size: int) -> int:
        symbol = self._lir.symbols.get(name)
        most = None if symbol is None else symbol.hi
        up = 1 << max(size - 1, 0).bit_length() if size > 0 else size
        return up if most is None else max(min(up, most), size)


def _in_slots(blocks: Sequence[ArenaBlock], kinds: Sequence[str] | None) -> tuple[dict[str, int], int]:
    """Blocks side by side; with kinds, a block takes over the place of one of its kind and size that is dead."""
    offsets: dict[str, int] = {}
    free: dict[tuple[str, int], list[tuple[int, int]]] = {}  # last step and offset, by kind and size
    top = 0
    for i in sorted(range(len(blocks)), key=lambda i: blocks[i].birth):
        block = blocks[i]
        slots = free.setdefault((kinds[i], block.size), []) if kinds is not None else []
        taken = next((slot for slot in slots if slot[0] < block.birth), None)
        if taken is not None:
            slots.remove(taken)
        at = top if taken is None else taken[1]
        top = max(top, at + block.size)
        offsets[block.name] = at
        slots.append((block.death, at))
    return offsets, top


def byte_size(buffer: LirBuffer, binding: Mapping[str, Dim] | None) -> int:
    size = buffer.type.nbytes
    if binding is not None:
        size = substitute(size, binding)
    if isinstance(size, int):
        return size
    high = bounds(size)[1]
    if high is None:
        raise SymbolError(
            f"buffer {buffer.name} : {buffer.type} has no upper bound: bind its sizes, or give them bounds", code="S155"
        )
    return high


def round_up(size: int, step: int = ALIGNMENT) -> int:
    return -(-size // step) * step


def pack(blocks: Sequence[ArenaBlock], slack: float = 0.0) -> tuple[dict[str, int], int]:
    """Offsets by best fit, largest first; several orders are tried and the smallest arena wins.

    No more are tried once one is larger than the bytes that are alive at once by no more than this part of them.
    """
    orders = (
        sorted(blocks, key=lambda b: (-b.size, b.birth)),
        sorted(blocks, key=lambda b: (-(b.size * (b.death - b.birth + 1)), b.birth)),
        sorted(blocks, key=lambda b: (-(b.death - b.birth), -b.size)),
        sorted(blocks, key=lambda b: (b.birth, -b.size)),
    )
    best: tuple[dict[str, int], int] | None = None
    floor = lower_bound(blocks)
    for order in orders:
        found = _first_fit(order)
        if best is None or found[1] < best[1]:
            best = found
        if best[1] <= floor * (1 + slack):
            break
    assert best is not None
    return best


def _first_fit(order: Sequence[ArenaBlock]) -> tuple[dict[str, int], int]:
    births, deaths = (np.array([getattr(b, name) for b in order]) for name in ("birth", "death"))
    placed: list[tuple[int, int]] = []  # start and end, in this order
    offsets: dict[str, int] = {}
    top = 0
    for count, block in enumerate(order):
        meets = (births[:count] <= block.death) & (deaths[:count] >= block.birth)
        alive = sorted(placed[i] for i in meets.nonzero()[0].tolist())
        offset, best = 0, None
        for start, end in alive:
            gap = start - offset
            if gap >= block.size and (best is None or gap < best[1]):
                best = (offset, gap)
            offset = max(offset, end)
        at = best[0] if best is not None else offset
        offsets[block.name] = at
        placed.append((at, at + block.size))
        top = max(top, at + block.size)
    return offsets, top


def lower_bound(blocks: Sequence[ArenaBlock]) -> int:
    """The most bytes alive at one step."""
    changes: dict[int, int] = {}
    for b in blocks:
        changes[b.birth] = changes.get(b.birth, 0) + b.size
        changes[b.death + 1] = changes.get(b.death + 1, 0) - b.size
    peak = current = 0
    for step in sorted(changes):
        current += changes[step]
        peak = max(peak, current)
    return peak


def check_limit(lir: Lir, limit: int | None) -> None:
    """Refuse a plan whose arena is above the limit, naming the peak and the largest buffers."""
    if limit is None:
        return
    placement = lir.placement()
    if placement.arena_size <= limit:
        return
    scratch = sorted((b for b in lir.buffers if b.role == "scratch"), key=lambda b: -byte_size(b, None))[:3]
    largest = ", ".join(f"{b.name} : {b.type} ({byte_size(b, None):,} bytes)" for b in scratch)
    raise MemoryLimitError(
        f"plan of {lir.name!r} needs {placement.arena_size:,} bytes of scratch memory, the limit is {limit:,}; "
        f"largest: {largest}",
        code="C200",
    )


def memory_report(lir: Lir, binding: Mapping[str, Dim] | None = None) -> str:
    """Peak, lower bound and the lifetime of every scratch buffer."""
    placement = lir.placement(binding)
    lines = [
        f"arena {placement.arena_size:,} bytes, lower bound {placement.lower_bound:,}, {len(lir.schedule)} steps",
        f"{'offset':>12} {'bytes':>12}  steps       buffer",
    ]
    scratch = [b for b in lir.buffers if b.role == "scratch"]
    for b in sorted(scratch, key=lambda b: placement.offsets[b.name]):
        lines.append(
            f"{placement.offsets[b.name]:>12} {byte_size(b, binding):>12}  {b.birth:>4}..{b.death:<4}  "
            f"{b.name} : {b.type}"
        )
    return "\n".join(lines)


def memory_svg(lir: Lir, binding: Mapping[str, Dim] | None = None) -> str:
    """A picture of the arena: steps from left to right, offsets upwards, a rectangle for each buffer."""
    placement = lir.placement(binding)
    steps, size = max(len(lir.schedule), 1), max(placement.arena_size, 1)
    width, height = 900, 420
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="9">']
    for i, b in enumerate(x for x in lir.buffers if x.role == "scratch"):
        x, w = b.birth / steps * width, (b.death - b.birth + 1) / steps * width
        h = round_up(byte_size(b, binding), lir.memory.alignment) / size * height
        y = height - placement.offsets[b.name] / size * height - h
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" '
            f'fill="hsl({i * 47 % 360},60%,70%)" stroke="#444">'
            f"<title>{b.name} : {b.type}</title></rect>"
        )
    return "\n".join([*parts, "</svg>"])
