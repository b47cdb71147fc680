"""`strata exec -- python app.py`: an unmodified program whose `import onnxruntime` is strata.ort."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from pathlib import Path

from strata.cli.parser import Mistake
from strata.config import child_environment
from strata.ort import switch_folder


def exec_(options: Namespace) -> None:
    """Put the switch on the program's path, and become the program."""
    words = [w for i, w in enumerate(options.program) if i or w != "--"]
    if not words:
        raise Mistake("a program is missing: strata exec -- python app.py")
    found = shutil.which(words[0])
    if found is None:
        raise Mistake(f"{words[0]!r} is not a program on the path")
    switch = switch_folder()
    environment = child_environment("PYTHONPATH", [str(switch), str(_home(switch))])
    os.execve(found, words, environment)  # noqa: S606 - it is what the user asked for


def _home(switch: Path) -> Path:
    """The folder that the package is in, for programs of an interpreter that does not have it."""
    return switch.parents[2]
