"""Regular expressions of models: Python's language, in a time that grows with the text."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from onnx import helper

from strata.config import using
from strata.errors import BudgetError, FileError
from strata.io.onnx import load
from strata.io.onnx.regex import FullMatch

SIMPLE = ("a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", r"\b", r"\B", "^", "$", r"\A", r"\Z", "(?i:A)", "(?s:.)", "é")
TIMES = ("*", "+", "?", "{0,2}", "{2}", "{1,}", "*?", "+?", "{2,3}?")
FLAGS = ("", "(?i)", "(?m)", "(?s)", "(?x)", "(?a)")


def pattern(rng: random.Random, depth: int) -> str:
    match rng.randrange(8) if depth else 0:
        case 0 | 1 | 2:
            return rng.choice(SIMPLE)
        case 3 | 4:
            return pattern(rng, depth - 1) + pattern(rng, depth - 1)
        case 5:
            return f"({pattern(rng, depth - 1)}|{pattern(rng, depth - 1)})"
        case _:
            return f"(?:{pattern(rng, depth - 1)}){rng.choice(TIMES)}"


def test_the_language_is_python_s(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        text = rng.choice(FLAGS) + pattern(rng, 4)
        theirs, ours = re.compile(text), FullMatch(text)
        for _ in range(8):
            given = "".join(rng.choice("aabb1\nAé ") for _ in range(rng.randrange(7)))
            assert ours(given) == (theirs.fullmatch(given) is not None), (text, given)


@pytest.mark.parametrize("text", ["(a+)+$", "(a|a)*$", "(a*)*b", "(a?){30}a{30}", "(.*a){12}", "(x+x+)+y"])
def test_time_is_linear(text: str) -> None:
    """Python's own matcher needs longer than the age of the world for some of these."""
    matches = FullMatch(text)
    assert not matches("a" * 3000 + "!")
    assert not matches("x" * 3000 + "!")


def test_what_needs_more_than_linear_time_is_refused() -> None:
    for text in (r"(a)\1", "(?=a)a", "(?<!a)b", "(?>a)", "a*+", "(?P<n>a)(?P=n)", "(a)(?(1)b|c)"):
        with pytest.raises(FileError, match="takes more than linear time"):
            FullMatch(text)
    for text in ("(a", "[", "a{2,1}", r"\p{L}", "(" * 3000 + ")" * 3000):
        with pytest.raises(FileError, match="pattern "):
            FullMatch(text)


def test_states_are_limited() -> None:
    with pytest.raises(BudgetError, match=r"states of the pattern .*: more than max_nodes"):
        FullMatch("(?:(?:a{1000}){1000}){1000}")
    with using(max_seconds=1e-9), pytest.raises(BudgetError, match="max_seconds"):
        FullMatch("a*")("a" * 10_000)


def test_in_a_model() -> None:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("RegexFullMatch", ["x"], ["y"], pattern="(a+)+$")], "g",
        [info("x", 8, ["n"])], [info("y", 9, ["n"])],
    )  # fmt: skip
    model = load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]), device="reference")
    (found,) = model.run(x=np.array(["a" * 40, "a" * 40 + "!", ""], object))
    np.testing.assert_array_equal(found, [True, False, False])
