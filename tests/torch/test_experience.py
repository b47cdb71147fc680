"""What a compile is like: sizes as contracts, calls that do not wait, explanations, other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import strata as st
from strata.core import symbols
from strata.torch.reports import REPORTS


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    st.torch.register()
    torch._dynamo.reset()
    REPORTS.clear()
    torch.manual_seed(0)
    yield
    assert st.torch.wait(60)
    torch._dynamo.reset()


def small() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).eval()


def compiled_graphs() -> list[Any]:
    return [program() for g in st.torch.report().graphs for program in g.programs]


def test_bounds_of_a_marked_size_are_a_contract() -> None:
    model = small()
    run: Any = torch.compile(model, backend="strata", options={"strict": True})
    with torch.no_grad():
        for n in (9, 64, 2, 33):
            x = torch.randn(n, 8)
            torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
            torch.testing.assert_close(run(x), model(x))
    (graph,) = compiled_graphs()
    (size,) = {name for given in graph.source.inputs for d in given.type.shape for name in symbols(d)}
    assert f"{size} in 2..64" in str(graph.source)


@pytest.mark.parametrize("first", [1, 6])
def test_one_compile_serves_one_too(first: int) -> None:
    model = small()
    run: Any = torch.compile(model, backend="strata", dynamic=True, options={"strict": True})
    shapes: Any = torch.fx.experimental._config
    with torch.no_grad(), shapes.patch(backed_size_oblivious=False):
        st.torch.register(any_size=True)
        for n in (first, 9, 64, 1, 2):
            x = torch.randn(n, 8)
            torch.testing.assert_close(run(x), model(x))
    assert len(compiled_graphs()) == 1


def test_sizes_that_torch_knows_nothing_of() -> None:
    model = small()
    run: Any = torch.compile(model, backend="strata", options={"strict": True})
    with torch.no_grad():
        for n in (5, 1, 8):
            x = torch.randn(n, 8)
            torch._dynamo.decorators.mark_unbacked(x, 0)
            torch.testing.assert_close(run(x), model(x))
    assert len(compiled_graphs()) == 1


def test_the_first_call_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    may_compile, compile_now = threading.Event(), st.Session.compile

    def compile_later(*args: Any, **options: Any) -> Any:
        assert may_compile.wait(60)
        return compile_now(*args, **options)

    monkeypatch.setattr(st.Session, "compile", compile_later)
    model, x = small().train(), torch.randn(4, 8)
    run: Any = torch.compile(model, backend="strata", options={"background": True, "strict": True})

    def gradients(f: Any) -> list[torch.Tensor]:
        model.zero_grad()
        f(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients(model)
    torch.testing.assert_close(gradients(run), expected)
    found = st.torch.report().graphs
    assert [g.meanwhile for g in found] == [1, 1]
    may_compile.set()
    assert st.torch.wait()
    torch.testing.assert_close(gradients(run), expected)
    assert [g.meanwhile for g in found] == [1, 1]
    assert [len(g.programs) for g in found] == [1, 1]


def test_a_compile_in_the_background_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(st.Session, "compile", fail)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    run: Any = torch.compile(f, backend="strata", options={"background": True})
    x = torch.randn(3)
    torch.testing.assert_close(run(x), x.sin() * 2)
    assert st.torch.wait()
    torch.testing.assert_close(run(x), x.sin() * 2)
    assert "by nothing" in st.torch.report().explain()


def test_explanations() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(x.sin() @ x).abs() * 2

    run: Any = torch.compile(f, backend="strata")
    run(torch.randn(3, 3))
    run(torch.randn(4, 4))
    text = st.torch.report().explain()
    assert "inference graph, trace 0/0" in text
    assert "traced again, because" in text
    assert "stays in torch: aten.linalg_eig" in text
    assert "steps a run" in text


def test_an_option_that_is_no_flag() -> None:
    with pytest.raises(Exception, match="background is True or False"):
        torch.compile(lambda x: x + 1, backend="strata", options={"background": 3})(torch.ones(2))


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(Exception, match="'tpu' is a target to plan for, not a device"):
        torch.compile(lambda x: x + 1, backend="strata", options={"device": "tpu"})(torch.ones(2))


PROGRAM = """
import sys
import torch
import strata as st
from strata.cache import default_store
st.torch.register()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 3)).eval()
x = torch.randn(4, 8)
with torch.no_grad():
    torch.testing.assert_close(torch.compile(model, backend="strata", options={"strict": True})(x), model(x))
# plans are kept where they were slow to make
made = [e for e in default_store().events if e.what == "put" and e.about["kind"] != "plan"]
print(len(made), "llvmlite.binding" in sys.modules)
"""


def test_another_process_compiles_nothing_and_no_compiler_is_needed(tmp_path: Path) -> None:
    env = {**os.environ, "STRATA_CACHE_DIR": str(tmp_path), "PATH": ""}
    cold, warm = [
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, check=True)
        for _ in range(2)
    ]
    assert int(cold.stdout.split()[0]) > 0
    assert warm.stdout.split() == ["0", "False"]
