"""Speculative decoding: the large model's tokens where they are certain, its distribution where they are drawn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.errors import OptionError
from strata.models import Decoder, Sampler, load
from strata.models.speculative import Tally, accept, drafted_tokens
from tests.unit.models.random_models import random_model

stats = pytest.importorskip("scipy.stats", reason="needs scipy")
pytestmark = pytest.mark.filterwarnings("ignore")


def plausible(counts: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether counts may come from a distribution, by a chi-square test at 1e-4."""
    assert counts[wanted == 0].sum() == 0
    counts, wanted = counts[wanted > 0], wanted[wanted > 0]
    return bool(stats.chisquare(counts, wanted / wanted.sum() * counts.sum()).pvalue > 1e-4)


def test_equal_distributions_accept_all_and_one_more(rng: np.random.Generator) -> None:
    p = rng.dirichlet(np.ones(8), 6)
    for _ in range(100):
        tokens = [int(rng.choice(8, p=row)) for row in p[:5]]
        assert accept(tokens, p[:5], p[:5], rng) == (5, None)
        kept, last = accept(tokens, p[:5], p, rng)
        assert kept == 5
        assert last is not None


@pytest.mark.parametrize("sharp", [0.2, 1.0, 5.0])
def test_what_is_said_follows_the_wanted_distribution(sharp: float, rng: np.random.Generator) -> None:
    """Also where the draft never says what is wanted, or says what is not."""
    p, q = rng.dirichlet(np.full(6, sharp), 3), rng.dirichlet(np.full(6, sharp), 4)
    p[0, 2], q[0, 1], p[1, :3], q[1, 3:] = 0, 0, 0, 0
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    said: list[Counter[int]] = [Counter() for _ in range(4)]
    accepted = 0
    for _ in range(8000):
        tokens = [int(rng.choice(6, p=row)) for row in p]
        kept, last = accept(tokens, p, q, rng)
        assert last is not None
        for i, token in enumerate([*tokens[:kept], last]):
            said[i][token] += 1
        accepted += kept > 0
    assert abs(accepted / 8000 - np.minimum(p[0], q[0]).sum()) < 0.03
    for i, counts in enumerate(said[:1]):  # of later places, only those behind accepted ones are said
        assert plausible(np.array([counts[t] for t in range(6)]), q[i])
    for i, counts in enumerate(said[1:], 1):
        if sum(counts.values()) > 500:
            assert plausible(np.array([counts[t] for t in range(6)]), q[i])


def test_disjoint_distributions_reject_and_are_still_right(rng: np.random.Generator) -> None:
    p, q = np.array([[1.0, 0, 0]]), np.array([[0, 0.25, 0.75], [1.0, 0, 0]])
    found = [accept([0], p, q, rng) for _ in range(4000)]
    assert {kept for kept, _ in found} == {0}
    assert plausible(np.array([[last for _, last in found].count(t) for t in range(3)]), q[0])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """pair(family): a model of two layers, and a smaller one that often says the same."""

    def pair(family: str = "llama") -> tuple[Decoder, Decoder]:
        folder = tmp_path_factory.mktemp(family)
        random_model(folder / "large", family)
        random_model(folder / "small", family, **({} if family == "gpt2" else {"num_hidden_layers": 1}))
        large, small = load(folder / "large", context=96), load(folder / "small", context=96)
        return large, small

    return pair


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
def test_greedy_tokens_are_those_of_the_model_alone(models: Any, family: str, rng: np.random.Generator) -> None:
    large, small = models(family)
    for length, count in ((1, 1), (5, 3), (70, 4), (17, 9), (66, 2)):
        ids = rng.integers(0, 128, length).tolist()
        alone = list(large.tokens(ids, 25, Sampler()))
        for draft in (small, large):
            assert list(drafted_tokens(large, draft, ids, 25, Sampler(), count=count)) == alone
        ends = alone[7:8]
        wanted = list(large.tokens(ids, 25, Sampler(), ends))
        assert list(drafted_tokens(large, small, ids, 25, Sampler(), count=count, ends=ends)) == wanted
    assert list(drafted_tokens(large, small, ids, 500, Sampler())) == list(large.tokens(ids, 500, Sampler()))  # context
    penalty = Sampler(repetition_penalty=1.3)
    assert list(drafted_tokens(large, small, ids, 20, penalty)) == list(large.tokens(ids, 20, penalty))


