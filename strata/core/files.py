"""Opening files that a user or a file named: only regular files, never pipes or devices.

Opening a FIFO waits for a writer, a socket fails with a strange error, a device may do something when it is opened, and
a folder fails later. `open_file` looks first, opens without waiting, and looks at what it got.
"""

from __future__ import annotations

import errno
import io
import os
import stat

PathLike = str | os.PathLike[str]

_KINDS = (
    (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"), (stat.S_ISCHR, "a device"), (stat.S_ISBLK, "a device"),
)  # fmt: skip
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_handle(path: PathLike, *, follow: bool = True) -> int:
    """A handle of a plain file to read from. OSError where there is none, or something else is in its place."""
    try:
        found = os.stat(path, follow_symlinks=follow)
    except ValueError as error:  # half a surrogate pair or a zero byte: no file is called so
        raise FileNotFoundError(errno.ENOENT, f"no file can have this name ({error})", os.fspath(path)) from None
    check_plain(path, found)
    handle = os.open(path, _FLAGS | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    try:
        check_plain(path, os.fstat(handle))  # it may have been replaced meanwhile
    except OSError:
        os.close(handle)
        raise
    return handle


def open_file(path: PathLike, *, follow: bool = True) -> io.BufferedReader:
    """A plain file, to read from."""
    return os.fdopen(open_handle(path, follow=follow), "rb")


def append_private(path: PathLike) -> io.TextIOWrapper:
    """A text file to append to, which nobody but its owner may read if it is new."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    return os.fdopen(handle, "a", encoding="utf-8")


def read_bytes(path: PathLike) -> bytes:
    """All that a plain file holds."""
    with open_file(path) as file:
        return file.read()


def read_text(path: PathLike) -> str:
    """The text of a plain file."""
    with io.TextIOWrapper(open_file(path), "utf-8") as file:
        return file.read()


def check_plain(path: PathLike, found: os.stat_result) -> None:
    """OSError where it is not the state of a plain file."""
    if stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    kind = next((name for test, name in _KINDS if test(found.st_mode)), "a link")
    raise OSError(errno.EINVAL, f"it is {kind}, not a plain file", os.fspath(path))
