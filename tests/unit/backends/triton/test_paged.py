"""Attention over pages: read where they are, in blocks that neither batches nor cuts of a prompt move."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from strata import ops
from strata.backends import register_backend, registry
from strata.backends.triton.backend import PlannedBackend, rendered_step
from strata.backends.triton.codegen.product import by_rows, find_product
from strata.backends.triton.codegen.render import Rendered, normal_form
from strata.backends.triton.target import Gpu
from strata.core import DType, bf16, f32, f64, i8, i64, sym
from strata.mir import Graph
from strata.runtime import CompilePipeline

HOPPER = Gpu.named("sm_90")


@pytest.fixture(autouse=True)
def _planned() -> Iterator[None]:
    register_backend("triton_planned", PlannedBackend(HOPPER))
    yield
    with registry._lock:
        registry._made.pop("triton_planned", None)


def steps_of(tokens: Any, dtype: DType = bf16, pools: DType | None = None, **options: Any) -> list[Any]:
    """The plan of an attention of 16 heads that share 8 key heads of 128."""
    g = Graph("attention")
    batch, pages, mine, kind = sym("B", 1), sym("P", 1), sym("N", 1), pools or dtype
    shapes = {
        "q": dtype[batch, tokens, 2048], "k": kind[pages, 16, 1024], "v": kind[pages, 16, 1024],
        "new_k": dtype[batch, tokens, 1024], "new_v": dtype[batch, tokens, 1024],
        "table": i64[batch, mine], "past": i64[batch],
    }  # fmt: skip
    inputs = [g.input(name, type_) for name, type_ in shapes.items()]
    if pools is not None:
        inputs += [g.input(f"scales_{name}", dtype[pages, 16, 8]) for name in "kv"]
    g.outputs(ops.paged_attention(*inputs, num_heads=16, kv_heads=8, **options))
    return list(CompilePipeline("triton_planned").compile(g).lir.schedule)


def rendered(*args: Any, **options: Any) -> Rendered:
    (step,) = [s for s in steps_of(*args, **options) if s.label == "paged_attention"]
    made = rendered_step(step, HOPPER)
    assert made is not None
    for program in made.programs:
        for interpreted in (False, True):
            ast.parse(program.text(interpreted=interpreted))
    return made


def test_a_decode_takes_heads_together_and_merges_the_segments_that_a_sequence_has() -> None:
    first, second = rendered(1).programs
    assert [str(d) for d in first.grid] == ["8*B", "(16*N + 511) // 512"]
    assert [str(d) for d in second.grid] == ["8*B", "2"]
    assert "if low <= past:" in first.body
    assert "count = tl.load(past + batch) // 512 + 1" in second.body
    assert "table" not in second.body


def test_a_prompt_has_blocks_of_old_keys_of_both_and_of_new_ones() -> None:
    (program,) = rendered(sym("S", 1)).programs
    old, mixed, full, diagonal = program.body.split("for start in range")[1:]
    assert "new_k" not in old
    assert "position" not in old
    assert "tl.where(is_new[:, None]" in mixed
    assert "table" not in full
    assert "position" not in full
    assert "(key[None, :] <= position[:, None])" in diagonal


def test_no_page_is_gathered() -> None:
    (*before, last) = steps_of(sym("S", 1))
    assert last.kernel is None
    assert not any("keys" in name for s in before for name in s.outputs)
    gathered = [n for s in before for n in s.nodes if n.op.name.startswith("gather")]
    assert all(n.types[0] == i64[1] for n in gathered)  # the ids that errors are about


@pytest.mark.parametrize(("dtype", "pools"), [(f64, None), (f32, i8)])
def test_what_is_not_taken_is_gathered(dtype: DType, pools: DType | None) -> None:
    assert all(s.label != "paged_attention" for s in steps_of(1, dtype, pools))


def test_windows_and_caps() -> None:
    first, _ = rendered(1, window=100, softcap=30.0).programs
    assert "tanh_f32" in first.helpers
    assert "tl.maximum(past - 100, low)" in first.body


def test_schedules_of_any_number_of_rows_add_up_in_one_order() -> None:
    """No split sums, and no tile that other tensor core instructions multiply."""
    g = Graph("product")
    g.outputs(ops.matmul(g.input("x", bf16[sym("R", 1), 1024]), g.param("w", (1024, 4096), bf16)))
    (kernel,) = CompilePipeline("triton_planned").compile(g).lir.kernels.values()
    product = find_product(normal_form(kernel), HOPPER)
    assert product is not None
    tiles = [product.tiles, *(other.tiles for _, other in by_rows(product, HOPPER))]
    assert len(tiles) > 2
    assert {t.parts for t in tiles} == {1}
    assert min(t.rows for t in tiles) >= 64
