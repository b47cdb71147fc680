"""Small kernels that several tests share, each with a NumPy function to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import Dim, DType, TensorType, f32, i64
from strata.kernel import Expr, Kernel, KernelBuilder

Array = Any


@dataclass(frozen=True)
class Sample:
    """A kernel, the types of its inputs, and what it should compute."""

    kernel: Kernel
    reference: Callable[..., Any]

    def arrays(self, sizes: dict[str, int], seed: int = 0) -> list[Array]:
        rng = np.random.default_rng(seed)
        made = []
        for buffer in self.kernel.inputs:
            shape = buffer.type.bind(sizes).static_shape
            if buffer.dtype.is_int:
                made.append(rng.integers(0, 4, shape).astype(buffer.dtype.np))
            else:
                made.append(rng.normal(size=shape).astype(buffer.dtype.np))
        return made


def elementwise(shape: tuple[Dim, ...], function: Callable[..., Expr], dtype: DType = f32, inputs: int = 1) -> Kernel:
    k = KernelBuilder("elementwise")
    views = [k.input(f"x{n}", TensorType(dtype, shape)) for n in range(inputs)]
    k.output("y", TensorType(dtype, shape), lambda index: function(k, *(v[index] for v in views)))
    return k.build()


def softmax(rows: Dim, columns: Dim, dtype: DType = f32) -> Sample:
    k = KernelBuilder("softmax")
    x = k.input("x", dtype[rows, columns])

    def value(index: tuple[Expr, ...]) -> Expr:
        r, c = index
        high = k.reduce("max", (columns,), lambda j: k.accumulate(x[r, j]))
        total = k.reduce("sum", (columns,), lambda j: k.exp(k.accumulate(x[r, j]) - high))
        return (k.exp(k.accumulate(x[r, c]) - high) / total).cast(dtype)

    k.output("y", dtype[rows, columns], value)

    def reference(x: Array) -> Array:
        wide = x.astype(np.float64)
        e = np.exp(wide - wide.max(1, keepdims=True, initial=-np.inf))
        return e / e.sum(1, keepdims=True)

    return Sample(k.build(), reference)


def layernorm(rows: Dim, columns: Dim) -> Sample:
    """Residual, norm, scale and shift, with mean and 1/deviation as further outputs."""
    k = KernelBuilder("layernorm")
    x, residual = k.input("x", f32[rows, columns]), k.input("residual", f32[rows, columns])
    gain, bias = k.input("gain", f32[columns,]), k.input("bias", f32[columns,])
    count = k.cast(k.index(columns), f32)
    total = k.view(f32[rows, columns], lambda ix: x[ix] + residual[ix])
    mean = k.view(f32[rows,], lambda ix: k.reduce("sum", (columns,), lambda j: total[ix[0], j]) / count)

    def deviation(index: tuple[Expr, ...]) -> Expr:
        (r,) = index

        def square(j: Expr) -> Expr:
            d = total[r, j] - mean[r]
            return d * d

        return k.rsqrt(k.reduce("sum", (columns,), square) / count + 1e-5)

    scale = k.view(f32[rows,], deviation)
    k.output("y", f32[rows, columns], lambda ix: (total[ix] - mean[ix[0]]) * scale[ix[0]] * gain[ix[1]] + bias[ix[1]])
    k.output("mean", f32[rows,], mean)
    k.output("scale", f32[rows,], scale)

    def reference(x: Array, residual: Array, gain: Array, bias: Array) -> tuple[Array, ...]:
        t = (x + residual).astype(np.float64)
        mean = t.mean(1)
        scale = 1 / np.sqrt(((t - mean[:, None]) ** 2).mean(1) + 1e-5)
        return (t - mean[:, None]) * scale[:, None] * gain + bias, mean, scale

    return Sample(k.build(), reference)


def reduction(shape: tuple[Dim, ...], axes: tuple[int, ...], kind: str = "sum", dtype: DType = f32) -> Sample:
    k = KernelBuilder("reduction")
    x = k.input("x", TensorType(dtype, shape))
    kept = tuple(d for n, d in enumerate(shape) if n not in axes)

    def value(index: tuple[Expr, ...]) -> Expr:
        def body(*reduced: Expr) -> Expr:
            rest, inner = iter(index), iter(reduced)
            return x[tuple(next(inner) if n in axes else next(rest) for n in range(len(shape)))]

        return k.reduce(kind, tuple(shape[a] for a in axes), body)

    out = i64 if kind.startswith("arg") else dtype
    k.output("y", TensorType(out, kept), value)

    def reference(x: Array) -> Array:
        if kind.startswith("arg"):
            return getattr(np, kind)(x, axis=axes[0])
        wide = x.astype(np.float64) if dtype.is_float else x
        extra = {"initial": -np.inf if kind == "max" else np.inf} if kind in ("max", "min") and dtype.is_float else {}
        return getattr(np, kind)(wide, axis=axes, **extra)

    return Sample(k.build(), reference)


def transpose(shape: tuple[Dim, ...], order: tuple[int, ...]) -> Sample:
    k = KernelBuilder("transpose")
    x = k.input("x", TensorType(f32, shape))
    inverse = tuple(order.index(n) for n in range(len(order)))
    k.output("y", TensorType(f32, tuple(shape[n] for n in order)), lambda ix: x[tuple(ix[n] for n in inverse)])
    return Sample(k.build(), lambda x: x.transpose(order))


def gather(rows: Dim, count: Dim, width: Dim) -> Sample:
    k = KernelBuilder("gather")
    table, ids = k.input("table", f32[rows, width]), k.input("ids", i64[count,])
    k.output("y", f32[count, width], lambda ix: table[ids[ix[0]], ix[1]])
    return Sample(k.build(), lambda table, ids: table[ids])


def reshape(shape: tuple[Dim, ...], to: tuple[Dim, ...]) -> Sample:
    k = KernelBuilder("reshape")
    x = k.input("x", TensorType(f32, shape))
    k.output("y", TensorType(f32, to), lambda ix: x[k.unflatten(k.flatten(ix, to), shape)] * 2.0)
    return Sample(k.build(), lambda x: x.reshape(-1) * 2)


def merge_heads(batch: Dim, heads: Dim, length: Dim, width: Dim) -> Sample:
    """[B, H, S, D] to [B * S, H * D]."""
    k = KernelBuilder("merge_heads")
    x = k.input("x", f32[batch, heads, length, width])
    turned = k.view(f32[batch, length, heads, width], lambda ix: x[ix[0], ix[2], ix[1], ix[3]])
    to = (batch * length, heads * width)
    k.output("y", TensorType(f32, to), lambda ix: turned[k.unflatten(k.flatten(ix, to), turned.shape)])
    return Sample(
        k.build(), lambda x: x.transpose(0, 2, 1, 3).reshape(x.shape[0] * x.shape[2], x.shape[1] * x.shape[3])
    )


def pad(rows: Dim, columns: Dim, before: int, after: int) -> Sample:
    k = KernelBuilder("pad")
    x = k.input("x", f32[rows, columns])

    def value(index: tuple[Expr, ...]) -> Expr:
        r, c = index
        inside = k.all_of(c >= before, c < k.index(columns) + before)
        return k.guard(inside, lambda: x[r, c - before], 7.0)

    k.output("y", f32[rows, columns + before + after], value)
    return Sample(k.build(), lambda x: np.pad(x, ((0, 0), (before, after)), constant_values=7))


def matmul(rows: Dim, inner: Dim, columns: Dim) -> Sample:
    k = KernelBuilder("matmul")
    a, b = k.input("a", f32[rows, inner]), k.input("b", f32[inner, columns])
    k.output("y", f32[rows, columns], lambda ix: k.reduce("sum", (inner,), lambda j: a[ix[0], j] * b[j, ix[1]]))
    return Sample(k.build(), lambda a, b: a.astype(np.float64) @ b)


def concatenate(left: Dim, right: Dim, width: Dim) -> Sample:
    k = KernelBuilder("concatenate")
    x, y = k.input("x", f32[left, width]), k.input("y", f32[right, width])
    out = k.output_buffer("z", f32[left + right, width])
    for view, offset in ((x, 0), (y, left)):
        axes = k.axes(view.shape)
        k.store(out, axes, (axes[0] + k.index(offset), axes[1]), view[axes])
    return Sample(k.build(), lambda x, y: np.concatenate([x, y]))


def cumulative(rows: Dim, columns: Dim, axis: int, *, reverse: bool = False, exclusive: bool = False) -> Sample:
    k = KernelBuilder("cumulative")
    x = k.input("x", f32[rows, columns])
    extent = (rows, columns)[axis]

    def value(index: tuple[Expr, ...]) -> Expr:
        def at(j: Expr) -> Expr:
            j = k.index(extent) - 1 - j if reverse else j
            return x[j, index[1]] if axis == 0 else x[index[0], j]

        position = k.index(extent) - 1 - index[axis] if reverse else index[axis]
        return k.scan("sum", extent, at, position, exclusive=exclusive)

    k.output("y", f32[rows, columns], value)

    def reference(x: Array) -> Array:
        x = x.astype(np.float64)
        x = np.flip(x, axis) if reverse else x
        total = np.cumsum(x, axis) - (x if exclusive else 0)
        return np.flip(total, axis) if reverse else total

    return Sample(k.build(), reference)
