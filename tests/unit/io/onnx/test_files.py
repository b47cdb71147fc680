"""Files: external data that must stay inside the model's folder, and files that make no sense."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="ONNX models need the package onnx")

import onnx

from strata.errors import FileError
from strata.io.onnx import load
from tests.unit.io.onnx.models import model, node, port

DATA = np.arange(100, dtype=np.float32)


def external(location: str, offset: int = 0, length: int = DATA.nbytes) -> Any:
    """y = x + w, w stored in another file."""
    proto = model([node("Add", ["x", "w"], ["y"])], [port("x", [100])], [port("y", [100])], initializers={"w": DATA})
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": str(offset), "length": str(length)}.items():
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return proto


def write(folder: Path, proto: Any) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def run(path: Path) -> np.ndarray:
    result: np.ndarray = load(path, device="reference").run(x=np.zeros(100, np.float32))[0]
    return result


def test_external_data(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "w.bin").write_bytes(b"\0" * 8 + DATA.tobytes())
    np.testing.assert_array_equal(run(write(tmp_path, external("deep/w.bin", 8))), DATA)


@pytest.mark.parametrize(
    "location", ["/etc/passwd", "../w.bin", "a/../../w.bin", "", "missing.bin", "a\\..\\w.bin", "w\0.bin"]
)
def test_paths_outside_are_refused(location: str, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "w.bin").write_bytes(DATA.tobytes())
    with pytest.raises(FileError):
        run(write(inner, external(location)))


@pytest.mark.parametrize("kind", ["symlink", "hard link", "linked folder", "folder"])
def test_links_are_refused(kind: str, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "out").mkdir()
    secret = tmp_path / "out" / "w.bin"
    secret.write_bytes(DATA.tobytes())
    location = "w.bin"
    if kind == "symlink":
        (inner / "w.bin").symlink_to(secret)
    elif kind == "hard link":
        os.link(secret, inner / "w.bin")
    elif kind == "linked folder":
        (inner / "deep").symlink_to(tmp_path / "out")
        location = "deep/w.bin"
    else:
        (inner / "w.bin").mkdir()
    with pytest.raises(FileError):
        run(write(inner, external(location)))


@pytest.mark.parametrize(("offset", "length"), [(-8, 400), (8, 400), (1 << 60, 400), (0, 399)])
def test_ranges_outside_the_file_are_refused(offset: int, length: int, tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(DATA.tobytes())
    with pytest.raises(FileError):
        run(write(tmp_path, external("w.bin", offset, length)))


def test_models_in_memory_have_no_folder() -> None:
    with pytest.raises(FileError, match="no folder"):
        load(external("w.bin"), device="reference").run(x=np.zeros(100, np.float32))


@pytest.mark.parametrize("data", [b"", b"\0", b"\xff" * 100, b"not a model", b"\x08\x07"])
def test_what_is_no_model(data: bytes) -> None:
    with pytest.raises(FileError):
        load(data)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be opened"):
        load(tmp_path / "none.onnx")
