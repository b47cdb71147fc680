"""How matmuls are planned: what is read in place, where sums wait, how much stack they take; texts and errors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

import strata.ops as functions
from strata.backends.llvm.gemm.match import find_matmul
from strata.backends.llvm.gemm.planning import in_rows, plan_contraction, with_ending
from strata.backends.llvm.gemm.spec import Contraction
from strata.core import Dim, Target, bf16, c64, f32, sym
from strata.errors import DTypeError, ShapeError
from strata.mir import Graph
from strata.runtime import CompilePipeline, Session

ops: Any = functions
HOST = Target.host()


def test_short_products_stay_in_rows() -> None:
    spec = plan_contraction(64, 96, 40, HOST)
    assert in_rows(spec, 64, 96, 40) == replace(spec, b_rows=True, streams=())
    assert in_rows(spec, 64, 97, 40) is not None  # the last vector begins before the last panel
    assert in_rows(spec, 64, spec.lanes - 1, 40) is None  # it would begin before the row
    assert in_rows(spec, 4096, 96, 40) is None  # packing is small beside the product
    assert in_rows(spec, 64, 96, 40000) is None  # no cache holds a panel
    few = in_rows(plan_contraction(3, 96, 40000, HOST, m_exact=True), 3, 96, 40000)
    assert few is not None  # all of B is read once
    assert few.k_block == 32
    assert not few.waits_in_output  # threads would take the lines where their columns meet from each other
    half = plan_contraction(64, 96, 40, HOST, a=bf16)
    assert in_rows(half, 64, 96, 40) is None  # has to be converted


def test_which_sums_go_through_their_epilogue_in_registers() -> None:
    plain = plan_contraction(64, 256, 64, HOST)
    assert not with_ending(plain, 64).ends_in_registers
    spec = replace(plain, epilogue="relu(x)")
    assert with_ending(spec, 64).ends_in_registers
    assert "ends in registers" in str(with_ending(spec, 64))
    assert not with_ending(spec, 1024).ends_in_registers
    assert not with_ending(replace(spec, epilogue="x" * 1000), 64).ends_in_registers
    assert not with_ending(replace(spec, k_block=16), 64).ends_in_registers


def test_text_is_complete() -> None:
    spec = plan_contraction(128, 384, 384, Target.named("avx2"))
    assert str(spec) == (
        "contract f32 * f32 -> f32 -> f32; tile 6/4/2/1 x 8*2 tails 1/2; a rows; k_block all; sums of 128; "
        "chunk 66 rows 1 panels; batch_rank 0; prefetch 144"
    )


def test_stack_use_is_bounded() -> None:
    for m, n, k in itertools.product((1, 8, 100, 1000, 100000), repeat=3):
        for unit, in_place in itertools.product((True, False), repeat=2):
            spec = plan_contraction(m, n, k, HOST, a_unit_k=unit, in_place=in_place)
            assert spec.stack_bytes <= 256 << 10, str(spec)


def test_errors() -> None:
    with pytest.raises(ShapeError, match="negative size"):
        plan_contraction(-1, 2, 3, HOST)
    with pytest.raises(DTypeError, match="do not multiply elements of type c64"):
        _ = Contraction(HOST, a=c64).arithmetic


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("m", [1, 2])
def test_products_of_one_row_are_contractions(m: int, turned: bool) -> None:
    """Their columns start next to each other, and yet they are no windows of a filter."""
    g = Graph("g")
    w = g.param("w", f32[(96, 64) if turned else (64, 96)])
    g.outputs(g.input("x", f32[m, 64]) @ (ops.transpose(w) if turned else w))
    (step,) = CompilePipeline("cpu").compile(g).lir.schedule
    assert step.kernel is not None
    assert find_matmul(step.kernel) is not None


@pytest.mark.parametrize("batch", [1, 3, sym("n", 1, 8)])
def test_a_reshaped_matmul_is_a_matmul(batch: Dim) -> None:
    """Rows and columns that a reshape puts together are told apart again: loops would take fifty times as long."""
    g = Graph("reshaped")
    y = g.input("x", (batch, 64, 33)) @ g.param("w", (33, 16)) + g.param("b", (16,))
    g.outputs(ops.reshape(ops.gelu(y), (batch, 16, 64)))
    (kernel,) = Session("cpu").compile(g)._executable.kernels.values()  # type: ignore[attr-defined]
    assert kernel.product is not None
