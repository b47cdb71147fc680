"""The short way into programs: same results, and never an array that somebody still has."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.backends.llvm.executor.fast_call_code import HITS, TURNS
from strata.backends.llvm.executor.python_objects import CAN_CHECK_ARRAYS
from strata.backends.llvm.runtime import fast_call as short
from strata.backends.llvm.runtime.fast_call import NOT_READY, PATIENCE, NativeFastCall

pytestmark = pytest.mark.skipif(not CAN_CHECK_ARRAYS, reason="this Python lays its objects out in another way")


def _program(shape: tuple[int, ...] = (6, 5), dtype: str = "f32") -> Any:
    g = st.Graph("quick")
    x, y = g.input("x", shape, dtype), g.input("y", shape, dtype)
    g.outputs(x + y, x * y)
    return st.Session("cpu").compile(g)


def _arrays(rng: np.random.Generator, shape: tuple[int, ...] = (6, 5)) -> dict[str, np.ndarray]:
    return {n: rng.standard_normal(shape).astype(np.float32) for n in "xy"}


def _ready(compiled: Any, feeds: dict[str, np.ndarray]) -> NativeFastCall:
    for _ in range(short.FIRST_RUNS + TURNS):  # the graph remembers the last results: another has to be kept
        compiled.run(feeds)
    quick: NativeFastCall = compiled._fast_call
    assert quick.asked != NOT_READY
    return quick


def _hits(quick: NativeFastCall) -> int:
    return int(quick._words[HITS])


def _check(made: Any, feeds: dict[str, np.ndarray]) -> None:
    x, y = feeds["x"], feeds["y"]
    np.testing.assert_array_equal(made[0], x + y)
    np.testing.assert_array_equal(made[1], x * y)


@pytest.mark.parametrize("shape", [(), (1,), (6, 5), (64, 300)])
def test_results_are_those_of_the_long_way(shape, rng):
    compiled = _program(shape)
    quick = _ready(compiled, _arrays(rng, shape))
    before = _hits(quick)
    for _ in range(5):
        feeds = _arrays(rng, shape)
        _check(compiled.run(feeds), feeds)
        _check(compiled.run(**feeds), feeds)
        _check(compiled.run_ready([feeds["x"], feeds["y"]]), feeds)
    assert _hits(quick) == before + 15


@pytest.mark.parametrize("reads_lists", [True, False])
def test_where_objects_are_laid_out_in_another_way_the_long_way_does_it_all(reads_lists, monkeypatch, rng):
    """The plain fallback: nothing reads an object's memory, and results and errors are the same."""
    monkeypatch.setattr("strata.backends.llvm.runtime.fast_call.CAN_CHECK_ARRAYS", False)
    monkeypatch.setattr("strata.backends.llvm.runtime.executable.IS_DIRECT", reads_lists)
    compiled = _program((6, 5))
    for _ in range(5):
        feeds = _arrays(rng, (6, 5))
        _check(compiled.run(feeds), feeds)
        _check(compiled.run_ready([feeds["x"], feeds["y"]]), feeds)
    quick = compiled._executable.fast_call
    assert quick.asked != compiled._threads_option
    assert quick.enter(feeds) is None


