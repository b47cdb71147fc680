"""Products with quantised weights in Triton's interpreter against the oracle: all schemes, few rows, many, any number.

TRITON_INTERPRET=1 python -m tests.backends.triton_blocks               two minutes
TRITON_INTERPRET=1 python -m tests.backends.triton_blocks q4k int8/32   some of them
"""

from __future__ import annotations

import sys

import numpy as np

from strata import ops
from strata.backends import register_backend
from strata.backends.triton.backend import interpreted
from strata.core import Dim, DType, bf16, f16, f32, sym
from strata.mir import Graph
from strata.ops import gguf_blocks
from strata.ops.quant.schemes import Scheme
from strata.runtime import Session

DEVICE = "triton_interpreter"
PACKED = ("u4_128h", "i8_64b", "m4_32f", "nf4_64f", "fp4_64b", "e4m3_128f", "e5m2_32h")
PLAIN = ("int8/32", "int8a/32", "int4/32", "fp8e4m3", "fp8e5m2", "nvfp4/16")
ROWS: tuple[tuple[Dim, int], ...] = ((1, 1), (3, 3), (6, 6), (20, 20), (sym("n"), 1), (sym("n"), 7), (sym("n"), 18))


def scheme_of(name: str) -> Scheme:
    known = name in gguf_blocks.FORMATS or name in gguf_blocks.PACKED
    return Scheme(f"gguf_{name}") if known else Scheme.from_text(name)


def is_right(scheme: Scheme, dtype: DType, rows: Dim, count: int, rng: np.random.Generator) -> bool:
    """Columns that no tile divides, and blocks that a step of the loop is not full of."""
    k, n = (3 * scheme.block_size if scheme.is_gguf else 96), 6
    if scheme.is_gguf:
        blocks = gguf_blocks.random_blocks(gguf_blocks.block_format(scheme.kind), n * k // scheme.block_size, rng)
        weights: tuple[np.ndarray, ...] = (blocks, *([] if scheme.book is None else [scheme.book]))
    else:
        weights = scheme.encode(rng.standard_normal((k, n)))
    graph = Graph("product")
    x = graph.input("x", dtype[rows, k])
    params = [graph.param(f"p{i}", w.shape, w.dtype) for i, w in enumerate(weights)]
    graph.outputs(ops.dequant_matmul(x, *params, scheme=scheme))
    given = (rng.standard_normal((count, k)) / 256).astype(dtype.np)  # f16 ends at 65504
    results = []
    for device in (DEVICE, "reference"):
        compiled = Session(device).compile(graph)
        for i, w in enumerate(weights):
            compiled.set_param(f"p{i}", w)
        results.append(np.asarray(compiled.run(x=given)[0], np.float32))
        assert device != DEVICE or not compiled.host_steps
    allowed = {"f32": 1e-5, "f16": 4e-3, "bf16": 3e-2}[dtype.name]
    return bool(np.abs(results[0] - results[1]).max() <= allowed * np.abs(results[1]).max())


def main(names: list[str]) -> int:
    register_backend(DEVICE, interpreted())
    rng = np.random.default_rng(0)
    total, bad = 0, 0
    for name in names or [*gguf_blocks.FORMATS, *PACKED, *PLAIN]:
        for dtype in (f32, bf16, f16):
            for rows, count in ROWS if dtype is f32 else ROWS[::3]:
                total += 1
                if not is_right(scheme_of(name), dtype, rows, count, rng):
                    bad += 1
                    print(f"{name} {dtype} {rows} rows, {count} of them", file=sys.stderr)
    print(f"{total} products with quantised weights in Triton's interpreter, {bad} wrong")
    return bad if total else 1


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
