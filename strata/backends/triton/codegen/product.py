"""Matmuls as tiles of `tl.dot`, with any epilogue: the contractions of `strata.kernel`, by a schedule.

f32 is multiplied with full precision, f16 and bf16 on tensor cores with sums in f32, i8 with sums in i32. A factor that
lies in memory as matrices can be loaded by the copy engine (TMA), which also fills what is outside with zeros; others
are loaded, or computed, element by element.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

from strata.backends.triton.codegen.elements import literal
from strata.backends.triton.codegen.emit import Lane, TritonEmitter, place_points
from strata.backends.triton.codegen.grid import place_beside, programs_beside
from strata.backends.triton.codegen.scalars import dot, encoded
from strata.backends.triton.schedules.schedule import TritonTiles, fitted_tiles, known, parse_gpu_schedule
from strata.backends.triton.schedules.winners import has_winners, winner
from strata.backends.triton.target import Gpu
from strata.core import Dim, DType, bf16, dim_prod, f16, f32, i8, i32
from strata.kernel import (
    Axis,
    ContractionForm,
    Expr,
    Kernel,
    Load,
    MatrixView,
    Scalar,
    find_contraction,
    linear,
    matrix_view,
)

_FEW = 8  # rows or columns that make a tile worth its empty part
_SHORT = 16  # terms, of which fewer are no tile
_WIDE = 1 << 18  # elements of a matrix that a few rows are better multiplied with by tensor cores, too
_STEPS = 4  # of a part, where another number of parts was measured
# rows up to which a matmul of any number of rows has a schedule of its own, on tensor cores and elsewhere
TENSOR_CLASSES, ROW_CLASSES = (64, 256, 1024), (16, 128, 1024)
_WHOLE_ROWS = 64  # of a tile that four warps multiply together: all such tiles add up their terms in one order
_HOPPER = 90  # the first architecture with a copy engine
_ENGINE_BYTES = 16  # that rows of a matrix are a multiple of where the copy engine loads it


@dataclass(frozen=True, slots=True)
class TileSum:
    """One sum of products: its factors, in the type that they are multiplied in."""

    node: Expr
    terms: tuple[Axis, ...]
    left: Expr
    right: Expr
    dtype: DType


@dataclass(frozen=True, slots=True)
class TiledContraction:
    """A contraction with a schedule."""

    form: ContractionForm
    sums: tuple[TileSum, ...]
    tiles: TritonTiles

    @property
    def kernel(self) -> Kernel:
        return self.form.kernel


def find_product(kernel: Kernel, gpu: Gpu) -> TiledContraction | None:
    """A normalized kernel as a matmul; None where it is none, or where tiles would be nearly empty."""
    form = find_contraction(kernel)
    if form is None or not form.columns or form.repeats:
        return None
    sums = [_typed(s.node, s.terms, s.left, s.right, {t: s.narrowed(t) for t in (f16, bf16, i8)}) for s in form.sums]
    found = tuple(s for s in sums if s is not None)
    if len(found) < len(sums):
        return None
    _, rows, columns, _ = (known(d) for d in form.extents)
    terms = min(known(s.count) for s in form.sums)
    narrow = found[0].dtype.bits <= 16
    few = _FEW if not narrow or columns * terms < _WIDE else 1
    if not kernel.schedule and (rows < few or columns < _FEW or terms < _SHORT):
        return None
    return TiledContraction(form, found, choose_tiles(form, found, gpu, kernel.schedule))


def _typed(
    node: Expr, terms: tuple[Axis, ...], left: Expr, right: Expr, narrow: dict[DType, tuple[Expr, Expr] | None]
) -> TileSum | None:
    for dtype in (f16, bf16) if node.dtype is f32 else (i8,) if node.dtype is i32 else ():
        factors = narrow[dtype]
        if factors is not None:
            return TileSum(node, terms, *factors, dtype)
    return TileSum(node, terms, left, right, f32) if node.dtype is f32 else None


def choose_tiles(
    form: ContractionForm, sums: tuple[TileSum, ...], gpu: Gpu, given: str = "", most_rows: int | None = None
) -> TritonTiles:
    """The schedule that a search has found, or that won among sizes like these; what does not apply is left out. With
    `most_rows`, for no more rows than that."""
    _, rows, columns, terms = form.extents
    rows = rows if most_rows is None else most_rows
    dtype = sums[0].dtype
    if given:
        found = parse_gpu_schedule(given)
        assert isinstance(found, TritonTiles), f"{given} is no schedule of a matmul"
    else:
        kind, sizes = f"product {dtype.bits}", (known(rows), known(columns), known(terms))
        pairs = len(sums) == 2 and has_winners(f"{kind} pairs")
        made = winner(gpu, f"{kind} pairs" if pairs else kind, sizes)
        assert isinstance(made, TritonTiles)
        found = made
        if len(sums) > 1 and not pairs:  # as many tiles of sums, and of factors, are held at once
            wide = max(32, found.columns // power_floor(len(sums)))
            deep = max(32, found.terms * found.columns // (wide * power_floor(len(sums))))
            found = replace(found, columns=wide, terms=min(deep, found.terms))
    found = fitted_tiles(found, rows, columns, terms, dtype.bits)
    views = descriptor_views(form, sums, found, gpu) if found.descriptors else None
    if found.descriptors and views is None:
        found = replace(found, descriptors=False)
    if found.persistent and (form.batch or _tile_count(form, found) <= found.persistent):
        found = replace(found, persistent=0)
    if found.parts > 1 and not can_split(form, found.parts * found.terms):  # fewer, each of several steps
        fitting = (n for n in range(found.parts - 1, 1, -1) if can_split(form, _STEPS * n * found.terms))
        found = replace(found, parts=next(fitting, 1))
    return found


def by_rows(product: TiledContraction, gpu: Gpu) -> list[tuple[int, TiledContraction]]:
    """Other schedules for few rows, where their number is a symbol: which of them runs is decided at each launch.

    All of them add up terms in the order of the first, so that a row has the same bits among any number of others:
    sums are not split, and no tile is so low that other tensor core instructions multiply it.
    """
    rows = product.form.extents[1]
    if isinstance(rows, int) or product.kernel.schedule:
        return []
    found: list[tuple[int, TiledContraction]] = []
    narrow = product.sums[0].dtype in (f16, bf16)
    for most in TENSOR_CLASSES if narrow else ROW_CLASSES:
        tiles = replace(choose_tiles(product.form, product.sums, gpu, most_rows=most), parts=1)
        if narrow:
            tiles = replace(tiles, rows=max(tiles.rows, _WHOLE_ROWS))
        if found and found[-1][1].tiles == tiles:
            found.pop()
        if most < known(rows) and tiles != product.tiles:
            found.append((most, replace(product, tiles=tiles)))
    return found


def power_floor(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def can_split(form: ContractionForm, by: int) -> bool:
    """Whether terms are whole parts: those of all sums, along one axis."""
    terms = form.sums[0].terms
    whole = len(terms) == 1 and isinstance(terms[0].extent, int) and terms[0].extent % by == 0
    return whole and all(s.terms == terms for s in form.sums) and form.sums[0].node.dtype in (f32, i32)


def _tile_count(form: ContractionForm, tiles: TritonTiles) -> int:
    _, rows, columns, _ = (known(d) for d in form.extents)
    return -(-rows // tiles.rows) * -(-columns // tiles.columns)


def descriptor_views(
    form: ContractionForm, sums: tuple[TileSum, ...], tiles: TritonTiles, gpu: Gpu
) -> dict[tuple[Expr, int], MatrixView] | None:
    """The factors as the copy engine takes them; None where one is no matrix in memory, or has rows that do not start
    where it can."""
    if gpu.kind != "cuda" or not isinstance(gpu.arch, int) or gpu.arch < _HOPPER:
        return None
    found: dict[tuple[Expr, int], MatrixView] = {}
    for one in sums:
        for factor, outer, dim in ((one.left, form.rows, 1), (one.right, form.columns, 0)):
            view = matrix_view(factor, outer, one.terms)
            if view is None or not _is_aligned(view, one.dtype):
                return None
            found[factor, dim] = view
    return found


def _is_aligned(view: MatrixView, dtype: DType) -> bool:
    unit = _ENGINE_BYTES // dtype.itemsize
    form = linear(view.load.index[0])
    outer = [step for atom, step in form.terms.items() if step != 1]
    return all(isinstance(step, int) and step % unit == 0 for step in (form.constant, *outer))


def emit_contraction(product: TiledContraction) -> tuple[TritonEmitter, tuple[Dim, ...]]:
    """The body of the function, and how many programs there are: of tiles, and of batches."""
    form, tiles = product.form, product.tiles
    e = TritonEmitter(form.kernel, tiles, (tiles.rows, tiles.columns))
    counts = [(dim_prod([a.extent for a in axes]) + n - 1) // n
              for axes, n in ((form.rows, tiles.rows), (form.columns, tiles.columns))]  # fmt: skip
    down, across = (e.size(n) for n in counts)
    with ExitStack() as inside:
        if form.batch:
            place_beside(e, "batch", dim_prod([a.extent for a in form.batch]))
            _place_batch(e, form.batch)
        loaded = _descriptors(e, product)
        if tiles.persistent:
            total = e.size(counts[0] * counts[1])
            e.write(f"for tile in tl.range(tl.program_id(0), {total}, {tiles.persistent}, flatten=True):")
            inside.enter_context(e.indented())
        else:
            e.write("tile = tl.program_id(0)")
        row, column = _ordered(e, tiles.group, down, across)
        if form.rows:
            place_points(e, form.rows, row, tiles.rows, 0, "row")
        place_points(e, form.columns, column, tiles.columns, 1, "column")
        loops: dict[tuple[object, ...], list[TileSum]] = {}
        for one in product.sums:
            loops.setdefault((one.terms, one.dtype), []).append(one)
        for sums in loops.values():
            _sums(e, sums, tiles, loaded, (row, column))
        if not form.rows:
            _one_row(e, product.sums)
        for store in form.kernel.stores:
            for axis in store.axes:
                assert axis in e.axes
            values_in_order(e, store.value)
            e.store(store)
    programs: tuple[Dim, ...] = (tiles.persistent,) if tiles.persistent else (counts[0] * counts[1],)
    beside = programs_beside(dim_prod([a.extent for a in form.batch])) if form.batch else ()
    return e, (*programs, *beside)


def _ordered(e: TritonEmitter, group: int, down: str, across: str) -> tuple[str, str]:
    """Which row and column of tiles a tile is: in groups of rows, down each column of a group."""
    if group == 1 or down == "1" or across == "1":
        return f"(tile // {across})", f"(tile % {across})"
    first = e.name(f"tile // ({group} * {across}) * {group}", "first")
    high = e.name(f"tl.minimum({down} - {first}, {group})", "high")
    inner = e.name(f"tile % ({group} * {across})", "inner")
    return f"({first} + {inner} % {high})", f"({inner} // {high})"


def _descriptors(e: TritonEmitter, product: TiledContraction) -> dict[tuple[Expr, int], str]:
    """Names of descriptors of the factors, by factor and by the dimension that its terms lie along."""
    if not product.tiles.descriptors:
        return {}
    form, tiles = product.form, product.tiles
    made: dict[tuple[Expr, int], str] = {}
    for one in product.sums:
        for factor, outer, dim, block in (
            (one.left, form.rows, 1, tiles.rows),
            (one.right, form.columns, 0, tiles.columns),
        ):
            if (factor, dim) in made:
                continue
            view = matrix_view(factor, outer, one.terms)
            assert view is not None
            sizes = [(_narrow(e, outer[0].extent), block), (_narrow(e, one.terms[0].extent), tiles.terms)]
            sizes = sizes[::-1] if view.is_turned else sizes
            base = e.arguments[view.load.buffer.name]
            if view.start is not None:
                base = f"{base} + {e.value(view.start)}"
            shape, blocks = (", ".join(str(pair[at]) for pair in sizes) for at in (0, 1))
            text = f"tl.make_tensor_descriptor({base}, [{shape}], [{e.size(view.step)}, 1], [{blocks}])"
            made[factor, dim] = e.name(text, "matrix")
    return made


def _narrow(e: TritonEmitter, dim: Dim) -> str:
    """A size as the copy engine takes it, with 32 bits."""
    return str(dim) if isinstance(dim, int) else f"{e.size(dim)}.to(tl.int32)"


def _one_row(e: TritonEmitter, sums: tuple[TileSum, ...]) -> None:
    """A vector was multiplied as the first of a tile of rows: the others hold nothing."""
    for one in sums:
        whole = e.values[one.node]
        first = f"tl.arange(0, {e.shape[0]})[:, None] == 0"
        e.values[one.node] = e.name(f"tl.sum(tl.where({first}, {whole}, 0), axis=0, keep_dims=True)", "row")
    e.shape = (1, e.shape[1])


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


def _place_batch(e: TritonEmitter, axes: tuple[Axis, ...]) -> None:
    rest = "batch"
    for at in range(len(axes) - 1, 0, -1):
        extent = e.size(axes[at].extent)
        e.axes[axes[at]] = Lane(e.name(f"{rest} % {extent}", "i"))
        rest = e.name(f"{rest} // {extent}", "i")
    e.axes[axes[0]] = Lane(rest)


def _sums(
    e: TritonEmitter, sums: list[TileSum], tiles: TritonTiles, loaded: dict[tuple[Expr, int], str], at: tuple[str, str]
) -> None:
    """One loop over blocks of terms for matmuls over the same axes, which may share factors."""
    total = dim_prod([a.extent for a in sums[0].terms])
    extent = e.size(total)
    names = []
    for one in sums:
        kind, out = ("tl.int32", i32) if one.dtype is i8 else ("tl.float32", f32)
        names.append(e.name(f"tl.full([{tiles.rows}, {tiles.columns}], {literal(0, out)}, {kind})", "sum"))
    exact = isinstance(total, int) and total % tiles.terms == 0
    wide = any(not isinstance(d, int) for d in e.sizes) and bool(loaded)  # then tiles are counted with 64 bits
    cut = ".to(tl.int32)" if wide else ""
    blocks = zip(at, (tiles.rows, tiles.columns), strict=True)
    corners = [e.name(f"({one} * {block}){cut}", "at") for one, block in blocks] if loaded else []
    start = e.fresh("start")
    e.write(f"for {start} in range(0, {extent}, {tiles.terms}):")
    with e.indented():
        made: dict[tuple[Expr, int], str] = {}
        for one, name in zip(sums, names, strict=True):
            for node, dim in ((one.left, 1), (one.right, 0)):
                if (node, dim) in made:
                    continue
                if loaded:
                    first = start if isinstance(total, int) else f"{start}.to(tl.int32)"
                    made[node, dim] = _loaded(e, loaded[node, dim], node, corners[1 - dim], first, dim, one.terms[0])
                    continue
                shape = (tiles.rows, tiles.terms) if dim == 1 else (tiles.terms, tiles.columns)
                made[node, dim] = _factor(e, one, node, dim, shape, start, "" if exact else extent, tiles.terms)
            e.write(f"{name} = {dot(made[one.left, 1], made[one.right, 0], name, one.dtype, e.needs)}")
    e.values |= {one.node: name for one, name in zip(sums, names, strict=True)}


def _loaded(e: TritonEmitter, matrix: str, node: Expr, corner: str, start: str, dim: int, term: Axis) -> str:
    """A tile of a factor by the copy engine, turned where its terms are the rows of what lies in memory."""
    assert isinstance(node, Load)
    along = linear(node.index[0]).terms.get(term) == 1  # terms lie side by side
    tile = f"{matrix}.load([{corner}, {start}])" if along else f"{matrix}.load([{start}, {corner}])"
    is_turned = along != (dim == 1)
    return e.name(f"{tile}.T" if is_turned else tile, "tile")


def _factor(
    e: TritonEmitter, one: TileSum, node: Expr, dim: int, shape: tuple[int, int], start: str, extent: str, step: int
) -> str:
    """A tile of a factor, 0 outside of the terms there are; terms lie along the given dimension."""
    before_shape, before_axes, before_values = e.shape, dict(e.axes), e.values
    e.shape = shape
    e.values = {n: v for n, v in before_values.items() if not n.free}
    term = e.name(f"{start} + {e.spread(f'tl.arange(0, {step})', dim)}", "term")
    mask = e.name(f"{term} < {extent}", "m") if extent else ""
    rest = term
    for at in range(len(one.terms) - 1, -1, -1):
        axis = one.terms[at]
        if at == 0:
            e.axes[axis] = Lane(rest, frozenset((dim,)), mask)
            break
        size = e.size(axis.extent)
        e.axes[axis] = Lane(e.name(f"{rest} % {size}", "i"), frozenset((dim,)), mask)
        rest = e.name(f"{rest} // {size}", "i")
    dtype = one.dtype
    if isinstance(node, Load):
        text = e.raw_load(node)
        is_masked = bool(node.index[0].free & set(one.terms))
    else:
        values_in_order(e, node)
        text, is_masked = encoded(e.value(node), dtype, e.needs), False
    whole = frozenset((0, 1))
    if e.dims(node) != whole:
        text = f"tl.broadcast_to({text}, {e.tile(whole)})"
    if mask and not is_masked:
        match dtype.name:
            case "bf16":
                text = f"{e.needs('inside_bf16')}({mask}, {text})"
            case "f16" | "i8":
                text = f"tl.where({mask}, {text}, 0).to({'tl.float16' if dtype is f16 else 'tl.int8'})"
            case _:
                text = f"tl.where({mask}, {text}, 0)"
    made = e.name(text, "tile")
    e.shape, e.axes, e.values = before_shape, before_axes, before_values
    return made
