"""Encoders of every family give the vectors that transformers gives (encoder_vectors.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.io import save_safetensors
from tests.unit.models.encoder_vectors import FAMILIES, FILE, SIZES, batch, weight

KNOWN: dict[str, Any] = json.loads(FILE.read_text("utf-8"))


def folder(path: Path, name: str) -> Path:
    """A model as a folder."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(KNOWN[name]["config"]), "utf-8")
    weights = {k: weight(k, tuple(shape)) for k, shape in KNOWN[name]["weights"].items()}
    save_safetensors(path / "model.safetensors", weights)
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_vectors(name: str, tmp_path: Path) -> None:
    ids, mask = batch()
    model = st.load(folder(tmp_path / "model", name))
    hidden = model.run(input_ids=ids.astype(np.int32), attention_mask=mask)["last_hidden_state"]
    mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
    wanted = np.array(KNOWN[name]["vectors"])
    cosine = (mean * wanted).sum(1) / np.linalg.norm(mean, axis=1) / np.linalg.norm(wanted, axis=1)
    assert cosine.min() > 0.99999
    np.testing.assert_allclose(mean, wanted, atol=2e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_heads_of_rerankers_and_of_tokens(name: str, tmp_path: Path) -> None:
    """A random model of transformers with one label for a text, and with five for each token."""
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    ids, mask = batch()
    for kind, labels in (("Sequence", 1), ("Token", 5)):
        torch.manual_seed(0)
        sizes = {**SIZES, **FAMILIES[name], "num_labels": labels}
        config = transformers.AutoConfig.for_model(name.split(maxsplit=1)[0], **sizes)
        reference = getattr(transformers, f"AutoModelFor{kind}Classification").from_config(config).eval()
        for p in reference.parameters():
            p.data.mul_(4.0 if p.ndim > 1 else 1.0)
        reference.save_pretrained(tmp_path / kind)
        with torch.no_grad():
            given = dict(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask.astype(int)))
            wanted = reference(**given).logits.numpy()
        model = st.load(tmp_path / kind)
        found = model.run(input_ids=ids.astype(np.int32), attention_mask=mask)["logits"]
        kept = mask if kind == "Token" else slice(None)
        assert np.abs(found[kept] - wanted[kept]).max() <= 2e-4 * np.abs(wanted[kept]).max()
        assert model.scores_pairs == (kind == "Sequence")


def test_names_of_the_models_own_checkpoints(tmp_path: Path) -> None:
    """Nomic's and GTE's first checkpoints join projections and have other names."""
    ids, mask = batch()
    joined = {
        "nomic_bert": (("Wqkv", "attn", ("q_proj", "k_proj", "v_proj")),),
        "gte": (
            ("qkv_proj", "attention", ("q_proj", "k_proj", "v_proj")),
            ("up_gate_proj", "mlp", ("up_proj", "gate_proj")),
        ),
    }
    renamed = {
        "nomic_bert": (
            ("layers.", "encoder.layers."), ("embeddings.LayerNorm", "emb_ln"), ("self_attn.o_proj", "attn.out_proj"),
            ("up_proj", "fc11"), ("gate_proj", "fc12"), ("down_proj", "fc2"), ("post_attention_layernorm", "norm1"),
            ("post_mlp_layernorm", "norm2"),
        ),
        "gte": (
            ("layers.", "encoder.layer."), ("self_attn.o_proj", "attention.o_proj"),
            ("post_attention_layernorm", "attn_ln"), ("post_mlp_layernorm", "mlp_ln"),
        ),
    }  # fmt: skip
    for name, rows in joined.items():
        path = folder(tmp_path / name, name)
        plain = {k: weight(k, tuple(s)) for k, s in KNOWN[name]["weights"].items()}
        made: dict[str, np.ndarray] = {}
        for key, tensor in plain.items():
            row = next((r for r in rows if any(f".{part}." in key for part in r[2])), None)
            if row is None:
                made[key] = tensor
                continue
            part = next(p for p in row[2] if f".{p}." in key)
            if part == row[2][0]:
                at = f"{key.split('.')[0]}.{key.split('.')[1]}.{row[1]}.{row[0]}.{key.rsplit('.', 1)[1]}"
                made[at] = np.concatenate([plain[key.replace(part, p)] for p in row[2]])
        for old, new in renamed[name]:
            made = {k.replace(old, new): v for k, v in made.items()}
        save_safetensors(path / "model.safetensors", made)
        hidden = st.load(path).run(input_ids=ids.astype(np.int32), attention_mask=mask)["last_hidden_state"]
        mean = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)
        np.testing.assert_allclose(mean, np.array(KNOWN[name]["vectors"]), atol=2e-5)


@pytest.mark.parametrize(("key", "value"), [("position_embedding_type", "relative_key"), ("is_decoder", True)])
def test_habits_that_are_not_known_are_named(key: str, value: Any, tmp_path: Path) -> None:
    place = folder(tmp_path / "model", "bert")
    settings = {**KNOWN["bert"]["config"], key: value}
    (place / "config.json").write_text(json.dumps(settings), "utf-8")
    with pytest.raises(st.errors.FileError, match=key):
        st.load(place)
