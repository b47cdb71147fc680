"""Matmuls as tiles of `tl.dot`, with any epilogue.

`y[b, m, n] = f(sum k : A(b, m, k) * B(b, k, n), …)`: axes that only one factor has are rows or columns, axes of both
are batches, and the axes of the sum are one axis of terms. Matmuls, convolutions (as matmuls of gathered
windows) and their fusions all have this form. f32 is multiplied with full precision, f16 and bf16 on tensor cores with
sums in f32, i8 with sums in i32.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.backends.triton.elements import literal
from strata.backends.triton.emit import Lane, TritonEmitter, place_points
from strata.backends.triton.scalars import encoded
from strata.backends.triton.schedule import TritonTiles, choose_tiles, known
from strata.core import Dim, DType, bf16, dim_prod, f16, f32, i8, i32
from strata.kernel import Axis, Const, Expr, Kernel, Load, Reduce, Scalar, Scan, apply, postorder

_FEW = 8  # rows or columns that make a tile worth its empty part
_SHORT = 16  # terms, of which fewer are no tile


@dataclass(frozen=True, slots=True)
class TritonProduct:
    """One sum of products: its factors, in the type that they are multiplied in."""

    node: Reduce
    terms: tuple[Axis, ...]
    left: Expr
    right: Expr
    dtype: DType


@dataclass(frozen=True, slots=True)
class TritonContraction:
    """A kernel of matmuls over the same axes."""

    kernel: Kernel
    batch: tuple[Axis, ...]
    rows: tuple[Axis, ...]
    columns: tuple[Axis, ...]
    products: tuple[TritonProduct, ...]

    @property
    def tiles(self) -> TritonTiles:
        sizes = [dim_prod([a.extent for a in axes]) for axes in (self.rows, self.columns, self.products[0].terms)]
        return choose_tiles(sizes[0], sizes[1], sizes[2], self.products[0].dtype)


def find_contraction(kernel: Kernel) -> TritonContraction | None:
    """A normalized kernel as a contraction; None where it is none, or where tiles would be nearly empty."""
    if not kernel.stores or any(isinstance(n, Scan) for n in postorder(kernel.roots)):
        return None
    axes = kernel.stores[0].axes
    if not axes or any(set(s.axes) != set(axes) for s in kernel.stores):
        return None
    sums = _outermost(kernel)
    if not sums:
        return None
    products = [_product(node) for node in sums]
    found: list[TritonProduct] = [p for p in products if p is not None]
    if len(found) < len(products):
        return None
    own = set(axes)
    first = found[0]
    left, right = first.left.free & own, first.right.free & own
    if axes[-1] in left - right:  # what lies side by side in the result are columns
        left, right = right, left
    rows, columns, batch = left - right, right - left, left & right
    if (rows | columns | batch) != own or not rows or not columns:
        return None
    turned = []
    for p in found:
        sides = p.left.free & own, p.right.free & own
        if sides == (left, right):
            turned.append(p)
        elif sides == (right, left):
            turned.append(TritonProduct(p.node, p.terms, p.right, p.left, p.dtype))
        else:
            return None
    order = axes.index
    groups = [tuple(sorted(part, key=order)) for part in (batch, rows, columns)]
    sizes = [known(dim_prod([a.extent for a in part])) for part in groups[1:]]
    terms = min(known(dim_prod([a.extent for a in p.terms])) for p in turned)
    if min(sizes) < _FEW or terms < _SHORT or any(n < 1 for n in sizes):
        return None
    return TritonContraction(kernel, groups[0], groups[1], groups[2], tuple(turned))


def _outermost(kernel: Kernel) -> list[Reduce]:
    found: dict[Reduce, None] = {}
    seen: set[Expr] = set()
    stack = list(reversed(kernel.roots))
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, Reduce):
            found[node] = None
        else:
            stack += reversed(node.inputs)
    return list(found)


def _product(node: Reduce) -> TritonProduct | None:
    axes: list[Axis] = []
    body: Expr = node
    while isinstance(body, Reduce) and body.kind == "sum":
        axes += body.axes
        body = body.body
    if len(set(axes)) < len(axes) or not isinstance(body, Scalar) or body.name != "mul":
        return None
    if any(isinstance(n, Reduce) for n in postorder((body,))):
        return None
    left, right = body.args
    if node.dtype is f32:
        for dtype in (f16, bf16):
            narrow = [_without_cast(x, dtype) for x in (left, right)]
            if narrow[0] is not None and narrow[1] is not None:
                return TritonProduct(node, tuple(axes), narrow[0], narrow[1], dtype)
        return TritonProduct(node, tuple(axes), left, right, f32)
    if node.dtype is i32:
        narrow = [_without_cast(x, i8) for x in (left, right)]
        if narrow[0] is not None and narrow[1] is not None:
            return TritonProduct(node, tuple(axes), narrow[0], narrow[1], i8)
    return None


def _without_cast(node: Expr, dtype: DType) -> Expr | None:
    """What a cast from a narrow type is of."""
    match node:
        case Scalar("cast", (x,)) if x.dtype is dtype:
            return x
        case Scalar("select", (condition, x, Const(0))):  # borders of windows
            inner = _without_cast(x, dtype)
            if isinstance(inner, Load) and inner.where is condition:
                return inner
            return None if inner is None else apply("select", condition, inner, Const(0, dtype))
    return None


def emit_contraction(form: TritonContraction) -> tuple[TritonEmitter, tuple[Dim, ...]]:
    """The body of the function, and how many programs there are: of tiles, and of batches."""
    tiles = form.tiles
    e = TritonEmitter(form.kernel, tiles, (tiles.rows, tiles.columns))
    across = _count(e, form.columns, tiles.columns)
    e.write("tile = tl.program_id(0)")
    if form.batch:
        e.write("batch = tl.program_id(1)")
        _place_batch(e, form.batch)
    place_points(e, form.rows, f"(tile // {across})", tiles.rows, 0, "row")
    place_points(e, form.columns, f"(tile % {across})", tiles.columns, 1, "column")
    loops: dict[tuple[object, ...], list[TritonProduct]] = {}
    for product in form.products:
        loops.setdefault((product.terms, product.dtype), []).append(product)
    for products in loops.values():
        _sums(e, products, tiles)
    for store in form.kernel.stores:
        for axis in store.axes:
            assert axis in e.axes
        values_in_order(e, store.value)
        e.store(store)
    rows, columns = (
        (dim_prod([a.extent for a in axes]) + n - 1) // n
        for axes, n in ((form.rows, tiles.rows), (form.columns, tiles.columns))
    )
    programs = (rows * columns, *([dim_prod([a.extent for a in form.batch])] if form.batch else []))
    return e, programs


def values_in_order(e: TritonEmitter, root: Expr) -> None:
    """Epilogues may be long chains: their values are written inputs first, without recursion."""
    stack: list[tuple[Expr, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if node in e.values:
            continue
        if ready:
            e.value(node)
        elif isinstance(node, Scalar):
            stack.append((node, True))
            stack += [(x, False) for x in reversed(node.inputs)]


def _count(e: TritonEmitter, axes: tuple[Axis, ...], block: int) -> str:
    return e.size((dim_prod([a.extent for a in axes]) + block - 1) // block)


def _place_batch(e: TritonEmitter, axes: tuple[Axis, ...]) -> None:
    rest = "batch"
    for at in range(len(axes) - 1, 0, -1):
        extent = e.size(axes[at].extent)
        e.axes[axes[at]] = Lane(e.name(f"{rest} % {extent}", "i"))
        rest = e.name(f"{rest} // {extent}", "i")
    e.axes[axes[0]] = Lane(rest)


def _sums(e: TritonEmitter, products: list[TritonProduct], tiles: TritonTiles) -> None:
    """One loop over blocks of terms for matmuls over the same axes, which may share factors."""
    total = dim_prod([a.extent for a in products[0].terms])
    extent = e.size(total)
    sums = []
    for product in products:
        kind, out = ("tl.int32", i32) if product.dtype is i8 else ("tl.float32", f32)
        sums.append(e.name(f"tl.full([{tiles.rows}, {tiles.columns}], {literal(0, out)}, {kind})", "sum"))
    exact = isinstance(total, int) and total % tiles.terms == 0
    start = e.fresh("start")
    e.write(f"for {start} in range(0, {extent}, {tiles.terms}):")
    with e.indented():
        known: dict[tuple[Expr, int], str] = {}
        for product, made in zip(products, sums, strict=True):
            for node, dim in ((product.left, 1), (product.right, 0)):
                if (node, dim) not in known:
                    shape = (tiles.rows, tiles.terms) if dim == 1 else (tiles.terms, tiles.columns)
                    limit = "" if exact else extent
                    known[node, dim] = _factor(e, product, node, dim, shape, start, limit, tiles.terms)
            left, right = known[product.left, 1], known[product.right, 0]
            e.write(f"{made} = {_dot(e, product.dtype, left, right, made)}")
    e.values |= {product.node: made for product, made in zip(products, sums, strict=True)}


def _dot(e: TritonEmitter, dtype: DType, left: str, right: str, sums: str) -> str:
    match dtype.name:
        case "bf16":
            return f"{e.needs('dot_bf16')}({left}, {right}, {sums})"
        case "i8":
            return f"tl.dot({left}, {right}, {sums}, out_dtype=tl.int32)"
        case "f16":
            return f"tl.dot({left}, {right}, {sums})"
        case _:
            return f'tl.dot({left}, {right}, {sums}, input_precision="ieee")'


def _factor(
    e: TritonEmitter,
    product: TritonProduct,
    node: Expr,
    dim: int,
    shape: tuple[int, int],
    start: str,
    extent: str,
    step: int,
) -> str:
    """A tile of a factor, 0 outside of the terms there are; terms lie along the given dimension."""
    before_shape, before_axes, before_values = e.shape, dict(e.axes), e.values
    e.shape = shape
    e.values = {n: v for n, v in before_values.items() if not n.free}
    term = e.name(f"{start} + {e.spread(f'tl.arange(0, {step})', dim)}", "term")
    mask = e.name(f"{term} < {extent}", "m") if extent else ""
    rest = term
    for at in range(len(product.terms) - 1, -1, -1):
        axis = product.terms[at]
        if at == 0:
            e.axes[axis] = Lane(rest, frozenset((dim,)), mask)
            break
        size = e.size(axis.extent)
        e.axes[axis] = Lane(e.name(f"{rest} % {size}", "i"), frozenset((dim,)), mask)
        rest = e.name(f"{rest} // {size}", "i")
    dtype = product.dtype
    if isinstance(node, Load):
        text = e.raw_load(node)
        is_masked = bool(node.index[0].free & set(product.terms))
    else:
        values_in_order(e, node)
        text, is_masked = encoded(e.value(node), dtype, e.needs), False
    whole = frozenset((0, 1))
    if e.dims(node) != whole:
        text = f"tl.broadcast_to({text}, {e.tile(whole)})"
    if mask and not is_masked:
        text = f"tl.where({mask}, {text}, 0)"
        if dtype is bf16 or dtype is f16 or dtype is i8:
            text = f"{text}.to({ {'bf16': 'tl.uint16', 'f16': 'tl.float16', 'i8': 'tl.int8'}[dtype.name] })"
    made = e.name(text, "tile")
    e.shape, e.axes, e.values = before_shape, before_axes, before_values
    return made
