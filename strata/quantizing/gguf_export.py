"""A decoder's folder as the tensors and keys of a GGUF file: names, sizes, rotary positions, the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from strata.core import read_text
from strata.errors import FileError
from strata.models import read_json
from strata.ops import rope_frequencies

ARCHITECTURES: Final = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma",
                        "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "smollm3": "smollm3"}  # fmt: skip
PAIRED: Final = ("llama", "smollm3")  # whose rotary positions turn neighbours
NAMES: Final = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "pre_feedforward_layernorm": "ffn_norm",
}  # fmt: skip
OUTER: Final = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
NORMAL, CONTROL, USER, BYTE = 1, 3, 4, 6  # kinds of tokens
SPLITS: Final = {r"\p{N}{1,3}": "llama-bpe", r"|\p{N}|": "qwen2"}  # what tells regular expressions apart


def architecture(model: Any) -> str:
    """The name that GGUF has for the family of a decoder."""
    family = getattr(model.config, "family", "")
    if family not in ARCHITECTURES:
        raise FileError(
            f"quantize: models of the kind {family!r} have no GGUF form here; {', '.join(ARCHITECTURES)} have",
            code="F158",
        )
    return ARCHITECTURES[family]


def gguf_name(name: str, has_outer_norms: bool) -> str:
    """The name in a GGUF file of a weight under its plain Hugging Face name."""
    base, _, end = name.rpartition(".")
    if base in OUTER:
        return f"{OUTER[base]}.{end}"
    parts = base.split(".", 2)
    if len(parts) == 3 and parts[0] == "layers":
        known = NAMES | {"post_attention_layernorm": "post_attention_norm" if has_outer_norms else "ffn_norm"}
        if parts[2] in known:
            return f"blk.{parts[1]}.{known[parts[2]]}.{end}"
    raise FileError(f"quantize: {name!r} has no name in a GGUF file", code="F158")


def with_pairs_adjacent(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys with the rotary pairs side by side."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def arranged(model: Any, name: str, array: np.ndarray) -> np.ndarray:
    """A weight as a GGUF file has it."""
    config = model.config
    part = name.rpartition(".")[0].rpartition(".")[2]
    if architecture(model) in PAIRED and not config.is_permuted and part in ("q_proj", "k_proj"):
        return with_pairs_adjacent(array, config.heads if part == "q_proj" else config.kv_heads)
    if config.norm_offset and "norm" in part:
        return (array.astype(np.float32) + np.float32(config.norm_offset)).astype(np.float32)
    return array


def model_keys(model: Any) -> dict[str, Any]:
    """The keys of the sizes and habits of a decoder."""
    c, family = model.config, architecture(model)
    keys: dict[str, Any] = {
        "block_count": c.layers, "context_length": c.positions, "embedding_length": c.hidden,
        "feed_forward_length": c.inner, "attention.head_count": c.heads, "attention.head_count_kv": c.kv_heads,
        "attention.layer_norm_rms_epsilon": np.float32(c.eps), "rope.freq_base": np.float32(c.rope.theta),
        "rope.dimension_count": c.rotary_dim, "vocab_size": c.vocab,
    }  # fmt: skip
    if c.head_dim != c.hidden // c.heads or family in ("gemma", "gemma2", "gemma3"):
        keys |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    window = next((w for w in c.windows if w), None)
    if window:
        keys["attention.sliding_window"] = window
    if c.score_cap:
        keys["attn_logit_softcapping"] = np.float32(c.score_cap)
    if c.logit_cap:
        keys["final_logit_softcapping"] = np.float32(c.logit_cap)
    scaling = c.rope.scaling
    if scaling is not None and scaling.kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": scaling.kind, "rope.scaling.factor": np.float32(scaling.factor),
                 "rope.scaling.original_context_length": scaling.original_length}  # fmt: skip
    return {"general.architecture": family} | {f"{family}.{key}": value for key, value in keys.items()}


def rope_divisors(model: Any) -> np.ndarray | None:
    """What each pair's rate is divided by, where llama3's stretch asks for it."""
    rope = model.config.rope
    if rope.long_factors or rope.scaling is None or rope.scaling.kind != "llama3":
        return None
    plain = rope_frequencies(model.config.rotary_dim, rope.theta)
    rates, _ = rope.scaling.frequencies(model.config.rotary_dim, rope.theta, model.config.positions)
    found: np.ndarray = (plain / rates).astype(np.float32)
    return found


# ---------------------------------------------------------------------------------------------------------- vocabulary


def vocabulary_keys(folder: Path, vocab: int) -> dict[str, Any]:
    """The keys of the tokenizer of a folder."""
    if not (folder / "tokenizer.json").exists():
        raise FileError(f"quantize: {folder} has no tokenizer.json", code="F158")
    file = read_json(folder / "tokenizer.json")
    model = file.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        kind = model.get("type") if isinstance(model, dict) else None
        raise FileError(f"quantize: a tokenizer of the kind {kind!r} has no GGUF form here; BPE has", code="F158")
    added = [t for t in file.get("added_tokens", ()) if isinstance(t, dict)]
    tokens, kinds = [f"[PAD{i}]" for i in range(vocab)], [5] * vocab
    for text, at in model["vocab"].items():
        if at < vocab:
            tokens[at], kinds[at] = text, NORMAL
    for token in added:
        at = token.get("id", vocab)
        if at < vocab:
            tokens[at], kinds[at] = token.get("content", ""), CONTROL if token.get("special") else USER
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", ())]
    is_byte_level = "ByteLevel" in json.dumps(file.get("pre_tokenizer")) + json.dumps(file.get("decoder"))
    keys: dict[str, Any] = {"tokens": tokens}
    if is_byte_level:
        keys |= {"model": "gpt2", "pre": _split_name(file), "merges": merges}
    else:
        keys |= _sentence_piece(tokens, kinds, merges)
    keys["token_type"] = np.array(kinds, np.int32)
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()} | _special(folder, file, tokens)


def _split_name(file: Mapping[str, Any]) -> str:
    """Which of the splits that readers of GGUF know is the tokenizer's."""
    text = json.dumps(file.get("pre_tokenizer"), ensure_ascii=False).replace("\\\\", "\\")
    for mark, name in SPLITS.items():
        if mark in text:
            return name
    return "smollm" if '"Digits"' in text else "gpt-2"


