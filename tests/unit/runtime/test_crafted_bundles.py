"""Bundles whose header or plan says other things than their writer would, with checksums that are right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.cli import main
from strata.errors import FileError
from strata.runtime import inspect_bundle
from strata.runtime.storage.container import ALIGNMENT, MAGIC, Container, write_container


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    g = st.Graph("small")
    x, w = g.input("x", (2, 4), "f32"), g.param("w", (4, 3), "f32")
    g.outputs(st.ops.softmax(x @ w, -1))
    compiled = st.Session("cpu").compile(g)
    compiled.set_param("w", np.ones((4, 3), np.float32))
    path = tmp_path_factory.mktemp("bundles") / "x.strata"
    compiled.save(path)
    return path


def changed(bundle: Path, target: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A copy with another description and other parts."""
    file = Container(bundle)
    about, parts = dict(file.about), {name: bytes(file.read(name)) for name in file.names}
    change(about, parts)
    write_container(target, about, parts)
    return target


def with_header(target: Path, header: bytes) -> Path:
    header += b" " * (-(len(MAGIC) + 40 + len(header)) % ALIGNMENT)
    target.write_bytes(MAGIC + hashlib.sha256(header).digest() + len(header).to_bytes(8, "little") + header)
    return target


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{", b"[]", b"3", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"about": {}}', b'{"about": [], "parts": []}',
        b'{"about": {}, "parts": {}}', b'{"about": {}, "parts": [[]]}', b'{"about": {}, "parts": [["a", 0, 1]]}',
        b'{"about": {}, "parts": [["a", "0", 1, ""]]}', b'{"about": {}, "parts": [["a", -64, 8, ""]]}',
        b'{"about": {}, "parts": [["a", 0, 9999999999, ""]]}', b'{"about": {}, "parts": [["a", 0, -1, ""]]}',
        b'{"about": {}, "parts": [["a", 0, 0, ""], ["a", 0, 0, ""]]}', b'{"about": {}, "parts": [[3, 0, 0, ""]]}',
        b'{"about": {}, "parts": [["a", true, 0, ""]]}', b'{"about": {"format": 2}, "parts": []}',
    ],
)  # fmt: skip
def test_headers(header: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = with_header(tmp_path / "x.strata", header)
    for read in (st.load_compiled, inspect_bundle):
        with pytest.raises(FileError, match=r"x\.strata"):
            read(path)
    assert main(["inspect", str(path)]) == 2
    assert "x.strata" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device", None), ("device", 3), ("levels", None), ("levels", "avx2"), ("levels", [3]), ("levels", {}),
        ("generator", []), ("weights", None), ("weights", []), ("weights", {"w": None}), ("weights", {"w": ["f32"]}),
        ("weights", {"w": ["f32", 12]}), ("weights", {"w": ["f32", [-4, -3]]}), ("weights", {"w": ["f99", [4, 3]]}),
        ("weights", {"w": ["f32", ["4", 3]]}), ("weights", {"w": ["f32", [4, 4]]}), ("weights", {"v": ["f32", [4, 3]]}),
        ("weights", {"w": ["f64", [4, 3]]}), ("weights", {"w": ["f32", [2**40, 2**40]]}), ("format", 99),
    ],
)  # fmt: skip
def test_descriptions(bundle: Path, key: str, value: Any, tmp_path: Path) -> None:
    path = changed(bundle, tmp_path / "x.strata", lambda about, parts: about.update({key: value}))
    with pytest.raises(st.errors.StrataError):
        st.load_compiled(path)


def test_a_weight_that_the_program_does_not_have(bundle: Path, tmp_path: Path) -> None:
    def change(about: dict[str, Any], parts: dict[str, Any]) -> None:
        about["weights"] = {"v": about["weights"]["w"]}
        parts["weight v"] = parts.pop("weight w")

    with pytest.raises(FileError, match="the program has none of that name"):
        st.load_compiled(changed(bundle, tmp_path / "x.strata", change))


