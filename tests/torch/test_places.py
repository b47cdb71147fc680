"""Tensors in the memory of a GPU: what can be said without one (with one: tests/backends/test_torch_cuda.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import strata as st
import strata.torch.convert as conversion
from strata.torch.convert import convert
from strata.torch.options import TorchOptions
from strata.torch.program import CudaProgram


def traced(f: Any, *args: torch.Tensor) -> Any:
    return make_fx(f, tracing_mode="fake")(*args)


def f(x: torch.Tensor, w: torch.Tensor) -> Any:
    y = x @ w
    return y.relu(), (y * 2).t().contiguous().t(), x


def test_the_place_of_a_graph_is_that_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "DEVICES", ("cpu", "meta"))  # stands for a GPU: it has no elements either
    x, w = torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta")
    made = convert(traced(f, x, w))
    assert not made.unsupported
    assert str(made.place) == "meta"
    mixed = convert(traced(lambda x: x.to("meta") + 1, torch.ones(2)))
    assert "not in this memory" in str(mixed.unsupported)


def test_a_device_that_is_not_the_tensors_is_refused() -> None:
    options = TorchOptions.read({"device": "cpu"}, {})
    with pytest.raises(st.errors.OptionError, match="the tensors are on cuda:0"):
        options.session(torch.device("cuda:0"))


def test_programs_of_devices_take_and_give_tensors() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(2, 3), torch.randn(3, 4)
    program = CudaProgram(convert(traced(f, x, w), bound=frozenset({1})), st.Session("cpu"))
    for _ in range(2):
        found = program([x, w])
        torch.testing.assert_close(found, list(f(x, w)))
        assert found[1].stride() == f(x, w)[1].stride()
        assert found[2] is x
        w.mul_(2)  # is seen by its version


def _inference(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
    return torch.ops.aten._native_batch_norm_legit_no_training(x, w, b, mean, var, 0.1, 1e-5)


def _legit(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
    return torch.ops.aten._native_batch_norm_legit_functional(x, w, b, mean, var, False, 0.1, 1e-5)


@pytest.mark.parametrize("norm", [_inference, _legit])
def test_batch_norm_of_a_gpu_gives_what_it_normalised_with(norm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "DEVICES", ("cpu", "meta"))
    torch.manual_seed(0)
    args = [torch.randn(2, 3, 4, 4), *torch.randn(3, 3), torch.rand(3)]
    made = convert(traced(norm, *(a.to("meta") for a in args)))
    assert not made.unsupported
    y, mean, rstd, *kept = CudaProgram(made, st.Session("cpu"))(list(args))
    x, w, b, m, v = (a.double() for a in args)
    wanted = torch.nn.functional.batch_norm(x, m, v, w, b)
    torch.testing.assert_close(y, wanted.float())
    torch.testing.assert_close((mean, rstd), (args[3], (v + 1e-5).rsqrt().float()))
    torch.testing.assert_close(kept, [args[3], args[4]][: len(kept)])