def _sentence_piece(tokens: list[str], kinds: list[int], merges: list[str]) -> dict[str, Any]:
    """Scores follow the merges: what is merged first scores highest."""
    rank = {merge.replace(" ", ""): i for i, merge in enumerate(merges)}
    scores = np.array([-float(rank.get(token, len(rank) + i)) for i, token in enumerate(tokens)], np.float32)
    for i, token in enumerate(tokens):
        if kinds[i] == NORMAL and len(token) == 6 and token.startswith("<0x"):
            kinds[i] = BYTE
    return {"model": "llama", "pre": "default", "scores": scores}


def _special(folder: Path, file: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).exists():
            settings |= {k: v for k, v in read_json(folder / name).items() if v is not None}
    place = {token: i for i, token in enumerate(tokens)}
    keys: dict[str, Any] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        given = settings.get(f"{name}_token_id")
        given = given[0] if isinstance(given, list) and given else given
        text = settings.get(f"{name}_token")
        text = text.get("content") if isinstance(text, dict) else text
        found = given if type(given) is int else place.get(text) if isinstance(text, str) else None
        if found is not None and 0 <= found < len(tokens):
            keys[f"tokenizer.ggml.{key}_token_id"] = found
    keys["tokenizer.ggml.add_bos_token"] = "TemplateProcessing" in json.dumps(file.get("post_processor"))
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        template = read_text(folder / "chat_template.jinja")
    if isinstance(template, str):
        keys["tokenizer.chat_template"] = template
    return keys
