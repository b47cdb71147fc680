"""ai.onnx.ml tree ensembles: forests in the form that `tree_leaves` walks, and the weights of their leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import as_dtype
from strata.errors import FileError
from strata.io.onnx.catalogue import ops
from strata.io.onnx.handlers.scores import ML, class_of, fixed, labelled, transformed
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import reads
from strata.mir import Value

LEAF, LEQ, LT, GTE, GT, EQ, NEQ, MEMBER = range(-1, 7)
_MODES = {
    "LEAF": LEAF, "BRANCH_LEQ": LEQ, "BRANCH_LT": LT, "BRANCH_GTE": GTE, "BRANCH_GT": GT, "BRANCH_EQ": EQ,
    "BRANCH_NEQ": NEQ, "BRANCH_MEMBER": MEMBER,
}  # fmt: skip


@dataclass
class Nodes:
    """Nodes of all trees, one row each; `yes` and `no` are rows, `members` the sets of nodes of that mode."""

    mode: np.ndarray
    feature: np.ndarray
    value: np.ndarray
    yes: np.ndarray
    no: np.ndarray
    missing: np.ndarray  # whether NaN passes the test
    roots: np.ndarray
    members: dict[int, tuple[float, ...]]


@dataclass
class Forest:
    """Tables of `tree_leaves`. `tests` are features that are added to the rows: whether one is among some values."""

    splits: np.ndarray
    links: np.ndarray
    roots: np.ndarray
    depth: int
    leaf_of: np.ndarray  # the number of a node's leaf, -1 of others
    tests: list[tuple[int, tuple[float, ...], bool]]


def grown(n: NodeView, nodes: Nodes, x: Value) -> Forest:
    """A forest whose nodes all ask `x <= split`, with the children of each side by side."""
    dtype, width = x.dtype.np, x.shape[1]
    asked = int(nodes.feature[nodes.mode != LEAF].max(initial=0))
    if not isinstance(width, int):
        width = asked + 1
    if asked >= width:
        raise FileError(f"{n.label}: a tree asks for feature {asked}, and rows have {width}", code="F504")
    tests = _as_features(nodes, width)
    _ask_one_way(nodes, dtype)
    inner = nodes.mode != LEAF
    leaf_of = np.where(inner, -1, np.cumsum(~inner) - 1)
    rows = [nodes.roots]  # of every level
    trees = [np.arange(len(nodes.roots))]
    while True:
        open_ = inner[rows[-1]]
        if not open_.any():
            break
        down = rows[-1][open_]
        rows.append(np.stack([nodes.yes[down], nodes.no[down]], 1).reshape(-1))
        trees.append(np.repeat(trees[-1][open_], 2))
        if sum(map(len, rows)) > 2 * len(nodes.mode):
            raise FileError(f"{n.label}: a node of its trees has two parents", code="F504")
    all_rows, all_trees = np.concatenate(rows), np.concatenate(trees)
    order = np.argsort(all_trees, kind="stable")  # a tree after the other; the two children stay together
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    held = all_rows[order]
    is_inner = inner[all_rows]
    firsts = np.cumsum(is_inner) - 1  # the children of inner nodes come in their order, after all roots
    left = np.where(is_inner, place[np.minimum(len(nodes.roots) + 2 * firsts, len(order) - 1)], ~leaf_of[all_rows])
    feature = np.where(nodes.missing[held], ~nodes.feature[held], nodes.feature[held])
    links = np.stack([np.where(inner[held], feature, 0), left[order]], 1).astype(np.int32)
    splits = np.where(inner[held], nodes.value[held], 0).astype(dtype)
    return Forest(splits, links, place[: len(nodes.roots)].astype(np.int32), max(len(rows) - 1, 1), leaf_of, tests)


def _as_features(nodes: Nodes, width: int) -> list[tuple[int, tuple[float, ...], bool]]:
    """Tests for equality become features that are 1 where they pass; the nodes then ask whether those are <= 0.5."""
    tests: dict[tuple[int, tuple[float, ...], bool], int] = {}
    for at in np.flatnonzero(np.isin(nodes.mode, (EQ, NEQ, MEMBER))):
        values = nodes.members[int(at)] if nodes.mode[at] == MEMBER else (float(nodes.value[at]),)
        passes = bool(nodes.missing[at]) ^ bool(nodes.mode[at] == NEQ)  # NaN equals nothing: it passes NEQ
        if nodes.mode[at] == NEQ:
            passes = False
        test = int(nodes.feature[at]), values, passes
        nodes.feature[at] = width + tests.setdefault(test, len(tests))
        nodes.mode[at] = GT if nodes.mode[at] != NEQ else LEQ
        nodes.value[at], nodes.missing[at] = 0.5, False
    return list(tests)


def _ask_one_way(nodes: Nodes, dtype: np.dtype[Any]) -> None:
    """Every inner node as `x <= value`: bounds that are not included move down by one, greater ones change sides."""
    value = nodes.value.astype(dtype)
    below = np.isin(nodes.mode, (LT, GTE))
    nodes.value = np.where(below, np.nextafter(value, np.asarray(-np.inf, dtype)), value)
    turned = np.isin(nodes.mode, (GTE, GT))
    nodes.yes, nodes.no = np.where(turned, nodes.no, nodes.yes), np.where(turned, nodes.yes, nodes.no)
    nodes.missing = np.where(turned, ~nodes.missing, nodes.missing)


def leaves(n: NodeView, x: Value, forest: Forest) -> Value:
    """The leaves that rows reach."""

    if forest.tests:
        most = max(len(values) for _, values, _ in forest.tests)
        table = np.full((len(forest.tests), most), np.nan, forest.splits.dtype)
        for row, (_, values, _) in zip(table, forest.tests, strict=True):
            row[: len(values)] = values
        asked = ops.gather(x, fixed(n, np.array([f for f, _, _ in forest.tests], np.int64)), 1)
        same = ops.any(ops.equal(ops.insert_axis(asked, 2), ops.insert_axis(fixed(n, table), 0)), 2)
        lost = fixed(n, np.array([[lost for _, _, lost in forest.tests]]))
        same = ops.logical_or(same, ops.logical_and(ops.isnan(asked), lost))
        x = ops.concat([x, ops.cast(same, x.dtype)], 1)
    return ops.tree_leaves(
        x, fixed(n, forest.splits), fixed(n, forest.links), fixed(n, forest.roots), depth=forest.depth
    )


def features(n: NodeView) -> tuple[Value, np.dtype[Any]]:
    """Rows of features in f32 or f64, and which."""
    x = n[0]
    if x.ndim == 1:
        x = ops.insert_axis(x, 0)
    dtype = np.dtype(np.float64 if n.np_dtype(0) == np.float64 else np.float32)
    return ops.cast(x, as_dtype(dtype)), dtype


# ------------------------------------------------------------------------------------------ ensembles by lists of nodes


def _numbers(n: NodeView, name: str) -> np.ndarray:
    """An attribute of floats, or the tensor that stands in for it."""
    found = n.attr(f"{name}_as_tensor")
    return np.asarray(n.attr(name) or () if found is None else found, np.float64).reshape(-1)


def _listed(n: NodeView) -> tuple[Nodes, Any]:
    """Nodes from lists of trees and numbers of nodes; and a function from these to rows."""
    trees, ids = (np.asarray(n.attr(f"nodes_{k}") or (), np.int64) for k in ("treeids", "nodeids"))
    modes = n.attr("nodes_modes") or ()
    feature = np.asarray(n.attr("nodes_featureids") or (), np.int64)
    value = _numbers(n, "nodes_values")
    yes, no = (np.asarray(n.attr(f"nodes_{k}nodeids") or (), np.int64) for k in ("true", "false"))
    missing = np.asarray(n.attr("nodes_missing_value_tracks_true") or np.zeros(len(ids)), bool)
    if len({len(a) for a in (trees, ids, modes, feature, value, yes, no, missing)}) != 1 or not len(ids):
        raise FileError(f"{n.label}: its lists of nodes differ in length, or are empty", code="F504")
    unknown = set(modes) - set(_MODES)
    if unknown:
        raise FileError(f"{n.label}: nodes of mode {min(unknown)!r}", code="F504")
    mode = np.array([_MODES[m] for m in modes])
    order = np.lexsort((ids, trees))
    keys = np.stack([trees[order], ids[order]], 1)

    def rows(tree: np.ndarray, number: np.ndarray) -> np.ndarray:
        dense = np.searchsorted(_key(keys), _key(np.stack([tree, number], 1)))
        dense = np.minimum(dense, len(order) - 1)
        if not (keys[dense] == np.stack([tree, number], 1)).all():
            raise FileError(f"{n.label}: a tree names a node that it does not have", code="F504")
        return order[dense]

    inner = mode != LEAF
    below = [np.zeros(len(ids), np.int64), np.zeros(len(ids), np.int64)]
    for side, numbers in zip(below, (yes, no), strict=True):
        side[inner] = rows(trees[inner], numbers[inner])
    is_child = np.zeros(len(ids), bool)
    is_child[np.concatenate([side[inner] for side in below])] = True
    names, roots = np.unique(trees, return_index=True)  # the first node, unless one alone has no parent
    tops = np.flatnonzero(~is_child)
    owners, first, counts = np.unique(trees[tops], return_index=True, return_counts=True)
    alone = np.searchsorted(names, owners[counts == 1])
    roots[alone] = tops[first[counts == 1]]
    if (feature[inner] < 0).any():
        raise FileError(f"{n.label}: feature {feature[inner].min()}", code="F504")
    members: dict[int, tuple[float, ...]] = {}
    return Nodes(mode, feature.copy(), value, below[0], below[1], missing.copy(), roots, members), rows


def _key(pairs: np.ndarray) -> np.ndarray:
    """Pairs of numbers as one that is ordered as they are."""
    return pairs[:, 0] * (1 << 32) + pairs[:, 1]


def _weights(n: NodeView, rows: Any, forest: Forest, kind: str, width: int, fill: float, dtype: Any) -> np.ndarray:
    """The weights of leaves [L, width]; `fill` where a leaf has none."""
    trees, nodes, ids = (np.asarray(n.attr(f"{kind}_{k}") or (), np.int64) for k in ("treeids", "nodeids", "ids"))
    weights = _numbers(n, f"{kind}_weights")
    if len({len(a) for a in (trees, nodes, ids, weights)}) != 1 or (
        len(ids) and not 0 <= ids.min() <= ids.max() < width
    ):
        raise FileError(f"{n.label}: its lists of weights differ in length, or name one beyond {width}", code="F504")
    leaf = forest.leaf_of[rows(trees, nodes)]
    table = np.full((int(forest.leaf_of.max()) + 1, width), fill)
    kept = leaf >= 0  # weights of inner nodes are never reached
    table[leaf[kept], ids[kept]] = 0 if fill else table[leaf[kept], ids[kept]]
    np.add.at(table, (leaf[kept], ids[kept]), weights[kept])
    return table.astype(dtype)


def _gathered(n: NodeView, found: Value, table: np.ndarray, kind: str) -> Value:
    """What the weights of a row's leaves come to."""
    n.room(table.size, table.dtype.itemsize)
    weights = ops.gather(fixed(n, table), found, 0)
    if kind in ("SUM", "AVERAGE"):
        total: Value = ops.sum(weights, 1)
        return total / float(found.shape[1]) if kind == "AVERAGE" and isinstance(found.shape[1], int) else total
    best = ops.min(weights, 1) if kind == "MIN" else ops.max(weights, 1)
    return ops.where(ops.isinf(best), ops.zeros_like(best), best)


