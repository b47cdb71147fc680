"""Quantised models: perplexity near that of the original, files that are read again, reports, the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.cli import main
from strata.errors import FileError, OptionError
from strata.finetuning import LoraOptions, finetune
from strata.models import Decoder, load
from strata.quantizing import collect_activations, perplexity
from tests.unit.quantizing.small_lm import corpus, make_folder, train

pytest.importorskip("tokenizers")
TEXTS = [text[:1500] for text in corpus()[:3]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A language model after some steps of training."""
    return train(make_folder(tmp_path_factory.mktemp("lm") / "small"), steps=40)


def same(a: Any, b: Any) -> None:
    ids = np.arange(1, 20, dtype=np.int32)[None]
    first, second = (m.run(input_ids=ids)["logits"] for m in (a, b))
    assert np.linalg.norm(first - second) <= 1e-3 * np.linalg.norm(first)


def test_perplexity_is_the_exponential_of_the_mean_loss(trained: Decoder) -> None:
    found = perplexity(trained, TEXTS[:1], context=32)
    ids = trained.tokenizer.encode(TEXTS[0])
    lost = []
    for start in range(0, len(ids), 32):
        some = ids[start : start + 32]
        if len(some) < 2:
            continue
        logits = trained.run(input_ids=np.array([some]))["logits"][0].astype(np.float64)
        odds = np.exp(logits - logits.max(-1, keepdims=True))
        odds /= odds.sum(-1, keepdims=True)
        lost += [-np.log(odds[i, token]) for i, token in enumerate(some[1:])]
    assert found.tokens == len(lost)
    np.testing.assert_allclose(found.value, np.exp(np.mean(lost)), rtol=1e-5)
    assert found.value < 0.5 * trained.config.vocab  # it has learnt something


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "bound"), [("q4_k", 0.035), ("q6_k", 0.003), ("q8_0", 0.003), ("iq4_xs", 0.05)])
def test_gguf_files_keep_the_perplexity(trained: Decoder, kind: str, bound: float, tmp_path: Path) -> None:
    stages: set[str] = set()
    made = st.quantize(
        trained, format=kind, calibration=TEXTS, context=64, output=tmp_path / "m.gguf",
        progress=lambda stage, done, total: stages.add(stage),
    )  # fmt: skip
    report = made.report
    assert report.change is not None
    assert report.change < bound
    assert report.bytes_after < 0.6 * report.bytes_before
    assert {"perplexity before", "calibrate", "quantize", "perplexity after"} <= stages
    assert len(report.layers) == 15
    assert report.worst(1)[0].error == max(layer.error for layer in report.layers)
    again = load(tmp_path / "m.gguf", context=128)
    same(made, again)
    assert again.tokenizer.encode(TEXTS[0]) == trained.tokenizer.encode(TEXTS[0])
    assert again.is_quantized


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.01), ("fp8", 0.03), ("int4-awq", 0.1), ("gptq", 0.1)])
def test_folders_are_read_again(trained: Decoder, kind: str, bound: float, tmp_path: Path) -> None:
    made = st.quantize(trained, format=kind, calibration=TEXTS, context=64, output=tmp_path / "q", group_size=64)
    assert made.report.change < bound
    assert made.report.bytes_after < 0.7 * made.report.bytes_before
    again = load(tmp_path / "q", context=128)
    assert again.is_quantized
    same(made, again)
    assert perplexity(again, TEXTS, context=64).value < made.report.perplexity_before * (1 + bound)


def test_gptq_loses_less_than_rounding(trained: Decoder) -> None:
    """Of the results of matmuls, which is what it is for."""
    names = ["layers.0.mlp.down_proj", "layers.1.self_attn.o_proj"]
    acts = collect_activations(trained, TEXTS, products=names, context=64)
    from strata.quantizing import layouts

    for name in names:
        w, h = np.asarray(trained._build(8, every=True).weights[f"{name}.weight"]), acts.products[name]

        def lost(parts: dict[str, np.ndarray], w: np.ndarray = w, h: np.ndarray = h) -> float:
            away = layouts.as_blocks(parts, layouts.settings_of("gptq", 64, [])).dequantize() - w
            return float((away @ h * away).sum())

        assert lost(layouts.gptq_parts(w, h, 64)) < 0.8 * lost(layouts.gptq_parts(w, None, 64))


