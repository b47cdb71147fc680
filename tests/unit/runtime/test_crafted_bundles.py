"""Bundles whose header or plan says other things than their writer would, with checksums that are right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.cli import main
from strata.errors import FileError
from strata.runtime import inspect_bundle
from strata.runtime.container import ALIGNMENT, MAGIC, Container, write_container


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    g = st.Graph("small")
    x, w = g.input("x", (2, 4), "f32"), g.param("w", (4, 3), "f32")
    g.outputs(st.ops.softmax(x @ w, -1))
    compiled = st.Session("cpu").compile(g)
    compiled.set_param("w", np.ones((4, 3), np.float32))
    path = tmp_path_factory.mktemp("bundles") / "x.strata"
    compiled.save(path)
    return path


def changed(bundle: Path, target: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A copy with another description and other parts."""
    file = Container(bundle)
    about, parts = dict(file.about), {name: bytes(file.read(name)) for name in file.names}
    change(about, parts)
    write_container(target, about, parts)
    return target


def with_header(target: Path, header: bytes) -> Path:
    header += b" " * (-(len(MAGIC) + 40 + len(header)) % ALIGNMENT)
    target.write_bytes(MAGIC + hashlib.sha256(header).digest() + len(header).to_bytes(8, "little") + header)
    return target


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{", b"[]", b"3", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"about": {}}', b'{"about": [], "parts": []}',
        b'{"about": {}, "parts": {}}', b'{"about": {}, "parts": [[]]}', b'{"about": {}, "parts": [["a", 0, 1]]}',
        b'{"about": {}, "parts": [["a", "0", 1, ""]]}', b'{"about": {}, "parts": [["a", -64, 8, ""]]}',
        b'{"about": {}, "parts": [["a", 0, 9999999999, ""]]}', b'{"about": {}, "parts": [["a", 0, -1, ""]]}',
        b'{"about": {}, "parts": [["a", 0, 0, ""], ["a", 0, 0, ""]]}', b'{"about": {}, "parts": [[3, 0, 0, ""]]}',
        b'{"about": {}, "parts": [["a", true, 0, ""]]}', b'{"about": {"format": 2}, "parts": []}',
    ],
)  # fmt: skip
def test_headers(header: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_header(tmp_path / "x.strata", header)
    for read in (st.load_compiled, inspect_bundle):
        with pytest.raises(FileError, match=r"x\.strata"):
            read(path)
    assert main(["inspect", str(path)]) == 2
    assert "x.strata" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device", None), ("device", 3), ("levels", None), ("levels", "avx2"), ("levels", [3]), ("levels", {}),
        ("generator", []), ("weights", None), ("weights", []), ("weights", {"w": None}), ("weights", {"w": ["f32"]}),
        ("weights", {"w": ["f32", 12]}), ("weights", {"w": ["f32", [-4, -3]]}), ("weights", {"w": ["f99", [4, 3]]}),
        ("weights", {"w": ["f32", ["4", 3]]}), ("weights", {"w": ["f32", [4, 4]]}), ("weights", {"v": ["f32", [4, 3]]}),
        ("weights", {"w": ["f64", [4, 3]]}), ("weights", {"w": ["f32", [2**40, 2**40]]}), ("format", 99),
    ],
)  # fmt: skip
def test_descriptions(bundle: Path, key: str, value: Any, tmp_path: Path) -> None:
    path = changed(bundle, tmp_path / "x.strata", lambda about, parts: about.update({key: value}))
    with pytest.raises(st.errors.StrataError):
        st.load_compiled(path)


def test_a_weight_that_the_program_does_not_have(bundle: Path, tmp_path: Path) -> None:
    def change(about: dict[str, Any], parts: dict[str, Any]) -> None:
        about["weights"] = {"v": about["weights"]["w"]}
        parts["weight v"] = parts.pop("weight w")

    with pytest.raises(FileError, match="the program has none of that name"):
        st.load_compiled(changed(bundle, tmp_path / "x.strata", change))


@pytest.mark.parametrize("key", ["inputs", "params", "buffers", "steps", "kernels", "io", "constants", "symbols"])
@pytest.mark.parametrize("value", [None, 3, [], {}, [[]], [3], [["x"]], "x"], ids=repr)
def test_plans(bundle: Path, key: str, value: Any, tmp_path: Path) -> None:
    def change(about: dict[str, Any], parts: dict[str, Any]) -> None:
        for name in [n for n in parts if n.startswith("plan ")]:
            head = json.loads(parts[name].partition(b"\n")[0])
            head[key] = value
            parts[name] = json.dumps(head).encode() + b"\n" + parts[name].partition(b"\n")[2]

    path = changed(bundle, tmp_path / "x.strata", change)
    if (key, value) in (("constants", []), ("symbols", {}), ("constants", {})):  # as it was
        st.load_compiled(path).run(x=np.ones((2, 4), np.float32))
        return
    with pytest.raises(FileError) as caught:
        st.load_compiled(path)
    assert caught.value.code in ("F402", "F405")


@pytest.mark.parametrize(("old", "new"), [("f32[2, 4]", "f32[9, 4]"), ("f32[4, 3]", "f32[4, 9]"), ("f32", "f64")])
def test_a_plan_of_other_types_than_its_kernels(bundle: Path, old: str, new: str, tmp_path: Path) -> None:
    """It would read beside what it is given."""

    def change(about: dict[str, Any], parts: dict[str, Any]) -> None:
        for name in [n for n in parts if n.startswith("plan ")]:
            head = json.loads(parts[name].partition(b"\n")[0])
            head["buffers"] = json.loads(json.dumps(head["buffers"]).replace(old, new))
            parts[name] = json.dumps(head).encode() + b"\n" + parts[name].partition(b"\n")[2]

    with pytest.raises(FileError):
        st.load_compiled(changed(bundle, tmp_path / "x.strata", change))


def test_graphs(bundle: Path, tmp_path: Path) -> None:
    def change(about: dict[str, Any], parts: dict[str, Any]) -> None:
        about["generator"] = "another"
        parts["graph"] = b"\xff mir"

    with pytest.raises(FileError, match="its graph cannot be read"):
        st.load_compiled(changed(bundle, tmp_path / "x.strata", change))


def test_a_missing_bundle_is_a_missing_file(tmp_path: Path) -> None:
    for read in (st.load_compiled, inspect_bundle):
        with pytest.raises(FileNotFoundError) as caught:
            read(tmp_path / "none.strata")
        assert isinstance(caught.value, FileError)
