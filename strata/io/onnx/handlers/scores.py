"""ai.onnx.ml: what models of scores share: labels of classes, and what is done to scores at the end."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.errors import FileError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.items import Host, Labels
from strata.io.onnx.node import NodeView
from strata.mir import Value, constant

ML = "ai.onnx.ml"
POST_TRANSFORMS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO", "PROBIT")


def transformed(n: NodeView, x: Value, kind: str | None = None) -> Value:
    """Scores [B, C] after the post-transform."""
    kind = n.choice("post_transform", "NONE", POST_TRANSFORMS) if kind is None else kind
    match kind:
        case "LOGISTIC":
            return ops.sigmoid(x)
        case "SOFTMAX":
            return ops.softmax(x, 1)
        case "SOFTMAX_ZERO":  # zeros stay zeros, and do not count
            counts = ops.abs(x) > 1e-7
            top = ops.max(x, 1, keepdims=True)
            risen = ops.where(counts, ops.exp(x - top), ops.zeros_like(x))
            return ops.where(counts, risen / ops.sum(risen, 1, keepdims=True), ops.zeros_like(x))
        case "PROBIT":
            return _inverse_erf(2.0 * x - 1.0) * float(np.sqrt(2.0))
        case _:
            return x


def labelled(n: NodeView, words: str = "classlabels") -> np.ndarray:
    """The labels of classes: texts or integers."""
    for suffix, dtype in (("strings", object), ("int64s", np.int64), ("ints", np.int64)):
        found = n.attr(f"{words}_{suffix}")
        if found:
            return np.array(list(found), dtype)
    raise FileError(f"{n.label}: there are no labels of classes", code="F504")


def class_of(labels: np.ndarray, at: Value) -> Any:
    """Labels by ids."""
    if labels.dtype == object:
        return Labels(at, labels)
    if (labels == np.arange(len(labels))).all():
        return at
    return ops.gather(constant(labels), at, 0)


def _inverse_erf(x: Value) -> Value:
    """Winitzki's formula, made exact by three steps of Newton's method."""
    log = ops.log((1.0 - x) * (1.0 + x))
    middle = 2.0 / (np.pi * 0.147) + 0.5 * log
    y = ops.sign(x) * ops.sqrt(ops.sqrt(middle * middle - log / 0.147) - middle)
    for _ in range(3):
        y = y - (ops.erf(y) - x) * ops.exp(y * y) * float(np.sqrt(np.pi) / 2)
    return y


def fixed(n: NodeView, array: np.ndarray) -> Value:
    """An array of the model as a value."""
    return n.tracer.value(Host(array, True))
