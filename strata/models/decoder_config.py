"""The configuration of Llama-like decoders: Llama, Mistral, Qwen2 and 3, SmolLM, Phi-3, Gemma 1 to 3.

Hugging Face's config.json and GGUF's metadata both become this record; the graph is built from it alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.errors import FileError
from strata.models.blocks.activations import activation_of
from strata.models.cached import Slot, kv_slots
from strata.models.config_values import (
    MOST_LAYERS,
    layer_count,
    mapping,
    of_layers,
    optional_real,
    real,
    reals,
    whole,
)
from strata.models.weights import Weights, check_layers, check_shapes
from strata.ops import RopeScaling, rope_frequencies, rope_tables

EPS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3", "gemma3_text", "smollm3")
# there are no windows unless use_sliding_window says so
ASKED_WINDOWS = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")
MEANT: dict[str, dict[str, Any]] = {  # by a config.json that leaves a key out, where a family means its own
    "mistral": dict(num_key_value_heads=8, sliding_window=4096),
    "qwen2": dict(sliding_window=4096, max_window_layers=28),
    "qwen3": dict(head_dim=128, sliding_window=4096, max_window_layers=28),
    "qwen2_moe": dict(sliding_window=4096, num_experts_per_tok=4),
    "qwen3_moe": dict(sliding_window=4096, num_experts_per_tok=8),
    "qwen3_next": dict(num_experts_per_tok=10),
    "olmoe": dict(num_experts_per_tok=8),
    "gpt_oss": dict(num_experts_per_tok=4),
    "glm4_moe": dict(num_experts_per_tok=8, num_key_value_heads=8),
    "deepseek_v3": dict(num_experts_per_tok=8, n_group=8, topk_group=4),
    "phi3": dict(rms_norm_eps=1e-5),
    "gemma": dict(head_dim=256, num_key_value_heads=16),
    "gemma2": dict(head_dim=256, num_key_value_heads=4, sliding_window=4096, query_pre_attn_scalar=256,
                   attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    "gemma3_text": dict(head_dim=256, num_attention_heads=8, num_key_value_heads=4, vocab_size=262208,
                        max_position_embeddings=131072, sliding_window=4096, sliding_window_pattern=6,
                        query_pre_attn_scalar=256, rope_theta=1e6, rope_local_base_freq=10000.0),
    "smollm3": dict(num_key_value_heads=4, rope_theta=2e6, tie_word_embeddings=True, no_rope_layer_interval=4),
    "olmo2": dict(rms_norm_eps=1e-5),
    "olmo3": dict(rms_norm_eps=1e-5, rope_theta=500000.0, sliding_window=4096, sliding_window_pattern=4),
    "cohere": dict(rope_theta=500000.0),
    "cohere2": dict(head_dim=128, sliding_window=4096, sliding_window_pattern=4),
    "glm": dict(head_dim=128, num_key_value_heads=2),
    "glm4": dict(head_dim=128, num_key_value_heads=2),
    "ernie4_5": dict(head_dim=128, num_key_value_heads=2, rope_theta=500000.0),
    "mixtral": dict(num_key_value_heads=8, rope_theta=1e6),
    "dots1": dict(sliding_window=4096, max_window_layers=62),
    "exaone4": dict(sliding_window=4096, sliding_window_pattern=4),
    "exaone_moe": dict(sliding_window=4096, sliding_window_pattern=4),
    "gemma3n_text": dict(num_key_value_heads=2, sliding_window=512, sliding_window_pattern=5, rope_theta=1e6,
                         rope_local_base_freq=10000.0, final_logit_softcapping=30.0),
    "ministral": dict(num_key_value_heads=8, sliding_window=4096),
    "ministral3": dict(num_key_value_heads=8),
    "seed_oss": dict(num_key_value_heads=8, head_dim=128),
    "cwm": dict(num_key_value_heads=8, head_dim=128, sliding_window=8192),
    "helium": dict(num_key_value_heads=20, head_dim=128),
    "internlm3": dict(num_key_value_heads=2, head_dim=128),
    "iquestcoder": dict(num_key_value_heads=8, head_dim=128),
    "nanochat": dict(final_logit_softcapping=15.0),
}  # fmt: skip


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions of one kind of layer: a base, and how it is stretched."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    long_factors: tuple[float, ...] = ()  # of Phi-3: a divisor for each pair, beyond the trained length and within it
    short_factors: tuple[float, ...] = ()
    trained_length: int = 0
    table_factor: float = 1.0
    long_table_factor: float | None = None  # where it differs beyond the trained length
    divisors: tuple[float, ...] = ()  # of a GGUF file's rope_freqs: for each pair, at any length

    def tables(self, length: int, head_dim: int, n_rot: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin f32[length, n_rot / 2]."""
        size, is_long = self.table_factor, length > self.trained_length
        if self.long_factors:
            factors = self.long_factors if is_long else self.short_factors
            size = self.long_table_factor if is_long and self.long_table_factor is not None else size
            rates = rope_frequencies(n_rot, self.theta) / np.asarray(factors)
        elif self.divisors:
            rates = rope_frequencies(n_rot, self.theta) / np.asarray(self.divisors)
        else:
            cos, sin = rope_tables(length, n_rot, theta=self.theta, scaling=self.scaling)
            return cos, sin
        angles = np.outer(np.arange(length), rates)
        return (np.cos(angles) * size).astype(np.float32), (np.sin(angles) * size).astype(np.float32)


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes and habits of a decoder."""

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    positions: int
    eps: float = 1e-5
    activation: str = "silu"
    n_rot: int = 0  # features of a head that are rotated; 0 is all
    rope: RopeConfig = RopeConfig()
    local_rope: RopeConfig | None = None  # of layers with a window, where it differs
    interleaved: bool = False  # pairs of neighbours are rotated, as in Cohere, and in GGUF files of Llama
    is_permuted: bool = False  # rows of q_proj and k_proj are in the order of such pairs: GGUF files of Llama
    windows: tuple[int | None, ...] = ()  # keys that layers see, in turn, None for all
    rope_layers: tuple[bool, ...] = ()  # whether each layer has rotary positions; empty is all
    norm: str = "rms"  # or "layer", which takes the mean off, too
    norm_offset: float = 0.0  # Gemma stores its norms' weights less 1
    embedding_scale: float = 1.0
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    has_outer_norms: bool = False  # Gemma 2 and 3: norms behind attention and feed-forward, too
    is_tied: bool = True
    is_gated: bool = True  # whether a gate is multiplied into the feed-forward
    is_parallel: bool = False  # attention and feed-forward both read the layer's input

    def __post_init__(self) -> None:
        sizes = (
            self.vocab,
            self.hidden,
            self.layers,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.inner,
            self.positions,
        )
        ok = min(sizes) > 0 and self.heads % self.kv_heads == 0 and self.head_dim % 2 == 0 and self.n_rot % 2 == 0
        if not ok or self.n_rot > self.head_dim:
            raise FileError(f"the configuration of the {self.family} makes no sense: {self}", code="F140")

    def check(self, weights: Weights) -> None:
        """Refuse weights that are not those of this configuration, by the sizes that decide how much is made."""
        check_layers(self.family, self.layers, weights, "layers.{}.")
        q, kv, at = self.heads * self.head_dim, self.kv_heads * self.head_dim, "layers.0."
        joined, gated = f"{at}self_attn.qkv_proj.weight", f"{at}mlp.gate_up_proj.weight"
        check_shapes(self.family, weights, {
            "embed_tokens.weight": (self.vocab, self.hidden),
            **({joined: (q + 2 * kv, self.hidden)} if joined in weights else {
                f"{at}self_attn.q_proj.weight": (q, self.hidden), f"{at}self_attn.k_proj.weight": (kv, self.hidden)}),
            **({gated: (2 * self.inner, self.hidden)} if gated in weights else {
                f"{at}mlp.up_proj.weight": (self.inner, self.hidden)} if f"{at}mlp.up_proj.weight" in weights else {}),
        })  # fmt: skip

    @property
    def stretched(self) -> int:
        """Tokens that positions can be stretched to: those of a dynamic rope follow from the context asked for."""
        scaling = self.rope.scaling
        return int(self.positions * scaling.factor) if scaling and scaling.kind == "dynamic" else self.positions

    @property
    def slots(self) -> tuple[Slot, ...]:
        """What is carried from step to step."""
        return kv_slots(range(self.layers), self.kv_heads, self.head_dim)

    @property
    def rotary_dim(self) -> int:
        return self.n_rot or self.head_dim

    def window(self, layer: int) -> int | None:
        return self.windows[layer % len(self.windows)] if self.windows else None


def with_defaults(found: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Settings, with those of a family where a key is missing or null."""
    return {**found, **{key: value for key, value in defaults.items() if found.get(key) is None}}


