"""RNN, GRU, LSTM."""

from __future__ import annotations

from typing import Any

from strata.io.onnx.catalogue import ops
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads


def rnn_options(n: NodeView) -> dict[str, Any]:
    """Attributes that all three share."""
    return {
        "activations": n.attr("activations"),
        "activation_alpha": n.attr("activation_alpha"),
        "activation_beta": n.attr("activation_beta"),
        "clip": n.attr("clip"),
        "direction": n.choice("direction", "forward", ("forward", "reverse", "bidirectional")),
        "layout": n.attr("layout", 0),
    }


@reads("RNN")
def rnn(n: NodeView) -> Any:
    return tuple(ops.onnx_rnn(*(n[i] for i in range(6)), **rnn_options(n)))


@reads("GRU")
def gru(n: NodeView) -> Any:
    before = bool(n.attr("linear_before_reset", 0))
    return tuple(ops.onnx_gru(*(n[i] for i in range(6)), linear_before_reset=before, **rnn_options(n)))


@reads("LSTM")
def lstm(n: NodeView) -> Any:
    return tuple(
        ops.onnx_lstm(*(n[i] for i in range(8)), input_forget=bool(n.attr("input_forget", 0)), **rnn_options(n))
    )
