"""Ten thousand ops: every stage takes time in proportion, pinned by counts of calls and bounded in seconds."""

import sys
import time

import pytest

from strata.core import f32
from strata.mir import Graph, parse, verify
from strata.transforms import grad, jvp, vmap

LIMIT = 10.0  # seconds of a processor a stage


def chain(count):
    g = Graph("chain")
    x = g.input("x", f32[4])
    y = x
    for _ in range(count // 2):
        y = (y + x).tanh()
    return g.outputs(y.sum())


def shared(count):
    """Each value is used by the three that follow it: exponentially many paths, few nodes."""
    g = Graph("shared")
    x = g.input("x", f32[4])
    window = [x, x * 2.0, x * 3.0]
    for i in range(count // 2):
        window = [
            *window[1:],
            (window[0] * window[1] + window[2]).sin() if i % 2 else window[0] + window[1] * window[2],
        ]
    return g.outputs((window[0] + window[1] + window[2]).sum())


def calls(fn):
    """How many Python functions a call enters: a measure of work that does not flicker."""
    count = 0

    def count_call(_frame, event, _arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(count_call)
    try:
        result = fn()
    finally:
        sys.setprofile(None)
    return count, result


STAGES = {
    "verify": verify,
    "print": lambda g: str(g.returning(*g.results)),
    "parse": lambda g: parse(str(g)),
    "grad": lambda g: grad(g, ["x"]),
    "jvp": lambda g: jvp(g, ["x"]),
    "vmap": lambda g: vmap(g, ["x"], 3),
}


@pytest.mark.parametrize("build", [chain, shared], ids=["chain", "shared"])
def test_building_is_linear(build):
    small, _ = calls(lambda: build(1000))
    large, g = calls(lambda: build(10_000))
    assert large < 11 * small
    assert 8_000 < len(g.nodes()) < 12_000


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("build", [chain, shared], ids=["chain", "shared"])
def test_each_stage_is_linear(build, stage):
    run = STAGES[stage]
    graphs = {size: build(size) for size in (250, 2500, 10_000)}
    small, _ = calls(lambda: run(graphs[250]))
    large, _ = calls(lambda: run(graphs[2500]))
    assert large < 11 * small, f"{stage}: {small} calls for 250 ops, {large} for 2,500"
    start = time.process_time()
    run(graphs[10_000])
    assert time.process_time() - start < LIMIT


def test_gradients_of_shared_values_stay_small():
    assert len(grad(shared(10_000), ["x"]).nodes()) < 8 * 10_000
