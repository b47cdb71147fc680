"""Matmuls: contractions of `strata.kernel` that the matmul template takes, and their code with the epilogue.

The template reads both factors at affine addresses, and has one axis of rows, of columns and of terms: other rows and
columns are batches. A kernel may hold two sums that differ only in where B starts: halves of a wide matmul, as gated
layers multiply them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

from strata.backends.llvm.gemm.arith import convert, is_multiplied
from strata.backends.llvm.gemm.driver import emit_contraction
from strata.backends.llvm.gemm.epilogue import Site
from strata.backends.llvm.gemm.pack_b import PACK_SLOTS, emit_pack_b
from strata.backends.llvm.gemm.planning import (
    LOOP_CHUNK_SECONDS,
    PACK_SECONDS,
    in_rows,
    plan_contraction,
    with_ending,
    with_half_tail,
)
from strata.backends.llvm.gemm.spec import BYTES, CHUNK_SECONDS, Contraction, ceil_div
from strata.backends.llvm.gemm.tiles import even_grain
from strata.backends.llvm.ir.builder import IrModule, Value
from strata.backends.llvm.ir.registers import from_memory, to_memory
from strata.backends.llvm.loops.emit import LoopEmitter
from strata.backends.llvm.loops.values import Context
from strata.core import Dim, DType, Target, bounds, dim_max, dim_min, dim_prod, divide_exactly, i8, i64, u8
from strata.kernel import (
    Axis,
    Const,
    Expr,
    Kernel,
    Load,
    Reduce,
    Scalar,
    Scan,
    Store,
    SumOfProducts,
    axis_roles,
    find_contraction,
    linear,
    normalize,
    postorder,
    substitute_axes,
    sum_of_products,
    with_nodes,
)

# an argument: ("buffer", (name, bytes)), ("packed", ""), ("symbol", name) or ("number", size)
Slot = tuple[str, Any]
ROWS_ALONG = 12  # rows for which a matrix that lies transposed is not worth its packing
COLUMNS_ALONG = 8  # at most, of such a matrix, are read beside each other
UNBOUNDED_ROWS = 4096  # rows to plan for when their number has no upper bound


@dataclass(frozen=True, slots=True)
class Operand:
    """A buffer read at base + the sum of stride * axis."""

    buffer: str
    dtype: DType
    base: Dim
    strides: dict[Axis, Dim]

    @property
    def place(self) -> tuple[str, Dim]:
        """The buffer, and where in it the operand starts, in bytes."""
        return self.buffer, self.base * self.dtype.itemsize

    def stride(self, axis: Axis | None) -> Dim:
        return 0 if axis is None else self.strides.get(axis, 0)


@dataclass(frozen=True, slots=True)
class MatrixKernel:
    """A kernel as a matmul: its axes by role, its operands, and the reduction that its epilogue starts from."""

    kernel: Kernel  # in normal form
    sums: Reduce
    a: Operand
    b: Operand
    out: Operand
    rows: Axis | None
    columns: Axis | None
    inner: Axis
    batch: tuple[Axis, ...]
    along: tuple[tuple[Dim, str], ...] = ()  # 1 where a matrix may be read along its rows, else 0; its buffer
    second: Reduce | None = None  # the other matmul of a pair
    apart: Dim = 0  # how far after B's start its B starts, in elements

    def extent(self, axis: Axis | None) -> Dim:
        return 1 if axis is None else axis.extent


@lru_cache(maxsize=64)
def find_matmul(kernel: Kernel) -> MatrixKernel | None:
    """The kernel as a matmul, or None."""
    form = find_contraction(normalize(kernel))
    if form is None or len(form.kernel.stores) != 1 or len(form.sums) > 2:
        return None
    normal = form.kernel
    (store,) = normal.stores
    out = _affine(store.buffer.name, store.buffer.dtype, store.index[0])
    first, *others = map(_factors, form.sums)
    if out is None or first is None or None in others:
        return None
    (a, b), sums = first, form.sums[0]
    (inner,) = sums.terms
    row, column = (axes[-1] if axes else None for axes in (form.rows, form.columns))
    if row is None and column is not None and _overlaps(b, column, inner):
        return None
    # rows and columns that the output keeps apart from the others: heads, for one
    batch = tuple(x for x in store.axes if x is not row and x is not column)
    roles = _roles(kernel, normal)
    column = Axis("single", 1) if column is None and roles.is_matrix else column
    found = MatrixKernel(normal, sums.node, a, b, out, row, column, inner, batch, roles.along)
    return _paired(found, form.sums[1], *others) if others else found


@dataclass(frozen=True, slots=True)
class _Roles:
    """What a matmul is before axes of one element are dropped: the order of its sums is found from it."""

    is_matrix: bool  # a factor has its own axes
    along: tuple[tuple[Dim, str], ...] = ()


def _roles(kernel: Kernel, normal: Kernel) -> _Roles:
    """A sum is a dot product where few rows are multiplied by a matrix that it goes along, a matrix by one column,
    or a row by a column; else terms are added one after the other. What counts are sizes, known or not.

    Axes of the result that a reshape has put together are apart in the normal form only."""
    store = kernel.stores[0]
    sums = next((n for n in postorder([store.value]) if isinstance(n, Reduce)), None)
    if kernel is not normal and sums is not None and any(_divides(n, sums.axes) for n in postorder([sums.body])):
        return _roles(normal, normal)
    product = sum_of_products(sums) if sums is not None and sums.dtype.is_float and len(kernel.stores) == 1 else None
    if product is None:
        return _Roles(is_matrix=False)
    product = product.across(store.axes)
    left, right = (_through_cast(x) for x in (product.left, product.right))
    _, *own = axis_roles(store.axes, left, right)
    if not isinstance(left, Load) or not isinstance(right, Load) or not any(own):
        return _Roles(is_matrix=False)
    rows, columns = (dim_prod([a.extent for a in axes]) for axes in own)
    alone, single = _is_at_most(rows * columns, 1), _is_at_most(columns, 1)
    found: list[tuple[Dim, str]] = [(alone, "")]
    lies, behind = _lies_along(right, product.terms)
    if behind.isdisjoint(own[1]):  # else there is one column
        found.append((_is_at_most(rows, ROWS_ALONG) * (1 - single) * lies, right.buffer.name))
    lies, behind = _lies_along(left, product.terms)
    if not behind or dim_prod([a.extent for a in own[0] if a not in behind]) != 1:  # else there is one row
        found.append(((single - alone) * lies, left.buffer.name))
    return _Roles(is_matrix=True, along=tuple((where, name) for where, name in found if where != 0))


def _divides(node: Expr, summed: Sequence[Axis]) -> bool:
    """Whether a load divides an axis that is not summed over, as reshaped values do."""
    indices = node.index if isinstance(node, Load) else ()
    atoms = [atom for index in indices for atom in linear(index).terms if not isinstance(atom, Axis)]
    return any(not atom.free <= set(summed) for atom in atoms)


def _is_at_most(size: Dim, most: int) -> Dim:
    """1 where it is, else 0."""
    return dim_max(0, dim_min(1, most + 1 - size))


def _lies_along(side: Load, axes: Sequence[Axis]) -> tuple[Dim, frozenset[Axis]]:
    """1 where neighbours in memory are terms of one sum, else 0; and the axes of which there is one element then."""
    where: Dim = 1
    behind: frozenset[Axis] = frozenset()
    for index, extent in zip(reversed(side.index), reversed(side.buffer.shape), strict=True):
        near = [atom for atom, step in linear(index).terms.items() if step == 1 and atom.free]
        if near and all(atom.free & set(axes) for atom in near):
            return where, behind
        where, behind = where * _is_at_most(extent, 1), behind | index.free
        if where == 0:
            break
    return 0, behind


def _factors(sums: SumOfProducts) -> tuple[Operand, Operand] | None:
    """A and B, where the template multiplies them: along one axis, in types that it has."""
    left, right = (_operand(_through_cast(e)) for e in (sums.left, sums.right))
    if left is None or right is None or sums.node.axes != sums.terms or len(sums.terms) != 1:
        return None
    if left.dtype is not right.dtype and not {left.dtype, right.dtype} <= {i8, u8}:
        return None
    dtype, inner = sums.node.dtype, sums.terms[0]
    if dtype.accumulator is not dtype or inner not in left.strides or inner not in right.strides:
        return None
    plain = dtype.is_complex or (is_multiplied(left.dtype) and is_multiplied(right.dtype))
    return (left, right) if plain else None


def _paired(first: MatrixKernel, sums: SumOfProducts, factors: tuple[Operand, Operand] | None) -> MatrixKernel | None:
    """Two matmuls of one A with parts of one B, which all batches share."""
    if factors is None or sums.terms != (first.inner,) or factors[0] != first.a:
        return None
    one, other = first.b, factors[1]
    if replace(one, base=0) != replace(other, base=0) or any(a in one.strides for a in first.batch):
        return None
    return replace(first, second=sums.node, apart=other.base - one.base)


def _through_cast(e: Expr) -> Expr:
    """What is cast while it is packed; a float that becomes an integer saturates, which is not done there."""
    if not isinstance(e, Scalar) or e.name != "cast" or (e.args[0].dtype.is_float and e.dtype.is_int):
        return e
    return e.args[0]


def _operand(e: Expr) -> Operand | None:
    if not isinstance(e, Load) or e.where is not None:
        return None
    return _affine(e.buffer.name, e.dtype, e.index[0])


def _affine(name: str, dtype: DType, address: Expr) -> Operand | None:
    form = linear(address)
    if not all(isinstance(atom, Axis) for atom in form.terms):
        return None
    return Operand(name, dtype, form.constant, {a: c for a, c in form.terms.items() if isinstance(a, Axis)})


def _overlaps(side: Operand, column: Axis, inner: Axis) -> bool:
    """Whether columns share most of their elements, as the windows of a filter do: packed, each would be a copy.

    The columns of a matrix whose rows are contiguous start near each other too, and share nothing.
    """
    step, stride, length = side.strides[column], side.strides[inner], inner.extent
    if not (isinstance(step, int) and isinstance(stride, int) and isinstance(length, int)):
        return False
    return step % stride == 0 and 2 * abs(step) <= abs(stride) * length


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """The template chosen for a contraction, and the arguments that its two kernels take."""

    matrix: MatrixKernel
    spec: Contraction
    name: str

    @property
    def pack_name(self) -> str:
        return f"{self.name}_pack"

    @property
    def layout(self) -> str:
        """Weights packed alike share one packed copy."""
        return f"{self.spec.panels(self.matrix.b.dtype).name} {self.pack_arguments()}"

    def packed_elements(self) -> Dim:
        """Elements of B once packed, all batches that differ included; 0 where it is read in place."""
        return 0 if self.spec.b_rows else self.panel_size() * self.pack_count()

    def panel_size(self) -> Dim:
        panels = self.spec.panels(self.matrix.b.dtype)
        return panels.elements(self.matrix.extent(self.matrix.columns), self.matrix.inner.extent)

    def _b_batch(self) -> list[Axis]:
        return [a for a in self.matrix.batch if a in self.matrix.b.strides]

    def pack_count(self) -> Dim:
        """Matrices of B to pack."""
        return dim_prod([a.extent for a in self._b_batch()]) * self.spec.matrices

    def pack_points(self) -> Dim:
        panels = self.spec.panels(self.matrix.b.dtype)
        return self.pack_count() * ceil_div(self.matrix.extent(self.matrix.columns) * panels.parts, panels.columns)

    def packs_in_one_go(self) -> bool:
        """Whether the batches of B lie at one distance from each other, as the packer wants them."""
        axes = self._b_batch()
        for outer, inner in pairwise(axes):
            if self.matrix.b.strides[outer] != self.matrix.b.strides[inner] * inner.extent:
                return False
        return True

    def pack_arguments(self) -> list[Slot]:
        """(kind, value) of each slot of the packer: a buffer's name, the packed region, or a number."""
        m, axes = self.matrix, self._b_batch()
        numbers: dict[str, Dim] = {
            "n": m.extent(m.columns), "k": m.inner.extent, "k_stride": m.b.stride(m.inner),
            "n_stride": m.b.stride(m.columns),
            "source_batch": m.b.strides[axes[-1]] if axes else m.apart, "packed_batch": self.panel_size(),
        }  # fmt: skip
        slots: list[Slot] = []
        for slot in PACK_SLOTS:
            if slot == "source":
                slots.append(("buffer", m.b.place))
            elif slot == "packed":
                slots.append(("packed", ""))
            else:
                slots.append(("number", numbers[slot]))
        return slots

    def arguments(self) -> list[Slot]:
        """(kind, value) of each slot of the matmul."""
        m, spec = self.matrix, self.spec
        numbers: dict[str, Dim] = {
            "m": m.extent(m.rows), "n": m.extent(m.columns), "k": m.inner.extent, "a_row": m.a.stride(m.rows),
            "a_k": m.a.stride(m.inner), "out_row": m.out.stride(m.rows), "out_column": m.out.stride(m.columns),
            "b_k": m.b.stride(m.inner),
        }  # fmt: skip
        if spec.is_open:
            numbers["chunk_panels"] = spec.panels_of_chunk(*self._extents())
        packed_stride = self.panel_size()
        for i in reversed(range(len(m.batch))):
            axis = m.batch[i]
            numbers |= {
                f"batch{i}_extent": axis.extent,
                f"batch{i}_a": m.a.stride(axis),
                f"batch{i}_out": m.out.stride(axis),
            }
            moves = axis in m.b.strides
            numbers[f"batch{i}_b"] = m.b.stride(axis) if spec.b_rows else packed_stride if moves else 0
            if moves:
                packed_stride = packed_stride * axis.extent
        b: Slot = ("buffer", m.b.place) if spec.b_rows else ("packed", "")
        return template_slots(spec, m.kernel, numbers, m.a.place, b, m.out.place)

    def points(self) -> Dim:
        """Chunks of the matmul, as Contraction.chunk_count says."""
        m, n, k, batch = self._extents()
        return self.spec.chunk_count(m, n, batch, k)

    def grains(self) -> tuple[int, int]:
        """Panels to pack, and chunks to multiply, that are handed out together: short ones are not worth it alone."""
        sizes = (*self._extents(), self.points(), self.pack_points(), self.pack_count())
        numbers = [size for size in sizes if isinstance(size, int) and size > 0]
        if len(numbers) < len(sizes):
            return 1, 1
        m, n, k, batch, points, panels, matrices = numbers
        spec = self.spec
        seconds = max(2.0 * m * n * k * batch / spec.flops, matrices * n * k * spec.b.itemsize / BYTES)
        most = spec.chunk_seconds / 3
        return even_grain(panels, PACK_SECONDS * k * spec.panel_columns, most), even_grain(
            points, seconds / points, most
        )

    def _extents(self) -> tuple[Dim, Dim, Dim, Dim]:
        """Rows, columns, the inner extent and the batches."""
        m = self.matrix
        return m.extent(m.rows), m.extent(m.columns), m.inner.extent, dim_prod([a.extent for a in m.batch])


