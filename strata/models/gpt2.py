"""GPT-2: learned positions, layer norms, one projection for queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strata.errors import FileError
from strata.mir import Value
from strata.models.blocks.activations import activated, activation_of
from strata.models.cached import DECODERS, CachedGraph, CacheSizes, DecoderFamily, Layout, Slot, kv_slots
from strata.models.config_values import real, whole
from strata.models.weights import Weights, check_layers, check_shapes, ops, without_prefix


@dataclass(frozen=True)
class Gpt2Config:
    """The sizes of a GPT-2."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    inner: int
    positions: int
    eps: float
    activation: str
    family: str = "gpt2"
    is_scaled: bool = True  # scores, by the root of a head's size
    is_scaled_by_layer: bool = False  # and by the number of the layer

    def score_scale(self, layer: int) -> float | None:
        """What scores of a layer are multiplied by; None is the usual."""
        if self.is_scaled and not self.is_scaled_by_layer:
            return None
        return (self.head_dim**-0.5 if self.is_scaled else 1.0) / (layer + 1 if self.is_scaled_by_layer else 1)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Gpt2Config:
        hidden = whole(found, "n_embd")
        made = cls(
            whole(found, "vocab_size"), hidden, whole(found, "n_layer"), whole(found, "n_head"),
            whole(found, "n_inner", 4 * hidden), whole(found, "n_positions"),
            real(found, "layer_norm_epsilon", 1e-5),
            activation_of(found, "activation_function", "gelu_new"),
            is_scaled=bool(found.get("scale_attn_weights", True)),
            is_scaled_by_layer=bool(found.get("scale_attn_by_inverse_layer_idx", False)),
        )  # fmt: skip
        if hidden % made.heads:
            raise FileError(f"the configuration has {hidden} features for {made.heads} heads", code="F140")
        return made

    def check(self, weights: Weights) -> None:
        """Refuse weights that are not those of this configuration, by the sizes that decide how much is made."""
        check_layers(self.family, self.layers, weights, "h.{}.")
        check_shapes(self.family, weights, {
            "wte.weight": (self.vocab, self.hidden), "wpe.weight": (self.positions, self.hidden),
            "h.0.mlp.c_fc.weight": (self.hidden, self.inner),
        })  # fmt: skip

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def slots(self) -> tuple[Slot, ...]:
        return kv_slots(range(self.layers), self.heads, self.head_dim)


class Gpt2Graph(CachedGraph):
    """Builds the graph of a GPT-2. Its matrices are stored [in, out]."""

    def __init__(
        self, config: Gpt2Config, weights: Weights, length: int, *, every: bool = False, layout: Layout = "plain"
    ) -> None:
        sizes = CacheSizes(config.layers, config.heads, config.heads, config.head_dim)
        plain = without_prefix(weights, ("transformer.",))
        super().__init__("decoder", plain, sizes, length, every=every, layout=layout)
        self.config = config

    def layer(self, x: Value, number: int) -> Value:
        c, at = self.config, f"h.{number}."
        both = self.linear(
            self.layer_norm(x, f"{at}ln_1", c.hidden, c.eps),
            f"{at}attn.c_attn",
            3 * c.hidden,
            c.hidden,
            transposed=False,
        )
        q, k, v = (ops.narrow(both, -1, i * c.hidden, c.hidden) for i in range(3))
        mixed = self.attend(number, q, k, v, scale=c.score_scale(number))
        x = x + self.linear(mixed, f"{at}attn.c_proj", c.hidden, c.hidden, transposed=False)
        y = self.linear(
            self.layer_norm(x, f"{at}ln_2", c.hidden, c.eps), f"{at}mlp.c_fc", c.inner, c.hidden, transposed=False
        )
        return x + self.linear(activated(y, c.activation), f"{at}mlp.c_proj", c.hidden, c.inner, transposed=False)

    def build(self) -> Gpt2Graph:
        c = self.config
        x = self.embedding(self.ids, "wte.weight", c.vocab, c.hidden)
        x = x + ops.take(self.param("wpe.weight", (c.positions, c.hidden)), self.positions, axis=0)
        for i in range(c.layers):
            x = self.layer(x, i)
        x = self.layer_norm(self.asked(x), "ln_f", c.hidden, c.eps)
        self.finish(self.linear(x, "lm_head" if self.has("lm_head.weight") else "wte", c.vocab, c.hidden, bias=False))
        return self


DECODERS["gpt2"] = DecoderFamily(
    Gpt2Config.from_json, Gpt2Graph, lambda found: without_prefix(found, ("transformer.",))
)
