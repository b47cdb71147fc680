"""Every op of the catalogue, a family a file, and the front-end functions that apply them to values.

`strata.ops.<name>` is the function of that name, whichever family it lives in; so is `value.<name>(...)`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from strata.mir import METHODS, near
from strata.ops.base.creation import full, iota, ones, zeros
from strata.ops.base.elementwise import accepts
from strata.ops.base.movement import Concat, Slice
from strata.ops.control.branching import Cond, cond
from strata.ops.control.custom import (
    Custom,
    CustomFn,
    Extension,
    Extensions,
    custom,
    custom_fn,
    extensions,
    require_no_traced_captures,
)
from strata.ops.control.custom_kernel import CustomKernel, kernel_text
from strata.ops.control.ensure import Ensure
from strata.ops.control.looping import While, scan, scan_backward, scan_carry, while_loop
from strata.ops.control.pruning import prune
from strata.ops.control.remat import Barrier, CheckpointOp, Fence, checkpoint
from strata.ops.control.scanning import ScanOp
from strata.ops.control.tracing import make_graph, numbered, outer_values, trace_body
from strata.ops.conv.conv import Conv
from strata.ops.conv.conv_filled import ConvFilled, ConvLastFilled
from strata.ops.conv.conv_last import (
    ConvFirst,
    ConvLast,
    ConvLastBackwardWeight,
    to_first,
    to_last,
    weight_to_first,
    weight_to_last,
)
from strata.ops.indexing.arrange import arange, eye, linspace, tri
from strata.ops.indexing.ensure_ids import EnsureIds
from strata.ops.indexing.indexing import CheckedIds, Indexed, id_error, may_be_empty
from strata.ops.linalg.matmul import MatMul
from strata.ops.nn.attention import Attention, AttentionBackward, AttentionLse
from strata.ops.nn.paged import PagedAttention, PagedUpdate
from strata.ops.nn.rope import RopeScaling, rope_frequencies, rope_tables
from strata.ops.quant import gguf_blocks, gguf_codebooks, gguf_fields, schemes
from strata.ops.signal.fft import fftfreq, hann_window, rfftfreq
from strata.ops.signal.signal import blackman_window, hamming_window, mel_weight_matrix

FAMILIES = (
    "base.creation",
    "base.elementwise",
    "base.movement",
    "control.branching",
    "control.custom",
    "control.custom_kernel",
    "control.ensure",
    "control.looping",
    "control.remat",
    "control.scanning",
    "conv.conv",
    "conv.conv_filled",
    "conv.conv_functions",
    "conv.conv_last",
    "conv.grid",
    "conv.pool",
    "conv.pool_functions",
    "conv.resize",
    "conv.windows",
    "elementwise.activation",
    "elementwise.complex",
    "elementwise.logic",
    "elementwise.math",
    "elementwise.numeric",
    "elementwise.rounding",
    "elementwise.special",
    "indexing.arrange",
    "indexing.ensure_ids",
    "indexing.indexing",
    "indexing.moving_window",
    "indexing.scattering",
    "indexing.sorting",
    "indexing.subscript",
    "indexing.trees",
    "linalg.einsum",
    "linalg.factorize",
    "linalg.linalg",
    "linalg.matmul",
    "linalg.solve",
    "nn.attention",
    "nn.attention_functions",
    "nn.fused",
    "nn.fused_blocks",
    "nn.losses",
    "nn.moe",
    "nn.norm",
    "nn.norm_gradients",
    "nn.paged",
    "nn.rnn",
    "nn.rope",
    "nn.sampling",
    "nn.sequence",
    "quant.dequant",
    "quant.fake_quantize",
    "quant.quantize",
    "random",
    "reduce.cumulative",
    "reduce.reduce",
    "reduce.softmax",
    "render.raster",
    "render.splat",
    "signal.fft",
    "signal.signal",
    "signal.spectral",
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
