"""Plans: compiled once, run often; variables; memory that is read and written in place."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import strata as st
from strata.errors import OptionError, ShapeError, SymbolError, UnknownNameError


def test_a_plan_reads_what_its_inputs_hold_now():
    data = np.float32([1.0, 2.0, 3.0])
    y = st.asarray(data) * 2.0
    plan = y.prepare()
    assert y.is_realized
    np.testing.assert_array_equal(plan.execute().output(0), [2.0, 4.0, 6.0])
    data[:] = 10.0
    plan.execute()
    np.testing.assert_array_equal(plan.output(0), [20.0, 20.0, 20.0])
    np.testing.assert_array_equal(y.numpy(), [20.0, 20.0, 20.0])
    assert np.shares_memory(y.numpy(), plan.output(0))


def test_several_outputs_share_kernels_and_duplicates_share_buffers():
    x = st.tensor(np.linspace(0, 1, 64))
    heavy = x.exp().cumsum(0)
    a, b, c = heavy * 2.0, heavy + 1.0, heavy * 2.0
    plan = st.prepare(a, b, c)
    alone = sum(len((t).prepare().kernels) for t in (x.exp().cumsum(0) * 3.0, x.exp().cumsum(0) + 4.0))
    assert len(plan.kernels) < alone
    plan.execute()
    assert plan.num_outputs == 3
    assert np.shares_memory(plan.output(0), plan.output(2))
    np.testing.assert_allclose(plan.output(1), np.exp(np.linspace(0, 1, 64)).cumsum() + 1)


def test_an_empty_plan_for_what_is_there():
    x = st.tensor([1.0])
    plan = x.prepare()
    assert plan.kernels == ()
    np.testing.assert_array_equal(plan.execute().output(), [1.0])
    assert "empty plan" in plan.explain()


def test_variables_over_the_whole_range_with_one_compile(tmp_path):
    n = st.Variable("N", 1, 32)
    x = st.empty((n, 4))
    assert str(x.type) == "f32[N, 4]"
    y = (x * 2.0).sum(axis=1)
    plan = y.prepare()
    data = np.arange(128, dtype="f").reshape(32, 4)
    x.data(N=32)[:] = data
    plan.execute()
    with st.trace(tmp_path / "runs.json"):
        for size in range(1, 33):
            x.data(N=size)[:] = data[:size]
            np.testing.assert_allclose(plan.execute(N=size).output(0), 2 * data[:size].sum(1))
    names = {event["name"] for event in json.loads((tmp_path / "runs.json").read_text())}
    assert names
    assert not {"compile", "code"} & names
    assert plan.variables == {"N": 32}
    plan.execute()
    assert plan.output(0).shape == (32,)


def test_a_variable_out_of_range_changes_nothing():
    n = st.Variable("N", 2, 8)
    x = st.empty((n,))
    x.data(N=8)[:] = 1.0
    plan = (x + 1.0).prepare()
    plan.execute(N=3)
    before = plan.output(0).copy()
    for wrong in (1, 9, 2.5, True):
        with pytest.raises(SymbolError, match=r"N is 2..8, it cannot be"):
            plan.execute(N=wrong)
    with pytest.raises(UnknownNameError, match="no variable 'M'"):
        plan.execute(M=3)
    assert plan.variables == {"N": 3}
    np.testing.assert_array_equal(plan.output(0), before)


def test_bound_variables():
    n = st.Variable("N", 1, 16)
    assert n.bind(3).as_var_val() == ("N", 3)
    x = st.empty((n.bind(3), 2))
    x.data()[:] = 5.0
    y = x + 1.0
    assert str(y.type) == "f32[N, 2]"
    np.testing.assert_array_equal(y.numpy(), np.full((3, 2), 6.0))
    z = st.empty((n.bind(4), 2))
    with pytest.raises(SymbolError, match="N is bound to 3 and to 4"):
        (x + z).numpy()
    with pytest.raises(SymbolError, match="it cannot be 17"):
        n.bind(17)
    with pytest.raises(SymbolError, match="upper bound"):
        st.empty((st.Variable("M"), 2))


def test_what_a_plan_says_of_itself():
    x = st.tensor(np.ones((8, 8), "f"))
    plan = (x @ x).relu().prepare()
    assert [k.label for k in plan.kernels] == ["matmul + relu"]
    assert plan.kernels[0].bytes == 3 * 256 or plan.kernels[0].bytes == 2 * 256
    (kernel,) = plan.kernels
    assert (kernel.sizes, kernel.flops) == ((8, 8), 2 * 8**3 + 64)
    assert kernel.name in kernel.source
    assert kernel.schedule == ""  # no search was asked for
    assert "matmul" in plan.explain()
    profile = plan.profile(3)
    assert [row.label for row in profile.rows] == ["matmul + relu"]
    assert profile.seconds > 0
    assert "1 output," in repr(plan)


def test_clones_have_results_and_chosen_inputs_of_their_own():
    x, w = st.tensor(np.ones(4, "f")), st.tensor(np.full(4, 3, "f"))
    plan = (x * w).prepare()
    clone = plan.clone([x])
    plan.execute()
    assert clone.output(0).tolist() == [0, 0, 0, 0]  # not run yet
    x.data()[0] = 5.0  # of the first plan only
    clone.execute()
    assert plan.execute().output(0).tolist() == [15, 3, 3, 3]
    assert clone.output(0).tolist() == [3, 3, 3, 3]
    clone.inputs[0].data()[1] = 2.0
    assert clone.execute().output(0).tolist() == clone.tensors[0].tolist() == [3, 6, 3, 3]
    w.data()[3] = 9.0  # which both read
    assert (plan.execute().output(0)[3], clone.execute().output(0)[3]) == (9, 9)
    with pytest.raises(OptionError, match="an input is a tensor with an array that the plan reads"):
        plan.clone([st.tensor([1.0])])


def test_clones_have_variables_of_their_own():
    n = st.Variable("N", 1, 8)
    x = st.empty((n, 2))
    plan = (x + 1).prepare()
    clone = plan.clone([x]).execute(N=5)
    plan.execute(N=2)
    assert (plan.output(0).shape, clone.output(0).shape) == ((2, 2), (5, 2))


def test_clones_run_at_the_same_time(rng: np.random.Generator):
    """Two branches, so that there is memory between programs, too."""
    x = st.tensor(rng.standard_normal((192, 192)).astype("f"))
    plan = ((x @ x) @ x - (x.T @ x.T) @ x.T).prepare()
    assert plan.branches == 2
    clones = [plan.clone([x]) for _ in range(4)]
    for i, clone in enumerate(clones):
        clone.inputs[0].data()[0] = i
    want = [clone.execute().output(0).copy() for clone in clones]
    assert len({array.tobytes() for array in want}) == 4
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            list(threads.map(lambda clone: clone.execute(), clones))
            for clone, array in zip(clones, want, strict=True):
                np.testing.assert_array_equal(clone.output(0), array)


def test_mistakes():
    plan = (st.tensor([1.0]) + 1.0).prepare()
    with pytest.raises(OptionError, match="1 output, not 3"):
        plan.output(3)
    with pytest.raises(OptionError, match="not a tensor"):
        st.prepare(3)
    with pytest.raises(ShapeError, match="N belongs to no array"):
        st.zeros((st.Variable("N", 1, 8),)).prepare()
    with pytest.raises(OptionError, match="no memory"):
        (st.tensor([1.0]) + 1.0).data()
