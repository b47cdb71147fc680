"""Several continuations of one prompt, computed together: samples, and beam search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from strata.errors import OptionError
from strata.models.generating.filters import SampleStream
from strata.models.sampling import Sampler
from strata.models.seq2seq.beams import MOST_TEXTS, beam_search, trimmed
from strata.models.seq2seq.rules import TokenRules

if TYPE_CHECKING:
    from strata.models.generate import Decoder, DecodeState


def reordered(model: Decoder, state: DecodeState, rows: np.ndarray) -> None:
    """Go on with these sequences of a state, in this order; some may be there twice."""
    for i, cache in enumerate(state.caches):
        state.caches[i] = model.kept(np.ascontiguousarray(np.asarray(cache)[rows]))
    state.feeds = {}


def samples(
    model: Decoder, ids: Sequence[int], count: int, max_tokens: int, sampler: Sampler, ends: Sequence[int] = ()
) -> list[list[int]]:
    """New tokens of so many samples of one prompt, which is read once. The first is what `tokens` gives."""
    if count > MOST_TEXTS:
        raise OptionError(f"generate: n={count}, {MOST_TEXTS} is the most", code="O236")
    state = model.start(capacity=len(ids) + min(max_tokens, 64))
    first = model.step(state, np.asarray([ids], np.int32))[0]
    reordered(model, state, np.zeros(count, np.int64))
    streams = [sampler.stream(), *(_stream(sampler, i) for i in range(1, count))]
    found: list[list[int]] = [[] for _ in range(count)]
    live, logits = list(range(count)), [first] * count
    for made in range(max_tokens):
        going = []
        for place, i in enumerate(live):
            token = sampler.choose(logits[place], [*ids, *found[i]], streams[i], start=len(ids))
            if token not in ends:
                found[i].append(token)
                going.append(place)
        if not going or made + 1 == max_tokens or state.length >= model.context:
            break
        if len(going) < len(live):
            reordered(model, state, np.array(going))
        live = [live[place] for place in going]
        logits = list(model.step(state, np.array([[found[i][-1]] for i in live], np.int32)))
    return found


def _stream(sampler: Sampler, number: int) -> SampleStream:
    seeds = None if sampler.seed is None else np.random.SeedSequence([sampler.seed, number])
    return SampleStream(np.random.Philox(seeds))


def best_beams(
    model: Decoder, ids: Sequence[int], beams: int, max_tokens: int, *, ends: Sequence[int] = (),
    length_penalty: float = 1.0, early_stopping: bool | str = False, sampler: Sampler | None = None,
) -> list[list[int]]:  # fmt: skip
    """New tokens of the likeliest texts that a beam search finds, without their end: so many, the best first."""
    most = min(max_tokens, model.context - len(ids))
    if beams < 1 or most < 1:
        raise OptionError(f"generate: {beams} beams of {most} tokens are none", code="O236")
    if beams > MOST_TEXTS:
        raise OptionError(f"generate: beams={beams}, {MOST_TEXTS} is the most", code="O236")
    state = model.start(capacity=len(ids) + most)
    first = model.step(state, np.asarray([ids], np.int32))
    reordered(model, state, np.zeros(beams, np.int64))
    rules = TokenRules(start=tuple(ids), ends=tuple(ends), length_penalty=length_penalty, early_stopping=early_stopping)
    rules = rules.with_penalties((sampler or Sampler()).penalised)

    def step(rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if (rows != np.arange(beams)).any():
            reordered(model, state, rows)
        return model.step(state, tokens)

    (texts,) = beam_search(np.repeat(first, beams, 0), step, rules, 1, most, beams)
    return [trimmed(tokens, ends) for tokens in texts]
