"""The command line. Everything beyond argument reading is imported by the command that needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from strata.errors import StrataError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success, 2 a user's mistake told in one line on standard error."""
    import argparse

    parser = argparse.ArgumentParser(prog="strata", description="Compile and run tensor programs.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="what this machine has: ISA, threads, limits, cache")
    doctor.add_argument("--json", action="store_true", help="print JSON for a program to read")
    options = parser.parse_args(argv)

    try:
        if options.version:
            print(f"strata {_version()}")
        elif options.command == "doctor":
            from strata.cli.doctor import report

            print(report(as_json=options.json))
        else:
            parser.print_help()
    except StrataError as error:
        print(f"strata: {error}", file=sys.stderr)
        return 2
    return 0


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("strata")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown (not installed)"
