"""Attention as Triton text: which programs there are, and that they are Python which defines its function.

What they compute is checked in Triton's interpreter: `tests/backends/triton_attention.py`."""

import ast
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from strata import ops
from strata.backends import register_backend, registry
from strata.backends.attention import contiguous
from strata.backends.triton.backend import PlannedBackend
from strata.backends.triton.codegen.attention import render_attention, takes_attention
from strata.backends.triton.codegen.render import Rendered
from strata.backends.triton.target import Gpu
from strata.core import DType, bf16, f16, f32, f64, i64, sym
from strata.lir import Spacing
from strata.mir import Graph
from strata.runtime import CompilePipeline
from tests import fake_gluon

HOPPER = Gpu.named("sm_90")


@pytest.fixture(autouse=True)
def _no_device_stays() -> Iterator[None]:
    yield
    with registry._lock:
        registry._made.pop("triton_planned", None)


def planned(q: tuple[Any, ...], kv: tuple[Any, ...], dtype: DType = bf16, **options: Any) -> list[Any]:
    register_backend("triton_planned", PlannedBackend(HOPPER))
    g = Graph("attention")
    inputs = [g.input(name, dtype[shape]) for name, shape in (("q", q), ("k", kv), ("v", kv))]
    offset = g.input("offset", i64[1]) if options.pop("cached", False) else None
    g.outputs(ops.attention(*inputs, layout="bhsd", offset=offset, **options))
    return list(CompilePipeline("triton_planned").compile(g).lir.schedule)


def rendered(*args: Any, given: str = "", **options: Any) -> Rendered:
    (step,) = planned(*args, **options)
    made = render_attention(step.nodes[0], step.views, HOPPER, given)
    for program in made.programs:
        for interpreted in (False,) if program.gluon else (False, True):
            tree = ast.parse(program.text(interpreted=interpreted))
            assert program.name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    return made


def test_attention_is_one_program_with_two_dots_in_a_loop():
    made = rendered((4, 16, 4096, 128), (4, 16, 4096, 128), given="attention 128 x 64 warps 8 stages 3")
    (program,) = made.programs
    assert program.grid == (32, 64)
    assert program.body.count("for start in range") == 1
    assert program.body.count("dot_bf16(") == 2
    assert not made.scratch


def test_causal_blocks_below_the_diagonal_have_no_mask():
    (program,) = rendered((1, 2, 256, 64), (1, 2, 256, 64), causal=True).programs
    below, diagonal = program.body.split("for start in range")[1:]
    assert "position" not in below
    assert "key[None, :] <= position[:, None]" in diagonal


def test_a_decode_takes_heads_together_and_keys_in_segments():
    made = rendered((1, 32, 1, 128), (1, 8, 32768, 128), causal=True, cached=True)
    first, second = made.programs
    assert first.grid == (8, 32)
    assert second.grid == (8, 4)
    assert [b.name for b in made.scratch] == ["part", "about"]


def test_segments_depend_on_keys_alone():
    one, many = (rendered((n, 8, 1, 64), (n, 8, 2048, 64)).programs[0] for n in (1, 64))
    assert one.schedule == many.schedule


def test_sizes_may_be_symbols():
    (program,) = rendered((sym("B"), 2, sym("Q"), 64), (sym("B"), 2, sym("K"), 64), causal=True).programs
    assert len(program.sizes) >= 2


@pytest.mark.parametrize(
    ("dtype", "width", "expected"), [(bf16, 64, True), (f32, 256, True), (f32, 512, False), (f64, 64, False)]
)
def test_what_is_not_taken_is_decomposed(dtype: DType, width: int, expected: bool):
    steps = planned((1, 2, 32, width), (1, 2, 32, width), dtype)
    is_whole = any(
        s.kernel is None and takes_attention(s.nodes[0].op, [x.type for x in s.nodes[0].inputs]) for s in steps
    )
    assert is_whole is expected
    assert all(s.kernel is not None for s in steps) is not expected


SPECIALISED = "attention 128 x {} warps 4 stages 2 consumers {} persistent {}"


