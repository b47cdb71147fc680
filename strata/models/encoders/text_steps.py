"""What the files of a text encoder say beside its weights: pooling, dense layers, normalisation, scores."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from strata import ops as functions
from strata.core import read_text
from strata.errors import FileError, MissingFileError, OptionError
from strata.io import load_safetensors
from strata.models.encoders.bert import pooled, unit
from strata.models.weights import read_json
from strata.places import here

ops: Any = functions
_MODES = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}  # fmt: skip
UNLIMITED = 1 << 24  # tokens: a tokenizer says more than that where it has no limit
_SHORT = {"mean_sqrt_len_tokens": "mean_sqrt_len", "lasttoken": "last"}
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Tanh": ops.tanh, "ReLU": ops.relu, "GELU": ops.gelu, "Sigmoid": ops.sigmoid, "SiLU": ops.silu,
    "Identity": lambda x: x,
}  # fmt: skip


@dataclass(frozen=True)
class Dense:
    """A linear layer and its activation."""

    weight: np.ndarray
    bias: np.ndarray | None
    activation: str


@dataclass(frozen=True)
class Steps:
    """What is done with the vectors of tokens, and how texts are read."""

    folder: Path  # of the encoder
    pooling: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    after: tuple[Dense | str, ...] = ()  # dense layers, and "normalize"
    limit: int | None = None
    lower: bool = False

    def finish(self, b: Any, x: Any, *, normalize: bool) -> Any:
        """The vector of each text, from those of its tokens."""
        mask = b.mask if self.include_prompt else b.graph.input("pooling_mask", (b.batch, b.length), "bool")
        parts = [pooled(x, mask, kind, False) for kind in self.pooling]
        out = parts[0] if len(parts) == 1 else ops.concat(parts, 1)
        for number, step in enumerate(self.after):
            if isinstance(step, str):
                out = unit(out)
                continue
            name = f"dense{number}"
            held = {f"{name}.weight": step.weight} | ({} if step.bias is None else {f"{name}.bias": step.bias})
            b.weights = {**b.weights, **held}
            rows, columns = step.weight.shape
            out = _ACTIVATIONS[step.activation](b.linear(out, name, rows, columns))
        return unit(out) if normalize and "normalize" not in self.after[-1:] else out

    @property
    def is_plain(self) -> bool:
        """Whether it is pooling of one kind, and no more than normalisation after it."""
        return len(self.pooling) == 1 and all(isinstance(step, str) for step in self.after)

    def width(self, hidden: int) -> int:
        """Features of a vector."""
        size = hidden * len(self.pooling)
        for step in self.after:
            size = size if isinstance(step, str) else step.weight.shape[0]
        return size


def read_steps(folder: Path) -> Steps:
    """From modules.json; a folder without one is an encoder, whose tokens are averaged."""
    place = folder / "modules.json"
    if not place.exists():
        return Steps(folder, limit=text_limit(folder))
    try:
        listed = json.loads(read_text(place))
        rows = [(str(row["type"]).rsplit(".", 1)[1], str(row.get("path", ""))) for row in listed]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise FileError(f"{place} is not a list of modules: {error}", code="F720") from None
    if any(Path(path).is_absolute() or ".." in Path(path).parts for _, path in rows):
        raise FileError(f"{place} names folders outside its own", code="F720")
    encoder, include, after = folder, True, list[Dense | str]()
    pooling: tuple[str, ...] = ("mean",)
    for kind, path in rows:
        match kind:
            case "Transformer":
                encoder = folder / path
            case "Pooling":
                settings = read_json(folder / path / "config.json")
                pooling, include = pooling_modes(settings), settings.get("include_prompt", True) is not False
            case "Dense":
                after.append(_dense(folder / path))
            case "Normalize":
                after.append("normalize")
            case "Dropout":
                pass
            case _:
                raise FileError(f"{place}: modules of the kind {kind!r} are not known", code="F720")
    settings = _settings(encoder)
    return Steps(encoder, pooling, include, tuple(after), text_limit(encoder), bool(settings.get("do_lower_case")))


def _settings(folder: Path) -> dict[str, Any]:
    for name in ("sentence_bert_config.json", "sentence_transformer_config.json"):
        if (folder / name).exists():
            return read_json(folder / name)
    return {}


def text_limit(folder: Path) -> int | None:
    """Tokens of a text that the files of a model say are read."""
    place = folder / "tokenizer_config.json"
    said = [
        _settings(folder).get("max_seq_length"),
        read_json(place).get("model_max_length") if place.exists() else None,
    ]
    return next((n for n in said if isinstance(n, int) and 0 < n < UNLIMITED), None)


def reads_types(folder: Path) -> bool:
    """Whether the tokenizer of a model tells the texts of a pair apart by types of tokens."""
    place = folder / "tokenizer_config.json"
    settings = read_json(place) if place.exists() else {}
    named = settings.get("model_input_names")
    if isinstance(named, list):
        return "token_type_ids" in named
    return settings.get("tokenizer_class") not in ("TokenizersBackend", "PreTrainedTokenizerFast")


def pooling_modes(settings: dict[str, Any]) -> tuple[str, ...]:
    """How vectors of tokens become one, by the file of a Pooling module."""
    named = settings.get("pooling_mode")
    if named:
        listed = [named] if isinstance(named, str) else list(named)
        return tuple(_SHORT.get(str(mode), str(mode)) for mode in listed)
    return tuple(mode for key, mode in _MODES.items() if settings.get(key)) or ("mean",)


def _dense(folder: Path) -> Dense:
    settings = read_json(folder / "config.json")
    if not (folder / "model.safetensors").exists():
        raise MissingFileError(f"{folder} has no model.safetensors", code="F720")
    weights = load_safetensors(folder / "model.safetensors")
    activation = str(settings.get("activation_function", "Tanh")).rsplit(".", 1)[-1].strip("()'> ")
    if activation not in _ACTIVATIONS:
        raise FileError(f"{folder}: activation {activation!r} is not one of {', '.join(_ACTIVATIONS)}", code="F720")
    if "linear.weight" not in weights:
        raise FileError(f"{folder} has no linear.weight", code="F720")
    bias = weights.get("linear.bias") if settings.get("bias", True) else None
    return Dense(np.asarray(weights["linear.weight"]), None if bias is None else np.asarray(bias), activation)


# ------------------------------------------------------------------------------------------------------------- scores

Scores = Callable[[np.ndarray], np.ndarray]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x.astype(np.float64))), np.float32)


def _same(x: np.ndarray) -> np.ndarray:
    return x


# what files name, by the last part of the name: torch.nn.modules.linear.Identity
_OF_SCORES: dict[str, Scores] = {
    "Identity": _same, "Sigmoid": _sigmoid, "Tanh": np.tanh, "ReLU": lambda x: np.maximum(x, 0),
}  # fmt: skip


def _said_activation(folder: Path) -> Scores | None:
    """What the files of a model say becomes of its scores, where they do; many rerankers give them as they are."""
    config, beside = folder / "config.json", folder / "config_sentence_transformers.json"
    said = read_json(config) if config.exists() else {}
    own = said.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or said.get("sbert_ce_default_activation_function")
    named = named or (read_json(beside).get("activation_fn") if beside.exists() else None)
    if named is None:
        return None
    found = _OF_SCORES.get(str(named).rsplit(".", 1)[-1])
    if found is None:
        known = ", ".join(_OF_SCORES)
        raise OptionError(
            f"{folder}: activation {named!r} is not one of {known}", code="O721", place=here(), fix="activation_fn=…"
        )
    return found


def score_activation(folder: Path | None, labels: int) -> Scores:
    """What becomes of the scores of a model with so many labels; without a folder, no file says so."""
    said = None if folder is None else _said_activation(folder)
    return said or (_sigmoid if labels == 1 else _same)
