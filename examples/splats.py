"""Fit Gaussian splats to pictures: a scene is rendered from eight sides, and other splats learn to look like it.

    python examples/splats.py [FOLDER [COUNT [STEPS]]]

FOLDER/splats.png has what was wanted beside what was learnt, FOLDER/splats-loss.svg the error of each step.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from strata.core import progress
from strata.viewer import picture, plot

Splats = dict[str, Any]


def shell(count: int, rng: np.random.Generator) -> Splats:
    """The scene to learn: a striped ball over a chequered disc."""
    ball = count // 2
    way = rng.standard_normal((ball, 3))
    way /= np.linalg.norm(way, axis=1, keepdims=True)
    disc = rng.uniform(-1, 1, (count - ball, 2)) * 1.1
    positions = np.concatenate([way * 0.6, np.stack([disc[:, 0], np.full(len(disc), -0.75), disc[:, 1]], 1)])
    stripes = 0.5 + 0.5 * np.sin(9 * way[:, 1:2] + np.array([0.0, 2.1, 4.2]))
    squares = np.where((np.floor(3 * disc[:, :1]) + np.floor(3 * disc[:, 1:])) % 2 == 0, 0.85, 0.2)
    colours = np.concatenate([stripes, np.repeat(squares, 3, 1)])
    return parameters(positions, np.full((count, 3), np.log(1.2 / count**0.5)), np.full(count, 2.5), colours)


def noise(count: int, rng: np.random.Generator) -> Splats:
    """Where learning begins: grey splats anywhere."""
    positions, sizes = rng.uniform(-1, 1, (count, 3)) * [1.0, 0.85, 1.0], np.full((count, 3), np.log(1.2 / count**0.5))
    return parameters(positions, sizes, np.full(count, -2.0), np.full((count, 3), 0.5))


def parameters(positions: Any, scales: Any, opacities: Any, colours: Any) -> Splats:
    turned = np.tile([1.0, 0.0, 0.0, 0.0], (len(positions), 1))
    parts = {"positions": positions, "scales": scales, "turned": turned, "opacities": opacities, "colours": colours}
    return {name: np.asarray(x, np.float32) for name, x in parts.items()}


def cameras(count: int) -> np.ndarray:
    """Cameras in a ring around the scene."""
    places = [(2.6 * np.cos(a), 0.9, 2.6 * np.sin(a)) for a in 2 * np.pi * np.arange(count) / count]
    aim, dark = (0.0, -0.15, 0.0), (0.05, 0.05, 0.08)
    return np.stack([st.splat_camera(place, aim, fov=50.0, background=dark).numpy() for place in places])


def render(splats: Splats, camera: Any, size: int) -> Any:
    """What a camera sees. Opacities are logits here, and quaternions have length 1 whatever is learnt."""
    turned = splats["turned"] / (splats["turned"] ** 2).sum(axis=1, keepdims=True).sqrt()
    parts = splats["positions"], splats["scales"], turned, st.sigmoid(splats["opacities"]), splats["colours"]
    return st.splat_render(*parts, camera=camera, width=size, height=size, max_splat_steps=0)[:, :, :3]


def fit(count: int = 20_000, steps: int = 200, size: int = 144, views: int = 8, seed: int = 0) -> dict[str, Any]:
    """Learn a scene from its pictures: the splats, the losses, and both pictures of the first camera."""
    rng, ring = np.random.default_rng(seed), cameras(views)
    draw = st.jit(lambda splats, camera: render(splats, camera, size))
    scene, optimizer = shell(count, rng), st.optim.Adam(st.optim.cosine_schedule(0.02, steps))
    aims = [draw(scene, camera).numpy() for camera in ring]

    def loss(splats: Splats, camera: Any, aim: Any) -> Any:
        return st.abs(render(splats, camera, size) - aim).mean()

    @st.jit
    def step(splats: Splats, state: Any, camera: Any, aim: Any) -> Any:
        value, slope = st.value_and_grad(loss)(splats, camera, aim)
        pace = {"positions": 0.15, "scales": 0.5, "turned": 0.3, "opacities": 2.0, "colours": 1.0}  # places are slow
        moved, state = optimizer.update(splats, slope, state)
        return {k: splats[k] + (moved[k] - splats[k]) * pace[k] for k in splats}, state, value

    learnt, losses = noise(count, rng), []
    state = optimizer.init(learnt)
    with progress("fitting", steps) as advance:
        for i in range(steps):
            learnt, state, value = step(learnt, state, ring[i % views], aims[i % views])
            losses.append(value.item())
            advance(1, f"error {losses[-1]:.4f}")
    return {"splats": learnt, "losses": losses, "aim": aims[0], "picture": draw(learnt, ring[0]).numpy()}


def main(out: Path = Path(), count: int = 20_000, steps: int = 200) -> None:
    made = fit(count, steps)
    print(f"mean absolute error {made['losses'][0]:.4f} at first, {np.mean(made['losses'][-8:]):.4f} in the end")
    picture(np.concatenate([made["aim"], made["picture"]], 1)[::-1]).save(out / "splats.png")  # rows go upwards
    lines = plot({"mean absolute error": made["losses"]}, title=f"{count:,} splats", x="step", y="error", log=True)
    lines.save(out / "splats-loss.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."), *map(int, sys.argv[2:]))
