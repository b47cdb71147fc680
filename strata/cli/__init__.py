"""The command line. Everything beyond argument reading is imported by the command that needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from strata.cli.parser import Mistake, make_parser
from strata.errors import StrataError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 is success, 1 a check that failed, 2 a user's mistake told in one line on standard error."""
    parser = make_parser()
    options = parser.parse_args(argv)
    if options.version:
        print(f"strata {_version()}")
        return 0
    if options.handler is None:
        parser.print_help()
        return 0
    module, _, function = options.handler.partition(":")
    try:
        return int(getattr(import_module(f"strata.cli.{module}"), function)(options) or 0)
    except (Mistake, StrataError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # `strata … | head`: the reader has seen enough
            sys.stderr.close()
            return 0
        print(f"strata: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def one_line(error: Exception) -> str:
    """What went wrong, in one line: the summary of an error, its code and the repair."""
    if isinstance(error, StrataError):
        fix = f"; try: {error.fix}" if error.fix else ""
        text = f"{error.summary}   [{error.code}]{fix}"
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {(error.strerror or str(error)).lower()}"
    else:
        text = str(error)
    return " ".join(text.split("\n"))


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("strata")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown (not installed)"
