"""Ctrl-C in native code: the main thread polls Python for signals and stops where one raises.

Python runs handlers of signals in its main thread only, and only between its own instructions. So the main thread,
while it runs a program, asks for them itself: between chunks of work, between some steps and between turns of loops,
whenever the last time is about a twentieth of a second ago. What a handler raises is kept, the rest of the call is left
out, and whoever entered native code raises it. docs/design/012-interrupts.md says why it is done so.
"""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Any, Final

FUNCTIONS: Final = (
    "PyGILState_Ensure", "PyGILState_Release", "PyErr_CheckSignals", "PyErr_Fetch", "PyErr_Restore",
)  # fmt: skip
# words in the pool's memory: the thread whose call ends (or 0), Python's main thread, when to ask next, the functions,
# then what was raised
ENDED, MAIN, NEXT, FIRST_FUNCTION = 0, 8, 16, 24
RAISED: Final = FIRST_FUNCTION + 8 * len(FUNCTIONS)
STEPS_BETWEEN: Final = 8  # steps of a program of which one asks; a power of two
TURNS_BETWEEN: Final = 64  # turns of a loop, whose body has only kernels; else every turn asks
_NOBODY = -1  # no thread's number


def interrupt_text(at: int, machine: str) -> str:
    """LLVM text of interrupted(pool), poll(pool), poll_turn(pool, status) and raise_kept(pool), beside now()."""
    text = _TEXT + (_X86 if machine in ("x86_64", "amd64") else _CLOCK)
    text += _POSIX if os.name == "posix" else _OTHER
    numbers = {"ENDED": ENDED, "MAIN": MAIN, "NEXT": NEXT, "TYPE": RAISED, "VALUE": RAISED + 8, "PLACE": RAISED + 16}
    numbers |= {name.partition("_")[2].upper(): FIRST_FUNCTION + 8 * i for i, name in enumerate(FUNCTIONS)}
    for name, offset in numbers.items():
        text = text.replace(f"<{name}>", str(at + offset))
    return text


_TEXT: Final = """
; whether the call of this thread was told to end
define internal i1 @interrupted(ptr %pool) alwaysinline nounwind {
entry:
  %pended = getelementptr i8, ptr %pool, i64 <ENDED>
  %ended = load atomic i64, ptr %pended monotonic, align 8
  %some = icmp ne i64 %ended, 0
  br i1 %some, label %whose, label %no
whose:
  %self = call i64 @thread_self()
  %mine = icmp eq i64 %ended, %self
  ret i1 %mine
no:
  ret i1 false
}
; lets handlers of signals run, where it is time; whether one of them raised something
define internal i1 @poll(ptr %pool) noinline nounwind {
entry:
  %pmain = getelementptr i8, ptr %pool, i64 <MAIN>
  %main = load i64, ptr %pmain, align 8
  %self = call i64 @thread_self()
  %mine = icmp eq i64 %main, %self
  br i1 %mine, label %look, label %no
look:
  %now = call i64 @ticks()
  %pnext = getelementptr i8, ptr %pool, i64 <NEXT>
  %next = load i64, ptr %pnext, align 8
  %due = icmp uge i64 %now, %next
  br i1 %due, label %ask, label %no
ask:
  %wait = call i64 @ticks_between()
  %later = add i64 %now, %wait
  store i64 %later, ptr %pnext, align 8
  %pensure = getelementptr i8, ptr %pool, i64 <ENSURE>
  %ensure = load ptr, ptr %pensure, align 8
  %prelease = getelementptr i8, ptr %pool, i64 <RELEASE>
  %release = load ptr, ptr %prelease, align 8
  %pcheck = getelementptr i8, ptr %pool, i64 <CHECKSIGNALS>
  %check = load ptr, ptr %pcheck, align 8
  %state = call i32 %ensure()
  %found = call i32 %check()
  %raised = icmp ne i32 %found, 0
  br i1 %raised, label %keep, label %on
keep:
  %pfetch = getelementptr i8, ptr %pool, i64 <FETCH>
  %fetch = load ptr, ptr %pfetch, align 8
  %type = getelementptr i8, ptr %pool, i64 <TYPE>
  %value = getelementptr i8, ptr %pool, i64 <VALUE>
  %place = getelementptr i8, ptr %pool, i64 <PLACE>
  call void %fetch(ptr %type, ptr %value, ptr %place)
  %pended = getelementptr i8, ptr %pool, i64 <ENDED>
  store atomic i64 %self, ptr %pended monotonic, align 8
  br label %on
on:
  call void %release(i32 %state)
  ret i1 %raised
no:
  ret i1 false
}
; gives Python what was kept, for a caller that then tells it that something was raised
define void @raise_kept(ptr %pool) nounwind {
  %pended = getelementptr i8, ptr %pool, i64 <ENDED>
  store atomic i64 0, ptr %pended monotonic, align 8
  %ptype = getelementptr i8, ptr %pool, i64 <TYPE>
  %type = load ptr, ptr %ptype, align 8
  %pvalue = getelementptr i8, ptr %pool, i64 <VALUE>
  %value = load ptr, ptr %pvalue, align 8
  %pplace = getelementptr i8, ptr %pool, i64 <PLACE>
  %place = load ptr, ptr %pplace, align 8
  %prestore = getelementptr i8, ptr %pool, i64 <RESTORE>
  %restore = load ptr, ptr %prestore, align 8
  call void %restore(ptr %type, ptr %value, ptr %place)
  ret void
}
; lets handlers of signals run between turns of a loop; the status that it looks at says so where the loop is to end
define void @poll_turn(ptr %pool, ptr %status) nounwind {
entry:
  %new = call i1 @poll(ptr %pool)
  %ended = call i1 @interrupted(ptr %pool)
  br i1 %ended, label %end, label %on
end:
  store i64 -1, ptr %status, align 8
  ret void
on:
  ret void
}
"""
_X86: Final = """
declare i64 @llvm.readcyclecounter()
define internal i64 @ticks() alwaysinline nounwind {
  %t = call i64 @llvm.readcyclecounter()
  ret i64 %t
}
; 30 to 60 ms of any of the clocks
define internal i64 @ticks_between() alwaysinline nounwind {
  ret i64 120000000
}
"""
_CLOCK: Final = """
define internal i64 @ticks() alwaysinline nounwind {
  %t = call i64 @now()
  ret i64 %t
}
define internal i64 @ticks_between() alwaysinline nounwind {
  ret i64 50000000
}
"""
_POSIX: Final = """
declare i64 @pthread_self()
define internal i64 @thread_self() alwaysinline nounwind {
  %t = call i64 @pthread_self()
  ret i64 %t
}
"""
_OTHER: Final = """
define internal i64 @thread_self() alwaysinline nounwind {
  ret i64 0
}
"""


def prepare(address: int) -> None:
    """Write the words at an address: nobody was interrupted, and the main thread may be."""
    main = threading.main_thread().ident if os.name == "posix" else _NOBODY
    words = [0, main or _NOBODY, 0, *map(_address, FUNCTIONS)]
    place = (ctypes.c_int64 * len(words)).from_address(address)
    for i, word in enumerate(words):
        place[i] = word


def _address(name: str) -> int:
    return ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value or 0


def raiser(function: int) -> Any:
    """`raise_kept` as a function of Python; it raises."""
    return ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(function)
