"""Settings of a call, plans in branches, planner modes, caches, beam search and arrays on disk, for lazy tensors."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.config import Config, config, using
from strata.errors import ConfigError, FileError, OptionError, ShapeError
from strata.tensor import lazy_cache


def settings(**changes: object) -> Config:
    return replace(config(), **changes)  # type: ignore[arg-type]


def two_branches(rng: np.random.Generator, size: int = 160) -> tuple[st.Tensor, st.Tensor]:
    a, b = (st.asarray(rng.standard_normal((size, size)).astype(np.float32)) for _ in range(2))
    return ((a @ a).tanh() @ a).sum(axis=0), ((b @ b).sin() @ b).max(axis=0)


# a config per call


def test_a_config_per_call(rng: np.random.Generator) -> None:
    # whole numbers: sums are exact, so that NumPy, which interprets small programs, gives the bits that kernels give
    x = st.asarray(rng.integers(-9, 9, (8, 8)).astype(np.float32))
    want = (x @ x + 1.0).numpy()
    own = settings(memory_planner="off", num_threads=1)
    y, z = x @ x + 1.0, x @ x + 1.0
    assert y.realize_with(own) is y
    assert st.realize_with(own, [z, x])[0] is z
    plan = (x @ x + 1.0).prepare_with(own)
    plan.execute()
    both = st.prepare_with(own, x @ x + 1.0, (x - 2.0).exp())
    both.execute()
    for made in (y.numpy(), z.numpy(), plan.output(0), both.output(0)):
        np.testing.assert_array_equal(made, want)
    assert config().memory_planner == "arena"
    with pytest.raises(OptionError, match="is not a tensor"):
        st.prepare_with(own, 3.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        y.realize_with({"num_threads": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["arena", "remap", "off"])
def test_planner_modes_give_the_same_bits(mode: str, rng: np.random.Generator) -> None:
    x = st.asarray(rng.standard_normal((96, 96)).astype(np.float32))

    def expression() -> st.Tensor:
        a = (x @ x).softmax(axis=1)
        return (a @ x).softmax(axis=0) @ a

    plain, planned = expression().prepare(), expression().prepare_with(settings(memory_planner=mode))
    plain.execute()
    planned.execute()
    np.testing.assert_array_equal(planned.output(0), plain.output(0))
    assert planned._compiled is not None
    assert planned._compiled.lir.memory.mode == mode


def test_settings_that_are_wrong() -> None:
    for name, bad in (("memory_planner", "pool"), ("tune", "fast"), ("beam_width", 0), ("beam_seconds", -1.0),
                      ("lazy_cache", 1), ("lazy_cache_limit", 0), ("concurrent", "yes")):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            settings(**{name: bad})


# branches


def spans(path: Path) -> list[dict[str, Any]]:
    return [e for e in json.loads(path.read_text()) if e.get("ph") == "X"]


@pytest.mark.parametrize("joined", [False, True])
def test_independent_branches_overlap_and_keep_their_bits(joined: bool, tmp_path: Path) -> None:
    apart = []
    for t in two_branches(np.random.default_rng(0), 400):
        alone = t.prepare()
        alone.execute()
        apart.append(np.array(alone.output(0)))
    x, y = two_branches(np.random.default_rng(0), 400)
    plan = (x + y).prepare() if joined else st.prepare(x, y)
    assert plan.branches == 2
    with using(num_threads=2):
        plan.execute()
        overlaps = False
        for _ in range(40):  # whether two threads meet is the system's business: once is enough
            with st.trace(tmp_path / "run.json"):
                plan.execute()
            one, other = (e for e in spans(tmp_path / "run.json") if e["name"] == "run branch")
            begin = max(one["ts"], other["ts"])
            end = min(one["ts"] + one["dur"], other["ts"] + other["dur"])
            assert one["tid"] != other["tid"]
            overlaps = overlaps or begin < end
            if overlaps:
                break
    assert overlaps
    together = [np.array(plan.output(i)) for i in range(plan.num_outputs)]
    with using(concurrent=False):
        plan.execute()
    for made, again in zip(together, plan.outputs, strict=True):
        np.testing.assert_array_equal(made, again)
    want = [apart[0] + apart[1]] if joined else apart
    for made, alone in zip(together, want, strict=True):
        np.testing.assert_array_equal(made, alone)
    assert len(plan.kernels) >= 4
    assert "steps" in str(plan)


def test_what_depends_on_each_other_or_is_small_is_one_program(rng: np.random.Generator) -> None:
    x, y = two_branches(rng, 8)
    assert (x + y).prepare().branches == 1
    a = st.asarray(rng.standard_normal((160, 160)).astype(np.float32))
    shared = a @ a
    assert st.prepare((shared.tanh() @ a).sum(), (shared.sin() @ a).sum()).branches == 1


def test_python_steps_do_not_run_beside_others(rng: np.random.Generator) -> None:
    """A kernel that is a Python function may not be safe: its plan runs one branch after the other."""
    running, most = 0, 0

    @st.custom_op
    def slow(x):
        nonlocal running, most
        running += 1
        most = max(most, running)
        made = np.sqrt(np.abs(np.asarray(x)))
        running -= 1
        return made

    a, b = (st.asarray(rng.standard_normal((160, 160)).astype(np.float32)) for _ in range(2))
    plan = st.prepare((slow(a @ a) @ a).sum(), (slow(b @ b) @ b).sum())
    with using(num_threads=2):
        for _ in range(5):
            plan.execute()
    assert most == 1


# caches


def test_the_cache_of_lazy_programs_has_a_cap_and_an_off_switch(rng: np.random.Generator) -> None:
    x = st.asarray(rng.standard_normal((5, 7)).astype(np.float32))
    lazy_cache.clear()
    with using(lazy_cache_limit=2):
        kept = [(x * float(i)).sum(axis=0).exp().numpy() for i in range(5)]
        assert len(lazy_cache._programs.keys()) <= 2
    lazy_cache.clear()
    with using(lazy_cache=False):
        made = [(x * float(i)).sum(axis=0).exp().numpy() for i in range(5)]
        assert lazy_cache._programs.keys() == []
    for one, other in zip(kept, made, strict=True):
        np.testing.assert_array_equal(one, other)


# beam search


def test_beam_search_from_lazy_tensors(
    rng: np.random.Generator, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    x = st.asarray(rng.standard_normal((64, 257)).astype(np.float32))
    heuristic = (x.exp() * 2.0 + x).sum(axis=1).prepare()
    heuristic.execute()
    plain = heuristic.output(0)
    own = settings(tune="beam", beam_width=2, beam_seconds=0.2, beam_log=True, cache_dir=tmp_path)
    with caplog.at_level(logging.INFO, logger="strata"):
        plan = (x.exp() * 2.0 + x).sum(axis=1).prepare_with(own)
    plan.execute()
    np.testing.assert_array_equal(plan.output(0), plain)
    assert any("beam search of 2 wide" in r.getMessage() for r in caplog.records)
    caplog.clear()
    few = settings(tune="beam", beam_max_ops=1, beam_log=True, cache_dir=tmp_path / "other")
    with caplog.at_level(logging.INFO, logger="strata"):
        (x.exp() * 2.0 + x).sum(axis=1).prepare_with(few)
    assert not any("beam search" in r.getMessage() for r in caplog.records)


# files


def test_arrays_on_disk(tmp_path: Path, rng: np.random.Generator) -> None:
    data = rng.standard_normal((6, 5)).astype(np.float32)
    path = tmp_path / "data.bin"
    path.write_bytes(b"head" + data.tobytes() + b"!")
    x = st.open_array(path, "f32", (6, 5), 4)
    np.testing.assert_array_equal(x.numpy(), data)
    np.testing.assert_array_equal((x[1:3] * 2.0).numpy(), data[1:3] * 2)
    assert not x.numpy().flags.writeable
    np.testing.assert_array_equal(st.open_array(path, "u8", 4).numpy(), np.frombuffer(b"head", np.uint8))
    shifted = st.open_array(str(path), np.float32, (2,), 5)  # not at a multiple of 4: a copy
    np.testing.assert_array_equal(shifted.numpy(), np.frombuffer(path.read_bytes(), np.float32, 2, 5))
    assert st.open_array(path, "f64", (0, 3)).shape == (0, 3)
    with pytest.raises(FileError, match=r"needs 125 bytes, the file has 125|needs 128 bytes"):
        st.open_array(path, "f32", (6, 5), 8)
    with pytest.raises(FileError, match="the offset is a number of bytes"):
        st.open_array(path, "f32", (1,), -4)
    with pytest.raises(ShapeError):
        st.open_array(path, "f32", (-1,))
    with pytest.raises(FileError, match="open_array"):
        st.open_array(tmp_path / "none.bin", "f32", (1,))
