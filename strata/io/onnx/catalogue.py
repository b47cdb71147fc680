"""Every op as `ops.<name>`, for the handlers of ONNX operators."""

from typing import Any

from strata import ops as _ops

ops: Any = _ops
