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
_PLACED = ("Pooling", "WordWeights", "Normalize", "LayerNorm")  # modules that stand on one side of the pooling
UNLIMITED = 1 << 24  # tokens: a tokenizer says more than that where it has no limit
_SHORT = {"mean_sqrt_len_tokens": "mean_sqrt_len", "lasttoken": "last"}
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Tanh": ops.tanh, "ReLU": ops.relu, "GELU": ops.gelu, "Sigmoid": ops.sigmoid, "SiLU": ops.silu, "ELU": ops.elu,
    "Identity": lambda x: x, "NoneType": lambda x: x, "LeakyReLU": lambda x: ops.leaky_relu(x, negative_slope=0.01),
    "Softplus": ops.softplus, "Mish": ops.mish, "SELU": ops.selu, "CELU": ops.celu, "ReLU6": ops.relu6,
    "Softsign": ops.softsign, "Hardtanh": ops.hardtanh, "Hardswish": ops.hardswish, "LogSigmoid": ops.log_sigmoid,
    "Hardsigmoid": ops.hardsigmoid,
}  # fmt: skip


@dataclass(frozen=True)
class Dense:
    """A linear layer and its activation; with a residual, what goes in is added to what comes out."""

    weight: np.ndarray
    bias: np.ndarray | None
    activation: str
    residual: bool = False
    across: np.ndarray | None = None  # the matrix that brings the residual to the width of the output

    def width(self, size: int) -> int:
        return int(self.weight.shape[0])

    def apply(self, b: Any, x: Any, name: str) -> Any:
        rows, columns = self.weight.shape
        held = {"linear.weight": self.weight, "linear.bias": self.bias, "residual.weight": self.across}
        _hold(b, name, held)
        out = _ACTIVATIONS[self.activation](b.linear(x, f"{name}.linear", rows, columns))
        if not self.residual:
            return out
        return out + (x if self.across is None else b.linear(x, f"{name}.residual", rows, columns))


@dataclass(frozen=True)
class Norm:
    """Layer normalisation of a text's vector."""

    gamma: np.ndarray
    beta: np.ndarray

    def width(self, size: int) -> int:
        return size

    def apply(self, b: Any, x: Any, name: str) -> Any:
        _hold(b, name, {"weight": self.gamma, "bias": self.beta})
        return ops.layer_norm(x, b.param(f"{name}.weight", self.gamma.shape), b.param(f"{name}.bias", self.beta.shape))


@dataclass(frozen=True)
class Normalise:
    """Rows of length 1."""

    def width(self, size: int) -> int:
        return size

    def apply(self, b: Any, x: Any, name: str) -> Any:
        return unit(x)


@dataclass(frozen=True)
class WordWeights:
    """A weight for each token of the vocabulary."""

    table: np.ndarray  # f32[vocabulary]

    def of_tokens(self, b: Any, name: str) -> Any:
        """The weights of the tokens of each text, 0 where there is none: f32[B, S]."""
        _hold(b, name, {"weight": self.table})
        return ops.take(b.param(f"{name}.weight", self.table.shape), b.ids, axis=0) * ops.cast(b.mask, "f32")


def _hold(b: Any, name: str, arrays: dict[str, np.ndarray | None]) -> None:
    b.weights = {**b.weights, **{f"{name}.{key}": held for key, held in arrays.items() if held is not None}}


