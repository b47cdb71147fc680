"""ONNX: models in (`load`), the standard runtime interface (`backend`), graphs out (`export`)."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from strata.errors import FileError

if find_spec("onnx") is None:
    raise FileError("ONNX files need the package onnx, which is not installed", fix="pip install 'strata[onnx]'")

from strata.io.onnx.model import OnnxModel, load_onnx

load = load_onnx
_LATER = {  # what needs the package itself
    "backend": ("strata.io.onnx.backend", "StrataBackend"),
    "StrataBackend": ("strata.io.onnx.backend", "StrataBackend"),
    "ReferenceBackend": ("strata.io.onnx.backend", "ReferenceBackend"),
    "PreparedModel": ("strata.io.onnx.backend", "PreparedModel"),
    "export": ("strata.io.onnx.export", "export"),
    "known_ops": ("strata.io.onnx.reading", "known_ops"),
    "reads": ("strata.io.onnx.reading", "reads"),
    "NodeView": ("strata.io.onnx.node", "NodeView"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"strata.io.onnx has no name {name!r}")
    module, attribute = _LATER[name]
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
