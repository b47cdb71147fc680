"""Fused ops: one node for what a pattern of primitives computes. Each decomposes into exactly those primitives."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.core import Dim, DType, TensorType, broadcast_shapes, divide_exactly, f16, f32, f64
from strata.errors import OptionError, StrataError
from strata.mir import REGISTRY, Op, Sample, UnaryOp, Value, function, near, op
from strata.ops.base.elementwise import lift
from strata.ops.base.frontend import Operand, as_value, promoted, same_shape, to_inexact
from strata.ops.base.movement import broadcast_to
from strata.ops.elementwise.activation import ACTIVATIONS, activation_name, halves
from strata.ops.elementwise.logic import cast
from strata.ops.elementwise.math import silu
from strata.ops.linalg.matmul import MatMul
from strata.ops.nn.norm import LayerNormOp, RmsNorm, check_eps
from strata.ops.nn.norm_gradients import check_affine, check_float

Step = tuple[Any, ...]  # (op, operands) or (op, operands, fields)


@op("fused_matmul_bias_act")
class FusedMatMulBiasAct(Op):
    """act(x · w + bias): x [.., M, K], w [K, N], bias [N]; any activation by name, or None."""

    act: str | None

    def infer(self, x: TensorType, w: TensorType, bias: TensorType) -> TensorType:
        known = self.act is None or self.act in ACTIVATIONS
        message = f"no activation is named {self.act!r}{near(str(self.act), ACTIVATIONS)}"
        self.require(known, message, code="O210", error=OptionError)
        check_float(self, x, w, bias)
        self.require(w.ndim == 2, f"the weight must be a matrix, got {w}", code="S240")
        out = MatMul().infer(x, w)
        ok = same_shape(bias.shape, w.shape[1:])
        self.require(ok, f"the bias {bias} does not have one element for each column of {w}", code="S241")
        return out

    def decompose(self, x: Value, w: Value, bias: Value) -> Value:
        y = MatMul()(x, w) + bias
        return y if self.act is None else ACTIVATIONS[self.act](y)

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        if any(batched[1:]):
            return super().vmap(*inputs, batched=batched, size=size)
        return self(*inputs)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f32[3, 4], f32[4, 5], f32[5], act=act) for act in (None, "gelu", "silu", "tanh")] + [
            Sample(f32[2, 3, 4], f32[4, 2], f32[2], act="gelu_tanh"),
            Sample(f64[1, 4], f64[4, 1], f64[1], act="softplus"),
            Sample(f32[0, 4], f32[4, 2], f32[2], act="relu"),
        ]


class FusedResidual(Op):
    """A normalisation of x + residual (+ bias) over the last axis; takes (x, residual[, bias], γ, β)."""

    has_bias: bool
    eps: float

    def infer(self, x: TensorType, residual: TensorType, *rest: TensorType) -> TensorType:
        wanted = 5 if self.has_bias else 4
        self.require(
            len(rest) + 2 == wanted,
            f"takes {wanted} inputs with has_bias={self.has_bias}, got {len(rest) + 2}",
            code="S242",
        )
        check_float(self, x, residual, *rest)
        self.require(x.ndim > 0 and x.shape[-1] != 0, f"{x} has no last axis to normalise", code="S233")
        self.require(
            same_shape(x.shape, residual.shape), f"the residual {residual} does not have the shape of {x}", code="S243"
        )
        check_affine(self, x, (x.ndim - 1,), *rest)
        return x

    def norm(self, axes: tuple[int, ...]) -> Op:
        raise NotImplementedError

    def decompose(self, x: Value, residual: Value, *rest: Value) -> Value:
        total = x + residual
        if self.has_bias:
            total = total + rest[0]
        return self.norm((x.ndim - 1,))(total, *rest[-2:])

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        if batched != (True, True, *(False,) * (len(inputs) - 2)):
            return super().vmap(*inputs, batched=batched, size=size)
        return self(*inputs)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 6], f32[3, 6], f32[6], f32[6], has_bias=False, eps=1e-5),
            Sample(f64[2, 3, 4], f64[2, 3, 4], f64[4], f64[4], f64[4], has_bias=True, eps=1e-3),
            Sample(f32[4], f32[4], f32[4], f32[4], has_bias=False, eps=1e-5),
            Sample(f32[0, 3], f32[0, 3], f32[3], f32[3], f32[3], has_bias=True, eps=1e-5),
        ]


@op("fused_residual_layer_norm")
class FusedResidualLN(FusedResidual):
    """layer_norm(x + residual (+ bias))."""

    def norm(self, axes: tuple[int, ...]) -> Op:
        return LayerNormOp(axes, self.eps)


@op("fused_residual_rms_norm")
class FusedResidualRmsNorm(FusedResidual):
    """rms_norm(x + residual (+ bias))."""

    def norm(self, axes: tuple[int, ...]) -> Op:
        return RmsNorm(axes, self.eps)


@op("fused_swiglu")
class FusedSwiGLU(UnaryOp):
    """up silu(gate) of the halves of the last axis: up is first unless `gate_first`; `cast_to` converts the result."""

    gate_first: bool
    cast_to: DType | None

    def infer(self, x: TensorType) -> TensorType:
        check_float(self, x)
        self.require(x.ndim > 0, f"needs [.., 2n], got {x}", code="S232")
        half = divide_exactly(x.shape[-1], 2)
        self.require(half is not None, f"the last axis of {x} does not make two halves", code="S232")
        out = x.with_shape([*x.shape[:-1], half])  # type: ignore[list-item]
        return out if self.cast_to is None else out.with_dtype(self.cast_to)

    def numpy(self, x: np.ndarray) -> np.ndarray:
        from scipy.special import expit

        first, second = np.split(x, 2, -1)
        up, gate = (second, first) if self.gate_first else (first, second)
        return up * (gate * expit(gate))

    def decompose(self, x: Value) -> Value:
        first, second = halves(x, -1, self.name)
        up, gate = (second, first) if self.gate_first else (first, second)
        y = up * silu(gate)
        return y if self.cast_to is None else cast(y, self.cast_to)

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(x)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[3, 8], gate_first=False, cast_to=None),
            Sample(f32[2, 3, 4], gate_first=True, cast_to=None),
            Sample(f64[6], gate_first=True, cast_to=f64),
            Sample(f32[0, 4], gate_first=False, cast_to=None),
            Sample(f32[2, 4], gate_first=False, cast_to=f16, grad=False),
        ]


@op("lora_matmul")
class LoraMatMul(Op):
    """x · w + scale (x · a) · b: x [.., M, K], w [K, N], a [K, r], b [r, N]."""

    scale: float

    def infer(self, x: TensorType, w: TensorType, a: TensorType, b: TensorType) -> TensorType:
        check_float(self, x, w, a, b)
        for t in (w, a, b):
            self.require(t.ndim == 2, f"weights must be matrices, got {t}", code="S240")
        out = MatMul().infer(x, w)
        low = MatMul().infer(MatMul().infer(x, a), b)
        self.require(
            same_shape(out.shape, low.shape), f"the low-rank matmul has shape {low}, the dense one {out}", code="S244"
        )
        return out

    def numpy(self, x: np.ndarray, w: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return x @ (w + self.scale * (a @ b))

    def decompose(self, x: Value, w: Value, a: Value, b: Value) -> Value:
        return MatMul()(x, w) + MatMul()(MatMul()(x, a) * self.scale, b)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[4, 8], f32[8, 6], f32[8, 2], f32[2, 6], scale=0.5),
            Sample(f64[2, 3, 4], f64[4, 5], f64[4, 1], f64[1, 5], scale=-2.0),
            Sample(f32[0, 4], f32[4, 2], f32[4, 1], f32[1, 2], scale=1.0),
        ]


@op("elementwise_region")
class ElementwiseRegion(Op):
    """A straight-line program of element-wise steps whose last step is the result; bit-equal to the steps on their own.

    A step is (op, operands) or (op, operands, fields). Operands number the inputs first and then the steps:
    with two inputs, `(("add", (0, 1)), ("cast", (2,), (f16,)), ("gelu", (3,)))` is gelu(cast(x + y)).
    """

    chain: tuple[Step, ...]

    elementwise = True
    dtypes = "any"

    def infer(self, *types: TensorType) -> TensorType:
        self.require(len(self.chain) > 0, "has no steps", code="O218", error=OptionError)
        values: list[TensorType] = list(types)
        for i, step in enumerate(self.chain):
            made, operands = self._step(i, step, len(values))
            try:
                result = made.infer_types([values[o] for o in operands])
            except StrataError as error:
                self.require(False, f"step {i}: {error.summary}", code=error.code, error=type(error))
            values.append(result[0])
        shape = broadcast_shapes(*(t.shape for t in types), what=self.name)
        self.require(
            same_shape(shape, values[-1].shape),
            f"inputs broadcast to {shape}, the last step has {values[-1]}",
            code="S245",
        )
        return values[-1]

    def _step(self, i: int, step: Step, known: int) -> tuple[Op, tuple[int, ...]]:
        """The op and the operands of one step; operands come before it."""
        well_formed = isinstance(step, tuple) and len(step) in (2, 3) and isinstance(step[1], tuple)
        self.require(well_formed, f"step {i} is {step!r}, not (op, operands[, fields])", code="O218", error=OptionError)
        name, operands, *fields = step
        cls = REGISTRY[name]
        self.require(
            cls.elementwise and not cls.multi_output,
            f"step {i}: {name} is not element-wise",
            code="O218",
            error=OptionError,
        )
        ok = len(operands) > 0 and all(isinstance(o, int) and 0 <= o < known for o in operands)
        self.require(
            ok,
            f"step {i}: operands {operands} are not among the {known} values before it",
            code="O218",
            error=OptionError,
        )
        return cls(*(fields[0] if fields else ())), operands

    def decompose(self, *inputs: Value) -> Value:
        values = list(inputs)
        for i, step in enumerate(self.chain):
            made, operands = self._step(i, step, len(values))
            values.append(made(*(values[o] for o in operands)))
        return values[-1]

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        plain = [x.shape[1:] if b else x.shape for x, b in zip(inputs, batched, strict=True)]
        shape = broadcast_shapes(*plain, what=self.name)
        out = self(*(lift(x, len(shape)) if b else x for x, b in zip(inputs, batched, strict=True)))
        return broadcast_to(out, (size, *shape))

    @classmethod
    def samples(cls) -> list[Sample]:
        affine = (("multiply", (0, 1)), ("add", (3, 2)), ("gelu", (4,)))
        clipped = (("greater", (0, 1)), ("exp", (0,)), ("where", (2, 3, 1)))
        return [
            Sample(f32[3, 4], f32[4], f32[3, 4], chain=affine),
            Sample(f32[5, 1], f32[2, 1, 3], f32[()], chain=affine),
            Sample(f32[2, 3, 2, 2], f32[3, 1, 1], f32[1, 3, 1, 1], chain=affine),
            Sample(f64[4], f64[4], chain=clipped),
            Sample(f32[0, 2], f32[2], chain=clipped),
            Sample(f32[3], chain=(("cast", (0,), (f64,)), ("sin", (1,))), grad=False),
        ]


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def fused_matmul_bias_act(x: Operand, w: Operand, bias: Operand, act: str | None = None) -> Value:
    """act(x · w + bias) as one node."""
    name = None if act is None else activation_name(act, "fused_matmul_bias_act")
    return FusedMatMulBiasAct(name)(*promoted(x, w, bias))


def _residual(cls: type[FusedResidual], inputs: tuple[Operand, ...], bias: Operand | None, eps: float) -> Value:
    x, residual, gamma, beta = inputs
    rest = (gamma, beta) if bias is None else (bias, gamma, beta)
    return cls(bias is not None, check_eps(eps, cls.name))(*promoted(x, residual, *rest))


@function()
def fused_residual_layer_norm(
    x: Operand, residual: Operand, gamma: Operand, beta: Operand, *, bias: Operand | None = None, eps: float = 1e-5
) -> Value:
    """layer_norm(x + residual + bias) over the last axis as one node."""
    return _residual(FusedResidualLN, (x, residual, gamma, beta), bias, eps)


@function()
def fused_residual_rms_norm(
    x: Operand, residual: Operand, gamma: Operand, beta: Operand, *, bias: Operand | None = None, eps: float = 1e-5
) -> Value:
    """rms_norm(x + residual + bias) over the last axis as one node."""
    return _residual(FusedResidualRmsNorm, (x, residual, gamma, beta), bias, eps)


@function()
def fused_swiglu(x: Operand, *, gate_first: bool = False, cast_to: DType | None = None) -> Value:
    """up silu(gate) of the halves of the last axis as one node."""
    return FusedSwiGLU(gate_first, cast_to)(to_inexact(as_value(x)))


@function()
def lora_matmul(x: Operand, w: Operand, a: Operand, b: Operand, scale: float = 1.0) -> Value:
    """x · w + scale (x · a) · b."""
    return LoraMatMul(float(scale))(*promoted(x, w, a, b))


@function()
def elementwise_region(*inputs: Operand, chain: tuple[Step, ...]) -> Value:
    """A fused chain of element-wise steps; see ElementwiseRegion."""
    return ElementwiseRegion(chain)(*(as_value(x) for x in inputs))
