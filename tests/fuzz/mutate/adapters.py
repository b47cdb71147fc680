"""LoRA adapters in PEFT's format beside a sound model: settings, header and tensors are changed."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np

from strata.io import quantized_tensor, save_gguf, save_safetensors
from strata.models import load
from tests.fuzz.mutate.base import Files, Format
from tests.fuzz.mutate.changes import change_bytes, change_json, json_bytes
from tests.fuzz.mutate.configs import DECODER, shapes

SETTINGS = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], "use_rslora": False,
    "use_dora": False, "alpha_pattern": {"q_proj": 8}, "rank_pattern": {}, "bias": "none", "fan_in_fan_out": False,
    "modules_to_save": None,
}  # fmt: skip
WORDS = ("LORA", "IA3", "F16", "I32", "U8", "BF16", "C64", "BOOL", "(", "(a+)+$", "[", "lora_only", "all")


class Adapters(Format):
    name = "adapter"

    def prepare(self, folder: Path) -> None:
        rng = np.random.default_rng(0)
        self.base = folder / "base"
        self.base.mkdir(exist_ok=True)
        weights = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes(DECODER).items()}
        save_safetensors(self.base / "model.safetensors", weights)
        (self.base / "config.json").write_text(json.dumps(DECODER))
        parts = {}
        for name, n, k in (("self_attn.q_proj", 8, 8), ("mlp.down_proj", 8, 12)):
            at = f"base_model.model.model.layers.0.{name}.lora_"
            parts[f"{at}A.weight"] = rng.standard_normal((2, k)).astype(np.float32)
            parts[f"{at}B.weight"] = rng.standard_normal((n, 2)).astype(np.float32)
        parts["base_model.model.model.norm.modules_to_save.weight"] = np.ones(8, np.float32)
        path = folder / "adapter_model.safetensors"
        save_safetensors(path, parts)
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        self.header, self.body = json.loads(data[8 : 8 + size]), data[8 + size :]
        (folder / "adapter_config.json").write_text(json.dumps(SETTINGS))
        self._gguf(folder)
        assert self.attempt(folder, random.Random(0)) == "ran"
        shutil.rmtree(folder / "base")

    def _gguf(self, folder: Path) -> None:
        """The sound model: a folder's files, and a GGUF file whose queries lie in another order."""
        self.files = {name: (self.base / name).read_bytes() for name in ("model.safetensors", "config.json")}
        rng = np.random.default_rng(1)
        names = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64),
                 "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}  # fmt: skip
        tensors = {
            f"blk.0.{n}.weight": quantized_tensor(
                f"blk.0.{n}.weight", rng.standard_normal(s).astype(np.float32), "q8_0"
            )
            for n, s in names.items()
        }
        plain = {"token_embd.weight": (16, 64), "output_norm.weight": (64,), "blk.0.attn_norm.weight": (64,),
                 "blk.0.ffn_norm.weight": (64,)}  # fmt: skip
        sizes = {"block_count": 1, "context_length": 32, "embedding_length": 64, "feed_forward_length": 96,
                 "attention.head_count": 4, "attention.head_count_kv": 2}  # fmt: skip
        place = folder / "base" / "m.gguf"
        arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in plain.items()}
        save_gguf(place, {**tensors, **arrays}, {"general.architecture": "llama",
                                                  **{f"llama.{k}": v for k, v in sizes.items()}})  # fmt: skip
        self.files["m.gguf"] = place.read_bytes()

    def mutant(self, rng: random.Random) -> Files:
        settings = change_json(SETTINGS, rng, WORDS) if rng.random() < 0.6 else SETTINGS
        header = change_json(self.header, rng, WORDS) if rng.random() < 0.6 else self.header
        text = json_bytes(header, rng)
        text += b" " * (-len(text) % 8)
        body = change_bytes(self.body, rng) if rng.random() < 0.2 else self.body
        return {
            "adapter_config.json": json_bytes(settings, rng),
            "adapter_model.safetensors": len(text).to_bytes(8, "little") + text + body,
            **{f"base/{name}": data for name, data in self.files.items()},
        }

    def attempt(self, folder: Path, rng: random.Random) -> str:
        of_gguf = rng.random() < 0.2
        base = folder / "base" / "m.gguf" if of_gguf else folder / "base"
        if not of_gguf and rng.random() < 0.4:
            model = load(base, device="reference").adapted({"a": folder})
            builder = model._build(16, every=False)
            builder.changes = model._adapters.blank
            builder.build()
            model._adapters.check(builder.weights, builder.bound)
            model._adapters.active = "a"
            assert model._adapters.values()
        else:
            model = load(base, device="reference", adapter=folder, merge=rng.random() < 0.5)
            builder = model._build(16, every=False).build()
        builder.check()
        return "ran"
