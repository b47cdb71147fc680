"""Decoder graphs with cross-attention: a KV cache for themselves, keys and values of the source that never change."""

from __future__ import annotations

from dataclasses import dataclass

from strata.core import bool_, f32, sym
from strata.mir import Value
from strata.models.blocks.transformer import LayerNames, LayerSizes, TransformerBuilder
from strata.models.cached import CachedGraph, CacheSizes
from strata.models.weights import Weights, ops


@dataclass(frozen=True, kw_only=True)
class CrossSizes:
    """What an encoder-decoder plans with, whatever the family."""

    vocab: int
    cache: CacheSizes
    positions: int  # most tokens that the decoder makes, and the encoder reads where `sources` says no other
    sources: int | None = None
    has_mask: bool = True  # whether sources of a batch have lengths of their own


class CrossGraph(CachedGraph, TransformerBuilder):
    """A decoder under construction that reads a source."""

    def __init__(self, name: str, weights: Weights, sizes: CrossSizes, length: int, *, every: bool) -> None:
        super().__init__(name, weights, sizes.cache, length, every=every)
        source, width = sym("T", 1), sizes.cache.width
        self.memory = [
            [self.graph.input(f"cross_{kind}{i}", (self.batch, source, width), f32) for kind in ("keys", "values")]
            for i in range(sizes.cache.layers)
        ]
        self.kept: Value | None = None
        if sizes.has_mask:
            mask = self.graph.input("memory_mask", (self.batch, source), bool_)
            self.kept = ops.reshape(mask, (self.batch, 1, 1, source))

    def attend_self(
        self, layer: int, q: Value, k: Value, v: Value, *, bias: Value | None = None, scale: float | None = None
    ) -> Value:
        """Attention among the tokens; new keys and values enter the KV cache."""
        keys, values = self.gathered(layer, k, v)
        return ops.attention(
            q, keys, values, bias, mask_kind=None if bias is None else "bias", layout="bsd", causal=True,
            offset=self.past, num_heads=self.sizes.heads, kv_heads=self.sizes.kv_heads, scale=scale,
        )  # fmt: skip

    def attend_source(self, layer: int, q: Value, *, scale: float | None = None) -> Value:
        """Attention to the source."""
        keys, values = self.memory[layer]
        kind = None if self.kept is None else "custom"
        return ops.attention(
            q, keys, values, self.kept, mask_kind=kind, layout="bsd", num_heads=self.sizes.heads,
            kv_heads=self.sizes.kv_heads, scale=scale,
        )  # fmt: skip

    def cross_layer(self, x: Value, number: int, names: LayerNames, sizes: LayerSizes) -> Value:
        """Attention among the tokens, to the source, feed-forward: each added, and normalised before or after."""
        at, h = names.at.format(number), sizes.hidden

        def among(y: Value) -> Value:
            q, k, v = (self.linear(y, at + name, h, h) for name in (names.q, names.k, names.v))
            return self.linear(self.attend_self(number, q, k, v), at + names.o, h, h)

        def source(y: Value) -> Value:
            q = self.linear(y, f"{at}encoder_attn.q_proj", h, h)
            return self.linear(self.attend_source(number, q), f"{at}encoder_attn.out_proj", h, h)

        def dense(y: Value) -> Value:
            return self.feed_forward(y, at, names, sizes)

        for norm, block in ((names.norm1, among), ("encoder_attn_layer_norm", source), (names.norm2, dense)):
            if sizes.is_pre:
                x = x + block(self.layer_norm(x, at + norm, h, sizes.eps))
            else:
                x = self.layer_norm(x + block(x), at + norm, h, sizes.eps)
        return x
