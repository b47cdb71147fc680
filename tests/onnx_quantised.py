"""Models that onnxruntime quantises, run here and there: `python -m tests.onnx_quantised` compares all of them.

Small networks are quantised in every way that `onnxruntime.quantization` has. Where the two runtimes differ, the graph
that onnxruntime makes of the file is cut at its codes: each piece is run by both on the same codes, and once in f64,
with sums and products that are exact. A piece is right if its codes are the exact numbers rounded either
way (a number next to a half may go up or down), or its numbers are as close as f32 gets.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

node = helper.make_node
Feeds = dict[str, np.ndarray]
CLOSE = 1e-5  # of the largest number

# ------------------------------------------------------------------------------------------------------------- networks


def _proto(nodes: list[Any], kind: int, shape: list[Any], held: dict[str, Any]) -> Any:
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", kind, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(a), name) for name, a in held.items()],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return onnx.shape_inference.infer_shapes(made)


def _weights(rng: np.random.Generator, **shapes: tuple[int, ...]) -> dict[str, Any]:
    """Matrices [in, out] and filters [out, in, …] that keep the size of numbers; short ones are biases."""

    def scale(shape: tuple[int, ...]) -> float:
        return 0.1 if len(shape) == 1 else float(np.prod(shape[1:] if len(shape) > 2 else shape[:1])) ** -0.5

    return {name: np.float32(rng.standard_normal(shape) * scale(shape)) for name, shape in shapes.items()}


def perceptron(rng: np.random.Generator) -> Any:
    held = _weights(rng, w1=(64, 128), b1=(128,), w2=(128, 96), b2=(96,), w3=(96, 10))
    nodes = [
        node("MatMul", ["x", "w1"], ["m"]), node("Add", ["m", "b1"], ["a"]), node("Relu", ["a"], ["r"]),
        node("Gemm", ["r", "w2", "b2"], ["g"]), node("Tanh", ["g"], ["t"]), node("MatMul", ["t", "w3"], ["y"]),
    ]  # fmt: skip
    return _proto(nodes, TensorProto.FLOAT, ["n", 64], held)


def convolutions(rng: np.random.Generator) -> Any:
    held = _weights(
        rng, w1=(16, 3, 3, 3), b1=(16,), w2=(16, 1, 3, 3), b2=(16,), w3=(32, 16, 1, 1), b3=(32,), w4=(32, 32, 3, 3),
        b4=(32,), w5=(32, 10),
    )  # fmt: skip
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1] * 4), node("Relu", ["c1"], ["r1"]),
        node("Conv", ["r1", "w2", "b2"], ["c2"], pads=[1] * 4, group=16), node("Sigmoid", ["c2"], ["s2"]),
        node("Mul", ["c2", "s2"], ["h2"]), node("Conv", ["h2", "w3", "b3"], ["c3"], strides=[2, 2]),
        node("LeakyRelu", ["c3"], ["l3"], alpha=0.1), node("Conv", ["l3", "w4", "b4"], ["c4"], pads=[1] * 4),
        node("Add", ["c4", "l3"], ["a4"]), node("MaxPool", ["a4"], ["p4"], kernel_shape=[2, 2], strides=[2, 2]),
        node("GlobalAveragePool", ["p4"], ["g4"]), node("Flatten", ["g4"], ["f4"]), node("MatMul", ["f4", "w5"], ["y"]),
    ]  # fmt: skip
    return _proto(nodes, TensorProto.FLOAT, ["n", 3, 16, 16], held)


def hourglass(rng: np.random.Generator) -> Any:
    """Down and up again: pooling whose means are ties, transposed convolution, resize, concatenation, masks."""
    held = _weights(
        rng, w1=(8, 3, 3, 3), b1=(8,), w2=(12, 8, 3, 3), b2=(12,), w3=(12, 8, 2, 2), b3=(8,), w4=(6, 16, 1, 1), b4=(6,),
        g=(12,), b=(12,), w5=(5, 512), b5=(5,),
    ) | {
        "g": np.ones(12, np.float32), "low": np.float32(0), "high": np.float32(6), "sizes": np.float32([1, 1, 2, 2]),
        "parts": np.array([2, 4]), "limit": np.float32(0.2),
    }  # fmt: skip
    nodes = [
        node("Conv", ["x", "w1", "b1"], ["c1"], pads=[1] * 4), node("Clip", ["c1", "low", "high"], ["r1"]),
        node("AveragePool", ["r1"], ["p1"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["p1", "w2", "b2"], ["c2"], pads=[1] * 4), node("InstanceNormalization", ["c2", "g", "b"], ["i2"]),
        node("Relu", ["i2"], ["r2"]), node("ConvTranspose", ["r2", "w3", "b3"], ["t3"], strides=[2, 2]),
        node("Resize", ["p1", "", "sizes"], ["u1"], mode="nearest"), node("Concat", ["t3", "u1"], ["d3"], axis=1),
        node("Conv", ["d3", "w4", "b4"], ["c4"]), node("Split", ["c4", "parts"], ["s1", "s2"], axis=1),
        node("Softmax", ["s2"], ["q2"], axis=1), node("ReduceMean", ["q2"], ["m2"], axes=[1], keepdims=1),
        node("Greater", ["s1", "limit"], ["is"]), node("Where", ["is", "s1", "m2"], ["o"]),
        node("Flatten", ["o"], ["f"]), node("Gemm", ["f", "w5", "b5"], ["y"], transB=1, alpha=0.7, beta=1.3),
    ]  # fmt: skip
    return _proto(nodes, TensorProto.FLOAT, ["n", 3, 16, 16], held)


def encoder(rng: np.random.Generator) -> Any:
    """A layer of BERT with its table of words."""
    d = 32
    held = _weights(
        rng, e=(50, d), wq=(d, d), wk=(d, d), wv=(d, d), wo=(d, d), bq=(d,), bo=(d,), b=(d,), w1=(d, 4 * d),
        b1=(4 * d,), w2=(4 * d, d), b2=(d,),
    ) | {
        "g": np.ones(d, np.float32), "heads": np.array([0, 0, 4, 8]), "flat": np.array([0, 0, d]),
        "scale": np.float32(8**-0.5), "half": np.float32(0.5), "one": np.float32(1), "root": np.float32(2**0.5),
    }  # fmt: skip
    held["e"] *= 50**0.5
    nodes = [node("Gather", ["e", "x"], ["h"])]
    for part in "qkv":
        nodes.append(node("MatMul", ["h", f"w{part}"], [f"{part}0"]))
        nodes += [node("Add", ["bq", "q0"], ["q1"])] if part == "q" else []
        nodes.append(node("Reshape", ["q1" if part == "q" else f"{part}0", "heads"], [f"{part}r"]))
        nodes.append(node("Transpose", [f"{part}r"], [f"{part}t"], perm=[0, 2, 3, 1] if part == "k" else [0, 2, 1, 3]))
    nodes += [
        node("MatMul", ["qt", "kt"], ["s"]), node("Mul", ["s", "scale"], ["t"]), node("Softmax", ["t"], ["p"], axis=-1),
        node("MatMul", ["p", "vt"], ["c"]), node("Transpose", ["c"], ["ct"], perm=[0, 2, 1, 3]),
        node("Reshape", ["ct", "flat"], ["cr"]), node("MatMul", ["cr", "wo"], ["o"]), node("Add", ["o", "bo"], ["ob"]),
        node("Add", ["ob", "h"], ["sum"]), node("LayerNormalization", ["sum", "g", "b"], ["n"], axis=-1),
        node("MatMul", ["n", "w1"], ["f"]), node("Add", ["f", "b1"], ["fb"]), node("Div", ["fb", "root"], ["fd"]),
        node("Erf", ["fd"], ["fe"]), node("Add", ["fe", "one"], ["f1"]), node("Mul", ["fb", "f1"], ["f2"]),
        node("Mul", ["f2", "half"], ["f3"]), node("MatMul", ["f3", "w2"], ["m2"]), node("Add", ["m2", "b2"], ["o2"]),
        node("Add", ["o2", "n"], ["last"]), node("LayerNormalization", ["last", "g", "b"], ["y"], axis=-1),
    ]  # fmt: skip
    return _proto(nodes, TensorProto.INT64, ["n", "t"], held)


def recurrent(rng: np.random.Generator) -> Any:
    held = _weights(rng, w=(1, 96, 16), r=(1, 96, 24), v=(24, 8)) | {"axis": np.array([1])}
    held |= {k: np.float32(held[k] * 10) for k in "wr"} | {"b": np.float32(rng.standard_normal((1, 192)) * 0.1)}
    nodes = [
        node("LSTM", ["x", "w", "r", "b"], ["h"], hidden_size=24), node("Squeeze", ["h", "axis"], ["s"]),
        node("MatMul", ["s", "v"], ["y"]),
    ]  # fmt: skip
    return _proto(nodes, TensorProto.FLOAT, ["t", "n", 16], held)


NETWORKS: dict[str, tuple[Callable[[np.random.Generator], Any], tuple[int, ...]]] = {
    "perceptron": (perceptron, (5, 64)), "convolutions": (convolutions, (2, 3, 16, 16)),
    "hourglass": (hourglass, (2, 3, 16, 16)), "encoder": (encoder, (2, 7)), "recurrent": (recurrent, (6, 2, 16)),
}  # fmt: skip


def inputs(name: str, seed: int) -> Feeds:
    rng, shape = np.random.default_rng(seed), NETWORKS[name][1]
    return {"x": rng.integers(0, 50, shape) if name == "encoder" else rng.standard_normal(shape, dtype=np.float32)}


# ----------------------------------------------------------------------------------------------------------------- ways


@dataclass(frozen=True)
class Way:
    """How a network is quantised."""

    kind: str  # dynamic, QDQ, QOperator or blocks
    weights: str = "QInt8"
    activations: str = "QUInt8"
    per_channel: bool = False
    reduce_range: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        flags = [w for w, is_so in (("per channel", self.per_channel), ("reduced", self.reduce_range)) if is_so]
        extra = [f"{k}={v}" for k, v in self.options]
        return ", ".join([f"{self.kind} {self.activations}×{self.weights}", *flags, *extra])

    def quantise(self, name: str, folder: Path) -> Any:
        """The quantised network."""
        from onnxruntime import quantization as q

        source, target = folder / "plain.onnx", folder / "quantised.onnx"
        onnx.save(NETWORKS[name][0](np.random.default_rng(0)), source)
        if self.kind == "blocks":
            from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

            logging.getLogger("onnxruntime.quantization.matmul_nbits_quantizer").setLevel(logging.WARNING)
            maker = MatMulNBitsQuantizer(onnx.load(source), quant_format=q.QuantFormat.QOperator, **dict(self.options))
            maker.process()
            return maker.model.model
        shared = {
            "weight_type": q.QuantType[self.weights], "per_channel": self.per_channel,
            "reduce_range": self.reduce_range,
        }  # fmt: skip
        if self.kind == "dynamic":
            q.quantize_dynamic(source, target, **shared)
            return onnx.load(target)

        class Reader(q.CalibrationDataReader):  # type: ignore[misc]
            rows = iter([inputs(name, seed) for seed in range(100, 108)])

            def get_next(self) -> Feeds | None:
                return next(self.rows, None)

        q.quantize_static(
            source, target, Reader(), quant_format=q.QuantFormat[self.kind], extra_options=dict(self.options),
            activation_type=q.QuantType[self.activations], **shared,
        )  # fmt: skip
        return onnx.load(target)


def ways() -> Iterator[Way]:
    pairs = [(c, r) for c in (False, True) for r in (False, True)]
    for weights in ("QInt8", "QUInt8"):
        for c, r in pairs:
            yield Way("dynamic", weights, "QUInt8", c, r)
    for kind in ("QDQ", "QOperator"):
        for activations, weights in (("QUInt8", "QInt8"), ("QUInt8", "QUInt8"), ("QInt8", "QInt8")):
            for c, r in pairs:
                yield Way(kind, weights, activations, c, r)
        for option in (("ActivationSymmetric", True), ("WeightSymmetric", False)):
            yield Way(kind, options=(option,))
    for activations, weights in (("QUInt16", "QInt8"), ("QInt16", "QInt8"), ("QUInt16", "QUInt16")):
        yield Way("QDQ", weights, activations, options=(("UseQDQContribOps", True),))
    for bits, symmetric, size in ((4, True, 32), (4, False, 32), (4, False, 16), (8, True, 32), (8, False, 32)):
        for accuracy in (0, 4):
            options = {"bits": bits, "is_symmetric": symmetric, "block_size": size, "accuracy_level": accuracy}
            yield Way("blocks", f"{bits} bits", "floats", options=tuple(options.items()))


# --------------------------------------------------------------------------------------------------------------- oracle


def _along(x: Any, of: np.ndarray, axis: int) -> np.ndarray:
    x = np.asarray(x, np.float64)
    return x.reshape(()) if x.size == 1 else x.reshape([-1 if i == axis % of.ndim else 1 for i in range(of.ndim)])


def _real(codes: np.ndarray, scale: Any, zero: Any = 0, axis: int = 1) -> np.ndarray:
    return (codes.astype(np.float64) - _along(0 if zero is None else zero, codes, axis)) * _along(scale, codes, axis)


def _codes(x: np.ndarray, scale: Any, zero: Any, axis: int = 1) -> tuple[np.ndarray]:
    """Codes before they are rounded, in the range of their type."""
    kind = np.iinfo(np.uint8 if zero is None else zero.dtype)
    moved = x / _along(scale, x, axis) + _along(0 if zero is None else zero, x, axis)
    return (np.clip(moved, kind.min, kind.max),)


class QuantizeLinear(OpRun):  # type: ignore[misc]
    def _run(self, x: Any, scale: Any, zero: Any = None, axis: int = 1, **_: Any) -> Any:
        return _codes(x, scale, zero, axis)


class DequantizeLinear(OpRun):  # type: ignore[misc]
    def _run(self, x: Any, scale: Any, zero: Any = None, axis: int = 1, **_: Any) -> Any:
        return (_real(x, scale, zero, axis),)


class DynamicQuantizeLinear(OpRun):  # type: ignore[misc]
    def _run(self, x: Any) -> Any:
        low, high = min(x.min(), 0.0), max(x.max(), 0.0)
        scale = (high - low) / 255 or 1.0
        zero = np.uint8(np.rint(-low / scale))
        return *_codes(x, scale, zero), np.float64(scale), zero


class _Microsoft(OpRun):  # type: ignore[misc]
    op_domain = "com.microsoft"


class QLinearAdd(_Microsoft):
    def _run(self, a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, scale: Any, zero: Any = None) -> Any:
        return _codes(_real(a, sa, za) + _real(b, sb, zb), scale, zero)


class QLinearMul(_Microsoft):
    def _run(self, a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, scale: Any, zero: Any = None) -> Any:
        return _codes(_real(a, sa, za) * _real(b, sb, zb), scale, zero)


class QLinearSigmoid(_Microsoft):
    def _run(self, x: Any, sx: Any, zx: Any, scale: Any, zero: Any = None) -> Any:
        return _codes(1 / (1 + np.exp(-_real(x, sx, zx))), scale, zero)


class QLinearLeakyRelu(_Microsoft):
    def _run(self, x: Any, sx: Any, zx: Any, scale: Any, zero: Any = None, alpha: float = 0.01) -> Any:
        real = _real(x, sx, zx)
        return _codes(np.where(real < 0, real * alpha, real), scale, zero)


class QLinearAveragePool(_Microsoft):
    def _run(self, x: Any, sx: Any, zx: Any, scale: Any, zero: Any = None, **attributes: Any) -> Any:
        h, w = attributes["kernel_shape"]
        assert list(attributes["strides"]) == [h, w]
        assert not any(attributes.get("pads") or ())
        real = _real(x, sx, zx)
        windows = real.reshape(*real.shape[:2], real.shape[2] // h, h, real.shape[3] // w, w)
        return _codes(windows.mean((3, 5)), scale, zero)


class QLinearGlobalAveragePool(_Microsoft):
    def _run(self, x: Any, sx: Any, zx: Any, scale: Any, zero: Any = None, **_: Any) -> Any:
        return _codes(_real(x, sx, zx).mean((2, 3), keepdims=True), scale, zero)


class QLinearConcat(_Microsoft):
    def _run(self, scale: Any, zero: Any, *parts: Any, axis: int) -> Any:
        return _codes(np.concatenate([_real(*parts[i : i + 3]) for i in range(0, len(parts), 3)], axis), scale, zero)


class QLinearSoftmax(_Microsoft):
    def _run(self, x: Any, sx: Any, zx: Any, scale: Any, zero: Any = None, axis: int = -1, **_: Any) -> Any:
        real = _real(x, sx, zx)
        powers = np.exp(real - real.max(axis, keepdims=True))
        return _codes(powers / powers.sum(axis, keepdims=True), scale, zero)


class QLinearMatMul(OpRun):  # type: ignore[misc]
    def _run(self, a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, scale: Any, zero: Any) -> Any:
        return _codes(_real(a, sa, za) @ _real(b, sb, zb, -1), scale, zero)


class QGemm(_Microsoft):
    def _run(self, a: Any, sa: Any, za: Any, b: Any, sb: Any, zb: Any, c: Any, scale: Any, zero: Any, **at: Any) -> Any:
        left, right = _real(a, sa, za), _real(b, sb, zb, 0 if at.get("transB") else 1)
        unit = at.get("alpha", 1.0) * np.float64(sa) * np.asarray(sb, np.float64)
        made = at.get("alpha", 1.0) * (left.T if at.get("transA") else left) @ (right.T if at.get("transB") else right)
        return _codes(made if c is None else made + c * unit, scale, zero)


class MatMulNBits(_Microsoft):
    def _run(
        self, x: Any, packed: Any, scale: Any, zero: Any = None, _: Any = None, bias: Any = None, **at: Any
    ) -> Any:
        bits, rows = at["bits"], at["N"]

        def codes(bytes_: np.ndarray) -> np.ndarray:
            parts = [(bytes_ >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
            return np.stack(parts, -1).reshape(*bytes_.shape[:-1], -1).astype(np.float64)

        held = codes(packed.reshape(rows, -1, packed.shape[-1]))
        blocks = held.shape[1]
        points = np.float64(1 << bits - 1) if zero is None else codes(zero.reshape(rows, -1))[:, :blocks, None]
        real = ((held - points) * np.asarray(scale, np.float64).reshape(rows, blocks, 1)).reshape(rows, -1)
        return (x @ real[:, : at["K"]].T + (0 if bias is None else bias),)


class DynamicQuantizeLSTM(_Microsoft):
    """The LSTM of the numbers that the codes of its weights stand for."""

    def _run(self, x: Any, w: Any, r: Any, b: Any, *rest: Any, **attributes: Any) -> Any:
        points = (*rest[-4:],)

        def real(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
            return (codes[0].astype(np.float64) - zero.astype(np.float64)) * scale.astype(np.float64)

        made = lstm(x, real(w, *points[:2]), real(r, *points[2:]), b[0], lambda a, m: a @ m)
        return made[: len(self.output)]


def lstm(x: Any, w: np.ndarray, r: np.ndarray, b: np.ndarray, product: Callable[..., Any]) -> tuple[np.ndarray, ...]:
    """x[T, B, I] through an LSTM of weights [I, 4 · H] and [H, 4 · H], forwards, from zeros."""
    size = r.shape[-2]
    shares = product(x.reshape(-1, x.shape[2]), w).reshape(*x.shape[:2], -1) + b[: 4 * size] + b[4 * size :]
    hidden, cell = np.zeros((2, x.shape[1], size))
    rows = []
    for share in shares:
        i, o, f, c = np.split(share + product(hidden, r), 4, 1)
        cell = cell / (1 + np.exp(-f)) + np.tanh(c) / (1 + np.exp(-i))
        hidden = np.tanh(cell) / (1 + np.exp(-o))
        rows.append(hidden)
    return np.stack(rows)[:, None], hidden[None], cell[None]


EXACT = [
    QuantizeLinear, DequantizeLinear, DynamicQuantizeLinear, QLinearAdd, QLinearMul,
    QLinearSigmoid, QLinearLeakyRelu, QLinearAveragePool, QLinearGlobalAveragePool, QLinearConcat, QLinearSoftmax,
    QLinearMatMul, QGemm, MatMulNBits, DynamicQuantizeLSTM,
]  # fmt: skip
EXACT += [type(kind.__name__, (kind,), {"op_domain": "com.microsoft"}) for kind in EXACT[:2]]
INSIDE = ("DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulNBits")  # what rounds inside


def exact(proto: Any, feeds: Feeds) -> list[np.ndarray]:
    """What a piece gives in f64, its codes not rounded."""
    made = onnx.ModelProto.FromString(proto.SerializeToString())
    for held in made.graph.initializer:
        array = numpy_helper.to_array(held)
        if array.dtype == np.float32:
            held.CopyFrom(numpy_helper.from_array(array.astype(np.float64), held.name))
    for to in (a for n in made.graph.node if n.op_type == "Cast" for a in n.attribute if a.i == TensorProto.FLOAT):
        to.i = TensorProto.DOUBLE
    wide = {k: x.astype(np.float64) if x.dtype == np.float32 else x for k, x in feeds.items()}
    return list(ReferenceEvaluator(made, new_ops=EXACT).run(None, wide))


# -------------------------------------------------------------------------------------------------------------- running


def theirs(proto: Any, feeds: Feeds, *, optimised: bool, keep: Path | None = None) -> list[np.ndarray]:
    import onnxruntime as ort

    options, levels = ort.SessionOptions(), ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_EXTENDED if optimised else levels.ORT_DISABLE_ALL
    options.log_severity_level = 4
    if keep is not None:
        options.optimized_model_filepath = str(keep)
    others = [  # not about codes
        "GemmActivationFusion", "ConvActivationFusion", "QuickGeluFusion", "BiasGeluFusion", "SkipLayerNormFusion",
        "GeluFusionL1", "GeluFusionL2", "MatMulScaleFusion", "MatmulTransposeFusion", "AttentionFusion",
    ]  # fmt: skip
    session = ort.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=others
    )
    return list(session.run(None, feeds))


def ours(proto: Any, feeds: Feeds) -> list[np.ndarray]:
    from strata.io.onnx import load

    return [np.asarray(x) for x in load(proto, device="cpu").run(feeds)]


def _with_all_outputs(proto: Any) -> Any:
    made = onnx.ModelProto.FromString(proto.SerializeToString())
    known = {o.name for o in made.graph.output}
    names = [o for n in made.graph.node for o in n.output if o and o not in known]
    made.graph.output.extend(helper.make_empty_tensor_value_info(o) for o in names)
    return made


def pieces(proto: Any, values: Feeds) -> Iterator[Any]:
    """The graph between codes: each piece ends in one tensor of codes, or in a result."""
    made_by = {o: n for n in proto.graph.node for o in n.output if o}
    held = {i.name: i for i in proto.graph.initializer}

    def is_cut(name: str) -> bool:
        return values[name].dtype.kind in "iu" or name not in made_by or made_by[name].op_type in INSIDE

    ends = [o for n in proto.graph.node for o in n.output if o and is_cut(o)]
    for end in dict.fromkeys([*ends, *(o.name for o in proto.graph.output)]):
        nodes: list[Any] = []
        starts: dict[str, None] = {}

        def visit(name: str, nodes: list[Any] = nodes, starts: dict[str, None] = starts) -> None:
            maker = made_by[name]
            if maker in nodes:
                return
            for source in filter(None, maker.input):
                if source in held or is_cut(source):
                    starts[source] = None
                else:
                    visit(source)
            nodes.append(maker)

        visit(end)
        ports = [
            helper.make_tensor_value_info(s, helper.np_dtype_to_tensor_dtype(values[s].dtype), values[s].shape)
            for s in starts
            if s not in held
        ]
        graph = helper.make_graph(
            nodes, "piece", ports, [helper.make_empty_tensor_value_info(end)], [held[s] for s in starts if s in held]
        )
        yield helper.make_model(graph, opset_imports=proto.opset_import, ir_version=proto.ir_version)


def away(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, as a part of the largest number."""
    gap = np.abs(found.astype(np.float64) - wanted.astype(np.float64)).max(initial=0.0)
    return float(gap / max(float(np.abs(wanted).max(initial=0.0)), 1e-9))


