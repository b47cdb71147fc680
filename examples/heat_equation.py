"""The heat equation on a rod, and the initial temperature found from the final one.

u_t = a u_xx with u = 0 at both ends, by explicit steps in a `scan`. The sine modes decay as exp(-a (kπ)² t), which is
what the simulation is held against; the second part runs the problem backwards by gradient descent through the solver.

    python examples/heat_equation.py [FOLDER]     draws FOLDER/heat_equation.svg
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from strata.viewer import plot

POINTS, STEPS, DIFFUSIVITY, END = 63, 400, 0.01, 1.0
DX, DT = 1.0 / (POINTS + 1), END / STEPS


def evolve(start: Any, steps: int = STEPS) -> Any:
    """The temperature after `steps` steps."""

    def step(u: Any, _: Any) -> tuple[Any, None]:
        padded = st.pad(u, (1, 1))
        return u + (DIFFUSIVITY * DT / DX**2) * (padded[2:] - 2.0 * u + padded[:-2]), None

    return st.scan(step, start, None, length=steps, checkpoints=20)[0]


def exact(coefficients: dict[int, float], time: float) -> np.ndarray:
    """The solution for a sum of sine modes."""
    x = np.arange(1, POINTS + 1) * DX
    decay = {k: np.exp(-DIFFUSIVITY * (k * np.pi) ** 2 * time) for k in coefficients}
    return sum(c * decay[k] * np.sin(k * np.pi * x) for k, c in coefficients.items())  # type: ignore[return-value]


def recover(final: np.ndarray, steps: int = 60) -> tuple[np.ndarray, list[float]]:
    """An initial temperature that ends as `final`, by gradient descent with momentum."""
    opt = st.optim.SGD(20.0, momentum=0.8)
    guess = st.asarray(np.zeros(POINTS))
    state = opt.init(guess)

    @st.jit
    def step(guess: Any, state: Any) -> Any:
        value, grad = st.value_and_grad(lambda u: ((evolve(u) - st.asarray(final)) ** 2).mean())(guess)
        return *opt.update(guess, grad, state), value

    losses = []
    for _ in range(steps):
        guess, state, value = step(guess, state)
        losses.append(value.item())
    return guess.numpy(), losses


def main(out: Path = Path()) -> None:
    modes = {1: 1.0, 3: 0.5}
    final = st.jit(evolve)(exact(modes, 0.0)).numpy()
    print(f"largest error against the sine modes: {np.abs(final - exact(modes, END)).max():.2e}")
    start, losses = recover(final)
    error = np.abs(start - exact(modes, 0.0)).max()
    print(f"recovering the start: loss {losses[0]:.2e} -> {losses[-1]:.2e}, error {error:.2e}\n")
    x = np.arange(1, POINTS + 1) * DX
    lines = {"start": (x, exact(modes, 0.0)), "found": (x[::3], start[::3]), "after 1 s": (x, final)}
    made = plot(lines, title="heat on a rod", x="place", y="temperature")
    print(made)
    made.save(out / "heat_equation.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
