"""`torch.compile(model, backend="strata")`: what eager gives, its gradients, its changes, its errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import strata as st


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    st.torch.register()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def mlp() -> Any:
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 4)
    )


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="strata", options={"strict": True, **options})


def test_inference_is_eagers() -> None:
    model = mlp().eval()
    x = torch.randn(3, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x))


@pytest.mark.parametrize("change", ["no_grad", "data", "element", "limits", "replace"])
def test_changed_parameters_are_seen(change: str) -> None:
    model = mlp().eval()
    run, x = compiled(model), torch.randn(3, 16)
    with torch.no_grad():
        run(x)
        if change == "no_grad":
            model[0].weight.mul_(2)
        elif change == "data":
            model[0].weight.data.mul_(2)
        elif change == "element":
            model[0].weight.data[17, 5] = 9
        elif change == "limits":
            model[0].weight.data.clamp_(-0.2, 0.2)
        else:
            model[0].weight.data = torch.randn(32, 16)
        torch.testing.assert_close(run(x), model(x))


def test_gradients_and_dropout_are_eagers() -> None:
    model, x = mlp().train(), torch.randn(3, 16)
    run: Any = compiled(model)
    found = []
    for f in (run, model):
        model.zero_grad()
        torch.manual_seed(7)
        f(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_channels_last_comes_back_so() -> None:
    model: Any = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    with torch.no_grad():
        y, expected = compiled(model)(x), model(x)
    torch.testing.assert_close(y, expected)
    assert y.stride() == expected.stride()


def test_batch_norm_statistics_are_eagers() -> None:
    ours = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).train()
    theirs = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).train()
    theirs.load_state_dict(ours.state_dict())
    run, x = compiled(ours), torch.randn(2, 3, 9, 9)
    for _ in range(3):
        run(x).sum().backward()
        theirs(x).sum().backward()
    torch.testing.assert_close(dict(ours.named_buffers()), dict(theirs.named_buffers()))
    torch.testing.assert_close(ours[0].weight.grad, theirs[0].weight.grad, rtol=1e-4, atol=1e-4)


def test_ids_out_of_range_are_an_error() -> None:
    table = torch.nn.Embedding(5, 3)
    with torch.no_grad(), pytest.raises(IndexError):
        compiled(table)(torch.tensor([1, 7]))


@pytest.mark.parametrize("norm_first", [False, True])
def test_layers_that_torch_calls_whole(norm_first: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=norm_first)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(3, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(x), model(x))
        ours, _ = compiled(attention)(x, x, x, need_weights=False)
        torch.testing.assert_close(ours, attention(x, x, x, need_weights=False)[0])
