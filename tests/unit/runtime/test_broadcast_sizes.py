"""Symbols that turn out to be 1 beside another size are broadcast; sizes that really differ are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import strata as st
from strata.core import f32, sym
from strata.errors import ShapeError, SymbolError
from strata.io.onnx import load
from strata.mir import Graph
from strata.runtime import Session, specialize
from strata.runtime.execute.compiled import MOST_FORMS

SIZES = [(3, 3), (1, 4), (4, 1), (5, 5), (1, 1), (1, 9), (9, 1), (2, 2)]


def graph() -> Graph:
    g = Graph("g")
    x, y, w = g.input("x", f32[sym("N"), 3]), g.input("y", f32[sym("M"), 3]), g.param("w", f32[3])
    return g.outputs(st.ops.relu(x * y + w), st.ops.sum(x, 0))


def arrays(rng: np.random.Generator, n: int, m: int) -> dict[str, np.ndarray]:
    return {"x": rng.standard_normal((n, 3)).astype("f4"), "y": rng.standard_normal((m, 3)).astype("f4")}


def check(found: Any, feeds: dict[str, np.ndarray], w: np.ndarray) -> None:
    np.testing.assert_allclose(found[0], np.maximum(feeds["x"] * feeds["y"] + w, 0), rtol=1e-6)
    np.testing.assert_allclose(found[1], feeds["x"].sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_program_with_symbols(device: str, rng) -> None:
    made = Session(device).compile(graph())
    w = np.ones(3, np.float32)
    made.set_param("w", w)
    for n, m in SIZES:
        feeds = arrays(rng, n, m)
        check(made.run(feeds), feeds, w)
        out = [np.empty((max(n, m), 3), np.float32), np.empty(3, np.float32)]
        made.run_into(feeds, out)
        check(out, feeds, w)
    made.set_param("w", w * 5)  # in all forms
    for n, m in SIZES:
        feeds = arrays(rng, n, m)
        check(made.run(feeds), feeds, w * 5)
    with pytest.raises(SymbolError, match="sizes N = 2 and max"):
        made.run(arrays(rng, 2, 3))


def test_a_symbol_beside_a_number_and_batches_of_products(rng) -> None:
    g = Graph("g")
    x, y = g.input("x", f32[sym("B"), 2, 4]), g.input("y", f32[3, 4, 5])
    made = Session("cpu").compile(g.outputs(x @ y))
    for batch in (3, 1):
        a, b = rng.standard_normal((batch, 2, 4)).astype("f4"), rng.standard_normal((3, 4, 5)).astype("f4")
        np.testing.assert_allclose(made.run(x=a, y=b)[0], a @ b, rtol=1e-5, atol=1e-5)
    with pytest.raises(SymbolError, match="B = 2 and 3 = 3"):
        made.run(x=np.zeros((2, 2, 4), "f4"), y=np.zeros((3, 4, 5), "f4"))


def test_the_inner_size_of_a_product_is_not_broadcast() -> None:
    g = Graph("g")
    made = Session("cpu").compile(g.outputs(g.input("x", f32[2, sym("K")]) @ g.input("y", f32[4, 5])))
    with pytest.raises(SymbolError, match="K = 1 and 4 = 4"):
        made.run(x=np.zeros((2, 1), "f4"), y=np.zeros((4, 5), "f4"))


def test_forms_are_bounded() -> None:
    g = Graph("g")
    x, y = g.input("x", f32[sym("N")]), g.input("y", f32[sym("M")])
    made = Session("reference").compile(
        g.outputs(st.ops.narrow(x, 0, 0, sym("N") - sym("K")) + y, g.input("k", f32[sym("K")]))
    )
    for n in range(2, 2 + MOST_FORMS):  # N - K is 1, each time for other numbers
        made.run(x=np.ones(n, "f4"), k=np.ones(n - 1, "f4"), y=np.ones(5, "f4"))
    with pytest.raises(SymbolError, match="must be equal"):
        made.run(x=np.ones(60, "f4"), k=np.ones(59, "f4"), y=np.ones(5, "f4"))


@pytest.mark.parametrize(
    "contract",
    [
        {"on_miss": "bucket", "max_variants": 1},
        {"buckets": {"N": [4, 64], "M": [4, 64]}},
        {"on_miss": "interpret"},
        {"on_miss": "compile", "max_variants": 2},
    ],
    ids=str,
)
def test_contracts(contract: dict[str, Any], rng) -> None:
    made = specialize(graph(), "cpu", **contract)
    w = np.ones(3, np.float32)
    made.set_param("w", w)
    for n, m in SIZES:
        feeds = arrays(rng, n, m)
        check(made.run(feeds), feeds, w)
    made.wait()
    with pytest.raises((SymbolError, ShapeError)):
        made.run(arrays(rng, 2, 3))


@pytest.mark.parametrize("contract", [{}, {"max_variants": 1, "on_miss": "bucket"}], ids=str)
def test_jit(contract: dict[str, Any], rng) -> None:
    made = st.jit(**contract)(lambda x, y: (x + y).sum(0)) if contract else st.jit(lambda x, y: (x + y).sum(0))
    for n, m in SIZES:
        feeds = arrays(rng, n, m)
        found = made(*(st.tensor(a) for a in feeds.values())).numpy()
        np.testing.assert_allclose(found, (feeds["x"] + feeds["y"]).sum(0), rtol=1e-4, atol=1e-5)
    with pytest.raises(ShapeError):
        made(st.tensor(np.zeros((2, 3), "f4")), st.tensor(np.zeros((3, 3), "f4")))


def test_onnx(rng) -> None:
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [n, 3]) for name, n in (("x", "n"), ("y", "m"))]
    add = helper.make_node("Add", ["x", "y"], ["z"])
    proto = helper.make_model(helper.make_graph([add], "g", ports, [helper.make_empty_tensor_value_info("z")]))
    made = load(proto, device="cpu")
    for n, m in SIZES:
        feeds = arrays(rng, n, m)
        np.testing.assert_array_equal(made.run(feeds)[0], feeds["x"] + feeds["y"])
    with pytest.raises(ShapeError):
        made.run(arrays(rng, 2, 3))
