"""BERT, RoBERTa, ELECTRA, DistilBERT: encoders for embeddings and classification, for any batch and length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from strata.core import bool_, f32, i32, sym
from strata.errors import FileError
from strata.mir import Value, constant
from strata.models.blocks.activations import activated, activation_of
from strata.models.config_values import real, text, whole
from strata.models.encoders.modernbert import ModernBertConfig, ModernBertGraph, labels_tokens
from strata.models.weights import WeightBuilder, Weights, check_layers, check_shapes, ops, without_prefix


@runtime_checkable
class EncoderSizes(Protocol):
    """The configuration of an encoder, as far as its results need it."""

    @property
    def family(self) -> str: ...

    @property
    def hidden(self) -> int: ...

    @property
    def vocab(self) -> int: ...

    @property
    def types(self) -> int:
        """Of tokens, such as the first text and the second."""

    @property
    def labels(self) -> int: ...

    @property
    def is_per_token(self) -> bool:
        """Whether labels are those of tokens."""

    @property
    def longest(self) -> int:
        """Tokens that there are positions for."""


@dataclass(frozen=True)
class BertConfig:
    """The sizes of an encoder, under one set of names for all families."""

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    inner: int
    positions: int
    types: int
    eps: float
    activation: str
    labels: int = 0
    is_per_token: bool = False  # labels of tokens, not of texts
    first: int = 0  # position of the first token: the ones before it are those of padding
    embedded: int = 0  # features of embeddings, where these are not those of layers

    @property
    def longest(self) -> int:
        """Tokens that there are positions for."""
        return self.positions - self.first

    @classmethod
    def from_json(cls, found: dict[str, Any], labels: int = 0) -> BertConfig:
        """From config.json of a BERT, a RoBERTa or a DistilBERT."""
        family = found.get("model_type", "bert")
        usual = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act")
        names = {"distilbert": ("dim", "n_layers", "n_heads", "hidden_dim", "activation")}.get(family, usual)
        if family not in NAMES:
            raise FileError(f"{family!r} is not a family of encoders: {', '.join(NAMES)}", code="F144")
        hidden, layers, heads, inner, activation = names
        kind = text(found, "position_embedding_type", "absolute")
        if kind != "absolute" or found.get("is_decoder"):
            key, value = ("position_embedding_type", kind) if kind != "absolute" else ("is_decoder", True)
            raise FileError(f"the configuration has {key} = {value!r}, which encoders here do not have", code="F140")
        size = whole(found, hidden)
        made = cls(
            family, whole(found, "vocab_size"), size, whole(found, layers), whole(found, heads),
            whole(found, inner, 4 * size), whole(found, "max_position_embeddings", 512),
            whole(found, "type_vocab_size", 2, least=0) if family in TYPED else 0,
            real(found, "layer_norm_eps", 1e-12), activation_of(found, activation), labels, labels_tokens(found),
            whole(found, "pad_token_id", 1, least=0) + 1 if family in SHIFTED else 0,
            whole(found, "embedding_size", size) if family == "electra" else 0,
        )  # fmt: skip
        if made.hidden % made.heads or made.longest < 1:
            raise FileError(f"the configuration has {made.hidden} features for {made.heads} heads", code="F140")
        return made

    def check(self, weights: Weights) -> None:
        """Refuse weights that are not those of this configuration, by the sizes that decide how much is made."""
        names, plain = NAMES[self.family], encoder_weights(weights)
        check_layers(self.family, self.layers, plain, names["layer"])
        first = names["layer"].format(0)
        tables = {"word": self.vocab, "position": self.positions, "token_type": self.types}
        check_shapes(self.family, plain, {
            **{f"embeddings.{t}_embeddings.weight": (n, self.embedded or self.hidden) for t, n in tables.items() if n},
            f"{first}{names['up']}.weight": (self.inner, self.hidden),
        })  # fmt: skip


# weight names by role, with the layer's number left open
BERT = {
    "layer": "encoder.layer.{}.", "q": "attention.self.query", "k": "attention.self.key",
    "v": "attention.self.value", "o": "attention.output.dense", "norm1": "attention.output.LayerNorm",
    "up": "intermediate.dense", "down": "output.dense", "norm2": "output.LayerNorm",
}  # fmt: skip
SHIFTED = ("roberta", "xlm-roberta", "camembert", "mpnet")  # families whose first positions are those of padding
TYPED = ("bert", "roberta", "xlm-roberta", "camembert", "electra")  # families with types of tokens
NAMES = {
    "bert": BERT, "roberta": BERT, "xlm-roberta": BERT, "camembert": BERT, "electra": BERT,
    "mpnet": {
        **BERT, "q": "attention.attn.q", "k": "attention.attn.k", "v": "attention.attn.v", "o": "attention.attn.o",
        "norm1": "attention.LayerNorm",
    },
    "distilbert": {
        "layer": "transformer.layer.{}.", "q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin",
        "o": "attention.out_lin", "norm1": "sa_layer_norm", "up": "ffn.lin1", "down": "ffn.lin2",
        "norm2": "output_layer_norm",
    },
}  # fmt: skip


def encoder_weights(weights: Weights) -> Weights:
    """The weights under their plain names; old checkpoints call a norm's scale gamma and its shift beta."""
    plain = without_prefix(weights, ("bert.", "distilbert.", "roberta.", "mpnet.", "electra."))
    renamed = {"gamma": "weight", "beta": "bias"}
    return {f"{n.rpartition('.')[0]}.{renamed[n.rpartition('.')[2]]}" if n.rpartition(".")[2] in renamed else n: t
            for n, t in plain.items()}  # fmt: skip


