"""Signals while native code runs: handlers are heard, what they raise ends the call, and the next one is as any other.

Every program here would run for days: that it ends is the test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are not heard in native code on this system")

PROGRAM = """
import os, signal, sys, threading
import numpy as np
import strata as st

def loop(x):
    return st.while_loop(lambda i: i[0] < 10.0, lambda i: i * 1.0, x)

def scan(x):
    return st.scan(lambda c, _: (c * 0.5 + 1.0, None), x, None, length=1 << 50)[0]

def nested(x):
    return st.scan(lambda c, _: (scan(c), None), x, None, length=1 << 50)[0]

def branch(x):
    return st.cond(x[0] < 1.0, scan, lambda x: x, x)

LONG = {"while": loop, "scan": scan, "nested": nested, "cond": branch}
name, threads, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
size = 4 if way == "small" else 1 << 20

def compiled():
    run = st.jit(LONG[name])
    x = st.tensor(np.zeros(size, "f4"))
    return lambda: run(x).numpy()

def lazy():
    x = st.tensor(np.zeros(size, "f4"))
    return lambda: LONG[name](x).numpy()

def check():  # the pool works, and nothing is left behind
    g = st.Graph("after")
    c = st.Session("cpu").compile(g.outputs(g.input("x", (1 << 18,)) * 2.0))
    for _ in range(20):
        assert (c.run(x=np.ones(1 << 18, "f4"))[0] == 2).all()

class Mine(Exception):
    pass

def raises(number, frame):
    raise Mine

with st.config.using(num_threads=threads):
    run = (lazy if way == "lazy" else compiled)()
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))  # heard, and nothing ends
    signal.signal(signal.SIGUSR2, raises)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may ignore it
    stop = threading.Event()
    beside = threading.Thread(target=lambda: [check() for _ in iter(stop.is_set, True)])
    beside.start()
    ctrl_c = signal.SIGINT, KeyboardInterrupt
    for sent, expected in (ctrl_c, (signal.SIGUSR2, Mine), ctrl_c):
        heard.clear()
        done = threading.Event()

        def send():
            while not heard and not done.wait(0.05):
                os.kill(os.getpid(), signal.SIGUSR1)
            if not done.wait(0.2):
                os.kill(os.getpid(), sent)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            run()
        except expected:
            pass
        else:
            raise AssertionError("it came to an end")
        finally:
            done.set()
            sender.join()
        check()
    stop.set()
    beside.join()
print("ended")
"""


def ends(*arguments: str) -> None:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            out, err = child.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            raise
    assert child.returncode == 0, err[-3000:]
    assert out == "ended\n"
    assert "Exception ignored" not in err


@pytest.mark.parametrize("name", ["while", "scan", "nested", "cond"])
def test_loops_end(name: str) -> None:
    ends(name, "2", "small")


@pytest.mark.parametrize("threads", ["1", "3"])
def test_turns_that_several_threads_take_part_in_end(threads: str) -> None:
    ends("scan", threads, "wide")


def test_lazy_programs_end() -> None:
    ends("while", "2", "lazy")
