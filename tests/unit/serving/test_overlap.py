"""Serving on devices with memory of their own, here XLA's CPU: steps feed themselves, and requests give what they give
alone, whoever chooses their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from strata.backends import DeviceArray, backend_for
from strata.models import Decoder, Sampler
from strata.models.generating.choosing import DRAW, choice
from strata.models.generating.feeding import TokenDraw, prompt_class, prompt_rows, row_class, table_class
from strata.runtime import Session
from strata.serving import Engine, Generation

Make = Callable[..., Decoder]
PROMPTS = ["hello", "xyz" * 11, "abc", "xyz" * 11 + "a"]
HOT: dict[str, Any] = dict(temperature=0.9, min_p=0.05, seed=3)
FILTERED: dict[str, Any] = dict(temperature=1.3, top_k=9, top_p=0.8, min_p=0.02, seed=5)
ON_HOST: dict[str, Any] = dict(temperature=0.7, top_k=9, repetition_penalty=1.2, seed=4)


@pytest.fixture(scope="module")
def model(decoder: Make) -> Decoder:
    pytest.importorskip("jax", reason="needs jax")
    return decoder(device="xla")


def engine_of(model: Decoder, **options: Any) -> Engine:
    return Engine(model, **{"cache_tokens": 512, "max_requests": 4, "max_tokens": 64, **options})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, HOT, FILTERED, ON_HOST], ids=["likeliest", "drawn", "filtered", "on_host"])
def test_requests_give_what_they_give_alone(model: Decoder, options: dict[str, Any]) -> None:
    engine = engine_of(model)
    requests = [engine.submit(p, max_tokens=6, **options) for p in PROMPTS]
    engine.run()
    assert [r.text() for r in requests] == [model.generate(p, max_tokens=6, **options) for p in PROMPTS]
    assert all(r.is_chosen_on_device is (options is not ON_HOST) for r in requests)
    assert not any(r.ahead for r in requests)
    assert engine.cache.pool.free == engine.cache.pool.pages


@pytest.mark.filterwarnings("ignore")
def test_those_who_choose_on_the_host_do_not_change_the_others(model: Decoder) -> None:
    engine = engine_of(model)
    made = [engine.submit(p, max_tokens=5, **o) for p, o in zip(PROMPTS, ({}, ON_HOST, HOT, {}), strict=True)]
    scored = engine.submit("hello", max_tokens=5, logprobs=1)
    engine.run()
    alone = [model.generate(p, max_tokens=5, **o) for p, o in zip(PROMPTS, ({}, ON_HOST, HOT, {}), strict=True)]
    assert [r.text() for r in made] == alone
    assert scored.tokens == made[0].tokens
    assert [s.token for s in scored.scores] == scored.tokens


@pytest.mark.filterwarnings("ignore")
def test_a_preempted_request_goes_on_with_the_same_tokens(model: Decoder) -> None:
    engine = engine_of(model, cache_tokens=80, prefix_cache=False)
    made = [engine.submit(p, max_tokens=24) for p in ("hello", "abc")]
    made.append(engine.submit("xyz" * 4, max_tokens=24))
    engine.run()
    assert engine.metrics.snapshot()["counters"]["preemptions"] > 0
    assert [r.text() for r in made] == [model.generate(r.prompt_ids, max_tokens=24) for r in made]


@pytest.mark.filterwarnings("ignore")
def test_long_answers_make_room_for_a_new_request(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata.serving.turns.FIRST_TOKENS", 8)
    engine = engine_of(model, cache_tokens=96, prefix_cache=False)
    long = [engine.submit(p, max_tokens=30) for p in ("hello", "abc", "xyz")]
    for _ in range(12):
        engine.step()
    while engine.cache.pool.free > 1:
        engine.step()
    question = engine.submit("room?", max_tokens=2)
    for _ in range(5):
        engine.step()
    assert question.is_done
    engine.run()
    for request in (*long, question):
        assert request.text() == model.generate(request.prompt_ids, max_tokens=request.max_tokens)
    assert engine.cache.pool.free == engine.cache.pool.pages


@pytest.mark.filterwarnings("ignore")
def test_the_next_step_is_asked_for_before_tokens_are_known(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ended meanwhile is dropped; nothing but tokens comes down."""
    home = backend_for(model.device).home
    assert home is not None
    sizes: list[int] = []
    download = home.download

    def seen(x: DeviceArray, out: np.ndarray | None = None) -> np.ndarray:
        sizes.append(x.nbytes)
        return download(x, out)

    monkeypatch.setattr(home, "download", seen)
    engine = engine_of(model)
    whole = model.generate("hello", max_tokens=6)
    sizes.clear()
    stopped = engine.submit("hello", max_tokens=30, stop=whole[2])
    other = engine.submit("abc", max_tokens=6)
    ahead = []
    while engine.step():
        ahead.append(max(stopped.ahead, other.ahead))
    assert max(ahead) == 1
    assert stopped.finish_reason == "stop"
    assert stopped.text() == whole[: whole.index(whole[2])]
    assert len(other.tokens) == 6
    assert max(sizes) <= 4 * row_class(2)
    request = engine.submit("hello", max_tokens=100)
    engine.step()
    engine.step()
    request.cancel()
    engine.run()
    assert request.finish_reason == "cancelled"
    assert engine.cache.pool.free == engine.cache.pool.pages


