"""Every op of the catalogue, a family a file, and the front-end functions that apply them to values.

`strata.ops.<name>` is the function of that name, whichever family it lives in; so is `value.<name>(...)`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from strata.mir import METHODS, near
from strata.ops import gguf_blocks, schemes
from strata.ops.arrange import arange, eye, linspace, tri
from strata.ops.branching import Cond, cond
from strata.ops.conv import Conv
from strata.ops.conv_filled import ConvFilled, ConvLastFilled
from strata.ops.conv_last import (
    ConvFirst,
    ConvLast,
    ConvLastBackwardWeight,
    to_first,
    to_last,
    weight_to_first,
    weight_to_last,
)
from strata.ops.creation import full, iota, ones, zeros
from strata.ops.custom import (
    Custom,
    CustomFn,
    Extension,
    Extensions,
    custom,
    custom_fn,
    extensions,
    require_no_traced_captures,
)
from strata.ops.custom_kernel import CustomKernel, kernel_text
from strata.ops.elementwise import accepts
from strata.ops.fft import fftfreq, hann_window, rfftfreq
from strata.ops.indexing import CheckedIds, Indexed, id_error, may_be_empty
from strata.ops.looping import While, scan, scan_backward, scan_carry, while_loop
from strata.ops.matmul import MatMul
from strata.ops.movement import Slice
from strata.ops.paged import PagedAttention
from strata.ops.pruning import prune
from strata.ops.remat import Barrier, Checkpoint, Fence, checkpoint
from strata.ops.rope import RopeScaling, rope_frequencies, rope_tables
from strata.ops.scanning import Scan
from strata.ops.signal import blackman_window, hamming_window, mel_weight_matrix
from strata.ops.tracing import make_graph, numbered, outer_values, trace_body

FAMILIES = (
    "activation",
    "arrange",
    "attention",
    "attention_functions",
    "branching",
    "complex",
    "conv",
    "conv_filled",
    "conv_functions",
    "conv_last",
    "creation",
    "cumulative",
    "custom",
    "custom_kernel",
    "dequant",
    "einsum",
    "elementwise",
    "factorize",
    "fake_quantize",
    "fft",
    "fused",
    "fused_blocks",
    "grid",
    "indexing",
    "linalg",
    "logic",
    "looping",
    "losses",
    "math",
    "matmul",
    "moe",
    "movement",
    "moving_window",
    "norm",
    "norm_gradients",
    "numeric",
    "paged",
    "pool",
    "pool_functions",
    "quantize",
    "random",
    "reduce",
    "remat",
    "resize",
    "rnn",
    "rope",
    "rounding",
    "sampling",
    "scanning",
    "scattering",
    "sequence",
    "signal",
    "softmax",
    "solve",
    "sorting",
    "special",
    "spectral",
    "subscript",
    "windows",
)

for _family in FAMILIES:  # each registers its ops and functions
    import_module(f"strata.ops.{_family}")

for _name in [name for name in globals() if name in METHODS]:  # a function hides the module of its own name
    globals()[_name] = METHODS[_name]


def __getattr__(name: str) -> Callable[..., Any]:
    if name in METHODS:
        return METHODS[name]
    raise AttributeError(f"strata.ops has no function {name!r}{near(name, METHODS)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *METHODS})
