"""Static quantisation of ONNX models: 8-bit weights by channel, activations by calibration, as QDQ pairs (int8)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from strata.errors import OptionError
from strata.modules import imported
from strata.quantizing.report import LayerReport, QuantReport

OPSET: Final = 13  # from which on scales may be given for each index of an axis
MATMULS: Final = ("Conv", "ConvTranspose", "Gemm", "MatMul")
LEAST: Final = 1e-8  # of a scale


def quantize_onnx(
    path: str | os.PathLike[str], calibration: Iterable[Mapping[str, Any]], output: str | os.PathLike[str] | None = None
) -> Any:
    """An ONNX model whose convolutions and matmuls have 8-bit weights and inputs, from feeds that show their ranges.

    QuantizeLinear and DequantizeLinear stand around them, as ONNX Runtime and other runtimes expect it. The model has
    a `report`.
    """
    import onnx

    feeds = list(calibration)
    if not feeds or not all(isinstance(feed, Mapping) for feed in feeds):
        raise OptionError(
            "quantize: an ONNX model is calibrated with arrays by input name, a list of them", code="O681"
        )
    model = onnx.load(os.fspath(path))
    version = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if version < OPSET:
        model = onnx.version_converter.convert_version(model, OPSET)
    before = model.ByteSize()
    work = _QdqModel(model)
    work.calibrate(feeds)
    work.rewrite()
    onnx.checker.check_model(model)
    data = model.SerializeToString()
    if output is not None:
        Path(output).write_bytes(data)
    made = imported("strata.io.onnx").load(data if output is None else Path(output))
    made.report = QuantReport("int8", work.layers, before, len(data), output=None if output is None else str(output))
    return made


class _QdqModel:
    """One model, changed in place."""

    def __init__(self, model: Any) -> None:
        import onnx

        self.onnx, self.model, self.graph = onnx, model, model.graph
        self.arrays = {t.name: t for t in self.graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
        self.nodes = [n for n in self.graph.node if self._is_taken(n)]
        self.names = list(dict.fromkeys(n.input[0] for n in self.nodes))
        self.ranges: dict[str, tuple[float, float]] = {}
        self.pairs: dict[str, str] = {}
        self.made: list[Any] = []
        self.layers: list[LayerReport] = []
        if not self.nodes:
            raise OptionError(f"quantize: the model has no {', '.join(MATMULS)} with constant weights", code="O681")

    def _is_taken(self, node: Any) -> bool:
        if node.op_type not in MATMULS or node.domain not in ("", "ai.onnx") or node.input[1] not in self.arrays:
            return False
        shape = self.arrays[node.input[1]].dims
        return node.input[0] not in self.arrays and len(shape) >= 2

    def calibrate(self, feeds: list[Mapping[str, Any]]) -> None:
        """The least and the largest of each input of a matmul."""
        watched = self.onnx.ModelProto()
        watched.CopyFrom(self.model)
        known = {v.name for v in watched.graph.output}
        inputs = {v.name for v in watched.graph.input}
        for name in self.names:
            if name not in known and name not in inputs:
                kind = self.onnx.TensorProto.FLOAT
                watched.graph.output.append(self.onnx.helper.make_tensor_value_info(name, kind, None))
        model = imported("strata.io.onnx").load(watched.SerializeToString())
        outputs = [v.name for v in watched.graph.output]
        for feed in feeds:
            found = {**feed, **dict(zip(outputs, model.run(**feed), strict=True))}
            for name in self.names:
                array = np.asarray(found[name])
                low, high = self.ranges.get(name, (0.0, 0.0))
                self.ranges[name] = min(low, float(array.min(initial=0))), max(high, float(array.max(initial=0)))

    def rewrite(self) -> None:
        """Pairs before every matmul that is taken; others stay as they are."""
        taken = {id(n) for n in self.nodes}
        for node in list(self.graph.node):
            if id(node) in taken:
                scale = self._activation(node)
                self._weight(node, scale)
            self.made.append(node)
        del self.graph.node[:]
        self.graph.node.extend(self.made)
        used = {name for node in self.graph.node for name in node.input} | {v.name for v in self.graph.output}
        kept = [t for t in self.graph.initializer if t.name in used]
        gone = {t.name for t in self.graph.initializer} - {t.name for t in kept}
        del self.graph.initializer[:]
        self.graph.initializer.extend(kept)
        inputs = [v for v in self.graph.input if v.name not in gone]
        del self.graph.input[:]
        self.graph.input.extend(inputs)

    def _constant(self, name: str, array: np.ndarray) -> str:
        self.graph.initializer.append(self.onnx.numpy_helper.from_array(array, name))
        return name

    def _activation(self, node: Any) -> float:
        name = node.input[0]
        low, high = self.ranges[name]
        scale = max((high - low) / 255, LEAST)
        if name not in self.pairs:
            zero = int(np.clip(np.rint(-128 - low / scale), -128, 127))
            sides = [self._constant(f"{name}_scale", np.array(scale, np.float32)),
                     self._constant(f"{name}_zero_point", np.array(zero, np.int8))]  # fmt: skip
            make = self.onnx.helper.make_node
            self.made.append(make("QuantizeLinear", [name, *sides], [f"{name}_quantized"], f"{name}_quantize"))
            self.made.append(
                make("DequantizeLinear", [f"{name}_quantized", *sides], [f"{name}_dequantized"], f"{name}_dequantize")
            )
            self.pairs[name] = f"{name}_dequantized"
        node.input[0] = self.pairs[name]
        return float(np.float32(scale))

    def _weight(self, node: Any, x_scale: float) -> None:
        name = node.input[1]
        array = self.onnx.numpy_helper.to_array(self.arrays[name])
        axis = self._axis(node, array.ndim)
        others = tuple(i for i in range(array.ndim) if i != axis)
        scale = np.maximum(np.abs(array).max(others) / 127, LEAST).astype(np.float32)
        if f"{name}_dequantized" not in self.pairs.values():
            wide = np.expand_dims(scale, others)
            codes = np.clip(np.rint(array / wide), -127, 127).astype(np.int8)
            lost, whole = float(((codes * wide - array) ** 2).sum()), float((array**2).sum())
            after, error = codes.nbytes + scale.nbytes, (lost / whole) ** 0.5 if whole else 0.0
            self.layers.append(LayerReport(node.name or name, "int8", array.nbytes, after, error))
            parts = [self._constant(f"{name}_quantized", codes), self._constant(f"{name}_scale", scale),
                     self._constant(f"{name}_zero_point", np.zeros(len(scale), np.int8))]  # fmt: skip
            self._dequantize(parts, name, axis)
        node.input[1] = f"{name}_dequantized"
        self._bias(node, x_scale, scale)

    def _dequantize(self, parts: list[str], name: str, axis: int) -> None:
        to = f"{name}_dequantized"
        self.made.append(self.onnx.helper.make_node("DequantizeLinear", parts, [to], f"{name}_dequantize", axis=axis))
        self.pairs[name] = to

    def _axis(self, node: Any, rank: int) -> int:
        """Along which outputs lie."""
        flags = {a.name: a.i for a in node.attribute if a.name == "transB"}
        if node.op_type == "Conv":
            return 0
        if node.op_type == "ConvTranspose":
            return 1
        if node.op_type == "Gemm":
            return 0 if flags.get("transB") else 1
        return rank - 1

    def _bias(self, node: Any, x_scale: float, scale: np.ndarray) -> None:
        """A bias in 32 bits, on the grid of the products, where it is one number for each output."""
        if len(node.input) < 3 or node.input[2] not in self.arrays or node.op_type == "ConvTranspose":
            return
        name = node.input[2]
        array = self.onnx.numpy_helper.to_array(self.arrays[name])
        if array.shape != scale.shape or any(a.name in ("alpha", "beta") and a.f != 1 for a in node.attribute):
            return
        grid = (scale.astype(np.float64) * x_scale).astype(np.float32)
        codes = np.rint(array / grid)
        if np.abs(codes).max(initial=0) >= 2**31 - 1:
            return
        own = f"{name}_of_{node.output[0]}"
        parts = [self._constant(f"{own}_quantized", codes.astype(np.int32)), self._constant(f"{own}_scale", grid),
                 self._constant(f"{own}_zero_point", np.zeros(len(grid), np.int32))]  # fmt: skip
        self._dequantize(parts, own, 0)
        node.input[2] = f"{own}_dequantized"
