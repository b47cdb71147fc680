"""A test of many cases runs all of them, and its failure names each that failed."""

from __future__ import annotations

import pytest

from tests.groups import check_all


def test_every_case_runs_and_every_failure_is_named() -> None:
    ran = list[str]()

    def case(name: str, error: Exception | None) -> None:
        ran.append(name)
        if error is not None:
            raise error

    errors = {"a": None, "b": ValueError("first"), "c": None, "d": AssertionError("second")}
    with pytest.raises(ExceptionGroup, match=r"^2 of 4 cases failed: b, d") as caught:
        check_all((name, lambda name=name, error=error: case(name, error)) for name, error in errors.items())  # type: ignore[misc]
    assert ran == list(errors)
    assert caught.value.exceptions == (errors["b"], errors["d"])
    assert [error.__notes__ for error in caught.value.exceptions] == [["in the case 'b'"], ["in the case 'd'"]]


def test_nothing_fails_where_no_case_does() -> None:
    check_all([("a", lambda: None), ("b", lambda: 1)])
