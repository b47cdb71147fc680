"""The suite tells the truth: contenders are compared before they are timed, losses come first, losses grow loudly."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def result(name: str, ours: float, **peers: float) -> dict[str, Any]:
    times = {"strata": ours, **peers}
    contenders = {n: {"best": t / 1e3, "median": t / 1e3 * 1.1, "runs": 5} for n, t in times.items()}
    return {"workload": name, "group": "rows", "threads": 1, "wrong": {}, "judge": "numpy", "contenders": contenders}


def run_of(*results: dict[str, Any]) -> dict[str, Any]:
    machine = {"cpu": "a cpu", "cores": 2, "system": "Linux", "python": "3", "versions": {}, "commit": "c", "date": "d"}
    return {
        "machine": {**machine, "load": 0.1},
        "results": list(results),
        "seconds": 60,
        "load_after": 0.2,
        "suite": "quick",
    }


def test_losses_come_first_and_ratios_are_against_the_best_peer() -> None:
    from benchmarks.report import page, picture, ratio

    lost, won = result("slow one", 4.0, numpy=8.0, torch=2.0), result("fast one", 1.0, numpy=8.0, torch=2.0)
    assert (ratio(lost), ratio(won)) == (0.5, 2.0)
    text = page(run_of(won, lost))
    assert text.index("slow one") < text.index("## Wins") < text.index("fast one")
    assert "geometric mean of 2 ratios 1.00" in text
    assert picture(run_of(won, lost)).count("<rect") == 3


def test_what_was_not_timed_is_named() -> None:
    from benchmarks.report import page

    wrong = result("odd one", 1.0, numpy=2.0) | {"wrong": {"torch": 0.5}}
    text = page(run_of(wrong, {"workload": "broken one", "threads": 1, "error": "ValueError: no"}))
    assert "odd one on 1: results differ from numpy's: torch by 5.0e-01" in text
    assert "broken one on 1: ValueError: no" in text


def test_a_fallen_ratio_is_worse_beyond_noise() -> None:
    from benchmarks.__main__ import _is_worse, to_defend

    stored = to_defend([result("a", 1.0, numpy=1.5)])
    assert stored == {"a / 1": 1.5}
    assert not _is_worse(result("a", 1.2, numpy=1.5), stored)
    assert _is_worse(result("a", 2.0, numpy=1.5), stored)


def test_every_workload_of_a_group_agrees_with_its_judge() -> None:
    from benchmarks.contenders import first_array, make_runs
    from benchmarks.registry import load_workloads

    case = load_workloads()["rms norm 1 MB"].make()
    results = {name: first_array(run()) for name, run in make_runs(case, 1).items()}
    assert {"strata", "numpy"} <= set(results)
    for found in results.values():
        assert abs(found - results["numpy"]).max() < 1e-4
    assert "torch" not in sys.modules or "torch" in results


def test_contenders_have_processes_of_their_own_that_stand_still_between_bursts(tmp_path: Path) -> None:
    import numpy as np

    from benchmarks.measure import Contender

    contender = Contender("numpy", 1)
    try:
        assert contender.prepare("sum of rows 1 MB", tmp_path / "r.npy")
        assert len(contender.burst(3)) == 3
        assert np.load(tmp_path / "r.npy").ndim == 1
        assert not contender.prepare("MLP training step 784-512-512-10, batch 128", tmp_path / "r.npy")
        with pytest.raises(RuntimeError, match="numpy: KeyError"):
            contender.prepare("no such workload", tmp_path / "r.npy")
    finally:
        contender.end()
