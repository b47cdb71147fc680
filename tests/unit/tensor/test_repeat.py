"""Calls that are recognised without a signature: they give what it gives, and nothing else is taken for one."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import pytest

import strata as st
from strata import nn
from strata.config import using
from strata.errors import OptionError, RunError, TraceError


class Pair(NamedTuple):
    a: Any
    b: Any


def total(tree: Any, scale: Any = 1.0, *, extra: Any = None) -> Any:
    """A function of all leaves, in which each counts differently."""
    from strata.core import flatten

    leaves, _ = flatten([tree, scale, extra])
    out = 0.0
    for i, x in enumerate(leaves):
        out = out + (i + 1) * (x.sum() if isinstance(x, (st.Tensor, np.ndarray)) else x)
    return {"out": out + st.zeros(()), "first": leaves[0] * 2}


def recognised(f: Any, *args: Any, **kwargs: Any) -> bool:
    return any(r.inputs(args, kwargs) is not None for r in f._repeats)


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


TREES = {
    "tensor": lambda make: make(3),
    "dict": lambda make: {"b": make(3), "a": make(2, 2)},
    "nest": lambda make: {"x": [make(3), (make(2), None)], "y": {"k": make(1)}, 3: make(2)},
    "named": lambda make: Pair(make(2), [make(3)]),
    "numbers": lambda make: [make(2), 3, 2.5],
    "empty": lambda make: [make(2), {}, (), []],
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("kind", ["tensors", "arrays", "both"])
def test_calls_alike_are_recognised_and_give_the_same(name: str, kind: str) -> None:
    f, seeds = st.jit(total), iter(range(1000))

    def make(*shape: int) -> Any:
        seed = next(seeds)
        made = array(*shape, seed=seed)
        return made if kind == "arrays" or (kind == "both" and seed % 2) else st.tensor(made)

    for turn in range(4):
        tree, extra = TREES[name](make), {"z": make(2)}
        seen = recognised(f, tree, 2.0, extra=extra)
        got = f(tree, 2.0, extra=extra)
        want = total(tree, 2.0, extra=extra)
        np.testing.assert_allclose(got["out"].numpy(), st.tensor(want["out"]).numpy(), rtol=1e-5)
        assert seen or turn < 2 or kind == "both"
    assert len(f.variants) == 1


def test_what_differs_is_not_taken_for_the_same() -> None:
    f = st.jit(total, static_argnums=(1,))
    x = array(4)
    base: Any = {"a": st.tensor(x), "b": [st.tensor(x), 2]}
    for _ in range(3):
        f(base, 3)
    assert recognised(f, base, 3)
    others: list[tuple[Any, Any, dict[str, Any]]] = [
        ({"a": st.tensor(x), "b": [st.tensor(x), 5]}, 3, {}),
        ({"a": st.tensor(x), "b": [st.tensor(x), 2.0]}, 3, {}),
        ({"a": st.tensor(x), "b": (st.tensor(x), 2)}, 3, {}),
        ({"a": st.tensor(x), "c": [st.tensor(x), 2]}, 3, {}),
        ({"a": st.tensor(x), "b": [st.tensor(x), 2], "c": st.tensor(x)}, 3, {}),
        ({"a": st.tensor(x), "b": st.tensor(x)}, 3, {}),
        ({"a": st.tensor(array(5)), "b": [st.tensor(x), 2]}, 3, {}),
        ({"a": st.tensor(x.astype("f8")), "b": [st.tensor(x), 2]}, 3, {}),
        (base, 4, {}),
        (base, 3, {"extra": st.tensor(x)}),
        (base, True, {}),
    ]
    for tree, scale, more in others:
        assert not recognised(f, tree, scale, **more)
        got, want = f(tree, scale, **more), total(tree, scale, **more)
        np.testing.assert_allclose(got["out"].numpy(), st.tensor(want["out"]).numpy(), rtol=1e-5)
    with pytest.raises(OptionError, match="does not exist"):
        f()


def test_tensors_that_are_not_computed_or_not_contiguous() -> None:
    f = st.jit(lambda x: x * 2)
    x = array(4, 6)
    for given in (x, st.tensor(x), st.tensor(x) + 0.0, x[:, ::-1], np.asfortranarray(x), st.tensor(x)[:, ::-1]):
        for _ in range(3):
            np.testing.assert_array_equal(f(given).numpy(), 2 * np.asarray(given))
    assert len(f.variants) == 1


def test_inside_of_another_trace() -> None:
    inner = st.jit(lambda x: x * 2)
    x = st.tensor(array(3))
    for _ in range(3):
        inner(x)
    np.testing.assert_array_equal(st.grad(lambda y: inner(y).sum())(x).numpy(), [2, 2, 2])
    outer = st.jit(lambda y: inner(y) + 1)
    for _ in range(3):
        np.testing.assert_array_equal(outer(x).numpy(), 2 * x.numpy() + 1)


def test_donated_tensors_are_given_up() -> None:
    step = st.jit(lambda state, x: {"w": state["w"] + x, "n": state["n"] + 1}, donate_argnums=(0,))
    x = array(5)
    state: Any = {"w": st.zeros((5,)), "n": st.zeros(())}
    for _ in range(6):
        before, state = state, step(state, x)
    assert recognised(step, state, x)
    np.testing.assert_allclose(state["w"].numpy(), 6 * x, rtol=1e-6)
    with pytest.raises(RunError, match="was donated"):
        before["w"].numpy()
    with pytest.raises(RunError, match="was donated"):
        step(before, x)
    seen = state["w"].numpy()  # somebody looks at it: it must stay
    kept = seen.copy()
    after = step(state, x)
    np.testing.assert_array_equal(seen, kept)
    np.testing.assert_allclose(after["w"].numpy(), kept + x, rtol=1e-6)


def test_the_same_tensor_twice_is_not_written_over() -> None:
    step = st.jit(lambda a, b: (a + 1.0, b * 2.0), donate_argnums=(0,))
    for _ in range(4):
        x = st.jit(lambda y: y + 0.0)(array(6))
        a, b = step(x, x)
        np.testing.assert_allclose(a.numpy(), array(6) + 1)
        np.testing.assert_allclose(b.numpy(), array(6) * 2)


def test_modules() -> None:
    model = nn.Linear(3, 2)
    f = st.jit(lambda m, x: m(x))
    x = array(4, 3)
    for _ in range(4):
        got = f(model, x)
    assert recognised(f, model, x)
    np.testing.assert_allclose(got.numpy(), np.asarray(model(st.tensor(x))), rtol=1e-5, atol=1e-6)  # terms cancel
    other = nn.Linear(3, 2)
    np.testing.assert_allclose(f(other, x).numpy(), np.asarray(other(st.tensor(x))), rtol=1e-5, atol=1e-6)
    other.note = "another"
    assert not recognised(f, other, x)


def test_settings_and_limits() -> None:
    f = st.jit(lambda x: x + 1.0, max_variants=2, on_miss="error")
    a, b, c = (st.tensor(array(n)) for n in (2, 3, 4))
    for _ in range(3):
        f(a)
    assert recognised(f, a)
    with using(device="reference"):
        f(a)
    assert len(f.variants) == 2
    with pytest.raises(TraceError):
        f(c)
    f.clear()
    assert not recognised(f, a)
    for _ in range(3):
        np.testing.assert_array_equal(f(b).numpy(), b.numpy() + 1)


def test_many_threads() -> None:
    f = st.jit(lambda p, x: {"y": p["w"] * x + p["b"]})
    wrong: list[Any] = []

    def work(seed: int) -> None:
        w, b = array(8, seed=seed), array(8, seed=seed + 100)
        for i in range(200):
            x = array(8, seed=i) if i % 3 else array(3, seed=i)
            p = {"w": w[: len(x)], "b": st.tensor(b[: len(x)])}
            if not np.allclose(f(p, x)["y"].numpy(), p["w"] * x + b[: len(x)], atol=1e-6):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert len(f.variants) == 2
