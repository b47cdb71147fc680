"""Buckets of jit: ranges of sizes share a program, nothing is padded, and the number of programs is bounded."""

import numpy as np
import pytest

import strata as st
from strata.config import using
from strata.errors import OptionError, RunError, TraceError

BUCKETS = {0: {0: [16, 64, 256]}}


def softmax_mean(x: st.Tensor) -> st.Tensor:
    return st.softmax(x, axis=-1).mean(axis=0) * 0.5


def check(f, sizes, rng, width: int = 12) -> None:
    for n in sizes:
        x = rng.standard_normal((n, width)).astype("f")
        want = np.exp(x - x.max(-1, keepdims=True))
        want = (want / want.sum(-1, keepdims=True)).mean(0) * 0.5
        got = f(x).numpy()
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_ranges_share_a_program(rng) -> None:
    f = st.jit(softmax_mean, buckets=BUCKETS)
    check(f, [2, 3, 9, 16], rng)
    assert len(f.buckets) == 1
    check(f, [17, 40, 64, 63, 200, 256, 5], rng)
    assert len(f.buckets) == 3


def test_results_have_the_length_of_the_call(rng) -> None:
    f = st.jit(lambda x: st.exp(x) * x.shape[1], buckets={0: {0: [64], 1: [32]}})
    for shape in ((2, 3), (3, 2), (64, 32), (17, 17), (1, 5), (0, 4)):
        x = rng.standard_normal(shape).astype("f")
        got = f(x).numpy()
        assert got.shape == shape
        np.testing.assert_allclose(got, np.exp(x) * shape[1], rtol=1e-5)


def test_a_size_of_one_is_broadcast_as_it_should_be(rng) -> None:
    f = st.jit(lambda x, y: x + y, buckets=BUCKETS)
    y = rng.standard_normal((7, 4)).astype("f")
    for n in (7, 1):
        x = rng.standard_normal((n, 4)).astype("f")
        np.testing.assert_allclose(f(x, y).numpy(), x + y, rtol=1e-6)


def test_a_number_that_happens_to_be_the_size(rng) -> None:
    """It may stand for the size or not: such a call has a program of its own, and others are not touched by it."""
    f = st.jit(lambda x: x.mean(axis=0) * 9.0, buckets=BUCKETS)
    for n in (9, 8, 10, 9, 12):
        x = rng.standard_normal((n, 5)).astype("f")
        np.testing.assert_allclose(f(x).numpy(), x.mean(0) * 9.0, rtol=1e-4, atol=1e-5)
    assert len(f.buckets) == 2


def test_sizes_above_the_largest_are_refused(rng) -> None:
    f = st.jit(softmax_mean, buckets=BUCKETS)
    with pytest.raises(RunError, match="argument 0, axis 0: 257 is above the largest bucket, 256"):
        f(np.zeros((257, 4), "f"))
    check(f, [20], rng)


def test_the_number_of_programs_is_bounded(rng) -> None:
    strict = st.jit(softmax_mean, buckets=BUCKETS, max_variants=2, on_miss="error")
    check(strict, [3, 30, 4, 60], rng)
    with pytest.raises(TraceError, match="has its 2 variants"):
        strict(np.zeros((100, 12), "f"))
    check(strict, [10, 50], rng)
    for on_miss in ("interpret", "bucket", "compile", None):
        f = st.jit(softmax_mean, buckets=BUCKETS, max_variants=2, on_miss=on_miss)
        check(f, [3, 30, 100, 4, 60, 200], rng)
        assert len(f.buckets) <= 2


def test_arguments_that_hold_several_arrays(rng) -> None:
    f = st.jit(lambda batch, w: batch["x"] @ w + batch["y"], buckets={0: {0: [8, 64]}})
    w = rng.standard_normal((5, 3)).astype("f")
    for n in (2, 9, 33):
        batch = {"x": rng.standard_normal((n, 5)).astype("f"), "y": rng.standard_normal((n, 3)).astype("f")}
        np.testing.assert_allclose(f(batch, w).numpy(), batch["x"] @ w + batch["y"], rtol=1e-4, atol=1e-5)
    assert len(f.buckets) == 2


@pytest.mark.parametrize(
    "buckets", [{0: {0: []}}, {0: {0: [8, 8]}}, {0: {-1: [8]}}, {-1: {0: [8]}}, {0: {0: [8, "9"]}}]
)
def test_impossible_buckets_are_refused(buckets) -> None:
    with pytest.raises(OptionError, match="rising sizes"):
        st.jit(softmax_mean, buckets=buckets)


@pytest.mark.parametrize("on_miss", ["bucket", "interpret"])
def test_calls_beyond_the_variants_are_given_tensors(on_miss: str) -> None:
    f = st.jit(lambda x: {"y": x.relu().sum(axis=0), "n": 3, "z": np.ones(2)}, max_variants=1, on_miss=on_miss)
    for n in (2, 3, 40, 1, 0):
        made = f(np.ones((n, 2), "f"))
        assert [type(made[name]) for name in "ynz"] == [st.Tensor, int, st.Tensor]
        assert made["y"].tolist() == [n, n]


def test_a_shared_program_is_traced_once_for_a_shape() -> None:
    traced = []
    f = st.jit(lambda x, w: traced.append(x.shape) or (x @ w).sum(axis=0), max_variants=2, on_miss="bucket")
    w = np.ones((6, 3), "f")
    for _ in range(3):
        for n in (3, 4, 17, 9, 300):
            assert f(np.ones((n, 6), "f"), w).tolist() == [6 * n] * 3
    assert len(traced) == 5
    assert (len(f.variants), len(f.buckets)) == (1, 1)  # one program has open rows, for small and for large numbers
    for _ in range(3):
        f(np.ones((7, 5), "f"), np.ones((5, 3), "f"))  # another size varies: op by op, and known as such
    assert len(traced) == 5 + 2 + 1 + 1
    assert len(f.buckets) == 1


def test_settings_that_change_code_are_part_of_the_signature(rng) -> None:
    f = st.jit(lambda x, w: st.conv2d(x, w, padding=1))
    x, w = rng.standard_normal((1, 16, 32, 32), "f"), rng.standard_normal((16, 16, 3, 3), "f")
    near = f(x, w).numpy()
    with using(winograd=False):
        direct = f(x, w).numpy()
    assert len(f.variants) == 2
    assert (near != direct).any()  # other sums
    np.testing.assert_allclose(near, direct, rtol=1e-3, atol=1e-3)
