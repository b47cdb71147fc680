"""Every family of decoders against transformers on random weights.

A table: the largest relative difference of logits, by one prefill, in pieces with decode steps, and over pages;
whether 32 greedily generated tokens are those of transformers, alone and in a batch of prompts of several lengths; and
whether the weights, saved and loaded again, give the same bits. Needs torch and transformers.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from strata.io import load_safetensors, save_safetensors
from strata.models import Decoder, PagedCache, Sampler, load
from tests.unit.models.random_models import FAMILIES, random_model, reference_logits

LIMIT = 2e-4
NEW = 32
LENGTHS = (5, 37, 17)


def greedy(model: Any, ids: np.ndarray) -> list[int]:
    """What transformers generates, token by token, by its own KV cache."""
    import torch

    with torch.no_grad():
        out = model.generate(
            torch.tensor(ids[None]).long(), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
            attention_mask=torch.ones((1, len(ids)), dtype=torch.long),
        )  # fmt: skip
    return [int(t) for t in out[0, len(ids) :]]


def pieces(model: Decoder, ids: np.ndarray) -> np.ndarray:
    """Logits of every token: 40 at once, 20 one by one, the rest at once."""
    state = model.start(len(ids), 16)
    found = [model.step(state, np.ascontiguousarray(ids[:, :40]), every=True)]
    found += [model.step(state, np.ascontiguousarray(ids[:, i : i + 1]))[:, None] for i in range(40, 60)]
    return np.concatenate([*found, model.step(state, np.ascontiguousarray(ids[:, 60:]), every=True)], 1)


def paged(model: Decoder, ids: np.ndarray) -> np.ndarray:
    """Logits of every token over a paged cache: 48 at once, then one by one, two sequences together."""
    cache = PagedCache(model, 20)
    tables = [cache.table() for _ in ids]
    for table in tables:
        table.reserve(ids.shape[1])
    found = [cache.step(tables, np.ascontiguousarray(ids[:, :48]), every=True)]
    for i in range(48, ids.shape[1]):
        found.append(cache.step(tables, np.ascontiguousarray(ids[:, i : i + 1]), every=True))
    return np.concatenate(found, 1)


def saved_again(folder: Path, copy: Path) -> None:
    """The folder with its weights read and written by us."""
    copy.mkdir()
    shutil.copy(folder / "config.json", copy)
    weights = {name: np.array(w) for name, w in load_safetensors(folder / "model.safetensors").items()}
    save_safetensors(copy / "model.safetensors", weights)


def compare(name: str, folder: Path) -> dict[str, Any]:
    """The figures of one family."""
    reference = random_model(folder / "model", name)
    ours = load(folder / "model", context=128)
    ids = np.random.default_rng(1).integers(3, 128, (2, 96)).astype(np.int32)
    wanted = reference_logits(reference, ids)
    scale = float(np.abs(wanted).max())
    first = ours.run(input_ids=ids)["logits"]
    ways = {"prefill": first, "steps": pieces(ours, ids), "paged": paged(ours, ids)}
    found: dict[str, Any] = {way: float(np.abs(logits - wanted).max()) / scale for way, logits in ways.items()}
    prompts = [ids[i % 2, :n] for i, n in enumerate(LENGTHS)]
    alone = [greedy(reference, prompt) for prompt in prompts]
    tokens = [list(ours.tokens(list(map(int, p)), NEW, Sampler())) for p in prompts]
    rows = list(ours.token_rows([list(map(int, p)) for p in prompts], NEW, Sampler()))
    found["tokens"] = tokens == alone
    found["batch"] = [[row[i] for row in rows] for i in range(len(prompts))] == alone
    saved_again(folder / "model", folder / "again")
    again = load(folder / "again", context=128).run(input_ids=ids)["logits"]
    found["again"] = bool((again == first).all())
    found["ok"] = max(found[way] for way in ways) <= LIMIT and all(found[k] for k in ("tokens", "batch", "again"))
    return found


NAMES = (*FAMILIES, "gpt2")


def table(names: Sequence[str]) -> bool:
    """Print the figures of these families; whether all are as they are to be."""
    warnings.simplefilter("ignore")
    print("| family | prefill | steps | paged | 32 tokens | batch | loaded again |\n|---|---|---|---|---|---|---|")
    wrong = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = compare(name, Path(folder))
            except Exception as error:  # noqa: BLE001 - the others are compared, too
                print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0]} |", flush=True)
                wrong.append(name)
                continue
        shown = [f"{found[way]:.0e}" for way in ("prefill", "steps", "paged")]
        shown += ["equal" if found[key] else "differ" for key in ("tokens", "batch", "again")]
        print(f"| {name} | {' | '.join(shown)} |", flush=True)
        if not found["ok"]:
            wrong.append(name)
    print(
        f"\n{len(names) - len(wrong)} of {len(names)} within {LIMIT}" + (f"; not: {', '.join(wrong)}" if wrong else "")
    )
    return not wrong
