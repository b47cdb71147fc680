"""Schedules that kernels may have, timed on an NVIDIA GPU: what `winners.json` is made of; JSON rows.

    python -m benchmarks.gpu_sweep product,attention    all candidates of all sizes, the best six of each

Candidates are compiled on all cores first; each has to give the results of the first one before it is timed. Kinds are
product (bf16), decode (one row), middle (some rows), wide (f32), conv, blocks (quantised), attention, backward.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import strata as st
from benchmarks.gpu import (
    ATTENTIONS,
    QUANTISED,
    Programs,
    attention_graph,
    dequant_graph,
    matmul,
    milliseconds,
    random_tensor,
    torch_,
)
from strata import ops
from strata.backends.triton.backend import PlannedBackend
from strata.backends.triton.codegen.attention import render_attention
from strata.backends.triton.codegen.dequant import render_dequant
from strata.backends.triton.codegen.product import find_product
from strata.backends.triton.codegen.render import Rendered, normal_form, render
from strata.backends.triton.launch.workers import compile_ahead
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


def sweep(programs: Programs, kinds: Sequence[str], most: int) -> Iterator[dict[str, Any]]:
    """Every candidate of every size, compiled on all cores first, checked, timed."""
    st.register_backend("triton_planned", PlannedBackend(programs.gpu))
    work: list[tuple[str, tuple[int, ...], Callable[[], dict[str, Any]], list[tuple[str, Rendered]]]] = []
    graphs: list[Graph] = [matmul(*sizes) for sizes in GEMMS] if "product" in kinds else []
    graphs += [matmul(*sizes) for sizes in GEMMS if sizes[0] == 1] if "decode" in kinds else []
    graphs += (
        [matmul(*sizes) for sizes in GEMMS if sizes[1:] == (4096, 4096) and 16 < sizes[0] < 4096]
        if "middle" in kinds
        else []
    )
    graphs += [matmul(*sizes, f32) for sizes in WIDE_GEMMS] if "wide" in kinds else []
    graphs += [conv(*sizes, f16) for sizes in CONVS] if "conv" in kinds else []
    graphs += [conv(*sizes, f32) for sizes in CONVS[:2]] if "wide" in kinds else []
    for graph in graphs:
        for kernel in CompilePipeline("triton_planned").compile(graph).lir.kernels.values():
            found = find_product(normal_form(kernel), programs.gpu)
            if found is None:
                continue
            texts = [str(t) for t in product_candidates(found.form, found.sums, programs.gpu)][:most]
            made = [(t, render(replace(kernel, schedule=t), programs.gpu)) for t in texts]

            def tensors(buffers: Any = kernel.buffers) -> dict[str, Any]:
                return {b.name: random_tensor(b.dtype, [int(d) for d in b.shape], 0.1) for b in buffers}

            sizes = tuple(int(n) for n in found.form.extents[1:])
            work.append((f"product {found.sums[0].dtype.bits}", sizes, tensors, made))
    for name, m, n, k in QUANTISED if "blocks" in kinds else ():
        if m > 8:
            continue
        (step,) = CompilePipeline("triton_planned").compile(dequant_graph(name, m, n, k)).lir.schedule
        texts = [f"rows {points} x {terms} warps {warps}" for points in (1, 2) for terms in (512, 1024, 2048, 4096)
                 for warps in (1, 2, 4, 8) if points * terms >= 512 * warps]  # fmt: skip
        made = [(t, render_dequant(step.nodes[0], programs.gpu, t)) for t in texts]

        def blocks(name: str = name, m: int = m, n: int = n, k: int = k) -> dict[str, Any]:
            form = gguf_blocks.block_format(name)
            codes = gguf_blocks.random_blocks(form, n * k // form.elements, np.random.default_rng(0)).reshape(-1)
            return {"codes": torch_().from_numpy(codes).cuda(), "x": random_tensor(bf16, (m, k)),
                    "out": random_tensor(bf16, (m, n))}  # fmt: skip

        work.append((f"rows blocks {name} {m}", (n, k), blocks, made))
    if "attention" in kinds:
        for b, h, q, s, d, shared, causal in ATTENTIONS:
            graph = attention_graph(b, h, q, s, d, shared=shared, causal=causal)
            (step,) = CompilePipeline("triton_planned").compile(graph).lir.schedule
            rows = q * (h // shared) if q <= 16 else q
            made = []
            for blocks in attention_candidates(q, d, 16):
                made.append((str(blocks), render_attention(step.nodes[0], step.views or (), programs.gpu, str(blocks))))

            def heads(
                b: int = b, h: int = h, q: int = q, s: int = s, d: int = d, shared: int = shared
            ) -> dict[str, Any]:
                shapes = {"q": (b, h, q, d), "k": (b, shared, s, d), "v": (b, shared, s, d), "out": (b, h, q, d)}
                return {name: random_tensor(bf16, shape) for name, shape in shapes.items()}

            work.append((f"attention 16{' causal' if causal else ''}", (rows, s, d), heads, made))
    begin = time.perf_counter()
    rejected = compile_ahead([p for _, _, _, made in work for _, r in made for p in r.programs], programs.gpu)
    why = sorted({text[-80:] for text in rejected.values()})[:5]
    count = sum(len(made) for *_, made in work)
    yield {"compiled": count, "rejected": len(rejected), "seconds": time.perf_counter() - begin, "why": why}
    for kind, sizes, fresh, made in work:
        memory = fresh()
        first = None
        times: list[tuple[float, str]] = []
        for text, rendered in made:
            if any(p.text() in rejected for p in rendered.programs):
                continue
            out = memory[rendered.kernel.outputs[0].name]
            try:
                out.fill_(float("nan"))
                run = programs.launcher(rendered, memory)
                run()
                torch_().cuda.synchronize()
                if first is None:
                    first = out.float().clone()
                error = float((out.float() - first).abs().max() / first.abs().max())
                if not error <= 2e-2:
                    yield {"kind": kind, "sizes": sizes, "schedule": text, "wrong": error}
                    continue
                times.append((milliseconds(run, 0.01), text))
            except Exception as problem:  # noqa: BLE001 - a candidate that the card refuses is no winner
                yield {"kind": kind, "sizes": sizes, "schedule": text, "fails": str(problem)[:100]}
        times.sort()
        peer = None
        inputs = [memory[x.name] for x in made[0][1].kernel.inputs]
        if kind.startswith("product") and all(t.ndim == 2 for t in inputs):
            a, b = inputs if inputs[0].shape == (sizes[0], sizes[2]) else inputs[::-1]
            peer = milliseconds(partial(torch_().matmul, a, b), 0.02)
        yield {"kind": kind, "sizes": sizes, "peer": peer, "best": [[round(t, 5), text] for t, text in times[:6]]}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds")
    parser.add_argument("--most", type=int, default=60, help="candidates of one size")
    given = parser.parse_args()
    torch_().manual_seed(0)
    for row in sweep(Programs(), given.kinds.split(","), given.most):
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
