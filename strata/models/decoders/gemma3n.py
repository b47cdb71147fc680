"""Gemma 3n (text): several streams of which one is computed (AltUp), inputs of each layer, caches that layers share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from strata.errors import FileError
from strata.mir import Value
from strata.models.cached import DECODERS, DecoderFamily
from strata.models.config_values import layer_count, mapping, of_layers, real, whole
from strata.models.decoder_config import from_json, with_defaults
from strata.models.llama import plain_names
from strata.models.shared_caches import SharedConfig, SharedGraph
from strata.models.weights import Weights, check_shapes, ops

SPARSITY = "activation_sparsity_pattern"


@dataclass(frozen=True)
class Gemma3nConfig(SharedConfig):
    """The sizes of a Gemma 3n."""

    inners: tuple[int, ...] = ()  # of each layer's feed-forward
    sparsity: tuple[float, ...] = ()  # of each layer's gate
    streams: int = 4
    active: int = 0
    laurel: int = 64
    has_scale: bool = True

    def check(self, weights: Weights) -> None:
        super().check(weights)
        check_shapes(self.family, weights, {"layers.0.altup.modality_router.weight": (self.streams, self.hidden)})


def gemma3n_config(found: dict[str, Any]) -> Gemma3nConfig:
    """From config.json of the text model, or of one that sees and hears, too."""
    found = {**mapping(found, "text_config"), "model_type": "gemma3n_text"} if "text_config" in found else found
    layers = layer_count(found)

    def each(key: str) -> list[dict[str, Any]]:
        """A setting of each layer, from a list or from one that all have."""
        given = found.get(key) or None
        listed = of_layers(found, key, layers) if isinstance(given, list) else [given] * layers
        return [{key: x} for x in listed or ()]

    inners = [whole(x, "intermediate_size") for x in each("intermediate_size")]
    sparse = [real(x, SPARSITY, 0.0, positive=False) for x in each(SPARSITY)]
    if not all(0 <= x < 1 for x in sparse):
        raise FileError(f"the configuration has the sparsities {sparse}", code="F140")
    made = from_json(with_defaults({**found, "intermediate_size": inners[0]}, rms_norm_eps=1e-6, head_dim=256))
    config = Gemma3nConfig(**{
        **vars(made), "inners": tuple(inners), "sparsity": tuple(sparse), "norm_offset": 0.0, "score_scale": 1.0,
        "streams": whole(found, "altup_num_inputs", 4), "active": whole(found, "altup_active_idx", 0, least=0),
        "laurel": whole(found, "laurel_rank", 64), "own_width": whole(found, "hidden_size_per_layer_input", 256),
        "own_vocab": whole(found, "vocab_size_per_layer_input", 262144),
        "shared": whole(found, "num_kv_shared_layers", 15, least=0),
        "has_scale": bool(found.get("altup_correct_scale", True)),
    })  # fmt: skip
    if config.active >= config.streams:
        raise FileError(f"the configuration has altup_active_idx = {config.active} of {config.streams} streams",
                        code="F140")  # fmt: skip
    return config.with_sources()


class Gemma3nGraph(SharedGraph):
    """Builds the graph of a Gemma 3n."""

    config: Gemma3nConfig

    def feed_forward(self, x: Value, layer: int) -> Value:
        c, at, inner = self.config, f"layers.{layer}.mlp.", self.config.inners[layer]
        gate, up = self.linears(x, [f"{at}gate_proj", f"{at}up_proj"], (inner, inner), c.hidden)
        if c.sparsity[layer] > 0:
            mean = ops.mean(gate, -1, keepdims=True)
            spread = ops.sqrt(ops.mean((gate - mean) * (gate - mean), -1, keepdims=True))
            gate = ops.relu(gate - mean - spread * NormalDist().inv_cdf(c.sparsity[layer]))
        return self.linear(self.activated(gate) * up, f"{at}down_proj", c.hidden, inner)

    def modes(self, x: Value, at: str) -> Value:
        c = self.config
        routed = self.norm(x, f"{at}router_norm", c.hidden) / c.hidden
        return ops.tanh(self.linear(routed, f"{at}modality_router", c.streams, c.hidden))

    def streams(self, xs: list[Value], number: int) -> list[Value]:
        """One layer: all streams are predicted, the active one is computed, and corrects the others."""
        c, at, n = self.config, f"layers.{number}.", self.config.streams
        coefficients = self.linear(self.modes(xs[c.active], f"{at}altup."), f"{at}altup.prediction_coefs", n * n, n)
        guesses = [
            xs[i] + sum((xs[j] * ops.narrow(coefficients, -1, i * n + j, 1) for j in range(1, n)),
                        xs[0] * ops.narrow(coefficients, -1, i * n, 1)) for i in range(n)
        ]  # fmt: skip
        active = guesses[c.active]
        normal = self.norm(active, f"{at}input_layernorm", c.hidden)
        left = self.linear(normal, f"{at}laurel.linear_left", c.laurel, c.hidden)
        right = self.linear(left, f"{at}laurel.linear_right", c.hidden, c.laurel)
        laurel = normal + self.norm(right, f"{at}laurel.post_laurel_norm", c.hidden)
        mixed = active + self.norm(self.attention(normal, number), f"{at}post_attention_layernorm", c.hidden)
        mixed = (mixed + laurel) * (1 / math.sqrt(2))
        inner = self.feed_forward(self.norm(mixed, f"{at}pre_feedforward_layernorm", c.hidden), number)
        made = mixed + self.norm(inner, f"{at}post_feedforward_layernorm", c.hidden)
        weights = self.linear(self.modes(made, f"{at}altup."), f"{at}altup.correction_coefs", n, n) + 1.0
        found = [guess + (made - active) * ops.narrow(weights, -1, i, 1) for i, guess in enumerate(guesses)]
        first = found[c.active]
        if c.has_scale:
            first = first * self.param(f"{at}altup.correct_output_scale", (c.hidden,))
        more = self.read_own(first, number)
        return [found[0], *(x + more for x in found[1:])]

    def scaled(self, x: Value, like: Value) -> Value:
        size = ops.sqrt(ops.maximum(ops.mean(x * x, -1, keepdims=True), 1e-5))
        return x * ops.sqrt(ops.mean(like * like, -1, keepdims=True)) / size

    def build(self) -> Gemma3nGraph:
        c = self.config
        x = self.embedding(self.ids, "embed_tokens.weight", c.vocab, c.hidden) * c.embedding_scale
        self.own = self.inputs_of_layers(x)
        names = [f"{i}" for i in range(c.streams - 1)]
        xs = [x, *(self.scaled(self.linear(x, f"altup_projections.{i}", c.hidden, c.hidden), x) for i in names)]
        for i in range(c.layers):
            xs = self.streams(xs, i)
        mean, *others = [self.asked(x) for x in xs]
        first = mean
        for name, x in zip(names, others, strict=True):
            mean = mean + self.scaled(self.linear(x, f"altup_unembed_projections.{name}", c.hidden, c.hidden), first)
        self.finish(self.logits(mean * (1 / c.streams)))
        return self


DECODERS.update(dict.fromkeys(("gemma3n", "gemma3n_text"), DecoderFamily(gemma3n_config, Gemma3nGraph, plain_names)))
