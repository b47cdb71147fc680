"""Families of images, speech and encoder-decoders give what transformers gives (tests/families/vectors.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.errors import FileError, OptionError
from tests.families import oracle, stored
from tests.families.cases import CASES

KNOWN = stored.read()


def folder(path: Path, name: str, **changes: Any) -> Path:
    """A model as a folder; `changes` are made to config.json."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**KNOWN[name]["config"], **changes}), "utf-8")
    oracle.write_weights(path, {k: tuple(v) for k, v in KNOWN[name]["weights"].items()})
    if CASES[name].generation:
        stored.complete(path, CASES[name].generation, CASES[name].config["vocab_size"])
    return path


def test_every_case_is_stored() -> None:
    assert set(KNOWN) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_results(name: str, tmp_path: Path) -> None:
    model = st.load(folder(tmp_path / "model", name), device=CASES[name].device)
    found = model.run(**CASES[name].inputs(np.random.default_rng(0)))
    for key, wanted in KNOWN[name]["results"].items():
        assert list(found[key].shape) == KNOWN[name]["shapes"][key]
        size = max(np.abs(wanted).max(), 1e-3)
        np.testing.assert_allclose(stored.sampled(found[key]), wanted, atol=2e-4 * size + 1e-6, rtol=0)


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].tokens])
def test_tokens_greedy_and_by_beams(name: str, tmp_path: Path) -> None:
    model = st.load(folder(tmp_path / "model", name))
    for beams, rows in KNOWN[name]["tokens"].items():
        assert stored.generated(model, CASES[name], int(beams)) == rows


@pytest.mark.parametrize("name", [n for n in CASES if CASES[n].sees])
def test_tokens_from_images(name: str, tmp_path: Path) -> None:
    assert stored.seen_tokens(st.load(folder(tmp_path / "model", name)), CASES[name]) == KNOWN[name]["seen"]


def test_speech_in_windows_with_times(tmp_path: Path) -> None:
    """Languages, tasks, times, beams, and sound of several windows."""
    assert stored.transcribed(st.load(folder(tmp_path / "model", "whisper"))) == KNOWN["whisper"]["speech"]


def test_a_batch_is_its_rows(tmp_path: Path) -> None:
    """Sources of several lengths in one batch give what each gives alone."""
    model = st.load(folder(tmp_path / "model", "bart"))
    given = CASES["bart"].inputs(np.random.default_rng(0))
    rows = [list(map(int, r[m])) for r, m in zip(given["input_ids"], given["attention_mask"], strict=True)]
    assert model.generate_ids(rows, max_tokens=12) == [model.generate_ids([r], max_tokens=12)[0] for r in rows]


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("vit", {"hidden_size": 40}, "'embeddings.cls_token' is f32[1, 1, 32], the configuration asks for [1, 1, 40]"),
        ("vit", {"num_hidden_layers": 3}, "the configuration has 3 layers, the weights have 2"),
        ("vit", {"patch_size": 4}, "'embeddings.position_embeddings' is f32[1, 10, 32], the configuration asks for"),
        ("vit", {"hidden_act": "zork"}, "hidden_act = 'zork'"),
        (
            "clip",
            {"projection_dim": 8},
            "'visual_projection.weight' is f32[16, 32], the configuration asks for [8, 32]",
        ),
        ("swin", {"embed_dim": 16}, "'embeddings.norm.weight' is f32[8], the configuration asks for [16]"),
        ("swin", {"num_heads": [3, 4]}, "8 features for 3 heads"),
        ("swin", {"window_size": 30}, "are smaller than windows of 30 in stage 0"),
        ("swinv2", {"depths": [2, 2]}, "the weights have no 'encoder.layers.1.blocks.1.layernorm_before.weight'"),
        ("detr", {"num_queries": 7}, "'query_position_embeddings.weight' is f32[6, 16], the configuration asks for"),
        ("detr", {"encoder_layers": 2}, "the configuration has 2 layers, the weights have 1"),
        ("detr", {"dilation": True}, "a dilated backbone"),
        ("rt_detr", {"normalize_before": True}, "normalize_before"),
        ("rt_detr", {"eval_size": [64, 64]}, "eval_size"),
        ("wav2vec2", {"add_adapter": True}, "add_adapter = True"),
        ("wav2vec2, norms first", {"adapter_attn_dim": 16}, "adapter_attn_dim = 16"),
        ("hubert", {"conv_pos_batch_norm": True}, "conv_pos_batch_norm"),
        ("rt_detr", {"decoder_n_points": 3}, "sampling_offsets.weight' is f32[32, 16], the configuration asks for"),
        ("resnet", {"depths": [1, 2]}, "3 hidden_sizes, 2 depths for its stages"),
        ("swinv2", {"image_size": 2}, "are smaller than windows of 8 in stage 1"),
        ("rt_detr", {"encode_proj_layers": [5]}, "2 features, encode_proj_layers = [5]"),
        ("smolvlm", {"scale_factor": 3}, "are not divided by 3"),
        ("smolvlm", {"image_token_id": None}, "the configuration has no image_token_id"),
        ("t5", {"d_ff": 40}, "DenseReluDense.wi.weight' is f32[48, 32], the configuration asks for [40, 32]"),
        ("bart", {"decoder_layers": 9}, "the configuration has 9 layers, the weights have 3"),
    ],
)
def test_weights_that_are_not_the_configurations(name: str, changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(FileError) as caught:
        st.load(folder(tmp_path / "model", name, **changes))
    assert told in str(caught.value)


def test_arguments_that_do_not_fit(tmp_path: Path) -> None:
    model = st.load(folder(tmp_path / "model", "bart"))
    with pytest.raises(OptionError, match="65 tokens are more than the 64"):
        model.generate_ids([[5] * 65])
    with pytest.raises(OptionError, match="a source is empty"):
        model.generate_ids([[5], []])
    with pytest.raises(OptionError, match="takes input_ids"):
        model.run(zork=1)
