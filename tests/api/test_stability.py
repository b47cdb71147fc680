"""What docs/stability.md promises: names and arguments of the last release are there, and what goes warns first."""

from __future__ import annotations

import json

import pytest

import strata
from tests import released

STORED = json.loads(released.STORED.read_text("utf-8"))


@pytest.mark.parametrize("version", list(STORED)[-2:])
def test_names_of_a_release_are_kept(version: str) -> None:
    assert released.broken(STORED[version]) == [], "keep it, or list it in strata._DEPRECATED for one minor release"


def test_a_change_of_the_surface_is_noticed() -> None:
    then = {"jit": [*(released.arguments(strata.jit) or []), "gone"], "nowhere": None}
    assert set(released.broken(then)) <= {"jit(gone=…)", "nowhere"}
    assert "nowhere" in released.broken(then)


def test_a_name_that_goes_warns_and_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(strata._DEPRECATED, "as_array", ("asarray", "0.3"))
    with pytest.warns(DeprecationWarning, match=r"strata.as_array goes in 0.3: use strata.asarray") as told:
        assert strata.as_array is strata.asarray
    assert told[0].filename == __file__
    assert released.broken({"as_array": None}) == []
    assert "as_array" not in strata.__all__


def test_deprecated_names_lead_to_names_that_exist() -> None:
    for old, (new, version) in strata._DEPRECATED.items():
        assert old not in strata.__all__
        assert new in strata.__all__
        assert tuple(map(int, version.split("."))) > tuple(map(int, strata.__version__.split(".")[:2]))
