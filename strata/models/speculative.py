"""Speculative decoding: a small model drafts tokens, and the large one verifies all of them in one step.

Drafted tokens are accepted with such probabilities that the text has the large model's distribution. Where all are
accepted, the same step gives one token more. Tokens are verified four at a time, three where weights are quantised: so
few take the same kernels as single ones, so that greedy tokens are those of the large model alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from strata.errors import OptionError
from strata.models.sampling import Sampler

if TYPE_CHECKING:
    from strata.models.generate import Decoder, DecodeState

TOGETHER: Final = 4  # tokens that are judged in one step
TOGETHER_QUANTIZED: Final = 3
READING: Final = 64  # tokens of a prompt that are read in one step: logits of all of them are made


@dataclass
class Tally:
    """How well a draft does."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0  # of the large model, without the prompt

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0


def accept(
    tokens: Sequence[int], drafted: np.ndarray, wanted: np.ndarray, numbers: np.random.Generator
) -> tuple[int, int | None]:
    """How many drafted tokens are accepted, and the token that comes behind them.

    `drafted` are the distributions that the tokens were drawn from, [n, V]; `wanted` are those to follow, [n, V], or
    [n + 1, V] with one for a token behind the last, without which that token is None if all are accepted. The tokens
    together are distributed as `wanted` says, whatever was drafted.
    """
    for i, token in enumerate(tokens):
        p, q = float(drafted[i, token]), float(wanted[i, token])
        if numbers.random() * p < q:  # with probability min(1, q / p)
            continue
        rest = np.maximum(wanted[i] - drafted[i], 0.0)
        return i, _drawn(rest if rest.sum() > 0 else wanted[i], numbers)
    return len(tokens), _drawn(wanted[len(tokens)], numbers) if len(wanted) > len(tokens) else None


def _drawn(weights: np.ndarray, numbers: np.random.Generator) -> int:
    running = np.cumsum(weights)
    place = int(np.searchsorted(running, numbers.random() * running[-1], side="right"))
    return min(place, len(weights) - 1)


