"""`strata tune`: schedules that were searched for, and the second time found."""

import json
from pathlib import Path

import pytest

import strata as st
from strata import ops
from strata.cli import main


def test_schedules_are_searched_for_and_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    g = st.Graph("rows")
    g.outputs(ops.softmax(g.input("x", (8, 64)), axis=-1))
    file = tmp_path / "rows.mir"
    file.write_text(str(g))
    told = []
    for _ in range(2):
        assert main(["tune", str(file), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out)["kernels"])
    assert told[0] == told[1]
    assert [one["kernel"] for one in told[0]] == ["k0"]
    assert "vectorise" in told[0][0]["schedule"]
    assert main(["tune", str(file)]) == 0
    assert capsys.readouterr().out.startswith("1 of 1 kernels have a schedule that was searched for")
