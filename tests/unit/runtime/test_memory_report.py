"""The memory that a compiled graph tells of: plan, parameters, and what kernels take beside the plan's buffers."""

from __future__ import annotations

import pytest

from strata import ops
from strata.core import sym
from strata.errors import MemoryLimitError
from strata.mir import Graph
from strata.runtime import Session


def test_memory_and_signature() -> None:
    g = Graph("g")
    x, w = g.input("x", (4, 8)), g.param("w", (8, 8))
    c = Session("cpu").compile(g.outputs(ops.softmax(x @ w, axis=-1) @ w))
    assert c.signature == "(x: f32[4, 8], param w: f32[8, 8]) -> f32[4, 8]"
    m = c.memory
    assert (m.inputs, m.outputs, m.params) == (128, 128, 256)
    assert m.scratch == c.lir.arena_size >= m.lower_bound
    assert m.splitlines()[0].startswith("arena ")
    total = m.scratch + m.inputs + m.outputs + m.params + m.constants + m.packed
    assert m.fits_in(total) == 0
    assert m.fits_in(total - 10) == 10


@pytest.mark.parametrize("kind", ["packed operand", "any rows", "sort"])
def test_memory_counts_what_kernels_take_beside_the_plan(kind: str) -> None:
    g = Graph("g")
    match kind:
        case "packed operand":
            g.outputs(g.input("a", (300, 300)) @ g.input("b", (300, 300)).T)
        case "any rows":
            g.outputs(ops.gelu(g.input("a", (sym("n", 1, 500), 300)) @ g.input("b", (300, 300)).T))
        case _:
            g.outputs(ops.sort(g.input("a", (50_000,)), axis=0))
    c = Session("cpu").compile(g)
    m = c.memory
    sizes = {name: symbol.hi for name, symbol in c.lir.symbols.items()}
    taken = c._executable.bound_for(sizes).arena
    assert m.workspace == m.scratch - c.lir.arena_size > 0
    assert 0 <= taken - m.scratch <= 64  # the start of a cache line
    assert m.splitlines()[-1] == f"and {m.workspace:,} bytes of workspace for kernels"
    Session("cpu").compile(g, memory_limit=m.scratch)
    with pytest.raises(MemoryLimitError, match=f"{m.workspace:,} of workspace for kernels, the limit is"):
        Session("cpu").compile(g, memory_limit=m.scratch - 1)


def test_no_workspace_is_known_where_a_size_has_no_bound() -> None:
    g = Graph("g")
    n = sym("n")
    c = Session("cpu").compile(g.outputs(ops.sort(g.input("x", (n,)), axis=0)))
    assert (c.memory.scratch, c.memory.workspace) == (None, None)