class Drafting:
    """One generation of a target with a draft. `before` are all tokens so far; the last one is in neither cache."""

    def __init__(self, target: Decoder, draft: Decoder, sampler: Sampler, count: int | None) -> None:
        self.together = TOGETHER_QUANTIZED if target.is_quantized else TOGETHER
        count = self.together - 1 if count is None else count
        if draft.config.vocab != target.config.vocab:
            raise OptionError(
                f"generate: the draft knows {draft.config.vocab} tokens, the model {target.config.vocab}", code="O610"
            )
        if target.has_state or draft.has_state:
            raise OptionError(
                "generate: a model with a recurrent state takes no drafts: it cannot take tokens back", code="O610"
            )
        if not sampler.is_fixed:
            raise OptionError("generate: xtc and mirostat take no drafts", code="O610")
        if count < 1:
            raise OptionError(f"generate: {count} drafted tokens are none", code="O610")
        self.target, self.draft, self.sampler, self.count = target, draft, sampler, count
        self.numbers = sampler.stream()
        self.target_state, self.draft_state = target.start(), draft.start()
        self.before: list[int] = []
        self.start = 0  # tokens of the prompt
        self.tally = Tally()

    def read(self, ids: Sequence[int]) -> int:
        """The prompt; gives the first token."""
        self.before, self.start = list(ids), len(ids)
        logits = np.empty(0)
        while self.target_state.length < len(ids):
            start = self.target_state.length
            end = len(ids) if len(ids) - start <= READING + TOGETHER else start + READING
            logits = self._fed(self.target, self.target_state, ids[start:end], every=True)[-1]
        token = self.sampler.choose(logits, self.before, self.numbers, start=self.start)
        self.before.append(token)
        return token

    def step(self, most: int) -> list[int]:
        """The next tokens, one to `count` + 1 of them, and no more than `most`."""
        room = min(self.target.context - self.target_state.length - 1, self.draft.context - len(self.before) + 1)
        tokens, drafted = self._draft(min(self.count, most - 1, room))
        found: list[int] = []
        start = self.target_state.length
        pending = [self.before[-1], *tokens]
        for at in range(0, len(pending), self.together):
            group = pending[at : at + self.together]
            logits = self._fed(self.target, self.target_state, group, every=True)
            self.tally.steps += 1
            judged = tokens[at : at + len(group)]
            kept, last = self._judge(judged, drafted[at : at + len(group)], logits, [*self.before, *found])
            found += judged[:kept]
            if last is not None:
                found.append(last)
                break
        self.target_state.length = start + len(found)  # what was rejected is written over
        self.tally.drafted += len(tokens)
        self.tally.accepted += len(found) - 1
        self.before += found
        self.draft_state.length = min(self.draft_state.length, len(self.before) - 1)
        return found

    def _draft(self, count: int) -> tuple[list[int], list[np.ndarray]]:
        """Tokens, and the distributions they were drawn from (none where the likeliest are taken)."""
        tokens: list[int] = []
        drafted: list[np.ndarray] = []
        for _ in range(count):
            so_far = [*self.before, *tokens]
            (logits,) = self._fed(self.draft, self.draft_state, so_far[self.draft_state.length :])
            if self.sampler.temperature == 0:
                tokens.append(self.sampler.choose(logits, so_far, self.numbers, start=self.start))
                continue
            drafted.append(self.sampler.probabilities(logits, so_far, start=self.start))
            tokens.append(_drawn(drafted[-1], self.numbers))
        return tokens, drafted

    def _judge(
        self, tokens: list[int], drafted: list[np.ndarray], logits: np.ndarray, before: list[int]
    ) -> tuple[int, int | None]:
        """How many of these tokens stay, and what follows them; None where the next group decides that."""
        if self.sampler.temperature == 0:
            for i, row in enumerate(logits):
                best = self.sampler.choose(row, [*before, *tokens[:i]], self.numbers, start=self.start)
                if i == len(tokens) or best != tokens[i]:
                    return i, best
            return len(tokens), None
        wanted = [
            self.sampler.probabilities(row, [*before, *tokens[:i]], start=self.start) for i, row in enumerate(logits)
        ]
        return accept(tokens, np.asarray(drafted), np.asarray(wanted), self.numbers)

    @staticmethod
    def _fed(model: Decoder, state: DecodeState, ids: Sequence[int], *, every: bool = False) -> np.ndarray:
        logits = model.step(state, np.asarray([ids], np.int32), every=every)
        return logits[0] if every else logits


def drafted_tokens(
    target: Decoder, draft: Decoder, ids: Sequence[int], max_tokens: int, sampler: Sampler, *, count: int | None = None,
    ends: Sequence[int] = (), tally: Tally | None = None,
) -> Iterator[int]:  # fmt: skip
    """New tokens of `target`, up to one of `ends`; `draft` makes them come faster. `tally` is kept up to date."""
    if not ids:
        raise OptionError("generate: the prompt is empty", code="O266")
    work = Drafting(target, draft, sampler, count)
    if tally is not None:
        work.tally = tally
    found = [work.read(ids)] if max_tokens > 0 else []
    given = 0
    while True:
        for token in found:
            if token in ends:
                return
            yield token
            given += 1
        if given >= max_tokens or work.target_state.length >= target.context:
            return
        found = work.step(max_tokens - given)


class NgramDraft:
    """Speculative decoding without a draft model: what followed the last tokens when they were there before.

    Answers repeat what they are about: names, code, quotations. `draft` costs a look-up, so that a wrong one is cheap.
    """

    LENGTHS: Final = (4, 3, 2)  # of the endings that are looked up, longest first

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens of the sequence."""
        for token in tokens:
            # entered once something follows them, so that an ending does not find itself
            for n in self.LENGTHS:
                if len(self._tokens) >= n:
                    self._places[tuple(self._tokens[-n:])] = len(self._tokens)
            self._tokens.append(token)

    def draft(self, count: int) -> list[int]:
        """Up to so many tokens that may come next."""
        for n in self.LENGTHS:
            at = self._places.get(tuple(self._tokens[-n:])) if len(self._tokens) >= n else None
            if at is not None:
                return self._tokens[at : at + count]
        return []
