"""A file that is not there, is a folder, or may not be read: the error is ours, and the system's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.errors import FileError
from strata.io.image import load_image

pytest.importorskip("onnx", reason="one of the files is an ONNX model")

LOADERS: dict[str, Callable[[Path], Any]] = {
    "model.onnx": st.load,
    "onnx": st.io.onnx.load,
    "model.gguf": st.load,
    "model.safetensors": st.io.load_safetensors,
    "weights.gguf": st.io.load_gguf,
    "bundle.strata": st.load_compiled,
    "picture.png": load_image,
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_missing_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        LOADERS[name](tmp_path / name)
    assert isinstance(caught.value, FileError)
    assert name in str(caught.value)


@pytest.mark.parametrize("strange", ["\ud800", "\0"], ids=["surrogate", "zero"])
@pytest.mark.parametrize("name", LOADERS)
def test_a_name_that_no_file_can_have(name: str, strange: str, tmp_path: Path) -> None:
    with pytest.raises(FileError) as caught:
        LOADERS[name](tmp_path / f"a{strange}{name}")
    assert caught.value.code.startswith("F")


@pytest.mark.parametrize("strange", ["\ud800", "\0"], ids=["surrogate", "zero"])
@pytest.mark.parametrize("save", [st.io.save_safetensors, st.io.save_gguf])
def test_writing_under_a_name_that_no_file_can_have(save: Callable[..., None], strange: str, tmp_path: Path) -> None:
    with pytest.raises(FileError) as caught:
        save(tmp_path / f"a{strange}", {"w": np.zeros(2, np.float32)})
    assert caught.value.code == "F121"


@pytest.mark.parametrize("save", [st.io.save_safetensors, st.io.save_gguf])
def test_a_path_behind_the_tensors(save: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(FileError, match=rf"{save.__name__}: the path comes first, got a dict") as caught:
        save({"w": np.zeros(2, np.float32)}, str(tmp_path / "x"))
    assert caught.value.code == "F121"
    assert f"{save.__name__}(path, tensors)" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [n for n in LOADERS if LOADERS[n] is not st.load])
def test_a_folder_in_its_place(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        LOADERS[name](tmp_path / name)
    assert isinstance(caught.value, FileError)


def test_a_folder_without_what_a_model_needs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json") as caught:
        st.load(tmp_path)
    assert isinstance(caught.value, FileError)
