"""Mixtures of experts of which a few stay in memory: the same bits, and no bytes of experts that nobody asked for."""

from __future__ import annotations

import ctypes
import json
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.errors import FileError, OptionError
from strata.io import GgufTensor, quantized_tensor, save_gguf, save_safetensors
from strata.models import Decoder, PagedCache, Sampler, load
from strata.runtime import ExpertWatch
from strata.serving import ExpertPool, ExpertStore
from tests.unit.models.decoder_vectors import prompt, unpacked, weight
from tests.unit.models.test_decoder_vectors import KNOWN, folder
from tests.unit.models.test_gguf_experts import gguf_file

NEW = 6
EXPERTS, CHOSEN, HIDDEN, INNER = 8, 2, 256, 1024


def answers(model: Decoder) -> list[np.ndarray]:
    """Logits of a prompt's end and of single tokens; tokens; and the logits of pages with sequences of two lengths."""
    ids, state = prompt(), model.start()
    found = [model.step(state, np.ascontiguousarray(ids[:, :9]))]
    found += [model.step(state, np.ascontiguousarray(ids[:, i : i + 1])) for i in range(9, 12)]
    found += [np.array(list(model.tokens(ids[0].tolist(), NEW, Sampler())))]
    cache = PagedCache(model, 4)
    tables = [cache.table(), cache.table()]
    for table, count in zip(tables, (9, 5), strict=True):
        table.reserve(16)
        found.append(cache.step([table], np.ascontiguousarray(ids[:, :count])))
    return [*found, cache.step(tables, ids[:, :2].reshape(2, 1).copy())]


@pytest.mark.parametrize(("name", "budgets"), [("mixtral", (0, 2, 99)), ("gpt_oss", (1,)), ("jamba", (1,))])
def test_folders_give_the_same_bits(name: str, budgets: tuple[int, ...], tmp_path: Path) -> None:
    place = folder(tmp_path / "model", name)
    wanted = answers(load(place))
    moved = []
    for budget in budgets:
        model = load(place, experts=budget)
        for a, b in zip(answers(model), wanted, strict=True):
            np.testing.assert_array_equal(a, b)
        assert model.experts is not None
        stats = model.experts.take_stats()
        assert (sum(stats.hits) == 0) == (budget == 0)
        assert (sum(stats.misses) == 0) == (budget == 99)
        moved.append(sum(stats.moved))
        assert model.experts.take_stats().moved == (0,) * len(model.experts)
    assert moved == sorted(set(moved), reverse=True)
    assert moved[-1] > 0


