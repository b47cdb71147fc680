"""Importing and making much leave the collector as it was, whatever happens meanwhile."""

from __future__ import annotations

import gc
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from strata import modules


@pytest.fixture(autouse=True)
def _collector():
    before = gc.isenabled(), gc.get_threshold()
    yield
    assert (gc.isenabled(), gc.get_threshold()) == before


def test_thresholds_come_back() -> None:
    before = gc.get_threshold()
    with modules.making_much():
        assert gc.get_threshold() == tuple(map(max, before, modules.RARELY))
        with pytest.raises(KeyError), modules.making_much():
            raise KeyError
        assert gc.get_threshold() != before
    assert gc.get_threshold() == before


def test_a_collector_that_is_off_stays_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with modules.making_much():
            assert gc.get_threshold()[0] == 0
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_what_the_application_sets_meanwhile_comes_back() -> None:
    before = gc.get_threshold()
    try:
        with modules.making_much():
            gc.set_threshold(123, 7, 5)
            with modules.making_much():
                assert gc.get_threshold() == tuple(map(max, (123, 7, 5), modules.RARELY))
        assert gc.get_threshold() == (123, 7, 5)
        with modules.making_much():
            gc.set_threshold(0)
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_a_module_may_turn_the_collector_off_or_set_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "sets_the_collector.py").write_text("import gc\ngc.disable()\ngc.set_threshold(99, 9, 9)\n")
    try:
        with modules.making_much():
            modules.imported("sets_the_collector")
        assert not gc.isenabled()
        assert gc.get_threshold() == (99, 9, 9)
    finally:
        gc.enable()
        gc.set_threshold(*before)
        sys.modules.pop("sets_the_collector", None)


def test_nothing_is_collected_while_a_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "makes_much.py").write_text(
        "import gc\nbefore = gc.get_stats()\nmade = [[i] for i in range(100_000)]\nafter = gc.get_stats()\n"
    )
    module = modules.imported("makes_much")
    assert [g["collections"] for g in module.before] == [g["collections"] for g in module.after]
    sys.modules.pop("makes_much", None)


def test_threads_that_make_much() -> None:
    def make(_: int) -> None:
        with modules.making_much():
            assert gc.get_threshold()[0] >= modules.RARELY[0]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, range(200)))


def test_an_import_ages_objects_and_leaves_the_collector_on() -> None:
    gc.enable()
    frozen = gc.get_freeze_count()  # some versions of Python begin with a few; then nothing is moved
    assert modules.imported("json").__name__ == "json"
    cycle: list[object] = []
    cycle.append(cycle)
    modules.imported(next(n for n in ("colorsys", "sched", "filecmp", "fileinput") if n not in sys.modules))
    assert gc.isenabled()
    assert frozen or any(x is cycle for x in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == frozen
    with pytest.raises(ModuleNotFoundError):
        modules.imported("strata.no_such_module")
    assert gc.isenabled()
