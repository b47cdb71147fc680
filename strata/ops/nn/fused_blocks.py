"""Fused attention blocks and encoder layers: whole blocks as one node, each with its decomposition into primitives."""

from __future__ import annotations

import numpy as np

from strata.core import TensorType, f32, f64
from strata.errors import OptionError
from strata.mir import Op, Sample, Value, draw, function, near, op
from strata.ops.base.frontend import Operand, as_value, promoted, same_shape
from strata.ops.base.movement import split
from strata.ops.elementwise.activation import ACTIVATIONS, activation_name
from strata.ops.linalg.matmul import MatMul
from strata.ops.nn.attention_functions import attention
from strata.ops.nn.norm import LayerNormOp, check_eps
from strata.ops.nn.norm_gradients import check_float
from strata.ops.nn.rope import rope

ENCODER_INPUTS = (
    "hidden", "qkv_w", "qkv_b", "out_w", "out_b", "ln1_g", "ln1_b", "fc1_w", "fc1_b", "fc2_w", "fc2_b", "ln2_g",
    "ln2_b", "mask",
)  # fmt: skip
PROJECTION_BIASES = ("qkv_b", "out_b", "fc1_b", "fc2_b")


class FusedBlock(Op):
    """A block with named inputs of known shapes."""

    heads: int
    dim: int

    def check_inputs(self, names: tuple[str, ...], types: tuple[TensorType, ...]) -> dict[str, TensorType]:
        count = len(names)
        self.require(len(types) == count, f"takes {count} inputs ({', '.join(names)}), got {len(types)}", code="S242")
        given = dict(zip(names, types, strict=True))
        check_float(self, *(t for name, t in given.items() if name not in ("mask", "cos", "sin")))
        hidden = given["hidden"]
        self.require(hidden.ndim == 3, f"hidden must be [B, S, h], got {hidden}", code="S246")
        return given

    def check_shape(self, given: dict[str, TensorType], name: str, *shape: object) -> None:
        if name in given:
            got = given[name]
            wanted = TensorType(got.dtype, shape)  # type: ignore[arg-type]
            self.require(same_shape(got.shape, wanted.shape), f"{name} must be {wanted}, got {got}", code="S247")

    def check_projections(self, given: dict[str, TensorType]) -> None:
        batch, length, width = given["hidden"].shape
        inner = self.heads * self.dim
        self.check_shape(given, "qkv_w", width, 3 * inner)
        self.check_shape(given, "qkv_b", 3 * inner)
        self.check_shape(given, "out_w", inner, width)
        self.check_shape(given, "out_b", width)
        self.check_shape(given, "mask", batch, length)


@op("fused_attention_block")
class FusedAttentionBlock(FusedBlock):
    """Projection to q, k, v, optional rope, attention under a key mask, output projection.

    Takes hidden [B, S, h], qkv_w [h, 3·heads·dim], out_w, mask [B, S], then (qkv_b, out_b), then (cos, sin).
    """

    has_bias: bool
    has_rope: bool

    def input_names(self) -> tuple[str, ...]:
        biases = ("qkv_b", "out_b") if self.has_bias else ()
        return ("hidden", "qkv_w", "out_w", "mask", *biases, *(("cos", "sin") if self.has_rope else ()))

    def infer(self, *types: TensorType) -> TensorType:
        given = self.check_inputs(self.input_names(), types)
        self.check_projections(given)
        return given["hidden"]

    def decompose(self, *inputs: Value) -> Value:
        given = dict(zip(self.input_names(), inputs, strict=True))
        qkv = MatMul()(given["hidden"], given["qkv_w"])
        if self.has_bias:
            qkv = qkv + given["qkv_b"]
        q, k, v = split(qkv, 3, axis=-1)
        if self.has_rope:
            q, k = (rope(x, given["cos"], given["sin"], head_dim=self.dim, layout="bsd") for x in (q, k))
        y = attention(q, k, v, given["mask"], num_heads=self.heads, mask_kind="custom", layout="bsd")
        y = MatMul()(y, given["out_w"])
        return y + given["out_b"] if self.has_bias else y

    @classmethod
    def samples(cls) -> list[Sample]:
        mask = np.array([[1, 1, 0], [1, 0, 1]], np.float32)
        plain = [f32[2, 3, 4], f32[4, 12], f32[4, 4], mask]
        tables = draw(f32[3, 1], -1.0, 1.0)
        return [
            Sample(*plain, heads=2, dim=2, has_bias=False, has_rope=False),
            Sample(*plain, f32[12], f32[4], tables, tables, heads=2, dim=2, has_bias=True, has_rope=True),
            Sample(f64[1, 1, 3], f64[3, 6], f64[2, 3], np.array([[True]]), heads=1, dim=2, has_bias=False,
                   has_rope=False),
        ]  # fmt: skip


