"""How hard to try: `make torture` runs the same tests many times over."""

from __future__ import annotations

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("strata").addoption(
        "--torture", action="store_true", help="repeat the tests of tests/torture as often as a release needs"
    )


@pytest.fixture
def many(request: pytest.FixtureRequest):
    """`many(few, lots)`: how often to repeat."""
    hard = bool(request.config.getoption("--torture", default=False))
    return lambda few, lots: lots if hard else few


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
