"""SentenceTransformer and CrossEncoder on small models, beside NumPy on the encoder's own hidden states."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.errors import OptionError, StrataError
from strata.io import load_safetensors, save_safetensors
from strata.models.encoders.text_steps import reads_types
from strata.sentence_transformers import CrossEncoder, SentenceTransformer, quantize_embeddings
from strata.serving.api.embeddings import embed
from strata.serving.api.requests import EmbeddingRequest
from tests.unit.models import decoder_vectors
from tests.unit.models.encoder_vectors import weight
from tests.unit.models.test_encoders import KNOWN

tokenizers = pytest.importorskip("tokenizers", reason="texts are read by the package tokenizers")
WORDS = [
    "the", "a", "cat", "dog", "sat", "on", "mat", "house", "tree", "runs", "fast", "slow", "blue", "red", "green",
    "big", "small", "car", "man", "woman", "query", ":",
]  # fmt: skip
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def tokenizer() -> Any:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def write(
    folder: Path,
    *,
    pooling: dict[str, Any] | None = None,
    dense: bool = False,
    normalize: bool = False,
    labels: int = 0,
) -> Path:
    """A model as sentence-transformers writes one."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**KNOWN["bert"]["config"], "architectures": ["BertForSequenceClassification" if labels else "BertModel"]}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    weights = {k: weight(k, tuple(s)) for k, s in KNOWN["bert"]["weights"].items()}
    if labels:
        weights |= {"classifier.weight": weight("c", (labels, 32)) * 20, "classifier.bias": weight("b", (labels,))}
    save_safetensors(folder / "model.safetensors", weights)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 20}), "utf-8")
    if pooling is None:
        return folder
    rows = (
        [("Transformer", ""), ("Pooling", "1_Pooling")]
        + [("Dense", "2_Dense")] * dense
        + [("Normalize", "3")] * normalize
    )
    listed = [
        {"idx": i, "name": str(i), "path": p, "type": f"sentence_transformers.models.{k}"}
        for i, (k, p) in enumerate(rows)
    ]
    (folder / "modules.json").write_text(json.dumps(listed), "utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling), "utf-8")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query : "}}), "utf-8")
    if dense:
        (folder / "2_Dense").mkdir()
        settings = {"in_features": 32, "out_features": 12, "activation_function": "torch.nn.modules.activation.Tanh"}
        (folder / "2_Dense/config.json").write_text(json.dumps(settings), "utf-8")
        held = {"linear.weight": weight("d", (12, 32)), "linear.bias": weight("e.bias", (12,))}
        save_safetensors(folder / "2_Dense/model.safetensors", held)
    return folder


def texts(count: int = 11) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(1, 30))) for _ in range(count)]


