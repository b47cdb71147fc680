"""Every op as ONNX: the samples of each, exported, checked by onnx, and run by onnxruntime or onnx's own evaluator."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="ONNX models need the package onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="it runs what is exported")

import strata as st  # noqa: E402 - after the packages that it needs
from strata.core import TensorType, as_dtype  # noqa: E402
from strata.errors import LowerError, OptionError, StrataError  # noqa: E402
from strata.io.onnx import export, load  # noqa: E402
from strata.mir import REGISTRY, Op, Sample, evaluate  # noqa: E402
from tests.groups import check_all  # noqa: E402

NO_COUNTERPART = {  # decompositions of matrices, complex numbers, functions that ONNX has no op for, codes of weights
    "bitcast", "cholesky", "complex", "complex_norm_sq", "conj", "conv_filled", "custom", "custom_kernel",
    "dequant_weights", "eigh", "fft", "gcd", "imag", "lgamma", "lu", "paged_update", "polygamma", "qr", "real", "solve",
    "svd", "triangular_solve",
}  # fmt: skip
GROUPS = 6


@pytest.mark.parametrize("group", range(GROUPS))
def test_samples(group: int) -> None:
    onnxruntime.set_default_logger_severity(4)
    some = REGISTRY.classes()[group::GROUPS]
    check_all((f"{cls.name}-{i}", partial(check, cls, s)) for cls in some for i, s in enumerate(cls.samples()[:4]))


def check(cls: type[Op], sample: Sample, opset: int | None = None) -> None:
    arrays = sample.arrays()
    # onnxruntime hangs on convolutions of nothing; NaN has no place in orders of ONNX, complex numbers none at all
    if any(not a.size or a.dtype.kind == "c" for a in arrays):
        return
    if not cls.elementwise and any(a.dtype.kind == "f" and not np.isfinite(a).all() for a in arrays):
        return
    graph = st.Graph("g")
    made = cls(**sample.fields)(*(graph.input(f"x{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)))
    graph.outputs(*(made if isinstance(made, tuple) else (made,)))
    try:
        model = export(graph, opset=opset)
    except LowerError as error:
        if opset is not None and error.code == "L502":
            return
        if set(error.summary.partition("counterpart of ")[2].split(", ")) <= NO_COUNTERPART:
            return
        raise
    onnx.checker.check_model(model, full_check=True)
    feeds = {p.name: arrays[int(p.name[1:])] for p in model.graph.input}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for got, want in zip(ran(model, feeds), evaluate(graph, feeds), strict=True):
            close(got, np.asarray(want))


def ran(model: Any, feeds: dict[str, np.ndarray]) -> Any:
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            None, feeds
        )
    except Exception:  # noqa: BLE001 - it has no kernel for some element types that ONNX allows
        from onnx.reference import ReferenceEvaluator

        return ReferenceEvaluator(model).run(None, feeds)


def close(got: np.ndarray, want: np.ndarray) -> None:
    if got.dtype == np.uint8 and want.dtype.itemsize == 1 and want.dtype.kind not in "iub":
        got = got.view(want.dtype)  # how onnxruntime hands out float8
    rtol = 1e-2 if want.dtype.itemsize < 4 and want.dtype.kind not in "iub" else 1e-4
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=rtol / 10)


OPSETS = (8, 11, 13, 17, 18, 26)


@pytest.mark.parametrize("opset", OPSETS)
def test_samples_in_other_opsets(opset: int) -> None:
    """Each op is written as the opset has it, or refused with the names that it lacks."""
    onnxruntime.set_default_logger_severity(4)
    some = [(cls, s) for cls in REGISTRY.classes() for s in cls.samples()[:2]][OPSETS.index(opset) :: 3]
    check_all((cls.name, partial(check, cls, s, opset=opset)) for cls, s in some)


WIDENED = ("bool", "i8", "u16", "u32", "u64", "f16", "bf16", "f64")


@pytest.mark.parametrize("dtype", WIDENED)
def test_element_types_that_onnx_does_not_give_an_op(dtype: str) -> None:
    """A wider type takes their place: what comes out is of the type that it was."""
    onnxruntime.set_default_logger_severity(4)
    names = (
        "abs", "argmax", "argsort", "cos", "cummax", "cumsum", "floor", "fold_windows", "less", "matmul", "maximum",
        "negative", "pool_max", "pool_min", "reduce_max", "reduce_prod", "reduce_sum", "relu", "round", "sort", "topk",
    )  # fmt: skip
    kind = as_dtype(dtype)
    check_all((name, partial(check_as, REGISTRY[name], kind)) for name in names)


def check_as(cls: type[Op], kind: Any) -> None:
    sample = cls.samples()[0]
    first = sample.arrays()[0].dtype
    arrays = [np.nan_to_num(a).astype(kind.np) if a.dtype == first else a for a in sample.arrays()]
    try:
        cls(**sample.fields).infer(*(TensorType(as_dtype(a.dtype.name), a.shape) for a in arrays))
    except StrataError:  # not an op of this type
        return
    check(cls, Sample(*arrays, **sample.fields))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_quotients_of_narrow_floats(dtype: str) -> None:
    check(REGISTRY["floor_divide"], Sample(*(np.array(v, as_dtype(dtype).np) for v in ([7, -7, 9], [2, 2, -4]))))


def test_order_of_large_unsigned_integers() -> None:
    graph = st.Graph("g")
    x = graph.input("x", (4,), "u64")
    graph.outputs(st.ops.argsort(x), st.ops.sort(x))
    given = np.array([2**63 + 1, 5, 2**64 - 1, 0], np.uint64)
    at, found = ran(export(graph), {"x": given})
    assert at.tolist() == [3, 1, 0, 2]
    assert found.tolist() == sorted(given.tolist())


def test_softmax_of_one_axis_in_an_opset_that_flattens(rng: np.random.Generator) -> None:
    graph = st.Graph("g")
    graph.outputs(st.ops.softmax(graph.input("x", (2, 3, 4)), 1))
    x = rng.standard_normal((2, 3, 4), dtype=np.float32)
    (want,) = evaluate(graph, {"x": x})
    np.testing.assert_allclose(ran(export(graph, opset=11), {"x": x})[0], want, rtol=1e-5)


@pytest.mark.parametrize("opset", [0, 7, 1000, True, "21", 21.0])
def test_opsets_that_there_are_not(opset: Any) -> None:
    graph = st.Graph("g")
    graph.outputs(graph.input("x", (2,)) + 1)
    with pytest.raises(OptionError, match="opset"):
        export(graph, opset=opset)


def test_what_is_listed_has_none() -> None:
    from strata.io.onnx.exporter import WRITERS

    assert not NO_COUNTERPART & set(WRITERS)
    assert all(REGISTRY[name].decompose is Op.decompose for name in NO_COUNTERPART)


def test_control_flow_of_symbolic_sizes(rng: np.random.Generator) -> None:
    """A scan, a loop and a branch inside one another, at several sizes."""

    def body(total: Any, row: Any) -> Any:
        made = st.ops.cond(st.ops.sum(row) > 0, lambda a, b: a + b, lambda a, b: a - b, total, row)
        return made, made * 2.0

    graph = st.Graph("g")
    x = graph.input("x", (st.sym("n"), 3))
    last, all_ = st.ops.scan(body, st.ops.zeros((3,)), x)
    grown = st.ops.while_loop(lambda v: st.ops.sum(v * v) < 100.0, lambda v: v * 1.5 + 0.1, last)
    graph.outputs(last, all_, grown)
    session = onnxruntime.InferenceSession(export(graph).SerializeToString(), providers=["CPUExecutionProvider"])
    for n in (1, 4, 9):
        data = rng.standard_normal((n, 3), dtype=np.float32)
        for got, want in zip(session.run(None, {"x": data}), evaluate(graph, {"x": data}), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_size_that_no_input_has_alone(rng: np.random.Generator) -> None:
    graph = st.Graph("g")
    n = st.sym("n")
    x = graph.input("x", (2 * n + 3, 4))
    graph.outputs(st.ops.sum(st.ops.narrow(x, 0, 0, n), 0) + st.ops.iota(4, dtype="f32"))
    session = onnxruntime.InferenceSession(export(graph).SerializeToString(), providers=["CPUExecutionProvider"])
    for size in (1, 5):
        data = rng.standard_normal((2 * size + 3, 4), dtype=np.float32)
        want = data[:size].sum(0) + np.arange(4, dtype=np.float32)
        np.testing.assert_allclose(session.run(None, {"x": data})[0], want, rtol=1e-5, atol=1e-6)


def test_names_do_not_meet() -> None:
    graph = st.Graph("g")
    x, y = graph.input("v1", (2,)), graph.input("v2", (2,))
    graph.outputs((x + y) * x)
    model = export(graph)
    onnx.checker.check_model(model, full_check=True)
    np.testing.assert_allclose(ran(model, {"v1": np.full(2, 3, "f4"), "v2": np.full(2, 4, "f4")})[0], [21, 21])


def test_a_loaded_model_keeps_its_names_and_what_is_not_one_graph_its_nodes() -> None:
    helper, kinds = onnx.helper, onnx.TensorProto
    port = helper.make_tensor_value_info
    plain = helper.make_graph(
        [helper.make_node("Relu", ["in"], ["positive"])], "g", [port("in", kinds.FLOAT, ["n", 2])],
        [port("positive", kinds.FLOAT, ["n", 2])],
    )  # fmt: skip
    made = export(load(helper.make_model(plain)))
    assert [p.name for p in (*made.graph.input, *made.graph.output)] == ["in", "positive"]
    sized = helper.make_graph(
        [helper.make_node("NonZero", ["in"], ["at"]), helper.make_node("Size", ["at"], ["count"])], "g",
        [port("in", kinds.FLOAT, ["n", 2])], [port("count", kinds.INT64, [])],
    )  # fmt: skip
    model = load(helper.make_model(sized, opset_imports=[helper.make_opsetid("", 17)]))
    made = export(model)
    assert [n.op_type for n in made.graph.node] == ["NonZero", "Size"]
    with pytest.raises(LowerError, match="cannot be one graph"):
        export(model, opset=21)


def test_compiled_graphs_and_their_models_are_written_with_their_weights(rng: np.random.Generator) -> None:
    g = st.Graph("dense")
    x = g.input("x", (st.sym("n", 1, 8), 3))
    w = g.param("w", (3, 2))
    g.outputs(x @ w, x)
    compiled = st.Session("cpu").compile(g)
    weights = rng.standard_normal((3, 2), np.float32)
    compiled.set_param("w", weights)
    rows = rng.standard_normal((5, 3), np.float32)
    written = export(compiled)
    assert [i.name for i in written.graph.input] == ["x"]
    np.testing.assert_allclose(load(written).run(x=rows)[0], rows @ weights, rtol=1e-6)
    model = st.models.Model(compiled, ("product", "same"))
    named = export(model)
    assert [o.name for o in named.graph.output] == ["product", "same"]
    other = load(export(compiled, params={"w": 2 * weights}))
    np.testing.assert_allclose(other.run(x=rows)[0], rows @ (2 * weights), rtol=1e-6)


def test_a_model_of_torch_is_written(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    size = {0: torch.export.Dim("batch", max=64)}
    written = export(st.torch.load(module, (torch.ones(2, 4),), dynamic_shapes=(size,)))
    rows = rng.standard_normal((7, 4), np.float32)
    want = module(torch.from_numpy(rows)).detach().numpy()
    np.testing.assert_allclose(load(written).run({written.graph.input[0].name: rows})[0], want, rtol=1e-5, atol=1e-6)
