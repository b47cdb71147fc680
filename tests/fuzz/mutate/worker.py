"""A process that tries mutants one after the other and says on its standard output what became of each.

    python -m tests.fuzz.mutate.worker gguf 7 0 2000     # mutants 0 to 1999 of seed 7

A line is a JSON object: the mutant's number, one word, the seconds of a core that this process has used, and what went
wrong, if something did. The machine that started this process watches its time and whether it lives.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from strata.config import config, using
from strata.errors import OutOfMemoryError, StrataError
from tests.fuzz.mutate.base import Format, write_files
from tests.fuzz.mutate.formats import format_named

MEMORY = 256 << 20  # bytes that a mutant may take, beside four times its files
ADDRESSES = 8 << 30  # of address space beside what the process has at its start: then allocating fails
_watched: list[tuple[str, ...]] = []  # where a mutant may open files, while it runs
_outside: list[str] = []


def generator(name: str, seed: int, number: int) -> random.Random:
    """The random numbers of one mutant: any of them can be made again alone."""
    return random.Random(f"{name} {seed} {number}")


def resident_memory() -> int:
    """The bytes of this process in memory; from here on `peak_memory` counts anew. 0 where the system does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return 0
    return _status("VmRSS")


def peak_memory() -> int:
    """The most bytes that this process had in memory since `resident_memory`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def _hook(event: str, arguments: Any) -> None:
    if event != "open" or not _watched or not isinstance(arguments[0], (str, bytes)):
        return
    path = os.path.realpath(os.fsdecode(arguments[0]))
    if not path.startswith(_watched[0]):
        _outside.append(path)


@cache
def _watch() -> None:
    sys.addaudithook(_hook)  # for good: Python cannot take one away


def attempt(form: Format, folder: Path, seed: int, number: int) -> tuple[str, str]:
    """Try one mutant: one word, and what it did that nothing may do."""
    rng = generator(form.name, seed, number)
    files = form.mutant(rng)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    size = write_files(folder, files)
    places = (
        folder,
        config().cache_dir,
        sys.prefix,
        sys.base_prefix,
        Path(np.__file__).parents[1],
        Path(__file__).parents[3],
    )
    own = [Path(place).resolve() for place in places]
    _outside.clear()
    before = resident_memory()
    _watched[:] = [(*map(str, own), "/proc/", "/sys/", "/dev/")]
    try:
        with np.errstate(all="ignore"):
            outcome, wrong = form.attempt(folder, rng), ""
    except OutOfMemoryError as error:
        outcome, wrong = "memory", f"asked for more memory than there is: {error.summary}"
    except StrataError:
        outcome, wrong = "refused", ""
    except BaseException as error:  # noqa: BLE001 - a panic of another language is one, too
        outcome, wrong = "foreign", _told(error)
    finally:
        _watched.clear()
    grown = peak_memory() - before
    if not wrong and grown > 4 * size + MEMORY:
        outcome, wrong = "memory", f"took {grown >> 20} MB for a file of {size} bytes"
    if not wrong and _outside:
        outcome, wrong = "outside", f"opened {_outside[0]}"
    return outcome, wrong


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f"{os.sep}strata{os.sep}" in f.filename] or frames
    where = f"{'/'.join(Path(own[-1].filename).parts[-3:])}:{own[-1].lineno}" if own else "?"
    return f"{type(error).__name__} at {where}: {str(error)[:200]}"


def main(arguments: list[str]) -> None:
    name, (seed, first, count) = arguments[0], map(int, arguments[1:4])
    faulthandler.enable()
    say = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a mutant prints is not for the machine
    form = format_named(name)
    with (
        tempfile.TemporaryDirectory() as place,
        using(num_threads=1, cache_dir=Path(place) / "cache"),
        np.errstate(all="ignore"),
    ):
        root = Path(place).resolve()
        (root / "sound").mkdir()
        form.prepare(root / "sound")
        _watch()
        _bound_addresses()
        for number in range(first, first + count):
            start = time.process_time()
            print(json.dumps({"at": number, "cpu": start}), file=say, flush=True)
            outcome, wrong = attempt(form, root / "mutant", seed, number)
            told = {"number": number, "outcome": outcome, "cpu": time.process_time() - start, "wrong": wrong}
            print(json.dumps(told), file=say, flush=True)


def _bound_addresses() -> None:
    try:
        import resource
    except ImportError:
        return
    now = _status("VmSize")
    if now:
        resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESSES, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main(sys.argv[1:])
