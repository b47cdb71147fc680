"""Every kind of schedule of Triton matmuls in its interpreter, against NumPy: tiles, groups, split-k, descriptors.

TRITON_INTERPRET=1 python -m tests.backends.triton_schedules          a minute
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from strata import ops
from strata.backends import register_backend
from strata.backends.triton.backend import interpreted
from strata.backends.triton.codegen.product import find_product
from strata.backends.triton.codegen.render import HOPPER, render
from strata.backends.triton.launch.interpreter import InterpreterDriver
from strata.backends.triton.schedules.schedule import TritonTiles, parse_gpu_schedule
from strata.core import DType, bf16, f16, f32
from strata.kernel import Kernel, interpret, normalize
from strata.mir import Graph, Value
from strata.runtime import CompilePipeline

SCHEDULES = (
    "product 32 x 32 x 32 warps 4 stages 3",
    "product 16 x 64 x 32 warps 4 stages 2 group 2",
    "product 32 x 32 x 16 warps 4 stages 3 parts 2",
    "product 32 x 32 x 16 warps 4 stages 3 group 4 parts 4 descriptors",
    "product 32 x 64 x 32 warps 4 stages 3 descriptors",
    "product 16 x 32 x 32 warps 4 stages 3 group 8 descriptors persistent 3",
    "product 16 x 32 x 64 warps 4 stages 3 group 2 persistent 5",
)


def graphs() -> Iterator[tuple[str, Graph]]:
    """Matmuls in all layouts, of one row, of many, batched, with sizes that tiles do not divide, with epilogues."""

    def one(name: str, dtype: DType, *shapes: tuple[int, ...], turned: str = "", gated: bool = False) -> Graph:
        g = Graph(name)
        a, b, *rest = (g.input(f"x{i}", dtype[shape]) for i, shape in enumerate(shapes))
        a, b = (ops.swapaxes(x, -1, -2) if side in turned else x for x, side in ((a, "a"), (b, "b")))
        y: Value = ops.matmul(a, b)
        if gated:
            half = y.shape[-1] // 2
            y = ops.silu(y[..., :half]) * y[..., half:]
        for bias in rest:
            y = ops.gelu(y + bias)
        g.outputs(y)
        return g

    for dtype in (bf16, f16, f32):
        yield f"plain {dtype}", one("plain", dtype, (48, 64), (64, 80))
        yield f"turned b {dtype}", one("turned_b", dtype, (48, 64), (80, 64), turned="b")
        yield f"turned a {dtype}", one("turned_a", dtype, (64, 48), (64, 80), turned="a")
        yield f"bias {dtype}", one("bias", dtype, (70, 64), (64, 72), (72,))
    yield "odd", one("odd", bf16, (33, 47), (47, 65), (65,))
    yield "batched", one("batched", bf16, (3, 40, 64), (3, 64, 48))
    yield "batched heads", one("batched_heads", f16, (2, 3, 40, 64), (2, 3, 48, 64), turned="b")
    yield "gated", one("gated", bf16, (24, 64), (64, 96), gated=True)
    heads = Graph("heads")
    x = ops.reshape(ops.transpose(heads.input("x0", bf16[2, 4, 20, 16]), (0, 2, 1, 3)), (40, 64))
    heads.outputs(ops.matmul(x, heads.input("x1", bf16[64, 80])))
    yield "heads", heads
    yield "a row", one("a_row", bf16, (1, 512), (512, 544), (544,))
    yield "a row turned", one("a_row_turned", bf16, (1, 512), (544, 512), turned="b")
    yield "a few rows", one("a_few_rows", f16, (3, 512), (512, 544))


def kernels(graph: Graph) -> Iterator[Kernel]:
    for kernel in CompilePipeline("triton_interpreter").compile(graph).lir.kernels.values():
        if find_product(normalize(kernel), HOPPER) is not None:
            yield kernel


def run(driver: InterpreterDriver, kernel: Kernel, arrays: list[np.ndarray]) -> list[np.ndarray]:
    made = driver.make(kernel)
    buffers = []
    for array in arrays:
        buffers.append(driver.allocate(array.nbytes))
        driver.write(buffers[-1], array)
    outs = [np.empty([int(d) for d in b.shape], b.dtype.np) for b in kernel.outputs]
    targets = [driver.allocate(o.nbytes) for o in outs]
    driver.launch(made, [*buffers, *targets, *(driver.allocate(n) for n in made.scratch({}))], {})
    for target, out in zip(targets, outs, strict=True):
        driver.read(target, out)
    return outs


def main() -> int:
    register_backend("triton_interpreter", interpreted())
    driver, rng = InterpreterDriver(), np.random.default_rng(0)
    total, bad, used = 0, 0, set[str]()
    for name, graph in graphs():
        for kernel in kernels(graph):
            arrays = [rng.standard_normal([int(d) for d in b.shape]).astype(b.dtype.np) for b in kernel.inputs]
            expected = interpret(kernel, arrays)
            for text in SCHEDULES:
                chosen = replace(kernel, schedule=text)
                total += 1
                used.add(str(render(chosen).programs[0].schedule))
                for got, want in zip(run(driver, chosen, arrays), expected, strict=True):
                    a, b = got.astype(np.float64), np.asarray(want).astype(np.float64)
                    limit = {2: 2e-2, 4: 1e-5}[got.dtype.itemsize] * max(1.0, np.abs(b).max())
                    if not np.abs(a - b).max(initial=0) <= limit:
                        bad += 1
                        print(f"{name}: {text}: off by {np.abs(a - b).max()} of {limit}", file=sys.stderr)
    kinds = [parse_gpu_schedule(text) for text in used]
    tiles = [s for s in kinds if isinstance(s, TritonTiles)]
    assert any(s.descriptors for s in tiles)
    assert any(s.persistent for s in tiles)
    assert any(s.group > 1 for s in tiles)
    print(f"{total} matmuls by {len(SCHEDULES)} schedules in Triton's interpreter, {bad} wrong")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
