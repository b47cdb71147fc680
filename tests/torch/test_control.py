"""Control flow of torch: `cond`, loops, scans, maps, regions; attention that scores by a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import strata as st
from strata.torch.reports import REPORTS

# Eager attention by a graph says that it is slow: it is what ours is compared with.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")

W = torch.tensor([0.5, -1.25, 2.0])
SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4])


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    st.torch.register()
    torch._dynamo.reset()
    REPORTS.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def both(f: Callable[..., Any], *args: torch.Tensor, strict: bool = True, near: float = 1e-5, **options: Any) -> None:
    """Results and gradients of a function, compiled and as it is."""
    run: Any = torch.compile(f, backend="strata", options={"strict": strict}, **options)
    found: list[list[torch.Tensor]] = []
    for g in (run, f):
        given = [x.detach().clone().requires_grad_(x.requires_grad) for x in args]
        made = g(*given)
        made = list(made) if isinstance(made, tuple) else [made]
        wanted = [x for x in given if x.requires_grad]
        if wanted:
            sum(y.float().square().sum() for y in made if y.requires_grad).backward()
        found.append([*made, *(x.grad for x in wanted if x.grad is not None)])
    assert len(found[0]) == len(found[1])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=near, rtol=1e-4)


def branches(x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda x: (x + W).sin(), lambda x: x.cos() * 2, (x,))


def loop(i: torch.Tensor, x: torch.Tensor) -> Any:
    return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * W + i), (i, x))


def rows(x: torch.Tensor) -> Any:
    over: Any = torch_map
    return over(lambda row, w: row.sin() * w, x, W)


def sums(x: torch.Tensor) -> Any:
    return scan(lambda c, row: (c + row, c * row * W), torch.ones(3), x)


@pytest.mark.parametrize("sign", [1, -1])
def test_cond(sign: int) -> None:
    x = torch.rand(4, 3) * sign
    both(branches, x)
    both(branches, x.requires_grad_())


def test_cond_inside_cond() -> None:
    def f(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, branches, lambda x: torch.cond(x.min() < -2, branches, torch.relu, (x,)), (x,))

    for x in (torch.rand(4, 3), -torch.rand(4, 3), -3 - torch.rand(4, 3)):
        both(f, x)


def test_while_loop() -> None:
    for start in (0, 3, 9):
        both(loop, torch.tensor(start), torch.randn(4, 3))


def test_scan() -> None:
    x = torch.randn(6, 3)
    both(sums, x)
    both(sums, x.requires_grad_())
    both(lambda x: scan(lambda c, row: (c * 0.5 + row, c * row), torch.ones(6), x, dim=1, reverse=True), x.detach())


def test_map() -> None:
    x = torch.randn(4, 3)
    both(rows, x)
    both(rows, x.requires_grad_())


def test_sizes_that_change() -> None:
    counts = []
    for f in (branches, sums):
        torch._dynamo.reset()
        REPORTS.clear()
        run: Any = torch.compile(f, backend="strata", dynamic=True, options={"strict": True})
        for n in (4, 7, 5):
            x = torch.randn(n, 3)
            torch.testing.assert_close(run(x), f(x))
        counts.append(len(st.torch.report().graphs))
    assert counts == [1, 1]


@pytest.mark.parametrize("training", [False, True])
def test_regions_that_are_compiled_once(training: bool) -> None:
    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    both(lambda x: region(region(x)) * 2, torch.randn(4, 3, requires_grad=training))


def unlike(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigvals(x[:3]).real.sum() + x


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.cond(x.sum() > 0, unlike, torch.relu, (x,)).sin(),
        lambda x: torch.cond(
            x.sum() > 0, lambda x: (x.int() // 2 // (x.int() * 0 + 3)).float(), torch.relu, (x,)
        ).sin(),
        lambda x: while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, unlike(x)), (torch.tensor(0), x))[1] * 2,
    ],
)
def test_what_has_no_rule_inside_stays_in_torch(f: Callable[..., Any]) -> None:
    both(f, torch.rand(4, 3) * 5, strict=False)
    report = st.torch.report()
    assert report.stayed.keys() in ({"cond"}, {"while_loop"})
    assert "in a graph inside" in str(report)


def test_numbers_drawn_in_a_branch_are_torchs() -> None:
    def f(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: x + torch.randn_like(x), lambda x: x * 2, (x,))

    x, found = torch.rand(4, 3), []
    for g in (torch.compile(f, backend="strata"), f):
        torch.manual_seed(1)
        found.append(g(x))
    torch.testing.assert_close(*found)


def test_exported_control_flow_ships(tmp_path: Path) -> None:
    class Flow(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cond(x.sum() > 0, self.layer, lambda x: x.cos(), (x,))
            last, rows = scan(lambda c, row: (c + row, c * row), torch.zeros(3), y)
            _, z = while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, z * 0.5 + i), (torch.tensor(0), last))
            with torch.no_grad():
                w = rows.sin()
            return w + z

    model = Flow().requires_grad_(False)  # torch warns of gradients in its own loops
    batch = torch.export.Dim("batch", min=2, max=64)
    loaded = st.torch.load(model, (torch.randn(4, 3),), dynamic_shapes=({0: batch},))
    loaded.save(tmp_path / "flow.strata")
    shipped = st.load_compiled(tmp_path / "flow.strata")
    for n, sign in ((2, 1), (9, -1)):
        x = torch.rand(n, 3) * sign
        expected = model(x).numpy()
        np.testing.assert_allclose(loaded(x.numpy()), expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(shipped.run(x=x.numpy())[0], expected, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------------------------------------------ flex_attention


def bias(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return score + SLOPES[h] * (i - j)


def cap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return 5 * torch.tanh(score / 5)


def mask(seen: Callable[..., Any]) -> Any:
    return create_block_mask(seen, None, None, 16, 16, device="cpu", BLOCK_SIZE=8)


def heads(*counts: int, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(2, n, 16, 8, requires_grad=grad) for n in counts]


DOCUMENTS = torch.tensor([0] * 7 + [1] * 9)
FLEX: dict[str, Callable[..., Any]] = {
    "plain": flex_attention,
    "bias": lambda q, k, v: flex_attention(q, k, v, score_mod=bias),
    "cap": lambda q, k, v: flex_attention(q, k, v, score_mod=cap, scale=0.3),
    "causal": lambda q, k, v: flex_attention(q, k, v, score_mod=bias, block_mask=mask(lambda b, h, i, j: i >= j)),
    "documents": lambda q, k, v: flex_attention(
        q, k, v, block_mask=mask(lambda b, h, i, j: (DOCUMENTS[i] == DOCUMENTS[j]) & (i >= j))
    ),
    "a row of nothing, and sums": lambda q, k, v: flex_attention(
        q, k, v, block_mask=mask(lambda b, h, i, j: i > j), return_lse=True
    ),
}


@pytest.mark.parametrize("name", FLEX)
def test_flex_attention(name: str) -> None:
    both(FLEX[name], *heads(4, 4, 4))


def test_flex_attention_of_fewer_heads() -> None:
    both(lambda q, k, v: flex_attention(q, k, v, score_mod=bias, enable_gqa=True), *heads(4, 2, 2))


def test_flex_attention_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # torch trains it on GPUs only
    slopes = SLOPES.clone().requires_grad_()

    def learned(q: Any, k: Any, v: Any, slopes: Any) -> Any:
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + slopes[h] * (i - j))

    both(learned, *heads(4, 4, 4, grad=True), slopes)
    both(FLEX["a row of nothing, and sums"], *heads(4, 4, 4, grad=True))
