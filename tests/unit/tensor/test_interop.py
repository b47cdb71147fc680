"""Other libraries: memory goes both ways without copies, and generic code runs on tensors."""

import numpy as np
import pytest

import strata as st
from strata.errors import DeviceError, DTypeError, OptionError


def address(array):
    return array.__array_interface__["data"][0]


def test_numpy_shares_memory_both_ways():
    data = np.arange(12, dtype="f").reshape(3, 4)
    x = st.asarray(data)
    assert address(x.numpy()) == address(data)
    assert address(np.asarray(x)) == address(data)
    assert address(np.from_dlpack(x)) == address(data)
    assert address(st.xp.from_dlpack(data).numpy()) == address(data)
    y = (x + 1.0).realize()
    assert address(np.from_dlpack(y)) == address(y.numpy())
    assert np.asarray(x, dtype="f8").dtype == np.float64
    assert address(np.array(x, copy=True)) != address(data)


def test_torch_shares_memory_both_ways():
    torch = pytest.importorskip("torch")
    t = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    x = st.asarray(t)
    assert address(x.numpy()) == t.data_ptr()
    y = (x * 2.0).realize()
    back = torch.from_dlpack(y)
    assert back.data_ptr() == address(y.numpy())
    np.testing.assert_array_equal(back.numpy(), [[0, 2, 4], [6, 8, 10]])


def test_jax_shares_memory_both_ways():
    jax = pytest.importorskip("jax")
    given = jax.device_put(np.arange(65536, dtype="f").reshape(256, 256), jax.devices("cpu")[0])
    x = st.asarray(given)
    assert address(x.numpy()) == given.unsafe_buffer_pointer()
    y = st.jit(lambda x: x * 2.0)(x)
    back = jax.numpy.from_dlpack(y)
    assert back.unsafe_buffer_pointer() == address(y.numpy())
    np.testing.assert_array_equal(np.asarray(back), np.asarray(given) * 2)


def test_results_of_compiled_programs_are_shared_too():
    torch = pytest.importorskip("torch")
    f = st.jit(lambda x: x * 2.0)
    y = f(np.ones((64, 256), "f"))
    assert torch.from_dlpack(y).data_ptr() == address(y.numpy())
    assert y.__dlpack_device__() == (1, 0)
    assert np.from_dlpack(y, copy=True).sum() == 2 * 64 * 256


def test_a_donated_array_of_the_caller_is_not_overwritten():
    data = np.ones(100_000, "f")
    f = st.jit(lambda x: x + 1.0, donate_argnums=(0,))
    y = f(st.asarray(data))
    assert data[0] == 1.0
    assert y.numpy()[0] == 2.0


def test_einops_on_tensors():
    einops = pytest.importorskip("einops")
    x = np.arange(24.0).reshape(2, 3, 4).astype("f")
    from einops import array_api

    y = array_api.rearrange(st.asarray(x), "a b c -> c (a b)")
    np.testing.assert_array_equal(y.numpy(), einops.rearrange(x, "a b c -> c (a b)"))
    z = array_api.reduce(st.asarray(x), "a b c -> b", "sum")
    np.testing.assert_allclose(z.numpy(), x.sum((0, 2)))
    w = array_api.repeat(st.asarray(x), "a b c -> a d b c", d=2)
    assert w.shape == (2, 2, 3, 4)


def test_scipy_on_the_array_namespace():
    x = st.asarray(np.linspace(0.1, 1, 7))
    xp = x.__array_namespace__()
    assert xp is st.xp
    assert xp.__array_api_version__ == "2025.12"
    np.testing.assert_allclose(xp.sum(xp.sin(x)).item(), np.sin(np.linspace(0.1, 1, 7)).sum())


