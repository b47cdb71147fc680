"""Nomic BERT and GTE: BERT with rotary positions and a gated feed-forward; MPNet: BERT with biases of distances."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import f32
from strata.mir import Value
from strata.models.blocks.activations import activated, activation_of
from strata.models.blocks.distances import buckets_of_both, by_distance
from strata.models.config_values import mapping, real, text, whole
from strata.models.decoder_config import RopeConfig
from strata.models.encoders.bert import BERT, GRAPHS, NAMES, BertConfig, BertGraph
from strata.models.encoders.modernbert import labels_tokens
from strata.models.weights import Weights, check_layers, check_shapes, ops, without_prefix

FARTHEST = 128  # distance of tokens that MPNet tells apart
LONGEST = 1 << 15  # tokens that tables of positions are made for
HIDDEN = -1e30  # score of a token that does not count
ROTARY = {
    "layer": "layers.{}.", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "norm1": "post_attention_layernorm", "up": "mlp.up_proj", "down": "mlp.down_proj",
    "norm2": "post_mlp_layernorm",
}  # fmt: skip
# names in the models' own checkpoints
_RENAMED = (
    (r"^(new|nomic_bert|gte)\.", ""), (r"encoder\.layers?\.", "layers."), (r"^emb_ln\.", "embeddings.LayerNorm."),
    (r"attn\.out_proj", "self_attn.o_proj"), (r"attention\.o_proj", "self_attn.o_proj"), (r"mlp\.fc11", "mlp.up_proj"),
    (r"mlp\.fc12", "mlp.gate_proj"), (r"mlp\.fc2", "mlp.down_proj"), (r"norm1\.", "post_attention_layernorm."),
    (r"norm2\.", "post_mlp_layernorm."), (r"attn_ln\.", "post_attention_layernorm."),
    (r"mlp_ln\.", "post_mlp_layernorm."),
)  # fmt: skip
_JOINED = {"attn.Wqkv": "qkv", "attention.qkv_proj": "qkv", "mlp.up_gate_proj": "up gate"}


def plain_names(weights: Weights) -> dict[str, Any]:
    """Weights under one set of names: projections that lie in one tensor are parts of it."""
    found: dict[str, Any] = {}
    for name, tensor in weights.items():
        short = name
        for pattern, to in _RENAMED:
            short = re.sub(pattern, to, short)
        joint = next((part for part in _JOINED if f".{part}." in short), None)
        if joint is None:
            found[short] = tensor
            continue
        roles = [ROTARY[r] for r in "qkv"] if _JOINED[joint] == "qkv" else ["mlp.up_proj", "mlp.gate_proj"]
        for role, part in zip(roles, np.split(np.asarray(tensor), len(roles)), strict=True):
            found[short.replace(joint, role)] = part
    return found


@dataclass(frozen=True)
class RotaryConfig(BertConfig):
    """The sizes of a Nomic BERT or a GTE."""

    theta: float = 10000.0

    @classmethod
    def from_json(cls, found: dict[str, Any], labels: int = 0) -> RotaryConfig:
        """From config.json, of transformers or of the model's own."""
        given = str(found.get("model_type"))
        family = "nomic_bert" if given == "nomic_bert" else "gte"
        names = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
                 "intermediate_size": "n_inner", "max_position_embeddings": "n_positions",
                 "layer_norm_eps": "layer_norm_epsilon"}  # fmt: skip
        found = {**{ours: found[theirs] for ours, theirs in names.items() if theirs in found}, **found}
        ropes = mapping(found, "rope_parameters")
        default = real(found, "rotary_emb_base", 1000.0) if family == "nomic_bert" else 160000.0
        hidden = whole(found, "hidden_size")
        act = activation_of(found, default="silu" if family == "nomic_bert" else "gelu")
        named = text(found, "activation_function", "")
        if named:
            act = "silu" if named == "swiglu" else activation_of(found, "activation_function")
        return cls(
            family, whole(found, "vocab_size"), hidden, whole(found, "num_hidden_layers"),
            whole(found, "num_attention_heads"), whole(found, "intermediate_size", 4 * hidden),
            min(whole(found, "max_position_embeddings", 8192), LONGEST),
            whole(found, "type_vocab_size", 2 if family == "nomic_bert" else 1, least=0),
            real(found, "layer_norm_eps", 1e-12), act, labels, labels_tokens(found), 0, 0,
            real(ropes, "rope_theta", real(found, "rope_theta", default)),
        )  # fmt: skip

    def check(self, weights: Weights) -> None:
        plain = plain_names(weights)
        check_layers(self.family, self.layers, plain, ROTARY["layer"])
        check_shapes(self.family, plain, {
            "embeddings.word_embeddings.weight": (self.vocab, self.hidden),
            "layers.0.mlp.up_proj.weight": (self.inner, self.hidden),
        })  # fmt: skip


