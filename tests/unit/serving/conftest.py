"""Tiny random decoders for the tests of serving."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from strata.models import Decoder, load
from tests.unit.models.random_models import random_model


class Letters:
    """A tokenizer of single letters, so that generation is tested without a vocabulary."""

    eos, bos, template = (), None, None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [ord(c) % 128 for c in text]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def chat(self, messages: list[dict[str, str]], *, add_prompt: bool = True) -> str:
        return "".join(f"{m['role'][0]}:{m['content']};" for m in messages)


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Decoder]:
    """decoder(family, context=…) gives a random model; folders are made once."""
    folders: dict[tuple[str, str], Path] = {}

    def make(name: str = "llama", *, context: int = 160, device: str = "cpu", **sizes: int) -> Decoder:
        key = name, repr(sorted(sizes.items()))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(name)
            random_model(folders[key], name, **sizes)
        model: Decoder = load(folders[key], context=context, device=device)
        model._tokenizer = Letters()  # type: ignore[assignment]
        return model

    return make
