"""The command line as far as it goes: version, doctor."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import strata as st
from strata.cli import main


def test_doctor_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["cores"] >= facts["cores in affinity mask"] >= 1


def cache_line(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["doctor", "--json"]) == 0
    return str(json.loads(capsys.readouterr().out)["cache"])


def test_doctor_writes_to_find_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with st.config.using(cache_dir=tmp_path / "cache"):
        assert cache_line(capsys).endswith("; can be written")

        def full(handle: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        assert cache_line(capsys).endswith("; compiled code is not kept: No space left on device")
    (tmp_path / "file").write_text("")
    with st.config.using(cache_dir=tmp_path / "file" / "cache"):
        assert "not kept: " in cache_line(capsys)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="a file system of our own needs `unshare`")
@pytest.mark.parametrize("options", ["size=64k", "size=4m,nr_inodes=2"])
def test_doctor_on_a_full_disk(tmp_path: Path, options: str) -> None:
    script = f'mount -t tmpfs -o {options} tmpfs {tmp_path} || exit 77; "$0" -m strata.cli doctor --json'
    env = {**os.environ, "STRATA_CACHE_DIR": str(tmp_path)}
    command = ["unshare", "-m", "sh", "-c", script, sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("this user may not mount")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cache"].endswith("not kept: No space left on device")


def test_doctor_on_a_folder_of_others(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with st.config.using(cache_dir=tmp_path / "cache"):
        told = "can be written by others (mode 777, not 755)"
        assert told in cache_line(capsys)
        for command in ("ls", "verify"):
            assert main(["cache", command]) == (command == "verify")
            assert told in capsys.readouterr().out
        assert main(["cache", "why", "matmul"]) == 0
        assert told in capsys.readouterr().out


def test_user_mistake_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["physician"])
    assert caught.value.code == 2
    assert "physician" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("strata ")
