"""LoRA over quantised weights against PEFT: the same losses step by step, and adapters that PEFT loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import strata as st
from strata.finetuning import LoraOptions, finetune
from strata.finetuning.lora import first_changes, token_rows
from strata.models import Decoder, load
from tests.unit.quantizing.peft_run import peft_losses, reference
from tests.unit.quantizing.small_lm import make_folder

torch = pytest.importorskip("torch", reason="needs torch")
peft = pytest.importorskip("peft", reason="needs peft")
pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("kind", ["q4_k", "q8_0"])
def test_losses_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    st.quantize(load(make_folder(tmp_path / "model"), context=64), format=kind, output=tmp_path / "m.gguf")
    base: Decoder = load(tmp_path / "m.gguf", context=64)
    options = LoraOptions(
        rank=4,
        steps=12,
        batch=4,
        length=32,
        learning_rate=5e-3,
        weight_decay=0.01,
        targets=("q_proj", "v_proj", "up_proj"),
    )
    texts, start = ["the same words again and again. " * 60], first_changes(base, options)
    rows = token_rows(base, texts, options)
    model, wanted = peft_losses(reference(base), dict(start), rows, options)
    found = finetune(base, texts, options=options, output=tmp_path / "adapter", start=start)
    assert wanted[-1] < 0.95 * wanted[0]
    np.testing.assert_allclose(found.losses, wanted, rtol=0.02)
    ids = rows[:2, :-1]
    again = peft.PeftModel.from_pretrained(model.unload(), tmp_path / "adapter")
    with torch.no_grad():
        theirs = again(torch.tensor(ids).long()).logits.numpy()
    ours = load(tmp_path / "m.gguf", context=64, adapter=tmp_path / "adapter").run(input_ids=ids)["logits"]
    assert np.linalg.norm(ours - theirs) <= 0.02 * np.linalg.norm(theirs)