def plan_matrix(
    matrix: MatrixKernel, name: str, target: Target, kept: frozenset[str] = frozenset(), *, in_loop: bool = False
) -> MatrixPlan | None:
    """Choose the template's parameters for the sizes of a kernel, or for their upper bounds.

    Where B is not kept but fresh in every run, packing it once for all runs is not an option, and it may be read in
    place. In a loop, smaller pieces are worth handing out.
    """
    if matrix.a.dtype.is_complex or matrix.columns is None or read_along(matrix, kept) == 1:
        return None
    is_fresh = matrix.b.buffer not in kept
    m, n, k = (planned(matrix.extent(a)) for a in (matrix.rows, matrix.columns, matrix.inner))
    batch = 1
    for axis in matrix.batch:
        batch *= planned(axis.extent)
    loads = [b.name for b in matrix.kernel.inputs]
    value = matrix.kernel.stores[0].value
    plain = value is matrix.sums
    out = matrix.kernel.outputs[0]
    others = [b for b in matrix.kernel.inputs if b.name not in (matrix.a.buffer, matrix.b.buffer)]
    in_place = any(
        b.type.size == out.type.size for b in others
    )  # the plan may let such an operand and the output share memory
    m_exact = isinstance(matrix.extent(matrix.rows), int)
    try:
        spec = plan_contraction(
            m, n, k, target, a=matrix.a.dtype, b=matrix.b.dtype, out=matrix.out.dtype, accumulator=matrix.sums.dtype,
            batch=batch, batch_rank=len(matrix.batch), fewest_rows=bounds(matrix.extent(matrix.rows))[0] or 1,
            a_unit_k=matrix.a.stride(matrix.inner) == 1, unit_columns=matrix.out.stride(matrix.columns) == 1,
            in_place=in_place, is_pair=matrix.second is not None, is_open=not m_exact, m_exact=m_exact,
            n_exact=isinstance(matrix.extent(matrix.columns), int),
            chunk_seconds=LOOP_CHUNK_SECONDS if in_loop else CHUNK_SECONDS,
            epilogue="" if plain else repr(value),
            epilogue_pointers=() if plain else tuple(f"p_{b}" for b in loads),
            epilogue_numbers=tuple(f"size_{i}" for i in range(len(matrix.kernel.symbols()))),
        )  # fmt: skip
    except (AssertionError, StopIteration):
        return None
    if not plain:
        spec = with_ending(replace(spec, beside_output=_beside_output(matrix)), k)
    if isinstance(matrix.extent(matrix.columns), int):
        spec = with_half_tail(spec, n)
    is_row = matrix.b.stride(matrix.columns) == 1 and isinstance(matrix.extent(matrix.columns), int)
    placed = in_rows(spec, m, n, k, batch) if is_fresh and is_row else None
    if placed is not None:
        return MatrixPlan(matrix, placed, name)
    if is_fresh:  # each thread multiplies by what it has packed itself
        spec = replace(spec, columns_first=True)
    plan = MatrixPlan(matrix, spec, name)
    return plan if plan.packs_in_one_go() else None


