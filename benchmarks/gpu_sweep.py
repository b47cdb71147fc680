"""Schedules that kernels may have, timed on an NVIDIA GPU: what `winners.json` is made of; JSON rows.

    python -m benchmarks.gpu_sweep product,attention    all candidates of all sizes, the best six of each

Candidates are compiled on all cores first; each has to give the results of the first one before it is timed, on tensors
that take turns, so that none is in L2 when it is read. Kinds are product (bf16), decode (one row), middle (some rows),
training (forward and gradients of weights), wide (f32), conv, resnet, blocks (quantised), attention, backward.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from benchmarks.gpu import (
    ATTENTIONS,
    Programs,
    attention_graph,
    dequant_graph,
    matmul,
    milliseconds,
    random_tensor,
    torch_,
)
from benchmarks.gpu_models import resnet
from strata import ops
from strata.backends.triton.backend import PlannedBackend
from strata.backends.triton.codegen.attention import render_attention
from strata.backends.triton.codegen.attention_backward import render_backward
from strata.backends.triton.codegen.blocks import BlockShape
from strata.backends.triton.codegen.dequant import kind_of_winner, render_dequant
from strata.backends.triton.codegen.fragments import is_fragments
from strata.backends.triton.codegen.product import find_product
from strata.backends.triton.codegen.render import Rendered, normal_form, render
from strata.backends.triton.codegen.words import is_words
from strata.backends.triton.launch.workers import compile_ahead
from strata.backends.triton.schedules.schedule import Fragments, TritonRows
from strata.backends.triton.target import Gpu
from strata.backends.triton.tuning.search import attention_candidates, product_candidates
from strata.core import DType, bf16, f16, f32
from strata.mir import Graph
from strata.ops import gguf_blocks
from strata.runtime import CompilePipeline

GEMMS = [
    (8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (1024, 1024, 1024), (512, 3072, 768),
    (512, 4096, 4096), (256, 4096, 4096), (32, 4096, 4096), (4096, 3072, 768), (4096, 768, 3072), (128, 3072, 768),
    (2048, 5632, 2048), (128, 14336, 4096), (64, 4096, 4096), (16, 4096, 4096), (1, 4096, 4096), (1, 14336, 4096),
    (1, 2048, 5632), (1, 32000, 2048), (1, 2560, 2048), (1, 2048, 2048), (1, 5632, 2048), (1, 3072, 768),
    (1, 768, 3072),
]  # fmt: skip

GATED = [(1, 5632, 2048), (1, 14336, 4096), (1, 3072, 1024)]  # columns of each half
FORWARD = [(16384, 768, 768), (16384, 2304, 768), (16384, 3072, 768), (16384, 768, 3072), (16384, 50304, 768)]
GRADIENTS = [(768, 768, 16384), (768, 2304, 16384), (768, 3072, 16384), (3072, 768, 16384), (50304, 768, 16384)]
CACHES = 256 << 20  # bytes that push everything else out of L2
MOST_SETS = 24  # of tensors that a kernel is timed on in turns
WIDE_GEMMS = [(4096, 4096, 4096), (1024, 1024, 1024), (128, 768, 768), (16, 4096, 4096)]
CONVS = [
    (64, 64, 64, 56, 3),
    (64, 256, 64, 56, 1),
    (64, 64, 256, 56, 1),
    (64, 128, 128, 28, 3),
    (64, 256, 256, 14, 3),
    (64, 512, 512, 7, 3),
    (64, 1024, 256, 14, 1),
    (64, 3, 64, 224, 7),
    (1, 256, 256, 14, 3),
]  # batch, inputs, outputs, pixels a side, taps a side


def conv(batch: int, inputs: int, outputs: int, side: int, taps: int, dtype: DType) -> Graph:
    g, pad = Graph("conv"), taps // 2
    x, w = g.input("x", dtype[batch, inputs, side, side]), g.param("w", dtype[outputs, inputs, taps, taps])
    stride = 2 if taps == 7 else 1
    y = ops.relu(ops.conv(x, w, stride=(stride, stride), padding=((pad, pad), (pad, pad))))
    again = g.param("v", dtype[outputs, outputs, 1, 1])  # so that channels are last in between
    g.outputs(ops.conv(y, again))
    return g


@dataclass
class Trial:
    """One kernel: its size class, memory for it, and its programs by each of some schedules."""

    kind: str
    sizes: tuple[int, ...]
    fresh: Callable[[], dict[str, Any]]
    made: list[tuple[str, Rendered]]
    table: tuple[str, tuple[int, ...]] | None = None  # of winners: kind and sizes, where all that are alike share one
    times: dict[str, float] = field(default_factory=dict)


def product_graphs(kinds: Sequence[str]) -> Iterator[Graph]:
    ones = [sizes for sizes in GEMMS if sizes[0] == 1]
    middle = [sizes for sizes in GEMMS if sizes[1:] == (4096, 4096) and 16 < sizes[0] < 4096]
    for kind, found in (("product", GEMMS), ("decode", ones), ("middle", middle)):
        yield from (matmul(*sizes) for sizes in found) if kind in kinds else ()
    if "decode" in kinds:
        yield from (gated(*sizes) for sizes in GATED)
    if "training" in kinds:
        yield from (matmul(*sizes) for sizes in FORWARD)
        yield from (gradient(*sizes) for sizes in GRADIENTS)
    if "wide" in kinds:
        yield from (matmul(*sizes, f32) for sizes in WIDE_GEMMS)
        yield from (conv(*sizes, f32) for sizes in CONVS[:2])
    if "conv" in kinds:
        yield from (conv(*sizes, f16) for sizes in CONVS)
    if "resnet" in kinds:
        yield resnet(64).graph()


def gated(m: int, n: int, k: int) -> Graph:
    """A gated layer: two matmuls that share their left factor, and meet element by element."""
    g = Graph("gated")
    y = ops.matmul(g.input("a", bf16[m, k]), g.input("b", bf16[k, 2 * n]))
    g.outputs(ops.silu(y[:, :n]) * y[:, n:])
    return g


def gradient(m: int, n: int, k: int) -> Graph:
    """The gradient of weights: rows are the terms."""
    g = Graph("gradient")
    g.outputs(ops.matmul(ops.transpose(g.input("a", bf16[k, m]), (1, 0)), g.input("b", bf16[k, n])))
    return g


def product_trials(programs: Programs, kinds: Sequence[str], most: int) -> Iterator[Trial]:
    for graph in product_graphs(kinds):
        for kernel in CompilePipeline("triton_planned").compile(graph).lir.kernels.values():
            found = find_product(normal_form(kernel), programs.gpu)
            if found is None:
                continue
            texts = [str(t) for t in (found.tiles, *product_candidates(found.form, found.sums, programs.gpu))]
            texts = list(dict.fromkeys(texts))[:most]  # the table's comes first
            made = [(t, render(replace(kernel, schedule=t), programs.gpu)) for t in texts]

            def tensors(buffers: Any = kernel.buffers) -> dict[str, Any]:
                return {b.name: random_tensor(b.dtype, [int(d) for d in b.shape], 0.1) for b in buffers}

            kind = f"product {found.sums[0].dtype.bits}{' pairs' if len(found.sums) == 2 else ''}"
            yield Trial(kind, tuple(int(n) for n in found.form.extents[1:]), tensors, made)


BLOCKS = [
    *((name, 1, 4096, 4096) for name in ("q4k", "q6k", "iq4_xs", "q4_0", "q8_0", "u4_128h", "q5k", "q3k")),
    ("q4k", 1, 14336, 4096), ("q6k", 1, 14336, 4096), ("q8_0", 1, 14336, 4096), ("q4_0", 1, 14336, 4096),
    ("q4k", 1, 4096, 14336), ("q4k", 4, 4096, 4096),
    ("q4k", 8, 4096, 4096), ("q4k", 512, 4096, 4096), ("q6k", 512, 4096, 4096),
]  # fmt: skip


def block_trials(programs: Programs, *, table: bool = False) -> Iterator[Trial]:
    for name, m, n, k in BLOCKS:
        (step,) = CompilePipeline("triton_planned").compile(dequant_graph(name, m, n, k)).lir.schedule
        texts = [""] if table else block_schedules(name, m, k, programs.gpu)  # "": what the table says
        rendered = [render_dequant(step.nodes[0], programs.gpu, text) for text in texts]
        made = [(str(r.programs[0].schedule), r) for r in rendered]

        form = gguf_blocks.block_format(name)
        codes = gguf_blocks.random_blocks(form, n * k // form.elements, np.random.default_rng(0)).reshape(-1)

        def blocks(codes: np.ndarray = codes, m: int = m, n: int = n, k: int = k) -> dict[str, Any]:
            return {"codes": torch_().from_numpy(codes).cuda(), "x": random_tensor(bf16, (m, k)),
                    "out": random_tensor(bf16, (m, n))}  # fmt: skip

        shape = BlockShape.of(form)
        assert shape is not None
        kind = kind_of_winner(shape, bf16, programs.gpu, is_few=m <= 8)
        yield Trial(f"{kind} {m}", (n, k), blocks, made, (kind, (min(m, 4), form.elements, n, k)))


def block_schedules(name: str, m: int, k: int, gpu: Gpu) -> list[str]:
    """The plain one first; those whose lanes all have something to do."""
    form = gguf_blocks.block_format(name)
    shape = BlockShape.of(form)
    assert shape is not None
    if m > 8:
        sizes = ((2, 512, 1), (1, 1024, 1), (4, 1024, 4), (2, 2048, 4), (1, 4096, 4), (4, 2048, 4), (4, 4096, 8))
        return [f"rows {points} x {terms} warps {warps}" for points, terms, warps in sizes]
    if not is_words(shape):
        tiles = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 4))
        return [f"rows {points} x {terms} warps {warps}" for points, warps in tiles for terms in (1024, 2048, 4096)]
    texts = [str(TritonRows(points, terms, warps)) for points in (8, 16) for terms in (1024, 2048)
             for warps in (1, 2, 4, 8) if 32 * warps == terms // form.elements * shape.runs * points // 4]  # fmt: skip
    if is_fragments(shape, bf16, gpu):
        texts += [str(Fragments(points, terms * warps, warps)) for points in (16, 32) for warps in (2, 4, 8, 16)
                  for terms in (256, 512) if terms * warps <= k and (terms, points) != (512, 32)]  # fmt: skip
    return texts


def attention_trials(programs: Programs) -> Iterator[Trial]:
    for b, h, q, s, d, shared, causal in ATTENTIONS:
        graph = attention_graph(b, h, q, s, d, shared=shared, causal=causal)
        (step,) = CompilePipeline("triton_planned").compile(graph).lir.schedule
        made = [(str(blocks), render_attention(step.nodes[0], step.views or (), programs.gpu, str(blocks)))
                for blocks in attention_candidates(q, d, 16)]  # fmt: skip
        shapes = {"q": (b, h, q, d), "k": (b, shared, s, d), "v": (b, shared, s, d), "out": (b, h, q, d)}

        def heads(shapes: dict[str, tuple[int, ...]] = shapes) -> dict[str, Any]:
            return {name: random_tensor(bf16, shape) for name, shape in shapes.items()}

        rows = q * (h // shared) if q <= 16 else q
        yield Trial(f"attention 16{' causal' if causal else ''}", (rows, s, d), heads, made)


def backward_trials(programs: Programs) -> Iterator[Trial]:
    """The programs of queries, then those of keys, each alone."""
    for b, h, s, d in ((4, 16, 4096, 128), (16, 12, 1024, 64)):
        g = Graph("gradients")
        given = [g.input(name, bf16[b, h, s, d]) for name in ("q", "k", "v", "dy")]
        out, lse = ops.AttentionLse(h, h, d, causal=True)(*given[:3])
        g.outputs(*ops.AttentionBackward(h, h, d, causal=True, has_lse=True)(*given, out, lse))
        step = CompilePipeline("triton_planned").compile(g).lir.schedule[-1]
        shapes = dict.fromkeys(("q", "k", "v", "dy", "out", "dq", "dk", "dv"), (b, h, s, d))

        def heads(shapes: dict[str, tuple[int, ...]] = shapes) -> dict[str, Any]:
            rows = next(iter(shapes.values()))[:3]
            sums = {name: random_tensor(f32, rows) + 8 for name in ("lse", "slope_of")}
            return sums | {name: random_tensor(bf16, shape) for name, shape in shapes.items()}

        for at, kind in enumerate(("queries", "keys")):
            made = []
            for text in map(str, attention_candidates(s, d, 16)):
                whole = render_backward(step.nodes[0], step.views or (), programs.gpu, (text, text))
                outputs = whole.kernel.outputs[1:] if at else whole.kernel.outputs[:1]
                made.append((text, Rendered(replace(whole.kernel, outputs=outputs), (whole.programs[at],), ())))
            yield Trial(f"attention {kind} 16", (s, s, d), heads, made)


def sweep(
    programs: Programs, kinds: Sequence[str], most: int, winners: Path | None = None, *, table: bool = False
) -> Iterator[dict[str, Any]]:
    """Every candidate of every size, compiled on all cores first, checked, timed."""
    st.register_backend("triton_planned", PlannedBackend(programs.gpu))
    work = list(product_trials(programs, kinds, most))
    work += block_trials(programs, table=table) if "blocks" in kinds else ()
    work += attention_trials(programs) if "attention" in kinds else ()
    work += backward_trials(programs) if "backward" in kinds else ()
    begin = time.perf_counter()
    rejected = compile_ahead([p for trial in work for _, r in trial.made for p in r.programs], programs.gpu)
    why = sorted({text[-80:] for text in rejected.values()})[:5]
    count = sum(len(trial.made) for trial in work)
    yield {"compiled": count, "rejected": len(rejected), "seconds": time.perf_counter() - begin, "why": why}
    for trial in work:
        made = [(text, r) for text, r in trial.made if not any(p.text() in rejected for p in r.programs)]
        yield from timed(programs, replace(trial, made=made))
        if winners is not None:
            data = json.loads(winners.read_text())
            data[str(programs.gpu)] |= choose(work)
            winners.write_text(json.dumps(data))


def choose(work: Sequence[Trial]) -> dict[str, list[tuple[tuple[int, ...], str]]]:
    """By kind: sizes, and the schedule that is nearest to the best of every trial of them."""
    groups: dict[tuple[str, tuple[int, ...]], list[dict[str, float]]] = {}
    for trial in work:
        if trial.table and trial.times:
            groups.setdefault(trial.table, []).append(trial.times)
    chosen: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for (kind, sizes), found in groups.items():
        shared = [text for text in found[0] if all(text in times for times in found)]
        if shared:
            best = min(shared, key=lambda text: prod(times[text] / min(times.values()) for times in found))
            chosen.setdefault(kind, []).append((sizes, best))
    return chosen


def timed(programs: Programs, trial: Trial) -> Iterator[dict[str, Any]]:
    """What is wrong, and the best times."""
    about = {"kind": trial.kind, "sizes": trial.sizes}
    sets = [trial.fresh()]
    size = sum(t.numel() * t.element_size() for t in sets[0].values())
    sets += [trial.fresh() for _ in range(min(MOST_SETS, CACHES // size))]
    first = None
    times: list[tuple[float, str]] = []
    for text, rendered in trial.made:
        out = sets[0][rendered.kernel.outputs[0].name]
        try:
            out.fill_(float("nan"))
            runs = [programs.launcher(rendered, memory) for memory in sets]
            runs[0]()
            torch_().cuda.synchronize()
            if first is None:
                first = out.float().clone()
            error = float((out.float() - first).abs().max() / first.abs().max())
            if not error <= 2e-2:
                yield about | {"schedule": text, "wrong": error}
                continue
            times.append((milliseconds(in_rotation(runs), 0.01), text))
            trial.times[text] = times[-1][0]
        except Exception as problem:  # noqa: BLE001 - a candidate that the card refuses is no winner
            yield about | {"schedule": text, "fails": str(problem)[:100]}
    times.sort()
    peer = None
    inputs = [[memory[x.name] for x in trial.made[0][1].kernel.inputs] for memory in sets]
    if trial.kind in ("product 16", "product 32") and [t.ndim for t in inputs[0]] == [2, 2]:
        m, _, k = trial.sizes
        pairs = [pair if pair[0].shape in ((m, k), (k, m)) else pair[::-1] for pair in inputs]
        pairs = [(a if a.shape == (m, k) else a.t(), b) for a, b in pairs]
        peer = milliseconds(in_rotation([partial(torch_().matmul, a, b) for a, b in pairs]), 0.02)
    before = next((t for t, text in times if text == trial.made[0][0]), None)
    yield about | {"peer": peer, "before": before, "best": [[round(t, 5), text] for t, text in times[:6]]}


def in_rotation(runs: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """One after the other: what a run reads has left the caches when it comes again."""
    turn = cycle(runs)

    def run() -> None:
        next(turn)()

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds")
    parser.add_argument("--most", type=int, default=60, help="candidates of one size")
    parser.add_argument("--winners", type=Path, help="the table of winners, which then has those of blocks")
    parser.add_argument("--table", action="store_true", help="of blocks, the schedules that the table has")
    given = parser.parse_args()
    torch_().manual_seed(0)
    for row in sweep(Programs(), given.kinds.split(","), given.most, given.winners, table=given.table):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
