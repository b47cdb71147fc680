"""One layer, gelu(x @ w + b), through every stage of strata: graph, derivative, plan, native code, and its speed."""

from __future__ import annotations

import time

import numpy as np

import strata as st


def build() -> st.Graph:
    """The layer for any batch size."""
    g = st.Graph("layer")
    x = g.input("x", (st.sym("batch", 1, 512), 256))
    w = g.param("w", (256, 1024))
    b = g.param("b", (1024,))
    return g.outputs((x @ w + b).gelu())


def best(run, rounds: int = 30) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def main() -> None:
    g = build()
    print("the graph (MIR):\n")
    print(g)

    gradient = st.transforms.grad(g, wrt=["w"])
    print(f"\nits derivative with respect to w: {len(gradient.nodes())} nodes, as a graph again")

    compiled = st.Session("cpu").compile(g)
    print("\nthe plan (LIR): one kernel, no scratch memory\n")
    print(compiled.lir)

    rng = np.random.default_rng(0)
    w = rng.standard_normal((256, 1024)).astype(np.float32) / 16
    b = rng.standard_normal(1024).astype(np.float32)
    compiled.set_params({"w": w, "b": b})  # packed once, for all runs

    from scipy.special import erf

    def with_numpy(x: np.ndarray) -> np.ndarray:
        y = x @ w + b
        return y * 0.5 * (1 + erf(y * np.float32(0.5**0.5)))

    print("\none compile, any batch size:\n")
    print("  batch   strata ms   NumPy ms   ratio   largest difference")
    for batch in (1, 7, 64, 512):
        x = rng.standard_normal((batch, 256)).astype(np.float32)
        (y,) = compiled.run(x=x)
        difference = np.abs(y - with_numpy(x)).max()
        ours, theirs = best(lambda x=x: compiled.run(x=x)), best(lambda x=x: with_numpy(x))
        print(f"  {batch:5}   {ours:9.3f}   {theirs:8.3f}   {theirs / ours:5.1f}   {difference:.1e}")

    print("\nthe same as lazy tensors, differentiated:\n")
    loss = st.value_and_grad(lambda w, x: (x @ w).gelu().sum())
    value, slope = loss(st.tensor(w), st.asarray(rng.standard_normal((4, 256)).astype(np.float32)))
    print(f"  loss {value.item():.3f}, gradient of shape {slope.shape}, norm {float((slope * slope).sum().sqrt().item()):.3f}")


if __name__ == "__main__":
    main()
