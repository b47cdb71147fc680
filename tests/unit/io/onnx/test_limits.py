"""Models that ask for more than they weigh: refused by a budget, or read in a time that grows with them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from strata.config import using
from strata.errors import BudgetError, FileError, StrataError
from strata.io.onnx import load
from strata.io.onnx.limits import OnnxLimits
from tests.fuzz.mutate.worker import peak_memory, resident_memory

node, info = helper.make_node, helper.make_tensor_value_info
ALLOWED = 256 << 20  # bytes that a refusal may take


def model(
    nodes: Sequence[Any], inputs: Sequence[Any] = (), outputs: Sequence[str] = ("y",), functions: Sequence[Any] = (),
    **held: Any,
) -> bytes:  # fmt: skip
    graph = helper.make_graph(
        list(nodes), "g", list(inputs), [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(x), name) for name, x in held.items()],
    )  # fmt: skip
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1), helper.make_opsetid("ai.onnx.ml", 3)]
    made = helper.make_model(graph, opset_imports=imports, functions=list(functions))
    return bytes(made.SerializeToString())


def run(data: bytes, device: str = "reference", **feeds: Any) -> Any:
    return load(data, device=device).run(feeds)


def doubled(op: str, times: int, **attributes: Any) -> list[Any]:
    return [node(op, [f"v{i}"] * 2, [f"v{i + 1}" if i < times - 1 else "y"], **attributes) for i in range(times)]


FAR = 1 << 40
GROWING = {
    "Concat": model(doubled("Concat", 40, axis=0), v0=np.arange(4)),
    "Concat of texts": model(doubled("Concat", 40, axis=0), v0=np.array(["a", "b"], object)),
    "StringConcat": model(doubled("StringConcat", 50), v0=np.array(["ab"], object)),
    "Concat of sizes": model(
        [node("Shape", ["x"], ["v0"]), *doubled("Concat", 40, axis=0)], [info("x", 1, ["n", "m"])]
    ),
    "Mul": model(
        [node("Unsqueeze", ["v", "end"], ["r"]), node("Mul", ["r", "v"], ["t"]), node("Reshape", ["t", "all"], ["w"]),
         node("Unsqueeze", ["w", "end"], ["r2"]), node("Mul", ["r2", "w"], ["y"])],
        v=np.ones(3000, np.float32), end=np.array([1]), all=np.array([-1]),
    ),
    **{
        f"{name}Window": model([node(f"{name}Window", ["n"], ["y"])], n=np.array(1 << 31))
        for name in ("Hann", "Hamming", "Blackman")
    },
    "MelWeightMatrix": model(
        [node("MelWeightMatrix", ["bins", "size", "rate", "low", "high"], ["y"])],
        bins=np.array(1 << 20), size=np.array(1 << 20), rate=np.array(16000), low=np.float32(0), high=np.float32(8000),
    ),
    "ConstantOfShape": model([node("ConstantOfShape", ["s"], ["y"])], s=np.array([FAR])),
    "ConstantOfShape of texts": model(
        [node("ConstantOfShape", ["s"], ["y"], value=helper.make_tensor("t", TensorProto.STRING, [1], [b"a"]))],
        s=np.array([1 << 33]),
    ),
    "Range": model([node("Range", ["a", "b", "c"], ["y"])], a=np.array(0), b=np.array(FAR), c=np.array(1)),
    "Expand": model([node("Expand", ["v", "s"], ["y"])], v=np.float32(1), s=np.array([1 << 20, 1 << 20])),
    "Tile": model([node("Tile", ["v", "s"], ["y"])], v=np.ones(2, np.float32), s=np.array([FAR])),
    "Pad": model([node("Pad", ["v", "s"], ["y"])], v=np.ones(2, np.float32), s=np.array([0, FAR])),
    "Resize": model(
        [node("Resize", ["v", "", "", "s"], ["y"], mode="linear")],
        v=np.ones((1, 1, 2, 2), np.float32), s=np.array([1, 1, 1 << 31, 2]),
    ),
    "Resize by scales": model(
        [node("Resize", ["v", "", "s"], ["y"], mode="cubic")],
        v=np.ones((1, 1, 2, 2), np.float32), s=np.array([1, 1, 1e12, 1], np.float32),
    ),
    "OneHot": model(
        [node("OneHot", ["v", "d", "s"], ["y"])], v=np.arange(8), d=np.array(FAR), s=np.array([0, 1], np.float32)
    ),
    "DFT": model(
        [node("DFT", ["v", "n", "a"], ["y"])], v=np.ones((1, 8, 1), np.float32), n=np.array(FAR), a=np.array(1)
    ),
    "RandomUniform": model([node("RandomUniform", [], ["y"], shape=[1 << 20, 1 << 20])]),
    "Split": model([node("Split", ["v"], ["y"], axis=0, num_outputs=FAR)], v=np.ones(4, np.float32)),
    "TfIdfVectorizer": model(
        [node("TfIdfVectorizer", ["v"], ["y"], mode="TF", min_gram_length=1, max_gram_length=1, max_skip_count=0,
              ngram_counts=[0], ngram_indexes=[FAR], pool_int64s=[1])],
        v=np.array([1, 2]),
    ),
    "SplitToSequence": model([node("SplitToSequence", ["x"], ["y"], axis=0)], [info("x", 1, ["n"])]),
}  # fmt: skip
FEEDS: dict[str, dict[str, Any]] = {
    "Concat of sizes": {"x": np.zeros((2, 3), np.float32)},
    "SplitToSequence": {"x": np.zeros(1 << 20, np.float32)},
}


@pytest.mark.parametrize("name", GROWING)
def test_growth_is_refused_before_memory_is_taken(name: str) -> None:
    before = resident_memory()
    with pytest.raises(StrataError) as caught:
        run(GROWING[name], **FEEDS.get(name, {}))
    assert isinstance(caught.value, BudgetError) or caught.value.code in ("F504", "S500"), str(caught.value)
    assert peak_memory() - before < ALLOWED


def test_a_sparse_tensor_that_is_large_when_dense() -> None:
    values = numpy_helper.from_array(np.ones(1, np.float64), "v")
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.zeros(1, np.int64), "i"), [1 << 35])
    data = model([node("Constant", [], ["y"], sparse_value=sparse)])
    with pytest.raises(BudgetError, match=r"sparse tensor 'v' of shape .* takes 256 GiB: more than max_folded_bytes"):
        run(data)


def test_constants_are_let_go_of() -> None:
    """A chain of nodes on one weight never has more than a few of its results: it is folded to the end."""
    chain = [node("Neg", [f"v{i}"], [f"v{i + 1}"]) for i in range(200)]
    data = model([*chain, node("Add", ["x", "v200"], ["y"])], [info("x", 1, [1])], v0=np.ones(1 << 16, np.float32))
    with using(max_folded_bytes=1 << 20):
        made = load(data, device="reference")
        assert [n.op.name for n in made.graph().nodes() if n.op.name == "negative"] == []
        np.testing.assert_array_equal(made.run(x=np.ones(1, np.float32))[0], np.full(1 << 16, 2, np.float32))


def test_what_has_no_room_is_left_to_the_graph() -> None:
    data = model(
        [node("Concat", ["w"] * 8, ["v"], axis=0), node("Add", ["x", "v"], ["y"])], [info("x", 1, [1])],
        w=np.ones(1 << 16, np.float32),
    )  # fmt: skip
    with using(max_folded_bytes=1 << 10):
        made = load(data, device="reference")
        assert "concat" in [n.op.name for n in made.graph().nodes()]
        assert made.run(x=np.ones(1, np.float32))[0].shape == (1 << 19,)


def functions(count: int, calls: int) -> list[Any]:
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
    made = [helper.make_function("own", "f0", ["a"], ["b"], [node("Relu", ["a"], ["b"])], imports)]
    for i in range(1, count):
        names = ["a", *(f"t{k}" for k in range(calls - 1)), "b"]
        inner = [node(f"f{i - 1}", [p], [q], domain="own") for p, q in pairwise(names)]
        made.append(helper.make_function("own", f"f{i}", ["a"], ["b"], inner, imports))
    return made


def test_functions_that_call_each_other_twice() -> None:
    call = [node("f29", ["x"], ["y"], domain="own")]
    with pytest.raises(BudgetError, match="nodes of the model, with its functions written out: more than max_nodes"):
        load(model(call, [info("x", 1, [2])], functions=functions(30, 2)))
    small = model([node("f9", ["x"], ["y"], domain="own")], [info("x", 1, [2])], functions=functions(10, 2))
    np.testing.assert_array_equal(run(small, x=np.array([-1, 2], np.float32))[0], [0, 2])


def test_a_function_that_calls_itself() -> None:
    own = helper.make_function(
        "own", "f", ["a"], ["b"], [node("f", ["a"], ["b"], domain="own")], [helper.make_opsetid("own", 1)]
    )
    with pytest.raises(FileError, match="function 'f' calls itself"):
        load(model([node("f", ["x"], ["y"], domain="own")], [info("x", 1, [2])], functions=[own]))


def loop(count: str, steps: int, body: Any) -> bytes:
    return model([node("Loop", [count, "", "x"], ["y"], body=body)], [info("x", 1, [2])], **{count: np.array(steps)})


def body_of(*nodes: Any) -> Any:
    return helper.make_graph(
        [*nodes, node("Identity", ["c"], ["d"])], "body",
        [info("i", 7, []), info("c", 9, []), info("v", 1, [2])], [info("d", 9, []), info("w", 1, [2])],
    )  # fmt: skip


def test_loops_inside_each_other_multiply() -> None:
    inner = body_of(node("Add", ["v", "v"], ["w"]))
    middle = body_of(node("Loop", ["m", "", "v"], ["w"], body=inner))
    with pytest.raises(BudgetError, match=r"Loop would run 4,000,000 steps: more than max_steps"):
        run(loop("m", 2000, middle), x=np.zeros(2, np.float32))
    assert run(loop("m", 20, middle), x=np.zeros(2, np.float32))[0].shape == (2,)


@pytest.mark.parametrize("ends", ["c", "yes"])
def test_a_loop_that_nothing_ends(ends: str) -> None:
    body = helper.make_graph(
        [node("Add", ["v", "v"], ["w"]), node("Identity", [ends], ["d"])], "body",
        [info("i", 7, []), info("c", 9, []), info("v", 1, [2])], [info("d", 9, []), info("w", 1, [2])],
    )  # fmt: skip
    loops = [node("Loop", ["", "go", "x"], ["y"], body=body)]
    data = model(loops, [info("x", 1, [2]), info("go", 9, [])], yes=np.array(True))
    with pytest.raises(FileError, match="Loop: nothing in its body ends it"):
        run(data, x=np.zeros(2, np.float32), go=np.array(True))
    np.testing.assert_array_equal(run(data, x=np.ones(2, np.float32), go=np.array(False))[0], [1, 1])


@pytest.mark.parametrize("keep", [0, 1])
def test_splitting_into_many(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many items as an axis has, each a view: the number of nodes and compiles does not grow with them."""
    counts: list[int] = []
    count = OnnxLimits.nodes
    monkeypatch.setattr(OnnxLimits, "nodes", lambda self, n=1: (counts.append(n), count(self, n))[1])
    data = model(
        [node("SplitToSequence", ["x"], ["s"], axis=0, keepdims=keep),
         node("ConcatFromSequence", ["s"], ["y"], axis=0, new_axis=1 - keep), node("SequenceLength", ["s"], ["n"])],
        [info("x", 1, ["n", 3])], ["y", "n"],
    )  # fmt: skip
    x = np.random.default_rng(0).standard_normal((4000, 3)).astype(np.float32)
    for device in ("reference", "cpu"):
        y, n = run(data, device, x=x)
        np.testing.assert_array_equal(y, x)
        assert n == 4000
    assert len(counts) < 40