def hidden(folder: Path, given: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states of texts, and which tokens count."""
    ids = [[*e.ids[:19], 3] if len(e.ids) > 20 else e.ids for e in tokenizer().encode_batch(given)]
    mask = np.arange(max(map(len, ids))) < np.array([len(i) for i in ids])[:, None]
    block = np.zeros(mask.shape, np.int32)
    for row, found in zip(block, ids, strict=True):
        row[: len(found)] = found
    return st.load(folder).run(input_ids=block, attention_mask=mask)["last_hidden_state"], mask


def mean(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    return np.asarray((x * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True))


def unit(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


POOLINGS: dict[str, Any] = {
    "mean": mean,
    "max": lambda x, m: np.where(m[:, :, None], x, -np.inf).max(1),
    "cls": lambda x, m: x[:, 0],
    "lasttoken": lambda x, m: x[np.arange(len(x)), m.sum(1) - 1],
    "mean_sqrt_len_tokens": lambda x, m: (x * m[:, :, None]).sum(1) / np.sqrt(m.sum(1, keepdims=True)),
    "weightedmean": lambda x, m: (
        (x * (m * (1 + np.arange(m.shape[1])))[:, :, None]).sum(1) / (m * (1 + np.arange(m.shape[1]))).sum(1)[:, None]
    ),
}


@pytest.mark.parametrize("mode", POOLINGS)
def test_pooling(mode: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", pooling={"pooling_mode": mode})
    found = SentenceTransformer(folder).encode(texts(), batch_size=4)
    np.testing.assert_allclose(found, POOLINGS[mode](*hidden(folder, texts())), atol=2e-6)


def test_dense_normalise_and_old_keys(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", pooling={"pooling_mode_mean_tokens": True}, dense=True, normalize=True)
    model = SentenceTransformer(folder)
    inner = np.tanh(mean(*hidden(folder, texts())) @ weight("d", (12, 32)).T + weight("e.bias", (12,)))
    np.testing.assert_allclose(model.encode(texts()), unit(inner), atol=2e-6)
    assert model.get_sentence_embedding_dimension() == 12


def test_options(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", pooling={"pooling_mode": "mean"})
    model = SentenceTransformer(folder)
    given = texts()
    plain = model.encode(given)
    np.testing.assert_array_equal(model.encode(given[0]), model.encode(given[:1])[0])
    np.testing.assert_allclose(model.encode(given, normalize_embeddings=True), unit(plain), atol=1e-6)
    np.testing.assert_allclose(model.encode(given, truncate_dim=8), plain[:, :8], atol=1e-6)
    short = model.encode(given, truncate_dim=8, normalize_embeddings=True)
    np.testing.assert_allclose(short, unit(plain[:, :8]), atol=1e-6)
    asked = model.encode([f"query : {t}" for t in given])
    np.testing.assert_array_equal(model.encode(given, prompt_name="query"), asked)
    np.testing.assert_array_equal(model.encode_query(given), asked)
    np.testing.assert_array_equal(model.encode(given, precision="binary"), quantize_embeddings(plain, "binary"))
    assert model.encode(given, precision="int8").dtype == np.int8
    assert model.encode(given, precision="ubinary").shape == (len(given), 4)
    assert isinstance(model.encode(given, convert_to_numpy=False), list)
    np.testing.assert_array_equal(model.encode(given, convert_to_tensor=True).numpy(), plain)
    np.testing.assert_allclose(np.diag(model.similarity(plain, plain)), 1, atol=1e-6)
    assert model.encode([]).shape == (0, 32)


def test_a_prompt_that_is_not_pooled(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", pooling={"pooling_mode": "mean", "include_prompt": False})
    given = texts(4)
    x, mask = hidden(folder, [f"query : {t}" for t in given])
    rest = mask & (np.arange(mask.shape[1]) >= 3)
    np.testing.assert_allclose(SentenceTransformer(folder).encode(given, prompt_name="query"), mean(x, rest), atol=2e-6)


@pytest.mark.parametrize("labels", [1, 3])
def test_cross_encoder(labels: int, tmp_path: Path) -> None:
    folder = write(tmp_path / "c", labels=labels)
    model = CrossEncoder(folder)
    given = texts(6)
    pairs = list(zip(given, given[::-1], strict=True))
    alone = np.stack([model.predict(pair) for pair in pairs])
    np.testing.assert_allclose(model.predict(pairs), alone, atol=1e-6)
    if labels > 1:
        np.testing.assert_allclose(model.predict(pairs, apply_softmax=True).sum(1), 1, atol=1e-6)
        with pytest.raises(OptionError, match="num_labels=1"):
            model.rank(given[0], given)
        return
    ranked = model.rank(given[0], given, top_k=3, return_documents=True)
    scores = model.predict([(given[0], d) for d in given])
    assert [row["corpus_id"] for row in ranked] == np.argsort(-scores, kind="stable")[:3].tolist()
    assert ranked[0]["text"] == given[ranked[0]["corpus_id"]]


@pytest.mark.parametrize("where", ["sentence_transformers", "sbert_ce_default_activation_function", "beside"])
def test_the_activation_that_files_say(where: str, tmp_path: Path) -> None:
    """Rerankers such as ms-marco-MiniLM give scores as they are, and say so in one of three places."""
    folder, name = write(tmp_path / "c", labels=1), "torch.nn.modules.linear.Identity"
    pair = tuple(texts(2))
    squeezed = CrossEncoder(folder).predict(pair)
    place = folder / ("config_sentence_transformers.json" if where == "beside" else "config.json")
    settings = json.loads(place.read_text()) if place.exists() else {}
    settings |= {where: {"activation_fn": name}} if where == "sentence_transformers" else {where: name}
    place.write_text(json.dumps(settings | ({"activation_fn": name} if where == "beside" else {})))
    score = CrossEncoder(folder).predict(pair)
    np.testing.assert_allclose(1 / (1 + np.exp(-score)), squeezed, rtol=1e-6)
    assert CrossEncoder(folder, activation_fn=lambda x: x * 0).predict(pair) == 0
    place.write_text(json.dumps(settings | {where: "my.Own", "activation_fn": "my.Own"}))
    if where != "sentence_transformers":
        with pytest.raises(OptionError, match=r"my\.Own"):
            CrossEncoder(folder)


@pytest.mark.parametrize("kind", ["TokenizersBackend", "BertTokenizer"])
def test_types_of_tokens_by_the_class_of_the_tokenizer(kind: str, tmp_path: Path) -> None:
    """transformers' own class for any tokenizer gives no types; BERT's does."""
    folder = write(tmp_path / "c", labels=1)
    place = folder / "tokenizer_config.json"
    settings = json.loads(place.read_text()) if place.exists() else {}
    settings.pop("model_input_names", None)
    place.write_text(json.dumps(settings | {"tokenizer_class": kind}))
    assert reads_types(folder) is (kind == "BertTokenizer")


def test_queries_and_documents_take_prompts_by_position(tmp_path: Path) -> None:
    model, given = SentenceTransformer(write(tmp_path / "m", pooling={"pooling_mode": "mean"})), texts(2)
    for encode in (model.encode_query, model.encode_document):
        np.testing.assert_array_equal(encode(given, None, "w1 "), model.encode(given, prompt="w1 "))
        np.testing.assert_array_equal(encode(given, "query"), model.encode(given, prompt_name="query"))
    assert model.device == "cpu"


def test_mistakes(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", pooling={"pooling_mode": "mean"})
    model = SentenceTransformer(folder)
    wrong: list[Any] = [
        lambda: SentenceTransformer("no/such/folder"), lambda: model.encode(["a"], prompt_name="zork"),
        lambda: model.encode(["a"], precision="int3"), lambda: model.encode([3]),  # type: ignore[list-item]
        lambda: model.encode(["a"], batch_size=0), lambda: CrossEncoder(folder),
        lambda: model.encode(["a"], output_value="tokens"),
    ]  # fmt: skip
    for call in wrong:
        with pytest.raises(StrataError):
            call()
    (folder / "modules.json").write_text('[{"type": "a.Router", "path": ""}]', "utf-8")
    with pytest.raises(StrataError, match="Router"):
        SentenceTransformer(folder)
    (folder / "modules.json").write_text('[{"type": "a.Pooling", "path": "../.."}]', "utf-8")
    with pytest.raises(StrataError, match="outside"):
        SentenceTransformer(folder)


SLIM = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("scipy", "rich", "onnx", "torch", "transformers", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import numpy as np
from strata.sentence_transformers import SentenceTransformer

np.save("found.npy", SentenceTransformer("model").encode(["the cat sat", "a dog"]))
"""


def test_texts_need_numpy_llvm_and_a_tokenizer_only(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", pooling={"pooling_mode_mean_tokens": True}, normalize=True)
    root = Path(__file__).parents[3]
    program = f"import sys; sys.path.insert(0, {str(root)!r})\n{SLIM}"
    cache = {"STRATA_CACHE_DIR": str(tmp_path / "cache"), "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=cache, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    wanted = SentenceTransformer(folder).encode(["the cat sat", "a dog"])
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), wanted, rtol=1e-6, atol=1e-7)


def test_arguments_by_the_names_of_both_versions(tmp_path: Path) -> None:
    model, given = SentenceTransformer(write(tmp_path / "m", pooling={"pooling_mode": "mean"})), texts(5)
    wanted = model.encode(given)
    np.testing.assert_array_equal(model.encode(inputs=given), wanted)
    np.testing.assert_array_equal(model.encode(sentences=given), wanted)  # as it was called before version 6
    for args, named in (((given,), {}), ((), {"inputs": given})):
        with pytest.raises(OptionError, match="sentences and inputs are two names of one argument"):
            model.encode(*args, sentences=given, **named)
    pool = model.start_multi_process_pool(["cpu", "cpu"])
    np.testing.assert_array_equal(model.encode(given, pool=pool, chunk_size=2, device=["cpu"]), wanted)
    model.stop_multi_process_pool(pool)
    with model.truncate_sentence_embeddings(5):
        np.testing.assert_array_equal(model.encode(given), wanted[:, :5])
    with pytest.raises(OptionError, match="the model is on 'cpu', and device is 'cuda:0'"):
        model.encode(given, device="cuda:0")
    with pytest.raises(OptionError, match="the model is on 'cpu', and device is 'cuda'"):
        model.start_multi_process_pool(["cuda"])


def test_vectors_of_tokens(tmp_path: Path) -> None:
    folder, given = write(tmp_path / "m", pooling={"pooling_mode": "mean"}, dense=True), texts(5)
    x, mask = hidden(folder, given)
    found = SentenceTransformer(folder).encode(given, output_value="token_embeddings", batch_size=2)
    for row, wanted, kept in zip(found, x, mask, strict=True):
        np.testing.assert_allclose(row, wanted[kept], atol=2e-6)
    alone = SentenceTransformer(folder).encode(given[0], output_value="token_embeddings")
    np.testing.assert_allclose(alone, found[0], atol=2e-6)


def test_prompts_of_pairs(tmp_path: Path) -> None:
    folder, (a, b) = write(tmp_path / "c", labels=1), texts(2)
    model = CrossEncoder(folder, prompts={"query": "query : "})
    wanted = model.predict([(f"query : {a}", b)])
    np.testing.assert_array_equal(model.predict([(a, b)], prompt_name="query"), wanted)
    np.testing.assert_array_equal(model.predict(sentences=[(a, b)], prompt="query : "), wanted)
    np.testing.assert_array_equal(
        model.predict([(a, b)], activation_fct=np.tanh), model.predict([(a, b)], activation_fn=np.tanh)
    )
    usual = CrossEncoder(folder, prompts={"query": "query : "}, default_prompt_name="query")
    np.testing.assert_array_equal(usual.predict([(a, b)]), wanted)
    assert usual.rank(a, [b])[0]["score"] == wanted[0]
    with pytest.raises(StrataError, match="has no prompt 'zork'"):
        model.predict([(a, b)], prompt_name="zork")


@pytest.mark.parametrize("mode", ["cls", "lasttoken", "weightedmean"])
def test_an_encoder_alone_does_what_the_files_say(mode: str, tmp_path: Path) -> None:
    """As `strata serve` gives vectors: with the pooling and the layers of the folder."""
    given = texts(6)
    for name, settings in (("plain", {}), ("whole", {"dense": True, "normalize": True})):
        folder = write(tmp_path / name, pooling={"pooling_mode": mode}, **settings)
        np.testing.assert_allclose(st.load(folder).embed(given), SentenceTransformer(folder).encode(given), atol=2e-6)


def test_a_pooling_is_read_from_where_modules_json_says(tmp_path: Path) -> None:
    folder, given = write(tmp_path / "m", pooling={"pooling_mode": "cls"}), texts(6)
    (folder / "1_Pooling").rename(folder / "pool")
    listed = (folder / "modules.json").read_text("utf-8").replace("1_Pooling", "pool")
    (folder / "modules.json").write_text(listed, "utf-8")
    np.testing.assert_allclose(st.load(folder).embed(given), SentenceTransformer(folder).encode(given), atol=2e-6)


@pytest.mark.parametrize("named", ["Identity", "Tanh", None])
def test_scores_of_an_encoder_alone_are_those_that_the_files_say(named: str | None, tmp_path: Path) -> None:
    """As `strata serve` ranks documents."""
    folder, given = write(tmp_path / "c", labels=1), texts(6)
    if named is not None:
        settings = {"activation_fn": f"torch.nn.modules.linear.{named}"}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(settings), "utf-8")
    pairs = list(zip(given, given[::-1], strict=True))
    np.testing.assert_allclose(st.load(folder).score_pairs(pairs)[0], CrossEncoder(folder).predict(pairs), atol=1e-6)


