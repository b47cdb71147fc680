"""Random ops of many sizes between guard pages, on every instruction set, against their meaning in f64."""

import numpy as np
import pytest

from strata.core import f32
from strata.mir import Graph, evaluate
from tests.backends.guard_pages import DEVICES, run_guarded
from tests.fuzz.sized_ops import sized_gradients, sized_ops

CLOSE = {"f64": 1e-9, "c128": 1e-9, "f32": 1e-4, "c64": 1e-4, "f16": 2e-2, "bf16": 6e-2}


def check_sized(seed: int) -> None:
    check(*sized_ops(seed), seed)


def check_gradients(seed: int) -> None:
    found = sized_gradients(seed)
    if found is not None:
        check(*found, seed)


def check(graph: Graph, feeds: dict[str, np.ndarray], seed: int) -> None:
    device = DEVICES[seed % len(DEVICES)]
    note = f"seed {seed} on {device}\n{graph}"
    with np.errstate(all="ignore"):
        wanted = evaluate(graph, feeds, wide=True)
    results = run_guarded(graph, feeds, device, threads=(1, 2, 7)[seed // 3 % 3])
    has_f32 = any(x.dtype is f32 for node in graph.nodes() for x in node.outputs)  # then f64 is no more exact
    for got, want, x in zip(results, wanted, graph.results, strict=True):
        assert (got.shape, got.dtype) == (want.shape, x.dtype.np), note
        if not x.dtype.is_inexact:
            np.testing.assert_array_equal(got, want.astype(got.dtype), err_msg=note)
            continue
        close = max(CLOSE[x.dtype.name], CLOSE["f32"] if has_f32 else 0.0)
        scale = max(1.0, float(np.max(np.abs(want[np.isfinite(want)]), initial=0.0)))
        np.testing.assert_allclose(got.astype(want.dtype), want, rtol=close, atol=close * scale, err_msg=note)


@pytest.mark.parametrize("seed", range(60))
def test_sized(seed: int) -> None:
    check_sized(seed)


@pytest.mark.parametrize("seed", range(40))
def test_gradients(seed: int) -> None:
    check_gradients(seed)
