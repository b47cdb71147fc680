"""Plans: packing, lifetimes, in-place reuse, views, phases, manifests, and what the verifier refuses."""

from dataclasses import replace

import numpy as np
import pytest

from strata import ops
from strata.core import f32
from strata.errors import VerifyError
from strata.lir import Lir, plan, verify_plan
from strata.lir.memory import ArenaBlock, lower_bound, pack
from strata.mir import Graph


def chain(steps: int = 4, size: int = 16) -> Graph:
    """Sorts are steps of their own, so every value is stored."""
    g = Graph("chain")
    y = g.input("x", f32[size])
    for _ in range(steps):
        y = ops.sort(ops.sin(y))
    return g.outputs(y)


def test_blocks_that_never_meet_share_memory():
    offsets, total = pack([ArenaBlock("a", 64, 0, 1), ArenaBlock("b", 64, 2, 3), ArenaBlock("c", 64, 1, 2)])
    assert offsets["a"] == offsets["b"] != offsets["c"]
    assert total == 128


def test_blocks_never_overlap_while_alive(rng):
    for _ in range(50):
        blocks = []
        for i in range(40):
            birth = int(rng.integers(0, 60))
            blocks.append(ArenaBlock(str(i), 64 * int(rng.integers(1, 40)), birth, birth + int(rng.integers(0, 12))))
        offsets, total = pack(blocks)
        assert lower_bound(blocks) <= total <= sum(b.size for b in blocks)
        for i, a in enumerate(blocks):
            for b in blocks[:i]:
                if a.birth <= b.death and b.birth <= a.death:
                    apart = offsets[a.name] + a.size <= offsets[b.name] or offsets[b.name] + b.size <= offsets[a.name]
                    assert apart, (a, b)


def test_report_lists_buffers_by_offset():
    lir = plan(chain())
    lines = lir.memory_report().splitlines()
    assert lines[0].startswith(f"arena {lir.arena_size:,} bytes, lower bound")
    offsets = [int(line.split()[0]) for line in lines[2:]]
    assert offsets == sorted(offsets)
    assert len(offsets) == sum(b.role == "scratch" for b in lir.buffers) > 1
    svg = lir.memory_svg()
    assert svg.startswith("<svg")
    assert svg.count("<rect") == len(offsets)


def test_element_wise_steps_take_over_dying_inputs():
    lir = plan(chain())
    shared = [b for b in lir.buffers if b.alias is not None]
    assert len(shared) == 3  # the first sin reads the caller's input
    assert lir.arena_size == 128
    verify_plan(lir)


def test_inputs_read_elsewhere_are_not_taken_over():
    g = Graph("g")
    y = ops.sort(g.input("x", f32[16]))
    flipped = ops.sort(ops.flip(y, 0) + y)  # reads y at two places
    kept = ops.sort(flipped)
    g.outputs(ops.sort(ops.exp(flipped) * kept))  # both die here, one is taken over
    lir = plan(g)
    (shared,) = [b for b in lir.buffers if b.alias is not None]
    assert lir.schedule[shared.birth].label.startswith("exp")
    verify_plan(lir)


def test_movements_are_views():
    g = Graph("g")
    y = ops.sort(g.input("x", f32[4, 16]))
    part = ops.reshape(ops.narrow(y, 0, 1, 2), (32,))
    lir = plan(g.outputs(ops.exp(part), ops.transpose(y) * 2.0))
    assert all("slice" not in s.label or "exp" in s.label for s in lir.schedule)
    assert sum(b.role == "scratch" for b in lir.buffers) == 1


def test_phases():
    g = Graph("g")
    x, w, v = g.input("x", f32[4, 8]), g.param("w", f32[8, 8]), g.param("v", f32[8, 8])
    logits = ops.exp(x) @ (w + v)
    g.outputs(ops.exp(ops.max(logits, axis=0)))
    phases = {s.label: s.phase for s in plan(g).schedule}
    assert phases == {"add": "prologue", "exp": "steady", "matmul": "steady", "reduce_max + exp": "epilogue"}
    light = Graph("light")
    light.outputs(ops.exp(light.input("x", f32[4])))
    assert [s.phase for s in plan(light).schedule] == ["steady"]


def test_manifest_sizes_and_order():
    g = Graph("g")
    x = g.input("x", f32[2, 3])
    w, b = g.param("layer.w", f32[3, 4]), g.param("head.b", f32[4])
    manifest = plan(g.outputs(x @ w + b, x)).manifest()
    assert manifest.input_names == ("x",)
    assert manifest.param_names == ("layer.w", "head.b")
    assert manifest.param_byte_size("layer.w") == 48
    assert manifest.total_param_bytes == 64
    assert manifest.weight_blocks() == {"head": ("head.b",), "layer": ("layer.w",)}
    assert manifest.weight_layout() == {"head.b": (0, 16), "layer.w": (64, 48)}
    assert [b.name for b in manifest.outputs] == ["output0", "output1"]
    assert manifest.outputs[1].buffer == "x"


def broken(lir: Lir, **changes: object) -> str:
    with pytest.raises(VerifyError) as error:
        verify_plan(replace(lir, **changes))
    return str(error.value)


def test_the_verifier_refuses():
    lir = plan(chain(2))
    first, second, *rest = lir.schedule
    assert "before it is written" in broken(lir, schedule=(second, first, *rest))
    assert "two buffers are called x" in broken(lir, buffers=(*lir.buffers, lir.buffers[0]))
    assert "which is not a buffer" in broken(lir, schedule=(replace(first, inputs=("nothing",)), second, *rest))
    assert "again" in broken(lir, schedule=(first, first, second, *rest))
    assert "is never written" in broken(lir, schedule=lir.schedule[:-1])
    wide = tuple(replace(b, type=f32[99]) if b.role == "scratch" else b for b in lir.buffers)
    assert "the plan says f32[99]" in broken(lir, buffers=wide)
    short = tuple(replace(b, death=b.birth) if b.role == "scratch" and b.alias is None else b for b in lir.buffers)
    assert "lives from" in broken(lir, buffers=short)
    strange = tuple(replace(b, role="somewhere") if b.role == "input" else b for b in lir.buffers)
    assert "has the role 'somewhere'" in broken(lir, buffers=strange)


def test_results_that_are_leaves_or_repeated():
    g = Graph("g")
    x, c = g.input("x", f32[3]), g.constant(np.ones(3, np.float32))
    y = ops.exp(x)
    lir = plan(g.outputs(x, c, y, y))
    verify_plan(lir)
    assert lir.io.outputs == ("x", "const0", "out2", "out2")


def test_rows_are_not_computed_again_for_a_reader_in_other_axes():
    """Groups of 2 channels of 12 numbers each, read channel by channel: the sums are a kernel of their own."""
    g = Graph("groups")
    x, w = g.input("x", f32[3, 8, 3, 4]), g.input("w", f32[8])
    rows = ops.reshape(x, (3, 4, 24))
    y = ops.reshape(rows / ops.sum(rows, axis=-1, keepdims=True), (3, 8, 3, 4))
    g.outputs(y * ops.reshape(w, (8, 1, 1)))
    assert [s.label.split(" + ")[-1] for s in plan(g).schedule] == ["reduce_sum", "multiply"]