def meant(found: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, with what a family means by keys that are missing; what is null is none."""
    return {**MEANT.get(str(found.get("model_type")), {}), **found}


def from_json(found: dict[str, Any]) -> DecoderConfig:
    """From config.json, by the keys that all families of this line share."""
    family = found.get("model_type", "")
    if family == "gemma3" and "text_config" in found:
        found = {**mapping(found, "text_config"), "model_type": "gemma3_text"}
    found = meant(found)
    if found.get("use_bidirectional_attention"):
        raise FileError(
            "the configuration has use_bidirectional_attention = True, decoders look back only", code="F140"
        )
    heads, layers, hidden = (whole(found, k) for k in ("num_attention_heads", "num_hidden_layers", "hidden_size"))
    head_dim = whole(found, "head_dim", hidden // heads)
    gemma = family.startswith("gemma")
    rotary = mapping(found, "rope_parameters")
    rotary = rotary if rotary.get("partial_rotary_factor") is not None else found
    n_rot = int(head_dim * min(real(rotary, "partial_rotary_factor", 1.0, positive=False), 1.0))
    if n_rot < 0 or n_rot % 2:
        raise FileError(f"the configuration rotates {n_rot} features of a head, which are no pairs", code="F140")
    full, local = _ropes(family, found, n_rot)
    every = _rotary_layers(found, layers) if n_rot else (False,) * layer_count(found)
    scalar = optional_real(found, "query_pre_attn_scalar")
    key = "hidden_activation" if found.get("hidden_activation") is not None else "hidden_act"
    act = activation_of(found, key, "gelu_pytorch_tanh" if gemma else "silu")
    if family == "gemma" and act == "gelu":
        act = "gelu_tanh"  # what the released weights were trained with
    eps = next((key for key in EPS if found.get(key) is not None), EPS[0])
    return DecoderConfig(
        family, whole(found, "vocab_size"), hidden, layers, heads, whole(found, "num_key_value_heads", heads),
        head_dim, whole(found, "intermediate_size"), whole(found, "max_position_embeddings", 2048),
        eps=real(found, eps, 1e-6), activation=act,
        n_rot=n_rot, rope=full, local_rope=local, windows=_windows(family, found, layers),
        rope_layers=tuple(bool(t) for t in every) if every else (),
        norm_offset=1.0 if gemma else 0.0, embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        score_scale=scalar**-0.5 if scalar and family != "gemma" else None,
        score_cap=optional_real(found, "attn_logit_softcapping"),
        logit_cap=optional_real(found, "final_logit_softcapping"),
        has_outer_norms=family in ("gemma2", "gemma3", "gemma3_text"),
        is_tied=bool(found.get("tie_word_embeddings", gemma)),
    )  # fmt: skip


def listed_json(found: dict[str, Any]) -> DecoderConfig:
    """As `from_json`, for families that say something about each layer: there are not too many for a list of them."""
    layer_count(found)
    return from_json(found)


def _windows(family: str, found: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """The keys that layers see, in turn; empty where all see all."""
    if found.get("sliding_window") is None or (family in ASKED_WINDOWS and not found.get("use_sliding_window")):
        return ()
    window, kinds = whole(found, "sliding_window"), of_layers(found, "layer_types", layers)
    if kinds is None and found.get("max_window_layers") is not None:
        first = whole(found, "max_window_layers", least=0)  # the layers before it see all
        return tuple(window if i >= first else None for i in range(layer_count(found)))
    if kinds is None and family == "smollm3":
        return tuple(None if rotates else window for rotates in _rotary_layers(found, layers) or ())
    pattern = found.get("sliding_window_pattern")
    if kinds is None and isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return tuple(window if kind == "L" else None for kind in pattern)
    if kinds is None and isinstance(pattern, int) and pattern > 1:
        return (*[window] * (whole(found, "sliding_window_pattern", most=MOST_LAYERS) - 1), None)
    if kinds is None:
        return (window, None) if family == "gemma2" else (window,)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rotary_layers(found: Mapping[str, Any], layers: int) -> Sequence[Any] | None:
    """Whether each layer has rotary positions, where some may have none."""
    every = of_layers(found, "no_rope_layers", layers)
    if every is None and found.get("no_rope_layer_interval") is not None:
        step = whole(found, "no_rope_layer_interval")
        return [(i + 1) % step != 0 for i in range(layer_count(found))]
    return every


def _ropes(family: str, found: dict[str, Any], n_rot: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rope of full layers, and of local ones where the model tells them apart."""
    given = mapping(found, "rope_parameters")
    if "full_attention" in given:
        full = _rope(mapping(given, "full_attention"), found, n_rot)
        is_split = "sliding_attention" in given
        return full, _rope(mapping(given, "sliding_attention"), found, n_rot) if is_split else None
    settings = {"rope_theta": found.get("rope_theta"), **mapping(found, "rope_scaling"), **given}
    base = optional_real(found, "rope_theta" if family == "olmo3" else "rope_local_base_freq")
    return _rope(settings, found, n_rot), RopeConfig(base) if base else None


def _rope(settings: Mapping[str, Any], found: dict[str, Any], n_rot: int) -> RopeConfig:
    theta = real(settings, "rope_theta", real(found, "rope_theta", 10000.0))
    kind = settings.get("rope_type") or settings.get("type") or "default"
    longest = whole(found, "max_position_embeddings", 2048)
    key = "original_max_position_embeddings"
    trained = whole(settings, key, whole(found, key, longest))
    factor = real(settings, "factor", 1.0)
    match kind:
        case "default" | "mrope":  # the three positions of mrope are one in a text
            return RopeConfig(theta)
        case "linear" | "dynamic":
            return RopeConfig(theta, RopeScaling(kind, factor, trained))
        case "llama3":
            low, high = real(settings, "low_freq_factor"), real(settings, "high_freq_factor")
            if low >= high:
                raise FileError(
                    f"the configuration has low_freq_factor = {low} and high_freq_factor = {high}", code="F140"
                )
            return RopeConfig(theta, RopeScaling("llama3", factor, trained, low, high))
        case "yarn":
            if theta <= 1:
                raise FileError(f"the configuration has rope_theta = {theta}, yarn needs one above 1", code="F140")
            return RopeConfig(theta, RopeScaling("yarn", factor, trained, beta_fast=real(settings, "beta_fast", 32.0),
                                           beta_slow=real(settings, "beta_slow", 1.0),
                                           attention_factor=yarn_factor(settings, factor),
                                           truncate=bool(settings.get("truncate", True))))  # fmt: skip
        case "longrope" | "su":
            ratio = longest / trained if settings.get("factor") is None else factor
            size = optional_real(settings, "attention_factor")
            if size is None:
                size = math.sqrt(1 + math.log(ratio) / math.log(trained)) if ratio > 1 and trained > 1 else 1.0
            long, short = reals(settings, "long_factor"), reals(settings, "short_factor")
            if not len(long) == len(short) == n_rot // 2:
                raise FileError(
                    f"rope factors for {len(long)} and {len(short)} pairs, a head has {n_rot // 2}", code="F140"
                )
            return RopeConfig(theta, None, long, short, trained, size)
    raise FileError(
        f"rope scaling {kind!r} is not one of default, linear, dynamic, llama3, yarn, longrope, mrope", code="F140"
    )


def yarn_scale(factor: float, mscale: float) -> float:
    """What yarn multiplies scores by, as factors of queries and of keys."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_factor(settings: Mapping[str, Any], factor: float) -> float | None:
    """What the tables of yarn are multiplied by; None is its own choice."""
    given, of_all = optional_real(settings, "mscale"), optional_real(settings, "mscale_all_dim")
    if settings.get("attention_factor") is None and given and of_all:
        return yarn_scale(factor, given) / yarn_scale(factor, of_all)
    return optional_real(settings, "attention_factor")


def from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Any], *, known: Sequence[str] = FAMILIES,
    inner: int | None = None,
) -> DecoderConfig:  # fmt: skip
    """From the metadata of a GGUF file; `inner` is the width of feed-forwards that the file says nothing about."""
    family = str(metadata.get("general.architecture"))
    if family not in known:
        raise FileError(f"gguf: {family!r} is not a family of decoders: {', '.join(known)}", code="F144")
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise FileError("gguf: there is no matrix token_embd.weight", code="F142")

    def size(key: str, default: int | None = None, least: int = 1) -> int:
        return whole(metadata, f"{family}.{key}", default, least=least)

    def number(key: str, default: float) -> float:
        return real(metadata, f"{family}.{key}", default)

    heads, hidden, layers = size("attention.head_count"), size("embedding_length"), size("block_count")
    check_layers("gguf", layers, tensors, "blk.{}.")
    head_dim = size("attention.key_length", max(hidden // heads, 1))
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    factor = number("rope.scaling.factor", 1.0)
    trained = size("rope.scaling.original_context_length", size("context_length"))
    theta, n_rot = number("rope.freq_base", 10000.0), size("rope.dimension_count", head_dim)
    scaling = RopeScaling(kind, factor, trained) if kind in ("linear", "yarn") and factor != 1 else None
    stretch = tensors.get("rope_freqs.weight")
    divisors = tuple(float(x) for x in stretch.dequantize().reshape(-1)) if stretch is not None else ()
    if (divisors and len(divisors) != n_rot // 2) or not all(0 < d < math.inf for d in divisors) or theta <= 1:
        raise FileError(
            f"gguf: rope has {len(divisors)} factors and the base {theta} for {n_rot // 2} pairs", code="F140"
        )
    window = size("attention.sliding_window", 0, least=0)
    gemma = family.startswith("gemma")
    period = {"gemma2": 2, "gemma3": 6}.get(family, 1)
    sees = () if not window else (window,) if period == 1 else (*[window] * (period - 1), None)
    return DecoderConfig(
        family, int(table.shape[0]), hidden, layers, heads, size("attention.head_count_kv", heads), head_dim,
        size("feed_forward_length", inner), size("context_length"),
        eps=number("attention.layer_norm_rms_epsilon", 1e-5), activation="gelu_tanh" if gemma else "silu",
        n_rot=n_rot, rope=RopeConfig(theta, scaling, divisors=divisors),
        local_rope=RopeConfig(10000.0) if family == "gemma3" else None,
        interleaved=(neighbours := family in ("llama", "mistral", "smollm3")), is_permuted=neighbours,
        windows=sees, embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        score_cap=50.0 if family == "gemma2" else None, logit_cap=30.0 if family == "gemma2" else None,
        has_outer_norms=family in ("gemma2", "gemma3"), is_tied="output.weight" not in tensors,
    )  # fmt: skip
