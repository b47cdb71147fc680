"""Torch's own samples (OpInfo) of every op whose ATen graph the table covers, against eager.

    python -m tests.torch_opinfo [names …] [--samples N] [--dtypes float32,int64] [--slice I/N] [--json FILE]

A sample is traced to ATen, converted, compiled and run; its results have to be eager's within OpInfo's tolerance, with
its element types. Samples with an op that stays in torch are counted apart: there the graph is split.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import sys
import warnings
from typing import Any

import torch

DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool)
DIFFERENT = {
    # why a result may differ from eager's, by the name of the op
    "empty": "memory that was never written", "empty_like": "memory that was never written",
    "empty_strided": "memory that was never written", "empty_permuted": "memory that was never written",
    "sort": "ids of equal elements, where nobody asked for a stable sort",
    "topk": "ids of equal elements",
    "new_empty": "memory that was never written", "new_empty_strided": "memory that was never written",
}  # fmt: skip
RANDOM = (
    "rand",
    "normal",
    "bernoulli",
    "dropout",
    "multinomial",
    "uniform",
    "exponential",
    "cauchy",
    "geometric",
    "poisson",
)


def flat(x: Any) -> list[Any]:
    """Tensors of nested results."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, (list, tuple)):
        return [t for v in x for t in flat(v)]
    return []


def trace(op: Any, sample: Any) -> tuple[Any, list[torch.Tensor]]:
    """The ATen graph of one call, as a function of its tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils import _pytree as pytree

    from strata.torch.backend import decompositions

    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]

    def run(*given: torch.Tensor) -> Any:
        parts = iter(given)
        first, args, kwargs = pytree.tree_unflatten(
            [next(parts) if isinstance(x, torch.Tensor) else x for x in leaves], spec
        )
        return flat(op.op(first, *args, **kwargs))

    functional = torch.func.functionalize(run, remove="mutations")
    return make_fx(functional, decomposition_table=decompositions(), tracing_mode="fake")(*tensors), tensors


def check(op: Any, sample: Any, dtype: torch.dtype, session: Any) -> str:
    """`equal`, or the reason why it stays in torch (`stays: …`), or what differs (`differs: …`)."""
    from strata.torch.convert import convert
    from strata.torch.program import compile_graph

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = flat(op.op(sample.input, *sample.args, **sample.kwargs))
            gm, tensors = trace(op, sample)
    except Exception as error:  # noqa: BLE001 - what torch itself cannot trace says nothing about us
        return f"torch: {type(error).__name__}"
    if not expected or any(t.layout is not torch.strided or t.is_quantized for t in (*expected, *tensors)):
        return "torch: no dense tensors"
    made = convert(gm)
    if made.unsupported:
        node, reason = next(iter(made.unsupported.items()))
        return f"stays: {node.target}: {reason}"
    try:
        found = compile_graph(made, session)([t.detach() for t in tensors])
    except Exception as error:  # noqa: BLE001 - it is what the suite is for
        return f"differs: {type(error).__name__}: {str(error)[:160]}"
    found = [t for t in found if t is not None]
    if len(found) != len(expected):
        return f"differs: {len(found)} results, not {len(expected)}"
    for ours, theirs in zip(found, expected, strict=True):
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            return f"differs: {ours.dtype}{list(ours.shape)}, not {theirs.dtype}{list(theirs.shape)}"
        try:
            torch.testing.assert_close(ours, theirs.detach(), equal_nan=True, **tolerance(op, theirs.dtype))
        except AssertionError as error:
            return f"differs: {' '.join(str(error).split())[:200]}"
    return "equal"


def tolerance(op: Any, dtype: torch.dtype) -> dict[str, Any]:
    """What OpInfo allows this op."""
    rtol, atol = {torch.float32: (1.3e-6, 1e-5), torch.float64: (1e-7, 1e-7), torch.complex64: (1.3e-6, 1e-5),
                  torch.complex128: (1e-7, 1e-7)}.get(dtype, (0.0, 0.0))  # fmt: skip
    for decorator in op.decorators:
        allowed = getattr(decorator, "tol", None) or getattr(getattr(decorator, "dtype", None), "tol", None)
        if isinstance(allowed, dict) and dtype in allowed:
            rtol, atol = max(rtol, allowed[dtype].rtol), max(atol, allowed[dtype].atol)
    return {"rtol": rtol, "atol": atol}


def run_all(names: list[str], samples: int, dtypes: tuple[torch.dtype, ...], part: tuple[int, int]) -> dict[str, Any]:
    """Counts, by outcome, and the differences, by op and element type."""
    from torch.testing._internal.common_methods_invocations import op_db

    from strata.runtime import Session

    session = Session("cpu")
    counts: collections.Counter[str] = collections.Counter()
    differing: dict[str, str] = {}
    staying: dict[str, str] = {}
    for at, op in enumerate(op_db):
        if (names and op.name not in names) or at % part[1] != part[0]:
            continue
        if any(word in op.name for word in RANDOM) or op.name in DIFFERENT:
            continue
        for dtype in dtypes:
            if dtype not in op.supported_dtypes("cpu"):
                continue
            torch.manual_seed(0)
            for i, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=False)):
                if i >= samples:
                    break
                outcome = check(op, sample, dtype, session)
                kind = outcome.partition(":")[0]
                counts[kind] += 1
                key = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''} {str(dtype)[6:]}"
                if kind == "differs":
                    print(f"{key}: sample {i}: {outcome[9:]}", flush=True)
                    differing.setdefault(key, f"sample {i}: {outcome[9:]}")
                elif kind == "stays":
                    staying.setdefault(key, outcome[7:])
    return {"counts": dict(counts), "differs": differing, "stays": staying}


def main() -> int:
    """Run, print what differs, sum up."""
    parser = argparse.ArgumentParser(description="torch's OpInfo samples")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--dtypes", default="")
    parser.add_argument("--slice", default="0/1")
    parser.add_argument("--json")
    options = parser.parse_args()
    dtypes = tuple(getattr(torch, name) for name in options.dtypes.split(",") if name) or DTYPES
    at, of = map(int, options.slice.split("/"))
    logging.disable(logging.ERROR)  # torch tells at length what it cannot trace
    found = run_all(options.names, options.samples, dtypes, (at, of))
    counts = found["counts"]
    ran = counts.get("equal", 0) + counts.get("differs", 0)
    print(f"{ran} samples ran: {counts.get('equal', 0)} equal ({counts.get('equal', 0) / max(ran, 1):.2%}); "
          f"{counts.get('stays', 0)} with an op that stays in torch")  # fmt: skip
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)
    return 0 if counts.get("equal", 0) >= 0.97 * ran else 1


if __name__ == "__main__":
    sys.exit(main())
