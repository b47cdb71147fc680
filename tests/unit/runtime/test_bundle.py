"""Bundles: one file that runs without compiling; damage and other versions are noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.backends.llvm.jit import jit
from strata.backends.llvm.runtime.archive import CpuArchive
from strata.core import Dim, Target, sym
from strata.errors import FileError, OptionError, UnknownNameError
from strata.mir import Graph
from strata.passes import FusionLimits
from strata.runtime import CompiledGraph, CompileOptions, Session, inspect_bundle
from strata.runtime.execute import load_bundle
from strata.runtime.storage.container import Container, write_container

ROWS = sym("N", 1, 64)


def network(rows: Dim = ROWS) -> CompiledGraph:
    g = Graph("net")
    x, w, b = g.input("x", (rows, 8)), g.param("w", (8, 8)), g.param("b", (8,))
    q = ops.reshape(x @ w, (1, rows, 8))
    mixed = ops.attention(q, q, q, num_heads=2, layout="bsd").reshape((rows, 8))
    c = Session("cpu").compile(g.outputs(ops.layer_norm(ops.gelu(mixed @ w + b), b, b), ops.sort(x, axis=-1)))
    rng = np.random.default_rng(0)
    c.set_params({"w": rng.standard_normal((8, 8)).astype(np.float32), "b": rng.standard_normal(8).astype(np.float32)})
    return c


X = np.random.default_rng(1).standard_normal((9, 8)).astype(np.float32)

PROCESS = """
import sys, numpy as np
import strata as st
from strata.backends.llvm.jit import jit
def refuse(*args, **kwargs):
    raise AssertionError("compiled")
