"""Multi-head attention with torch's parameters."""

from __future__ import annotations

from typing import Any

import strata.tensor as tensors
from strata.core import here
from strata.errors import OptionError
from strata.nn import initial
from strata.nn.layers import Linear
from strata.nn.module import Module
from strata.tensor import Tensor, random, zeros

ops: Any = tensors


class MultiheadAttention(Module):
    """Attention over [batch, length, embed_dim] (torch's `batch_first=True`)."""

    def __init__(
        self, embed_dim: int, num_heads: int, bias: bool = True, *, key: Any = None, dtype: Any = "f32"
    ) -> None:
        if embed_dim % num_heads:
            raise OptionError(
                f"MultiheadAttention: {embed_dim} features do not split into {num_heads} heads",
                code="O281",
                place=here(),
            )
        first, second = random.split(initial.key_or_next(key))
        self.num_heads = num_heads
        self.in_proj_weight = initial.xavier_uniform(first, (3 * embed_dim, embed_dim), dtype)
        self.in_proj_bias = zeros((3 * embed_dim,), dtype).realize() if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias, key=second, dtype=dtype)

    def __call__(
        self, query: Any, key: Any = None, value: Any = None, attn_mask: Any = None, is_causal: bool = False
    ) -> Tensor:
        """Self-attention when only the query is given; a mask is added to the scores, or is bool with True to keep."""
        width = self.in_proj_weight.shape[1]
        if key is None and value is None:
            q, k, v = ops.split(self._project(query, 0, 3 * width), 3, axis=-1)
        else:
            key = query if key is None else key
            value = key if value is None else value
            q, k, v = (self._project(x, i * width, width) for i, x in enumerate((query, key, value)))
        mixed = ops.scaled_dot_product_attention(*map(self._heads, (q, k, v)), attn_mask, is_causal)
        return self.out_proj(mixed.transpose((0, 2, 1, 3)).reshape(q.shape))

    def _project(self, x: Any, start: Any, size: Any) -> Tensor:
        y: Tensor = x @ self.in_proj_weight[start : start + size].T
        return y if self.in_proj_bias is None else y + self.in_proj_bias[start : start + size]

    def _heads(self, x: Any) -> Any:
        batch, length, width = x.shape
        return x.reshape((batch, length, self.num_heads, width // self.num_heads)).transpose((0, 2, 1, 3))
