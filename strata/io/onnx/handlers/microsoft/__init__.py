"""com.microsoft: operators that exporters and optimisers of ONNX Runtime emit."""

from strata.io.onnx.handlers.microsoft import (
    arrays,
    attention,
    experts,
    fused,
    others,
    quantised,
    rotary,
    streams,
)

__all__ = ["arrays", "attention", "experts", "fused", "others", "quantised", "rotary", "streams"]
