"""Decode of one sequence on a device: tokens are sampled there, and fed to the next step without a trip to the host.

The next step is launched before the previous token is read, so the host's work overlaps with the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.arguments import untouched
from strata.backends import backend_for
from strata.errors import RunError
from strata.models.cached import ROW
from strata.models.generating.choosing import DRAW, Chooser

if TYPE_CHECKING:
    from strata.models.generate import Decoder, DecodeState
    from strata.models.sampling import Sampler


@untouched
def tokens_ahead(
    model: Decoder, chooser: Chooser, state: DecodeState, ids: Sequence[int], most: int, sampler: Sampler,
    ends: Sequence[int], *, ahead: bool,
) -> Iterator[int]:  # fmt: skip
    """As `Decoder.tokens` gives them. Without `ahead`, a step waits until its token is known not to be an end, of which
    layers with a state must not know."""
    numbers = sampler.stream()
    steps = _Steps(model, chooser, state, sampler)
    known = len(ids)  # tokens of the prompt, and those that were given
    waiting = steps.ask(np.asarray([ids[state.length :]], np.int32), numbers)
    try:
        for count in range(1, most + 1):
            goes_on = count < most and state.length < model.context
            following = steps.ask(None, numbers) if ahead and goes_on else None
            token = waiting()
            if token < 0:
                raise RunError("generate: the logits have a NaN or an infinity", code="X220")
            if token in ends:
                return
            known += 1
            yield token
            if not goes_on:
                return
            waiting = following or steps.ask(None, numbers)
    finally:
        state.length = min(state.length, known)


class _Steps:
    """Steps of one state, each of which chooses a token."""

    def __init__(self, model: Decoder, chooser: Chooser, state: DecodeState, sampler: Sampler) -> None:
        home: Any = backend_for(model.device).home
        self._model, self._state, self._sampler, self._home = model, state, sampler, home
        filters = sampler.top_k > 0 or sampler.top_p < 1.0
        self._chooser = chooser.graph(draws=sampler.temperature > 0, filters=filters and sampler.temperature > 0)
        self._logits = home.empty(np.dtype(np.float32), (1, model.config.vocab), "decode")
        self._token = home.zeros(np.dtype(np.int32), (1, 1, 1), "decode")
        self._rows = home.upload(np.zeros((1, len(ROW)), np.int64), "decode")

    def ask(self, ids: np.ndarray | None, numbers: np.random.Generator) -> Callable[[], int]:
        """Ask for a step with these tokens, or with the one that was chosen last; the call waits for what it chooses,
        -1 where the largest logit is none."""
        self._model.step_into(self._state, self._token.front((1, 1)) if ids is None else ids, self._logits)
        feeds = {"logits": self._logits, "rows": self._rows, "tokens": self._token}
        if self._sampler.temperature > 0:
            number = numbers.random()
            feeds["draws"] = np.array([[number if n == "number" else getattr(self._sampler, n) for n in DRAW]])
        chosen = self._home.empty(np.dtype(np.int32), (1,), "decode")
        self._chooser.run_into(feeds, [chosen, self._token])
        found: Callable[[], np.ndarray] = self._home.later(chosen)
        return lambda: int(found()[0])
