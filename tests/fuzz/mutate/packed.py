"""Quantised safetensors folders: the header, the quantiser's configuration and the parts of weights are changed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from strata.io import GgufTensor, packed_weights
from strata.models.weights import folder_weights, read_json
from tests.fuzz.mutate.base import Files, Format
from tests.fuzz.mutate.changes import change_bytes, change_json, json_bytes
from tests.unit.models.test_packed import CONFIG, LAYOUTS, saved


class Packed(Format):
    name = "packed"

    def prepare(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.folders = []
        for i, (settings, make) in enumerate(LAYOUTS.values()):
            parts, _ = make(rng, (64, 128))
            tensors = {f"model.layers.0.mlp.up_proj.{end}": np.ascontiguousarray(part) for end, part in parts.items()}
            place = saved(folder / str(i), tensors | {"norm.weight": np.ones(4, np.float32)})
            data = (place / "model.safetensors").read_bytes()
            size = int.from_bytes(data[:8], "little")
            self.folders.append((settings, json.loads(data[8 : 8 + size]), data[8 + size :]))
            assert any(isinstance(t, GgufTensor) for t in packed_weights(tensors, settings).values())

    def mutant(self, rng: random.Random) -> Files:
        settings, header, body = rng.choice(self.folders)
        words = ("F16", "I32", "U8", "F8_E4M3", "BF16", "awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors")
        if rng.random() < 0.6:
            header = self._swapped(header, rng) if rng.random() < 0.7 else change_json(header, rng, words)
        given = change_json(settings, rng, words) if rng.random() < 0.6 else settings
        text = json_bytes(header, rng)
        text += b" " * (-len(text) % 8)
        config = json.dumps({**CONFIG, "quantization_config": given}).encode("utf-8", "surrogatepass")
        data = change_bytes(body, rng) if rng.random() < 0.3 and body else body
        return {"model.safetensors": len(text).to_bytes(8, "little") + text + data, "config.json": config}

    def _swapped(self, header: dict[str, object], rng: random.Random) -> dict[str, object]:
        """Tensors under each other's names, left out, or of another shape and the same size."""
        names = [n for n in header if n != "__metadata__"]
        first, second = rng.choice(names), rng.choice(names)
        made = dict(header)
        match rng.randrange(3):
            case 0:
                made[first], made[second] = header[second], header[first]
            case 1:
                made[first + rng.choice((".x", "s", ".scales", ".qweight"))] = made.pop(first)
            case _:
                entry = dict(made[first])  # type: ignore[call-overload]
                shape = list(entry["shape"])
                rng.shuffle(shape)
                entry["shape"] = rng.choice((shape, [*shape, 1], [int(np.prod(shape))], [1, *shape]))
                made[first] = entry
        return made

    def attempt(self, folder: Path, rng: random.Random) -> str:
        read_json(folder / "config.json")
        for tensor in folder_weights(folder).values():
            if isinstance(tensor, GgufTensor):
                tensor.dequantize().sum()
        return "read"
