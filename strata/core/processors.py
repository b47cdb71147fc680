"""How many threads this process may use: the user's setting, the affinity mask, the container's CPU quota."""

from __future__ import annotations

import os


def available_threads(setting: int | None = None) -> int:
    """The user's setting, else the CPUs that the affinity mask and the container's quota allow."""
    if setting is not None:
        return max(1, setting)
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = cgroup_quota()
    # a quota of 1.5 CPUs is worth two threads half of the time: round up
    return max(1, count if quota is None else min(count, int(-(-quota // 1))))


def cgroup_quota(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> float | None:
    """CPUs granted by the tightest control group around this process; None without a limit."""
    limits = []
    for hierarchy, path in _groups(membership):
        for directory in _upwards(path):
            limit = _limit_v2(f"{root}{directory}") if hierarchy == "" else _limit_v1(f"{root}/{hierarchy}{directory}")
            if limit is not None:
                limits.append(limit)
    return min(limits) if limits else None


def _groups(membership: str) -> list[tuple[str, str]]:
    """(controller of a v1 hierarchy or '' for v2, path of this process in it)."""
    found = []
    for line in _read(membership).splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            found.append(("", path))
        elif "cpu" in controllers.split(","):
            found += [("cpu", path), (controllers, path)]
    return found


def _upwards(path: str) -> list[str]:
    parts = [p for p in path.split("/") if p and p != ".."]
    return ["".join("/" + p for p in parts[:n]) for n in range(len(parts), -1, -1)]


def _limit_v2(directory: str) -> float | None:
    fields = _read(f"{directory}/cpu.max").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return _ratio(fields[0], fields[1])


def _limit_v1(directory: str) -> float | None:
    quota, period = _read(f"{directory}/cpu.cfs_quota_us").strip(), _read(f"{directory}/cpu.cfs_period_us").strip()
    return _ratio(quota, period) if quota and period else None


def _ratio(quota: str, period: str) -> float | None:
    try:
        value = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return None
    return value if value > 0 else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
