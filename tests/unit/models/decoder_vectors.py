"""Logits and tokens of small decoders of every family, as transformers computes them.

`python -m tests.unit.models.decoder_vectors [NAME ...]` writes decoder_vectors.json, where transformers is installed.
Weights follow from their names, so that only the names, the configuration and the results are kept.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tests.unit.models.random_models import FAMILIES, family_model

FILE = Path(__file__).with_suffix(".json")
SMALL = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "max_position_embeddings": 64}
PROMPT, NEW = 14, 8  # tokens
NUMBER = r"(?<=\.)\d+(?=\.)"  # of a layer or an expert, in a name


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A weight that follows from its name; scales of norms are near 1."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape) * 0.2
    is_scale = len(shape) == 1 and name.endswith("weight")
    return np.asarray(drawn * (0.3 if is_scale else 1.0) + is_scale, np.float32)


def prompt(vocab: int = SMALL["vocab_size"]) -> np.ndarray:
    return np.random.default_rng(0).integers(3, vocab, (1, PROMPT)).astype(np.int32)


def packed(shapes: dict[str, tuple[int, ...]]) -> list[list[Any]]:
    """Names with `#` for their numbers, shapes, and the numbers of each that there are."""
    found: dict[tuple[str, tuple[int, ...]], list[list[int]]] = {}
    for name, shape in shapes.items():
        numbers = [int(n) for n in re.findall(NUMBER, name)]
        found.setdefault((re.sub(NUMBER, "#", name), tuple(shape)), []).append(numbers)
    return [[name, list(shape), numbers] for (name, shape), numbers in found.items()]


def unpacked(found: list[list[Any]]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for pattern, shape, lists in found:
        for numbers in lists:
            left = iter(numbers)
            shapes[re.sub("#", lambda _, left=left: str(next(left)), pattern)] = tuple(shape)  # type: ignore[misc]
    return shapes


def results(name: str, folder: Path) -> dict[str, Any]:
    """What transformers computes with weights that follow from their names."""
    import torch

    model = family_model(name, SMALL).eval()
    model.save_pretrained(folder)
    from safetensors.numpy import load_file, save_file  # type: ignore[import-not-found,unused-ignore]

    shapes = {k: v.shape for k, v in load_file(folder / "model.safetensors").items()}
    save_file({k: weight(k, s) for k, s in shapes.items()}, folder / "model.safetensors", {"format": "pt"})
    model = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor(prompt()).long()
    with torch.no_grad():
        logits = model(ids).logits[0, -1].numpy()
        out = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
                             attention_mask=torch.ones_like(ids))  # fmt: skip
    config = json.loads((folder / "config.json").read_text("utf-8"))
    kept = {
        k: v
        for k, v in config.items()
        if k not in ("transformers_version", "architectures") and (v is not None or k == "sliding_window")
    }  # which is one that families have if they say nothing
    return {
        "config": kept, "weights": packed(shapes), "logits": [round(float(x), 5) for x in logits],
        "tokens": [int(t) for t in out[0, PROMPT:]],
    }  # fmt: skip


def main() -> None:
    """Write what transformers computes."""
    import tempfile

    found = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    for name in sys.argv[1:] or [*FAMILIES, "gpt2"]:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = results(name, Path(folder))
    lines = ",\n".join(f" {json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in sorted(found.items()))
    FILE.write_text(f"{{\n{lines}\n}}\n", "utf-8")


if __name__ == "__main__":
    main()
