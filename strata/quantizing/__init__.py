"""Quantise models: perplexity, importance matrices, GGUF files and folders of quantised weights, reports."""

from strata.arguments import public_names
from strata.quantizing.calibrate import Activations, collect_activations
from strata.quantizing.onnx_static import quantize_onnx
from strata.quantizing.perplexity import Perplexity, perplexity
from strata.quantizing.quantize import FORMATS, quantize
from strata.quantizing.report import QuantReport

public_names(globals())
