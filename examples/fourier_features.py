"""Fit a signal with random Fourier features: a closed form by least squares, and the same by gradient descent.

y(x) = W [cos(ωx), sin(ωx)] is linear in W, so the best W is known: the gradient's answer is held against it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import strata as st

SAMPLES, FEATURES = 256, 8


def signal(x: np.ndarray) -> np.ndarray:
    return np.sin(3 * x) + 0.5 * np.cos(7 * x) * np.exp(-(x**2))


def features(x: Any, frequencies: Any) -> Any:
    """cos and sin of every frequency, a row for each sample."""
    phase = x.reshape((-1, 1)) * frequencies.reshape((1, -1))
    return st.concat([phase.cos(), phase.sin()], axis=1)


def fit(x: np.ndarray, y: np.ndarray, frequencies: np.ndarray, steps: int = 400) -> tuple[np.ndarray, list[float]]:
    """Weights by gradient descent with momentum."""
    opt = st.optim.SGD(0.3, momentum=0.9, nesterov=True)
    weights = st.asarray(np.zeros(2 * len(frequencies)))
    state = opt.init(weights)

    @st.jit
    def step(weights: Any, state: Any, x: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            return ((features(x, st.asarray(frequencies)) @ w.reshape((-1, 1))).reshape((-1,)) - y).square().mean()

        value, grad = st.value_and_grad(loss)(weights)
        return *opt.update(weights, grad, state), value

    losses = []
    for _ in range(steps):
        weights, state, value = step(weights, state, x, y)
        losses.append(value.item())
    return weights.numpy(), losses


def main() -> None:
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(-2, 2, SAMPLES))
    frequencies = np.arange(1, FEATURES + 1) * np.pi / 2
    _, losses = fit(x, signal(x), frequencies)
    table = features(st.asarray(x), st.asarray(frequencies)).numpy()
    best = np.linalg.lstsq(table, signal(x), rcond=None)[0]
    floor = np.mean((table @ best - signal(x)) ** 2)
    print(f"loss {losses[0]:.3g} -> {losses[-1]:.3g}, the best there is {floor:.3g}")


if __name__ == "__main__":
    main()
