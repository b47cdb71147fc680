"""How threads wait and tell the time: the parts of the pool that depend on the platform."""

from __future__ import annotations

import platform
import sys

_GETTID_CALL = {"x86_64": 186, "aarch64": 178, "amd64": 186, "arm64": 178}
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "amd64": 202, "arm64": 98}  # Linux system call numbers


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