class RotaryGraph(BertGraph):
    """Builds the graph of a Nomic BERT or a GTE."""

    config: RotaryConfig

    def __init__(self, config: BertConfig, weights: Weights, name: str = "bert") -> None:
        super().__init__(config, plain_names(weights), name)
        size = config.hidden // config.heads
        self.tables = []
        tables = RopeConfig(self.config.theta).tables(config.longest, size, size)
        for part, table in zip(("cos", "sin"), tables, strict=True):
            self.bound[f"rope.{part}"] = table
            self.tables.append(ops.narrow(self.graph.param(f"rope.{part}", table.shape, f32), 0, 0, self.length))

    def embeddings(self, types: Value | None) -> Value:
        c = self.config
        x = self.embedding(self.ids, "embeddings.word_embeddings.weight", c.vocab, c.hidden)
        if c.types:
            table = self.param("embeddings.token_type_embeddings.weight", (c.types, c.hidden))
            x = x + (table[0] if types is None else ops.take(table, types, axis=0))
        return self.layer_norm(x, "embeddings.LayerNorm", c.hidden, c.eps)

    def mixed(self, q: Value, k: Value, v: Value, at: str) -> Value:
        q, k = (
            ops.rope(z, *self.tables, head_dim=self.config.hidden // self.config.heads, layout="bsd") for z in (q, k)
        )
        return super().mixed(q, k, v, at)

    def inner(self, x: Value, at: str) -> Value:
        c = self.config
        gate = activated(self.linear(x, f"{at}mlp.gate_proj", c.inner, c.hidden), c.activation)
        return gate * self.linear(x, f"{at}mlp.up_proj", c.inner, c.hidden)


class MpnetGraph(BertGraph):
    """Builds the graph of an MPNet: scores have a bias for each head and bucket of distances."""

    def __init__(self, config: BertConfig, weights: Weights, name: str = "bert") -> None:
        super().__init__(config, weights, name)
        table = np.asarray(self.weights["encoder.relative_attention_bias.weight"], np.float32)
        gaps = np.arange(1 - config.longest, config.longest)
        found = by_distance(
            self, "distance_bias", table[buckets_of_both(gaps, len(table), FARTHEST)], self.length
        )  # [S, S, heads]
        bias = ops.insert_axis(ops.transpose(found, (2, 0, 1)), 0)
        kept = ops.reshape(self.mask, (self.batch, 1, 1, self.length))
        self.bias = ops.where(kept, bias, ops.full((), HIDDEN))

    def mixed(self, q: Value, k: Value, v: Value, at: str) -> Value:
        c = self.config
        shape = (self.batch, c.heads, self.length, self.length)
        bias = ops.broadcast_to(self.bias, shape)
        return ops.attention(q, k, v, bias, num_heads=c.heads, kv_heads=c.heads, mask_kind="bias", layout="bsd")


NAMES["nomic_bert"] = NAMES["gte"] = {**BERT, **ROTARY}
GRAPHS |= {"nomic_bert": RotaryGraph, "gte": RotaryGraph, "mpnet": MpnetGraph}
__all__ = ["MpnetGraph", "RotaryConfig", "RotaryGraph", "plain_names", "without_prefix"]
