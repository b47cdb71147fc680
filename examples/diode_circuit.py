"""Fit a diode circuit to a measured voltage: backward Euler by `scan`, Newton with `solve` at every step, in f64.

A source drives a resistor into a capacitor with a diode across it:

    C dv/dt = (u(t) - v) / R - I (exp(v / V_T) - 1)

Backward Euler gives a nonlinear equation for each new v, which Newton's method solves. The whole simulation is one
differentiable program: R and I are found from the voltage by gradient descent on their logarithms.

    python examples/diode_circuit.py [FOLDER]     draws FOLDER/diode_circuit.svg
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from strata.viewer import plot

STEPS, DT = 200, 5e-5
CAPACITY, THERMAL = 1e-6, 0.026
TRUE = {"resistance": 1e3, "current": 1e-9}


def source(time: np.ndarray) -> np.ndarray:
    """The driving voltage."""
    return np.sin(2 * np.pi * 200 * time)


def simulate(params: dict[str, Any], drive: Any) -> Any:
    """The capacitor's voltage at every step."""
    resistance, current = params["resistance"], params["current"]

    def residual(v: Any, before: Any, u: Any) -> Any:
        diode = current * ((v / THERMAL).exp() - 1.0)
        return CAPACITY * (v - before) / DT - (u - v) / resistance + diode

    def step(v: Any, u: Any) -> tuple[Any, Any]:
        new = v
        for _ in range(8):
            slope = CAPACITY / DT + 1.0 / resistance + current / THERMAL * (new / THERMAL).exp()
            move = st.solve(slope.reshape((1, 1)), residual(new, v, u).reshape((1,))).reshape(())
            new = new - st.clip(move, -0.1, 0.1)  # the exponential must not run away
        return new, new

    return st.scan(step, st.asarray(np.float64(0.0)), drive)[1]


def fit(measured: np.ndarray, drive: np.ndarray, steps: int = 150) -> tuple[dict[str, float], list[float]]:
    """Resistance and saturation current from a voltage, by Adam on their logarithms; and the losses."""

    def loss(logs: dict[str, Any]) -> Any:
        params = {k: v.exp() for k, v in logs.items()}
        return ((simulate(params, st.asarray(drive)) - st.asarray(measured)) ** 2).mean() * 1e3

    opt = st.optim.Adam(st.optim.cosine_schedule(0.15, steps))
    logs = {"resistance": st.asarray(np.log(3e3)), "current": st.asarray(np.log(2e-10))}
    state = opt.init(logs)

    @st.jit
    def step(logs: Any, state: Any) -> Any:
        value, grads = st.value_and_grad(loss)(logs)
        return *opt.update(logs, grads, state), value

    losses = []
    for _ in range(steps):
        logs, state, value = step(logs, state)
        losses.append(value.item())
    return {k: float(np.exp(v.item())) for k, v in logs.items()}, losses


def main(out: Path = Path()) -> None:
    time = np.arange(1, STEPS + 1) * DT
    drive, run = source(time), st.jit(simulate)
    measured = run({k: st.asarray(np.float64(v)) for k, v in TRUE.items()}, drive).numpy()
    found, losses = fit(measured, drive)
    fitted = run({k: st.asarray(np.float64(v)) for k, v in found.items()}, drive).numpy()
    made = plot({"source": (1e3 * time, drive), "measured": (1e3 * time, measured), "fitted": (1e3 * time, fitted)},
                title="a diode clips a sine", x="ms", y="V")  # fmt: skip
    print(f"{made}\n\nloss {losses[0]:.3g} -> {losses[-1]:.3g}")
    for name, value in found.items():
        print(f"{name}: {value:.4g} (true {TRUE[name]:.4g})")
    made.save(out / "diode_circuit.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
