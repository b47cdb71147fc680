"""Estimators of scikit-learn as ONNX files, run here and there: `python -m tests.sklearn_onnx` runs every one.

Each is fitted on small data, converted by skl2onnx, and run by strata on rows that it has not seen, in batches of
several sizes. Labels must be scikit-learn's, scores close. Where they are not, onnxruntime decides whether the file
says something else than the estimator: then strata and onnxruntime agree.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

ROWS = (1, 7, 40)


@dataclass(frozen=True)
class Case:
    """An estimator, the data that it is fitted on, and the options of its conversion."""

    name: str
    make: Callable[[], Any]
    kind: str  # labels, texts, two, numbers, counts, gaps, categories
    options: tuple[tuple[str, Any], ...] = ()
    tolerance: float = 1e-4
    double: bool = False


@cache
def data(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows to fit, their targets, and other rows."""
    from sklearn.datasets import load_diabetes, load_iris

    rng = np.random.default_rng(0)
    if kind in ("numbers", "several"):
        x, y = load_diabetes(return_X_y=True)
        x, y = (x * 10).astype(np.float32), (y / 100).astype(np.float64)
        if kind == "several":
            y = np.stack([y, y**2, -y], 1)
    else:
        x, y = load_iris(return_X_y=True)
        x = x.astype(np.float32)
        if kind == "two":
            y = (y == 1).astype(np.int64)
        elif kind == "texts":
            y = np.array(["setosa", "versicolor", "virginica"])[y]
        elif kind == "sparse labels":
            y = np.array([3, 7, -2])[y]
        elif kind == "counts":
            x = np.floor(x * 3)
        elif kind == "categories":
            x = np.floor(x).astype(np.int64)
        elif kind == "gaps":
            x = x + rng.normal(0, 1e-2, x.shape)  # no two rows are equally far: last bits would pick the neighbour
            x = np.where(rng.random(x.shape) < 0.1, np.nan, x).astype(np.float32)
    order = rng.permutation(len(x))
    x, y = x[order], y[order]
    return x[:100], y[:100], x[100:150]


