"""The shipped suite on the `cuda` device, where there is a GPU: every sample of every op, and runs that repeat."""

from functools import partial

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.core import f32
from strata.mir import REGISTRY, Op
from strata.testing.backend_suite import cases, run_case
from tests.groups import check_all

if not any(name.startswith("cuda") for name in st.devices()):
    pytest.skip("no NVIDIA GPU here, or no triton and cuda.core packages", allow_module_level=True)


@pytest.mark.parametrize("cls", REGISTRY.classes(), ids=lambda c: c.name)
def test_samples(cls: type[Op]) -> None:
    check_all((case.name, partial(run_case, "cuda", case)) for case in cases([cls]))


def test_repeated_runs_are_one_graph_and_give_equal_bits() -> None:
    g = st.Graph("layers")
    x = g.input("x", f32[64, 128])
    w = g.param("w", f32[128, 128])
    for _ in range(6):
        x = ops.gelu(ops.matmul(x, w))
    g.outputs(ops.softmax(x, axis=1))
    rng = np.random.default_rng(0)
    array, weight = rng.standard_normal((64, 128)), rng.standard_normal((128, 128)) * 0.1
    feeds = {"x": array.astype(np.float32)}
    results = []
    compiled = {name: st.Session(name).compile(g) for name in ("cuda", "cpu")}
    for one in compiled.values():
        one.set_param("w", weight.astype(np.float32))
        results.append([one.run(feeds)[0] for _ in range(4)])
    for again in results[0]:
        np.testing.assert_array_equal(again, results[0][0])
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-4, atol=1e-5)
    assert st.Device("cuda").backend.driver.replays > 0
