"""Many generations at once: each is what it would be alone, bit for bit, whoever comes and goes beside it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata.serving
from strata.backends import DeviceArray
from strata.config import using
from strata.errors import OptionError, RunError, UnknownNameError
from strata.io import quantized_tensor, save_gguf
from strata.models import Decoder, load
from strata.runtime.execute.state import updates_in_place
from strata.serving import Engine, PagedCache
from tests.unit.serving.conftest import Letters, random_llama

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


@pytest.mark.parametrize("every", [True, False])
def test_pools_are_changed_in_place(decoder: Make, every: bool) -> None:
    """Attention reads a pool before the new rows are written to it: no step copies one."""
    model = decoder()
    lir = model.graph_for(every=every, layout="paged")._lir
    names = PagedCache(model, 1).pools
    assert [name for at, name in enumerate(names) if not updates_in_place(lir, name, at + 1)] == []


def test_pages_live_on_the_device(decoder: Make) -> None:
    """On XLA's CPU: pools are its arrays, steps change them there, and texts are those of one request alone."""
    pytest.importorskip("jax", reason="needs jax")
    model = decoder(device="xla")
    engine = Engine(model, cache_tokens=512, max_requests=3, max_tokens=64)
    requests = [engine.submit(p, max_tokens=4) for p in ("hello", "xyz" * 11, "xyz" * 11 + "a")]
    engine.run()
    assert [r.text() for r in requests] == [model.generate(r.prompt_ids, max_tokens=4) for r in requests]
    assert requests[2].cached_tokens == 16
    assert all(isinstance(pool, DeviceArray) and pool.device == "xla" for pool in engine.cache.pools.values())
    assert engine.cache.pool.free == engine.cache.pool.pages


def test_quantised_weights_exactly(tmp_path: Path, rng: np.random.Generator) -> None:
    """Three at a time with `exact`; and a draft is judged three at a time."""
    model = quantised(tmp_path / "m.gguf", rng)
    assert model.is_quantized
    prompts = [rng.integers(0, 96, n).tolist() for n in (3, 40, 101, 5, 64, 18, 33)]
    alone = [model.generate(p, max_tokens=10) for p in prompts]
    engine = Engine(model, exact=True, max_tokens=64)
    requests = [engine.submit(p, max_tokens=10) for p in prompts]
    engine.run()
    assert [r.text() for r in requests] == alone
    cache, tables = PagedCache(model, 64), []
    for ids in prompts[:3]:
        tables.append(cache.table())
        tables[-1].reserve(len(ids) + 1)
        cache.step(tables[-1:], np.asarray([ids], np.int32))
    found = cache.step(tables, np.array([[1], [2], [3]], np.int32))
    for row, ids, last in zip(found, prompts, (1, 2, 3), strict=False):
        state = model.start()
        model.step(state, np.asarray([ids], np.int32))
        assert np.array_equal(row, model.step(state, np.array([[last]], np.int32))[0])
    draft = quantised(tmp_path / "d.gguf", rng, layers=1)
    for p in prompts[:4]:
        assert model.generate(p, max_tokens=20, draft=draft) == model.generate(p, max_tokens=20)
        assert model.generate(p, max_tokens=20, draft=model, draft_tokens=7) == model.generate(p, max_tokens=20)


