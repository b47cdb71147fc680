"""What programs of torch do beside computing: sizes that change, threads, graph breaks, hooks, errors, subclasses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import strata as st
from strata.torch.reports import REPORTS


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    st.torch.register()
    torch._dynamo.reset()
    REPORTS.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def small() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).eval()


def test_any_batch_is_one_compile() -> None:
    model = small()
    run: Any = torch.compile(model, backend="strata", dynamic=True, options={"strict": True})
    sizes = list(range(1, 65))
    random.Random(0).shuffle(sizes)
    sizes = [2, *(n for n in sizes if n > 1)]  # torch makes a program of its own for 1
    with torch.no_grad():
        for n in sizes:
            x = torch.randn(n, 8)
            torch.testing.assert_close(run(x), model(x))
    assert len(st.torch.report().graphs) == 1


def test_dynamic_training() -> None:
    model = small().train()
    run: Any = torch.compile(model, backend="strata", dynamic=True, options={"strict": True})
    for n in (4, 7, 5):
        x = torch.randn(n, 8)
        found = []
        for f in (run, model):
            model.zero_grad()
            f(x).square().sum().backward()
            found.append([p.grad.clone() for p in model.parameters()])
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)
    assert len(st.torch.report().graphs) == 2


def test_eight_threads() -> None:
    model = small()
    run: Any = torch.compile(model, backend="strata")
    inputs = [torch.randn(4, 8) for _ in range(64)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]
        run(inputs[0])

    def call(x: torch.Tensor) -> Any:
        with torch.no_grad():
            return run(x)

    with ThreadPoolExecutor(8) as pool:
        for ours, theirs in zip(pool.map(call, inputs), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_an_op_without_a_rule_stays_in_torch() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvals(x.sin() @ x).abs().sort().values * 2

    x = torch.randn(4, 4)
    torch.testing.assert_close(torch.compile(f, backend="strata")(x), f(x))
    found = st.torch.report()
    assert found.stayed == {"aten.linalg_eigvals.default": 1} or "aten.linalg_eig.default" in found.stayed
    assert "in torch" in str(found)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="would stay in torch"):
        torch.compile(f, backend="strata", options={"strict": True})(x)


def test_a_shape_that_depends_on_data() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum() + x.nonzero().shape[0]

    x = torch.randn(9)
    torch.testing.assert_close(torch.compile(f, backend="strata")(x), f(x))


def test_views_and_changes_in_place() -> None:
    def f(x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache[:, 1:3] = x * 2
        row = cache[0]
        row += 1
        return row, x.t()

    x = torch.randn(2, 2)
    ours, theirs = torch.zeros(2, 4), torch.zeros(2, 4)
    run: Any = torch.compile(f, backend="strata")
    for _ in range(2):
        torch.testing.assert_close(run(x, ours), f(x, theirs))
        torch.testing.assert_close(ours, theirs)


def test_non_contiguous_inputs() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).sum(0)

    run: Any = torch.compile(f, backend="strata", options={"strict": True})
    for x in (torch.randn(6, 8)[::2, 1::3], torch.randn(3, 4, 5).permute(2, 0, 1), torch.randn(4).expand(3, 4)):
        torch.testing.assert_close(run(x), f(x))


def test_hooks_and_exceptions() -> None:
    model, seen = small(), []
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(out.shape))
    run: Any = torch.compile(model, backend="strata")
    with torch.no_grad():
        torch.testing.assert_close(run(torch.ones(2, 8)), model(torch.ones(2, 8)))
        assert len(seen) == 2
        with pytest.raises(RuntimeError):
            run(torch.ones(2, 9))


def test_inference_mode_and_autocast() -> None:
    model, x = small(), torch.randn(2, 8)
    run: Any = torch.compile(model, backend="strata", options={"strict": True})
    with torch.inference_mode():
        torch.testing.assert_close(run(x), model(x))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = run(x), model(x)
    assert ours.dtype is theirs.dtype is torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_a_subclass_of_tensor() -> None:
    class Marked(torch.Tensor):
        pass

    x = torch.randn(3).as_subclass(Marked)
    f = torch.compile(lambda t: t.sin() + 1, backend="strata")
    torch.testing.assert_close(torch.Tensor(f(x)), torch.sin(torch.Tensor(x)) + 1)


def test_random_numbers_are_torchs() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(3, 4) * torch.randn_like(x)

    run, x = torch.compile(f, backend="strata", options={"strict": True}), torch.zeros(3, 4)
    torch.manual_seed(3)
    ours = run(x)
    torch.manual_seed(3)
    torch.testing.assert_close(ours, f(x))


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_numbers_are_drawn_in_the_order_of_memory(order: tuple[int, ...]) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.permute(order) * 2
        drawn = torch.rand_like(y), torch.randn_like(y), torch.randint_like(y, 100), torch.empty_like(y).exponential_()
        return torch.nn.functional.dropout(y), *drawn, torch.bernoulli(y.sigmoid()), torch.rand(3)

    x = torch.randn(3, 4, 5)
    found = []
    for g in (torch.compile(f, backend="strata", options={"strict": True}), f):
        torch.manual_seed(1)
        found.append(g(x))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_draws_follow_each_other_as_in_torch() -> None:
    """Also where some are torch's and the graph is split."""

    def f(x: torch.Tensor) -> Any:
        first = torch.nn.functional.dropout(x, 0.3)
        count = (x > 0).nonzero().shape[0]
        second = torch.nn.functional.dropout(x.sin(), 0.3)
        chosen = torch.multinomial(torch.ones(5), 3)
        return (
            torch.nn.functional.dropout(first * count, 0.2), second[chosen], torch.normal(x, 2.0), torch.rand(3),
            torch.empty(4).exponential_(2), torch.empty(3).geometric_(0.3), torch.normal(1.0, x.abs()),
            torch.empty(3).cauchy_(), torch.empty(3).log_normal_(0.5), torch.empty(3).uniform_(1, 2),
        )  # fmt: skip

    run, x = torch.compile(f, backend="strata"), torch.randn(5, 6)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for seed in (0, 1):
            torch.manual_seed(seed)
            ours: Any = run(x)
            torch.manual_seed(seed)
            torch.testing.assert_close(ours, f(x))
    assert "aten.multinomial.default" in st.torch.report().stayed


