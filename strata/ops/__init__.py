"""Every op of the catalogue, a family a file, and the front-end functions that apply them to values.

`strata.ops.<name>` is the function of that name, whichever family it lives in; so is `value.<name>(...)`. A family is
loaded when one of its ops is first read by name; all of them, when a function is asked for.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from strata.mir import METHODS, near
from strata.modules import deferred


def _function(name: str) -> Callable[..., Any]:
    if name in METHODS:
        return METHODS[name]
    raise AttributeError(f"strata.ops has no function {name!r}{near(name, METHODS)}")


if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Any]: ...


_names = deferred(globals(), beyond=_function)
with _names:
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
    from strata.ops.conv.conv_functions import conv
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


def __dir__() -> list[str]:
    return sorted({*globals(), *_names.homes, *METHODS})
