"""Encoders of every family give the vectors that transformers gives (encoder_vectors.json)."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.errors import FileError
from strata.io import save_safetensors
from strata.models import Encoder
from tests.unit.models.encoder_vectors import FAMILIES, FILE, SIZES, batch, weight
from tests.unit.models.test_decoder_vectors import folder as random_folder

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


def test_scores_of_an_encoder_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that happen to lie where the program runs say nothing about it."""
    (tmp_path / "config.json").write_text('{"sbert_ce_default_activation_function": "torch.nn.ReLU"}', "utf-8")
    monkeypatch.chdir(tmp_path)
    config: Any = SimpleNamespace(family="bert", hidden=8, vocab=8, types=0, labels=1, is_per_token=False, longest=8)
    model = Encoder(config, {}, lambda: pytest.fail("no text is read"))
    assert model.activation(np.zeros(1, np.float32)) == 0.5


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


NARROW: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3": ("qwen3", NARROW), "windows": ("mistral", {"num_key_value_heads": 2, "sliding_window": 5}),
    "Gemma both ways": ("gemma3_text", {
        **NARROW, "sliding_window": 8, "use_bidirectional_attention": True, "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "full_attention"]}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_that_give_vectors(name: str, tmp_path: Path) -> None:
    """A decoder with a pooling is an encoder; rows of a batch are what they are alone."""
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    (ids, mask), (kind, own) = batch(), DECODERS[name]
    torch.manual_seed(0)
    reference = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **{**SIZES, **own}))
    for p in reference.parameters():
        p.data.mul_(4.0 if p.ndim > 1 else 1.0)
    reference.save_pretrained(tmp_path)
    reference = type(reference).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        given = dict(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask.astype(int)))
        wanted = reference(**given).last_hidden_state.numpy()
    _modules(tmp_path, "Normalize")
    model = st.load(tmp_path)
    found = model.run(input_ids=ids.astype(np.int32), attention_mask=mask)["last_hidden_state"]
    np.testing.assert_allclose(found[mask], wanted[mask], atol=2e-5 * np.abs(wanted).max())
    last = np.stack([row[keep][-1] for row, keep in zip(wanted, mask, strict=True)])
    rows = [[int(i) for i in row[keep]] for row, keep in zip(ids, mask, strict=True)]
    vectors = model.embed_ids(rows)
    np.testing.assert_allclose(vectors, last / np.linalg.norm(last, axis=1, keepdims=True), atol=2e-5)
    np.testing.assert_allclose(vectors[1], model.embed_ids(rows[1:2])[0], atol=1e-6)


def _modules(path: Path, *behind: str) -> None:
    """Say that the last token is the vector, and what is behind it."""
    kinds = ("Transformer", "Pooling", *behind)
    listed = [{"type": f"sentence_transformers.models.{k}", "path": f"{i}_{k}"} for i, k in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(listed), "utf-8")
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}', "utf-8")


def test_layers_behind_the_pooling_are_not_left_out(tmp_path: Path) -> None:
    _modules(folder(tmp_path, "bert"), "CNN", "Normalize")
    with pytest.raises(FileError, match="modules of the kind 'CNN' are not known"):
        st.load(tmp_path).embed_ids([[5, 6, 7]])


def test_kinds_of_decoders_that_give_no_vectors_are_named(tmp_path: Path) -> None:
    made = random_folder(tmp_path / "mamba", "mamba")
    _modules(made)
    with pytest.raises(FileError, match="decoders of the kind 'mamba' do not give vectors"):
        st.load(made)


@pytest.mark.parametrize("kind", [{}, [], 3, None, "x"])
def test_kinds_that_are_no_names(kind: Any, tmp_path: Path) -> None:
    made = random_folder(tmp_path / "llama", "llama")
    settings = json.loads((made / "config.json").read_text("utf-8"))
    (made / "config.json").write_text(json.dumps({**settings, "model_type": kind}), "utf-8")
    for listed in (False, True):
        if listed:
            _modules(made)
        with pytest.raises(FileError, match="are not known"):
            st.load(made)