def quantised(path: Path, rng: np.random.Generator, layers: int = 2) -> Decoder:
    """A random decoder in blocks of 8 bits."""
    sizes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
             "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}  # fmt: skip
    shapes = {"token_embd": (96, 64), "output": (96, 64)}
    shapes |= {f"blk.{i}.{name}": shape for i in range(layers) for name, shape in sizes.items()}
    tensors: dict[str, Any] = {
        f"{name}.weight": quantized_tensor(name, (rng.standard_normal(shape) / 4).astype(np.float32), "q8_0")
        for name, shape in shapes.items()
    }
    norms = ["output_norm", *(f"blk.{i}.{part}_norm" for i in range(layers) for part in ("attn", "ffn"))]
    tensors |= {f"{name}.weight": np.ones(64, np.float32) for name in norms}
    about = {"embedding_length": 64, "block_count": layers, "feed_forward_length": 96, "context_length": 160,
             "attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 16}  # fmt: skip
    save_gguf(path, tensors, {"general.architecture": "llama", **{f"llama.{k}": v for k, v in about.items()}})
    model: Decoder = load(path)
    model._tokenizer = Letters()  # type: ignore[assignment]
    return model


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


def test_a_crowd_that_comes_and_goes(decoder: Make, seed: int) -> None:
    """Clients in threads that ask for anything, and give up at any time: what is said is right, and nothing is lost."""
    model = decoder()
    wanted = {i: model.generate(f"{i} " * (1 + 7 * i), max_tokens=12, temperature=0.9, seed=i) for i in range(5)}
    with Engine(model, cache_tokens=400, max_requests=3, max_tokens=40, queue=1000) as engine:

        def client(number: int) -> None:
            rng = np.random.default_rng([seed, number])
            for _ in range(12):
                i = int(rng.integers(5))
                request = engine.submit(f"{i} " * (1 + 7 * i), max_tokens=12, temperature=0.9, seed=i)
                if rng.random() < 0.3:
                    pieces = [piece for piece, _ in zip(request, range(int(rng.integers(6))), strict=False)]
                    request.cancel()
                    assert request.wait(60)
                    assert wanted[i].startswith("".join(pieces))
                else:
                    assert request.text(timeout=60) == wanted[i]

        with ThreadPoolExecutor(5) as threads:
            list(threads.map(client, range(5)))
    assert engine.cache.pool.free == engine.cache.pool.pages
    assert not engine._served
    assert not engine._running
    assert not engine._reading
    counters = engine.metrics.snapshot()["counters"]
    assert counters["requests"] == 60 == counters["finished_length"] + counters.get("finished_cancelled", 0)


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

    def spoiled(tables: Any, ids: np.ndarray, **more: Any) -> np.ndarray:
        logits = step(tables, ids, **more)
        logits[[t is bad.table for t in tables]] = np.nan
        return logits

    monkeypatch.setattr(engine.cache, "step", spoiled)
    engine.run()
    assert good.text() == alone
    with pytest.raises(RunError, match="NaN"):
        bad.text()
    assert bad.finish_reason == "error"


def test_mistakes(decoder: Make) -> None:
    assert callable(
        strata.serving.Generation
    )  # asked for by name, it checks its arguments: the engine's words come first
    engine = Engine(decoder(), cache_tokens=64, max_requests=1, queue=1)
    asked: tuple[tuple[dict[str, Any], str], ...] = (
        (dict(prompt=""), "prompt is empty"),
        (dict(prompt=[1, 128]), "token 128 at position 1 is outside the vocabulary of 128"),
        (dict(prompt="x" * 161), "161 tokens are more than 160"),
        (dict(prompt="x" * 80), "a prompt of 80 tokens is larger than a cache of 64"),
        (dict(prompt=5), "messages or token ids, got int"), (dict(prompt=[1.5]), "got list"),
        (dict(prompt="x", max_tokens=2.5), "max_tokens 2.5 is not a positive"),
        (dict(prompt="x", max_tokens=0), "max_tokens 0"), (dict(prompt="x", top_p=3.0), "top_p 3"),
    )  # fmt: skip
    for wrong, message in asked:
        with pytest.raises(OptionError, match=message):
            engine.submit(**wrong)
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
    sizes: tuple[dict[str, Any], ...] = (
        dict(max_requests=0), dict(queue=-1), dict(cache_tokens="many"), dict(cache_tokens=0), dict(max_tokens=9.5),
    )  # fmt: skip
    for size in sizes:
        with pytest.raises(OptionError, match="serve nobody"):
            Engine(decoder(), **size)
    with pytest.raises(OptionError, match="generates no text"):
        Engine("model")  # type: ignore[arg-type]


def test_a_short_prompt_does_not_wait_for_long_ones(chat_model: Make) -> None:
    """They are read in chunks, with steps of the others between them; bits do not depend on it."""
    model = chat_model()
    long = [[5 + i * step % 90 for i in range(460)] for step in (1, 7)]
    short = [[9, 8, 7], [20, 30, 40, 50]]
    alone = [model.generate(p, max_tokens=4) for p in (*long, *short)]
    engine = Engine(model, cache_tokens=4096, max_requests=4, max_tokens=160)
    requests = [engine.submit(p, max_tokens=4) for p in long]
    engine.step()
    requests += [engine.submit(p, max_tokens=4) for p in short]
    steps = 0
    while not all(r.is_done for r in requests[2:]):
        assert engine.step()
        steps += 1
    assert steps <= 6
    assert not any(r.tokens for r in requests[:2])
    engine.run()
    assert [r.text() for r in requests] == alone


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell")
def test_a_file_does_not_stay_in_memory_beside_the_packed_weights(tmp_path: Path) -> None:
    random_llama(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    model = load(tmp_path, context=64)
    model._tokenizer = Letters()  # type: ignore[assignment]
    engine = Engine(model)
    assert engine.submit("hello, what is this?", max_tokens=8).text() == model.generate(
        "hello, what is this?", max_tokens=8
    )
    file = tmp_path / "model.safetensors"
    lines = Path("/proc/self/smaps").read_text("utf-8").split(str(file))[1:]
    resident = sum(int(part.split("Rss:")[1].split()[0]) << 10 for part in lines)
    assert lines
    assert resident < file.stat().st_size / 4  # rows of the embedding


def test_graphs_of_a_model_have_one_copy_of_its_weights(tmp_path: Path, rng: np.random.Generator) -> None:
    """Those that are laid one after the other, too; they are let go with the last graph."""
    model = quantised(tmp_path / "m.gguf", rng)
    builders = [model._build(model.context, every=every) for every in (False, True)]
    for builder in builders:
        builder.build()
    first, second = (builder.bound for builder in builders)
    joined = [name for name in first if "+" in name]
    assert joined
    assert all(np.shares_memory(first[name], second[name]) for name in joined)
    held = weakref.ref(first[joined[0]].base)
    assert held() is not None
    del builders, builder, first, second
    gc.collect()
    assert held() is None
