"""Rows added where ids say, as in the gradient of an embedding: few of the terms of a row are any but 0.

A program takes the columns of one row and looks at all ids, many at a time. Where some of them are of its row, it looks
at fewer at a time, and adds up what it finds: some of them together, and those in the order of the ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.backends.triton.codegen.elements import literal, register
from strata.backends.triton.codegen.emit import Lane, TritonEmitter, place_points
from strata.backends.triton.schedules.schedule import TritonRows, known, power_of_two
from strata.core import Dim, dim_prod
from strata.kernel import Axis, Const, Expr, Kernel, Reduce, Scalar, Store, postorder

_LEAST = 256  # rows, and ids, from which most terms are not looked at
_WIDEST = 1024  # columns of a program
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
    e = TritonEmitter(form.kernel, TritonRows(1, columns, 4), (_FEW, columns))
    across = (wide + columns - 1) // columns
    e.write("tile = tl.program_id(0)")
    row = e.name(f"tile // {e.size(across)}", "row")
    e.axes[form.row] = Lane(row)
    if form.columns:
        place_points(e, form.columns, f"(tile % {e.size(across)})", columns, 1, "column")
    kind = register(form.node.dtype)
    total = e.name(f"tl.full([1, {columns}], {literal(0, form.node.dtype)}, {kind})", "sum")
    (term,) = form.node.axes
    count = e.size(term.extent)
    first = e.fresh("start")
    e.write(f"for {first} in range(0, {count}, {_MANY}):")
    with e.indented():
        e.shape = (_MANY,)
        _, here = _ids(e, form, first, _MANY, row)
        found = e.name(f"tl.max({here}.to(tl.int32), axis=0)", "found")
        e.shape = (_FEW, columns)
        near = e.fresh("near")
        e.write(f"for {near} in range({first}, tl.minimum({first} + {_MANY}, {count}) * {found}, {_FEW}):")
        with e.indented():
            ids, here = _ids(e, form, near, _FEW, row)
            with e.axis(term, Lane(ids, frozenset((0,)), here)):
                x = f"tl.where({here}, {e.value(form.x)}, {literal(0, form.node.dtype)})"
                e.write(f"{total} = {total} + tl.sum({x}, axis=0, keep_dims=True).to({kind})")
    e.values[form.node] = total
    e.shape = (1, columns)
    e.store(form.store)
    return e, (form.row.extent * across,)


def _ids(e: TritonEmitter, form: ScatteredRows, start: str, count: int, row: str) -> tuple[str, str]:
    """The numbers of some ids, and which of them are of the program's row."""
    (term,) = form.node.axes
    lanes = e.name(f"{start} + {e.spread(f'tl.arange(0, {count})', 0)}", "term")
    mask = ""
    if not isinstance(term.extent, int) or term.extent % count:
        mask = e.name(f"{lanes} < {e.size(term.extent)}", "m")
    with e.axis(term, Lane(lanes, frozenset((0,)), mask)):
        text = f"{e.value(form.at)} == {row}"
    return lanes, e.name(f"{mask} & ({text})" if mask else text, "here")
