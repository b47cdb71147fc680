"""ModernBERT: an encoder with rotary positions, gated feed-forwards, and sliding-window attention in most layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.core import bool_, f32, i32, sym
from strata.errors import FileError
from strata.mir import Value, constant
from strata.models.blocks.activations import activated, activation_of
from strata.models.config_values import mapping, of_layers, real, text, whole
from strata.models.decoder_config import RopeConfig
from strata.models.weights import WeightBuilder, Weights, check_layers, check_shapes, ops, without_prefix

LONGEST = 1 << 16  # tokens that positions are made for: no weights say how many there are


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
    is_local: tuple[bool, ...]  # of each layer; empty: all but one in `period`
    window: int  # tokens on each side that a local layer sees
    theta: float
    local_theta: float
    family: str = "modernbert"
    types: int = 0
    labels: int = 0
    is_per_token: bool = False  # labels of tokens, not of texts
    head_activation: str = "gelu"
    head_pooling: str = "cls"
    period: int = 3

    @classmethod
    def from_json(cls, found: dict[str, Any], labels: int = 0) -> ModernBertConfig:
        """From config.json."""
        layers, period = whole(found, "num_hidden_layers"), whole(found, "global_attn_every_n_layers", 3)
        kinds = of_layers(found, "layer_types", layers)
        ropes = mapping(found, "rope_parameters")
        full, local = mapping(ropes, "full_attention"), mapping(ropes, "sliding_attention")
        made = cls(
            whole(found, "vocab_size"), whole(found, "hidden_size"), layers, whole(found, "num_attention_heads"),
            whole(found, "intermediate_size"), whole(found, "max_position_embeddings", 8192),
            real(found, "norm_eps", 1e-5), activation_of(found, "hidden_activation"),
            () if kinds is None else tuple(k == "sliding_attention" for k in kinds),
            whole(found, "local_attention", 128) // 2,
            real(full, "rope_theta", real(found, "global_rope_theta", 160000.0)),
            real(local, "rope_theta", real(found, "local_rope_theta", 10000.0)), labels=labels,
            is_per_token=labels_tokens(found), head_activation=activation_of(found, "classifier_activation"),
            head_pooling=text(found, "classifier_pooling", "cls"), period=period,
        )  # fmt: skip
        if made.hidden % (2 * made.heads):
            raise FileError(f"the configuration has {made.hidden} features for {made.heads} heads", code="F140")
        return made

    @property
    def longest(self) -> int:
        """Tokens that there are positions for."""
        return self.positions

    def sees_near(self, layer: int) -> bool:
        """Whether a layer sees a window only."""
        return self.is_local[layer] if self.is_local else layer % self.period != 0

    def check(self, weights: Weights) -> None:
        """Refuse weights that are not those of this configuration, by the sizes that decide how much is made."""
        plain = without_prefix(weights, ("model.",))
        check_layers(self.family, self.layers, plain, "layers.{}.")
        check_shapes(self.family, plain, {
            "embeddings.tok_embeddings.weight": (self.vocab, self.hidden),
            "layers.0.attn.Wqkv.weight": (3 * self.hidden, self.hidden),
            "layers.0.mlp.Wi.weight": (2 * self.inner, self.hidden),
        })  # fmt: skip


def labels_tokens(found: dict[str, Any]) -> bool:
    """Whether a configuration is of a model that labels tokens, or marks an answer in a text."""
    kinds = found.get("architectures")
    return isinstance(kinds, list) and any(
        end in str(kind) for kind in kinds for end in ("ForTokenClassification", "ForQuestionAnswering")
    )


class ModernBertGraph(WeightBuilder):
    """Builds the graph of an encoder over inputs of symbolic size [B, S]."""

    def __init__(self, config: ModernBertConfig, weights: Weights, name: str = "modernbert") -> None:
        super().__init__(name, without_prefix(weights, ("model.",)))
        self.config = config
        self.batch, self.length = sym("B", 1), sym("S", 1, min(config.positions, LONGEST))
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
        for part, table in zip(
            ("cos", "sin"), RopeConfig(theta).tables(min(self.config.positions, LONGEST), size, size), strict=True
        ):
            self.bound[f"{name}.{part}"] = table
            found.append(ops.narrow(self.graph.param(f"{name}.{part}", table.shape, f32), 0, 0, self.length))
        return found

    def layer(self, x: Value, number: int) -> Value:
        c, at = self.config, f"layers.{number}."
        local = c.sees_near(number)
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
        return x + self.linear(activated(inner, c.activation) * gate, f"{at}mlp.Wo", c.hidden, c.inner)

    def head(self, x: Value) -> Value:
        """What stands before a classifier or a decoder."""
        c = self.config
        y = activated(self.linear(x, "head.dense", c.hidden, c.hidden), c.head_activation)
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
