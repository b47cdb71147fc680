"""Attention with specialised warps as the compiler makes it: tensor cores are asked without waiting, nothing spills.

python -m tests.backends.triton_specialised          half a minute, no GPU
"""

from __future__ import annotations

import re
import sys

from strata import ops
from strata.backends import register_backend
from strata.backends.triton.backend import PlannedBackend
from strata.backends.triton.codegen.attention import render_attention
from strata.backends.triton.launch.compile import compiled
from strata.backends.triton.target import Gpu
from strata.core import DType, bf16, f16
from strata.mir import Graph
from strata.runtime import CompilePipeline

GPU = Gpu.named("sm_90")


def main() -> int:
    register_backend("triton_planned", PlannedBackend(GPU))
    cases: list[tuple[int, int, int, bool, DType]] = [
        (128, 2, 2, False, bf16), (128, 2, 2, True, bf16), (64, 3, 2, False, f16), (64, 2, 3, True, bf16),
    ]  # fmt: skip
    bad = 0
    for width, consumers, stages, causal, dtype in cases:
        g = Graph("attention")
        inputs = [g.input(name, dtype[2, 4, 300, width]) for name in "qkv"]
        g.outputs(ops.attention(*inputs, layout="bhsd", causal=causal))
        (step,) = CompilePipeline("triton_planned").compile(g).lir.schedule
        assert step.views is not None
        given = f"attention 128 x 128 warps 4 stages {stages} consumers {consumers} persistent 132"
        (program,) = render_attention(step.nodes[0], step.views, GPU, given).programs
        made = compiled(program, GPU)
        loops = 3 if causal else 2  # the first block of keys, and loops with and without a mask
        products = (width // 16 + 8) * loops * consumers
        found = len(re.findall(r"wgmma\.mma_async", made.asm["ptx"]))
        spills = made.n_spills if hasattr(made, "n_spills") and isinstance(made.n_spills, int) else 0
        threads = int(made.metadata.num_warps)
        if (found, threads, spills) != (products, 4 * (consumers + 1), 0):
            bad += 1
            print(f"{program.schedule}, {width} wide: {found} products, {threads} warps, {spills}", file=sys.stderr)
    print(f"{len(cases)} attentions with specialised warps, {bad} wrong")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
