"""Classify handwritten digits: 8x8 images that come with scikit-learn, a small network, one compiled training step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import strata as st
from strata import nn


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
    predict = st.jit(lambda m, images: m(images).argmax(axis=-1))
    return state["model"], float((predict(state["model"], test_x).numpy() == test_y).mean())


def main() -> None:
    _, accuracy = train()
    print(f"accuracy on images that it has not seen: {accuracy:.1%}")


if __name__ == "__main__":
    main()
