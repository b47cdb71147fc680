"""Vectors of small encoders of every family, as transformers computes them.

`python -m tests.unit.models.encoder_vectors` writes encoder_vectors.json, where transformers is installed. Weights
follow from their names, so that only the names, the configuration and the vectors are kept.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_suffix(".json")
LENGTHS = (5, 17, 9)  # tokens of the rows of a batch
SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 66,
}  # fmt: skip
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {}, "electra": {"embedding_size": 20}, "mpnet": {}, "nomic_bert": {}, "gte": {},
    "roberta": {"type_vocab_size": 1, "pad_token_id": 1},
    "xlm-roberta": {"type_vocab_size": 1, "pad_token_id": 1},
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8, "pad_token_id": 0},
    "deberta-v2": {**DEBERTA, "position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True,
                   "position_biased_input": False, "type_vocab_size": 0, "conv_kernel_size": 3, "conv_act": "gelu"},
    "deberta-v2 plain": {**DEBERTA, "type_vocab_size": 2},
}  # fmt: skip


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A weight that follows from its name; scales of norms are near 1."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape) * 0.08
    is_scale = len(shape) == 1 and name.endswith("weight")
    return (drawn + is_scale).astype(np.float32)


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Ids of rows of several lengths, and which of them count."""
    rng = np.random.default_rng(0)
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    return np.where(mask, rng.integers(3, SIZES["vocab_size"], mask.shape), 1), mask


def main() -> None:
    """Write what transformers computes."""
    import torch
    from transformers import AutoConfig, AutoModel  # type: ignore[import-not-found,unused-ignore]

    found = {}
    ids, mask = batch()
    for name, own in FAMILIES.items():
        config = AutoConfig.for_model(name.split()[0], **{**SIZES, **own})
        model = AutoModel.from_config(config).eval()
        state = {k: torch.tensor(weight(k, tuple(v.shape))) for k, v in model.state_dict().items()}
        model.load_state_dict(state)
        with torch.no_grad():
            out = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask.astype(int))).last_hidden_state
        mean = (out.numpy() * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
        kept = {k: v for k, v in json.loads(config.to_json_string(use_diff=False)).items() if v is not None}
        found[name] = {
            "config": kept, "weights": {k: list(v.shape) for k, v in state.items()},
            "vectors": [[round(float(v), 6) for v in row] for row in mean],
        }  # fmt: skip
    FILE.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
