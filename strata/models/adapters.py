"""LoRA adapters from PEFT folders: low-rank updates of a model's matmuls, merged into its weights or kept apart."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from strata.errors import FileError
from strata.io import GgufTensor, load_safetensors
from strata.models.weights import Weights, read_json, without_prefix

PREFIXES = ("language_model.model.", "model.language_model.", "model.", "language_model.", "bert.", "distilbert.",
            "transformer.")  # fmt: skip
LARGEST = 1e30  # of an alpha
LONGEST = 256  # letters of a pattern, and of the end of a name that it is compared with
_SLOW = re.compile(r"[*+?}][^()]*\)+[*+{]")  # a repeated group with a repetition in it takes exponential time
_PART = re.compile(r"(.*)\.lora_([AB])(?:\.default)?\.weight\Z")


@dataclass(frozen=True, eq=False)
class LowRank:
    """A change of one matmul: W becomes W + scale · B · A, with A [rank, in] and B [out, rank]."""

    a: np.ndarray
    b: np.ndarray
    scale: float

    def matrix(self) -> np.ndarray:
        """The whole change, f32[out, in]."""
        return (self.b.astype(np.float32) @ self.a.astype(np.float32)) * np.float32(self.scale)


@dataclass(frozen=True, eq=False)
class Adapter:
    """Changes by the name of a matmul, without `.weight`; weights that are replaced as a whole."""

    changes: dict[str, LowRank]
    replaced: dict[str, np.ndarray]


def load_adapter(folder: str | os.PathLike[str]) -> Adapter:
    """An adapter from a folder with adapter_config.json and adapter_model.safetensors."""
    place = Path(folder)
    settings = read_json(place / "adapter_config.json")
    if settings.get("peft_type", "LORA") != "LORA" or settings.get("use_dora"):
        kind = "DoRA" if settings.get("use_dora") else settings.get("peft_type")
        raise FileError(f"adapter: {place.name} is of the kind {kind}, LoRA is known", code="F140")
    tensors = load_safetensors(place / "adapter_model.safetensors")
    plain = without_prefix({n.removeprefix("base_model.model."): t for n, t in tensors.items()}, PREFIXES)
    parts: dict[str, dict[str, np.ndarray]] = {}
    replaced: dict[str, np.ndarray] = {}
    for name, tensor in plain.items():
        assert isinstance(tensor, np.ndarray)
        found = _PART.match(name)
        if found is not None:
            parts.setdefault(found[1], {})[found[2]] = tensor
        elif ".lora_" in name:
            raise FileError(f"adapter: {name!r} does not belong to a matmul", code="F140")
        else:
            replaced[name.replace(".modules_to_save", "").replace(".default", "")] = tensor
    return Adapter({name: _change(name, pair, settings) for name, pair in parts.items()}, replaced)


def _change(name: str, pair: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> LowRank:
    a, b = pair.get("A"), pair.get("B")
    if a is None or b is None or a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        shapes = " and ".join(f"{part} {list(x.shape)}" for part, x in sorted(pair.items()))
        raise FileError(f"adapter: the parts of {name!r} do not fit: {shapes}", code="F142")
    rank = a.shape[0]
    alpha = _pattern(settings.get("alpha_pattern"), name, settings.get("lora_alpha", 8))
    if type(alpha) not in (int, float) or not abs(alpha) < LARGEST or rank < 1:
        raise FileError(f"adapter: lora_alpha {alpha!r:.60} with rank {rank} gives no scale", code="F140")
    return LowRank(a, b, float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank))


def _pattern(patterns: Any, name: str, default: Any) -> Any:
    """What a pattern says of a module; patterns match the ends of names."""
    for pattern, value in patterns.items() if isinstance(patterns, dict) else ():
        if _SLOW.search(pattern) or len(pattern) > LONGEST:
            raise FileError(f"adapter: the pattern {pattern!r:.60} is too long, or repeats what repeats", code="F140")
        try:
            found = re.search(rf"(^|\.)(?:{pattern})\Z", name[-LONGEST:])
        except (re.error, OverflowError, RecursionError):
            raise FileError(f"adapter: the pattern {pattern!r:.60} cannot be read", code="F140") from None
        if found:
            return value
    return default


def permuted_rows(adapter: Adapter, heads: Mapping[str, int]) -> Adapter:
    """The adapter for GGUF files of Llama, whose queries and keys lie in another order: pairs side by side."""
    changes = dict(adapter.changes)
    for name, change in adapter.changes.items():
        count = heads.get(name.rpartition(".")[2])
        if count is not None and change.b.shape[0] % (2 * count) == 0:  # others are refused where they are applied
            b = change.b.reshape(count, 2, -1, change.b.shape[1]).swapaxes(1, 2).reshape(change.b.shape)
            changes[name] = replace(change, b=np.ascontiguousarray(b))
    return Adapter(changes, adapter.replaced)


def _is_transposed(weights: Weights, name: str, change: LowRank) -> bool:
    """Whether a matmul is stored [in, out], as in GPT-2; one that the change does not fit is refused."""
    found = weights.get(f"{name}.weight")
    if found is None:
        raise FileError(f"adapter: it changes {name!r}, which the model does not have", code="F142")
    size = (change.b.shape[0], change.a.shape[1])
    if tuple(found.shape) not in (size, size[::-1]):
        raise FileError(
            f"adapter: the change of {name!r} is {list(size)}, the weight is {list(found.shape)}", code="F142"
        )
    return tuple(found.shape) != size


def apply_adapter(
    weights: Weights, adapter: Adapter, *, merge: bool
) -> tuple[dict[str, np.ndarray | GgufTensor], dict[str, LowRank]]:
    """The weights with what is merged, and the changes that are kept apart: of quantised weights, or all."""
    made = {**weights, **adapter.replaced}
    apart: dict[str, LowRank] = {}
    for name, change in adapter.changes.items():
        transposed = _is_transposed(made, name, change)
        found = made[f"{name}.weight"]
        if not merge or (isinstance(found, GgufTensor) and not found.is_plain):
            apart[name] = change
            continue
        whole = found.data if isinstance(found, GgufTensor) else found
        matrix = change.matrix()
        made[f"{name}.weight"] = whole.astype(np.float32) + (matrix.T if transposed else matrix)
    return made, apart


class AdapterSet:
    """Adapters by name, of which one at a time is used: a graph has room for the largest change of each matmul.

    `blank` is what the graph is built with; `values` are the parameters that make it one adapter, or none.
    """

    def __init__(self, adapters: Mapping[str, Adapter]) -> None:
        self._adapters = dict(adapters)
        self.active: str | None = None
        self.blank: dict[str, LowRank] = {}
        for name, adapter in adapters.items():
            if adapter.replaced:
                raise FileError(
                    f"adapter: {name!r} replaces {next(iter(adapter.replaced))!r} as a whole, and cannot be put in and "
                    "out", code="F142",
                )  # fmt: skip
            for product, change in adapter.changes.items():
                a, b = change.a, change.b
                known = self.blank.get(product)
                rank = max(a.shape[0], known.a.shape[0] if known else 0)
                if known and (known.a.shape[1], known.b.shape[0]) != (a.shape[1], b.shape[0]):
                    raise FileError(f"adapter: {name!r} changes {product!r} of another size", code="F142")
                zero = np.float32(0)
                self.blank[product] = LowRank(
                    np.broadcast_to(zero, (rank, a.shape[1])), np.broadcast_to(zero, (b.shape[0], rank)), 1.0
                )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def check(self, weights: Weights, bound: Mapping[str, Any]) -> None:
        """Refuse changes of what the model does not have, or does not multiply with."""
        for name, change in self.blank.items():
            _is_transposed(weights, name, change)
            if f"{name}.lora_A" not in bound:
                raise FileError(f"adapter: it changes {name!r}, which is not a matmul of the model", code="F142")

    def values(self) -> dict[str, np.ndarray]:
        """The parameters of the active adapter; zeros where it changes nothing."""
        changes = self._adapters[self.active].changes if self.active is not None else {}
        found: dict[str, np.ndarray] = {}
        for name, room in self.blank.items():
            a, b = np.zeros(room.a.shape, np.float32), np.zeros(room.b.shape, np.float32)
            if name in changes:
                change = changes[name]
                rank = change.a.shape[0]
                a[:rank], b[:, :rank] = change.a, change.b.astype(np.float32) * np.float32(change.scale)
            found[f"{name}.lora_A"], found[f"{name}.lora_B"] = a, b
        return found
