"""docs/torch.md: the overloads of ATen that the table covers, and what they are made of.

python -m tests.torch_table
"""

from __future__ import annotations

import dis
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from strata.mir import METHODS
from strata.torch.random import DRAWS
from strata.torch.table import TABLE

PAGE = Path(__file__).parents[1] / "docs/torch.md"
HEAD = """# ATen

Made by `python -m tests.torch_table`. What `torch.compile(backend="strata")` and `strata.torch.load` know: each
overload of ATen, whether it is core ATen, and the ops it is made of. Torch decomposes other ops to these; what is left
stays in torch, and `strata.torch.report()` tells.

How it is tested: `python -m tests.torch_opinfo` runs torch's own samples of its ops (f32, f64, i64, bool) through the
table and compares with eager; `python -m tests.torch_models` runs models of transformers, timm, torchvision and
diffusers against f64; `tests/torch` has a slice of both. Two kinds of results may differ: memory that was never written
(`empty`) is zero here, and ids of equal elements follow a stable sort.

## Measured

On two cores, torch 2.13. Errors are lengths of differences from eager in f64, by the length of the result.

| what | found |
|---|---|
| models of transformers, timm, torchvision, diffusers (`python -m tests.torch_models`) | 66 of 66 right, no fallback |
| of these, in the order of the list, run again since | the first 50: all right, no fallback |
| `resnet` of transformers, added since | right (3.5e-7, eager 4.2e-7), no fallback |
| torch's own samples (`python -m tests.torch_opinfo`) | 9054 of 9110 within OpInfo's tolerance (99.4 %) |
| what torch draws (`torch.manual_seed`) | eager's numbers, also for tensors whose axes lie in another order |
| the other 56 | signs of eigenvectors, ids of equal elements, dropout, f32 sums rounded otherwise |
| as far from f64 as eager, which is far | `tv_ssdlite` (both 0.77): close scores put boxes in another order |
| 100 steps of AdamW (`--train`): bert, gpt2, llama, t5, vit, convnext | losses within 3.6e-5, gradients 2.4e-6 |
| the same: deit, gpt_neo, electra, swin (one op stays in torch) | losses within 3.1e-6, gradients 2.5e-6 |
| the same, timm_resnet18 | losses within 2.7e-4, gradients 2.2e-6; statistics in the end within 1.9e-3 |
| statistics of timm_resnet18 against f64 | 1.9e-3, eager 1.2e-3: small differences grow in both |
| a second process with the same program | compiles nothing; a compiler is never needed, `PATH` may be empty |

Times: two threads, nothing else running, best of calls in turns (`python -m benchmarks.torch_models`). Models called
`full_*` have the sizes in use; the others are small, and there calls of torch's ops are most of eager's time.

| what | found |
|---|---|
| steady, 66 models, against eager | 5.5 times as fast (geometric mean); least 1.02 (`tv_ssdlite`) |
| steady, 11 `full_*` models, against eager | 1.87 times as fast; least 1.45 (`full_minilm`) |
| steady, six models, against inductor | 3.1 times as fast; least 1.95 (`gpt2`) |

Packed parameters are watched: where the system tells of writes, a call asks it about each of the larger ones. Where
it does not, they are read in place. In ms of processor time, one thread, the best of 12 calls:

| model | a call | asking, of it | a call that reads in place |
|---|---|---|---|
| `full_minilm` (91 MB, 39 watched) | 45.6 | 0.24 | 47.6 |
| `full_resnet50` (102 MB, 46 watched) | 62.6 | 0.36 | 68.2 |
| `full_gpt2` (498 MB, 50 watched) | 67.1 | 0.41 | 90.3 |

First calls with empty caches (`--cold --inductor`), in seconds. A second process finds everything compiled. Torch's own
tracing (`aot_eager`, measured on its own) is in every column; it alone can be more than a fifth of inductor's time.

| model | inductor | strata | times as long | a second process | torch's tracing |
|---|---|---|---|---|---|
| `gpt2` | 4.90 | 1.61 | 3.0 | 1.18 | 1.11 |
| `distilbert` | 4.34 | 2.63 | 1.6 | | 1.22 |
| `qwen2_moe` | 11.93 | 3.14 | 3.8 | | 1.83 |
| `timm_resnet18` | 9.59 | 2.27 | 4.2 | 1.07 | 0.93 |
| `timm_convnext_atto` | 11.35 | 2.61 | 4.3 | | |
| `full_gpt2` | 12.71 | 4.51 | 2.8 | 3.58 | 2.72 |

Where first calls go, in seconds, one run each on a quiet machine (torch's `compilation_time_metrics` and a clock around
our compiler). Dynamo's part differs from run to run: 0.65 to 0.89 for `bert`. For `bert`, dynamo and AOTAutograd alone
take more than a fifth of inductor's time; for the others they leave room, and our part is too long for it.

| model | inductor | a fifth | strata | dynamo | AOTAutograd | ours | a second process | dynamo | AOTAutograd | ours |
|---|---|---|---|---|---|---|---|---|---|---|
| `bert` | 4.59 | 0.92 | 1.66 | 0.89 | 0.20 | 0.57 | 1.17 | 0.88 | 0.20 | 0.08 |
| `vit` | 5.48 | 1.10 | 1.37 | 0.67 | 0.17 | 0.53 | 0.68 | 0.43 | 0.16 | 0.08 |
| `convnext` | 8.17 | 1.63 | 1.70 | 0.51 | 0.19 | 0.99 | 0.74 | 0.52 | 0.19 | 0.03 |

LLVM works on other cores while our own thread goes on. In seconds of processor time: our thread in a first call, and
LLVM for all of its modules, one after the other in one process. The profile of our thread is flat. Modules that differ
in nothing but numbers, of which one could stand for all, would spare `timm_resnet18` 0.36 s, `convnext` 0.09 s and the
others nothing.

| model | our thread | LLVM | modules |
|---|---|---|---|
| `bert` | 0.24 | 0.44 | 48 |
| `vit` | 0.24 | 0.43 | 45 |
| `convnext` | 0.34 | 0.46 | 62 |
| `gpt2` | 0.21 | 0.35 | 44 |
| `distilbert` | 0.20 | 0.36 | 40 |
| `timm_resnet18` | 0.63 | 0.97 | 74 |
| `qwen2_moe` | 0.44 | 0.99 | 91 |

Of a second process, conversion and planning take 0.03 to 0.14 s; the rest is tracing and, for large models, packing of
weights. Small modules side by side: `python -m benchmarks.torch_compile`. Torch's own loops of several threads collapse
on a machine that does other work as well, so compare on one that is quiet.

### On a GPU

One NVIDIA H200, torch 2.11, small models in f32 without TF32: the best of 24 calls, in ms. Each call waits for the
device. A step of training is forward, a loss and backward, without dropout. Launches are most of eager's time in such
models; sizes in use are in [benchmarks on a GPU](benchmarks-gpu.md). The rows were taken before there was
`python -m benchmarks.torch_models --device cuda --together --check [--train] bert llama gpt2 vit convnext`, which
measures the same things in the same way.

| model | inference: eager | strata | times as fast | training: eager | strata | times as fast |
|---|---|---|---|---|---|---|
| `bert` | 1.633 | 0.257 | 6.4 | 4.280 | 3.024 | 1.4 |
| `llama` | 2.387 | 0.252 | 9.5 | 6.411 | 2.232 | 2.9 |
| `gpt2` | 2.509 | 0.372 | 6.7 | 6.153 | 4.226 | 1.5 |
| `vit` | 0.933 | 0.262 | 3.6 | 3.573 | 3.468 | 1.03 |
| `convnext` | 1.555 | 0.368 | 4.2 | 5.641 | 5.518 | 1.02 |

Results of these and of `t5`, `whisper` and `resnet` were right (at most twice eager's error against f64), and so were
gradients of `bert`, `llama`, `gpt2`, `vit`, `convnext` and `whisper`. Nothing stayed in torch but the batch norms of
`resnet`, which have a rule since; it has not run on a GPU yet. Inductor was not measured. First calls took 15 to 65 s
with eight models compiling at once, which says little of one alone.

"""


