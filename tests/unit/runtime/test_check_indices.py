"""The setting `check_indices`: what kernels would clamp is an error, natively and from every device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.backends import registry
from strata.backends.resident import HOMES
from strata.config import using
from strata.errors import IndexRangeError, ShapeError
from strata.mir import Value
from tests.dry_cuda import dry_cuda
from tests.fake_cuda import FakeCore, fake_backend

Build = Any
CROSS = "softmax_cross_entropy_with_logits"
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


@pytest.fixture(params=["cpu", "reference", "xla", "fake_cuda", *(d for d in st.devices() if d in ("cuda", "wgpu"))])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param != "fake_cuda":
        yield request.param
        return
    st.register_backend("fake_cuda", fake_backend(FakeCore()))
    yield "fake_cuda"
    HOMES.remove(registry._made.pop("fake_cuda").home)  # type: ignore[arg-type]


def graph(build: Build, shape: tuple[int, ...], dtype: str = "i64") -> st.Graph:
    g = st.Graph("ids")
    x = g.input("x", (5, 3), "f32")
    made: Value = build(x, g.input("i", shape, dtype))
    g.outputs(made * 2.0)
    return g


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


def test_without_the_setting_an_id_is_clamped(device: str) -> None:
    build, ids, _ = CASES["gather"]
    x = np.arange(15, dtype="f4").reshape(5, 3)
    (out,) = st.Session(device).compile(graph(build, ids.shape)).run(x=x, i=ids)
    np.testing.assert_array_equal(out, x[[1, 4, 0]] * 2)


@pytest.mark.parametrize("name", CASES)
def test_kernels_and_the_interpreter_clamp_alike(name: str) -> None:
    build, ids, _ = CASES[name]
    feeds = {"x": np.arange(15, dtype="f4").reshape(5, 3), "i": ids}
    made = graph(build, ids.shape)
    for got, want in zip(st.Session("cpu").compile(made).run(feeds), st.evaluate(made, feeds), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("size", [0, st.sym("n", 0, 8)], ids=["empty", "symbolic"])
@pytest.mark.parametrize("name", ["gather", "gather_elements", "gather_nd"])
def test_an_id_into_an_empty_axis_is_always_an_error(name: str, size: Any, device: str) -> None:
    """There is nothing to clamp it to, and nothing outside the table may be read."""
    g = st.Graph("ids")
    x, i = g.input("x", (size, 3)), g.input("i", (2, 1), "i64")
    g.outputs(getattr(x, name)(i) + 1.0)
    feeds = {"x": np.zeros((0, 3), "f4"), "i": np.array([[0], [4]])}
    made = st.Session(device).compile(g)
    with pytest.raises(IndexRangeError, match=f"{name}: id 0 is outside 0..-1"):
        made.run(feeds)
    if size != 0 and name == "gather":
        feeds["x"] = np.arange(6, dtype="f4").reshape(2, 3)
        np.testing.assert_array_equal(made.run(feeds)[0], feeds["x"][[[0], [1]]] + 1)


@pytest.mark.parametrize("size", [0, st.sym("n", 0, 8)], ids=["empty", "symbolic"])
def test_what_is_scattered_into_an_empty_axis_goes_nowhere(size: Any, device: str) -> None:
    g = st.Graph("ids")
    x, i, u = g.input("x", (size, 3)), g.input("i", (2, 1), "i64"), g.input("u", (2, 3))
    g.outputs(x.scatter_elements(i, u[:, :1]), x.scatter_nd(i, u), st.ops.scatter_add(u, i.reshape((2,)), size))
    feeds = {"x": np.zeros((0, 3), "f4"), "i": np.array([[0], [4]]), "u": np.ones((2, 3), "f4")}
    assert [out.shape for out in st.Session(device).compile(g).run(feeds)] == [(0, 3)] * 3


@pytest.mark.parametrize("dtype", ["i64", "i32", "u8"])
@pytest.mark.parametrize(
    "loss", [st.ops.cross_entropy, st.ops.nll_loss, st.ops.softmax_cross_entropy_with_logits], ids=lambda f: f.__name__
)
def test_a_label_outside_the_classes_is_always_an_error(loss: Any, dtype: str, device: str) -> None:
    g = st.Graph("labels")
    x, labels = g.input("x", (2, 2, 3)), g.input("labels", (2, 2), dtype)
    g.outputs(loss(x, labels, ignore_index=156, **({"axis": -1} if loss.__name__ != CROSS else {})))
    made = st.Session(device).compile(g)
    feeds = {"x": np.ones((2, 2, 3), "f4"), "labels": np.array([[0, 156], [2, 1]], g.inputs[1].dtype.np)}
    assert np.isfinite(made.run(feeds)[0]).all()
    feeds["labels"][1, 0] = 3
    with pytest.raises(IndexRangeError, match="label 3 of row 2 is outside the 3 classes"):
        made.run(feeds)


def test_the_gradient_refuses_a_label_too() -> None:
    g = st.Graph("labels")
    x, labels = g.input("x", (2, 3)), g.input("labels", (2,), "i64")
    g.outputs(st.ops.cross_entropy(x, labels))
    made = st.Session("cpu").compile(st.transforms.grad(g, wrt=["x"]))
    assert sum(s.label == "checked_ids" for s in made.lir.schedule) == 1  # one check for both directions
    with pytest.raises(IndexRangeError, match="label -1 of row 1 is outside the 3 classes"):
        made.run(x=np.ones((2, 3), "f4"), labels=np.array([0, -1]), d_output=np.float32(1))


def test_an_expert_that_does_not_exist_is_always_an_error(device: str) -> None:
    g = st.Graph("experts")
    x, w, ids = g.input("x", (2, 4)), g.input("w", (3, 4, 5)), g.input("ids", (2,), "i64")
    g.outputs(st.ops.grouped_matmul(x, w, ids))
    made = st.Session(device).compile(g)
    with pytest.raises(IndexRangeError, match="grouped_matmul: row 1 asks for expert 3 of 3"):
        made.run(x=np.ones((2, 4), "f4"), w=np.ones((3, 4, 5), "f4"), ids=np.array([2, 3]))
    with pytest.raises(ShapeError, match="no experts"):
        st.ops.grouped_matmul(x, st.Graph("empty").input("w", (0, 4, 5)), ids)


def test_ids_of_tensors_on_a_device_are_checked_when_something_is_read(device: str) -> None:
    """Runs do not wait: the error comes with the next value that is read, whatever it is, and once."""
    logits, row = st.ones((2, 3), device=device), st.ones((), device=device)
    loss = st.jit(st.cross_entropy)
    for _ in range(3):
        assert loss(logits, st.tensor(np.array([0, 2]), device=device)).item() == pytest.approx(np.log(3))
        with pytest.raises(IndexRangeError, match="label 3 of row 1 is outside the 3 classes"):
            assert loss(logits, st.tensor(np.array([0, 3]), device=device)).item()
        assert row.item() == 1.0


def test_experts_that_are_found_among_all_need_no_check_on_a_gpu() -> None:
    g = st.Graph("experts")
    x, w = g.input("x", (2, 4)), g.input("w", (3, 4, 5))
    ids = st.ops.topk(g.input("scores", (2, 3)), 1)[1]
    g.outputs(st.ops.grouped_matmul(x, w, ids.reshape((2,))), st.ops.grouped_matmul(x, w, g.input("ids", (2,), "i64")))
    with dry_cuda("plans"):
        labels = [s.label for s in st.Session("plans").compile(g).lir.schedule]
    assert sum("ensure_ids" in label for label in labels) == 1  # of the ids that are given


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


def test_what_was_found_about_ids_is_an_error_on_every_device(device: str) -> None:
    g = st.Graph("found")
    ids, found = g.input("ids", (3,), "i64"), g.input("found", (4,), "i64")
    g.outputs(st.ops.EnsureIds(wrap=False, what="gather", kind="id")(ids, found) + 1)
    made, given = st.Session(device).compile(g), np.array([4, 0, 9])
    assert device in ("cpu", "reference") or made.host_steps == []
    (out,) = made.run(ids=given, found=np.zeros(4, np.int64))
    np.testing.assert_array_equal(out, given + 1)
    with pytest.raises(IndexRangeError, match=r"gather: id 9 is outside 0\.\.4"):
        made.run(ids=given, found=np.array([1, 2, 9, 5]))


def test_no_ids_are_no_error(device: str) -> None:
    with using(check_indices=True):
        made = st.Session(device).compile(graph(lambda x, i: x.gather(i), (0,)))
        assert made.run(x=np.ones((5, 3), "f4"), i=np.zeros(0, np.int64))[0].shape == (0, 3)
