"""Losses: softmax cross entropy as an op with its backward op, and the usual others as compositions."""

from __future__ import annotations

import numpy as np

from strata.core import Dim, TensorType, f32, f64, i32, i64, normalize_axis
from strata.errors import OptionError, ShapeError
from strata.mir import Op, Sample, Value, constant, function, op
from strata.ops.base.creation import iota, ones_like
from strata.ops.base.elementwise import maximum
from strata.ops.base.frontend import Operand, as_value, promoted, same_shape, to_inexact
from strata.ops.base.movement import broadcast_to, insert_axis, moveaxis
from strata.ops.elementwise.activation import log_sigmoid, softplus
from strata.ops.elementwise.logic import cast, equal, not_equal, rounded_once, stop_gradient, where
from strata.ops.elementwise.math import exp, log, sqrt
from strata.ops.elementwise.rounding import abs_
from strata.ops.indexing.indexing import CheckedIds, check_ids
from strata.ops.reduce.reduce import count_of, mean, sum_
from strata.ops.reduce.softmax import LogSoftmax, LogSumExp, Softmax, widened

_NAME = "softmax_cross_entropy_with_logits"


class CrossEntropy(Op):
    """Logits [.., C] and integer labels [..]. Rows whose label is `ignore_index` count as nothing."""

    ignore_index: int | None

    def check(self, logits: TensorType, labels: TensorType, *rows: TensorType) -> None:
        self.require_dtype(
            logits.dtype.is_float, f"does not take logits of {logits.dtype}, only float types", code="D104"
        )
        self.require_dtype(labels.dtype.is_int, f"labels must be integers, got {labels}", code="D210")
        self.require(logits.ndim >= 1, f"needs logits [.., C], got {logits}", code="S237")
        self.require(logits.shape[-1] != 0, f"logits {logits} have no classes", code="S237")
        ok = same_shape(labels.shape, logits.shape[:-1])
        self.require(ok, f"labels {labels} do not have one element for each row of {logits}", code="S238")
        for t in rows:
            self.require_dtype(t.dtype is logits.dtype, f"operands differ in dtype, {logits} and {t}", code="D103")
            self.require(
                same_shape(t.shape, labels.shape), f"{t} does not have one element for each label {labels}", code="S238"
            )

    def kept(self, labels: Value) -> Value | None:
        """Which rows count; None when all do."""
        return None if self.ignore_index is None else not_equal(labels, constant(self.ignore_index, labels.dtype))

    def np_labels(self, logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Labels with 0 for ignored rows, and which rows count; a label outside the classes is an error."""
        kept = np.ones(labels.shape, bool) if self.ignore_index is None else labels != self.ignore_index
        check_ids(labels, logits.shape[-1], False, _NAME, "label", self.ignore_index)
        return np.where(kept, labels, 0), kept

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Value:
        spread = (x if b else broadcast_to(x, (size, *x.shape)) for x, b in zip(inputs, batched, strict=True))
        return self(*spread)


@op("softmax_cross_entropy_with_logits")
class SoftmaxCrossEntropyWithLogits(CrossEntropy):
    """logsumexp(row) - row[label] for each row."""

    def infer(self, logits: TensorType, labels: TensorType) -> TensorType:
        self.check(logits, labels)
        return logits.drop(logits.ndim - 1)

    def numpy(self, logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
        from scipy.special import logsumexp as logsumexp_of

        safe, kept = self.np_labels(logits, labels)
        picked = np.take_along_axis(logits, safe[..., None].astype(np.int64), -1)[..., 0]
        return np.where(kept, logsumexp_of(logits, axis=-1) - picked, 0)

    def decompose(self, logits: Value, labels: Value) -> Value:
        wide = widened(logits)
        labels = checked_labels(logits, labels, self.ignore_index, _NAME)
        loss = LogSumExp(wide.ndim - 1)(wide) - sum_(where(is_label(logits, labels), wide, 0.0), -1)
        kept = self.kept(labels)
        return cast(loss if kept is None else where(kept, loss, 0.0), logits.dtype)

    def jvp(self, logits: Value, labels: Value, *, out: Value, dx: tuple[Value | None, ...]) -> Value | None:
        if dx[0] is None:
            return None
        slope = SoftmaxCrossEntropyBackward(self.ignore_index)(logits, labels, ones_like(out))
        return sum_(slope * dx[0], -1)

    def vjp(self, logits: Value, labels: Value, *, out: Value, ct: Value) -> tuple[Value | None, ...]:
        return SoftmaxCrossEntropyBackward(self.ignore_index)(logits, labels, ct), None

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[4, 5], np.array([0, 4, 2, 2]), ignore_index=None),
            Sample(f64[3], np.array(1), ignore_index=None),
            Sample(f32[2, 3, 4], np.array([[0, -1, 3], [-1, 2, 1]], np.int32), ignore_index=-1),
            Sample(f32[0, 3], i64[0], ignore_index=None),
            Sample(np.array([[1, -np.inf, 2]], np.float32), np.array([0]), ignore_index=None, grad=False),
        ]


@op("softmax_cross_entropy_backward")
class SoftmaxCrossEntropyBackward(CrossEntropy):
    """(softmax - onehot) dl for each row; takes (logits, labels, dl)."""

    def infer(self, logits: TensorType, labels: TensorType, dl: TensorType) -> TensorType:
        self.check(logits, labels, dl)
        return logits

    def numpy(self, logits: np.ndarray, labels: np.ndarray, dl: np.ndarray) -> np.ndarray:
        from scipy.special import softmax as softmax_of

        safe, kept = self.np_labels(logits, labels)
        onehot = np.eye(logits.shape[-1], dtype=logits.dtype)[safe.astype(np.int64)]
        return np.where(kept[..., None], (softmax_of(logits, axis=-1) - onehot) * dl[..., None], 0)

    def decompose(self, logits: Value, labels: Value, dl: Value) -> Value:
        wide = widened(logits)
        labels = checked_labels(logits, labels, self.ignore_index, _NAME)
        p = Softmax(wide.ndim - 1)(wide)
        slope = where(is_label(logits, labels), p - 1.0, p)
        kept = self.kept(labels)
        scale = widened(dl) if kept is None else where(kept, widened(dl), 0.0)
        return cast(slope * insert_axis(scale, -1), logits.dtype)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(f32[4, 5], np.array([0, 4, 2, 2]), f32[4], ignore_index=None),
            Sample(f64[3], np.array(1), f64[()], ignore_index=None),
            Sample(f32[2, 3, 4], np.array([[0, -1, 3], [-1, 2, 1]], np.int32), f32[2, 3], ignore_index=-1),
            Sample(f32[0, 3], i64[0], f32[0], ignore_index=None),
        ]


def checked_labels(logits: Value, labels: Value, ignore_index: int | None, what: str) -> Value:
    """Labels as they are, in i32 or i64; one that is neither a class nor to be ignored is an error of the run."""
    signed = labels if labels.dtype in (i32, i64) else cast(labels, i64)
    return CheckedIds((logits.shape[-1],), False, what, "label", ignore_index)(signed)


def is_label(logits: Value, labels: Value) -> Value:
    """True at the class of each row's label."""
    return equal(iota((logits.shape[-1],), dtype=labels.dtype), insert_axis(labels, -1))


# ------------------------------------------------------------------------------------------------------------ functions


def _reduced(loss: Value, reduction: str, what: str, count: Value | None = None) -> Value:
    """none, sum or mean (over `count`, when not every element counts)."""
    match reduction:
        case "none":
            return loss
        case "sum":
            return sum_(loss)
        case "mean":
            return mean(loss) if count is None else sum_(loss) / count
    raise OptionError(f"{what}: reduction is 'mean', 'sum' or 'none', got {reduction!r}", code="O215")


def _ids(labels: Operand) -> Value:
    """Labels as i32 or i64; floats are truncated."""
    value = as_value(labels)
    return value if value.dtype in (i32, i64) else cast(value, i64)


def _pair(x: Operand, y: Operand, what: str) -> tuple[Value, Value]:
    a, b = promoted(x, y)
    a, b = to_inexact(a), to_inexact(b)
    if not same_shape(a.shape, b.shape):
        raise ShapeError(f"{what}: the prediction {a.type} and the target {b.type} differ in shape", code="S239")
    return a, b


@function("sparse_softmax_cross_entropy")
def softmax_cross_entropy_with_logits(logits: Operand, labels: Operand, *, ignore_index: int | None = None) -> Value:
    """The cross entropy of each row of logits [.., C] with its integer label."""
    return SoftmaxCrossEntropyWithLogits(ignore_index)(to_inexact(as_value(logits)), _ids(labels))


@function()
def softmax_cross_entropy_backward(
    logits: Operand, labels: Operand, dl: Operand, *, ignore_index: int | None = None
) -> Value:
    """The gradient of softmax_cross_entropy_with_logits for its logits."""
    x, g = promoted(to_inexact(as_value(logits)), dl)
    return SoftmaxCrossEntropyBackward(ignore_index)(x, _ids(labels), g)


@function()
@rounded_once
def cross_entropy(
    logits: Operand,
    target: Operand,
    weight: Operand | None = None,
    *,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    axis: int | None = None,
) -> Value:
    """Softmax cross entropy with integer labels, or with probabilities of the shape of the logits.

    The classes lie along `axis`: by default axis 1, as in torch, or 0 for one row. `weight` has a factor a class.
    """
    x = to_inexact(as_value(logits))
    y = as_value(target)
    at = normalize_axis(axis if axis is not None else min(1, x.ndim - 1), x.ndim, "cross_entropy")
    if not 0.0 <= label_smoothing <= 1.0:
        raise OptionError(f"cross_entropy: label_smoothing lies in 0..1, got {label_smoothing}", code="O216")
    rows = moveaxis(x, at, -1)
    if y.ndim == x.ndim and y.dtype.is_float:
        return _with_probabilities(rows, moveaxis(y, at, -1), weight, reduction, label_smoothing)
    labels = _ids(y)
    if weight is None and label_smoothing == 0.0:
        loss = SoftmaxCrossEntropyWithLogits(ignore_index)(rows, labels)
        if ignore_index is None or reduction != "mean":
            return _reduced(loss, reduction, "cross_entropy")
        counted = not_equal(labels, constant(ignore_index, labels.dtype))
        return _reduced(loss, reduction, "cross_entropy", sum_(cast(counted, loss.dtype)))
    log_p = LogSoftmax(rows.ndim - 1)(rows)
    loss, total = _nll(log_p, labels, weight, ignore_index, _NAME)
    if label_smoothing > 0.0:
        factors = 1.0 if weight is None else cast(as_value(weight), log_p.dtype)
        spread = -sum_(log_p * factors, -1) / count_of(log_p, (log_p.ndim - 1,), log_p.dtype)
        if ignore_index is not None:
            spread = where(not_equal(labels, constant(ignore_index, labels.dtype)), spread, 0.0)
        loss = loss * (1 - label_smoothing) + spread * label_smoothing
    return _reduced(loss, reduction, "cross_entropy", total)


def _with_probabilities(rows: Value, target: Value, weight: Operand | None, reduction: str, smoothing: float) -> Value:
    x, y = _pair(rows, target, "cross_entropy")
    log_p = LogSoftmax(x.ndim - 1)(x)
    if smoothing > 0.0:
        y = y * (1 - smoothing) + smoothing / count_of(y, (y.ndim - 1,), y.dtype)
    if weight is not None:
        y = y * cast(as_value(weight), y.dtype)
    return _reduced(-sum_(where(equal(y, 0.0), 0.0, y * log_p), -1), reduction, "cross_entropy")


def _nll(
    log_p: Value, labels: Value, weight: Operand | None, ignore_index: int | None, what: str
) -> tuple[Value, Value]:
    """-log_p[label] times the weight of the label for each row, and the sum of those weights."""
    labels = checked_labels(log_p, labels, ignore_index, what)
    chosen = is_label(log_p, labels)
    factor = ones_like(labels, log_p.dtype)
    if weight is not None:
        factor = sum_(where(chosen, cast(as_value(weight), log_p.dtype), 0.0), -1)
    if ignore_index is not None:
        factor = where(not_equal(labels, constant(ignore_index, labels.dtype)), factor, 0.0)
    picked = sum_(where(chosen, log_p, 0.0), -1)
    return where(equal(factor, 0.0), 0.0, -picked * factor), sum_(factor)


@function()
def nll_loss(
    log_probabilities: Operand,
    target: Operand,
    weight: Operand | None = None,
    *,
    ignore_index: int | None = -100,
    reduction: str = "mean",
    axis: int | None = None,
) -> Value:
    """The negative log-likelihood of integer labels; classes along axis 1, or 0 for a single row."""
    x = to_inexact(as_value(log_probabilities))
    at = normalize_axis(axis if axis is not None else min(1, x.ndim - 1), x.ndim, "nll_loss")
    rows, labels = moveaxis(x, at, -1), _ids(target)
    if not same_shape(labels.shape, rows.shape[:-1]):
        raise ShapeError(
            f"nll_loss: labels {labels.type} do not have one element for each row of {x.type}", code="S238"
        )
    loss, total = _nll(rows, labels, weight, ignore_index, "nll_loss")
    return _reduced(loss, reduction, "nll_loss", total)


@function()
@rounded_once
def mse_loss(x: Operand, target: Operand, *, reduction: str = "mean") -> Value:
    """(x - target)²."""
    a, b = _pair(x, target, "mse_loss")
    return _reduced((a - b) * (a - b), reduction, "mse_loss")


@function()
@rounded_once
def l1_loss(x: Operand, target: Operand, *, reduction: str = "mean") -> Value:
    """|x - target|."""
    a, b = _pair(x, target, "l1_loss")
    return _reduced(abs_(a - b), reduction, "l1_loss")


@function()
@rounded_once
def huber_loss(x: Operand, target: Operand, *, delta: float = 1.0, reduction: str = "mean") -> Value:
    """½ d² where |d| ≤ delta, else delta (|d| - ½ delta), with d = x - target."""
    a, b = _pair(x, target, "huber_loss")
    if not delta > 0:
        raise OptionError(f"huber_loss: delta must be positive, got {delta}", code="O217")
    d = a - b
    size = abs_(d)
    return _reduced(where(size <= delta, d * d * 0.5, (size - 0.5 * delta) * delta), reduction, "huber_loss")


@function()
@rounded_once
def smooth_l1_loss(x: Operand, target: Operand, *, beta: float = 1.0, reduction: str = "mean") -> Value:
    """½ d² / beta where |d| < beta, else |d| - ½ beta, with d = x - target; beta = 0 is l1_loss."""
    if beta == 0:
        return l1_loss(x, target, reduction=reduction)
    a, b = _pair(x, target, "smooth_l1_loss")
    if not beta > 0:
        raise OptionError(f"smooth_l1_loss: beta must not be negative, got {beta}", code="O217")
    d = a - b
    size = abs_(d)
    return _reduced(where(size < beta, d * d * (0.5 / beta), size - 0.5 * beta), reduction, "smooth_l1_loss")


@function("bce_with_logits")
@rounded_once
def binary_cross_entropy_with_logits(
    x: Operand,
    target: Operand,
    weight: Operand | None = None,
    *,
    pos_weight: Operand | None = None,
    reduction: str = "mean",
) -> Value:
    """-(t log σ(x) + (1 - t) log(1 - σ(x))) without overflow; `pos_weight` multiplies the first term."""
    a, t = _pair(x, target, "binary_cross_entropy_with_logits")
    positive = log_sigmoid(a) * t
    if pos_weight is not None:
        positive = positive * pos_weight
    loss = (1.0 - t) * softplus(a) - positive
    return _reduced(loss if weight is None else loss * weight, reduction, "binary_cross_entropy_with_logits")


def _bounded_log(x: Value) -> Value:
    """log x from -100 on, whose slope is that of a straight line below 1e-12: a certain mistake has a gradient, too."""
    low = x < 1e-12
    line = stop_gradient(maximum(log(x), -100.0)) + (x - stop_gradient(x)) * 1e12
    return where(low, line, log(where(low, 1.0, x)))


@function("bce")
@rounded_once
def binary_cross_entropy(
    x: Operand, target: Operand, weight: Operand | None = None, *, reduction: str = "mean"
) -> Value:
    """-(t log x + (1 - t) log(1 - x)); logarithms stop at -100, their slopes at 1e12."""
    a, t = _pair(x, target, "binary_cross_entropy")
    loss = -(t * _bounded_log(a) + (1.0 - t) * _bounded_log(1.0 - a))
    return _reduced(loss if weight is None else loss * weight, reduction, "binary_cross_entropy")


@function()
@rounded_once
def kl_div(x: Operand, target: Operand, *, reduction: str = "mean", log_target: bool = False) -> Value:
    """target (log target - x), where x holds log-probabilities; reduction may also be 'batchmean'."""
    a, t = _pair(x, target, "kl_div")
    if log_target:
        loss = exp(t) * (t - a)
    else:
        positive = t > 0.0
        loss = where(positive, t * (log(where(positive, t, 1.0)) - a), 0.0)
    if reduction == "batchmean":
        return sum_(loss) / count_of(loss, (0,) if loss.ndim else (), loss.dtype)
    return _reduced(loss, reduction, "kl_div")


@function()
@rounded_once
def cosine_similarity(x: Operand, y: Operand, axis: int = 1, eps: float = 1e-8) -> Value:
    """x · y / (|x| |y|) along an axis; norms below eps count as eps."""
    a, b = promoted(x, y)
    a, b = to_inexact(a), to_inexact(b)
    dot = sum_(a * b, axis)
    return dot / (maximum(sqrt(sum_(a * a, axis)), eps) * maximum(sqrt(sum_(b * b, axis)), eps))
