"""GPT-2 124M learns a rule on a device and on the processor: the same start, batches and AdamW, loss by loss.

    python -m benchmarks.gpt2_curve [--device cuda] [--steps 200] [--only f32]

Prints a JSON row for each kind of numbers on the device: the losses, and the largest gap to the processor's in f32.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import strata as st
from benchmarks.gpu_models import GPT2, gpt2_step, gpt2_weights
from strata.core import DType, bf16, f32

BATCH, LENGTH = 2, 64
KINDS = {"f32": f32, "bf16": bf16}
ALPHABET = 2000  # of the vocabulary: words that a rule of so few batches can be learned for


def start(layers: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {}
    for name, shape in gpt2_weights(LENGTH, layers, GPT2["width"], GPT2["vocabulary"]).items():
        is_scale = name.startswith("n") and "_b" not in name
        drawn = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        found[name] = np.ones(shape, np.float32) if is_scale else drawn if len(shape) > 1 else np.zeros_like(drawn)
    return found


def batches(steps: int) -> Iterator[dict[str, np.ndarray]]:
    """Every word is followed by one that belongs to it, but for a tenth."""
    rng = np.random.default_rng(1)
    follower = rng.permutation(ALPHABET)
    for _ in range(steps):
        words = [rng.integers(0, ALPHABET, BATCH)]
        for _ in range(LENGTH):
            words.append(np.where(rng.random(BATCH) < 0.1, rng.integers(0, ALPHABET, BATCH), follower[words[-1]]))
        text = np.stack(words, 1)
        yield {"ids": np.ascontiguousarray(text[:, :-1]), "targets": np.ascontiguousarray(text[:, 1:])}


def train(device: str, kind: DType, steps: int, layers: int) -> dict[str, Any]:
    begin = time.perf_counter()
    compiled = st.Session(device).compile(gpt2_step(BATCH, LENGTH, layers=layers, kind=kind))
    for at, (name, array) in enumerate(start(layers).items()):
        for n, (state, value) in enumerate(
            ((name, array), (f"first_{name}", np.zeros_like(array)), (f"second_{name}", np.zeros_like(array)))
        ):
            compiled.bind(state, value)
            compiled.feed(state, output=1 + 3 * at + n)
    losses, first = [], 0.0
    for feeds in batches(steps):
        losses.append(float(np.asarray(compiled.run(feeds)[0])))
        first = first or time.perf_counter() - begin
    seconds = time.perf_counter() - begin
    return {
        "device": device, "kind": str(kind), "losses": losses, "host_steps": list(compiled.host_steps),
        "first_call_s": round(first, 2), "step_ms": round((seconds - first) / max(1, steps - 1) * 1e3, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=GPT2["layers"])
    parser.add_argument("--only", choices=KINDS, default=None)
    parser.add_argument("--threads", type=int, default=None, help="of the processor")
    given = parser.parse_args()
    with st.config.using(num_threads=given.threads):
        wanted = train("cpu", f32, given.steps, given.layers)
    print(json.dumps(wanted), flush=True)
    for name, kind in KINDS.items():
        if given.only in (None, name):
            found = train(given.device, kind, given.steps, given.layers)
            gaps = np.abs(np.array(found["losses"]) - wanted["losses"])
            shares = gaps / np.abs(wanted["losses"])
            print(
                json.dumps(found | {"largest_gap": float(gaps.max()), "largest_share": float(shares.max())}), flush=True
            )


if __name__ == "__main__":
    main()
