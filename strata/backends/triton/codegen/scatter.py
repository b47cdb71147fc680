"""Scatter-add of rows by ids, as in the gradient of an embedding: of the terms of a row, few are not 0.

A program takes the columns of some rows and looks at all ids, many at a time. It counts those that are of its rows, and
so knows where the next few of them are. What they name is loaded together, and added in the order of the ids.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.backends.triton.codegen.elements import literal, register
from strata.backends.triton.codegen.emit import Lane, TritonEmitter, place_points
from strata.backends.triton.schedules.schedule import Squares, known, power_of_two
from strata.core import Dim, dim_prod
from strata.kernel import Axis, Const, Expr, Kernel, Reduce, Scalar, Store, postorder

_LEAST = 256  # rows, and ids, from which most terms are not looked at
_WIDEST = 256  # columns of a program
_ROWS, _ELEMENTS = 32, 8192  # of a program's sums, at most
_MANY = 1024  # ids that are looked at together
_FEW = 8  # rows that are on their way together


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
    rows = min(_ROWS, _ELEMENTS // columns)
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
    count, start, first = e.size(term.extent), e.fresh("start"), e.fresh("first")
    e.write(f"for {start} in range(0, {count}, {_MANY}):")
    with e.indented():
        e.shape = (_MANY,)
        lanes, at, mask = _ids(e, form, start)
        here = e.name(f"{_between(at, low, rows, mask)}.to(tl.int32)", "here")
        found = e.name(f"tl.sum({here}, axis=0)", "found")
        e.write(f"if {found} > 0:")
        with e.indented():
            number = e.name(f"tl.where({here} != 0, tl.cumsum({here}, axis=0) - 1, -1)", "number")
            slots = e.name(f"tl.arange(0, {_FEW})", "slot")
            e.write(f"for {first} in range(0, {found}, {_FEW}):")
            with e.indented():
                is_next = f"{number}[None, :] == {first} + {slots}[:, None]"
                terms = e.name(f"tl.min(tl.where({is_next}, {lanes}[None, :], {count}), axis=1)", "term")
                e.shape = (rows, columns)
                _add(
                    e, form, total, [f"tl.min(tl.where({slots} == {i}, {terms}, {count}), axis=0)" for i in range(_FEW)]
                )
    e.shape = (rows, columns)
    e.values[form.node] = total
    e.store(form.store)
    return e, ((form.row.extent + rows - 1) // rows * across,)


def _add(e: TritonEmitter, form: ScatteredRows, total: str, terms: list[str]) -> None:
    """What some terms name is added to its rows, one after the other; all of it is loaded before."""
    (term,) = form.node.axes
    loaded = []
    for text in terms:
        place = e.name(text, "term")
        inside = e.name(f"{place} < {e.size(term.extent)}", "inside")
        with e.axis(term, Lane(place, frozenset(), inside)):
            loaded.append((e.value(form.at), e.value(form.x), inside))
    for at, x, inside in loaded:
        is_row = f"{inside} & ({e.axes[form.row].text} == {at})"
        e.write(f"{total} = tl.where({is_row}, {total} + {x}, {total})")


def _ids(e: TritonEmitter, form: ScatteredRows, start: str) -> tuple[str, str, str]:
    """The numbers of many terms, their ids, and which of them there are, where that is not all."""
    (term,) = form.node.axes
    lanes = e.name(f"{start} + tl.arange(0, {_MANY})", "term")
    mask = ""
    if not isinstance(term.extent, int) or term.extent % _MANY:
        mask = e.name(f"{lanes} < {e.size(term.extent)}", "m")
    with e.axis(term, Lane(lanes, frozenset((0,)), mask)):
        return lanes, e.value(form.at), mask


def _between(at: str, low: str, rows: int, mask: str) -> str:
    """Which ids are of a program's rows."""
    text = f"({at} >= {low}) & ({at} < {low} + {rows})"
    return f"({mask} & {text})" if mask else f"({text})"
