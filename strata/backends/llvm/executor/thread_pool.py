"""The thread pool: native worker threads, and the fork-join that gives them chunks of a kernel.

One atomic word holds `generation << 16 | open << 15 | active`. A caller opens a generation; workers enter it by
compare-and-swap while it is open; the caller takes chunks too, closes the generation when none is left, and waits only
for the workers that entered. So a sleeping worker never delays a call: it just comes too late. A caller that finds the
pool busy (another thread, or a call from inside a kernel) does all of its chunks alone. The chunks are the same in
every case."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from typing import Any, Final
from weakref import WeakSet

from strata.backends.llvm.executor.dispatch_loop import STEP_WORDS, dispatch_loop_text
from strata.backends.llvm.executor.fast_call_code import fast_call_text
from strata.backends.llvm.executor.interrupts import interrupt_text, prepare, raiser
from strata.backends.llvm.executor.waiting import (
    MASK_WORDS,
    MOST_PLACED,
    allowed_processors,
    clock_functions,
    wait_functions,
)
from strata.backends.llvm.jit import jit
from strata.config import logger
from strata.core import Target, available_threads, new_lock

# Offsets into the pool's memory; a cache line each, so that spinning readers do not disturb writers.
_JOB, _SLEEPERS, _SPIN, _LOCK, _STOP, _HELPERS, _TRACE, _PLACE, _BYTES = 64, 128, 192, 256, 320, 384, 448, 512, 4096
_TURN: Final = _TRACE + 8  # beside a word that is as seldom written
_INTERRUPT: Final = 1024  # after the words of _PLACE
_STEPS_AHEAD: Final = 16  # steps of a program among which one for several threads is worth calling them at once
_SPIN_ROUNDS: Final = 20_000  # about half a millisecond of looking for work before a worker sleeps

_TEXT: Final = f"""
; the job of a generation: kernel, arguments, points, grain, where to note times (or null), where it turns (or 0), the
; pool, then how many chunks were asked for: by the caller in the low half of a word, by workers in the high half. The
; caller (%mine) takes the first chunks, workers take the last ones, until they meet: so each finds in its caches what
; it read and wrote a moment ago. Turned, they begin where they would meet and end with the first and the last chunk
define internal void @take_chunks(ptr %job, i1 %mine) nounwind {{
entry:
  %kernel = load ptr, ptr %job, align 8
  %p1 = getelementptr i8, ptr %job, i64 8
  %arguments = load ptr, ptr %p1, align 8
  %p2 = getelementptr i8, ptr %job, i64 16
  %points = load i64, ptr %p2, align 8
  %p3 = getelementptr i8, ptr %job, i64 24
  %grain = load i64, ptr %p3, align 8
  %p4 = getelementptr i8, ptr %job, i64 32
  %trace = load ptr, ptr %p4, align 8
  %p5 = getelementptr i8, ptr %job, i64 40
  %middle = load i64, ptr %p5, align 8
  %p6 = getelementptr i8, ptr %job, i64 48
  %pool = load ptr, ptr %p6, align 8
  %turned = icmp ne i64 %middle, 0
  %next = getelementptr i8, ptr %job, i64 64
  %more_points = add i64 %points, %grain
  %most = sub i64 %more_points, 1
  %chunks = udiv i64 %most, %grain
  %step = select i1 %mine, i64 1, i64 {1 << 32}
  %traced = icmp ne ptr %trace, null
  br i1 %traced, label %note, label %take
note:
  %t0 = call i64 @now()
  br label %take
take:
  %start = phi i64 [ 0, %entry ], [ %t0, %note ], [ %start, %work ], [ %start, %ask ]
  %taken = phi i64 [ 0, %entry ], [ 0, %note ], [ %more, %work ], [ %more, %ask ]
  %asked = atomicrmw add ptr %next, i64 %step monotonic
  %front = and i64 %asked, {(1 << 32) - 1}
  %back = lshr i64 %asked, 32
  %both = add i64 %front, %back
  %left = icmp slt i64 %both, %chunks
  br i1 %left, label %work, label %done
work:
  %behind = sub i64 %chunks, %back
  %last = sub i64 %behind, 1
  %place = select i1 %mine, i64 %front, i64 %last
  %from = sub i64 %middle, %place
  %inward = sub i64 %from, 1
  %over = icmp slt i64 %inward, 0
  %around = add i64 %inward, %chunks
  %mirrored = select i1 %over, i64 %around, i64 %inward
  %chunk = select i1 %turned, i64 %mirrored, i64 %place
  %begin = mul i64 %chunk, %grain
  %stop = add i64 %begin, %grain
  %inside = icmp slt i64 %stop, %points
  %end = select i1 %inside, i64 %stop, i64 %points
  call void %kernel(ptr %arguments, i64 %begin, i64 %end)
  %more = add i64 %taken, 1
  br i1 %mine, label %ask, label %take
ask:
  %ends = call i1 @poll(ptr %pool)
  br i1 %ends, label %give_up, label %take
give_up: ; nobody finds a chunk any more
  %were = atomicrmw or ptr %next, i64 {(1 << 31) - 1} monotonic
  br label %done
done:
  %begun = phi i64 [ %start, %take ], [ %start, %give_up ]
  %did = phi i64 [ %taken, %take ], [ %more, %give_up ]
  %worked = icmp ne i64 %did, 0
  %noted = and i1 %traced, %worked
  br i1 %noted, label %record, label %out
record:
  %t1 = call i64 @now()
  %thread = call i64 @thread_number()
  %k = atomicrmw add ptr %trace, i64 1 seq_cst
  %ps = getelementptr i64, ptr %trace, i64 1
  %size = load i64, ptr %ps, align 8
  %fits = icmp slt i64 %k, %size
  br i1 %fits, label %write, label %out
write:
  %k4 = mul i64 %k, 4
  %kw = add i64 %k4, 2
  %e0 = getelementptr i64, ptr %trace, i64 %kw
  store i64 %thread, ptr %e0, align 8
  %e1 = getelementptr i64, ptr %e0, i64 1
  store i64 %begun, ptr %e1, align 8
  %e2 = getelementptr i64, ptr %e0, i64 2
  store i64 %t1, ptr %e2, align 8
  %e3 = getelementptr i64, ptr %e0, i64 3
  store i64 %did, ptr %e3, align 8
  br label %out
out:
  ret void
}}