class BertGraph(WeightBuilder):
    """Builds the graph of an encoder over inputs of symbolic size [B, S]."""

    def __init__(self, config: BertConfig, weights: Weights, name: str = "bert") -> None:
        super().__init__(name, encoder_weights(weights))
        self.config = config
        self.batch, self.length = sym("B", 1), sym("S", 1, config.longest)
        self.ids = self.graph.input("input_ids", (self.batch, self.length), i32)
        self.mask = self.graph.input("attention_mask", (self.batch, self.length), bool_)

    def embeddings(self, types: Value | None) -> Value:
        """Word, position and type embeddings, normalised."""
        c = self.config
        width = c.embedded or c.hidden
        x = self.embedding(self.ids, "embeddings.word_embeddings.weight", c.vocab, width)
        places = self.param("embeddings.position_embeddings.weight", (c.positions, width))
        places = ops.narrow(places, 0, c.first, self.length)
        if c.types:
            table = self.param("embeddings.token_type_embeddings.weight", (c.types, width))
            kind = table[0] if types is None else ops.take(table, types, axis=0)
            x = x + (places + kind)
        else:
            x = x + places
        x = self.layer_norm(x, "embeddings.LayerNorm", width, c.eps)
        return x if width == c.hidden else self.linear(x, "embeddings_project", c.hidden, width)

    def layer(self, x: Value, number: int) -> Value:
        """LN(x + attention), then LN(x + feed-forward)."""
        c = self.config
        names = NAMES[c.family]
        at = names["layer"].format(number)
        q, k, v = (self.linear(x, at + names[role], c.hidden, c.hidden) for role in "qkv")
        mixed = self.mixed(q, k, v, at)
        x = self.layer_norm(
            x + self.linear(mixed, at + names["o"], c.hidden, c.hidden), at + names["norm1"], c.hidden, c.eps
        )
        return self.layer_norm(
            x + self.linear(self.inner(x, at), at + names["down"], c.hidden, c.inner),
            at + names["norm2"],
            c.hidden,
            c.eps,
        )

    def mixed(self, q: Value, k: Value, v: Value, at: str) -> Value:
        """Attention of projections [B, S, H · D] among the tokens that count."""
        c = self.config
        kept = ops.reshape(self.mask, (self.batch, 1, 1, self.length))
        return ops.attention(q, k, v, kept, num_heads=c.heads, kv_heads=c.heads, mask_kind="custom", layout="bsd")

    def inner(self, x: Value, at: str) -> Value:
        """The first half of the feed-forward."""
        c = self.config
        return activated(self.linear(x, at + NAMES[c.family]["up"], c.inner, c.hidden), c.activation)

    def encoded(self, types: Value | None = None) -> Value:
        x = self.embeddings(types)
        for i in range(self.config.layers):
            x = self.layer(x, i)
        return x


def graph_of(config: EncoderSizes, weights: Weights, name: str) -> BertGraph | ModernBertGraph:
    """An encoder under construction."""
    if isinstance(config, ModernBertConfig):
        return ModernBertGraph(config, weights, name)
    make: Callable[..., Any] = GRAPHS.get(config.family, BertGraph)
    found: BertGraph = make(config, weights, name)
    return found


GRAPHS: dict[str, Callable[..., Any]] = {}  # of families that are not built as BERT is; each enters its own


