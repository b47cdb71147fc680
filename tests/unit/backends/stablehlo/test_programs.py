"""Programs on the `xla` device next to `cpu`: training, derivatives, state, random numbers, models."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import strata as st
from strata import nn, ops
from strata.config import using
from strata.core import f32, i64
from strata.mir import Graph
from strata.runtime import Session
from strata.transforms import grad_with_loss

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="the xla device runs on jax, which is not installed")


def on_both(run: Callable[[], Any]) -> tuple[Any, Any]:
    made = []
    for device in ("xla", "cpu"):
        with using(device=device):
            made.append(run())
    return made[0], made[1]


def feeds_for(graph: Graph, rng: np.random.Generator) -> dict[str, np.ndarray]:
    found = {}
    for x in (*graph.inputs, *graph.params):
        shape = x.type.static_shape
        values = rng.standard_normal(shape) if x.dtype.is_float else rng.integers(0, 3, shape)
        found[x.node.op.key] = np.asarray(values).astype(x.dtype.np)
    return found


def test_training_takes_the_same_steps() -> None:
    def losses() -> list[float]:
        rng = np.random.default_rng(0)
        model = nn.Sequential(nn.Linear(8, 16, key=st.random.key(0)), nn.GELU(), nn.Linear(16, 3, key=st.random.key(1)))

        def loss(model: Any, x: Any, y: Any) -> Any:
            return st.cross_entropy(model(x), y).mean()

        trainer = nn.Trainer(loss, st.optim.AdamW(1e-2), clip_norm=1.0)
        state, found = trainer.init(model), []
        for _ in range(4):
            x, y = rng.standard_normal((12, 8)).astype(np.float32), rng.integers(0, 3, 12)
            state, out = trainer.step(state, (x, y))
            found.append(float(np.asarray(out["loss"] if isinstance(out, dict) else out)))
        return found

    ours, theirs = on_both(losses)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert ours[0] != ours[-1]


def convolutional(g: Graph) -> Any:
    x, w, v = g.input("x", f32[2, 3, 8, 8]), g.param("w", f32[4, 3, 3, 3]), g.param("v", f32[4, 5])
    h = ops.relu(ops.conv2d(x, w, padding=1, stride=2))
    return ops.sum((ops.mean(ops.max_pool2d(h, 2), axis=(2, 3)) @ v) ** 2.0)


def recurrent(g: Graph) -> Any:
    x, w = g.input("x", f32[5, 3, 4]), g.param("w", f32[4, 4])
    h, ys = ops.scan(lambda h, row: (ops.tanh(h @ w + row), ops.sum(h)), ops.zeros((3, 4)), x)
    return ops.sum(h) + ops.sum(ys**2.0)


def attentive(g: Graph) -> Any:
    q, k, v = (g.param(n, f32[1, 2, 6, 8]) for n in "qkv")
    return ops.sum(ops.attention(q, k, v, num_heads=2, causal=True, scale=0.7, softcap=3.0) ** 2.0)


def solving(g: Graph) -> Any:
    a, b = g.param("a", f32[3, 3]), g.param("b", f32[3, 2])
    return ops.sum(ops.solve(a, b)) + ops.slogdet(a)[1] + ops.sum(ops.cumprod(b, axis=0))


@pytest.mark.parametrize("make", [convolutional, recurrent, attentive, solving], ids=lambda f: f.__name__)
def test_gradients(make: Callable[[Graph], Any]) -> None:
    g = Graph(make.__name__)
    g.outputs(make(g))
    graph = grad_with_loss(g, None)
    feeds = feeds_for(graph, np.random.default_rng(1))
    found = []
    for device in ("xla", "cpu"):
        compiled = Session(device).compile(graph)
        compiled.set_params({n: a for n, a in feeds.items() if n in compiled.params})
        found.append(compiled.run({n: a for n, a in feeds.items() if n in compiled.inputs}))
        assert compiled.host_steps == []
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4 * max(1.0, float(np.abs(want).max())))


def test_random_numbers_are_the_same_bits() -> None:
    def drawn() -> list[np.ndarray]:
        key = st.random.key(7)
        return [st.random.randint(key, (5, 3), 0, 1 << 20).numpy(), st.random.uniform(key, (64,)).numpy()]

    ours, theirs = on_both(drawn)
    for got, want in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(got, want)


def test_samples_of_a_distribution() -> None:
    g = Graph("next")
    logits, key = g.input("logits", f32[64, 5]), g.input("key", st.random.key(0).numpy().shape, "u32")
    g.outputs(
        ops.sample(logits, key, temperature=0.8), ops.sample(logits, key, greedy=True), ops.argmax(logits, axis=-1)
    )
    values = np.tile(np.array([0.0, 1.0, 2.0, -1.0, 0.5], np.float32), (64, 1))
    found = []
    for device in ("xla", "cpu"):
        compiled = Session(device).compile(g)
        runs = [compiled.run(logits=values, key=st.random.key(seed).numpy()) for seed in (1, 1, 2)]
        np.testing.assert_array_equal(runs[0][0], runs[1][0])
        assert (runs[0][0] != runs[2][0]).any()
        np.testing.assert_array_equal(runs[0][1], runs[0][2])
        found.append(runs[0][0])
    np.testing.assert_array_equal(*found)


def test_state_is_kept_between_runs() -> None:
    g = Graph("cache")
    cache, row, at = g.input("cache", f32[6, 2]), g.input("row", f32[1, 2]), g.input("at", i64[()])
    new = ops.dynamic_update_slice(cache, row, (at, g.constant(0, "i64")))
    g.outputs(ops.sum(new), new)
    compiled = Session("xla").compile(g)
    compiled.bind("cache", np.zeros((6, 2), np.float32))
    compiled.feed("cache", 1)
    for step in range(3):
        total, _ = compiled.run(row=np.full((1, 2), step + 1.0, np.float32), at=np.array(step))
    assert total == 12.0
    np.testing.assert_array_equal(compiled.read("cache")[:4, 0], [1, 2, 3, 0])


def test_results_may_lie_over_inputs() -> None:
    g = Graph("over")
    x = g.input("x", f32[4])
    g.outputs(ops.flip(x, 0) + x)
    compiled = Session("xla").compile(g)
    memory = np.arange(4, dtype=np.float32)
    compiled.run_into({"x": memory}, [memory])
    np.testing.assert_array_equal(memory, [3, 3, 3, 3])


def test_control_flow_with_symbols() -> None:
    n = st.sym("n", 1, 32)
    g = Graph("loops")
    x = g.input("x", (n, 3))
    total, sums = ops.scan(lambda c, row: (c + row, ops.sum(c)), ops.zeros((3,)), x, reverse=True)
    grown = ops.while_loop(lambda s: ops.sum(s) < 100.0, lambda s: s * 2.0 + 1.0, total)
    chosen = ops.cond(ops.sum(x) > 0.0, lambda: grown, lambda: -grown)
    g.outputs(chosen, sums)
    found = {d: Session(d).compile(g) for d in ("xla", "cpu")}
    for size in (1, 4, 9):
        given = np.random.default_rng(size).standard_normal((size, 3)).astype(np.float32)
        for got, want in zip(*(c.run(x=given) for c in found.values()), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.skipif(find_spec("onnx") is None, reason="ONNX models need the package onnx")
def test_models_in_onnx() -> None:
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((4, 3, 3, 3)), "b": rng.standard_normal(4), "m": rng.standard_normal((4, 5))}
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("HardSwish", ["c"], ["h"]),
        helper.make_node("GlobalAveragePool", ["h"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "m"], ["l"]),
        helper.make_node("Softmax", ["l"], ["y"], axis=-1),
    ]
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, "h", "w_"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    loaded = [st.onnx.load(model, device=d) for d in ("xla", "cpu")]
    for shape in ((1, 3, 8, 8), (2, 3, 5, 7)):
        given = rng.standard_normal(shape).astype(np.float32)
        got, want = (m.run(x=given)[0] for m in loaded)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_processor_is_not_left_for_another_compiler() -> None:
    g = Graph("large")
    x = g.input("x", (512, 512))
    assert st.pick_device(g.outputs(x @ x), ["cpu", "xla"]) == "cpu"
