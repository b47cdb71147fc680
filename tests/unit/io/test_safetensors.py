"""safetensors files: round trips, zero copies, and refusals that say what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from strata.errors import FileError
from strata.io import load_safetensors, save_safetensors


def _write(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.uint8, np.bool_, np.complex64]
)
def test_round_trip_keeps_dtype_and_bytes(tmp_path: Path, dtype: type, rng: np.random.Generator) -> None:
    arrays = {
        "x": rng.standard_normal((3, 5)).astype(dtype),
        "s": np.array(1).astype(dtype),
        "e": np.zeros((0, 4), dtype),
    }
    save_safetensors(tmp_path / "x.safetensors", arrays, {"made": "here"})
    found = load_safetensors(tmp_path / "x.safetensors")
    assert found.metadata == {"made": "here"}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert found[name].tobytes() == array.tobytes()


def test_arrays_lie_over_the_file(tmp_path: Path) -> None:
    save_safetensors(tmp_path / "x.safetensors", {"x": np.ones((8, 8), np.float32)})
    x = load_safetensors(tmp_path / "x.safetensors")["x"]
    assert not x.flags.owndata
    assert not x.flags.writeable


def test_agrees_with_the_reference_library(tmp_path: Path, rng: np.random.Generator) -> None:
    numpy_api = pytest.importorskip("safetensors.numpy", reason="needs safetensors")
    arrays = {
        "a.b": rng.standard_normal((2, 3)),
        "c": rng.integers(0, 9, (4,)),
        "h": rng.standard_normal(5).astype(np.float16),
    }
    numpy_api.save_file(arrays, tmp_path / "theirs.safetensors")
    save_safetensors(tmp_path / "ours.safetensors", arrays)
    for name, array in numpy_api.load_file(tmp_path / "ours.safetensors").items():
        assert np.array_equal(array, arrays[name])
    for name, array in load_safetensors(tmp_path / "theirs.safetensors").items():
        assert np.array_equal(array, arrays[name])


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"not json", b"", "is not JSON"),
        ([1], b"", "is not a JSON object"),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234", "does not fill its 4 bytes"),
        ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, b"1234", "outside the 4 bytes"),
        ({"x": {"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}}, b"1234", "unknown type 'Q9'"),
        ({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234", "no valid shape"),
        (
            {n: {"dtype": "U8", "shape": [2], "data_offsets": [i, i + 2]} for i, n in enumerate("xy")},
            b"123",
            "starts at byte 1",
        ),
        ({"x": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"123", "end at byte 2 of 3"),
        (b'{"x": 1, "x": 2}', b"", "names a tensor twice"),
        (b"[" * 100_000, b"", "is not JSON"),
    ],
)
def test_bad_headers_are_refused(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    with pytest.raises(FileError, match=message):
        load_safetensors(_write(tmp_path / "x.safetensors", header, data))


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(FileError, match="does not fit the file's 10"):
        load_safetensors(tmp_path / "x.safetensors")
