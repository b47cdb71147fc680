"""scikit-learn and SciPy on tensors of strata, through the Array API: `python -m tests.array_api_users`.

Each call is made on NumPy arrays and on tensors; results must agree, and those that are arrays must be tensors again.
SciPy asks for SCIPY_ARRAY_API=1 in the environment before it is imported.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

Call = Callable[..., Any]


def estimators() -> dict[str, Call]:
    """Calls of scikit-learn on rows, labels and numbers."""
    from sklearn import decomposition, discriminant_analysis, linear_model, metrics, model_selection, naive_bayes
    from sklearn import preprocessing as prep

    def transformed(make: Call) -> Call:
        return lambda x, y, t: make().fit(x).transform(x)

    def predicted(make: Call, labels: bool = True) -> Call:
        return lambda x, y, t: make().fit(x, y if labels else t).predict(x)

    pairwise = metrics.pairwise
    return {
        **{name: transformed(getattr(prep, name)) for name in (
            "StandardScaler", "MinMaxScaler", "MaxAbsScaler", "Normalizer", "Binarizer", "PolynomialFeatures")},
        "KernelCenterer": lambda x, y, t: prep.KernelCenterer().fit(x @ x.T).transform(x @ x.T),
        "LabelEncoder": lambda x, y, t: prep.LabelEncoder().fit_transform(y),
        "PCA, full": transformed(lambda: decomposition.PCA(3, svd_solver="full")),
        "PCA, covariance_eigh": transformed(lambda: decomposition.PCA(3, svd_solver="covariance_eigh")),
        "PCA, randomized": transformed(lambda: decomposition.PCA(
            3, svd_solver="randomized", random_state=0, power_iteration_normalizer="QR")),
        "Ridge, svd": predicted(lambda: linear_model.Ridge(solver="svd"), False),
        "RidgeCV": predicted(linear_model.RidgeCV, False),
        "RidgeClassifier, svd": predicted(lambda: linear_model.RidgeClassifier(solver="svd")),
        "LinearDiscriminantAnalysis, svd": predicted(discriminant_analysis.LinearDiscriminantAnalysis),
        "GaussianNB": predicted(naive_bayes.GaussianNB),
        "train_test_split": lambda x, y, t: model_selection.train_test_split(x, random_state=0)[0],
        "r2_score": lambda x, y, t: metrics.r2_score(t, t * 0.9),
        "mean_squared_error": lambda x, y, t: metrics.mean_squared_error(t, t * 0.9),
        "accuracy_score": lambda x, y, t: metrics.accuracy_score(y, 1 - y),
        "f1_score": lambda x, y, t: metrics.f1_score(y, y),
        "confusion_matrix": lambda x, y, t: metrics.confusion_matrix(y, 1 - y),
        "cosine_similarity": lambda x, y, t: pairwise.cosine_similarity(x),
        "euclidean_distances": lambda x, y, t: pairwise.euclidean_distances(x),
        "rbf_kernel": lambda x, y, t: pairwise.rbf_kernel(x),
    }  # fmt: skip


def functions() -> dict[str, Call]:
    """Calls of SciPy on one array."""
    from scipy import fft, integrate, ndimage, signal, special, stats
    from scipy.cluster import vq
    from scipy.spatial.transform import Rotation

    return {
        "special.expit": special.expit, "special.erf": special.erf, "special.gammaln": special.gammaln,
        "special.xlogy": lambda x: special.xlogy(x, x), "special.logsumexp": lambda x: special.logsumexp(x, axis=1),
        "special.softmax": lambda x: special.softmax(x, axis=1), "stats.zscore": stats.zscore, "stats.skew": stats.skew,
        "stats.kurtosis": stats.kurtosis, "stats.entropy": stats.entropy, "stats.gmean": stats.gmean,
        "stats.pearsonr": lambda x: stats.pearsonr(x[0, :], x[1, :]).statistic,
        "stats.ttest_ind": lambda x: stats.ttest_ind(x, x * 2).statistic, "fft.fft": fft.fft, "fft.rfft": fft.rfft,
        "fft.dct": fft.dct, "fft.fftshift": fft.fftshift, "signal.detrend": signal.detrend,
        "signal.fftconvolve": lambda x: signal.fftconvolve(x, x, mode="same"), "signal.hilbert": signal.hilbert,
        "ndimage.gaussian_filter": lambda x: ndimage.gaussian_filter(x, 1.0), "cluster.vq.whiten": vq.whiten,
        "integrate.trapezoid": integrate.trapezoid, "integrate.cumulative_trapezoid": integrate.cumulative_trapezoid,
        "spatial.transform.Rotation": lambda x: Rotation.from_rotvec(x[:, :3]).as_matrix(),
    }  # fmt: skip


def wrong(call: Call, *arrays: np.ndarray) -> str | None:
    """What is wrong with the answer on tensors."""
    import strata as st

    want = np.asarray(call(*arrays))
    try:
        got = call(*(st.asarray(x) for x in arrays))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    if want.ndim and not isinstance(got, st.Tensor):
        return f"an array of {type(got).__name__} comes back"
    return None if np.allclose(np.asarray(got), want, rtol=1e-6, atol=1e-8) else "the numbers differ"


def main() -> int:
    from sklearn import config_context

    warnings.simplefilter("ignore")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 5))
    data = x, (x @ rng.standard_normal(5) > 0).astype(np.int64), x @ rng.standard_normal(5)
    with config_context(array_api_dispatch=True):
        told = {f"sklearn {name}": wrong(call, *data) for name, call in estimators().items()}
    some = abs(rng.standard_normal((6, 8))) + 0.1
    told |= {f"scipy.{name}": wrong(call, some) for name, call in functions().items()}
    bad = {name: why for name, why in told.items() if why}
    print(json.dumps({"calls": len(told), "wrong": bad}, indent=1))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
