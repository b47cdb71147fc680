"""Products with quantised weights as Triton text: what there is in memory, and which programs run for how many rows.

What they compute is checked in Triton's interpreter: `tests/backends/triton_blocks.py`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from strata import ops
from strata.backends import register_backend, registry
from strata.backends.triton.backend import PlannedBackend
from strata.backends.triton.codegen.blocks import BlockShape
from strata.backends.triton.codegen.dequant import render_dequant
from strata.backends.triton.codegen.render import Rendered
from strata.backends.triton.target import Gpu
from strata.core import Dim, DType, bf16, f32, sym, u8
from strata.lir import Lir
from strata.mir import Graph
from strata.ops import gguf_blocks
from strata.ops.quant.schemes import Scheme
from strata.runtime import CompilePipeline

HOPPER = Gpu.named("sm_90")
K, N = 1024, 2048


@pytest.fixture(autouse=True)
def _no_device_stays() -> Iterator[None]:
    yield
    with registry._lock:
        registry._made.pop("triton_planned", None)


def planned(rows: Dim, scheme: str = "gguf_q4k", dtype: DType = bf16) -> Lir:
    register_backend("triton_planned", PlannedBackend(HOPPER))
    g, made = Graph("product"), Scheme(scheme)
    codes = g.param("codes", u8[made.code_count(K, N)])
    g.outputs(ops.dequant_matmul(g.input("x", dtype[rows, K]), codes, scheme=made))
    return CompilePipeline("triton_planned").compile(g).lir


def rendered(rows: Dim, scheme: str = "gguf_q4k", dtype: DType = bf16, given: str = "") -> Rendered:
    (step,) = planned(rows, scheme, dtype).schedule
    made = render_dequant(step.nodes[0], HOPPER, given)
    for program in made.all_programs:
        for interpreted in (False, True):
            ast.parse(program.text(interpreted=interpreted))
    return made


def test_weights_are_in_memory_as_they_are_in_the_file():
    lir = planned(1)
    assert [s.name for s in lir.schedule] == ["dequant_matmul"]
    assert not [b for b in lir.buffers if b.role == "weight"]
    assert sum(int(b.type.nbytes) for b in lir.buffers if b.role == "param") == K * N * 144 // 256


TILED = [name for name, form in gguf_blocks.FORMATS.items() if BlockShape.of(form) is not None]


def test_blocks_of_bits_are_tiles_and_codebooks_are_not():
    assert {"q4_0", "q8_0", "q2k", "q3k", "q4k", "q5k", "q6k", "iq4_nl", "iq4_xs", "tq2_0"} <= set(TILED)
    assert not {"iq2_xxs", "iq3_s", "tq1_0"} & set(TILED)


@pytest.mark.parametrize("form", TILED)
def test_a_byte_is_loaded_once(form: str):
    (program,) = rendered(1, f"gguf_{form}", f32).programs
    loads = [line for line in program.body.splitlines() if "tl.load(codes" in line]
    assert len(loads) == len({line.split("tl.load")[1] for line in loads})
    parts = len(gguf_blocks.block_format(form).q.bits)
    assert sum("byte" in line for line in loads) == parts + (
        form in ("q5_0", "q5_1")
    )  # whose halves have fifth bits apart


def test_few_rows_share_a_read_of_the_weights():
    (program,) = rendered(6, given="rows 1 x 1024 warps 2").programs
    assert program.grid == (2 * N,)
    assert program.body.count("for start in range") == 1
    assert all(f"sum{i} = sum{i} +" in program.body for i in range(4))
    assert "sum4" not in program.body


def test_many_rows_are_a_matmul_after_a_program_that_writes_the_weights():
    made = rendered(512)
    assert [p.name for p in made.programs] == ["unpack", "dequant_product"]
    assert [(b.name, b.dtype, b.shape) for b in made.scratch] == [("weights", bf16, (N, K))]
    assert "dot_bf16(" in made.programs[1].body


def test_any_number_of_rows_is_decided_at_each_launch():
    made = rendered(sym("n"))
    assert [p.name for p in made.programs_for(1)] == ["dequant_matmul"]
    assert [p.name for p in made.programs_for(8)] == ["dequant_matmul"]
    assert made.programs_for(9)[0].name == "unpack"
    assert made.programs_for(9)[1] != made.programs_for(4096)[1]
    assert len({p.name for p in made.all_programs}) == len(made.all_programs)


@pytest.mark.parametrize("scheme", ["int8/32", "int4/32", "fp8e4m3"])
def test_plain_schemes_are_read_in_place_too(scheme: str):
    register_backend("triton_planned", PlannedBackend(HOPPER))
    g, made = Graph("product"), Scheme.from_text(scheme)
    codes = g.param("codes", made.storage[made.code_count(K, N)])
    sides = [g.param(name, f32[shape]) for name, shape in zip(made.sides, made.side_shapes(K, N), strict=True)]
    g.outputs(ops.dequant_matmul(g.input("x", bf16[1, K]), codes, *sides, scheme=made))
    lir = CompilePipeline("triton_planned").compile(g).lir
    assert [s.name for s in lir.schedule] == ["dequant_matmul"]
    assert render_dequant(lir.schedule[0].nodes[0], HOPPER).programs