def _fill(kind: str) -> float:
    return {"MIN": np.inf, "MAX": -np.inf}.get(kind, 0.0)


@reads("TreeEnsembleRegressor", domain=ML)
def tree_ensemble_regressor(n: NodeView) -> Value:
    x, dtype = features(n)
    nodes, rows = _listed(n)
    forest = grown(n, nodes, x)
    kind = n.choice("aggregate_function", "SUM", ("SUM", "AVERAGE", "MIN", "MAX"))
    width = int(n.attr("n_targets", 1))
    n.room(width)
    total = _gathered(n, leaves(n, x, forest), _weights(n, rows, forest, "target", width, _fill(kind), dtype), kind)
    base = _numbers(n, "base_values")
    if len(base):
        total = total + fixed(n, base.astype(dtype))
    return ops.cast(transformed(n, total), "f32")


@reads("TreeEnsembleClassifier", domain=ML)
def tree_ensemble_classifier(n: NodeView) -> tuple[Any, Value]:
    x, dtype = features(n)
    nodes, rows = _listed(n)
    forest = grown(n, nodes, x)
    labels = labelled(n)
    width = len(labels)
    table = _weights(n, rows, forest, "class", width, 0.0, dtype)
    ids, weights = np.asarray(n.attr("class_ids") or (), np.int64), _numbers(n, "class_weights")
    score = _gathered(n, leaves(n, x, forest), table, "SUM")
    base = _numbers(n, "base_values").astype(dtype)
    one = width == 2 and len(np.unique(ids)) == 1
    if not one:
        if len(base) == width:
            score = score + fixed(n, base)
        scored = np.zeros(width, bool)
        scored[ids] = True  # a class without a single weight is never the best
        at = ops.argmax(ops.where(fixed(n, scored), score, ops.full_like(score, -np.inf)), 1)
        return class_of(labels, at), ops.cast(transformed(n, score), "f32")
    # weights of one class: its score decides, and the other class gets what is left of it
    single = ops.narrow(score, 1, int(ids[0]), 1)
    if len(base):
        single = single + float(base[-1] if len(base) == 2 else base[0])
    positive = bool((weights >= 0).all())
    at = ops.cast(ops.reshape(single, (single.shape[0],)) > (0.5 if positive else 0.0), "i64")
    return class_of(labels, at), ops.cast(_two(n, single, positive=positive), "f32")


