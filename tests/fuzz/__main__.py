"""Random graphs without end: `python -m tests.fuzz --count 2000 --seed 7`. The seed is printed, and repeats a run."""

import argparse
import secrets
import sys
import time
import traceback

from tests.fuzz.test_every_pass import check_every_pass, check_precision
from tests.fuzz.test_open_sizes import check_open
from tests.fuzz.test_random_graphs import check_everything
from tests.fuzz.test_sized_ops import check_gradients, check_sized


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="graphs to try")
    parser.add_argument("--seed", type=int, default=None, help="first seed; a random one by default")
    options = parser.parse_args()
    first = options.seed if options.seed is not None else secrets.randbelow(1 << 31)
    print(
        f"seeds {first} to {first + options.count - 1}: repeat with --seed {first} --count {options.count}", flush=True
    )
    failed = []
    start = time.monotonic()
    for seed in range(first, first + options.count):
        try:
            check_everything(seed)
            check_every_pass(seed)
            check_precision(seed)
            check_sized(seed)
            check_gradients(seed)
            check_open(seed)
        except Exception:  # noqa: BLE001 - every failure counts, whatever it is
            failed.append(seed)
            print(f"seed {seed}: repeat with --seed {seed} --count 1", flush=True)
            traceback.print_exc(limit=-5)  # the innermost calls
    seconds = time.monotonic() - start
    print(f"{options.count} graphs, {len(failed)} failures in {seconds:.0f} s{f': {failed}' if failed else ''}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
