"""Programs of lazy expressions: kept by structure, interpreted while small, shared by shapes."""

import threading

import numpy as np
import pytest

import strata as st
from strata.config import using
from strata.tensor import lazy_cache as schedule
from strata.tensor.shape_generic import generalize
from strata.tensor.structure_key import outline


@pytest.fixture(autouse=True)
def counts():
    schedule.clear()
    schedule.COUNTS = schedule.Counts()
    return schedule.COUNTS


def expression(x):
    return (x * 2.0 + 1.0).tanh().sum()


def test_a_second_run_of_a_structure_makes_nothing_new(counts):
    for _ in range(3):
        np.testing.assert_allclose((st.tensor([1.0, 2.0]) + st.tensor([3.0, 4.0])).numpy(), [4.0, 6.0])
    assert (counts.runs, counts.hits, counts.compiled) == (3, 2, 0)


def test_other_ops_other_inputs_other_types_are_other_structures(counts):
    x, y = st.tensor([1.0, 2.0]), st.tensor([5.0, 7.0])
    assert (x - y).tolist() == [-4.0, -5.0]
    assert (y - x).tolist() == [4.0, 5.0]
    assert (x - x).tolist() == [0.0, 0.0]
    assert (st.tensor([1, 2]) - st.tensor([5, 7])).tolist() == [-4, -5]
    assert (x - 5.0).tolist() == [-4.0, -3.0]
    assert (x - 6.0).tolist() == [-5.0, -4.0]
    assert counts.hits == 1  # x - y and y - x have one structure


def test_small_programs_are_never_compiled(counts, rng):
    for n in range(1, 300):
        x = rng.standard_normal(n).astype("f")
        np.testing.assert_allclose(expression(st.asarray(x)).item(), np.tanh(x * 2 + 1).sum(), rtol=2e-5, atol=1e-5)
    assert counts.compiled == 0


def test_a_thousand_shapes_share_one_program(counts, rng):
    for n in rng.integers(40_000, 60_000, 1000):
        x = np.full(n, 0.25, "f")
        np.testing.assert_allclose(expression(st.asarray(x)).item(), n * np.tanh(1.5), rtol=1e-4)
    assert counts.compiled == 1
    assert counts.interpreted < 200


def test_what_is_used_often_is_compiled_for_its_shape(counts, rng):
    x = rng.standard_normal((100, 300)).astype("f")
    expected = np.exp(x).sum(1)
    for _ in range(2000):
        y = st.asarray(x).exp().sum(axis=1)
        y.realize()
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-5)
    assert counts.compiled == 1


def test_work_that_is_large_is_compiled_at_once(counts, rng):
    x = rng.standard_normal((2000, 2000))
    total = (st.asarray(x) @ st.asarray(x)).sin().exp().sum().item()
    np.testing.assert_allclose(total, np.exp(np.sin(x @ x)).sum(), rtol=1e-9)
    assert counts.compiled == 1
    assert counts.interpreted == 0


def test_the_choice_depends_on_the_program_only(counts, rng):
    x = rng.standard_normal(30_000).astype("f")
    choices = []
    for _ in range(2):
        schedule.clear()
        seen = []
        for _ in range(300):
            before = counts.interpreted
            expression(st.asarray(x)).realize()
            seen.append(counts.interpreted - before)
        choices.append(seen)
    assert choices[0] == choices[1]
    assert {0, 1} == set(choices[0])


def test_reference_device_never_compiles(counts, rng):
    x = rng.standard_normal((1500, 1500)).astype("f")
    with using(device="reference"):
        (st.asarray(x) @ st.asarray(x)).realize()
        f = st.jit(lambda a: a @ a)
        np.testing.assert_allclose(f(x[:4, :4]).numpy(), x[:4, :4] @ x[:4, :4], rtol=1e-5)
    assert counts.compiled == 0
    assert counts.interpreted == 1


