"""The blocks: each says how it is written in MIR, as one op or as primitives that passes can match."""

from __future__ import annotations

from typing import Any

from strata import ops as functions
from strata.core import here
from strata.errors import LowerError
from strata.hir.ir import Block, block
from strata.mir import Value

ops: Any = functions  # functions are found by name, also where a module has the same one


def missing(what: str, needs: str, code: str) -> LowerError:
    return LowerError(f"{what}: needs {needs}", code=code, place=here())


@block("linear")
class LinearBlock(Block):
    """act(x · w + bias)."""

    act: str | None

    def lower(self, x: Value, w: Value, bias: Value | None = None, *, fusable: bool) -> Value:
        if bias is not None and not fusable and w.ndim == 2 and bias.ndim == 1 and x.ndim > 1:
            return ops.fused_matmul_bias_act(x, w, bias, act=self.act)
        y = ops.matmul(x, w)
        y = y if bias is None else y + bias
        return y if self.act is None else ops.activation(y, self.act)


@block("linear_fused")
class LinearFused(Block):
    """act(x · w + bias), always as the fused op."""

    act: str | None

    def lower(self, x: Value, w: Value, bias: Value, *, fusable: bool) -> Value:
        return ops.fused_matmul_bias_act(x, w, bias, act=self.act)

    def check_count(self, count: int) -> None:
        if count == 2:
            raise missing(self.name, "a bias", "L201")
        super().check_count(count)


@block("shared_linear_pair")
class SharedLinearPair(Block):
    """x · w1 and x · w2: one matmul with both weights side by side, or two."""

    def lower(self, x: Value, w1: Value, w2: Value, *, fusable: bool) -> tuple[Value, Value]:
        if fusable:
            return ops.matmul(x, w1), ops.matmul(x, w2)
        both = ops.matmul(x, ops.concat([w1, w2], axis=1))
        first = w1.shape[1]
        return ops.narrow(both, -1, 0, first), ops.narrow(both, -1, first, w2.shape[1])


@block("swiglu_ffn")
class SwigluFfn(Block):
    """(silu(x · gate) ⊙ (x · up)) · down."""

    def lower(self, x: Value, up: Value, gate: Value, down: Value, *, fusable: bool) -> Value:
        if fusable:
            return ops.matmul(ops.multiply(ops.matmul(x, up), ops.silu(ops.matmul(x, gate))), down)
        both = ops.matmul(x, ops.concat([up, gate], axis=1))
        return ops.matmul(ops.fused_swiglu(both), down)


@block("residual_rms_norm")
class ResidualRmsNorm(Block):
    """rms_norm(x + residual)."""

    eps: float

    def lower(self, x: Value, residual: Value, gamma: Value, beta: Value, *, fusable: bool) -> Value:
        if fusable:
            return ops.rms_norm(x + residual, gamma, beta, eps=self.eps)
        return ops.fused_residual_rms_norm(x, residual, gamma, beta, eps=self.eps)


@block("rms_norm")
class RmsNormBlock(Block):
    """x / sqrt(mean(x²) + eps) γ + β over the last axis."""

    eps: float

    def lower(self, x: Value, gamma: Value, beta: Value | None = None, *, fusable: bool) -> Value:
        return ops.rms_norm(x, gamma, beta, eps=self.eps)


@block("attention")
class AttentionBlock(Block):
    """Scaled dot-product attention; a mask only with mask_kind "custom" or "bias"."""

    num_heads: int
    kv_heads: int | None
    mask_kind: str
    window: int | None
    scale: float | None
    softcap: float | None
    layout: str | None

    def lower(self, q: Value, k: Value, v: Value, mask: Value | None = None, *, fusable: bool) -> Value:
        return ops.attention(q, k, v, mask, **self.static_fields())

    def check_count(self, count: int) -> None:
        wanted = 4 if self.mask_kind in ("custom", "bias") else 3
        if count != wanted:
            message = f"attention: takes {wanted} inputs with mask_kind={self.mask_kind!r}, got {count}"
            raise LowerError(message, code="L200", place=here())


