"""Every public name, called with what it cannot take: a StrataError that names the caller's line, on each device."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.config import logger
from strata.errors import ArgumentError, DeviceError, OptionError, OutOfMemoryError, ShapeError, StrataError, TraceError
from strata.io.onnx import NodeView
from strata.io.onnx.trace import OnnxTracer
from strata.models import Sampler
from tests.api.surface import callables, wrong_answers

X, W, K = np.ones((5, 4), "f4"), np.ones((4, 2), "f4"), np.zeros(3, "f4")
A = st.ones((2, 3))


def graph() -> st.Graph:
    g = st.Graph("g")
    x = g.input("x", (st.sym("seq", 1, 16), 4))
    g.outputs(x @ g.param("w", (4, 2)), g.input("kv", (3,)) + 1.0)
    return g


def module() -> Any:
    m = st.hir.Module("f")
    x = m.input("x", (st.sym("batch", 1, 8), 4), "f32")
    m.outputs(m.linear(x, m.param("w", (4, 4), "f32")))
    return m


CALLS: dict[str, Any] = {
    "tensor of a text": lambda: st.tensor("abc"),
    "ragged list": lambda: st.tensor([[1, 2], [3]]),
    "size that is not a number": lambda: st.empty((float("nan"),)),
    "half a size": lambda: st.ones((2.5,)),
    "more than memory": lambda: st.ones((1 << 62, 1 << 62)).numpy(),
    "variable without a range": lambda: st.Variable("N", 5, 4),
    "variable out of range": lambda: st.Variable("N", 1, 4).bind(9),
    "key of a text": lambda: st.random.key("x"),  # type: ignore[arg-type]
    "jit of a number": lambda: st.jit(3),  # type: ignore[call-overload]
    "jit variants": lambda: st.jit(lambda x: x, max_variants="a"),  # type: ignore[call-overload]
    "jit on a miss": lambda: st.jit(lambda x: x, on_miss="what"),
    "grad of many": lambda: st.grad(lambda x: x)(A),
    "grad of no argument": lambda: st.grad(lambda x: x.sum(), argnums=3)(A),
    "vmap of different lengths": lambda: st.vmap(lambda a, b: a + b)(st.ones((3,)), st.ones((4,))),
    "scan without a pair": lambda: st.scan(lambda c, x: c, st.tensor(0.0), st.arange(3.0)),  # type: ignore[arg-type]
    "scan of two lengths": lambda: st.scan(lambda c, x: (c, c), st.tensor(0.0), st.arange(3.0), length=5),
    "cond of several": lambda: st.cond(st.tensor([True, False]), lambda: 1, lambda: 2),
    "graph name": lambda: st.Graph(3),  # type: ignore[arg-type]
    "graph input twice": lambda: graph().input("x", (1,)),
    "graph input shape": lambda: st.Graph("q").input("a", 3.5),  # type: ignore[arg-type]
    "graph input size": lambda: st.Graph("q").input("a", (-1,)),
    "graph output": lambda: st.Graph("q").outputs(3),  # type: ignore[arg-type]
    "graph without outputs": lambda: st.Session("reference").compile(st.Graph("empty")),
    "parse of nothing": lambda: st.parse(""),
    "parse of a number": lambda: st.parse(3),  # type: ignore[arg-type]
    "module fusion": lambda: st.hir.Module("f", fusion="x"),
    "pipeline of a number": lambda: st.CompilePipeline("cpu").compile(3),
    "optimize of a number": lambda: st.CompilePipeline("cpu").optimize(3),  # type: ignore[arg-type]
    "plan of a number": lambda: st.CompilePipeline("cpu").plan(3),  # type: ignore[arg-type]
    "inspect of a number": lambda: st.CompilePipeline("cpu").inspect(3),
    "unknown symbol": lambda: st.CompilePipeline("cpu").compile(graph()).specialize({"nope": 1}),
    "symbol that is a text": lambda: st.CompilePipeline("cpu").compile(graph()).specialize({"seq": "a"}),  # type: ignore[dict-item]
    "half a symbol": lambda: st.CompilePipeline("cpu").compile(graph()).specialize({"seq": 2.5}),  # type: ignore[dict-item]
    "symbol out of range": lambda: st.CompilePipeline("cpu").compile(graph()).specialize({"seq": 99}),
    "unknown op to force": lambda: st.CompileOptions(force_common=("nope",)),
    "tune": lambda: st.CompileOptions(tune="x"),
    "memory limit": lambda: st.CompileOptions(memory_limit=-1),
    "binding": lambda: st.CompileOptions(dim_binding=3),  # type: ignore[arg-type]
    "negative binding": lambda: st.CompileOptions(dim_binding={"a": -1}),
    "flag": lambda: st.CompileOptions(deterministic="x"),  # type: ignore[arg-type]
    "grad of an unknown input": lambda: st.transforms.grad(graph(), wrt=["nope"]),
    "report of a number": lambda: st.dispatch_report(3, "cpu"),
    "device of a number": lambda: st.pick_device(3),
    "backend without methods": lambda: st.register_backend("x", 3),  # type: ignore[arg-type]
    "backend without a name": lambda: st.register_backend("a b", st.Device("reference").backend),
    "load of a number": lambda: st.load(3),
    "load of nothing": lambda: st.load("no-such-file.onnx"),
    "bundle of a number": lambda: st.load_compiled(3),  # type: ignore[arg-type]
    "export of a number": lambda: st.onnx.export(3, "x.onnx"),
    "export to nowhere": lambda: st.onnx.export(graph(), "no/such/folder/x.onnx"),
    "cache of nothing": lambda: st.CompileCache("cpu", 0),
    "cache policy": lambda: st.CompileCache("cpu", 4, policy="x"),
    "cache without a function": lambda: st.CompileCache("reference", 4).get_or_compile("z", 3),  # type: ignore[arg-type]
    "no buckets": lambda: st.BucketedCompileCache("cpu", []),
    "buckets of a number": lambda: st.BucketedCompileCache("cpu", 3),  # type: ignore[arg-type]
    "buckets that overlap": lambda: st.BucketedCompileCache("cpu", [range(1, 16), range(8, 32)]),
    "trace to nowhere": lambda: st.trace("no/such/folder/run.json").__enter__(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_is_named_with_its_line(name: str) -> None:
    refused(CALLS[name])


def refused(call: Any) -> StrataError:
    with pytest.raises(StrataError) as caught:
        call()
    assert "test_mistakes.py:" in str(caught.value), f"no line of the caller in {caught.value}"
    return caught.value


RUNS: dict[str, Any] = {
    "nothing": lambda c: c.run(),
    "an input less": lambda c: c.run(x=X),
    "an input more": lambda c: c.run(x=X, kv=K, z=X),
    "an input twice": lambda c: c.run({"x": X}, x=X, kv=K),
    "no mapping": lambda c: c.run(3),
    "another shape": lambda c: c.run(x=X[:, :3], kv=K),
    "another dtype": lambda c: c.run(x=X.astype("c8"), kv=K),
    "a size out of range": lambda c: c.run(x=np.ones((99, 4), "f4"), kv=K),
    "a text": lambda c: c.run(x="a", kv=K),
    "None": lambda c: c.run(x=None, kv=K),
    "unknown parameter": lambda c: c.set_param("nope", W),
    "shape of a parameter": lambda c: c.set_param("w", W.T),
    "parameters of a number": lambda c: c.set_params(3),
    "one result too few": lambda c: c.run_into({"x": X, "kv": K}, out=[np.zeros((5, 2), "f4")]),
    "dtype of a result": lambda c: c.run_into({"x": X, "kv": K}, out=[np.zeros((5, 2)), np.zeros(3, "f4")]),
    "results of a number": lambda c: c.run_into({"x": X, "kv": K}, out=3),
    "unknown state": lambda c: c.bind("nope", K),
    "state that is not bound": lambda c: c.read("kv"),
    "feed of no output": lambda c: c.feed("kv", output=9),
    "feed of another shape": lambda c: c.feed("kv", output=0),
    "unknown extent": lambda c: c.set_active_extent("nope", 2),
    "extent out of range": lambda c: c.set_active_extent("seq", 99),
    "half an extent": lambda c: c.set_active_extent("seq", 2.5),
}


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("name", RUNS)
def test_mistakes_with_a_compiled_graph(name: str, device: str) -> None:
    c = st.Session(device).compile(graph())
    c.set_param("w", W)
    refused(lambda: RUNS[name](c))
    np.testing.assert_array_equal(c.run(x=X, kv=K)[0], X @ W)


def test_mistakes_with_bundles(tmp_path: Path) -> None:
    c = st.Session("cpu").compile(graph())
    for call in (
        lambda: c.save(3), lambda: c.save(tmp_path / "no/such/x"), lambda: c.save(tmp_path / "x", levels=["zork"]),
        lambda: c.save(tmp_path / "x", levels=[]), lambda: c.save(tmp_path / "x", levels="avx2"),
        lambda: c.save(tmp_path / "x", levels=3), lambda: st.Session("reference").compile(graph()).save(tmp_path / "x"),
    ):  # fmt: skip
        refused(call)
    assert not list(tmp_path.iterdir())


def test_one_key_is_for_one_set_of_sizes() -> None:
    cache = st.DynamicDimCompileCache("reference", 4)
    made = cache.get_or_specialize("k", {"batch": 2}, module)
    assert cache.get_or_specialize("k", {"batch": 2}, module) is made
    assert isinstance(refused(lambda: cache.get_or_specialize("k", {"batch": 3}, module)), OptionError)


@pytest.mark.usefixtures("without_packages")
@pytest.mark.parametrize("name", ["cuda:0", "cuda", "wgpu", "xla", "xla:3"])
def test_a_device_that_is_not_there_says_what_to_install(name: str) -> None:
    kind = name.partition(":")[0]
    for call in (
        lambda: st.Device(name), lambda: st.Session(name), lambda: st.dispatch_report(graph(), name),
        lambda: st.CompilePipeline(name), lambda: st.CompileCache(name, 4), lambda: st.ModelCompilePipeline(name),
    ):  # fmt: skip
        error = refused(call)
        assert isinstance(error, DeviceError)
        assert f"strata[{kind}]" in str(error)


@pytest.mark.parametrize("name", ["zork", "", None, 3, "cpu:zork", "cpu:-1"])
def test_no_such_device(name: Any) -> None:
    refused(lambda: st.Device(name))


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_what_memory_does_not_hold_is_an_error(device: str) -> None:
    """Scratch memory, a result, and the copy of an input that does not lie in order: each more than there are
    addresses, as some systems promise all that they could address."""
    row, column = np.ones((1, 1 << 24), "f4"), np.ones((1 << 24, 1), "f4")

    def scratch() -> Any:
        g = st.Graph("g")
        x, y = g.input("x", column.shape), g.input("y", row.shape)
        g.outputs(st.ops.sort(x + y, axis=0).sum())
        return st.Session(device).compile(g).run(x=column, y=row)

    def result() -> Any:
        g = st.Graph("g")
        g.outputs(g.input("x", (1,)).broadcast_to((1 << 50,)) + 1.0)
        return st.Session(device).compile(g).run(x=np.ones(1, "f4"))

    def copied() -> Any:
        g = st.Graph("g")
        g.outputs(g.input("x", (1 << 50,)).sum())
        return st.Session(device).compile(g).run(x=np.broadcast_to(np.float32(1), (1 << 50,)))

    for call in (scratch, result, copied):
        assert isinstance(refused(call), OutOfMemoryError)


class Framed:
    """What NumPy can read, and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array if dtype is None else self.array.astype(dtype)


