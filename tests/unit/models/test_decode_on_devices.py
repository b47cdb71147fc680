"""Decode of one sequence on a device that chooses tokens itself: the same tokens as by the host, and the same state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import strata as st
from strata.errors import RunError
from strata.models import Sampler
from strata.models.generate import Decoder
from tests.unit.tensor.test_residence import FOUND, tiny_llama

PROMPT = [3, 1, 4, 1, 5]
WAYS = {
    "likeliest": Sampler(),
    "drawn": Sampler(temperature=1.3, seed=5),
    "filtered": Sampler(temperature=1.1, top_k=12, top_p=0.9, min_p=0.01, seed=6),
}


@pytest.fixture(params=["xla", *FOUND])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    tiny_llama(tmp_path)
    return st.load(tmp_path, device=request.param)


def by_host(model: Decoder, sampler: Sampler, count: int) -> list[int]:
    """What the host chooses from each step's logits."""
    state, numbers, before = model.start(), sampler.stream(), list(PROMPT)
    logits = model.step(state, np.array([PROMPT], np.int32))[0]
    for _ in range(count):
        before.append(sampler.choose(logits, before, numbers))
        logits = model.step(state, np.array([before[-1:]], np.int32))[0]
    return before[len(PROMPT) :]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_that_the_host_chooses(model: Decoder, way: str) -> None:
    wanted = by_host(model, WAYS[way], 12)
    assert list(model.tokens(PROMPT, 12, WAYS[way])) == wanted
    end = wanted[7]
    assert list(model.tokens(PROMPT, 12, WAYS[way], (end,))) == wanted[: wanted.index(end)]


def test_a_state_knows_no_more_than_was_given(model: Decoder) -> None:
    wanted = by_host(model, Sampler(), 12)
    state = model.start()
    end = wanted[5]
    given = list(model.tokens(PROMPT, 12, Sampler(), (end,), state))
    assert state.length == len(PROMPT + given)
    known = PROMPT + wanted[: len(given) + 1]
    rest = list(model.tokens(known, len(PROMPT) + 12 - len(known), Sampler(), (), state))
    assert known + rest == PROMPT + wanted


def test_the_context_ends_the_text(model: Decoder) -> None:
    assert len(list(model.tokens(PROMPT, 500, Sampler()))) == model.context - len(PROMPT) + 1


def test_logits_without_a_largest_one(model: Decoder) -> None:
    weights = {name: np.full(x.shape, np.nan, np.float32) for name, x in model.graph.params.items() if "norm" in name}
    assert weights
    for sizes in ((), (("B", 1), ("S", 1))):
        model.graph_for(every=False, sizes=sizes).set_params(weights)
    with pytest.raises(RunError, match="NaN or an infinity"):
        list(model.tokens(PROMPT, 4, Sampler()))
