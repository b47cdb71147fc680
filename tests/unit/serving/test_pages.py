"""Pages that prompts share, requests that give theirs back and go on later, drafts: the bits stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.errors import OptionError, RunError
from strata.models import PAGE, Decoder, NgramDraft, PagedCache, PagePool, page_bytes, page_keys
from strata.serving import AdapterQueue, Engine
from tests.unit.serving.test_engine import quantised

Make = Callable[..., Decoder]
pytestmark = pytest.mark.filterwarnings("ignore")
PREFIX = "a prompt that many begin with, and that is longer than a few pages of the cache: "


def count(engine: Engine, name: str) -> int:
    return int(engine.metrics.snapshot()["counters"].get(name, 0))


def scored(engine: Engine, prompt: Any, **options: Any) -> tuple[str, list[float]]:
    request = engine.submit(prompt, logprobs=0, **options)
    return request.text(), [s.logprob for s in request.scores]


def test_a_shared_beginning_is_read_once(decoder: Make) -> None:
    model = decoder()
    endings = ["x", "something else", "xyz" * 10, ""]
    alone = [scored(Engine(model, prefix_cache=False), PREFIX + e, max_tokens=8) for e in endings]
    engine = Engine(model, max_tokens=64)
    assert [scored(engine, PREFIX + e, max_tokens=8) for e in endings] == alone
    pages = (len(PREFIX) - 5) // PAGE  # of the last prompt, so much is left that it is no single token's work
    assert count(engine, "prefix_hit_tokens") == (2 * (len(PREFIX) // PAGE) + pages) * PAGE
    together = [engine.submit(PREFIX + e, max_tokens=8, logprobs=0) for e in endings]  # in one step
    engine.run()
    assert [(r.text(), [s.logprob for s in r.scores]) for r in together] == alone
    assert engine.cache.pool.free == engine.cache.pool.pages


def test_choices_share_their_prompt_in_one_step(decoder: Make) -> None:
    engine = Engine(decoder(), max_requests=4)
    requests = [engine.submit(PREFIX, max_tokens=3) for _ in range(4)]
    engine.run()
    assert [r.cached_tokens for r in requests] == [0, *[(len(PREFIX) - 5) // PAGE * PAGE] * 3]
    assert len({r.text() for r in requests}) == 1


@pytest.mark.parametrize("times", [2, 3, 4, 5])
def test_all_that_is_shared_is_told(decoder: Make, times: int) -> None:
    """Also where a prompt that came together with another one is read in chunks."""
    engine = Engine(decoder(context=256, max_position_embeddings=256))
    prompt = "a long beginning that every request has. " * times
    first, second = (engine.submit(prompt + end, max_tokens=4) for end in ("one", "two"))
    engine.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, (len(prompt) - 2) // PAGE * PAGE)


def test_kept_pages_go_when_room_is_needed(decoder: Make) -> None:
    model = decoder()
    engine = Engine(model, cache_tokens=12 * PAGE)
    prompts = [f"{i} is how this one begins, " * 4 for i in range(6)]
    for _ in range(2):
        for p in prompts:
            assert engine.submit(p, max_tokens=4).text() == model.generate(p, max_tokens=4)
    pool = engine.cache.pool
    assert pool.free == pool.pages
    assert 0 < pool.kept <= pool.pages


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_kv_cache_of_8_bits(decoder: Make, name: str) -> None:
    """A quarter of the memory, nearly the same logits; batches, shared pages and preemption change no bit."""
    model = decoder(name)
    caches = [PagedCache(model, 12, bits=bits) for bits in (32, 8)]
    ids = np.asarray([list(PREFIX.encode())], np.int32) % 128
    found = []
    for cache in caches:
        table = cache.table()
        table.reserve(ids.shape[1] + 1)
        found.append([cache.step([table], ids), cache.step([table], ids[:, :1])])
    near = [np.abs(a - b).max() / np.abs(a).max() for a, b in zip(*found, strict=True)]
    assert 0 < max(near) < 0.02
    sizes = [sum(p.nbytes for p in cache.pools.values()) for cache in caches]
    assert sizes == [12 * page_bytes(model, bits) for bits in (32, 8)]
    assert sizes[1] < 0.32 * sizes[0]
    prompts = [PREFIX + end for end in ("x", "something else", "xyz" * 10, "")]
    alone = [scored(Engine(model, kv_bits=8, prefix_cache=False), p, max_tokens=30) for p in prompts]
    engine = Engine(model, kv_bits=8, max_tokens=64, cache_tokens=14 * PAGE)
    together = [engine.submit(p, max_tokens=30, logprobs=0) for p in prompts]
    engine.run()
    assert [(r.text(), [s.logprob for s in r.scores]) for r in together] == alone
    assert count(engine, "prefix_hit_tokens") > 0
    assert count(engine, "preemptions") > 0
    with pytest.raises(OptionError, match="8, 16 or 32 bits, got 4"):
        PagedCache(model, 1, bits=4)


def test_an_adapter_shares_with_its_own() -> None:
    ids = list(range(40))
    assert page_keys(ids) == page_keys(ids[:35])
    assert not set(page_keys(ids)) & set(page_keys(ids, "fr"))
    assert not set(page_keys(ids)) & set(page_keys([1, *ids[1:]]))


def test_a_pool_that_keeps(rng: np.random.Generator) -> None:
    """Histories of lending, sharing and giving back, beside a plain model of who holds what."""
    pool = PagePool(7)
    held: list[int] = []
    contents: dict[bytes, int] = {}
    for turn in range(3000):
        match int(rng.integers(4)):
            case 0:
                page = pool.take()
                assert (page is None) == (len(set(held)) == 7)
                if page is not None:
                    assert page not in held
                    held.append(page)
                    contents = {k: p for k, p in contents.items() if p != page}
            case 1 if held:
                page, key = held[int(rng.integers(len(held)))], b"%d" % rng.integers(12)
                pool.keep(page, key)
                if key not in contents and page not in contents.values():
                    contents[key] = page
            case 2:
                key = b"%d" % rng.integers(12)
                page = pool.share(key)
                assert page == contents.get(key)
                if page is not None:
                    held.append(page)
            case 3 if held:
                pool.give_back([held.pop(int(rng.integers(len(held))))])
            case _:
                pass
        assert pool.free == 7 - len(set(held)), turn
        assert pool.kept == len(contents)


@pytest.mark.parametrize("speculate", [True, False])
def test_who_came_last_makes_room_and_goes_on(decoder: Make, speculate: bool) -> None:
    model = decoder()
    options: list[dict[str, Any]] = [
        dict(max_tokens=100), dict(max_tokens=90, temperature=0.9, seed=1), dict(max_tokens=100_000),
        dict(max_tokens=60, temperature=1.2, seed=4, frequency_penalty=0.5),
    ]  # fmt: skip
    prompts = ["hello", "a somewhat longer prompt", "x" * 40, "and one more"]
    alone = [
        scored(Engine(model, prefix_cache=False, speculate=False), p, **o)
        for p, o in zip(prompts, options, strict=True)
    ]
    engine = Engine(model, cache_tokens=176, speculate=speculate)
    requests = [engine.submit(p, logprobs=0, **o) for p, o in zip(prompts, options, strict=True)]
    engine.run()
    assert [(r.text(), [s.logprob for s in r.scores]) for r in requests] == alone
    assert count(engine, "preemptions") > 0
    assert engine.cache.pool.free == engine.cache.pool.pages


def test_one_that_asks_for_much_reserves_nothing(decoder: Make) -> None:
    model = decoder()
    engine = Engine(model, cache_tokens=800, max_requests=4)
    greedy = [engine.submit("hello", max_tokens=100_000) for _ in range(8)]
    for _ in range(80):
        engine.step()
    innocent = engine.submit("me", max_tokens=2)
    for _ in range(3):
        engine.step()
    assert innocent.is_done
    for request in greedy:
        request.cancel()
    engine.run()
    engine = Engine(model, cache_tokens=96)
    full = engine.submit("hello", max_tokens=100_000)
    engine.run()
    assert full.finish_reason == "length"
    assert len(full.tokens) == 96 - len("hello") + 1
    assert model.generate("hello", max_tokens=160).startswith(full.text())


def test_drafts_change_no_bit(decoder: Make, tmp_path: Path, rng: np.random.Generator) -> None:
    for model in (decoder(), quantised(tmp_path / "m.gguf", rng)):
        for options in (dict(), dict(temperature=0.3, top_k=4, seed=2), dict(repetition_penalty=1.1)):
            found = []
            for speculate in (False, True):
                engine = Engine(model, speculate=speculate, prefix_cache=False)
                found.append(scored(engine, [5, 6] * 10, max_tokens=60, **options))
            assert found[0] == found[1]
            assert count(engine, "drafted_tokens") > 0
        assert count(engine, "accepted_tokens") <= count(engine, "drafted_tokens")


def test_what_followed_before_is_drafted() -> None:
    draft = NgramDraft()
    draft.extend([1, 2, 3, 4, 5, 1, 2])
    assert draft.draft(3) == [3, 4, 5]
    draft.extend([9])
    assert draft.draft(3) == []
    draft.extend([1, 2])
    assert draft.draft(2) == [9, 1]  # the last time counts


def test_prompts_are_scored(decoder: Make) -> None:
    model = decoder()
    engine = Engine(model, max_tokens=96)
    request = engine.submit(PREFIX + PREFIX[:40], max_tokens=0, prompt_logprobs=2)
    assert request.text() == ""
    ids = np.asarray([request.prompt_ids], np.int32)
    logits = model.run(input_ids=ids)["logits"][0].astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert request.prompt_scores[0] is None
    for at, found in enumerate(request.prompt_scores[1:]):
        assert found is not None
        assert abs(found.logprob - logs[at, ids[0, at + 1]]) < 1e-4
        assert [t for t, _ in found.top] == np.argsort(-logs[at])[:2].tolist()
    assert len(request.prompt_scores) == ids.size


def test_clients_take_turns() -> None:
    queue: AdapterQueue[str] = AdapterQueue(1)
    for i in range(4):
        queue.put(f"a{i}", client="a", cost=10)
    for i in range(2):
        queue.put(f"b{i}", client="b", cost=10)
    queue.put("c0", client="c", priority=-1)
    queue.put("d0", client="d", priority=1)
    assert [queue.pop() for _ in range(len(queue))] == ["c0", "a0", "b0", "a1", "b1", "a2", "a3", "d0"]
    queue.put("b2", client="b")
    queue.put("a4", client="a")  # was given more
    assert queue.head() == (None, "b2")


def test_a_full_queue_makes_room_for_others(decoder: Make) -> None:
    engine = Engine(decoder(), max_requests=1, queue=3)
    many = [engine.submit("x", max_tokens=2, client="many") for _ in range(4)]
    one = engine.submit("y", max_tokens=2, client="one")
    with pytest.raises(RunError, match="4 requests wait already"):
        engine.submit("x", max_tokens=2, client="many")
    engine.run()
    assert one.text()
    with pytest.raises(RunError, match="wait already"):
        many[-1].text()
    assert all(r.text() for r in many[:-1])