STRANGE: dict[str, Any] = {
    "masked array": lambda: st.tensor(np.ma.array([1.0], mask=[True])),
    "masked argument": lambda: st.jit(lambda x: x)(np.ma.array([1.0], mask=[True])),
    "masked operand": lambda: A + np.ma.array([1.0, 2.0, 3.0], mask=[0, 1, 0]),
    "large masked operand": lambda: st.zeros((99,)) + np.ma.array(np.ones(99), mask=np.ones(99)),
    "objects": lambda: A + np.array([1, None, 2]),
    "texts": lambda: A + np.array(["a", "b", "c"]),
    "records": lambda: st.jit(lambda x: x)(np.zeros(3, [("a", "f4")])),
    "dates": lambda: st.tensor(np.array(["2020-01-01"], "M8[D]")),
    "long floats": lambda: A + np.ones(3, np.longdouble),
    "number beyond 64 bits": lambda: st.tensor(1 << 70),
    "operand beyond 64 bits": lambda: st.tensor([1, 2]) + (1 << 70),
    "operand beyond its type": lambda: st.tensor([1], dtype="i8") + 300,
    "negative operand of an unsigned type": lambda: st.tensor([1], dtype="u8") + -1,
    "filled beyond its type": lambda: st.full((2,), 300, "i8"),
    "list beyond its type": lambda: st.tensor([1, 300], dtype="i8"),
    "negative list of an unsigned type": lambda: st.tensor((-1,), dtype="u32"),
    "realize of a number": lambda: st.realize(3),
    "realize of texts": lambda: st.realize({"a": "b"}),
    "generator": lambda: st.tensor(i for i in range(3)),
}


