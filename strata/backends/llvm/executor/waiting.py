"""How threads wait and read the clock: the parts of the thread pool that depend on the platform."""

from __future__ import annotations

import os
import platform
import sys

MASK_WORDS = 16  # processors that a mask can name, in words of 64
MOST_PLACED = 8  # workers; more processors than that always leave an idle one to be found
STATES = 1 + MOST_PLACED + MASK_WORDS  # words before the states of workers; see wait_functions
WAKER = STATES + MOST_PLACED
BARRED = WAKER + 1

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


_MACHINE = platform.machine().lower()


def wait_functions(machine: str = _MACHINE) -> str:
    """LLVM text of pause, sleep_while(word, value), wake(word, count), give_way, and of where workers may run.

    A sleeper is often woken on the processor of its waker, where it waits until the waker's time is up, although
    another processor is idle. So before it sleeps, a worker bars itself from the processor of the last waker
    (step_aside); the waker bars those that sleep and have barred themselves from another (keep_away), which costs it
    as much time as waking; and a worker that has done its first work may go anywhere again. All take the address of:
    the number of workers (0: leave them alone), their thread numbers, the processors allowed (MASK_WORDS words), for
    each worker 0 while it is awake, the processor that it is barred from plus 1, or -1; the last waker's processor
    plus 1; for each worker whether it has been barred since it was last freed. That is told after the fact, by
    whoever did it, so that a worker which is awake sooner than its waker thinks is freed after its next work.
    """
    if machine in ("x86_64", "amd64"):
        pause, declared = "call void @llvm.x86.sse2.pause()", "declare void @llvm.x86.sse2.pause()"
    else:
        pause, declared = "call void @llvm.aarch64.hint(i32 1)", "declare void @llvm.aarch64.hint(i32)"
    head = f"{declared}\ndefine internal void @pause() alwaysinline nounwind {{ {pause} ret void }}\n"
    if sys.platform == "linux" and machine in _FUTEX_CALL:
        placing = _PLACING.replace("NUMBER", str(_AFFINITY_CALL[machine])).replace("COUNT", str(MASK_WORDS))
        for word, value in (
            ("ROOM", MOST_PLACED),
            ("LIMIT", 64 * MASK_WORDS),
            ("STATES", STATES),
            ("WAKER", WAKER),
            ("BARRED", BARRED),
        ):
            placing = placing.replace(word, str(value))
        return head + _FUTEX.replace("NUMBER", str(_FUTEX_CALL[machine])) + placing
    return head + _PORTABLE


def clock_functions(machine: str = _MACHINE) -> str:
    """LLVM text of now(), as time.perf_counter_ns counts, and thread_number(); both 0 where unknown."""
    if sys.platform == "linux" and machine in _GETTID_CALL:
        return (_CLOCK + _NUMBER).replace("NUMBER", str(_GETTID_CALL[machine])).replace("MONOTONIC", "1")
    if sys.platform == "darwin":
        return _CLOCK.replace("MONOTONIC", "6") + "define internal i64 @thread_number() nounwind { ret i64 0 }\n"
    return (
        "define internal i64 @now() nounwind { ret i64 0 }\n"
        "define internal i64 @thread_number() nounwind { ret i64 0 }\n"
    )


