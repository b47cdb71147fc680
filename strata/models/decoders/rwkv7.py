"""RWKV-7: no attention, a state of constant size for each layer, with a decay and a delta rule for each feature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.errors import FileError
from strata.io import GgufTensor
from strata.mir import Value
from strata.models.cached import DECODERS, CacheSizes, DecoderFamily, Layout, Slot
from strata.models.config_values import layer_count, real, text, whole
from strata.models.decoders.recurrent import ENDLESS, RecurrentGraph
from strata.models.weights import Weights, check_layers, check_shapes, ops, without_prefix

MIXED = "rwkvag"  # what is made of a token and the one before it, in the order of checkpoints that pack the shares
RANKS = {"w": "decay", "a": "a", "v": "v", "g": "gate"}  # of low-rank layers, by the name of their setting
SLOWEST = math.exp(-0.5)  # the most that a decay's logarithm is below 0
TINY = 1e-12  # the least length of a key that is made one of length 1


@dataclass(frozen=True)
class Rwkv7Config:
    """The sizes of an RWKV-7."""

    family: str
    vocab: int
    hidden: int
    layers: int
    inner: int
    heads: int
    value_dim: int  # of a head; its keys have hidden / heads
    ranks: tuple[tuple[str, int | None], ...]  # None is what the weights have
    eps: float = 1e-5
    has_first_norm: bool = True  # of the embeddings
    positions: int = ENDLESS

    @property
    def key_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def slots(self) -> tuple[Slot, ...]:
        state = (self.heads, self.key_dim, self.value_dim)
        kinds = (("before", (1, self.hidden)), ("inner", (1, self.hidden)), ("state", state))
        return tuple(Slot(f"{kind}{i}", shape, is_fixed=True) for i in range(self.layers) for kind, shape in kinds)

    def check(self, weights: Weights) -> None:
        check_layers(self.family, self.layers, weights, "layers.{}.")
        check_shapes(self.family, weights, {
            "embeddings.weight": (self.vocab, self.hidden), "layers.0.attn.r_k": (self.heads, self.key_dim),
            "layers.0.ffn.key.weight": (self.inner, self.hidden),
        })  # fmt: skip


def rwkv7_config(found: dict[str, Any]) -> Rwkv7Config:
    """From config.json."""
    hidden = whole(found, "hidden_size")
    heads = whole(found, "num_heads", max(1, hidden // whole(found, "head_dim", 64)))
    values = found.get("value_dim")
    if isinstance(values, list) and values and all(v == values[0] for v in values):
        values = values[0]
    wide = whole({"value_dim": values}, "value_dim", hidden)
    if hidden % heads or wide % heads:
        raise FileError(f"the configuration has {hidden} features and {wide} values for {heads} heads", code="F140")
    if found.get("attn") is not None:
        raise FileError("the configuration of the RWKV-7 asks for layers with attention, which are not known",
                        code="F144")  # fmt: skip
    if (act := text(found, "hidden_act", "sqrelu")) != "sqrelu":
        raise FileError(f"the configuration of the RWKV-7 has hidden_act = {act!r:.60}, not 'sqrelu'", code="F140")
    ranks = tuple((k, whole(found, f"{v}_low_rank_dim", 0, least=0) or None) for k, v in RANKS.items())
    return Rwkv7Config(
        "rwkv7", whole(found, "vocab_size"), hidden, layer_count(found),
        whole(found, "intermediate_size", int(real(found, "hidden_ratio", 4.0) * hidden)), heads, wide // heads,
        ranks, eps=real(found, "norm_eps", 1e-5), has_first_norm=bool(found.get("norm_first", True)),
    )  # fmt: skip


class Rwkv7Graph(RecurrentGraph):
    """Builds the graph of an RWKV-7."""

    def __init__(
        self, config: Rwkv7Config, weights: Weights, length: int, *, every: bool = False, layout: Layout = "plain"
    ) -> None:
        none = CacheSizes(0, 1, 1, 2)
        super().__init__("decoder", weights, none, length, every=every, layout=layout, slots=config.slots)
        self.config = config
        self.ranks = dict(config.ranks)

    def norm(self, x: Value, name: str) -> Value:
        return self.layer_norm(x, name, self.config.hidden, self.config.eps)

    def low_rank(self, x: Value, at: str, kind: str, width: int) -> Value:
        """A layer through few features; of decays with a tanh between, of gates with a sigmoid."""
        name, hidden = f"{at}{kind}_lora.lora.", self.config.hidden
        held = self.weights.get(f"{name}0.weight")
        rank = self.ranks[kind] or (1 if held is None else int(held.shape[0]))
        x = self.linear(x, f"{name}0", rank, hidden)
        between = {"w": ops.tanh, "g": ops.sigmoid}.get(kind)
        return self.linear(x if between is None else between(x), f"{name}2", width, rank)

    def split(self, x: Value, size: int) -> Value:
        return ops.reshape(x, (self.batch, self.count, self.config.heads, size))

    def mixer(self, x: Value, layer: int, first: Value | None) -> tuple[Value, Value]:
        """What a layer adds, and the values of the first layer, which all others mix with their own."""
        c, at = self.config, f"layers.{layer}.attn."
        keys, values = c.hidden, c.heads * c.value_dim
        change = self.before(x, f"before{layer}") - x
        r, w, k, v, a, g = (x + change * self.param(f"{at}x_{kind}", (c.hidden,)) for kind in MIXED)
        if layer:
            share = ops.sigmoid(self.low_rank(v, at, "v", values))
        r, k = self.linear(r, f"{at}r_proj", keys, c.hidden), self.linear(k, f"{at}k_proj", keys, c.hidden)
        v = self.linear(v, f"{at}v_proj", values, c.hidden)
        if first is None:
            first = v
        else:
            v = v + (first - v) * share
        decay = ops.exp(-SLOWEST * ops.sigmoid(self.low_rank(w, at, "w", keys)))
        rate = ops.sigmoid(self.low_rank(a, at, "a", keys))
        removed = self.split(k * self.param(f"{at}k_k", (keys,)), c.key_dim)
        length = ops.sqrt(ops.sum(removed * removed, -1, keepdims=True))
        removed = removed / ops.maximum(length, TINY)
        k = k + k * (rate - 1.0) * self.param(f"{at}k_a", (keys,))
        r, k, decay, rate = (self.split(y, c.key_dim) for y in (r, k, decay, rate))
        v = self.split(v, c.value_dim)
        y = self.vector_scan(r, decay, k, v, -removed, removed * rate, f"state{layer}")
        y = ops.layer_norm(y, eps=c.key_dim * c.eps)
        for name, act in (("weight", ops.mul), ("bias", ops.add)):
            if self.has(f"{at}g_norm.{name}"):
                y = act(y, ops.reshape(self.param(f"{at}g_norm.{name}", (values,)), (c.heads, c.value_dim)))
        y = y + ops.sum(r * k * self.param(f"{at}r_k", (c.heads, c.key_dim)), -1, keepdims=True) * v
        y = ops.reshape(y, (self.batch, self.count, values)) * self.low_rank(g, at, "g", values)
        return self.linear(y, f"{at}o_proj", c.hidden, values), first

    def feed_forward(self, x: Value, layer: int) -> Value:
        c, at = self.config, f"layers.{layer}.ffn."
        x = x + (self.before(x, f"inner{layer}") - x) * self.param(f"{at}x_k", (c.hidden,))
        x = ops.relu(self.linear(x, f"{at}key", c.inner, c.hidden))
        return self.linear(x * x, f"{at}value", c.hidden, c.inner)

    def build(self) -> Rwkv7Graph:
        c = self.config
        x = self.embedding(self.ids, "embeddings.weight", c.vocab, c.hidden)
        x = self.norm(x, "layers.0.pre_norm") if c.has_first_norm else x
        first = None
        for i in range(c.layers):
            mixed, first = self.mixer(self.norm(x, f"layers.{i}.attn_norm"), i, first)
            x = x + mixed
            x = x + self.feed_forward(self.norm(x, f"layers.{i}.ffn_norm"), i)
        head = "lm_head" if self.has("lm_head.weight") else "embeddings"
        self.finish(self.linear(self.norm(self.asked(x), "norm"), head, c.vocab, c.hidden))
        return self


def rwkv7_names(weights: Weights) -> dict[str, np.ndarray | GgufTensor]:
    """Shares of the token before as vectors; older checkpoints pack six of them."""
    found: dict[str, np.ndarray | GgufTensor] = {}
    for name, tensor in without_prefix(weights, ("model.",)).items():
        at, _, last = name.rpartition(".")
        if last == "x_x" and isinstance(tensor, np.ndarray) and len(tensor) == len(MIXED):
            found |= {f"{at}.x_{kind}": tensor[i].reshape(-1) for i, kind in enumerate(MIXED)}
        elif last.startswith("x_") and isinstance(tensor, np.ndarray):
            found[name] = tensor.reshape(-1)
        else:
            found[name] = tensor
    return found


DECODERS.update(dict.fromkeys(("rwkv7", "rwkv7_fla"), DecoderFamily(rwkv7_config, Rwkv7Graph, rwkv7_names)))
