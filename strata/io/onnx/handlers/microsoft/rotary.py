"""com.microsoft: rotary embeddings: of one position, of three (time, height, width), of angles that are given."""

from __future__ import annotations

import numpy as np

from strata.core import Dim
from strata.errors import FileError, LowerError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.items import Host
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

MS = "com.microsoft"


def heads_of(x: Value, count: Dim) -> Value:
    """[B, S, H · D] as [B, H, S, D]."""
    batch, length, width = x.shape
    return ops.transpose(ops.reshape(x, (batch, length, count, width // count)), 0, 2, 1, 3)


def turned(x: Value, at: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """Pairs of x [B, H, S, D] turned by the angles of their positions [B, S]."""
    cos, sin = (ops.insert_axis(ops.gather(table, at, 0), 1) for table in (cos, sin))
    return _rotated(x, cos, sin, interleaved)


def _rotated(x: Value, cos: Value, sin: Value, interleaved: bool) -> Value:
    """Pairs of x [B, H, S, D] turned by angles whose cosines and sines are [B, 1, S, half]; the rest stays."""
    half, width = cos.shape[3], x.shape[3]
    part, rest = ops.split(x, [2 * half, width - 2 * half], 3) if width != 2 * half else (x, None)
    if interleaved:
        pairs = ops.reshape(part, (*part.shape[:3], half, 2))
        a, b = (ops.squeeze(p, 4) for p in ops.split(pairs, 2, 4))
        part = ops.reshape(ops.stack([a * cos - b * sin, b * cos + a * sin], 4), part.shape)
    else:
        a, b = ops.split(part, 2, 3)
        part = ops.concat([a * cos - b * sin, b * cos + a * sin], 3)
    return part if rest is None else ops.concat([part, rest], 3)


def _apart(n: NodeView, x: Value, half: Dim) -> Value:
    """Heads [B, H, S, D] of x, which may be [B, S, H · D]."""
    if x.ndim == 4:
        return x
    return heads_of(x, n.attr("num_heads", 0) or x.shape[2] // (2 * half))


def _joined(out: Value, x: Value) -> Value:
    return out if x.ndim == 4 else ops.reshape(ops.transpose(out, 0, 2, 1, 3), x.shape)


@reads("RotaryEmbedding", domain=MS)
def rotary_embedding(n: NodeView) -> Value:
    """Pairs of x [B, H, S, D] or [B, S, H · D] turned by the angles of their positions."""
    x, at, cos, sin = (n[i] for i in range(4))
    if n.attr("is_packed_batching", 0):
        raise LowerError(f"{n.label}: packed batches are not supported", code="L500")
    heads = _apart(n, x, cos.shape[1])
    batch, _, length, _ = heads.shape
    if at.ndim == 1:
        at = ops.broadcast_to(ops.insert_axis(at + ops.iota(length), 0), (batch, length))
    return _joined(turned(heads, at, cos, sin, bool(n.attr("interleaved", 0))), x)


@reads("MRotaryEmbedding", domain=MS)
def multimodal_rotary_embedding(n: NodeView) -> Value:
    """The same with three positions a token [3, B, S]: each turns some of the pairs."""
    x, at, cos, sin = (n[i] for i in range(4))
    sections = tuple(int(s) for s in n.attr("mrope_section"))
    half = cos.shape[1]
    if len(sections) != 3 or min(sections) < 0 or sum(sections) != half:
        raise FileError(f"{n.label}: mrope_section {list(sections)} for {half} pairs", code="F504")
    if n.attr("is_packed_batching", 0) or n.attr("scale", 1.0) != 1.0:
        raise LowerError(f"{n.label}: packed batches and scales are not supported", code="L500")
    which = n.tracer.value(Host(_axis_of_pairs(sections, interleaved=bool(n.attr("mrope_layout", 0)))))

    def mixed(table: Value) -> Value:
        time, height, width = (ops.gather(table, ops.squeeze(p, 0), 0) for p in ops.split(at, 3, 0))
        found = ops.where(ops.equal(which, 0), time, ops.where(ops.equal(which, 1), height, width))
        return ops.insert_axis(found, 1)

    made = _rotated(_apart(n, x, half), mixed(cos), mixed(sin), bool(n.attr("interleaved", 0)))
    return _joined(made, x)


def _axis_of_pairs(sections: tuple[int, ...], *, interleaved: bool) -> np.ndarray:
    """Which of the three positions turns each pair of a head."""
    if not interleaved:
        return np.repeat(np.arange(3), sections)
    which = np.zeros(sum(sections), np.int64)
    for axis in (1, 2):
        which[axis : 3 * sections[axis] : 3] = axis
    return which


@reads("GemmaRotaryEmbedding", domain=MS)
def gemma_rotary_embedding(n: NodeView) -> tuple[Value, Value]:
    """q · cos + q' · sin of angles [B, S, D], and the same of k; the turned halves q' and k' are inputs."""
    angles, q, q_half, k, k_half = (n[i] for i in range(5))
    cos, sin = (ops.insert_axis(ops.cast(made, q.dtype), 1) for made in (ops.cos(angles), ops.sin(angles)))
    return q * cos + q_half * sin, k * cos + k_half * sin
