"""Bundles: one file that runs without compiling; damage and other versions are noticed."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.backends.llvm import jit
from strata.core import Dim, Target, sym
from strata.errors import FileError, OptionError, UnknownNameError
from strata.mir import Graph
from strata.runtime import CompiledGraph, Session, inspect_bundle
from strata.runtime.container import Container, write_container

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
from strata.backends.llvm import jit
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
