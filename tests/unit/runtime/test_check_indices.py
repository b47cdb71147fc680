"""The setting `check_indices`: what kernels would clamp is an error, natively and from every device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import strata as st
from strata.config import using
from strata.errors import IndexRangeError
from strata.mir import Value

Build = Any
BAD = np.array([1, 7, -9])
CASES: dict[str, tuple[Build, Any, str]] = {
    "gather": (lambda x, i: x.gather(i), BAD, "gather: id 7 is outside 0..4"),
    "take": (lambda x, i: x.take(i, axis=0), np.array([-5, 4, -6]), "gather: id -6 is outside -5..4"),
    "gather_elements": (lambda x, i: x.gather_elements(i), np.array([[0], [5]]), "gather_elements: id 5 is outside"),
    "gather_nd": (lambda x, i: x.gather_nd(i), np.array([[4, 2], [0, 3]]), "gather_nd: id 3 is outside 0..2"),
    "scatter_elements": (
        lambda x, i: x.scatter_elements(i, x[:2, :1]), np.array([[-1], [0]]), "scatter_elements: id -1 is outside 0..4",
    ),
    "scatter_nd": (lambda x, i: x.scatter_nd(i, x[:2]), np.array([[0], [5]]), "scatter_nd: id 5 is outside 0..4"),
}  # fmt: skip


def graph(build: Build, shape: tuple[int, ...], dtype: str = "i64") -> st.Graph:
    g = st.Graph("ids")
    x = g.input("x", (5, 3), "f32")
    made: Value = build(x, g.input("i", shape, dtype))
    g.outputs(made * 2.0)
    return g


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("name", CASES)
def test_an_id_out_of_range_is_an_error(name: str, dtype: str, device: str) -> None:
    build, ids, message = CASES[name]
    x = np.arange(15, dtype="f4").reshape(5, 3)
    with using(check_indices=True):
        made = st.Session(device).compile(graph(build, ids.shape, dtype))
        for _ in range(2):
            with pytest.raises(IndexRangeError, match=message):
                made.run(x=x, i=ids.astype(dtype))
        good = np.zeros_like(ids, dtype=dtype)
        (out,) = made.run(x=x, i=good)
    (expected,) = st.evaluate(graph(build, ids.shape, dtype), {"x": x, "i": good})
    np.testing.assert_array_equal(out, expected)


def test_without_the_setting_an_id_is_clamped() -> None:
    build, ids, _ = CASES["gather"]
    x = np.arange(15, dtype="f4").reshape(5, 3)
    (out,) = st.Session("cpu").compile(graph(build, ids.shape)).run(x=x, i=ids)
    np.testing.assert_array_equal(out, x[[1, 4, 0]] * 2)


def test_symbolic_sizes_and_loops_are_checked() -> None:
    n = st.sym("n", 1, 64)
    g = st.Graph("open")
    g.outputs(g.input("x", (n, 3), "f32").gather(g.input("i", (4,), "i64")))
    with using(check_indices=True):
        made = st.Session("cpu").compile(g)
        for rows in (6, 9):
            ids = np.array([0, 1, 2, rows - 1])
            made.run(x=np.zeros((rows, 3), "f4"), i=ids)
            with pytest.raises(IndexRangeError, match=f"id {rows} is outside 0..{rows - 1}"):
                made.run(x=np.zeros((rows, 3), "f4"), i=ids + 1)

        @st.jit
        def steps(table: Any, ids: Any) -> Any:
            return st.scan(lambda c, i: (c + table.gather(i.reshape((1,))).sum(), c), st.tensor(0.0), ids)[0]

        table = st.tensor(np.arange(4, dtype="f4"))
        assert steps(table, st.tensor(np.array([0, 3, 1]))).item() == 4.0
        with pytest.raises(IndexRangeError, match="id 4 is outside"):
            steps(table, st.tensor(np.array([0, 4, 1]))).item()


def test_lazy_tensors_are_checked() -> None:
    with using(check_indices=True), pytest.raises(IndexRangeError, match="id 5 is outside"):
        st.tensor(np.zeros((5, 300, 300), "f4")).gather(st.tensor(np.array([0, 5]))).numpy()
