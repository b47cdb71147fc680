"""Bounded tables: entries made once by whoever asks first, alone or together; and the list of all tables."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

import strata
from strata.core import TABLES, Table

SOURCES = {p: p.read_text() for p in Path(strata.__file__).parent.rglob("*.py")}


def waited(table: Table[str, int], keys: list[str], make, later: list[str], make_later):
    """What a thread gets for `keys`, and another one for `later`, which asks and waits while the first one makes."""
    results = {}

    def ask(name: str, wanted: list[str], made) -> None:
        try:
            results[name] = table.get_or_make_all(wanted, made)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            results[name] = error

    def first(missing: list[str]):
        other.start()
        while not table._making[later[0]]._condition._waiters:
            time.sleep(0.001)
        return make(missing)

    other = threading.Thread(target=ask, args=("later", later, make_later))
    ask("first", keys, first)
    other.join()
    return results["first"], results["later"]


def lengths(missing: list[str]) -> list[int]:
    return [len(key) for key in missing]


def test_what_is_missing_is_made_together_and_once() -> None:
    table: Table[str, int] = Table("code")
    asked: list[list[str]] = []

    def make(missing: list[str]) -> list[int]:
        asked.append(missing)
        return lengths(missing)

    assert table.get_or_make_all(["a", "bb", "a"], make) == [1, 2, 1]
    assert table.get_or_make_all(["bb", "ccc", "a"], make) == [2, 3, 1]
    assert asked == [["a", "bb"], ["ccc"]]
    assert (table.counters.hits, table.counters.misses) == (2, 3)
    assert table.keys() == ["bb", "a", "ccc"]


def test_whoever_asks_meanwhile_waits() -> None:
    def never(missing: list[str]) -> list[int]:
        raise AssertionError(missing)

    assert waited(Table("code"), ["a", "bb"], lengths, ["bb"], never) == ([1, 2], [2])


def test_a_failure_reaches_those_who_waited_for_it() -> None:
    def fail(missing: list[str]) -> list[int]:
        raise ZeroDivisionError

    table: Table[str, int] = Table("code")
    first, later = waited(table, ["a"], fail, ["a"], lengths)
    assert isinstance(first, ZeroDivisionError)
    assert first is later
    assert table.get_or_make("a", lambda: 7) == 7, "it is not kept"


@pytest.mark.parametrize(("keys", "error"), [(["a", "bb"], ZeroDivisionError), (["bb"], KeyboardInterrupt)])
def test_a_failure_that_may_be_of_another_is_tried_again(keys: list[str], error: type[BaseException]) -> None:
    """Of several that are made together, any may be the one that cannot be made; an interrupt is of one thread."""

    def fail(missing: list[str]) -> list[int]:
        raise error

    first, later = waited(Table("code"), keys, fail, ["bb"], lengths)
    assert isinstance(first, error)
    assert later == [2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_makes_what_its_parent_was_making() -> None:
    table: Table[str, int] = Table("lazy")
    children = []

    def make() -> int:
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(60)
            os._exit(table.get_or_make("a", lambda: 0))
        return 1

    assert table.get_or_make("a", make) == 1
    assert os.waitpid(children[0], 0)[1] == 0


def test_every_table_is_in_the_list_and_there_is_no_other() -> None:
    used = {name for text in SOURCES.values() for name in re.findall(r'\bTable\("([^"]*)"', text)}
    assert used == set(TABLES)
    own = [p.name for p, text in SOURCES.items() if re.search(r"OrderedDict|popitem|move_to_end", text)]
    assert own == ["tables.py"]
