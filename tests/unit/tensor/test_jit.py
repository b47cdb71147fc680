"""The compile contract of jit: variants, buckets, donation, what it says of itself."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import strata as st
from strata import nn
from strata.config import using
from strata.errors import OptionError, RunError, TraceError


def test_a_stream_of_shapes_shares_one_program_in_buckets(rng):
    f = st.jit(lambda x: (x * 2.0).sum(axis=1), max_variants=1, on_miss="bucket")
    for n in (10, 11, 12, 40, 41, 100):
        x = rng.standard_normal((n, 30)).astype("f")
        out = f(x)
        assert out.shape == (n,)
        np.testing.assert_allclose(out.numpy(), (x * 2).sum(1), rtol=1e-4, atol=1e-5)
    assert len(f.variants) == 0
    assert len(f.buckets) == 1


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_the_shared_program_is_one_of_the_variants(limit):
    """The last of them is kept for it."""
    f = st.jit(lambda x: (x * 2.0).sum(axis=1), max_variants=limit, on_miss="bucket")
    for n in (10, 11, 12, 40, 41, 10, 100):
        assert f(np.ones((n, 30), "f")).numpy().tolist() == [60.0] * n
        assert len(f.variants) + len(f.buckets) <= limit
    assert (len(f.variants), len(f.buckets)) == (limit - 1, 1)
    assert len(f.misses) == limit


def test_small_sizes_share_a_program_too():
    f = st.jit(lambda x: (x * 2.0).mean(), max_variants=1, on_miss="bucket")
    for n in (2, 3, 5, 7, 1, 2, 1):
        assert f(st.tensor(np.arange(n, dtype="f4"))).item() == n - 1
    assert len(f.variants) == 0
    assert len(f.buckets) == 1  # a size of 1 broadcasts: there is no room for its program, so it runs without one


def test_what_needs_fixed_sizes_has_the_last_variant():
    f = st.jit(lambda x: x[:, 5:25].reshape((x.shape[0] * 20,)), max_variants=2, on_miss="bucket")
    assert f(np.zeros((12, 30), "f")).shape == (240,)
    assert f(np.zeros((13, 30), "f")).shape == (260,)
    assert len(f.variants) + len(f.buckets) == 2


def test_compiling_anyway_keeps_to_the_bound():
    f = st.jit(lambda x: x + 1, max_variants=2, on_miss="compile")
    for n in (2, 3, 4, 5):
        assert f(st.tensor(np.zeros(n, "f4"))).shape == (n,)
    assert len(f.variants) == 2


def test_captured_arrays_are_inputs_of_a_bucket(rng):
    w = st.asarray(rng.standard_normal((30, 20)).astype("f"))
    f = st.jit(lambda x: x @ w, max_variants=1, on_miss="bucket")
    for n in (10, 12, 14):
        x = rng.standard_normal((n, 30)).astype("f")
        np.testing.assert_allclose(f(x).numpy(), x @ w.numpy(), rtol=1e-4, atol=1e-4)
    assert len(f.buckets) == 1


def test_what_cannot_share_a_program_says_so():
    f = st.jit(lambda x: x[:, 5:25].reshape((240,)) if x.shape[0] == 12 else x[:, 5:25].reshape((260,)),
               max_variants=1, on_miss="bucket")  # fmt: skip
    f(np.zeros((12, 30), "f"))
    with pytest.raises(TraceError, match="cannot share a program"):
        f(np.zeros((13, 30), "f"))


def test_donated_tensors_are_gone_and_their_memory_is_used_again():
    f = st.jit(lambda state, x: ({"w": state["w"] + x}, x * 2.0), donate_argnums=(0,))
    state = {"w": st.tensor(np.zeros(100_000, "f"))}
    x = np.ones(100_000, "f")
    places = set()
    for i in range(6):
        old = state
        state, _ = f(state, x)
        places.add(state["w"].data().__array_interface__["data"][0])
        with pytest.raises(RunError, match="donated"):
            old["w"].numpy()
        assert state["w"].numpy()[0] == i + 1
    assert len(places) <= 4
    with pytest.raises(OptionError, match="donated argument 3 does not exist"):
        st.jit(lambda x: x, donate_argnums=(3,))(x)


def test_a_variant_is_compiled_once_and_for_its_settings(rng):
    f = st.jit(lambda x: x.exp())
    x = rng.standard_normal(5).astype("f")
    for _ in range(3):
        f(x)
    (variant,) = f.variants.values()
    compiled = variant.compiled
    assert variant.runs == 3
    with using(device="reference"):
        f(x)
    assert len(f.variants) == 2
    assert variant.compiled is compiled
    f.clear()
    assert not f.variants


def test_another_shape_never_gets_the_results_of_the_first(rng):
    f = st.jit(lambda x: x.cumsum(0))
    for n in (3, 5, 4, 3, 7, 1, 5):
        x = rng.standard_normal(n).astype("f")
        np.testing.assert_allclose(f(x).numpy(), x.cumsum(), rtol=1e-5)


def test_explain():
    f = st.jit(lambda x, w: (x @ w).relu())
    x, w = np.ones((4, 8), "f"), np.ones((8, 2), "f")
    said = f.explain(x, w)
    assert said.kernels == ("matmul + relu",)
    f(x, w)
    f(np.ones((5, 8), "f"), w)
    text = str(f.explain())
    assert "2 variants" in text
    assert "the first call" in text
    assert "f32[5, 8], f32[8, 2] at test_jit.py" in text
    assert "a signature not seen before" in text


def test_keywords_modules_dataclasses_and_results_that_are_no_tensors():
    model = nn.Linear(2, 2)

    @st.jit
    def f(m, *, x, note="a"):
        return {"y": m(x), "note": note, "none": None, "n": 3}

    out = f(model, x=np.ones((1, 2), "f"))
    assert (out["note"], out["none"], out["n"]) == ("a", None, 3)
    assert out["y"].shape == (1, 2)
    assert f(model, x=np.ones((1, 2), "f"), note="b")["note"] == "b"
    assert len(f.variants) == 2


def test_vmap_and_grad_of_jitted_functions(rng):
    f = st.jit(lambda x: (x**2).sum())
    x = rng.standard_normal((3, 4)).astype("f")
    np.testing.assert_allclose(st.vmap(f)(st.asarray(x)).numpy(), (x**2).sum(1), rtol=1e-5)
    np.testing.assert_allclose(st.jit(st.vmap(st.grad(f)))(x).numpy(), 2 * x, rtol=1e-6)


def test_profiles():
    f = st.jit(lambda x, w: (x @ w).relu(), donate_argnums=(0,))
    x, w = st.tensor(np.ones((4, 8), "f")), np.ones((8, 2), "f")
    profile = f.profile(x, w, repeats=2)
    assert [row.label for row in profile.rows] == ["matmul + relu"]
    assert x.numpy().sum() == 32  # a profile takes nothing over


@pytest.mark.parametrize("threads", [1, 2])
def test_cold_warm_serial_and_parallel_runs_give_the_same_bits(rng, threads):
    x = rng.standard_normal((200, 300)).astype("f")

    def fn(a):
        return (a @ a.T).softmax(axis=-1).sum(axis=0)

    first = st.jit(fn)(x).numpy().copy()
    with using(num_threads=threads):
        again = st.jit(fn)(x).numpy()
        plan = fn(st.asarray(x)).prepare()
        out = plan.execute().output(0)
    with using(lazy_cache=False):
        uncached = fn(st.asarray(x)).prepare()
        np.testing.assert_array_equal(first, uncached.execute().output(0))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, out)
    assert [k.source for k in uncached.kernels] == [k.source for k in plan.kernels]
    assert "sum" in plan.kernels[0].source


def test_an_element_type_is_an_argument_like_another() -> None:
    cast = st.jit(lambda x, kinds: [x.astype(k) for k in kinds])
    x = st.tensor(np.ones(2, np.float32))
    for kinds in ([st.f64, st.i32], [st.i32]):
        assert [y.dtype for y in cast(x, kinds)] == kinds


@dataclass
class _Doubled:
    x: Any
    twice: Any = field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.x * 2


def test_fields_that_a_class_sets_itself() -> None:
    made = st.jit(lambda d: _Doubled(d.x + 1))(_Doubled(st.tensor(np.ones(2, np.float32))))
    np.testing.assert_array_equal(made.twice.numpy(), [4.0, 4.0])
    given = _Doubled(st.tensor(np.ones(2, np.float32)))
    given.twice = given.x * 5  # a function sees what is there
    np.testing.assert_array_equal(st.jit(lambda d: d.x + d.twice)(given).numpy(), [6.0, 6.0])
