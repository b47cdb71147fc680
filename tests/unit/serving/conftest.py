"""Tiny random decoders for the tests of serving."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import pytest

from strata.io import save_safetensors
from strata.models import Decoder, PagedCache, load
from strata.serving import Engine
from strata.serving.fairness import FairShare
from tests.unit.models.random_models import SIZES, random_model


def usual_cost(rows: int, tokens: int) -> float:
    """What a call of the model costs, in that of one row: many rows read the weights once."""
    return 0.4 + 0.35 * tokens if tokens > 1 else 0.5 + 0.5 * rows


@pytest.fixture(autouse=True)
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines take steps to be as long as they would usually be: who takes part in one does not depend on the machine.

    Each has its own time, which goes on as its model computes.
    """
    times: WeakKeyDictionary[PagedCache, float] = WeakKeyDictionary()
    step, start = PagedCache.step, Engine.__init__

    def timed(cache: PagedCache, tables: Any, ids: np.ndarray, **more: Any) -> np.ndarray:
        times[cache] = times.get(cache, 0.0) + usual_cost(*ids.shape)
        return step(cache, tables, ids, **more)

    def made(engine: Engine, *args: Any, **options: Any) -> None:
        start(engine, *args, **options)
        cache = ref(engine.cache)
        engine.fair = FairShare(lambda: times.get(here, 0.0) if (here := cache()) is not None else 0.0)

    monkeypatch.setattr(PagedCache, "step", timed)
    monkeypatch.setattr(Engine, "__init__", made)


class Letters:
    """A tokenizer of single letters, so that generation is tested without a vocabulary."""

    eos, bos, template = (), None, None

    def encode(self, text: str, *, add_special: bool = True, limit: int | None = None) -> list[int]:
        return [ord(c) % 128 for c in text]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def chat(self, messages: list[dict[str, str]], *, add_prompt: bool = True) -> str:
        return "".join(f"{m['role'][0]}:{m['content']};" for m in messages)

    def chat_ids(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return self.encode(self.chat(messages))


def random_llama(folder: Path, **more: int) -> None:
    """A Llama of random weights, made without the library that it is compared with elsewhere."""
    sizes = SIZES | more
    hidden, inner, vocab = sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    keys = hidden // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    for i in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{p}_proj": (hidden, hidden) for p in "qo"}
        shapes |= {f"{at}self_attn.{p}_proj": (keys, hidden) for p in "kv"}
        shapes |= {f"{at}mlp.{p}_proj": (inner, hidden) for p in ("gate", "up")}
        shapes |= {f"{at}mlp.down_proj": (hidden, inner)}
        shapes |= {f"{at}{p}_layernorm": (hidden,) for p in ("input", "post_attention")}
    shapes["model.norm"] = (hidden,)
    rng = np.random.default_rng(0)
    weights = {
        f"{name}.weight": np.ones(shape, "f") if len(shape) == 1 else rng.normal(0, 0.1, shape).astype("f")
        for name, shape in shapes.items()
    }
    save_safetensors(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decoder]:
    """decoder(family, context=…) gives a random model; folders are made once, and a model is loaded once."""
    folders: dict[tuple[str, str], Path] = {}
    models: dict[tuple[object, ...], Decoder] = {}

    def make(name: str = "llama", *, context: int = 160, device: str = "cpu", **sizes: int) -> Decoder:
        key = name, repr(sorted(sizes.items()))
        if key not in folders:
            folder = tmp_path_factory.mktemp(name)
            if name == "llama":
                random_llama(folder, **sizes)
            else:
                random_model(folder, name, **sizes)
            folders[key] = folder
        which = (*key, context, device)
        if which not in models:
            models[which] = load(folders[key], context=context, device=device)
            models[which]._tokenizer = Letters()  # type: ignore[assignment]
        return models[which]

    return make


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_folder(folder: Path, template: str = CHATML) -> Path:
    """A random model with a tokenizer of bytes and a chat template, as users have them on disk."""
    import tokenizers

    folder.mkdir(exist_ok=True)
    random_llama(folder, vocab_size=320, max_position_embeddings=2048)
    letters = {c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    inner.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = inner.token_to_id("<|im_end|>")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Decoder]:
    """chat_model() gives a random model that chats, which is made and loaded once."""
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    folder = chat_folder(tmp_path_factory.mktemp("chat") / "tiny")

    model: Decoder = load(folder, context=1024)
    return lambda: model
