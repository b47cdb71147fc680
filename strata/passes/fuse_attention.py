"""Find self-attention with its projections, and make it one op where the sequence is short enough for the caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from strata.core import bool_
from strata.mir import Graph, Value
from strata.ops import fused_attention_block, ones
from strata.passes.base import Pass, PassContext, register
from strata.passes.match import Uses, rewrite_each


@register
@dataclass(frozen=True)
class FuseAttentionBlock(Pass):
    """x qkv_w → q, k, v → (rope) → attention → out_w as one op, up to `threshold` tokens in a batch."""

    threshold: int = 64

    name: ClassVar[str] = "fuse_attention_block"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        return rewrite_each(graph, lambda value, uses: _Finder(uses, self.threshold).block(value), self.name)


@dataclass(frozen=True)
class _Projection:
    """x w (+ bias)."""

    x: Value
    w: Value
    bias: Value | None


class _Finder:
    def __init__(self, uses: Uses, threshold: int) -> None:
        self.uses = uses
        self.threshold = threshold

    def block(self, value: Value) -> Value | None:
        """The fused op for the output projection of an attention; None where any part is not as the op has it."""
        out = self._projection(value)
        if out is None or out.x.node.op.name != "attention" or self.uses.of(out.x) != 1:
            return None
        node, op = out.x.node, out.x.node.op
        plain = (
            op.layout == "bsd" and op.num_heads == op.kv_heads and not op.causal and op.window is None  # type: ignore[attr-defined]
            and not op.has_offset and op.score_scale is None and op.softcap is None and op.mask in ("none", "custom")  # type: ignore[attr-defined]
        )  # fmt: skip
        if not plain:
            return None
        q, k, v = node.inputs[:3]
        (q_rows, q_tables), (k_rows, k_tables) = self._unrotated(q), self._unrotated(k)
        source = self._thirds(q_rows, k_rows, v)
        if source is None or q_tables != k_tables or (q_tables is None) != (q_rows == q):
            return None
        into = self._projection(source)
        if into is None or (into.bias is None) != (out.bias is None) or not self._is_small(into.x):
            return None
        if out.w.shape[1] != into.x.shape[-1]:
            return None  # the op gives what it takes: a block inside a residual
        mask = self._key_mask(node.inputs[3:], into.x)
        if mask is None:
            return None
        biases = None if into.bias is None or out.bias is None else (into.bias, out.bias)
        sizes = {"num_heads": op.num_heads, "head_dim": op.head_dim}  # type: ignore[attr-defined]
        result: Value = fused_attention_block(into.x, into.w, out.w, mask, biases=biases, tables=q_tables, **sizes)
        return result

    def _projection(self, value: Value) -> _Projection | None:
        bias: Value | None = None
        if value.node.op.name == "add":
            pairs = [value.node.inputs, value.node.inputs[::-1]]
            value, bias = next(((a, b) for a, b in pairs if a.node.op.name == "matmul" and b.ndim == 1), (value, None))
            if bias is None or self.uses.of(value) != 1:
                return None
        if value.node.op.name != "matmul":
            return None
        x, w = value.node.inputs
        if w.ndim != 2 or (bias is not None and bias.shape != w.shape[1:]):
            return None
        return _Projection(x, w, bias)

    def _unrotated(self, value: Value) -> tuple[Value, tuple[Value, Value] | None]:
        """A value before its rotation, and the tables of cosines and sines."""
        op = value.node.op
        if op.name != "rope" or self.uses.of(value) != 1:
            return value, None
        if op.n_rot != op.head_dim or op.interleaved or op.layout != "bsd" or len(value.node.inputs) != 3:  # type: ignore[attr-defined]
            return value, None
        x, cos, sin = value.node.inputs
        return x, (cos, sin)

    def _thirds(self, *parts: Value) -> Value | None:
        """The value whose last axis the three are thirds of, in order, when nothing else reads it."""
        if any(p.node.op.name != "slice" or self.uses.of(p) != 1 for p in parts):
            return None
        source = parts[0].node.inputs[0]
        width = source.shape[-1]
        if not isinstance(width, int) or width % 3 or self.uses.of(source) != 3:
            return None
        lead = source.shape[:-1]
        for i, part in enumerate(parts):
            op = part.node.op
            start, stop = (*(0,) * len(lead), i * width // 3), (*lead, (i + 1) * width // 3)
            whole = (op.start, op.stop, op.step) == (start, stop, (1,) * source.ndim)  # type: ignore[attr-defined]
            if part.node.inputs[0] != source or not whole:
                return None
        return source

    def _is_small(self, x: Value) -> bool:
        if x.ndim != 3:
            return False
        batch, length, _ = x.shape
        return isinstance(batch, int) and isinstance(length, int) and batch * length <= self.threshold

    def _key_mask(self, given: tuple[Value, ...], x: Value) -> Value | None:
        """A mask of keys, [batch, length]; all of them where there is none."""
        rows = x.shape[:2]
        if not given:
            return ones(rows, bool_)
        (mask,) = given
        if (
            mask.node.op.name == "reshape"
            and mask.node.inputs[0].shape == rows
            and mask.shape == (rows[0], 1, 1, rows[1])
        ):
            return mask.node.inputs[0]
        return None
