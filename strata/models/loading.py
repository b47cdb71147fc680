"""`load`: a model from a file or a folder, by what is in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from strata.errors import FileError, MissingFileError, OptionError
from strata.modules import imported


def load(
    path: str | os.PathLike[str], *, device: str = "cpu", context: int | None = None,
    adapter: str | os.PathLike[str] | None = None, merge: bool = True, experts: int | None = None,
) -> Any:  # fmt: skip
    """A model from an ONNX file, a GGUF file, or a folder with config.json and safetensors.

    `context` bounds the tokens that a text generator plans for. `adapter` is a folder with a LoRA adapter, whose
    changes are merged into the weights; with `merge=False`, and where weights are quantised, they are kept apart.
    `experts` is how many experts of each layer of a mixture stay in memory; others are read from the file when a token
    is routed to them. What is generated is the same in all bits.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise FileError(f"load: {path!r} is not a path", code="F148")
    place, context = Path(path), planned(context)
    if place.is_dir():
        found = imported("strata.models.families").load_folder(
            place, device, context, _adapter(adapter), merge, _budget(experts)
        )
        found.source = place
        return found
    if not place.exists():
        raise MissingFileError(f"load: there is no file or folder {place}", code="F148")
    match place.suffix.lower():
        case ".onnx":
            if adapter is not None:
                raise FileError(f"load: {place.name} is an ONNX file, which takes no adapter", code="F148")
            if experts is not None:
                raise OptionError(f"load: {place.name} is an ONNX file, whose experts are all in memory", code="O612")
            return imported("strata.io.onnx").load(place, device=device)
        case ".gguf":
            load_file = imported("strata.models.families").load_gguf_model
            found = load_file(place, device, context, _adapter(adapter), merge, _budget(experts))
            found.source = place
            return found
    raise FileError(
        f"load: {place.name} cannot be loaded; load reads .onnx, .gguf and folders with config.json", code="F148"
    )


def _adapter(folder: str | os.PathLike[str] | None) -> Any:
    return None if folder is None else imported("strata.models.adapters").load_adapter(folder)


def planned(context: int | None) -> int | None:
    """The tokens that a text generator is told to plan for, checked."""
    if context is not None and context < 1:
        raise OptionError(f"context: a model plans for one token or more, got {context}", code="O615")
    return context


def _budget(experts: int | None) -> int | None:
    if experts is not None and experts < 0:
        raise OptionError(f"load: experts is how many of each layer stay in memory, got {experts}", code="O612")
    return experts