; a worker writes its thread number into the first free place of the list behind the number of workers; which, or 0
define internal i64 @enlist(ptr %place) nounwind {{
entry:
  %tid = call i64 @thread_number()
  br label %look
look:
  %i = phi i64 [ 1, %entry ], [ %i2, %next ]
  %inside = icmp sle i64 %i, {MOST_PLACED}
  br i1 %inside, label %try, label %out
try:
  %cell = getelementptr i64, ptr %place, i64 %i
  %swap = cmpxchg ptr %cell, i64 0, i64 %tid seq_cst seq_cst
  %mine = extractvalue {{ i64, i1 }} %swap, 1
  br i1 %mine, label %out, label %next
next:
  %i2 = add i64 %i, 1
  br label %look
out:
  %index = phi i64 [ %i, %try ], [ 0, %look ]
  call void @stand_up(ptr %place, i64 %index)
  ret i64 %index
}}

define ptr @pool_worker(ptr %pool) nounwind {{
entry:
  %pjob = getelementptr i8, ptr %pool, i64 {_JOB}
  %psleepers = getelementptr i8, ptr %pool, i64 {_SLEEPERS}
  %pspin = getelementptr i8, ptr %pool, i64 {_SPIN}
  %pstop = getelementptr i8, ptr %pool, i64 {_STOP}
  %phelpers = getelementptr i8, ptr %pool, i64 {_HELPERS}
  %place = getelementptr i8, ptr %pool, i64 {_PLACE}
  %index = call i64 @enlist(ptr %place)
  br label %idle
idle:
  %last = phi i32 [ -1, %entry ], [ %generation, %run ]
  br label %look
look:
  %rounds = phi i32 [ 0, %idle ], [ %more, %again ], [ 0, %awake ], [ %rounds, %enter ]
  %word = load atomic i32, ptr %pool seq_cst, align 4
  %openbit = and i32 %word, 32768
  %open = icmp ne i32 %openbit, 0
  %generation = lshr i32 %word, 16
  %new = icmp ne i32 %generation, %last
  %active = and i32 %word, 32767
  %helpers = load atomic i32, ptr %phelpers monotonic, align 4
  %room = icmp slt i32 %active, %helpers
  %a = and i1 %open, %new
  %b = and i1 %a, %room
  br i1 %b, label %enter, label %nothing
enter:
  %entered = add i32 %word, 1
  %swap = cmpxchg ptr %pool, i32 %word, i32 %entered seq_cst seq_cst
  %in = extractvalue {{ i32, i1 }} %swap, 1
  br i1 %in, label %run, label %look
run:
  %job = load ptr, ptr %pjob, align 8
  call void @take_chunks(ptr %job, i1 false)
  %left = atomicrmw sub ptr %pool, i32 1 seq_cst
  call void @free_again(ptr %place, i64 %index)
  br label %idle
nothing:
  %stop = load atomic i32, ptr %pstop monotonic, align 4
  %stopped = icmp ne i32 %stop, 0
  br i1 %stopped, label %quit, label %spin
spin:
  call void @pause()
  %more = add i32 %rounds, 1
  %limit = load i32, ptr %pspin, align 4
  %patient = icmp slt i32 %more, %limit
  br i1 %patient, label %again, label %sleep
again:
  br label %look
sleep:
  call void @step_aside(ptr %place, i64 %index)
  %s0 = atomicrmw add ptr %psleepers, i32 1 seq_cst
  call void @sleep_while(ptr %pool, i32 %word)
  %s1 = atomicrmw sub ptr %psleepers, i32 1 seq_cst
  br label %awake
awake:
  call void @stand_up(ptr %place, i64 %index)
  br label %look
quit:
  ret ptr null
}}

