"""Rows added where ids say, as in the gradient of an embedding: few of the terms of a row are any but 0.

A program takes the columns of some rows and looks at all ids, many at a time. Where some of them are of its rows, it
looks at fewer at a time, and adds up what it finds, row by row: a few of them together, and those in the order of the
ids.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from strata.backends.triton.codegen.elements import literal, register
from strata.backends.triton.codegen.emit import Lane, TritonEmitter, place_points
from strata.backends.triton.schedules.schedule import Squares, known, power_of_two
from strata.core import Dim, dim_prod
from strata.kernel import Axis, Const, Expr, Kernel, Reduce, Scalar, Store, postorder

_LEAST = 256  # rows, and ids, from which most terms are not looked at
_WIDEST = 256  # columns of a program
_ELEMENTS = 4096  # of a program's sums
_MANY, _SOME, _FEW = 1024, 128, 16  # ids that are looked at together


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
    rows = min(_FEW, _ELEMENTS // columns)
    e = TritonEmitter(form.kernel, Squares(rows, columns), (rows, columns))
    across = (wide + columns - 1) // columns
    e.write("tile = tl.program_id(0)")
    place_points(e, (form.row,), f"(tile // {e.size(across)})", rows, 0, "row")
    if form.columns:
        place_points(e, form.columns, f"(tile % {e.size(across)})", columns, 1, "column")
    low = e.name(f"tile // {e.size(across)} * {rows}", "low")
    kind, zero = register(form.node.dtype), literal(0, form.node.dtype)
    total = e.name(f"tl.full([{rows}, {columns}], {zero}, {kind})", "sum")
    (term,) = form.node.axes
    count = e.size(term.extent)
    with ExitStack() as inside:
        first, last = "0", count
        for block in (_MANY, _SOME):
            start = e.fresh("start")
            e.write(f"for {start} in range({first}, {last}, {block}):")
            inside.enter_context(e.indented())
            e.shape = (block,)
            _, at, mask = _ids(e, form, start, block)
            found = e.name(f"tl.max({_between(at, low, rows, mask)}.to(tl.int32), axis=0)", "found")
            first, last = start, f"tl.minimum({start} + {block}, {count}) * {found}"
        near = e.fresh("near")
        e.write(f"for {near} in range({first}, {last}, {_FEW}):")
        inside.enter_context(e.indented())
        e.shape = (_FEW, columns)
        lanes, at, mask = _ids(e, form, near, _FEW)
        here = e.name(_between(at, low, rows, mask), "here")
        with e.axis(term, Lane(lanes, frozenset((0,)), here)):
            x = e.value(form.x)
        found = e.name(f"tl.max(tl.max({here}.to(tl.int32), axis=1), axis=0)", "found")
        one = e.fresh("one")
        e.write(f"for {one} in range({low}, ({low} + {rows}) * {found}):")
        inside.enter_context(e.indented())
        picked = f"tl.sum(tl.where({here} & ({at} == {one}), {x}, {zero}), axis=0, keep_dims=True).to({kind})"
        e.write(f"{total} = tl.where({e.axes[form.row].text} == {one}, {total} + {picked}, {total})")
    e.shape = (rows, columns)
    e.values[form.node] = total
    e.store(form.store)
    return e, ((form.row.extent + rows - 1) // rows * across,)


def _ids(e: TritonEmitter, form: ScatteredRows, start: str, count: int) -> tuple[str, str, str]:
    """The numbers of some terms, their ids, and which of them there are, where that is not all."""
    (term,) = form.node.axes
    lanes = e.name(f"{start} + {e.spread(f'tl.arange(0, {count})', 0)}", "term")
    mask = ""
    if not isinstance(term.extent, int) or term.extent % count:
        mask = e.name(f"{lanes} < {e.size(term.extent)}", "m")
    with e.axis(term, Lane(lanes, frozenset((0,)), mask)):
        return lanes, e.value(form.at), mask


def _between(at: str, low: str, rows: int, mask: str) -> str:
    """Which ids are of a program's rows."""
    text = f"({at} >= {low}) & ({at} < {low} + {rows})"
    return f"({mask} & {text})" if mask else f"({text})"
