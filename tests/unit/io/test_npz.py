"""NumPy's files: read as NumPy reads them, refused before they hurt."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from strata.config import using
from strata.errors import BudgetError, FileError
from strata.io import load_npy, load_npz

ARRAYS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "c": np.array(1 + 2j),
    "d": np.zeros((0, 3), np.bool_),
    "e": np.array([1, 2], ">i4"),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_by_name(save: object, tmp_path: Path) -> None:
    save(tmp_path / "x.npz", **ARRAYS)  # type: ignore[operator]
    found = load_npz(tmp_path / "x.npz")
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array, strict=True)


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_one_array(name: str, version: tuple[int, int], tmp_path: Path) -> None:
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, ARRAYS[name], version=version)
    np.testing.assert_array_equal(load_npy(tmp_path / "x.npy"), ARRAYS[name], strict=True)


def test_unpacking_has_a_budget(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "x.npz", a=np.zeros(1 << 20, np.float32), b=np.zeros(1 << 20, np.float32))
    assert (tmp_path / "x.npz").stat().st_size < 20_000
    assert load_npz(tmp_path / "x.npz")["a"].nbytes == 4 << 20
    with using(max_unpacked_bytes=6 << 20), pytest.raises(BudgetError, match="max_unpacked_bytes, which is 6 MiB"):
        load_npz(tmp_path / "x.npz")


def test_the_default_budget_refuses_a_file_of_zeros(tmp_path: Path) -> None:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (1 << 28,)})
    with (
        zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as made,
        made.open("a.npy", "w") as member,
    ):
        member.write(head.getvalue())
        for _ in range(16):
            member.write(bytes(1 << 24))
    with pytest.raises(BudgetError, match="max_unpacked_bytes"):
        load_npz(tmp_path / "x.npz")


def _npy(descr: str, shape: str, data: bytes = b"", order: str = "False") -> bytes:
    head = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + data


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x93NUMPY", b"\x93NUMPY\x09\x00", _npy("'<f4'", "(3,)"), _npy("'<f4'", "(-1,)", bytes(8)),
        _npy("'<f4'", "(99999999999999,)", bytes(8)), _npy("'|O'", "(1,)", bytes(8)), _npy("'<U4'", "(1,)", bytes(16)),
        _npy("'<f4'", "(" * 900, bytes(8)), _npy("'nope'", "(1,)", bytes(8)), _npy("'<f4'", "(True,)", bytes(8)),
        _npy("'<f4'", "(1,)", bytes(8), "3"), _npy("__import__('os')", "(1,)"), _npy("'<f4'", "[1]", bytes(8)),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(data)
    with pytest.raises(FileError, match=r"x\.npy"):
        load_npy(tmp_path / "x.npy")
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as made:
        made.writestr("a.npy", data)
    with pytest.raises(FileError, match=r"x\.npz"):
        load_npz(tmp_path / "x.npz")


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(FileError):
        load_npz(tmp_path / "x.npz")
    with pytest.raises(FileNotFoundError):
        load_npz(tmp_path / "none.npz")


def test_an_array_is_in_memory_once(tmp_path: Path) -> None:
    array = np.arange(12 << 20, dtype=np.float32)
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", a=array)
    tracemalloc.start()
    try:
        np.testing.assert_array_equal(load_npy(tmp_path / "a.npy")[::4096], array[::4096])
        np.testing.assert_array_equal(load_npz(tmp_path / "a.npz")["a"][::4096], array[::4096])
        assert tracemalloc.get_traced_memory()[1] < 1.9 * array.nbytes
    finally:
        tracemalloc.stop()