def test_results_that_are_held_stay_as_they_are(rng):
    compiled = _program()
    _ready(compiled, _arrays(rng))
    held = []
    for turn in range(200):
        feeds = _arrays(rng)
        made = compiled.run(feeds)
        held.append((feeds, made if turn % 3 else (made[0][1:], made[1])))
        if turn % 5 == 4:
            del held[: len(held) // 2]
        del made
        for was, (a, b) in held:
            whole = was["x"] + was["y"]
            np.testing.assert_array_equal(a, whole if len(a) == 6 else whole[1:])
            np.testing.assert_array_equal(b, was["x"] * was["y"])


@pytest.mark.parametrize("hold", [memoryview, lambda a: a.T, lambda a: a.reshape(-1)[3:], lambda a: a.data, iter])
def test_whoever_looks_at_the_memory_of_a_result_keeps_it(hold, rng):
    compiled = _program((9, 9))
    quick = _ready(compiled, _arrays(rng, (9, 9)))
    made = compiled.run(_arrays(rng, (9, 9)))
    addresses = {a.ctypes.data for a in made}
    holders = [hold(a) for a in made]
    del made
    gc.collect()
    before = _hits(quick)
    other = compiled.run(_arrays(rng, (9, 9)))
    assert not addresses & {a.ctypes.data for a in other}
    del holders, other
    compiled.run(_arrays(rng, (9, 9)))
    assert _hits(quick) > before


def _rename(a: np.ndarray) -> None:
    a.shape = (5, 6)


def _lock(a: np.ndarray) -> None:
    a.flags.writeable = False


def _retype(a: np.ndarray) -> None:
    a.dtype = np.int32


@pytest.mark.parametrize("change", [_rename, _lock, _retype])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_result_that_was_changed_is_not_given_out_again(change, rng):
    compiled = _program()
    _ready(compiled, _arrays(rng))
    for _ in range(6):
        feeds = _arrays(rng)
        made = compiled.run(feeds)
        _check(made, feeds)
        assert [(a.shape, a.dtype, a.flags.writeable) for a in made] == [((6, 5), np.dtype("f4"), True)] * 2
        for a in made:
            change(a)
        del made, a


def test_a_result_that_is_watched_is_not_given_out_again(rng):
    compiled = _program()
    _ready(compiled, _arrays(rng))
    seen = []
    for _ in range(6):
        feeds = _arrays(rng)
        made = compiled.run(feeds)
        assert not any(watch() is made[0] for watch, _ in seen)
        seen.append((weakref.ref(made[0]), feeds["x"] + feeds["y"]))
        del made
        for watch, values in seen:
            if (alive := watch()) is not None:
                np.testing.assert_array_equal(alive, values)
            del alive


def test_programs_without_steps_or_elements(rng):
    compiled = _program((0, 3))
    for _ in range(4):
        assert [a.shape for a in compiled.run(_arrays(rng, (0, 3)))] == [(0, 3)] * 2
    g = st.Graph("same")
    x = g.input("x", (3,))
    g.outputs(x, x + 1, x)
    compiled = st.Session("cpu").compile(g)
    for _ in range(4):
        given = rng.standard_normal(3).astype("f4")
        a, b, c = compiled.run(x=given)
        np.testing.assert_array_equal([a, b, c], [given, given + 1, given])


def test_references_are_counted_as_they_were(rng):
    compiled = _program()
    feeds = _arrays(rng)
    _ready(compiled, feeds)
    before = [sys.getrefcount(v) for v in feeds.values()]
    for _ in range(100):
        compiled.run(feeds)
        compiled.run_ready(list(feeds.values()))
        with pytest.raises(st.errors.StrataError):
            compiled.run({"x": feeds["x"], "z": feeds["y"]})
        with pytest.raises(st.errors.StrataError):
            compiled.run({"x": feeds["x"], "y": feeds["y"][:3]})
    assert [sys.getrefcount(v) for v in feeds.values()] == before


def test_other_arrays_go_the_long_way(rng):
    compiled = _program()
    feeds = _arrays(rng)
    quick = _ready(compiled, feeds)
    before = _hits(quick)
    turned = {n: np.asfortranarray(a) for n, a in feeds.items()}
    strided = {n: np.repeat(a, 2, axis=1)[:, ::2] for n, a in feeds.items()}
    swapped = {n: a.astype(">f4") for n, a in feeds.items()}
    offset = {n: np.frombuffer(b"-" + a.tobytes(), np.float32, 30, 1).reshape(6, 5) for n, a in feeds.items()}
    listed = {n: a.tolist() for n, a in feeds.items()}
    for odd in (turned, strided, swapped, offset, listed):
        _check(compiled.run(odd), feeds)
    assert _hits(quick) == before

    class Named(dict):
        pass

    _check(compiled.run(Named(feeds)), feeds)
    for bad in ({"x": feeds["x"]}, {**feeds, "z": feeds["x"]}, {**feeds, "y": feeds["y"].astype("f8")}, {1: 2, 3: 4}):
        with pytest.raises(st.errors.StrataError):
            compiled.run(bad)
    _check(compiled.run(feeds), feeds)


def test_keys_that_run_code_of_their_own(rng):
    """A key as odd as this one may run the program itself while it is compared."""
    compiled = _program()
    inner, outer = _arrays(rng), _arrays(rng)
    _ready(compiled, inner)

    class Key:
        def __init__(self, name: str) -> None:
            self.name = name

        def __hash__(self) -> int:
            return hash(self.name)

        def __eq__(self, other: object) -> bool:
            _check(compiled.run(inner), inner)
            return self.name == other

    for _ in range(5):
        _check(compiled.run({Key(n): a for n, a in outer.items()}), outer)


def test_parameters_that_are_set_again(rng):
    g = st.Graph("weights")
    x, w = g.input("x", (4, 8)), g.param("w", (8, 16))
    g.outputs(x @ w)
    compiled = st.Session("cpu").compile(g)
    twin, of_twin = None, np.zeros(())
    for turn in range(4):
        values, given = rng.standard_normal((8, 16)).astype("f4"), rng.standard_normal((4, 8)).astype("f4")
        compiled.set_param("w", values)
        if twin is None:
            twin, of_twin = compiled.clone(), values
        if turn % 2:  # neither sees what is set on the other
            of_twin = values + 1
            twin.set_param("w", of_twin)
        for one in (compiled, twin, compiled, compiled, twin):
            wanted = given @ (of_twin if one is twin else values)
            np.testing.assert_allclose(one.run(x=given)[0], wanted, rtol=1e-5, atol=1e-5)
        assert compiled._fast_call.asked != NOT_READY, turn


def test_what_goes_wrong_is_told(rng):
    g = st.Graph("rows")
    a, b = g.input("a", (3, 3), "f64"), g.input("b", (3, 1), "f64")
    g.outputs(st.ops.solve(a, b))
    compiled = st.Session("cpu").compile(g)
    feeds = {"a": rng.standard_normal((3, 3)), "b": rng.standard_normal((3, 1))}
    quick = _ready(compiled, feeds)
    before = _hits(quick)
    for turn in range(3):
        with pytest.raises(st.errors.RunError, match="singular"):
            compiled.run({**feeds, "a": np.ones((3, 3))})
        np.testing.assert_allclose(compiled.run(feeds)[0], np.linalg.solve(feeds["a"], feeds["b"]))
        assert _hits(quick) == before + 2 * turn + 2


def test_one_program_in_many_threads(rng):
    compiled = _program((300, 300))
    cases = [_arrays(rng, (300, 300)) for _ in range(4)]
    _ready(compiled, cases[0])
    wrong: list[BaseException] = []

    def work(feeds: dict[str, np.ndarray]) -> None:
        try:
            for _ in range(60):
                _check(compiled.run(feeds), feeds)
        except BaseException as error:  # noqa: BLE001 - told below
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(c,)) for c in cases]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_threads_may_change_between_runs(rng):
    compiled = _program((300, 300))
    feeds = _arrays(rng, (300, 300))
    for threads in (1, 2, 7, 1, None, 2):
        with st.config.using(num_threads=threads):
            for _ in range(4):
                _check(compiled.run(feeds), feeds)


