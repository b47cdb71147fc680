"""Paged attention as a step of a program: decode reads pages in place, prefill gathers them first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from strata.backends.llvm.attention.decode import can_decode, part_elements
from strata.backends.llvm.attention.form import SLOTS, AttentionSpec
from strata.backends.llvm.attention.forward import emit_attention
from strata.backends.llvm.attention.paged import PAGED_SLOTS, emit_collect, emit_paged_decode, emit_paged_merge
from strata.backends.llvm.attention.steps import DECODE_QUERIES, FEW_HEADS, SEGMENT, with_blocks
from strata.backends.llvm.ir.native import WORKSPACE_ALIGN, Workspace, number_slots, numbers
from strata.backends.llvm.ir.overrides import NativeCall, NativeOp, Planned, Sizes, Slot, override
from strata.core import Target, TensorType, f32
from strata.mir import Node, Op


def _accepts(op: Op, types: Sequence[TensorType], target: Target) -> bool:
    """Pages of f32, or of 8 bits for it, whose length divides the blocks that keys are taken in."""
    page = types[1].shape[1]
    return types[0].dtype is f32 and isinstance(page, int) and 0 < page <= SEGMENT and SEGMENT % page == 0


@override("paged_attention", instead_of_parts=_accepts)
def paged_attention(node: Node, target: Target) -> NativeOp | None:
    """The attention of a node."""
    op: Any = node.op
    types = [x.type for x in node.inputs]
    if not _accepts(op, types, target):
        return None
    q, keys, _, _, _, table, _, *scales = types
    packs = bool(scales)
    page, width = keys.shape[1].__index__(), op.kv_heads * op.head_dim
    spec = AttentionSpec(
        target, op.num_heads, op.kv_heads, op.head_dim, op.head_dim, op.dense.scale, f32, causal=True, window=op.window,
        has_offset=True, softcap=op.softcap,
    )  # fmt: skip
    packed = with_blocks(spec, q.shape[1], table.shape[1] * page)
    single = replace(spec, decode=True)
    part = replace(single, segment=SEGMENT)
    decodes = can_decode(single)
    splits = decodes and op.kv_heads < FEW_HEADS  # as where keys lie in one array
    packing = ["attend_pack"] if packed.packs_values else []

    def emit(module: Any) -> None:
        emit_collect(module, packed, "collect", packed=packs)
        emit_attention(module, packed, "attend")
        if decodes:
            emit_paged_decode(module, single, page, "decode", packed=packs)
        if splits:
            emit_paged_decode(module, part, page, "decode_part", packed=packs)
            emit_paged_merge(module, part, page, "merge")

    def plan(bound: Sizes) -> Planned:
        batch, queries = numbers(q.shape[:2], bound)
        pages, mine = numbers([keys.shape[0], table.shape[1]], bound)
        rows = mine * page
        if 0 in (batch, queries):
            return Planned(())
        values: dict[str, Slot] = {
            "q": ("input", 0), "k": ("input", 1), "v": ("input", 2), "new_k": ("input", 3), "new_v": ("input", 4),
            "table": ("input", 5), "offset": ("input", 6), "out": ("output", 0), "work": ("workspace", 0),
        }  # fmt: skip
        if packs:
            values |= {"k_scale": ("input", 7), "v_scale": ("input", 8)}
        sizes = {
            "batch": batch, "queries": queries, "keys": rows, "offset_batch": 1, "table_row": mine, "pages": pages,
            "new_batch": queries * width, "new_row": width,
        }  # fmt: skip
        for name, heads in (("q", op.num_heads), ("out", op.num_heads), ("k", op.kv_heads), ("v", op.kv_heads)):
            sizes[f"{name}_head"], sizes[f"{name}_row"] = op.head_dim, heads * op.head_dim
            sizes[f"{name}_batch"] = queries * heads * op.head_dim if name in ("q", "out") else 0

        def slots(names: Sequence[str]) -> list[Slot]:
            return [values.get(name, ("number", sizes.get(name, 0))) for name in names]

        if decodes and queries <= DECODE_QUERIES:
            count = single.chunk_count(queries, batch)
            if not splits or rows <= SEGMENT:
                return Planned((NativeCall("decode", slots(PAGED_SLOTS), count),))
            segments = -(-rows // SEGMENT)
            left = count * segments * single.shared_by * part_elements(single) * single.accumulator.itemsize
            both = slots(PAGED_SLOTS)
            return Planned(
                (NativeCall("decode_part", both, count * segments), NativeCall("merge", both, count)),
                left + WORKSPACE_ALIGN,
            )
        one = batch * rows * width * 4
        work = Workspace(packed.v_packed_size(rows, batch) * 4 if packing else 0)
        gathers = []
        for at, name in enumerate("kv"):
            told = number_slots(mine, pages, queries, page, width)
            by: Slot = ("input", 7 + at) if packs else ("number", 0)
            inputs: list[Slot] = [("input", 1 + at), ("input", 3 + at), ("input", 5), ("input", 6), by]
            values[name] = work.area(one)
            gathers.append(NativeCall("collect", [values[name], *inputs, *told], batch * mine))
            sizes[f"{name}_batch"] = rows * width
        calls = (
            *gathers, *(NativeCall(name, slots(SLOTS), packed.pack_count(batch)) for name in packing),
            NativeCall("attend", slots(SLOTS), packed.chunk_count(queries, batch)),
        )  # fmt: skip
        return Planned(calls, work.size + WORKSPACE_ALIGN)

    functions = ["collect", *packing, "attend", *(["decode"] if decodes else [])]
    functions += ["decode_part", "merge"] if splits else []
    return NativeOp(f"paged {page} {'i8 ' if packs else ''}{packed}; {functions}", emit, tuple(functions), plan)
