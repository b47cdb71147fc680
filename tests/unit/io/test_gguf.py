"""GGUF files: round trips, all versions, the reference package's values, split files, refusals."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from strata.errors import FileError
from strata.io import GgufTensor, load_gguf, quantized_tensor, save_gguf

KINDS = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2k", "q3k", "q4k", "q5k", "q6k")


def test_round_trip(tmp_path: Path, rng: np.random.Generator) -> None:
    w = rng.standard_normal((3, 512)).astype(np.float32)
    tensors = {kind: quantized_tensor(kind, w, kind) for kind in KINDS} | {"plain": w, "half": w.astype(np.float16)}
    metadata = {"general.architecture": "llama", "n": 7, "far": 1 << 40, "less": -5, "x": 0.5, "flag": False,
                "names": ["a", "ü"], "numbers": [1, 2, 3], "floats": np.float32([1, 2])}  # fmt: skip
    save_gguf(tmp_path / "x.gguf", tensors, metadata)
    found = load_gguf(tmp_path / "x.gguf")
    for key, value in metadata.items():
        assert np.array_equal(found.metadata[key], value), key
    for name, tensor in tensors.items():
        data = tensor.data if isinstance(tensor, GgufTensor) else tensor
        assert found[name].shape == w.shape
        assert np.array_equal(found[name].data, data)
    assert not found["q4k"].data.flags.owndata
    assert str(found["q4k"].scheme) == "gguf_q4k"


def test_the_reference_package_reads_what_we_write(tmp_path: Path, rng: np.random.Generator) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf")
    w = rng.standard_normal((4, 256)).astype(np.float32)
    save_gguf(tmp_path / "x.gguf", {kind: quantized_tensor(kind, w, kind) for kind in KINDS}, {"a": ["x", "y"]})
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    ours = load_gguf(tmp_path / "x.gguf")
    assert reader.fields["a"].contents() == ["x", "y"]
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(w.shape)
        assert np.array_equal(ours[tensor.name].dequantize(), values), tensor.name


def test_version_1_has_narrow_counts(tmp_path: Path) -> None:
    name, key = b"w", b"k"
    head = b"GGUF" + struct.pack("<III", 1, 1, 1)
    head += struct.pack("<I", len(key)) + key + struct.pack("<II", 4, 9)
    head += struct.pack("<I", len(name)) + name + struct.pack("<III", 1, 2, 0) + struct.pack("<Q", 0)
    head += b"\0" * (-len(head) % 32)
    (tmp_path / "x.gguf").write_bytes(head + np.float32([1, 2]).tobytes())
    found = load_gguf(tmp_path / "x.gguf")
    assert found.metadata == {"k": 9}
    assert found["w"].data.tolist() == [1, 2]


def test_split_files_are_one(tmp_path: Path) -> None:
    for i, name in enumerate(("a", "b")):
        save_gguf(tmp_path / f"m-0000{i + 1}-of-00002.gguf", {name: np.float32([i])}, {"split.count": 2, "split.no": i})
    found = load_gguf(tmp_path / "m-00001-of-00002.gguf")
    assert sorted(found) == ["a", "b"]
    with pytest.raises(FileError, match="in two of the files"):
        load_gguf([tmp_path / "m-00001-of-00002.gguf"] * 2)


def _header(*parts: bytes, tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts) + b"\0" * 64


def _tensor(name: bytes, dims: tuple[int, ...], code: int, offset: int) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, code, offset)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML1234", "does not begin with GGUF"),
        (_header(version=9), "has version 9"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "is big-endian"),
        (_header(tensors=1 << 60), "says it has"),
        (_header(struct.pack("<Q", 1 << 50), keys=1), "a string of"),
        (_header(struct.pack("<Q", 1) + b"k" + struct.pack("<I", 77), keys=1), "unknown type 77"),
        (_header(struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 4, 1 << 60), keys=1), "an array of"),
        (
            _header(struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 3), struct.pack("<Q", 1 << 62), keys=1),
            "of an array",
        ),
        (_header(_tensor(b"w", (1 << 60,), 0, 0), tensors=1), "has the sizes"),
        (_header(_tensor(b"w", (1 << 40, 1 << 40, 1 << 40), 0, 0), tensors=1), "has the sizes"),
        (_header(_tensor(b"w", (4,), 0, 1 << 62), tensors=1), "does not lie inside"),
        (_header(_tensor(b"w", (4,), 0, 3), tensors=1), "does not lie inside"),
        (_header(_tensor(b"w", (31,), 2, 0), tensors=1), "not whole blocks"),
        (_header(_tensor(b"w", (4,), 99, 0), tensors=1), "unknown type 99"),
        (_header(_tensor(b"w", (4,), 0, 0), _tensor(b"v", (4,), 0, 0), tensors=2), "overlap"),
        (_header(_tensor(b"w", (4,), 0, 0), _tensor(b"w", (4,), 0, 0), tensors=2), "twice"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(FileError, match=message):
        load_gguf(tmp_path / "x.gguf")


@pytest.mark.parametrize("part", ["key", "tensor"])
def test_names_that_are_not_utf_8(part: str, tmp_path: Path) -> None:
    save_gguf(tmp_path / "x.gguf", {"tensor": np.float32([1, 2])}, {"key": "value"})
    data = (tmp_path / "x.gguf").read_bytes()
    word = part.encode()
    assert data.count(word) == 1
    (tmp_path / "x.gguf").write_bytes(data.replace(word, word[:-1] + b"\xff"))
    with pytest.raises(FileError, match="UTF-8") as caught:
        load_gguf(tmp_path / "x.gguf")
    assert caught.value.code == "F130"
