"""ai.onnx.ml: support vector machines: kernels, decisions between pairs of classes, probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.errors import FileError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.handlers.scores import ML, POST_TRANSFORMS, class_of, fixed, labelled, transformed
from strata.io.onnx.items import Host
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

_LEAST = 1e-7  # a probability between two classes


def _kernel(n: NodeView, x: Value, vectors: np.ndarray) -> Value:
    """The kernel of rows x [B, F] and vectors [V, F]."""
    gamma, shift, degree = (*(n.attr("kernel_params") or ()), 0.0, 0.0, 0.0)[:3]
    kind = n.choice("kernel_type", "LINEAR", ("LINEAR", "POLY", "RBF", "SIGMOID"))
    if kind == "RBF":
        gap = ops.insert_axis(x, 1) - ops.insert_axis(fixed(n, vectors), 0)
        return ops.exp(ops.sum(gap * gap, 2) * -gamma)
    dot = ops.matmul(x, fixed(n, np.ascontiguousarray(vectors.T)))
    if kind == "LINEAR":
        return dot
    dot = dot * gamma + shift
    return ops.tanh(dot) if kind == "SIGMOID" else ops.power(dot, float(degree))


def _rows(n: NodeView) -> tuple[Value, int]:
    x = ops.cast(n[0], "f32")
    x = ops.insert_axis(x, 0) if x.ndim == 1 else x
    width = x.shape[1]
    if not isinstance(width, int):
        raise FileError(f"{n.label}: the number of features is not known", code="F504")
    return x, width


@reads("SVMRegressor", domain=ML)
def svm_regressor(n: NodeView) -> Value:
    x, width = _rows(n)
    count = int(n.attr("n_supports", 0))
    weights = np.asarray(n.attr("coefficients") or (), np.float32)
    rho = np.asarray(n.attr("rho") or (0.0,), np.float32)
    if count:
        vectors = np.asarray(n.attr("support_vectors") or (), np.float32).reshape(count, width)
        out = ops.matmul(_kernel(n, x, vectors), fixed(n, weights.reshape(count, 1)))
    else:
        out = _kernel(n, x, weights.reshape(1, width))
    out = out + float(rho[0])
    if n.attr("one_class", 0):
        return ops.where(out > 0.0, ops.ones_like(out), ops.full_like(out, -1.0))
    return transformed(n, out)


@reads("SVMClassifier", domain=ML)
def svm_classifier(n: NodeView) -> tuple[Any, Value]:
    x, width = _rows(n)
    labels = labelled(n)
    counts = tuple(n.attr("vectors_per_class") or ())
    weights = np.asarray(n.attr("coefficients") or (), np.float32)
    rho = np.asarray(n.attr("rho") or (), np.float32)
    if not counts:
        return _linear(n, x, width, labels, weights, rho)
    total, classes = sum(counts), len(counts)
    vectors = np.asarray(n.attr("support_vectors") or (), np.float32).reshape(total, width)
    scores = _between_pairs(n, _kernel(n, x, vectors), counts, weights.reshape(classes - 1, total), rho)
    proba, probb = (np.asarray(n.attr(k) or (), np.float32) for k in ("prob_a", "prob_b"))
    if len(proba):
        chances = _chances(n, scores, classes, proba, probb)
        return class_of(labels, ops.argmax(_votes(scores, classes), 1)), transformed(n, chances)
    if classes == 2 and len(labels) == 2:
        first = ops.reshape(scores, (scores.shape[0],)) > 0.0
        return class_of(labels, ops.where(first, 0, 1)), _two_columns(n, scores)
    return class_of(labels, ops.argmax(_votes(scores, classes), 1)), transformed(n, scores)


def _two_columns(n: NodeView, score: Value) -> Value:
    """The score of class 0 against class 1 stands in the second column, as skl2onnx reads it; its opposite before it.

    What is opposite follows from the post-transform: transforms of several scores have no meaning for a single one.
    """
    match n.choice("post_transform", "NONE", POST_TRANSFORMS):
        case "NONE":
            return ops.concat([ops.negative(score), score], 1)
        case "LOGISTIC":
            return ops.sigmoid(ops.concat([ops.negative(score), score], 1))
        case _:
            return ops.concat([1.0 - score, score], 1)


def _linear(
    n: NodeView, x: Value, width: int, labels: np.ndarray, weights: np.ndarray, rho: np.ndarray
) -> tuple[Any, Value]:
    """One row of weights for each class."""
    scores = _kernel(n, x, weights.reshape(-1, width)) + float(rho[0] if len(rho) else 0.0)
    if scores.shape[1] == 1 and len(labels) == 2:
        at = ops.cast(ops.reshape(scores, (scores.shape[0],)) > 0.0, "i64")
        return class_of(labels, at), ops.concat([ops.negative(scores), scores], 1)
    return class_of(labels, ops.argmax(scores, 1)), transformed(n, scores)


def _between_pairs(n: NodeView, kernel: Value, counts: tuple[int, ...], weights: np.ndarray, rho: np.ndarray) -> Value:
    """The decision between every two classes, as one matmul over all vectors."""
    starts = np.cumsum((0, *counts))
    pairs = [(i, j) for i in range(len(counts)) for j in range(i + 1, len(counts))]
    table = np.zeros((weights.shape[1], len(pairs)), np.float32)
    for at, (i, j) in enumerate(pairs):
        table[starts[i] : starts[i + 1], at] = weights[j - 1, starts[i] : starts[i + 1]]
        table[starts[j] : starts[j + 1], at] = weights[i, starts[j] : starts[j + 1]]
    return ops.matmul(kernel, fixed(n, table)) + fixed(n, rho[: len(pairs)])


def _votes(scores: Value, classes: int) -> Value:
    """How often each class wins."""
    pairs = [(i, j) for i in range(classes) for j in range(i + 1, classes)]
    columns = [ops.cast(ops.narrow(scores, 1, at, 1) > 0.0, "f32") for at in range(len(pairs))]
    won: list[Any] = [0.0] * classes
    for (i, j), first in zip(pairs, columns, strict=True):
        won[i], won[j] = won[i] + first, won[j] + (1.0 - first)
    return ops.concat(won, 1)


def _chances(n: NodeView, scores: Value, classes: int, a: np.ndarray, b: np.ndarray) -> Value:
    """Probabilities of classes from those between pairs, by the second method of Wu, Lin and Weng (2004).

    Two classes go the same way: where it stops, as scikit-learn and onnxruntime do, is up to 2e-3 from its end.
    """
    pairs = [(i, j) for i in range(classes) for j in range(i + 1, classes)]
    between = ops.clip(ops.sigmoid(ops.negative(scores * fixed(n, a) + fixed(n, b))), _LEAST, 1 - _LEAST)
    table = n.tracer.array(between).astype(np.float64)
    r = np.zeros((len(table), classes, classes))
    for at, (i, j) in enumerate(pairs):
        r[:, i, j], r[:, j, i] = table[:, at], 1 - table[:, at]
    return n.tracer.value(Host(_coupled(r).astype(np.float32), False))


def _coupled(r: np.ndarray) -> np.ndarray:
    """p that minimises the sum of (r_ji p_i - r_ij p_j)², for every row; each stops when it is close enough."""
    rows, k = len(r), r.shape[1]
    q = -np.swapaxes(r, 1, 2) * r
    q[:, range(k), range(k)] = np.square(np.swapaxes(r, 1, 2)).sum(2)
    p = np.full((rows, k), 1.0 / k)
    going = np.ones(rows, bool)
    for _ in range(max(100, k)):
        qp = (q @ p[:, :, None])[:, :, 0]
        pqp = (p * qp).sum(1)
        going &= np.abs(qp - pqp[:, None]).max(1, initial=0) >= 0.005 / k
        if not going.any():
            break
        for t in range(k):
            diff = np.where(going, (pqp - qp[:, t]) / q[:, t, t], 0.0)
            p[:, t] += diff
            pqp = (pqp + diff * (diff * q[:, t, t] + 2 * qp[:, t])) / (1 + diff) ** 2
            qp = (qp + diff[:, None] * q[:, t]) / (1 + diff)[:, None]
            p /= (1 + diff)[:, None]
    return p
