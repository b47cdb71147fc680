"""`torch.compile(backend="strata")` on tensors of a GPU: read and written where they are, in the stream's order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import strata as st

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or not any(name.startswith("cuda") for name in st.devices()):
    pytest.skip("no NVIDIA GPU here, or no torch, triton and cuda.core packages for it", allow_module_level=True)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    st.torch.register()
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def mlp() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32)).cuda()


def test_inference_stays_on_the_device() -> None:
    model, x = mlp().eval(), torch.randn(16, 64, device="cuda")
    run: Any = torch.compile(model, backend="strata", options={"strict": True})
    with torch.no_grad():
        for _ in range(3):
            found = run(x)
            assert found.is_cuda
            torch.testing.assert_close(found, model(x), rtol=1e-3, atol=1e-3)
        model[0].weight.mul_(2)
        torch.testing.assert_close(run(x), model(x), rtol=1e-3, atol=1e-3)


def test_training_on_the_device() -> None:
    model, x = mlp().train(), torch.randn(16, 64, device="cuda")
    run: Any = torch.compile(model, backend="strata")
    found = []
    for f in (run, model):
        model.zero_grad()
        f(x).square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-3)


def test_any_batch_and_another_stream() -> None:
    model = mlp().eval()
    run: Any = torch.compile(model, backend="strata", dynamic=True, options={"strict": True})
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        for n in (7, 3, 32):
            x = torch.randn(n, 64, device="cuda")
            torch.testing.assert_close(run(x), model(x), rtol=1e-3, atol=1e-3)


def test_random_numbers_are_the_devices() -> None:
    def f(x: Any) -> Any:
        return x + torch.rand(8, 4, device="cuda")

    run: Any = torch.compile(f, backend="strata")
    x = torch.zeros(8, 4, device="cuda")
    torch.manual_seed(3)
    found = run(x)
    torch.manual_seed(3)
    torch.testing.assert_close(found, f(x))


def test_tensors_go_both_ways_without_the_host() -> None:
    theirs = torch.arange(6.0, device="cuda")
    ours = st.from_torch(theirs)
    assert str(ours.device).startswith("cuda")
    back = st.to_torch(ours * 2)
    assert back.is_cuda
    torch.testing.assert_close(back, theirs * 2)
