"""Attention and its backward pass as steps: operands are read in place, the score matrix is never stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from strata.backends.attention import AttentionPlaces
from strata.backends.llvm.attention.backward import (
    BACKWARD_SLOTS,
    backward_spec,
    can_go_back,
    emit_backward,
    parts_of,
    work_size,
)
from strata.backends.llvm.attention.decode import can_decode, emit_merge, part_elements
from strata.backends.llvm.attention.form import SLOTS, AttentionSpec
from strata.backends.llvm.attention.forward import emit_attention
from strata.backends.llvm.ir.native import WORKSPACE_ALIGN
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, Slot, override
from strata.core import Dim, Target, TensorType, bf16, bool_, bounds, f16, f32, f64, i64, substitute
from strata.lir import Spacing
from strata.mir import Node, Op

DECODE_QUERIES = 4  # up to this many queries, reading the keys once beats packing them
SEGMENT = 512  # keys of a chunk, where so few key heads do not keep all threads busy:
FEW_HEADS = 16
KEY_BLOCK = 512
LEAST_ROWS = 40  # of a block


def _accepts(op: Op, types: Sequence[TensorType], target: Target) -> bool:
    """Floats of at least 16 bits, queries and keys that exist, masks of the kernel's types."""
    q, k, v, *extra = types
    sizes = op.sizes(q, k, v)  # type: ignore[attr-defined]
    if q.dtype not in (f16, bf16, f32, f64) or sizes.queries == 0 or sizes.keys == 0:
        return False
    masked = op.mask != "none"  # type: ignore[attr-defined]
    if masked and extra[0].dtype is not (bool_ if op.mask == "custom" else q.dtype):  # type: ignore[attr-defined]
        return False
    return not op.has_offset or extra[-1].dtype is i64  # type: ignore[attr-defined]


def _heads(op: Any, types: Sequence[TensorType]) -> Sequence[Dim]:
    return op.num_heads, op.kv_heads, op.head_dim, op.sizes(*types[:3]).value_dim