@pytest.mark.parametrize(
    ("q", "kv", "causal", "keys", "consumers"),
    [
        ((2, 2, 256, 64), (2, 2, 256, 64), False, 64, 2),
        ((1, 4, 200, 64), (1, 2, 333, 64), False, 128, 3),
        ((1, 4, 300, 64), (1, 1, 300, 64), True, 64, 2),
        ((1, 2, 130, 128), (1, 2, 500, 128), True, 128, 2),
        ((1, 2, 100, 64), (1, 2, 400, 64), True, 64, 3),
    ],
)
def test_specialised_warps_agree_with_numpy(q, kv, causal, keys, consumers):
    given = SPECIALISED.format(keys, consumers, 3)
    (step,) = planned(q, kv, f16, causal=causal)
    (program,) = render_attention(step.nodes[0], step.views, HOPPER, given).programs
    assert program.gluon
    rng = np.random.default_rng(0)
    x, y, z = (rng.standard_normal(shape).astype(np.float16) for shape in (q, kv, kv))
    out = np.full(q, np.nan, np.float16)
    fake_gluon.run(program.text(), program.name, 3, [x, y, z, out, fake_gluon.values(q[0])])
    a, b, c = (np.repeat(v.astype(np.float64), q[1] // v.shape[1], 1) for v in (x, y, z))
    score = a @ b.swapaxes(-1, -2) / np.sqrt(q[-1])
    if causal:
        keep = np.arange(kv[2]) <= np.arange(q[2])[:, None] + max(kv[2] - q[2], 0)
        score = np.where(keep, score, -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    want = weight / weight.sum(-1, keepdims=True) @ c
    assert np.abs(out - want).max() < 4e-3


@pytest.mark.parametrize("keys", [300, 389])
def test_specialised_warps_leave_sums_of_rows_and_drop_by_infinity(keys):
    register_backend("triton_planned", PlannedBackend(HOPPER))
    q, kv = (1, 2, 300, 64), (1, 2, keys, 64)
    g = Graph("attention")
    inputs = [g.input(name, f16[shape]) for name, shape in (("q", q), ("k", kv), ("v", kv))]
    fields = {"causal": True, "dropped": -np.inf, "zero_rows": True}
    g.outputs(*ops.AttentionLse(2, 2, 64, **fields)(*inputs))
    (node,) = [n for n in g.nodes() if n.op.name == "attention_lse"]
    views = [Spacing(0, contiguous(x.type.shape)) for x in node.inputs]
    (program,) = render_attention(node, views, HOPPER, SPECIALISED.format(64, 2, 3)).programs
    assert program.gluon
    rng = np.random.default_rng(0)
    x, y, z = (rng.standard_normal(shape).astype(np.float16) for shape in (q, kv, kv))
    out, lse = np.full(q, np.nan, np.float16), np.full(q[:3], np.nan, np.float32)
    arguments = [x, y, z, out, fake_gluon.Pointer(lse), fake_gluon.values(1)]
    fake_gluon.run(program.text(), program.name, 3, arguments)
    score = x.astype(np.float64) @ y.astype(np.float64).swapaxes(-1, -2) / 8
    score = np.where(np.arange(keys) <= np.arange(300)[:, None] + keys - 300, score, -np.inf)
    level = np.log(np.exp(score).sum(-1))
    assert np.abs(lse - level).max() < 1e-3
    assert np.abs(out - np.exp(score - level[..., None]) @ z.astype(np.float64)).max() < 4e-3


def test_specialised_warps_are_for_plain_scores_of_known_sizes():
    shape = (1, 2, 256, 64)
    given = SPECIALISED.format(128, 2, 132)
    cases: list[tuple[tuple[Any, ...], DType, dict[str, Any]]] = [
        ((1, 2, 256, 32), f16, {}), (shape, f32, {}), (shape, f16, {"softcap": 2.0}),
        (shape, f16, {"causal": True, "window": 9}), ((1, 2, sym("S", 16), 64), f16, {}),
    ]  # fmt: skip
    for size, dtype, options in cases:
        (program,) = rendered(size, size, dtype, given=given, **options).programs
        assert not program.gluon
        assert "consumers" not in str(program.schedule)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "width", "expected"),
    [
        (4096, 4096, 128, (2, 2)), (8192, 8192, 128, (2, 2)), (2048, 2048, 128, (2, 2)), (1024, 1024, 128, (2, 2)),
        (512, 512, 128, (0, 0)), (128, 128, 128, (0, 0)), (128, 4096, 128, (0, 0)), (256, 32768, 128, (0, 0)),
        (4096, 4096, 64, (3, 0)), (16384, 16384, 64, (3, 0)), (2048, 2048, 64, (0, 0)), (1024, 1024, 64, (0, 0)),
        (128, 128, 64, (0, 0)), (4096, 2048, 128, (2, 0)), (4096, 4096, 96, (0, 0)), (8, 4096, 128, (0, 0)),
    ],
)  # fmt: skip
def test_long_attention_on_hopper_has_specialised_warps(queries, keys, width, expected, causal):
    made = rendered((1, 2, queries, width), (1, 2, keys, width), causal=causal)
    assert made.programs[0].schedule.consumers == expected[causal]
    assert bool(made.programs[0].gluon) is bool(expected[causal])


def test_what_specialised_warps_do_not_suit_keeps_the_plain_winner():
    plain = "attention 128 x 64 warps 4 stages 2"
    shape = (1, 2, 4096, 128)
    for dtype, options, size in ((f16, {"softcap": 2.0}, shape), (bf16, {}, (1, 2, sym("S", 16), 128))):
        (program,) = rendered(size, size, dtype, **options).programs
        assert str(program.schedule) == plain
    (step,) = planned(shape, shape)
    for name, schedule in (("sm_90", "consumers 2"), ("sm_80", "stages 3"), ("sm_100", "stages 3")):
        (program,) = render_attention(step.nodes[0], step.views, Gpu.named(name)).programs
        assert str(program.schedule).partition("persistent")[0].strip().endswith(schedule)


def test_explain_names_the_schedule():
    register_backend("triton_planned", PlannedBackend(HOPPER))
    shape = bf16[1, 2, 4096, 128]
    g = Graph("attention")
    g.outputs(ops.attention(g.input("q", shape), g.input("k", shape), g.input("v", shape), layout="bhsd"))
    lir = CompilePipeline("triton_planned").compile(g).lir
    (text,) = PlannedBackend(HOPPER).sources(lir).values()
    assert "attention 128 x 128 warps 4 stages 2 consumers 2 persistent 132" in text