define internal void @call_workers(ptr %pool, i32 %count) nounwind {{
entry:
  %place = getelementptr i8, ptr %pool, i64 {_PLACE}
  call void @keep_away(ptr %place)
  call void @wake(ptr %pool, i32 %count)
  ret void
}}

; sleepers are called as soon as a program begins that has work for them: its first steps may be for one thread
define internal void @call_for_steps(ptr %pool, i64 %threads, ptr %program, i64 %first, i64 %last) nounwind {{
entry:
  %psleepers = getelementptr i8, ptr %pool, i64 {_SLEEPERS}
  %sleepers = load atomic i32, ptr %psleepers monotonic, align 4
  %asleep = icmp ne i32 %sleepers, 0
  %several = icmp sgt i64 %threads, 1
  %wanted = and i1 %asleep, %several
  %end = add i64 %first, {_STEPS_AHEAD}
  br i1 %wanted, label %look, label %out
look:
  %s = phi i64 [ %first, %entry ], [ %s2, %step ]
  %inside = icmp slt i64 %s, %last
  %near = icmp slt i64 %s, %end
  %more = and i1 %inside, %near
  br i1 %more, label %step, label %out
step:
  %s2 = add i64 %s, 1
  %row = mul i64 %s, {STEP_WORDS}
  %at = add i64 %row, 3
  %ppoints = getelementptr i64, ptr %program, i64 %at
  %points = load i64, ptr %ppoints, align 8
  %pgrain = getelementptr i64, ptr %ppoints, i64 1
  %grain = load i64, ptr %pgrain, align 8
  %shared = icmp sgt i64 %points, %grain
  br i1 %shared, label %call, label %look
call:
  %h64 = sub i64 %threads, 1
  %h = trunc i64 %h64 to i32
  call void @call_workers(ptr %pool, i32 %h)
  br label %out
out:
  ret void
}}

