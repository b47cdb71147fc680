"""What a call costs the host: x + 1 on 8 floats that live on a device, beside PyTorch and JAX there.

    python -m benchmarks.device_calls [--device cuda]

Microseconds a call: the median of 30 rounds of 2,000 calls, contenders in turns, one wait at the end of a round."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import strata as st

ROUNDS, CALLS = 30, 2000


def contenders(device: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """A call, and what waits for all of them."""
    x = st.tensor(np.zeros(8, np.float32), device=device)
    jitted = st.jit(lambda v: v + 1)
    g = st.Graph("one_more")
    compiled = st.Session(device).compile(g.outputs(g.input("x", (8,), "f32") + 1))

    def wait() -> None:
        (x * 2).numpy()

    found: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "strata, jit": (lambda: jitted(x), wait), "strata, compiled graph": (lambda: compiled.run(x=x), wait),
    }  # fmt: skip
    if device == "cuda" and find_spec("torch"):
        import torch

        t = torch.zeros(8, device="cuda")
        found["torch, eager"] = (lambda: t + 1, torch.cuda.synchronize)
        found["strata, compiled graph on torch's"] = (lambda: compiled.run(x=t), torch.cuda.synchronize)
    if find_spec("jax"):
        import jax

        j = jax.numpy.zeros(8, np.float32)
        plus = jax.jit(lambda v: v + 1)
        found["jax, jit"] = (lambda: plus(j), lambda: plus(j).block_until_ready())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    found = contenders(parser.parse_args().device)
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(ROUNDS + 2):
        for name, (call, wait) in found.items():
            wait()
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            wait()
            times[name].append((time.perf_counter() - begin) / CALLS * 1e6)
    for name, spent in times.items():
        kept = spent[2:]
        print(json.dumps({"call": name, "us": round(statistics.median(kept), 2), "best_us": round(min(kept), 2)}))


if __name__ == "__main__":
    main()
