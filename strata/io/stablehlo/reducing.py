"""Rules of StableHLO's reductions, windows, sorts, contractions, convolutions, transforms and control flow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from strata import ops
from strata.core import Dim
from strata.errors import LowerError
from strata.io.stablehlo.lapack import hermitian
from strata.io.stablehlo.moving import attribute, padded
from strata.io.stablehlo.rules import Item, ModuleReader, direction_of, known_sizes, op_named, rule, scalar, static_type
from strata.io.stablehlo.syntax import HloOp, HloRegion, axes_of
from strata.mir import Value, constant

REDUCE: dict[str, Callable[[Value, tuple[int, ...]], Value]] = {
    "add": lambda x, axes: ops.any(x, axes) if x.dtype.is_bool else ops.reduce_sum(x, axes),
    "multiply": lambda x, axes: ops.all(x, axes) if x.dtype.is_bool else ops.prod(x, axes, dtype=x.dtype),
    "maximum": lambda x, axes: ops.any(x, axes) if x.dtype.is_bool else ops.max(x, axes),
    "minimum": lambda x, axes: ops.all(x, axes) if x.dtype.is_bool else ops.min(x, axes),
    "or": lambda x, axes: ops.any(x, axes) if x.dtype.is_bool else _bits(x, axes, ops.bitwise_or),
    "and": lambda x, axes: ops.all(x, axes) if x.dtype.is_bool else _bits(x, axes, ops.bitwise_and),
    "xor": lambda x, axes: _bits(x, axes, ops.logical_xor if x.dtype.is_bool else ops.bitwise_xor),
}
POOLS = {"add": "pool_sum", "multiply": "pool_prod", "maximum": "pool_max", "minimum": "pool_min"}
RUNNING = {"add": ops.cumsum, "multiply": ops.cumprod, "maximum": ops.cummax, "minimum": ops.cummin}
BINARY = {
    "add": ops.add, "multiply": ops.multiply, "maximum": ops.maximum, "minimum": ops.minimum, "or": ops.logical_or,
    "and": ops.logical_and, "xor": ops.logical_xor,
}  # fmt: skip


def reducer(op: HloOp) -> str | None:
    """The name of the operation that a reduction applies, where its body is one."""
    if op.words:
        return op.words[0].removeprefix("stablehlo.")
    (region,) = op.regions
    return one_operation(region)


def one_operation(region: HloRegion) -> str | None:
    *body, end = region.body
    names = sorted(name for name, _ in region.arguments)
    if len(body) != 1 or end.operands != body[0].results or sorted(body[0].operands) != names:
        return None
    found = body[0].name.removeprefix("stablehlo.")
    return found if found in REDUCE else None


def neutral(name: str, dtype: Any) -> Any:
    """What changes nothing under an operation."""
    if name in ("add", "or", "xor"):
        return 0
    if name == "multiply":
        return 1
    if dtype.is_bool or name == "and":
        return name in ("minimum", "and") if dtype.is_bool else -1
    if dtype.is_float:
        return -math.inf if name == "maximum" else math.inf
    bounds = np.iinfo(dtype.np)
    return bounds.min if name == "maximum" else bounds.max


def is_neutral(name: str, start: Value) -> bool:
    held = start.node.op.static_fields().get("data") if start.node.op.name == "constant" else None
    return held is not None and bool(
        np.all(held.array == np.asarray(neutral(name, start.dtype)).astype(held.array.dtype))
    )


@rule("reduce")
def reduce(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Value]:
    half = len(given) // 2
    inputs, starts = [x.value for x in given[:half]], [x.value for x in given[half:]]
    axes = tuple(op.attributes["dimensions"])
    name = reducer(op)
    if name is not None and half == 1:
        made = REDUCE[name](inputs[0], axes) if axes else inputs[0]
        if made.dtype is not inputs[0].dtype:
            made = ops.cast(made, inputs[0].dtype)
        if is_neutral(name, starts[0]):
            return [made]
        both = {"or": ops.bitwise_or, "and": ops.bitwise_and, "xor": ops.bitwise_xor} if not made.dtype.is_bool else {}
        return [both.get(name, BINARY[name])(made, starts[0])]
    return tree(module, op.regions[0], inputs, starts, axes)


def tree(
    module: ModuleReader, region: HloRegion, inputs: Sequence[Value], starts: Sequence[Value], axes: Sequence[int]
) -> list[Value]:
    """A reduction by an arbitrary body: halves are combined until one element is left."""
    kept = [a for a in range(inputs[0].ndim) if a not in axes]
    count: Dim = math.prod([inputs[0].shape[a] for a in axes])
    if not isinstance(count, int):
        raise LowerError("a reduction with an arbitrary body needs axes of known length", code="L512")
    moved = [ops.reshape(ops.transpose(x, [*axes, *kept]), (count, *(x.shape[a] for a in kept))) for x in inputs]
    while count > 1:
        half = count // 2
        first = [ops.narrow(x, 0, 0, half) for x in moved]
        second = [ops.narrow(x, 0, half, half) for x in moved]
        rest = [ops.narrow(x, 0, 2 * half, count - 2 * half) for x in moved] if count % 2 else None
        made = module.apply_region(region, [*first, *second])
        moved = made if rest is None else [ops.concat([a, b], 0) for a, b in zip(made, rest, strict=True)]
        count = half + count % 2
    shape = tuple(inputs[0].shape[a] for a in kept)
    begin = [ops.broadcast_to(s, shape) for s in starts]
    if count == 0:
        return begin
    return module.apply_region(region, [*begin, *(ops.reshape(x, shape) for x in moved)])


def _bits(x: Value, axes: Sequence[int], combine: Callable[[Value, Value], Value]) -> Value:
    """Bits of all elements combined: halves until one is left."""
    for axis in sorted(axes, reverse=True):
        count = x.shape[axis]
        if not isinstance(count, int):
            raise LowerError("bits are combined over axes of known length", code="L512")
        while count > 1:
            half = count // 2
            made = combine(ops.narrow(x, axis, 0, half), ops.narrow(x, axis, half, half))
            x = made if count % 2 == 0 else ops.concat([made, ops.narrow(x, axis, 2 * half, 1)], axis)
            count = half + count % 2
        x = ops.squeeze(x, axis)
    return x


@rule("map")
def map_(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Value]:
    return module.apply_region(op.regions[0], [x.value for x in given])


# -------------------------------------------------------------------------------------------------------------- windows


def _pairs(found: Any, rank: int) -> list[tuple[int, int]]:
    if not found:
        return [(0, 0)] * rank
    flat = np.asarray(found).reshape(-1, 2) if np.size(found) == 2 * rank else np.zeros((rank, 2), int) + found
    return [(int(a), int(b)) for a, b in flat]


@rule("reduce_window")
def reduce_window(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Value]:
    half = len(given) // 2
    rank = given[0].value.ndim
    window = [int(d) for d in op.attributes["window_dimensions"]]
    ones = [1] * rank
    stride = op.attributes.get("window_strides") or ones
    spread = op.attributes.get("base_dilations") or ones
    dilation = op.attributes.get("window_dilations") or ones
    padding = _pairs(op.attributes.get("padding"), rank)
    name = one_operation(op.regions[0])
    inputs, starts = [x.value for x in given[:half]], [x.value for x in given[half:]]
    if name is not None and half == 1 and is_neutral(name, starts[0]):
        return [_pooled(name, inputs[0], window, stride, spread, dilation, padding)]
    grown = []
    for x, start in zip(inputs, starts, strict=True):
        wide = padded(x, [p[0] for p in padding], [p[1] for p in padding], [s - 1 for s in spread], start)
        grown.append(_windows(wide, window, stride, dilation))
    return tree(module, op.regions[0], grown, starts, list(range(rank, 2 * rank)))


@rule("dynamic_reduce_window")
def dynamic_reduce_window(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Value]:
    """Windows whose sizes come as data: all of them known, or one that is an axis from end to end."""
    half = (len(given) - 5) // 2
    window, stride, spread, dilation, padding = (known_sizes(x, "the window") for x in given[2 * half :])
    region = module.functions[op.attributes["called_computations"][0]].region
    name = one_operation(region)
    x, start = given[0].value, given[half].value
    if half != 1 or name is None or not is_neutral(name, start):
        raise LowerError("windows of open sizes are combined by one operation", code="L512")
    pairs = list(zip(padding[::2], padding[1::2], strict=True))
    return [_pooled(name, x, window, stride, spread, dilation, pairs)]  # type: ignore[arg-type]


def _windows(x: Value, window: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Value:
    fields = {"kernel": tuple(window), "stride": tuple(stride), "dilation": tuple(dilation)}
    made: Value = op_named("windows", **fields, padding=((0, 0),) * len(window), value=0.0)(x)
    return made


def _pooled(
    name: str, x: Value, window: Sequence[int], stride: Sequence[int], spread: Sequence[int], dilation: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Value:  # fmt: skip
    """Windows under one operation: a running one along an axis, or a pool."""
    plain = all(s == 1 for s in (*stride, *spread, *dilation))
    wide = [a for a, w in enumerate(window) if not (isinstance(w, int) and w == 1)]
    if plain and len(wide) == 1 and window[wide[0]] == x.shape[wide[0]]:
        (axis,) = wide
        length, (low, high) = window[axis], padding[axis]
        others = all(p == (0, 0) for a, p in enumerate(padding) if a != axis)
        if others and (low, high) in ((length - 1, 0), (0, length - 1)) and not x.dtype.is_bool and name in RUNNING:
            return _running(name, x, axis, is_reverse=low == 0)
    empty = np.asarray(neutral(name, x.dtype)).astype(x.dtype.np)
    edges = [p[0] for p in padding], [p[1] for p in padding]
    x = padded(x, *edges, [s - 1 for s in spread], constant(empty))
    if not all(isinstance(d, int) for d in (*window, *stride, *spread, *dilation)):
        raise LowerError("windows of open sizes run along one axis, from end to end", code="L512")
    if name not in POOLS or x.dtype.is_bool:
        return REDUCE[name](_windows(x, window, stride, dilation), tuple(range(x.ndim, 2 * x.ndim)))
    fields = {"kernel": tuple(window), "stride": tuple(stride), "dilation": tuple(dilation)}
    made: Value = op_named(POOLS[name], **fields, padding=((0, 0),) * len(window))(x)
    return made


def _running(name: str, x: Value, axis: int, *, is_reverse: bool) -> Value:
    turned = ops.flip(x, axis) if is_reverse else x
    made = RUNNING[name](turned, axis)
    made = made[0] if isinstance(made, tuple) else made
    made = ops.cast(made, x.dtype)
    found: Value = ops.flip(made, axis) if is_reverse else made
    return found


@rule("select_and_scatter")
def select_and_scatter(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    """What each window chose gets the window's element: the gradient of a maximum or minimum over windows."""
    x, source, start = (i.value for i in given)
    chooses = [o for o in op.regions[0].body if o.name.endswith("compare")]
    adds = one_operation(op.regions[1])
    direction = direction_of(chooses[0]) if chooses else None
    if len(op.regions[0].body) != 2 or direction not in ("GE", "GT", "LE", "LT") or adds != "add":
        raise LowerError("select_and_scatter takes the largest or smallest and adds", code="L511")
    rank = x.ndim
    window = [int(d) for d in op.attributes["window_dimensions"]]
    stride = op.attributes.get("window_strides") or [1] * rank
    padding = _pairs(op.attributes.get("padding"), rank)
    largest = direction in ("GE", "GT")
    empty = np.asarray(neutral("maximum" if largest else "minimum", x.dtype)).astype(x.dtype.np)
    low, high = [p[0] for p in padding], [p[1] for p in padding]
    wide = padded(x, low, high, [0] * rank, constant(empty))
    seen = _windows(wide, window, stride, [1] * rank)
    count = math.prod(window)
    flat = ops.reshape(seen, (*seen.shape[:rank], count))
    best = ops.argmax(flat, -1) if largest else ops.argmin(flat, -1)  # the first of equals
    chosen = ops.reshape(ops.equal(ops.expand_dims(best, -1), ops.iota((count,))), (*seen.shape[:rank], *window))
    spread = ops.where(chosen, ops.reshape(source, (*source.shape, *([1] * rank))), scalar(0, source))
    fields = {"kernel": tuple(window), "stride": tuple(stride), "dilation": (1,) * rank, "padding": ((0, 0),) * rank}
    back = op_named("fold_windows", **fields, size=tuple(wide.shape))(spread)
    made = padded(back, [-p for p in low], [-p for p in high], [0] * rank, 0.0)
    return made if is_neutral("add", start) else made + start


