"""Programs over a mesh of devices: eight virtual ones on a CPU, in a process of their own, next to one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from strata.backends import ThreadSpread
from strata.errors import OptionError
from strata.mir import Graph
from strata.runtime import CompileOptions, Session

ROOT = Path(__file__).parents[4]
needs_jax = pytest.mark.skipif(find_spec("jax") is None, reason="the xla device runs on jax, which is not installed")

PROGRAM = """
import numpy as np
import strata as st
from strata import ops
from strata.errors import DeviceError, IndexRangeError, OptionError
from strata.transforms import grad_with_loss

assert [st.Device(f"xla:{i}").index for i in range(8)] == list(range(8))
rng = np.random.default_rng(0)
g = st.Graph("layer")
x, w, v = g.input("x", (st.sym("rows", 4, 64), 8)), g.param("w", (8, 16)), g.param("v", (16, 6))
g.outputs(ops.softmax(ops.gelu(x @ w) @ v, axis=-1), ops.sum(x, axis=0))
params = {n: rng.standard_normal(s).astype("f4") for n, s in {"w": (8, 16), "v": (16, 6)}.items()}
mesh = {"data": 4, "model": 2}
shard = {"x": ("data",), "w": (None, "model"), "v": ("model", None)}
one, many = st.Session("xla").compile(g), st.Session("xla").compile(g, mesh=mesh, shard=shard)
for compiled in (one, many, st.Session("xla:5").compile(g)):
    compiled.set_params(params)
for rows in (4, 16, 4):
    given = rng.standard_normal((rows, 8)).astype("f4")
    for got, want in zip(many.run(x=given), one.run(x=given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
text = many.stablehlo(rows=16)
assert 'sdy.mesh @mesh = <["data"=4, "model"=2]>' in text
assert '%w: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"model"}]>}' in text
try:
    many.run(x=np.ones((6, 8), "f4"))
except OptionError as error:
    assert "does not divide into 4 parts" in str(error)
else:
    raise AssertionError("6 rows on 4 devices")

h = st.Graph("loss")
x, w = h.input("x", (8, 4)), h.param("w", (4, 4))
h.outputs(ops.sum(ops.tanh(x @ w) ** 2.0))
grads = grad_with_loss(h, None)
feeds = {n: rng.standard_normal(t.static_shape).astype(t.dtype.np)
         for n, t in st.Session("xla").compile(grads).inputs.items()}
found = []
for options in ({}, {"mesh": {"data": 8}, "shard": {"x": ("data", None)}}):
    c = st.Session("xla").compile(grads, **options)
    c.set_params({n: np.eye(4, dtype="f4") for n in c.params})
    found.append(c.run(feeds))
for got, want in zip(*found, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

k = st.Graph("between")  # an op of the host between two modules, 64-bit numbers, both axes of the mesh on one axis
x = k.input("x", (8, 8), "f64")
values, vectors = ops.eigh(x + ops.transpose(x, (1, 0)))
k.outputs(values * 2.0, ops.cumsum(x, axis=0))
given = rng.standard_normal((8, 8))
c = st.Session("xla").compile(k, mesh={"a": 2, "b": 4}, shard={"x": (("a", "b"),)})
assert c.host_steps == ["eigh"]
for got, want in zip(c.run(x=given), st.evaluate(k, {"x": given}), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-9)

m = st.Graph("experts")
x, w, ids = m.input("x", (8, 2)), m.input("w", (4, 2, 5)), m.input("ids", (8,), "i64")
c = st.Session("xla").compile(m.outputs(ops.grouped_matmul(x, w, ids)), mesh={"data": 8}, shard={"x": ("data",)})
feeds = {"x": np.ones((8, 2), "f4"), "w": rng.standard_normal((4, 2, 5)).astype("f4"), "ids": np.arange(8) % 4}
np.testing.assert_allclose(c.run(feeds)[0], st.evaluate(m, feeds)[0], rtol=1e-5)
try:
    c.run({**feeds, "ids": np.arange(8)})
except IndexRangeError as error:
    assert "expert 4 of 4" in str(error)
else:
    raise AssertionError("an expert that is not there")
try:
    st.Session("xla").compile(m, mesh={"data": 16})
except DeviceError as error:
    assert "a grid of 16 is not available; cpu has 8 here" in str(error)
else:
    raise AssertionError("16 of 8 devices")
print("equal")
"""


@needs_jax
def test_eight_devices_are_as_one() -> None:
    flags = "--xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr[-3000:]


def test_parts_of_arrays() -> None:
    spread = ThreadSpread((("data", 2), ("model", 3)), {})
    array = np.arange(24).reshape(4, 6)
    for cuts in ((), (("data",),), ((), ("model",)), (("model",), ("data",)), ((), ("model", "data"))):
        if cuts == (("model",), ("data",)):
            continue  # 4 rows do not go into 3 parts
        seen = [array[spread.part(cuts, array.shape, at)] for at in range(6)]
        assert np.unique(np.concatenate([s.reshape(-1) for s in seen])).tolist() == list(range(24))
        assert len({s.shape for s in seen}) == 1
    np.testing.assert_array_equal(array[spread.part(((), ("model", "data")), array.shape, 1)], array[:, 2:3])


def test_options_that_do_not_go_together() -> None:
    for options in (
        {"mesh": {}}, {"mesh": {"a": 0}}, {"mesh": 3}, {"shard": {"x": ("a",)}}, {"mesh": {"a b": 2}},
        {"mesh": {"a": 2}, "shard": {"x": ("b",)}}, {"mesh": {"a": 2}, "shard": {"x": ("a", "a")}},
    ):  # fmt: skip
        with pytest.raises(OptionError):
            CompileOptions(**options)  # type: ignore[arg-type]
    g = Graph("g")
    g.outputs(g.input("x", (2,)) + 1.0)
    with pytest.raises(OptionError, match="cpu is one device"):
        Session("cpu").compile(g, mesh={"a": 2})
    assert CompileOptions(mesh={"a": 2}).key != CompileOptions().key


@needs_jax
def test_cuts_of_what_is_not_there() -> None:
    g = Graph("g")
    g.outputs(g.input("x", (3,)) + 1.0)
    for shard in ({"y": ("a",)}, {"x": (None, "a")}):
        with pytest.raises(OptionError):
            Session("xla").compile(g, mesh={"a": 1}, shard=shard)
    (made,) = Session("xla").compile(g, mesh={"a": 1}, shard={"x": ("a",)}).run(x=np.zeros(3, np.float32))
    np.testing.assert_array_equal(made, 1)