@pytest.mark.parametrize("name", STRANGE)
def test_strange_data_is_refused(name: str) -> None:
    refused(STRANGE[name])


def test_data_of_any_layout_is_read() -> None:
    """Byte order, order of axes, strides, alignment, subclasses, read-only memory, no elements, what NumPy can read."""
    x = np.arange(24, dtype="f4").reshape(4, 6)
    bytes_behind = np.frombuffer(b"\0" + x.tobytes(), "f4", 24, 1).reshape(4, 6)
    given = [
        x.astype(">f4"), np.asfortranarray(x), x[::-1, ::-1], x[:, ::2], bytes_behind, x.view(np.matrix), Framed(x),
        np.broadcast_to(x[0], (4, 6)), x[:0], x[:, :0], np.repeat(x, 20, 0)[::-1].T, memoryview(x),
    ]  # fmt: skip
    double = st.jit(lambda x: x * 2.0)
    for data in given:
        want = np.asarray(data).astype("f4")
        assert double(st.tensor(data)).numpy().tolist() == (want * 2).tolist()
        assert (st.zeros(want.shape) + np.asarray(data)).numpy().tolist() == want.tolist()
        if not isinstance(data, memoryview):
            assert double(data).numpy().tolist() == (want * 2).tolist()
        g = st.Graph("g")
        g.outputs(g.input("x", want.shape) * 2.0)
        assert st.Session("cpu").compile(g).run(x=data)[0].tolist() == (want * 2).tolist()


