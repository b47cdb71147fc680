"""Ahead-of-time bundles: header, plans, graph and weights changed, with checksums that are right again.

Machine code is not changed under a right checksum: a bundle's code is run, as a library's is.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from strata.runtime.storage.container import ALIGNMENT, MAGIC
from tests.fuzz.mutate.base import Files, Format
from tests.fuzz.mutate.changes import change_bytes, change_json, change_text, json_bytes
from tests.fuzz.mutate.weights import inspect

Parts = dict[str, bytes]


class Bundle(Format):
    name = "bundle"

    def prepare(self, folder: Path) -> None:
        self.sound: list[tuple[bytes, dict[str, Any], Parts]] = []
        for at, compiled in enumerate(_programs()):
            path = folder / "x.strata"
            compiled.save(path)
            data = path.read_bytes()
            self.sound.append((data, *_parts(data)))
            assert self.attempt(folder, random.Random(at)) == "ran"

    def mutant(self, rng: random.Random) -> Files:
        data, about, parts = rng.choice(self.sound)
        if rng.random() < 0.2:
            return {"x.strata": change_bytes(data, rng)}
        parts, header = dict(parts), None
        match rng.randrange(6):
            case 0 | 1:
                about = change_json(about, rng)
            case 2 | 3:
                name = rng.choice([n for n in parts if n.startswith("plan ")])
                text, _, blobs = parts[name].partition(b"\n")
                changed = json_bytes(change_json(json.loads(text), rng), rng)
                parts[name] = changed + b"\n" + (blobs if rng.random() < 0.8 else blobs[: rng.randrange(9)])
            case 4:
                parts["graph"] = change_text(parts["graph"].decode(), rng).encode("utf-8", "surrogatepass")
                about = {**about, "generator": "another"} if rng.random() < 0.3 else about
            case 5:
                whole = {"about": about, "parts": _table(parts)}
                header = json_bytes(change_json(whole, rng), rng)
        if rng.random() < 0.1:
            name = rng.choice([n for n in parts if not n.startswith("code ")])
            parts.pop(name) if rng.random() < 0.5 else parts.update({name: parts[name][: rng.randrange(9)]})
        return {"x.strata": _file(about, parts, header, rng)}

    def attempt(self, folder: Path, rng: random.Random) -> str:
        path = folder / "x.strata"
        if rng.random() < 0.3:
            inspect(path)
        compiled = st.load_compiled(path)
        compiled.run(
            {name: np.ones([_size(d) for d in kind.shape], kind.dtype.np) for name, kind in compiled.inputs.items()}
        )
        return "ran"


def _size(dim: Any) -> int:
    return dim if isinstance(dim, int) and dim < 1 << 16 else 3


def _programs() -> list[Any]:
    g = st.Graph("small")
    x, w = g.input("x", (2, 4), "f32"), g.param("w", (4, 3), "f32")
    g.outputs(st.ops.softmax(x @ w, -1), (x * 2.0).sum(-1))
    a = st.Session("cpu").compile(g)
    a.set_param("w", np.ones((4, 3), np.float32))
    g = st.Graph("sized")
    y = g.input("y", (st.sym("n", 1, 64), 4), "f32")
    g.outputs(st.ops.cumsum(y, 0) + np.arange(4, dtype=np.float32))
    return [a, st.Session("cpu").compile(g)]


def _parts(data: bytes) -> tuple[dict[str, Any], Parts]:
    """What a sound bundle says about itself, and its parts."""
    at = len(MAGIC) + 32
    length = int.from_bytes(data[at : at + 8], "little")
    header = json.loads(data[at + 8 : at + 8 + length])
    start = at + 8 + length
    return header["about"], {name: data[start + a : start + a + n] for name, a, n, _ in header["parts"]}


def _table(parts: Parts) -> list[list[Any]]:
    table, at = [], 0
    for name, data in parts.items():
        table.append([name, at, len(data), hashlib.sha256(data).hexdigest()])
        at += -(-len(data) // ALIGNMENT) * ALIGNMENT
    return table


def _file(about: dict[str, Any], parts: Parts, header: bytes | None, rng: random.Random) -> bytes:
    if header is None:
        header = json_bytes({"about": about, "parts": _table(parts)}, rng)
    header += b" " * (-(len(MAGIC) + 40 + len(header)) % ALIGNMENT)
    head = MAGIC + hashlib.sha256(header).digest() + len(header).to_bytes(8, "little") + header
    return head + b"".join(data + b"\0" * (-len(data) % ALIGNMENT) for data in parts.values())
