"""Attention for Hopper with specialised warps, in Gluon: one warp loads, warpgroups of four multiply and add up.

The loading warp has the copy engine (TMA) bring queries, keys and values into shared memory, and runs ahead as far as
there is room. Each consumer has 64 query rows. While the tensor cores take its products, another consumer works out
exponentials; and within a consumer, the scores of a block of keys are made while the values of the block before are
added up. Who has the tensor cores when is left to the hardware: barriers that pass them on made it no faster. Keys go
from the last block to the first, so that blocks with a mask come first. Programs stay: they take block after block of
queries, and for causal attention a long one and a short one in turn. Queries of the next block are on their way, and
results of the last one too, while a block is worked on. The bits of a row depend on its keys alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strata.backends.attention import LOG2E, LOWEST, AttentionPlaces
from strata.backends.triton.codegen.elements import literal
from strata.backends.triton.codegen.render import Rendered, TritonProgram
from strata.backends.triton.schedules.schedule import AttentionBlocks
from strata.backends.triton.target import Gpu
from strata.core import Dim, DType, bf16, f16, f32
from strata.kernel import Kernel

PART = 64  # query rows of a consumer: those of one instruction
_WIDTHS = (64, 128)
_LINE = 16  # bytes that addresses and steps of the copy engine are multiples of
_REGISTERS = {1: 240, 2: 240, 3: 160}  # of a thread, by consumers
_LOADING = 24  # registers of a thread that only loads
_SHARED = "sq, sk, sv, q_ready, q_free, k_ready, k_free, v_ready, v_free"
_SIZES = "queries, keys, items"
_QUEUED = 2  # blocks of queries in shared memory


def suits_specialised(op: Any, places: AttentionPlaces, starts: dict[str, Dim], dtype: DType, gpu: Gpu) -> bool:
    """Whether warps can be specialised for an attention: plain scores, rows that the copy engine can bring."""
    plain = op.mask == "none" and op.softcap is None and op.window is None and not op.has_offset and op.scale > 0
    if (gpu.kind, gpu.arch) != ("cuda", 90) or not gpu.is_real or not plain or dtype not in (f16, bf16):
        return False
    if op.causal and not _no_more(places.sizes.queries, places.sizes.keys):  # rows may keep no key
        return False
    if op.head_dim not in _WIDTHS or places.sizes.value_dim != op.head_dim:
        return False
    if not all(isinstance(n, int) for n in (places.sizes.queries, places.sizes.keys)):
        return False
    steps = [d for at in places.strides.values() for d in (at.batch, at.head, at.row)]
    whole = _LINE // dtype.itemsize
    lines = all(isinstance(d, int) and d > 0 and d % whole == 0 for d in steps)
    return lines and places.is_side_by_side and all(isinstance(s, int) and s % whole == 0 for s in starts.values())


def _no_more(queries: Dim, keys: Dim) -> bool:
    return isinstance(queries, int) and isinstance(keys, int) and queries <= keys


def render_specialised(
    kernel: Kernel, op: Any, places: AttentionPlaces, starts: dict[str, Dim], dtype: DType, blocks: AttentionBlocks
) -> Rendered:
    """One program whose warps have parts of their own."""
    blocks = replace(blocks, rows=PART * blocks.consumers)
    sizes = places.sizes
    heads = {"q": op.num_heads, "k": op.kv_heads, "v": op.kv_heads, "out": op.num_heads}
    lines = [f"items = n0.to(tl.int32) * {op.num_heads}", f"queries = {sizes.queries} + 0 * items",
             f"keys = {sizes.keys} + 0 * items"]  # fmt: skip
    for name, count in heads.items():
        at = places.strides[name]
        rows, block = (sizes.queries, "PART") if name in ("q", "out") else (sizes.keys, "KEYS")
        start = f" + {starts[name]}" if starts.get(name, 0) else ""
        lines.append(
            f"d{name} = tma.make_tensor_descriptor({name}{start}, [n0.to(tl.int32), {count}, {rows}, WIDTH], "
            f"[{at.batch}, {at.head}, {at.row}, 1], [1, 1, {block}, WIDTH], TILE)"
        )
    lines += _SETUP.splitlines()
    results = _results(kernel)
    each = [f"(consume_{part}, ({results}, {_SHARED}, {_SIZES}))" for part in range(blocks.consumers)]
    each.append(f"(produce, (dq, dk, dv, {_SHARED}, {_SIZES}))")
    warps = [4] * (blocks.consumers - 1) + [1]
    registers = [_REGISTERS[blocks.consumers]] * (blocks.consumers - 1) + [_LOADING]
    lines.append(f"tl.warp_specialize([{', '.join(each)}], {warps}, {registers})")
    body = "".join(f"    {line}\n" for line in lines)
    grid = blocks.persistent
    program = TritonProgram(
        "attention", replace(kernel, inputs=kernel.buffers, outputs=()), body, frozenset(), kernel.buffers,
        (sizes.batch,), (grid,), blocks, gluon=_module(op, dtype, blocks, results),
    )  # fmt: skip
    return Rendered(kernel, (program,), ())


def _results(kernel: Kernel) -> str:
    """What consumers write to: by the copy engine, and sums of rows where a backward pass reads them."""
    return "dout, lse" if len(kernel.outputs) > 1 else "dout"


def _module(op: Any, dtype: DType, blocks: AttentionBlocks, results: str) -> str:
    """Everything before the program: constants, and what its warps do."""
    layout = "tl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, {}, 16])"
    constants = {
        "PART": PART, "PARTS": blocks.consumers, "ROWS": blocks.rows, "KEYS": blocks.keys, "WIDTH": op.head_dim,
        "STAGES": blocks.stages, "QUEUED": _QUEUED, "CAUSAL": bool(op.causal), "ZEROS": bool(op.zero_rows),
        "KEEPS": results != "dout", "NATURAL": 1 / LOG2E, "LOWEST": LOWEST,
        "HEADS": op.num_heads, "GROUP": op.num_heads // op.kv_heads, "SCALE": op.scale * LOG2E,
        "DROPPED": literal(op.dropped_score / op.scale, f32), "DTYPE": "tl.bfloat16" if dtype is bf16 else "tl.float16",
        "TILE": "tl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)",
        "SCORES": layout.format(blocks.keys), "SUMS": layout.format(op.head_dim),
    }  # fmt: skip
    head = "".join(f"{name} = tl.constexpr({value})\n" for name, value in constants.items())
    consumers = "".join(
        f"\n\n@gluon.jit\ndef consume_{part}({results}, {_SHARED}, {_SIZES}):\n"
        f"    consume({results}, {_SHARED}, {_SIZES}, {part})\n"
        for part in range(blocks.consumers)
    )
    parts = _PARTS.replace("RESULTS", results).replace("SHARED", _SHARED).replace("SIZES", _SIZES)
    return _IMPORTS + head + parts + consumers


_IMPORTS = """import triton
import triton.experimental.gluon.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait,
)