def test_importance_is_the_mean_square_of_what_matmuls_are_given(trained: Decoder) -> None:
    acts = collect_activations(trained, TEXTS[:1], products=["layers.0.self_attn.q_proj"], context=64)
    found = acts.importance("layers.0.self_attn.q_proj")
    assert found is not None
    np.testing.assert_allclose(np.diag(acts.products["layers.0.self_attn.q_proj"]) / acts.tokens, found, rtol=1e-4)
    np.testing.assert_array_equal(found, acts.importance("layers.0.self_attn.k_proj"))


def test_mistakes_are_told_before_any_work(trained: Decoder, tmp_path: Path) -> None:
    for options, said in (
        ({"format": "q9"}, "no format 'q9'"),
        ({"format": "gptq"}, "needs texts"),
        ({"format": "q4_k", "output": tmp_path / "folder"}, "a file named .gguf"),
        ({"format": "int8", "output": tmp_path / "m.gguf"}, "a folder"),
        ({"format": "int8", "group_size": 33}, "not a multiple of 32"),
    ):
        with pytest.raises(OptionError, match=said):
            st.quantize(trained, **options)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="not a decoder"):
        st.quantize(object())
    assert trained.source is not None
    with pytest.raises(FileError, match="is the model that is read"):
        st.quantize(trained, format="int8", output=trained.source)
    with pytest.raises(OptionError, match="no two tokens"):
        perplexity(trained, [""])
    np.testing.assert_array_equal(np.asarray(st.quantize(np.array([1.0, 2.0]), 0.5)), [2, 4])


def test_command_line(trained: Decoder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text(
        "\n".join(TEXTS[0].split("\n\n")[0].splitlines()[:3]) + "\n" + TEXTS[0].replace("\n\n", "\n")[:400]
    )
    folder, out = str(trained.source), str(tmp_path / "m.gguf")
    arguments = ["--format", "q6_k", "--calibrate", str(texts), "--context", "64", "--json"]
    assert main(["quantize", folder, "-o", out, *arguments]) in (0, None)
    report = json.loads(capsys.readouterr().out)
    assert report["perplexity_before"] > 1
    assert report["output"] == out
    assert main(["perplexity", out, str(texts), "--context", "64", "--json"]) in (0, None)
    found = json.loads(capsys.readouterr().out)
    np.testing.assert_allclose(found["perplexity"], report["perplexity_after"], rtol=1e-3)
    few = ["--steps", "2", "--batch", "1", "--length", "16", "--targets", "o_proj", "--json"]
    assert main(["finetune", out, str(texts), "-o", str(tmp_path / "adapter"), *few]) in (0, None)
    assert len(json.loads(capsys.readouterr().out)["losses"]) == 2
    assert load(out, context=64, adapter=tmp_path / "adapter").generate("a", max_tokens=2) is not None
    assert main(["quantize", folder, "-o", out, "--format", "q9"]) == 2


def test_lora_over_quantised_weights(trained: Decoder, tmp_path: Path) -> None:
    """The loss falls, weights stay as they are, and the adapter is one that is loaded like any other."""
    made = st.quantize(trained, format="q4_k", output=tmp_path / "m.gguf")
    base = load(tmp_path / "m.gguf", context=128)
    del made
    options = LoraOptions(
        rank=4, steps=12, batch=4, length=32, learning_rate=5e-3, targets=("q_proj", "v_proj", "up_proj")
    )
    found = finetune(base, ["the same words again and again. " * 40], options=options, output=tmp_path / "adapter")
    assert found.losses[-1] < 0.75 * found.losses[0]
    assert found.planned_bytes >= found.weight_bytes + found.activation_bytes
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA"
    assert settings["r"] == 4
    text = ["the same words again and again. " * 4]
    before = perplexity(base, text, context=32).value
    for source in (tmp_path / "m.gguf", trained.source):
        adapted = load(source, context=128, adapter=tmp_path / "adapter")
        assert perplexity(adapted, text, context=32).value < 0.75 * before
    with pytest.raises(MemoryError, match="the limit is 1000"):
        finetune(base, text, options=LoraOptions(length=8, memory_limit=1000))
    with pytest.raises(OptionError, match="no matmul is named x_proj"):
        finetune(base, text, options=LoraOptions(length=8, targets=("x_proj",)))
