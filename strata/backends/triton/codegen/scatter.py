"""Rows added where ids say, as in the gradient of an embedding: few of the terms of a row are any but 0.

A program takes a block of rows and columns and looks at all ids, many at a time. Where some of them are of its rows, it
looks at fewer at a time, and adds up what it finds in the order of the ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.backends.triton.codegen.elements import literal, register
from strata.backends.triton.codegen.emit import Lane, TritonEmitter, place_points
from strata.backends.triton.schedules.schedule import Squares, known, power_of_two
from strata.core import Dim, dim_prod
from strata.kernel import Axis, Const, Expr, Kernel, Reduce, Scalar, Store, postorder

_LEAST = 256  # rows, and ids, from which most terms are not looked at
_ELEMENTS = 8192  # of a program's sums
_WIDEST = 1024
_MANY, _FEW = 1024, 16  # ids that are looked at together


@dataclass(frozen=True, slots=True)
class ScatteredRows:
    """`sum select(at == row, x, 0)` over one axis, where `at` is the same for all rows and x for all of them, too."""

    kernel: Kernel
    node: Reduce
    row: Axis
    columns: tuple[Axis, ...]
    at: Expr
    x: Expr

    @property
    def store(self) -> Store:
        return self.kernel.stores[0]


def find_scatter(kernel: Kernel) -> ScatteredRows | None:
    """A normalized kernel that adds rows where ids say; None where it does anything else, or is small."""
    if len(kernel.stores) != 1:
        return None
    (store,) = kernel.stores
    sums = [node for node in postorder((store.value,)) if isinstance(node, Reduce)]
    if len(sums) != 1 or sums[0].kind != "sum" or len(sums[0].axes) != 1:
        return None
    (node,), body = sums, sums[0].body
    (term,) = node.axes
    casts = []
    while isinstance(body, Scalar) and body.name == "cast":
        casts.append(body.dtype)
        body = body.args[0]
    match body:
        case Scalar("select", (Scalar("eq", (a, b)), x, Const(0))):
            pass
        case _:
            return None
    row, at = (a, b) if isinstance(a, Axis) else (b, a)
    if not isinstance(row, Axis) or row not in store.axes or at.free != {term} or row in x.free or term not in x.free:
        return None
    if known(row.extent) < _LEAST or known(term.extent) < _LEAST:
        return None
    if not (node.dtype.is_float or node.dtype.is_int) or node.dtype.is_complex:
        return None
    for dtype in reversed(casts):
        x = x.cast(dtype)
    return ScatteredRows(kernel, node, row, tuple(a for a in store.axes if a is not row), at, x)


def emit_scatter(form: ScatteredRows) -> tuple[TritonEmitter, tuple[Dim, ...]]:
    """The body of the function, and how many programs there are."""
    wide = dim_prod([a.extent for a in form.columns])
    columns = power_of_two(known(wide), 1, _WIDEST)
    rows = min(64, _ELEMENTS // columns)
    e = TritonEmitter(form.kernel, Squares(rows, columns), (rows, columns))
    across = (wide + columns - 1) // columns
    e.write("tile = tl.program_id(0)")
    place_points(e, (form.row,), f"(tile // {e.size(across)})", rows, 0, "row")
    if form.columns:
        place_points(e, form.columns, f"(tile % {e.size(across)})", columns, 1, "column")
    low = e.name(f"tile // {e.size(across)} * {rows}", "low")
    total = e.name(f"tl.full([{rows}, {columns}], {literal(0, form.node.dtype)}, {register(form.node.dtype)})", "sum")
    (term,) = form.node.axes
    count = e.size(term.extent)
    first = e.fresh("start")
    e.write(f"for {first} in range(0, {count}, {_MANY}):")
    with e.indented():
        found = _found(e, form, first, _MANY, low, rows)
        near = e.fresh("near")
        e.write(f"for {near} in range({first}, tl.minimum({first} + {_MANY}, {count}) * {found}, {_FEW}):")
        with e.indented():
            found = _found(e, form, near, _FEW, low, rows)
            one = e.fresh("id")
            e.write(f"for {one} in range({near}, tl.minimum({near} + {_FEW}, {count}) * {found}):")
            with e.indented(), e.axis(term, Lane(one)):
                here = f"{e.axes[form.row].text} == {e.value(form.at)}"
                e.write(f"{total} = tl.where({here}, {total} + {e.value(form.x)}, {total})")
    e.values[form.node] = total
    e.store(form.store)
    return e, ((form.row.extent + rows - 1) // rows * across,)


def _found(e: TritonEmitter, form: ScatteredRows, start: str, count: int, low: str, rows: int) -> str:
    """1 where some of the next ids are of the program's rows, 0 elsewhere."""
    (term,) = form.node.axes
    before, e.shape = e.shape, (count,)
    lanes = e.name(f"{start} + tl.arange(0, {count})", "term")
    mask = ""
    if not isinstance(term.extent, int) or term.extent % count:
        mask = e.name(f"{lanes} < {e.size(term.extent)}", "m")
    with e.axis(term, Lane(lanes, frozenset((0,)), mask)):
        at = e.value(form.at)
        found = e.name(f"tl.max((({at} >= {low}) & ({at} < {low} + {rows})).to(tl.int32), axis=0)", "found")
    e.shape = before
    return found
