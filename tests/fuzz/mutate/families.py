"""Folders of every family of decoders, encoders, speech and images: config.json and the settings beside it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from strata.io import save_safetensors
from strata.models import Decoder, load
from tests.families import oracle, stored
from tests.families.cases import CASES
from tests.fuzz.mutate.base import Files, Format
from tests.fuzz.mutate.changes import change_bytes, change_json, json_bytes
from tests.unit.models import decoder_vectors, encoder_vectors, test_rwkv7

SOUND = {"feature_size": 16, "sampling_rate": 16000, "n_fft": 400, "hop_length": 160, "do_normalize": True,
         "return_attention_mask": True, "feature_extractor_type": "WhisperFeatureExtractor"}  # fmt: skip
IMAGE = {"do_resize": True, "size": {"height": 64, "width": 64}, "crop_size": {"height": 64, "width": 64},
         "do_center_crop": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": 2,
         "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}  # fmt: skip
LETTERS = {"<pad>": 0, "|": 1, "a": 2, "b": 3}
WORDS = ("llama", "mixtral", "rwkv7", "mamba2", "whisper", "silu", "relu2", "gelu", "linear", "yarn", "llama3",
         "dynamic", "longrope", "mrope", "full_attention", "sliding_attention", "mamba", "sqrelu")  # fmt: skip


def sound_models() -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray], dict[str, Any]]]:
    """A configuration of each family, weights that fit it, and files of settings beside it."""
    for record in json.loads(decoder_vectors.FILE.read_text("utf-8")).values():
        shapes = decoder_vectors.unpacked(record["weights"])
        yield record["config"], {k: decoder_vectors.weight(k, s) for k, s in shapes.items()}, {}
    for record in json.loads(encoder_vectors.FILE.read_text("utf-8")).values():
        found = {k: encoder_vectors.weight(k, tuple(s)) for k, s in record["weights"].items()}
        yield record["config"], found, {}
    yield test_rwkv7.CONFIG, test_rwkv7.weights(np.random.default_rng(0)), {}
    for name, record in stored.read().items():
        found = {k: oracle.weight(k, tuple(s)) for k, s in record["weights"].items()}
        beside: dict[str, Any] = {"preprocessor_config.json": IMAGE}
        if CASES[name].generation or "wav" in name or "hubert" in name:
            beside = {"preprocessor_config.json": SOUND, "vocab.json": LETTERS}
        if CASES[name].tokens or CASES[name].generation:
            beside["generation_config.json"] = CASES[name].generation or {"max_length": 20, "num_beams": 2}
        yield record["config"], found, beside


class Families(Format):
    name = "family"

    def prepare(self, folder: Path) -> None:
        self.sound = []
        path = folder / "model.safetensors"
        for config, found, beside in sound_models():
            save_safetensors(path, found)
            self.sound.append((config, path.read_bytes(), beside))
            (folder / "config.json").write_text(json.dumps(config))
            for name, value in beside.items():
                (folder / name).write_text(json.dumps(value))
            assert self.attempt(folder, random.Random(0)) == "ran", config
            for file in folder.iterdir():
                file.unlink()

    def mutant(self, rng: random.Random) -> Files:
        config, weights, beside = rng.choice(self.sound)
        texts: dict[str, Any] = {"config.json": config, **beside}
        changed = rng.choice(list(texts)) if rng.random() < 0.4 else "config.json"
        texts[changed] = change_json(texts[changed], rng, WORDS)
        files = {name: json_bytes(value, rng) for name, value in texts.items()}
        if rng.random() < 0.05:
            files[changed] = change_bytes(files[changed], rng)
        return {**files, "model.safetensors": weights}

    def attempt(self, folder: Path, rng: random.Random) -> str:
        model: Any = load(folder, device="reference")
        if isinstance(model, Decoder):
            builder = model._build(min(model.context, 64), every=rng.random() < 0.5)
            builder.build()
            builder.check()
        elif hasattr(model, "mel"):
            model.mel.features(np.zeros(3000, np.float32))
        elif hasattr(model, "settings") and hasattr(model.settings, "letters"):
            model.settings.text([0, 1, 2, 3])
        elif hasattr(model, "settings") and hasattr(model.settings, "pixels"):
            model.settings.pixels(np.zeros((20, 30, 3), np.uint8))
        elif hasattr(model, "embedder"):
            model.run(input_ids=np.array([[1, 2, 3]]))
        return "ran"