@override("attention", views=True, instead_of_parts=_accepts, numbers=_heads)
def attention(node: Node, target: Target, views: Sequence[Spacing] | None) -> NativeOp | None:
    """The attention of a node whose inputs have the given spacing."""
    op: Any = node.op
    types = [x.type for x in node.inputs]
    if views is None or not _accepts(op, types, target):
        return None
    placed = _Placed(op, {"q": 0, "k": 1, "v": 2, "mask": 3}, {"out": node.types[0]}, types, views)
    if not placed.is_readable:
        return None
    sizes = op.sizes(*types[:3])
    few = isinstance(sizes.queries, int) and sizes.queries <= DECODE_QUERIES

    packed = with_blocks(_spec(op, types, 3, target), sizes.queries, sizes.keys)
    single = replace(_spec(op, types, 3, target), decode=True)
    is_open = not isinstance(sizes.queries, int)
    decodes = can_decode(single) and (few or is_open)
    # whether keys are split depends on heads and keys alone: the bits of a row do not depend on the batch it is in
    most_keys = bounds(sizes.keys)[1]
    splits = decodes and op.mask == "none" and single.kv_heads < FEW_HEADS
    splits = splits and (most_keys is None or most_keys > SEGMENT)
    part = replace(single, segment=SEGMENT)

    def emit(module: Any) -> None:
        if not few or not decodes:
            emit_attention(module, packed, "attend")
        if decodes:
            emit_attention(module, single, "decode")
        if splits:
            emit_attention(module, part, "decode_part")
            emit_merge(module, part)

    packing = ["attend_pack"] if packed.packs_values else []
    functions = ([] if few and decodes else [*packing, "attend"]) + (["decode"] if decodes else [])
    functions += ["decode_part", "merge"] if splits else []

    def plan(bound: Sizes) -> Planned:
        batch, queries, keys = (_number(d, bound) for d in (sizes.batch, sizes.queries, sizes.keys))
        if 0 in (batch, queries):
            return Planned(())
        if decodes and queries <= DECODE_QUERIES:
            count = single.chunk_count(queries, batch)
            if splits and keys > SEGMENT:
                segments = -(-keys // SEGMENT)
                slots = placed.slots(SLOTS, bound, work=("workspace", 0))
                left = count * segments * single.shared_by * part_elements(single) * single.accumulator.itemsize
                both = NativeCall("decode_part", slots, count * segments), NativeCall("merge", slots, count)
                return Planned(both, left + WORKSPACE_ALIGN)
            return Planned((NativeCall("decode", placed.slots(SLOTS, bound), count),))
        v_bytes = packed.v_packed_size(keys, batch) * packed.accumulator.itemsize
        slots = placed.slots(SLOTS, bound, work=("workspace", 0))
        calls = (
            *(NativeCall(name, slots, packed.pack_count(batch)) for name in packing),
            NativeCall("attend", slots, packed.chunk_count(queries, batch)),
        )
        return Planned(calls, v_bytes + WORKSPACE_ALIGN if packing else 0)

    return NativeOp(f"{packed}; {functions}", emit, tuple(functions), plan)


def with_blocks(spec: AttentionSpec, queries: Dim, keys: Dim) -> AttentionSpec:
    """Whole tiles and panels of rows; blocks of keys no longer than the keys."""
    rows = math.lcm(spec.query_panels.columns, spec.mix_tiles.heights[0])
    most = bounds(keys)[1]
    block = KEY_BLOCK if most is None else min(KEY_BLOCK, -(-max(1, most) // 64) * 64)
    known = [n if isinstance(n, int) else None for n in (queries, keys)]
    return replace(
        spec, query_rows=-(-LEAST_ROWS // rows) * rows, key_block=block, queries=known[0], keys=known[1]
    )  # fmt: skip


def _goes_back(op: Op, types: Sequence[TensorType], target: Target) -> bool:
    """As attention, where neither a bias nor a cap needs a cotangent."""
    q, k, v, dy, *extra = types
    if q.dtype not in (f32, f64) or dy.dtype is not q.dtype or not _accepts(op, (q, k, v, *extra), target):
        return False
    return can_go_back(_spec(op, types, 4, target))


@override("attention_backward", views=True, instead_of_parts=_goes_back, numbers=_heads)
def attention_backward(node: Node, target: Target, views: Sequence[Spacing] | None) -> NativeOp | None:
    """The cotangents of queries, keys and values."""
    op: Any = node.op
    types = [x.type for x in node.inputs]
    if views is None or not _goes_back(op, types, target):
        return None
    operands = {"q": 0, "k": 1, "v": 2, "dy": 3, "mask": 4}
    placed = _Placed(op, operands, dict(zip(("dq", "dk", "dv"), node.types, strict=True)), types, views)
    if not placed.is_readable:
        return None
    spec = backward_spec(_spec(op, types, 4, target))
    sizes = op.sizes(*types[:3])

    def plan(bound: Sizes) -> Planned:
        batch, queries, keys = (_number(d, bound) for d in (sizes.batch, sizes.queries, sizes.keys))
        heads, parts = batch * spec.kv_heads, parts_of(spec, queries, batch)
        if batch == 0:
            return Planned(())
        slots = placed.slots(BACKWARD_SLOTS, bound, work=("workspace", 0), parts=("number", parts))
        calls = (NativeCall("slopes", slots, heads * parts), NativeCall("slopes_sum", slots, heads))
        return Planned(calls, work_size(spec, keys, parts, batch) * spec.accumulator.itemsize + WORKSPACE_ALIGN)

    return NativeOp(f"backward {spec}", lambda module: _emit_backward(module, spec), ("slopes", "slopes_sum"), plan)


def _emit_backward(module: Any, spec: AttentionSpec) -> None:
    emit_backward(module, spec, "slopes")


def _spec(op: Any, types: Sequence[TensorType], mask_at: int, target: Target) -> AttentionSpec:
    sizes = op.sizes(*types[:3])
    spans_keys = op.mask == "none" or types[mask_at].shape[-1] != 1
    spans_rows = op.mask == "none" or types[mask_at].shape[-2] != 1
    return AttentionSpec(
        target, op.num_heads, op.kv_heads, op.head_dim, sizes.value_dim, op.scale, types[0].dtype, op.causal, op.window,
        op.mask, spans_keys, spans_rows, op.has_offset, op.softcap, op.dropped, op.zero_rows,
    )  # fmt: skip


class _Placed(AttentionPlaces):
    """Operands as arguments of the kernels, which read rows whose elements lie side by side."""

    @property
    def is_readable(self) -> bool:
        return self.is_side_by_side

    def slots(self, names: Sequence[str], sizes: Sizes, **others: Slot) -> list[Slot]:
        values: dict[str, Slot] = {
            name: ("number", _number(getattr(self.sizes, name), sizes)) for name in ("batch", "queries", "keys")
        }
        values |= {name: ("output", i) for i, name in enumerate(self.outputs)}
        values |= {name: self._at(at, sizes) for name, at in self.inputs.items()}
        for name, strides in self.strides.items():
            for part, stride in zip(("batch", "head", "row"), strides[:3], strict=True):
                values[f"{name}_{part}"] = ("number", _number(stride, sizes))
        if self.op.has_offset:
            values["offset"] = self._at(len(self.types) - 1, sizes)
            moves = self.types[-1].shape[0] != 1
            values["offset_batch"] = ("number", _number(self.views[-1].strides[0], sizes) if moves else 0)
        values |= others
        return [values.get(slot, ("number", 0)) for slot in names]

    def _at(self, i: int, sizes: Sizes) -> Slot:
        start = _number(self.views[i].start, sizes) * self.types[i].dtype.itemsize
        return "input_at", (i, start)


def _number(dim: Dim, sizes: Sizes) -> int:
    value = substitute(dim, sizes)
    assert isinstance(value, int)
    return value
