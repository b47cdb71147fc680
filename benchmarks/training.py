"""Training steps of small models, ours against torch: the same data, start and update rule, measured in turns.

python benchmarks/training.py [mlp|conv|transformer …] [--threads 2] [--steps 60] [--compile]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np

import strata as st
from strata import nn
from strata.config import using


@dataclass
class Case:
    """A model in both libraries and a batch maker."""

    ours: Any
    theirs: Any
    batch: Callable[[np.random.Generator], tuple[np.ndarray, np.ndarray]]
    lr: float = 1e-3


def mlp() -> Case:
    """784-512-512-10, batch 128."""
    import torch

    sizes = (784, 512, 512, 10)
    ours, theirs = [], []
    for i, (a, b) in enumerate(pairwise(sizes)):
        ours += [nn.Linear(a, b)] + ([nn.ReLU()] if i < 2 else [])
        theirs += [torch.nn.Linear(a, b)] + ([torch.nn.ReLU()] if i < 2 else [])

    def batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return rng.standard_normal((128, 784)).astype("f"), rng.integers(0, 10, 128)

    return Case(nn.Sequential(*ours), torch.nn.Sequential(*theirs), batch)


def conv() -> Case:
    """Two convolutions with pooling and a linear head on 28x28 images, batch 64."""
    import torch

    ours = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip
    t = torch.nn
    theirs = t.Sequential(
        t.Conv2d(1, 16, 3, padding=1), t.ReLU(), t.MaxPool2d(2), t.Conv2d(16, 32, 3, padding=1), t.ReLU(),
        t.MaxPool2d(2), t.Flatten(), t.Linear(32 * 7 * 7, 10),
    )  # fmt: skip

    def batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return rng.standard_normal((64, 1, 28, 28)).astype("f"), rng.integers(0, 10, 64)

    return Case(ours, theirs, batch)


WIDTH, HEADS, LAYERS, WORDS, LENGTH, BATCH = 256, 8, 4, 1024, 128, 8


class Block(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self) -> None:
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, HEADS)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def __call__(self, x: Any) -> Any:
        x = x + self.attn(self.norm1(x), is_causal=True)
        return x + self.down(self.up(self.norm2(x)).gelu())


class Lm(nn.Module):
    """Embeddings, decoder layers, logits."""

    def __init__(self) -> None:
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = [Block() for _ in range(LAYERS)]
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def __call__(self, ids: Any) -> Any:
        x = self.words(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).reshape((-1, WORDS))


def transformer() -> Case:
    """A causal language model: 4 layers of width 256, batch 8 of 128 tokens."""
    import torch
    from torch.nn import functional

    t = torch.nn

    class Attention(t.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_proj_weight = t.Parameter(torch.empty(3 * WIDTH, WIDTH))
            self.in_proj_bias = t.Parameter(torch.empty(3 * WIDTH))
            self.out_proj = t.Linear(WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            b, n, d = x.shape
            q, k, v = functional.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
            q, k, v = (y.view(b, n, HEADS, d // HEADS).transpose(1, 2) for y in (q, k, v))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out_proj(y.transpose(1, 2).reshape(b, n, d))

    class TorchBlock(t.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = t.LayerNorm(WIDTH), t.LayerNorm(WIDTH)
            self.attn = Attention()
            self.up, self.down = t.Linear(WIDTH, 4 * WIDTH), t.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            x = x + self.attn(self.norm1(x))
            return x + self.down(functional.gelu(self.up(self.norm2(x))))

    class TorchLm(t.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = t.Embedding(WORDS, WIDTH), t.Embedding(LENGTH, WIDTH)
            self.blocks = t.ModuleList([TorchBlock() for _ in range(LAYERS)])
            self.norm, self.head = t.LayerNorm(WIDTH), t.Linear(WIDTH, WORDS, bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.words(ids) + self.places.weight
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)).reshape(-1, WORDS)

    def batch(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        ids = rng.integers(0, WORDS, (BATCH, LENGTH + 1))
        return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]).reshape(-1)

    return Case(Lm(), TorchLm(), batch, 3e-4)


def our_step(case: Case) -> tuple[Any, Callable[[Any, Any, Any], Any]]:
    """The state and the jitted step: forward, backward and AdamW in one program, state given up to it."""
    opt = st.optim.AdamW(case.lr)

    def loss(model: Any, x: Any, y: Any) -> Any:
        return st.cross_entropy(model(x), y)

    def step(state: Any, x: Any, y: Any) -> Any:
        model, slots = state
        value, grads = st.value_and_grad(loss)(model, x, y)
        return opt.update(model, grads, slots), value

    return (case.ours, opt.init(case.ours)), st.jit(step, donate_argnums=(0,))


def their_step(case: Case, compiled: bool) -> Callable[[Any, Any], float]:
    import torch

    model = torch.compile(case.theirs) if compiled else case.theirs
    opt = torch.optim.AdamW(case.theirs.parameters(), case.lr, fused=True)

    def step(x: Any, y: Any) -> float:
        opt.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()
        opt.step()
        return float(loss.detach())

    return step


def equal_case(name: str) -> Case:
    """A case whose two models have the same weights."""
    import torch

    torch.manual_seed(0)
    case = {"mlp": mlp, "conv": conv, "transformer": transformer}[name]()
    for p in case.theirs.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.05)
        elif p.abs().sum() == 0 or not torch.isfinite(p).all():
            torch.nn.init.zeros_(p)
    case.ours.load_state_dict({k: v.detach().numpy().copy() for k, v in case.theirs.state_dict().items()})
    return case


def measure(name: str, threads: int, steps: int, compiled: bool) -> None:
    import torch

    torch.set_num_threads(threads)
    case = equal_case(name)
    state, ours = our_step(case)
    theirs = their_step(case, compiled)
    rng = np.random.default_rng(0)
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    work: dict[str, list[float]] = {"ours": [], "torch": []}  # processor time, which a busy machine changes less
    gap = 0.0
    with using(num_threads=threads):
        for i in range(steps + 5):
            x, y = case.batch(rng)
            start, cpu = perf_counter(), process_time()
            state, loss = ours(state, x, y)
            mine = loss.item()
            middle, cpu_middle = perf_counter(), process_time()
            reference = theirs(x, y)
            end, cpu_end = perf_counter(), process_time()
            gap = max(gap, abs(mine - reference))
            if i >= 5:
                times["ours"].append(middle - start)
                times["torch"].append(end - middle)
                work["ours"].append(cpu_middle - cpu)
                work["torch"].append(cpu_end - cpu_middle)
    a, b = (median(times[k]) * 1e3 for k in ("ours", "torch"))
    low = [min(times[k]) * 1e3 for k in ("ours", "torch")]
    other = "torch.compile" if compiled else "torch eager"
    used = [median(work[k]) * 1e3 for k in ("ours", "torch")]
    print(
        f"{name:12} {threads} threads: ours {a:7.2f} ms (best {low[0]:.2f}), {other} {b:7.2f} ms (best {low[1]:.2f}), "
        f"ratio {b / a:.2f} (best {low[1] / low[0]:.2f}); processor time {used[0]:.2f} and {used[1]:.2f} ms, "
        f"ratio {used[1] / used[0]:.2f}; largest gap of losses {gap:.2e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=["mlp", "conv", "transformer"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    for name in options.cases:
        measure(name, options.threads, options.steps, options.compile)


if __name__ == "__main__":
    main()
