"""Llama-like decoders as graphs, from Hugging Face weights or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from strata.core import f32
from strata.io import GgufTensor
from strata.mir import Value
from strata.models.blocks.activations import activated
from strata.models.cached import DECODERS, CachedGraph, CacheSizes, DecoderFamily, Layout
from strata.models.decoder_config import FAMILIES, DecoderConfig, from_json
from strata.models.weights import Weights, ops, without_prefix

GGUF_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip


def plain_names(weights: Weights) -> dict[str, np.ndarray | GgufTensor]:
    """Hugging Face names without the prefixes of whole models."""
    return without_prefix(weights, ("language_model.model.", "model.language_model.", "model.", "language_model."))


def gguf_names(
    tensors: Mapping[str, GgufTensor], config: DecoderConfig, more: Mapping[str, str] | None = None
) -> dict[str, np.ndarray | GgufTensor]:
    """GGUF names as Hugging Face's; `more` are those that a family has beside the common ones."""
    outer = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
    norms = ("post_attention_layernorm", "pre_feedforward_layernorm")
    names = GGUF_NAMES | {"ffn_norm": norms[config.has_outer_norms], "post_attention_norm": "post_attention_layernorm"}
    names |= more or {}
    if config.family == "phi3":
        names |= {"ffn_up": "mlp.gate_up_proj"}
    found: dict[str, np.ndarray | GgufTensor] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] == "blk" and len(parts) == 4 and parts[2] in names:
            found[f"layers.{parts[1]}.{names[parts[2]]}.{parts[3]}"] = tensor
        elif parts[0] in outer:
            found[f"{outer[parts[0]]}.{parts[-1]}"] = tensor
    return found


