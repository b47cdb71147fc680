"""Large models with random weights as GGUF files: a Llama in any block type, and a mixture of experts like Mixtral."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

DRAWN = 2048  # blocks that are encoded; tensors are drawn from them
BYTES = [f"<0x{i:02X}>" for i in range(256)]


class Packer:
    """Tensors of random weights in one block type, of a size that keeps a deep model calm."""

    def __init__(self, kind: str) -> None:
        from strata.ops.quant.gguf_blocks import block_format

        self.form, self.rng = block_format(kind), np.random.default_rng(0)
        numbers = self.rng.standard_normal((DRAWN, self.form.elements), np.float32)
        self.blocks = {}
        for scale in (0.01, 1.0):
            assert self.form.encode is not None
            self.blocks[scale] = self.form.encode(self.form, numbers * np.float32(scale), None).reshape(DRAWN, -1)

    def tensor(self, *shape: int, scale: float = 0.01) -> Any:
        from strata.io import GgufTensor

        count = int(np.prod(shape)) // self.form.elements
        blocks = self.blocks[scale][self.rng.integers(0, DRAWN, count)]
        return GgufTensor("", self.form.name, shape, blocks.reshape(*shape[:-1], -1))


def random_llama(
    path: Path,
    kind: str = "q4k",
    *,
    layers: int = 16,
    hidden: int = 2048,
    inner: int = 8192,
    vocab: int = 32000,
    experts: int = 0,
    chosen: int = 2,
) -> int:
    """A Llama with random weights, or a Mixtral where there are experts; returns the bytes that one token reads."""
    from strata.io import GgufTensor, save_gguf

    packer = Packer(kind)
    tensors: dict[str, Any] = {
        "token_embd.weight": packer.tensor(vocab, hidden, scale=1.0),  # tied: a token is most like itself
        "output_norm.weight": np.ones(hidden, np.float32),
    }
    for i in range(layers):
        at = f"blk.{i}."
        tensors |= {f"{at}{n}.weight": np.ones(hidden, np.float32) for n in ("attn_norm", "ffn_norm")}
        rows = {"attn_q": hidden, "attn_k": hidden // 4, "attn_v": hidden // 4, "attn_output": hidden}
        tensors |= {f"{at}{name}.weight": packer.tensor(n, hidden) for name, n in rows.items()}
        end, stack = ("_exps", (experts,)) if experts else ("", ())
        for name, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
            tensors[f"{at}ffn_{name}{end}.weight"] = packer.tensor(*stack, *shape)
        if experts:
            router = packer.rng.standard_normal((experts, hidden), np.float32) / np.float32(hidden**0.5)
            tensors[f"{at}ffn_gate_inp.weight"] = router
    sizes = {"embedding_length": hidden, "block_count": layers, "feed_forward_length": inner, "context_length": 2048,
             "attention.head_count": hidden // 64, "attention.head_count_kv": hidden // 256,
             "rope.dimension_count": 64, "vocab_size": vocab}  # fmt: skip
    sizes |= {"expert_count": experts, "expert_used_count": chosen} if experts else {}
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *(f"w{i}" for i in range(vocab - 259))]
    words = {"model": "llama", "tokens": tokens, "scores": np.zeros(vocab, np.float32), "bos_token_id": 1,
             "eos_token_id": 2, "token_type": np.array([2, 3, 3, *[6] * 256, *[1] * (vocab - 259)], np.int32),
             "add_bos_token": True}  # fmt: skip
    metadata: dict[str, Any] = {"general.architecture": "llama", "llama.attention.layer_norm_rms_epsilon": 1e-5}
    metadata |= {f"llama.{k}": v for k, v in sizes.items()} | {f"tokenizer.ggml.{k}": v for k, v in words.items()}
    held = path.with_suffix(f".{os.getpid()}")
    save_gguf(held, tensors, metadata)
    held.replace(path)
    blocks = {n: t.data.nbytes for n, t in tensors.items() if isinstance(t, GgufTensor)}
    return sum(b * chosen // experts if "_exps" in n else b for n, b in blocks.items())


def kept(folder: Path, kind: str, **sizes: int) -> Path:
    """A file of such a model, made once."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "-".join(["llama", kind, *(f"{k}{v}" for k, v in sizes.items())])
    path = path.with_suffix(".gguf")
    if not path.exists():
        random_llama(path, kind, **sizes)
    return path