jit.compile_text = refuse
c = st.load_compiled(sys.argv[1])
x = np.random.default_rng(1).standard_normal((9, 8)).astype(np.float32)
np.savez(sys.argv[2], *c.run(x=x))
"""


def test_runs_in_another_process_without_a_compiler(tmp_path) -> None:
    c = network()
    c.save(tmp_path / "m.strata")
    env = {**os.environ, "STRATA_CACHE_DIR": str(tmp_path / "empty")}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(tmp_path / "m.strata"), str(tmp_path / "out.npz")],
        capture_output=True, text=True, env=env, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as found:
        for a, b in zip((found["arr_0"], found["arr_1"]), c.run(x=X), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
def test_every_level_that_this_processor_has_gives_the_results(tmp_path, level: str) -> None:
    if not Target.named(level).runs_on(Target.host()):
        pytest.skip(f"this processor has no {level}")
    c = network()
    c.save(tmp_path / "m.strata", levels=[level])
    assert inspect_bundle(tmp_path / "m.strata")["levels"] == [level]
    loaded = st.load_compiled(tmp_path / "m.strata")
    for a, b in zip(loaded.run(x=X), c.run(x=X), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_weights_are_mapped_or_left_out(tmp_path) -> None:
    c = network(4)
    c.save(tmp_path / "m.strata")
    loaded = st.load_compiled(tmp_path / "m.strata")
    assert not loaded._param_values["w"].flags.owndata
    assert str(loaded.source).startswith("mir @net(")
    assert loaded.signature == c.signature
    c.save(tmp_path / "bare.strata", weights=False)
    bare = st.load_compiled(tmp_path / "bare.strata")
    with pytest.raises(UnknownNameError, match="no value yet"):
        bare.run(x=X[:4])
    bare.set_params(c._param_values)
    np.testing.assert_array_equal(bare.run(x=X[:4])[0], loaded.run(x=X[:4])[0])
    about = inspect_bundle(tmp_path / "m.strata")
    assert about["name"] == "net"
    assert about["weights"]["w"] == ["f32", [8, 8]]
    assert "plan baseline" in about["parts"]


def test_another_version_compiles_the_graph_again(tmp_path, monkeypatch, caplog) -> None:
    c = network(4)
    c.save(tmp_path / "m.strata", levels=["baseline"])
    monkeypatch.setattr(jit, "VERSION", "another")
    loaded = st.load_compiled(tmp_path / "m.strata")
    assert "another version made it" in caplog.text
    np.testing.assert_allclose(loaded.run(x=X[:4])[0], c.run(x=X[:4])[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_damage_is_noticed(tmp_path, seed: int) -> None:
    path = tmp_path / "m.strata"
    if seed == 0:
        path.write_bytes(b"")
    else:
        write_container(path, {"format": 1}, {"a": b"x" * 1000, "b": bytes(range(256))})
        data = bytearray(path.read_bytes())
        rng = np.random.default_rng(seed)
        if seed % 3 == 0:
            del data[int(rng.integers(0, len(data) - 1)) :]
        else:
            data[int(rng.integers(0, len(data)))] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(data))
    try:
        Container(path).verify()
    except FileError:
        return
    assert bytes(Container(path).read("a")) == b"x" * 1000  # the damage hit the padding
    assert bytes(Container(path).read("b")) == bytes(range(256))


def test_what_is_no_bundle_is_refused(tmp_path) -> None:
    (tmp_path / "t").write_text("hello")
    with pytest.raises(FileError, match="is not a strata bundle"):
        st.load_compiled(tmp_path / "t")
    with pytest.raises(FileError, match="cannot be read"):
        st.load_compiled(tmp_path / "none")
    with pytest.raises(FileError, match="cannot be written"):
        network(4).save(tmp_path / "no" / "where")
    with pytest.raises(OptionError, match="levels are among"):
        network(4).save(tmp_path / "x", levels=["avx9"])
    g = Graph("g")
    with pytest.raises(OptionError, match="'reference' has none"):
        Session("reference").compile(g.outputs(g.input("x", (2,)) + 1.0)).save(tmp_path / "x")


def test_state_updates_travel(tmp_path) -> None:
    g = Graph("step")
    new, cache, at = g.input("new", (1, 4)), g.input("cache", (8, 4)), g.input("at", (), "i64")
    c = Session("cpu").compile(g.outputs(ops.dynamic_update_slice(cache, new, (at, g.constant(0, "i64")))))
    c.save(tmp_path / "m.strata")
    loaded = st.load_compiled(tmp_path / "m.strata")
    (out,) = loaded.run(new=np.ones((1, 4), np.float32), cache=np.zeros((8, 4), np.float32), at=np.int64(3))
    np.testing.assert_array_equal(out.sum(axis=1), [0, 0, 0, 4, 0, 0, 0, 0])


def other_kind() -> str:
    return "baseline" if Target.host().has("neon") else "neon"


def mixed() -> st.Graph:
    """Loops, a product, a sort, an update and a loop of the program."""
    g = st.Graph("mixed")
    x, w = g.input("x", (st.sym("n", 1, 64), 32)), g.param("w", (32, 64))
    _, sums = st.ops.scan(lambda carry, row: (carry + row, carry), g.input("s", (32,)), x)
    table = g.input("t", (8, 32)).scatter_elements(g.input("i", (2, 32), "i64"), x.sum(axis=0).broadcast_to((2, 32)))
    return g.outputs((x @ w).gelu().softmax(axis=-1), st.ops.sort(x, axis=-1), sums, table)


def feeds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x, s, t = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, 32), (32,), (8, 32)))
    return {"x": x, "s": s, "t": t, "i": np.arange(64).reshape(2, 32) % 2}


def test_code_for_another_kind_of_processor(tmp_path: Path) -> None:
    c = st.Session("cpu").compile(mixed())
    c.set_param("w", np.ones((32, 64), np.float32))
    c.save(tmp_path / "m.strata", levels=[other_kind(), CpuArchive().levels[0]])
    file = Container(tmp_path / "m.strata")
    assert file.about["levels"][0] == other_kind()
    machines: Counter[str] = Counter()
    for name in file.names:
        if name.startswith("code "):
            data = bytes(file.read(name))
            machines[jit.machine_of_object(data[max(data.find(b"\x7fELF"), 0) :])] += 1
    assert min(machines["aarch64"], machines["x86_64"]) > 4
    for got, want in zip(st.load_compiled(tmp_path / "m.strata").run(feeds()), c.run(feeds()), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_bundle_for_others_only_is_compiled_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    c = st.Session("cpu").compile(mixed())
    c.set_param("w", np.ones((32, 64), np.float32))
    c.save(tmp_path / "m.strata", levels=[other_kind()])
    with caplog.at_level("WARNING", "strata"):
        again = st.load_compiled(tmp_path / "m.strata")
    assert "this processor has other instructions" in caplog.text
    for got, want in zip(again.run(feeds()), c.run(feeds()), strict=True):
        np.testing.assert_array_equal(got, want)


MADE_ELSEWHERE = """
import sys, numpy as np, strata as st
from strata.backends.llvm.jit import jit
from strata.config import using
from tests.unit.runtime.test_bundle import feeds, mixed
with using(cache_dir=sys.argv[2]):
    if sys.argv[3] == "save":  # as if this processor could not run what it makes
        made = st.Session("cpu:baseline").compile(mixed())
        made.set_param("w", np.ones((32, 64), np.float32))
        jit.machine_of_object = lambda data: "another"
        from strata.backends.llvm.codegen import kernels
        kernels._loaded.clear()
        made.save(sys.argv[1], levels=["baseline"])
    else:
        def refuse(*args, **options):
            raise AssertionError("compiled again")
        jit.compile_text = refuse
        again = st.load_compiled(sys.argv[1])
        assert again.lir.target.name == "baseline", again.lir.target
        r = st.Session("reference").compile(mixed())
        r.set_param("w", np.ones((32, 64), np.float32))
        for got, want in zip(again.run(feeds()), r.run(feeds()), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        print("right")
"""


@pytest.mark.skipif(Target.host().has("neon"), reason="made for the other kind, which is x86 there")
def test_code_that_was_never_loaded_is_complete(tmp_path: Path) -> None:
    """What is recorded without an address is all that a processor of that kind needs."""
    said = ""
    for step in ("save", "load"):
        ran = subprocess.run(
            [sys.executable, "-c", MADE_ELSEWHERE, str(tmp_path / "m.strata"), str(tmp_path / step), step],
            capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-2000:]
        said = ran.stdout
    assert said.strip() == "right"


@pytest.mark.parametrize("is_compiled_again", [False, True])
def test_options_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_compiled_again: bool) -> None:
    """A graph that computes in f16 does so on every machine, and when it is saved again."""
    g = Graph("half")
    g.outputs((g.input("x", (4, 4)) @ g.param("w", (4, 4))) / 3.0)
    options = CompileOptions(precision="f16", fusion=FusionLimits(max_steps=3), skip_passes=("fold",))
    c = Session("cpu").compile(g, options)
    x, w = (np.random.default_rng(i).standard_normal((4, 4)).astype(np.float32) for i in range(2))
    c.set_param("w", w)
    c.save(tmp_path / "a", levels=["baseline"])
    if is_compiled_again:
        monkeypatch.setattr(CpuArchive, "version", "another")
    loaded = st.load_compiled(tmp_path / "a")
    assert loaded.options == options
    loaded.save(tmp_path / "b", levels=["baseline"])
    again = st.load_compiled(tmp_path / "b")
    for one in (loaded, again):
        np.testing.assert_array_equal(one.run(x=x)[0], c.run(x=x)[0])
    assert (Session("cpu").compile(g).options.precision, loaded.options.precision) == (None, "f16")


def test_options_of_a_later_version_are_refused(tmp_path: Path) -> None:
    network().save(tmp_path / "a", levels=["baseline"])
    file = Container(tmp_path / "a")
    parts = {name: bytes(file.read(name)) for name in file.names}
    for odd in ({"bend": 1}, {"precision": 3}, {"fusion": {"width": 1}}, [1]):
        write_container(tmp_path / "b", {**file.about, "compile": odd}, parts)
        with pytest.raises(FileError, match="compile options that this version does not know"):
            st.load_compiled(tmp_path / "b")


def test_sizes_are_checked_without_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundle says what must hold of sizes, so that its graph is not read to run it."""
    graph = st.Graph("pairs")
    x, y = graph.input("x", (st.sym("n", 1, 64), 4)), graph.input("y", (st.sym("m", 1, 64), 4))
    graph.outputs(x * y)
    compiled = st.Session("cpu").compile(graph)
    compiled.save(tmp_path / "pairs.strata")
    a, b = np.ones((3, 4), np.float32), np.full((3, 4), 2, np.float32)
    wrong = {}
    for made in (compiled, st.load_compiled(tmp_path / "pairs.strata")):
        with pytest.raises(st.errors.SymbolError) as found:
            made.run(x=a, y=b[:2])
        wrong[made] = found.value.summary
    assert len(set(wrong.values())) == 1
    loaded = st.load_compiled(tmp_path / "pairs.strata")
    monkeypatch.setattr(load_bundle, "parse", None)
    np.testing.assert_array_equal(loaded.run(x=a, y=b)[0], compiled.run(x=a, y=b)[0])