def test_texts_are_in_lower_case_where_the_files_say_so(tmp_path: Path) -> None:
    folder = str(write(tmp_path, pooling={"pooling_mode_cls_token": True}))
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}', "utf-8")
    given = ["The CAT", "a Red house"]
    alone = st.load(folder)
    np.testing.assert_allclose(alone.embed(given), SentenceTransformer(folder).encode(given), atol=2e-6)
    asked = EmbeddingRequest(tuple(given), cuts=True)
    rows = [row["embedding"] for row in embed(alone, asked, "m", lambda: False)["data"]]
    np.testing.assert_allclose(rows, alone.embed(given), atol=2e-6)


@pytest.mark.parametrize("dense", [False, True])
def test_decoders_give_vectors(dense: bool, tmp_path: Path) -> None:
    """The last token of a decoder, and what is behind it, as the graph of all its tokens has them."""
    write(
        tmp_path, pooling={"pooling_mode_lasttoken": True, "word_embedding_dimension": 32}, dense=dense, normalize=True
    )
    record = json.loads(decoder_vectors.FILE.read_text("utf-8"))["qwen3"]
    (tmp_path / "config.json").write_text(json.dumps(record["config"]), "utf-8")
    shapes = decoder_vectors.unpacked(record["weights"])
    save_safetensors(tmp_path / "model.safetensors", {k: decoder_vectors.weight(k, s) for k, s in shapes.items()})
    model, text = SentenceTransformer(str(tmp_path)), "red green"
    ids = np.array([tokenizer().encode(text).ids], np.int32)
    last = st.load(tmp_path).run(input_ids=ids)["last_hidden_state"][0, -1]
    if dense:
        held = load_safetensors(tmp_path / "2_Dense/model.safetensors")
        last = np.tanh(held["linear.weight"] @ last + held["linear.bias"])
    np.testing.assert_allclose(model.encode(text), last / np.linalg.norm(last), atol=1e-5)


