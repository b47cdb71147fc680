"""Which ops leave something to the host on `cuda`: a short list that docs/guides/devices.md has, too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata import ops
from strata.core import f32, sym
from strata.mir import REGISTRY, Graph, as_tuple
from strata.runtime import Session
from strata.testing.backend_suite import cases
from strata.testing.check import build, single_op_graph, type_of
from strata.transforms import grad_with_loss
from tests.dry_cuda import dry_cuda
from tests.groups import check_all

DEVICE = "cuda_plans"
ON_THE_HOST = {  # op of a sample: what runs on the host in it
    "custom": {"custom"},  # Python code of the user
}


@pytest.fixture(scope="module", autouse=True)
def _device() -> Iterator[None]:
    with dry_cuda(DEVICE):
        yield


def host_steps(graph: Graph) -> set[str]:
    return set(Session(DEVICE).compile(graph).host_steps)


def test_samples() -> None:
    found: dict[str, set[str]] = {}

    def look(case: Any) -> None:
        arrays = case.arrays()
        if any(0 in np.shape(a) for a in arrays):
            return  # there is nothing to compute
        steps = host_steps(single_op_graph(build(case.op, case.sample), [type_of(a) for a in arrays]))
        if steps:
            found.setdefault(case.op.name, set()).update(steps)

    check_all((case.name, partial(look, case)) for case in cases())
    assert found == ON_THE_HOST


def test_the_guide_has_the_list() -> None:
    text = (Path(__file__).parents[3] / "docs/guides/devices.md").read_text()
    section = text.partition("## NVIDIA GPUs")[2].partition("\n## ")[0]
    (said,) = re.findall(r"- \*\*On the host\*\*: (.*(?:\n  .*)*)", section)
    assert set(re.findall(r"`(\w+)`", said)) == {*ON_THE_HOST} - {"custom"}
    assert "written in Python" in said


def test_sizes_that_are_symbols() -> None:
    """Sorts and loops take them; transforms and factorisations want to know the size of the axis they work on."""
    n = sym("N", 1)
    g = Graph("sorted")
    x = g.input("x", f32[3, n])
    g.outputs(ops.sort(x), *ops.topk(x, 1), *ops.cummax(x, 1))
    assert not host_steps(g)
    g = Graph("batch")
    g.outputs(ops.fft(g.input("x", f32[n, 12])))
    assert not host_steps(g)
    g = Graph("transform")
    g.outputs(ops.fft(g.input("x", f32[3, n])))
    assert host_steps(g) == {"fft"}


@pytest.mark.parametrize(
    "name", ["selective_scan", "gated_delta_net", "solve", "cholesky", "eigh", "svd", "sort", "logcumsumexp"]
)
def test_gradients(name: str) -> None:
    sample = REGISTRY[name].samples()[0]
    arrays = sample.arrays()
    g = Graph("loss")
    given = [g.param(f"x{i}", type_of(a)) for i, a in enumerate(arrays)]
    out = as_tuple(build(REGISTRY[name], sample)(*given))[0]
    g.outputs(ops.sum(out * out))
    assert not host_steps(grad_with_loss(g, tuple(g.param_names)))
