"""Mixtures of experts in GGUF files: the logits of the same model as a folder, and quantised experts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.io import quantized_tensor, save_gguf
from strata.models import Decoder, load
from strata.models.decoders.gguf_moe import NAMES
from strata.models.llama import GGUF_NAMES
from tests.unit.models.decoder_vectors import prompt, unpacked, weight
from tests.unit.models.test_decoder_vectors import KNOWN

ARCHITECTURES = {"mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe"}
PARTS = {"w1": "gate", "w3": "up", "w2": "down"}


def turned(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q_proj and k_proj as Llama's GGUF files have them: halves of heads become neighbours."""
    return w.reshape(heads, 2, -1, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def gguf_file(path: Path, name: str, kind: str | None) -> None:
    """A stored model as a GGUF file; its experts' first matrices are quantised."""
    c, arch = KNOWN[name]["config"], ARCHITECTURES[name]
    back = {v: k for k, v in {**GGUF_NAMES, **NAMES, "ffn_norm": "post_attention_layernorm"}.items()}
    tensors: dict[str, Any] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for key, shape in unpacked(KNOWN[name]["weights"]).items():
        w, short = weight(key, shape), key.removeprefix("model.").replace("block_sparse_moe.", "mlp.")
        outer = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}.get(short.split(".")[0])
        if outer:
            tensors[f"{outer}.weight"] = w
            continue
        match = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", short)
        assert match is not None
        layer, inner, end = match.groups()
        part = re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)", inner)
        if part:
            kind_of = PARTS.get(part[2], part[2].removesuffix("_proj"))
            experts.setdefault(f"blk.{layer}.ffn_{kind_of}_exps.weight", {})[int(part[1])] = w
            continue
        heads = {"self_attn.q_proj": c["num_attention_heads"], "self_attn.k_proj": c["num_key_value_heads"]}.get(inner)
        w = turned(w, heads) if heads and arch == "llama" else w
        tensors[f"blk.{layer}.{back[inner]}.{end}"] = w[0] if inner.endswith("shared_expert_gate") else w
    for key, rows in experts.items():
        stack = np.stack([rows[i] for i in range(len(rows))])
        tensors[key] = stack if kind is None or "down" in key else quantized_tensor(key, stack, kind)
    sizes = {
        "embedding_length": c["hidden_size"], "block_count": c["num_hidden_layers"], "context_length": 64,
        "feed_forward_length": c["intermediate_size"], "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"], "expert_used_count": c["num_experts_per_tok"],
        "expert_count": next(c[k] for k in ("num_experts", "num_local_experts") if k in c),
        "expert_feed_forward_length": c.get("moe_intermediate_size", c["intermediate_size"]),
        "attention.key_length": c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"], "rope.freq_base": c["rope_parameters"]["rope_theta"],
    }  # fmt: skip
    sizes |= {"attention.clamp_kqv": c["clip_qkv"]} if "clip_qkv" in c else {}
    save_gguf(path, tensors, {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in sizes.items()}})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_experts_of_gguf_files(name: str, tmp_path: Path) -> None:
    wanted, ids = np.array(KNOWN[name]["logits"]), prompt()
    for kind, limit in ((None, 2e-4), ("q8_0", 0.03)):
        gguf_file(tmp_path / "m.gguf", name, kind)
        model: Decoder = load(tmp_path / "m.gguf")
        found = model.step(model.start(), ids)[0]
        assert np.abs(found - wanted).max() <= limit * np.abs(wanted).max()
        state = model.start()
        for i in range(ids.shape[1]):
            found = model.step(state, np.ascontiguousarray(ids[:, i : i + 1]))[0]
        assert np.abs(found - wanted).max() <= limit * np.abs(wanted).max()