def test_it_is_given_up_where_results_are_never_free(rng):
    compiled = _program()
    feeds = _arrays(rng)
    held = [compiled.run(feeds) for _ in range(PATIENCE + 5)]
    assert compiled._fast_call.asked == NOT_READY
    _check(compiled.run(feeds), feeds)
    assert len({a.ctypes.data for made in held for a in made}) == 2 * len(held)


def test_what_is_kept_is_bounded(rng, monkeypatch):
    monkeypatch.setattr(short, "MOST_KEPT", 3 * 2 * 2 * 4096 * 4)
    programs = [_program((4096 + 8 * i,)) for i in range(5)]
    for i, compiled in enumerate(programs):
        feeds = _arrays(rng, (4096 + 8 * i,))
        for _ in range(4):
            _check(compiled.run(feeds), feeds)
    ready = [p._fast_call.asked != NOT_READY for p in programs]
    assert ready[-1]
    assert not all(ready)
    feeds = _arrays(rng, (4096,))
    for _ in range(4):
        _check(programs[0].run(feeds), feeds)


def test_long_results_are_not_kept(rng):
    shape = (1 << 20,)
    compiled = _program(shape)
    feeds = _arrays(rng, shape)
    for _ in range(4):
        _check(compiled.run(feeds), feeds)
    assert compiled._fast_call.asked == NOT_READY