define void @pool_parallel(
  ptr %pool, i64 %threads, ptr %kernel, ptr %arguments, i64 %points, i64 %grain, i64 %middle
) nounwind {{
entry:
  %job = alloca [16 x i64], align 64
  %ptrace = getelementptr i8, ptr %pool, i64 {_TRACE}
  %trace = load ptr, ptr %ptrace, align 8
  %one = icmp sle i64 %points, %grain
  %some = icmp sgt i64 %points, 0
  %unseen = icmp eq ptr %trace, null
  %a = and i1 %one, %some
  %plain = and i1 %a, %unseen
  br i1 %plain, label %once, label %several
once:
  call void %kernel(ptr %arguments, i64 0, i64 %points)
  ret void
several:
  store ptr %kernel, ptr %job, align 8
  %j1 = getelementptr i8, ptr %job, i64 8
  store ptr %arguments, ptr %j1, align 8
  %j2 = getelementptr i8, ptr %job, i64 16
  store i64 %points, ptr %j2, align 8
  %j3 = getelementptr i8, ptr %job, i64 24
  store i64 %grain, ptr %j3, align 8
  %j4 = getelementptr i8, ptr %job, i64 32
  store ptr %trace, ptr %j4, align 8
  %j5 = getelementptr i8, ptr %job, i64 40
  store i64 %middle, ptr %j5, align 8
  %j6 = getelementptr i8, ptr %job, i64 48
  store ptr %pool, ptr %j6, align 8
  %next = getelementptr i8, ptr %job, i64 64
  store i64 0, ptr %next, align 8
  %single = icmp sle i64 %threads, 1
  %serial = or i1 %one, %single
  br i1 %serial, label %alone, label %try
try:
  %plock = getelementptr i8, ptr %pool, i64 {_LOCK}
  %locked = cmpxchg ptr %plock, i32 0, i32 1 seq_cst seq_cst
  %mine = extractvalue {{ i32, i1 }} %locked, 1
  br i1 %mine, label %open, label %alone
alone:
  call void @take_chunks(ptr %job, i1 true)
  ret void
open:
  %phelpers = getelementptr i8, ptr %pool, i64 {_HELPERS}
  %h64 = sub i64 %threads, 1
  %h = trunc i64 %h64 to i32
  store atomic i32 %h, ptr %phelpers monotonic, align 4
  %pjob = getelementptr i8, ptr %pool, i64 {_JOB}
  store ptr %job, ptr %pjob, align 8
  %word = load atomic i32, ptr %pool seq_cst, align 4
  %old = lshr i32 %word, 16
  %generation = add i32 %old, 1
  %high = shl i32 %generation, 16
  %opened = or i32 %high, 32768
  store atomic i32 %opened, ptr %pool seq_cst, align 4
  %psleepers = getelementptr i8, ptr %pool, i64 {_SLEEPERS}
  %sleepers = load atomic i32, ptr %psleepers seq_cst, align 4
  %anyone = icmp ne i32 %sleepers, 0
  br i1 %anyone, label %call, label %work
call:
  call void @call_workers(ptr %pool, i32 %h)
  br label %work
work:
  call void @take_chunks(ptr %job, i1 true)
  %closed = atomicrmw and ptr %pool, i32 -32769 seq_cst
  br label %wait
wait:
  %rounds = phi i32 [ 0, %work ], [ %more, %hold ], [ 0, %yield ]
  %now = load atomic i32, ptr %pool seq_cst, align 4
  %active = and i32 %now, 32767
  %empty = icmp eq i32 %active, 0
  br i1 %empty, label %done, label %spin
spin:
  call void @pause()
  %more = add i32 %rounds, 1
  %patient = icmp slt i32 %more, 2000
  br i1 %patient, label %hold, label %yield
hold:
  br label %wait
yield:
  call void @give_way()
  br label %wait
done:
  store atomic i32 0, ptr %plock seq_cst, align 4
  ret void
}}

