"""Attention as one step: queries, keys and values read where they lie, scores never stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strata.backends.llvm.attention import SLOTS, AttentionSpec, emit_attention
from strata.backends.llvm.attention_decode import can_decode
from strata.backends.llvm.overrides import Call, NativeOp, Planned, Sizes, Slot, override
from strata.core import Dim, Target, TensorType, bool_, f32, f64, i64, substitute
from strata.lir import Spacing
from strata.mir import Node, Op

DECODE_QUERIES = 4  # up to so many queries, reading the keys once beats packing them
_ALIGN = 64


def _accepts(op: Op, types: Sequence[TensorType], target: Target) -> bool:
    """f32 and f64 with static heads, keys that exist, masks of the kernel's types."""
    q, k, v, *extra = types
    sizes = op.sizes(q, k, v)  # type: ignore[attr-defined]
    if q.dtype not in (f32, f64) or not isinstance(sizes.value_dim, int) or sizes.keys == 0:
        return False
    masked = op.mask != "none"  # type: ignore[attr-defined]
    if masked and extra[0].dtype is not (bool_ if op.mask == "custom" else q.dtype):  # type: ignore[attr-defined]
        return False
    return not op.has_offset or extra[-1].dtype is i64  # type: ignore[attr-defined]


@override("attention", views=True, instead_of_parts=_accepts)
def attention(node: Node, target: Target, views: Sequence[Spacing] | None) -> NativeOp | None:
    """The attention of a node whose inputs have the given spacing."""
    op: Any = node.op
    types = [x.type for x in node.inputs]
    if views is None or not _accepts(op, types, target):
        return None
    placed = _Placed(op, types, node.types[0], views)
    if not placed.is_readable:
        return None
    sizes = op.sizes(*types[:3])
    mask = types[3] if op.mask != "none" else None
    few = isinstance(sizes.queries, int) and sizes.queries <= DECODE_QUERIES

    def spec_for(decode: bool) -> AttentionSpec:
        return AttentionSpec(
            target, op.num_heads, op.kv_heads, op.head_dim, sizes.value_dim, op.scale, types[0].dtype, op.causal,
            op.window,
            op.mask, mask is None or mask.shape[-1] != 1, op.has_offset, op.softcap, decode,
        )  # fmt: skip

    packed = spec_for(False)
    single = spec_for(True)
    both = not isinstance(sizes.queries, int)
    decodes = can_decode(single) and (few or both)

    def emit(module: Any) -> None:
        if not few or not decodes:
            emit_attention(module, packed, "attend")
        if decodes:
            emit_attention(module, single, "decode")

    functions = ([] if few and decodes else ["attend_pack", "attend"]) + (["decode"] if decodes else [])

    def plan(bound: Sizes) -> Planned:
        batch, queries, keys = (_number(d, bound) for d in (sizes.batch, sizes.queries, sizes.keys))
        if 0 in (batch, queries, keys):
            return Planned(())
        if decodes and queries <= DECODE_QUERIES:
            slots = placed.slots(bound, 0, batch, queries, keys)
            return Planned((Call("decode", slots, single.chunk_count(queries, batch)),))
        item = packed.accumulator.itemsize
        k_bytes = -(-packed.k_packed_size(keys, batch) * item // _ALIGN) * _ALIGN
        v_bytes = packed.v_packed_size(keys, batch) * item + _ALIGN
        slots = placed.slots(bound, k_bytes, batch, queries, keys)
        calls = (
            Call("attend_pack", slots, packed.pack_count(batch)),
            Call("attend", slots, packed.chunk_count(queries, batch)),
        )
        return Planned(calls, k_bytes + v_bytes)

    return NativeOp(f"{packed}; {functions}", emit, tuple(functions), plan)


class _Placed:
    """Where the operands of an attention lie, as strides of batch, head and row."""

    def __init__(self, op: Any, types: Sequence[TensorType], out: TensorType, views: Sequence[Spacing]) -> None:
        self.op, self.types, self.views = op, types, views
        sizes = op.sizes(*types[:3])
        dims = {"q": op.head_dim, "k": op.head_dim, "v": sizes.value_dim, "out": sizes.value_dim}
        spacing = [*views[:3], Spacing(0, _contiguous(out.shape))]
        self.strides: dict[str, tuple[Dim, Dim, Dim]] = {}
        self.is_readable = True
        for name, view in zip(("q", "k", "v", "out"), spacing, strict=True):
            batch, head, row, inner = self._axes(view.strides, dims[name])
            self.strides[name] = (batch, head, row)
            self.is_readable &= inner == 1
        if op.mask != "none":
            shape, steps = types[3].shape, views[3].strides
            moving = [0 if d == 1 else s for d, s in zip(shape, steps, strict=True)]
            self.strides["mask"] = (moving[0], moving[1], moving[2])
            self.is_readable &= shape[3] == 1 or steps[3] == 1

    def _axes(self, strides: tuple[Dim, ...], dim: Dim) -> tuple[Dim, Dim, Dim, Dim]:
        """Strides of batch, head, row and element in the op's layout."""
        match self.op.layout:
            case "bhsd":
                b, h, s, d = strides
                return b, h, s, d
            case "bshd":
                b, s, h, d = strides
                return b, h, s, d
            case "bsd":
                b, s, d = strides
                return b, d * dim, s, d
        s, d = strides
        return 0, d * dim, s, d

    def slots(self, sizes: Sizes, k_bytes: int, batch: int, queries: int, keys: int) -> list[Slot]:
        values: dict[str, Slot] = {
            "k_packed": ("workspace", 0), "v_packed": ("workspace", k_bytes), "out": ("output", 0),
            "batch": ("number", batch), "queries": ("number", queries), "keys": ("number", keys),
        }  # fmt: skip
        for i, name in enumerate(("q", "k", "v")):
            values[name] = self._at(i, sizes)
        if self.op.mask != "none":
            values["mask"] = self._at(3, sizes)
        for name, strides in self.strides.items():
            for part, stride in zip(("batch", "head", "row"), strides, strict=True):
                values[f"{name}_{part}"] = ("number", _number(stride, sizes))
        if self.op.has_offset:
            values["offset"] = self._at(len(self.types) - 1, sizes)
            moves = self.types[-1].shape[0] != 1
            values["offset_batch"] = ("number", _number(self.views[-1].strides[0], sizes) if moves else 0)
        return [values.get(slot, ("number", 0)) for slot in SLOTS]

    def _at(self, i: int, sizes: Sizes) -> Slot:
        start = _number(self.views[i].start, sizes) * self.types[i].dtype.itemsize
        return "input_at", (i, start)


def _contiguous(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    strides: list[Dim] = []
    step: Dim = 1
    for d in reversed(shape):
        strides.insert(0, step)
        step = step * d
    return tuple(strides)


def _number(dim: Dim, sizes: Sizes) -> int:
    value = substitute(dim, sizes)
    assert isinstance(value, int)
    return value
