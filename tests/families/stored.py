"""Stored results of transformers for every family: `python -m tests.families --write` makes vectors.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from strata.models import Sampler
from tests.families.cases import Case

BEAMS = (1, 4)
TOKENS = 32
FILE = Path(__file__).with_name("vectors.json")
KEPT = 24  # numbers of a result that are stored, spread over it


SPEECH: list[tuple[int, dict[str, Any]]] = [  # frames of sound (64 are a window), and what is asked of it
    (64, {"language": "de", "task": "transcribe", "timestamps": False}),
    (64, {"language": "en", "task": "translate", "timestamps": True}),
    (64, {"task": "transcribe", "timestamps": True}),
    (64, {"language": "fr", "task": "transcribe", "timestamps": True, "beams": 3}),
    (307, {"language": "en", "task": "transcribe", "timestamps": True}),
]


def features(frames: int) -> np.ndarray:
    return np.random.default_rng(frames).standard_normal((16, frames)).astype(np.float32)


def transcribed(model: Any) -> list[list[int]]:
    """Our tokens of each of SPEECH."""
    found = [model.transcribe_features(features(frames), **options) for frames, options in SPEECH]
    return [[t for segment in made.segments for t in segment.tokens] for made in found]


def complete(folder: Path, generation: dict[str, Any], vocabulary: int) -> None:
    """What a folder of speech has beside its weights: generation_config.json, and a tokenizer of the words w0, w1, …"""
    from tokenizers import Tokenizer, models

    (folder / "generation_config.json").write_text(json.dumps(generation), "utf-8")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.save(str(folder / "tokenizer.json"))


def sampled(array: np.ndarray) -> list[float]:
    """Some numbers of a result, in a fixed order."""
    flat = array.reshape(-1)
    rows = np.linspace(0, flat.size - 1, min(KEPT, flat.size)).astype(int)
    return [round(float(x), 6) for x in flat[rows]]


def generated(model: Any, case: Case, beams: int) -> list[list[int]]:
    """The tokens that we generate: sources of several lengths in one batch."""
    given = case.inputs(np.random.default_rng(0))
    rows = [list(map(int, row[kept])) for row, kept in zip(given["input_ids"], given["attention_mask"], strict=True)]
    found: list[list[int]] = model.generate_ids(rows, max_tokens=TOKENS, beams=beams)
    return found


def seen_tokens(model: Any, case: Case) -> list[int]:
    """The tokens that we generate from a prompt with images."""
    given = case.inputs(np.random.default_rng(0))
    read = model.prompt_of(given.pop("input_ids")[0], given)
    state = model.start()
    state.seen = read.seen
    return list(model.tokens(read.ids, TOKENS, Sampler(), (), state))


def record(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], found: dict[str, np.ndarray]) -> dict[str, Any]:
    """What is stored of a model."""
    return {
        "config": config, "weights": {k: list(v) for k, v in shapes.items()},
        "shapes": {k: list(v.shape) for k, v in found.items()}, "results": {k: sampled(v) for k, v in found.items()},
    }  # fmt: skip


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
    return found


def write(records: dict[str, Any]) -> None:
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in records.items())
    FILE.write_text(f"{{\n{lines}\n}}\n", "utf-8")