# ---------------------------------------------------------------------------------------------------------------- order


@rule("sort")
def sort(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Value]:
    """By the keys that the comparator compares, first one first; NaN is the largest."""
    keys = _sort_keys(op.regions[0])
    axis = op.attributes.get("dimension", -1)
    values = [x.value for x in given]
    axis = axis if axis >= 0 else axis + values[0].ndim
    if len(values) == 1 and len(keys) == 1:
        return [ops.sort(values[0], axis, descending=keys[0][1])]
    order: Value | None = None
    for at, descending in reversed(keys):
        key = values[at] if order is None else ops.take_along_axis(values[at], order, axis)
        found = ops.argsort(key, axis, descending=descending)
        order = found if order is None else ops.take_along_axis(order, found, axis)
    return [ops.take_along_axis(x, order, axis) for x in values]


def _sort_keys(region: HloRegion) -> list[tuple[int, bool]]:
    """(operand, whether largest first) for each key, in the order in which the comparator looks at them."""
    names = [name for name, _ in region.arguments]
    comes_from = {name: {name} for name in names}
    found: list[tuple[int, bool]] = []
    for op in region.body:
        sources = set().union(*(comes_from.get(x, set()) for x in op.operands))
        comes_from.update(dict.fromkeys(op.results, sources))
        direction = direction_of(op)
        if not op.name.endswith("compare") or direction not in ("LT", "GT", "LE", "GE"):
            continue
        sides = [comes_from.get(x, set()) for x in op.operands]
        if any(len(s) != 1 for s in sides):
            continue
        left, right = (names.index(next(iter(s))) for s in sides)
        if left == right or left // 2 != right // 2:
            continue
        found.append((left // 2, (direction in ("GT", "GE")) != (left > right)))
    keys = list(dict.fromkeys(found))
    if not keys or len({at for at, _ in keys}) != len(keys):
        raise LowerError("the comparator of a sort compares its operands, first one first", code="L511")
    return sorted(keys, key=lambda k: k[0])


@rule("chlo.top_k")
def top_k(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Value]:
    values, ids = ops.topk(given[0].value, attribute(op, "k"), -1)
    return [values, ops.cast(ids, static_type(op, 1).dtype)]


# --------------------------------------------------------------------------------------------------------- contractions


@rule("dot_general")
def dot_general(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    numbers = op.attributes.get("dot_dimension_numbers")
    if isinstance(numbers, dict):
        contract = numbers.get("lhs_contracting_dimensions", []), numbers.get("rhs_contracting_dimensions", [])
        batch = numbers.get("lhs_batching_dimensions", []), numbers.get("rhs_batching_dimensions", [])
    else:
        contract = op.attributes.get("contracting_dims", [[], []])
        batch = op.attributes.get("batching_dims", [[], []])
    x, y = _widened(op, given)
    made: Value = ops.dot_general(x, y, (tuple(contract[0]), tuple(contract[1])), (tuple(batch[0]), tuple(batch[1])))
    return made


@rule("dot")
def dot(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    x, y = _widened(op, given)
    made: Value = ops.dot_general(x, y, ((x.ndim - 1,), (0,)))
    return made


def _widened(op: HloOp, given: list[Item]) -> tuple[Value, Value]:
    """Operands in the type that the result has: sums are in it."""
    dtype = static_type(op).dtype
    x, y = (ops.cast(i.value, dtype) for i in given[:2])
    return x, y


@rule("convolution")
def convolution(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    x, w = _widened(op, given)
    inputs, kernel, output = _conv_axes(op)
    rank = x.ndim - 2
    settings = op.attributes.get("window", {})
    settings = settings if isinstance(settings, dict) else {}

    def setting(short: str, long: str, default: Any) -> Any:
        return settings.get(short) or op.attributes.get(long) or default

    stride = setting("stride", "window_strides", [1] * rank)
    padding = _pairs(setting("pad", "padding", None), rank)
    spread = setting("lhs_dilate", "lhs_dilation", [1] * rank)
    dilation = setting("rhs_dilate", "rhs_dilation", [1] * rank)
    turned = setting("reverse", "window_reversal", [False] * rank)
    groups, batch_groups = op.attributes.get("feature_group_count", 1), op.attributes.get("batch_group_count", 1)
    x = ops.transpose(x, [inputs.index(a) for a in ("b", "f", *map(str, range(rank)))])
    w = ops.transpose(w, [kernel.index(a) for a in ("o", "i", *map(str, range(rank)))])
    if any(turned):
        w = ops.flip(w, tuple(2 + a for a in range(rank) if turned[a]))
    if batch_groups > 1:  # groups of examples are groups of channels
        n, c, *sizes = x.shape
        parts = ops.reshape(x, (batch_groups, n // batch_groups, c, *sizes))
        x = ops.reshape(ops.moveaxis(parts, 0, 1), (n // batch_groups, batch_groups * c, *sizes))
        groups = batch_groups
    low = [min(0, p[0]) for p in padding]
    high = [min(0, p[1]) for p in padding]
    if any(spread_ > 1 for spread_ in spread) or any((*low, *high)):
        x = padded(
            x, [0, 0, *(p[0] for p in padding)], [0, 0, *(p[1] for p in padding)], [0, 0, *(s - 1 for s in spread)], 0.0
        )
        padding = [(0, 0)] * rank
    made = ops.conv(x, w, None, tuple(stride), tuple(padding), tuple(dilation), groups, rank=rank)
    made = ops.cast(made, static_type(op).dtype)
    order = ["b", "f", *map(str, range(rank))]
    moved: Value = ops.transpose(made, [order.index(a) for a in output])
    return moved


# what each axis of the images, of the kernel and of the result is called where axes are given by number
RAW_AXES = (
    ("input_spatial_dimensions", {"b": "input_batch_dimension", "f": "input_feature_dimension"}),
    ("kernel_spatial_dimensions", {"i": "kernel_input_feature_dimension", "o": "kernel_output_feature_dimension"}),
    ("output_spatial_dimensions", {"b": "output_batch_dimension", "f": "output_feature_dimension"}),
)


def _raw_axes(found: Mapping[str, Any], spatial: str, names: Mapping[str, str]) -> list[str]:
    axes = {found[key]: letter for letter, key in names.items()}
    axes |= {axis: str(at) for at, axis in enumerate(found.get(spatial, []))}
    return [axes[at] for at in sorted(axes)]


def _conv_axes(op: HloOp) -> tuple[list[str], list[str], list[str]]:
    found = op.attributes.get("dim_numbers") or op.attributes.get("dimension_numbers")
    if isinstance(found, dict):
        return tuple(_raw_axes(found, *names) for names in RAW_AXES)  # type: ignore[return-value]
    if isinstance(found, str):  # [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]
        first, _, output = found.partition("->")
        left, _, right = first.partition("]x[")
        found = [axes_of(left), axes_of(right), axes_of(output)]
    if not isinstance(found, list) or len(found) != 3:
        raise LowerError("the axes of a convolution cannot be read", code="L510")
    a, b, c = ([str(part) for part in axes_of(one)] for one in found)
    return a, b, c


# ----------------------------------------------------------------------------------------------- transforms and solvers


@rule("fft")
def fft(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    kind = str(op.attributes.get("type") or op.attributes.get("fft_type")).rpartition(" ")[2]
    lengths = attribute(op, "length", "fft_length")
    x = given[0].value
    axes = list(range(-len(lengths), 0))
    if kind == "RFFT":
        x = ops.rfft(x, lengths[-1], -1)
        axes = axes[:-1]
    for axis in axes if kind != "IRFFT" else axes[:-1]:
        x = (ops.fft if kind in ("FFT", "RFFT") else ops.ifft)(x, axis=axis)
    made: Value = ops.irfft(x, lengths[-1], -1) if kind == "IRFFT" else x
    return made


@rule("cholesky")
def cholesky(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    a, lower = given[0].value, bool(op.attributes.get("lower", False))
    made: Value = ops.cholesky(hermitian(a, lower=lower), upper=not lower)
    return made


@rule("triangular_solve")
def triangular_solve(module: ModuleReader, op: HloOp, given: list[Item]) -> Value:
    a, b = (x.value for x in given)
    lower, left = op.attributes.get("lower", False), op.attributes.get("left_side", True)
    unit = bool(op.attributes.get("unit_diagonal", False))
    kind = str(op.attributes.get("transpose_a", "NO_TRANSPOSE")).rpartition(" ")[2]
    if kind == "ADJOINT":
        a = ops.conj(a)
    turned = kind in ("TRANSPOSE", "ADJOINT")
    if not left:  # x·a = b is aᵀ·xᵀ = bᵀ
        b, turned = ops.swapaxes(b, -1, -2), not turned
    made = ops.solve_triangular(a, b, lower=bool(lower), transpose=turned, unit_diagonal=unit)
    found: Value = made if left else ops.swapaxes(made, -1, -2)
    return found


# --------------------------------------------------------------------------------------------------------- control flow


@rule("while")
def while_(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Value]:
    cond, body = op.regions
    made = ops.while_loop(
        lambda state: module.apply_region(cond, state)[0],
        lambda state: tuple(module.apply_region(body, state)),
        tuple(x.value for x in given),
    )
    return list(made)


@rule("if")
def if_(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Value]:
    then, orelse = op.regions
    return _either(given[0].value, lambda: module.apply_region(then, ()), lambda: module.apply_region(orelse, ()))


@rule("case")
def case(module: ModuleReader, op: HloOp, given: list[Item]) -> list[Value]:
    """The branch of a number; one outside of them takes the last."""
    at, regions = given[0].value, op.regions

    def chosen(first: int) -> list[Value]:
        if first == len(regions) - 1:
            return module.apply_region(regions[first], ())
        return _either(
            ops.equal(at, scalar(first, at)),
            lambda: module.apply_region(regions[first], ()),
            lambda: chosen(first + 1),
        )

    return chosen(0)


def _either(predicate: Value, then: Callable[[], list[Value]], orelse: Callable[[], list[Value]]) -> list[Value]:
    made = ops.cond(ops.reshape(predicate, ()), lambda: tuple(then()), lambda: tuple(orelse()))
    return list(made)
