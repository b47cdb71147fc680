"""Matmul: batched matmul, and dot_general, which einsum and others reduce to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from strata.core import (
    Dim,
    DType,
    TensorType,
    bool_,
    broadcast_shapes,
    c64,
    dim_prod,
    f16,
    f32,
    f64,
    i8,
    i32,
    normalize_axis,
    u8,
)
from strata.mir import METHODS, Op, Sample, Value, function, op
from strata.ops.base.elementwise import lift, unbroadcast
from strata.ops.base.frontend import Operand, promoted
from strata.ops.base.movement import reshape, swapaxes, transpose

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View


def sums_type(x: DType, y: DType) -> DType | None:
    """The type of products of an x and a y, added up: i32 for bytes times i8. None where they do not go together."""
    if y is i8 and x in (i8, u8):
        return i32
    return x if x is y else None


@op("matmul")
class MatMul(Op):
    """[.., M, K] · [.., K, N] with broadcast batch axes. Half precision adds up in f32; bytes times i8 give i32."""

    dtypes = "numeric"

    def infer(self, x: TensorType, y: TensorType) -> TensorType:
        self.require(x.ndim >= 2 and y.ndim >= 2, f"needs two matrices or stacks of them, got {x} and {y}", code="S125")
        odd = next((t for t in (x, y) if t.dtype.is_bool), None)
        self.require_dtype(odd is None, f"does not take {odd}, only numeric types", code="D104")
        same = sums_type(x.dtype, y.dtype) is not None
        self.require_dtype(same, f"operands differ in dtype, {x} and {y}", code="D103")
        k, other = x.shape[-1], y.shape[-2]
        mismatch = k != other and isinstance(k, int) and isinstance(other, int)
        fix = None
        if mismatch and x.ndim == y.ndim == 2 and y.shape[-1] == k:
            fix = f"transpose the second operand (.T), which gives {x.dtype}[{x.shape[0]}, {y.shape[0]}]"
        self.require(not mismatch, f"inner sizes differ, {k} and {other}", code="S102", fix=fix)
        batch = broadcast_shapes(x.shape[:-2], y.shape[:-2], what=self.name)
        return TensorType(sums_type(x.dtype, y.dtype) or x.dtype, (*batch, x.shape[-2], y.shape[-1]))

    def numpy(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        if x.dtype.kind in "iu" and x.dtype.itemsize < 4:
            wide = np.int32 if y.dtype == np.int8 else np.int64
            return (x.astype(wide) @ y.astype(wide)).astype(np.int32 if y.dtype == np.int8 else x.dtype)
        return x @ y

    def jvp(self, x: Value, y: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        tx, ty = dx
        first = MatMul()(tx, y) if tx is not None else None
        second = MatMul()(x, ty) if ty is not None else None
        return first + second if first is not None and second is not None else first if first is not None else second

    def vjp(self, x: Value, y: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        to_x = unbroadcast(MatMul()(ct, adjoint(y)), x.shape)
        if y.ndim == 2 and x.ndim > 2:  # one wide matmul over all rows rather than a sum of small ones
            rows = dim_prod(x.shape[:-1])
            to_y = MatMul()(adjoint(reshape(x, (rows, x.shape[-1]))), reshape(ct, (rows, ct.shape[-1])))
        else:
            to_y = unbroadcast(MatMul()(adjoint(x), ct), y.shape)
        return to_x, to_y

    def vmap(self, x: Value, y: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        if batched == (True, False) and y.ndim == 2:
            return MatMul()(x, y)
        rank = max(v.ndim - b for v, b in zip((x, y), batched, strict=True))
        return MatMul()(*(lift(v, rank) if b else v for v, b in zip((x, y), batched, strict=True)))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: View) -> Expr:
        x, y = inputs
        *batch, m, n = index
        result = sums_type(x.dtype, y.dtype) or x.dtype
        accumulator = result.accumulator

        def side(v: View, row: Expr, column: Expr) -> Expr:
            return k.cast(v[(*k.broadcast(batch, v.shape[:-2]), row, column)], accumulator)

        total = k.reduce("sum", (x.shape[-1],), lambda kk: side(x, m, kk) * side(y, kk, n))
        return k.cast(total, result)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 4], f32[4, 5]), Sample(f32[2, 3, 4], f32[4, 5]), Sample(f32[3, 4], f32[2, 4, 5]),
            Sample(f32[2, 1, 3, 4], f32[5, 4, 2]), Sample(f32[3, 0], f32[0, 2]), Sample(f32[1, 1], f32[1, 1]),
            Sample(f64[0, 4], f64[4, 2]), Sample(f16[2, 3], f16[3, 2], grad=False),
            Sample(i8[3, 4], i8[4, 2], grad=False), Sample(u8[5, 7], i8[7, 3], grad=False),
            Sample(i32[3, 4], i32[4, 2], grad=False), Sample(c64[2, 3], c64[3, 2], grad=False),
        ]  # fmt: skip


def adjoint(x: Value) -> Value:
    """The transpose of the last two axes, conjugated."""
    flipped = swapaxes(x, -1, -2)
    return METHODS["conj"](flipped) if x.dtype.is_complex else flipped


@op("dot_general")
class DotGeneral(Op):
    """Contract and batch over any axes. Output axes: batch (in the left order), left free, right free."""

    left_contract: tuple[int, ...]
    right_contract: tuple[int, ...]
    left_batch: tuple[int, ...]
    right_batch: tuple[int, ...]

    def infer(self, x: TensorType, y: TensorType) -> TensorType:
        self.require(
            len(self.left_contract) == len(self.right_contract) and len(self.left_batch) == len(self.right_batch),
            "contracting and batch axes must come in pairs", code="S126",
        )  # fmt: skip
        self.require_dtype(x.dtype is y.dtype, f"operands differ in dtype, {x} and {y}", code="D103")
        for kind, t, axes in (
            ("left", x, (*self.left_contract, *self.left_batch)),
            ("right", y, (*self.right_contract, *self.right_batch)),
        ):
            ok = len(set(axes)) == len(axes) and all(0 <= a < t.ndim for a in axes)
            self.require(ok, f"{kind} axes {axes} are not distinct axes of {t}", code="S103")
        pairs = (
            *zip(self.left_contract, self.right_contract, strict=True),
            *zip(self.left_batch, self.right_batch, strict=True),
        )
        for a, b in pairs:
            same = x.shape[a] == y.shape[b] or not (isinstance(x.shape[a], int) and isinstance(y.shape[b], int))
            self.require(
                same, f"axis {a} of {x} and axis {b} of {y} differ, {x.shape[a]} and {y.shape[b]}", code="S102"
            )
        batch = [x.shape[a] for a in self.left_batch]
        left = [x.shape[a] for a in self._free(x.ndim, self.left_contract, self.left_batch)]
        right = [y.shape[a] for a in self._free(y.ndim, self.right_contract, self.right_batch)]
        return TensorType(i32 if x.dtype is i8 else x.dtype, (*batch, *left, *right))

    @staticmethod
    def _free(ndim: int, *used: tuple[int, ...]) -> list[int]:
        taken = {a for axes in used for a in axes}
        return [a for a in range(ndim) if a not in taken]

    def numpy(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        letters = [chr(ord("a") + i) for i in range(x.ndim + y.ndim)]
        left, right = letters[: x.ndim], letters[x.ndim :]
        pairs = (
            *zip(self.left_contract, self.right_contract, strict=True),
            *zip(self.left_batch, self.right_batch, strict=True),
        )
        for a, b in pairs:
            right[b] = left[a]
        free_left = [left[a] for a in self._free(x.ndim, self.left_contract, self.left_batch)]
        free_right = [right[a] for a in self._free(y.ndim, self.right_contract, self.right_batch)]
        out = [left[a] for a in self.left_batch] + free_left + free_right
        result = np.int32 if x.dtype == np.int8 else x.dtype
        wide = np.int64 if x.dtype.kind in "iu" and x.dtype.itemsize < 4 else x.dtype  # four bits have no sums in NumPy
        made = np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(out)}", x.astype(wide), y.astype(wide))
        return made.astype(result)

    def decompose(self, x: Value, y: Value) -> Value:
        if x.dtype.is_bool:  # whether any pair is true
            return METHODS["cast"](self.decompose(*(METHODS["cast"](v, i32) for v in (x, y))), x.dtype)
        free_x = self._free(x.ndim, self.left_contract, self.left_batch)
        free_y = self._free(y.ndim, self.right_contract, self.right_batch)
        out = self.infer(x.type, y.type)
        batch = [x.shape[a] for a in self.left_batch]
        k = dim_prod([x.shape[a] for a in self.left_contract])
        rows, columns = dim_prod([x.shape[a] for a in free_x]), dim_prod([y.shape[a] for a in free_y])
        left = reshape(transpose(x, [*self.left_batch, *free_x, *self.left_contract]), (*batch, rows, k))
        right = reshape(transpose(y, [*self.right_batch, *self.right_contract, *free_y]), (*batch, k, columns))
        return reshape(MatMul()(left, right), out.shape)

    @classmethod
    def samples(cls) -> list[Sample]:
        def case(*types: TensorType, axes: tuple[tuple[int, ...], ...], grad: bool = True) -> Sample:
            names = ("left_contract", "right_contract", "left_batch", "right_batch")
            return Sample(*types, grad=grad, **dict(zip(names, axes, strict=True)))

        return [
            case(f32[3, 4], f32[4, 5], axes=((1,), (0,), (), ())),
            case(f32[2, 3, 4], f32[4, 2, 5], axes=((2,), (0,), (0,), (1,))),
            case(f32[2, 3, 4], f32[3, 2, 6], axes=((0, 1), (1, 0), (), ())),
            case(f32[3], f32[2], axes=((), (), (), ())),
            case(f64[2, 0], f64[0, 3], axes=((1,), (0,), (), ())),
            case(bool_[3, 4], bool_[4, 2], axes=((1,), (0,), (), ()), grad=False),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def matmul(x: Operand, y: Operand) -> Value:
    """NumPy's `@`: vectors are promoted to matrices and the added axis is dropped again."""
    a, b = promoted(x, y)
    if a.ndim == 0 or b.ndim == 0:
        MatMul()(a, b)  # raises with both types
    left = reshape(a, (1, *a.shape)) if a.ndim == 1 else a
    right = reshape(b, (*b.shape, 1)) if b.ndim == 1 else b
    out = MatMul()(left, right)
    shape = list(out.shape)
    if b.ndim == 1:
        del shape[-1]
    if a.ndim == 1:
        del shape[-1 if b.ndim == 1 else -2]
    return reshape(out, shape)


@function()
def dot_general(
    x: Operand,
    y: Operand,
    contract: tuple[tuple[int, ...], tuple[int, ...]],
    batch: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> Value:
    """Contract and batch over any pairs of axes."""
    a, b = promoted(x, y)

    def axes(which: tuple[int, ...], ndim: int) -> tuple[int, ...]:
        return tuple(normalize_axis(axis, ndim, "dot_general") for axis in which)

    left, right = axes(contract[0], a.ndim), axes(contract[1], b.ndim)
    return DotGeneral(left, right, axes(batch[0], a.ndim), axes(batch[1], b.ndim))(a, b)
