"""Reading text in images: each step against what it should find, then real models on the image of the demo."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import strata.cli
from strata.errors import DTypeError, FileError, ShapeError
from strata.io import load_image
from strata.models import TextReader, ocr

RECEIPT = Path(strata.cli.__file__).with_name("demo") / "receipt.png"
LINES = [
    "STRATA COFFEE HOUSE", "Receipt 20417", "15 Nov 2026", "2 x flat white", "7.60", "1 x almond croissant", "4.25",
    "Total", "11.85", "compiled, not interpreted!",
]  # fmt: skip


def turned(corners: np.ndarray, degrees: float) -> np.ndarray:
    a = np.radians(degrees)
    return corners @ np.array([[np.cos(a), np.sin(a)], [-np.sin(a), np.cos(a)]]) + 100


@pytest.mark.parametrize("degrees", [0, 9, 30, -20, 44, -44])
def test_the_smallest_rectangle_is_the_one_that_was_drawn(degrees: float, rng: np.random.Generator) -> None:
    box = turned(np.array([[0.0, 0], [80, 0], [80, 12], [0, 12]]), degrees)
    inside = rng.random((400, 2))
    points = box[0] + inside[:, :1] * (box[1] - box[0]) + inside[:, 1:] * (box[3] - box[0])
    found = ocr.smallest_rectangle(np.concatenate([points, box]))
    np.testing.assert_allclose(found, box, atol=1e-6)


def test_points_on_a_line_or_one_point_have_a_rectangle() -> None:
    line = np.array([[0.0, 0], [1, 1], [5, 5]])
    assert ocr._sides(ocr.smallest_rectangle(line)) == pytest.approx((50**0.5, 0), abs=1e-9)
    assert ocr._sides(ocr.smallest_rectangle(np.array([[3.0, 4]]))) == (0, 0)


def test_text_that_stands_begins_at_its_foot() -> None:
    tall = ocr.smallest_rectangle(np.array([[0.0, 0], [10, 0], [10, 90], [0, 90]]))
    np.testing.assert_allclose(tall, [[10, 0], [10, 90], [0, 90], [0, 0]])


def test_boxes_grow_around_patches_and_specks_are_left_out() -> None:
    sure = np.zeros((64, 96), np.float32)
    sure[20:30, 10:70] = 0.9
    sure[50, 50] = 0.9
    sure[40:46, 10:60] = 0.35  # perhaps text: not sure enough on average
    (box,) = ocr.boxes_of(sure)
    width, height = ocr._sides(box)
    margin = ocr.GROW * 61 * 11 / (2 * (61 + 11))  # a dilation adds a pixel to each side of 59 x 9
    assert (width, height) == pytest.approx((61 + 2 * margin, 11 + 2 * margin))
    assert ocr.boxes_of(np.zeros((32, 32), np.float32)) == []


def test_a_straight_cut_is_the_image_itself(rng: np.random.Generator) -> None:
    image = rng.integers(0, 256, (ocr.HEIGHT, 100, 3)).astype(np.uint8)
    box = np.array([[0.0, 0], [100, 0], [100, ocr.HEIGHT], [0, ocr.HEIGHT]])
    np.testing.assert_allclose(ocr.cut(image, box), image, atol=1e-3)
    np.testing.assert_array_equal(ocr.resize(image, ocr.HEIGHT, 100), image)
    flat = np.full((10, 20, 3), 7, np.uint8)
    np.testing.assert_array_equal(ocr.resize(flat, 32, 64), np.full((32, 64, 3), 7))


def test_repeats_and_blanks_are_no_characters() -> None:
    names = ("", "a", "b", " ")
    columns = np.eye(4)[[0, 1, 1, 0, 1, 2, 2, 0, 3, 0]] * 0.5
    assert ocr.decode(columns, names) == ("aab ", 0.5)
    assert ocr.decode(np.eye(4)[[0, 0]], names) == ("", 0.0)
    assert ocr.decode(np.zeros((0, 4)).reshape(0, 4), names) == ("", 0.0)
    assert ocr.decode(np.eye(6)[[5, 1]], names) == ("a", 1.0)  # a character that the list lacks


def models() -> Path | None:
    spec = find_spec("rapidocr_onnxruntime")
    places = (Path(folder) / "models" for folder in (spec.submodule_search_locations or ())) if spec else ()
    return next((place for place in places if place.exists()), None)


@pytest.mark.slow
@pytest.mark.skipif(models() is None, reason="the models come with rapidocr-onnxruntime")
def test_reads_the_image_of_the_demo() -> None:
    folder = models()
    assert folder is not None
    reader = TextReader(folder / "ch_PP-OCRv4_det_infer.onnx", folder / "ch_PP-OCRv4_rec_infer.onnx")
    image = load_image(RECEIPT)
    found = reader.read(image)
    assert [line.text for line in found] == LINES
    assert all(line.score > 0.9 for line in found)
    assert [line.text for line in reader.read(image[:, :, 0])] == LINES  # grey
    half = reader.read(image[130:230])
    assert [line.text for line in half] == LINES[3:7]
    assert reader.read(np.full((40, 50), 255, np.uint8)) == []
    np.testing.assert_allclose(half[0].corners + np.array([0, 130]), found[3].corners, atol=4)
    with pytest.raises(DTypeError, match="an image is u8, not float32"):
        reader.read(image.astype(np.float32))
    with pytest.raises(ShapeError, match=r"not \(3, 4, 4\)"):
        reader.read(np.zeros((3, 4, 4), np.uint8))
    with pytest.raises(FileError, match="has no list of characters"):
        TextReader(folder / "ch_PP-OCRv4_det_infer.onnx", folder / "ch_PP-OCRv4_det_infer.onnx")
