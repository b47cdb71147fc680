"""Train a small language model from scratch, on text that is here: the source code of strata itself.

    python examples/language_model.py [FOLDER]

A transformer of 2 layers reads letters, and then writes something like Python. FOLDER/language_model.svg is the loss.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from strata import nn
from strata.viewer import plot

WIDTH, HEADS, LAYERS, LENGTH = 96, 4, 2, 64
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))  # the others become "?"


class Block(nn.Module):
    def __init__(self) -> None:
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(self.up(self.norm2(x)).gelu())


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        self.letters, self.places = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = [Block() for _ in range(LAYERS)]
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET))

    def __call__(self, ids: Any) -> Any:
        x = self.letters(ids) + self.places(np.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def corpus() -> np.ndarray:
    """The modules of strata as letters."""
    files = sorted(Path(st.__file__).parent.rglob("*.py"))
    text = "\n\n".join(f.read_text("utf-8") for f in files)
    known = {letter: i for i, letter in enumerate(ALPHABET)}
    return np.array([known.get(c, known["?"]) for c in text], np.int64)


def batches(letters: np.ndarray, size: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Stretches of text, and the same one letter further."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(letters) - LENGTH - 1, size)
        rows = letters[starts[:, None] + np.arange(LENGTH + 1)]
        yield rows[:, :-1], rows[:, 1:]


def train(steps: int = 600, size: int = 24) -> tuple[Any, list[float]]:
    """A trained model, and the losses."""
    nn.manual_seed(0)
    trainer = nn.Trainer(
        lambda model, x, y: st.cross_entropy(model(x).reshape((-1, len(ALPHABET))), y.reshape((-1,))),
        st.optim.AdamW(st.optim.cosine_schedule(4e-3, steps), weight_decay=0.01), clip_norm=1.0,
    )  # fmt: skip
    losses: list[Any] = []
    start, data = trainer.init(LanguageModel()), batches(corpus(), size)
    state = trainer.fit(start, data, steps, on_step=lambda _, told: losses.append(told["loss"]))
    return state["model"], [value.item() for value in losses]


def write(model: Any, prompt: str, count: int = 240, temperature: float = 0.5, seed: int = 0) -> str:
    """Text that goes on from a prompt, a letter at a time."""
    rng, text = np.random.default_rng(seed), prompt
    run = st.jit(lambda model, ids: model(ids))
    for _ in range(count):
        seen = [ALPHABET.index(c) for c in text[-LENGTH:]]
        logits = run(model, np.array([seen + [0] * (LENGTH - len(seen))])).numpy()[0, len(seen) - 1] / temperature
        odds = np.exp(logits - logits.max())
        text += ALPHABET[rng.choice(len(ALPHABET), p=odds / odds.sum())]
    return text


def main(out: Path = Path()) -> None:
    model, losses = train()
    made = plot({"loss": losses}, title="a language model of 2 layers", x="step", y="nats a letter")
    print(made, f"\n\nloss {losses[0]:.2f} -> {np.mean(losses[-20:]):.2f}; it writes:\n\n{write(model, 'def ')}")
    made.save(out / "language_model.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path())
