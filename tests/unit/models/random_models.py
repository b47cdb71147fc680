"""Random models of every family of decoders, made by transformers: the oracle of several tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64, rope_theta=10000.0)  # fmt: skip
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=10000.0)
LINEAR = dict(rope_type="linear", factor=2.0, rope_theta=500.0)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "phi3": ("Phi3", {}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20}),
    "smollm3": ("SmolLM3", {}),
}


def random_model(folder: Path, name: str, **more: Any) -> Any:
    """A random model of a family, saved to a folder."""
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = dict(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=1, eos_token_id=2)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    else:
        family, extra = FAMILIES[name]
        kind = getattr(transformers, f"{family}{'Text' if family == 'Gemma3' else ''}Config")
        model = getattr(transformers, f"{family}ForCausalLM")(kind(**{**SIZES, **extra, **more}))
    for p in model.parameters():
        if p.ndim > 1:
            p.data.mul_(3.0)  # logits of a few units, so that an error shows
    model.eval().save_pretrained(folder)
    return model


def reference_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        found: np.ndarray = model(torch.tensor(ids).long()).logits.numpy()
    return found