def test_gguf_files_give_the_same_bits(tmp_path: Path) -> None:
    """The first matrices of the experts are blocks, the last one is not."""
    gguf_file(tmp_path / "m.gguf", "qwen2_moe", "q8_0")
    wanted = answers(load(tmp_path / "m.gguf"))
    for a, b in zip(answers(load(tmp_path / "m.gguf", experts=2)), wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_of_16_bits(tmp_path: Path) -> None:
    """They are widened in their slots, and counted as they lie in the file."""
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(KNOWN["mixtral"]["config"]), "utf-8")
    shapes = unpacked(KNOWN["mixtral"]["weights"])
    save_safetensors(place / "model.safetensors", {k: weight(k, s).astype(np.float16) for k, s in shapes.items()})
    wanted, model = answers(load(place)), load(place, experts=1)
    for a, b in zip(answers(model), wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.experts is not None
    model.experts.take_stats()
    for store in model.experts:
        store.run(np.zeros((1, 32), np.float32), np.array([3 - store.pool.resident[0]]))  # one that is away
    assert model.experts.take_stats().moved == (3 * 32 * 40 * 2,) * 2


def large_file(path: Path, rng: np.random.Generator) -> None:
    """A model of one layer whose experts are many pages each."""

    def random(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    tensors: dict[str, Any] = {
        "token_embd.weight": random(32, HIDDEN), "output.weight": random(32, HIDDEN),
        **{f"{name}_norm.weight": np.ones(HIDDEN, np.float32) for name in ("output", "blk.0.attn", "blk.0.ffn")},
        **{f"blk.0.attn_{part}.weight": random(HIDDEN, HIDDEN) for part in ("q", "k", "v", "output")},
        "blk.0.ffn_gate_inp.weight": random(EXPERTS, HIDDEN) * 4,
    }  # fmt: skip
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    experts = {
        (name := f"blk.0.ffn_{part}_exps.weight"): quantized_tensor(name, random(EXPERTS, *shape), "q8_0")
        for part, shape in shapes.items()
    }
    sizes = {
        "embedding_length": HIDDEN, "block_count": 1, "context_length": 64, "feed_forward_length": INNER,
        "attention.head_count": 4, "attention.head_count_kv": 4, "expert_used_count": CHOSEN, "expert_count": EXPERTS,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    save_gguf(
        path, {**tensors, **experts}, {"general.architecture": "llama", **{f"llama.{k}": v for k, v in sizes.items()}}
    )


def forbidden(model: Decoder, ids: np.ndarray) -> int:
    """Take the pages of all experts but these from the process: whoever reads one of them ends it. How many bytes."""
    total = 0
    for name, tensor in model.weights().items():
        if ".experts." in name:
            assert isinstance(tensor, GgufTensor)
            each = tensor.data[0].nbytes
            for expert in set(range(EXPERTS)) - set(ids.tolist()):
                start = tensor.data.ctypes.data + expert * each
                first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
                length = (start + each) // mmap.PAGESIZE * mmap.PAGESIZE - first
                assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(first), ctypes.c_size_t(length), 0) == 0
                total += length
    return total


def steps_without_the_others(path: Path) -> None:
    """A decode step that may read its own experts only, with all experts in memory and not; in a process of its own."""
    plain, token = load(path), np.array([[7]], np.int32)
    models = [load(path, experts=budget) for budget in (None, 0, 3)]
    states = [m.start() for m in (plain, *models)]
    for m, state in zip((plain, *models), states, strict=True):
        m.step(state, np.array([[3, 1, 4, 1, 5, 9]], np.int32))
    with ExpertWatch(plain.graph, EXPERTS) as watch:
        wanted = plain.step(states[0], token)
    (ids,) = watch.take_topk()
    chosen = set(ids.tolist())
    each = sum(t.data[0].nbytes for n, t in plain.weights().items() if ".experts." in n)
    assert len(chosen) == CHOSEN
    for model, state in zip(models, states[1:], strict=True):
        assert forbidden(model, ids) > 0.9 * (EXPERTS - CHOSEN) * each
        here = set() if model.experts is None else set(model.experts[0].pool.resident)
        if model.experts is not None:
            model.experts.take_stats()
        np.testing.assert_array_equal(model.step(state, token), wanted)
        if model.experts is not None:
            stats, away = model.experts.take_stats(), len(chosen - here)
            assert stats.moved == (away * each,)
            assert (stats.hits, stats.misses) == ((CHOSEN - away,), (away,))
            assert (stats.hit_calls, stats.miss_calls) == (stats.hits, stats.misses)
            assert model.experts.nbytes == (len(here) + CHOSEN) * each  # with the spare slots


@pytest.mark.skipif(sys.platform == "win32", reason="pages are taken away with mprotect")
def test_a_step_reads_the_bytes_of_its_experts_only(tmp_path: Path, rng: np.random.Generator) -> None:
    large_file(tmp_path / "large.gguf", rng)
    program = f"from {__name__} import *; steps_without_the_others(Path({str(tmp_path / 'large.gguf')!r}))"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_mistakes(tmp_path: Path) -> None:
    place = folder(tmp_path / "model", "mixtral")
    with pytest.raises(OptionError, match="experts is how many of each layer stay in memory, got -1"):
        load(place, experts=-1)
    for bad in (1.5, "2"):
        with pytest.raises(OptionError, match="experts is a whole number or None"):
            load(place, experts=bad)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="has no experts"):
        load(folder(tmp_path / "dense", "olmo2"), experts=2)
    (tmp_path / "m.onnx").write_bytes(b"")
    with pytest.raises(OptionError, match="ONNX file"):
        load(tmp_path / "m.onnx", experts=2)
    settings = {**KNOWN["mixtral"]["config"], "num_local_experts": 3}
    (place / "config.json").write_text(json.dumps(settings), "utf-8")
    with pytest.raises(FileError, match="is of 4 experts, the configuration has 3"):
        load(place, experts=2)
    with pytest.raises(OptionError, match="0 spare slots are none"):
        ExpertStore(ExpertPool(2, 1), lambda _: (np.zeros((2, 2)),) * 3, spare=0)
