"""Modules of PyTorch: `torch.compile(backend="strata")` beside eager and inductor, steady and in the first call.

    python -m benchmarks.torch_compile [--threads 1] [--seconds 0.5] [names …]

The same module with the same weights runs in a process for each; calls are timed in turns, as in the whole suite. A
first call is all from `torch.compile` to the first result, with torch imported and its tracer warm.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.registry import Case, Run, workload

GROUP = "PyTorch modules"
HOW = {"strata": "strata", "torch": None, "torch.compile": "inductor"}
TRACER = "ReLU of 8 numbers"  # comes first, and is not counted: it imports torch's tracer


def _modules() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Modules and their inputs, by name."""
    import torch
    from torch import nn

    def encoder(width: int, layers: int, heads: int, tokens: int, batch: int) -> tuple[Any, Any]:
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), torch.randn(batch, tokens, width)

    def block(inside: int, out: int, stride: int = 1, groups: int = 1, size: int = 3) -> Any:
        conv = nn.Conv2d(inside, out, size, stride, size // 2, groups=groups, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU())

    class Residual(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.parts = nn.Sequential(block(width, width), block(width, width))

        def forward(self, x: Any) -> Any:
            return torch.relu(x + self.parts(x))

    class Swish(nn.Module):
        def __init__(self, width: int, hidden: int) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(width)
            self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
            self.down = nn.Linear(hidden, width, bias=False)

        def forward(self, x: Any) -> Any:
            y = self.norm(x)
            return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    class Attention(nn.Module):
        def __init__(self, width: int, heads: int, kept: int) -> None:
            super().__init__()
            self.heads, self.kept, self.size = heads, kept, width // heads
            self.norm = nn.LayerNorm(width)
            self.qkv = nn.Linear(width, width + 2 * kept * self.size)
            self.out = nn.Linear(width, width)

        def forward(self, x: Any) -> Any:
            b, t, width = x.shape
            q, k, v = self.qkv(self.norm(x)).split([width, self.kept * self.size, self.kept * self.size], -1)
            q, k, v = (y.view(b, t, -1, self.size).transpose(1, 2) for y in (q, k, v))
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return x + self.out(y.transpose(1, 2).reshape(b, t, width))

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5000, 64)
            self.rest = nn.Sequential(nn.Linear(64 * 8, 128), nn.ReLU(), nn.Linear(128, 1), nn.Sigmoid())

        def forward(self, x: Any) -> Any:
            return self.rest(self.table(x).flatten(1))

    def pointwise() -> Any:
        class Chain(nn.Module):
            def forward(self, x: Any) -> Any:
                y = (x * 1.5 + 0.1).sigmoid() * x.tanh() + x.abs().sqrt()
                return (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True) + 1e-5).sqrt()

        return Chain()

    def picture(batch: int, size: int) -> Any:
        return torch.randn(batch, 3, size, size)

    return {
        TRACER: lambda: (nn.ReLU(), torch.randn(8)),
        "MLP 256-1024-256, batch 32": lambda: (
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), torch.randn(32, 256)),
        "encoder: 2 layers d128, 4 x 32 tokens": lambda: encoder(128, 2, 4, 32, 4),
        "encoder: 4 layers d256, 1 x 64 tokens": lambda: encoder(256, 4, 8, 64, 1),
        "gated feed-forward: 4 of d256, 64 tokens": lambda: (
            nn.Sequential(*(Swish(256, 704) for _ in range(4))), torch.randn(1, 64, 256)),
        "decoder: grouped attention d256, 128 tokens": lambda: (
            nn.Sequential(*(Attention(256, 8, 2) for _ in range(2)), Swish(256, 704)), torch.randn(1, 128, 256)),
        "residual conv net 32x32, batch 4": lambda: (
            nn.Sequential(block(3, 32), Residual(32), block(32, 64, 2), Residual(64), nn.AdaptiveAvgPool2d(1),
                          nn.Flatten(), nn.Linear(64, 10)), picture(4, 32)),
        "depth-wise conv net 64x64, batch 1": lambda: (
            nn.Sequential(block(3, 16, 2), block(16, 16, groups=16), block(16, 48, size=1),
                          block(48, 48, 2, groups=48), block(48, 96, size=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(96, 10)), picture(1, 64)),
        "patches: conv stem and encoder, batch 2": lambda: (
            nn.Sequential(nn.Conv2d(3, 96, 8, 8), nn.Flatten(2), nn.LayerNorm(64), nn.Linear(64, 64)),
            picture(2, 64)),
        "auto-encoder with transposed convolutions": lambda: (
            nn.Sequential(block(3, 16, 2), block(16, 32, 2), nn.ConvTranspose2d(32, 16, 2, 2), nn.ReLU(),
                          nn.ConvTranspose2d(16, 3, 2, 2), nn.Sigmoid()), picture(2, 32)),
        "embeddings and an MLP, batch 256": lambda: (Bag(), torch.randint(0, 5000, (256, 8))),
        "element-wise chain and a norm, 256 x 1024": lambda: (pointwise(), torch.randn(256, 1024)),
        "group norm and SiLU conv blocks 16x16": lambda: (
            nn.Sequential(*(nn.Sequential(nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1))
                            for _ in range(3))), torch.randn(1, 32, 16, 16)),
    }  # fmt: skip


