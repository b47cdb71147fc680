"""Linear algebra, bags of embeddings, samples of pictures: against eager, and against loops."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import strata as st
from strata.torch.aten.further import roi_align
from strata.torch.reports import REPORTS


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    st.torch.register()
    torch._dynamo.reset()
    REPORTS.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def same(f: Any, *args: Any) -> None:
    """Compiled without a fallback, and eager: the same."""
    with torch.no_grad():
        run: Any = torch.compile(f, backend="strata", options={"strict": True})
        torch.testing.assert_close(run(*args), f(*args), rtol=1e-4, atol=1e-4, equal_nan=True)


def test_solves_and_factorisations() -> None:
    linalg = torch.linalg

    def f(a: torch.Tensor, b: torch.Tensor) -> Any:
        s = a @ a.mT + 3 * torch.eye(4)
        values, vectors = linalg.eigh(s)
        u, singular, v = linalg.svd(b, full_matrices=False)
        return (
            linalg.solve(a, b), linalg.solve(a, b[..., 0]), linalg.solve(a, b.mT, left=False), linalg.inv(s),
            linalg.cholesky(s), linalg.cholesky(s, upper=True), linalg.qr(a), linalg.qr(b.mT),
            values, vectors * values.unsqueeze(-2) @ vectors.mT, linalg.eigvalsh(s), singular,
            u * singular.unsqueeze(-2) @ v, linalg.svdvals(a), linalg.det(a), linalg.slogdet(a), linalg.lu(a),
            linalg.pinv(b), linalg.solve_triangular(s, b, upper=False),
            linalg.solve_triangular(s, b.mT, upper=True, left=False), torch.cholesky_solve(b, s),
            torch.cholesky_solve(b, s, upper=True), torch.cholesky_inverse(s),
        )  # fmt: skip

    same(f, torch.randn(2, 4, 4), torch.randn(2, 4, 3))


@pytest.mark.parametrize(("f", "x"), [(torch.linalg.inv, torch.zeros(2, 2)), (torch.linalg.cholesky, -torch.eye(3))])
def test_a_matrix_that_will_not_do_is_torchs_error(f: Any, x: torch.Tensor) -> None:
    def g(x: torch.Tensor) -> Any:
        return f(x) + 1

    with torch.no_grad(), pytest.raises(torch.linalg.LinAlgError):
        torch.compile(g, backend="strata", options={"strict": True})(x)


def test_a_program_that_asks_how_it_went() -> None:
    def f(x: torch.Tensor) -> Any:
        _, info = torch.linalg.cholesky_ex(x)
        return info, torch.linalg.inv_ex(x).inverse

    x = -torch.eye(3)
    torch.testing.assert_close(torch.compile(f, backend="strata")(x), f(x))


def test_gradients_through_a_solve() -> None:
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (torch.linalg.solve(a, b).sin().sum() + torch.linalg.cholesky(a @ a.mT + torch.eye(3)).sum()).tanh()

    a, b = torch.randn(3, 3), torch.randn(3, 2)
    found = []
    for g in (torch.compile(f, backend="strata"), f):
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        g(*leaves).backward()
        found.append([t.grad for t in leaves])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_bags_of_embeddings() -> None:
    def f(w: torch.Tensor, ids: torch.Tensor, offsets: torch.Tensor, pairs: torch.Tensor, by: torch.Tensor) -> Any:
        return [
            *(functional.embedding_bag(ids, w, offsets, mode=mode) for mode in ("sum", "mean", "max")),
            *(functional.embedding_bag(ids, w, offsets, mode=mode, padding_idx=1) for mode in ("sum", "mean")),
            functional.embedding_bag(ids, w, offsets, mode="sum", include_last_offset=True),
            functional.embedding_bag(pairs, w, per_sample_weights=by, mode="sum"),
        ]

    ids, offsets = torch.tensor([1, 2, 0, 1, 3]), torch.tensor([0, 2, 2, 5])
    same(f, torch.randn(4, 3), ids, offsets, torch.tensor([[1, 2], [0, 3]]), torch.rand(2, 2))


def test_middles() -> None:
    def f(x: torch.Tensor) -> Any:
        holes = torch.where(x > 1, math.nan, x)
        return torch.kthvalue(x, 2), torch.median(x, 1), torch.median(holes, 0, keepdim=True)

    same(f, torch.randn(5, 7))


def test_grid_samples() -> None:
    def f(x: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
        return [
            functional.grid_sample(x, grid, mode, padding, aligned)
            for mode in ("bilinear", "nearest", "bicubic")
            for padding in ("zeros", "border", "reflection")
            for aligned in (False, True)
        ]

    same(f, torch.randn(2, 3, 5, 6), torch.rand(2, 4, 3, 2) * 2.6 - 1.3)


def sampled(picture: np.ndarray, y: float, x: float) -> np.ndarray:
    """Between the four pixels around a place; nothing beyond one pixel of the border."""
    height, width = picture.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return np.zeros(len(picture))
    y, x = max(y, 0), max(x, 0)
    top, left = min(int(y), height - 1), min(int(x), width - 1)
    low, right = min(top + 1, height - 1), min(left + 1, width - 1)
    down, along = (y - top if top < height - 1 else 0), (x - left if left < width - 1 else 0)
    upper = picture[:, top, left] * (1 - along) + picture[:, top, right] * along
    lower = picture[:, low, left] * (1 - along) + picture[:, low, right] * along
    return upper * (1 - down) + lower * down


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [2, 0])
def test_regions_of_pictures(aligned: bool, ratio: int) -> None:
    rng = np.random.default_rng(0)
    pictures = rng.standard_normal((2, 3, 9, 8)).astype(np.float32)
    rois = np.array([[0, 1, 2, 9, 12], [1, 0, 0, 4, 3], [1, 5, 3, 15.5, 17]], np.float32)
    scale, height, width = 0.5, 2, 3
    g = st.Graph("regions")
    made = roi_align(
        st.TensorType(st.f32, (3, 3, height, width)), g.input("x", pictures.shape), g.input("rois", rois.shape),
        scale, height, width, ratio, aligned,
    )  # fmt: skip
    (found,) = st.Session("cpu").compile(g.outputs(made)).run(x=pictures, rois=rois)
    expected = np.zeros_like(found)
    for n, (which, *corners) in enumerate(rois):
        x0, y0, x1, y1 = (c * scale - (0.5 if aligned else 0) for c in corners)
        h, w = (y1 - y0, x1 - x0) if aligned else (max(y1 - y0, 1), max(x1 - x0, 1))
        down, along = ratio or math.ceil(h / height), ratio or math.ceil(w / width)
        for i in range(height):
            for j in range(width):
                total = sum(
                    sampled(
                        pictures[int(which)], y0 + h / height * (i + (a + 0.5) / down),
                        x0 + w / width * (j + (b + 0.5) / along),
                    )
                    for a in range(down) for b in range(along)
                )  # fmt: skip
                expected[n, :, i, j] = total / (down * along)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
