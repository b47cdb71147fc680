"""Many small cases in one test: a test of its own costs each of them more than the case itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable


def check_all(cases: Iterable[tuple[str, Callable[[], object]]]) -> None:
    """Runs every case, then fails with the names of all that failed, and the traceback of each."""
    names, errors = list[str](), list[Exception]()
    count = 0
    for name, run in cases:
        count += 1
        try:
            run()
        except Exception as error:  # noqa: BLE001 - raised below, with the others
            error.add_note(f"in the case {name!r}")
            names.append(name)
            errors.append(error)
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {count} cases failed: {', '.join(names)}", errors)