_CLOCK = """
declare i32 @clock_gettime(i32, ptr)
define internal i64 @now() nounwind {
  %t = alloca [2 x i64], align 8
  %r = call i32 @clock_gettime(i32 MONOTONIC, ptr %t)
  %s = load i64, ptr %t, align 8
  %p = getelementptr i64, ptr %t, i64 1
  %n = load i64, ptr %p, align 8
  %k = mul i64 %s, 1000000000
  %v = add i64 %k, %n
  ret i64 %v
}
"""
_NUMBER = """
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
; the processors allowed without one of them; whether any are left
define internal i1 @all_but(ptr %place, i64 %cpu, ptr %mask) nounwind {
entry:
  %word = lshr i64 %cpu, 6
  %low = and i64 %cpu, 63
  %bit = shl i64 1, %low
  %rest = xor i64 %bit, -1
  %tids = getelementptr i64, ptr %place, i64 1
  %base = getelementptr i64, ptr %tids, i64 ROOM
  br label %copy
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
  br i1 %more, label %copy, label %done
done:
  %some = icmp ne i64 %any2, 0
  ret i1 %some
}
define internal void @keep_away(ptr %place) nounwind {
entry:
  %mask = alloca i64, i64 COUNT, align 8
  %count = load i64, ptr %place, align 8
  %cpu = call i32 @sched_getcpu()
  %wide = sext i32 %cpu to i64
  %known = icmp ult i64 %wide, LIMIT
  %some = icmp ne i64 %count, 0
  %go = and i1 %known, %some
  br i1 %go, label %copy, label %out
copy:
  %here = add i64 %wide, 1
  %pwaker = getelementptr i64, ptr %place, i64 WAKER
  store atomic i64 %here, ptr %pwaker monotonic, align 8
  %any = call i1 @all_but(ptr %place, i64 %wide, ptr %mask)
  br i1 %any, label %each, label %out
each:
  %t = phi i64 [ 0, %copy ], [ %t2, %next ]
  %i = add i64 %t, 1
  %ptid = getelementptr i64, ptr %place, i64 %i
  %tid = load atomic i64, ptr %ptid monotonic, align 8
  %real = icmp ne i64 %tid, 0
  %s = add i64 %t, STATES
  %pstate = getelementptr i64, ptr %place, i64 %s
  %state = load atomic i64, ptr %pstate monotonic, align 8
  %asleep = icmp ne i64 %state, 0
  %elsewhere = icmp ne i64 %state, %here
  %a = and i1 %real, %asleep
  %b = and i1 %a, %elsewhere
  br i1 %b, label %claim, label %next
claim:
  %swap = cmpxchg ptr %pstate, i64 %state, i64 %here seq_cst seq_cst
  %still = extractvalue { i64, i1 } %swap, 1
  br i1 %still, label %set, label %next
set:
  %r = call i64 (i64, ...) @syscall(i64 NUMBER, i64 %tid, i64 128, ptr %mask)
  %n = add i64 %t, BARRED
  %pbarred = getelementptr i64, ptr %place, i64 %n
  store atomic i64 1, ptr %pbarred seq_cst, align 8
  br label %next
next:
  %t2 = add i64 %t, 1
  %others = icmp ult i64 %t2, %count
  br i1 %others, label %each, label %out
out:
  ret void
}
; before a worker sleeps, by its place in the list
define internal void @step_aside(ptr %place, i64 %index) nounwind {
entry:
  %mask = alloca i64, i64 COUNT, align 8
  %count = load i64, ptr %place, align 8
  %some = icmp ne i64 %count, 0
  %listed = icmp ne i64 %index, 0
  %go = and i1 %some, %listed
  %s0 = add i64 %index, STATES
  %s = sub i64 %s0, 1
  %pstate = getelementptr i64, ptr %place, i64 %s
  %pwaker = getelementptr i64, ptr %place, i64 WAKER
  %waker = load atomic i64, ptr %pwaker monotonic, align 8
  %known = icmp ne i64 %waker, 0
  br i1 %go, label %look, label %out
look:
  br i1 %known, label %copy, label %free
copy:
  %cpu = sub i64 %waker, 1
  %any = call i1 @all_but(ptr %place, i64 %cpu, ptr %mask)
  br i1 %any, label %bar, label %free
bar:
  %n0 = add i64 %index, BARRED
  %n = sub i64 %n0, 1
  %pbarred = getelementptr i64, ptr %place, i64 %n
  store atomic i64 1, ptr %pbarred seq_cst, align 8
  %r = call i64 (i64, ...) @syscall(i64 NUMBER, i64 0, i64 128, ptr %mask)
  store atomic i64 %waker, ptr %pstate seq_cst, align 8
  br label %out
free:
  call void @go_anywhere(ptr %place)
  store atomic i64 -1, ptr %pstate seq_cst, align 8
  br label %out
out:
  ret void
}
; when it is awake
define internal void @stand_up(ptr %place, i64 %index) nounwind {
entry:
  %listed = icmp ne i64 %index, 0
  br i1 %listed, label %mark, label %out
mark:
  %s0 = add i64 %index, STATES
  %s = sub i64 %s0, 1
  %pstate = getelementptr i64, ptr %place, i64 %s
  store atomic i64 0, ptr %pstate seq_cst, align 8
  br label %out
out:
  ret void
}
; a worker that was barred may go anywhere, once it has done some work: until then nobody should wait for it
define internal void @free_again(ptr %place, i64 %index) nounwind {
entry:
  %listed = icmp ne i64 %index, 0
  br i1 %listed, label %look, label %out
look:
  %n0 = add i64 %index, BARRED
  %n = sub i64 %n0, 1
  %pbarred = getelementptr i64, ptr %place, i64 %n
  %barred = load atomic i64, ptr %pbarred monotonic, align 8
  %is = icmp ne i64 %barred, 0
  br i1 %is, label %free, label %out
free:
  store atomic i64 0, ptr %pbarred seq_cst, align 8
  call void @go_anywhere(ptr %place)
  br label %out
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
define internal void @step_aside(ptr %place, i64 %index) nounwind {
  ret void
}
define internal void @stand_up(ptr %place, i64 %index) nounwind {
  ret void
}
define internal void @free_again(ptr %place, i64 %index) nounwind {
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