def read_along(matrix: MatrixKernel, kept: frozenset[str]) -> Dim:
    """1 where loops read both factors along their rows, else 0; a matrix that stays from run to run is packed."""
    return sum((where for where, buffer in matrix.along if buffer not in kept), 0)


def along_kernel(matrix: MatrixKernel, order: str = "dot") -> Kernel:
    """The kernel as loops, whose sums have an order: "dot" where they read both factors along their rows."""
    return _in_order(matrix.kernel, [r for r in (matrix.sums, matrix.second) if r is not None], order)


def single_terms(kernel: Kernel, kept: frozenset[str]) -> tuple[Dim, Kernel, Kernel] | None:
    """A matmul over one term is not a sum in the normal form. Where the term is too small to be told from -0.0, its
    order still shows. Returns where it is read along rows, as `read_along` does, and the kernel in either order."""
    sums = [n for s in kernel.stores for n in postorder([s.value]) if isinstance(n, (Reduce, Scan))]
    if len(sums) != 1 or not isinstance(sums[0], Reduce) or any(a.extent != 1 for a in sums[0].axes):
        return None
    roles = _roles(kernel, kernel)
    if not roles.is_matrix or not sums[0].sums_products:
        return None
    along = sum((where for where, buffer in roles.along if buffer not in kept), 0)
    return along, _in_order(kernel, sums, "dot"), _in_order(kernel, sums, "products")


