"""Prompt caches on disk: what a decoder remembers of a prompt, in a safetensors file, for the next process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.errors import FileError
from strata.io import GgufTensor, load_safetensors, save_safetensors
from strata.models.decoders.expert_weights import one_expert

if TYPE_CHECKING:
    from strata.models.generate import Decoder, DecodeState

SAMPLED = 64  # numbers of each weight that tell models apart
IDS = "prompt.ids"


def fingerprint(model: Decoder) -> np.ndarray:
    """What tells this model from others, u8[32]: its configuration, and numbers of all its weights."""
    made = hashlib.blake2b(repr(model.config).encode(), digest_size=32)
    weights = model.weights()
    for name in sorted(weights):
        tensor: Any = weights[name]
        if ".experts." in name:  # of the first one, whether all are in memory or not
            flat = one_expert(tensor, 0).reshape(-1)
        else:
            flat = (tensor.data if isinstance(tensor, GgufTensor) else np.asarray(tensor)).reshape(-1)
        made.update(f"{name}{tuple(tensor.shape)}".encode())
        made.update(np.ascontiguousarray(flat[:: max(1, flat.size // SAMPLED)]).tobytes())
    return np.frombuffer(made.digest(), np.uint8)


def save_prompt(path: str | os.PathLike[str], model: Decoder, state: DecodeState, ids: Sequence[int]) -> None:
    """Write what a state remembers of these tokens."""
    arrays = {IDS: np.asarray(ids[: state.length], np.int32), "prompt.model": fingerprint(model)}
    for slot, cache in zip(model.config.slots, state.caches, strict=True):
        array = np.asarray(cache)
        arrays[slot.name] = np.ascontiguousarray(array if slot.is_fixed else array[:, : state.length])
    place = Path(path)
    new = place.with_name(f".{place.name}.{os.getpid()}")
    save_safetensors(new, arrays)
    new.replace(place)


def load_prompt(path: str | os.PathLike[str], model: Decoder, ids: Sequence[int]) -> DecodeState | None:
    """A state that remembers as much of a prompt as a file does, less its last token; None where that is nothing.

    A file of another model is refused. A recurrent state is used where the file's prompt is a beginning of this one.
    """
    if not Path(path).exists():
        return None
    found = load_safetensors(path)
    slots = model.config.slots
    lost = next((n for n in (IDS, "prompt.model", *(s.name for s in slots)) if n not in found), None)
    if lost is not None or not np.array_equal(found["prompt.model"], fingerprint(model)):
        raise FileError(f"{Path(path).name} holds a prompt of another model", code="F148")
    kept = [int(i) for i in found[IDS]]
    same = next((i for i, (a, b) in enumerate(zip(kept, ids, strict=False)) if a != b), min(len(kept), len(ids)))
    same = min(same, len(ids) - 1)
    if same < 1 or (model.has_state and same < len(kept)):
        return None
    state = model.start(capacity=len(ids))
    for i, slot in enumerate(slots):
        array = found[slot.name]
        wanted = (1, *slot.shape) if slot.is_fixed else (1, len(kept), *slot.shape)
        if array.shape != wanted or array.dtype != np.float32:
            raise FileError(f"{Path(path).name} has {slot.name} of {array.shape}, expected {wanted}", code="F148")
        whole = np.array(array) if slot.is_fixed else np.asarray(state.caches[i])
        if not slot.is_fixed:
            whole[:, :same] = array[:, :same]
        state.caches[i] = model.kept(whole)
    state.length = same
    return state