class LlamaGraph(CachedGraph):
    """Builds the graph of a decoder. Families override its methods where they differ."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, length: int, *, every: bool = False, layout: Layout = "plain"
    ) -> None:
        sizes = CacheSizes(config.layers, config.heads, config.kv_heads, config.head_dim)
        super().__init__("decoder", weights, sizes, length, every=every, layout=layout, slots=config.slots)
        self.config = config
        self.tables = {False: self._rope_tables("rope", config.rope, length)}
        self.tables[True] = (
            self._rope_tables("local_rope", config.local_rope, length) if config.local_rope else self.tables[False]
        )

    def _rope_tables(self, name: str, rope: Any, length: int) -> tuple[Value, Value]:
        return self.table_rows(name, rope.tables(length, self.config.head_dim, self.config.rotary_dim))

    def table_rows(self, name: str, tables: tuple[np.ndarray, np.ndarray]) -> tuple[Value, Value]:
        """The rows of the new tokens."""
        rows = []
        for part, table in zip(("cos", "sin"), tables, strict=True):
            self.bound[f"{name}.{part}"] = table
            whole = self.graph.param(f"{name}.{part}", table.shape, f32)
            rows.append(ops.take(whole, self.positions, axis=0))
        return rows[0], rows[1]

    def norm(self, x: Value, name: str, width: int) -> Value:
        gamma = self.param(f"{name}.weight", (width,))
        if self.config.norm_offset:
            gamma = gamma + self.config.norm_offset
        if self.config.norm == "rms":
            return ops.rms_norm(x, gamma, eps=self.config.eps)
        beta = self.param(f"{name}.bias", (width,)) if self.has(f"{name}.bias") else None
        return ops.layer_norm(x, gamma, beta, eps=self.config.eps)

    def heads_norm(self, x: Value, name: str, heads: int) -> Value:
        """A norm of each head, where the model has one."""
        if not self.has(f"{name}.weight"):
            return x
        size = self.config.head_dim
        split = ops.reshape(x, (self.batch, self.count, heads, size))
        return ops.reshape(self.norm(split, name, size), x.shape)

    def rotated(self, x: Value, layer: int) -> Value:
        c = self.config
        if c.rope_layers and not c.rope_layers[layer]:
            return x
        cos, sin = self.tables[c.window(layer) is not None]
        return ops.rope(x, cos, sin, head_dim=c.head_dim, n_rot=c.rotary_dim, interleaved=c.interleaved, layout="bsd")

    def placed(self, x: Value, name: str, heads: int, layer: int) -> Value:
        """Queries or keys, normalised and rotated."""
        return self.rotated(self.heads_norm(x, name, heads), layer)

    def projected(self, x: Value, layer: int) -> list[Value]:
        """Queries, keys and values."""
        c, at = self.config, f"layers.{layer}.self_attn."
        wide, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
        if not self.has(f"{at}qkv_proj.weight"):
            return self.linears(x, [f"{at}{p}_proj" for p in "qkv"], (wide, narrow, narrow), c.hidden)
        both = self.linear(x, f"{at}qkv_proj", wide + 2 * narrow, c.hidden)
        return [ops.narrow(both, -1, a, n) for a, n in ((0, wide), (wide, narrow), (wide + narrow, narrow))]

    def attention(self, x: Value, layer: int) -> Value:
        c, at = self.config, f"layers.{layer}.self_attn."
        q, k, v = self.projected(x, layer)
        q = self.placed(q, f"{at}q_norm", c.heads, layer)
        k = self.placed(k, f"{at}k_norm", c.kv_heads, layer)
        window = c.window(layer)
        mixed = self.attend(
            layer, q, k, v, window=None if window is None else window - 1, scale=c.score_scale, softcap=c.score_cap
        )
        return self.linear(mixed, f"{at}o_proj", c.hidden, c.heads * c.head_dim)

    def feed_forward(self, x: Value, layer: int) -> Value:
        c, at = self.config, f"layers.{layer}.mlp."
        if self.has(f"{at}gate_up_proj.weight"):
            both = self.linear(x, f"{at}gate_up_proj", 2 * c.inner, c.hidden)
            gate, up = ops.narrow(both, -1, 0, c.inner), ops.narrow(both, -1, c.inner, c.inner)
        elif not c.is_gated:
            up = self.activated(self.linear(x, f"{at}up_proj", c.inner, c.hidden))
            return self.linear(up, f"{at}down_proj", c.hidden, c.inner)
        else:
            gate, up = self.linears(x, [f"{at}gate_proj", f"{at}up_proj"], (c.inner, c.inner), c.hidden)
        return self.linear(self.activated(gate) * up, f"{at}down_proj", c.hidden, c.inner)

    def activated(self, x: Value) -> Value:
        return activated(x, self.config.activation)

    def layer(self, x: Value, number: int) -> Value:
        c, at = self.config, f"layers.{number}."
        mixed = self.attention(self.norm(x, f"{at}input_layernorm", c.hidden), number)
        if not c.has_outer_norms:
            x = x + mixed
            return x + self.feed_forward(self.norm(x, f"{at}post_attention_layernorm", c.hidden), number)
        x = x + self.norm(mixed, f"{at}post_attention_layernorm", c.hidden)
        inner = self.feed_forward(self.norm(x, f"{at}pre_feedforward_layernorm", c.hidden), number)
        return x + self.norm(inner, f"{at}post_feedforward_layernorm", c.hidden)

    def embedded(self) -> Value:
        """The vectors of the new tokens."""
        c = self.config
        x = self.embedding(self.ids, "embed_tokens.weight", c.vocab, c.hidden)
        return x if c.embedding_scale == 1.0 else x * c.embedding_scale

    def build(self) -> LlamaGraph:
        """The whole graph: logits, then keys and values of every layer."""
        c = self.config
        x = self.embedded()
        for i in range(c.layers):
            x = self.layer(x, i)
        self.finish(self.logits(self.asked(x)))
        return self

    def logits(self, x: Value) -> Value:
        """The logits of the last layer's rows."""
        c = self.config
        head = "embed_tokens" if c.is_tied and not self.has("lm_head.weight") else "lm_head"
        logits = self.linear(self.norm(x, "norm", c.hidden), head, c.vocab, c.hidden)
        if head != "lm_head" and self.has("lm_head.bias"):
            logits = logits + self.param("lm_head.bias", (c.vocab,))
        return logits if c.logit_cap is None else ops.tanh(logits / c.logit_cap) * c.logit_cap


DECODERS.update(dict.fromkeys(FAMILIES, DecoderFamily(from_json, LlamaGraph, plain_names)))