def _in_order(kernel: Kernel, sums: Sequence[Expr], order: str) -> Kernel:
    """A kernel whose sums, none inside another, get an order."""
    given: dict[Expr, Expr] = {n: Reduce(n.kind, n.axes, n.body, order) for n in sums if isinstance(n, Reduce)}
    return with_nodes(kernel, given)


def few_rows_together(matrix: MatrixKernel, target: Target) -> Kernel:
    """The kernel with its few rows, and as many columns as there are registers for sums, in one loop: what it reads of
    both factors is used several times."""
    kernel = along_kernel(matrix)
    (store,) = kernel.stores
    rows = matrix.extent(matrix.rows)
    if matrix.rows is None or matrix.columns not in store.axes or not isinstance(rows, int) or rows > ROWS_ALONG:
        return kernel
    assert matrix.columns is not None
    columns = matrix.columns.extent
    most = max(1, (3 * target.vector_registers // 4) // rows)
    beside = 1
    if isinstance(columns, int):
        beside = next(n for n in range(min(most, COLUMNS_ALONG), 0, -1) if columns % n == 0)
    group = Axis(f"{matrix.columns.name}g", columns // beside)
    axes = (*(a for a in store.axes if a not in (matrix.rows, matrix.columns)), group)
    stores = []
    for row in range(rows):
        for column in range(beside):
            places: dict[Axis, Expr] = {matrix.rows: Const(row, i64), matrix.columns: group * beside + column}
            done = substitute_axes((*store.index, store.value), places)
            stores.append(store.rebuilt(done, axes))
    return replace(kernel, stores=tuple(stores))


def _beside_output(matrix: MatrixKernel) -> tuple[str, ...]:
    """Pointers of operands that the epilogue reads at the offsets at which it writes."""
    loads = [n for n in postorder([matrix.kernel.stores[0].value]) if isinstance(n, Load)]
    operands = [(n, _operand(n)) for n in loads if n.dtype.itemsize == matrix.out.dtype.itemsize]
    found = [o.buffer for n, o in operands if o is not None and o.strides == matrix.out.strides]
    return tuple(f"p_{name}" for name in dict.fromkeys(found) if name not in (matrix.a.buffer, matrix.b.buffer))


def template_slots(
    spec: Contraction, kernel: Kernel, numbers: Mapping[str, Dim], a: tuple[str, Dim], b: Slot, out: tuple[str, Dim]
) -> list[Slot]:
    """(kind, value) of each slot of a template: its matrices, what its epilogue reads, and numbers by their names."""
    symbols = dict(zip(spec.epilogue_numbers, kernel.symbols(), strict=True))
    slots: list[Slot] = []
    for slot in spec.slots:
        if slot in ("a", "out"):
            slots.append(("buffer", a if slot == "a" else out))
        elif slot == "b":
            slots.append(b)
        elif slot in spec.epilogue_pointers:
            slots.append(("buffer", (slot.removeprefix("p_"), 0)))
        elif slot in symbols:
            slots.append(("symbol", symbols[slot]))
        else:
            slots.append(("number", numbers[slot]))
    return slots


def planned(extent: Dim) -> int:
    """A size to plan for: the extent itself, or its upper bound."""
    if isinstance(extent, int):
        return extent
    low, high = bounds(extent)
    return max(low, min(high, UNBOUNDED_ROWS) if high is not None else UNBOUNDED_ROWS)


def emit_matrix(module: IrModule, plan: MatrixPlan) -> tuple[str, str]:
    """Adds the packer and the matmul to a module; returns their names."""
    spec = plan.spec
    value = plan.matrix.kernel.stores[0].value
    epilogue = (
        None
        if value is plan.matrix.sums
        else lambda site, sums: _GemmEpilogue(site, plan).finish(sums, plan.matrix.second)
    )
    emit_contraction(module, spec, epilogue, plan.name)
    if not spec.b_rows:
        emit_pack_b(module, spec.panels(plan.matrix.b.dtype), plan.pack_name)
    return plan.name, plan.pack_name


class FinishedSums(LoopEmitter):
    """The expression around a reduction, evaluated on a row of finished sums."""

    def begin(self, site: Site, kernel: Kernel, sums: Expr, symbols: Sequence[str]) -> None:
        """Start at a site; `sums` is the node of the kernel that the finished sums are the value of."""
        self.site, self.sums = site, sums
        self.start(site.f, kernel, site.spec.target)
        self.pointers = {name.removeprefix("p_"): site.pointer(name) for name in site.spec.epilogue_pointers}
        self.sizes = {s: site.number(slot) for s, slot in zip(symbols, site.spec.epilogue_numbers, strict=True)}

    def finish(self, sums: str, second: Expr | None = None) -> str:
        """The values to store, in the output's type; `second` is the node of a pair's other sums."""
        f, lanes, target = self.f, self.site.lanes, self.target
        accumulator, out = self.site.spec.accumulator, self.site.spec.out
        value = self.kernel.stores[0].value
        self.values[self.sums] = (from_memory(f, accumulator, sums, lanes, target),)
        if second is not None:
            self.values[second] = (from_memory(f, accumulator, self.site.second, lanes, target),)
        for node in postorder([value]):  # what takes the sums comes first
            if isinstance(node, Scalar) and node.dtype is not i64 and self.sums in node.args:
                self.value(node)
        (result,) = self.widened(value, lanes)
        stored = to_memory(f, value.dtype, result, lanes, target)
        return convert(f, stored, value.dtype, out, lanes, target)

    def place(self, store: Store, width: Dim, row: Value, column: Value) -> None:
        """Place the axes of a store at a row and a column of a matrix of some width. Its last axis counts columns, or
        rows and columns together; the axes before it count rows."""
        f = self.f
        *outer, last = store.axes
        joined = divide_exactly(last.extent, width)
        if joined is None:
            flat = f.add(f.mul(row, self.size(width)), column)
            row, column = f.divided(flat, self.size(last.extent)) if outer else (0, flat)
        elif not outer and joined != 1:
            column = f.add(column, f.mul(row, self.size(width)))
        elif joined != 1:
            row, within = f.divided(row, self.size(joined))
            column = f.add(column, f.mul(within, self.size(width)))
        self.first[last] = column
        for axis in reversed(outer[1:]):
            row, self.first[axis] = f.divided(row, self.size(axis.extent))
        if outer:
            self.first[outer[0]] = row


class _GemmEpilogue(FinishedSums):
    """The epilogue of a matmul."""

    def __init__(self, site: Site, plan: MatrixPlan) -> None:
        m = plan.matrix
        self.begin(site, m.kernel, m.sums, tuple(m.kernel.symbols()))
        self.context = Context(m.columns, site.lanes, site.mask) if site.lanes > 1 else Context()
        if m.rows is not None:
            self.first[m.rows] = site.row
        assert m.columns is not None
        self.first[m.columns] = site.column
        for axis, index in zip(m.batch, site.batch, strict=True):
            self.first[axis] = index
