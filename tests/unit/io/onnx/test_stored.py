"""Models in the store: a later process reads nothing of ONNX, and what does not fit is made again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="ONNX models need the package onnx")

from strata.cache import default_store
from strata.config import using
from strata.core import sym
from strata.errors import FileError, ShapeError
from strata.io.onnx import load, reads
from strata.io.onnx import model as importer
from strata.io.onnx.file import BLOCK, ModelFile
from strata.io.onnx.plans import Port, forms
from strata.io.onnx.trace import OnnxTracer
from tests.unit.io.onnx.models import BOOL, INT64, model, node, port


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(importer, "WORTH_SECONDS", 0.0)
    with using(cache_dir=tmp_path / "cache"):
        yield tmp_path / "cache"


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One item for each time that a model's graph was read."""
    found: list[Any] = []
    real = OnnxTracer.run_graph

    def run_graph(self: OnnxTracer, *args: Any, **named: Any) -> Any:
        if named.get("top"):
            found.append(self)
        return real(self, *args, **named)

    monkeypatch.setattr(OnnxTracer, "run_graph", run_graph)
    return found


def layers(rng: np.random.Generator, batch: int | str = "batch") -> tuple[Any, dict[str, np.ndarray]]:
    """Two layers, and as a second output what follows from the weights alone."""
    weights = {
        "w": rng.standard_normal((8, 16), dtype=np.float32),
        "b": rng.standard_normal(16, dtype=np.float32),
        "v": rng.standard_normal((16, 80), dtype=np.float32),
        "ones": np.ones((9, 9), np.float32),
    }
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Add", ["h", "b"], ["s"]),
        node("Relu", ["s"], ["r"]),
        node("MatMul", ["r", "v"], ["y"]),
        node("Mul", ["ones", "ones"], ["one"]),
    ]
    outputs = [port("y", [batch, 80]), port("one", [9, 9])]
    return model(nodes, [port("x", [batch, 8])], outputs, initializers=weights), weights


def expected(x: np.ndarray, weights: dict[str, np.ndarray]) -> np.ndarray:
    return np.maximum(x @ weights["w"] + weights["b"], 0) @ weights["v"]


