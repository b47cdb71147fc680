"""Configurations: every number is checked, against its kind and against the weights, before anything is made for it."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.errors import FileError
from strata.io import save_gguf, save_safetensors
from strata.models import Decoder
from strata.models.decoder_config import from_json
from strata.models.decoders import decoder_family
from strata.models.vision.model import labels_of
from tests.fuzz.mutate.configs import DECODER, ENCODER, GPT2, LONG, MODERN, SHORT, shapes
from tests.fuzz.mutate.families import sound_models
from tests.fuzz.mutate.weights import tiny_decoder
from tests.unit.models.test_decoder_vectors import KNOWN

FAMILIES: dict[str, dict[str, Any]] = {
    "bert": ENCODER, "distilbert": SHORT, "modernbert": MODERN, "gpt2": GPT2, "phi3": LONG, "llama": DECODER,
    "gemma2": {**DECODER, "model_type": "gemma2"}, "qwen2": {**DECODER, "model_type": "qwen2"},
}  # fmt: skip
BAD = (0, -1, 10**9, 2**31, 2**70, 1.5, 1e300, "12", None, [], True)


def folder(tmp_path: Path, config: dict[str, Any], kind: str) -> Path:
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes(FAMILIES[kind]).items()}
    save_safetensors(tmp_path / "model.safetensors", arrays)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("kind", FAMILIES)
def test_sound_configurations_load_and_run(kind: str, tmp_path: Path) -> None:
    model = st.load(folder(tmp_path, FAMILIES[kind], kind), device="reference")
    assert next(iter(model.run(input_ids=np.array([[1, 2, 3]])).values())).shape[:2] == (1, 3)


def test_a_router_may_have_no_jitter() -> None:
    """Only experts as good as the best one count then; a negative one makes no sense."""
    of, settings = decoder_family("phimoe"), KNOWN["phimoe"]["config"]
    assert of.config({**settings, "router_jitter_noise": 0.0}).jitter == 0
    with pytest.raises(FileError, match=r"router_jitter_noise = -0\.1"):
        of.config({**settings, "router_jitter_noise": -0.1})


SIZES = ("num_hidden_layers", "n_layer", "n_layers", "hidden_size", "n_embd", "dim", "vocab_size", "intermediate_size",
         "n_inner", "hidden_dim")  # fmt: skip


@pytest.mark.parametrize("kind", FAMILIES)
def test_sizes_are_those_of_the_weights(kind: str, tmp_path: Path) -> None:
    sound = FAMILIES[kind]
    for key in [k for k in SIZES if k in sound]:
        for value in BAD:
            if value is None and key in ("n_inner", "intermediate_size", "hidden_dim"):
                continue  # has a default, which is another size
            place = folder(tmp_path, {**sound, key: value}, kind)
            with pytest.raises(FileError) as caught:
                st.load(place, device="reference")
            assert caught.value.code in ("F140", "F142"), (key, value)


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_number_is_checked(kind: str, tmp_path: Path) -> None:
    """Loading and running either works or ends in a typed error, and never makes what the weights do not back."""
    sound = FAMILIES[kind]
    numbers = [k for k, v in sound.items() if isinstance(v, (int, float)) and not isinstance(v, bool)]
    for key in numbers:
        for value in (0, 10**9, 2**63, "12", float("nan"), -1e-5):
            place = folder(tmp_path, {**sound, key: value}, kind)
            try:
                st.load(place, device="reference").run(input_ids=np.array([[1, 2, 3]]))
            except st.errors.StrataError:
                continue


def test_the_message_names_both_numbers_of_layers(tmp_path: Path) -> None:
    place = folder(
        tmp_path, {**DECODER, "num_hidden_layers": 10**9, "layer_types": None, "no_rope_layers": None}, "llama"
    )
    with pytest.raises(FileError, match="has 1000000000 layers, the weights have 1"):
        st.load(place)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_nothing_is_made_for_layers_that_no_weights_back(family: str) -> None:
    many = {**DECODER, "model_type": family, "num_hidden_layers": 10**7, "layer_types": None, "no_rope_layers": None}
    tracemalloc.start()
    try:
        config = from_json(many)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    window = DECODER["sliding_window"]
    assert [config.window(i) for i in range(4)] == ([window, None] * 2 if family == "gemma2" else [window] * 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["full_attention"] * 7), ("layer_types", 3), ("no_rope_layers", [1, 1]), ("sliding_window", 0),
        ("sliding_window", "8"), ("rope_scaling", 3), ("rope_theta", 0), ("rope_theta", -1e4), ("rms_norm_eps", "x"),
        ("rope_scaling", {"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
        ("rope_scaling", {"rope_type": "linear", "factor": 0}), ("rope_scaling", {"rope_type": ["x"]}),
        ("rope_scaling", {"rope_type": "longrope", "long_factor": "x", "short_factor": []}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}),
        ("rope_parameters", {"full_attention": 3}), ("hidden_act", 3), ("attn_logit_softcapping", 0), ("head_dim", 3),
        ("rope_theta", 10**400), ("rms_norm_eps", 10**4000), ("rope_theta", float("inf")), ("rope_theta", True),
        ("rope_scaling", {"rope_type": "longrope", "long_factor": [10**400], "short_factor": [1.0]}),
        ("query_pre_attn_scalar", -1), ("partial_rotary_factor", "half"), ("num_key_value_heads", 3),
        ("partial_rotary_factor", 0.4),
    ],
)  # fmt: skip
def test_habits_of_decoders(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(FileError):
        st.load(folder(tmp_path, {**DECODER, key: value}, "llama"), device="reference")


def test_a_pattern_of_windows_is_not_longer_than_a_model() -> None:
    with pytest.raises(FileError, match="sliding_window_pattern = 9223372036854775808"):
        from_json({**DECODER, "layer_types": None, "sliding_window_pattern": 2**63})
    assert from_json({**DECODER, "layer_types": None, "sliding_window_pattern": 3}).windows == (8, 8, None)


def test_labels_have_numbers_that_can_be_read() -> None:
    names: dict[str, Any] = {"0": "cat", "x": "dog", "9" * 5000: "owl", "²": "elk", "11": 7}
    assert labels_of({"id2label": names}) == {0: "cat", 11: "7"}
    assert labels_of({"id2label": ["cat"]}) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 2), ("llama.block_count", 4_000_000_000), ("llama.block_count", "one"),
        ("llama.attention.head_count", 0), ("llama.attention.head_count", 1 << 30), ("llama.embedding_length", 9),
        ("llama.feed_forward_length", 1 << 30), ("llama.context_length", 0), ("llama.attention.head_count_kv", 7),
        ("llama.rope.freq_base", float("nan")), ("llama.rope.dimension_count", 1 << 20),
        ("llama.attention.key_length", 1 << 30), ("llama.attention.layer_norm_rms_epsilon", float("inf")),
        ("llama.attention.sliding_window", -1), ("llama.block_count", True), ("llama.rope.scaling.factor", 0.0),
    ],
)  # fmt: skip
def test_metadata_of_gguf_files(key: str, value: Any, tmp_path: Path) -> None:
    tensors, keys = tiny_decoder()
    save_gguf(tmp_path / "x.gguf", tensors, keys)
    st.load(tmp_path / "x.gguf", device="reference").run(input_ids=np.array([[1, 2]]))
    save_gguf(tmp_path / "x.gguf", tensors, {**keys, key: value})
    with pytest.raises(FileError):
        st.load(tmp_path / "x.gguf", device="reference")


def test_an_encoder_needs_ids_only(tmp_path: Path) -> None:
    model = st.load(folder(tmp_path, ENCODER, "bert"))
    ids = np.array([[1, 2, 3], [4, 5, 6]])
    plain = model.run(input_ids=ids)
    given = model.run(input_ids=ids, attention_mask=np.ones((2, 3), bool), token_type_ids=np.zeros((2, 3), np.int64))
    other = model.run(input_ids=ids, token_type_ids=np.ones((2, 3), np.int64))
    np.testing.assert_array_equal(plain["last_hidden_state"], given["last_hidden_state"])
    assert not np.array_equal(plain["last_hidden_state"], other["last_hidden_state"])


def test_missing_files_are_missing_files(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("none.onnx", "none.gguf", "none", "empty"):
        with pytest.raises(FileNotFoundError) as caught:
            st.load(tmp_path / name)
        assert isinstance(caught.value, FileError)


ONCE: tuple[tuple[str, str, Any], ...] = (  # what ended in another error, or went on and on
    ("deberta-v2", "pos_att_type", 1.5),
    ("bamba", "mamba_d_conv", 10**9),
    ("gemma3n_text", "altup_num_inputs", 10**9),
    ("qwen3_next", "head_dim", 10**9),
    ("deberta-v2", "max_position_embeddings", 10**9),
    ("deberta-v2", "num_attention_heads", 10**9),
    ("t5", "relative_attention_max_distance", 10**9),
    ("swin", "image_size", 10**9),
    ("detr", "d_model", 10**9),
    ("rt_detr", "encoder_hidden_dim", 10**9),
    ("rt_detr", "encoder_layers", 10**9),
    ("rt_detr", "num_feature_levels", 10**9),
    ("gemma3n_text", "activation_sparsity_pattern", ["a"] * 5),
    ("gemma3n_text", "intermediate_size", [96, True, 96, 96, 96]),
    ("gemma4_text", "num_kv_shared_layers", 4),
)  # fmt: skip


@pytest.mark.parametrize(("family", "key", "value"), ONCE)
def test_values_that_went_wrong_once(family: str, key: str, value: Any, tmp_path: Path) -> None:
    config, weights, beside = next(found for found in sound_models() if found[0]["model_type"] == family)
    save_safetensors(tmp_path / "model.safetensors", weights)
    for name, given in {"config.json": {**config, key: value}, **beside}.items():
        (tmp_path / name).write_text(json.dumps(given))

    def build() -> None:
        model = st.load(tmp_path, device="reference")
        if isinstance(model, Decoder):
            model._build(64, every=True).build().check()

    with pytest.raises(FileError, match=key if value != 10**9 else "0{9}|9{9}") as caught:
        build()
    assert caught.value.code in ("F140", "F142")
