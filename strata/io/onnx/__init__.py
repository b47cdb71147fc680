"""ONNX: models in (`load`), the standard backend interface (`backend`), graphs out (`export`)."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from strata.arguments import public
from strata.errors import FileError

if find_spec("onnx") is None:
    raise FileError("ONNX files need the package onnx, which is not installed", fix="pip install 'strata[onnx]'")

from strata.io.onnx import dtypes
from strata.io.onnx.model import OnnxModel, load_onnx
from strata.io.onnx.plans import Port

if TYPE_CHECKING:
    from strata.io.onnx.node import NodeView
    from strata.io.onnx.reading import known_ops, reads
    from strata.io.onnx.standard import OnnxReferenceBackend, PreparedModel, StrataBackend
    from strata.io.onnx.writing import export

load = public(load_onnx, name="load")
load_onnx = public(load_onnx)
public(OnnxModel)
public(Port)
# what needs the package itself; no module has one of these names, which would take its place
_LATER = {
    "backend": ("strata.io.onnx.standard", "StrataBackend"),
    "StrataBackend": ("strata.io.onnx.standard", "StrataBackend"),
    "ReferenceBackend": ("strata.io.onnx.standard", "OnnxReferenceBackend"),
    "PreparedModel": ("strata.io.onnx.standard", "PreparedModel"),
    "export": ("strata.io.onnx.writing", "export"),
    "known_ops": ("strata.io.onnx.reading", "known_ops"),
    "reads": ("strata.io.onnx.reading", "reads"),
    "NodeView": ("strata.io.onnx.node", "NodeView"),
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"strata.io.onnx has no name {name!r}")
    module, attribute = _LATER[name]
    value = globals()[name] = public(getattr(import_module(module), attribute))
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
