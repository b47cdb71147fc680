"""Gaussian splats, forward and backward, beside the same mathematics in PyTorch: `python -m benchmarks.splats`.

Both take turns; the ratio is of the shortest times. PyTorch gets the lists of splats by tile, and composites each tile
at once.
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

    def step() -> Any:
        for x in tensors.values():
            x.grad = None
        w, q = tensors["turned"][:, :1], tensors["turned"][:, 1:]
        seen = (tensors["positions"] - eye) @ axes.T
        s = SCALE * torch.exp(tensors["scales"])

        def back(v: Any) -> Any:  # Rᵀv
            return v + 2 * torch.linalg.cross(torch.linalg.cross(v, q) + w * v, q)

        frame = torch.stack([back(axes[i].expand_as(q)) for i in range(3)], -1) / s[:, :, None]  # of the camera's axes
        local = torch.einsum("nij,nj->ni", frame, seen)
        rows = []
        for t, chosen in enumerate(lists_):
            y, x = torch.meshgrid(torch.arange(TILE), torch.arange(TILE), indexing="ij")
            px = (x.reshape(-1) + t % across * TILE + 0.5 - size / 2) / focal
            py = (y.reshape(-1) + t // across * TILE + 0.5 - size / 2) / focal
            ray = torch.stack([px, py, torch.ones_like(px)], 0)
            turned = frame[chosen] @ ray  # [K, 3, pixels]
            place = local[chosen][:, :, None]
            along = (turned * place).sum(1) / (turned * turned).sum(1)
            off = along[:, None] * turned - place
            alpha = tensors["opacities"][chosen][:, None] * torch.exp(-0.5 * (off * off).sum(1))
            alpha = torch.where((alpha >= CUTOFF) & (along > 0), alpha, 0.0)
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
    parser.add_argument("--turns", type=int, default=8)
    given = parser.parse_args()
    parts = scene(given.count)
    camera = st.splat_camera((0.0, 0.0, -3.0), (0.0, 0.0, 0.0), background=(0.1, 0.2, 0.3)).numpy()
    aim = np.random.default_rng(1).uniform(0, 1, (given.size, given.size, 4)).astype(np.float32)
    ours, theirs = (make(parts, camera, aim, given.size) for make in (strata_step, torch_step))
    (loss, slopes), (other, others) = ours(), theirs()
    worst = max(float(np.abs(slopes[n] - others[n]).max() / np.abs(others[n]).max()) for n in slopes)
    print(f"losses {loss:.6f} and {other:.6f}; largest difference of gradients {worst:.1e} of the largest gradient")
    times: dict[str, list[float]] = {"strata": [], "torch": []}
    for _ in range(given.turns):
        for name, run in (("strata", ours), ("torch", theirs)):
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    best = {name: 1e3 * min(found) for name, found in times.items()}
    print(f"{given.count} splats, {given.size}²: {best['strata']:.1f} ms, torch {best['torch']:.1f} ms: "
          f"{best['torch'] / best['strata']:.1f}×")  # fmt: skip


if __name__ == "__main__":
    main()