def ops_of(rule: Any, depth: int = 4) -> set[str]:
    """Names of our ops that a rule mentions, in helpers of its module too."""
    if not isinstance(rule, FunctionType) or depth == 0:
        return set()
    for name, method in METHODS.items():
        if method is rule:
            return {name}
    found: set[str] = set()
    codes = [rule.__code__]
    while codes:
        code = codes.pop()
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
        found |= {c for c in code.co_consts if isinstance(c, str) and c in METHODS}
        before = None
        for step in dis.get_instructions(code):
            helper = rule.__globals__.get(step.argval) if step.opname == "LOAD_GLOBAL" else None
            if isinstance(helper, FunctionType) and helper is not rule and helper.__module__ == rule.__module__:
                found |= ops_of(helper, depth - 1)
            if before == "ops" and step.argval in METHODS:
                found.add(step.argval)
            before = step.argval
    for cell in rule.__closure__ or ():
        held = cell.cell_contents
        found |= {held} if isinstance(held, str) and held in METHODS else ops_of(held, depth - 1)
    return found


def core() -> set[str]:
    """Overloads that torch calls core ATen."""
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        overload = schema.overload_name or "default"
        packet = getattr(torch.ops.aten, name, None) if space == "aten" and not overload.endswith("out") else None
        op = getattr(packet, overload, None)
        if op is not None and torch.Tag.core in op.tags:
            found.add(f"aten::{name}.{overload}")
    return found


def page() -> str:
    """The page."""
    official = core()
    ours = set(TABLE) | set(DRAWS)
    rows = [f"{len(official & ours)} of {len(official)} overloads of core ATen, {len(ours - official)} others.", "",
            "| overload | core | made of |", "|---|---|---|"]  # fmt: skip
    for name in sorted(ours):
        made_of = "torch's generator"
        if name in TABLE:
            made_of = ", ".join(sorted(ops_of(TABLE[name].rule))) or "the value itself"
        rows.append(f"| `{name.removeprefix('aten::')}` | {'yes' if name in official else ''} | {made_of} |")
    missing = sorted(name.removeprefix("aten::") for name in official - ours)
    rows += ["", "Of core ATen these stay in torch, or are never met in functional graphs: "
             + ", ".join(f"`{name}`" for name in missing) + "."]  # fmt: skip
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
