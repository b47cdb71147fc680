"""Every subcommand with wrong options and files: exit code 2 and a line that says so, never a traceback."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

import strata as st
from strata.cli import main
from strata.cli.parser import make_parser

Command = tuple[str, ...]
Actions = list[argparse.Action]
OF_THE_MACHINE = {("demo",), ("serve",), ("doctor",), ("bench",)}  # which run, or ask, without a file
SUFFIXES = (".onnx", ".gguf", ".safetensors", ".strata", ".pt2", ".mir", ".json", ".wav", ".npy", ".npz")


def subcommands(
    parser: argparse.ArgumentParser, before: Command = ()
) -> Iterator[tuple[Command, list[argparse.Action]]]:
    parts = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not parts:
        yield before, parser._actions
    for part in parts:
        for name, below in part.choices.items():
            yield from subcommands(below, (*before, name))


def wrong(command: Command, actions: Actions) -> Iterator[Command]:
    """An unknown option; files that are not there or hold nothing; values that no option takes."""
    yield (*command, "--zork")
    if command in OF_THE_MACHINE:
        return
    needed = sum(not a.option_strings and a.nargs not in ("?", "*") for a in actions)
    for file in ("no-such-file", "empty", "text.mir", "folder", "", *(f"bytes{suffix}" for suffix in SUFFIXES)):
        yield (*command, *[file] * max(1, needed))
    for option in (a for a in actions if a.option_strings and a.nargs != 0):
        for value in ("zork", "-1", "nan", ""):
            yield (*command, *["no-such-file"] * needed, f"{option.option_strings[-1]}={value}")


@pytest.mark.parametrize(
    ("command", "actions"), list(subcommands(make_parser())), ids=lambda x: " ".join(map(str, x))[:24]
)
def test_wrong_options_and_files(
    command: Command,
    actions: Actions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("text.mir").write_text("mir nonsense", "utf-8")
    Path("folder").mkdir()
    for suffix in SUFFIXES:
        Path(f"bytes{suffix}").write_bytes(bytes(range(256)) * 8)
    for call in wrong(command, actions):
        with st.config.using(cache_dir=tmp_path / "cache"):
            try:
                code = main(list(call))
            except SystemExit as stop:
                code = int(stop.code or 0)
        said = capsys.readouterr().err
        assert code in (0, 1, 2), f"{call} ends with {code}"
        assert code != 2 or said.strip(), f"{call} says nothing"
        assert "Traceback" not in said, f"{call} says {said}"
        assert "--zork" not in call or code == 2
