"""Grids are within what CUDA has: 65,535 programs along the second and the third axis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strata import ops
from strata.backends import register_backend, registry
from strata.backends.triton.backend import PlannedBackend, rendered_step
from strata.backends.triton.codegen.render import Rendered, render
from strata.backends.triton.target import Gpu
from strata.core import Dim, bf16, f32, i64, substitute, sym
from strata.errors import RunError
from strata.mir import Graph
from strata.ops.nn.attention import AttentionBackward
from strata.runtime import CompilePipeline
from tests.fake_cuda import FakeCore, driver_of

HOPPER = Gpu.named("sm_90")
MOST = (1 << 31) - 1, 65535, 65535


@pytest.fixture(autouse=True)
def _no_device_stays() -> Iterator[None]:
    register_backend("triton_planned", PlannedBackend(HOPPER))
    yield
    with registry._lock:
        registry._made.pop("triton_planned", None)


def matmuls(batch: Dim) -> Graph:
    g = Graph("matmuls")
    return g.outputs(ops.matmul(g.input("a", f32[batch, 64, 64]), g.input("b", f32[batch, 64, 64])))


def attention(batch: Dim) -> Graph:
    g = Graph("attention")
    return g.outputs(ops.attention(*(g.input(name, bf16[batch, 4, 49, 32]) for name in "qkv"), layout="bhsd"))


def gradients(batch: Dim) -> Graph:
    g = Graph("gradients")
    inputs = [g.input(name, bf16[batch, 4, 49, 32]) for name in ("q", "k", "v", "dy")]
    return g.outputs(*AttentionBackward(4, 4, 32, causal=True)(*inputs))


def pages(batch: Dim) -> Graph:
    g = Graph("pages")
    kinds = {"q": (batch, 40, 96), "k": (batch, 16, 48), "v": (batch, 16, 48)}
    kinds |= {"new_k": (batch, 40, 48), "new_v": (batch, 40, 48)}
    inputs = [g.input(name, bf16[shape]) for name, shape in kinds.items()]
    inputs += [g.input("table", i64[batch, 3]), g.input("past", i64[batch])]
    return g.outputs(ops.paged_attention(*inputs, num_heads=4, kv_heads=2))


def rendered(graph: Graph) -> list[Rendered]:
    steps = CompilePipeline("triton_planned").compile(graph).lir.schedule
    found = [render(s.kernel, HOPPER) if s.kernel is not None else rendered_step(s, HOPPER) for s in steps]
    return [r for r in found if r is not None]  # checks of ids have kernels elsewhere


@pytest.mark.parametrize("make", [matmuls, attention, gradients, pages])
def test_any_number_of_batches_has_a_grid(make) -> None:
    few = {p.name: p for r in rendered(make(100)) for p in r.all_programs if len(p.grid) > 1}
    assert few
    assert not any("program_id(2)" in p.body for p in few.values()), "most have no need of it"
    for batch, count in ((200_000, 200_000), (sym("B", 1), 200_000), (sym("B", 1), 7), (sym("B", 1, 100), 100)):
        programs = [p for r in rendered(make(batch)) for p in r.all_programs if p.name in few]
        assert {p.name for p in programs} == set(few)
        for program in programs:
            grid = [substitute(d, {"B": count}) for d in program.grid]
            assert all(isinstance(n, int) and 0 < n <= most for n, most in zip(grid, MOST, strict=False))
            if len(grid) == 3:
                items = few[program.name].grid[1] * count // 100
                assert items <= grid[1] * grid[2] < items + (1 << 15), "no program is missing"
                assert "tl.program_id(1) + tl.program_id(2) * 32768" in program.body
                assert "return" in program.body
        assert any(len(p.grid) == 3 for p in programs) == (batch != sym("B", 1, 100))


def test_a_grid_beyond_that_is_an_error_before_the_launch() -> None:
    driver = driver_of(FakeCore())
    made = driver.make(CompilePipeline("triton_planned").compile(matmuls(2)).lir.schedule[0].kernel)
    (program,) = made.rendered.programs
    object.__setattr__(program, "grid", (1, 65536))
    with pytest.raises(RunError, match="65536 programs are more than a GPU takes"):
        driver.launch(made, [0, 0, 0], {})