@pytest.mark.parametrize("batch", ["batch", 5])
def test_a_stored_model_is_not_read(
    batch: int | str, rng: np.random.Generator, traced: list[Any], tmp_path: Path
) -> None:
    proto, weights = layers(rng, batch)
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    x = rng.standard_normal((5, 8), dtype=np.float32)
    first = load(path).run(x=x)
    count = len(traced)
    again = load(path)
    second = again.run(x=x)
    assert len(traced) == count
    assert again._read is None
    assert repr(again) == repr(load(proto))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_allclose(second[0], expected(x, weights), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(second[1], np.ones((9, 9)))
    if batch == "batch":
        wide = rng.standard_normal((11, 8), dtype=np.float32)
        np.testing.assert_allclose(again.run(x=wide)[0], expected(wide, weights), rtol=1e-4, atol=1e-4)
        assert len(traced) == count
        assert again.is_symbolic


def test_sizes_that_an_op_cannot_take_are_refused(traced: list[Any], tmp_path: Path) -> None:
    nodes = [node("Exp", ["x"], ["e"]), node("TopK", ["e", "k"], ["y", "at"], axis=0)]
    proto = model(nodes, [port("x", ["N"])], [port("y", [5])], initializers={"k": np.array([5], np.int64)})
    path = tmp_path / "best.onnx"
    path.write_bytes(proto.SerializeToString())
    x = np.arange(7, dtype=np.float32) / 8
    for _ in range(2):
        loaded = load(path)
        np.testing.assert_allclose(loaded.run(x=x)[0], np.exp(x)[:1:-1], rtol=1e-6)
        count = len(traced)
        with pytest.raises(ShapeError, match="k = 5 elements"):
            loaded.run(x=x[:4])
    assert len(traced) == count  # of the first model


def test_another_process_imports_nothing_of_onnx(rng: np.random.Generator, tmp_path: Path, store: Path) -> None:
    proto, weights = layers(rng)
    path, data = tmp_path / "model.onnx", tmp_path / "x.npy"
    path.write_bytes(proto.SerializeToString())
    x = rng.standard_normal((5, 8), dtype=np.float32)
    np.save(data, x)
    program = (
        "import json, sys, numpy as np, strata as st\n"
        "from strata.config import using\n"
        f"with using(cache_dir={str(store)!r}):\n"
        f"    y = st.load({str(path)!r}).run(x=np.load({str(data)!r}))[0]\n"
        "heavy = [m for m in ('onnx', 'google.protobuf', 'llvmlite.binding') if m in sys.modules]\n"
        "print(json.dumps([y.tolist(), heavy]))"
    )
    for heavy in (["onnx", "google.protobuf", "llvmlite.binding"], []):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        result, loaded = json.loads(done.stdout)
        assert loaded == heavy
        np.testing.assert_allclose(np.array(result), expected(x, weights), rtol=1e-4, atol=1e-4)


def test_why_not_symbolic_and_guards_come_back(rng: np.random.Generator, traced: list[Any]) -> None:
    """Rows side by side that the file counts by two names: they must be one."""
    nodes = [node("Concat", ["x", "v"], ["y"], axis=1)]
    data = model(nodes, [port("x", ["n", 4]), port("v", ["m", 3])], [port("y", None)]).SerializeToString()
    x, v = rng.standard_normal((5, 4), dtype=np.float32), rng.standard_normal((5, 3), dtype=np.float32)
    first, again = load(data), load(data)
    results = [m.run(x=x, v=v)[0] for m in (first, again)]
    np.testing.assert_array_equal(results[0], results[1])
    assert len(traced) == 2, "the most general form does not fit; the second model comes from the store"
    assert first.why_not_symbolic == again.why_not_symbolic != []
    np.testing.assert_array_equal(again.run(x=x[:2], v=v[:2])[0], np.concatenate([x[:2], v[:2]], 1))
    assert len(traced) == 2


def test_a_guard_that_breaks_makes_another_plan(rng: np.random.Generator, traced: list[Any]) -> None:
    data = model(
        [node("Add", ["x", "v"], ["y"])], [port("x", ["n", 3]), port("v", ["m", 3])], [port("y", None)]
    ).SerializeToString()
    x, v = rng.standard_normal((5, 3), dtype=np.float32), rng.standard_normal((5, 3), dtype=np.float32)
    for count in (2, 2):  # the second model finds both plans
        m = load(data)
        np.testing.assert_array_equal(m.run(x=x, v=v)[0], x + v)
        np.testing.assert_array_equal(m.run(x=x, v=v[:1])[0], x + v[:1])
        assert len(traced) == count


def test_elements_that_decide_are_part_of_the_key(rng: np.random.Generator) -> None:
    """A number of steps that is an input: a plan is good for that number only."""
    nodes = [
        node("Concat", ["n", "two"], ["shape"], axis=0),
        node("Reshape", ["x", "shape"], ["y"]),
    ]
    proto = model(
        nodes, [port("x", ["k"]), port("n", [1], INT64)], [port("y", None)], initializers={"two": np.array([2], "i8")}
    )
    data = proto.SerializeToString()
    x = rng.standard_normal(12, dtype=np.float32)
    for _ in range(2):
        m = load(data)
        np.testing.assert_array_equal(m.run(x=x, n=np.array([6]))[0], x.reshape(6, 2))
        np.testing.assert_array_equal(m.run(x=x[:8], n=np.array([4]))[0], x[:8].reshape(4, 2))


def entries(kind: str) -> list[str]:
    return [e.key for e in default_store().entries() if e.about.get("kind") == kind]


@pytest.mark.parametrize("kind", ["onnx head", "onnx plan"])
@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: b"{}",
        lambda data: b"[1, 2]\n",
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b"float", b"flaot").replace(b'["file", 1, [8, 16]', b'["file", 1, [8, 17000000]'),
        lambda data: data.replace(b'["file", 1, [8, 16], ', b'["file", 1, [8, 16], -'),
        lambda data: data.replace(b'"format": 1', b'"format": 99').replace(b'"ports"', b'"prots"'),
    ],
)
def test_a_foreign_entry_is_made_again(kind: str, change: Any, rng: np.random.Generator) -> None:
    proto, weights = layers(rng)
    data = proto.SerializeToString()
    x = rng.standard_normal((5, 8), dtype=np.float32)
    load(data).run(x=x)
    (key,) = entries(kind)
    good = default_store().get(key)
    assert good is not None
    default_store().put(key, change(good), {"kind": kind})
    np.testing.assert_allclose(load(data).run(x=x)[0], expected(x, weights), rtol=1e-4, atol=1e-4)


