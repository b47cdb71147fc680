"""Finds kernels that are convolutions with channels last, and emits them by the templates with their epilogue.

The kernel of a step says what is computed; the step keeps the `conv_last` that the one sum in it is, for its window.
Pixels of all images are the rows of the contraction, outputs its columns, groups its batch. Weights are packed from
any order of their axes; those of groups side by side become a line for each tap and channel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

from strata.backends.llvm.conv.grouped import emit_beside, fits_beside, plan_beside
from strata.backends.llvm.conv.table import Convolution, ConvWindow, emit_convolution, plan_convolution
from strata.backends.llvm.conv.winograd import (
    TURNED,
    Winograd,
    emit_pack_taps,
    emit_winograd,
    plan_winograd,
    winograd_wins,
)
from strata.backends.llvm.gemm.arith import convert
from strata.backends.llvm.gemm.epilogue import Site
from strata.backends.llvm.gemm.match import FinishedSums, Slot, ceil_div, planned, template_slots
from strata.backends.llvm.gemm.pack_b import PACK_SLOTS, emit_pack_b
from strata.backends.llvm.gemm.spec import Contraction, EpilogueFields
from strata.backends.llvm.ir.builder import IrFunction, IrModule, Value
from strata.backends.llvm.ir.native import each_point, template
from strata.backends.llvm.ir.registers import memory_type
from strata.backends.llvm.loops.values import Context
from strata.config import config
from strata.core import Dim, DType, Target, bounds, dim_prod, divide_exactly, f16, f32, f64, i8, u8
from strata.kernel import (
    Buffer,
    Expr,
    Kernel,
    Load,
    Reduce,
    Scan,
    Store,
    normalize,
    postorder,
    replaced,
    sum_of_products,
)
from strata.lir import Spacing, Step

SUMS = "sums"  # stands for the finished sums in an epilogue
WHOLE_WORD = 4  # bytes of x that a dot product takes at once: those of one tap
FEWEST_PIXELS = 256  # that chunks are cut for, where there may be any number
MOST_RUNS = 128  # runs of a pixel, and taps of a run, that its code is unrolled over


@dataclass(frozen=True, slots=True)
class Read:
    """An operand: its buffer in the kernel, its type, and where its elements lie."""

    buffer: str
    dtype: DType
    shape: tuple[Dim, ...]
    spacing: Spacing

    @property
    def place(self) -> tuple[str, Dim]:
        """The buffer, and where in it the operand starts, in bytes."""
        return self.buffer, self.spacing.start * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ConvKernel:
    """A kernel as a convolution x * w followed by an epilogue: the kernel with the sums as an input."""

    kernel: Kernel  # as it is
    epilogue: Kernel | None  # in normal form; None: the sums are stored
    op: Any  # conv_last
    x: Read
    b: Read  # the weights [*kernel, C / groups, O]
    out: Buffer

    @property
    def rank(self) -> int:
        return len(self.op.stride)

    @property
    def counts(self) -> tuple[Dim, ...]:
        return self.out.shape[1:-1]

    @property
    def pixels(self) -> Dim:
        """Rows: output pixels of all images."""
        return dim_prod(self.out.shape[:-1])

    @property
    def outputs(self) -> int:
        """Columns of one group."""
        return int(self.b.shape[-1]) // self.groups

    @property
    def channels(self) -> int:
        """Channels of one group."""
        return int(self.b.shape[-2])

    @property
    def groups(self) -> int:
        return int(self.op.groups)

    @property
    def is_depthwise(self) -> bool:
        return self.channels == 1 and self.outputs == 1 and self.groups > 1

    @property
    def tiles(self) -> Dim:
        """Tiles of two by two pixels, of all images."""
        return dim_prod([self.out.shape[0], *(ceil_div(count, 2) for count in self.counts)])

    @property
    def weight_strides(self) -> tuple[int, ...]:
        return tuple(int(s) for s in self.b.spacing.strides)

    def slots(self, spec: Contraction, numbers: dict[str, Dim]) -> list[Slot]:
        """(kind, value) of each slot of a template, given its numbers."""
        return template_slots(spec, self.kernel, numbers, self.x.place, ("packed", ""), (self.out.name, 0))

    @property
    def ending(self) -> EpilogueFields:
        """What the planner of a template is told of the epilogue."""
        text, pointers = "", []
        if self.epilogue is not None:
            text = repr(self.epilogue.stores[0].value)
            pointers = [f"p_{b.name}" for b in self.epilogue.inputs if b.name != SUMS]
        numbers = tuple(f"size_{i}" for i in range(len(self.kernel.symbols())))
        return {"epilogue": text, "epilogue_pointers": tuple(pointers), "epilogue_numbers": numbers}

    @property
    def window(self) -> ConvWindow:
        kernel = tuple(int(d) for d in self.b.shape[:-2])
        return ConvWindow(kernel, self.op.stride, self.op.dilation, self.op.input_dilation)


def find_convolution(kernel: Kernel, step: Step) -> ConvKernel | None:
    """The kernel of a step as a convolution with channels last, or None."""
    return find_sliding(kernel, step, "conv_last", "conv_last_filled")


def find_sliding(kernel: Kernel, step: Step, *names: str) -> ConvKernel | None:
    """The kernel of a step as the contraction over windows that an op of one of these names is, or None."""
    node = step.slides
    if node is None or node.op.name not in names or step.views is None or len(kernel.stores) != 1:
        return None
    (store,) = kernel.stores
    sums = [e for e in postorder([store.value]) if isinstance(e, (Reduce, Scan))]
    shape = node.types[0].shape  # of the result, but for axes of size 1
    same = [d for d in store.buffer.shape if d != 1] == [d for d in shape if d != 1]
    if len(sums) != 1 or tuple(store.index) != tuple(store.axes) or not same:
        return None
    sides = _loads_of_product(sums[0])
    if sides is None or not all(isinstance(d, int) for d in node.inputs[1].shape):
        return None
    x, w = (Read(e.buffer.name, v.dtype, v.shape, s) for v, e, s in zip(node.inputs, sides, step.views, strict=True))
    out = replace(store.buffer, shape=shape)
    return ConvKernel(kernel, epilogue_of(kernel, store, sums[0]), node.op, x, w, out)


def _loads_of_product(sums: Expr) -> tuple[Load, Load] | None:
    """What the sum of x * w loads, x first."""
    product = sum_of_products(sums) if isinstance(sums, Reduce) else None
    if product is None:
        return None
    x, w = ([e for e in postorder([side]) if isinstance(e, Load)] for side in (product.left, product.right))
    return (x[0], w[0]) if len(x) == len(w) == 1 and x[0].buffer != w[0].buffer else None


def epilogue_of(kernel: Kernel, store: Store, sums: Expr) -> Kernel | None:
    """The kernel with its sum as an input, in normal form; None where the sum is stored as it is."""
    if store.value is sums:
        return None
    stand_in = Buffer(SUMS, sums.dtype, store.buffer.shape)
    value = replaced((store.value,), {sums: Load(stand_in, tuple(store.axes))})[store.value]
    used = {e.buffer.name for e in postorder([value]) if isinstance(e, Load)}
    inputs = (*(b for b in kernel.inputs if b.name in used), stand_in)
    return normalize(Kernel(kernel.name, inputs, kernel.outputs, (replace(store, value=value),)))


@dataclass(frozen=True, slots=True)
class SlidingPlan:
    """The template chosen for a step that slides a window; as MatrixPlan."""

    matrix: ConvKernel
    convolution: Any
    name: str

    @property
    def spec(self) -> Any:
        return self.convolution.product

    @property
    def pack_name(self) -> str:
        return f"{self.name}_pack"


@dataclass(frozen=True, slots=True)
class ConvPlan(SlidingPlan):
    """The template of a convolution, and the arguments that its two kernels take."""

    convolution: Convolution | Winograd

    @property
    def layout(self) -> str:
        """Weights packed alike share one packed copy."""
        m = self.matrix
        kind = "lines" if self.is_beside else self.spec.panels(m.b.dtype).name
        kind += " winograd" if self.is_winograd else ""
        return f"conv {kind} {m.b.shape} {m.groups} {m.b.spacing}"

    @property
    def is_winograd(self) -> bool:
        return isinstance(self.convolution, Winograd)

    @property
    def is_beside(self) -> bool:
        """Groups are side by side."""
        return isinstance(self.convolution, Convolution) and self.convolution.beside > 0

    def _k(self) -> int:
        """Rows of the packed weights."""
        return (TURNED if self.is_winograd else self.matrix.window.taps) * self.matrix.channels

    def _panel_size(self) -> int:
        m = self.matrix
        return self.spec.panels(m.b.dtype).size(m.outputs, self._k())

    def packed_elements(self) -> int:
        """Elements of the weights once packed."""
        m = self.matrix
        return self._k() * int(m.out.shape[-1]) if self.is_beside else m.groups * self._panel_size()

    def pack_points(self) -> int:
        m = self.matrix
        return self._k() if self.is_beside else self.spec.panels(m.b.dtype).chunks(m.outputs, m.groups)

    def k_stride(self) -> Dim | None:
        """The distance of one k to the next in the weights, where that is one number."""
        m = self.matrix
        sizes, strides = m.b.shape[:-1], m.b.spacing.strides[:-1]
        axes = [(d, s) for d, s in zip(sizes, strides, strict=True) if d != 1]
        for (_, outer), (size, inner) in pairwise(axes):
            if outer != inner * size:
                return None
        return axes[-1][1] if axes else 0

    def pack_arguments(self) -> list[Slot]:
        """(kind, value) of each slot of the packer."""
        m = self.matrix
        last = m.b.spacing.strides[-1]
        numbers: dict[str, Dim] = {
            "n": m.outputs, "k": self._k(), "k_stride": self.k_stride() or 0, "n_stride": last,
            "source_batch": last * m.outputs, "packed_batch": self._panel_size(),
        }  # fmt: skip
        kinds: dict[str, Slot] = {"source": ("buffer", m.b.place), "packed": ("packed", "")}
        return [kinds.get(slot, ("number", numbers.get(slot, 0))) for slot in PACK_SLOTS]

    def arguments(self) -> list[Slot]:
        """(kind, value) of each slot of the matmul."""
        m, spec = self.matrix, self.spec
        width = m.out.shape[-1]
        grouped = not self.is_beside
        numbers: dict[str, Dim] = {
            "m": self._rows(), "n": m.outputs if grouped else width, "k": self._k(), "a_row": 0, "a_k": 1,
            "out_row": width, "out_column": 1, "batch0_extent": m.groups if grouped else 1,
            "batch0_a": m.channels if grouped else 0, "batch0_b": self._panel_size() if grouped else 0,
            "batch0_out": m.outputs if grouped else 0, "x_image": m.x.spacing.strides[0],
        }  # fmt: skip
        for axis in range(m.rank):
            numbers |= {f"size{axis}": m.x.shape[axis + 1], f"count{axis}": m.counts[axis]}
            numbers |= {f"low{axis}": m.op.padding[axis][0], f"x{axis}": m.x.spacing.strides[axis + 1]}
        return m.slots(spec, numbers)

    def _rows(self) -> Dim:
        return self.matrix.tiles if self.is_winograd else self.matrix.pixels

    def points(self) -> Dim:
        """Chunks of the matmul, as Contraction.chunk_count says."""
        m, spec = self.matrix, self.spec
        columns = int(m.out.shape[-1]) if self.is_beside else m.outputs
        parts = -(-columns // (spec.panel_columns * spec.chunk_panels))
        return ceil_div(self._rows(), spec.chunk_rows) * parts * (1 if self.is_beside else m.groups)


def plan_convolution_kernel(found: ConvKernel, name: str, target: Target, *, winograd: bool = True) -> ConvPlan | None:
    """The template and its parameters for the sizes of a kernel, or for their upper bounds; None where none fits.

    Winograd's is taken where it may turn out to be faster, unless it is not to be."""
    window = found.window
    last = found.x.spacing.strides[-1]
    bytes_ = found.x.dtype in (i8, u8)
    if (found.x.dtype not in (f32, f64, f16) and not bytes_) or 0 in found.b.shape:
        return None
    if bytes_ and not found.is_depthwise and found.channels % WHOLE_WORD:
        return None
    if not all(isinstance(s, int) for s in found.b.spacing.strides):
        return None
    if max(window.runs(found.channels, found.groups), window.kernel[-1]) > MOST_RUNS or 0 in found.out.shape:
        return None
    if last != 1 and found.x.shape[-1] != 1:
        return None
    if found.epilogue is not None and not _has_columns(found):
        return None
    width = found.counts[-1]
    fields: dict[str, Any] = {
        "dtype": found.x.dtype, "out": found.out.dtype, "width": width if isinstance(width, int) else None,
        "m_exact": isinstance(found.pixels, int), **found.ending,
    }  # fmt: skip
    pixels = planned(found.pixels)
    target = _with_fitting_vectors(found, target)
    spec: Convolution | Winograd
    codes = {"weights": found.b.dtype, "fill": found.op.outside()}
    if fits_beside(found.channels, found.outputs, found.groups, window, found.x.dtype, target):
        pixel = found.x.spacing.strides[-2]
        fields |= {
            "channels": found.channels,
            "outputs": found.outputs,
            "pixel": pixel if isinstance(pixel, int) else 0,
        }
        spec = plan_beside(pixels, found.groups, window, target, **fields, **codes)
    elif winograd and wins_turned(found) != 0:
        del fields["dtype"], fields["width"]
        fields["m_exact"] = isinstance(found.tiles, int)
        spec = plan_winograd(planned(found.tiles), found.outputs, found.channels, window, target, **fields)
    else:
        fewest = max(bounds(found.pixels)[0] or 0, FEWEST_PIXELS)
        fields |= codes | {"groups": found.groups, "edges": _edges(found), "fewest": fewest}
        spec = plan_convolution(pixels, found.outputs, found.channels, window, target, **fields)
    return ConvPlan(found, spec, name)