def is_right(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether codes are exact numbers rounded, or numbers are close."""
    if found.dtype.kind in "iu":
        slack = 1e-3 + 1e-6 * (np.iinfo(found.dtype).max - np.iinfo(found.dtype).min)  # f32 has 24 bits
        return bool((np.abs(found.astype(np.float64) - wanted) <= 0.5 + slack).all())
    return away(found, wanted) <= CLOSE


@dataclass
class Verdict:
    """How far the two are apart, and the pieces in which they differ: the operators of those that are not exact."""

    apart: float
    our_faults: Counter[str] = field(default_factory=Counter)
    their_faults: Counter[str] = field(default_factory=Counter)
    ties: int = 0

    @property
    def is_explained(self) -> bool:
        return not self.our_faults and (self.apart <= CLOSE or bool(self.their_faults) or self.ties > 0)

    def __str__(self) -> str:
        words = [f"{self.apart:.1e}"]
        words += [f"onnxruntime is inexact in {dict(self.their_faults)}"] if self.their_faults else []
        words += [f"strata is inexact in {dict(self.our_faults)}"] if self.our_faults else []
        words += [f"{self.ties} ties"] if self.ties else []
        return ", ".join(words)


def judge(name: str, way: Way) -> Verdict:
    """Run a quantised network both ways; where the results differ, look for the pieces that make the difference."""
    with tempfile.TemporaryDirectory() as folder:
        proto = way.quantise(name, Path(folder))
        feeds, keep = inputs(name, 1), Path(folder) / "optimised.onnx"
        (want,) = theirs(proto, feeds, optimised=True, keep=keep)
        verdict = Verdict(away(ours(proto, feeds)[0], want))
        if verdict.apart <= CLOSE:
            return verdict
        _blame(verdict, onnx.load(keep), feeds)
        return verdict


def _blame(verdict: Verdict, graph: Any, feeds: Feeds) -> None:
    full = _with_all_outputs(graph)
    values = dict(zip([o.name for o in full.graph.output], theirs(full, feeds, optimised=False), strict=True))
    values |= feeds | {i.name: numpy_helper.to_array(i) for i in graph.graph.initializer}
    for piece in pieces(graph, values):
        given = {p.name: values[p.name] for p in piece.graph.input}
        theirs_, ours_ = values[piece.graph.output[0].name], ours(piece, given)[0]
        if away(ours_, theirs_) <= (0 if ours_.dtype.kind in "iu" else CLOSE):
            continue
        (right,) = exact(piece, given)
        ops = "+".join(dict.fromkeys(n.op_type for n in piece.graph.node if n.op_type != "DequantizeLinear"))
        verdict.our_faults[ops] += not is_right(ours_, right)
        verdict.their_faults[ops] += not is_right(theirs_, right)
        verdict.ties += is_right(ours_, right) and is_right(theirs_, right) and ours_.dtype.kind in "iu"
    verdict.our_faults, verdict.their_faults = +verdict.our_faults, +verdict.their_faults


def main(argv: list[str]) -> int:
    """Judge all networks in all ways, or those whose line contains a word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="")
    options = parser.parse_args(argv)
    count = apart = open_ = 0
    for name in NETWORKS:
        for way in ways():
            if options.word not in (line := f"{name}: {way}"):
                continue
            try:
                verdict = judge(name, way)
            except ModuleNotFoundError as error:
                print(f"{line}: not quantised, {error}")
                continue
            count, apart, open_ = count + 1, apart + (verdict.apart > 0.01), open_ + (not verdict.is_explained)
            if verdict.apart > CLOSE:
                print(f"{line}: {verdict}", flush=True)
    print(f"{count} comparisons, {apart} more than 1 % apart, {open_} not explained")
    return 1 if open_ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