def test_results_into_arrays_of_the_caller(rng):
    compiled = _program()
    out = [np.empty((6, 5), np.float32) for _ in range(2)]
    for _ in range(short.FIRST_RUNS + 1):
        compiled.run_into(_arrays(rng), out)
    quick = _ready(compiled, _arrays(rng))
    before = _hits(quick)
    for _ in range(5):
        feeds = _arrays(rng)
        compiled.run_into(feeds, out)
        _check(out, feeds)
        _check(compiled.run(feeds), feeds)
    assert _hits(quick) == before + 10
    counts = [sys.getrefcount(a) for a in (*out, *feeds.values())]
    for _ in range(50):
        compiled.run_into(feeds, out)
    assert [sys.getrefcount(a) for a in (*out, *feeds.values())] == counts


def test_arrays_of_the_caller_that_need_a_closer_look(rng):
    compiled = _program()
    feeds = _arrays(rng)
    quick = _ready(compiled, feeds)
    before = _hits(quick)
    good = [np.empty((6, 5), np.float32) for _ in range(2)]
    wide = np.empty((6, 10), np.float32)
    locked = np.empty((6, 5), np.float32)
    locked.flags.writeable = False
    bad = ([good[0]], [*good, good[0]], [good[0], good[0]], [good[0], wide[:, ::2]], [good[0], locked])
    bad += ([good[0], good[1].astype("f8")], [good[0], np.empty((5, 6), "f4")], [good[0], good[1].tolist()])
    memory = np.empty(50, np.float32)
    bad += ([memory[:30].reshape(6, 5), memory[20:].reshape(6, 5)],)
    for out in bad:
        with pytest.raises(st.errors.StrataError):
            compiled.run_into(feeds, out)
    assert _hits(quick) == before
    # over an input: it is copied first
    x = feeds["x"].copy()
    compiled.run_into({"x": x, "y": feeds["y"]}, [x, good[1]])
    _check([x, good[1]], feeds)
    part = np.empty(60, np.float32)
    part[3:33] = feeds["x"].reshape(-1)
    compiled.run_into({"x": part[3:33].reshape(6, 5), "y": feeds["y"]}, [part[5:35].reshape(6, 5), good[1]])
    _check([part[5:35].reshape(6, 5), good[1]], feeds)
    assert _hits(quick) == before
    compiled.run_into(feeds, [memory[:30].reshape(6, 5), good[1]])
    _check([memory[:30].reshape(6, 5), good[1]], feeds)
    compiled.run_into(feeds, tuple(good))
    _check(good, feeds)
    assert _hits(quick) == before + 1
    for wrong in ((feeds, good), [feeds["x"], feeds["y"]]):
        with pytest.raises(st.errors.OptionError, match="by name"):
            compiled.run(wrong)
        with pytest.raises(st.errors.OptionError, match="by name"):
            compiled.run_into(wrong, good)
