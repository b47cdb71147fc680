"""The ops that `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` call whole in inference."""

from __future__ import annotations

from typing import Any

from strata import ops
from strata.mir import Value
from strata.torch.aten.layers import linear
from strata.torch.table import Later, Unsupported, aten


def _refuse() -> Any:
    raise Unsupported("the weights of attention")


def _attended(
    inputs: tuple[Value, Value, Value], width: int, heads: int, weight: Value, bias: Value, out: Value, shift: Value
) -> Value:
    """Attention of heads over projections that lie in one matrix, and the projection of their results."""
    parts = []
    for i, x in enumerate(inputs):
        projected = linear(
            x.type, x, ops.narrow(weight, 0, i * width, width), ops.narrow(bias, 0, i * width, width)
        )  # fmt: skip
        batch, tokens = x.shape[:2]
        parts.append(ops.swapaxes(ops.reshape(projected, (batch, tokens, heads, width // heads)), 1, 2))
    y = ops.swapaxes(ops.scaled_dot_product_attention(*parts), 1, 2)
    return linear(inputs[0].type, ops.reshape(y, inputs[0].shape), out, shift)


@aten("_native_multi_head_attention")
def multi_head_attention(
    out: Any, query: Value, key: Value, value: Value, width: int, heads: int, weight: Value, bias: Value,
    projection: Value, shift: Value, mask: Value | None = None, need_weights: bool = True, *rest: Any, **options: Any,
) -> Any:  # fmt: skip
    if mask is not None or need_weights:
        raise Unsupported("attention with a mask, or that gives its weights")
    return [_attended((query, key, value), width, heads, weight, bias, projection, shift), Later(_refuse)]


@aten("_transformer_encoder_layer_fwd")
def encoder_layer(
    out: Any, x: Value, width: int, heads: int, weight: Value, bias: Value, projection: Value, shift: Value,
    use_gelu: bool, norm_first: bool, eps: float, scale_1: Value, offset_1: Value, scale_2: Value, offset_2: Value,
    up: Value, up_bias: Value, down: Value, down_bias: Value, mask: Value | None = None, mask_type: int | None = None,
) -> Value:  # fmt: skip
    if mask is not None:
        raise Unsupported("a layer with a mask")

    def norm(y: Value, scale: Value, offset: Value) -> Value:
        return ops.layer_norm(y, scale, offset, axis=-1, eps=eps)

    def attention(y: Value) -> Value:
        return _attended((y, y, y), width, heads, weight, bias, projection, shift)

    def feed_forward(y: Value) -> Value:
        inner = linear(y.type, y, up, up_bias)
        return linear(y.type, ops.gelu(inner) if use_gelu else ops.relu(inner), down, down_bias)

    if norm_first:
        x = x + attention(norm(x, scale_1, offset_1))
        return x + feed_forward(norm(x, scale_2, offset_2))
    x = norm(x + attention(x), scale_1, offset_1)
    return norm(x + feed_forward(x), scale_2, offset_2)
