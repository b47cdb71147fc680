"""No pass makes an ill-typed graph: every result is checked, and an op that refuses its inputs names the pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from strata import ops
from strata.config import config
from strata.core import i8, i32, u8
from strata.errors import VerifyError
from strata.mir import Graph, Value, evaluate
from strata.passes import Pass, PassContext, rewrite, run_passes
from strata.runtime import CompileOptions, Session


def encoder(kind: str, heads: int = 3) -> tuple[Graph, dict[str, np.ndarray]]:
    """Dynamic quantisation as exporters write it: products of codes less their zero points, in i32, then scaled."""
    rng = np.random.default_rng(0)
    g = Graph("encoder")
    feeds: dict[str, np.ndarray] = {"x": rng.standard_normal((4, 16)).astype(np.float32)}
    x = g.input("x", (4, 16))
    low, high = ops.min(x), ops.max(x)
    scale = (high - low) / 255.0
    zero = ops.cast(ops.clip(ops.round(-low / scale), 0.0, 255.0), u8)
    codes = ops.cast(ops.clip(ops.round(x / scale) + ops.cast(zero, "f32"), 0.0, 255.0), u8)
    results: list[Value] = []
    for i in range(heads):
        dtype = {"signed": i8, "unsigned": u8, "mixed": (i8, u8)[i % 2]}[kind]
        w = g.param(f"w{i}", (16, 8), dtype)
        feeds[f"w{i}"] = rng.integers(0 if dtype is u8 else -128, 128, (16, 8)).astype(dtype.np)
        point = g.constant(np.array(3, dtype.np))
        left, right = (ops.cast(v, i32) - ops.cast(z, i32) for v, z in ((codes, zero), (w, point)))
        total = ops.matmul(left, right)
        b = g.param(f"b{i}", (8,), "f32")
        feeds[f"b{i}"] = rng.standard_normal(8).astype(np.float32)
        results.append(ops.cast(total, "f32") * (scale * 0.02) + b)
    return g.outputs(*results), feeds


@pytest.mark.parametrize("kind", ["signed", "unsigned", "mixed"])
@pytest.mark.parametrize("fusion", [True, False])
def test_products_of_codes_share_their_left_side(kind: str, fusion: bool) -> None:
    graph, feeds = encoder(kind)
    compiled = Session("cpu").compile(graph, CompileOptions(fusion=fusion))
    compiled.set_params({n: feeds[n] for n in graph.param_names})
    for got, want in zip(compiled.run(x=feeds["x"]), evaluate(graph, feeds), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("left", "right"), [(u8, i8), (i8, i8), (i32, i32)])
def test_whole_numbers_are_joined_as_they_are(left: object, right: object) -> None:
    rng = np.random.default_rng(1)
    g = Graph("codes")
    x = g.input("x", (5, 12), left)
    weights = [g.param(f"w{i}", (12, 8), right) for i in range(3)]
    product = ops.MatMul()
    g.outputs(*(product(x, w) for w in weights))
    feeds = {"x": rng.integers(0, 100, (5, 12)).astype(x.dtype.np)}
    feeds |= {f"w{i}": rng.integers(-100, 100, (12, 8)).astype(weights[0].dtype.np) for i in range(3)}
    compiled = Session("cpu").compile(g)
    compiled.set_params({n: feeds[n] for n in g.param_names})
    for got, want in zip(compiled.run(x=feeds["x"]), evaluate(g, feeds), strict=True):
        np.testing.assert_array_equal(got, want)


@dataclass(frozen=True)
class Halve(Pass):
    """A pass with a mistake: the operands of an addition become different types."""

    name: ClassVar[str] = "halve"

    def run(self, graph: Graph, ctx: PassContext) -> Graph:
        def change(value: Value, inputs: tuple[Value, ...]) -> list[Value] | None:
            if value.node.op.name != "add":
                return None
            return [value.node.op(ops.cast(inputs[0], "f16"), inputs[1])]

        return rewrite(graph, change, self.name)


def test_an_op_that_refuses_what_a_pass_gives_it_names_the_pass() -> None:
    g = Graph("sum")
    x, y = g.input("x", (3,)), g.input("y", (3,))
    g.outputs(x + y)
    with pytest.raises(VerifyError, match="pass halve applied an op to what it does not take in @sum") as caught:
        run_passes([Halve()], g, PassContext())
    assert caught.value.code == "V304"


def test_the_suites_verify_every_pass() -> None:
    assert config().verify
    assert PassContext().verify_each
