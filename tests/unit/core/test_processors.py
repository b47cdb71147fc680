"""Threads that a process may use: its setting, its affinity mask, its container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strata.core import available_threads, cgroup_quota, processors


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "200000 100000\n"}, 0.5),
        ("0::/seen/only/by/host\n", {"cpu.max": "100000 100000\n"}, 1.0),
        ("4:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "300000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 3.0),
        ("4:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("", {}, None),
    ],
)
def test_cgroup_quota(tmp_path: Path, own: str, files: dict[str, str], cores: float | None) -> None:
    write(tmp_path, files | {"own": own})
    assert cgroup_quota(str(tmp_path), str(tmp_path / "own")) == cores


def test_setting_mask_and_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for quota, threads in ((None, 8), (1.0, 1), (0.2, 1), (1.5, 2), (64.0, 8)):
        monkeypatch.setattr(processors, "cgroup_quota", lambda quota=quota: quota)
        assert available_threads() == threads
        assert available_threads(3) == 3
    assert available_threads(0) == 1
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert available_threads() == 5
