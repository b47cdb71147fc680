"""Exported programs as models, graphs as modules, tensors both ways."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import strata as st
from strata.cli import main
from strata.errors import FileError


def small() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).eval()


def test_a_module_of_any_batch() -> None:
    model, x = small(), torch.randn(4, 8)
    loaded = st.torch.load(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},))
    for n in (1, 4, 9):
        given = torch.randn(n, 8)
        np.testing.assert_allclose(loaded(given.numpy()), model(given).detach().numpy(), rtol=1e-5, atol=1e-6)
    assert sorted(loaded.params) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def test_commands_take_exported_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, bundle = str(tmp_path / "model.pt2"), str(tmp_path / "model.strata")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(small(), (torch.randn(4, 8),)), file)
    assert main(["compile", file, "-o", bundle]) == 0
    for path in (file, bundle):
        capsys.readouterr()
        assert main(["explain", path]) == 0
        assert "matmul + add + relu" in capsys.readouterr().out
        assert main(["view", path, "-o", str(tmp_path / "page.html")]) == 0
    Path(file).write_bytes(Path(file).read_bytes()[:1000])
    with pytest.raises(FileError, match="is not an exported program"):
        st.torch.load(file)


def test_a_file_runs_without_torch(tmp_path: Path) -> None:
    model, x = small(), torch.randn(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    st.torch.load(tmp_path / "model.pt2").save(tmp_path / "model.strata")
    np.save(tmp_path / "x.npy", x.numpy())
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, strata as st\n"
        "np.save('y.npy', st.load_compiled('model.strata').run(input=np.load('x.npy'))[0])\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), model(x).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_buffers_are_kept_from_run_to_run() -> None:
    class Counting(torch.nn.Module):
        seen: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return x + self.seen

    loaded = st.torch.load(Counting(), torch.zeros(2))
    assert list(loaded.inputs) == ["x"]
    assert [loaded(np.zeros(2, np.float32))[0] for _ in range(3)] == [1, 2, 3]


def test_results_of_a_dictionary_have_its_names() -> None:
    class Named(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"sine": x.sin(), "twice": x * 2}

    assert set(st.torch.load(Named(), torch.ones(2)).run(x=np.ones(2, np.float32))) == {"sine", "twice"}


def test_layouts_views_and_inputs_among_results() -> None:
    class Mixed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = (x * 2).permute(1, 0)
            return y, y[:1], x, x.contiguous().sum(0)

    x = torch.randn(3, 4)
    found = st.torch.load(Mixed(), x)(x.numpy())
    for ours, theirs in zip(found, Mixed()(x), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)


def test_a_graph_is_a_module_with_gradients() -> None:
    model, x = small(), torch.randn(4, 8, requires_grad=True)
    wrapped = st.torch.wrap(st.torch.load(model, (x.detach(),)).graph)
    wrapped(x).square().sum().backward()
    ours, x.grad = x.grad, None
    model(x).square().sum().backward()
    torch.testing.assert_close(ours, x.grad)
    torch.testing.assert_close(wrapped.get_parameter("0_weight").grad, model[0].weight.grad)


def test_derivatives_of_derivatives_of_a_graph() -> None:
    g = st.Graph("product")
    x, w = g.input("x", (st.sym("n"), 4)), g.param("w", (4, 3))
    compiled = st.Session("cpu").compile(g.outputs((x @ w).tanh(), x.sum()))
    compiled.set_param("w", np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32))
    wrapped = st.torch.wrap(compiled)
    given = torch.randn(5, 4, requires_grad=True)

    def penalty(f: Any, w: torch.Tensor) -> list[torch.Tensor]:
        made, total = f(given)
        (slope,) = torch.autograd.grad(made.square().sum() + total.sin(), given, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), (given, w), create_graph=True))

    weight = wrapped.get_parameter("w")
    ours = penalty(wrapped, weight)
    theirs = penalty(lambda x: ((x @ weight).tanh(), x.sum()), weight)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert all(t.requires_grad for t in ours)


def test_a_graph_as_a_module_is_copied() -> None:
    model, x = small(), torch.randn(4, 8)
    wrapped = st.torch.wrap(st.torch.load(model, (x,)).graph)
    other = copy.deepcopy(wrapped)
    with torch.no_grad():
        other.get_parameter("0_weight").zero_()
        torch.testing.assert_close(wrapped(x), model(x))
        assert not torch.allclose(other(x), model(x))
        other.load_state_dict(wrapped.state_dict())
        torch.testing.assert_close(other(x), model(x))


def test_sizes_among_the_results() -> None:
    class Counted(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            return x @ y, x.shape[0] * 2 + 1, y.shape[1]

    rows, columns = torch.export.Dim("rows", min=1, max=64), torch.export.Dim("columns", min=1, max=64)
    model = st.torch.load(Counted(), (torch.randn(3, 4), torch.randn(4, 5)), dynamic_shapes=({0: rows}, {1: columns}))
    for n, m in ((3, 5), (7, 2), (1, 1)):
        _, doubled, wide = model(np.ones((n, 4), np.float32), np.ones((4, m), np.float32))
        assert (doubled, wide) == (2 * n + 1, m)


def test_tensors_share_their_memory() -> None:
    theirs = torch.ones(3)
    ours = st.from_torch(theirs)
    theirs[0] = 5
    assert ours.numpy()[0] == 5
    made = st.zeros((3,)).realize()
    back = st.to_torch(made)
    back[1] = 7
    assert made.numpy()[1] == 7
    assert st.to_torch(st.ones((2,), dtype="bf16")).dtype is torch.bfloat16
    halves = torch.ones(4, dtype=torch.bfloat16)
    assert st.to_torch(st.from_torch(halves)).data_ptr() == halves.data_ptr()


def test_memory_that_is_only_read_is_copied() -> None:
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    for given in (array, st.asarray(array)):
        st.to_torch(given)[0] = 5
    assert (array == 1).all()


@pytest.mark.parametrize("t", [torch.eye(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"])
def test_tensors_without_plain_memory_are_refused(t: torch.Tensor) -> None:
    with pytest.raises(st.errors.DTypeError, match="dense tensor"):
        st.from_torch(t)


def test_random_numbers_of_a_program_are_refused() -> None:
    with pytest.raises(st.errors.LowerError, match="torch's generator"):
        st.torch.load(torch.nn.Dropout(0.5).train(), (torch.ones(3),))


def test_numbers_by_size_and_angle() -> None:
    class Polar(torch.nn.Module):
        def forward(self, size: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
            return torch.polar(size, angle)

    size, angle = torch.rand(4), torch.randn(4)
    found = st.torch.load(Polar(), (size, angle))(size.numpy(), angle.numpy())
    np.testing.assert_allclose(found, torch.polar(size, angle).numpy(), rtol=1e-6)


def test_casts_of_an_exported_program() -> None:
    """`torch.export` states what it knew of a tensor in front of each cast."""

    class Casts(torch.nn.Module):
        def forward(self, x: Any, i: Any) -> Any:
            return x.to(torch.float64), i.float() + 1, x.half(), x.to(i.device)

    x, i = torch.randn(3), torch.arange(3)
    for found, expected in zip(st.torch.load(Casts(), (x, i))(x, i), Casts()(x, i), strict=True):
        torch.testing.assert_close(torch.as_tensor(found), expected)


def test_a_model_keeps_its_weights() -> None:
    """The module goes on without it, all of it."""
    model, x = small(), torch.randn(4, 8)
    loaded, expected = st.torch.load(model, (x,)), model(x).detach().numpy()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    np.testing.assert_allclose(loaded(x.numpy()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_inputs_that_change_are_written(kind: str) -> None:
    class Changes(torch.nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            x[1:].add_(1)
            return {"a": x * 2 + y}

    x, y = torch.randn(3, 2), torch.randn(3, 2)
    loaded = st.torch.load(torch.export.export(Changes(), (x.clone(), y)))
    given = x.clone() if kind == "tensor" else x.numpy().copy()
    found = loaded.run(x=given, y=y)
    expected = Changes()(x, y)
    assert list(found) == ["a"]
    np.testing.assert_allclose(np.asarray(found["a"]), expected["a"].numpy(), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(given), x.numpy())


def test_parameters_whose_names_differ_by_a_dot() -> None:
    """`a.b` and `a_b` are two parameters of a wrapped graph, and one called as a method is no method."""
    g = st.Graph("names")
    x = g.input("x", (2,), st.f32)
    params = {name: g.param(name, (2,), st.f32) for name in ("a.b", "a_b", "forward")}
    g.outputs(x * params["a.b"] + params["a_b"] * params["forward"])
    compiled = st.Session("cpu").compile(g)
    compiled.set_params({"a.b": np.float32([1, 2]), "a_b": np.float32([3, 4]), "forward": np.float32([5, 6])})
    torch.testing.assert_close(st.torch.wrap(compiled)(torch.ones(2)), torch.tensor([16.0, 26.0]))
