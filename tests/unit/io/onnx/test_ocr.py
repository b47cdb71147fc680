"""The OCR pipeline (find text, turn it, read it) on a rendered image, with our models in place of onnxruntime's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="ONNX models need the package onnx")
rapidocr = pytest.importorskip(
    "rapidocr_onnxruntime", reason="the pipeline and its models come with rapidocr-onnxruntime"
)
drawing = pytest.importorskip("PIL.ImageDraw", reason="the image is drawn by Pillow")

from PIL import Image, ImageFont  # noqa: E402 - after the packages that it needs

from strata.io.onnx import OnnxModel, load  # noqa: E402

pytestmark = pytest.mark.slow

LINES = ("Layers that print", "Invoice 20417", "compile once")


class Session:
    """What the pipeline expects of a session, over one of our models."""

    def __init__(self, path: Path) -> None:
        self.model: OnnxModel = load(path)

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name=p.name) for p in self.model.inputs]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name=p.name) for p in self.model.outputs]

    def run(self, _: Any, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        return list(self.model.run(feeds))


def rendered() -> np.ndarray:
    image = Image.new("RGB", (480, 240), "white")
    font = ImageFont.load_default(size=36)
    pen = drawing.Draw(image)
    for i, line in enumerate(LINES):
        pen.text((30, 20 + 70 * i), line, fill="black", font=font)
    return np.asarray(image)


def test_reads_a_rendered_image() -> None:
    pipeline = rapidocr.RapidOCR()
    folder = Path(rapidocr.__file__).parent / "models"
    pipeline.text_det.infer.session = Session(folder / "ch_PP-OCRv4_det_infer.onnx")
    pipeline.text_cls.infer.session = Session(folder / "ch_ppocr_mobile_v2.0_cls_infer.onnx")
    pipeline.text_rec.session.session = Session(folder / "ch_PP-OCRv4_rec_infer.onnx")
    found, _ = pipeline(rendered())
    assert [text.replace(" ", "") for _, text, _ in found] == [line.replace(" ", "") for line in LINES]
