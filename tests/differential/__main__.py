"""Random programs on every path: `python -m tests.differential --count 2000 --seed 7 --jobs 2 --paths graph,symbolic`.

The seed is printed, and repeats a run. For each violation a small program that still shows it is printed.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys

from tests.differential.draw import draw_program
from tests.differential.paths import DEVICES, MAIN, digest
from tests.differential.workers import Totals, run_all, work


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="programs to try")
    parser.add_argument("--seed", type=int, default=None, help="first seed; a random one by default")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--paths",
        default=",".join(MAIN),
        help=f"separated by commas; bits: symbols against numbers in every bit; {', '.join(DEVICES)} are there too",
    )
    parser.add_argument("--seconds", type=float, default=None, help="begin no program after so many")
    parser.add_argument("--whole", action="store_true", help="show programs as they were drawn")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--digests", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.digests is not None:
        print(json.dumps({seed: digest(draw_program(int(seed))) for seed in options.digests.split(",")}))
        return 0
    paths = options.paths.split(",")
    if options.worker:
        return work(options.seed, options.count, paths, whole=options.whole, seconds=options.seconds)
    first = options.seed if options.seed is not None else secrets.randbelow(1 << 31)
    print(
        f"seeds {first} to {first + options.count - 1}: repeat with --seed {first} --count {options.count}", flush=True
    )
    totals: Totals = run_all(first, options.count, options.jobs, paths, whole=options.whole, seconds=options.seconds)
    print(totals)
    return bool(totals.violations)


if __name__ == "__main__":
    sys.exit(main())
