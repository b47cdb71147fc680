"""Contrastive search: of the likeliest tokens, the one that is likely and unlike what came before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import OptionError
from strata.models.generating.continuations import reordered
from strata.models.sampling import Sampler

if TYPE_CHECKING:
    from strata.models.generate import Decoder, DecodeState


def contrastive_tokens(
    model: Decoder, ids: Sequence[int], max_tokens: int, sampler: Sampler, alpha: float, ends: Sequence[int] = ()
) -> Iterator[int]:
    """New tokens, one by one, up to one of `ends`, which is not given.

    Each of the `top_k` likeliest tokens takes a step; chosen is the one whose probability, times 1 - alpha, is furthest
    above alpha times the largest cosine between its hidden state and one of the tokens before.
    """
    if not 0 < alpha <= 1 or sampler.top_k < 2:
        raise OptionError(
            f"generate: penalty_alpha {alpha} is not in (0, 1], or top_k {sampler.top_k} is below 2", code="O236"
        )
    if sampler.temperature > 0:
        raise OptionError("generate: a contrastive search draws no tokens; give a temperature or penalty_alpha",
                          code="O236")  # fmt: skip
    if not ids:
        raise OptionError("generate: the prompt is empty", code="O266")
    count = min(sampler.top_k, model.config.vocab)
    state = model.start(capacity=len(ids) + min(max_tokens, 64))
    rows, hidden = model.step_with_hidden(state, np.asarray([ids], np.int32), every=True)
    logits, seen = rows[0, -1], _unit(hidden[0])
    reordered(model, state, np.zeros(count, np.int64))
    before = list(ids)
    for _ in range(max_tokens):
        tokens, shares = sampler.likeliest(logits, before, count, start=len(ids))
        if state.length >= model.context:  # no candidate has room for a step: the likeliest is the last
            if int(tokens[0]) not in ends:
                yield int(tokens[0])
            return
        rows, hidden = model.step_with_hidden(state, tokens[:, None].astype(np.int32))
        found = _unit(hidden)
        scores = (1 - alpha) * shares - alpha * (found @ seen.T).max(1)
        best = int(scores.argmax())
        token = int(tokens[best])
        if token in ends:
            return
        yield token
        before.append(token)
        logits, seen = rows[best], np.concatenate([seen, found[best : best + 1]])
        _go_on(model, state, best)


def _unit(rows: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float64)
    found: np.ndarray = wide / np.maximum(np.linalg.norm(wide, axis=-1, keepdims=True), 1e-12)
    return found


def _go_on(model: Decoder, state: DecodeState, best: int) -> None:
    """Every row of a state goes on with the token of one of them: the rest of the rows are the same already."""
    if not all(isinstance(cache, np.ndarray) for cache in state.caches):
        reordered(model, state, np.full(len(np.asarray(state.caches[0])), best))
        return
    for slot, cache in zip(model.config.slots, state.caches, strict=True):
        part: Any = cache if slot.is_fixed else cache[:, state.length - 1]
        part[:] = part[best].copy()