def _edges(found: ConvKernel) -> tuple[int, int] | None:
    """The padding before the last axis and its size, where they are known."""
    low, size = found.op.padding[-1][0], found.x.shape[-2]
    return (low, size) if isinstance(low, int) and isinstance(size, int) else None


def wins_turned(found: ConvKernel) -> Dim:
    """1 where Winograd's way is faster, else 0: symbolic where sizes are."""
    if not config().winograd or found.x.dtype is not f32 or found.groups != 1 or found.rank != 2:
        return 0
    size, low = found.x.shape[1], found.op.padding[0][0]
    return winograd_wins(found.window, found.channels, found.outputs, size, found.counts, low)


def _with_fitting_vectors(found: ConvKernel, target: Target) -> Target:
    """Narrower vectors where wide ones are no faster and would be half empty: 24 outputs are 3 of 8, not 2 of 16."""
    if not target.splits_vectors:
        return target
    half = replace(target, vector_bytes=target.vector_bytes // 2)
    beside = fits_beside(found.channels, found.outputs, found.groups, found.window, found.x.dtype, target)
    columns = found.groups * found.outputs if beside else found.outputs
    size = 4 if found.x.dtype in (i8, u8) else found.x.dtype.itemsize
    last = columns % target.lanes(size)
    few = found.is_depthwise and columns <= 96  # 96 of 56 x 56: 0.19 -> 0.17 ms; 512 of 7 x 7: 0.017 -> 0.021
    return half if few or 0 < last <= half.lanes(size) else target


def emit_convolution_kernel(module: IrModule, plan: ConvPlan) -> tuple[str, str]:
    """Adds the packer and the convolution to a module; returns their names."""
    found = plan.matrix
    width, by_groups = int(found.out.shape[-1]), not plan.is_beside and found.groups > 1

    def finish(site: Site, sums: str) -> str:
        group = site.f.mul(site.batch[0], found.outputs) if by_groups else 0
        return ConvEpilogue(site, found, width, site.f.add(site.column, group)).finish(sums)

    epilogue = None if found.epilogue is None else finish
    if isinstance(plan.convolution, Winograd):
        emit_winograd(module, plan.convolution, epilogue, plan.name)
        emit_pack_taps(module, plan.convolution, plan.pack_name, _taps_at(plan))
    elif plan.is_beside:
        emit_beside(module, plan.convolution, epilogue, plan.name)
        _emit_pack_lines(module, plan)
    else:
        emit_convolution(module, plan.convolution, epilogue, plan.name)
        load = None if plan.k_stride() is not None else _weights_at(plan)
        emit_pack_b(module, plan.spec.panels(found.b.dtype), plan.pack_name, load)
    return plan.name, plan.pack_name


def _offset(f: IrFunction, k: Value, plan: ConvPlan) -> Value:
    """Where the k-th row of the weights starts: k counts channels, then taps."""
    sizes, strides = plan.matrix.b.shape[:-1], plan.matrix.weight_strides[:-1]
    total: Value = 0
    for i in reversed(range(len(sizes))):
        if sizes[i] == 1:
            continue
        size = int(sizes[i])
        outer = f.op(f"udiv i64 {k}, {size}") if any(d != 1 for d in sizes[:i]) else 0
        total = f.add(total, f.mul(f.sub(k, f.mul(outer, size)), strides[i]))
        k = outer
    return total


def _weights_at(plan: ConvPlan) -> Any:
    """The load of a packer that reads weights in any order of axes."""
    b, spec, outputs = plan.matrix.b, plan.spec, plan.matrix.outputs
    element, size = memory_type(b.dtype), b.dtype.itemsize
    stride = plan.matrix.weight_strides[-1]

    def load(f: IrFunction, source: str, k: Value, n: Value, lanes: int, mask: str | None) -> str:
        row = f.address(element, source, _offset(f, k, plan))
        type_ = memory_type(b.dtype, lanes)
        value = "zeroinitializer"
        for lane in range(lanes):
            column = f.smin(f.add(n, lane), outputs - 1)
            one = f.load(element, f.address(element, row, f.mul(column, stride)), size)
            value = f.insert(type_, value, one, lane) if lanes > 1 else one
        if mask is not None and lanes > 1:
            value = f.select(type_, mask, value, "zeroinitializer")
        return convert(f, value, b.dtype, spec.b, lanes, spec.target)

    return load


def _taps_at(plan: ConvPlan) -> Any:
    """The load of a packer that reads all taps of a channel, in any order of axes."""
    m = plan.matrix
    element, size, stride = memory_type(m.b.dtype), m.b.dtype.itemsize, m.weight_strides[-1]

    def load(f: IrFunction, channel: Value, output: Value, lanes: int, mask: str | None) -> list[str]:
        source = f.load("ptr", f.address("i64", "%args", PACK_SLOTS.index("source")), 8)
        first = f.address(element, source, f.add(f.mul(channel, m.weight_strides[-2]), f.mul(output, stride)))
        return [vector_at(f, f.address(element, first, away), output, lanes, mask) for away in taps]

    def vector_at(f: IrFunction, place: str, output: Value, lanes: int, mask: str | None) -> str:
        type_ = memory_type(m.b.dtype, lanes)
        if stride == 1:
            return f.load(type_, place, size, mask)
        value = "zeroinitializer"
        for lane in range(lanes):
            step: Value = lane if mask is None else f.smin(lane, f.sub(m.outputs - 1, output))
            one = f.load(element, f.address(element, place, f.mul(step, stride)), size)
            value = f.insert(type_, value, one, lane)
        return value if mask is None else f.select(type_, mask, value, "zeroinitializer")

    taps = [y * m.weight_strides[0] + x * m.weight_strides[1] for y, x in product(range(3), repeat=2)]
    return load


def _emit_pack_lines(module: IrModule, plan: ConvPlan) -> None:
    """The packer for groups side by side: a line of outputs for each tap and channel of a group."""
    b, outputs = plan.matrix.b, int(plan.matrix.b.shape[-1])
    element, size = memory_type(b.dtype), b.dtype.itemsize
    f = template(module, plan.pack_name)
    source, packed = (f.load("ptr", f.address("i64", "%args", PACK_SLOTS.index(s)), 8) for s in ("source", "packed"))

    def tap(k: str, _: list[str]) -> None:
        row = f.address(element, source, _offset(f, k, plan))
        line = f.address(element, packed, f.mul(k, outputs))

        def one(c: str, _: list[str]) -> None:
            value = f.load(element, f.address(element, row, f.mul(c, plan.matrix.weight_strides[-1])), size)
            f.store(element, value, f.address(element, line, c), size)

        f.loop(0, outputs, 1, [], one)

    each_point(f, tap)


def _has_columns(found: ConvKernel) -> bool:
    """Whether the last axis of the epilogue counts columns, or pixels and columns together."""
    axes = found.epilogue.stores[0].axes if found.epilogue is not None else ()
    return bool(axes) and divide_exactly(axes[-1].extent, int(found.out.shape[-1])) is not None


class ConvEpilogue(FinishedSums):
    """The epilogue of a convolution, a kernel with the sums as an input, evaluated on a row of finished sums."""

    def __init__(self, site: Site, found: ConvKernel, width: Dim, column: Value) -> None:
        assert found.epilogue is not None
        (store,) = found.epilogue.stores
        sums = next(e for e in postorder(found.epilogue.roots) if isinstance(e, Load) and e.buffer.name == SUMS)
        self.begin(site, found.epilogue, sums, tuple(found.kernel.symbols()))
        self.context = Context(store.axes[-1], site.lanes, site.mask) if site.lanes > 1 else Context()
        self.place(store, width, site.row, column)
