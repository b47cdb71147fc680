"""The command line as far as it goes: version, doctor."""

from __future__ import annotations

import json

import pytest

from strata.cli import main


def test_doctor_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cores"] >= facts["cores in affinity mask"] >= 1


def test_user_mistake_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["physician"])
    assert caught.value.code == 2
    assert "physician" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("strata ")
