"""Attention as one Triton kernel in its interpreter against the oracle: masks, windows, offsets, segments, pages.

TRITON_INTERPRET=1 python -m tests.backends.triton_attention          half a minute
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from strata import ops
from strata.backends import register_backend
from strata.backends.triton.backend import interpreted
from strata.backends.triton.codegen import grid
from strata.core import DType, bf16, bool_, f16, f32, i64, sym
from strata.mir import Graph, Value, evaluate
from strata.ops.nn.attention import AttentionBackward
from strata.runtime import Session

DEVICE = "triton_interpreter"
Case = tuple[str, Graph, dict[str, np.ndarray]]


def attention(
    name: str, rng: np.random.Generator, q: tuple[int, ...], kv: tuple[int, int], dtype: DType = f32, *,
    layout: str = "bhsd", mask: tuple[str, tuple[int, ...]] | None = None, offset: list[int] | None = None,
    is_open: bool = False, **options: Any,
) -> Case:  # fmt: skip
    """q is batch, heads, queries, width; kv is key heads and keys."""
    batch, heads, queries, width = q
    shared, keys = kv
    g, feeds, inputs = Graph("attention"), {}, []

    def take(label: str, array: np.ndarray, open_axes: dict[int, Any]) -> Value:
        kind = {"bool": bool_, "int64": i64}.get(array.dtype.name, dtype)
        shape = [open_axes.get(at, n) for at, n in enumerate(array.shape)] if is_open else array.shape
        feeds[label] = array
        return g.input(label, kind[tuple(shape)])

    for label, (count, length) in {"q": (heads, queries), "k": (shared, keys), "v": (shared, keys)}.items():
        shape = (batch, count, length, width) if layout == "bhsd" else (batch, length, count, width)
        array = rng.standard_normal(shape).astype(dtype.np)
        axis = 2 if layout == "bhsd" else 1
        inputs.append(take(label, array, {0: sym("B"), axis: sym("Q" if label == "q" else "K")}))
    extra = {}
    if mask is not None:
        kind, spread = mask
        array = rng.random(spread) < 0.7 if kind == "custom" else rng.standard_normal(spread).astype(dtype.np)
        if kind == "custom":
            array[0, :, :5] = False  # rows without a key
        extra["mask"] = take("mask", array, {})
    if offset is not None:
        extra["offset"] = take("offset", np.array(offset, np.int64), {})
    g.outputs(ops.attention(*inputs, layout=layout, **extra, **options))
    return name, g, feeds


def cases() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for dtype in (f32, f16, bf16):
        yield attention(f"plain {dtype}", rng, (2, 2, 40, 32), (2, 40), dtype)
        yield attention(f"causal {dtype}", rng, (1, 2, 70, 32), (2, 70), dtype, causal=True)
        yield attention(f"decode {dtype}", rng, (2, 4, 1, 32), (2, 300), dtype)
    yield attention("whole blocks", rng, (1, 2, 128, 64), (2, 128), bf16, causal=True)
    yield attention("more keys, causal", rng, (1, 2, 33, 16), (1, 90), f16, causal=True)
    yield attention("more queries, causal", rng, (1, 2, 90, 16), (2, 33), causal=True)
    yield attention("heads last, grouped", rng, (2, 6, 40, 24), (2, 50), layout="bshd", causal=True)
    yield attention("window", rng, (1, 2, 80, 16), (2, 80), causal=True, window=9)
    yield attention("window past the keys", rng, (1, 1, 80, 16), (1, 20), window=5)
    yield attention("softcap", rng, (1, 2, 40, 16), (2, 40), f16, softcap=1.5)
    yield attention("bias", rng, (2, 2, 40, 16), (2, 45), bf16, mask=("bias", (2, 1, 40, 45)))
    yield attention("bias of keys", rng, (2, 2, 40, 16), (2, 45), mask=("bias", (1, 2, 1, 45)), causal=True)
    yield attention("custom", rng, (2, 2, 40, 16), (2, 45), mask=("custom", (2, 1, 40, 45)), causal=True)
    yield attention("custom of rows", rng, (2, 2, 40, 16), (2, 45), mask=("custom", (2, 2, 40, 1)))
    yield attention("offset", rng, (2, 2, 20, 16), (1, 90), offset=[3, 60], causal=True)
    yield attention("offset before", rng, (2, 2, 20, 16), (2, 40), offset=[-5, 30], causal=True)
    yield attention("negative scale", rng, (1, 2, 40, 16), (2, 40), bf16, scale=-0.3)
    yield attention("decode, offset", rng, (2, 4, 1, 32), (2, 512), f16, offset=[3, 400], causal=True)
    yield attention("decode, window", rng, (1, 4, 2, 32), (2, 400), offset=[300], causal=True, window=50)
    yield attention("decode, custom", rng, (2, 4, 2, 32), (2, 300), mask=("custom", (2, 1, 2, 300)), causal=True)
    yield attention("decode, bias", rng, (2, 4, 3, 32), (4, 300), bf16, mask=("bias", (1, 4, 1, 300)))
    yield attention("open sizes", rng, (2, 2, 37, 16), (2, 53), is_open=True, causal=True)
    yield attention("open sizes, all keys", rng, (2, 2, 37, 16), (2, 53), f16, is_open=True, layout="bshd")


def gradients() -> Iterator[Case]:
    """Backward attention: as a graph of its own, whose results are dq, dk and dv."""
    rng = np.random.default_rng(1)
    for at, (name, dtype, (batch, heads, queries, width), (shared, keys), layout, causal) in enumerate(
        (
            ("back, plain", f32, (2, 2, 40, 32), (2, 40), "bhsd", False),
            ("back, causal", bf16, (1, 4, 70, 32), (2, 70), "bhsd", True),
            ("back, heads last", f16, (2, 4, 33, 24), (2, 50), "bshd", True),
            ("back, more queries", f32, (1, 2, 90, 16), (1, 33), "bhsd", True),
            ("back, whole blocks", bf16, (1, 2, 128, 64), (2, 128), "bhsd", True),
        )
        * 2
    ):
        g, feeds, inputs = Graph("back"), {}, []
        for label, count, length in (
            ("q", heads, queries),
            ("k", shared, keys),
            ("v", shared, keys),
            ("dy", heads, queries),
        ):
            shape = (batch, count, length, width) if layout == "bhsd" else (batch, length, count, width)
            feeds[label] = rng.standard_normal(shape).astype(dtype.np)
            inputs.append(g.input(label, dtype[shape]))
        op = AttentionBackward(heads, shared, width, layout=layout, causal=causal)
        beside = [] if at < 5 else [ops.attention(*inputs[:3], causal=causal, layout=layout)]
        g.outputs(*op(*inputs), *beside)  # beside the forward pass, whose rows' sums are kept
        yield name if at < 5 else f"{name}, beside forward", g, feeds


def over_pages() -> Iterator[Case]:
    """Attention over pages in any order, of one new token and of several, at the edges of blocks and segments."""
    rng = np.random.default_rng(2)
    for name, dtype, tokens, past, options in (
        ("pages, one token", f32, 1, [500, 37], {}),
        ("pages, one token in a new segment", bf16, 1, [512, 0], {}),
        ("pages, one token at the end of a segment", f16, 1, [511, 255], {}),
        ("pages, one token, window", bf16, 1, [600, 255], {"window": 40}),
        ("pages, prompt", f32, 70, [37, 0], {}),
        ("pages, prompt, whole blocks", bf16, 64, [64, 128], {}),
        ("pages, prompt, softcap", bf16, 130, [80], {"softcap": 5.0}),
        ("pages, prompt, window", f32, 130, [80, 0], {"window": 20}),
    ):
        batch, mine = len(past), 40
        shapes = {
            "q": (batch, tokens, 96), "k": (batch * mine, 16, 48), "v": (batch * mine, 16, 48),
            "new_k": (batch, tokens, 48), "new_v": (batch, tokens, 48),
        }  # fmt: skip
        opened = {"q": sym("B", 1), "k": sym("P", 1), "v": sym("P", 1), "new_k": sym("B", 1), "new_v": sym("B", 1)}
        count = 1 if tokens == 1 else sym("S", 1)
        feeds = {label: rng.standard_normal(shape).astype(dtype.np) for label, shape in shapes.items()}
        g = Graph("pages")
        inputs = [
            g.input(label, dtype[opened[label], shape[1] if shape[1] == 16 and label in "kv" else count, shape[2]])
            for label, shape in shapes.items()
        ]
        inputs += [g.input("table", i64[sym("B", 1), sym("N", 1)]), g.input("past", i64[sym("B", 1)])]
        feeds |= {"table": rng.permutation(batch * mine).reshape(batch, mine), "past": np.array(past)}
        g.outputs(ops.paged_attention(*inputs, num_heads=4, kv_heads=2, **options))
        yield name, g, feeds


def beside() -> Iterator[Case]:
    """Of what has programs along a second axis, as if there were 2 of them there and the others along a third."""
    again = ("plain f32", "causal bf16", "back, causal", "back, causal, beside forward", "pages, prompt")
    known = [case for case in (*cases(), *gradients(), *over_pages()) if case[0] in again]
    assert len(known) == len(again)
    rng = np.random.default_rng(3)
    g = Graph("batches")
    shapes = {"a": (5, 40, 33), "b": (5, 33, 17)}
    g.outputs(ops.matmul(*(g.input(label, f32[shape]) for label, shape in shapes.items())))
    vars(grid).update(MOST=1, TURN=2)
    for name, graph, feeds in known:
        yield f"{name}, along a third axis", graph, feeds
    feeds = {label: rng.standard_normal(shape).astype(np.float32) for label, shape in shapes.items()}
    yield "matmuls along a third axis", g, feeds
    vars(grid).update(MOST=65535, TURN=1 << 15)


def main(names: list[str]) -> int:
    register_backend(DEVICE, interpreted())
    total, bad = 0, 0
    for name, graph, feeds in chain(cases(), gradients(), over_pages(), beside()):
        if names and name not in names:
            continue
        total += 1
        expected = evaluate(graph, feeds)
        compiled = Session(DEVICE).compile(graph)
        assert not compiled._executable.host_steps, f"{name} runs on the host"
        for got, want in zip(compiled.run(feeds), expected, strict=True):
            a, b = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
            limit = {"float32": 1e-5, "float16": 4e-3}.get(got.dtype.name, 3e-2) * max(1.0, np.abs(b).max())
            if not np.abs(a - b).max() <= limit:
                bad += 1
                print(f"{name}: off by {np.abs(a - b).max()} of {np.abs(b).max()}", file=sys.stderr)
    print(f"{total} attentions in Triton's interpreter, {bad} wrong")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
