"""Many generations at once: each is what it would be alone, bit for bit, whoever comes and goes beside it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from strata.config import using
from strata.errors import OptionError, RunError, UnknownNameError
from strata.models import Decoder
from strata.serving import Engine, PagedCache

Make = Callable[..., Decoder]
pytestmark = pytest.mark.filterwarnings("ignore")
PROMPTS = ["hello", "a", "something much longer, with many letters in it, so that it has to be cut " * 2, "xyz" * 11]
HOT: dict[str, Any] = dict(temperature=0.8, top_k=20, seed=5)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "phi3", "gemma2", "gemma3", "gpt2"])
def test_requests_give_what_they_give_alone(decoder: Make, name: str) -> None:
    model = decoder(name)
    alone = [model.generate(p, max_tokens=6) for p in PROMPTS]
    alone += [model.generate(p, max_tokens=6, **HOT) for p in PROMPTS]
    engine = Engine(model, cache_tokens=1024, max_requests=5, max_tokens=48)
    requests = [engine.submit(p, max_tokens=6) for p in PROMPTS]
    requests += [engine.submit(p, max_tokens=6, **HOT) for p in PROMPTS]
    engine.run()
    assert [r.text() for r in requests] == alone
    assert {r.finish_reason for r in requests} == {"length"}
    assert engine.cache.pool.free == engine.cache.pool.pages


@pytest.mark.parametrize("device", ["cpu", "cpu:avx2", "cpu:baseline"])
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_logits_are_those_of_one_sequence(decoder: Make, device: str, threads: int, rng: np.random.Generator) -> None:
    """Pages in any order, sequences of any lengths side by side, prompts cut between pages: the same bits."""
    model = decoder(device=device)
    ids = [rng.integers(0, 128, n).astype(np.int32) for n in (101, 37, 21)]
    cuts = [(0, 16, 48, 101), (0, 16, 37), (0, 21)]
    with using(num_threads=threads):
        cache = PagedCache(model, 24)
        tables = [cache.table() for _ in ids]
        for turn in range(10):  # pages of the three lie between each other
            for table in tables:
                assert table.reserve(16 * (turn + 1)) or turn > 7
        states = [model.start(1, 160) for _ in ids]
        for row, cut, table, state in zip(ids, cuts, tables, states, strict=True):
            whole = model.step(state, row[None])
            for a, b in pairwise(cut):
                found = cache.step([table], row[None, a:b])
            assert np.array_equal(found, whole)
        for _ in range(3):
            new = rng.integers(0, 128, (3, 1)).astype(np.int32)
            found = cache.step(tables, new)
            for i, state in enumerate(states):
                assert np.array_equal(found[i : i + 1], model.step(state, new[i : i + 1]))


def test_late_comers_and_leavers(decoder: Make) -> None:
    model = decoder()
    engine = Engine(model, cache_tokens=480, max_requests=3, max_tokens=40)
    first = engine.submit("hello", max_tokens=30)
    for _ in range(5):
        assert engine.step()
    longer = "a longer one that comes while the first is on its way"
    second = engine.submit(longer, max_tokens=4, **HOT)
    third, fourth = engine.submit("third", max_tokens=20), engine.submit("fourth", max_tokens=3)
    assert "".join(second) == model.generate(longer, max_tokens=4, **HOT)
    third.cancel()
    assert fourth.text() == model.generate("fourth", max_tokens=3)
    assert first.text() == model.generate("hello", max_tokens=30)
    assert third.finish_reason == "cancelled"
    assert model.generate("third", max_tokens=20).startswith(third.text())
    assert engine.cache.pool.free == 30
    assert not engine.step()


def test_stop_strings_and_ends(decoder: Make) -> None:
    model = decoder()
    whole = model.generate("hello", max_tokens=20, **HOT)
    stop = whole[7:9]
    engine = Engine(model)
    request = engine.submit("hello", max_tokens=20, stop=[stop, "@"], **HOT)
    assert request.text() == whole[: whole.index(stop)]
    assert request.finish_reason == "stop"
    full = engine.submit("hello", max_tokens=500)
    assert full.text() == model.generate("hello", max_tokens=500)
    assert (len(full.tokens), full.finish_reason) == (160 - 5 + 1, "length")


def test_a_thread_serves_many(decoder: Make) -> None:
    model = decoder()
    with Engine(model, cache_tokens=640, max_requests=4) as engine:
        requests = [engine.submit(f"prompt {i}" * (i + 1), max_tokens=5 + i) for i in range(9)]
        texts = [r.text(timeout=60) for r in requests]
        gone = engine.submit("never ends", max_tokens=100)
        assert next(iter(gone))
        gone.cancel()
        assert gone.wait(60)
    assert texts == [model.generate(f"prompt {i}" * (i + 1), max_tokens=5 + i) for i in range(9)]
    with pytest.raises(RunError, match="closed"):
        engine.submit("x")
    counters = engine.metrics.snapshot()["counters"]
    assert counters["requests"] == 10
    assert counters["finished_length"] == 9


def test_closing_at_once_ends_what_is_on_its_way(decoder: Make) -> None:
    engine = Engine(decoder(), max_requests=2)
    engine.start()
    requests = [engine.submit("hello", max_tokens=150) for _ in range(6)]
    engine.close(drain=False)
    assert {r.finish_reason for r in requests} <= {"cancelled", "length"}
    assert requests[-1].finish_reason == "cancelled"
    assert engine.cache.pool.free == engine.cache.pool.pages


def test_a_request_that_fails_fails_alone(decoder: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder()
    alone = model.generate("bb", max_tokens=4)
    engine = Engine(model)
    bad, good = engine.submit("a", max_tokens=4), engine.submit("bb", max_tokens=4)
    step = engine.cache.step

    def spoiled(tables: Any, ids: np.ndarray) -> np.ndarray:
        logits = step(tables, ids)
        logits[[t is bad.table for t in tables]] = np.nan
        return logits

    monkeypatch.setattr(engine.cache, "step", spoiled)
    engine.run()
    assert good.text() == alone
    with pytest.raises(RunError, match="NaN"):
        bad.text()
    assert bad.finish_reason == "error"


def test_mistakes(decoder: Make) -> None:
    engine = Engine(decoder(), cache_tokens=64, max_requests=1, queue=1)
    for wrong, message in (
        (dict(prompt=""), "prompt is empty"), (dict(prompt=[1, 128]), "token 128 at place 1 is none of 128"),
        (dict(prompt="x" * 161), "161 tokens are more than 160"),
        (dict(prompt="x" * 60), "a request of 160 tokens is larger than a cache of 64"),
        (dict(prompt="x", max_tokens=0), "max_tokens 0"), (dict(prompt="x", top_p=3.0), "top_p 3"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            engine.submit(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="no adapter 'fr'"):
        engine.submit("x", max_tokens=2, adapter="fr")
    for _ in range(2):
        engine.submit("x", max_tokens=2)
    with pytest.raises(RunError, match="2 requests wait already"):
        engine.submit("x", max_tokens=2)
    engine.run()
    assert engine.submit("x", max_tokens=2).text()
    with pytest.raises(OptionError, match="leaves no room for prompts"):
        Engine(decoder(), max_tokens=16)
    with pytest.raises(OptionError, match="generates no text"):
        Engine("model")  # type: ignore[arg-type]