@op("fused_transformer_layer")
class FusedTransformerLayer(FusedBlock):
    """A post-norm encoder layer: h1 = LN1(x + attention(x)); LN2(h1 + fc2(act(fc1(h1)))).

    Takes the 14 inputs of ENCODER_INPUTS, or 10 without the four projection biases.
    """

    inter: int
    eps1: float
    eps2: float
    act: str
    has_bias: bool

    def input_names(self) -> tuple[str, ...]:
        return tuple(name for name in ENCODER_INPUTS if self.has_bias or name not in PROJECTION_BIASES)

    def infer(self, *types: TensorType) -> TensorType:
        message = f"no activation is named {self.act!r}{near(self.act, ACTIVATIONS)}"
        self.require(self.act in ACTIVATIONS, message, code="O210", error=OptionError)
        given = self.check_inputs(self.input_names(), types)
        self.check_projections(given)
        width = given["hidden"].shape[2]
        self.check_shape(given, "fc1_w", width, self.inter)
        self.check_shape(given, "fc1_b", self.inter)
        self.check_shape(given, "fc2_w", self.inter, width)
        for name in ("fc2_b", "ln1_g", "ln1_b", "ln2_g", "ln2_b"):
            self.check_shape(given, name, width)
        return given["hidden"]

    def decompose(self, *inputs: Value) -> Value:
        given = dict(zip(self.input_names(), inputs, strict=True))

        def project(x: Value, name: str) -> Value:
            y = MatMul()(x, given[f"{name}_w"])
            return y + given[f"{name}_b"] if self.has_bias else y

        x = given["hidden"]
        names = ("hidden", "qkv_w", "out_w", "mask", *(("qkv_b", "out_b") if self.has_bias else ()))
        block = FusedAttentionBlock(self.heads, self.dim, self.has_bias, has_rope=False)
        attended = block.decompose(*(given[name] for name in names))
        h = LayerNormOp((2,), self.eps1)(x + attended, given["ln1_g"], given["ln1_b"])
        wide = ACTIVATIONS[self.act](project(h, "fc1"))
        return LayerNormOp((2,), self.eps2)(h + project(wide, "fc2"), given["ln2_g"], given["ln2_b"])

    @classmethod
    def samples(cls) -> list[Sample]:
        fields = {"heads": 2, "dim": 2, "inter": 6, "eps1": 1e-5, "eps2": 1e-3, "act": "gelu"}
        mask = np.array([[1, 1, 0], [1, 0, 1]], np.float32)
        h, ln = f32[2, 3, 4], f32[4]
        return [
            Sample(h, f32[4, 12], f32[12], f32[4, 4], ln, ln, ln, f32[4, 6], f32[6], f32[6, 4], ln, ln, ln, mask,
                   has_bias=True, **fields),
            Sample(h, f32[4, 12], f32[4, 4], ln, ln, f32[4, 6], f32[6, 4], ln, ln, mask, has_bias=False, **fields),
        ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def fused_attention_block(
    hidden: Operand, qkv_w: Operand, out_w: Operand, mask: Operand, *, num_heads: int, head_dim: int,
    biases: tuple[Operand, Operand] | None = None, tables: tuple[Operand, Operand] | None = None,
) -> Value:  # fmt: skip
    """Self-attention with its projections as one node; `biases` of both projections, `tables` (cos, sin) for rope."""
    x, qkv, out, *rest = promoted(hidden, qkv_w, out_w, *(biases or ()))
    made = FusedAttentionBlock(num_heads, head_dim, biases is not None, tables is not None)
    return made(x, qkv, out, as_value(mask), *rest, *(as_value(t) for t in tables or ()))


@function()
def fused_transformer_layer(
    *inputs: Operand, num_heads: int, head_dim: int, eps1: float = 1e-5, eps2: float = 1e-5, act: str = "gelu"
) -> Value:
    """A post-norm encoder layer as one node; 14 inputs, or 10 without projection biases: see FusedTransformerLayer."""
    has_bias = len(inputs) == len(ENCODER_INPUTS)
    *main, mask = inputs
    values = promoted(*main)
    first = values[7 if has_bias else 5] if len(values) > 7 else values[-1]
    inter = first.shape[-1] if first.ndim else 0
    made = FusedTransformerLayer(
        num_heads, head_dim, inter.__index__(), check_eps(eps1, "fused_transformer_layer"),
        check_eps(eps2, "fused_transformer_layer"), activation_name(act, "fused_transformer_layer"), has_bias,
    )  # fmt: skip
    return made(*values, as_value(mask))
