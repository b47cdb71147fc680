"""Arrays of PyTorch and JAX given to a program of the host: the same kind comes back, without a copy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import strata as st


def doubled(dtype: str, size: object = 3) -> st.CompiledGraph:
    g = st.Graph("doubled")
    x = g.input("x", (size, 4), dtype)
    g.outputs(x + x, x)
    return st.Session("cpu").compile(g)


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "f16", "i64", "u8"])
@pytest.mark.parametrize("size", [3, st.sym("n", 0, 8)])
def test_torch_in_torch_out(dtype: str, size: object) -> None:
    kind = getattr(torch, {"u8": "uint8"}.get(dtype, st.core.as_dtype(dtype).np.name))
    x = torch.arange(12).reshape(3, 4).to(kind)
    for _ in range(3):  # the first call, and those that take the short way
        got, same = doubled(dtype, size).run(x=x)
        assert (type(got), got.dtype, same.dtype) == (torch.Tensor, kind, kind)
        assert torch.equal(got, x + x)
        assert torch.equal(same, x)
        assert same.data_ptr() != x.data_ptr()  # results are new arrays


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i32"])
def test_jax_in_jax_out(dtype: str) -> None:
    x = jnp.arange(12).reshape(3, 4).astype(st.core.as_dtype(dtype).np)
    got, _ = doubled(dtype).run({"x": x})
    assert (type(got), got.dtype) == (type(x), x.dtype)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(x + x))


def test_numpy_in_numpy_out_after_torch() -> None:
    c = doubled("f32")
    x = torch.ones(3, 4)
    kinds = [type(c.run(x=a)[0]) for a in (x, x.numpy(), x, x.numpy(), x.tolist())]
    assert kinds == [torch.Tensor, np.ndarray, torch.Tensor, np.ndarray, np.ndarray]


def test_the_first_foreign_array_decides() -> None:
    g = st.Graph("sum")
    g.outputs(g.input("a", (2,)) + g.input("b", (2,)))
    c = st.Session("cpu").compile(g)
    (got,) = c.run(a=np.ones(2, np.float32), b=torch.ones(2))
    assert torch.equal(got, torch.full((2,), 2.0))


def test_programs_that_keep_state_give_tensors_that_may_be_written_to() -> None:
    g = st.Graph("counter")
    x, kept = g.input("x", (2,)), g.input("kept", (2,))
    g.outputs(x + kept, kept + 1)
    c = st.Session("cpu").compile(g)
    c.bind("kept", np.zeros(2, np.float32))
    c.feed("kept", output=1)
    for turn in range(3):
        total, count = c.run(x=torch.ones(2))
        assert total.tolist() == [1.0 + turn] * 2
        count += 100  # the caller's own
        assert c.read("kept").tolist() == [turn + 1.0] * 2


def test_loaded_models_give_what_they_are_given() -> None:
    model = st.onnx.load(st.onnx.export(st.tanh, None, np.ones((2, 3), np.float32)))
    x = torch.arange(6.0).reshape(2, 3)
    for _ in range(3):
        (got,) = model.run({model.inputs[0].name: x})
        assert type(got) is torch.Tensor
        torch.testing.assert_close(got, torch.tanh(x))
        (plain,) = model.run({model.inputs[0].name: x.numpy()})
        assert type(plain) is np.ndarray


def test_models_of_torch_give_what_they_are_given() -> None:
    module = torch.nn.Linear(3, 2)
    model = st.torch.load(module, (torch.ones(2, 3),))
    x = torch.arange(6.0).reshape(2, 3)
    torch.testing.assert_close(model(x), module(x).detach())
    np.testing.assert_allclose(model(x.numpy()), module(x).detach().numpy(), rtol=1e-6, atol=1e-6)


def test_a_message_names_a_few_of_many_parameters() -> None:
    g = st.Graph("deep")
    x = g.input("x", (2, 2))
    for i in range(9):
        x = x @ g.param(f"w{i}", (2, 2))
    g.outputs(x)
    c = st.Session("cpu").compile(g)
    c.set_params({f"w{i}": np.eye(2, dtype=np.float32) for i in range(9)})
    with pytest.raises(st.errors.UnknownNameError, match=r"param w3: f32\[2, 2\], … 5 more parameters\) -> f32"):
        c.run()
    assert "w8" in c.signature
    assert "w8" not in repr(c)
