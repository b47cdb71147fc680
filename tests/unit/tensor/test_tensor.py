"""The lazy tensor: creation, operators, realization, and what happens to values that leave their trace."""

import copy
import gc

import numpy as np
import pytest

import strata as st
from strata.errors import DTypeError, OptionError, ShapeError, TraceError
from strata.tensor import realize as door
from strata.tensor.structure_key import outline
from strata.tensor.tensor import Tensor


@pytest.fixture
def runs(monkeypatch):
    """How often the door to the runtime is used, with the size of each graph."""
    module = __import__("sys").modules["strata.tensor.realize"]
    seen = []
    real = module.run_values

    def counted(roots):
        seen.append(len(outline(roots).nodes))
        return real(roots)

    monkeypatch.setattr(module, "run_values", counted)
    assert door is st.realize
    return seen


def test_operators_record_and_numpy_computes(runs):
    a = st.tensor([[1.0, 2.0], [3.0, 4.0]])
    b = (a @ a.T).relu().sum(axis=-1)
    assert (b.shape, b.dtype, b.ndim, b.size) == ((2,), st.float32, 1, 2)
    assert not b.is_realized
    assert runs == []
    np.testing.assert_array_equal(b.numpy(), [16.0, 36.0])
    assert b.is_realized
    assert b.tolist() == [16.0, 36.0]
    assert b.sum().item() == 52.0
    np.testing.assert_array_equal(np.asarray(b), [16.0, 36.0])
    assert len(runs) == 2


def test_creation_and_dtypes():
    assert st.tensor(1.5).dtype is st.float32
    assert st.tensor([1, 2]).dtype is st.int64
    assert st.tensor(True).dtype is st.bool_
    assert st.tensor([1, 2], "f16").dtype is st.float16
    assert st.asarray(np.ones(2)).dtype is st.float64
    assert st.zeros((2, 3)).shape == (2, 3)
    np.testing.assert_array_equal(st.full((2,), 7, "i32").numpy(), np.int32([7, 7]))
    np.testing.assert_array_equal(st.arange(4).numpy(), np.arange(4))
    np.testing.assert_array_equal(st.eye(2).numpy(), np.eye(2))
    np.testing.assert_array_equal(st.full_like(st.zeros((2,)), 3).numpy(), [3, 3])
    np.testing.assert_array_equal(st.asarray([st.tensor(1.0), st.tensor(2.0)]).numpy(), [1, 2])
    assert st.empty((2,), "i8").dtype is st.int8


def test_asarray_shares_memory_and_tensor_does_not():
    data = np.zeros(3, np.float32)
    shared, copied = st.asarray(data), st.tensor(data)
    assert np.shares_memory(shared.numpy(), data)
    assert not np.shares_memory(copied.numpy(), data)
    with pytest.raises(ValueError, match="read-only"):
        shared.numpy()[0] = 1.0


def test_dlpack_both_ways():
    x = st.tensor([1.0, 2.0]) * 2.0
    np.testing.assert_array_equal(np.from_dlpack(x), [2.0, 4.0])
    torch = pytest.importorskip("torch")
    np.testing.assert_array_equal(torch.from_dlpack(x).numpy(), [2.0, 4.0])
    np.testing.assert_array_equal((st.asarray(torch.ones(2)) + 1.0).numpy(), [2.0, 2.0])


def test_numpy_on_either_side():
    x, y = st.tensor([1.0, 2.0]), np.float32([3.0, 4.0])
    for result, expected in (
        (x + y, [4, 6]),
        (y + x, [4, 6]),
        (y - x, [2, 2]),
        (2.0 / x, [2, 1]),
        (-x, [-1, -2]),
        (abs(-x), [1, 2]),
    ):
        assert isinstance(result, Tensor)
        np.testing.assert_array_equal(result.numpy(), expected)
    big = np.ones(1000, np.float32)
    assert (big + st.ones((1000,))).sum().item() == 2000.0


def test_comparisons_are_element_wise():
    x = st.tensor([1.0, 2.0, 3.0])
    assert (x == 2.0).tolist() == [False, True, False]
    assert (x != 2.0).tolist() == [True, False, True]
    assert (x < 2.5).tolist() == [True, True, False]
    assert (x == "text") is False
    assert len({x, x}) == 1
    assert bool((x > 0.0).all())


def test_indexing_iteration_and_masks():
    x = st.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(x[1, ::-1].numpy(), [5, 4, 3])
    np.testing.assert_array_equal(x[st.tensor([1, 0])].numpy(), [[3, 4, 5], [0, 1, 2]])
    np.testing.assert_array_equal(x[x > 2].numpy(), [3, 4, 5])
    np.testing.assert_array_equal([row.sum().item() for row in x], [3, 12])
    assert len(x) == 2
    assert list(range(5))[st.tensor(2)] == 2


