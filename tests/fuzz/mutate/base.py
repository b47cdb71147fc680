"""What a format brings to the machine."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

Files = Mapping[str, bytes]  # of one mutant, by name; a name may have folders


class Format:
    """Sound files of a format, changes to them, and what reads them. One object lives in each worker."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()  # packages; without them the format is left out

    def prepare(self, folder: Path) -> None:
        """Make the sound files, and read each once: all modules are there before memory is watched."""
        raise NotImplementedError

    def mutant(self, rng: random.Random) -> Files:
        """The files of one mutant."""
        raise NotImplementedError

    def attempt(self, folder: Path, rng: random.Random) -> str:
        """Read the mutant in `folder`, and run it where that is cheap; says what became of it in one word."""
        raise NotImplementedError


def write_files(folder: Path, files: Files) -> int:
    """Put files into a folder; how many bytes they have together."""
    for name, data in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return sum(map(len, files.values()))