def add_modules(folder: Path, *rows: tuple[str, dict[str, Any], dict[str, np.ndarray]], at: int) -> None:
    """Put modules into modules.json, before the one at a place."""
    listed = json.loads((folder / "modules.json").read_text("utf-8"))
    for offset, (kind, settings, held) in enumerate(rows):
        place = folder / f"more{at + offset}"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(settings), "utf-8")
        if held:
            save_safetensors(place / "model.safetensors", held)
        listed.insert(at + offset, {"path": place.name, "type": f"sentence_transformers.models.{kind}"})
    (folder / "modules.json").write_text(json.dumps(listed), "utf-8")


@pytest.mark.parametrize("mode", ["mean", "mean_sqrt_len_tokens", "weightedmean", "cls"])
def test_words_with_weights(mode: str, tmp_path: Path) -> None:
    """A mean divides by the sum of the weights, whatever else weights the tokens."""
    folder = write(tmp_path / "m", pooling={"pooling_mode": mode})
    table = np.abs(weight("w", (len(SPECIAL) + len(WORDS), 1))) + 0.2
    add_modules(folder, ("WordWeights", {}, {"emb_layer.weight": table}), at=1)
    x, mask = hidden(folder, texts())
    ids = [[*e.ids[:19], 3] if len(e.ids) > 20 else e.ids for e in tokenizer().encode_batch(texts())]
    weights = np.zeros(mask.shape, np.float32)
    for row, known in zip(weights, ids, strict=True):
        row[: len(known)] = table[known, 0]
    weighted, total = x * weights[:, :, None], weights.sum(1, keepdims=True)
    wanted = {
        "mean": weighted.sum(1) / total,
        "mean_sqrt_len_tokens": weighted.sum(1) / np.sqrt(total),
        "weightedmean": (weighted * np.arange(1, mask.shape[1] + 1)[:, None]).sum(1) / total,
        "cls": weighted[:, 0],
    }[mode]
    model = SentenceTransformer(folder)
    np.testing.assert_allclose(model.encode(texts()), wanted, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(st.load(folder).embed(texts()), wanted, atol=1e-5, rtol=1e-5)
    tokens = model.encode(texts(), output_value="token_embeddings")
    np.testing.assert_allclose(tokens[0], weighted[0, : len(ids[0])], atol=2e-6)


def test_layer_normalisation_and_residuals(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", pooling={"pooling_mode": "mean"})
    gamma, beta = weight("g", (32,)), weight("h.bias", (32,))
    inner, across = weight("i", (12, 32)), weight("j", (12, 32))
    last = weight("k", (12, 12))
    name = "torch.nn.modules.activation.LeakyReLU"
    add_modules(
        folder,
        ("LayerNorm", {"dimension": 32}, {"norm.weight": gamma, "norm.bias": beta}),
        (
            "Dense",
            {"activation_function": name, "use_residual": True, "bias": False},
            {"linear.weight": inner, "residual.weight": across},
        ),
        ("Dense", {"activation_function": None, "use_residual": True}, {"linear.weight": last}),
        at=2,
    )
    x = mean(*hidden(folder, texts()))
    x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * gamma + beta
    y = x @ inner.T
    x = np.where(y > 0, y, 0.01 * y) + x @ across.T
    np.testing.assert_allclose(SentenceTransformer(folder).encode(texts()), x @ last.T + x, atol=1e-5)


def test_a_dense_layer_of_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", pooling={"pooling_mode": "max"})
    held = {"linear.weight": weight("d", (12, 32)), "linear.bias": weight("e.bias", (12,))}
    add_modules(folder, ("Dense", {"module_input_name": "token_embeddings"}, held), at=1)
    x, mask = hidden(folder, texts())
    x = np.tanh(x @ held["linear.weight"].T + held["linear.bias"])
    model = SentenceTransformer(folder)
    np.testing.assert_allclose(model.encode(texts()), POOLINGS["max"](x, mask), atol=2e-6)
    assert model.get_sentence_embedding_dimension() == 12
    place = folder / "more1" / "config.json"
    place.write_text(json.dumps({"module_input_name": "sentence_embedding"}), "utf-8")
    with pytest.raises(StrataError, match="reads and writes token_embeddings, this one sentence_embedding"):
        SentenceTransformer(folder)


def test_the_first_token_after_a_prompt(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", pooling={"pooling_mode": "cls", "include_prompt": False})
    x, _ = hidden(folder, [f"query : {t}" for t in texts()])
    found = SentenceTransformer(folder).encode(texts(), prompt="query : ")
    np.testing.assert_allclose(found, x[:, 3], atol=2e-6)  # after [CLS] and two words


def test_all_that_a_text_gives(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", pooling={"pooling_mode": "mean"})
    model, given = SentenceTransformer(folder), texts(5)
    found = model.encode(given, output_value=None, truncate_dim=8, batch_size=2)
    np.testing.assert_allclose(
        [row["sentence_embedding"] for row in found], model.encode(given, truncate_dim=8), atol=2e-6
    )
    tokens = model.encode(given, output_value="token_embeddings")
    for row, wanted in zip(found, tokens, strict=True):
        np.testing.assert_allclose(row["token_embeddings"], wanted, atol=2e-6)
        assert row["input_ids"].shape == row["attention_mask"].shape == (len(wanted),)
    assert model.encode(given[0], output_value=None)["input_ids"].ndim == 1
    assert model.encode([], output_value=None) == []
    low, high = np.concatenate(tokens).min(0), np.concatenate(tokens).max(0)
    for row, wanted in zip(
        model.encode(given, output_value="token_embeddings", precision="uint8"), tokens, strict=True
    ):
        np.testing.assert_array_equal(row, quantize_embeddings(wanted, "uint8", np.stack([low, high])))


def test_arguments_at_their_edges(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", pooling={"pooling_mode": "mean"})
    model, given = SentenceTransformer(folder, prompts={"passage": "query : "}), texts(3)
    wanted = model.encode(given)
    np.testing.assert_array_equal(model.encode(given, precision=None), wanted)
    np.testing.assert_array_equal(model.encode(np.array(given)), wanted)
    np.testing.assert_array_equal(model.encode_document(given), wanted)  # "document" is before "passage"
    assert model.encode(given, truncate_dim=0).shape == (3, 0)
    with model.truncate_embeddings(5):
        assert model.get_embedding_dimension() == 5
    for wrong in (
        lambda: model.encode(given, prompt_name=""),
        lambda: model.encode(given[0], precision="int8"),  # a range of one vector is no range
        lambda: quantize_embeddings(wanted[:1], "uint8"),
        lambda: setattr(model, "similarity_fn_name", "zork"),
    ):
        with pytest.raises(StrataError):
            wrong()
    model.similarity_fn_name = "dot"
    np.testing.assert_allclose(model.similarity(wanted, wanted), wanted @ wanted.T, rtol=1e-5)
    reranker = CrossEncoder(write(tmp_path / "c", labels=1))
    assert reranker.rank("the cat", np.array(given)) == reranker.rank("the cat", given)
    assert reranker.rank("the cat", np.array([])) == []
    pairs = [(a, "a dog") for a in given]
    np.testing.assert_array_equal(reranker.predict(pairs, apply_softmax=None), reranker.predict(pairs))


@pytest.mark.parametrize("kind", ["Dense", "LayerNorm", "WordWeights"])
def test_modules_whose_tensors_do_not_fit(kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "m", pooling={"pooling_mode": "mean"})
    held = {
        "Dense": {"linear.weight": weight("d", (12,))},
        "LayerNorm": {"norm.weight": weight("g", (7,)), "norm.bias": weight("h.bias", (7,))},
        "WordWeights": {"emb_layer.weight": weight("w", (3, 1))},
    }[kind]
    add_modules(folder, (kind, {}, held), at=1 if kind == "WordWeights" else 2)
    with pytest.raises(StrataError):
        SentenceTransformer(folder).encode(texts())
    (folder / "more1" if kind == "WordWeights" else folder / "more2").joinpath("model.safetensors").unlink()
    with pytest.raises(StrataError, match=r"has no model\.safetensors"):
        SentenceTransformer(folder)
