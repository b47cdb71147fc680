"""How many threads this process may use, and how threads wait: the parts of the pool that depend on the platform."""

from __future__ import annotations

import os
import platform
import sys

_GETTID_CALL = {"x86_64": 186, "aarch64": 178, "amd64": 186, "arm64": 178}
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "amd64": 202, "arm64": 98}  # Linux system call numbers


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


def wait_functions() -> str:
    """LLVM text of pause, sleep_while(word, value), wake(word, count) and give_way for this platform."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        pause, declared = "call void @llvm.x86.sse2.pause()", "declare void @llvm.x86.sse2.pause()"
    else:
        pause, declared = "call void @llvm.aarch64.hint(i32 1)", "declare void @llvm.aarch64.hint(i32)"
    head = f"{declared}\ndefine internal void @pause() alwaysinline nounwind {{ {pause} ret void }}\n"
    if sys.platform == "linux" and machine in _FUTEX_CALL:
        return head + _FUTEX.replace("NUMBER", str(_FUTEX_CALL[machine]))
    return head + _PORTABLE


def clock_functions() -> str:
    """LLVM text of now(), as time.perf_counter_ns counts, and thread_number(); both 0 where unknown."""
    machine = platform.machine().lower()
    if sys.platform == "linux" and machine in _GETTID_CALL:
        return _CLOCK.replace("NUMBER", str(_GETTID_CALL[machine]))
    return (
        "define internal i64 @now() nounwind { ret i64 0 }\n"
        "define internal i64 @thread_number() nounwind { ret i64 0 }\n"
    )


_CLOCK = """
declare i32 @clock_gettime(i32, ptr)
define internal i64 @now() nounwind {
  %t = alloca [2 x i64], align 8
  %r = call i32 @clock_gettime(i32 1, ptr %t)
  %s = load i64, ptr %t, align 8
  %p = getelementptr i64, ptr %t, i64 1
  %n = load i64, ptr %p, align 8
  %k = mul i64 %s, 1000000000
  %v = add i64 %k, %n
  ret i64 %v
}
define internal i64 @thread_number() nounwind {
  %r = call i64 (i64, ...) @syscall(i64 NUMBER)
  ret i64 %r
}
"""
_FUTEX = """
declare i64 @syscall(i64, ...)
declare i32 @sched_yield()
define internal void @sleep_while(ptr %word, i32 %value) nounwind {
  %r = call i64 (i64, ...) @syscall(i64 NUMBER, ptr %word, i32 128, i32 %value, ptr null, ptr null, i32 0)
  ret void
}
define internal void @wake(ptr %word, i32 %count) nounwind {
  %r = call i64 (i64, ...) @syscall(i64 NUMBER, ptr %word, i32 129, i32 %count, ptr null, ptr null, i32 0)
  ret void
}
define internal void @give_way() nounwind {
  %r = call i32 @sched_yield()
  ret void
}
"""
_PORTABLE = """
declare i32 @usleep(i32)
define internal void @sleep_while(ptr %word, i32 %value) nounwind {
  %r = call i32 @usleep(i32 200)
  ret void
}
define internal void @wake(ptr %word, i32 %count) nounwind {
  ret void
}
define internal void @give_way() nounwind {
  %r = call i32 @usleep(i32 1)
  ret void
}
"""
