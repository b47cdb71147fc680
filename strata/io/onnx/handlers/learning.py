"""ai.onnx.ml: the operators that tensor graphs use; trees and labels are looked up on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.io.onnx.catalogue import ops
from strata.io.onnx.dtypes import is_text
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

ML = "ai.onnx.ml"


@reads("Binarizer", domain=ML)
def binarizer(n: NodeView) -> Value:
    x = n[0]
    return ops.cast(x > n.attr("threshold", 0.0), x.dtype)


@reads("LabelEncoder", domain=ML)
def label_encoder(n: NodeView) -> np.ndarray:
    """Each element replaced by the value of its key, or by the default."""
    keys, values, default = (_table(n, name) for name in ("keys", "values", "default"))
    kind = values.dtype if default is None else default.dtype
    if default is None:
        default = np.array("_Unused" if is_text(kind) else -0.0 if kind.kind == "f" else -1, kind)
    table = {_plain(k): v for k, v in zip(keys.reshape(-1), values.reshape(-1), strict=True)}
    x = n.array(0)
    found = np.empty(x.size, values.dtype)
    found[:] = [table.get(_plain(v), default.reshape(-1)[0]) for v in x.reshape(-1)]
    return found.reshape(x.shape)


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


@reads("TreeEnsemble", domain=ML)
def tree_ensemble(n: NodeView) -> np.ndarray:
    """Sums (or extremes) of the leaves that each row reaches."""
    x = n.array(0)
    modes, splits = np.asarray(n.attr("nodes_modes")).reshape(-1), np.asarray(n.attr("nodes_splits")).reshape(-1)
    features = n.attr("nodes_featureids")
    yes, yes_leaf = n.attr("nodes_truenodeids"), n.attr("nodes_trueleafs")
    no, no_leaf = n.attr("nodes_falsenodeids"), n.attr("nodes_falseleafs")
    missing = n.attr("nodes_missing_value_tracks_true") or (0,) * len(features)
    targets, weights = n.attr("leaf_targetids"), np.asarray(n.attr("leaf_weights")).reshape(-1)
    members = _member_sets(n.attr("membership_values"), modes)
    kind = n.attr("aggregate_function", 1)
    n.room(x.shape[0] * n.attr("n_targets"))
    out = np.full((x.shape[0], n.attr("n_targets")), {2: np.inf, 3: -np.inf}.get(kind, 0.0))
    combine = {2: np.minimum, 3: np.maximum}.get(kind, np.add)
    for row in range(x.shape[0]):
        for root in n.attr("tree_roots"):
            leaf = _walk(x[row], root, modes, splits, features, members, missing, (yes, yes_leaf), (no, no_leaf))
            out[row, targets[leaf]] = combine(out[row, targets[leaf]], weights[leaf])
    if kind == 0:
        out /= len(n.attr("tree_roots"))
    return out.astype(x.dtype)


def _member_sets(values: Any, modes: np.ndarray) -> list[set[float]]:
    """Sets of values, separated by NaN, one for each node of mode 6."""
    sets: list[set[float]] = [set()]
    for v in [] if values is None else np.asarray(values).reshape(-1):
        if np.isnan(v):
            sets.append(set())
        else:
            sets[-1].add(float(v))
    found = iter(sets)
    return [next(found, set()) if mode == 6 else set() for mode in modes]


def _walk(
    row: np.ndarray, at: int, modes: Any, splits: Any, features: Any, members: Any, missing: Any, yes: Any, no: Any
) -> int:
    tests = {
        0: np.less_equal, 1: np.less, 2: np.greater_equal, 3: np.greater, 4: np.equal, 5: np.not_equal,
    }  # fmt: skip
    for _ in range(len(modes) + 1):
        value = row[features[at]]
        passed = float(value) in members[at] if modes[at] == 6 else bool(tests[int(modes[at])](value, splits[at]))
        passed = passed or bool(np.isnan(value) and missing[at])
        ids, leafs = yes if passed else no
        if leafs[at]:
            return int(ids[at])
        at = int(ids[at])
    return 0
