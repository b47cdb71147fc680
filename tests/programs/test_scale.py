"""Ten thousand ops: every stage takes work in proportion, pinned by counts of calls."""

import pytest

from strata.core import f32
from strata.mir import Graph, parse, verify
from strata.transforms import grad, jvp, vmap
from tests.counts import calls


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
    assert calls(lambda: build(10_000)) < 11 * calls(lambda: build(1000))
    assert 8_000 < len(build(10_000).nodes()) < 12_000


@pytest.mark.few(4)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("build", [chain, shared], ids=["chain", "shared"])
def test_each_stage_is_linear(build, stage):
    run = STAGES[stage]
    graphs = {size: build(size) for size in (250, 1250, 5000)}
    work = {size: calls(lambda g=graph: run(g)) for size, graph in graphs.items()}
    assert work[1250] < 5.5 * work[250], work
    assert work[5000] < 4.4 * work[1250], work


def test_gradients_of_shared_values_stay_small():
    assert len(grad(shared(10_000), ["x"]).nodes()) < 8 * 10_000
