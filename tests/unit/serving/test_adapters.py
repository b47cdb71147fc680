"""Requests for adapters: each is answered as its own adapter would, whatever stands beside it in the queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from strata.io import save_safetensors
from strata.models import Decoder
from strata.serving import Engine, Service


def test_each_request_gets_its_adapter(
    decoder: Callable[..., Decoder], tmp_path: Path, rng: np.random.Generator
) -> None:
    folders = {}
    for name in ("fr", "de"):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        at = "base_model.model.model.layers.1.mlp.up_proj.lora_"
        parts = {f"{at}A.weight": (4, 64), f"{at}B.weight": (96, 4)}
        made = {n: rng.standard_normal(shape).astype(np.float32) / 2 for n, shape in parts.items()}
        save_safetensors(folders[name] / "adapter_model.safetensors", made)
        (folders[name] / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    model = decoder()
    asked = ["fr", "fr", None, "de", "fr", "de", "de", None]
    alone = model.adapted(folders)
    wanted = []
    for i, adapter in enumerate(asked):
        alone.use_adapter(adapter)
        wanted.append(alone.generate(f"prompt {i}", max_tokens=8))
    assert len(set(wanted)) > 3
    assert wanted[2] == model.generate("prompt 2", max_tokens=8)
    engine = Engine(model, max_requests=4, adapters=folders)
    requests = [engine.submit(f"prompt {i}", max_tokens=8, adapter=a) for i, a in enumerate(asked)]
    engine.run()
    assert [r.text() for r in requests] == wanted
    assert engine.metrics.snapshot()["counters"]["adapter_swaps"] == 6
    service = Service(engine, name="base")
    assert service.names == ("base", "fr", "de")
    body = {"prompt": "prompt 3", "max_tokens": 8, "temperature": 0}
    for named, adapter in (("de", None), ("base", "de"), (None, "de")):
        found = service.answer("/v1/completions", {**body, "model": named, "adapter": adapter})
        assert found["choices"][0]["text"] == wanted[3]
