"""Decoders against transformers with random weights: logits, prefill against decode, and every habit of a family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.errors import FileError, OptionError
from strata.io import load_safetensors, save_safetensors
from strata.models import Decoder, Sampler, load
from tests.unit.models.random_models import FAMILIES, SIZES, random_model, reference_logits

pytestmark = pytest.mark.filterwarnings("ignore")


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


def test_dynamic_rope_beyond_the_trained_length(tmp_path: Path) -> None:
    """The base is that of the context asked for; without one, the trained length is the context."""
    rope = dict(rope_type="dynamic", factor=4.0, rope_theta=10000.0)
    model = random_model(tmp_path, "llama", max_position_embeddings=64, rope_parameters=rope)
    ids = np.random.default_rng(1).integers(3, 128, (2, 100)).astype(np.int32)
    short = reference_logits(model, ids[:, :40])
    found = load(tmp_path).run(input_ids=ids[:, :40])["logits"]
    assert np.abs(found - short).max() <= 2e-4 * np.abs(short).max()
    wanted = reference_logits(model, ids)
    found = load(tmp_path, context=100).run(input_ids=ids)["logits"]
    assert np.abs(found - wanted).max() <= 2e-4 * np.abs(wanted).max()
    assert (load(tmp_path).context, load(tmp_path, context=1000).context) == (64, 256)


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


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_ragged_batches_are_what_each_prompt_gives_alone(tmp_path: Path, name: str) -> None:
    random_model(tmp_path, name)
    model: Decoder = load(tmp_path, context=96)
    model._tokenizer = Letters()  # type: ignore[assignment]
    prompts = ["hello", "a", "something much longer, with many letters in it", "xyz"]
    assert model.generate_many(prompts, max_tokens=9) == [model.generate(p, max_tokens=9) for p in prompts]
    hot = dict(max_tokens=12, temperature=0.8, top_k=20, seed=5)
    assert model.generate_many(prompts, **hot) == [model.generate(p, **hot) for p in prompts]  # type: ignore[arg-type]
    assert model.generate_many([]) == []
    assert model.generate_many(prompts, max_tokens=0) == [""] * 4
    long = [p * 2 for p in prompts]  # each ends by itself where the context does
    assert model.generate_many(long, max_tokens=90) == [model.generate(p, max_tokens=90) for p in long]
    with pytest.raises(OptionError, match="a prompt is empty"):
        model.generate_many(["x", ""])


def test_rows_of_a_ragged_batch_end_by_themselves(generator: Callable[[], Decoder]) -> None:
    model = generator()
    prompts = [[5, 6, 7], [1], [9, 9]]
    sampler = Sampler()
    alone = [list(model.tokens(ids, 10, sampler)) for ids in prompts]
    ends = {alone[0][4], alone[1][2]}
    wanted = [list(model.tokens(ids, 10, sampler, tuple(ends))) for ids in prompts]
    steps = list(model.token_rows(prompts, 10, sampler, tuple(ends)))
    found = [[row[i] for row in steps if row[i] is not None] for i in range(3)]
    assert found == wanted
    assert len({len(w) for w in wanted}) > 1


def test_all_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    random_model(tmp_path, "llama")
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"intermediate_size": 100, "vocab_size": 120}))
    with pytest.raises(FileError) as caught:
        load(tmp_path).run(input_ids=[[1]])
    message = str(caught.value)
    for name, has, wants in (
        ("layers.0.mlp.gate_proj.weight", [96, 64], [100, 64]), ("layers.1.mlp.down_proj.weight", [64, 96], [64, 100]),
        ("embed_tokens.weight", [128, 64], [120, 64]),
    ):  # fmt: skip
        assert f"{name!r} is f32{has}, the configuration asks for {wants}" in message


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


YARNED = dict(rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16), rope_theta=500000.0)
SAID: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (  # of a config.json: changed keys, keys left out
    ("gpt2", dict(scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True), ()),
    ("gpt2", dict(activation_function="relu2"), ()),
    ("llama", dict(hidden_act="tanh"), ()),
    ("llama", dict(hidden_act="linear"), ()),
    ("phi3", {}, ("rms_norm_eps",)),
    ("gemma2", {}, ("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping", "sliding_window")),
    ("gemma3", {}, ("query_pre_attn_scalar", "sliding_window", "rope_parameters")),
    ("smollm3", {}, ("rope_parameters", "tie_word_embeddings", "no_rope_layers", "layer_types")),
    ("olmo2", {}, ("rms_norm_eps",)),
    ("mamba", dict(hidden_act="gelu"), ()),
    ("jamba", dict(hidden_act="gelu"), ()),
    ("gpt_oss", {}, ("rope_parameters",)),
    ("llama4", {}, ("rope_parameters",)),
    ("olmo3", YARNED, ("rope_parameters", "layer_types", "rms_norm_eps")),
    ("exaone4", {}, ("sliding_window", "layer_types")),
    ("ernie4_5", {}, ("rope_parameters",)),
    ("qwen3", dict(use_sliding_window=False, sliding_window=5), ("layer_types",)),
    ("qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1), ("layer_types",)),
    ("qwen3_moe", {}, ("num_experts_per_tok",)),
    ("qwen2_moe", dict(use_sliding_window=True, sliding_window=5, max_window_layers=2), ("layer_types",)),
)  # fmt: skip


@pytest.mark.parametrize(("name", "changed", "left_out"), SAID)
def test_what_a_configuration_says_and_leaves_out(
    name: str, changed: dict[str, Any], left_out: tuple[str, ...], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    random_model(tmp_path, name, **({"num_experts": 10} if "num_experts_per_tok" in left_out else {}))
    place = tmp_path / "config.json"
    found = {k: v for k, v in json.loads(place.read_text()).items() if k not in left_out}
    place.write_text(json.dumps({**found, **changed}))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = np.random.default_rng(0).integers(3, 128, (2, 40))
    wanted = reference_logits(reference, ids)
    got = load(tmp_path, context=128, device="reference").run(input_ids=ids)["logits"]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4 * float(np.abs(wanted).max()))


def test_a_tied_head_has_its_own_bias(tmp_path: Path) -> None:
    reference = random_model(tmp_path, "phi", tie_word_embeddings=True)
    ids = np.random.default_rng(0).integers(3, 128, (2, 20))
    wanted = reference_logits(reference, ids)
    got = load(tmp_path, context=128, device="reference").run(input_ids=ids)["logits"]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-4 * float(np.abs(wanted).max()))


@pytest.mark.parametrize(("name", "key", "value"), [
    ("llama", "hidden_act", "xielu"), ("gpt2", "activation_function", "swiglu"),
    ("gemma3", "use_bidirectional_attention", True), ("llama4", "layer_types", ["full_attention"] * 4),
])  # fmt: skip
def test_habits_that_are_not_known_are_named(name: str, key: str, value: Any, tmp_path: Path) -> None:
    random_model(tmp_path, name)
    place = tmp_path / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), key: value}))
    with pytest.raises(FileError, match=key) as caught:
        load(tmp_path, device="reference")
    assert caught.value.code == "F140"
