"""Networks that onnxruntime quantised: strata is exact in every piece in which the two differ."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx", reason="ONNX models need the package onnx")
runtime = pytest.importorskip("onnxruntime", reason="it quantises the networks")

from tests import onnx_quantised as quantised  # noqa: E402 - after the packages that it needs
from tests.onnx_quantised import Way  # noqa: E402

SAME = [
    ("perceptron", Way("dynamic", "QUInt8", per_channel=True)), ("perceptron", Way("QOperator", reduce_range=True)),
    ("perceptron", Way("QDQ", "QInt8", "QInt8")), ("convolutions", Way("QDQ", per_channel=True)),
    ("convolutions", Way("QOperator", "QUInt8")), ("encoder", Way("dynamic", reduce_range=True)),
    ("hourglass", Way("QOperator", "QInt8", "QInt8", per_channel=True)), ("recurrent", Way("QDQ")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "way"), SAME, ids=[f"{n}, {w}" for n, w in SAME])
def test_the_same_numbers(name: str, way: Way) -> None:
    """But where onnxruntime adds pairs of products in 16 bits, as it does with AVX2: then its sums are not exact."""
    assert quantised.judge(name, way).is_explained


def test_onnxruntime_cuts_off_the_codes_of_a_softmax() -> None:
    """Its optimiser makes QLinearSoftmax of softmax between codes, with tables of whole numbers."""
    verdict = quantised.judge("encoder", Way("QDQ"))
    assert not verdict.our_faults
    assert set(verdict.their_faults) == {"QLinearSoftmax"}


@pytest.mark.parametrize("per_channel", [False, True])
def test_onnxruntime_rounds_what_goes_into_a_quantised_lstm(per_channel: bool, tmp_path) -> None:
    """Codes are of the weights alone; onnxruntime makes codes of the input and of each hidden state, too."""
    way = Way("dynamic", per_channel=per_channel)
    verdict = quantised.judge("recurrent", way)
    assert not verdict.our_faults
    assert set(verdict.their_faults) == {"DynamicQuantizeLSTM"}

    proto = way.quantise("recurrent", tmp_path)
    held = {i.name: quantised.numpy_helper.to_array(i) for i in proto.graph.initializer}
    (made,) = (n for n in proto.graph.node if n.op_type == "DynamicQuantizeLSTM")
    w, r, b, *parts = (held[name] for name in [*made.input[1:4], *made.input[8:12]])
    del proto.graph.node[list(proto.graph.node).index(made) + 1 :]
    proto.graph.output[0].name = made.output[0]
    feeds = quantised.inputs("recurrent", 1)

    def product(a: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Codes of `a` times codes of weights, exactly."""
        scale, zero = (parts[0], parts[1]) if codes is w else (parts[2], parts[3])
        low, high = min(a.min(), 0.0), max(a.max(), 0.0)
        step = (high - low) / 255 or 1.0
        point = np.rint(-low / step)
        left = np.clip(np.rint(a / step) + point, 0, 255) - point
        return left @ (codes[0].astype(np.float64) - zero.astype(np.float64)) * (step * scale.astype(np.float64))

    rounded = quantised.lstm(feeds["x"], w, r, b[0], product)[0]
    (theirs,) = quantised.theirs(proto, feeds, optimised=False)
    (ours,) = quantised.ours(proto, feeds)
    assert quantised.away(theirs, rounded) < 2e-3  # a code next to a half moves all that follow
    assert quantised.away(ours, rounded) > 5e-3
