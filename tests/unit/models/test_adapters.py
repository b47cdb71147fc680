"""LoRA adapters in PEFT's format: merged and apart, against weights that torch merged; quantised models; mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.errors import FileError, OptionError, UnknownNameError
from strata.io import quantized_tensor, save_gguf, save_safetensors
from strata.models import load
from strata.models.adapters import load_adapter, permuted_rows
from tests.unit.models.random_models import random_model, reference_logits

pytestmark = pytest.mark.filterwarnings("ignore")
SETTINGS = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def _write(folder: Path, parts: dict[str, np.ndarray], **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_safetensors(folder / "adapter_model.safetensors", parts)
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS | settings))
    return folder


def _changed(model: Any, names: tuple[str, ...], scale: float, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random changes of a torch model's products, added to it and given as PEFT names them."""
    torch = pytest.importorskip("torch")
    parts: dict[str, np.ndarray] = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] not in names:
            continue
        transposed = type(module).__name__ == "Conv1D"
        rows, columns = module.weight.shape[::-1] if transposed else module.weight.shape
        a, b = (rng.standard_normal(s).astype(np.float32) / 4 for s in ((4, columns), (rows, 4)))
        change = torch.tensor(b) @ torch.tensor(a) * scale
        module.weight.data += change.T if transposed else change
        parts |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
    return parts


@pytest.mark.parametrize(
    ("family", "names", "settings", "scale"),
    [
        ("llama", ("q_proj", "v_proj", "down_proj"), {}, 4.0),
        ("llama", ("q_proj", "k_proj", "o_proj", "gate_proj", "up_proj"), {"use_rslora": True}, 8.0),
        ("phi3", ("qkv_proj", "gate_up_proj"), {"alpha_pattern": {"qkv_proj": 16}}, 4.0),
        ("gpt2", ("c_attn", "c_fc"), {"fan_in_fan_out": True}, 4.0),
    ],
)
def test_merged_and_apart(
    tmp_path: Path, family: str, names: tuple[str, ...], settings: dict[str, Any], scale: float,
    rng: np.random.Generator,
) -> None:  # fmt: skip
    model = random_model(tmp_path / "model", family)
    ids = rng.integers(0, 128, (1, 30)).astype(np.int32)
    plain = reference_logits(model, ids)
    folder = _write(tmp_path / "adapter", _changed(model, names, scale, rng), **settings)
    wanted = reference_logits(model, ids)
    assert np.abs(wanted - plain).max() > 0.05 * np.abs(plain).max()
    for merge in (True, False):
        found = load(tmp_path / "model", context=64, adapter=folder, merge=merge).run(input_ids=ids)["logits"]
        assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max(), merge


def test_whole_weights_of_an_adapter_replace_the_models(tmp_path: Path, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    model = random_model(tmp_path / "model", "llama")
    head = rng.standard_normal((128, 64)).astype(np.float32)
    folder = _write(tmp_path / "adapter", {"base_model.model.lm_head.modules_to_save.weight": head})
    model.lm_head.weight.data = torch.tensor(head)
    ids = np.arange(9, dtype=np.int32)[None]
    found = load(tmp_path / "model", adapter=folder).run(input_ids=ids)["logits"]
    wanted = reference_logits(model, ids)
    assert np.abs(found - wanted).max() <= 1e-3 * np.abs(wanted).max()


def test_quantised_weights_keep_changes_apart(tmp_path: Path, rng: np.random.Generator) -> None:
    """A GGUF file stores queries and keys of a Llama in pairs; the adapter knows Hugging Face's order."""
    pytest.importorskip("torch")
    model = random_model(tmp_path / "model", "llama")
    parts = {n: p.detach().numpy() for n, p in model.state_dict().items()}
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
             "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}  # fmt: skip

    def pairs(w: np.ndarray, heads: int) -> np.ndarray:
        return np.ascontiguousarray(w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape))

    tensors: dict[str, Any] = {"token_embd.weight": parts["model.embed_tokens.weight"],
                               "output.weight": parts["lm_head.weight"],
                               "output_norm.weight": parts["model.norm.weight"]}  # fmt: skip
    for i in range(2):
        at = f"model.layers.{i}."
        tensors[f"blk.{i}.attn_norm.weight"] = parts[f"{at}input_layernorm.weight"]
        tensors[f"blk.{i}.ffn_norm.weight"] = parts[f"{at}post_attention_layernorm.weight"]
        for name, short in names.items():
            w = parts[f"{at}{'mlp' if short.startswith('ffn') else 'self_attn'}.{name}.weight"]
            w = pairs(w, {"q_proj": 4, "k_proj": 2}[name]) if name in ("q_proj", "k_proj") else w
            tensors[f"blk.{i}.{short}.weight"] = quantized_tensor(short, w, "q8_0")
    metadata = {"general.architecture": "llama", "llama.embedding_length": 64, "llama.block_count": 2,
                "llama.feed_forward_length": 96, "llama.context_length": 256, "llama.attention.head_count": 4,
                "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-6,
                "llama.rope.dimension_count": 16}  # fmt: skip
    save_gguf(tmp_path / "m.gguf", tensors, metadata)
    folder = _write(tmp_path / "adapter", _changed(model, ("q_proj", "k_proj", "up_proj"), 4.0, rng))
    ids = rng.integers(0, 128, (1, 20)).astype(np.int32)
    wanted = reference_logits(model, ids)
    found = load(tmp_path / "m.gguf", adapter=folder).run(input_ids=ids)["logits"]
    assert np.linalg.norm(found - wanted) <= 0.03 * np.linalg.norm(wanted)  # 8 bits
    model = load(tmp_path / "m.gguf").adapted({"fr": folder})
    plain = model.run(input_ids=ids)["logits"]
    model.use_adapter("fr")
    assert np.abs(model.run(input_ids=ids)["logits"] - found).max() <= 1e-5 * np.abs(found).max()
    model.use_adapter(None)
    assert np.array_equal(model.run(input_ids=ids)["logits"], plain)
    with pytest.raises(OptionError, match="kept apart already"):
        load(tmp_path / "m.gguf", adapter=folder).adapted({"fr": folder}).run(input_ids=ids)


