"""ai.onnx.ml: scaling, encoding and imputing of features, linear models, labels and maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from strata.errors import FileError, RunError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.dtypes import TEXT, in_graphs, is_text
from strata.io.onnx.handlers.scores import ML, POST_TRANSFORMS, class_of, fixed, labelled, transformed
from strata.io.onnx.items import Host, Labels, Maps
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.kinds import counted
from strata.mir import Value


def real(n: NodeView, i: int = 0) -> Value:
    """An input as floats: f64 stays, the rest is f32."""
    return ops.cast(n[i], "f64" if n.np_dtype(i) == np.float64 else "f32")


# features


@reads("Binarizer", domain=ML)
def binarizer(n: NodeView) -> Value:
    x = n[0]
    return ops.cast(x > n.attr("threshold", 0.0), x.dtype)


@reads("Scaler", domain=ML)
def scaler(n: NodeView) -> Value:
    """(x - offset) * scale, of each feature or of all."""
    x = ops.cast(n[0], "f32")
    offset, scale = (
        np.asarray(n.attr(name) or default, np.float32) for name, default in (("offset", 0.0), ("scale", 1.0))
    )
    return (x - fixed(n, offset)) * fixed(n, scale)


@reads("Normalizer", domain=ML)
def normalizer(n: NodeView) -> Value:
    """Rows divided by their largest number, or by their norm; rows of norm 0 stay."""
    x = ops.cast(n[0], "f32")
    match n.choice("norm", "MAX", ("MAX", "L1", "L2")):
        case "MAX":
            size = ops.max(x, -1, keepdims=True)
        case "L1":
            size = ops.sum(ops.abs(x), -1, keepdims=True)
        case _:
            size = ops.sqrt(ops.sum(x * x, -1, keepdims=True))
    return x / ops.where(ops.equal(size, 0.0), ops.ones_like(size), size)


@reads("Imputer", domain=ML)
def imputer(n: NodeView) -> Value:
    """Elements equal to one number (or NaN) replaced by a number of their own feature."""
    x = n[0]
    kind, suffix = ("int64s", "int64") if x.dtype.is_int else ("floats", "float")
    values = np.asarray(n.attr(f"imputed_value_{kind}") or (), x.dtype.np)
    gone = n.attr(f"replaced_value_{suffix}", 0 if x.dtype.is_int else 0.0)
    if not len(values):
        raise FileError(f"{n.label}: there are no numbers of type {x.dtype} to fill in", code="F504")
    is_gone = ops.isnan(x) if isinstance(gone, float) and np.isnan(gone) else ops.equal(x, gone)
    return ops.where(is_gone, fixed(n, values if len(values) > 1 else values.reshape(())), x)


@reads("FeatureVectorizer", domain=ML)
def feature_vectorizer(n: NodeView) -> Value:
    """All inputs side by side, as f32; of each as many features as the model says, zeros where it has fewer."""
    widths = n.attr("inputdimensions") or ()
    parts = []
    for i, x in enumerate(n.values()):
        flat = ops.insert_axis(x, 0) if x.ndim == 1 else x
        wide, has = ops.cast(flat, "f32"), flat.shape[1]
        wants = widths[i] if i < len(widths) else has
        if isinstance(has, int) and has < wants:
            wide = ops.pad(wide, ((0, 0), (0, wants - has)))
        elif has != wants:
            wide = ops.narrow(wide, 1, 0, wants)
        parts.append(wide)
    return ops.concat(parts, 1)


@reads("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(n: NodeView) -> Any:
    """Elements of the last axis, by ids."""
    if not in_graphs(n.np_dtype(0)):
        held = n.array(0)
        if held.ndim == 1 and not n.is_fixed(1):
            return Labels(ops.reshape(n[1], (1, -1)), held)
        found = np.take(held, n.array(1).reshape(-1), -1)
        return found.reshape(1, -1) if held.ndim == 1 else found
    x, ids = n[0], ops.reshape(n[1], (-1,))
    width = x.shape[-1]
    if n.is_fixed(1) and isinstance(width, int) and not (n.array(1) >= 0).all() & (n.array(1) < width).all():
        raise RunError(f"{n.label}: an id is not one of the {width} features")
    found = ops.gather(x, ids, x.ndim - 1, wrap=True)
    return ops.insert_axis(found, 0) if x.ndim == 1 else found


@reads("OneHotEncoder", domain=ML)
def one_hot_encoder(n: NodeView) -> Value:
    """1 at the place of each element among the categories."""
    cats = n.attr("cats_strings") or n.attr("cats_int64s") or ()
    if is_text(n.np_dtype(0)):
        places = {str(c): i for i, c in enumerate(cats)}
        x = n.array(0)
        ids = np.array([places.get(str(v), -1) for v in x.reshape(-1)], np.int64).reshape(x.shape)
        at = n.tracer.value(Host(ids, n.is_fixed(0)))
        table = np.arange(len(cats), dtype=np.int64)
    else:
        at, table = ops.cast(n[0], "i64"), np.asarray(cats, np.int64)
    is_it = ops.equal(ops.insert_axis(at, at.ndim), fixed(n, table))
    if not n.attr("zeros", 1):
        message = f"{n.label}: an element is not one of the categories"
        is_it = ops.Ensure(message, RunError.default_code)(is_it, ops.all(ops.any(is_it, at.ndim)))
    return ops.cast(is_it, "f32")


def _kind_of_values(given: Mapping[Any, Any]) -> np.dtype[Any]:
    """The element type of a map's values, which are all alike; Python's floats stand for f32."""
    match next(iter(given.values()), 0.0):
        case str():
            return TEXT
        case np.generic() as first:
            return first.dtype
        case int():
            return np.dtype(np.int64)
        case _:
            return np.dtype(np.float32)


@reads("DictVectorizer", domain=ML)
def dict_vectorizer(n: NodeView) -> np.ndarray:
    """The numbers of a map in the order of a vocabulary, 0 for keys that it does not have."""
    words = n.attr("string_vocabulary") or n.attr("int64_vocabulary") or ()
    given = n.array(0).item()
    kind = _kind_of_values(given)
    absent = "" if kind == TEXT else 0
    return np.asarray([[given.get(w, absent) for w in words]], kind)


@reads("CastMap", domain=ML)
def cast_map(n: NodeView) -> np.ndarray:
    """The numbers of a map in the order of its keys, or at the places that these name."""
    given = n.array(0).item()
    kinds: dict[str, np.dtype[Any]] = {
        "TO_FLOAT": np.dtype(np.float32),
        "TO_INT64": np.dtype(np.int64),
        "TO_STRING": TEXT,
    }
    kind = kinds[n.choice("cast_to", "TO_FLOAT", tuple(kinds))]
    if n.choice("map_form", "DENSE", ("DENSE", "SPARSE")) == "DENSE":
        return np.array([[given[key] for key in sorted(given)]]).astype(kind)
    width = int(n.attr("max_map", 1))
    n.room(width)
    row = np.zeros((1, width), np.float64)
    for key, value in given.items():
        row[0, key] = value
    return row.astype(kind)


# labels


@reads("LabelEncoder", domain=ML)
def label_encoder(n: NodeView) -> Any:
    """Each element replaced by the value of its key, or by the default."""
    keys, values, default = (_table(n, name) for name in ("keys", "values", "default"))
    if keys is None:  # the first version: texts to their places, or back
        words = np.array(list(n.attr("classes_strings") or ()), object)
        ids = np.arange(len(words), dtype=np.int64)
        to_ids = is_text(n.np_dtype(0))
        keys, values = (words, ids) if to_ids else (ids, words)
        default = np.asarray(
            n.attr("default_int64", -1) if to_ids else n.attr("default_string", "_Unused"), values.dtype
        )
    kind = values.dtype if default is None else default.dtype
    if default is None:
        default = np.array("_Unused" if is_text(kind) else -0.0 if kind.kind == "f" else -1, kind)
    return _looked_up(n, keys.reshape(-1), values.reshape(-1), default.reshape(-1)[0])


@reads("CategoryMapper", domain=ML)
def category_mapper(n: NodeView) -> Any:
    """Texts to integers, or integers to texts."""
    words = np.array(list(n.attr("cats_strings") or ()), object)
    numbers = np.asarray(n.attr("cats_int64s") or (), np.int64)
    if is_text(n.np_dtype(0)):
        return _looked_up(n, words, numbers, n.attr("default_int64", -1))
    return _looked_up(n, numbers, words, n.attr("default_string", "_Unused"))


def _looked_up(n: NodeView, keys: np.ndarray, values: np.ndarray, default: Any) -> Any:
    """Values by keys: on the host for texts, else by a search among the sorted keys."""
    if len(keys) != len(values):
        raise FileError(f"{n.label}: {len(keys)} keys have {counted(len(values), 'value')}", code="F504")
    if is_text(keys.dtype) or not in_graphs(n.np_dtype(0)):
        table = {_plain(k): v for k, v in zip(keys, values, strict=True)}
        x = n.array(0)
        found = np.empty(x.size, values.dtype)
        found[:] = [table.get(_plain(v), default) for v in x.reshape(-1)]
        return found.reshape(x.shape)
    x = n[0]
    keys, values = keys.astype(x.dtype.np), np.concatenate([values, np.array([default], values.dtype)])
    missing = len(keys)
    order = np.argsort(keys, kind="stable")
    order = order[np.unique(keys[order], return_index=True)[1]] if len(keys) else order
    if not len(order):
        ids = ops.full_like(ops.cast(x, "i64"), missing)
    else:
        sorted_keys = keys[order]
        flat = ops.reshape(x, (-1,))
        place = ops.minimum(ops.searchsorted(fixed(n, sorted_keys), flat), len(order) - 1)
        found = ops.gather(fixed(n, sorted_keys), place, 0)
        is_key = ops.equal(found, flat)
        if x.dtype.is_float:
            is_key = ops.logical_or(is_key, ops.logical_and(ops.isnan(found), ops.isnan(flat)))
        ids = ops.where(is_key, ops.gather(fixed(n, order.astype(np.int64)), place, 0), missing)
        ids = ops.reshape(ids, x.shape)
    if is_text(values.dtype):
        return Labels(ids, values)
    return ops.gather(fixed(n, values), ids, 0)


def _plain(x: Any) -> Any:
    """NaN is a key like any other."""
    return "nan" if isinstance(x, (float, np.floating)) and np.isnan(x) else x


def _table(n: NodeView, name: str) -> Any:
    if n.has_attr(f"{name}_tensor"):
        return np.asarray(n.attr(f"{name}_tensor"))
    singular = name == "default"
    for suffix, dtype in {"strings": object, "int64s": np.int64, "floats": np.float32}.items():
        attribute = f"{name}_{suffix[:-1] if singular else suffix}"
        if n.has_attr(attribute):
            return np.asarray(n.attr(attribute), dtype)
    return None


@reads("ZipMap", domain=ML)
def zip_map(n: NodeView) -> Maps:
    """A map for each row, from the labels of classes to its scores."""
    x = n[0]
    keys = labelled(n)
    rows = ops.insert_axis(x, 0) if x.ndim == 1 else x
    if rows.shape[1] != len(keys):
        raise FileError(f"{n.label}: rows of {rows.shape[1]} scores for {len(keys)} labels", code="F504")
    return Maps(rows, tuple(str(k) if is_text(keys.dtype) else int(k) for k in keys))


# linear models


@reads("LinearRegressor", domain=ML)
def linear_regressor(n: NodeView) -> Value:
    x = real(n)
    x = ops.insert_axis(x, 0) if x.ndim == 1 else x
    width = int(n.attr("targets", 1))
    weights = np.asarray(n.attr("coefficients"), np.float32).reshape(width, -1)
    out = ops.matmul(x, fixed(n, weights.T.astype(x.dtype.np)))
    if n.attr("intercepts"):
        out = out + fixed(n, np.asarray(n.attr("intercepts"), x.dtype.np))
    return ops.cast(transformed(n, out), "f32")


@reads("LinearClassifier", domain=ML)
def linear_classifier(n: NodeView) -> tuple[Any, Value]:
    """The label of the greatest score, and the scores; a single score is that of the second of two labels."""
    x = ops.cast(n[0], "f32")
    x = ops.insert_axis(x, 0) if x.ndim == 1 else x
    bias = np.asarray(n.attr("intercepts") or (), np.float32)
    weights = np.asarray(n.attr("coefficients"), np.float32)
    width = x.shape[1]
    count = len(bias) or (weights.size // width if isinstance(width, int) else 1)
    score = ops.matmul(x, fixed(n, np.ascontiguousarray(weights.reshape(count, -1).T)))
    score = score + fixed(n, bias) if len(bias) else score
    labels = labelled(n)
    if count > 1:
        return class_of(labels, ops.argmax(score, 1)), transformed(n, score)
    at = ops.cast(ops.reshape(score, (score.shape[0],)) > 0.0, "i64")
    post = n.choice("post_transform", "NONE", POST_TRANSFORMS)
    if len(labels) == 2 and post != "PROBIT":
        chance = ops.sigmoid(score) if post == "LOGISTIC" else score
        return class_of(labels, at), ops.concat([1.0 - chance, chance], 1)
    if len(labels) == 1:
        labels = np.concatenate([np.array([0], labels.dtype), labels])
    return class_of(labels, at), transformed(n, score)