"""

_SETUP = """sq = tl.allocate_shared_memory(DTYPE, [QUEUED * PARTS, 1, 1, PART, WIDTH], TILE)
sk = tl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, KEYS, WIDTH], TILE)
sv = tl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, KEYS, WIDTH], TILE)
q_ready = tl.allocate_shared_memory(tl.int64, [QUEUED, 1], mbarrier.MBarrierLayout())
q_free = tl.allocate_shared_memory(tl.int64, [QUEUED, 1], mbarrier.MBarrierLayout())
k_ready = tl.allocate_shared_memory(tl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
k_free = tl.allocate_shared_memory(tl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
v_ready = tl.allocate_shared_memory(tl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
v_free = tl.allocate_shared_memory(tl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
for slot in tl.static_range(QUEUED):
    mbarrier.init(q_ready.index(slot), count=1)
    mbarrier.init(q_free.index(slot), count=PARTS)
for stage in tl.static_range(STAGES):
    mbarrier.init(k_ready.index(stage), count=1)
    mbarrier.init(k_free.index(stage), count=PARTS)
    mbarrier.init(v_ready.index(stage), count=1)
    mbarrier.init(v_free.index(stage), count=PARTS)"""

_PARTS = '''

@gluon.jit
def turns_of(queries, items):
    """Tiles that this program takes: of causal attention, two neighbours at a time."""
    tiles = (queries + ROWS - 1) // ROWS * items
    here = tl.program_id(0)
    programs = tl.num_programs(0)
    if CAUSAL:
        pairs = (tiles + 1) // 2
        odd = (tiles % 2 == 1) & ((pairs - 1) % programs == here)
        turns = (pairs - here + programs - 1) // programs * 2 - tl.where(odd, 1, 0)
    else:
        turns = (tiles - here + programs - 1) // programs
    return turns


@gluon.jit
def place_of(turn, queries, keys):
    """A tile's block of rows and item; the position of its first row; blocks of keys, and those without a mask."""
    blocks = (queries + ROWS - 1) // ROWS
    if CAUSAL:  # a long one and a short one
        tile = (tl.program_id(0) + turn // 2 * tl.num_programs(0)) * 2 + turn % 2
        item = tile // blocks
        at = tile % blocks
        block = tl.where(at % 2 == 0, blocks - 1 - at // 2, at // 2)
        first = block * ROWS + tl.maximum(keys - queries, 0)
        steps = (tl.minimum(keys, first + ROWS) + KEYS - 1) // KEYS
        full = tl.minimum(tl.minimum(first + 1, keys) // KEYS, steps - 1)
    else:
        tile = tl.program_id(0) + turn * tl.num_programs(0)
        item = tile // blocks
        block = tile % blocks
        first = 0
        steps = (keys + KEYS - 1) // KEYS
        full = steps - 1
    return block, item, first, steps, full


@gluon.jit
def produce(dq, dk, dv, SHARED, SIZES):
    count = 0
    for turn in range(turns_of(queries, items)):
        block, item, first, steps, full = place_of(turn, queries, keys)
        batch = item // HEADS
        head = item % HEADS
        shared = head // GROUP
        slot = turn % QUEUED
        mbarrier.wait(q_free.index(slot), ((turn // QUEUED) & 1) ^ 1)
        mbarrier.expect(q_ready.index(slot), ROWS * WIDTH * 2)
        for part in tl.static_range(PARTS):
            row = block * ROWS + part * PART
            place = sq.index(slot * PARTS + part)
            tma.async_copy_global_to_shared(dq, [batch, head, row, 0], q_ready.index(slot), place)
        for step in range(steps):
            stage = count % STAGES
            phase = ((count // STAGES) & 1) ^ 1
            at = (steps - 1 - step) * KEYS
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_ready.index(stage), KEYS * WIDTH * 2)
            tma.async_copy_global_to_shared(dk, [batch, shared, at, 0], k_ready.index(stage), sk.index(stage))
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_ready.index(stage), KEYS * WIDTH * 2)
            tma.async_copy_global_to_shared(dv, [batch, shared, at, 0], v_ready.index(stage), sv.index(stage))
            count += 1


@gluon.jit
def masked(score, at, first, keys, part: tl.constexpr):
    key = at + tl.arange(0, KEYS, tl.SliceLayout(0, SCORES))
    if CAUSAL:
        position = first + part * PART + tl.arange(0, PART, tl.SliceLayout(1, SCORES))
        score = tl.where(key[None, :] <= position[:, None], score, DROPPED)
    return tl.where(key[None, :] < keys, score, float("-inf"))


@gluon.jit
def scored(q, sk, k_ready, count):
    stage = count % STAGES
    mbarrier.wait(k_ready.index(stage), (count // STAGES) & 1)
    zeros = tl.zeros([PART, KEYS], tl.float32, SCORES)
    turned = sk.index(stage).reshape([KEYS, WIDTH]).permute((1, 0))
    return warpgroup_mma(q, turned, zeros, use_acc=False, is_async=True)


@gluon.jit
def step_over(
    q, sk, sv, k_ready, k_free, v_ready, v_free, count, at, first, keys, most, total, sums, weight,
    part: tl.constexpr, is_masked: tl.constexpr,
):
    """Scores of one more block of keys, while the values of the block before are added up."""
    score = scored(q, sk, k_ready, count)
    stage = (count - 1) % STAGES
    mbarrier.wait(v_ready.index(stage), ((count - 1) // STAGES) & 1)
    sums = warpgroup_mma(weight, sv.index(stage).reshape([KEYS, WIDTH]), sums, is_async=True)
    score = warpgroup_mma_wait(1, deps=[score])
    mbarrier.arrive(k_free.index(count % STAGES))
    if is_masked:
        score = masked(score, at, first, keys, part)
    higher = tl.maximum(most, tl.max(score, axis=1) * SCALE)
    weights = tl.exp2(score * SCALE - higher[:, None])
    fade = tl.exp2(most - higher)
    total = total * fade + tl.sum(weights, axis=1)
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(v_free.index(stage))
    sums = sums * tl.convert_layout(fade, tl.SliceLayout(1, SUMS))[:, None]
    return higher, total, sums, tl.convert_layout(weights.to(DTYPE), tl.DotOperandLayout(0, SUMS, 2))


@gluon.jit
def consume(RESULTS, SHARED, SIZES, part: tl.constexpr):
    count = 0
    for turn in range(turns_of(queries, items)):
        block, item, first, steps, full = place_of(turn, queries, keys)
        sums = tl.zeros([PART, WIDTH], tl.float32, SUMS)
        slot = turn % QUEUED
        place = sq.index(slot * PARTS + part)
        q = place.reshape([PART, WIDTH])
        mbarrier.wait(q_ready.index(slot), (turn // QUEUED) & 1)
        score = scored(q, sk, k_ready, count)
        score = warpgroup_mma_wait(0, deps=[score])
        mbarrier.arrive(k_free.index(count % STAGES))
        score = masked(score, (steps - 1) * KEYS, first, keys, part)
        most = tl.maximum(tl.max(score, axis=1) * SCALE, LOWEST)
        weights = tl.exp2(score * SCALE - most[:, None])
        total = tl.sum(weights, axis=1)
        weight = tl.convert_layout(weights.to(DTYPE), tl.DotOperandLayout(0, SUMS, 2))
        count += 1
        if turn > 0:  # results of the turn before have left by now
            tma.store_wait(0)
            mbarrier.arrive(q_free.index((turn - 1) % QUEUED))
        if CAUSAL:
            for step in range(1, steps - full):
                most, total, sums, weight = step_over(
                    q, sk, sv, k_ready, k_free, v_ready, v_free, count, (steps - 1 - step) * KEYS,
                    first, keys, most, total, sums, weight, part, True,
                )
                count += 1
        for step in range(0, full):
            most, total, sums, weight = step_over(
                q, sk, sv, k_ready, k_free, v_ready, v_free, count, 0,
                first, keys, most, total, sums, weight, part, False,
            )
            count += 1
        stage = (count - 1) % STAGES
        mbarrier.wait(v_ready.index(stage), ((count - 1) // STAGES) & 1)
        sums = warpgroup_mma(weight, sv.index(stage).reshape([KEYS, WIDTH]), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(v_free.index(stage))
        row = block * ROWS + part * PART
        if KEEPS:
            each = row + tl.arange(0, PART, tl.SliceLayout(1, SCORES))
            tl.store(lse + (item * queries + each), (most + tl.log2(total)) * NATURAL, mask=each < queries)
        if ZEROS:
            total = tl.where(total == 0, 1.0, total)
        sums = sums / tl.convert_layout(total, tl.SliceLayout(1, SUMS))[:, None]
        q.store(sums.to(DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(dout, [item // HEADS, item % HEADS, row, 0], place)
    tma.store_wait(0)
'''
