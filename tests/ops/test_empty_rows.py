"""Queries that keep no key: what came from softmax stays NaN on every path; torch's and ONNX's attention give zeros."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.backends import register_backend
from strata.backends.triton.backend import interpreted
from strata.core import bool_, f16, f32, f64, sym
from strata.mir import Graph, constant
from strata.runtime import CompileOptions, Session

INF = float("inf")
LOWEST = float(np.finfo(np.float32).min)


def plain(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray, low: float | None = None) -> np.ndarray:
    """softmax(q kᵀ / 2 + mask) v as it is written, in f64; with `low`, mask says which scores stay."""
    with np.errstate(invalid="ignore"):
        scores = q.astype(float) @ k.astype(float).swapaxes(-1, -2) * 0.5
        scores = scores.astype(mask.dtype) + mask if low is None else np.where(mask, scores, low)
        e = np.exp((scores - scores.max(-1, keepdims=True, initial=-INF)).astype(float))
        return e / e.sum(-1, keepdims=True) @ v.astype(float)


def drawn(queries: int, keys: int, dim: int, dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(queries * 1000 + keys + dim)
    return [rng.standard_normal((2, 2, n, dim)).astype(dtype) for n in (queries, keys, keys)]


def written(dim: int, queries: Any, keys: Any, low: float | None, dtype: Any = f32) -> Graph:
    g = Graph("g")
    q, k, v = (g.input(n, dtype[2, 2, s, dim]) for n, s in (("q", queries), ("k", keys), ("v", keys)))
    mask = g.input("mask", (dtype if low is None else bool_)[2, 1, queries, keys])
    scores = ops.matmul(q, ops.swapaxes(k, -1, -2)) * 0.5
    scores = scores + mask if low is None else ops.where(mask, scores, ops.full((), low, dtype))
    return g.outputs(ops.matmul(ops.softmax(scores, axis=-1), v))


def holes(queries: int, keys: int) -> np.ndarray:
    """Which keys stay: none for some queries, the last for another."""
    keep = np.random.default_rng(3).random((2, 1, queries, keys)) < 0.7
    keep[1, 0, 0] = np.arange(keys) == keys - 1
    keep[0, 0, 0] = False
    keep[1, 0, -1] = False
    return keep


def devices() -> list[str]:
    found = ["cpu", "reference", *(["xla"] if _has("jax") else [])]
    if _has("triton"):
        register_backend("triton_interpreter", interpreted())
        found.append("triton_interpreter")
    return found


def _has(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize(("queries", "keys", "dim"), [(2, 7, 8), (1, 600, 8), (9, 5, 8), (50, 600, 16), (9, 9, 3)])
@pytest.mark.parametrize("hidden", [-INF, LOWEST, -1e9, -1e4])
def test_an_added_mask_means_what_it_adds(device: str, queries: int, keys: int, dim: int, hidden: float) -> None:
    q, k, v = drawn(queries, keys, dim)
    mask = np.where(holes(queries, keys), np.float32(0), np.float32(hidden))
    got = Session(device).compile(written(dim, queries, keys, None)).run({"q": q, "k": k, "v": v, "mask": mask})[0]
    # scores of a row that -1e4 hides are rounded to places of that number
    want = plain(q, k, v, mask.astype(np.float64) if device == "reference" else mask)
    lost = np.broadcast_to(np.all(mask != 0, -1), want.shape[:-1])
    atol = 2e-3 if hidden == -1e4 else 2e-5
    np.testing.assert_allclose(got[~lost], want[~lost], rtol=0, atol=2e-5)
    np.testing.assert_allclose(got[lost], want[lost], rtol=0, atol=atol)
    assert np.isnan(got[lost]).all() == (hidden == -INF)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("low", [-INF, LOWEST, -1e4, -3.0])
def test_a_chosen_score_takes_the_place_of_one(device: str, low: float) -> None:
    q, k, v = drawn(9, 9, 8)
    keep = holes(9, 9)
    got = Session(device).compile(written(8, 9, 9, low)).run({"q": q, "k": k, "v": v, "mask": keep})[0]
    np.testing.assert_allclose(got, plain(q, k, v, keep, low), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("dtype", "atol"), [(f16, 5e-3), (f64, 1e-12)])
def test_other_types(dtype: Any, atol: float) -> None:
    q, k, v = drawn(9, 70, 16, dtype.np)
    mask = np.where(holes(9, 70), 0.0, -INF).astype(dtype.np)
    got = Session("cpu").compile(written(16, 9, 70, None, dtype)).run({"q": q, "k": k, "v": v, "mask": mask})[0]
    np.testing.assert_allclose(got, plain(q, k, v, mask), rtol=0, atol=atol)


@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (1, 600), (50, 40), (4, 0)])
def test_open_sizes(queries: int, keys: int) -> None:
    n, m = sym("n", 0, 64), sym("m", 0, 1024)
    q, k, v = drawn(queries, keys, 8)
    keep = holes(queries, keys) if keys else np.ones((2, 1, queries, 0), bool)
    mask = np.where(keep, np.float32(0), np.float32(-INF))
    feeds = {"q": q, "k": k, "v": v, "mask": mask}
    graph = written(8, n, m, None)
    want = plain(q, k, v, mask) if keys else np.zeros(q.shape)
    opened = Session("cpu").compile(graph).run(feeds)[0]
    known = Session("cpu").compile(graph, CompileOptions(dim_binding={"n": queries, "m": keys})).run(feeds)[0]
    np.testing.assert_allclose(opened, want, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(opened, known)


def test_scores_count_however_low_they_are() -> None:
    q, k, v = drawn(9, 12, 8)
    q, zero = q * np.float32(1e10), np.zeros((2, 1, 9, 12), np.float32)
    for device in devices():
        got = Session(device).compile(written(8, 9, 12, None)).run({"q": q, "k": k, "v": v, "mask": zero})[0]
        np.testing.assert_allclose(got, plain(q, k, v, zero), rtol=0, atol=1e-3)


def test_a_causal_mask_hides_no_more_than_it_says() -> None:
    """-1e4 is a number to add, not a key that is dropped."""
    q, k, v = drawn(6, 6, 8)
    q = q * np.float32(1e5)
    mask = np.where(np.tri(6, dtype=bool), np.float32(0), np.float32(-1e4))
    g = Graph("g")
    a, b, c = (g.input(n, f32[2, 2, 6, 8]) for n in "qkv")
    scores = ops.matmul(a, ops.swapaxes(b, -1, -2)) * 0.5 + constant(mask)
    made = Session("cpu").compile(g.outputs(ops.matmul(ops.softmax(scores, axis=-1), c)))
    np.testing.assert_allclose(made.run({"q": q, "k": k, "v": v})[0], plain(q, k, v, mask), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("empty", "fill"), [("mean", None), ("zero", 0.0), ("nan", np.nan)])
@pytest.mark.parametrize("kind", ["custom", "bias"])
@pytest.mark.parametrize(("queries", "keys"), [(2, 7), (9, 40), (3, 700)])
@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("window", [None, 2])
def test_attention_says_what_a_row_without_a_key_gives(
    empty: str, fill: float | None, kind: str, queries: int, keys: int, device: str, window: int | None
) -> None:
    q, k, v = drawn(queries, keys, 8)
    keep = holes(queries, keys)
    mask = keep if kind == "custom" else np.where(keep, np.float32(0), np.float32(-INF))
    g = Graph("g")
    named = {"q": q, "k": k, "v": v, "mask": mask}
    given = [g.input(n, x.shape, x.dtype) for n, x in named.items()]
    out = ops.attention(*given, layout="bhsd", num_heads=2, mask_kind=kind, scale=0.5, empty=empty, window=window)
    got = Session(device).compile(g.outputs(out)).run(named)[0]
    seen = keep
    if window is not None:
        distance = np.arange(queries)[:, None] + max(keys - queries, 0) - np.arange(keys)
        seen = keep & (distance >= 0) & (distance <= window)
    want = plain(q, k, v, np.where(seen, 0.0, -INF))
    lost = np.broadcast_to(~seen.any(-1), want.shape[:-1])
    assert lost.any()
    assert not lost.all()
    want[lost] = np.broadcast_to(v.mean(2, keepdims=True), want.shape)[lost] if fill is None else fill
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("flags", [True, False])
def test_as_torch(flags: bool) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = drawn(4, 6, 8)
    keep = holes(4, 6)
    mask = keep if flags else np.where(keep, np.float32(0), np.float32(-INF))
    given = [torch.from_numpy(x) for x in (q, k, v, mask)]
    given[0].requires_grad_()
    want = torch.nn.functional.scaled_dot_product_attention(*given[:3], attn_mask=given[3])
    want.square().sum().backward()

    def attended(a: st.Tensor) -> st.Tensor:
        return st.scaled_dot_product_attention(a, st.tensor(k), st.tensor(v), st.tensor(mask))

    got = attended(st.tensor(q)).numpy()
    np.testing.assert_allclose(got, want.detach().numpy(), rtol=0, atol=2e-5)
    assert not got[0, :, 0].any()
    slope = st.grad(lambda a: st.sum(attended(a) * attended(a)))(st.tensor(q)).numpy()
    np.testing.assert_allclose(slope, given[0].grad.numpy(), rtol=0, atol=2e-5)
