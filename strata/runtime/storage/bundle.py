"""Ahead-of-time bundles: a compiled graph in one file, with code for several instruction sets and its weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from strata.backends import CodeArchive, backend_for
from strata.core import as_dtype, here
from strata.errors import FileError, OptionError
from strata.runtime.storage.container import Container

FORMAT = 2
OPTIONS = (  # that decide what a program computes, and how
    "precision", "fusion", "kernel_dispatch", "force_common", "force_native", "deterministic", "exact", "control_flow",
    "unroll", "rematerialize", "drop_unused", "passes", "skip_passes",
)  # fmt: skip
MAX_RANK = 32


@dataclass(frozen=True, slots=True)
class About:
    """What a bundle says about itself, checked."""

    device: str
    levels: tuple[str, ...]
    generator: str
    weights: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]

    @classmethod
    def of(cls, file: Container) -> About:
        about = file.about
        if about.get("format") != FORMAT:
            told = f"has format {about.get('format')}, this version reads {FORMAT}"
            raise FileError(f"{file.path!r} {told}", code="F404", place=here())
        levels, weights = about.get("levels"), about.get("weights")
        for name in ("device", "generator"):
            if not isinstance(about.get(name), str):
                raise file.damaged(f"its {name} is {about.get(name)!r}, a name is needed")
        if not isinstance(levels, list) or not all(isinstance(level, str) for level in levels):
            raise file.damaged(f"its levels are {levels!r}, a list of names is needed")
        if not isinstance(weights, dict):
            raise file.damaged(f"its weights are {weights!r}, types and shapes by name are needed")
        kinds = {name: _weight_type(file, name, kind) for name, kind in weights.items()}
        return cls(about["device"], tuple(levels), about["generator"], kinds)


def _weight_type(file: Container, name: str, kind: Any) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The type and shape of a weight, which its part must have the bytes of."""
    if not isinstance(kind, list) or len(kind) != 2 or not isinstance(kind[0], str) or not isinstance(kind[1], list):
        raise file.damaged(f"weight {name!r} has no type and shape")
    dtype, shape = as_dtype(kind[0]).np, tuple(kind[1])
    if not all(type(d) is int and d >= 0 for d in shape) or len(shape) > MAX_RANK:
        raise file.damaged(f"weight {name!r} has the shape {list(shape)}")
    part = f"weight {name}"
    if part not in file or file.size(part) != prod(shape) * dtype.itemsize:
        held = file.size(part) if part in file else "no"
        raise file.damaged(f"weight {name!r} : {kind[0]}{list(shape)} has {held} bytes")
    return dtype, shape


def archive_of(device: str) -> CodeArchive:
    archive = backend_for(device).archive
    if archive is None:
        raise OptionError(f"bundles hold machine code, and {device!r} has none to keep", code="O411", place=here())
    return archive


def inspect_bundle(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a bundle holds, without loading any of it."""
    file = Container(path)
    About.of(file)
    return {**file.about, "parts": {name: file.size(name) for name in file.names}}
