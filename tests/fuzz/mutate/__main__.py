"""Mutated files and texts: what reads them may refuse with a StrataError, and must do nothing worse.

    python -m tests.fuzz.mutate --format all --count 20000 --seed 7 --jobs 16

One generator a format (formats.py), one machine for all (machine.py): mutants run in worker processes under a watchdog.
A violation is a crash, more than 5 seconds of a core, more memory than 4 × file + 256 MB, a file opened outside the
mutant's folder, or any exception that is not a StrataError. The seed is printed; any mutant can be made again alone.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
from pathlib import Path

from tests.fuzz.mutate.base import write_files
from tests.fuzz.mutate.formats import FORMATS, format_named, missing
from tests.fuzz.mutate.machine import Found, Machine, Violation
from tests.fuzz.mutate.worker import generator


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.mutate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", action="append", choices=("all", *FORMATS), help="may be given several times")
    parser.add_argument("--count", type=int, default=2000, help="mutants of each format")
    parser.add_argument("--seed", type=int, default=None, help="a random one by default")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--number", type=int, default=None, help="only this mutant")
    parser.add_argument("--keep", type=Path, default=None, help="a folder for the files of mutants that went wrong")
    options = parser.parse_args()
    chosen = [*FORMATS] if not options.format or "all" in options.format else options.format
    for name in chosen:
        if missing(name):
            print(f"{name}: left out, it needs {', '.join(missing(name))}", flush=True)
    names = [name for name in chosen if not missing(name)]
    seed = options.seed if options.seed is not None else secrets.randbelow(1 << 31)
    print(f"seed {seed}: repeat with --seed {seed} --count {options.count}", flush=True)
    start = time.monotonic()
    first, count = (0, options.count) if options.number is None else (options.number, 1)
    machine = Machine(seed, options.jobs, lambda found: print(found, flush=True))
    found = machine.run([(name, first, count) for name in names])
    if options.keep is not None:
        _keep(found.violations, options.keep)
    _report(found, time.monotonic() - start)
    return bool(found.violations)


def _report(found: Found, seconds: float) -> None:
    for name, outcomes in sorted(found.outcomes.items()):
        rate = outcomes.total() / max(found.seconds[name], 1e-9)
        print(f"{name:12} {outcomes.total():7} mutants, {rate:6.0f} a second of a core: {dict(outcomes)}")
    total = sum(outcomes.total() for outcomes in found.outcomes.values())
    print(f"{total} mutants, {len(found.violations)} violations in {seconds:.0f} s")


def _keep(violations: list[Violation], folder: Path) -> None:
    import tempfile

    for v in violations:
        form = format_named(v.form)
        with tempfile.TemporaryDirectory() as place:
            form.prepare(Path(place))
            write_files(folder / f"{v.form}-{v.seed}-{v.number}", form.mutant(generator(v.form, v.seed, v.number)))


if __name__ == "__main__":
    sys.exit(main())