@pytest.mark.parametrize("name", ["sin", "sqrt", "floor", "isnan", "sign", "tanh", "exp", "log1p"])
def test_functions_of_the_standard(name, rng):
    x = np.abs(rng.standard_normal(9))
    with np.errstate(all="ignore"):
        expected = getattr(np, name)(x)
    np.testing.assert_allclose(getattr(st.xp, name)(st.asarray(x)).numpy(), expected, rtol=1e-12)
    if name in ("tanh", "log1p"):
        z = x + 1j
        np.testing.assert_allclose(getattr(st.xp, name)(st.asarray(z)).numpy(), getattr(np, name)(z), rtol=1e-12)


def test_data_dependent_shapes():
    x = st.asarray(np.array([3, 0, 1, 3]))
    assert [a.tolist() for a in st.xp.nonzero(x)] == [[0, 2, 3]]
    found = st.xp.unique_all(x)
    assert found.values.tolist() == [0, 1, 3]
    assert found.counts.tolist() == [1, 1, 2]
    assert x[x > 1].tolist() == [3, 3]
    flag = st.asarray(True)
    assert st.asarray(5)[flag].tolist() == [5]
    y = st.asarray(5)
    y[flag] = 7
    assert y.item() == 7


def test_types_of_the_standard():
    xp = st.xp
    assert xp.isdtype(xp.int8, ("real floating", "signed integer"))
    assert not xp.isdtype(xp.int8, "real floating")
    assert xp.result_type(xp.int8, xp.uint8) is xp.int16
    assert xp.can_cast(xp.int8, xp.float64)
    assert xp.finfo(xp.float32).eps == np.finfo("f").eps
    assert xp.iinfo(xp.uint8).max == 255
    info = xp.__array_namespace_info__()
    assert set(info.dtypes(kind="complex floating")) == {"complex64", "complex128"}
    assert info.default_dtypes()["real floating"] is xp.float32
    assert st.ones((2,)).to_device("cpu").device == "cpu"
    with pytest.raises(DeviceError):
        st.ones((2,)).to_device("moon")
    with pytest.raises(OptionError):
        st.ones((2,)).__array_namespace__(api_version="1999.12")


@pytest.mark.parametrize("shape", [(3, 2), (2, 2, 3), (0, 2, 2), (2, 0, 3)])
def test_pseudo_inverses_with_a_limit_each(shape):
    a = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    limits = np.full(shape[:-2], 1e-3, np.float32)
    made = st.xp.linalg.pinv(st.asarray(a), rtol=st.asarray(limits)).numpy()
    np.testing.assert_allclose(made, np.linalg.pinv(a, rcond=limits), rtol=1e-4, atol=1e-5)


def test_notebooks_see_a_table():
    x = st.tensor([[1.0, 2.0]])
    assert x._repr_html_() == "<code>f32[1, 2]</code><table><tr><td>1</td><td>2</td></tr></table>"
    assert "not computed yet" in (x + 1.0)._repr_html_()
    assert "<pre>" in st.tensor([1.0])._repr_html_()


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_element_types_of_dlpack_that_numpy_lacks(kind: str) -> None:
    torch = pytest.importorskip("torch")
    made = torch.linspace(-3, 3, 24).to(getattr(torch, kind)).reshape(2, 3, 4)
    graph = st.Graph("wide")
    graph.outputs(graph.input("x", (3, 2), kind).cast("f32"))
    wide = st.Session("cpu").compile(graph)
    for x in (made, made.permute(2, 0, 1), made[:, 1:, ::2], made[:0], made[0, 0, 0], made.expand(5, 2, 3, 4)):
        found = st.asarray(x)
        assert found.dtype == getattr(st, kind)
        np.testing.assert_array_equal(found.cast("f32").numpy(), x.float().numpy())
        np.testing.assert_array_equal(st.xp.from_dlpack(x).cast("f32").numpy(), x.float().numpy())
    x = made[:, :, 1].T
    np.testing.assert_array_equal(wide.run(x=x)[0], x.float().numpy())
    with pytest.raises(DTypeError, match=r"a torch.Tensor cannot become a tensor"):
        st.asarray(torch.ones(3, requires_grad=True))
