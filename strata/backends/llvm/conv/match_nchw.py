"""Finds kernels that are convolutions with channels first (NCHW), as `match` does for channels last."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from strata.backends.llvm.conv.match import ConvEpilogue, ConvKernel, SlidingPlan, find_sliding
from strata.backends.llvm.conv.nchw import Border, Planes, emit_planes, plan_planes
from strata.backends.llvm.conv.nchw_direct import Lines, emit_lines, plan_lines
from strata.backends.llvm.conv.table import ConvWindow
from strata.backends.llvm.gemm.epilogue import Site
from strata.backends.llvm.gemm.match import Slot, ceil_div, planned
from strata.backends.llvm.gemm.pack_b import PACK_SLOTS
from strata.backends.llvm.ir.builder import IrFunction, IrModule
from strata.backends.llvm.ir.native import each_point, template
from strata.core import Dim, Target, dim_prod, divide_exactly, f32
from strata.kernel import PRODUCTS, Kernel
from strata.lir import Step


def find_planes(kernel: Kernel, step: Step) -> ConvKernel | None:
    """The kernel of a step as a convolution with channels first, or None."""
    return find_sliding(kernel, step, "conv_first")


@dataclass(frozen=True, slots=True)
class PlanesPlan(SlidingPlan):
    """The template of such a convolution, and the arguments that its two kernels take."""

    convolution: Planes | Lines

    @property
    def layout(self) -> str:
        return f"rows {self.matrix.b.shape} {self.matrix.b.spacing}"

    def packed_elements(self) -> int:
        return self.pack_points() * self.convolution.k

    def pack_points(self) -> int:
        """Outputs."""
        return int(self.matrix.b.shape[0])

    def pack_arguments(self) -> list[Slot]:
        kinds: dict[str, Slot] = {"source": ("buffer", self.matrix.b.place), "packed": ("packed", "")}
        return [kinds.get(slot, ("number", 0)) for slot in PACK_SLOTS]

    def _rows(self) -> Dim:
        return self.matrix.out.shape[0] * self.matrix.out.shape[1]

    def arguments(self) -> list[Slot]:
        """(kind, value) of each slot."""
        m, spec = self.matrix, self.spec
        pixels, strides = dim_prod(m.out.shape[2:]), m.x.spacing.strides
        numbers: dict[str, Dim] = {
            "m": self._rows(), "n": pixels, "k": self.convolution.k, "a_row": 0, "a_k": 1, "out_row": pixels,
            "out_column": 1, "x_image": strides[0], "x_channel": strides[1],
        }  # fmt: skip
        for axis in range(self.convolution.window.rank):
            numbers |= {f"size{axis}": m.x.shape[axis + 2], f"count{axis}": m.out.shape[axis + 2]}
            numbers |= {f"low{axis}": m.op.padding[axis][0], f"x{axis}": strides[axis + 2]}
        return m.slots(spec, numbers)

    def points(self) -> Dim:
        """Chunks."""
        m, conv = self.matrix, self.convolution
        if isinstance(conv, Lines):
            *front, height, width = m.out.shape[2:]
            return dim_prod([m.out.shape[0], *front, ceil_div(height, conv.lines), ceil_div(width, conv.columns)])
        if conv.is_depthwise:
            return ceil_div(self._rows(), conv.planes) * ceil_div(m.out.shape[2], conv.lines)
        return m.out.shape[0] * ceil_div(
            dim_prod(m.out.shape[2:]), conv.product.panel_columns * conv.product.chunk_panels
        )


def plan_planes_kernel(found: ConvKernel, name: str, target: Target) -> PlanesPlan | None:
    """The template and its parameters for the sizes of a kernel, or for their upper bounds; None where none fits."""
    outputs, channels, *kernel = (int(d) for d in found.b.shape)
    if found.x.dtype is not f32 or 0 in found.out.shape:
        return None
    if not all(isinstance(s, int) for s in found.b.spacing.strides):
        return None
    by_line = False
    if found.epilogue is not None:
        axes = found.epilogue.stores[0].axes
        if not axes:
            return None
        by_line = divide_exactly(axes[-1].extent, dim_prod(found.out.shape[2:])) is None
    images, _, *counts = (planned(d) for d in found.out.shape)
    window = ConvWindow(tuple(kernel), found.op.stride, found.op.dilation, found.op.input_dilation)
    fields: dict[str, Any] = {"out": found.out.dtype, **found.ending}
    groups = int(found.op.groups)
    if groups == 1:
        exact = isinstance(found.out.shape[-1], int)
        lines = plan_lines(images, outputs, channels, tuple(counts), window, target, width_exact=exact, **fields)
        if lines is not None:
            return PlanesPlan(found, lines, name)
    if len(kernel) != 2 or (groups > 1 and prod(kernel) > PRODUCTS):  # sums of planes are one block
        return None
    height, width = counts
    # panels of pixels go on from line to line; lines of groups end in idle lanes
    if groups > 1 and target.splits_vectors and 0 < width % target.lanes(4) <= target.lanes(4) // 2:
        target = replace(target, vector_bytes=target.vector_bytes // 2)  # as fast, and fewer idle lanes
    spec = plan_planes(
        images, outputs, channels, (height, width), window, target, groups=groups, by_line=by_line,
        borders=_borders(found), **fields,
    )  # fmt: skip
    return PlanesPlan(found, spec, name)


def _borders(found: ConvKernel) -> tuple[Border, ...]:
    """Of both axes of planes, where all is known."""
    made = []
    for (low, _), size, count in zip(found.op.padding, found.x.shape[2:], found.out.shape[2:], strict=True):
        if not (isinstance(low, int) and isinstance(size, int) and isinstance(count, int)):
            return ()
        made.append(Border(low, size, count))
    return tuple(made)


def emit_planes_kernel(module: IrModule, plan: PlanesPlan) -> tuple[str, str]:
    """Adds the packer and the convolution to a module; returns their names."""
    found = plan.matrix
    plane = dim_prod(found.out.shape[2:])

    def finish(site: Site, sums: str) -> str:
        return ConvEpilogue(site, found, plane, site.column).finish(sums)

    epilogue = None if found.epilogue is None else finish
    if isinstance(plan.convolution, Lines):
        emit_lines(module, plan.convolution, epilogue, plan.name)
    else:
        emit_planes(module, plan.convolution, epilogue, plan.name)
    _emit_pack_rows(module, plan)
    return plan.name, plan.pack_name


def _emit_pack_rows(module: IrModule, plan: PlanesPlan) -> None:
    """The packer: the channels of a tap next to each other, an output a point."""
    m, k = plan.matrix, plan.convolution.k
    f = template(module, plan.pack_name)
    source, packed = (f.load("ptr", f.address("i64", "%args", PACK_SLOTS.index(s)), 8) for s in ("source", "packed"))
    outer, channel, *strides = m.weight_strides
    _, channels, *sizes = (int(d) for d in m.b.shape)

    def output(o: str, _: list[str]) -> None:
        row, to = f.address("float", source, f.mul(o, outer)), f.address("float", packed, f.mul(o, k))
        _copy(f, row, to, [*sizes, channels], [*strides, channel])

    each_point(f, output)


def _copy(f: IrFunction, source: str, to: str, sizes: list[int], strides: list[int]) -> None:
    """Elements at strides, to places next to each other."""
    if not sizes:
        f.store("float", f.load("float", source, 4), to, 4)
        return
    inner = 1
    for size in sizes[1:]:
        inner *= size

    def one(i: str, _: list[str]) -> None:
        place = f.address("float", source, f.mul(i, strides[0]))
        _copy(f, place, f.address("float", to, f.mul(i, inner)), sizes[1:], strides[1:])

    f.loop(0, sizes[0], 1, [], one)
