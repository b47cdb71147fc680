"""One layer, gelu(x @ w + b), through every stage of strata: graph, derivative, plan, native code, and its speed."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from scipy.special import erf

import strata as st


def build() -> st.Graph:
    """The layer for any batch size."""
    g = st.Graph("layer")
    x = g.input("x", (st.sym("batch", 1, 512), 256))
    w = g.param("w", (256, 1024))
    b = g.param("b", (1024,))
    return g.outputs((x @ w + b).gelu())


def best(runs: dict[str, Callable[[], object]], rounds: int = 40) -> dict[str, float]:
    """The shortest time of each run in milliseconds, in turns, so that other work on the machine meets them alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: min(found) * 1e3 for name, found in times.items()}


def main() -> None:
    g = build()
    print("the graph (MIR):\n")
    print(g)

    gradient = st.transforms.grad(g, wrt=["w"])
    print(f"\nits derivative with respect to w: {len(gradient.nodes())} nodes, as a graph again")

    start = time.perf_counter()
    layer = st.Session("cpu").compile(g)
    took = (time.perf_counter() - start) * 1e3
    print(f"\nthe plan (LIR), made and compiled in {took:.0f} ms: one kernel, no scratch memory\n")
    print(layer.lir.summary())

    rng = np.random.default_rng(0)
    w = rng.standard_normal((256, 1024), np.float32) / 16
    b = rng.standard_normal(1024, np.float32)
    layer.set_params({"w": w, "b": b})  # packed once, for all runs

    def with_numpy(x: np.ndarray) -> np.ndarray:
        y = x @ w + b
        return y * 0.5 * (1 + erf(y * np.float32(0.5**0.5)))

    print("\none compile, any batch size:\n")
    print("  batch   strata ms   NumPy ms   ratio   largest difference")
    for batch in (1, 7, 64, 512):
        x = rng.standard_normal((batch, 256), np.float32)
        (y,) = layer.run(x=x)
        difference = np.abs(y - with_numpy(x)).max()
        times = best({"strata": lambda x=x: layer.run(x=x), "numpy": lambda x=x: with_numpy(x)})
        ratio = times["numpy"] / times["strata"]
        print(f"  {batch:5}   {times['strata']:9.3f}   {times['numpy']:8.3f}   {ratio:5.1f}   {difference:.1e}")

    print("\nthe same as lazy tensors, differentiated:\n")
    loss = st.value_and_grad(lambda w, x: (x @ w).gelu().sum())
    value, slope = loss(st.asarray(w), st.asarray(rng.standard_normal((4, 256), np.float32)))
    norm = (slope * slope).sum().sqrt().item()
    print(f"  loss {value.item():.3f}, gradient of shape {slope.shape}, norm {norm:.3f}")


if __name__ == "__main__":
    main()
