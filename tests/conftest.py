"""Options and fixtures that every test may use."""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
import zlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from strata.backends import registry
from strata.backends.stablehlo import adapter
from strata.testing import GoldenCase, check_case
from tests import few

# The default run draws the same examples every time, so that a red test is red for everyone; `make fuzz` explores.
settings.register_profile("strata", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fuzz", deadline=None, max_examples=5000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("strata")  # --hypothesis-profile overrides it

# JAX takes most of a GPU's memory when it starts; the other tests of this machine need some, too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

_SEED = pytest.StashKey[int]()
_STATES: dict[str, list[tuple[np.random.Generator, Any]]] = {}  # of the generators that a module of tests made
_ORDER = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("strata")
    group.addoption("--update-golden", action="store_true", help="write the actual results into the golden cases")
    group.addoption(
        "--random-order", type=int, nargs="?", const=-1, default=None, metavar="SEED",
        help="run files, and the tests in each, in an order drawn from a seed; a fresh one is printed by default",
    )  # fmt: skip
    group.addoption(
        "--few", action="store_true",
        help="of a test that is marked `few`, run so many cases, drawn from the seed of the order or a fresh one",
    )  # fmt: skip
    group.addoption(
        "--seed", type=int, default=0, help="changes the random inputs; a failure prints the value to repeat it"
    )


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a process in the background: tests interrupt themselves
        signal.signal(signal.SIGINT, signal.default_int_handler)
    given: int | None = config.getoption("--random-order")
    if given is not None or config.getoption("--few"):
        # all processes of a run must collect the same order: the first one draws, and tells the others
        told = getattr(config, "workerinput", {}).get("order")
        fresh = given is None or given < 0
        config.stash[_ORDER] = told if told is not None else secrets.randbelow(1 << 31) if fresh else given


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Of pytest-xdist: a process of the run begins."""
    node.workerinput["order"] = node.config.stash.get(_ORDER, None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of a file stay together, since they may share what is dear to make."""
    order = config.stash.get(_ORDER, None)
    if order is None:
        return
    if config.getoption("--few"):
        out = few.left_out(items, order)
        config.hook.pytest_deselected(items=out)
        gone = set(out)
        items[:] = [item for item in items if item not in gone]
    draw = random.Random(order)
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups = list(files.values())
    draw.shuffle(groups)
    for group in groups:
        draw.shuffle(group)
    items[:] = [item for group in groups for item in group]


def pytest_collection_finish() -> None:
    """Every module is there, and no test has drawn a number yet."""
    for name, module in list(sys.modules.items()):
        made = [x for x in vars(module).values() if isinstance(x, np.random.Generator)] if "test" in name else []
        if made:
            _STATES[name] = [(x, x.bit_generator.state) for x in made]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same numbers whatever ran before it."""
    own = getattr(getattr(item, "module", None), "__name__", "")
    for name, states in _STATES.items():
        if name == own or not name.rpartition(".")[2].startswith("test_"):  # its own, and those of helpers
            for generator, state in states:
                generator.bit_generator.state = state
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - of code that draws from it
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if _ORDER in config.stash:
        seed = config.stash[_ORDER]
        again = f"pytest --random-order={seed}{' --few' if config.getoption('--few') else ''}"
        terminalreporter.write_line(f"tests were in a random order: to repeat, {again}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own: the same in every run with the same --seed. It is printed if the test fails."""
    base: int = request.config.getoption("--seed")
    request.node.stash[_SEED] = base
    return zlib.crc32(f"{base}:{request.node.nodeid}".encode())


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no package that devices of other kinds run on is installed, whatever this machine has."""
    adapter.client.cache_clear()  # it knows the device already
    for name in ("jax", "wgpu", "triton", "cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    made = registry._made
    monkeypatch.setattr(registry, "_made", {name: backend for name, backend in made.items() if ":" not in name})


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[Path, Callable[[GoldenCase], str]], None]:
    """`golden(path, run)` compares a golden case with `run(case)`, or rewrites it under --update-golden."""
    update: bool = request.config.getoption("--update-golden")
    return lambda path, run: check_case(path, run, update=update)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and _SEED in item.stash:
        report.sections.append(("random inputs", f"to repeat: pytest --seed={item.stash[_SEED]} {item.nodeid!r}"))
    return report