def cases() -> Iterator[Case]:
    """Every estimator with a converter, and some of them with other data."""
    from skl2onnx._supported_operators import sklearn_operator_name_map
    from sklearn import ensemble, feature_selection, linear_model, multiclass, multioutput, pipeline, preprocessing, svm
    from sklearn import neural_network as networks
    from sklearn import tree as trees_of
    from sklearn.base import is_classifier, is_regressor
    from sklearn.utils import all_estimators

    known = {c.__name__ for c in sklearn_operator_name_map if isinstance(c, type)}
    few = {"n_estimators": 5, "max_iter": 60}
    loose = {
        "GaussianProcessRegressor": 0.02, "PowerTransformer": 1e-3, "QuantileTransformer": 1e-2, "KernelPCA": 1e-3,
        "QuadraticDiscriminantAnalysis": 1e-3, "PoissonRegressor": 1e-3, "GammaRegressor": 1e-3,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = all_estimators()
    for name, kind in found:
        if name not in known or name in LEFT_OUT:
            continue
        given = {k: v for k, v in few.items() if k in kind.__init__.__code__.co_varnames}
        if name == "SVC":
            given["probability"] = False
        if name == "KBinsDiscretizer":
            given["encode"] = "ordinal"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = kind(**given)
        except TypeError:
            continue  # it is made of others: below
        words = "numbers" if is_regressor(made) else "labels"
        words = "counts" if name.endswith("NB") and name != "GaussianNB" else words
        words = "categories" if name in ("OneHotEncoder", "OrdinalEncoder", "CategoricalNB") else words
        words = "gaps" if name.endswith("Imputer") else words
        words = "several" if name.startswith("MultiTask") else words
        yield Case(name, lambda kind=kind, given=given: kind(**given), words, (), loose.get(name, 1e-4))  # type: ignore[misc]
        if is_classifier(made) and name not in ("CategoricalNB", "ComplementNB"):
            yield Case(
                f"{name} of two",
                lambda kind=kind, given=given: kind(**given),
                words if words == "counts" else "two",
                (),
            )  # type: ignore[misc]
    two = [("a", trees_of.DecisionTreeClassifier(max_depth=3)), ("b", linear_model.LogisticRegression())]
    numbers = [("a", linear_model.Ridge()), ("b", trees_of.DecisionTreeRegressor(max_depth=3))]
    straight = linear_model.LogisticRegression()
    forest, network = ensemble.RandomForestClassifier(5), networks.MLPClassifier((8,), max_iter=40)
    trees = trees_of.DecisionTreeClassifier(max_depth=3)
    yield from (
        Case("forest of texts", lambda: ensemble.RandomForestClassifier(7), "texts"),
        Case("logistic of texts", linear_model.LogisticRegression, "texts"),
        Case("forest of other numbers", lambda: ensemble.RandomForestClassifier(7), "sparse labels"),
        Case("forest with maps", lambda: ensemble.RandomForestClassifier(7), "texts", (("zipmap", True),)),
        Case("logistic with maps", linear_model.LogisticRegression, "labels", (("zipmap", True),)),
        Case("SVC with probabilities", lambda: svm.SVC(probability=True, random_state=0), "labels"),
        Case("SVC with probabilities of two", lambda: svm.SVC(probability=True, random_state=0), "two"),
        Case("SVC of polynomials", lambda: svm.SVC(kernel="poly"), "labels", (), 1e-3),
        Case("SVC of sigmoids", lambda: svm.SVC(kernel="sigmoid"), "labels"),
        Case("SVC of lines", lambda: svm.SVC(kernel="linear"), "two", (), 1e-3),
        Case("SVR of polynomials", lambda: svm.SVR(kernel="poly"), "numbers", (), 1e-3),
        Case("boosting of three", lambda: ensemble.GradientBoostingClassifier(n_estimators=5), "labels"),
        Case("forest of several", lambda: ensemble.RandomForestRegressor(5), "several"),
        Case("bagging of trees", lambda: ensemble.BaggingClassifier(trees, 4), "labels"),
        Case("votes", lambda: ensemble.VotingClassifier(two, voting="soft"), "labels"),
        Case("mean of models", lambda: ensemble.VotingRegressor(numbers), "numbers"),
        Case("stack", lambda: ensemble.StackingClassifier(two), "labels"),
        Case("stack of numbers", lambda: ensemble.StackingRegressor(numbers), "numbers"),
        Case("one against the rest", lambda: multiclass.OneVsRestClassifier(straight), "labels"),
        Case("one against one", lambda: multiclass.OneVsOneClassifier(straight), "labels"),
        Case("each output", lambda: multioutput.MultiOutputRegressor(linear_model.Ridge()), "several"),
        Case("selection by a model", lambda: feature_selection.SelectFromModel(trees), "labels"),
        Case("elimination", lambda: feature_selection.RFE(trees), "labels"),
        Case("scaled forest", lambda: pipeline.make_pipeline(preprocessing.StandardScaler(), forest), "labels"),
        Case("scaled network", lambda: pipeline.make_pipeline(preprocessing.MinMaxScaler(), network), "labels"),
        Case("rows of length one", lambda: preprocessing.Normalizer("l1"), "labels"),
        Case("rows of greatest one", lambda: preprocessing.Normalizer("max"), "labels"),
        Case("no constant", lambda: preprocessing.PolynomialFeatures(2, include_bias=False), "labels"),
        Case("forest of doubles", lambda: ensemble.RandomForestRegressor(5), "numbers", (), 1e-5, True),
        Case("ridge of doubles", linear_model.Ridge, "numbers", (), 1e-6, True),
    )  # fmt: skip


# what takes no table of numbers, or has no converter for what it gives by default
LEFT_OUT = {
    "CountVectorizer", "DictVectorizer", "FeatureHasher", "HashingVectorizer", "TfidfVectorizer", "KernelCenterer",
    "LabelBinarizer", "LabelEncoder", "MultiLabelBinarizer", "RandomTreesEmbedding", "TargetEncoder",
    "NearestNeighbors",
    "LocalOutlierFactor", "GaussianRandomProjection", "GaussianProcessClassifier", "CCA", "PLSCanonical", "PLSSVD",
    "ClassifierChain", "RegressorChain", "OutputCodeClassifier", "KNeighborsTransformer", "RadiusNeighborsTransformer",
    "HistGradientBoostingClassifier", "HistGradientBoostingRegressor",
}  # fmt: skip


def model_of(case: Case) -> tuple[Any, bytes, np.ndarray]:
    """A fitted estimator, its file, and rows for it."""
    from skl2onnx import to_onnx

    x, y, others = data(case.kind)
    if case.double:
        x, others = x.astype(np.float64), others.astype(np.float64)
    made = case.make()
    if "random_state" in made.get_params():
        made.set_params(random_state=0)
    made.fit(x, y)
    options = dict(case.options)
    if hasattr(made, "predict_proba") and not options:
        options = {"zipmap": False}
    for given in ({id(made): options} if options else None, None):
        try:
            proto = to_onnx(made, x[:1], options=given, target_opset={"": 21, "ai.onnx.ml": 3})
        except (NameError, AttributeError):
            continue
        return made, bytes(proto.SerializeToString()), others
    raise AssertionError(f"{case.name} cannot be converted")


def expected(made: Any, x: np.ndarray) -> list[Any]:
    """What scikit-learn says: labels and scores, numbers, or features."""
    if hasattr(made, "predict") and not hasattr(made, "get_support"):
        found = [made.predict(x)]
        if hasattr(made, "predict_proba"):
            found.append(made.predict_proba(x))
        elif hasattr(made, "transform") and not hasattr(made, "classes_"):
            found.append(made.transform(x))
        return found
    found = made.transform(x)
    return [found.toarray() if hasattr(found, "toarray") else found]


def difference(case: Case) -> str | None:
    """What is wrong with a case, if anything is."""
    import strata as st

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made, file, x = model_of(case)
        session = st.ort.InferenceSession(file)
        name = session.get_inputs()[0].name
        for rows in ROWS:
            got = session.run(None, {name: x[:rows]})
            for found, wanted in zip(got, expected(made, x[:rows]), strict=False):
                maps = isinstance(found, list) and isinstance(found[0], dict)
                mine = np.array([list(row.values()) for row in found]) if maps else np.asarray(found)
                real = np.asarray(wanted)
                if real.dtype.kind in "USO" or (mine.dtype.kind == "i" and real.dtype.kind == "i"):
                    if (mine.reshape(-1) != real.reshape(-1)).mean() > (0.03 if rows > 10 else 0):
                        return f"labels of {rows} rows differ: {mine.reshape(-1)[:6]} and {real.reshape(-1)[:6]}"
                    continue
                if mine.size != real.size:
                    return f"shapes {mine.shape} and {real.shape}"
                scale = max(1.0, float(np.nanmax(np.abs(real), initial=0.0)))
                gap = float(np.nanmax(np.abs(mine.reshape(-1) - real.reshape(-1)), initial=0.0)) / scale
                if gap > case.tolerance or (np.isnan(mine.reshape(-1)) != np.isnan(real.reshape(-1))).any():
                    return f"scores of {rows} rows differ by {gap:.2g}"
    return None


def as_onnxruntime(case: Case) -> bool:
    """Whether onnxruntime gives the same as strata."""
    import onnxruntime

    import strata as st

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, file, x = model_of(case)
    mine = st.ort.InferenceSession(file)
    theirs = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    feeds = {mine.get_inputs()[0].name: x}
    return all(
        np.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
        for a, b in zip(mine.run(None, feeds), theirs.run(None, feeds), strict=True)
    )


def main(argv: list[str]) -> int:
    """Run all cases, or those whose names contain a word."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("word", nargs="?", default="")
    options = parser.parse_args(argv)
    right = 0
    wrong: list[str] = []
    absent: list[str] = []
    converted: list[str] = []
    for case in cases():
        if options.word not in case.name:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model_of(case)
        except Exception as error:  # noqa: BLE001 - scikit-learn or its converter refuses
            absent.append(f"{case.name}: {str(error).splitlines()[0][:100]}")
            continue
        try:
            found = difference(case)
        except Exception as error:  # noqa: BLE001
            found = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        if found is None:
            right += 1
        elif "differ by" in found and as_onnxruntime(case):
            converted.append(f"{case.name}: {found}")
        else:
            wrong.append(f"{case.name}: {found}")
            print(wrong[-1], flush=True)
    print(f"{right} agree with scikit-learn, {len(wrong)} do not; {len(absent)} are not converted")
    print(f"{len(converted)} files say something else than the estimator, and strata gives what onnxruntime gives:")
    print("\n".join([*converted, *absent]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
