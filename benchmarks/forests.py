"""Forests of scikit-learn as ONNX files beside onnxruntime, one thread each: `python -m benchmarks.forests`.

A batch of one is timed with another row in each call, as a service sees them, and with the same row again and again,
which the processor's branch prediction learns by heart. The two runtimes take turns; the best time of each row counts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

TREES, ROWS = 500, 4000


def models() -> dict[str, Callable[[], tuple[Any, np.ndarray]]]:
    """Estimators of 500 trees, fitted, and rows for them."""
    from sklearn import datasets, ensemble

    def fitted(model: Any, data: tuple[np.ndarray, np.ndarray]) -> tuple[Any, np.ndarray]:
        rows = data[0].astype(np.float32)
        return model.fit(rows, data[1]), rows

    def numbers() -> Any:
        return datasets.make_regression(ROWS, 20, noise=3, random_state=0)

    def classes() -> Any:
        return datasets.make_classification(ROWS, 30, n_informative=12, random_state=0)

    forest, boosting = ensemble.RandomForestClassifier, ensemble.GradientBoostingRegressor
    return {
        "digits": lambda: fitted(forest(TREES, random_state=0), datasets.load_digits(return_X_y=True)),
        "two classes": lambda: fitted(forest(TREES, random_state=0), classes()),
        "numbers": lambda: fitted(ensemble.RandomForestRegressor(TREES, max_depth=12, random_state=0), numbers()),
        "boosting": lambda: fitted(boosting(n_estimators=TREES, max_depth=5, random_state=0), numbers()),
    }


def best(calls: list[Callable[[int], Any]], count: int, turns: int) -> list[float]:
    """The time of each function: the best of its turns for every number, summed up."""
    times = np.full((len(calls), count), np.inf)
    for _ in range(turns):
        for which, call in enumerate(calls):
            for i in range(count):
                start = time.perf_counter()
                call(i)
                times[which, i] = min(times[which, i], time.perf_counter() - start)
    return [float(t) for t in times.mean(1)]


def main(argv: list[str]) -> int:
    """Time every forest at three batches."""
    import onnxruntime
    from skl2onnx import to_onnx

    import strata as st
    from strata.config import using

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args(argv).turns
    print("| forest | batch | onnxruntime | strata | speed |\n|---|---|---|---|---|")
    for name, make in models().items():
        model, rows = make()
        options = {id(model): {"zipmap": False}} if hasattr(model, "predict_proba") else None
        file = to_onnx(model, rows[:1], options=options, target_opset={"": 21, "ai.onnx.ml": 3}).SerializeToString()
        one = onnxruntime.SessionOptions()
        one.intra_op_num_threads = 1
        theirs = onnxruntime.InferenceSession(file, one, providers=["CPUExecutionProvider"])
        ours, port = st.ort.InferenceSession(file), theirs.get_inputs()[0].name
        parts = {
            "1, in turn": ([rows[i : i + 1] for i in range(1000)], turns),
            "1, the same": ([rows[5:6]] * 200, turns),
            "10,000": ([np.resize(rows, (10_000, rows.shape[1]))], turns),
        }
        with using(num_threads=1):
            for batch, (given, count) in parts.items():
                calls = [lambda i, s=s, p=port, given=given: s.run(None, {p: given[i]}) for s in (theirs, ours)]
                for a, b in zip(calls[0](0), calls[1](0), strict=True):
                    np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-3)
                slow, fast = best(calls, len(given), count)
                print(
                    f"| {name} | {batch} | {slow * 1e6:.1f} µs | {fast * 1e6:.1f} µs | {slow / fast:.2f}× |", flush=True
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
