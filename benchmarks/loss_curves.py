"""Loss curves of the three trainings, ours over torch's: the same data, start and update rule.

    python -m benchmarks.loss_curves [--steps 150]        writes docs/training.md and docs/training.svg

Labels follow a rule that a model can learn, so that the curves fall."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.training import LENGTH, WORDS, equal_case, our_step, their_step
from strata.config import using

ROOT = Path(__file__).parents[1]
TITLES = {
    "mlp": "MLP 784-512-512-10, batch 128",
    "conv": "convolutions on 28×28, batch 64",
    "transformer": "4-layer decoder of width 256, 8×128 tokens",
}
Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Curves:
    """Losses step by step."""

    name: str
    ours: list[float]
    theirs: list[float]

    @property
    def gap(self) -> float:
        return max(abs(a - b) for a, b in zip(self.ours, self.theirs, strict=True))


def learnable(name: str, rng: np.random.Generator) -> Callable[[], Batch]:
    """Batches whose labels follow from their inputs."""
    if name == "transformer":
        follower = rng.permutation(WORDS)

        def sentences() -> Batch:
            words = [rng.integers(0, WORDS, 8)]
            for _ in range(LENGTH):
                stray = rng.integers(0, WORDS, 8)
                words.append(np.where(rng.random(8) < 0.1, stray, follower[words[-1]]))
            ids = np.stack(words, 1)
            return np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:]).reshape(-1)

        return sentences
    shape = (128, 784) if name == "mlp" else (64, 1, 28, 28)
    strength = 0.15 if name == "mlp" else 0.6
    centres = rng.standard_normal((10, *shape[1:])).astype("f")

    def images() -> Batch:
        labels = rng.integers(0, 10, shape[0])
        return np.float32(strength) * centres[labels] + rng.standard_normal(shape).astype("f"), labels

    return images


def train(name: str, steps: int) -> Curves:
    case = equal_case(name)
    batch = learnable(name, np.random.default_rng(0))
    state, ours = our_step(case)
    theirs = their_step(case, compiled=False)
    curves = Curves(name, [], [])
    with using(num_threads=2):
        for _ in range(steps):
            x, y = batch()
            state, loss = ours(state, x, y)
            curves.ours.append(loss.item())
            curves.theirs.append(theirs(x, y))
    return curves


def picture(found: Sequence[Curves]) -> str:
    """A panel for each training: torch's losses as a wide pale line, ours as a thin dark one over it."""
    width, height, edge = 260, 170, 34
    box = f'viewBox="0 0 {len(found) * width} {height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="9">']
    for i, curves in enumerate(found):
        left, top = max(*curves.ours, *curves.theirs), height - edge

        def points(values: list[float], at: int = i * width, most: float = left, low: int = top) -> str:
            across = (width - 2 * edge) / max(1, len(values) - 1)
            return " ".join(
                f"{at + edge + n * across:.1f},{low - (low - 22) * v / most:.1f}" for n, v in enumerate(values)
            )

        x = i * width + edge
        parts += [
            f'<text x="{x}" y="12">{TITLES[curves.name]}</text>',
            f'<polyline points="{points(curves.theirs)}" fill="none" stroke="#f2b38a" stroke-width="4"/>',
            f'<polyline points="{points(curves.ours)}" fill="none" stroke="#14324f" stroke-width="1"/>',
            f'<path d="M{x},22 V{top} H{(i + 1) * width - edge}" fill="none" stroke="#888"/>',
            f'<text x="{x - 4}" y="28" text-anchor="end">{left:.1f}</text>',
            f'<text x="{x - 4}" y="{top}" text-anchor="end">0</text>',
            f'<text x="{(i + 1) * width - edge}" y="{top + 12}" text-anchor="end">step {len(curves.ours)}</text>',
        ]
    key = height - 8
    parts += [
        f'<path d="M{edge},{key - 3} h20" stroke="#f2b38a" stroke-width="4"/>',
        f'<text x="{edge + 26}" y="{key}">torch</text>',
        f'<path d="M{edge + 70},{key - 3} h20" stroke="#14324f"/><text x="{edge + 96}" y="{key}">strata</text>',
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def page(found: Sequence[Curves]) -> str:
    rows = [
        f"| {TITLES[c.name]} | {c.ours[0]:.4f} | {c.ours[-1]:.4f} | {c.theirs[-1]:.4f} | {c.gap:.1e} |" for c in found
    ]
    return "\n".join(
        [
            "# Training beside torch",
            "",
            "The same data, the same start, AdamW in f32 on two threads; the dark line is strata's loss, the pale one",
            "under it torch's.",
            "The gaps are rounding: sums are added in another order, and later steps amplify the difference.",
            "",
            "![loss curves](training.svg)",
            "",
            f"| {len(found[0].ours)} steps of | first loss | last loss | torch's | largest gap |",
            "|---|---:|---:|---:|---:|",
            *rows,
            "",
            "Written by `python -m benchmarks.loss_curves`; times are in [benchmarks](benchmarks.md).",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    found = [train(name, steps) for name in TITLES]
    for curves in found:
        print(f"{curves.name:12} {curves.ours[0]:.4f} -> {curves.ours[-1]:.4f}, largest gap {curves.gap:.1e}")
    (ROOT / "docs/training.svg").write_text(picture(found), "utf-8")
    (ROOT / "docs/training.md").write_text(page(found), "utf-8")


if __name__ == "__main__":
    main()