def test_several_tensors_share_one_graph(runs):
    x = st.tensor(np.linspace(0, 1, 5))
    heavy = x.exp()
    a, b = heavy + 1.0, heavy * 2.0
    st.realize(a, {"b": b})
    assert len(runs) == 1
    assert a.is_realized
    assert b.is_realized
    np.testing.assert_allclose(b.numpy(), 2 * np.exp(np.linspace(0, 1, 5)))
    assert len(runs) == 1


def test_what_was_built_on_a_realized_tensor_starts_from_its_array(runs):
    x = st.tensor([1.0, 2.0])
    middle = x.exp().log().exp()
    late = middle + 1.0
    middle.realize()
    late.realize()
    assert runs[1] < runs[0]


def test_a_realized_tensor_forgets_its_expression():
    x = st.tensor(np.ones(4))
    y = x.exp()
    node = y.value.node
    y.realize()
    assert y.value.node is not node
    assert y.value.node.inputs == ()
    del node
    gc.collect()
    np.testing.assert_allclose(y.numpy(), np.full(4, np.e))


def test_copies_formats_and_assignments():
    x = st.tensor([1.0, 2.0])
    assert copy.deepcopy({"x": x})["x"].tolist() == [1.0, 2.0]
    assert f"{x.sum():.2f}" == "3.00"
    np.testing.assert_array_equal(x.setitem(0, 5.0).numpy(), [5.0, 2.0])
    before = x * 10.0
    x[0] = 5.0
    x[1:] = st.tensor([7.0])
    np.testing.assert_array_equal(x.numpy(), [5.0, 7.0])
    np.testing.assert_array_equal(before.numpy(), [10.0, 20.0])
    assert x.assign(3.0).tolist() == [3.0, 3.0]


def test_repr_never_computes(runs):
    x = st.tensor([1.0, 2.0])
    assert repr(x) == "Tensor([1., 2.], f32[2])"
    assert repr(x + 1.0) == "Tensor(f32[2], add not computed yet)"
    assert runs == []


def test_errors_name_both_values_and_the_line():
    with pytest.raises(ShapeError) as caught:
        st.ones((2, 3)) + st.ones((2, 4))
    text = str(caught.value)
    assert "[2, 3]" in text
    assert "[2, 4]" in text
    assert "test_tensor.py" in text


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: st.ones((2,)).item(), ShapeError, r"f32\[2\] has 2 elements"),
        (lambda: bool(st.ones((2,))), ShapeError, r"needs one element, f32\[2\] has 2"),
        (lambda: len(st.tensor(1.0)), ShapeError, "no length"),
        (lambda: [1][st.tensor(0.0)], OptionError, "not an index"),
        (lambda: st.tensor(["a"]), DTypeError, "cannot become a tensor"),
        (lambda: st.tensor([[1], [1, 2]]), DTypeError, "cannot become a tensor"),
        (lambda: Tensor(3), OptionError, "st.tensor"),
        (lambda: st.ones((2,)).softmx(), AttributeError, "did you mean 'softmax'"),
        (lambda: st.sofmax, AttributeError, "did you mean 'softmax'"),
        (lambda: st.empty((st.Variable("N", 1, 8), 2)).numpy(), ShapeError, "size N has no value"),
    ],
)
def test_mistakes(act, error, message):
    with pytest.raises(error, match=message):
        act()


def test_a_tensor_does_not_leave_its_trace():
    kept = []

    def leak(x):
        kept.append(x * 2.0)
        return x.sum()

    st.grad(leak)(st.ones((3,)))
    assert repr(kept[0]) == "Tensor(f32[3], traced)"
    with pytest.raises(TraceError, match="of a function that is only traced") as caught:
        kept[0].numpy()
    assert "leak" in str(caught.value)


def test_no_python_branch_on_a_traced_tensor():
    with pytest.raises(TraceError, match="has no value while its function is traced"):
        st.grad(lambda x: x if x > 0.0 else -x)(2.0)


def test_graph_values_and_tensors_do_not_mix():
    g = st.Graph("g")
    x = g.input("x", (2,), "f32")
    with pytest.raises(TraceError):
        x + st.ones((2,))


def test_public_names_exist():
    for name in st.__all__:
        assert getattr(st, name) is not None
    assert set(st.__all__) <= set(dir(st))
    assert st.tensor([1.0]).shape == (1,)
    assert st.float32 is st.f32
