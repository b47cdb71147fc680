"""Devices, backends of others, reports and the choice of a device."""

from __future__ import annotations

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.backends import registry
from strata.backends.reference import ReferenceBackend
from strata.errors import DeviceError, OptionError
from strata.mir import Graph
from strata.runtime import CostModel, Device, Session, cost_model, estimate_graph_cost, pick_device


def matmul(n: int) -> Graph:
    g = Graph("mm")
    return g.outputs(g.input("x", (n, n)) @ g.param("w", (n, n)))


def test_devices_are_listed_and_made_by_name() -> None:
    assert {"cpu", "reference"} <= set(st.devices())
    d = st.Device("cpu")
    assert (str(d), d.kind, d.index) == ("cpu", "cpu", 0)
    assert d == Device("cpu")
    assert "bit vectors" in d.full_name
    assert Session(d).device == "cpu"


def test_missing_devices_are_refused() -> None:
    with pytest.raises(DeviceError, match="not available"):
        st.Device("abacus")
    with pytest.raises(ValueError, match="not available"):  # behaviour 110
        st.Device("abacus")
    with pytest.raises(DeviceError):
        Session("abacus")
    with pytest.raises(OptionError):
        Device(3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize("name", ["cuda:0", "wgpu", "xla", "xla:1"])
def test_a_device_that_is_not_there_says_what_it_needs(name: str) -> None:
    assert name.partition(":")[0] not in st.devices()
    with pytest.raises(DeviceError, match=r"pip install 'strata\["):
        st.Device(name)


@pytest.fixture
def other_backend():
    class Other(ReferenceBackend):
        name = "other"

        def __init__(self) -> None:
            self.cost_model = CostModel("other", 1e30, 1e30, 0.0, 0.0)

    st.register_backend("other", Other())
    yield
    with registry._lock:
        registry._made.pop("other")


@pytest.mark.usefixtures("other_backend")
def test_a_registered_backend_runs_programs() -> None:
    assert "other" in st.devices()
    g = Graph("g")
    c = Session("other").compile(g.outputs(g.input("x", (2,)) * 2.0))
    np.testing.assert_array_equal(c.run(x=np.ones(2, np.float32))[0], 2)


def test_costs_grow_with_the_work() -> None:
    model = CostModel("cpu", 1e9, 1e9, 1e-6, 1e-5)
    assert estimate_graph_cost(matmul(64), model) == pytest.approx(1e-5 + 2 * 64**3 / 1e9 + 1e-6)
    g = Graph("a")
    q = g.input("q", (2, 16, 8))
    attention = g.outputs(ops.attention(q, q, q, num_heads=2, layout="bsd"))
    assert estimate_graph_cost(attention, model) == pytest.approx(
        1e-5 + 1e-6 + max(4 * 2 * 2 * 16 * 16 * 4, 4 * 4 * 256) / 1e9
    )
    real = cost_model("cpu")
    assert real.flops_per_second > 1e8
    assert real.bytes_per_second > 1e8


@pytest.mark.usefixtures("other_backend")
def test_the_cheapest_device_that_can_is_picked() -> None:
    assert pick_device(matmul(8)) == "other"
    assert pick_device(matmul(8), ["cpu", "reference"]) == "cpu"
    models = {
        "cpu": CostModel("cpu", 1e9, 1e9, 1e-6, 1e-6),
        "reference": CostModel("reference", 1e12, 1e12, 1e-6, 1e-3),  # fast and far away
    }
    assert pick_device(matmul(8), models) == "cpu"
    assert pick_device(matmul(512), models) == "reference"
    small = {"reference": CostModel("reference", 1e12, 1e12, 0, 0, memory_bytes=1000), "cpu": models["cpu"]}
    assert pick_device(matmul(512), small) == "cpu"
    with pytest.raises(DeviceError, match="1,000 bytes"):
        pick_device(matmul(512), {"reference": small["reference"]})


def test_options_of_a_session_hold_and_can_be_overridden() -> None:
    s = Session("cpu", fusion=False)
    g = Graph("g")
    g.outputs(ops.relu(g.input("x", (4,)) + 1.0) * 2.0)
    assert len(s.compile(g).lir.schedule) > 1
    assert len(s.compile(g, fusion=True).lir.schedule) == 1
    with pytest.raises(OptionError):
        s.compile(g, fussion=True)


def small_graph() -> Graph:
    g = Graph("small")
    x, w = g.input("x", (5, 33)), g.param("w", (33, 7))
    return g.outputs(ops.softmax(ops.gelu(x @ w), axis=-1), ops.cumsum(x, axis=1), ops.sort(x, axis=1))


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512", "neon", "host"])
def test_a_processor_with_fewer_instructions_is_a_device(level: str) -> None:
    graph, rng = small_graph(), np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((5, 33)).astype("f4"), "w": rng.standard_normal((33, 7)).astype("f4")}
    assert str(st.CompilePipeline(f"cpu:{level}").compile(graph).lir.target) == level
    device = Device(f"cpu:{level}")
    assert (device.kind, device.index) == ("cpu", 0)
    session = Session(device)
    if not st.Target.named(level).runs_on(st.Target.host()):
        with pytest.raises(DeviceError, match="lacks instructions"):
            session.compile(graph)
        return
    compiled = session.compile(graph)
    compiled.set_param("w", feeds["w"])
    for got, want in zip(compiled.run(x=feeds["x"]), st.evaluate(graph, feeds, wide=True), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    with st.config.using(device=f"cpu:{level}"):
        assert (st.ones((2,)) * 7.0 + 1.5).tolist() == [8.5, 8.5]


def test_an_unknown_instruction_set_is_refused() -> None:
    for make in (Device, Session, st.CompilePipeline):
        with pytest.raises(st.errors.CompileError, match="'sse9' is not an instruction set"):
            make("cpu:sse9")
    for bad in (None, 3):
        with pytest.raises(DeviceError, match="given by its name"):
            st.CompilePipeline(bad)  # type: ignore[arg-type]
