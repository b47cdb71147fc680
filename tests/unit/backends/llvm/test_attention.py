"""Generated attention against the op's own NumPy meaning, in every layout and with every mask."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

import strata as st
from strata.backends.llvm.attention.backward import (
    BACKWARD_SLOTS,
    backward_spec,
    can_go_back,
    emit_backward,
    parts_of,
    work_size,
)
from strata.backends.llvm.attention.decode import can_decode
from strata.backends.llvm.attention.form import SLOTS, AttentionSpec
from strata.backends.llvm.attention.forward import emit_attention
from strata.backends.llvm.attention.steps import with_blocks
from strata.backends.llvm.ir.builder import IrModule
from strata.backends.llvm.jit.jit import MachineCode
from strata.config import using
from strata.core import DType, Target, as_dtype, bf16, f16, f32, f64
from strata.ops.nn.attention import Attention, AttentionBackward
from tests.groups import check_all
from tests.unit.backends.llvm.compiled import compiled

HOST = Target.host()
TARGETS = [HOST, *(t for t in map(Target.named, ("baseline", "avx2", "avx512", "neon")) if t.runs_on(HOST))]
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@cache
def build(spec: AttentionSpec) -> MachineCode:
    module = IrModule(spec.target.triple)
    names = [name for name in emit_attention(module, spec) if name]
    return compiled(module, spec.target, *names)


def spec_of(op: Attention | AttentionBackward, dtype: DType, value_dim: int) -> AttentionSpec:
    return AttentionSpec(
        HOST, op.num_heads, op.kv_heads, op.head_dim, value_dim, op.scale, dtype, op.causal, op.window, op.mask,
        has_offset=op.has_offset, softcap=op.softcap,
    )  # fmt: skip


def heads_first(x: np.ndarray, layout: str) -> np.ndarray:
    return x if layout == "bhsd" else x.swapaxes(1, 2)


def run(spec: AttentionSpec, q: np.ndarray, k: np.ndarray, v: np.ndarray, layout: str, extra: tuple[np.ndarray, ...]):
    """Views [B, H, S, D] of any layout; the result in the same layout."""
    qh, kh, vh = (heads_first(x, layout) for x in (q, k, v))
    batch, heads, queries, _ = qh.shape
    keys = kh.shape[2]
    shape = (batch, heads, queries, v.shape[-1]) if layout == "bhsd" else (batch, queries, heads, v.shape[-1])
    out = np.full(shape, 77, q.dtype)
    accumulator = spec.accumulator.np
    work = np.full(spec.v_packed_size(keys, batch) + 1, np.nan, accumulator)
    values = dict.fromkeys(SLOTS, 0)
    values |= dict(work=work.ctypes.data, batch=batch, queries=queries, keys=keys)
    for name, x in (("q", qh), ("k", kh), ("v", vh), ("out", heads_first(out, layout))):
        values[name] = x.ctypes.data
        for axis, part in enumerate(("batch", "head", "row")):
            values[f"{name}_{part}"] = x.strides[axis] // x.itemsize
    if spec.mask != "none":
        mask = extra[0]
        values["mask"] = mask.ctypes.data
        for axis, part in enumerate(("batch", "head", "row")):
            values[f"mask_{part}"] = mask.strides[axis] // mask.itemsize if mask.shape[axis] > 1 else 0
    if spec.has_offset:
        offset = np.ascontiguousarray(extra[-1], np.int64)
        values |= {"offset": offset.ctypes.data, "offset_batch": 1 if len(offset) > 1 else 0}
    block = np.array([values[s] for s in SLOTS], np.int64)
    code = build(spec)
    if spec.packs_values:
        KERNEL(code.address("attend_pack"))(block.ctypes.data, 0, spec.pack_count(batch))
    attend = KERNEL(code.address("attend"))
    for chunk in reversed(range(spec.chunk_count(queries, batch))):
        attend(block.ctypes.data, chunk, chunk + 1)
    assert np.isnan(work[-1])
    return out


CASES = {
    "plain": dict(),
    "causal": dict(causal=True),
    "window": dict(window=5),
    "custom": dict(mask="custom"),
    "causal-bias": dict(causal=True, mask="bias"),
    "softcap": dict(softcap=3.0, causal=True),
    "offset": dict(causal=True, has_offset=True),
    "window-offset": dict(window=3, has_offset=True),
}


LAYOUTS = ("bhsd", "bshd")  # one kernel serves both


@pytest.mark.few(8)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [f32, f64, f16, bf16], ids=str)
def test_against_the_op(case: str, dtype: DType) -> None:
    check_all((layout, partial(check_values, case, layout, dtype)) for layout in LAYOUTS)


def check_values(case: str, layout: str, dtype: DType) -> None:
    rng = np.random.default_rng(0)
    op = Attention(num_heads=4, kv_heads=2, head_dim=20, layout=layout, **CASES[case])
    for batch, queries, keys in ((2, 7, 7), (1, 1, 40), (2, 33, 33), (1, 30, 70), (1, 50, 20)):

        def tensor(heads: int, length: int, dim: int) -> np.ndarray:
            shape = (batch, heads, length, dim) if layout == "bhsd" else (batch, length, heads, dim)  # noqa: B023
            return rng.standard_normal(shape).astype(dtype.np)

        q, k, v = tensor(4, queries, 20), tensor(2, keys, 20), tensor(2, keys, 24)
        extra: list[np.ndarray] = []
        if op.mask == "custom":
            extra.append(rng.random((batch, 1, queries, keys)) < 0.6)
            extra[0][:, :, 0] = False
        elif op.mask == "bias":
            bias = rng.standard_normal((1, 4, queries, keys)).astype(dtype.np)
            bias[..., 0] = -np.inf
            extra.append(bias)
        if op.has_offset:
            extra.append(rng.integers(0, 30, batch))
        spec = spec_of(op, dtype, 24)
        exact = op.numpy(*(x.astype(np.float64) for x in (q, k, v)), *extra)
        tolerance = {f32: 1e-5, f64: 1e-12, f16: 4e-3, bf16: 2e-2}[dtype]
        for one in (spec, replace(spec, key_block=32, query_rows=5), replace(spec, key_block=64, query_rows=48)):
            result = run(one, q, k, v, layout, tuple(extra))
            assert np.allclose(result.astype(np.float64), exact, atol=tolerance), (batch, queries, keys)


@pytest.mark.few(6)
@pytest.mark.parametrize(("case", "target"), [
    *((case, HOST) for case in [*CASES, "causal-custom"]),
    *((case, target) for case in ("plain", "window-offset", "causal-custom") for target in TARGETS[1:]),
], ids=str)  # fmt: skip
def test_blocks_as_planned(case: str, target: Target) -> None:
    """Blocks as plans choose them, with code for known sizes and for all: tails of rows, of keys, of both."""
    rng = np.random.default_rng(0)
    fields = CASES.get(case, dict(causal=True, mask="custom"))
    op = Attention(num_heads=2, kv_heads=1, head_dim=16, **fields)
    for queries, keys in ((48, 48), (101, 531)) if target is HOST else ((101, 131),):
        q, k, v = (
            rng.standard_normal((1, h, n, 16)).astype(np.float32) for h, n in ((2, queries), (1, keys), (1, keys))
        )
        extra: list[np.ndarray] = []
        if op.mask == "custom":
            extra.append(rng.random((1, 2, queries, keys)) < 0.6)
            extra[0][:, :, 3] = False
        elif op.mask == "bias":
            extra.append(rng.standard_normal((1, 2, queries, keys)).astype(np.float32))
        if op.has_offset:
            extra.append(rng.integers(0, 30, 1))
        exact = op.numpy(*(x.astype(np.float64) for x in (q, k, v)), *extra)
        spec = replace(spec_of(op, f32, 16), target=target)
        known = with_blocks(spec, queries, keys)
        for one in (known, replace(known, queries=None, keys=None)):
            result = run(one, q, k, v, "bhsd", tuple(extra))
            assert np.allclose(result, exact, atol=1e-5), (queries, keys)


@pytest.mark.parametrize("mask", ["custom", "bias"])
@pytest.mark.parametrize("shape", [(2, 1, 1, 70), (2, 3, 40, 1), (1, 1, 1, 1), (1, 3, 40, 70)], ids=str)
def test_masks_of_one_row_or_one_key(mask: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    op = Attention(num_heads=3, kv_heads=3, head_dim=16, mask=mask)
    q, k, v = (rng.standard_normal((2, 3, n, 16)).astype(np.float32) for n in (40, 70, 70))
    values = rng.random(shape) < 0.7 if mask == "custom" else rng.standard_normal(shape).astype(np.float32)
    spans = dict(mask_spans_keys=shape[3] > 1, mask_spans_rows=shape[2] > 1)
    exact = op.numpy(*(x.astype(np.float64) for x in (q, k, v)), values)
    result = run(replace(spec_of(op, f32, 16), **spans), q, k, v, "bhsd", (values,))
    assert np.allclose(result, exact, atol=1e-5)


def test_scores_of_any_size() -> None:
    """The largest score of a row has weight 1, however large it is; what is not a number stays in its row."""
    rng = np.random.default_rng(0)
    op = Attention(num_heads=1, kv_heads=1, head_dim=16)
    q, k, v = (rng.standard_normal((1, 1, 20, 16)).astype(np.float32) for _ in range(3))
    for factor in (1e-30, 1e10, 1e30):
        exact = op.numpy((q * np.float32(factor)).astype(np.float64), k.astype(np.float64), v.astype(np.float64))
        result = run(spec_of(op, f32, 16), q * np.float32(factor), k, v, "bhsd", ())
        assert np.allclose(result, exact, atol=1e-5), factor
    q[0, 0, 3, 5] = np.nan
    result = run(spec_of(op, f32, 16), q, k, v, "bhsd", ())
    assert np.isnan(result[0, 0, 3]).all()
    assert np.isfinite(np.delete(result, 3, axis=2)).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("heads", "dtype"), [((4, 2), f32), ((3, 3), f32), ((7, 1), f32), ((4, 2), f16), ((7, 1), bf16)]
)
def test_decoding(case: str, heads: tuple[int, int], dtype: DType) -> None:
    check_all((layout, partial(check_decoding, case, layout, heads, dtype)) for layout in LAYOUTS)


def check_decoding(case: str, layout: str, heads: tuple[int, int], dtype: DType) -> None:
    rng = np.random.default_rng(0)
    op = Attention(num_heads=heads[0], kv_heads=heads[1], head_dim=32, layout=layout, **CASES[case])
    spec = replace(spec_of(op, dtype, 48), decode=True, key_block=64)
    assert can_decode(spec)
    for batch, queries, keys in ((2, 1, 7), (1, 1, 201), (2, 3, 64), (1, 2, 1)):
        shape = (lambda h, s, d: (batch, h, s, d)) if layout == "bhsd" else (lambda h, s, d: (batch, s, h, d))  # noqa: B023
        q, k, v = (
            rng.standard_normal(shape(h, s, d)).astype(dtype.np)
            for h, s, d in ((heads[0], queries, 32), (heads[1], keys, 32), (heads[1], keys, 48))
        )
        extra: list[np.ndarray] = []
        if op.mask == "custom":
            extra.append(rng.random((batch, heads[0], queries, keys)) < 0.6)
        elif op.mask == "bias":
            extra.append(rng.standard_normal((1, heads[0], queries, keys)).astype(dtype.np))
        if op.has_offset:
            extra.append(rng.integers(0, 30, batch))
        exact = op.numpy(*(x.astype(np.float64) for x in (q, k, v)), *extra)
        result = run(spec, q, k, v, layout, tuple(extra)).astype(np.float64)
        tolerance = {f32: 1e-5, f16: 4e-3, bf16: 2e-2}[dtype]
        assert np.allclose(result, exact, atol=tolerance), (batch, queries, keys)


def test_no_keys_and_no_queries() -> None:
    op = Attention(num_heads=1, kv_heads=1, head_dim=8)
    spec = spec_of(op, f32, 8)
    q, k = np.ones((1, 1, 3, 8), np.float32), np.ones((1, 1, 0, 8), np.float32)
    assert (run(spec, q, k, k, "bhsd", ()) == 0).all()
    assert run(spec, q[:, :, :0], q, q, "bhsd", ()).shape == (1, 1, 0, 8)


def test_batches_do_not_change_bits() -> None:
    rng = np.random.default_rng(0)
    op = Attention(num_heads=2, kv_heads=2, head_dim=32, causal=True)
    spec = replace(spec_of(op, f32, 32), key_block=64)
    q, k, v = (rng.standard_normal((3, 2, 150, 32)).astype(np.float32) for _ in range(3))
    together = run(spec, q, k, v, "bhsd", ())
    for i in range(3):
        assert (run(spec, q[i : i + 1], k[i : i + 1], v[i : i + 1], "bhsd", ())[0] == together[i]).all()


def test_text_and_stack() -> None:
    spec = AttentionSpec(HOST, 12, 12, 64, 64, 0.125, causal=True)
    assert str(spec) == "attention f32 heads 12/12 dim 64/64; scale 0.125; block 32 x 1024; causal"
    assert spec.stack_bytes < 160 << 10
    assert as_dtype("f32") is spec.dtype


# ------------------------------------------------------------------------------------------------------------ backward


@cache
def build_backward(spec: AttentionSpec) -> MachineCode:
    module = IrModule(spec.target.triple)
    return compiled(module, spec.target, *emit_backward(module, spec))


def run_backward(
    spec: AttentionSpec, arrays: dict[str, np.ndarray], layout: str, extra: tuple[np.ndarray, ...], parts: int
) -> list[np.ndarray]:
    """Cotangents of q, k and v; chunks run last first."""
    heads = {name: heads_first(x, layout) for name, x in arrays.items()}
    outs = {f"d{name}": np.full(arrays[name].shape, 77, arrays[name].dtype) for name in "qkv"}
    heads |= {name: heads_first(x, layout) for name, x in outs.items()}
    batch, _, queries, _ = heads["q"].shape
    keys = heads["k"].shape[2]
    work = np.full(work_size(spec, keys, parts, batch) + 1, np.nan, spec.dtype.np)
    values = dict.fromkeys(BACKWARD_SLOTS, 0) | dict(batch=batch, queries=queries, keys=keys, parts=parts)
    values["work"] = work.ctypes.data
    for name, x in heads.items():
        values[name] = x.ctypes.data
        for axis, part in enumerate(("batch", "head", "row")):
            values[f"{name}_{part}"] = x.strides[axis] // x.itemsize
    if spec.mask != "none":
        values["mask"] = extra[0].ctypes.data
        for axis, part in enumerate(("batch", "head", "row")):
            values[f"mask_{part}"] = extra[0].strides[axis] if extra[0].shape[axis] > 1 else 0
    offset = np.ascontiguousarray(extra[-1], np.int64) if spec.has_offset else np.zeros(1, np.int64)
    values |= {"offset": offset.ctypes.data, "offset_batch": 1 if len(offset) > 1 else 0}
    block = np.array([values[s] for s in BACKWARD_SLOTS], np.int64)
    code = build_backward(spec)
    count = batch * spec.kv_heads
    for name, chunks in (("slopes", count * parts), ("slopes_sum", count)):
        kernel = KERNEL(code.address(name))
        for chunk in reversed(range(chunks)):
            kernel(block.ctypes.data, chunk, chunk + 1)
    assert np.isnan(work[-1])
    return list(outs.values())


BACKWARD_CASES = {name: case for name, case in CASES.items() if name not in ("causal-bias", "softcap")} | {
    "causal-custom": dict(causal=True, mask="custom"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize(("case", "dtype", "target"), [
    *((case, f32, HOST) for case in BACKWARD_CASES), ("causal", f64, HOST),
    *(("causal-custom", f32, target) for target in TARGETS[1:]),
], ids=str)  # fmt: skip
def test_backward_against_the_op(case: str, dtype: DType, target: Target) -> None:
    rng = np.random.default_rng(0)
    for layout, head_dim, value_dim in (("bhsd", 20, 24), ("bshd", 32, 32)):
        op = AttentionBackward(num_heads=4, kv_heads=2, head_dim=head_dim, layout=layout, **BACKWARD_CASES[case])
        spec = backward_spec(replace(spec_of(op, dtype, value_dim), target=target))
        assert can_go_back(spec)
        for batch, queries, keys in (
            (2, 7, 7),
            (1, 1, 40),
            (1, 70, 70),
            (1, 30, 75),
            (1, 50, 20),
            (1, 3, 0),
            (1, 0, 3),
        ):

            def tensor(heads: int, length: int, dim: int) -> np.ndarray:
                shape = (batch, heads, length, dim) if layout == "bhsd" else (batch, length, heads, dim)  # noqa: B023
                return rng.standard_normal(shape).astype(dtype.np)

            arrays = dict(q=tensor(4, queries, head_dim), k=tensor(2, keys, head_dim), v=tensor(2, keys, value_dim))
            arrays["dy"] = tensor(4, queries, value_dim)
            extra: list[np.ndarray] = []
            if op.mask == "custom":
                extra.append(rng.random((batch, 4, queries, keys)) < 0.6)
                extra[0][:, :, :1] = False
            if op.has_offset:
                extra.append(rng.integers(0, 30, batch))
            exact = op.numpy(*(x.astype(np.float64) for x in arrays.values()), *extra)
            tolerance = {f32: 3e-5, f64: 1e-12}[dtype]
            for one, parts in ((spec, 1), (replace(spec, key_block=32), 3)):
                found = run_backward(one, arrays, layout, tuple(extra), parts)
                for name, got, wanted in zip("qkv", found, exact, strict=True):
                    assert np.allclose(got, wanted, atol=tolerance), (name, layout, batch, queries, keys, parts)


def test_backward_has_enough_chunks_and_no_more() -> None:
    spec = backward_spec(spec_of(Attention(num_heads=8, kv_heads=4, head_dim=16), f32, 16))
    assert parts_of(spec, 128, 16) == 1
    assert parts_of(spec, 128, 1) == 4
    assert parts_of(spec, 1, 1) == 2
    assert parts_of(spec, 0, 0) == 1


@pytest.mark.parametrize(("batch", "heads", "length"), [(1, 2, 70), (3, 4, 33), (1, 1, 600)])
def test_cotangents_are_one_step_with_equal_bits_on_any_threads(batch: int, heads: int, length: int) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.standard_normal((batch, heads, length, 32)).astype(np.float32) for _ in range(4))

    def loss(q: st.Tensor, k: st.Tensor, v: st.Tensor, dy: st.Tensor) -> st.Tensor:
        return (st.scaled_dot_product_attention(q, k, v, is_causal=True) * dy).sum()

    slopes = st.jit(st.grad(loss, argnums=(0, 1, 2)))
    assert sum(row.label == "attention_backward" for row in slopes.profile(q, k, v, dy, repeats=1).rows) == 1
    found = []
    for threads in (1, 2, 7):
        with using(num_threads=threads):
            found.append([x.numpy() for x in slopes(q, k, v, dy)])
    op = AttentionBackward(num_heads=heads, kv_heads=heads, head_dim=32, causal=True)
    exact = op.numpy(*(x.astype(np.float64) for x in (q, k, v, dy)))
    for one in found:
        for got, first, wanted in zip(one, found[0], exact, strict=True):
            assert (got == first).all()
            assert np.allclose(got, wanted, atol=5e-5)