def test_a_changed_file_is_another_model(rng: np.random.Generator, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    x = rng.standard_normal((5, 8), dtype=np.float32)
    for _ in range(2):
        proto, weights = layers(rng)
        path.write_bytes(proto.SerializeToString())
        np.testing.assert_allclose(load(path).run(x=x)[0], expected(x, weights), rtol=1e-4, atol=1e-4)


def test_a_file_that_changes_under_a_model_is_noticed(rng: np.random.Generator, tmp_path: Path) -> None:
    proto, weights = layers(rng)
    path = tmp_path / "model.onnx"
    data = proto.SerializeToString()
    path.write_bytes(data)
    x = rng.standard_normal((5, 8), dtype=np.float32)
    load(path).run(x=x)
    m = load(path)
    np.testing.assert_allclose(m.run(x=x)[0], expected(x, weights), rtol=1e-4, atol=1e-4)
    path.write_bytes(data[:-100])
    np.testing.assert_allclose(m.run(x=x)[0], expected(x, weights), rtol=1e-4, atol=1e-4)  # it has all it needs
    with pytest.raises(FileError, match="changed while the model was in use"):
        _ = m.program


def test_readers_of_the_user_are_never_stored(rng: np.random.Generator, traced: list[Any]) -> None:
    reads("Twice", domain="test.stored")(lambda n: n[0] * 2)
    own = model([node("Twice", ["x"], ["y"], domain="test.stored")], [port("x", ["n"])], [port("y", ["n"])],
                domains=["test.stored"]).SerializeToString()  # fmt: skip
    plain = model([node("Neg", ["x"], ["y"])], [port("x", ["n"])], [port("y", ["n"])]).SerializeToString()
    x = rng.standard_normal(4, dtype=np.float32)
    for _ in range(2):
        np.testing.assert_array_equal(load(own).run(x=x)[0], x * 2)
        np.testing.assert_array_equal(load(plain, custom_ops={"Neg": lambda n: n[0] + 1}).run(x=x)[0], x + 1)
    assert len(traced) == 4
    assert entries("onnx plan") == []
    np.testing.assert_array_equal(load(plain).run(x=x)[0], -x)


def test_models_in_segments_and_with_optional_inputs(rng: np.random.Generator) -> None:
    """What is found in the data of a run is never stored; an input with a value of its own may be left out."""
    nodes = [node("NonZero", ["x"], ["at"]), node("Identity", ["c"], ["d"])]
    proto = model(
        nodes, [port("x", ["n"]), port("c", [2])], [port("at", None, INT64), port("d", [2])],
        initializers={"c": np.array([1, 2], np.float32)},
    )  # fmt: skip
    data = proto.SerializeToString()
    for x in ([0, 1, 2], [3, 0, 0]):
        m = load(data)
        assert [p.name for p in m.optional_inputs] == ["c"]
        at, d = m.run(x=np.array(x, np.float32))
        np.testing.assert_array_equal(at, np.nonzero(x))
        np.testing.assert_array_equal(d, [1, 2])
    np.testing.assert_array_equal(load(data).run(x=np.ones(1, np.float32), c=np.zeros(2, np.float32))[1], [0, 0])


def test_element_types(rng: np.random.Generator) -> None:
    """Weights of several types, at odd places of the file."""
    weights = {
        "a": rng.integers(0, 2, 77).astype(bool), "b": rng.integers(-9, 9, 77).astype(np.int64),
        "c": rng.standard_normal(77).astype(np.float16), "d": rng.standard_normal(77),
    }  # fmt: skip
    nodes = [node("Where", ["x", "b", "zero"], ["p"]), node("And", ["x", "a"], ["q"])]
    nodes += [node("Identity", [n], [f"{n}_out"]) for n in "cd"]
    ports = [port("x", ["n"], BOOL)]
    outputs = [port("p", None, INT64), port("q", None, BOOL), port("c_out", None, 10), port("d_out", None, 11)]
    data = model(nodes, ports, outputs, initializers={**weights, "zero": np.array(0)}).SerializeToString()
    x = rng.integers(0, 2, 77).astype(bool)
    for _ in range(2):
        p, q, c, d = load(data).run(x=x)
        np.testing.assert_array_equal(p, np.where(x, weights["b"], 0))
        np.testing.assert_array_equal(q, x & weights["a"])
        np.testing.assert_array_equal(c, weights["c"])
        np.testing.assert_array_equal(d, weights["d"])


def test_a_stored_model_can_be_looked_at(rng: np.random.Generator, tmp_path: Path) -> None:
    proto, weights = layers(rng)
    data = proto.SerializeToString()
    x = rng.standard_normal((5, 8), dtype=np.float32)
    load(data).run(x=x)
    m = load(data)
    m.run(x=x)
    (plan,) = m._plans
    assert plan.compiled is not None
    assert "matmul" in str(plan.compiled.explain())
    assert len(plan.compiled.source.nodes()) > 4
    plan.compiled.save(tmp_path / "model.strata")
    from strata.runtime import load_compiled

    saved = load_compiled(tmp_path / "model.strata")
    np.testing.assert_allclose(saved.run(x=x)[0], expected(x, weights), rtol=1e-4, atol=1e-4)
    assert m.graph().input_names == ("x",)


@pytest.mark.parametrize("is_file", [True, False])
def test_bytes_are_found_in_blocks(tmp_path, is_file: bool) -> None:
    data = np.random.default_rng(0).bytes(3 * BLOCK + 17)
    place = tmp_path / "model"
    place.write_bytes(data)
    file = ModelFile(place if is_file else data)
    assert file.read() == data
    for start, size in ((0, 1000), (BLOCK - 5, 10), (BLOCK, BLOCK + 3), (2 * BLOCK + 9, BLOCK + 8), (5, 3 * BLOCK)):
        part = data[start : start + size]
        assert file.find(part, 0) == file.find(part, start) == start
        assert file.find(part, start + 1) == -1
    assert file.find(data + b"x", 0) == -1


def test_a_file_that_changed_is_not_read(tmp_path) -> None:
    place = tmp_path / "model"
    place.write_bytes(b"x" * 100)
    file = ModelFile(place)
    place.write_bytes(b"x" * 99)
    with pytest.raises(FileError, match="changed"):
        file.read()


def test_shapes_that_fit_more_sizes_come_first() -> None:
    """Sizes that happen to be equal are taken for one only where nothing more general can be read."""
    h, w = sym("h"), sym("w")
    port_ = Port("x", "tensor", np.dtype(np.float32), (1, 3, h, w))
    found = list(forms([port_], {"x": np.zeros((1, 3, 64, 64), np.float32)}))
    by32 = sym("h_by32") * 32, sym("w_by32") * 32
    assert [shapes["x"][2:] for shapes in found] == [(h, w), by32, (h, h), (by32[0], by32[0]), (64, w), (64, h)]


def test_weights_of_equal_elements_are_one_array(tmp_path) -> None:
    """Of any sizes, in any order; results stay the caller's own."""
    from onnx import numpy_helper

    quarter = numpy_helper.from_array(np.array([0.25], np.float32))
    made = [node("ConstantOfShape", [f"s{i}"], [f"w{i}"], value=quarter) for i in range(3)]
    shapes = {"s0": np.array([4, 3]), "s1": np.array([3, 9]), "s2": np.array([9, 2])}
    nodes = [
        *made,
        node("MatMul", ["x", "w0"], ["a"]),
        node("MatMul", ["a", "w1"], ["b"]),
        node("MatMul", ["b", "w2"], ["y"]),
    ]
    path = tmp_path / "equal.onnx"
    path.write_bytes(
        model(nodes, [port("x", ("n", 4))], [port("y", ("n", 2))], initializers=shapes).SerializeToString()
    )
    x = np.arange(20, dtype=np.float32).reshape(5, 4)
    expected = x @ np.full((4, 3), 0.25) @ np.full((3, 9), 0.25) @ np.full((9, 2), 0.25)
    for _ in range(2):  # made, then read back
        (y,) = load(path).run(x=x)
        np.testing.assert_allclose(y, expected, rtol=1e-6)
        y[...] = 0
