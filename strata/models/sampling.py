"""Sampling the next token from logits: greedy, temperature, top-k, top-p, min-p, repetition penalty, seeded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strata.core import here
from strata.errors import DTypeError, OptionError, RunError, ShapeError


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How tokens are chosen. A temperature of 0 takes the most likely one.

    Kept are the `top_k` largest, of these the shortest prefix by falling probability that reaches `top_p`, of these all
    with at least `min_p` times the largest probability. `repetition_penalty` divides the positive logits of tokens that
    occurred, and multiplies the negative ones.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, message: str) -> None:
            if not ok:
                raise OptionError(f"generate: {message}", code="O236")

        check(self.temperature >= 0, f"temperature {self.temperature} is negative")
        check(self.top_k >= 0, f"top_k {self.top_k} is negative")
        check(0 < self.top_p <= 1, f"top_p {self.top_p} is not in (0, 1]")
        check(0 <= self.min_p <= 1, f"min_p {self.min_p} is not in 0..1")
        check(self.repetition_penalty > 0, f"repetition_penalty {self.repetition_penalty} is not positive")

    def stream(self) -> np.random.Generator:
        """The random numbers of one generation: the same for the same seed."""
        return np.random.Generator(np.random.Philox(self.seed))

    def choose(self, logits: np.ndarray, before: Sequence[int], numbers: np.random.Generator) -> int:
        """The next token after `before`, from logits f32[V]."""
        logits, best = self._penalised(logits, before)
        if self.temperature == 0:
            return best
        ids, weights = self._kept(logits, float(logits[best]))
        running = np.cumsum(weights)
        place = int(np.searchsorted(running, numbers.random() * running[-1], side="right"))
        return int(ids[min(place, len(ids) - 1)])

    def probabilities(self, logits: np.ndarray, before: Sequence[int]) -> np.ndarray:
        """What `choose` draws from, f64[V]; all of it on one token at a temperature of 0."""
        logits, best = self._penalised(logits, before)
        found = np.zeros(len(logits))
        if self.temperature == 0:
            found[best] = 1.0
            return found
        ids, weights = self._kept(logits, float(logits[best]))
        found[ids] = weights / weights.sum()
        return found

    def _penalised(self, logits: np.ndarray, before: Sequence[int]) -> tuple[np.ndarray, int]:
        """Logits after the penalty, and the token with the largest."""
        if logits.ndim != 1 or not logits.size:
            raise ShapeError(f"logits are one row of numbers, got {logits.shape}", code="S600", place=here())
        if logits.dtype.kind not in "fiuV":  # V: bf16, say
            raise DTypeError(f"logits are real numbers, got {logits.dtype}", code="D104", place=here())
        if self.repetition_penalty != 1.0 and before:
            seen = np.unique(np.asarray(before))
            logits = logits.copy()
            old = logits[seen]
            logits[seen] = np.where(old > 0, old / self.repetition_penalty, old * self.repetition_penalty)
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            raise RunError(
                f"generate: the logits have a NaN or an infinity, {logits[best]} at token {best}", code="X220"
            )
        return logits, best

    def _kept(self, logits: np.ndarray, high: float) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that may be chosen, and their weights."""
        ids = np.arange(len(logits))
        if 0 < self.top_k < len(logits):
            ids = np.sort(np.argpartition(logits, -self.top_k)[-self.top_k :])
        weights = np.exp((logits[ids].astype(np.float64) - high) / max(self.temperature, 1e-6))
        if self.min_p > 0:
            ids, weights = ids[weights >= self.min_p], weights[weights >= self.min_p]
        if self.top_p < 1:
            order = np.argsort(-weights, kind="stable")
            running = np.cumsum(weights[order])
            last = int(np.searchsorted(running, self.top_p * running[-1])) + 1
            order = np.sort(order[:last])
            ids, weights = ids[order], weights[order]
        return ids, weights
