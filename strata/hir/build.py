"""Module: the builder of HIR, with a method for each block; every other op by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strata.core import TensorType, as_dtype, sym
from strata.hir import blocks
from strata.hir.ir import BlockBuilder, HirValue
from strata.mir import METHODS, Graph, near

# Short names that other builders of blocks use.
SHORT_NAMES = {
    "mm": "matmul", "ln": "layer_norm", "sm": "softmax", "layer_norm2d": "layer_norm_2d", "eq": "equal", "lt": "less",
}  # fmt: skip

Operand = Any


class HirModule(BlockBuilder):
    """A program of blocks. `fusion` says how blocks are lowered: "direct" to fused ops, "fusable" to primitives.

        m = Module("ffn")
        x, w, b = m.input("x", (4, 8)), m.param("w", (8, 16)), m.param("b", (16,))
        m.outputs(m.linear(x, w, b, act="gelu"))
        graph = m.lower()

    Every op is a method too, on the module and on its values, and becomes nodes of one MIR op each.
    """

    @classmethod
    def define(cls, name: str, build: Callable[[HirModule], Any], fusion: str = "direct") -> HirModule:
        """A module from a function that builds it and returns its outputs."""
        made = cls(name, fusion)
        made.outputs(build(made))
        return made

    def __getattr__(self, name: str) -> Any:
        known = SHORT_NAMES.get(name, name.rstrip("_"))
        if name.startswith("_") or known not in METHODS:
            raise AttributeError(f"a module has no block or op {name!r}{near(name, METHODS)}")
        return lambda *args, **kwargs: self.call(known, *args, **kwargs)

    def input_batch_seq(
        self, name: str, batch: str = "batch", seq: str = "seq", hidden: int = 1, dtype: Any = "f32"
    ) -> HirValue:
        """An input [batch, seq, hidden] whose first two sizes are symbols."""
        return self.input(name, TensorType(as_dtype(dtype), (sym(batch), sym(seq), hidden)))

    def linear(self, x: Operand, w: Operand, bias: Operand | None = None, act: str | None = None) -> HirValue:
        """act(x · w + bias)."""
        return self._block(blocks.LinearBlock(act), x, w, bias)

    def linear_fused(self, x: Operand, w: Operand, bias: Operand, act: str | None = None) -> HirValue:
        """act(x · w + bias), always as the fused op."""
        return self._block(blocks.LinearFused(act), x, w, bias)

    def shared_linear_pair(self, x: Operand, w1: Operand, w2: Operand) -> tuple[HirValue, HirValue]:
        """x · w1 and x · w2."""
        return self._block(blocks.SharedLinearPair(), x, w1, w2)

    def swiglu_ffn(self, x: Operand, up: Operand, gate: Operand, down: Operand) -> HirValue:
        """(silu(x · gate) ⊙ (x · up)) · down."""
        return self._block(blocks.SwigluFfn(), x, up, gate, down)

    def residual_rms_norm(
        self, x: Operand, residual: Operand, gamma: Operand, beta: Operand, eps: float = 1e-5
    ) -> HirValue:
        """rms_norm(x + residual)."""
        return self._block(blocks.ResidualRmsNorm(float(eps)), x, residual, gamma, beta)

    def rms_norm(self, x: Operand, gamma: Operand, beta: Operand | None = None, eps: float = 1e-5) -> HirValue:
        """x / sqrt(mean(x²) + eps) γ + β over the last axis."""
        return self._block(blocks.RmsNormBlock(float(eps)), x, gamma, beta)

    def attention(
        self, q: Operand, k: Operand, v: Operand, mask: Operand | None = None, *, num_heads: int,
        kv_heads: int | None = None, mask_kind: str = "none", window: int | None = None, scale: float | None = None,
        softcap: float | None = None, layout: str | None = None,
    ) -> HirValue:  # fmt: skip
        """Scaled dot-product attention; see ops.attention."""
        made = blocks.AttentionBlock(num_heads, kv_heads, mask_kind, window, scale, softcap, layout)
        return self._block(made, q, k, v, mask)

    def rope(self, x: Operand, cos: Operand, sin: Operand, *, head_dim: int, n_rot: int | None = None) -> HirValue:
        """Rotary embedding of token-major x."""
        return self._block(blocks.RopeBlock(head_dim, head_dim if n_rot is None else n_rot), x, cos, sin)

    def depthwise_conv1d_causal(self, x: Operand, w: Operand, left_pad: Operand, kernel: int) -> HirValue:
        """Each channel of x [B, S, C] convolved along the sequence with w [C, 1, 1, K] after left_pad [B, K - 1, C]."""
        return self._block(blocks.DepthwiseConv1dCausal(kernel), x, w, left_pad)

    def dequant_matmul(
        self, x: Operand, w: Operand, scale: Operand | None = None, zero_point: Operand | None = None, *, scheme: Any
    ) -> HirValue:
        """x times a quantised weight."""
        return self._block(blocks.DequantMatMulBlock(str(scheme)), x, w, scale, zero_point)

    def gated_delta_net(self, q: Operand, k: Operand, v: Operand, g: Operand, beta: Operand) -> HirValue:
        """The gated delta rule over a sequence, from an empty state."""
        return self._block(blocks.GatedDeltaNetBlock(), q, k, v, g, beta)

    def gated_delta_net_carry(
        self, q: Operand, k: Operand, v: Operand, g: Operand, beta: Operand, state: Operand
    ) -> tuple[HirValue, HirValue]:
        """The gated delta rule from a state: the outputs and the last state."""
        return self._block(blocks.GatedDeltaNetCarry(), q, k, v, g, beta, state)

    def llama_decoder_block(
        self, x: Operand, ln1_g: Operand, ln1_b: Operand, q: Operand, k: Operand, v: Operand, o: Operand,
        ln2_g: Operand, ln2_b: Operand, gate: Operand, up: Operand, down: Operand, cos: Operand, sin: Operand,
        mask: Operand | None = None, *, num_heads: int, head_dim: int, kv_heads: int | None = None, eps: float = 1e-5,
        mask_kind: str = "causal", window: int | None = None,
    ) -> HirValue:  # fmt: skip
        """A pre-norm decoder layer with rope, grouped attention and SwiGLU."""
        made = blocks.LlamaDecoderBlock(num_heads, head_dim, kv_heads or num_heads, float(eps), mask_kind, window)
        return self._block(made, x, ln1_g, ln1_b, q, k, v, o, ln2_g, ln2_b, gate, up, down, cos, sin, mask)

    transformer_block = llama_decoder_block

    def qwen35_mtp_head(
        self, *inputs: Operand, num_heads: int, head_dim: int, kv_heads: int | None = None, n_rot: int | None = None,
        eps: float = 1e-6,
    ) -> HirValue:  # fmt: skip
        """A draft head over the 29 inputs of blocks.MTP_INPUTS."""
        made = blocks.Qwen35MtpHead(num_heads, head_dim, kv_heads or num_heads, n_rot or head_dim, float(eps))
        return self.apply(made, *inputs)

    def gelu_approx(self, x: Operand) -> HirValue:
        """The tanh approximation of gelu."""
        return self.call("gelu", x, approximate="tanh")

    def _block(self, made: Any, *inputs: Operand | None) -> Any:
        """Trailing inputs that were not given are left out."""
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        return self.apply(made, *given)

    # ----------------------------------------------------------------------------------------------------------- stages

    def lower(self, policy: str | None = None) -> Graph:
        """The module as a graph; see hir.lower."""
        from strata.hir.lower import lower

        return lower(self, policy)

    def __str__(self) -> str:
        from strata.hir.text import show

        return show(self)

    def __repr__(self) -> str:
        return f"<Module {self.name}: {len(self.nodes)} nodes, {len(self.results)} outputs, {self.fusion}>"

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, HirModule) and str(self) == str(other))

    def __hash__(self) -> int:
        return hash(str(self))