@dataclass(frozen=True)
class Steps:
    """What is done with the vectors of tokens, and how texts are read."""

    folder: Path  # of the encoder
    pooling: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    before: tuple[Dense | WordWeights, ...] = ()  # of the vectors of tokens
    after: tuple[Dense | Norm | Normalise, ...] = ()  # of the vector of a text
    limit: int | None = None
    lower: bool = False

    def tokens(self, b: Any, x: Any) -> tuple[Any, Any]:
        """The vectors of tokens as they are pooled, and the sum of their weights where words have weights."""
        total = None
        for number, step in enumerate(self.before):
            if isinstance(step, Dense):
                x = step.apply(b, x, f"token{number}")
                continue
            weights = step.of_tokens(b, f"words{number}")
            x, total = x * ops.insert_axis(weights, -1), ops.sum(weights, 1, keepdims=True)
        return x, total

    def finish(self, b: Any, x: Any, *, normalize: bool) -> Any:
        """The vector of each text, from those of its tokens."""
        return self.whole(b, x, normalize=normalize)[0]

    def whole(self, b: Any, x: Any, *, normalize: bool) -> tuple[Any, Any]:
        """The vector of each text, and those of its tokens as they are pooled."""
        mask = b.mask if self.include_prompt else b.graph.input("pooling_mask", (b.batch, b.length), "bool")
        x, total = self.tokens(b, x)
        kinds = [kind if self.include_prompt or kind != "cls" else "first" for kind in self.pooling]
        parts = [pooled(x, mask, kind, False, total) for kind in kinds]
        out = parts[0] if len(parts) == 1 else ops.concat(parts, 1)
        for number, step in enumerate(self.after):
            out = step.apply(b, out, f"after{number}")
        return unit(out) if normalize and Normalise() not in self.after[-1:] else out, x

    def weighted(self, ids: list[list[int]]) -> list[list[int]]:
        """The tokens of texts, each of which has a weight where words have weights."""
        for step in self.before:
            wrong = max(map(max, filter(None, ids)), default=0) if isinstance(step, WordWeights) else 0
            if isinstance(step, WordWeights) and wrong >= len(step.table):
                raise FileError(f"{self.folder}: token {wrong} has no weight, there are {len(step.table)}", code="F720")
        return ids

    @property
    def is_plain(self) -> bool:
        """Whether it is pooling of one kind, and no more than normalisation after it."""
        plain = all(isinstance(step, Normalise) for step in self.after)
        return len(self.pooling) == 1 and not self.before and plain

    def width(self, hidden: int) -> int:
        """Features of a vector."""
        for step in self.before:
            hidden = step.width(hidden) if isinstance(step, Dense) else hidden
        size = hidden * len(self.pooling)
        for after in self.after:
            size = after.width(size)
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
    encoder, include = folder, True
    before, after = list[Dense | WordWeights](), list[Dense | Norm | Normalise]()
    is_pooled = False
    pooling: tuple[str, ...] = ("mean",)
    for kind, path in rows:
        if is_pooled == (kind in ("Pooling", "WordWeights")) and kind in _PLACED:
            told = "after the pooling" if is_pooled else "before the pooling"
            raise FileError(f"{place}: a module of the kind {kind!r} is {told}", code="F720")
        match kind:
            case "Transformer":
                encoder = folder / path
            case "Pooling":
                settings = read_json(folder / path / "config.json")
                pooling, include = pooling_modes(settings), settings.get("include_prompt", True) is not False
                is_pooled = True
            case "Dense":
                step = _dense(folder / path, of_tokens=not is_pooled)
                before.append(step) if not is_pooled else after.append(step)
            case "Normalize":
                after.append(Normalise())
            case "LayerNorm":
                found = _tensors(folder / path, "norm.weight", "norm.bias")
                after.append(Norm(found["norm.weight"], found["norm.bias"]))
            case "WordWeights":
                table = _tensors(folder / path, "emb_layer.weight")["emb_layer.weight"]
                before.append(WordWeights(np.asarray(table, np.float32).reshape(-1)))
            case "Dropout":
                pass
            case _:
                raise FileError(f"{place}: modules of the kind {kind!r} are not known", code="F720")
    settings = _settings(encoder)
    limit, lower = text_limit(encoder), bool(settings.get("do_lower_case"))
    return Steps(encoder, pooling, include, tuple(before), tuple(after), limit, lower)


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


def _tensors(folder: Path, *needed: str) -> dict[str, np.ndarray]:
    """The tensors of a module, of which some must be there."""
    place = folder / "model.safetensors"
    if not place.exists():
        raise MissingFileError(f"{folder} has no model.safetensors", code="F720")
    found = {name: np.asarray(held) for name, held in load_safetensors(place).items()}
    missing = next((name for name in needed if name not in found), None)
    if missing is not None:
        raise FileError(f"{folder} has no {missing}", code="F720")
    return found


def _dense(folder: Path, *, of_tokens: bool) -> Dense:
    settings = read_json(folder / "config.json")
    weights = _tensors(folder, "linear.weight")
    named = settings.get("activation_function", "Tanh")
    activation = "Identity" if named is None else str(named).rsplit(".", 1)[-1].strip("()'> ")
    if activation not in _ACTIVATIONS:
        raise FileError(f"{folder}: activation {activation!r} is not one of {', '.join(_ACTIVATIONS)}", code="F720")
    wanted = "token_embeddings" if of_tokens else "sentence_embedding"
    read = settings.get("module_input_name") or "sentence_embedding"
    written = settings.get("module_output_name") or read
    if (read, written) != (wanted, wanted):
        where = "before" if of_tokens else "after"
        message = f"{folder}: a Dense {where} the pooling reads and writes {wanted}, this one {read} and {written}"
        raise FileError(message, code="F720")
    bias = weights.get("linear.bias") if settings.get("bias", True) else None
    weight, residual = weights["linear.weight"], bool(settings.get("use_residual"))
    if weight.ndim != 2:
        raise FileError(f"{folder}: linear.weight is a matrix, got {weight.ndim} axes", code="F720")
    across = (
        _tensors(folder, "residual.weight")["residual.weight"]
        if residual and weight.shape[0] != weight.shape[1]
        else None
    )
    return Dense(weight, bias, activation, residual, across)


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