def test_parts_of_given_sizes() -> None:
    data = model(
        [node("SplitToSequence", ["x", "parts"], ["s"], axis=1), node("SequenceAt", ["s", "at"], ["y"])],
        [info("x", 1, [2, None]), info("parts", 7, [None]), info("at", 7, [])],
    )  # fmt: skip
    x = np.arange(400, dtype=np.float32).reshape(2, 200)
    parts = np.array([1, 3] * 50)
    np.testing.assert_array_equal(run(data, x=x, parts=parts, at=np.array(-1))[0], x[:, -3:])
    with pytest.raises(StrataError):
        run(data, x=x, parts=parts[:-1], at=np.array(0))


def test_deep_chains_are_read() -> None:
    chain = [node("Add", [f"v{i}", "one"], [f"v{i + 1}"]) for i in range(3000)]
    data = model([node("Identity", ["x"], ["v0"]), *chain], [info("x", 1, ["n"])], ["v3000"], one=np.float32(1))
    assert len(load(data, device="reference").graph().nodes()) > 3000


def test_graphs_nested_too_deep() -> None:
    """Protobuf refuses a hundred messages inside each other by itself."""
    inner = helper.make_graph([node("Relu", ["x"], ["r0"])], "b0", [], [info("r0", 1, None)])
    for i in range(1, 12):
        made = node("If", ["k"], [f"r{i}"], then_branch=inner, else_branch=inner)
        inner = helper.make_graph([made], f"b{i}", [], [info(f"r{i}", 1, None)])
    data = model([node("If", ["k"], ["y"], then_branch=inner)], [info("x", 1, [2]), info("k", 9, [])])
    with using(max_depth=8), pytest.raises(BudgetError, match="subgraphs are nested 9 deep: more than max_depth"):
        load(data)
    with using(max_nodes=100), pytest.raises(BudgetError, match=r"nodes of the model, .*: more than max_nodes"):
        load(data)
