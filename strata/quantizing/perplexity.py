"""Perplexity of a language model on texts: the exponential of the mean negative log-likelihood of their tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.errors import OptionError
from strata.kinds import with_article

LEAST = 2  # tokens of a piece: the first is read, the others are foretold
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Perplexity:
    """The perplexity, of how many tokens, in how many seconds."""

    value: float
    tokens: int
    seconds: float

    @property
    def loss(self) -> float:
        """The mean negative log-likelihood of a token."""
        return math.log(self.value)


def pieces(model: Any, texts: Sequence[str], context: int, most: int | None = None) -> list[np.ndarray]:
    """Tokens of texts in pieces of at most `context`, i32[1, S] each; of `most` tokens in all, if there are more."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise OptionError("perplexity: texts are a list of texts", code="O680")
    if not hasattr(model, "tokenizer") or not hasattr(model, "step"):
        raise OptionError(f"perplexity: {with_article(type(model))} generates no text", code="O680")
    length = min(context, model.context)
    if length < LEAST:
        raise OptionError(f"perplexity: the context is at least 2 tokens, got {length}", code="O680")
    found: list[np.ndarray] = []
    left = math.inf if most is None else most
    for text in texts:
        ids = model.tokenizer.encode(text)
        for start in range(0, len(ids), length):
            some = ids[start : start + length]
            if len(some) >= LEAST and left >= LEAST:
                some = some[: int(min(left, length))]
                found.append(np.asarray([some], np.int32))
                left -= len(some)
    if not found:
        raise OptionError("perplexity: the texts have no two tokens in a row", code="O680")
    return found


def losses(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Negative log-likelihoods of tokens 1.. of a piece, from the logits f32[S, V] of tokens 0.."""
    given = logits[:-1].astype(np.float64)
    given -= given.max(-1, keepdims=True)
    chosen = np.take_along_axis(given, ids[1:, None].astype(np.int64), -1)[:, 0]
    result: np.ndarray = np.log(np.exp(given).sum(-1)) - chosen
    return result


def perplexity(
    model: Any, texts: Sequence[str], *, context: int = 512, max_tokens: int | None = None,
    progress: Progress | None = None,
) -> Perplexity:  # fmt: skip
    """The perplexity of a text generator on texts, read in pieces of `context` tokens.

    `progress(done, all)` is called after each piece.
    """
    if context < LEAST:
        raise OptionError(f"perplexity: the context is at least 2 tokens, got {context}", code="O680")
    parts = pieces(model, texts, context, max_tokens)
    total, count, start = 0.0, 0, time.perf_counter()
    for done, (ids, lost) in enumerate(_each(model, parts), 1):
        total, count = total + float(lost.sum()), count + ids.shape[1] - 1
        if progress is not None:
            progress(done, len(parts))
    return Perplexity(math.exp(min(total / count, 700.0)), count, time.perf_counter() - start)


def _each(model: Any, parts: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for ids in parts:
        logits = model.run(input_ids=ids)["logits"]
        yield ids, losses(logits[0], ids[0])
