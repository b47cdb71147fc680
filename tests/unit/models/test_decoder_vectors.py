"""Decoders of every family give the logits and the tokens that transformers gives (decoder_vectors.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.io import save_safetensors
from strata.models import PAGE, PagedCache, Sampler, load
from tests.unit.models.decoder_vectors import FILE, NEW, prompt, unpacked, weight

KNOWN: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
PAGED = ("cohere2", "deepseek_v3", "gemma3n", "gpt_oss", "jamba", "llama4")


def folder(path: Path, name: str) -> Path:
    """A model as a folder."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(KNOWN[name]["config"]), "utf-8")
    weights = {k: weight(k, shape) for k, shape in unpacked(KNOWN[name]["weights"]).items()}
    save_safetensors(path / "model.safetensors", weights)
    return path


@pytest.mark.parametrize("name", KNOWN)
def test_logits_and_tokens(name: str, tmp_path: Path) -> None:
    model, ids = load(folder(tmp_path / "model", name)), prompt()
    wanted = np.array(KNOWN[name]["logits"])
    state = model.start()
    found = model.step(state, ids)[0]
    assert np.abs(found - wanted).max() <= 2e-4 * np.abs(wanted).max()
    assert list(model.tokens(ids[0].tolist(), NEW, Sampler())) == KNOWN[name]["tokens"]
    state = model.start()  # again in two pieces and a single token
    for start, end in ((0, 9), (9, 13), (13, 14)):
        found = model.step(state, np.ascontiguousarray(ids[:, start:end]))[0]
    assert np.abs(found - wanted).max() <= 2e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("name", PAGED)
def test_pages(name: str, tmp_path: Path) -> None:
    model, ids = load(folder(tmp_path / "model", name)), prompt()
    cache = PagedCache(model, 4)
    tables = [cache.table(), cache.table()]
    for table in tables:
        table.reserve(PAGE + 1)
    cache.step(tables[1:], np.ascontiguousarray(ids[:, :3]))  # of another length
    cache.step(tables[:1], np.ascontiguousarray(ids[:, :12]))
    found = cache.step(tables[:1], np.ascontiguousarray(ids[:, 12:]))[0]
    wanted = np.array(KNOWN[name]["logits"])
    assert np.abs(found - wanted).max() <= 2e-4 * np.abs(wanted).max()