def build_encoder(config: EncoderSizes, weights: Weights) -> tuple[BertGraph | ModernBertGraph, tuple[str, ...]]:
    """The whole encoder: hidden states, and where the weights have a head its pooled state and logits."""
    b = graph_of(config, weights, config.family)
    types = b.graph.input("token_type_ids", (b.batch, b.length), i32) if config.types else None
    x = b.encoded(types)
    outputs, names = [x], ["last_hidden_state"]
    first = ops.reshape(ops.narrow(x, 1, 0, 1), (b.batch, config.hidden))
    if b.has("pooler.dense.weight"):
        act = ops.gelu if config.family == "deberta-v2" else ops.tanh
        first = act(b.linear(first, "pooler.dense", config.hidden, config.hidden))
        outputs.append(first)
        names.append("pooler_output")
    if b.has("pre_classifier.weight"):
        first = ops.relu(b.linear(first, "pre_classifier", config.hidden, config.hidden))
    if isinstance(b, ModernBertGraph) and b.has("head.dense.weight"):
        if not config.labels:
            outputs.append(b.words(x))
            names.append("logits")
        first = b.head(pooled(x, b.mask, b.config.head_pooling, normalize=False))
    if b.has("classifier.weight") and config.labels:
        read = first
        if config.is_per_token:
            read = b.head(x) if isinstance(b, ModernBertGraph) else x
        outputs.append(b.linear(read, "classifier", config.labels, config.hidden))
        names.append("logits")
    if b.has("classifier.out_proj.weight") and config.labels:
        act = ops.gelu if config.family == "electra" else ops.tanh
        inner = act(b.linear(first, "classifier.dense", config.hidden, config.hidden))
        outputs.append(b.linear(inner, "classifier.out_proj", config.labels, config.hidden))
        names.append("logits")
    b.graph.outputs(*outputs)
    return b, tuple(names)


def build_embedder(
    config: EncoderSizes, weights: Weights, pooling: str, normalize: bool
) -> BertGraph | ModernBertGraph:
    """One vector for each row of ids."""
    b = graph_of(config, weights, "embed")
    b.graph.outputs(pooled(b.encoded(), b.mask, pooling, normalize))
    return b


def pooled(x: Value, mask: Value, kind: str, normalize: bool, total: Value | None = None) -> Value:
    """Token vectors [B, S, H] as one vector a row: the mean or maximum of those kept, the first, or the last.

    Where tokens are weighted, `total` [B, 1] is the sum of their weights, which means divide by.
    """
    batch, length, width = x.shape
    keep = ops.cast(mask, f32)
    match kind:
        case "mean":
            out = ops.sum(x * ops.insert_axis(keep, -1), 1) / _count(keep, total)
        case "mean_sqrt_len":
            out = ops.sum(x * ops.insert_axis(keep, -1), 1) / ops.sqrt(_count(keep, total))
        case "weightedmean":  # later tokens count more
            place = ops.reshape(ops.iota((length,), 0, i32), (1, length))
            weight = keep * (ops.cast(place, f32) + 1.0)
            total = ops.sum(weight, 1, keepdims=True) if total is None else total
            out = ops.sum(x * ops.insert_axis(weight, -1), 1) / ops.maximum(total, 1e-9)
        case "max":
            out = ops.max(ops.where(ops.insert_axis(mask, -1), x, ops.full(x.shape, -3.0e38)), 1)
        case "cls":
            out = ops.reshape(ops.narrow(x, 1, 0, 1), (batch, width))
        case "first":  # of those kept, which the first of all need not be
            place = ops.broadcast_to(ops.reshape(ops.iota((length,), 0, i32), (1, length)), (batch, length))
            first = ops.min(ops.where(mask, place, ops.full(place.shape, 1 << 30, i32)), 1, keepdims=True)
            out = ops.sum(x * ops.insert_axis(ops.cast(ops.equal(place, first), f32), -1), 1)
        case "last":
            place = ops.reshape(ops.iota((length,), 0, i32), (1, length))
            last = ops.max(
                ops.where(mask, ops.broadcast_to(place, (batch, length)), constant(0, i32)), 1, keepdims=True
            )
            out = ops.sum(x * ops.insert_axis(ops.cast(ops.equal(place, last), f32), -1), 1)
        case _:
            known = "mean, mean_sqrt_len, weightedmean, max, cls, last"
            raise FileError(f"pooling {kind!r} is not one of {known}", code="F145")
    return unit(out) if normalize else out


def _count(keep: Value, total: Value | None) -> Value:
    """What a mean divides by: how many tokens are kept, or the sum of their weights."""
    return ops.maximum(ops.sum(keep, 1, keepdims=True), 1.0) if total is None else ops.maximum(total, 1e-9)


def unit(x: Value) -> Value:
    """Rows of length 1."""
    size = ops.sqrt(ops.sum(x * x, -1, keepdims=True))
    return x / ops.maximum(size, 1e-12)
