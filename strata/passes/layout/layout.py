"""Layout assignment: channels last inside convolutional regions, with transposes at their borders only.

Every value keeps the form it was made in; the other form is made where a reader asks for it. A convolution reads and
gives channels last; ops that do not care about the order of axes (element-wise ops, pools, concatenation, slices,
padding, reductions, resizing) follow their inputs. Weights are transposed where they are parameters: once. Compositions
that hide such ops are decomposed first. A convolution that is alone stays as it is where that is faster; so does one
that is never done with channels last, beside any others: the sums of loops have another order. Narrow floats are
widened on the way, but for a backend that claims to gather windows itself: GPUs multiply them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

from strata.core import Dim, dim_prod, f32, f64, i8, u8
from strata.mir import Graph, Node, Value, as_tuple, origin_of, toposort
from strata.ops import (
    ConvFirst,
    ConvLast,
    ConvLastBackwardWeight,
    ConvLastFilled,
    broadcast_to,
    pad_constant,
    reshape,
    to_first,
    to_last,
    transpose,
    weight_to_first,
    weight_to_last,
)
from strata.passes.base import Pass, PassContext, register, rewrite, with_results
from strata.passes.canonicalize.decompose import Decompose
from strata.passes.layout.transposed_conv import as_plain, as_product, is_product, is_transposed
from strata.passes.quant.widen import widen_convolutions

GATHERED = (
    "conv_gathered"  # claims: a convolution is a matmul of gathered windows; narrow floats are multiplied as such
)
# compositions that lose their axes when decomposed
KEPT = "conv_backward_weight+pool_prod+pool_sum+resize_axis+resize_nearest_2x"
MOST_FOLLOWED = 8  # ops that are done again with channels last, rather than their result turned around
MOST_TAPS = 128  # kernels with more are gradients of weights, or filters: another algorithm's business
JOINED = 16  # channels below which all taps along the last axis are read as one
VECTOR, FEW_PIXELS, FITTING = 16, 128, 1.1  # lanes; pixels of a small map; lanes that they may take for one pixel
FEWEST_OUTPUTS = 4  # of a group: below, most lanes of a vector along channels would be idle
BESIDE = (2, 4, 8, 16)  # outputs of a group of no more channels, some of which fill a vector
MANY_CHANNELS = 8  # of which even one output is worth it
FEW_CHANNELS = 4  # of which all taps of some pixels are gathered into a panel
MOST_STRIDE = 8  # of such a convolution along a line
MOST_GATHERED = 256  # terms of a sum of such a convolution
MOST_ALONG = 512  # where lines of pixels fill vectors,
MOST_IN_VOLUME = 1024  # and in three dimensions
IDLE = 1.05  # lanes that a line may take for one pixel then
NARROW = 4  # pixels of a line below which vectors along it are mostly empty


@register
@dataclass(frozen=True)
class ChannelsLast(Pass):
    """Convolutions over [N, *sizes, C], and what is around them in the same order."""

    name: ClassVar[str] = "layout"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        if not ctx.claimed(ConvLast.name) or not any(n.op.name.startswith("conv") for n in graph.nodes()):
            return graph
        gathers = ctx.claims is not None and GATHERED in ctx.claims
        graph = graph if gathers else rewrite(graph, _padded_first, self.name)
        given = graph
        widen = (lambda g, _: g) if gathers else widen_convolutions
        graph = widen(Decompose(KEPT).run(graph, ctx), self.name)
        order = toposort(graph.results)
        wanted = {id(n) for n in order if n.op.name in SERVED and SERVED[n.op.name](n)}
        users = _users(order)
        claimed = ctx.claimed(ConvFirst.name)
        alone = {id(n) for n in order if claimed and _stays(n) and (id(n) not in wanted or _is_alone(n, wanted, users))}
        if not alone and not any(id(n) in wanted and not _is_matrix_product(n) for n in order):
            return rewrite(widen(given, self.name), _as_products, self.name)
        maker = _Layouts(wanted | alone, alone)
        for node in order:
            with origin_of(node, made_by=self.name):
                maker.add(node)
        return with_results(graph, [maker.first(x) for x in graph.results])


def _padded_first(value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
    """A filter with many taps along lines reads lines that were padded before: without a bound in its sums it is a
    product of windows and weights, at eight times the speed."""
    node, op = value.node, cast("Any", value.node.op)
    if node.op.name != "conv" or inputs[0].dtype not in (f32, f64):
        return None
    sides = [side for pair in op.padding for side in pair]
    if not all(isinstance(side, int) for side in sides) or not any(sides) or min(sides) < 0:
        return None
    x, w = inputs
    shape: Any = w.shape
    is_line = all(isinstance(d, int) for d in shape) and all(d == 1 for d in shape[2:-1]) and shape[-1] > MOST_TAPS
    if not is_line or op.groups != 1 or any(d != 1 for d in op.input_dilation):
        return None
    padded = pad_constant(x, [(0, 0), (0, 0), *op.padding], 0.0)
    return [replace(op, padding=((0, 0),) * len(op.padding))(padded, w)]


def _is_known(node: Node) -> bool:
    """Whether the weights of a convolution have sizes that code can be made for."""
    shape: Any = node.inputs[1].shape
    op: Any = node.op
    if not all(isinstance(d, int) for d in (*shape, op.groups)) or 0 in shape:
        return False
    joined = op.groups == 1 and shape[1] < JOINED and op.dilation[-1] == 1 == op.input_dilation[-1]
    return max(dim_prod(shape[2:-1] if joined else shape[2:]), shape[-1]) <= MOST_TAPS


def _is_served(node: Node) -> bool:
    """Whether a convolution is better with channels last."""
    x, w = node.inputs
    op: Any = node.op
    outputs, channels = w.shape[:2]
    of_bytes = x.dtype in (i8, u8) and (channels % 4 == 0 or outputs == op.groups)
    if not (x.dtype.is_float or of_bytes) or not _is_known(node):
        return False
    if channels == 1 and outputs == op.groups and outputs > 1:  # depth-wise
        return True
    group = outputs // op.groups
    beside = op.groups > 1 and x.dtype.is_float and channels <= group and group in BESIDE
    return beside or group >= FEWEST_OUTPUTS or channels >= MANY_CHANNELS


def _stays(node: Node) -> bool:
    """Whether a convolution by itself is better with channels first: depth-wise, of very few channels, or a matmul
    whose rows are planes of the result. Where channels last are no choice, that does not depend on how wide lines are:
    the sums of loops have another order, and symbols may have any width."""
    if node.op.name != "conv" or node.inputs[0].dtype is not f32 or not _is_known(node):
        return False
    if is_product(node):
        return _fills_vectors(dim_prod(node.inputs[0].shape[2:]))
    op: Any = node.op
    outputs, channels, *kernel = node.inputs[1].shape
    counts = [c for c in node.types[0].shape[-1 if op.groups == 1 else 2 :] if isinstance(c, int)]
    if not all(d == 1 for d in op.input_dilation) or (any(c < NARROW for c in counts) and _is_served(node)):
        return False
    if _is_matrix_product(node) or dim_prod(kernel) == 1:
        return False
    if op.groups == 1:
        return channels <= FEW_CHANNELS and op.stride[-1] <= MOST_STRIDE and _fits_lines(node)
    return channels == 1 and outputs == op.groups and len(kernel) == 2 and op.stride[1] <= 2


def _fits_lines(node: Node) -> bool:
    """Whether taps of few channels are better seen along lines: of planes, or of volumes whose lines fill vectors."""
    op: Any = node.op
    _, channels, *kernel = node.inputs[1].shape
    products, width = channels * dim_prod(kernel), node.types[0].shape[-1]
    if len(kernel) <= 2 and products <= MOST_GATHERED:
        return True
    lanes, most = VECTOR // 2, MOST_ALONG if len(kernel) <= 2 else MOST_IN_VOLUME
    filled = not _is_served(node) or (isinstance(width, int) and -(-width // lanes) * lanes <= IDLE * width)
    return filled and products <= most and len(kernel) <= 3 and channels * dim_prod(kernel[:-1]) * op.stride[-1] <= 256


def _users(order: Sequence[Node]) -> dict[int, list[Node]]:
    found: dict[int, list[Node]] = {}
    for node in order:
        for x in node.inputs:
            found.setdefault(id(x.node), []).append(node)
    return found


def _is_alone(node: Node, wanted: set[int], users: dict[int, list[Node]]) -> bool:
    """Whether neither a convolution nor a transpose is reached from here through ops that follow their inputs."""
    seen, stack = {id(node)}, [node]
    while stack:
        current = stack.pop()
        before = [node.inputs[0].node] if current is node else [x.node for x in current.inputs]
        for other in (*before, *users.get(id(current), ())):
            if id(other) in seen:
                continue
            if id(other) in wanted or other.op.name == "transpose":
                return False
            seen.add(id(other))
            if other.op.elementwise or other.op.name.startswith("reduce_") or other.op.name in FOLLOWING:
                stack.append(other)
    return True


def _is_served_gradient(node: Node) -> bool:
    """Whether the sizes of a weight gradient are known: its sums over pixels are always better with channels last."""
    op: Any = node.op
    return (
        node.inputs[0].dtype.is_float and all(isinstance(d, int) for d in (*op.shape, op.groups)) and 0 not in op.shape
    )


POOLS = ("pool_max", "pool_min", "pool_sum", "pool_prod", "pool_backward")
FOLLOWING = frozenset((
    "concat", "slice", "pad", "flip", "resize_axis", "softmax", "reshape", "broadcast_to", "resize_nearest_2x", *POOLS,
))  # fmt: skip
SERVED: dict[str, Callable[[Node], bool]] = {
    "conv": _is_served, "conv_filled": _is_served, "conv_backward_weight": _is_served_gradient,
}  # fmt: skip


def _is_matrix_product(node: Node) -> bool:
    """A point-wise convolution is a matmul in either order, one a group; converting would only cost.

    But pixels of small maps fill vectors badly: 49 take four of 16, while any number of outputs fits."""
    if node.op.name != "conv" or not node.inputs[0].dtype.is_float:
        return False
    op: Any = node.op
    pads = all(p == (0, 0) for p in op.padding)
    plain = all(v == 1 for values in (op.stride, op.input_dilation) for v in values)
    if not (pads and plain and all(d == 1 for d in node.inputs[1].shape[2:])):
        return False
    if op.groups != 1 and not (_is_known(node) and _fewest(node) >= FEWEST_OUTPUTS):
        return False
    pixels = dim_prod(node.inputs[0].shape[2:])
    wide = all(isinstance(d, int) and d >= VECTOR for d in node.inputs[1].shape[:2])
    return not wide or pixels == 1 or _fills_vectors(pixels)


def _fills_vectors(pixels: Dim) -> bool:
    """Whether few lanes stay empty where vectors hold the pixels of a map."""
    if not isinstance(pixels, int) or pixels >= FEW_PIXELS:
        return True
    return -(-pixels // VECTOR) * VECTOR <= FITTING * pixels


def _fewest(node: Node) -> int:
    """Channels or outputs of a group, whichever are fewer."""
    outputs, channels = (int(d) for d in node.inputs[1].shape[:2])
    return min(channels, outputs // int(node.op.static_fields()["groups"]))


def _as_products(value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
    """A point-wise convolution of groups as a matmul for each of them."""
    op: Any = value.node.op
    if not _is_matrix_product(value.node) or op.groups == 1:
        return None
    x, w = inputs
    outputs, channels = w.shape[:2]
    rows = reshape(w, (op.groups, outputs // op.groups, channels))
    planes = reshape(x, (x.shape[0], op.groups, channels, dim_prod(x.shape[2:])))
    return [reshape(rows @ planes, value.shape)]


def _on_planes(node: Node, x: Value, w: Value) -> Value:
    """A convolution that keeps channels first; a line is a plane of one."""
    op: Any = node.op
    kept = ConvFirst(op.stride, op.padding, op.dilation, op.groups, op.input_dilation)
    if x.ndim != 3:
        return kept(x, w)
    one: dict[str, Any] = {"stride": 1, "padding": (0, 0), "dilation": 1, "input_dilation": 1}
    fields: dict[str, Any] = {k: (v, *getattr(kept, k)) for k, v in one.items()}
    kept = replace(kept, **fields)
    planes, taps = (reshape(v, (*v.shape[:2], 1, v.shape[2])) for v in (x, w))
    return reshape(kept(planes, taps), node.types[0].shape)


class _Layouts:
    """Values of the new graph by those of the old, in the forms that were asked for so far."""

    def __init__(self, wanted: set[int], alone: set[int]) -> None:
        self.wanted, self.alone = wanted, alone
        self._first: dict[Value, Value] = {}
        self._last: dict[Value, Value] = {}
        self._native: set[Value] = set()  # values that were made with channels last
        self.rules: dict[str, Callable[[Node], bool]] = {
            "conv": self._conv, "conv_filled": self._conv, "conv_backward_weight": self._weight_gradient,
            "concat": self._concat, "slice": self._by_axes, "pad": self._by_axes,
            "flip": self._with_axes, "resize_axis": self._with_axis, "softmax": self._with_axis,
            "reshape": self._reshape, "broadcast_to": self._broadcast, "resize_nearest_2x": self._doubled,
            **dict.fromkeys(POOLS, self._pool),
        }  # fmt: skip

    def first(self, x: Value) -> Value:
        """A value in its own order of axes."""
        if x not in self._first:
            self._first[x] = _swap(self._last[x], to_first(x.ndim - 2)) if x in self._last else x
        return self._first[x]

    def last(self, x: Value) -> Value:
        """A value [N, C, *sizes] as [N, *sizes, C]."""
        if x not in self._last:
            made = self._made_last(x) if self._follows(x) else _swap(self.first(x), to_last(x.ndim - 2))
            self._last[x] = made
        return self._last[x]

    def _follows(self, x: Value, depth: int = 0) -> bool:
        """Whether a value comes element by element from others that have channels last already."""
        node = x.node
        if not node.op.elementwise or len(node.types) > 1 or depth == MOST_FOLLOWED:
            return False
        whole = [y for y in node.inputs if y.shape == x.shape]
        return bool(whole) and all(y in self._last or self._follows(y, depth + 1) for y in whole)

    def _made_last(self, x: Value) -> Value:
        return as_tuple(x.node.op(*(self._operand(y, x.ndim) for y in x.node.inputs)))[0]

    def add(self, node: Node) -> None:
        """The node in the new graph, in the form that its inputs suggest."""
        if id(node) in self.wanted or any(x in self._native for x in node.inputs):
            rule = self._rule(node)
            if rule is not None and rule(node):
                return
        inputs = tuple(self.first(x) for x in node.inputs)
        if inputs != node.inputs:
            for old, new in zip(node.outputs, as_tuple(node.op(*inputs)), strict=True):
                self._first[old] = new

    def _rule(self, node: Node) -> Callable[[Node], bool] | None:
        if node.op.elementwise:
            return self._elementwise
        return self._reduce if node.op.name.startswith("reduce_") else self.rules.get(node.op.name)

    # rules: whether the node was made from inputs with channels last

    def _give(self, node: Node, made: Value) -> bool:
        out = Value(node, 0)
        self._last[out] = made
        self._native.add(out)
        return True

    def _conv(self, node: Node) -> bool:
        if id(node) not in self.wanted:
            return False
        x, w = node.inputs
        op: Any = node.op
        if id(node) in self.alone:
            convolved = as_product if is_product(node) else _on_planes
            self._first[Value(node, 0)] = convolved(node, self.first(x), self.first(w))
            return True
        if is_transposed(node):
            return self._give(node, as_plain(node, self.last(x), self.first(w)))
        fields = (op.stride, op.padding, op.dilation, op.groups, op.input_dilation)
        made = ConvLastFilled(*fields, op.outside()) if op.outside() else ConvLast(*fields)
        return self._give(node, made(self.last(x), transpose(self.first(w), weight_to_last(x.ndim - 2))))

    def _weight_gradient(self, node: Node) -> bool:
        if id(node) not in self.wanted:
            return False
        op: Any = node.op
        made = ConvLastBackwardWeight(op.stride, op.padding, op.dilation, op.groups, op.shape[2:])
        weights = made(*map(self.last, node.inputs))
        self._first[Value(node, 0)] = transpose(weights, weight_to_first(weights.ndim - 2))
        return True

    def _elementwise(self, node: Node) -> bool:
        """Operands of lower rank get the axes that broadcasting would give them."""
        out = node.types[0]
        whole = [x for x in node.inputs if x in self._native and x.shape == out.shape]
        if not whole or len(node.types) > 1:
            return False
        return self._give(node, node.op(*(self._operand(x, out.ndim) for x in node.inputs)))

    def _operand(self, x: Value, ndim: int) -> Value:
        if x.ndim == ndim:
            return self.last(x)
        if x.ndim == 0:
            return self.first(x)
        return _swap(reshape(self.first(x), ((1,) * (ndim - x.ndim)) + x.shape), to_last(ndim - 2))

    def _concat(self, node: Node) -> bool:
        op: Any = node.op
        axis = to_last(node.inputs[0].ndim - 2).index(op.axis)
        return self._give(node, replace(op, axis=axis)(*map(self.last, node.inputs)))

    def _by_axes(self, node: Node) -> bool:
        """Ops whose fields have an entry for each axis."""
        (x,) = node.inputs
        op: Any = node.op
        order = to_last(x.ndim - 2)
        moved = {k: tuple(v[p] for p in order) for k, v in op.static_fields().items() if isinstance(v, tuple)}
        return self._give(node, replace(op, **moved)(self.last(x)))

    def _with_axis(self, node: Node) -> bool:
        (x,) = node.inputs
        op: Any = node.op
        return self._give(node, replace(op, axis=to_last(x.ndim - 2).index(op.axis))(self.last(x)))

    def _with_axes(self, node: Node) -> bool:
        (x,) = node.inputs
        op: Any = node.op
        order = to_last(x.ndim - 2)
        return self._give(node, replace(op, axes=tuple(sorted(order.index(a) for a in op.axes)))(self.last(x)))

    def _pool(self, node: Node) -> bool:
        """Windows over the axes in front of the channels have one channel each."""
        op: Any = node.op
        if op.rank != node.types[0].ndim - 2:
            return False
        return self._give(node, _with_channels(op)(*map(self.last, node.inputs)))

    def _reduce(self, node: Node) -> bool:
        (x,) = node.inputs
        op: Any = node.op
        order = to_last(x.ndim - 2)
        made = replace(op, axes=tuple(sorted(order.index(a) for a in op.axes)))(self.last(x))
        return self._arranged(node, made, [a for a in order if a not in op.axes])

    def _arranged(self, node: Node, made: Value, axes: list[int]) -> bool:
        """Note a value whose axes are these of the node's input, in this order."""
        out = Value(node, 0)
        ranked = [sorted(axes).index(a) for a in axes]
        if ranked == sorted(ranked):
            self._first[out] = made
        elif out.ndim >= 3 and tuple(ranked) == to_last(out.ndim - 2):
            return self._give(node, made)
        else:
            self._first[out] = transpose(made, [ranked.index(i) for i in range(len(ranked))])
        return True

    def _doubled(self, node: Node) -> bool:
        """Every element four times, along the two axes in front of the channels."""
        (x,) = node.inputs
        *lead, h, w, c = self.last(x).shape
        spread = broadcast_to(reshape(self.last(x), (*lead, h, 1, w, 1, c)), (*lead, h, 2, w, 2, c))
        return self._give(node, reshape(spread, (*lead, h * 2, w * 2, c))) if x.ndim > 3 else False

    def _reshape(self, node: Node) -> bool:
        """Sizes merged, split or dropped around channels that stay whole."""
        (x,) = node.inputs
        shape = node.types[0].shape
        out = Value(node, 0)
        if all(d == 1 for d in x.shape[2:]):  # both orders are one
            self._first[out] = reshape(self.last(x), shape)
            return True
        if len(shape) < 3 or shape[:2] != x.shape[:2]:
            return False
        return self._give(node, reshape(self.last(x), (shape[0], *shape[2:], shape[1])))

    def _broadcast(self, node: Node) -> bool:
        (x,) = node.inputs
        shape = node.types[0].shape
        if x.ndim != len(shape):
            return False
        return self._give(node, broadcast_to(self.last(x), [shape[p] for p in to_last(x.ndim - 2)]))


def _with_channels(op: Any) -> Any:
    """A window op over [*sizes, C]."""
    one: dict[str, Any] = {"kernel": 1, "stride": 1, "padding": (0, 0), "dilation": 1}
    return replace(op, **{k: (*getattr(op, k), v) for k, v in one.items()})


def _swap(x: Value, order: Sequence[int]) -> Value:
    """A transpose, or a reshape where no element moves."""
    shape: list[Dim] = [x.shape[p] for p in order]
    kept = [p for p in order if x.shape[p] != 1]
    return reshape(x, shape) if kept == sorted(kept) else transpose(x, order)
