"""Long scans in blocks, so that more than one invocation works on each.

    total[b] = sum of x[b * L + w] over w in L          block by block, all at once
    upto[b]  = running sum of total                      few
    y[b * L + w] = upto[b - 1] + running sum of x[b * L + w] along w

What is left behind the last block is one more, shorter.
"""

from __future__ import annotations

from math import isqrt

from strata.backends.wgsl.values import JOINS
from strata.core import dim_prod, i64
from strata.kernel import (
    Axis,
    Buffer,
    Const,
    Expr,
    Kernel,
    Load,
    Phases,
    Reduce,
    Scan,
    Store,
    apply,
    identity,
    postorder,
    replaced,
    size,
    substitute_axes,
)

LEAST = 2048  # elements along the axis
LINES = 1024  # that are independent: enough to keep a device busy


def split_scan(kernel: Kernel) -> Phases | None:
    """A normalized kernel of one long running reduction as phases; None where it is something else."""
    scans = [n for n in postorder(kernel.roots) if isinstance(n, Scan)]
    if len(scans) != 1 or len(kernel.stores) != 1 or any(isinstance(n, Reduce) for n in postorder(kernel.roots)):
        return None
    (scan,), (store,) = scans, kernel.stores
    along = scan.position
    if not isinstance(along, Axis) or along is not scan.axis or along not in store.axes:
        return None
    others = tuple(a for a in store.axes if a is not along)
    count, lines = along.extent, dim_prod([a.extent for a in others])
    if not isinstance(count, int) or count < LEAST or not isinstance(lines, int) or not 0 < lines < LINES:
        return None
    if scan.dtype.bits < 32:
        return None  # what a block comes to would be rounded
    return _ScanBlocks(kernel, scan, store, along, others).phases()


class _ScanBlocks:
    def __init__(self, kernel: Kernel, scan: Scan, store: Store, along: Axis, others: tuple[Axis, ...]) -> None:
        self.kernel, self.scan, self.store, self.along, self.others = kernel, scan, store, along, others
        assert isinstance(along.extent, int)
        self.length = isqrt(along.extent)
        self.blocks, self.rest = divmod(along.extent, self.length)
        self.block, self.within = Axis(f"{along.name}_b", self.blocks), Axis(f"{along.name}_w", self.length)
        shape = (dim_prod([self.blocks, *(a.extent for a in others)]),)
        self.totals, self.upto = (Buffer(f"part{n}", scan.dtype, shape) for n in (0, 1))

    def phases(self) -> Phases:
        kind, axes = self.scan.kind, (*self.others, self.block)
        first = self._body(self.block * self.length + self.within)
        total = Reduce(kind, (self.within,), first)
        running = Scan(kind, self.block, Load(self.totals, (self._place(self.block),)), self.block)
        kernels = [
            self._named("totals", (self.totals,), Store(self.totals, axes, (self._place(self.block),), total)),
            self._named("upto", (self.upto,), Store(self.upto, axes, (self._place(self.block),), running)),
            self._named("blocks", self.kernel.outputs, self._store((self.block, self.within), self._in_block())),
        ]
        if self.rest:
            kernels.append(self._named("rest", self.kernel.outputs, self._behind()))
        return Phases(tuple(kernels), (self.totals, self.upto))

    def _named(self, name: str, outputs: tuple[Buffer, ...], store: Store) -> Kernel:
        known = (*self.kernel.inputs, self.totals, self.upto)
        used = {n.buffer for n in postorder((*store.index, store.value)) if isinstance(n, Load)}
        return Kernel(f"{self.kernel.name}_{name}", tuple(b for b in known if b in used), outputs, (store,))

    def _place(self, block: Expr) -> Expr:
        """Where a block of a line has its element of a buffer in between."""
        place: Expr = Const(0, i64)
        for axis in self.others:
            place = place * size(axis.extent) + axis
        return place * self.blocks + block

    def _body(self, at: Expr) -> Expr:
        return substitute_axes((self.scan.body,), {self.along: at})[self.scan.body]

    def _in_block(self) -> tuple[Expr, Expr]:
        at = self.block * self.length + self.within
        own = Scan(self.scan.kind, self.within, self._body(at), self.within, self.scan.exclusive)
        later = apply("gt", self.block, Const(0, i64))
        before = Load(self.upto, (self._place(self.block) - 1,), later)
        start = apply("select", later, before, Const(identity(self.scan.kind, self.scan.dtype), self.scan.dtype))
        return at, apply(JOINS[self.scan.kind], start, own)

    def _behind(self) -> Store:
        axis = Axis(f"{self.along.name}_r", self.rest)
        at = axis + self.blocks * self.length
        own = Scan(self.scan.kind, axis, self._body(at), axis, self.scan.exclusive)
        before = Load(self.upto, (self._place(size(self.blocks - 1)),))
        return self._store((axis,), (at, apply(JOINS[self.scan.kind], before, own)))

    def _store(self, axes: tuple[Axis, ...], made: tuple[Expr, Expr]) -> Store:
        """The store with the scanned axis, and the scan, replaced."""
        at, value = made
        done = replaced((*self.store.index, self.store.value), {self.scan: value, self.along: at})
        kept = tuple(a for a in self.store.axes if a is not self.along)
        return self.store.rebuilt(done, (*kept, *axes))
