"""Checkpoints: any pytree of tensors as safetensors, with a JSON file of its structure.

The JSON file is written last, by a rename, and has the checksum of the data. A process that is killed at any moment
leaves the checkpoint before it; `latest` takes the newest one whose checksum is right.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strata.core import TreeDef, flatten, here, open_file, read_text, unflatten
from strata.errors import FileError
from strata.io import load_safetensors, save_safetensors
from strata.nn.module import Module
from strata.tensor import asarray

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    step: int
    data: Path
    manifest: Path
    extra: dict[str, Any]

    def load(self, like: Any) -> Any:
        """The tree, in the structure of `like` and on its devices; names, shapes and types must agree."""
        names, (leaves, structure) = leaf_names(like), flatten(like)
        stored = load_safetensors(self.data)
        loaded = []
        for name, leaf in zip(names, leaves, strict=True):
            if name not in stored:
                raise FileError(f"checkpoint {self.data.name}: it has no {name!r}", code="F160", place=here())
            there = asarray(leaf)
            kind, array = there.type, asarray(stored[name], copy=True, device=there.device)
            if array.type != kind:
                raise FileError(
                    f"checkpoint {self.data.name}: {name!r} is {array.type}, it must be {kind}",
                    code="F160",
                    place=here(),
                )
            loaded.append(array)
        return unflatten(structure, loaded)


def save_checkpoint(
    folder: str | Path, step: int, tree: Any, extra: dict[str, Any] | None = None, keep: int = 3
) -> Path:
    """Write a tree; the `keep` newest checkpoints stay. Returns the path of the manifest."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    data, manifest = place / f"step-{step:08d}.safetensors", place / f"step-{step:08d}.json"
    arrays = {n: asarray(x).numpy() for n, x in zip(leaf_names(tree), flatten(tree)[0], strict=True)}
    save_safetensors(data, arrays)
    text = json.dumps(
        {"format": FORMAT, "step": step, "data": data.name, "sha256": _digest(data), "extra": extra or {}}, indent=1
    )
    _write(manifest, text)
    _drop_old(place, keep)
    return manifest


def latest(folder: str | Path) -> Checkpoint | None:
    """The newest complete checkpoint of a folder, or None."""
    for manifest in sorted(Path(folder).glob("step-*.json"), reverse=True):
        found = _read(manifest)
        if found is not None:
            return found
    return None


def _read(manifest: Path) -> Checkpoint | None:
    try:
        content = json.loads(read_text(manifest))
        data = manifest.parent / Path(str(content["data"])).name
        if content["format"] != FORMAT or _digest(data) != content["sha256"]:
            return None
        return Checkpoint(int(content["step"]), data, manifest, dict(content["extra"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(path: Path) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _drop_old(folder: Path, keep: int) -> None:
    old = sorted(folder.glob("step-*.json"), reverse=True)[max(1, keep) :]
    for manifest in old:
        manifest.unlink(missing_ok=True)
        manifest.with_suffix(".safetensors").unlink(missing_ok=True)


def leaf_names(tree: Any) -> list[str]:
    """A dotted name for each leaf, in the order of `flatten`."""
    return [name.removeprefix(".") or "value" for name in _names(flatten(tree)[1], "")]


def _names(structure: TreeDef, prefix: str) -> Iterator[str]:
    kind, cls = structure.kind, structure.cls
    if kind == "dataclass" or (kind == "object" and cls is not None and not issubclass(cls, Module)):
        yield from (f"{prefix}.{i}" if i else prefix for i in range(structure.num_leaves))
    elif kind == "leaf":
        yield prefix
    else:
        keys = structure.keys if kind in ("dict", "object") else range(len(structure.children))
        for key, child in zip(keys, structure.children, strict=True):
            yield from _names(child, f"{prefix}.{key}")