def test_generators_of_tensors_are_lists() -> None:
    rows = [st.tensor([float(i), 1.0]) for i in range(3)]
    assert st.stack(r for r in rows).tolist() == [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]]
    assert st.concat(r for r in rows).tolist() == [0.0, 1.0, 1.0, 1.0, 2.0, 1.0]


def test_functions_of_numpy_compute_tensors() -> None:
    x = st.tensor([1.0, 2.0, 3.0])
    assert np.sum(x) == 6.0
    assert np.mean(x + 1.0) == 3.0
    assert np.concatenate([x, x + 1.0]).tolist() == [1.0, 2.0, 3.0, 2.0, 3.0, 4.0]
    assert np.linalg.norm(x * 0.0) == 0.0
    with pytest.raises(StrataError, match="only traced"):
        st.jit(np.sum)(x)


def test_numbers_at_the_ends_of_their_types_fit() -> None:
    for dtype, low, high in (
        ("i8", -128, 127),
        ("u8", 0, 255),
        ("i64", -(1 << 63), (1 << 63) - 1),
        ("u64", 0, (1 << 64) - 1),
    ):
        assert st.full((2,), high, dtype).tolist() == [high, high]
        assert st.tensor([low, high], dtype=dtype).tolist() == [low, high]
        assert (st.zeros((1,), dtype) + low).tolist() == [low]
    assert (st.tensor([1.0]) + (1 << 70)).tolist() == [float(1 << 70)]


# ------------------------------------------------------------------------------------------------ every public callable


EVERYTHING = list(callables())
TOGETHER = 50


