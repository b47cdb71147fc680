"""The shipped suite on the `xla` device: every sample of every op, many of them in one module, against the oracle.

Alone, each in a module of its own: `python -m tests.backends.test_xla_samples`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import pytest

import strata.ops  # noqa: F401 - fills the registry
from strata.mir import REGISTRY, Graph, as_tuple, evaluate
from strata.runtime import Session
from strata.testing.backend_suite import SampleCase, cases, compare, run_case
from strata.testing.check import build, type_of

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="the xla device runs on jax, which is not installed")

TOGETHER = 16  # ops in one module: compiling one takes long, whatever is in it
NAMES = [cls.name for cls in REGISTRY.classes() if cls.samples()]
PARTS = [NAMES[i : i + TOGETHER] for i in range(0, len(NAMES), TOGETHER)]
ON_THE_HOST = {"custom", "eigh", "svd"}  # and what is composed of them: no module can hold them


def check_together(some: Sequence[SampleCase]) -> list[str]:
    """Samples as one graph; the ops that ran on the host."""
    graph, feeds, outs, parts = Graph("samples"), {}, [], []
    for at, case in enumerate(some):
        arrays = case.arrays()
        given = {f"c{at}_{i}": a for i, a in enumerate(arrays)}
        made = as_tuple(build(case.op, case.sample)(*(graph.input(n, type_of(a)) for n, a in given.items())))
        feeds |= given
        parts.append((case.name, len(outs), len(outs) + len(made)))
        outs += made
    graph.outputs(*outs)
    compiled = Session("xla").compile(graph)
    results, wanted = compiled.run(feeds), evaluate(graph, feeds, wide=True)
    for name, start, stop in parts:
        for got, want, out in zip(results[start:stop], wanted[start:stop], outs[start:stop], strict=True):
            compare(got, want, out.type, name)
    return compiled.host_steps


@pytest.mark.few(4)
@pytest.mark.parametrize("names", PARTS, ids=lambda names: f"{names[0]}..{names[-1]}")
def test_samples(names: list[str]) -> None:
    steps = check_together(list(cases([REGISTRY[name] for name in names])))
    assert set(steps) <= ON_THE_HOST


if __name__ == "__main__":
    for one in cases():
        run_case("xla", one)
        print(one.name, flush=True)
