"""grid_sample, affine_grid and roi_align against torch and onnx's reference, with gradients."""

import itertools

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from strata import ops
from strata.core import f32
from strata.errors import OptionError, ShapeError
from strata.mir import Value, constant, evaluate_values, placeholder, pullback

RNG = np.random.default_rng(5)


def close(actual: Value, expected: object, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(
        evaluate_values([actual], {}, {})[0], np.asarray(expected), rtol=tolerance, atol=tolerance
    )


CASES = list(itertools.product(["bilinear", "nearest", "bicubic"], ["zeros", "border", "reflection"], [False, True]))


@pytest.mark.parametrize(("mode", "padding", "align"), CASES)
@pytest.mark.parametrize("rank", [2, 3])
def test_grid_sample_equals_torch_with_gradients(rank: int, mode: str, padding: str, align: bool) -> None:
    if rank == 3 and mode == "bicubic":
        return  # torch has none
    x = RNG.standard_normal((2, 3, *(5, 4, 3)[:rank]))
    grid = RNG.uniform(-1.9, 1.9, (2, *(3, 4, 2)[:rank], rank))
    tx, tg = torch.tensor(x, requires_grad=True), torch.tensor(grid, requires_grad=True)
    expected = F.grid_sample(tx, tg, mode, padding, align)
    vx, vg = constant(x), constant(grid)
    out = ops.grid_sample(vx, vg, mode, padding, align)
    close(out, expected.detach())
    ct = RNG.standard_normal(tuple(expected.shape))
    expected.backward(torch.tensor(ct))
    gx, gg = pullback([out], [constant(ct)], [vx, vg])
    close(gx, tx.grad)
    if mode != "nearest":
        close(gg, tg.grad)


def test_grid_sample_of_one_aligned_element() -> None:
    x, grid = RNG.standard_normal((1, 1, 1, 3)), RNG.uniform(-1, 1, (1, 2, 2, 2))
    for padding in ("border", "reflection"):
        expected = F.grid_sample(torch.tensor(x), torch.tensor(grid), "bilinear", padding, align_corners=True)
        close(ops.grid_sample(constant(x), constant(grid), "linear", padding, True), expected)


@pytest.mark.filterwarnings("ignore:Since version 1.3.0")  # torch, about axes of one element
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 4, 5, 2), (2, 1, 1, 3)])
def test_affine_grid_equals_torch(size: tuple, align: bool) -> None:
    theta = RNG.standard_normal((2, len(size) - 2, len(size) - 1))
    close(ops.affine_grid(constant(theta), size, align), F.affine_grid(torch.tensor(theta), size, align))


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("transform", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize("ratio", [0, 1, 3])
def test_roi_align_equals_onnx(mode: str, transform: str, ratio: int) -> None:
    x = RNG.uniform(0, 1, (2, 3, 8, 9)).astype(np.float32)
    rois = np.float32([[0, 0, 7, 7], [1.3, 2.2, 6.4, 5.1], [4, 4, 4.2, 4.1], [-1, 3, 12, 9]])
    images = np.int64([0, 1, 1, 0])
    options = {
        "output_height": 3, "output_width": 2, "sampling_ratio": ratio, "spatial_scale": 0.7, "mode": mode,
        "coordinate_transformation_mode": transform,
    }  # fmt: skip
    node = onnx.helper.make_node("RoiAlign", ["x", "r", "b"], ["y"], **options)
    expected = ReferenceEvaluator(node).run(None, {"x": x, "r": rois, "b": images})[0]
    close(ops.roi_align(constant(x), constant(rois), constant(images), **options), expected, 1e-5)


def test_max_roi_pool_equals_a_loop() -> None:
    x = RNG.standard_normal((2, 3, 7, 8))
    rois = np.array([[0, 1, 1, 9, 12], [1, 0, 0, 15, 13], [1, 6, 8, 6, 8], [0, 20, 20, 22, 22]], np.float64)
    expected = np.zeros((4, 3, 3, 2))
    for r, (image, *box) in enumerate(rois):
        x1, y1, x2, y2 = (int(np.floor(v * 0.5 + 0.5)) for v in box)
        high, wide = max(y2 - y1 + 1, 1) / 3, max(x2 - x1 + 1, 1) / 2
        for i, j in np.ndindex(3, 2):
            rows = slice(max(int(np.floor(i * high)) + y1, 0), max(int(np.ceil((i + 1) * high)) + y1, 0))
            columns = slice(max(int(np.floor(j * wide)) + x1, 0), max(int(np.ceil((j + 1) * wide)) + x1, 0))
            cells = x[int(image), :, rows, columns]
            expected[r, :, i, j] = cells.max((1, 2)) if cells.size else 0
    close(ops.max_roi_pool(constant(x), constant(rois), (3, 2), 0.5), expected)


def test_mistakes() -> None:
    x = placeholder("x", f32[1, 1, 4, 4])
    with pytest.raises(ShapeError, match="grid_sample"):
        ops.grid_sample(x, placeholder("g", f32[1, 2, 2, 3]))
    with pytest.raises(OptionError, match="wrap"):
        ops.grid_sample(x, placeholder("g", f32[1, 2, 2, 2]), padding_mode="wrap")
    with pytest.raises(ShapeError, match="affine_grid"):
        ops.affine_grid(placeholder("t", f32[1, 3, 4]), (1, 1, 2, 2))
    with pytest.raises(ShapeError, match="roi_align"):
        ops.roi_align(x, placeholder("r", f32[1, 5]), constant(np.int64([0])))
