"""ONNX: models in (`load`), the standard runtime interface (`backend`), graphs out (`export`)."""

from strata.io.onnx.model import OnnxModel, load_onnx
from strata.io.onnx.node import NodeView
from strata.io.onnx.registry import known_ops, reads
from strata.io.onnx.backend import PreparedModel, ReferenceBackend, StrataBackend

backend = StrataBackend
load = load_onnx
