"""Symbols whose sizes an op cannot take: its own rule refuses them when they are known, and nothing is read outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata import ops as functions
from strata.config import using
from strata.core import sym
from strata.errors import ShapeError
from strata.lir import RuleCheck, size_checks
from strata.mir import Graph, Value, evaluate
from strata.runtime import Session
from strata.runtime.storage import stored
from tests.backends.guard_pages import guarded

ops: Any = functions
N, M = sym("N", 0), sym("M", 0)


def numbers(*shape: int) -> np.ndarray:
    return np.linspace(-1, 1, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def attended(g: Graph, keys: Any, values: Any, mask: Any = None) -> Value:
    q, k, v = (g.input(n, (1, 2, s, 8)) for n, s in (("q", 4), ("k", keys), ("v", values)))
    given = () if mask is None else (g.input("mask", (1, 1, 4, mask)),)
    return ops.attention(q, k, v, *given, num_heads=2, layout="bhsd")


QUERY = {"q": numbers(1, 2, 4, 8)}
Build = Callable[[Graph], Any]
# by name: a graph, arrays that fit, arrays that do not
CASES: dict[str, tuple[Build, dict[str, np.ndarray], dict[str, np.ndarray]]] = {
    "topk": (lambda g: ops.topk(g.input("x", (N,)), 5), {"x": numbers(5)}, {"x": numbers(4)}),
    "item": (lambda g: g.input("x", (N, 3))[7], {"x": numbers(8, 3)}, {"x": numbers(7, 3)}),
    "item from the end": (lambda g: g.input("x", (N, 3))[-7], {"x": numbers(7, 3)}, {"x": numbers(6, 3)}),
    "narrow": (lambda g: ops.narrow(g.input("x", (N,)), 0, 2, 5), {"x": numbers(7)}, {"x": numbers(6)}),
    "window": (lambda g: ops.dynamic_slice(g.input("x", (N,)), [0], (5,)), {"x": numbers(5)}, {"x": numbers(4)}),
    "update": (
        lambda g: ops.dynamic_update_slice(g.input("x", (N,)), g.input("y", (M,)), [0]),
        {"x": numbers(9), "y": numbers(9)}, {"x": numbers(2), "y": numbers(9)},
    ),
    "border": (
        lambda g: ops.pad(g.input("x", (N,)), [(4, 4)], mode="reflect"), {"x": numbers(1)}, {"x": numbers(0)},
    ),
    "convolution": (
        lambda g: ops.conv1d(g.input("x", (1, 2, N)), g.input("w", (3, 2, 5))),
        {"x": numbers(1, 2, 5), "w": numbers(3, 2, 5)}, {"x": numbers(1, 2, 4), "w": numbers(3, 2, 5)},
    ),
    "pool": (
        lambda g: ops.max_pool1d(g.input("x", (1, 2, N)), 5), {"x": numbers(1, 2, 5)}, {"x": numbers(1, 2, 4)},
    ),
    "largest": (lambda g: ops.max(g.input("x", (N, 3)), axis=0), {"x": numbers(1, 3)}, {"x": numbers(0, 3)}),
    "place of the largest": (
        lambda g: ops.argmax(g.input("x", (N, 3)), axis=0), {"x": numbers(1, 3)}, {"x": numbers(0, 3)},
    ),
    "keys and values": (
        lambda g: attended(g, N, M),
        {**QUERY, "k": numbers(1, 2, 9, 8), "v": numbers(1, 2, 9, 8)},
        {**QUERY, "k": numbers(1, 2, 9, 8), "v": numbers(1, 2, 3, 8)},
    ),
    "keys and a mask": (
        lambda g: attended(g, N, N, M),
        {**QUERY, "k": numbers(1, 2, 9, 8), "v": numbers(1, 2, 9, 8), "mask": numbers(1, 1, 4, 1)},
        {**QUERY, "k": numbers(1, 2, 9, 8), "v": numbers(1, 2, 9, 8), "mask": numbers(1, 1, 4, 3)},
    ),
    "turns": (
        lambda g: ops.rope(g.input("x", (1, 2, N, 8)), g.input("c", (6, 4)), g.input("s", (6, 4)), layout="bhsd"),
        {"x": numbers(1, 2, 6, 8), "c": numbers(6, 4), "s": numbers(6, 4)},
        {"x": numbers(1, 2, 7, 8), "c": numbers(6, 4), "s": numbers(6, 4)},
    ),
    "labels": (
        lambda g: ops.cross_entropy(g.input("x", (N, 5)), g.input("y", (M,), "i64")),
        {"x": numbers(4, 5), "y": np.arange(4)}, {"x": numbers(2, 5), "y": np.zeros(9, np.int64)},
    ),
    "experts": (
        lambda g: ops.grouped_matmul(g.input("x", (N, 4)), g.input("w", (3, 4, 5)), g.input("ids", (M,), "i64")),
        {"x": numbers(3, 4), "w": numbers(3, 4, 5), "ids": np.array([0, 1, 1])},
        {"x": numbers(3, 4), "w": numbers(3, 4, 5), "ids": np.zeros(9, np.int64)},
    ),
    "a body": (
        lambda g: ops.scan(lambda c, x: (c + x[6], c), 0.0, g.input("x", (4, N))),
        {"x": numbers(4, 7)}, {"x": numbers(4, 6)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_sizes_are_refused_by_the_rule_of_the_op(name: str) -> None:
    build, fits, too_small = CASES[name]
    g = Graph("g")
    made = build(g)
    g.outputs(*(made if isinstance(made, tuple) else (made,)))
    compiled = Session("cpu").compile(g)
    for _ in range(2):
        for got, want in zip(compiled.run(fits), evaluate(g, fits), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        with pytest.raises(ShapeError):
            compiled.run({n: guarded(a, at_end=True) for n, a in too_small.items()})


def test_rules_that_refuse_nothing_are_not_asked() -> None:
    g = Graph("g")
    x = g.input("x", (sym("N"), 3, 8, 8))
    y = ops.conv2d(x, g.param("w", (4, 3, 3, 3)), padding=1)
    g.outputs(ops.softmax(ops.reshape(ops.mean(y, (2, 3)), (-1, 4)), 1), ops.transpose(x, (1, 0, 2, 3)))
    assert size_checks(g) == ()


def test_rules_as_text() -> None:
    g = Graph("g")
    g.outputs(*ops.topk(g.input("x", (N, M)), 5, 0))
    (rule,) = size_checks(g)
    assert isinstance(rule, RuleCheck)
    again = RuleCheck(rule.to_text())
    again.run({"N": 5, "M": 0})
    with pytest.raises(ShapeError, match="k = 5"):
        again.run({"N": 4, "M": 9})


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("getitem", lambda x: x[5]),
        ("split", lambda x: ops.split(x, [2, x.shape[0] - 2])[0]),
        ("pad", lambda x: ops.pad(x, ((-3, 0), (0, 0)))),
        ("max_pool", lambda x: ops.max_pool(ops.reshape(x, (1, 4, x.shape[0])), (5,))),
        ("topk", lambda x: ops.topk(x, 5, axis=0)[0]),
    ],
)
def test_sizes_that_an_op_refuses_are_told_in_the_words_of_the_caller(
    name: str, make: Callable[[Value], Value], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was called, not the op that it became; also where the plan is read from the store."""
    monkeypatch.setattr(stored, "WORTH_SECONDS", 0.0)
    g = Graph("g")
    g.outputs(make(g.input("x", (sym("N", 1, 16), 4))))
    with using(cache_dir=tmp_path):
        for _ in range(2):
            compiled = Session("cpu").compile(g)
            compiled.run(x=np.ones((8, 4), np.float32))
            with pytest.raises(ShapeError, match=f"^{name}: "):
                compiled.run(x=np.ones((1, 4), np.float32))
