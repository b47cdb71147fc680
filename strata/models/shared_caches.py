"""Gemma 3n and 4: the last layers attend to the caches of others, and layers read inputs of their own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from strata.errors import FileError
from strata.mir import Value
from strata.models.cached import Slot, kv_slots
from strata.models.decoder_config import DecoderConfig
from strata.models.llama import LlamaGraph
from strata.models.weights import ops


@dataclass(frozen=True)
class SharedConfig(DecoderConfig):
    """The sizes of a decoder whose last layers have no caches."""

    shared: int = 0  # layers at the end that attend to the caches of others
    shares_keys: bool = False  # whether layers without a window have values that are their keys
    own_width: int = 0  # of what a layer reads of a token
    own_vocab: int = 1

    def sizes(self, layer: int) -> tuple[int, int]:
        """The width of a head, and how many of keys there are."""
        del layer
        return self.head_dim, self.kv_heads

    def source(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to: of the same kind, the last that has its own."""
        first = self.layers - self.shared
        if layer < first:
            return layer
        return next(i for i in reversed(range(first)) if (self.window(i) is None) == (self.window(layer) is None))

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(
            s for i in range(self.layers - self.shared) for s in kv_slots([i], self.sizes(i)[1], self.sizes(i)[0])
        )

    def with_sources(self) -> Self:
        """These sizes, where each layer has a source."""
        kinds = {self.window(i) is None for i in range(self.layers - self.shared)}
        if not all((self.window(i) is None) in kinds for i in range(self.layers)):
            raise FileError(f"the configuration has num_kv_shared_layers = {self.shared} of {self.layers} layers, "
                            "before which each kind of layer has to be", code="F140")  # fmt: skip
        return self


class SharedGraph(LlamaGraph):
    """Builds the graph of a decoder whose last layers have no caches."""

    config: SharedConfig
    own: Value  # what each layer reads of each token, [B, S, layers, width]

    def attention(self, x: Value, layer: int) -> Value:
        c, at, source = self.config, f"layers.{layer}.self_attn.", self.config.source(layer)
        (size, count), window = c.sizes(layer), c.window(layer)
        q = self.placed(self.linear(x, f"{at}q_proj", c.heads * size, c.hidden), f"{at}q_norm", c.heads, layer)
        fields: dict[str, Any] = dict(window=None if window is None else window - 1, scale=c.score_scale)
        if source != layer:
            mixed = self.attend_to(source, q, **fields)
        else:
            parts = "k" if c.shares_keys and window is None else "kv"
            found = self.linears(x, [f"{at}{p}_proj" for p in parts], (count * size,) * len(parts), c.hidden)
            k, v = found[0], found[-1]
            heads = ops.reshape(v, (self.batch, self.count, count, size))
            v = ops.reshape(ops.rms_norm(heads, eps=c.eps), v.shape)
            mixed = self.attend(layer, q, self.placed(k, f"{at}k_norm", count, layer), v, **fields)
        return self.linear(mixed, f"{at}o_proj", c.hidden, c.heads * size)

    def inputs_of_layers(self, x: Value) -> Value:
        """What each layer reads of each token, of the token and of its embedding."""
        c = self.config
        shape, wide = (self.batch, self.count, c.layers, c.own_width), c.layers * c.own_width
        made = ops.reshape(self.linear(x, "per_layer_model_projection", wide, c.hidden) * c.hidden**-0.5, shape)
        made = self.norm(made, "per_layer_projection_norm", c.own_width)
        ids = ops.where(self.ids < c.own_vocab, self.ids, 0)
        rows = self.embedding(ids, "embed_tokens_per_layer.weight", c.own_vocab, wide)
        found: Value = (made + ops.reshape(rows, shape) * c.own_width**0.5) * math.sqrt(0.5)
        return found

    def read_own(self, x: Value, layer: int) -> Value:
        """What a layer makes of its own input."""
        c, at = self.config, f"layers.{layer}."
        part = ops.reshape(ops.narrow(self.own, 2, layer, 1), (self.batch, self.count, c.own_width))
        gate = self.activated(self.linear(x, f"{at}per_layer_input_gate", c.own_width, c.hidden)) * part
        more = self.linear(gate, f"{at}per_layer_projection", c.hidden, c.own_width)
        return self.norm(more, f"{at}post_per_layer_input_norm", c.hidden)
