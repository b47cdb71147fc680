"""T5, Flan-T5, mT5, UMT5: relative positions in buckets, norms without a shift, a gated feed-forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import bool_, i32, i64, sym
from strata.mir import Value, constant
from strata.models.base import Folder
from strata.models.blocks.activations import activated, activation_of
from strata.models.blocks.distances import buckets_of_both, shared_buckets
from strata.models.cached import CacheSizes
from strata.models.config_values import MOST_PLACES, real, text, whole
from strata.models.seq2seq.graphs import CrossGraph, CrossSizes
from strata.models.seq2seq.model import TextToText
from strata.models.seq2seq.rules import folder_rules
from strata.models.tokenizer import folder_tokenizer
from strata.models.weights import WeightBuilder, Weights, check_layers, ops

CONTEXT = 4096  # tokens that are planned for; relative positions have no end
FAMILIES = ("t5", "mt5", "umt5")


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """The sizes of a T5."""

    vocab: int
    hidden: int
    heads: int
    head_dim: int
    inner: int
    layers: tuple[int, int]  # of the encoder and of the decoder
    buckets: int
    farthest: int
    eps: float
    activation: str
    is_gated: bool
    is_scaled: bool  # whether states are scaled down before the logits, as tied embeddings need
    has_bias_each: bool  # whether every layer has positions of its own, or the first layer's are everyone's

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> T5Config:
        plain = found["model_type"] == "t5"
        act = text(found, "feed_forward_proj", "relu" if plain else "gated-gelu")
        gated = act.startswith("gated-")
        name = text(found, "dense_act_fn", "gelu_new" if act == "gated-gelu" else act.removeprefix("gated-"))
        tied = found.get("scale_decoder_outputs", found.get("tie_word_embeddings") is not False)
        layers = whole(found, "num_layers", 6)
        return cls(
            vocab=whole(found, "vocab_size"), hidden=whole(found, "d_model", 512), heads=whole(found, "num_heads", 8),
            head_dim=whole(found, "d_kv", 64), inner=whole(found, "d_ff", 2048),
            layers=(layers, whole(found, "num_decoder_layers", layers)),
            buckets=whole(found, "relative_attention_num_buckets", 32),
            farthest=whole(found, "relative_attention_max_distance", 128, most=MOST_PLACES),
            eps=real(found, "layer_norm_epsilon", 1e-6), activation=activation_of({"act": name}, "act"),
            is_gated=bool(found.get("is_gated_act", gated)), is_scaled=found["model_type"] != "mt5" and bool(tied),
            has_bias_each=found["model_type"] == "umt5",
        )  # fmt: skip


def bucket_table(config: T5Config, *, both: bool) -> np.ndarray:
    """Buckets of distances of keys from queries: -farthest to farthest, or with one direction, 0 to farthest back."""
    far = config.farthest
    if both:
        return buckets_of_both(np.arange(far, -far - 1, -1), config.buckets, far).astype(np.int32)
    return shared_buckets(np.arange(far + 1), config.buckets, far).astype(np.int32)


class T5Blocks(WeightBuilder):
    """What both halves of a T5 are made of."""

    config: T5Config

    def norm(self, x: Value, name: str) -> Value:
        return ops.rms_norm(x, self.param(f"{name}.weight", (self.config.hidden,)), eps=self.config.eps)

    def projected(self, x: Value, at: str, roles: str) -> list[Value]:
        return [self.linear(x, at + r, self.config.heads * self.config.head_dim, self.config.hidden) for r in roles]

    def back(self, x: Value, at: str) -> Value:
        return self.linear(x, f"{at}o", self.config.hidden, self.config.heads * self.config.head_dim)

    def dense(self, x: Value, at: str) -> Value:
        """x and the feed-forward of it."""
        c, normed = self.config, self.norm(x, f"{at}layer_norm")
        at = f"{at}DenseReluDense."
        inner = [self.linear(normed, at + n, c.inner, c.hidden) for n in (("wi_0", "wi_1") if c.is_gated else ("wi",))]
        made = activated(inner[0], c.activation) * inner[1] if c.is_gated else activated(inner[0], c.activation)
        return x + self.linear(made, f"{at}wo", c.hidden, c.inner)

    def bias(self, half: str, layer: int, distance: Value, *, both: bool) -> Value:
        """What is added to scores for distances i64[S, C]: f32[1, H, S, C]."""
        c, key = self.config, f"{half}.buckets"
        table = self.bound.setdefault(key, bucket_table(c, both=both))
        if key not in self._known:
            self._known[key] = self.graph.param(key, table.shape, i32)
        least = -c.farthest if both else 0
        near = ops.clip(distance, constant(least, i64), constant(c.farthest, i64)) - constant(least, i64)
        name = f"{half}.block.{layer if c.has_bias_each else 0}.layer.0.SelfAttention.relative_attention_bias.weight"
        rows = ops.take(self.param(name, (c.buckets, c.heads)), ops.take(self._known[key], near, axis=0), axis=0)
        return ops.insert_axis(ops.transpose(rows, (2, 0, 1)), 0)


class T5Encoder(T5Blocks):
    """Builds the encoder: its states, and keys and values of the source for each layer of the decoder."""

    def __init__(self, config: T5Config, weights: Weights) -> None:
        super().__init__("t5 encoder", weights)
        self.config = config

    def build(self) -> T5Encoder:
        c, batch, length = self.config, sym("B", 1), sym("T", 1)
        ids = self.graph.input("input_ids", (batch, length), i32)
        mask = self.graph.input("attention_mask", (batch, length), bool_)
        x = self.embedding(ids, "shared.weight", c.vocab, c.hidden)
        place = ops.iota((length,), 0, i64)
        distance = ops.reshape(place, (1, length)) - ops.reshape(place, (length, 1))
        away = ops.where(ops.reshape(mask, (batch, 1, 1, length)), constant(0.0, "f32"), constant(-1e30, "f32"))
        for i in range(c.layers[0]):
            at = f"encoder.block.{i}.layer."
            q, k, v = self.projected(self.norm(x, f"{at}0.layer_norm"), f"{at}0.SelfAttention.", "qkv")
            bias = ops.broadcast_to(
                self.bias("encoder", i, distance, both=True) + away, (batch, c.heads, length, length)
            )
            mixed = ops.attention(
                q, k, v, bias, mask_kind="bias", num_heads=c.heads, kv_heads=c.heads, layout="bsd", scale=1.0
            )
            x = self.dense(x + self.back(mixed, f"{at}0.SelfAttention."), f"{at}1.")
        x = self.norm(x, "encoder.final_layer_norm")
        cross = [
            kv
            for i in range(c.layers[1])
            for kv in self.projected(x, f"decoder.block.{i}.layer.1.EncDecAttention.", "kv")
        ]
        self.graph.outputs(x, *cross)
        return self


class T5Decoder(T5Blocks, CrossGraph):
    """Builds the decoder."""

    def __init__(self, config: T5Config, weights: Weights, sizes: CrossSizes, *, every: bool) -> None:
        CrossGraph.__init__(self, "t5", weights, sizes, sizes.positions, every=every)
        self.config = config

    def build(self) -> T5Decoder:
        c = self.config
        x = self.embedding(self.ids, "shared.weight", c.vocab, c.hidden)
        keys = ops.reshape(ops.iota((self.capacity,), 0, i64), (1, self.capacity))
        distance = ops.reshape(self.positions, (self.count, 1)) - keys
        for i in range(c.layers[1]):
            at = f"decoder.block.{i}.layer."
            q, k, v = self.projected(self.norm(x, f"{at}0.layer_norm"), f"{at}0.SelfAttention.", "qkv")
            mixed = self.attend_self(i, q, k, v, bias=self.bias("decoder", i, distance, both=False), scale=1.0)
            x = x + self.back(mixed, f"{at}0.SelfAttention.")
            (q,) = self.projected(self.norm(x, f"{at}1.layer_norm"), f"{at}1.EncDecAttention.", "q")
            x = x + self.back(self.attend_source(i, q, scale=1.0), f"{at}1.EncDecAttention.")
            x = self.dense(x, f"{at}2.")
        x = self.norm(self.asked(x), "decoder.final_layer_norm")
        if c.is_scaled:
            x = x * c.hidden**-0.5
        self.finish(self.linear(x, "lm_head" if self.has("lm_head.weight") else "shared", c.vocab, c.hidden))
        return self


def load(folder: Folder) -> TextToText:
    """A model from a folder."""
    config = T5Config.from_json(folder.settings)
    weights = {k.replace("encoder.embed_tokens", "shared"): w for k, w in folder.weights.items()}
    for half, count in zip(("encoder", "decoder"), config.layers, strict=True):
        check_layers("t5", count, weights, f"{half}.block.{{}}.")
    cache = CacheSizes(config.layers[1], config.heads, config.heads, config.head_dim)
    sizes = CrossSizes(vocab=config.vocab, cache=cache, positions=folder.context or CONTEXT)
    return TextToText(
        sizes, lambda: T5Encoder(config, weights).build(),
        lambda every: T5Decoder(config, weights, sizes, every=every).build(),
        folder_rules(folder.path, folder.settings, 0), lambda: folder_tokenizer(folder.path), device=folder.device,
    )  # fmt: skip
