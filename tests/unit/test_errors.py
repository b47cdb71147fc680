"""strata/errors.py: what the system says about a file is also the system's class."""

from __future__ import annotations

import errno
import os

import pytest

from strata.errors import FileAccessError, FileError, file_error


@pytest.mark.parametrize(
    ("number", "classic"),
    [
        (errno.ENOENT, FileNotFoundError),
        (errno.EISDIR, IsADirectoryError),
        (errno.EACCES, PermissionError),
        (errno.EIO, OSError),
    ],
)
def test_a_file_that_cannot_be_opened(number: int, classic: type[OSError]) -> None:
    error = file_error("a/b.onnx", OSError(number, os.strerror(number), "a/b.onnx"), code="F500")
    assert isinstance(error, FileError)
    assert isinstance(error, FileAccessError)
    assert isinstance(error, ValueError)
    assert isinstance(error, classic)
    assert (error.errno, error.strerror, error.filename) == (number, os.strerror(number), "a/b.onnx")
    assert str(error) == f"'a/b.onnx' cannot be opened: {os.strerror(number)}   [F500]"
    assert error.args == (f"'a/b.onnx' cannot be opened: {os.strerror(number)}",)
