"""What a user of `generate` waits for: Llama of 1.1 billion random bf16 weights, token by token on a device.

    python -m benchmarks.device_decode [--device cuda] [--tokens 256] [--layers 22]

Prints a JSON row: seconds to load and to the first token, tokens a second (the median of parts of 32).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16

import strata as st
from strata.models import Sampler

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PROMPT, PART = 128, 32


def folder(path: Path, layers: int) -> Path:
    """Weights of .016 to .031 in size with random signs: any bits that bf16 has there."""
    width, inner, shared = 2048, 5632, 256
    shapes = {"model.embed_tokens": (32000, width), "lm_head": (32000, width), "model.norm": (width,)}
    for layer in range(layers):
        here = f"model.layers.{layer}"
        shapes |= {f"{here}.self_attn.{n}_proj": (width, width) for n in "qo"}
        shapes |= {f"{here}.self_attn.{n}_proj": (shared, width) for n in "kv"}
        shapes |= {f"{here}.mlp.{n}_proj": (inner, width) for n in ("gate", "up")}
        shapes |= {f"{here}.mlp.down_proj": (width, inner)}
        shapes |= {f"{here}.{n}_layernorm": (width,) for n in ("input", "post_attention")}
    rng = np.random.default_rng(0)
    weights = {
        f"{name}.weight": ((rng.integers(0, 1 << 16, shape, dtype=np.uint16) & 0x807F) | 0x3C80).view(bfloat16)
        for name, shape in shapes.items()
    }
    (path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}), "utf-8")
    st.io.save_safetensors(path / "model.safetensors", weights)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, default=22)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        path = folder(Path(made), given.layers)
        begin = time.perf_counter()
        model = st.load(path, device=given.device)
        loaded = time.perf_counter()
        prompt = np.random.default_rng(1).integers(3, 32000, PROMPT).tolist()
        times = []
        for _ in model.tokens(prompt, given.tokens, Sampler()):
            times.append(time.perf_counter())
        parts = [PART / (b - a) for a, b in zip(times[PART::PART], times[2 * PART :: PART], strict=False)]
        row = {
            "model": f"Llama of {given.layers} layers, bf16", "device": given.device,
            "load_s": round(loaded - begin, 2), "first_token_s": round(times[0] - loaded, 2),
            "tokens_s": round(statistics.median(parts), 1), "best": round(max(parts), 1), "tokens": len(times),
        }  # fmt: skip
        print(json.dumps(row))


if __name__ == "__main__":
    main()