def test_mistakes_in_adapters_are_named(tmp_path: Path) -> None:
    random_model(tmp_path / "model", "llama")
    a, b = np.ones((4, 64), np.float32), np.ones((64, 4), np.float32)
    at = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    cases: list[tuple[dict[str, np.ndarray], dict[str, Any], str]] = [
        ({f"{at}A.weight": a}, {}, "parts of 'layers.0.self_attn.q_proj' do not fit"),
        ({f"{at}A.weight": a, f"{at}B.weight": b[:60]}, {}, r"is \[60, 64\], the weight is \[64, 64\]"),
        ({f"{at}A.weight": a, f"{at}B.weight": b}, {"use_dora": True}, "DoRA"),
        ({f"{at}A.weight": a, f"{at}B.weight": b}, {"peft_type": "IA3"}, "IA3"),
        ({f"{at}A.weight": a, f"{at}B.weight": b}, {"lora_alpha": "much"}, "lora_alpha 'much'"),
        ({f"{at}embedding_A": a}, {}, "does not belong to a matmul"),
        ({f"{at.replace('q_proj', 'z_proj')}{p}.weight": x for p, x in (("A", a), ("B", b))}, {}, "does not have"),
    ]
    for parts, settings, message in cases:
        with pytest.raises(FileError, match=message):
            load(tmp_path / "model", adapter=_write(tmp_path / "adapter", parts, **settings))
    with pytest.raises(FileError, match="cannot be read"):
        load(tmp_path / "model", adapter=tmp_path / "nowhere")


def test_adapters_change_places(tmp_path: Path, rng: np.random.Generator) -> None:
    """Of other ranks and products, one at a time; without one, the model as it is."""
    random_model(tmp_path / "model", "llama")
    at = "base_model.model.model.layers.{}.{}.lora_{}.weight"

    def parts(rank: int, sizes: dict[str, tuple[int, int]]) -> dict[str, np.ndarray]:
        return {
            at.format(layer, name, part): rng.standard_normal(shape).astype(np.float32) / 4
            for layer in range(2)
            for name, (n, k) in sizes.items()
            for part, shape in (("A", (rank, k)), ("B", (n, rank)))
        }

    one = _write(tmp_path / "one", parts(4, {"self_attn.q_proj": (64, 64), "mlp.down_proj": (64, 96)}))
    two = _write(tmp_path / "two", parts(7, {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64)}), r=7)
    model = load(tmp_path / "model", context=64).adapted({"one": one, "two": two})
    ids = rng.integers(0, 128, (2, 30)).astype(np.int32)
    seen = []
    for name, folder in (("one", one), ("two", two), (None, None), ("one", one)):
        model.use_adapter(name)
        wanted = load(tmp_path / "model", context=64, adapter=folder).run(input_ids=ids)["logits"]
        found = model.run(input_ids=ids)["logits"]
        assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()
        seen.append(found)
    assert np.array_equal(seen[0], seen[3])
    assert np.abs(seen[0] - seen[1]).max() > 1e-2
    with pytest.raises(UnknownNameError, match="no adapter 'three'; known: one, two"):
        model.use_adapter("three")
    with pytest.raises(UnknownNameError, match="known: none"):
        load(tmp_path / "model").use_adapter("one")
    whole = {"base_model.model.lm_head.modules_to_save.weight": np.ones((128, 64), np.float32)}
    with pytest.raises(FileError, match=r"replaces 'lm_head.weight' as a whole"):
        load(tmp_path / "model").adapted({"one": _write(tmp_path / "three", whole)})
    table = parts(2, {"input_layernorm": (64, 64)})
    with pytest.raises(FileError, match="the weight is"):
        load(tmp_path / "model").adapted({"one": _write(tmp_path / "three", table)}).run(input_ids=ids)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora_alpha": 10**400}, "gives no scale"),
        ({"lora_alpha": True}, "gives no scale"),
        ({"alpha_pattern": {"q_proj[": 3}}, "cannot be read"),
        ({"alpha_pattern": {"(a+)+": 3}}, "repeats what repeats"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    at = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    parts = {f"{at}A.weight": np.ones((4, 8), np.float32), f"{at}B.weight": np.ones((9, 4), np.float32)}
    folder = _write(tmp_path / "adapter", parts, **settings)
    with pytest.raises(FileError, match=told):
        load_adapter(folder)


def test_rows_that_do_not_pair_are_left_to_be_refused(tmp_path: Path) -> None:
    at = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    parts = {f"{at}A.weight": np.ones((4, 8), np.float32), f"{at}B.weight": np.ones((9, 4), np.float32)}
    found = load_adapter(_write(tmp_path / "adapter", parts))
    assert permuted_rows(found, {"q_proj": 4}).changes["layers.0.self_attn.q_proj"].b.shape == (9, 4)
