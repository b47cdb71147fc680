"""Beam search: several continuations at once, scored by their probability and length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from strata.errors import OptionError
from strata.models.seq2seq.rules import TokenRules

LOST = np.float32(-1e9)  # the score of what cannot be chosen
MOST_TEXTS: Final = 4096  # that are made of one prompt at once
MOST_PENALTY: Final = 20.0  # of a length: more is no number for long texts

Step = Callable[[np.ndarray, np.ndarray], np.ndarray]  # rows kept, their last tokens: logits f32[rows, V]


@dataclass
class BeamState:
    """The search for one source."""

    running: list[list[int]]
    scores: np.ndarray  # of the running ones
    found: list[tuple[np.float32, list[int]]]  # by falling score
    improves: bool = True
    over: bool = False


def beam_search(
    logits: np.ndarray, step: Step, rules: TokenRules, count: int, most: int, beams: int
) -> list[list[list[int]]]:
    """New tokens of each of `count` sources, their end included where there is one: so many texts, the best first.

    `logits` f32[count · beams, V] are those after the start of each source, once for each beam. `step` takes the rows
    that go on, which may be in another order and twice, and the tokens that they go on with.
    """
    if not abs(rules.length_penalty) <= MOST_PENALTY:
        raise OptionError(
            f"generate: length_penalty {rules.length_penalty} is not within {-MOST_PENALTY:g} to {MOST_PENALTY:g}",
            code="O236",
        )
    first = np.full(beams, LOST, np.float32)
    first[0] = 0  # all beams are equal at the start: one of them counts
    states = [BeamState([[] for _ in range(beams)], first.copy(), [(LOST, [])] * beams) for _ in range(count)]
    keep = max(2, 1 + len(rules.ends)) * beams
    for made in range(1, most + 1):
        rows, tokens = np.empty((count, beams), np.int64), np.empty((count, beams), np.int32)
        for n, state in enumerate(states):
            part = logits[n * beams : (n + 1) * beams]
            rows[n], tokens[n] = _advance(state, part, rules, made, most, keep)
            rows[n] += n * beams
        if made == most or not any(s.improves for s in states) or all(s.over for s in states):
            break
        if rules.early_stopping is True and all(_is_full(s) for s in states):
            break
        logits = step(rows.reshape(-1), tokens.reshape(-1, 1))
    return [[tokens for _, tokens in s.found] for s in states]


def _is_full(state: BeamState) -> bool:
    return all(score > LOST / 2 for score, _ in state.found)


def _advance(
    state: BeamState, logits: np.ndarray, rules: TokenRules, made: int, most: int, keep: int
) -> tuple[np.ndarray, np.ndarray]:
    """One token more: the beams that go on, and their tokens."""
    beams, vocab = logits.shape
    chances = np.stack([
        rules.allowed(_log_softmax(row), rules.start, tokens, most)
        for row, tokens in zip(logits, state.running, strict=True)
    ])  # fmt: skip
    flat = (chances + state.scores[:, None]).reshape(-1)
    best = _largest(flat, min(keep, flat.size))
    scores, from_beam, token = flat[best], best // vocab, best % vocab
    ended = np.isin(token, rules.ends) | (made >= most)
    full = _is_full(state) and rules.early_stopping is True
    final = scores / np.float32(made**rules.length_penalty)
    grown: list[tuple[np.float32, list[int]]] = []
    for i in range(len(best)):
        if ended[i] and i < beams and not full and state.improves:
            grown.append((final[i], [*state.running[from_beam[i]], int(token[i])]))
    merged = state.found + grown
    order = _largest(np.array([score for score, _ in merged], np.float32), beams)
    state.found = [merged[i] for i in order]
    live = scores + np.where(ended, LOST, np.float32(0))
    going = _largest(live, beams)
    state.running = [[*state.running[from_beam[i]], int(token[i])] for i in going]
    state.scores, state.over = live[going], bool(ended.all())
    length = most if rules.early_stopping == "never" and rules.length_penalty > 0 else made
    worst = min(score for score, _ in state.found)
    bounds = [worst if score > LOST / 2 else LOST for score, _ in state.found]
    state.improves &= any(state.scores[0] / np.float32(length**rules.length_penalty) > b for b in bounds)
    return from_beam[going], token[going].astype(np.int32)


def _largest(x: np.ndarray, count: int) -> np.ndarray:
    """The places of the largest, in falling order; the first of equal ones."""
    return np.argsort(-x, kind="stable")[:count]


def _log_softmax(row: np.ndarray) -> np.ndarray:
    shifted = row - row.max()
    return shifted - np.log(np.exp(shifted).sum(dtype=np.float32))


def trimmed(tokens: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Tokens up to an end, which is left out."""
    stop = next((i for i, t in enumerate(tokens) if t in ends), len(tokens))
    return list(tokens[:stop])