NAMES = (
    TRACER,
    "MLP 256-1024-256, batch 32", "encoder: 2 layers d128, 4 x 32 tokens", "encoder: 4 layers d256, 1 x 64 tokens",
    "gated feed-forward: 4 of d256, 64 tokens", "decoder: grouped attention d256, 128 tokens",
    "residual conv net 32x32, batch 4", "depth-wise conv net 64x64, batch 1",
    "patches: conv stem and encoder, batch 2", "auto-encoder with transposed convolutions",
    "embeddings and an MLP, batch 256", "element-wise chain and a norm, 256 x 1024",
    "group norm and SiLU conv blocks 16x16",
)  # fmt: skip


def _run(name: str, backend: str | None, threads: int) -> Run:
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    module, x = _modules()[name]()
    call = module.eval()
    if backend is not None:
        import strata as st

        st.torch.register()
        torch._dynamo.reset()  # it gives up on code of which it has traced many kinds, and these modules share theirs
        call = torch.compile(module, backend=backend)

    def run() -> Any:
        with torch.no_grad():
            return call(x).numpy()

    return run


def _case(name: str) -> Case:
    own = {contender: partial(_run, name, backend) for contender, backend in HOW.items()}
    return Case({"x": np.zeros(1, np.float32)}, own=own, tolerance=1e-4)


for _name in NAMES:
    workload(f"torch: {_name}", GROUP, quick=False, compilers=True)(partial(_case, _name))


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """A table in Markdown, and geometric means."""
    from benchmarks.report import geometric_mean

    columns = "eager ms | inductor ms | strata ms | × eager | × inductor | first call: inductor s | strata s"
    lines = [f"| module | {columns} |", "|---|---|---|---|---|---|---|---|"]
    ratios: dict[str, list[float]] = {"eager": [], "inductor": [], "first call": []}
    for r in rows:
        if "error" in r or set(r["contenders"]) < set(HOW):
            told = r.get("error") or f"wrong: {r['wrong']}, failed: {r['failed']}"
            lines.append(f"| {r['workload'][7:]} | {told} |")
            continue
        times = {n: r["contenders"][n]["best"] * 1e3 for n in HOW}
        first = {n: r["contenders"][n]["ready"] for n in HOW}
        found = times["torch"] / times["strata"], times["torch.compile"] / times["strata"]
        ratios["eager"].append(found[0])
        ratios["inductor"].append(found[1])
        ratios["first call"].append(first["torch.compile"] / first["strata"])
        lines.append(
            f"| {r['workload'][7:]} | {times['torch']:.3f} | {times['torch.compile']:.3f} | {times['strata']:.3f} | "
            f"{found[0]:.2f} | {found[1]:.2f} | {first['torch.compile']:.2f} | {first['strata']:.2f} |"
        )
    if ratios["eager"]:
        means = {n: geometric_mean(x) for n, x in ratios.items()}
        told = f"{means['eager']:.2f} × eager (worst {min(ratios['eager']):.2f}), {means['inductor']:.2f} × inductor"
        quick = f"a first call is {means['first call']:.1f} times as fast as inductor's"
        lines += ["", f"Geometric mean of {len(ratios['eager'])}: {told}; {quick}."]
    return lines


def main() -> int:
    """Measure, and print the table."""
    from benchmarks.measure import Team
    from benchmarks.registry import load_workloads

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.torch_compile", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", help="parts of names")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5)
    options = parser.parse_args()
    known = [w for w in load_workloads().values() if w.group == GROUP]
    chosen = [w for w in known[1:] if not options.names or any(n in w.name for n in options.names)]
    rows = []
    with tempfile.TemporaryDirectory() as folder, Team(options.threads, Path(folder)) as team:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "inductor"))  # theirs begins empty, like ours
        team.names = [n for n in team.names if n in HOW]
        team.measure(known[0], 0.1, compilers=True)
        for work in chosen:
            rows.append(team.measure(work, options.seconds, compilers=True))
            print("\n".join(summary(rows[-1:])[2:3]), flush=True)
    print("\n".join(summary(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
