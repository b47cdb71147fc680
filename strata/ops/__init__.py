"""Every op of the catalogue, a family a file, and the front-end functions that apply them to values.

`strata.ops.<name>` is the function of that name, whichever family it lives in; so is `value.<name>(...)`. A family is
loaded when one of its ops is first read by name; all of them, when a function is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import local
from typing import TYPE_CHECKING, Any

from strata.mir import METHODS, REGISTRY, near
from strata.modules import deferred, imported

FAMILIES: dict[str, tuple[str, ...]] = {  # and their ops
    "base.creation": ("dim_size", "iota"),
    "base.elementwise": ("add", "divide", "maximum", "minimum", "multiply", "power", "subtract"),
    "base.movement": ("broadcast_to", "concat", "flip", "pad", "reshape", "slice", "transpose"),
    "control.branching": ("cond",),
    "control.custom": ("custom", "custom_fn"),
    "control.custom_kernel": ("custom_kernel",),
    "control.ensure": ("ensure",),
    "control.looping": ("while",),
    "control.remat": ("barrier", "checkpoint", "fence"),
    "control.scanning": ("scan",),
    "conv.conv": ("conv", "conv_backward_input", "conv_backward_weight"),
    "conv.conv_filled": ("conv_filled", "conv_last_filled"),
    "conv.conv_functions": (),
    "conv.conv_last": ("conv_first", "conv_last", "conv_last_backward_weight"),
    "conv.grid": (),
    "conv.pool": ("pool_backward", "pool_index", "pool_max", "pool_min", "pool_prod", "pool_select", "pool_sum"),
    "conv.pool_functions": (),
    "conv.resize": ("resize_axis", "resize_nearest_2x"),
    "conv.windows": ("col2im", "fold_windows", "im2col", "windows"),
    "elementwise.activation": ("activation_backward", "relu_backward", "softplus"),
    "elementwise.complex": (
        "atan2", "complex", "complex_norm_sq", "complex_norm_sq_backward", "conj", "imag", "real",
    ),
    "elementwise.logic": (
        "bitcast", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift",
        "bitwise_xor", "cast", "equal", "greater", "greater_equal", "isinf", "isnan", "less", "less_equal",
        "not_equal", "stop_gradient", "where",
    ),
    "elementwise.math": (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "exp", "exp2", "expm1", "gelu",
        "gelu_tanh", "log", "log1p", "log2", "relu", "rsqrt", "sigmoid", "silu", "sin", "sinh", "sqrt", "tan",
        "tanh",
    ),
    "elementwise.numeric": (
        "bitwise_count", "copysign", "floor_divide", "fmod", "gcd", "hypot", "logaddexp", "remainder", "signbit",
    ),
    "elementwise.rounding": ("abs", "ceil", "floor", "negative", "round", "sign", "trunc"),
    "elementwise.special": ("erfc", "lgamma", "polygamma"),
    "indexing.arrange": (),
    "indexing.ensure_ids": ("ensure_ids",),
    "indexing.indexing": ("checked_ids", "gather", "gather_elements", "gather_nd"),
    "indexing.moving_window": ("dynamic_slice", "dynamic_update_slice"),
    "indexing.scattering": ("scatter_add", "scatter_elements", "scatter_nd"),
    "indexing.sorting": ("argmax", "argmin", "argsort", "searchsorted", "sort", "topk"),
    "indexing.subscript": (),
    "indexing.trees": ("tree_leaves",),
    "linalg.einsum": (),
    "linalg.factorize": ("cholesky", "eigh", "lu", "qr", "svd"),
    "linalg.linalg": ("adjugate", "det", "pinv", "slogdet"),
    "linalg.matmul": ("dot_general", "matmul"),
    "linalg.solve": ("solve", "triangular_solve"),
    "nn.attention": ("attention", "attention_backward", "attention_lse"),
    "nn.attention_functions": (),
    "nn.fused": (
        "elementwise_region", "fused_matmul_bias_act", "fused_residual_layer_norm", "fused_residual_rms_norm",
        "fused_swiglu", "lora_matmul",
    ),
    "nn.fused_blocks": ("fused_attention_block", "fused_transformer_layer"),
    "nn.losses": ("softmax_cross_entropy_backward", "softmax_cross_entropy_with_logits"),
    "nn.moe": ("dequant_grouped_matmul", "grouped_matmul", "grouped_outer"),
    "nn.norm": ("batch_norm_inference", "group_norm", "layer_norm", "layer_norm_2d", "rms_norm"),
    "nn.norm_gradients": (
        "batch_norm_inference_backward_beta", "batch_norm_inference_backward_gamma",
        "batch_norm_inference_backward_input", "group_norm_backward_beta", "group_norm_backward_gamma",
        "group_norm_backward_input", "layer_norm_backward_gamma", "layer_norm_backward_input",
        "rms_norm_backward_beta", "rms_norm_backward_gamma", "rms_norm_backward_input",
    ),
    "nn.paged": ("paged_attention", "paged_update"),
    "nn.rnn": (),
    "nn.rope": ("axial_rope2d", "rope", "rope_backward"),
    "nn.sampling": ("sample",),
    "nn.sequence": ("gated_delta_net", "selective_scan"),
    "quant.dequant": ("dequant_matmul", "dequant_weights"),
    "quant.fake_quantize": (
        "fake_quantize", "fake_quantize_backward", "fake_quantize_lsq", "fake_quantize_lsq_backward_scale",
        "fake_quantize_lsq_backward_x",
    ),
    "quant.quantize": ("dequantize", "qconv2d", "qmatmul", "quantize", "quantize_dequantize"),
    "random": ("random_bits",),
    "reduce.cumulative": ("cummax", "cummin", "cumprod", "cumsum", "linear_recurrence", "logcumsumexp"),
    "reduce.reduce": ("reduce_all", "reduce_any", "reduce_max", "reduce_min", "reduce_prod", "reduce_sum"),
    "reduce.softmax": ("log_softmax", "logsumexp", "softmax"),
    "render.raster": ("splat_bin", "splat_raster", "splat_raster_backward"),
    "render.splat": (
        "gaussian_splat_prepare", "gaussian_splat_rasterize", "gaussian_splat_render",
        "gaussian_splat_render_backward",
    ),
    "signal.fft": ("fft", "irfft", "rfft"),
    "signal.signal": (),
    "signal.spectral": ("fft_butterfly_stage", "log_mel", "log_mel_backward"),
}  # fmt: skip
_FAMILY_OF = {name: family for family, names in FAMILIES.items() for name in names}
_here = local()


def load(name: str | None = None) -> None:
    """Load the family that has an op of a name; every family without one: each registers its ops and functions."""
    if name is not None:
        if name in _FAMILY_OF:
            imported(f"strata.ops.{_FAMILY_OF[name]}")
        return
    if getattr(_here, "loads", False):  # a family asks for a function while all are loaded
        return
    _here.loads = True
    try:
        for family in FAMILIES:
            imported(f"strata.ops.{family}")
    finally:
        _here.loads = False
    METHODS.source = None
    REGISTRY.is_whole()


def _function(name: str) -> Callable[..., Any]:
    if name in METHODS:
        return METHODS[name]
    raise AttributeError(f"strata.ops has no function {name!r}{near(name, METHODS)}")


if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Any]: ...


with deferred(globals(), beyond=_function):
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