def _two(n: NodeView, single: Value, *, positive: bool) -> Value:
    """Scores of both classes from that of one."""
    kind = n.attr("post_transform", "NONE")
    if kind == "PROBIT":
        return transformed(n, single)
    if kind == "LOGISTIC":
        return ops.sigmoid(ops.concat([ops.negative(single), single], 1))
    return ops.concat([1.0 - single if positive else ops.negative(single), single], 1)


# ------------------------------------------------------------------------------------------------ ensembles by tensors


@reads("TreeEnsemble", domain=ML)
def tree_ensemble(n: NodeView) -> Value:
    """Sums (or means, or extremes) of the weights of the leaves that rows reach."""
    x, dtype = features(n)
    mode = np.asarray(n.attr("nodes_modes"), np.int64).reshape(-1)
    value = np.asarray(n.attr("nodes_splits"), np.float64).reshape(-1)
    feature = np.asarray(n.attr("nodes_featureids"), np.int64)
    missing = np.asarray(n.attr("nodes_missing_value_tracks_true") or np.zeros(len(mode)), bool)
    targets = np.asarray(n.attr("leaf_targetids"), np.int64)
    weights = np.asarray(n.attr("leaf_weights"), np.float64).reshape(-1)
    roots, width = np.asarray(n.attr("tree_roots"), np.int64), int(n.attr("n_targets"))
    count, ends = len(mode), len(targets)
    below = []
    for side in ("true", "false"):
        ids, is_leaf = (np.asarray(n.attr(f"nodes_{side}{k}"), np.int64) for k in ("nodeids", "leafs"))
        most = np.where(is_leaf, ends, count)
        if len(ids) != count or ((ids < 0) | (ids >= most)).any():
            raise FileError(f"{n.label}: a node leads to one that does not exist", code="F504")
        below.append(np.where(is_leaf, count + ids, ids))
    ok = len(value) == len(feature) == len(missing) == count and len(weights) == ends and (feature >= 0).all()
    if not ok or not len(roots) or not ((roots >= 0) & (roots < count)).all() or not (targets < width).all():
        raise FileError(f"{n.label}: its tables do not fit together", code="F504")
    found = iter(_member_sets(n.attr("membership_values")))
    members = {int(at): next(found, ()) for at in np.flatnonzero(mode == MEMBER)}
    tail = np.zeros(ends, np.int64)
    nodes = Nodes(
        np.concatenate([mode, np.full(ends, LEAF)]), np.concatenate([feature, tail]), np.concatenate([value, tail]),
        np.concatenate([below[0], tail]), np.concatenate([below[1], tail]),
        np.concatenate([missing, tail.astype(bool)]), roots, members,
    )  # fmt: skip
    forest = grown(n, nodes, x)
    kind = ("AVERAGE", "SUM", "MIN", "MAX")[int(n.attr("aggregate_function", 1))]
    n.room(ends * width)
    table = np.full((ends, width), _fill(kind))
    table[np.arange(ends), targets] = weights
    total = _gathered(n, leaves(n, x, forest), table.astype(dtype), kind)
    names = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
    return ops.cast(transformed(n, total, names[int(n.attr("post_transform", 0))]), as_dtype(n.np_dtype(0)))


def _member_sets(values: Any) -> list[tuple[float, ...]]:
    """Sets of values, separated by NaN, one for each node of that mode."""
    sets: list[list[float]] = [[]]
    for v in [] if values is None else np.asarray(values).reshape(-1):
        if np.isnan(v):
            sets.append([])
        else:
            sets[-1].append(float(v))
    return [tuple(s) for s in sets]