@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (lambda x: x.reshape(-1), [(12, 30), (11, 20)]),
        (lambda x: x - x.mean(axis=-1, keepdims=True), [(12, 30), (10, 20)]),
        (lambda x: x @ x.T, [(12, 30), (11, 9)]),
        (lambda x: st.concat([x, x], axis=0).softmax(axis=1), [(12, 30), (13, 31)]),
        (lambda x: x.sum(axis=1)[:4], [(12, 30), (13, 31)]),
        (lambda x: x.var(axis=0), [(12, 30), (13, 31)]),
    ],
)
def test_general_forms_are_equal_and_bind_back(build, shapes):
    forms = []
    for shape in shapes:
        value = build(st.asarray(np.zeros(shape, "f"))).value
        plan = outline([value])
        general = generalize(plan)
        assert general is not None
        assert general.graph.bind(general.binding).results[0].type == value.type
        forms.append(general.key)
    assert forms[0] == forms[1]


def test_a_size_that_scales_the_scores_of_an_attention_stays_a_number():
    """Attention with a known scale is one op: where the scale is a symbol, its last bits would differ."""

    def program(size):
        x = st.asarray(np.zeros((2, size, 4), "f"))
        scores = x @ x.mT / st.sqrt(float(size))
        return [(scores.softmax(axis=-1) @ x - x.mean(axis=(-2, -1), keepdims=True)).value]

    forms = [generalize(outline(program(size))) for size in (20, 21)]
    assert forms[0].key != forms[1].key
    for form, size in zip(forms, ("20.0", "21.0"), strict=True):
        text = str(form.graph)
        assert f"dense(f32[], [{size}])" in text  # the scale
        assert "dim_size() {dim = <4*s0>}" in text  # the divisor of the mean


def test_equal_sizes_are_another_form_than_different_ones():
    def key(shape):
        return generalize(outline([(st.asarray(np.zeros(shape, "f")) * 2.0).value])).key

    assert key((10, 10)) == key((11, 11))
    assert key((10, 11)) == key((20, 30))
    assert key((10, 10)) != key((10, 11))
    assert key((10, 4)) != key((10, 5))  # small sizes are structure


def test_programs_with_fixed_sizes_have_no_general_form():
    x = st.asarray(np.zeros((12, 30), "f"))
    assert generalize(outline([x[:, 5:25].reshape(240).value])) is None


def test_many_threads_one_program(rng):
    x = rng.standard_normal(50_000).astype("f")
    expected = np.tanh(x * 2 + 1).sum()
    failures = []

    def work():
        for _ in range(60):
            got = expression(st.asarray(x)).item()
            if abs(got - expected) > 1e-3 * abs(expected) + 1e-2:
                failures.append(got)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert failures == []


def test_shared_work_is_done_once_and_dependants_start_from_the_array(counts):
    x = st.tensor(np.linspace(0, 1, 50))
    shared = x.exp()
    a, b = shared.sum(), shared * 2.0
    shared.realize()
    plan = outline([a.value, b.value])
    assert [n.op.name for n in plan.nodes if n.op.name != "constant"] == ["reduce_sum", "multiply"]
    st.realize(a, b)
    assert counts.runs == 2


def test_duplicates_share_one_array():
    x = st.tensor([1.0, 2.0])
    a, b = x.exp() + 1.0, x.exp() + 1.0
    st.realize(a, b)
    assert np.shares_memory(a.numpy(), b.numpy())


def test_ten_thousand_ops_without_recursion():
    x = st.tensor([0.0])
    for _ in range(10_000):
        x = x + 1.0
    assert x.item() == 10_000.0


def test_a_failed_run_leaves_the_tensor_as_it_was():
    @st.custom_op
    def breaks(x):
        raise ValueError("no")

    y = breaks(st.tensor([1.0])) + 1.0
    with pytest.raises(ValueError, match="no"):
        y.numpy()
    assert not y.is_realized
    assert repr(y) == "Tensor(f32[1], add not computed yet)"


@pytest.mark.parametrize("name", ["sort", "argsort"])
def test_what_numpy_takes_long_for_is_compiled_at_once(name, counts):
    x = np.random.default_rng(3).permutation(1 << 20).astype(np.float32)
    np.testing.assert_array_equal(getattr(st, name)(st.asarray(x)).numpy(), getattr(np, name)(x))
    assert (counts.compiled, counts.interpreted) == (1, 0)
    np.testing.assert_array_equal(getattr(st, name)(st.asarray(x[:32])).numpy(), getattr(np, name)(x[:32]))
    assert counts.compiled == 1
