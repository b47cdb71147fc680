"""Values that readers compute again: more of them where arithmetic is nearly free."""

from strata import ops
from strata.core import bf16, f32
from strata.lir import plan
from strata.mir import Graph
from strata.passes import default_passes, run_passes
from strata.passes.base import PassContext

FREE = 64


def stored(graph: Graph, again: int | None = None) -> list[str]:
    """Types of what kernels hand on."""
    made, _ = run_passes(default_passes(), graph, PassContext(takes=lambda op, types=(): False))
    lir = plan(made) if again is None else plan(made, again=again)
    return sorted(str(b.type) for b in lir.buffers if b.role == "scratch")


def test_what_takes_one_load_is_computed_again() -> None:
    g = Graph("rows")
    x = g.input("x", f32[64, 4096])
    powers = ops.exp(x - ops.max(x, axis=1, keepdims=True))
    g.outputs(ops.sum(powers, axis=1), ops.sum(powers, axis=0))
    assert stored(g) == ["f32[64, 4096]"]
    assert stored(g, FREE) == ["f32[64]"]


def test_numbers_of_rows_are_stored_rather_than_rows() -> None:
    g = Graph("norms")
    x = g.input("x", f32[64, 4096])
    centred = x - ops.mean(x, axis=1, keepdims=True)
    g.outputs(ops.sum(centred * centred, axis=1), ops.sum(centred, axis=0))
    assert stored(g) == ["f32[64, 4096]"]
    assert stored(g, FREE) == ["f32[64, 1]"]


def test_a_matmul_stores_narrow_floats_that_several_read_as_wide_ones() -> None:
    g = Graph("loss")
    z = ops.cast(ops.matmul(g.input("x", bf16[64, 128]), g.param("w", bf16[128, 4096])), f32)
    g.outputs(ops.max(z, axis=1), ops.sum(z, axis=0))
    assert stored(g) == ["f32[64, 4096]"]
    assert stored(g, FREE) == ["bf16[64, 4096]"]


def test_an_epilogue_may_still_be_wide() -> None:
    g = Graph("residual")
    z = ops.cast(ops.matmul(g.input("x", bf16[64, 128]), g.param("w", bf16[128, 4096])), f32)
    g.outputs(z + g.input("y", f32[64, 4096]))
    assert stored(g, FREE) == []
