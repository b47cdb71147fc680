"""Filters of candidate tokens and penalties of logits: typical sampling, cutoffs, XTC, DRY, mirostat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class SampleStream(np.random.Generator):
    """The random numbers of one generation, and what its sampler remembers between tokens."""

    surprise: float | None = None  # the most that mirostat allows, in bits


def heaviest(weights: np.ndarray, mass: float) -> np.ndarray:
    """Where the fewest heaviest tokens are that have this part of all weights, in order; the first of equal ones.

    Weights are sorted and their tokens are not, which takes a tenth of the time.
    """
    falling = -np.sort(-weights)
    running = np.cumsum(falling)
    count = min(int(np.searchsorted(running, mass * running[-1])) + 1, len(falling))
    edge = falling[count - 1]
    keep = weights > edge
    keep[np.flatnonzero(weights == edge)[: count - int(keep.sum())]] = True
    return np.flatnonzero(keep)


def typical(weights: np.ndarray, mass: float) -> np.ndarray:
    """Which tokens are about as surprising as is to be expected: the most typical that have this mass together."""
    shares = weights / weights.sum()
    surprise = -np.log(np.maximum(shares, np.finfo(np.float64).tiny))
    distance = np.abs(surprise - (shares * surprise).sum())
    order = np.argsort(distance, kind="stable")
    last = min(int((np.cumsum(shares[order]) < mass).sum()), len(order) - 1)
    found: np.ndarray = distance <= distance[order[last]]
    return found


def likely(weights: np.ndarray, cutoff: float, *, by_entropy: bool = False) -> np.ndarray:
    """Which tokens have a share that is not below a cutoff, and the likeliest.

    By entropy, the cutoff is less where the shares are spread widely: its root times exp(-entropy), if that is less.
    """
    shares = weights / weights.sum()
    if by_entropy:
        entropy = -(shares * np.log(np.maximum(shares, np.finfo(np.float64).tiny))).sum()
        cutoff = min(cutoff, float(np.sqrt(cutoff) * np.exp(-entropy)))
    found: np.ndarray = (shares >= cutoff) | (shares == shares.max())
    return found


def without_top(weights: np.ndarray, threshold: float) -> np.ndarray:
    """Which tokens XTC leaves: of those with at least this share, the least likely one, and all with less."""
    shares = weights / weights.sum()
    high = np.flatnonzero(shares >= threshold)
    keep = np.ones(len(weights), bool)
    if len(high) > 1:
        keep[high] = False
        keep[high[np.argmin(shares[high])]] = True
    return keep


def repetition_lengths(tokens: Sequence[int], breakers: Sequence[int] = ()) -> dict[int, int]:
    """Tokens that would continue what the sequence ends with as it was continued before, and how long that is.

    What is repeated does not reach over one of the `breakers`. Time is linear in the length (the Z function).
    """
    behind = list(reversed(tokens))
    ends = set(breakers)
    limit = next((i for i, t in enumerate(behind) if t in ends), len(behind))
    same, left, right = [0] * len(behind), 0, 0
    found: dict[int, int] = {}
    for i in range(1, len(behind)):
        if i < right:
            same[i] = min(right - i, same[i - left])
        while i + same[i] < len(behind) and behind[same[i]] == behind[i + same[i]]:
            same[i] += 1
        if i + same[i] > right:
            left, right = i, i + same[i]
        length, token = min(same[i], limit), behind[i - 1]
        if length > found.get(token, 0) and token not in ends:
            found[token] = length
    return found


def dry_penalties(
    tokens: Sequence[int], multiplier: float, base: float, allowed: int, breakers: Sequence[int]
) -> dict[int, float]:
    """What DRY subtracts from logits: more, the longer the repetition that a token would continue."""
    lengths = repetition_lengths(tokens, breakers)
    highest = float(np.finfo(np.float32).max)  # logits stay numbers
    most = np.log(highest) / max(np.log(base), 1e-9)
    return {t: min(multiplier * base ** min(n - allowed, most), highest) for t, n in lengths.items() if n >= allowed}


def ngram_ends(tokens: Sequence[int], size: int) -> list[int]:
    """The tokens that would end a run of `size` that was there before."""
    if len(tokens) + 1 < size:
        return []
    last = list(tokens[len(tokens) - size + 1 :])
    return [tokens[i + size - 1] for i in range(len(tokens) - size + 1) if list(tokens[i : i + size - 1]) == last]


def phrase_ends(tokens: Sequence[int], phrases: Sequence[Sequence[int]]) -> list[int]:
    """The tokens that would end one of these phrases, of which the sequence ends with all the others."""
    return [
        p[-1] for p in phrases if len(p) <= len(tokens) + 1 and list(tokens[len(tokens) + 1 - len(p) :]) == [*p[:-1]]
    ]


def surprising(weights: np.ndarray, most: float) -> np.ndarray:
    """Which tokens mirostat leaves: those of at most so many bits, and the likeliest."""
    bits = -np.log2(np.maximum(weights / weights.sum(), np.finfo(np.float64).tiny))
    keep: np.ndarray = bits <= most
    keep[int(weights.argmax())] = True
    return keep
