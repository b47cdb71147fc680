"""Gaussian splats, forward and backward, beside the same mathematics in PyTorch: `python -m benchmarks.splats`.

All take turns; the ratio is of the shortest times. PyTorch gets the lists of splats by tile, made before the clock
starts, and composites each tile at once, from the same two quadratic forms. It has its threads, and one: on a busy
machine its threads wait for each other (OMP_WAIT_POLICY=passive helps), and one is faster.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import strata as st
from strata.mir import Graph
from strata.ops.render.splat import GaussianSplatRender, Scene

SCALE, CUTOFF, TILE = 1.6, 1 / 255, 16


def scene(count: int) -> dict[str, np.ndarray]:
    """Splats of about five pixels in a cube, half of the picture behind them seen through."""
    rng = np.random.default_rng(0)
    turned = rng.standard_normal((count, 4))
    turned /= np.linalg.norm(turned, axis=1, keepdims=True)
    made = {
        "positions": rng.uniform(-1, 1, (count, 3)), "scales": rng.normal(-4, 0.3, (count, 3)), "turned": turned,
        "opacities": rng.uniform(0.1, 0.9, count), "colours": rng.uniform(0, 1, (count, 3)),
    }  # fmt: skip
    return {name: x.astype(np.float32) for name, x in made.items()}


def lists(parts: dict[str, np.ndarray], camera: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids of the splats of each tile, and where they begin and end."""
    count = len(parts["opacities"])
    op = GaussianSplatRender(size, size, TILE, SCALE, CUTOFF, 0, 0.01, 16 * count, 0)
    g = Graph("lists")
    flat = [parts[n].reshape(-1) for n in ("positions", "scales", "turned", "opacities", "colours")]
    arrays = [*flat, np.zeros(0, np.float32), camera]
    _, made = Scene.of(op, *(g.input(f"x{i}", a.shape) for i, a in enumerate(arrays))).binned()
    compiled = st.Session("cpu").compile(g.outputs(made[0], made[1]))
    ids, ranges = compiled.run({f"x{i}": a for i, a in enumerate(arrays) if f"x{i}" in compiled.inputs})
    return ids, ranges