@block("rope")
class RopeBlock(Block):
    """Rotary embedding of token-major x by tables of cosines and sines."""

    head_dim: int
    n_rot: int

    def lower(self, x: Value, cos: Value, sin: Value, *, fusable: bool) -> Value:
        return ops.rope(x, cos, sin, head_dim=self.head_dim, n_rot=self.n_rot)


@block("depthwise_conv1d_causal")
class DepthwiseConv1dCausal(Block):
    """Each channel of x [B, S, C] convolved along the sequence with w [C, 1, 1, K], after left_pad [B, K - 1, C]."""

    kernel: int

    def lower(self, x: Value, w: Value, left_pad: Value, *, fusable: bool) -> Value:
        channels = x.shape[-1]
        rows = ops.transpose(ops.concat([left_pad, x], axis=1), (0, 2, 1))
        image = ops.reshape(rows, (rows.shape[0], channels, 1, rows.shape[2]))
        y = ops.conv2d(image, w, groups=channels)
        return ops.transpose(ops.reshape(y, (y.shape[0], channels, y.shape[3])), (0, 2, 1))

    def infer(self, inputs: Any) -> Any:
        x, w, pad = inputs
        wanted = ((x.shape[-1], 1, 1, self.kernel), (x.shape[0], self.kernel - 1, x.shape[-1]))
        for name, given, shape in (("w", w, wanted[0]), ("left_pad", pad, wanted[1])):
            if given.shape != shape:
                message = f"{self.name}: {name} must have shape {list(shape)} for x : {x.type}, got {given.type}"
                raise LowerError(message, code="L207", place=here())
        return super().infer(inputs)


@block("dequant_matmul")
class DequantMatMulBlock(Block):
    """x times a quantised weight, which is decoded on the way; GGUF schemes need no scale and zero point."""

    scheme: str

    def lower(
        self, x: Value, w: Value, scale: Value | None = None, zero_point: Value | None = None, *, fusable: bool
    ) -> Value:
        sides = [side for side in (scale, zero_point) if side is not None]
        return ops.dequant_matmul(x, w, *sides, scheme=self.scheme)

    def check_count(self, count: int) -> None:
        gguf = self.scheme.startswith("gguf_")
        if count == 2 and not gguf:
            raise missing(self.name, f"a scale and a zero point with scheme {self.scheme!r}", "L204")
        if count != 2 and (gguf or not 3 <= count <= 4):
            wanted = "2" if gguf else "3 or 4"
            message = f"{self.name}: takes {wanted} inputs with scheme {self.scheme!r}, got {count}"
            raise LowerError(message, code="L200", place=here())


@block("gated_delta_net")
class GatedDeltaNetBlock(Block):
    """The gated delta rule over a sequence, from an empty state."""

    def lower(self, q: Value, k: Value, v: Value, g: Value, beta: Value, *, fusable: bool) -> Value:
        return ops.gated_delta_net(q, k, v, g, beta)[0]


@block("gated_delta_net_carry")
class GatedDeltaNetCarry(Block):
    """The gated delta rule over a sequence from a state: the outputs and the last state."""

    def lower(
        self, q: Value, k: Value, v: Value, g: Value, beta: Value, state: Value, *, fusable: bool
    ) -> tuple[Value, Value]:
        return ops.gated_delta_net(q, k, v, g, beta, state)


@block("llama_decoder_block")
class LlamaDecoderBlock(Block):
    """A pre-norm decoder layer: rms norm, attention with rope, residual; rms norm, SwiGLU, residual."""

    num_heads: int
    head_dim: int
    kv_heads: int
    eps: float
    mask_kind: str
    window: int | None

    def lower(
        self, x: Value, ln1_g: Value, ln1_b: Value, q: Value, k: Value, v: Value, o: Value, ln2_g: Value, ln2_b: Value,
        gate: Value, up: Value, down: Value, cos: Value, sin: Value, mask: Value | None = None, *, fusable: bool,
    ) -> Value:  # fmt: skip
        h = ops.rms_norm(x, ln1_g, ln1_b, eps=self.eps)
        query, key = (ops.rope(ops.matmul(h, w), cos, sin, head_dim=self.head_dim) for w in (q, k))
        attended = ops.attention(
            query, key, ops.matmul(h, v), mask, num_heads=self.num_heads, kv_heads=self.kv_heads,
            mask_kind=self.mask_kind, window=self.window, layout="bsd" if x.ndim == 3 else "sd",
        )  # fmt: skip
        middle = x + ops.matmul(attended, o)
        h = ops.rms_norm(middle, ln2_g, ln2_b, eps=self.eps)
        return middle + SwigluFfn().lower(h, up, gate, down, fusable=fusable)

    def check_count(self, count: int) -> None:
        wanted = 15 if self.mask_kind in ("custom", "bias") else 14
        if count != wanted:
            message = f"{self.name}: takes {wanted} inputs with mask_kind={self.mask_kind!r}, got {count}"
            raise LowerError(message, code="L200", place=here())


