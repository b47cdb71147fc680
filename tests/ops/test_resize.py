"""Resizing against onnx's reference and torch; gradients against torch."""

import numpy as np
import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch.nn import functional as F  # noqa: N812 - torch's own habit

from strata import ops
from strata.core import TensorType, f32, sym
from strata.errors import OptionError, ShapeError
from strata.mir import Value, constant, evaluate_values, placeholder, pullback

RNG = np.random.default_rng(11)


def run(*values: Value) -> list[np.ndarray]:
    return list(evaluate_values(values, {}, {}))


def close(actual: Value, expected: object, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(run(actual)[0], np.asarray(expected), rtol=tolerance, atol=tolerance)


def reference(x: np.ndarray, *, scales=None, sizes=None, roi=None, **attributes) -> np.ndarray:
    feeds = {"x": x}
    names = ["x", "", "", ""]
    for i, (name, data, dtype) in enumerate(
        [("roi", roi, np.float32), ("scales", scales, np.float32), ("sizes", sizes, np.int64)], 1
    ):
        if data is not None:
            names[i], feeds[name] = name, np.array(data, dtype)
    while not names[-1]:
        names.pop()
    node = onnx.helper.make_node("Resize", names, ["y"], **attributes)
    return ReferenceEvaluator(node).run(None, feeds)[0]


X = RNG.standard_normal((1, 2, 5, 6)).astype(np.float32)
TRANSFORMS = ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("rounding", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_onnx_nearest(transform: str, rounding: str) -> None:
    options = {"mode": "nearest", "coordinate_transformation_mode": transform, "nearest_mode": rounding}
    for sizes in ([1, 2, 8, 3], [1, 2, 1, 13]):
        close(ops.resize(constant(X), sizes=sizes, **options), reference(X, sizes=sizes, **options))


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize(
    "extra",
    [{}, {"exclude_outside": 1}, {"antialias": 1}, {"antialias": 1, "exclude_outside": 1}, {"cubic_coeff_a": -0.5}],
)
def test_onnx_smooth_modes(transform: str, mode: str, extra: dict) -> None:
    if mode == "linear" and "cubic_coeff_a" in extra:
        return
    options = {"mode": mode, "coordinate_transformation_mode": transform, **extra}
    ours = {k: bool(v) if k != "cubic_coeff_a" and isinstance(v, int) else v for k, v in options.items()}
    for scales in ([1, 1, 0.6, 2.3], [1, 1, 1.5, 0.4]):
        exact = np.float32(scales).astype(np.float64)
        close(ops.resize(constant(X), scales=exact, **ours), reference(X, scales=scales, **options), 2e-5)


def test_onnx_crop_and_resize() -> None:
    roi = [0, 0, 0.4, 0.6, 1, 1, 1.2, 1.7]
    for mode in ("nearest", "linear", "cubic"):
        options = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 10.0}
        sizes = [1, 2, 3, 3]
        exact = np.float32(roi).astype(np.float64)
        close(
            ops.resize(constant(X), sizes=sizes, roi=exact, **options),
            reference(X, sizes=sizes, roi=roi, **options),
            1e-5,
        )


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller", "stretch"])
def test_onnx_axes_and_aspect_ratio(policy: str) -> None:
    options = {"mode": "linear", "keep_aspect_ratio_policy": policy}
    ours = ops.resize(constant(X), sizes=[7, 13], axes=[2, 3], **options)
    close(ours, reference(X, sizes=[7, 13], axes=[2, 3], **options), 1e-5)


# ---------------------------------------------------------------------------------------------------------------- torch


def check_against_torch(rank: int, **options) -> None:
    x = RNG.standard_normal((2, 2, *(5, 6, 4)[:rank]))
    tx, vx = torch.tensor(x, requires_grad=True), constant(x)
    expected, out = F.interpolate(tx, **options), ops.interpolate(vx, **options)
    close(out, expected.detach())
    ct = RNG.standard_normal(tuple(expected.shape))
    expected.backward(torch.tensor(ct))
    close(pullback([out], [constant(ct)], [vx])[0], tx.grad)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "area"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_interpolate_any_rank(mode: str, rank: int) -> None:
    check_against_torch(rank, size=(3, 11, 4)[:rank], mode=mode)
    check_against_torch(rank, scale_factor=(2.0, 0.5, 1.7)[:rank], mode=mode)


@pytest.mark.parametrize(("mode", "rank"), [("linear", 1), ("bilinear", 2), ("trilinear", 3), ("bicubic", 2)])
@pytest.mark.parametrize("align", [False, True])
def test_interpolate_smooth(mode: str, rank: int, align: bool) -> None:
    check_against_torch(rank, size=(3, 11, 1)[:rank], mode=mode, align_corners=align)
    for recompute in (None, True):
        check_against_torch(
            rank, scale_factor=(2.3, 0.5, 1.7)[:rank], mode=mode, align_corners=align, recompute_scale_factor=recompute
        )


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_interpolate_antialias(mode: str) -> None:
    for size in ((2, 3), (8, 2), (3, 11), (1, 1), (5, 6)):
        for align in (False, True):
            check_against_torch(2, size=size, mode=mode, antialias=True, align_corners=align)


@pytest.mark.parametrize(
    ("mode", "rank"),
    [("nearest", 1), ("nearest", 2), ("nearest", 3), ("nearest-exact", 2), ("linear", 1), ("bilinear", 2),
     ("trilinear", 3), ("bicubic", 2)],
)  # fmt: skip
def test_a_scale_that_keeps_or_doubles_a_size(mode: str, rank: int) -> None:
    """Values only: torch's gradients are not those of its values here."""
    x = RNG.standard_normal((2, 2, *(5, 6, 4)[:rank]))
    for antialias in (False, True) if mode in ("bilinear", "bicubic") else (False,):
        for scale in ((1.1, 2.1, 1.2), (2.19, 1.15, 2.2)):
            options = {"scale_factor": scale[:rank], "mode": mode, "antialias": antialias}
            close(ops.interpolate(constant(x), **options), F.interpolate(torch.tensor(x), **options))


def test_resize_2x_with_batch_3_equals_torch_and_its_gradient_is_a_sum_pool_case_97() -> None:
    x = RNG.standard_normal((3, 2, 2, 3))
    vx = constant(x)
    out = ops.resize_nearest_2x(vx)
    close(out, F.interpolate(torch.tensor(x), scale_factor=2))
    ct = RNG.standard_normal((3, 2, 4, 6))
    close(pullback([out], [constant(ct)], [vx])[0], F.avg_pool2d(torch.tensor(ct), 2) * 4)


def test_symbolic_sizes_repeat() -> None:
    x = placeholder("x", TensorType(f32, (sym("N"), 3, sym("H"), sym("W"))))
    for out in (ops.interpolate(x, scale_factor=2), ops.resize(x, scales=[1, 1, 2, 2], mode="nearest")):
        assert out.shape[0] is x.shape[0]
        array = RNG.standard_normal((1, 3, 2, 4)).astype(np.float32)
        got = evaluate_values([out], {x: array}, {"N": 1, "H": 2, "W": 4})[0]
        np.testing.assert_array_equal(got, array.repeat(2, 2).repeat(2, 3))


# --------------------------------------------------------------------------------------------------------------- blocks


def test_blocks_equal_onnx_and_torch() -> None:
    x = RNG.standard_normal((2, 12, 4, 6)).astype(np.float32)
    for mode in ("DCR", "CRD"):
        node = onnx.helper.make_node("DepthToSpace", ["x"], ["y"], blocksize=2, mode=mode)
        close(ops.depth_to_space(constant(x), 2, mode), ReferenceEvaluator(node).run(None, {"x": x})[0])
        node = onnx.helper.make_node("SpaceToDepth", ["x"], ["y"], blocksize=2)
        back = ops.space_to_depth(ops.depth_to_space(constant(x), 2, mode), 2, mode)
        close(back, x)
    close(ops.space_to_depth(constant(x), 2), ReferenceEvaluator(node).run(None, {"x": x})[0])
    close(ops.pixel_shuffle(constant(x), 2), F.pixel_shuffle(torch.tensor(x), 2))
    close(ops.pixel_unshuffle(constant(x), 2), F.pixel_unshuffle(torch.tensor(x), 2))


@pytest.mark.parametrize(
    ("call", "error", "code"),
    [
        (lambda x: ops.resize(x, mode="linear"), OptionError, "O248"),
        (lambda x: ops.resize(x, sizes=[2]), OptionError, "O241"),
        (lambda x: ops.resize(x, sizes=[1, 1, 8, 8], mode="lanczos"), OptionError, "O247"),
        (lambda x: ops.resize(x, sizes=[1, 1, 0, 8]), ShapeError, "S312"),
        (lambda x: ops.interpolate(x, size=8, mode="trilinear"), OptionError, "O247"),
        (lambda x: ops.interpolate(x, size=8, scale_factor=2), OptionError, "O248"),
        (lambda x: ops.depth_to_space(x, 2), ShapeError, "S313"),
        (lambda x: ops.space_to_depth(x, 3), ShapeError, "S313"),
    ],
)
def test_mistakes(call, error: type[Exception], code: str) -> None:
    with pytest.raises(error) as caught:
        call(placeholder("x", f32[1, 1, 4, 4]))
    assert caught.value.code == code
