"""Orders of stages, pipelines of functions, and weights that several share."""

from __future__ import annotations

import numpy as np
import pytest

from strata.errors import OptionError, UnknownNameError
from strata.serving import Pipeline, WeightRegistry, schedule


def test_orders() -> None:
    assert schedule({}) == []
    assert schedule({"c": ["b"], "b": ["a"], "a": []}) == ["a", "b", "c"]
    assert schedule({"end": ["left", "right"], "left": ["start"], "right": ["start"], "start": []}) == [
        "start", "left", "right", "end",
    ]  # fmt: skip
    assert schedule({"b": ["x"], "a": ["x"]}) == ["b", "a"]  # x comes from outside; of equals the first named


def test_circles_are_named() -> None:
    with pytest.raises(OptionError, match="pipeline: a needs a   "):
        schedule({"a": ["a"]})
    with pytest.raises(OptionError, match="pipeline: b needs c needs d needs b   "):
        schedule({"a": [], "out": ["b"], "b": ["a", "c"], "c": ["d"], "d": ["b"]})


def test_a_diamond_runs_each_stage_once() -> None:
    ran = []

    def stage(name: str, value: int) -> int:
        ran.append(name)
        return value

    line = Pipeline({
        "sum": (lambda a, b: stage("sum", a + b), ["double", "square"]),
        "double": (lambda x: stage("double", 2 * x), ["more"]),
        "square": (lambda x: stage("square", x * x), ["more"]),
        "more": (lambda x, y: stage("more", x + y), ["x", "y"]),
    })  # fmt: skip
    assert line.order == ("more", "double", "square", "sum")
    assert line.inputs == ("x", "y")
    assert line.run(x=2, y=3) == {"more": 5, "double": 10, "square": 25, "sum": 35}
    assert ran == ["more", "double", "square", "sum"]
    with pytest.raises(UnknownNameError, match="takes x, y, got x, z"):
        line.run(x=1, z=2)


def test_weights_are_kept_once() -> None:
    weights = WeightRegistry()
    table = np.ones((4, 8), np.float32)
    assert weights.register("embed", table) is table
    assert weights.register("embed", table.copy()) is table  # again: nothing changes
    weights.tie("head", "embed")
    assert weights["head"] is table
    weights.register("fr.a", np.zeros(3), adapter="fr")
    weights.register("fr.b", np.zeros(5), adapter="fr")
    assert weights.adapters == {"fr": ("fr.a", "fr.b")}
    assert weights.total_bytes == 4 * 8 * 4 + 8 * 8
    assert weights.names == ("embed", "fr.a", "fr.b", "head")
    assert "head" in weights
    nan = np.array([np.nan])
    weights.register("nan", nan)
    assert weights.register("nan", nan.copy()) is nan


def test_what_is_pinned_stays() -> None:
    weights = WeightRegistry()
    weights.register("embed", np.ones(4))
    weights.tie("head", "embed")
    assert weights.pin("head") is weights.pin("embed")
    weights.release("embed")
    with pytest.raises(OptionError, match="'embed' is pinned 1 times"):
        weights.drop("embed")
    weights.release("head")
    weights.drop("embed")
    assert weights.names == ()
    assert weights.total_bytes == 0


def test_mistakes() -> None:
    weights = WeightRegistry()
    weights.register("a", np.ones(4))
    weights.tie("b", "a")
    for wrong, message in (
        (lambda: weights.register("a", np.zeros(4)), r"'a' is float64\[4\] already"),
        (lambda: weights.register("b", np.ones(4)), "'b' is tied to 'a'"),
        (lambda: weights.tie("c", "b"), "'b' is itself tied to 'a'"),  # one step
        (lambda: weights.tie("a", "a"), "an array of its own"),
        (lambda: weights.release("a"), "released and was not pinned"),
    ):
        with pytest.raises(OptionError, match=message):
            wrong()
    for unknown in (
        lambda: weights.pin("x"),
        lambda: weights["x"],
        lambda: weights.tie("c", "x"),
        lambda: weights.drop("x"),
    ):
        with pytest.raises(UnknownNameError, match="there is no 'x'"):
            unknown()
    weights.drop("b")
    assert weights.names == ("a",)
