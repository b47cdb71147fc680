"""ai.onnx.ml: a slice of the estimators of scikit-learn, and operators on attributes at their limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import strata as st
from strata.errors import StrataError
from tests.sklearn_onnx import Case, cases, difference

pytest.importorskip("skl2onnx", reason="estimators are converted by skl2onnx")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is the second opinion")

SLICE = (
    "RandomForestClassifier", "GradientBoostingClassifier of two", "LogisticRegression", "SVC", "SVR", "MLPClassifier",
    "StandardScaler", "SimpleImputer", "OneHotEncoder", "KNeighborsClassifier", "forest with maps", "GaussianNB",
    "logistic of texts", "forest of doubles", "SVC with probabilities", "forest of several",
)  # fmt: skip


@pytest.fixture(scope="module")
def known() -> dict[str, Case]:
    return {case.name: case for case in cases()}


@pytest.mark.parametrize("name", SLICE)
def test_estimator(known: dict[str, Case], name: str) -> None:
    assert difference(known[name]) is None


def model(op: str, x: np.ndarray, outputs: list[tuple[str, int]], **attributes: Any) -> bytes:
    """A file with one operator of ai.onnx.ml."""
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    node = helper.make_node(op, ["x"], [name for name, _ in outputs], domain="ai.onnx.ml", **attributes)
    graph = helper.make_graph(
        [node], "one", [helper.make_tensor_value_info("x", kind, [None, *x.shape[1:]])],
        [helper.make_tensor_value_info(name, number, ["rows"] + ["n"] * (number == 1)) for name, number in outputs],
    )  # fmt: skip
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return bytes(helper.make_model(graph, opset_imports=sets, ir_version=8).SerializeToString())


def same(file: bytes, x: np.ndarray) -> None:
    theirs = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    for a, b in zip(st.ort.InferenceSession(file).run(None, {"x": x}), theirs.run(None, {"x": x}), strict=True):
        if a.dtype == object or a.dtype.kind in "iU":
            assert a.tolist() == b.tolist()
        else:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")


def random_trees(rng: np.random.Generator, trees: int, features: int, modes: tuple[str, ...]) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {k: [] for k in ("tree", "node", "feature", "mode", "value", "yes", "no", "missing")}
    for tree in range(trees):
        count = int(rng.integers(1, 12))
        inner = count
        for node in range(2 * count + 1):
            is_leaf = node >= inner
            numbers = (tree, node, int(rng.integers(features)), "LEAF" if is_leaf else str(rng.choice(modes)))
            below = (0, 0) if is_leaf else (2 * node + 1, 2 * node + 2)
            row = (*numbers, float(rng.integers(-2, 3)) / 2, *below, int(rng.integers(2)))
            for column, value in zip(rows.values(), row, strict=True):
                column.append(value)
    return rows


def node_attributes(rows: dict[str, list[Any]]) -> dict[str, Any]:
    names = {
        "tree": "treeids", "node": "nodeids", "feature": "featureids", "mode": "modes", "value": "values",
        "yes": "truenodeids", "no": "falsenodeids", "missing": "missing_value_tracks_true",
    }  # fmt: skip
    return {f"nodes_{names[k]}": v for k, v in rows.items()}


def leaves_of(rows: dict[str, list[Any]]) -> list[tuple[int, int]]:
    return [(t, n) for t, n, m in zip(rows["tree"], rows["node"], rows["mode"], strict=True) if m == "LEAF"]


@pytest.mark.parametrize("mode", [*MODES, "all"])
@pytest.mark.parametrize("kind", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_regressor_of_random_trees(mode: str, kind: str, rng: np.random.Generator) -> None:
    modes = MODES if mode == "all" else (mode,)
    rows = random_trees(rng, 5, 3, modes)
    ends = leaves_of(rows)
    x = (rng.integers(-3, 4, (33, 3)) / 2).astype(np.float32)
    if mode not in ("BRANCH_NEQ", "all"):  # onnxruntime takes NaN for equal there
        x[rng.random(x.shape) < 0.1] = np.nan
    file = model(
        "TreeEnsembleRegressor", x, [("y", TensorProto.FLOAT)], **node_attributes(rows), n_targets=2,
        target_treeids=[t for t, _ in ends] * 2, target_nodeids=[n for _, n in ends] * 2,
        target_ids=[0] * len(ends) + [1] * len(ends), target_weights=rng.standard_normal(2 * len(ends)).tolist(),
        aggregate_function=kind, base_values=[0.5, -1.0],
    )  # fmt: skip
    same(file, x)


@pytest.mark.parametrize("labels", [[0, 1], [5, -3], ["no", "yes"], [0, 1, 2], ["a", "b", "c"]])
@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_classifier_of_random_trees(labels: list[Any], transform: str, rng: np.random.Generator) -> None:
    """Of two classes, the weights are those of one: where both have some, onnxruntime compares the second with 0."""
    count = 1 if len(labels) == 2 else len(labels)
    rows = random_trees(rng, 4, 3, ("BRANCH_LEQ", "BRANCH_LT"))
    ends = leaves_of(rows)
    x = rng.standard_normal((20, 3)).astype(np.float32)
    named = {"classlabels_strings" if isinstance(labels[0], str) else "classlabels_int64s": labels}
    file = model(
        "TreeEnsembleClassifier", x,
        [("label", TensorProto.STRING if isinstance(labels[0], str) else TensorProto.INT64), ("y", TensorProto.FLOAT)],
        **node_attributes(rows), class_treeids=[t for t, _ in ends] * count,
        class_nodeids=[n for _, n in ends] * count, class_ids=[i for i in range(count) for _ in ends],
        class_weights=rng.standard_normal(len(ends) * count).tolist(), post_transform=transform, **named,
    )  # fmt: skip
    same(file, x)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX"])
@pytest.mark.parametrize("classes", [2, 3])
def test_linear_classifier(transform: str, classes: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((9, 4)).astype(np.float32)
    file = model(
        "LinearClassifier", x, [("label", TensorProto.INT64), ("y", TensorProto.FLOAT)],
        coefficients=rng.standard_normal(4 * classes).tolist(), intercepts=rng.standard_normal(classes).tolist(),
        classlabels_ints=list(range(3, 3 + classes)), post_transform=transform,
    )  # fmt: skip
    same(file, x)


def test_labels_of_numbers(rng: np.random.Generator) -> None:
    x = rng.integers(-3, 9, (5, 4))
    keys, values = [7, -2, 0, 3], [10, 20, 30, 40]
    same(
        model("LabelEncoder", x, [("y", TensorProto.INT64)], keys_int64s=keys, values_int64s=values, default_int64=-7),
        x,
    )
    words = model("LabelEncoder", x, [("y", TensorProto.STRING)], keys_int64s=keys, values_strings=["a", "b", "c", "d"])
    same(words, x)


@pytest.mark.parametrize(
    "change",
    [
        {"nodes_truenodeids": [0, 0, 0], "nodes_falsenodeids": [0, 0, 0]},
        {"nodes_truenodeids": [7, 0, 0]},
        {"nodes_modes": ["LEAF", "LEAF"]},
        {"nodes_modes": ["BRANCH_ODD", "LEAF", "LEAF"]},
        {"nodes_featureids": [-4, 0, 0]},
        {"target_ids": [3, 0]},
    ],
)
def test_trees_that_make_no_sense(change: dict[str, Any]) -> None:
    x = np.zeros((2, 3), np.float32)
    plain: dict[str, Any] = {
        "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [0, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_values": [0.0, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], "target_treeids": [0, 0],
        "target_nodeids": [1, 2], "target_ids": [0, 0], "target_weights": [1.0, 2.0], "n_targets": 1,
    }  # fmt: skip
    file = model("TreeEnsembleRegressor", x, [("y", TensorProto.FLOAT)], **{**plain, **change})
    with pytest.raises(StrataError):
        st.ort.InferenceSession(file).run(None, {"x": x})


def test_a_feature_beyond_the_row_is_refused() -> None:
    """A row that is too narrow for the trees is an error, not a read beyond it."""
    rows = random_trees(np.random.default_rng(0), 1, 9, ("BRANCH_LEQ",))
    rows["feature"] = [8] * len(rows["feature"])
    ends = leaves_of(rows)
    x = np.zeros((2, 3), np.float32)
    file = model(
        "TreeEnsembleRegressor", x, [("y", TensorProto.FLOAT)], **node_attributes(rows), n_targets=1,
        target_treeids=[t for t, _ in ends], target_nodeids=[n for _, n in ends], target_ids=[0] * len(ends),
        target_weights=[1.0] * len(ends),
    )  # fmt: skip
    with pytest.raises(StrataError, match="8"):
        st.ort.InferenceSession(file).run(None, {"x": x})


def test_the_files_are_valid() -> None:
    x = np.zeros((2, 3), np.float32)
    onnx.checker.check_model(onnx.load_from_string(model("Binarizer", x, [("y", TensorProto.FLOAT)], threshold=0.5)))


POSTS = ("NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
VECTORS = {
    "kernel_type": "RBF", "kernel_params": [0.3, 0.5, 2.0], "rho": [0.1, 0.2, 0.3],
    "support_vectors": np.linspace(-1, 1, 24).tolist(),
}  # fmt: skip


@pytest.mark.parametrize("post", POSTS)
@pytest.mark.parametrize("coefficients", [[0.3, -0.4, 0.5, -0.6, 0.7, 0.1], [0.1, 0.2, 0.1, 0.3, 0.1, 0.2]])
@pytest.mark.parametrize("chances", [False, True])
def test_two_classes_of_vectors(rng: np.random.Generator, post: str, coefficients: list[float], chances: bool) -> None:
    x = rng.normal(size=(9, 4)).astype(np.float32)
    extra = {"prob_a": [-1.0], "prob_b": [0.1]} if chances else {}
    attributes = {**VECTORS, "rho": [0.1], "vectors_per_class": [3, 3], "classlabels_ints": [4, 8], **extra}
    file = model("SVMClassifier", x, [("l", 7), ("p", 1)], coefficients=coefficients, post_transform=post, **attributes)
    same(file, x)


@pytest.mark.parametrize("post", POSTS)
def test_three_classes_of_vectors_with_chances(rng: np.random.Generator, post: str) -> None:
    x = rng.normal(size=(9, 4)).astype(np.float32)
    file = model(
        "SVMClassifier", x, [("l", 7), ("p", 1)], coefficients=np.linspace(-1, 1, 12).tolist(), post_transform=post,
        vectors_per_class=[2, 2, 2], classlabels_ints=[4, 8, 2], prob_a=[-1.0, -0.5, -0.7], prob_b=[0.1, 0.2, 0.0],
        **VECTORS,
    )  # fmt: skip
    same(file, x)


@pytest.mark.parametrize("post", POSTS)
def test_one_linear_score_of_two_classes(rng: np.random.Generator, post: str) -> None:
    x = rng.normal(size=(9, 4)).astype(np.float32)
    attributes = {"coefficients": [0.5, -1.0, 2.0, 0.3], "intercepts": [0.5], "classlabels_ints": [9, 4]}
    same(model("LinearClassifier", x, [("l", 7), ("p", 1)], post_transform=post, **attributes), x)


def test_features_that_are_missing_are_zeros(rng: np.random.Generator) -> None:
    x = rng.normal(size=(9, 4)).astype(np.float32)
    same(model("FeatureVectorizer", x, [("y", 1)], inputdimensions=[6]), x)


@pytest.mark.parametrize("x", [np.array([9]), np.array(["q"], object)])
def test_an_unknown_category_is_an_error_where_zeros_are_not_allowed(x: np.ndarray) -> None:
    known = {"cats_strings": ["a", "b"]} if x.dtype == object else {"cats_int64s": [1, 5]}
    file = model("OneHotEncoder", x, [("y", 1)], zeros=0, **known)
    with pytest.raises(StrataError, match="not one of the categories"):
        st.onnx.load(file).run(x=x)
