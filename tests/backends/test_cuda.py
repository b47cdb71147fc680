"""The shipped suite on the `cuda` device, where there is a GPU: every sample of every op, and runs that repeat."""

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.core import f32
from strata.testing.backend_suite import Case, cases, run_case


def has_gpu() -> bool:
    return any(name.startswith("cuda") for name in st.devices())


pytestmark = pytest.mark.skipif(not has_gpu(), reason="no NVIDIA GPU here, or no triton and cuda.core packages")


@pytest.mark.parametrize("case", list(cases()), ids=lambda c: c.name)
def test_sample(case: Case) -> None:
    run_case("cuda", case)


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
