"""One record for the decoders of the Llama line: Llama, Mistral, Qwen2 and 3, SmolLM, Phi-3, Gemma 1 to 3.

Hugging Face's config.json and GGUF's metadata both become this record; the graph is built from it alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.errors import FileError
from strata.ops import RopeScaling, rope_frequencies, rope_tables

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3", "gemma3_text", "smollm3")


@dataclass(frozen=True)
class Rope:
    """Rotary positions of one kind of layer: a base, and how it is stretched."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    long_factors: tuple[float, ...] = ()  # of Phi-3: a divisor for each pair, beyond the trained length and within it
    short_factors: tuple[float, ...] = ()
    trained_length: int = 0
    table_factor: float = 1.0
    divisors: tuple[float, ...] = ()  # of a GGUF file's rope_freqs: for each pair, at any length

    def tables(self, length: int, head_dim: int, n_rot: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin f32[length, n_rot / 2]."""
        if self.long_factors:
            factors = self.long_factors if length > self.trained_length else self.short_factors
            rates = rope_frequencies(n_rot, self.theta) / np.asarray(factors)
        elif self.divisors:
            rates = rope_frequencies(n_rot, self.theta) / np.asarray(self.divisors)
        else:
            cos, sin = rope_tables(length, n_rot, theta=self.theta, scaling=self.scaling)
            return cos, sin
        angles = np.outer(np.arange(length), rates)
        return (np.cos(angles) * self.table_factor).astype(np.float32), (np.sin(angles) * self.table_factor).astype(
            np.float32
        )


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
    n_rot: int = 0  # features of a head that turn; 0 is all
    rope: Rope = Rope()
    local_rope: Rope | None = None  # of layers with a window, where it differs
    interleaved: bool = False  # pairs of neighbours turn, as in GGUF files of Llama
    windows: tuple[int | None, ...] = ()  # keys that each layer sees, None for all
    turns: tuple[bool, ...] = ()  # whether each layer has rotary positions; empty is all
    norm_offset: float = 0.0  # Gemma stores its norms' weights less 1
    embedding_scale: float = 1.0
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    has_outer_norms: bool = False  # Gemma 2 and 3: norms behind attention and feed-forward, too
    is_tied: bool = True

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

    @property
    def turning(self) -> int:
        return self.n_rot or self.head_dim

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None


def from_json(found: dict[str, Any]) -> DecoderConfig:
    """From config.json."""
    family = found.get("model_type", "")
    if family == "gemma3" and "text_config" in found:
        found = {**found["text_config"], "model_type": "gemma3_text"}
    if family not in FAMILIES:
        raise FileError(f"{family!r} is no family of decoders: {', '.join(FAMILIES)}", code="F144")
    try:
        return _from_json(family, found)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"the configuration of a {family} lacks or spoils {error}", code="F140") from None


def _from_json(family: str, found: dict[str, Any]) -> DecoderConfig:
    heads, layers, hidden = (int(found[k]) for k in ("num_attention_heads", "num_hidden_layers", "hidden_size"))
    head_dim = int(found.get("head_dim") or hidden // heads)
    gemma = family.startswith("gemma")
    part = (
        found.get("partial_rotary_factor") or (found.get("rope_parameters") or {}).get("partial_rotary_factor") or 1.0
    )
    full, local = _ropes(found, int(head_dim * float(part)) // 2 * 2)
    kinds = found.get("layer_types")
    every = found.get("no_rope_layers")
    window = found.get("sliding_window")
    if family == "qwen2" and not found.get("use_sliding_window"):
        window = None
    sees: tuple[int | None, ...] = ()
    if window is not None:
        if kinds is None and family == "gemma2":
            kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
        local_layer = [k == "sliding_attention" for k in kinds] if kinds else [True] * layers
        sees = tuple(int(window) if l else None for l in local_layer)
    scalar = found.get("query_pre_attn_scalar")
    act = found.get("hidden_activation") or found.get("hidden_act") or ("gelu_pytorch_tanh" if gemma else "silu")
    if family == "gemma" and act == "gelu":
        act = "gelu_pytorch_tanh"  # what the released weights were trained with
    return DecoderConfig(
        family, int(found["vocab_size"]), hidden, layers, heads,
        int(found.get("num_key_value_heads") or heads), head_dim, int(found["intermediate_size"]),
        int(found.get("max_position_embeddings", 2048)),
        eps=float(found.get("rms_norm_eps", 1e-6)), activation="gelu_tanh" if "tanh" in act else act,
        n_rot=int(head_dim * float(part)) // 2 * 2, rope=full, local_rope=local, windows=sees,
        turns=tuple(bool(t) for t in every) if every else (),
        norm_offset=1.0 if gemma else 0.0, embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        score_scale=float(scalar) ** -0.5 if scalar and family != "gemma" else None,
        score_cap=found.get("attn_logit_softcapping"), logit_cap=found.get("final_logit_softcapping"),
        has_outer_norms=family in ("gemma2", "gemma3", "gemma3_text"),
        is_tied=bool(found.get("tie_word_embeddings", gemma)),
    )  # fmt: skip


def _ropes(found: dict[str, Any], n_rot: int) -> tuple[Rope, Rope | None]:
    """The rope of full layers, and of local ones where the model tells them apart."""
    given = found.get("rope_parameters") or {}
    if "full_attention" in given:
        full = _rope(given["full_attention"], found, n_rot)
        return full, _rope(given["sliding_attention"], found, n_rot) if "sliding_attention" in given else None
    settings = {**(found.get("rope_scaling") or {}), **given}
    settings.setdefault("rope_theta", found.get("rope_theta", 10000.0))
    base = found.get("rope_local_base_freq")
    return _rope(settings, found, n_rot), Rope(float(base)) if base else None


def _rope(settings: Mapping[str, Any], found: dict[str, Any], n_rot: int) -> Rope:
    theta = float(settings.get("rope_theta") or found.get("rope_theta") or 10000.0)
    kind = settings.get("rope_type") or settings.get("type") or "default"
    trained = int(settings.get("original_max_position_embeddings") or found.get("original_max_position_embeddings")
                  or found.get("max_position_embeddings", 2048))  # fmt: skip
    factor = float(settings.get("factor") or 1.0)
    match kind:
        case "default":
            return Rope(theta)
        case "linear" | "dynamic":
            return Rope(theta, RopeScaling(kind, factor, trained))
        case "llama3":
            low, high = float(settings["low_freq_factor"]), float(settings["high_freq_factor"])
            return Rope(theta, RopeScaling("llama3", factor, trained, low, high))
        case "yarn":
            given = settings.get("attention_factor")
            fast, slow = float(settings.get("beta_fast") or 32), float(settings.get("beta_slow") or 1)
            return Rope(theta, RopeScaling("yarn", factor, trained, beta_fast=fast, beta_slow=slow,
                                                attention_factor=None if given is None else float(given)))  # fmt: skip
        case "longrope" | "su":
            ratio = int(found.get("max_position_embeddings", trained)) / trained
            ratio = ratio if settings.get("factor") is None else factor
            size = settings.get("attention_factor")
            if size is None:
                size = math.sqrt(1 + math.log(ratio) / math.log(trained)) if ratio > 1 else 1.0
            long, short = (tuple(map(float, settings[f"{w}_factor"])) for w in ("long", "short"))
            if not len(long) == len(short) == n_rot // 2:
                raise FileError(
                    f"rope factors for {len(long)} and {len(short)} pairs, a head has {n_rot // 2}", code="F140"
                )
            return Rope(theta, None, long, short, trained, float(size))
    raise FileError(f"rope scaling {kind!r} is none of default, linear, dynamic, llama3, yarn, longrope", code="F140")


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderConfig:
    """From the metadata of a GGUF file."""
    family = metadata.get("general.architecture")
    if family not in FAMILIES:
        raise FileError(f"gguf: {family!r} is no family of decoders: {', '.join(FAMILIES)}", code="F144")

    def get(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{family}.{key}", default)
        if found is None:
            raise FileError(f"gguf: the metadata have no {family}.{key}", code="F140")
        if not isinstance(found, (int, float)):
            raise FileError(f"gguf: {family}.{key} is {type(found).__name__}, a number is needed", code="F140")
        return found

    heads, hidden, layers = int(get("attention.head_count")), int(get("embedding_length")), int(get("block_count"))
    head_dim = int(get("attention.key_length", hidden // max(heads, 1)))
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2 or layers > 4096:
        raise FileError("gguf: there is no matrix token_embd.weight", code="F142")
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    factor = float(get("rope.scaling.factor", 1.0))
    trained = int(get("rope.scaling.original_context_length", get("context_length")))
    scaling = RopeScaling(kind, factor, trained) if kind in ("linear", "yarn") and factor != 1 else None
    stretch = tensors.get("rope_freqs.weight")
    divisors = tuple(float(x) for x in stretch.dequantize().reshape(-1)) if stretch is not None else ()
    window = int(get("attention.sliding_window", 0))
    gemma = family.startswith("gemma")
    period = {"gemma2": 2, "gemma3": 6}.get(family, 1)
    sees = tuple(window if period == 1 or (i + 1) % period else None for i in range(layers)) if window else ()
    return DecoderConfig(
        family, int(table.shape[0]), hidden, layers, heads, int(get("attention.head_count_kv", heads)), head_dim,
        int(get("feed_forward_length")), int(get("context_length")),
        eps=float(get("attention.layer_norm_rms_epsilon", 1e-5)), activation="gelu_tanh" if gemma else "silu",
        n_rot=int(get("rope.dimension_count", head_dim)),
        rope=Rope(float(get("rope.freq_base", 10000.0)), scaling, divisors=divisors),
        local_rope=Rope(10000.0) if family == "gemma3" else None, interleaved=family in ("llama", "mistral", "smollm3"),
        windows=sees, embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        score_cap=50.0 if family == "gemma2" else None, logit_cap=30.0 if family == "gemma2" else None,
        has_outer_norms=family in ("gemma2", "gemma3"), is_tied="output.weight" not in tensors,
    )  # fmt: skip
