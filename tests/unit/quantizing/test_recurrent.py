"""Decoders with recurrent states: a training step and calibration beside torch, for whom a sequence starts afresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.finetuning import TrainingStep
from strata.models import load
from strata.quantizing.calibrate import collect_activations
from tests.unit.models.random_models import random_model

torch: Any = pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.filterwarnings("ignore")

# Two kinds of Mamba, a convolution beside attention, a delta rule beside attention, and experts behind Mamba.
NAMES = ("mamba", "mamba2", "lfm2", "qwen3_next", "jamba")
LENGTH = 12


class Spelled:
    """A tokenizer for which a text is its token ids."""

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [int(word) for word in text.split()]


def parameters(theirs: Any) -> dict[str, Any]:
    """Parameters of a model of transformers under the names of ours."""
    return {name.split(".", 1)[-1] if "." in name else name: p for name, p in theirs.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_is_that_of_torch(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    theirs = random_model(tmp_path, name)
    model = load(tmp_path, context=64)
    assert any(slot.is_fixed for slot in model.config.slots)
    bound = model._build(LENGTH, every=True).build().bound
    known = {n: p for n, p in parameters(theirs).items() if n in bound and bound[n].shape == tuple(p.shape)}
    chosen = [n for n in known if "experts" not in n]
    assert len(chosen) >= 8
    step = TrainingStep(model, {}, batch=2, length=LENGTH, trained=chosen)
    ids = rng.integers(3, 128, (2, LENGTH + 1)).astype(np.int32)
    counts = np.ones((2, LENGTH), np.float32)
    counts[1, -3:] = 0
    first = step.run(ids, counts)
    loss, grads = step.run(ids, counts)  # what the first step left behind is not read
    assert loss == first[0]
    logits = theirs(torch.tensor(ids[:, :-1]).long(), use_cache=False).logits.double()
    each = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.tensor(ids[:, 1:]).long().flatten(), reduction="none"
    )
    wanted = (each * torch.tensor(counts).flatten()).sum() / float(counts.sum())
    wanted.backward()
    assert abs(loss - wanted.item()) <= 1e-4 * abs(wanted.item())
    for n in chosen:
        want = known[n].grad.numpy()
        assert np.abs(grads[n] - want).max() <= 2e-3 * max(np.abs(want).max(), 1e-3), n


@pytest.mark.parametrize("name", NAMES)
def test_calibration_reads_each_piece_from_the_start(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    theirs = random_model(tmp_path, name)
    model = load(tmp_path, context=64)
    model._make_tokenizer = Spelled
    texts = [" ".join(map(str, rng.integers(3, 128, count))) for count in (9, 21, 7)]
    found = collect_activations(model, texts, context=10)
    assert found.tokens == 9 + 21 - 1 + 7  # a piece of one token is left out
    given: dict[str, np.ndarray] = {}

    def watch(name: str) -> Any:
        def hook(module: Any, inputs: tuple[Any, ...]) -> None:
            rows = inputs[0].detach().double().numpy().reshape(-1, inputs[0].shape[-1])
            given[name] = given.get(name, 0) + (rows**2).sum(0)

        return hook

    for at, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(watch(at.split(".", 1)[-1]))
    with torch.no_grad():
        for text in texts:
            ids = Spelled().encode(text)
            for start in range(0, len(ids), 10):
                if len(ids[start : start + 10]) > 1:
                    theirs(torch.tensor([ids[start : start + 10]]), use_cache=False)
    both = [n for n in given if n in found.squares and "experts" not in n]
    assert len(both) >= 4
    for n in both:
        assert np.abs(found.squares[n] - given[n]).max() <= 1e-3 * given[n].max(), n
