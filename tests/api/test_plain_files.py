"""Files that a user names, or that lie in a folder: plain files are read, anything else is refused at once.

A pipe would be waited for, a device may never end. Every reader of the package opens files by one function.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import strata as st
from strata import nn
from strata.cli import main
from strata.core import open_file, read_bytes, read_text
from strata.errors import StrataError
from strata.io import load_gguf, load_image, load_safetensors, save_safetensors
from strata.serving.record import read_records
from tests.source import nodes_of

PACKAGE = Path(st.__file__).parent
KINDS = ("pipe", "socket", "device", "nowhere", "folder")

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """A reader that waits ends as a failure, not as a test run without an end."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError("it waits for what is not a plain file")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def place(path: Path, kind: str) -> None:
    """Something that is no plain file."""
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            before = Path.cwd()
            os.chdir(path.parent)  # names of sockets are short
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(path.name)
            os.chdir(before)
        case "device":
            path.symlink_to("/dev/zero")
        case "nowhere":
            path.symlink_to(path.with_name("nothing"))
        case "folder":
            path.mkdir()


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "load onnx": ("model.onnx", st.load),
    "load gguf": ("model.gguf", st.load),
    "load_safetensors": ("model.safetensors", load_safetensors),
    "load_gguf": ("model.gguf", load_gguf),
    "load_compiled": ("model.strata", st.load_compiled),
    "load_image": ("image.png", load_image),
    "read_records": ("records", lambda path: list(read_records(path))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_a_named_file(tmp_path, kind: str, reader: str) -> None:
    name, read = READERS[reader]
    place(tmp_path / name, kind)
    with pytest.raises((StrataError, OSError)):
        read(tmp_path / name)


BERT = {
    "model_type": "bert", "vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16,
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "modules.json",
             "1_Pooling/config.json", "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json"],
)  # fmt: skip
def test_a_file_of_a_model(tmp_path, kind: str, name: str) -> None:
    from strata.models import folder_tokenizer

    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    (tmp_path / "tokenizer.json").write_text("{}")
    save_safetensors(tmp_path / "model.safetensors", {"x": np.zeros(2, np.float32)})
    (tmp_path / name).unlink(missing_ok=True)
    place(tmp_path / name, kind)
    refusals = 0
    for read in (st.load, folder_tokenizer):
        try:
            read(tmp_path)
        except StrataError:
            refusals += 1
    assert refusals


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", ["json", "safetensors"])
def test_a_checkpoint(tmp_path, kind: str, suffix: str) -> None:
    nn.save_checkpoint(tmp_path, 1, {"w": st.tensor([1.0])})
    nn.save_checkpoint(tmp_path, 2, {"w": st.tensor([2.0])})
    bad = tmp_path / f"step-00000002.{suffix}"
    bad.unlink()
    place(bad, kind)
    found = nn.latest(tmp_path)
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["x.mir", "x.onnx", "x.gguf", "x.safetensors", "x.strata"])
def test_the_command_line(tmp_path, kind: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    place(tmp_path / name, kind)
    assert main(["inspect", str(tmp_path / name)]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
def test_the_one_function(tmp_path, kind: str) -> None:
    path = tmp_path / "x"
    place(path, kind)
    for read in (open_file, read_bytes, read_text):
        with pytest.raises(OSError, match=str(path)):
            read(path)
    shutil.rmtree(path) if kind == "folder" else path.unlink()
    path.write_bytes(b"a\r\nb")
    assert read_bytes(path) == b"a\r\nb"
    assert read_text(path) == path.read_text()


# where a file is opened that is always a plain one, or is written
ALLOWED = {
    "core/files.py": "the one function",
    "core/processors.py": "of the system's",
    "core/target.py": "of the system's",
    "cli/doctor.py": "of the system's",
    "torch/writes.py": "of the system's",
    "cache/sources.py": "the package's own",
    "cache/store.py": "locks, which are opened for writing and without waiting",
    "viewer/page.py": "the package's own",
    "backends/triton/schedules/winners.py": "the package's own",
    "testing/golden.py": "of a test suite",
    "io/onnx/program.py": "without waiting, and refused where it has two names",
}
OPENERS = {"open", "read_bytes", "read_text", "memmap", "load", "from_file", "fromfile"}


def opened(source: str) -> list[int]:
    """Lines that open a file to read it, by anything but the one function."""
    found = []
    for node in nodes_of(source, OPENERS):
        if not isinstance(node, ast.Call):
            continue
        modes = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if any(mode in ("w", "wb", "a", "x") for mode in modes):
            continue
        match node.func:
            case ast.Name(id="open"):
                found.append(node.lineno)
            case ast.Attribute(value=ast.Name(id="os" | "io" | "mmap"), attr="open"):
                found.append(node.lineno)
            case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="load" | "memmap" | "fromfile"):
                if not (node.args and isinstance(node.args[0], ast.Name) and node.args[0].id == "file"):
                    found.append(node.lineno)
            case ast.Attribute(attr="read_text" | "read_bytes" | "from_file"):
                found.append(node.lineno)
            case _:
                pass
    return found


def test_no_other_function_opens_files() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in ALLOWED
        for line in opened(path.read_text())
    ]
    assert not found, found
    assert all(opened((PACKAGE / name).read_text()) for name in ALLOWED)
