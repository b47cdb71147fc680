"""`import strata` is cheap: what is heavy is imported by the first call that needs it.

How long it takes in seconds is in benchmarks/costs.py.
"""

from __future__ import annotations

import json
import subprocess
import sys

MOST_CALLS = 1000  # of Python functions, beyond numpy
MOST_MODULES = 12  # beyond numpy
HEAVY = ("llvmlite", "scipy", "torch", "rich", "onnx", "jax")

MEASURE = """
import json, sys
import numpy
before, calls = set(sys.modules), 0
def note(frame, event, arg):
    global calls
    calls += event == "call"
sys.setprofile(note)
import strata
sys.setprofile(None)
print(json.dumps([calls, sorted(set(sys.modules) - before)]))
"""


def measure() -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    calls, loaded = json.loads(done.stdout)
    return calls, loaded


def test_import_does_little() -> None:
    calls, loaded = measure()
    assert calls < MOST_CALLS
    assert len(loaded) < MOST_MODULES, loaded


def test_import_loads_nothing_heavy() -> None:
    _, loaded = measure()
    assert [name for name in HEAVY if name in {m.partition(".")[0] for m in loaded}] == []
