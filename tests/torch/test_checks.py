"""What torch refuses by the values it meets, and what depends on them: losses, chances, masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

import strata as st


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    st.torch.register()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def strict(f: Callable[..., Any]) -> Any:
    return torch.compile(f, backend="strata", options={"strict": True})


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    ("shape", "target"),
    [
        ((3, 4), [[3, 0, -1, 1], [-1, 1, 2, 3], [0, 1, 2, 3]]),
        ((2, 4), [[0, 0, -1, 2], [2, -1, -1, -1]]),
        ((4,), [3, -1, 0, 1]),
    ],
)
def test_labels_end_at_the_first_minus_one(shape: tuple[int, ...], target: Any, reduction: str) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.multilabel_margin_loss(x, y, reduction=reduction)

    x, y = torch.randn(shape), torch.tensor(target)
    found = []
    for g in (strict(f), f):
        leaf = x.clone().requires_grad_()
        loss = g(leaf, y)
        loss.square().sum().backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(*found)


def test_labels_of_an_exported_loss() -> None:
    x, y = torch.randn(2, 4), torch.tensor([[3, 0, -1, 1], [-1, 1, 2, 3]])
    loss = torch.nn.MultiLabelMarginLoss()
    assert st.torch.load(loss, (x, y))(x.numpy(), y.numpy()) == pytest.approx(loss(x, y).item(), rel=1e-5)


@pytest.mark.parametrize("bad", [1.5, -0.1, float("nan")])
def test_chances_outside_of_0_and_1(bad: float) -> None:
    def loss(p: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy(p, torch.ones(4))

    def filled(p: torch.Tensor) -> torch.Tensor:
        return torch.empty(4).bernoulli_(p)

    p = torch.tensor([0.0, 0.2, 0.9, 1.0])
    for f in (loss, torch.bernoulli, filled):
        torch._dynamo.reset()
        run = strict(f)
        for q in (p, torch.tensor([0.5, bad, 0.5, 0.5]), p):
            results = []
            for g in (run, f):
                torch.manual_seed(1)
                try:
                    results.append(g(q))
                except RuntimeError as error:
                    results.append(str(error).split(".")[0])
            if q is p:
                torch.testing.assert_close(*results)
            else:
                assert isinstance(results[0], str)
                assert results[0] == results[1]


def test_deviations_below_zero() -> None:
    def f(mean: torch.Tensor, std: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.normal(mean, std), torch.normal(0.0, std)

    run = strict(f)
    mean, std = torch.randn(20), torch.rand(20)
    found = []
    for g in (run, f):
        torch.manual_seed(1)
        found.append(g(mean, std))
        with pytest.raises(RuntimeError, match="all elements of std >= 0"):
            g(mean, -std)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chances_draw_torchs_numbers(dtype: torch.dtype) -> None:
    def f(p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.bernoulli(p), torch.rand(3), torch.zeros(50, 20, dtype=torch.int32).bernoulli_(p)

    p = torch.rand(50, 20, dtype=dtype)
    found = []
    for g in (strict(f), f):
        torch.manual_seed(1)
        found.append(g(p))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_entropy_is_eagers() -> None:
    def f(p: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return functional.binary_cross_entropy(p, y), functional.binary_cross_entropy(p, y, w, reduction="none")

    p, y, w = torch.rand(3, 5), torch.rand(3, 5), torch.rand(5)
    p[0, :2] = torch.tensor([0.0, 1.0])
    found = []
    for g in (strict(f), f):
        leaf = p.clone().requires_grad_()
        made = g(leaf, y, w)
        sum(t.sum() for t in made).backward()
        found.append((*(t.detach() for t in made), leaf.grad))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (1, 5), (3, 5)])
def test_rows_that_a_mask_picks(shape: tuple[int, ...], accumulate: bool) -> None:
    def f(x: torch.Tensor, mask: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return x.index_put((mask,), v, accumulate)

    run = strict(f)
    x, v = torch.randn(2, 4, 5), torch.randn(shape)
    for ids in ([1, 3, 4], [0, 1, 2], [7, 5, 6]):
        mask = torch.zeros(8, dtype=torch.bool).index_fill(0, torch.tensor(ids), True).reshape(2, 4)
        torch.testing.assert_close(run(x, mask, v), f(x, mask, v))
    if shape == (3, 5):
        with pytest.raises(RuntimeError, match="shape mismatch"):
            run(x, torch.ones(2, 4, dtype=torch.bool), v)


@pytest.mark.parametrize("power", [-1, -2])
def test_integers_to_a_negative_power(power: int) -> None:
    x = torch.tensor([2, 1, -1])
    with pytest.raises(RuntimeError, match="negative integer powers"):
        torch.compile(lambda x: x**power, backend="strata")(x)
    torch.testing.assert_close(strict(lambda x: x.float() ** power)(x), x.float() ** power)


def test_asserts_in_a_program() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > 0).all(), "positive only")
        return x + 1

    run = strict(f)
    torch.testing.assert_close(run(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises(RuntimeError, match="positive only"):
        run(-torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_numbers_at_the_edge(dtype: torch.dtype) -> None:
    """What torch makes of nan, infinities and zeros of either sign."""
    x = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -2.5, 0.5], dtype=dtype)

    def f(x: torch.Tensor) -> Any:
        powers = [x**p for p in (0.5, -0.5, -1, -2, 2, 3, 1.5)]
        return *powers, torch.sign(x), torch.sgn(x), torch.heaviside(x, x.flip(0)), x.sign().add(1)

    for found, expected in zip(strict(f)(x), f(x), strict=True):
        torch.testing.assert_close(found, expected, equal_nan=True)
