"""Plans on disk: the same results, the same text, and no use of a plan that is not the program's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import strata as st
from strata import ops
from strata.backends.llvm.codegen.kernels import plan_sources
from strata.config import using
from strata.core import Dim, sym
from strata.kernel import text
from strata.mir import Graph, constant, parse
from strata.ops import Extension, Extensions
from strata.runtime import CompilePipeline, Session
from strata.runtime.storage import stored
from strata.runtime.storage.stored import graph_digest, read_plan, stored_plan, write_plan

ROWS = sym("N", 1, 16)


def network(n: Dim = ROWS, scale: float = 2.0) -> Graph:
    g = Graph("net")
    x, w = g.input("x", (n, 8)), g.param("w", (8, 8))
    table = constant(np.arange(8, dtype=np.float32) * scale)
    q = ops.reshape(x @ w + table, (1, n, 8))
    return g.outputs(ops.attention(q, q, q, num_heads=2, layout="bsd"), ops.sort(x, axis=-1), x)


def test_read_back_is_the_same_plan() -> None:
    g = network()
    lir = CompilePipeline("cpu").compile(g).lir
    data = write_plan(lir, g)
    assert data is not None
    back = read_plan(data, g, lambda: lir.graph)
    assert back.summary() == lir.summary()
    assert st.parse(str(back)) == back
    assert back.symbols == lir.symbols
    assert [s.has_slides for s in back.schedule] == [s.has_slides for s in lir.schedule]
    assert back.kernels == lir.kernels
    assert back.fingerprint() == lir.fingerprint()
    x, w = np.random.default_rng(0).standard_normal((2, 8, 8)).astype(np.float32)
    outs = []
    for plan in (lir, back):
        c = Session("cpu").compile_lir(plan)
        c.set_param("w", w)
        outs.append(c.run(x=x))
    assert all(np.array_equal(a, b) for a, b in zip(*outs, strict=True))


def test_a_schedule_that_a_search_found_for_a_step_is_part_of_the_plan() -> None:
    lir = CompilePipeline("cpu").compile(network()).lir
    assert any(s.kernel is None and s.views is not None for s in lir.schedule)
    tuned = replace(lir, schedule=tuple(
        replace(s, schedule="attention 16 x 64; attention 32 x 32") if s.kernel is None else s for s in lir.schedule
    ))  # fmt: skip
    assert tuned.fingerprint() != lir.fingerprint()
    assert str(tuned) != str(lir)
    data = write_plan(tuned)
    assert data is not None
    assert st.parse(str(tuned)) == tuned
    for back in (st.parse(str(tuned)), read_plan(data, None, lambda: lir.graph)):
        assert [s.schedule for s in back.schedule] == [s.schedule for s in tuned.schedule]
        assert [s.views for s in back.schedule] == [s.views for s in tuned.schedule]


def test_layers_that_are_alike_are_read_once(monkeypatch) -> None:
    g = Graph("net")
    x = g.input("x", (4, 8))
    for _ in range(5):
        x = ops.relu(ops.sort(x, axis=-1) - 1.0)
    g.outputs(x)
    lir = CompilePipeline("cpu").compile(g).lir
    data = write_plan(lir, g)
    assert data is not None
    read: list[str] = []
    monkeypatch.setattr(stored, "parse", lambda text: (read.append(text), parse(text))[1])
    back = read_plan(data, g, lambda: lir.graph)
    assert [n.op.name for s in back.schedule if s.kernel is None for n in s.nodes] == ["sort"] * 5
    assert len(read) == 1


@pytest.mark.parametrize("shape", [(4, 3, 3, 3), (4, 3, 1, 1), (1, 3, 1, 1)])
def test_running_stored_code_reads_no_kernel(monkeypatch, shape: tuple[int, ...]) -> None:
    g = Graph("net")
    x = ops.conv(g.input("x", (1, 3, 8, 8)), g.param("w", shape), padding=((shape[-1] // 2,) * 2,) * 2)
    g.outputs(ops.softmax(ops.relu(x), axis=-1), ops.reduce_sum(x, axes=(0,)))
    lir = CompilePipeline("cpu").compile(g).lir
    w, x = (np.random.default_rng(0).standard_normal(s).astype(np.float32) for s in (shape, (1, 3, 8, 8)))
    made = Session("cpu").compile_lir(lir)
    made.set_param("w", w)
    expected = made.run(x=x)
    data = write_plan(lir, g)
    assert data is not None
    back = read_plan(data, g, lambda: lir.graph)
    with monkeypatch.context() as m:
        m.setattr(text, "parse_kernel", lambda _: pytest.fail("a kernel was read"))
        m.setattr(stored, "parse", lambda _: pytest.fail("an op was read"))
        again = Session("cpu").compile_lir(back)
        again.set_param("w", w)
        assert all(np.array_equal(a, b) for a, b in zip(again.run(x=x), expected, strict=True))
        keys = [[source.key() for source in plan_sources(plan, plan.target)[0].values()] for plan in (lir, back)]
        assert keys[0] == keys[1]
    slides = [s.slides for s in lir.schedule if s.has_slides]
    assert bool(slides) == (shape[-1] > 1)
    assert [str(s.slides.op) for s in back.schedule if s.has_slides] == [str(n.op) for n in slides]


@pytest.mark.parametrize(
    "other",
    [
        network(scale=3.0),
        network(8),
        network(sym("N", 1, 17)),
        parse(str(network()).replace("num_heads = 2", "num_heads = 4").replace("kv_heads = 2", "kv_heads = 4")
              .replace("head_dim = 4", "head_dim = 2")),
        parse(str(network()).replace("@net", "@other")),
    ],
)  # fmt: skip
def test_other_programs_have_other_keys(other: Graph) -> None:
    assert graph_digest(other) != graph_digest(network())
    assert graph_digest(network()) == graph_digest(network())


def test_hits_are_used_and_plan_again_when_looked_at(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(stored, "WORTH_SECONDS", 0.0)
    monkeypatch.setattr(stored, "code_version", lambda: "fixed")
    x = np.ones((3, 8), np.float32)
    with using(cache_dir=tmp_path):
        made = []
        for _ in range(2):
            c = Session("cpu").compile(network())
            c.set_param("w", np.eye(8, dtype=np.float32))
            made.append((c, c.run(x=x)))
        first, second = made
        assert first[0]._replan is None
        assert second[0]._replan is not None
        assert all(np.array_equal(a, b) for a, b in zip(first[1], second[1], strict=True))
        assert str(second[0].lir.graph) == str(first[0].lir.graph)
        assert second[0]._replan is None
        assert str(second[0].explain()).startswith("net:")


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"not json\n", b'{"format": 99}\n'])
def test_unreadable_plans_are_made_again(tmp_path, damage: bytes, caplog) -> None:
    with using(cache_dir=tmp_path):
        g = network()
        key = "ab" * 32
        stored.default_store().put(key, damage)
        lir, is_stored = stored_plan(key, g, lambda: CompilePipeline("cpu").compile(g).lir)
    assert not is_stored
    assert len(lir.schedule) > 0
    assert "cannot be read" in caplog.text


def test_programs_with_functions_of_users_are_not_kept() -> None:
    with Extensions().active() as known:
        known.register(Extension("twice", infer=lambda x, attrs: x, execute=lambda x, attrs: 2 * x))
        g = Graph("g")
        g.outputs(ops.custom("twice", g.input("x", (3,))))
        assert graph_digest(g) is None
        np.testing.assert_array_equal(Session("cpu").compile(g).run(x=np.ones(3, np.float32))[0], 2)


WARM = """
import sys
import strata.ops
from strata.cache import default_store
from strata.runtime import Session
from tests.counts import calls
from tests.programs.graphs import encoder
g, s, made = encoder(6, 1, 32), Session("cpu"), []
work = calls(lambda: made.append(s.compile(g)))
(c,) = made
puts = sum(e.what == "put" for e in default_store().events)
print(work, puts, c._replan is not None, "llvmlite.binding" in sys.modules)
"""


@pytest.mark.slow
def test_a_warm_start_does_little(tmp_path) -> None:
    """Nothing is planned or made again, and the code generator is not loaded. In seconds: benchmarks/costs.py."""
    env = {**os.environ, "STRATA_CACHE_DIR": str(tmp_path)}
    told = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, env=env, check=True)
        told.append(done.stdout.split())
    cold, warm = told
    assert int(cold[1]) > 0
    assert cold[2] == "False"
    assert warm[1:] == ["0", "True", "False"]
    assert int(warm[0]) < 40_000
    assert int(warm[0]) < int(cold[0]) / 10


def test_entries_that_say_something_else_raise_what_is_expected(rng: np.random.Generator) -> None:
    g = network()
    data = write_plan(CompilePipeline("cpu").compile(g).lir, g)
    assert data is not None
    line, _, rest = data.partition(b"\n")
    others = (None, 0, -1, 10**30, "", "x", [], {}, [1], {"a": 1}, 1.5, True, "f32[", "((((")
    for i in range(400):
        head = json.loads(line)
        part: Any = head
        for _ in range(int(rng.integers(1, 5))):  # walk down, and change what is there
            keys = list(part) if isinstance(part, dict) else range(len(part))
            key = keys[int(rng.integers(len(keys)))]
            if not isinstance(part[key], dict | list) or not part[key]:
                break
            last, part = part, part[key]
        else:
            part = last
        part[key] = others[i % len(others)]
        with suppress(*stored.DAMAGED):
            read_plan(json.dumps(head).encode() + b"\n" + rest, g, lambda: g)