define void @nothing(ptr %arguments, i64 %begin, i64 %end) nounwind {{
  ret void
}}
"""
_EXPORTS: Final = (
    "pool_worker", "pool_parallel", "program_run", "program_enter", "quick_call", "poll_turn", "raise_kept",
    "nothing",
)  # fmt: skip


def native_code(of: Target | None = None) -> jit.MachineCode:
    """The pool and the dispatch loop, loaded once per process; the same code for all processors of a kind."""
    target = Target.named("neon" if (of or Target.host()).has("neon") else "baseline")
    machine = target.triple.partition("-")[0]
    text = f'target triple = "{target.triple}"\n{wait_functions(machine)}{clock_functions(machine)}{_TEXT}'
    text += interrupt_text(_INTERRUPT, machine) + dispatch_loop_text(_TURN) + fast_call_text()
    return jit.stored_text(text, _EXPORTS, target)


class ThreadPool:
    """Workers beside the calling threads. Threads start on the first use that wants them, and again after a fork."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._memory = ctypes.create_string_buffer(_BYTES + 64)
        self.address = -(-ctypes.addressof(self._memory) // 64) * 64
        self._workers: list[Any] = []
        self.workers = 0  # threads started so far, without the callers'
        self._is_refused = False  # the system has no more threads for us
        self.users: WeakSet[Any] = WeakSet()  # those who rely on the current workers; told to `forget` them
        self.default_threads = available_threads()
        code = native_code()
        self._parallel = ctypes.CFUNCTYPE(
            None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, *(ctypes.c_int64,) * 3
        )(code.address("pool_parallel"))
        self._worker = code.address("pool_worker")
        self._raise_kept = raiser(code.address("raise_kept"))
        self._ended = ctypes.c_int64.from_address(self.address + _INTERRUPT)
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.stop)

    def ensure(self, threads: int) -> int:
        """Starts workers so that a call can use this many threads, the caller's included; returns the number."""
        if self.workers < threads - 1:
            with self._lock:
                while len(self._workers) < threads - 1 and not self._is_refused:
                    self._add()
                self.workers = len(self._workers)
                self._allow(self.workers)
        return threads

    def _add(self) -> None:
        """Start one more worker. Where the system refuses, the others do all the work."""
        try:
            self._workers.append(self._start())
        except (OSError, RuntimeError) as error:
            self._is_refused = True
            logger.warning("there are %d worker threads and no more: %s", len(self._workers), error)

    def parallel(self, kernel: int, arguments: int, points: int, grain: int, threads: int | None = None) -> None:
        """Runs a native kernel `void (ptr arguments, i64 begin, i64 end)` over all points, `grain` at a time."""
        count = self.ensure(threads or self.default_threads)
        self._parallel(self.address, count, kernel, arguments, points, grain, 0)
        self.check()

    def check(self) -> None:
        """Raise what a signal handler raised while this thread ran native code."""
        if self._ended.value and self._ended.value == threading.get_ident():
            self._raise_kept(self.address)

    def note_times(self, events: Any | None) -> None:
        """Record when threads work, in words: count, capacity, then (thread, begin, end, chunks) each."""
        ctypes.c_int64.from_address(self.address + _TRACE).value = 0 if events is None else ctypes.addressof(events)

    def stop(self) -> None:
        """Ends the workers; the next use starts new ones."""
        with self._lock:
            if not self._workers:
                return
            self._word(_STOP).value = 1
            # an empty generation changes the word that sleepers wait on, and wakes them all
            everyone = len(self._workers) + 1
            self._parallel(self.address, everyone, native_code().address("nothing"), None, everyone, 1, 0)
            workers, self._workers = self._workers, []
            self._lose_workers()
            for worker in workers:
                _join(worker)
            self._allow(0)
            self._word(_STOP).value = 0
        self.check()

    def _word(self, offset: int) -> ctypes.c_int32:
        return ctypes.c_int32.from_address(self.address + offset)

    def _allow(self, workers: int) -> None:
        """Publish the workers and the processors they may run on; 0 for none."""
        words = (ctypes.c_uint64 * (1 + MOST_PLACED + MASK_WORDS)).from_address(self.address + _PLACE)
        mask = allowed_processors()
        for i, word in enumerate(mask, 1 + MOST_PLACED):
            words[i] = word
        words[0] = workers if mask and workers <= MOST_PLACED else 0
        if not workers:
            for i in range(1, 1 + MOST_PLACED):
                words[i] = 0

    def _reset(self) -> None:
        ctypes.memset(self.address, 0, _BYTES)
        self._word(_SPIN).value = _SPIN_ROUNDS
        prepare(self.address + _INTERRUPT)

    def _forget(self) -> None:
        """In a forked child there are no workers."""
        self._workers = []
        self._lose_workers()
        self._is_refused = False
        self._reset()

    def _lose_workers(self) -> None:
        self.workers = 0
        for user in list(self.users):
            user.forget()

    def _start(self) -> Any:
        if _pthread_create is None:
            worker = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(self._worker)
            thread = threading.Thread(target=worker, args=(self.address,), daemon=True)
            thread.start()
            return thread
        handle = ctypes.c_ulong()
        failed = _pthread_create(
            ctypes.byref(handle), None, ctypes.c_void_p(self._worker), ctypes.c_void_p(self.address)
        )
        if failed:
            raise OSError(failed, "a worker thread cannot be started")
        return handle


def _find_pthread_create() -> Any:
    try:
        return ctypes.CDLL(None).pthread_create
    except (AttributeError, OSError, TypeError):
        return None


_pthread_create = _find_pthread_create()


def _join(worker: Any) -> None:
    if isinstance(worker, threading.Thread):
        worker.join(1.0)
    else:
        ctypes.CDLL(None).pthread_join(worker, None)


_the_pool: list[ThreadPool] = []
_making_it = new_lock()


def default_pool() -> ThreadPool:
    """The one pool of the process, shared by all sessions."""
    if not _the_pool:
        with _making_it:
            if not _the_pool:
                _the_pool.append(ThreadPool())
    return _the_pool[0]
