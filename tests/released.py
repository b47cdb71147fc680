"""Public names and arguments at each release, which later ones keep: `python -m tests.released` adds this version.

A name that goes is listed in `strata._DEPRECATED` for one minor release: it still works, and says what to use instead.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import strata

STORED = Path(__file__).parent / "api/released.json"


def surface() -> dict[str, list[str] | None]:
    """Names of `strata`, those of functions on tensors among them, with the arguments of what can be called."""
    return {name: arguments(getattr(strata, name)) for name in dir(strata) if not name.startswith("_")}


def arguments(thing: Any) -> list[str] | None:
    """Names that a call may give; None of what cannot be called, or takes anything."""
    if not callable(thing):
        return None
    try:
        found = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in found):
        return None
    return [p.name for p in found if p.kind not in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) and not p.name.startswith("_")]


def broken(then: dict[str, list[str] | None]) -> list[str]:
    """What a program written for that release can no longer name."""
    found = []
    for name, taken in then.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                now = arguments(getattr(strata, name))
        except AttributeError:
            found.append(name)
            continue
        if taken is not None and now is not None:
            found += [f"{name}({argument}=…)" for argument in taken if argument not in now]
    return found


def main() -> int:
    stored = json.loads(STORED.read_text("utf-8")) if STORED.exists() else {}
    stored[strata.__version__] = surface()
    text = ",\n".join(
        f'"{version}": {{\n' + ",\n".join(f" {json.dumps(n)}: {json.dumps(a)}" for n, a in names.items()) + "\n}"
        for version, names in stored.items()
    )
    STORED.write_text("{\n" + text + "\n}\n", "utf-8")
    print(f"{len(stored[strata.__version__])} names of {strata.__version__} are kept in {STORED.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
