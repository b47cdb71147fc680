"""Tiny random decoders for the tests of serving."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from strata.io import save_safetensors
from strata.models import Decoder, load
from tests.unit.models.random_models import SIZES, random_model


class Letters:
    """A tokenizer of single letters, so that generation is tested without a vocabulary."""

    eos, bos, template = (), None, None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [ord(c) % 128 for c in text]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def chat(self, messages: list[dict[str, str]], *, add_prompt: bool = True) -> str:
        return "".join(f"{m['role'][0]}:{m['content']};" for m in messages)


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
    """decoder(family, context=…) gives a random model; folders are made once."""
    folders: dict[tuple[str, str], Path] = {}

    def make(name: str = "llama", *, context: int = 160, device: str = "cpu", **sizes: int) -> Decoder:
        key = name, repr(sorted(sizes.items()))
        if key not in folders:
            folder = tmp_path_factory.mktemp(name)
            if name == "llama":
                random_llama(folder, **sizes)
            else:
                random_model(folder, name, **sizes)
            folders[key] = folder
        model: Decoder = load(folders[key], context=context, device=device)
        model._tokenizer = Letters()  # type: ignore[assignment]
        return model

    return make
