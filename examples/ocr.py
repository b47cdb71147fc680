"""Read the text in a photo: one model finds the lines, another reads them. Both are ONNX files from a package.

    pip install onnx && pip install --no-deps rapidocr-onnxruntime==1.4.4
    python examples/ocr.py [FOLDER [IMAGE]]

FOLDER/ocr.png is the image with a frame around each line.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np

from strata.io import load_image
from strata.models import Line, TextReader
from strata.viewer import picture

MODELS = ("ch_PP-OCRv4_det_infer.onnx", "ch_PP-OCRv4_rec_infer.onnx")


def reader() -> TextReader:
    """The two models, compiled for this machine; any image size, any length of line."""
    spec = importlib.util.find_spec("rapidocr_onnxruntime")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("the models are not installed: pip install --no-deps rapidocr-onnxruntime==1.4.4")
    folder = Path(spec.submodule_search_locations[0]) / "models"
    return TextReader(*(folder / name for name in MODELS))


def framed(image: np.ndarray, lines: list[Line]) -> np.ndarray:
    """The image with a red frame around each line."""
    made = image.copy()
    for line in lines:
        corners = np.concatenate([line.corners, line.corners[:1]])
        for start, end in pairwise(corners):
            along = np.linspace(start, end, int(np.abs(end - start).max()) + 2)
            x = np.clip(np.rint(along[:, 0]).astype(int), 0, image.shape[1] - 2)
            y = np.clip(np.rint(along[:, 1]).astype(int), 0, image.shape[0] - 2)
            for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
                made[y + dy, x + dx] = (214, 60, 50)
    return made


def main(out: Path = Path(), image: Path | None = None) -> None:
    with importlib.resources.as_file(importlib.resources.files("strata.cli.demo") / "receipt.png") as receipt:
        pixels = load_image(image or receipt)
    lines = reader().read(pixels)
    made = picture(framed(pixels, lines))
    print(made, "\n")
    for line in lines:
        print(f"{line.score:4.0%}  {line.text}")
    made.save(out / "ocr.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