@pytest.mark.parametrize("first", range(0, len(EVERYTHING), TOGETHER), ids=lambda first: EVERYTHING[first].name)
def test_wrong_calls_of_everything_that_is_public(first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the calls; `python -m tests.api.surface` makes all of them."""
    monkeypatch.chdir(tmp_path)
    some = EVERYTHING[first : first + TOGETHER]
    level = logger.level
    try:
        with st.config.using(cache_dir=tmp_path / "cache"):
            assert [told for target in some for told in wrong_answers(target, every=False)] == []
    finally:
        logger.setLevel(level)  # some of them set it for the process


NAMED: dict[str, tuple[Any, str]] = {
    "misspelt option": (lambda: st.CompileOptions(fusoin=1), "did you mean 'fusion'"),  # type: ignore[call-arg]
    "list as a key": (lambda: st.CompileCache("reference", 2).get_or_compile([], graph), "can be a key, got \\[\\]"),  # type: ignore[arg-type]
    "text as a key": (lambda: buckets().bucket_for("a"), "key is a whole number, got 'a'"),  # type: ignore[arg-type]
    "half a key": (lambda: buckets().get_or_compile(2.5, graph), "whole number, got 2.5"),  # type: ignore[arg-type]
    "half a ladder": (
        lambda: st.BucketedCompileCache.power_of_two_ladder("reference", 1.5, 8),  # type: ignore[arg-type]
        "min is a whole number, got 1.5",
    ),
    "list of sizes": (
        lambda: st.DynamicDimCompileCache("reference", 2).get_or_specialize("k", [1], module),  # type: ignore[arg-type]
        "binding is a mapping of names to whole numbers, got \\[1\\]",
    ),
    "no builder": (
        lambda: st.DynamicDimCompileCache("reference", 2).get_or_specialize("k", {"batch": 1}, 3),  # type: ignore[arg-type]
        "build_hir is a function, got 3",
    ),
    "number as a folder": (lambda: st.AotCache(3), "root is a .*path, got 3"),  # type: ignore[arg-type]
    "no inputs": (lambda: buckets().run_padded(2, 2, lambda n: graph(), inputs=None), "inputs is .*, got None"),  # type: ignore[arg-type]
    "unknown pass": (lambda: st.CompileOptions(skip_passes=("fodl",)), "no pass is named 'fodl'; did you mean 'fold'"),
    "steps that are a text": (lambda: st.CompileOptions(unroll="x"), "unroll is a whole number, got 'x'"),  # type: ignore[arg-type]
    "steps below none": (lambda: st.CompileOptions(unroll=-1), "unroll must be a count"),
    "negative batch": (lambda: st.ModelVariant.prefill(-1, 2), "batch cannot be -1"),
    "truth as a size": (lambda: st.Variable("N", 1, 4).bind(True), "it cannot be True"),
    "no node": (
        lambda: NodeView(object.__new__(OnnxTracer), st.ones(2), [], 1),
        "proto is a node of a model, got a Tensor",
    ),
    "logits of objects": (
        lambda: Sampler().probabilities(np.array([None, "a"], object), []),
        "logits are real numbers, got object",
    ),
    "elements that are objects": (lambda: st.xp.from_dlpack(np.array([None], object)), "gives no elements"),
    "product of truths": (lambda: st.ones((2, 2), "bool") @ st.ones((2, 2), "bool"), "does not take bool"),
}


def buckets() -> st.BucketedCompileCache:
    return st.BucketedCompileCache("reference", [range(1, 5)])


@pytest.mark.parametrize("name", NAMED)
def test_a_mistake_is_told_in_the_callers_words(name: str) -> None:
    call, said = NAMED[name]
    error = refused(call)
    assert re.search(said, error.summary), error.summary


def test_integers_of_numpy_are_integers() -> None:
    n = st.Variable("N", np.int64(1), np.int32(8))
    assert n.bind(np.int64(3)).value == 3
    plan = (st.empty((n,)) + 1.0).prepare()
    assert plan.execute(N=np.int64(4)).output(0).shape == (4,)
    assert buckets().bucket_for(np.int64(2)) == 0
    assert st.CompileCache("reference", np.uint8(3)).capacity == 3
    assert st.CompileOptions(unroll=np.int64(2)).unroll == 2
    assert st.ModelVariant.prefill(np.int32(1), np.int64(2)).dim_binding() == {"batch": 1, "seq": 2}


COUNTED: dict[str, Callable[[Any], Any]] = {
    "arange": st.arange,
    "split": lambda n: st.split(np.ones((4, 6), np.float32), n)[0],
    "pad": lambda n: st.pad(np.ones((4, 6), np.float32), n),
    "pad of an axis": lambda n: st.pad(np.ones((4, 6), np.float32), [(n, n), (0, n)]),
    "roll": lambda n: st.roll(np.arange(6), n),
    "tensordot": lambda n: st.tensordot(np.ones((2, 3, 3), np.float32), np.ones((3, 3, 5), np.float32), n),
    "permutation": lambda n: st.random.permutation(st.random.key(0), n),
    "rfft": lambda n: st.rfft(np.ones((3, 8), np.float32), n),
    "frames": lambda n: st.frames(np.ones(9, np.float32), n, n),
    "matrix_power": lambda n: st.matrix_power(np.eye(3, dtype=np.float32), n),
    "group_norm": lambda n: st.group_norm(np.ones((2, 4, 3, 3), np.float32), n),
    "max_pool2d": lambda n: st.max_pool2d(np.ones((1, 1, 6, 6), np.float32), n),
    "avg_pool2d stride": lambda n: st.avg_pool2d(np.ones((1, 1, 6, 6), np.float32), 2, stride=n),
    "conv2d": lambda n: st.conv2d(np.ones((1, 1, 6, 6), np.float32), np.ones((1, 1, 2, 2), np.float32), padding=(n, n)),
    "topk": lambda n: st.topk(np.arange(6.0), n)[0],
}


@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_whole_numbers_of_any_kind_and_nothing_else(name: str) -> None:
    call = COUNTED[name]
    want = call(2).numpy()
    for n in (np.int64(2), np.uint8(2), np.int32(2)):
        np.testing.assert_array_equal(call(n).numpy(), want)
    for n in (2.5, "2", True, np.float32(2)):
        if name == "arange" and not isinstance(n, str):
            continue  # which counts in steps of any size
        refused(lambda n=n: call(n))


def test_comparisons_of_values_are_element_by_element() -> None:
    g = st.Graph("g")
    a, b = g.input("a", (3,)), g.input("b", (3,))
    g.outputs(st.ops.where(a == b, 1.0, 2.0), st.ops.where(a != 1.0, a, b), a == a)
    x, y = np.array([1, 2, np.nan], "f4"), np.array([1, 3, 4], "f4")
    first, second, third = st.Session("cpu").compile(g).run(a=x, b=y)
    np.testing.assert_array_equal(first, np.where(x == y, 1.0, 2.0))
    np.testing.assert_array_equal(second, np.where(x != 1.0, x, y))
    np.testing.assert_array_equal(third, [True, True, False])
    assert a in (b, a)
    assert {a: 1}[g.inputs[0]] == 1
    assert a.same_as(g.inputs[0])
    assert not a.same_as(b)
    assert a != "text"
    for unknown in (
        lambda: bool(a == b), lambda: a < b < a, lambda: not a, lambda: a and b, lambda: 1.0 in a,
        lambda: int(a), lambda: float(a), lambda: complex(a),
    ):  # fmt: skip
        assert isinstance(refused(unknown), TraceError)


@pytest.mark.parametrize("file", ["<stdin>", "<console>", "<python-input-3>", "<ipython-input-3-0a1b>"])
def test_what_is_typed_in_is_the_users_program(file: str) -> None:
    g = st.Graph("g")
    scope = {"a": g.input("a", (3,)), "b": g.input("b", (3,)), "st": st}
    assert isinstance(eval(compile("a == b", file, "eval"), scope), st.Value)  # noqa: S307 - our own source
    with pytest.raises(ShapeError) as caught:
        eval(compile("st.ones((2, 3)) @ st.ones((2, 3))", file, "eval"), scope)  # noqa: S307
    assert f"{file}:1" in str(caught.value)


def test_values_of_two_graphs_do_not_meet() -> None:
    x, y = st.Graph("encoder").input("x", (3,)), st.Graph("decoder").input("y", (3,))
    for mix in (lambda: x + y, lambda: st.ops.concat([x.exp(), y * 2.0]), lambda: st.ops.where(x > 0.0, y, 0.0)):
        error = refused(mix)
        assert isinstance(error, TraceError)
        assert "'encoder'" in error.summary
        assert "'decoder'" in error.summary


def test_a_callback_keeps_its_errors() -> None:
    def broken(*_: Any) -> Any:
        raise TypeError("mine")

    for call in (
        lambda: st.jit(broken)(A), lambda: st.grad(broken)(A), lambda: st.vmap(broken)(A),
        lambda: st.CompileCache("reference", 2).get_or_compile("k", broken), lambda: st.scan(broken, A, A),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="mine") as caught:
            call()
        assert not isinstance(caught.value, ArgumentError)
