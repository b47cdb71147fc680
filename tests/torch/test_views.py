"""Results that are views: of arguments, of each other, with sizes that change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import strata as st
from strata.torch.kinds import stride_order

VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "parts": lambda x: x.chunk(2),
    "end": lambda x: x[2:],
    "steps": lambda x: x[1::2, 1:],
    "turned": lambda x: x[1:].t(),
    "repeated": lambda x: x[1:, None].expand(-1, 3, -1),
    "flat": lambda x: x.view(-1)[3:],
    "diagonal": lambda x: x.diagonal(-1),
    "beside a number": lambda x: (x.sin() + 1, x[2:], x),
    "of a result": lambda x: ((x * 2)[1:], (x * 2)[:1]),
    "of one result": lambda x: ((y := x * 2)[1:], y[:, 1:], y),
    "of a result that is not given": lambda x: ((y := x * 2)[1:], y[:, 1:]),
    "of columns": lambda x: ((y := (x * 2).t().contiguous().t())[1:], y.t()[:, 1:]),
    "real and imaginary": lambda x: ((z := torch.complex(x, x + 1)).real, z.imag[1:]),
}
ALONE = ("of a result", "real and imaginary")  # their elements lie one after the other, where eager leaves gaps
ARGUMENTS: dict[str, Callable[[int], torch.Tensor]] = {
    "plain": lambda n: torch.arange(n * 4.0).reshape(n, 4),
    "turned": lambda n: torch.arange(n * 4.0).reshape(4, n).t(),
    "inside another": lambda n: torch.arange((n + 3) * 8.0).reshape(n + 3, 8)[2:-1, 1:5],
}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    st.torch.register()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def flat(x: Any) -> list[torch.Tensor]:
    return [x] if isinstance(x, torch.Tensor) else list(x)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_eagers(name: str, argument: str, dynamic: bool) -> None:
    f = VIEWS[name]
    if name == "flat" and argument != "plain":
        pytest.skip("not a view")
    run: Any = torch.compile(f, backend="strata", dynamic=dynamic, options={"strict": True})
    for n in (6, 9, 4):
        given = []
        for g in (run, f):
            x = ARGUMENTS[argument](n)
            made = flat(g(x))
            before = [t.clone() for t in made]
            if name != "repeated":
                made[-1].mul_(-3)  # seen by the others where memory is shared
            given.append([*before, *made, x])
            for t, e in zip(made, flat(f(x)), strict=True):
                assert t.stride() == e.stride() or (name in ALONE and stride_order(t) == stride_order(e))
        for ours, theirs in zip(*given, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_an_argument_are_not_computed(dynamic: bool) -> None:
    x = torch.randn(6, 4)
    run: Any = torch.compile(lambda x: (x[1:], x.t(), x.view(-1)), backend="strata", dynamic=dynamic)
    for ours, theirs in zip(run(x), (x[1:], x.t(), x.view(-1)), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert all(not g.programs for g in st.torch.report().graphs[-1:])


def test_views_in_the_backward_pass() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> Any:
        y = (x @ w).tanh()
        return y[1:], (y.t() @ x[:, 1:]).relu(), w[1:]

    run: Any = torch.compile(f, backend="strata", dynamic=True)
    for n in (5, 8):
        found = []
        for g in (run, f):
            torch.manual_seed(n)
            x, w = torch.randn(n, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
            made = g(x, w)
            sum(t.square().sum() for t in made).backward()
            found.append([*made, x.grad, w.grad])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
