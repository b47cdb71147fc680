"""The suite tells the truth: contenders are compared before they are timed, losses come first, losses grow loudly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def source_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def result(name: str, ours: float, **peers: float) -> dict[str, Any]:
    times = {"strata": ours, **peers}
    contenders = {n: {"best": t / 1e3, "median": t / 1e3 * 1.1, "runs": 5} for n, t in times.items()}
    return {
        "workload": name,
        "group": "rows",
        "threads": 1,
        "wrong": {},
        "failed": {},
        "judge": "numpy",
        "contenders": contenders,
    }


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
    assert "| rows | 1 | 2 | 1.00 | 0.50 | 1 |" in text
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
    from benchmarks.contenders import first_array, make_run
    from benchmarks.registry import load_workloads

    case = load_workloads()["rms norm 1 MB"].make()
    ours, theirs = (first_array(make_run(name, case, 1)()) for name in ("strata", "numpy"))
    assert abs(ours - theirs).max() < 1e-4


def test_contenders_run_in_turns_and_are_stopped_in_between(tmp_path: Path) -> None:
    from benchmarks.measure import STOPS, Team
    from benchmarks.registry import load_workloads

    with Team(1, tmp_path) as team:
        found = team.measure(load_workloads()["call overhead: x + 1 on 8 floats"], 0.01)
        assert {"strata", "numpy"} <= set(found["contenders"])
        assert not found["wrong"]
        assert not found["failed"]
        assert all(c["runs"] > 100 and c["best"] <= c["median"] for c in found["contenders"].values())
        if STOPS and Path("/proc").exists():
            files = [Path(f"/proc/{w.process.pid}/stat") for w in team.workers.values()]
            until = monotonic() + 5  # a signal reaches a process that is being scheduled a moment later
            while {f.read_text().split()[2] for f in files} != {"T"} and monotonic() < until:
                sleep(0.01)
            assert {f.read_text().split()[2] for f in files} == {"T"}
    assert not any(w.alive for w in team.workers.values())


def test_a_contender_that_dies_or_differs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import measure
    from benchmarks.registry import load_workloads

    work = load_workloads()["call overhead: x + 1 on 8 floats"]
    answers = measure.Worker.ask

    def with_a_death(self: Any, **order: Any) -> dict[str, Any]:
        if self.contender == "numpy":
            self.process.kill()
        return answers(self, **order)

    monkeypatch.setattr(measure.Worker, "ask", with_a_death)
    with measure.Team(1, tmp_path) as team:
        found = team.measure(work, 0.01)
    assert "the process ended with -9" in found["failed"]["numpy"]
    assert "numpy" not in found["contenders"]
    far = measure._differences({"a": np.zeros(2), "b": np.ones(2), "c": np.zeros(3)}, "a")
    assert far == {"a": 0, "b": 1, "c": np.inf}


def test_the_page_takes_the_newest_result_of_each_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import __main__ as suite

    monkeypatch.setattr(suite, "HISTORY", tmp_path / "history.jsonl")
    assert suite.newest({"a"}, [1])["results"] == []
    runs = [run_of(result("a", 4.0, numpy=1.0), result("b", 1.0, numpy=1.0)), run_of(result("a", 2.0, numpy=1.0))]
    runs[1]["machine"] |= {"commit": "d", "load": 3}
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs), "utf-8")
    found = suite.newest({"a", "b"}, [1])
    assert [(r["workload"], r["contenders"]["strata"]["best"]) for r in found["results"]] == [
        ("a", 0.002),
        ("b", 0.001),
    ]
    assert (found["machine"]["commit"], found["machine"]["load"], found["seconds"]) == ("d, c", 3, 120)
    assert suite.newest({"b"}, [2])["results"] == []


def test_memory_is_shown_against_a_copy() -> None:
    from benchmarks.report import copy_share, page

    moved = result("sum 64 MB", 2.0, numpy=3.0) | {"bytes": 64e6, "copy": 40e9}
    assert copy_share(moved) == pytest.approx(0.8)
    text = page(run_of(moved, result("small one", 1.0, numpy=2.0)))
    assert "| sum 64 MB | 1 | 32.0 | 40.0 | **0.80** |" in text
    assert "| small one | 1 |" not in text[text.index("## Memory") :]
    assert "## Memory" not in page(run_of(result("small one", 1.0, numpy=2.0)))


def test_ceilings_are_shown_with_their_bars() -> None:
    from benchmarks.report import page

    row = {"what": "q8_0 weights", "threads": 2, "value": "30 GB/s", "ceiling": "40 GB/s", "share": 0.75, "bar": "0.70"}
    text = page(run_of(result("a", 1.0, numpy=2.0)) | {"ceilings": [row | {"met": True}, row | {"met": False}]})
    assert "| q8_0 weights | 2 | 30 GB/s | 40 GB/s | **0.75** | 0.70 | met |" in text
    assert "| 0.70 | missed |" in text


def test_peak_memory_is_of_the_process_alone() -> None:
    """Not of the large one that started it."""
    held = np.ones(256 << 20, np.uint8)
    code = "from benchmarks.measure import peak_memory; print(peak_memory())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert float(done.stdout) < held.nbytes / (2 << 20)


def test_large_rows_know_their_bytes() -> None:
    from benchmarks.registry import load_workloads

    workloads = load_workloads()
    assert workloads["sum of rows 64 MB"].make().bytes == (64 << 20) + 4 * 16384
    assert workloads["softmax 64 MB"].make().bytes == 2 * (64 << 20)
    assert workloads["softmax 1 MB"].make().bytes == 0


def test_the_speed_of_a_copy() -> None:
    from benchmarks.machine import copy_speed

    assert copy_speed(1, 1 << 20) > 0


def test_history_keeps_a_row_for_each_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import history

    monkeypatch.setattr(history, "ROWS", tmp_path / "history.json")
    monkeypatch.setattr(history, "PICTURE", tmp_path / "history.svg")
    monkeypatch.setattr(history, "GROUPS", tmp_path / "groups.svg")
    history.keep(run_of(result("a", 1.0, numpy=2.0), result("b", 1.0, numpy=8.0)))
    history.keep(run_of(result("a", 1.0, numpy=4.0), result("b", 1.0, numpy=4.0)))
    (row,) = history.read()  # the same commit again
    assert row["mean"] == {"1": 4.0}
    assert row["groups"] == {"rows": {"1": 4.0}}
    later = run_of(result("a", 1.0, numpy=9.0))
    later["machine"]["commit"] = "later"
    history.keep(later)
    assert [r["mean"]["1"] for r in history.read()] == [4.0, 9.0]
    assert "polyline" in (tmp_path / "history.svg").read_text()


def test_the_pictures_of_the_history_are_those_of_its_rows() -> None:
    from benchmarks import history

    assert history.GROUPS.read_text("utf-8") == history.groups_picture(history.read()[-1]), (
        "python -m benchmarks --history"
    )
    assert history.PICTURE.read_text("utf-8") == history.picture(history.read()).svg(), "python -m benchmarks --history"
