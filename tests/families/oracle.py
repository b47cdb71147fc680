"""What transformers says about a small model whose weights follow from their names."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from strata.io import load_safetensors, save_safetensors
from tests.families.cases import Case
from tests.families.stored import SPEECH, TOKENS, features


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A weight that follows from its name: scales of norms are near 1, variances are positive."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    if name.endswith("running_var"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    drawn = rng.standard_normal(shape) * (0.15 if len(shape) > 1 else 0.1)
    is_scale = len(shape) == 1 and name.endswith(("weight", "lambda1"))
    return (drawn + is_scale).astype(np.float32)


def transformers() -> Any:
    """The package; without torchvision where that does not fit the torch beside it."""
    try:
        import torchvision  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except Exception:  # noqa: BLE001 - it fails in its own ways
        sys.modules["torchvision"] = None  # type: ignore[assignment]
    import transformers as found  # type: ignore[import-not-found,unused-ignore]

    found.logging.set_verbosity_error()
    found.logging.disable_progress_bar()
    return found


def make(case: Case, folder: Path) -> Any:
    """The model of transformers, saved to a folder and loaded again."""
    package = transformers()
    kind = getattr(package, case.model)
    kind(kind.config_class(**case.config)).save_pretrained(folder)
    place = folder / "model.safetensors"
    shapes = {name: tuple(x.shape) for name, x in load_safetensors(place).items()}
    write_weights(folder, shapes)
    return kind.from_pretrained(folder).eval()


def write_weights(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A file of weights that follow from their names."""
    place = folder / "model.safetensors"
    place.unlink(missing_ok=True)
    save_safetensors(place, {name: weight(name, shape) for name, shape in shapes.items()})


def _kind(name: str, array: np.ndarray) -> np.ndarray:
    return array.astype(np.int64) if name == "attention_mask" else array


def results(case: Case, model: Any) -> dict[str, np.ndarray]:
    """What transformers computes."""
    import torch

    given = {k: torch.tensor(_kind(k, v)) for k, v in case.inputs(np.random.default_rng(0)).items()}
    with torch.no_grad():
        out = model(**given, **_options(case))
    return {name: np.asarray(out[name]) for name in case.outputs}


def _options(case: Case) -> dict[str, Any]:
    import torch

    return {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in case.options.items()}


def seen_tokens(case: Case, model: Any) -> list[int]:
    """What transformers generates from a prompt with images."""
    import torch

    given = {k: torch.tensor(v) for k, v in case.inputs(np.random.default_rng(0)).items()}
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        made = model.generate(**given, **_options(case), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return [int(t) for t in made[0, given["input_ids"].shape[1] :]]


def tokens(case: Case, model: Any, beams: int, count: int = TOKENS) -> list[list[int]]:
    """What transformers generates, without what the decoder starts with, and without the end and what follows it."""
    import torch

    given = {k: torch.tensor(v) for k, v in case.inputs(np.random.default_rng(0)).items() if "decoder" not in k}
    if "attention_mask" in given:
        given["attention_mask"] = given["attention_mask"].long()
    with torch.no_grad():
        made = model.generate(**given, max_new_tokens=count, num_beams=beams, do_sample=False)
    ends = model.generation_config.eos_token_id
    found = []
    for row in made.tolist():
        stop = next((i for i, t in enumerate(row) if i and t == ends), len(row))
        found.append(row[1:stop])
    return found


def transcripts(case: Case, model: Any) -> list[list[int]]:
    """The tokens of each of `stored.SPEECH`, without the end."""
    import torch

    package = transformers()
    model.generation_config = package.GenerationConfig(**case.generation)
    found = []
    for frames, options in SPEECH:
        asked = {"return_timestamps" if k == "timestamps" else "num_beams" if k == "beams" else k: v
                 for k, v in options.items()}  # fmt: skip
        with torch.no_grad():
            made = model.generate(
                torch.tensor(features(frames)[None]), attention_mask=torch.ones((1, frames)), **asked
            )  # fmt: skip
        found.append([t for t in made.tolist()[0] if t != case.generation["eos_token_id"]])
    return found


def settings(folder: Path) -> dict[str, Any]:
    """What config.json says, without what only transformers asks for."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return found


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, relative to the largest number."""
    if found.shape != wanted.shape:
        raise AssertionError(f"shapes differ: {found.shape} and {wanted.shape}")
    return float(np.abs(found - wanted).max() / max(float(np.abs(wanted).max()), 1e-9))
