"""Decoders against transformers with random weights: logits, prefill against decode, and every habit of a family."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.errors import FileError, OptionError
from strata.io import load_safetensors, save_safetensors
from strata.models import Decoder, load

pytestmark = pytest.mark.filterwarnings("ignore")
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


def random_model(folder: Path, name: str) -> Any:
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
        model = getattr(transformers, f"{family}ForCausalLM")(kind(**SIZES, **extra))
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


@pytest.mark.parametrize("name", [*FAMILIES, "gpt2"])
def test_logits_agree_with_transformers(tmp_path: Path, name: str, rng: np.random.Generator) -> None:
    model = random_model(tmp_path, name)
    ours = load(tmp_path, context=128)
    ids = rng.integers(0, 128, (2, 100)).astype(np.int32)
    wanted = reference_logits(model, ids)
    found = ours.run(input_ids=ids)["logits"]
    scale = np.abs(wanted).max()
    assert np.abs(found - wanted).max() <= 1e-3 * scale
    assert (found.argmax(-1) == wanted.argmax(-1)).all()
    state = ours.start(batch=2, capacity=16)  # grows on the way
    steps = [ours.step(state, np.ascontiguousarray(ids[:, i : i + 1])) for i in range(24)]
    assert np.abs(np.stack(steps, 1) - found[:, :24]).max() <= 1e-4 * scale
    rest = ours.step(state, np.ascontiguousarray(ids[:, 24:60]))
    assert np.abs(rest - found[:, 59]).max() <= 1e-4 * scale


def test_phi3_long_rope(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch = pytest.importorskip("torch", reason="needs torch")
    torch.manual_seed(0)
    rope = dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=64,
                long_factor=np.linspace(1, 4, 8).tolist(), short_factor=np.linspace(1, 2, 8).tolist())  # fmt: skip
    sizes = {**SIZES, "original_max_position_embeddings": 64}
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, rope_parameters=rope)).eval()
    model.save_pretrained(tmp_path)
    ids = np.arange(40, dtype=np.int32)[None]
    wanted = reference_logits(model, ids)
    found = load(tmp_path, context=64).run(input_ids=ids)["logits"]
    assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max()


class Letters:
    """A tokenizer of single letters, so that generation is tested without a vocabulary."""

    eos, bos, template = (), None, None

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [ord(c) % 128 for c in text]

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


@pytest.fixture
def generator(tmp_path: Path) -> Callable[[], Decoder]:
    def make() -> Decoder:
        random_model(tmp_path, "llama")
        model: Decoder = load(tmp_path, context=64)
        model._tokenizer = Letters()  # type: ignore[assignment]
        return model

    return make


def test_greedy_generation_follows_the_logits(generator: Callable[[], Decoder]) -> None:
    model = generator()
    text = model.generate("hello", max_tokens=12)
    ids = model.prompt_ids("hello")
    for _ in range(12):
        ids.append(int(model.run(input_ids=[ids])["logits"][0, -1].argmax()))
    assert text == Letters().decode(ids[5:])
    assert "".join(model.generate("hello", max_tokens=12, stream=True)) == text
    assert model.generate(model.prompt_ids("hello"), max_tokens=12) == text


def test_seeds_stops_and_limits(generator: Callable[[], Decoder]) -> None:
    model = generator()
    hot = dict(max_tokens=20, temperature=1.5, top_k=50, top_p=0.95, min_p=0.01, repetition_penalty=1.1)
    first = model.generate("hello", seed=3, **hot)
    assert first == model.generate("hello", seed=3, **hot)
    assert first != model.generate("hello", seed=4, **hot)
    stop = first[5:8]
    assert model.generate("hello", seed=3, stop=stop, **hot) == first[: first.index(stop)]
    assert len(model.generate("hello", max_tokens=500)) == 64 - 5 + 1  # the context ends it
    with pytest.raises(OptionError, match="more than the context of 64"):
        model.step(model.start(), np.zeros((1, 65), np.int32))
    with pytest.raises(OptionError, match="top_p 2"):
        model.generate("x", top_p=2.0)
    with pytest.raises(OptionError, match="prompt is empty"):
        model.generate("")


def test_decoding_compiles_once(generator: Callable[[], Decoder]) -> None:
    model = generator()
    model.generate("hello", max_tokens=4)
    graph = model.graph
    model.generate("hello, a longer one", max_tokens=30)
    assert model.graph is graph
    assert len(model._graphs) == 1


def test_sharded_bfloat16_folders(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    model = random_model(tmp_path / "whole", "llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "parts", max_shard_size="60KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    ids = np.arange(12, dtype=np.int32)[None]
    wanted = reference_logits(model.float(), ids)
    found = load(tmp_path / "parts").run(input_ids=ids)["logits"]
    assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max()


def test_mistakes_in_folders_are_named(tmp_path: Path) -> None:
    random_model(tmp_path, "llama")
    weights = dict(load_safetensors(tmp_path / "model.safetensors"))
    lost = weights.pop("model.layers.1.mlp.up_proj.weight")
    (tmp_path / "model.safetensors").unlink()
    save_safetensors(tmp_path / "model.safetensors", weights)
    with pytest.raises(FileError, match=r"no 'layers.1.mlp.up_proj.weight' : f32\[96, 64\]"):
        load(tmp_path).run(input_ids=[[1]])
    save_safetensors(tmp_path / "model.safetensors", weights | {"model.layers.1.mlp.up_proj.weight": lost[:, :60]})
    with pytest.raises(FileError, match=r"is f32\[96, 60\], the configuration asks for \[96, 64\]"):
        load(tmp_path).run(input_ids=[[1]])
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    with pytest.raises(FileError, match="lacks or spoils 'num_attention_heads'"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(FileError, match="'unheard-of' are not known"):
        load(tmp_path)
    with pytest.raises(FileError, match="no file or folder"):
        load(tmp_path / "nowhere.gguf")