def test_infinite_logits_are_an_error_of_their_request() -> None:
    made = Generation.__new__(Generation)
    made.ending, made.ignore_eos = None, False
    assert made.take(-1, (), 10) is None
    assert made.ending is not None
    assert "X220" in str(made.ending[1])


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_draws_are_those_of_the_sampler(seed: int, filters: bool) -> None:
    rng = np.random.default_rng(seed)
    rows, vocab = 40, 301
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    logits[3, 7] = logits[3].max()  # a tie
    logits[5, 9] = np.nan
    logits[20:30] = np.round(logits[20:30])  # many of them, and zeros of both signs
    logits[25, ::5] = -np.inf
    kinds: dict[str, list[Any]] = {"temperature": [0.0, 0.3, 1.0, 2.0], "min_p": [0.0, 0.1]}
    if filters:
        kinds |= {"top_k": [0, 1, 3, 50, 300, 301, 500], "top_p": [1.0, 0.999, 0.5, 0.05, 1e-9]}
    samplers = [Sampler(seed=seed, **{n: rng.choice(some).item() for n, some in kinds.items()}) for _ in range(rows)]
    numbers = rng.random(rows)
    draws = [
        TokenDraw(s.temperature, s.min_p, float(u), s.top_k, s.top_p) for s, u in zip(samplers, numbers, strict=True)
    ]
    feeds = {
        "logits": logits, "draws": np.array([[getattr(d, name) for name in DRAW] for d in draws], np.float64),
        "rows": np.c_[np.arange(rows)[::-1], np.zeros((rows, 2))].astype(np.int64),
        "tokens": np.full((rows + 2, 1, 1), -7, np.int32),
    }  # fmt: skip
    chosen, tokens = Session("cpu").compile(choice(draws=True, filters=filters)).run(feeds)

    class Once(np.random.Generator):
        def random(self) -> float:  # type: ignore[override]
            return float(self.number)  # type: ignore[attr-defined]

    for at, sampler in enumerate(samplers):
        if at == 5:
            assert chosen[at] == -1
        else:
            once = Once(np.random.PCG64())
            once.number = numbers[at]  # type: ignore[attr-defined]
            assert chosen[at] == sampler.choose(logits[at], [], once), sampler
    np.testing.assert_array_equal(tokens[:rows, 0, 0][::-1], np.maximum(chosen, 0))
    assert (tokens[rows:] == -7).all()


def test_of_equal_logits_top_k_keeps_the_first() -> None:
    logits = np.float32([1, 5, 3, 3, 3, 3, 0])
    sampler = Sampler(temperature=1.0, top_k=3)
    assert np.flatnonzero(sampler.probabilities(logits, [])).tolist() == [1, 2, 3]


def test_size_classes() -> None:
    assert [row_class(n) for n in (1, 3, 17, 32, 33, 65, 250)] == [1, 8, 32, 32, 64, 128, 256]
    assert [prompt_rows(n, 128) for n in (1, 2, 3, 4, 8, 9, 40)] == [1, 1, 3, 4, 4, 9, 16]
    assert [prompt_rows(n, 1000) for n in (2, 3, 40)] == [1, 3, 4]
    assert prompt_rows(40, 3000) == 1
    assert [table_class(n) for n in (1, 8, 9, 65)] == [1, 8, 16, 128]
    assert [prompt_class(n) for n in (1, 17, 33, 48, 49, 300, 400)] == [16, 32, 48, 48, 64, 384, 512]
