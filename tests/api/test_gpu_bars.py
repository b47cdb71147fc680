"""The bars of a card: every one is of a row that a stage measures, and what is missing or wrong is never a pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from time import monotonic

import pytest

from benchmarks.gpu_bars import AGAIN, SUITES, Bar, Stage, bars, collected, stages, table

ROOT = Path(__file__).parents[2]


def printed(*rows: object, then: str = "") -> tuple[str, ...]:
    lines = "".join(f"print({json.dumps(row)!r}, flush=True)\n" for row in rows)
    return ("-c", lines + then)


@pytest.mark.torch
def test_every_bar_is_of_a_row_that_a_stage_measures() -> None:
    pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    from benchmarks.device_calls import contenders
    from benchmarks.gpu import GROUPS
    from benchmarks.gpu_sweep import BLOCKS

    groups = {word for stage in stages(has_card=True) for at, word in enumerate(stage.command)
              if stage.command[at - 1] == "--only" and stage.command[1] == "benchmarks.gpu"}  # fmt: skip
    with FakeTensorMode():
        names = {case.name for listed in groups for group in listed.split(",") for case in GROUPS[group]()}
    known = names | {AGAIN + name for name in names} | set(SUITES) | set(contenders("cpu"))
    known |= {f"{name} {m}x{k}x{n} from memory" for name, m, n, k in BLOCKS}
    known |= {"Llama of 22 layers, bf16", "GPT-2 f32 beside the processor"}
    assert {name for bar in bars() for name in (bar.row, bar.over) if name} <= known


def test_stages_fit_in_the_time_and_name_what_is_there() -> None:
    for has_card in (True, False):
        for stage in stages(has_card=has_card):
            assert all((ROOT / word).is_file() for word in stage.command if word.endswith(".py"))
            assert stage.command[1] == "pytest" or (ROOT / (stage.command[1].replace(".", "/") + ".py")).is_file()
            assert 0 < stage.seconds <= (200 if has_card else 600)


def test_a_table_of_what_is_met_what_is_not_and_what_is_open() -> None:
    rows = [
        {"work": "matmul", "strata_ms": 1.0, "of_best_peer": 0.9, "right": True},
        {"work": "with bias", "strata_ms": 1.1},
        {"work": "wrong", "strata_ms": 0.1, "right": False, "error": 0.5},
        {"work": "fails", "fails": "OutOfMemoryError: none"},
        {"call": "jit", "us": 8.0},
        {"kind": "few blocks q4k 1", "sizes": [4096, 4096], "best": [[0.0065, "fragments"]]},
        {"kind": "f32", "losses": [1, 2], "largest_gap": 0.001},
        {"stage": "decode", "fails": "no time was left"},
    ]
    wanted = [
        Bar("matmul", "of_best_peer", 0.9), Bar("matmul", "strata_ms", 0.5, most=True), Bar("jit", "us", 10, most=True),
        Bar("with bias", "strata_ms", 1.03, most=True, over="matmul"), Bar("wrong", "strata_ms", 1, most=True),
        Bar("fails", "strata_ms", 1, most=True), Bar("nobody", "us", 1),
        Bar("q4k 1x4096x4096 from memory", "of_copy", 0.3),
        Bar("GPT-2 f32 beside the processor", "largest_gap", 0.01, most=True), Bar("jit", "us", 1, over="nobody"),
    ]  # fmt: skip
    text, is_met = table(wanted, rows)
    lines = text.splitlines()
    assert not is_met
    assert [line.split()[0] for line in lines[: len(wanted)]] == ["FAIL"] * 2 + ["open"] * 4 + ["pass"] * 4
    assert "1.1" in lines[1]
    assert "results are wrong by 0.5" in lines[2]
    assert "OutOfMemoryError" in lines[3]
    assert "decode: no time was left" in text
    assert lines[-1] == "4 pass, 2 FAIL, 4 open"
    assert table([replace(wanted[0])], rows)[1]


def test_rows_of_a_stage_that_fails_or_takes_too_long_count_until_then(tmp_path: Path) -> None:
    todo = [
        Stage(
            "crashes",
            printed({"work": "a", "n": 1}, then="print('{no row'); raise SystemExit('why')"),
            60,
            prefix=AGAIN,
        ),
        Stage("hangs", printed({"work": "b", "n": 2}, then="import time; time.sleep(600)"), 5),
        Stage("passes", ("-c", "print('3 passed')"), 60, is_suite=True),
        Stage("fails", ("-c", "raise SystemExit('1 failed')"), 60, is_suite=True),
    ]
    begin = monotonic()
    rows = list(collected(todo, 300, str(tmp_path)))
    assert monotonic() - begin < 300
    assert rows[0] == {"work": AGAIN + "a", "n": 1}
    assert rows[1]["stage"] == "crashes"
    assert rows[1]["fails"].endswith("why")
    assert rows[2] == {"work": "b", "n": 2}
    assert rows[3]["stage"] == "hangs"
    assert rows[4:] == [
        {"suite": "passes", "passed": 1, "told": "3 passed"}, {"suite": "fails", "passed": 0, "told": "1 failed"},
    ]  # fmt: skip
    assert list(collected(todo[:1], 0, str(tmp_path))) == [{"stage": "crashes", "fails": "no time was left"}]


def test_rows_of_a_file_are_judged(tmp_path: Path) -> None:
    rows = [{"work": bar.row, bar.key: 0.0} for bar in bars()]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.gpu_bars", "--rows", str(tmp_path / "rows.json")]
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert f"FAIL  {bars()[0].name}" in done.stdout
