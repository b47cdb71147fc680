"""One contract for all backends: nothing is asked for that the base classes lack, and the guide's backends keep it."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.backends import Backend, Capabilities, Executable, backend_for, register_backend, registry
from strata.backends.llvm.backend import CpuBackend
from strata.backends.llvm.runtime.executable import CpuExecutable
from strata.backends.offload import OffloadExecutable
from strata.backends.reference import ReferenceBackend, ReferenceExecutable
from strata.backends.stablehlo.executable import XlaBackend, XlaExecutable
from strata.backends.triton.backend import TritonBackend
from strata.backends.wgsl.backend import WgpuBackend
from strata.config import using
from strata.core import sym
from strata.errors import CompileError, OptionError, RunError, StrataError
from strata.lir import may_take_over
from strata.mir import REGISTRY, Graph, evaluate
from strata.runtime import CompiledGraph, Session, watch_finite
from strata.testing.backend_suite import cases, run_case
from tests.source import nodes_of

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs/guides/add-a-backend.md"
PROBES = ("getattr", "hasattr", "delattr", "setattr")
ASKED = re.compile(r"\b_?(backend|executable|driver|archive)(_for\(.*\))?$", re.IGNORECASE)
BACKENDS = (CpuBackend, TritonBackend, WgpuBackend, XlaBackend, ReferenceBackend)
EXECUTABLES = (CpuExecutable, OffloadExecutable, XlaExecutable, ReferenceExecutable)


# nothing is probed


def probes(program: str) -> Iterator[tuple[int, str]]:
    """Calls that ask whether a backend or an executable has something."""
    for node in nodes_of(program, PROBES):
        is_probe = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in PROBES
        if is_probe and ASKED.search(ast.unparse(node.args[0])):  # type: ignore[attr-defined]
            yield node.lineno, ast.unparse(node)  # type: ignore[attr-defined]


def test_nobody_probes_a_backend_or_an_executable() -> None:
    files = [p for folder in ("strata", "tests", "benchmarks", "docs") for p in (ROOT / folder).rglob("*.py")]
    assert [(path.name, *found) for path in files for found in probes(path.read_text("utf-8"))] == []


def test_the_search_for_probes_finds_them() -> None:
    lines = ['getattr(self.backend, "x", 0)', 'hasattr(made._executable, "y")', 'getattr(backend_for(d), "z", None)']
    assert len(list(probes("\n".join(lines)))) == 3
    assert not list(probes('getattr(np, "backend")\nhasattr(os, "fork")'))


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_capability_comes_with_its_method(kind: type[Backend]) -> None:
    said = kind.capabilities
    assert isinstance(said, Capabilities)
    assert said.searches == (kind.tune is not Backend.tune)
    assert said.spreads == (kind.compile_spread is not Backend.compile_spread)


def parameters(fn: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(fn).parameters)


@pytest.mark.parametrize("kind", [*BACKENDS, *EXECUTABLES])
def test_what_is_overridden_is_called_as_in_the_base_class(kind: type) -> None:
    base = Backend if issubclass(kind, Backend) else Executable
    for name, member in vars(base).items():
        if inspect.isfunction(member) and name != "__init__":
            assert parameters(kind.__dict__.get(name, member)) == parameters(member), name


def test_executables_that_tell_of_steps_say_so() -> None:
    for kind in EXECUTABLES:
        assert kind.observes_steps == (kind.run_observed is not Executable.run_observed)


# what is no backend


def test_what_is_no_backend_is_refused_with_what_it_lacks() -> None:
    class Duck:
        name = "duck"

        def compile(self, lir: Any) -> Any: ...

    class Nameless(ReferenceBackend):
        name = ""

    with pytest.raises(OptionError, match=r"a Duck, which is not a strata\.backends\.Backend   "):
        register_backend("duck", Duck())  # type: ignore[arg-type]
    with pytest.raises(
        OptionError, match=r"a dict, which is not a strata\.backends\.Backend and has no compile and no"
    ):
        register_backend("duck", {})  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="a Nameless without a name"):
        register_backend("duck", Nameless())
    with pytest.raises(TypeError, match="abstract"):
        Backend()  # type: ignore[abstract]
    assert "duck" not in registry._made


# the guide's backends


@pytest.fixture(scope="module")
def guide() -> Iterator[dict[str, Any]]:
    """The names that the guide's programs define; its devices are there meanwhile."""
    names: dict[str, Any] = {"__name__": "__main__"}
    before = set(registry._made)
    for block in runpy.run_path(str(ROOT / "docs/check.py"))["blocks"](GUIDE):
        exec(compile(block.code, str(GUIDE), "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    yield names
    for name in ("counting", "interpreting"):
        if name not in before:
            registry._made.pop(name)


DEVICES = ("counting", "interpreting")
on_both = pytest.mark.parametrize("device", DEVICES)
everywhere = pytest.mark.parametrize("device", ["cpu", "reference", *DEVICES])
pytestmark = pytest.mark.usefixtures("guide")


def layer() -> Graph:
    g = Graph("layer")
    x, w, b = g.input("x", (sym("n", 1, 16), 4)), g.param("w", (4, 4)), g.param("b", (4,))
    return g.outputs((x @ w + b).gelu(), x.softmax(-1))


def weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"w": rng.standard_normal((4, 4), np.float32), "b": rng.standard_normal(4, np.float32)}


def agrees(compiled: CompiledGraph, x: np.ndarray, params: dict[str, np.ndarray]) -> None:
    for got, want in zip(compiled.run(x=x), evaluate(layer(), {"x": x, **params}), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@on_both
@pytest.mark.parametrize(
    "op", ["add", "matmul", "softmax", "reduce_max", "gather", "transpose", "sort", "conv", "cumsum", "where", "cast"]
)
def test_samples_of_ops_agree_with_the_oracle(device: str, op: str) -> None:
    if op not in REGISTRY:
        op = next(cls.name for cls in REGISTRY.classes() if cls.name.startswith(op))
    for case in list(cases([REGISTRY[op]]))[:40]:
        run_case(device, case)


@everywhere
def test_sizes_clones_and_parameters(device: str, rng: np.random.Generator) -> None:
    first, second = weights(rng), weights(rng)
    c = Session(device).compile(layer())
    c.set_params(first)
    for n in (1, 3, 16):
        agrees(c, rng.standard_normal((n, 4), np.float32), first)
    other = c.clone()
    assert other._executable is c._executable
    x = rng.standard_normal((5, 4), np.float32)
    other.set_params(second)
    agrees(other, x, second)
    agrees(c, x, first)
    third = other.clone()
    c.set_param("b", second["b"])
    agrees(c, x, {**first, "b": second["b"]})
    agrees(third, x, second)
    agrees(other, x, second)


@everywhere
def test_traces_profiles_and_reports(device: str, rng: np.random.Generator, tmp_path: Path) -> None:
    c = Session(device).compile(layer())
    c.set_params(weights(rng))
    x = rng.standard_normal((3, 4), np.float32)
    with st.trace(tmp_path / "trace.json"):
        c.run(x=x)
    names = [e["name"] for e in json.loads((tmp_path / "trace.json").read_text("utf-8"))]
    labels = [step.label for step in c.lir.schedule]
    assert (set(labels) <= set(names)) == c._executable.observes_steps
    assert "kernel" in str(c.explain()) or labels[0] in str(c.explain())
    assert c.memory.packed >= 0
    assert c.memory.scratch is not None
    assert st.dispatch_report(layer(), device).compile_ready
    assert bool(c.profile(x=x))
    assert isinstance(c.host_steps, list)
    with pytest.raises(OptionError, match="O154"):
        c.stablehlo()
    g = Graph("bad")
    bad = Session(device).compile(g.outputs(g.input("x", (2,)).log() + 1.0))
    with watch_finite(), pytest.raises(RunError, match="log makes NaN"):
        bad.run(x=np.array([1, -1], np.float32))


@on_both
def test_what_a_backend_does_not_say_it_can_is_refused(device: str, tmp_path: Path) -> None:
    g = Graph("g")
    g.outputs(g.input("x", (8, 2)) * 2.0)
    with pytest.raises(OptionError, match="no search"):
        Session(device).compile(g, tune="beam")
    with pytest.raises(OptionError, match="one device"):
        Session(device).compile(g, mesh={"data": 2})
    with pytest.raises(OptionError, match="none to keep"):
        Session(device).compile(g).save(tmp_path / "bundle")


def test_ops_and_types_that_a_backend_refuses(guide: dict[str, Any]) -> None:
    class Narrow(guide["Counting"]):  # type: ignore[misc]
        capabilities = Capabilities(dtypes=frozenset({"f32"}), host_steps=False)

    register_backend("narrow", Narrow())
    try:
        g = Graph("g")
        g.outputs(g.input("x", (2,)).sin(), g.input("y", st.f64[2]) + 1.0)
        with pytest.raises(CompileError, match="counting cannot run 2") as error:
            Session("narrow").compile(g)
        assert "does not hold f64" in str(error.value)
        assert "sin" in str(error.value)
    finally:
        registry._made.pop("narrow")


def programs() -> dict[str, Graph]:
    made = {}
    for name, shape, build in (
        ("a view of what is written over", (2, 2), lambda x: (x + x.T.sum(axis=1), x.T)),
        ("part of it", (4,), lambda x: (x + x[1:3].sum(), x[1:3])),
        ("a product", (2, 2), lambda x: (x + x.T @ x.T, x.T)),
        ("one step", (4,), lambda x: (x * 2.0 + 1.0,)),
        ("two results", (4,), lambda x: (x * 2.0, (x * 2.0).sum())),
    ):
        g = Graph("donated")
        made[name] = g.outputs(*build(g.input("x", shape)))
    return made


@everywhere
@pytest.mark.parametrize("name", list(programs()))
def test_results_may_lie_over_inputs(device: str, name: str) -> None:
    c = Session(device).compile(programs()[name])
    shape = c.inputs["x"].static_shape
    x = np.arange(4, dtype=np.float32).reshape(shape)
    want = [a.copy() for a in c.run(x=x.copy())]
    taken = [i for i in range(len(want)) if may_take_over(c.lir, "x", i)]
    for i in taken:
        given = x.copy()
        got = c.run_over({"x": given}, {i: given})
        assert got[i] is given
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


@everywhere
def test_arguments_that_are_given_up_to_jit(device: str) -> None:
    step = st.jit(lambda x: (x + x.T.sum(axis=1), x.T), donate_argnums=(0,))
    double = st.jit(lambda x: x * 2.0)  # what it makes, nobody else has seen
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    with using(device=device):
        for _ in range(3):
            total, turned = step(double(st.asarray(x)))
            np.testing.assert_array_equal(turned.numpy(), 2 * x.T)
            np.testing.assert_array_equal(total.numpy(), 2 * x + 2 * x.sum(axis=0))


@everywhere
def test_caches_are_updated_in_place(device: str) -> None:
    g = Graph("g")
    cache = g.input("cache", (6, 2))
    made = st.ops.dynamic_update_slice(cache, g.input("new", (1, 2)), [g.input("at", st.i32[()]), 0])
    c = Session(device).compile(g.outputs(made, made.sum()))
    c.bind("cache", np.zeros((6, 2), np.float32))
    c.feed("cache", 0)
    for at in range(3):
        total = c.run(new=np.full((1, 2), at + 1, np.float32), at=np.int32(at))[1]
    assert total == 2 * (1 + 2 + 3)
    np.testing.assert_array_equal(c.read("cache")[:4, 0], [1, 2, 3, 0])


def test_the_runtime_asks_for_nothing_else(guide: dict[str, Any], rng: np.random.Generator) -> None:
    """Backends and executables that note every question which the base classes do not answer."""
    asked: list[str] = []

    class Noting:
        def __getattr__(self, name: str) -> Any:
            if not name.startswith("__"):
                asked.append(name)
            raise AttributeError(name)

    class Executing(Noting, guide["CountingExecutable"]):  # type: ignore[misc]
        pass

    class Asked(Noting, guide["Counting"]):  # type: ignore[misc]
        def compile(self, lir: Any) -> Any:
            return Executing(lir)

    register_backend("asked", Asked())
    try:
        c = Session("asked").compile(layer(), memory_limit=1 << 20)
        c.set_params(weights(rng))
        x = np.ones((2, 4), np.float32)
        c.run(x=x)
        c.run_into({"x": x}, [np.empty((2, 4), np.float32), np.empty((2, 4), np.float32)])
        c.clone().set_params(weights(rng))
        with watch_finite():
            c.run(x=x)
        for use in (c.explain, c.profile, c.stablehlo, lambda: c.memory, lambda: c.host_steps, lambda: c.save("x")):
            with contextlib.suppress(StrataError):  # which says that it cannot
                use()
        assert str(st.Device("asked").full_name) == "asked"
        assert st.pick_device(layer(), ["asked", "cpu"]) in ("asked", "cpu")
        assert "asked" in st.devices()
        st.dispatch_report(layer(), "asked")
        st.CompilePipeline("asked").inspect(layer())
        assert asked == []
    finally:
        registry._made.pop("asked")


def test_built_in_backends_are_of_the_contract() -> None:
    for name in ("cpu", "reference"):
        assert isinstance(backend_for(name), Backend)
        g = Graph("g")
        c = Session(name).compile(g.outputs(g.input("x", (2,)) + 1.0))
        assert isinstance(c._executable, Executable)