@pytest.mark.parametrize("narrow", [torch.uint8, torch.int8, torch.int16])
def test_numbers_beyond_a_narrow_type_wrap_around(narrow: torch.dtype) -> None:
    x = torch.tensor([1.5, -1.5, 300.0, -300.0, 70000.0, -70000.0, 0.25])
    run: Any = torch.compile(lambda x: x.to(narrow), backend="strata", options={"strict": True})
    assert torch.equal(run(x), x.to(torch.int64).to(narrow))


def test_mixed_arithmetic_follows_torch() -> None:
    a, b, c = torch.arange(4), torch.tensor(2.5), torch.randn(4, dtype=torch.float64)

    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return a + b, a / 2, a * True, c * a, (a > 1) + (a < 3), a // 3, a % 3, -a, a.float().mean(), a.sum() ** 2

    for ours, theirs in zip(torch.compile(f, backend="strata")(a, b, c), f(a, b, c), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_equal_results_have_memory_of_their_own() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return y, y.clone(), x.clone(), y.view(-1)

    run: Any = torch.compile(f, backend="strata", options={"strict": True})
    x = torch.zeros(2, 2)
    y, copy, same, view = run(x)
    y += 5
    assert (copy == 1).all()
    assert (view == 6).all()
    same += 1
    assert (x == 0).all()


def test_what_does_not_compile_stays_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise st.errors.CompileError("no", code="C100")

    monkeypatch.setattr(st.Session, "compile", refuse)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    run: Any = torch.compile(f, backend="strata")
    torch.testing.assert_close(run(torch.ones(3)), f(torch.ones(3)))
    assert sum(st.torch.report().stayed.values()) >= 2


def test_integers_divided_by_zero_are_torchs_error() -> None:
    x, y = torch.arange(6), torch.tensor([1, 2, 0, 3, -1, 5])
    modes: list[Any] = [
        lambda x, y: x // y, lambda x, y: x % y, torch.fmod, lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        lambda x, y: 7 % y, lambda x, y: (x // (y + 1)).sum() + y.sum(),
    ]  # fmt: skip
    for f in modes:
        torch._dynamo.reset()
        run: Any = torch.compile(f, backend="strata", options={"strict": True})
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            run(x, y)
        assert torch.equal(run(x, y.abs() + 1), f(x, y.abs() + 1))
    torch._dynamo.reset()
    none: Any = torch.compile(modes[0], backend="strata", dynamic=True)
    assert none(x[:0], torch.tensor(0)).shape == (0,)

    def of_size(x: Any) -> Any:
        return torch.arange(12) // x.shape[0]

    by_size: Any = torch.compile(of_size, backend="strata", dynamic=True)
    assert torch.equal(by_size(torch.randn(5)), torch.arange(12) // 5)
    floats: Any = torch.compile(modes[0], backend="strata")
    torch.testing.assert_close(floats(x.double(), y.double()), x.double() // y.double(), equal_nan=True)


def test_numbers_that_change_from_call_to_call() -> None:
    def scaled(x: Any, n: Any) -> Any:
        return x + n, n * 2

    x = torch.randn(3)
    run: Any = torch.compile(scaled, backend="strata")
    for n in (2, 7, -3, 0, 2.5, -0.5, float("inf")):
        found, expected = run(x, n), scaled(x, n)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1] == expected[1]


def test_tensors_of_several_lengths() -> None:
    parts: Any = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=torch.jagged)

    def doubled(x: Any) -> Any:
        return x.sin() * 2

    found: Any = torch.compile(doubled, backend="strata")(parts)
    assert found.offsets().equal(parts.offsets())
    torch.testing.assert_close(found.values(), parts.values().sin() * 2)


def test_an_empty_result_can_be_resized() -> None:
    def into(x: Any) -> Any:
        out = torch.empty(0)
        torch.add(x, 1, out=out)
        return out

    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(into, backend="strata")(x), x + 1)
