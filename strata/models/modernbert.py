"""ModernBERT: an encoder with rotary positions, gated feed-forwards, and windows in most of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.core import bool_, f32, i32, sym
from strata.errors import FileError
from strata.mir import Value, constant
from strata.models.decoder_config import Rope
from strata.models.weights import Builder, Weights, ops, without_prefix


@dataclass(frozen=True)
class ModernBertConfig:
    """The sizes of a ModernBERT."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    inner: int
    positions: int
    eps: float
    activation: str
    is_local: tuple[bool, ...]
    window: int  # tokens on each side that a local layer sees
    theta: float
    local_theta: float
    family: str = "modernbert"
    types: int = 0
    labels: int = 0
    is_per_token: bool = False  # labels of tokens, not of texts
    head_activation: str = "gelu"
    head_pooling: str = "cls"

    @classmethod
    def from_json(cls, found: dict[str, Any], labels: int = 0) -> ModernBertConfig:
        """From config.json."""
        try:
            layers = int(found["num_hidden_layers"])
            period = int(found.get("global_attn_every_n_layers", 3))
            kinds = found.get("layer_types") or [
                "sliding_attention" if i % period else "full_attention" for i in range(layers)
            ]
            ropes = found.get("rope_parameters") or {}
            full, local = (ropes.get(k) or {} for k in ("full_attention", "sliding_attention"))
            made = cls(
                int(found["vocab_size"]), int(found["hidden_size"]), layers, int(found["num_attention_heads"]),
                int(found["intermediate_size"]), int(found.get("max_position_embeddings", 8192)),
                float(found.get("norm_eps", 1e-5)), str(found.get("hidden_activation", "gelu")),
                tuple(k == "sliding_attention" for k in kinds), int(found.get("local_attention", 128)) // 2,
                float(full.get("rope_theta") or found.get("global_rope_theta") or 160000.0),
                float(local.get("rope_theta") or found.get("local_rope_theta") or 10000.0), labels=labels,
                is_per_token=labels_tokens(found), head_activation=str(found.get("classifier_activation", "gelu")),
                head_pooling=str(found.get("classifier_pooling", "cls")),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileError(f"the configuration of a modernbert lacks or spoils {error}", code="F140") from None
        sizes = (made.vocab, made.hidden, made.layers, made.heads, made.inner, made.positions)
        if min(sizes) < 1 or made.hidden % (2 * made.heads) or len(made.is_local) != made.layers:
            raise FileError(f"the configuration of the modernbert makes no sense: {made}", code="F140")
        return made


def labels_tokens(found: dict[str, Any]) -> bool:
    """Whether a configuration is of a model that labels tokens, or marks an answer in a text."""
    kinds = found.get("architectures") or ()
    return any(end in str(kind) for kind in kinds for end in ("ForTokenClassification", "ForQuestionAnswering"))


class ModernBertGraph(Builder):
    """Builds the graph of an encoder over inputs of symbolic size [B, S]."""

    def __init__(self, config: ModernBertConfig, weights: Weights, name: str = "modernbert") -> None:
        super().__init__(name, without_prefix(weights, ("model.",)))
        self.config = config
        self.batch, self.length = sym("B", 1), sym("S", 1, config.positions)
        self.ids = self.graph.input("input_ids", (self.batch, self.length), i32)
        self.mask = self.graph.input("attention_mask", (self.batch, self.length), bool_)
        self.tables = {
            kind: self._tables(f"rope{kind}", theta) for kind, theta in enumerate((config.theta, config.local_theta))
        }
        self.kept = ops.reshape(self.mask, (self.batch, 1, 1, self.length))
        row, column = (ops.reshape(ops.iota((self.length,), 0, i32), s) for s in ((self.length, 1), (1, self.length)))
        near = ops.abs(row - column) <= constant(config.window, i32)
        near = ops.reshape(near, (1, 1, self.length, self.length))
        self.kept_near = ops.logical_and(self.kept, near)

    def _tables(self, name: str, theta: float) -> list[Value]:
        size = self.config.hidden // self.config.heads
        found = []
        for part, table in zip(("cos", "sin"), Rope(theta).tables(self.config.positions, size, size), strict=True):
            self.bound[f"{name}.{part}"] = table
            found.append(ops.narrow(self.graph.param(f"{name}.{part}", table.shape, f32), 0, 0, self.length))
        return found

    def layer(self, x: Value, number: int) -> Value:
        c, at = self.config, f"layers.{number}."
        local = c.is_local[number]
        y = self.layer_norm(x, f"{at}attn_norm", c.hidden, c.eps) if self.has(f"{at}attn_norm.weight") else x
        both = self.linear(y, f"{at}attn.Wqkv", 3 * c.hidden, c.hidden)
        q, k, v = (ops.narrow(both, -1, i * c.hidden, c.hidden) for i in range(3))
        cos, sin = self.tables[local]
        q, k = (ops.rope(z, cos, sin, head_dim=c.hidden // c.heads, layout="bsd") for z in (q, k))
        kept = self.kept_near if local else self.kept
        mixed = ops.attention(q, k, v, kept, num_heads=c.heads, kv_heads=c.heads, mask_kind="custom", layout="bsd")
        x = x + self.linear(mixed, f"{at}attn.Wo", c.hidden, c.hidden)
        wide = self.linear(self.layer_norm(x, f"{at}mlp_norm", c.hidden, c.eps), f"{at}mlp.Wi", 2 * c.inner, c.hidden)
        inner, gate = (ops.narrow(wide, -1, i * c.inner, c.inner) for i in range(2))
        return x + self.linear(ops.activation(inner, c.activation) * gate, f"{at}mlp.Wo", c.hidden, c.inner)

    def head(self, x: Value) -> Value:
        """What stands before a classifier or a decoder."""
        c = self.config
        y = ops.activation(self.linear(x, "head.dense", c.hidden, c.hidden), c.head_activation)
        return self.layer_norm(y, "head.norm", c.hidden, c.eps)

    def words(self, x: Value) -> Value:
        """Logits of every token of the vocabulary, where the model has a head for masked words."""
        c = self.config
        name = "decoder" if self.has("decoder.weight") else "embeddings.tok_embeddings"
        y = self.linear(self.head(x), name, c.vocab, c.hidden, bias=False)
        return y + self.param("decoder.bias", (c.vocab,)) if self.has("decoder.bias") else y

    def encoded(self, types: Value | None = None) -> Value:
        """Hidden states; this family has no token types."""
        c = self.config
        x = self.embedding(self.ids, "embeddings.tok_embeddings.weight", c.vocab, c.hidden)
        x = self.layer_norm(x, "embeddings.norm", c.hidden, c.eps)
        for i in range(c.layers):
            x = self.layer(x, i)
        return self.layer_norm(x, "final_norm", c.hidden, c.eps)