def test_a_perfect_draft_gives_one_token_more_a_step(models: Any) -> None:
    large, small = models()
    tally = Tally()
    found = list(drafted_tokens(large, large, [3, 1, 4], 1 + 4 * 6, Sampler(), count=3, tally=tally))
    assert len(found) == 25
    assert (tally.steps, tally.drafted, tally.accepted, tally.rate) == (6, 18, 18, 1.0)
    hot = Sampler(temperature=1.0, seed=0)
    tally = Tally()
    assert len(list(drafted_tokens(large, large, [3, 1, 4], 25, hot, count=3, tally=tally))) == 25
    assert tally.rate > 0.95  # the same distribution up to rounding
    tally = Tally()
    list(drafted_tokens(large, small, [3, 1, 4], 25, hot, count=3, tally=tally))
    assert 0 <= tally.rate < 1


def test_draws_have_the_models_distribution(models: Any) -> None:
    """Three tokens of a prompt: all of their combinations as often as the large model alone would say them."""
    large, small = models()
    ids = [5, 6, 7, 8]
    hot = dict(temperature=1.3, top_k=3)

    def likely(so_far: list[int]) -> np.ndarray:
        logits = large.run(input_ids=[so_far])["logits"][0, -1]
        return Sampler(**hot).probabilities(logits, so_far)  # type: ignore[arg-type]

    wanted: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        wanted = {
            (*said, int(t)): chance * p[t]
            for said, chance in wanted.items()
            for p in (likely([*ids, *said]),)
            for t in np.flatnonzero(p)
        }
    assert len(wanted) == 27
    found = Counter(
        tuple(drafted_tokens(large, small, ids, 3, Sampler(seed=seed, **hot), count=2))  # type: ignore[arg-type]
        for seed in range(1500)
    )
    assert set(found) <= set(wanted)
    assert plausible(np.array([found[k] for k in wanted]), np.array(list(wanted.values())))


def test_generate_takes_a_draft(models: Any) -> None:
    large, small = models()

    class Letters:
        eos = (11,)

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(chr(97 + i % 26) for i in ids)

    large._tokenizer = Letters()
    text = large.generate([3, 1, 4], max_tokens=20)
    assert large.generate([3, 1, 4], max_tokens=20, draft=small, draft_tokens=5) == text
    assert "".join(large.generate([3, 1, 4], max_tokens=20, draft=small, stream=True)) == text
    assert large.generate([3, 1, 4], max_tokens=0, draft=small) == ""


def test_mistakes(models: Any, tmp_path: Path) -> None:
    large, small = models()
    random_model(tmp_path, "llama", vocab_size=64)
    with pytest.raises(OptionError, match="the draft knows 64 tokens, the model 128"):
        list(drafted_tokens(large, load(tmp_path), [1], 5, Sampler()))
    with pytest.raises(OptionError, match="0 drafted tokens"):
        list(drafted_tokens(large, small, [1], 5, Sampler(), count=0))
    with pytest.raises(OptionError, match="prompt is empty"):
        list(drafted_tokens(large, small, [], 5, Sampler()))


def test_probabilities_are_what_is_drawn_from(rng: np.random.Generator) -> None:
    logits = rng.standard_normal(12).astype(np.float32) * 2
    for options in (dict(), dict(top_k=4), dict(top_p=0.7), dict(min_p=0.2), dict(repetition_penalty=2.0)):
        sampler = Sampler(temperature=0.9, seed=1, **options)  # type: ignore[arg-type]
        numbers = sampler.stream()
        counts = np.bincount([sampler.choose(logits, [1, 2], numbers) for _ in range(3000)], minlength=12)
        p = sampler.probabilities(logits, [1, 2])
        assert abs(p.sum() - 1) < 1e-12
        assert plausible(counts, p)
    assert Sampler().probabilities(logits, []).tolist() == (np.arange(12) == logits.argmax()).astype(float).tolist()