def torch_step(parts: dict[str, np.ndarray], camera: np.ndarray, aim: np.ndarray, size: int) -> Any:
    """A function that renders, compares and goes back, in eager PyTorch."""
    import torch

    ids, ranges = lists(parts, camera, size)
    tensors = {name: torch.tensor(x, requires_grad=True) for name, x in parts.items()}
    eye, target = torch.tensor(camera[:3]), torch.tensor(camera[3:6])
    forward = torch.nn.functional.normalize(target - eye, dim=0)
    right = torch.nn.functional.normalize(torch.linalg.cross(torch.tensor(camera[6:9]), forward), dim=0)
    axes = torch.stack([right, torch.linalg.cross(forward, right), forward])
    focal = 0.5 * size / np.tan(np.radians(float(camera[9])) / 2)
    lists_ = [torch.tensor(ids[a:b].astype(np.int64)) for a, b in ranges]
    across = size // TILE
    wanted = torch.tensor(aim)
    shade = torch.tensor(camera[12:15])
    places = ((torch.arange(size) + 0.5 - size / 2) / focal).reshape(across, TILE)

    def dot(x: Any, y: Any) -> Any:
        return (x * y).sum(1)

    def step() -> Any:
        for x in tensors.values():
            x.grad = None
        w, q = tensors["turned"][:, :1], tensors["turned"][:, 1:]
        seen = (tensors["positions"] - eye) @ axes.T
        s = SCALE * torch.exp(tensors["scales"])

        def back(v: Any) -> Any:  # Rᵀv
            return v + 2 * torch.linalg.cross(torch.linalg.cross(v, q) + w * v, q)

        # The ray through pixel c + δ is turned = F (c + δ) in a splat's own frame, where its centre is place = z F c;
        # the squared distance of the ray is |turned × place|² / |turned|², two quadratic forms of δ.
        first, second, third = (back(axes[i].expand_as(q)) / s for i in range(3))
        depth = seen[:, 2:]
        centre = seen[:, :2] / depth
        middle = first * centre[:, :1] + second * centre[:, 1:] + third
        over = [depth * torch.linalg.cross(column, middle) for column in (first, second)]
        above = [dot(over[0], over[0]), 2 * dot(over[0], over[1]), dot(over[1], over[1])]
        below = [dot(x, y) for x, y in ((middle, middle), (middle, first), (middle, second))]
        below += [dot(first, first), 2 * dot(first, second), dot(second, second)]
        table = torch.stack([*centre.T, *above, *below, tensors["opacities"]], 1)
        rows = []
        for t, chosen in enumerate(lists_):
            u, v, a, b, c, d, e, f, g, h, i, strength = (x[:, None] for x in table[chosen].T)
            dx, dy = places[t % across] - u, places[t // across][:, None] - v[:, None]  # [K, TILE], [K, TILE, 1]
            dx = dx[:, None]
            xx, xy, yy = dx * dx, dx * dy, dy * dy  # [K, 1, TILE], [K, TILE, TILE], [K, TILE, 1]
            a, b, c, d, e, f, g, h, i, strength = (x[:, None] for x in (a, b, c, d, e, f, g, h, i, strength))
            along = d + e * dx + f * dy
            far = (a * xx + b * xy + c * yy) / (along + (e * dx + f * dy) + g * xx + h * xy + i * yy)
            alpha = strength * torch.exp(-0.5 * far)
            alpha = torch.where((alpha >= CUTOFF) & (along > 0), alpha, 0.0).flatten(1)  # [K, pixels]
            passed = torch.cumprod(1 - alpha, 0)
            before = torch.cat([torch.ones_like(alpha[:1]), passed[:-1]])
            weight = torch.where(before >= 0.01, before * alpha, 0.0)
            light = torch.einsum("kp,kc->pc", weight, tensors["colours"][chosen])
            left = 1 - weight.sum(0)
            colour = torch.clamp(light + left[:, None] * shade, min=1e-12) ** 2.2
            rows.append(torch.cat([colour, 1 - left[:, None]], 1))
        tiles = torch.stack(rows).reshape(across, across, TILE, TILE, 4)
        picture = tiles.permute(0, 2, 1, 3, 4).reshape(size, size, 4)
        loss = ((picture - wanted) ** 2).mean()
        loss.backward()
        return loss.detach().numpy(), {name: x.grad.numpy() for name, x in tensors.items()}

    return step


def strata_step(parts: dict[str, np.ndarray], camera: np.ndarray, aim: np.ndarray, size: int) -> Any:
    names = list(parts)

    @st.jit
    def both(*values: Any) -> Any:
        def loss(*values: Any) -> Any:
            made = st.splat_render(*values, camera=camera, width=size, height=size, max_splat_steps=0)
            return ((made - aim) ** 2).mean()

        return st.value_and_grad(loss, argnums=tuple(range(5)))(*values)

    def step() -> Any:
        value, slopes = both(*parts.values())
        return value.numpy(), {name: g.numpy() for name, g in zip(names, slopes, strict=True)}

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description="Gaussian splats beside PyTorch")
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    parts = scene(given.count)
    camera = st.splat_camera((0.0, 0.0, -3.0), (0.0, 0.0, 0.0), background=(0.1, 0.2, 0.3)).numpy()
    aim = np.random.default_rng(1).uniform(0, 1, (given.size, given.size, 4)).astype(np.float32)
    ours, theirs = (make(parts, camera, aim, given.size) for make in (strata_step, torch_step))
    (loss, slopes), (other, others) = ours(), theirs()
    worst = max(float(np.abs(slopes[n] - others[n]).max() / np.abs(others[n]).max()) for n in slopes)
    print(f"losses {loss:.6f} and {other:.6f}; largest difference of gradients {worst:.1e} of the largest gradient")
    import torch

    threads = torch.get_num_threads()
    times: dict[str, list[float]] = {"strata": [], f"torch on {threads} threads": [], "torch on 1 thread": []}
    for _ in range(given.turns):
        for name, run, count in zip(times, (ours, theirs, theirs), (threads, threads, 1), strict=True):
            torch.set_num_threads(count)
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    best = {name: 1e3 * min(found) for name, found in times.items()}
    print(
        f"{given.count} splats, {given.size}²: " + ", ".join(f"{name} {best[name]:.1f} ms" for name in best), end="; "
    )
    print(f"{min(list(best.values())[1:]) / best['strata']:.1f}×")


if __name__ == "__main__":
    main()
