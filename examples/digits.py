"""Classify handwritten digits: 8x8 images that come with scikit-learn, a small network, one compiled training step.

    python examples/digits.py [FOLDER]

FOLDER/digits.png shows test images by what they were read as; mistakes are red.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from strata import nn
from strata.viewer import Picture, picture


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images and labels to train on, and images and labels to test on."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = (digits.data[order] / 16.0).astype("f"), digits.target[order].astype(np.int64)
    return x[:1400], y[:1400], x[1400:], y[1400:]


def batches(x: np.ndarray, y: np.ndarray, size: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches for ever, in a new order in every round."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(y))
        for i in range(0, len(y) - size + 1, size):
            yield x[order[i : i + size]], y[order[i : i + size]]


def loss(model: Any, x: Any, y: Any) -> Any:
    return st.cross_entropy(model(x), y)


def train(steps: int = 400) -> tuple[Any, float]:
    """A trained model and its accuracy on the test images."""
    x, y, test_x, test_y = data()
    nn.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    trainer = nn.Trainer(loss, st.optim.AdamW(st.optim.cosine_schedule(5e-3, steps)), clip_norm=1.0)
    state = trainer.fit(trainer.init(model), batches(x, y, 64), steps)
    return state["model"], float((predict(state["model"], test_x) == test_y).mean())


@st.jit
def answers(model: Any, images: Any) -> Any:
    return model(images).argmax(axis=-1)


def predict(model: Any, images: np.ndarray) -> np.ndarray:
    """The digit of each image."""
    return answers(model, images).numpy()


def sheet(images: np.ndarray, read: np.ndarray, labels: np.ndarray, columns: int = 19, cell: int = 10) -> Picture:
    """A row for each digit, with images that were read as it; those that were mistaken come first, in red."""
    rows = []
    for digit in range(10):
        found = np.flatnonzero(read == digit)
        found = found[np.argsort(labels[found] == digit, kind="stable")][:columns]
        row = np.ones((cell, cell * columns, 3))
        for i, which in enumerate(found):
            paper = np.array([1.0, 1.0, 1.0]) if labels[which] == digit else np.array([1.0, 0.45, 0.4])
            image = np.pad(images[which].reshape(8, 8), (cell - 8) // 2)[..., None]
            row[:, cell * i : cell * (i + 1)] = paper * (1 - image)
        rows.append(row)
    return picture(np.concatenate(rows), scale=3)


def main(out: Path = Path()) -> None:
    model, accuracy = train()
    _, _, images, labels = data()
    made = sheet(images, predict(model, images), labels)
    print(f"{made}\n\naccuracy on images that it has not seen: {accuracy:.1%}")
    made.save(out / "digits.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
