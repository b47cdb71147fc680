"""ONNX: models in (`load`), the standard runtime interface (`backend`), graphs out (`export`)."""

from importlib.util import find_spec

from strata.errors import FileError

if find_spec("onnx") is None:
    raise FileError("ONNX files need the package onnx, which is not installed", fix="pip install 'strata[onnx]'")

from strata.io.onnx.backend import PreparedModel, ReferenceBackend, StrataBackend
from strata.io.onnx.export import export
from strata.io.onnx.model import OnnxModel, load_onnx
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import known_ops, reads

backend = StrataBackend
load = load_onnx