MTP_INPUTS = (
    "ids", "hidden", "embedding", "enorm_g", "enorm_b", "hnorm_g", "hnorm_b", "eh_proj", "ln1_g", "ln1_b", "q_gate",
    "k", "v", "o", "q_norm_g", "q_norm_b", "k_norm_g", "k_norm_b", "cos", "sin", "ln2_g", "ln2_b", "gate", "up", "down",
    "last", "norm_g", "norm_b", "lm_head",
)  # fmt: skip


@block("qwen35_mtp_head")
class Qwen35MtpHead(Block):
    """A draft head: embedded ids beside hidden states, one gated attention layer, the last token, logits.

    Takes MTP_INPUTS: ids [B, S], hidden [B, S, h]; q_gate [h, heads·2·dim] holds for each head its query and its gate;
    `last` [B], or one number for all rows, is the position whose logits are wanted. Gives [B, vocabulary].
    """

    num_heads: int
    head_dim: int
    kv_heads: int
    n_rot: int
    eps: float

    def lower(self, *inputs: Value, fusable: bool) -> Value:
        given = dict(zip(MTP_INPUTS, inputs, strict=True))

        def norm(x: Value, name: str) -> Value:
            return ops.rms_norm(x, given[f"{name}_g"], given[f"{name}_b"], eps=self.eps)

        embedded = ops.take(given["embedding"], given["ids"], axis=0)
        x = ops.concat([norm(embedded, "enorm"), norm(given["hidden"], "hnorm")], axis=-1)
        x = ops.matmul(x, given["eh_proj"])
        x = x + self._attention(norm(x, "ln1"), given)
        x = x + SwigluFfn().lower(norm(x, "ln2"), given["up"], given["gate"], given["down"], fusable=fusable)
        return ops.matmul(norm(self._last_token(x, given["last"]), "norm"), given["lm_head"])

    def _attention(self, h: Value, given: dict[str, Value]) -> Value:
        batch, length, _ = h.shape
        joint = ops.reshape(ops.matmul(h, given["q_gate"]), (batch, length, self.num_heads, 2 * self.head_dim))
        query, gate = ops.split(joint, 2, axis=-1)
        key = ops.reshape(ops.matmul(h, given["k"]), (batch, length, self.kv_heads, self.head_dim))
        value = ops.reshape(ops.matmul(h, given["v"]), (batch, length, self.kv_heads, self.head_dim))
        query = ops.rms_norm(query, given["q_norm_g"], given["q_norm_b"], eps=self.eps)
        key = ops.rms_norm(key, given["k_norm_g"], given["k_norm_b"], eps=self.eps)
        tables = (given["cos"], given["sin"])
        query, key = (
            ops.rope(x, *tables, head_dim=self.head_dim, n_rot=self.n_rot, layout="bshd") for x in (query, key)
        )
        y = ops.attention(query, key, value, num_heads=self.num_heads, causal=True, layout="bshd")
        y = ops.reshape(y * ops.sigmoid(gate), (batch, length, self.num_heads * self.head_dim))
        return ops.matmul(y, given["o"])

    def _last_token(self, x: Value, last: Value) -> Value:
        batch, _, width = x.shape
        at = ops.broadcast_to(ops.reshape(last, (*last.shape, 1, 1) if last.ndim else (1, 1, 1)), (batch, 1, width))
        return ops.reshape(ops.take_along_axis(x, at, axis=1), (batch, width))

    def arity(self) -> tuple[int, int]:
        return len(MTP_INPUTS), len(MTP_INPUTS)
