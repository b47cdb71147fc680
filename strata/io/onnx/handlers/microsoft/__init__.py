"""com.microsoft: operators that exporters and optimisers of ONNX Runtime emit."""

from strata.io.onnx.handlers.microsoft import attention, experts, fused, others, quantised

__all__ = ["attention", "experts", "fused", "others", "quantised"]
