"""Which family has which ops; one is loaded when an op of it is read by name, all when a function is asked for."""

from __future__ import annotations

from threading import local

from strata.mir import METHODS, REGISTRY
from strata.modules import imported

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
