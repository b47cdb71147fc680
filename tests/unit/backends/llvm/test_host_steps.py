"""Steps that run on the host read what the plan says they read: views of a buffer, too."""

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from strata import ops
from strata.backends.llvm.ir import overrides
from strata.core import sym
from strata.mir import Graph, evaluate
from strata.runtime import Session


@pytest.fixture
def without_native_attention(monkeypatch):
    """Attention that no hand-written kernel takes, though its step is planned to read views."""
    import_module("strata.backends.llvm.attention.steps")  # registers its own before
    monkeypatch.setitem(overrides._MAKERS, "attention", lambda node, target, views=None: None)


@pytest.mark.parametrize("rows", [5, sym("S", 1, 16)], ids=["static", "symbolic"])
def test_slices_of_a_product(rows, without_native_attention) -> None:
    g = Graph("host")
    whole = g.input("x", (2, rows, 8)) @ g.param("w", (8, 48))
    q, k, v = (ops.narrow(whole, -1, 16 * i, 16) for i in range(3))
    graph = g.outputs(ops.attention(q, k, v, num_heads=4, layout="bsd"))
    compiled = Session("cpu").compile(graph)
    (step,) = [s for s in compiled.lir.schedule if s.label == "attention"]
    assert step.views is not None
    assert len(set(step.inputs)) == 1  # three views of one buffer
    rng = np.random.default_rng(0)
    w = rng.standard_normal((8, 48)).astype(np.float32)
    compiled.set_params({"w": w})
    for count in (5,) if isinstance(rows, int) else (1, 5, 16):
        x = rng.standard_normal((2, count, 8)).astype(np.float32)
        (want,) = evaluate(graph, {"x": x, "w": w}, wide=True)
        np.testing.assert_allclose(compiled.run({"x": x})[0], want, rtol=1e-4, atol=1e-4)
    profile = compiled.profile({"x": x})
    assert any(row.label == "attention" for row in profile.rows)


def test_views_of_what_is_computed_once(without_native_attention) -> None:
    g = Graph("host")
    whole = g.param("a", (1, 3, 8)) @ g.param("w", (8, 48))
    q, k, v = (ops.narrow(whole, -1, 16 * i, 16) for i in range(3))
    graph = g.outputs(ops.attention(q, k, v, num_heads=4, layout="bsd") + g.input("x", (1, 3, 16)))
    rng = np.random.default_rng(0)
    feeds = {
        n: rng.standard_normal(s).astype(np.float32) for n, s in (("a", (1, 3, 8)), ("w", (8, 48)), ("x", (1, 3, 16)))
    }
    compiled = Session("cpu").compile(graph)
    compiled.set_params({n: feeds[n] for n in ("a", "w")})
    (want,) = evaluate(graph, feeds, wide=True)
    np.testing.assert_allclose(compiled.run({"x": feeds["x"]})[0], want, rtol=1e-4, atol=1e-4)


def test_families_register_the_ops_that_they_are_loaded_for() -> None:
    folder = Path(overrides.__file__).parent.parent
    for family, names in overrides.FAMILIES.items():
        import_module(f"strata.backends.llvm.{family}")
        made = {name for name, maker in overrides._MAKERS.items() if maker.__module__.endswith(f".{family}")}
        assert made == set(names)
    registering = {f"{f.parent.name}.{f.stem}" for f in folder.rglob("*.py") if "\n@override(" in f.read_text("utf-8")}
    assert registering == set(overrides.FAMILIES)
