"""Ctrl-C while XLA runs a loop that never ends: the program here would run for ever, that it ends is the test."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, threading
import numpy as np
import strata as st
from strata import ops

g = st.Graph("endless")
x = g.input("x", (4,))
c = st.Session("xla").compile(g.outputs(ops.while_loop(lambda s: s[0] < 10.0, lambda s: s * 0.5 + 1.0, x)))
assert (c.run(x=np.full(4, 11, "f4"))[0] == 11).all()
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    c.run(x=np.zeros(4, "f4"))
except KeyboardInterrupt:
    print("ended", flush=True)
    os._exit(0)
"""


@pytest.mark.skipif(os.name != "posix", reason="no signal can be sent to a process here")
def test_a_loop_without_an_end_can_be_left() -> None:
    pytest.importorskip("jax")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "ended\n", done.stderr[-3000:]