@pytest.mark.parametrize("key", ["inputs", "params", "buffers", "steps", "kernels", "io", "constants", "symbols"])
@pytest.mark.parametrize("value", [None, 3, [], {}, [[]], [3], [["x"]], "x"], ids=repr)
def test_plans(bundle: Path, key: str, value: Any, tmp_path: Path) -> None:
    def change(about: dict[str, Any], parts: dict[str, Any]) -> None:
        for name in [n for n in parts if n.startswith("plan ")]:
            head = json.loads(parts[name].partition(b"\n")[0])
            head[key] = value
            parts[name] = json.dumps(head).encode() + b"\n" + parts[name].partition(b"\n")[2]

    path = changed(bundle, tmp_path / "x.strata", change)
    if (key, value) in (("constants", []), ("symbols", {}), ("constants", {})):  # as it was
        st.load_compiled(path).run(x=np.ones((2, 4), np.float32))
        return
    with pytest.raises(FileError) as caught:
        st.load_compiled(path)
    assert caught.value.code in ("F402", "F405")


@pytest.mark.parametrize(("old", "new"), [("f32[2, 4]", "f32[9, 4]"), ("f32[4, 3]", "f32[4, 9]"), ("f32", "f64")])
def test_a_plan_of_other_types_than_its_kernels(bundle: Path, old: str, new: str, tmp_path: Path) -> None:
    """It would read beside what it is given."""

    def change(about: dict[str, Any], parts: dict[str, Any]) -> None:
        for name in [n for n in parts if n.startswith("plan ")]:
            head = json.loads(parts[name].partition(b"\n")[0])
            head["buffers"] = json.loads(json.dumps(head["buffers"]).replace(old, new))
            parts[name] = json.dumps(head).encode() + b"\n" + parts[name].partition(b"\n")[2]

    with pytest.raises(FileError):
        st.load_compiled(changed(bundle, tmp_path / "x.strata", change))


def with_plan(bundle: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy whose plans say something else."""

    def edit(about: dict[str, Any], parts: dict[str, Any]) -> None:
        for name in [n for n in parts if n.startswith("plan ")]:
            text, _, blobs = parts[name].partition(b"\n")
            head = json.loads(text)
            change(head)
            parts[name] = json.dumps(head).encode() + b"\n" + blobs

    return changed(bundle, target, edit)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with two results, scratch memory, a weight that is computed once, and an op that reads in place."""
    g = st.Graph("large")
    x, w = g.input("x", (st.sym("n", 1, 64), 4), "f32"), g.param("w", (4, 4), "f32")
    y = st.ops.softmax(x @ st.ops.exp(w), -1)
    g.outputs(st.ops.sort(y.transpose(1, 0), 0), y.sum(-1) + 1.0, st.ops.cumsum(st.ops.sort(y, 0), 0))
    compiled = st.Session("cpu").compile(g)
    compiled.set_param("w", np.eye(4, dtype=np.float32))
    path = tmp_path_factory.mktemp("bundles") / "x.strata"
    compiled.save(path)
    return path


def rows(head: dict[str, Any], role: str) -> list[Any]:
    found = [row for row in head["buffers"] if row[2] == role]
    assert found
    return found


def viewed(head: dict[str, Any]) -> list[list[Any]]:
    found = [view for step in head["steps"] if step[6] is None and step[8] for view in step[8]]
    assert found
    return found


PLANS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a result that no caller gets": lambda h: h["io"][2].pop(0),
    "a result in scratch memory": lambda h: h["io"][2].__setitem__(0, rows(h, "scratch")[0][0]),
    "an input that is not bound": lambda h: (h["inputs"].clear(), h["io"][0].clear()),
    "a parameter that is not bound": lambda h: (h["params"].clear(), h["io"][1].clear()),
    "an input that is said to be a parameter": lambda h: rows(h, "input")[0].__setitem__(2, "param"),
    "a scratch buffer outside the arena": lambda h: rows(h, "scratch")[0].__setitem__(2, "weight"),
    "a weight in the arena": lambda h: rows(h, "weight")[0].__setitem__(2, "scratch"),
    "a scratch buffer that is said to be a result": lambda h: rows(h, "scratch")[0].__setitem__(2, "result"),
    "a phase that there is not": lambda h: h["steps"][0].__setitem__(4, "later"),
    "a weight that is never computed": lambda h: [step.__setitem__(4, "steady") for step in h["steps"]],
    "all in the prologue": lambda h: [step.__setitem__(4, "prologue") for step in h["steps"]],
    "a life of half a step": lambda h: rows(h, "scratch")[0].__setitem__(4, 0.5),
    "a size with bounds that are no numbers": lambda h: h["symbols"].__setitem__("n", ["1", 64]),
    "a size of less than nothing": lambda h: h["symbols"].__setitem__("n", [-5, 64]),
    "bounds that are no interval": lambda h: h["symbols"].__setitem__("n", [9, 3]),
    "other bounds": lambda h: h["symbols"].__setitem__("n", [1, 6400]),
    "a view that starts behind the end": lambda h: [view.__setitem__(0, "100000") for view in viewed(h)],
    "a view that starts before the beginning": lambda h: [view.__setitem__(0, "-8") for view in viewed(h)],
    "views with other strides": lambda h: [view.__setitem__(1, ["4096"] * len(view[1])) for view in viewed(h)],
    "views of fewer axes": lambda h: [view[1].clear() for view in viewed(h)],
    "an update of a buffer that is not written": lambda h: h["steps"][-1].__setitem__(5, [["x", "x"]]),
}


