"""Ops that stay in torch get their inputs in the strides that eager gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import strata as st
from strata.torch.strides import lay


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    st.torch.register()
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


@torch.library.custom_op("strata_tests::seen", mutates_args=())
def seen(x: torch.Tensor) -> torch.Tensor:
    """The strides of a tensor, and its elements."""
    return torch.cat([torch.tensor(x.stride(), dtype=x.dtype), x.reshape(-1)])


@seen.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.dim() + x.numel())


@torch.library.custom_op("strata_tests::kept", mutates_args=())
def kept(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


@kept.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[1:])


@torch.library.custom_op("strata_tests::kept_backward", mutates_args=())
def kept_backward(ct: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return ct.expand(x.shape) * x.stride(0)


@kept_backward.register_fake
def _(ct: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


kept.register_autograd(
    lambda ctx, ct: kept_backward(ct, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

PADDED = [
    lambda x: torch.nn.functional.pad(x * 2, (0, 7))[..., : x.shape[-1]],
    lambda x: (x * 2).mT,
    lambda x: (x * 2)[:, :1].expand(x.shape),
    lambda x: (x * 2)[::2],
    lambda x: torch.nn.functional.pad(x * 2, (0, 7))[..., : x.shape[-1]].unsqueeze(0).mT,
]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("make", PADDED)
def test_strides_are_eagers(make: Callable[[Any], Any], dynamic: bool) -> None:
    run: Any = torch.compile(lambda x: seen(make(x)) + 1, backend="strata", dynamic=dynamic)
    for n in (5, 9):
        x = torch.randn(n, 17)
        torch.testing.assert_close(run(x), seen(make(x)) + 1)
    assert "strata_tests" in str(st.torch.report().stayed)


def test_sizes_that_depend_on_data() -> None:
    def f(x: Any) -> Any:
        found = torch.nonzero(x > 0)
        twice = torch.cat([found, found + 1]) * 2
        return seen(twice.mT.float()) - 1

    run: Any = torch.compile(f, backend="strata", dynamic=True)
    for n in (5, 9):
        x = torch.randn(n, 17)
        torch.testing.assert_close(run(x), f(x))


def test_what_the_forward_pass_kept() -> None:
    x = torch.randn(5, 17, requires_grad=True)

    def f(x: Any) -> Any:
        return kept(torch.nn.functional.pad(x.sin(), (0, 7))[..., :17])

    run: Any = torch.compile(f, backend="strata")
    found = [torch.autograd.grad(g(x).sum(), x)[0] for g in (run, f)]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("strides", [(24, 1), (1, 5), (0, 1), (1, 0), (2, 3), (1, 1), (3, 1)])
def test_laid(strides: tuple[int, int]) -> None:
    exact = torch.randn(200).as_strided((5, 4), strides)
    for given in (exact.contiguous(), exact.mT.contiguous().mT):
        found = lay(given, strides)
        assert found.stride() == strides
        assert torch.equal(found, exact)
