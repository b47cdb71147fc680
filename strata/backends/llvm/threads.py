"""How threads wait and tell the time: the parts of the pool that depend on the platform."""

from __future__ import annotations

import os
import platform
import sys

MASK_WORDS = 16  # processors that a mask can name, in words of 64
MOST_PLACED = 8  # workers; more processors than that always leave an idle one to be found

_GETTID_CALL = {"x86_64": 186, "aarch64": 178, "amd64": 186, "arm64": 178}
_AFFINITY_CALL = {"x86_64": 203, "aarch64": 122, "amd64": 203, "arm64": 122}
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "amd64": 202, "arm64": 98}  # Linux system call numbers


def allowed_processors() -> list[int]:
    """The processors that new threads may run on, as words of a mask; empty where threads cannot be placed."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    mask = sum(1 << cpu for cpu in os.sched_getaffinity(0))
    words = [mask >> 64 * i & (1 << 64) - 1 for i in range(MASK_WORDS)]
    return words if mask < 1 << 64 * MASK_WORDS else []


def wait_functions() -> str:
    """LLVM text of pause, sleep_while(word, value), wake(word, count), give_way, keep_away and go_anywhere.

    A sleeper is often woken on the processor of its waker, where it waits until the waker's time is up, although
    another processor is idle. So the waker first bars the workers from its own processor (keep_away), and a worker that
    has done its first work may go anywhere again. Both take the address of: the number of workers (0: leave them
    alone), their thread numbers, the processors allowed (MASK_WORDS words), and room for as many.
    """
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        pause, declared = "call void @llvm.x86.sse2.pause()", "declare void @llvm.x86.sse2.pause()"
    else:
        pause, declared = "call void @llvm.aarch64.hint(i32 1)", "declare void @llvm.aarch64.hint(i32)"
    head = f"{declared}\ndefine internal void @pause() alwaysinline nounwind {{ {pause} ret void }}\n"
    if sys.platform == "linux" and machine in _FUTEX_CALL:
        placing = _PLACING.replace("NUMBER", str(_AFFINITY_CALL[machine])).replace("COUNT", str(MASK_WORDS))
        return head + _FUTEX.replace("NUMBER", str(_FUTEX_CALL[machine])) + placing.replace("ROOM", str(MOST_PLACED))
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
_PLACING = """
declare i32 @sched_getcpu()
define internal void @keep_away(ptr %place) nounwind {
entry:
  %count = load i64, ptr %place, align 8
  %cpu = call i32 @sched_getcpu()
  %wide = sext i32 %cpu to i64
  %word = lshr i64 %wide, 6
  %known = icmp ult i64 %word, COUNT
  %some = icmp ne i64 %count, 0
  %go = and i1 %known, %some
  %low = and i64 %wide, 63
  %bit = shl i64 1, %low
  %rest = xor i64 %bit, -1
  %tids = getelementptr i64, ptr %place, i64 1
  %base = getelementptr i64, ptr %tids, i64 ROOM
  %mask = getelementptr i64, ptr %base, i64 COUNT
  br i1 %go, label %copy, label %out
copy:
  %i = phi i64 [ 0, %entry ], [ %i2, %copy ]
  %any = phi i64 [ 0, %entry ], [ %any2, %copy ]
  %from = getelementptr i64, ptr %base, i64 %i
  %allowed = load i64, ptr %from, align 8
  %here = icmp eq i64 %i, %word
  %keep = select i1 %here, i64 %rest, i64 -1
  %left = and i64 %allowed, %keep
  %to = getelementptr i64, ptr %mask, i64 %i
  store i64 %left, ptr %to, align 8
  %any2 = or i64 %any, %left
  %i2 = add i64 %i, 1
  %more = icmp ult i64 %i2, COUNT
  br i1 %more, label %copy, label %judge
judge:
  %none = icmp eq i64 %any2, 0
  br i1 %none, label %out, label %each
each:
  %t = phi i64 [ 0, %judge ], [ %t2, %next ]
  %ptid = getelementptr i64, ptr %tids, i64 %t
  %tid = load atomic i64, ptr %ptid monotonic, align 8
  %real = icmp ne i64 %tid, 0
  br i1 %real, label %set, label %next
set:
  %r = call i64 (i64, ...) @syscall(i64 NUMBER, i64 %tid, i64 128, ptr %mask)
  br label %next
next:
  %t2 = add i64 %t, 1
  %others = icmp ult i64 %t2, %count
  br i1 %others, label %each, label %out
out:
  ret void
}
define internal void @go_anywhere(ptr %place) nounwind {
entry:
  %count = load i64, ptr %place, align 8
  %some = icmp ne i64 %count, 0
  br i1 %some, label %free, label %out
free:
  %tids = getelementptr i64, ptr %place, i64 1
  %base = getelementptr i64, ptr %tids, i64 ROOM
  %r = call i64 (i64, ...) @syscall(i64 NUMBER, i64 0, i64 128, ptr %base)
  br label %out
out:
  ret void
}
"""
_PORTABLE = """
define internal void @keep_away(ptr %place) nounwind {
  ret void
}
define internal void @go_anywhere(ptr %place) nounwind {
  ret void
}
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