@pytest.mark.parametrize("what", PLANS)
def test_a_plan_that_would_reach_beside_its_memory(large: Path, what: str, tmp_path: Path) -> None:
    """Each would run machine code on an address that nobody gave."""
    path = with_plan(large, tmp_path / "x.strata", PLANS[what])
    with pytest.raises(FileError) as caught:
        st.load_compiled(path)
    assert caught.value.code in ("F402", "F405")


def test_the_plan_as_it_was(large: Path, tmp_path: Path) -> None:
    path = with_plan(large, tmp_path / "x.strata", lambda head: None)
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    for a, b in zip(st.load_compiled(path).run(x=x), st.load_compiled(large).run(x=x), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_buffer_that_shares_less_memory_than_it_needs(large: Path, tmp_path: Path) -> None:
    def change(head: dict[str, Any]) -> None:
        first = rows(head, "scratch")[0]
        last = len(head["steps"])
        head["buffers"].append(["%small", "f32[1]", "scratch", None, 0, last, None])
        first[6] = "%small"

    with pytest.raises(FileError, match="shares the memory of %small"):
        st.load_compiled(with_plan(large, tmp_path / "x.strata", change))


def test_code_is_not_made_of_a_plan_from_a_file(bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The graph is compiled again: a kernel from a file may read where it likes."""

    def change(head: dict[str, Any]) -> None:
        head["kernels"] = [text.replace("exp", "sin") for text in head["kernels"]]

    made = st.load_compiled(with_plan(bundle, tmp_path / "x.strata", change))
    assert "is compiled again" in caplog.text
    x = np.ones((2, 4), np.float32)
    np.testing.assert_array_equal(made.run(x=x), st.load_compiled(bundle).run(x=x))


def test_graphs(bundle: Path, tmp_path: Path) -> None:
    def change(about: dict[str, Any], parts: dict[str, Any]) -> None:
        about["generator"] = "another"
        parts["graph"] = b"\xff mir"

    with pytest.raises(FileError, match="its graph cannot be read"):
        st.load_compiled(changed(bundle, tmp_path / "x.strata", change))


def test_a_missing_bundle_is_a_missing_file(tmp_path: Path) -> None:
    for read in (st.load_compiled, inspect_bundle):
        with pytest.raises(FileNotFoundError) as caught:
            read(tmp_path / "none.strata")
        assert isinstance(caught.value, FileError)
