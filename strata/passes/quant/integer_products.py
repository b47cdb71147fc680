"""Integer matmuls and convolutions: products of dequantised values become i8 kernels.

    (x - zx) · sx  ×  (w - zw) · sw   =   (Σ x·w - zx·Σ w - zw·Σ x + n·zx·zw) · (sx · sw)

The sum of bytes is exact in i32, where the sum of dequantised numbers is rounded at every step: results differ by what
f32 loses. What is after the matmul (bias, activation, quantisation of the result) becomes its kernel's epilogue, and
sums of weights and products of scales are computed once, when parameters are bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from strata.core import Dim, bounds, dim_prod, f32, i8, i32, u8
from strata.mir import Graph, Input, Node, Param, Value, constant, evaluate_values
from strata.ops import Conv, ConvFilled, ConvLast, MatMul, cast, pad, reduce_sum, reshape, transpose
from strata.passes.base import Pass, PassContext, register, rewrite

MOST_TERMS = 1 << 16  # of a sum that cannot leave i32: 255 · 128 each
FEW = 8  # nodes that a constant is looked for through
WORD = 4  # channels come in groups of this size


@dataclass(frozen=True, slots=True)
class Codes:
    """A value as (codes - zero) · scale; no scale: the whole numbers themselves."""

    codes: Value  # u8 or i8
    zero: Value | None  # i32
    scale: Value | None  # f32

    def varies(self, axis: int) -> bool:
        """Whether scale or zero differ along an axis."""
        ndim = self.codes.ndim
        for part in (self.zero, self.scale):
            at = axis - ndim + part.ndim if part is not None else -1
            if part is not None and at >= 0 and part.shape[at] != 1:
                return True
        return False


@register
@dataclass(frozen=True)
class IntegerProducts(Pass):
    """Matmuls and convolutions of dequantised codes, and of widened ones, on the codes themselves."""

    name: ClassVar[str] = "integer_products"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        if not ctx.claimed(ConvLast.name):
            return graph
        return rewrite(graph, _changed, self.name)


def _changed(value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
    node = value.node
    if node.op.name == "pool_max":
        return _pooled(node, inputs[0])
    if node.op.name not in ("matmul", "conv") or inputs[0].dtype not in (f32, i32):
        return None
    x, w = (codes_of(v) for v in inputs)
    if x is None or w is None or (x.scale is None) != (w.scale is None):
        return None
    total = _matrix_product(x, w) if node.op.name == "matmul" else _convolution(node, x, w)
    if total is None:
        return None
    if x.scale is None or w.scale is None:
        return [total]
    scale = w.scale
    if node.op.name == "conv" and scale.ndim:
        scale = reshape(scale, scale.shape[0:1] + (1,) * (value.ndim - 2))
    return [cast(total, f32) * (x.scale * scale)]


# ----------------------------------------------------------------------------------------------------- what codes are


def codes_of(x: Value) -> Codes | None:
    """A value as codes, through movements that keep scales where they are."""
    if x.dtype is i32:
        return _whole(x)
    node = x.node
    if node.op.name == "dequantize":
        return _dequantized(node)
    if node.op.name == "transpose":
        return _turned(node)
    if node.op.name == "reshape":
        found = codes_of(node.inputs[0])
        return None if found is None or not _is_uniform(found) else replace(found, codes=reshape(found.codes, x.shape))
    if node.op.name != "multiply":
        return None
    for number, scale in (node.inputs, node.inputs[::-1]):
        if number.node.op.name != "cast" or number.shape != x.shape or scale.dtype is not f32:
            continue
        found = _whole(number.node.inputs[0])
        if found is not None:
            return replace(found, scale=scale)
    return None


def _whole(x: Value) -> Codes | None:
    """Codes widened to i32, less a zero point."""
    zero = None
    if x.node.op.name == "subtract" and x.dtype is i32:
        first, zero = x.node.inputs
        if first.shape != x.shape:
            return None
        x = first
    if x.dtype is not i32 or x.node.op.name != "cast":
        return None
    codes = x.node.inputs[0]
    if codes.dtype not in (u8, i8):
        return None
    known = None if zero is None else _known(zero)
    return Codes(codes, None if known is not None and not known.any() else zero, None)


def _dequantized(node: Node) -> Codes | None:
    op: Any = node.op
    (codes,) = node.inputs
    if codes.dtype not in (u8, i8):
        return None
    zero, scale = (op.along(values, codes.ndim) for values in (op.zero_points, op.scales))
    return Codes(codes, constant(zero.astype(np.int32)) if zero.any() else None, constant(scale))


def _turned(node: Node) -> Codes | None:
    op: Any = node.op
    found = codes_of(node.inputs[0])
    if found is None:
        return None

    def turned(part: Value | None) -> Value | None:
        if part is None or part.ndim == 0:
            return part
        whole = reshape(part, (1,) * (found.codes.ndim - part.ndim) + part.shape)
        return transpose(whole, op.perm)

    return Codes(transpose(found.codes, op.perm), turned(found.zero), turned(found.scale))


def _is_uniform(found: Codes) -> bool:
    return all(part is None or part.type.size == 1 for part in (found.zero, found.scale))


def _known(x: Value) -> np.ndarray | None:
    """A value that follows from constants in a few steps."""
    seen, order = 0, [x]
    while order and seen <= FEW:
        node = order.pop().node
        if isinstance(node.op, (Input, Param)):
            return None
        order += node.inputs
        seen += 1
    return evaluate_values([x], {}, {})[0] if not order and x.type.is_static else None


def _signed(w: Codes) -> Codes:
    """The same numbers as i8 codes: u8 codes less 128, and so is their zero point."""
    if w.codes.dtype is i8:
        return w
    moved = cast(cast(w.codes, i32) - 128, i8)
    if w.zero is None:
        return Codes(moved, constant(np.int32(-128)), w.scale)
    known = _known(w.zero)
    if known is not None and (known == 128).all():
        return Codes(moved, None, w.scale)
    return Codes(moved, w.zero - 128, w.scale)


def _fits(terms: Dim) -> bool:
    most = bounds(terms)[1]
    return most is not None and most <= MOST_TERMS


# ----------------------------------------------------------------------------------------------------------- products


def _matrix_product(x: Codes, w: Codes) -> Value | None:
    """Σ (x - zx) · (w - zw) in i32."""
    if x.varies(x.codes.ndim - 1) or w.varies(w.codes.ndim - 2) or not _fits(x.codes.shape[-1]):
        return None
    w = _signed(w)
    total = MatMul()(x.codes, w.codes)
    if w.zero is not None:
        total = total - _sums(cast(x.codes, i32), -1) * w.zero
    if x.zero is not None:
        weights = cast(w.codes, i32)
        total = total - _sums(weights if w.zero is None else weights - w.zero, -2) * x.zero
    return total


def _pooled(node: Node, x: Value) -> Sequence[Value] | None:
    """The greatest of dequantised codes is the greatest code, dequantised: a quarter of the memory to read."""
    found = codes_of(x) if x.dtype is f32 else None
    if found is None or found.scale is None or not _is_uniform(found):
        return None
    scale = _known(found.scale)
    if scale is None or not (scale > 0).all():
        return None
    greatest = cast(node.op(found.codes), i32)
    return [cast(greatest if found.zero is None else greatest - found.zero, f32) * found.scale]


def _sums(x: Value, axis: int) -> Value:
    """Sums along an axis, which stays."""
    shape = list(x.shape)
    shape[axis] = 1
    return reshape(reduce_sum(x, (axis,)), shape)


def _convolution(node: Node, x: Codes, w: Codes) -> Value | None:
    """The same over windows; weights have no zero point, and padding is the code of 0."""
    op: Any = node.op
    w = _signed(w)
    outputs, _, *kernel = w.codes.shape
    if w.zero is not None or not _is_uniform(x) or not _fits(dim_prod(w.codes.shape[1:])):
        return None
    if w.scale is not None and w.scale.type.size != 1 and w.scale.shape != (outputs, *(1,) * (w.codes.ndim - 1)):
        return None
    sees_outside = any(p != (0, 0) for p in op.padding) or any(d != 1 for d in op.input_dilation)
    fill = 0
    if x.zero is not None and sees_outside:
        zero = _known(x.zero)
        if zero is None:
            return None
        fill = int(zero.reshape(()))
    codes, weights = _whole_words(x.codes, w.codes, op.groups)
    if codes is None:
        return None
    fields = (op.stride, op.padding, op.dilation, op.groups, op.input_dilation)
    total = ConvFilled(*fields, fill)(codes, weights) if fill else Conv(*fields)(codes, weights)
    if x.zero is not None:
        sums = reduce_sum(cast(w.codes, i32), tuple(range(1, w.codes.ndim)))
        total = total - reshape(sums, (outputs, *(1,) * len(kernel))) * reshape(x.zero, ())
    return total


def _whole_words(x: Value, w: Value, groups: Dim) -> tuple[Value | None, Value]:
    """Channels filled up to whole words, where that is possible: weights of 0 take nothing from what is added."""
    channels = w.shape[1]
    if not isinstance(channels, int) or not isinstance(groups, int):
        return None, w
    more = -channels % WORD
    if not more or (channels == 1 and w.shape[0] == groups):  # depth-wise: every channel by itself
        return x, w
    if groups != 1:
        return None, w
    rest = [(0, 0)] * (x.ndim - 2)
    return pad(x, [(0, 0), (0, more), *rest]), pad(w, [(0, 0), (0, more), *rest])
