"""Matmuls and convolutions as StableHLO. Half precision accumulates in f32, small integers in i32."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np

from strata.backends.stablehlo.build import Hlo, StableHloBuilder, array, kind, kind_of, numbers
from strata.backends.stablehlo.kernels import gather
from strata.backends.stablehlo.table import Results, Writer, rule, types_of
from strata.core import DType, f32, f64, i32, i64


def _sums(x: DType, y: DType, result: DType) -> tuple[DType, DType]:
    """The types that factors are read in and that products add up in."""
    if x.is_float and x.bits < 32:
        return (x if x.bits == 16 else f32), f32
    if x is y and result is x and not x.is_int:
        return x, x
    return (i32, i32) if result.bits <= 32 else (i64, i64)


def dot(
    b: StableHloBuilder, x: Hlo, y: Hlo, contract: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]], result: DType,
) -> Hlo:  # fmt: skip
    """dot_general: batch axes first, then the free ones of x, then those of y."""
    read, added = _sums(x.dtype, y.dtype, result)
    if added.is_int and result.kind == "uint" and result.bits >= 32:
        read = added = result
    x, y = b.convert(x, read), b.convert(y, read)
    free = [
        [n for a, n in enumerate(v.shape) if a not in (*c, *p)] for v, c, p in zip((x, y), contract, batch, strict=True)
    ]
    shape = [*(x.shape[a] for a in batch[0]), *free[0], *free[1]]
    if x.size == 0 or y.size == 0:
        return b.const(0, result, shape)
    sides = f", batching_dims = {numbers(batch[0])} x {numbers(batch[1])}" if len(batch[0]) else ""
    text = (
        f"stablehlo.dot_general {x.name}, {y.name}{sides}, contracting_dims = {numbers(contract[0])} x "
        f"{numbers(contract[1])}, precision = [HIGHEST, HIGHEST] : ({kind(x)}, {kind(y)}) -> {kind_of(added, shape)}"
    )
    return b.convert(b.op(text, added, shape), result)


@rule("matmul")
def _matmul(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    x, y = xs
    b, result = w.b, types_of(op, xs)[0].dtype
    lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    if y.ndim == 2:  # one matmul of all rows
        return dot(b, x, y, ([x.ndim - 1], [0]), ([], []), result)
    x, y = b.trailing(x, (*lead, *x.shape[-2:])), b.trailing(y, (*lead, *y.shape[-2:]))
    axes = list(range(len(lead)))
    return dot(b, x, y, ([len(lead) + 1], [len(lead)]), (axes, axes), result)


@rule("dot_general")
def _dot_general(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    result = types_of(op, xs)[0].dtype
    x, y = xs
    return dot(w.b, x, y, (op.left_contract, op.right_contract), (op.left_batch, op.right_batch), result)


@rule("conv", "conv_first", "conv_filled")
def _conv(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    rank = xs[0].ndim - 2
    axes = range(2, rank + 2)
    return _convolved(w.b, op, *xs, spatial=(axes, axes, axes), features=((0, 1), (1, 0), (0, 1)))


@rule("conv_last", "conv_last_filled")
def _conv_last(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    rank = xs[0].ndim - 2
    inner, kernel = range(1, rank + 1), range(rank)
    return _convolved(
        w.b, op, *xs, spatial=(inner, kernel, inner), features=((0, rank + 1), (rank, rank + 1), (0, rank + 1))
    )


def _convolved(
    b: StableHloBuilder, op: Any, x: Hlo, weights: Hlo, *, spatial: Sequence[Sequence[int]],
    features: Sequence[tuple[int, int]],
) -> Hlo:  # fmt: skip
    """`spatial` axes and the two others (batch and channels, inputs and outputs) of x, weights and result."""
    (made,) = types_of(op, (x, weights))
    if 0 in (x.size, weights.size, *made.static_shape):
        return b.const(0, made.dtype, made.static_shape)
    read, added = _sums(x.dtype, weights.dtype, made.dtype)
    if added.is_int and made.dtype.kind == "uint" and made.dtype.bits >= 32:
        read = added = made.dtype
    x, weights = b.convert(x, read), b.convert(weights, read)
    padding, spread = op.padding, op.input_dilation
    outside = getattr(op, "outside", lambda: 0)()
    if outside != 0:  # what lies around and between is not zero
        low, high, between = [0] * x.ndim, [0] * x.ndim, [0] * x.ndim
        for axis, (first, last), gap in zip(spatial[0], padding, spread, strict=True):
            low[axis], high[axis], between[axis] = first, last, gap - 1
        x = b.pad(x, outside, low, high, between)
        padding, spread = [(0, 0)] * len(padding), [1] * len(spread)
    if added.is_complex:
        return _complex_convolved(b, op, x, weights, made, padding, spread, spatial, features)
    convolved = _tap_by_tap if added.is_int else _convolution  # GPUs of XLA have no convolutions of integers
    return b.convert(
        convolved(b, op, x, weights, added, made.static_shape, padding, spread, spatial, features), made.dtype
    )


def _tap_by_tap(
    b: StableHloBuilder, op: Any, x: Hlo, weights: Hlo, added: DType, shape: Sequence[int], padding: Any, spread: Any,
    spatial: Sequence[Sequence[int]], features: Sequence[tuple[int, int]],
) -> Hlo:  # fmt: skip
    """A matmul for each place in the window, and their sum."""
    (batch, channels), (inputs, outputs), (to_batch, to_channels) = features
    x = b.transpose(x, (batch, *spatial[0], channels))
    weights = b.transpose(weights, (*spatial[1], inputs, outputs))
    x = b.pad(
        x, 0, [0, *(low for low, _ in padding), 0], [0, *(high for _, high in padding), 0],
        [0, *(n - 1 for n in spread), 0],
    )  # fmt: skip
    rows, counts, groups = shape[to_batch], [shape[a] for a in spatial[2]], op.groups
    kernel, (depth, width) = weights.shape[:-2], weights.shape[-2:]
    total: Hlo | None = None
    for tap in product(*(range(n) for n in kernel)):
        start = [0, *(j * d for j, d in zip(tap, op.dilation, strict=True)), 0]
        stop = [
            rows,
            *(s + (n - 1) * t + 1 for s, n, t in zip(start[1:-1], counts, op.stride, strict=True)),
            x.shape[-1],
        ]
        part = b.reshape(b.slice(x, start, stop, [1, *op.stride, 1]), (rows * prod(counts), groups, depth))
        factors = b.slice(weights, [*tap, 0, 0], [*(j + 1 for j in tap), depth, width])
        factors = b.reshape(factors, (depth, groups, width // groups))
        made = dot(b, part, factors, ([2], [0]), ([1], [1]), added)
        total = made if total is None else b.same("add", total, made)
    assert total is not None
    whole = b.reshape(b.transpose(total, (1, 0, 2)), (rows, *counts, width))
    axes = [to_batch, *spatial[2], to_channels]  # where the axes of `whole` belong
    return b.transpose(whole, [axes.index(a) for a in range(len(axes))])


def _convolution(
    b: StableHloBuilder, op: Any, x: Hlo, weights: Hlo, added: DType, shape: Sequence[int], padding: Any, spread: Any,
    spatial: Sequence[Sequence[int]], features: Sequence[tuple[int, int]],
) -> Hlo:  # fmt: skip
    (batch, channels), (inputs, outputs), (to_batch, to_channels) = features
    pairs = ", ".join(f"[{low}, {high}]" for low, high in padding)
    numbers_of = (
        f"#stablehlo.conv<raw input_batch_dimension = {batch}, input_feature_dimension = {channels}, "
        f"input_spatial_dimensions = {list(spatial[0])}, kernel_input_feature_dimension = {inputs}, "
        f"kernel_output_feature_dimension = {outputs}, kernel_spatial_dimensions = {list(spatial[1])}, "
        f"output_batch_dimension = {to_batch}, output_feature_dimension = {to_channels}, "
        f"output_spatial_dimensions = {list(spatial[2])}>"
    )
    attributes = (
        f"window_strides = {array(op.stride)}, padding = dense<[{pairs}]> : tensor<{len(padding)}x2xi64>, "
        f"lhs_dilation = {array(spread)}, rhs_dilation = {array(op.dilation)}, dimension_numbers = {numbers_of}, "
        f"feature_group_count = {op.groups} : i64, batch_group_count = 1 : i64, "
        "precision_config = [#stablehlo<precision HIGHEST>, #stablehlo<precision HIGHEST>]"
    )
    return b.many("stablehlo.convolution", [x, weights], attributes, [(added, shape)])[0]


def _complex_convolved(
    b: StableHloBuilder, op: Any, x: Hlo, weights: Hlo, made: Any, padding: Any, spread: Any,
    spatial: Sequence[Sequence[int]], features: Sequence[tuple[int, int]],
) -> Hlo:  # fmt: skip
    """Four real convolutions."""
    real = f64 if made.dtype.real is f64 else f32

    def part(which: str, v: Hlo) -> Hlo:
        return b.to(f"stablehlo.{which}", [v], real, v.shape)

    def one(p: str, q: str) -> Hlo:
        return _convolution(b, op, part(p, x), part(q, weights), real, made.shape, padding, spread, spatial, features)

    re = b.same("subtract", one("real", "real"), one("imag", "imag"))
    im = b.same("add", one("real", "imag"), one("imag", "real"))
    return b.to("stablehlo.complex", [re, im], made.dtype, made.shape)


@rule("grouped_matmul")
def _grouped_matmul(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    """Few rows bring their own matrices; many go through every expert, those of others as zeros."""
    x, weights, ids = xs
    b, (made,) = w.b, types_of(op, xs)
    if 0 in (x.size, weights.size):
        return b.const(0, made.dtype, made.static_shape)
    if x.shape[0] <= weights.shape[0]:
        own = gather(b, weights, b.reshape(b.convert(ids, i64), (*ids.shape, 1)), [0])
        return dot(b, x, own, ([1], [1]), ([0], [0]), made.dtype)
    ids = b.convert(ids, i64)

    def add(expert: Hlo, total: Hlo) -> list[Hlo]:
        mine = b.compare("EQ", ids, b.spread(expert, ids.shape, ()))
        rows = b.select(b.spread(mine, x.shape, (0,)), x, b.like(0, x))
        return [b.same("add", total, dot(b, rows, b.row(weights, expert), ([1], [0]), ([], []), total.dtype))]

    total = b.const(0, _sums(x.dtype, x.dtype, made.dtype)[1], made.static_shape)
    return b.convert(b.repeat(weights.shape[0], [total], add)[0], made.dtype)


@rule("grouped_outer")
def _grouped_outer(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    x, y, ids = xs
    b, (made,) = w.b, types_of(op, xs)
    if 0 in (x.size, y.size, op.experts):
        return b.const(0, made.dtype, made.static_shape)
    ids = b.convert(ids, i64)

    def add(expert: Hlo, all_of: Hlo) -> list[Hlo]:
        mine = b.compare("EQ", ids, b.spread(expert, ids.shape, ()))
        rows = b.select(b.spread(mine, x.shape, (0,)), x, b.like(0, x))
        return [b.set_row(all_of, dot(b, rows, y, ([0], [0]), ([], []), made.dtype), expert)]

    return b.repeat(int(op.experts), [b.const(0, made.dtype, made.static_shape)], add)[0]
