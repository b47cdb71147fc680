"""Training where the model is: parameters, optimiser states and checkpoints stay on its device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata import nn
from strata.backends import registry
from strata.backends.resident import HOMES
from strata.core import flatten
from tests.fake_cuda import FakeCore, fake_backend
from tests.unit.nn.test_train import data, loss, model
from tests.unit.tensor.test_residence import FOUND

FAKE = "fake_training"


@pytest.fixture
def core() -> Iterator[FakeCore]:
    made = FakeCore()
    st.register_backend(FAKE, fake_backend(made, FAKE))
    yield made
    HOMES.remove(registry._made.pop(FAKE).home)  # type: ignore[arg-type]


@pytest.fixture(params=["xla", FAKE, *FOUND])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == FAKE:
        request.getfixturevalue("core")
    return str(request.param)


def devices(tree: Any) -> set[str]:
    return {str(x.device) for x in flatten(tree)[0] if isinstance(x, st.Tensor)}


def test_a_module_moves_and_the_one_it_was_stays(device: str) -> None:
    own = model()
    moved = own.to(device)
    assert devices(own) == {"cpu"}
    assert devices(moved) == {device}
    np.testing.assert_array_equal(moved.to("cpu").state_dict()["0.weight"], own.state_dict()["0.weight"])
    moved.load_state_dict({name: np.full(x.shape, 2, np.float32) for name, x in own.named_tensors().items()})
    assert devices(moved) == {device}
    assert moved.state_dict()["0.weight"][0, 0] == 2


@pytest.mark.parametrize("optimizer", [st.optim.AdamW(0.02), st.optim.SGD(0.02, momentum=0.9)], ids=["adamw", "sgd"])
def test_an_optimiser_keeps_its_state_beside_the_parameters(device: str, optimizer: Any) -> None:
    def step(params: Any, state: Any, x: Any) -> Any:
        return optimizer.update(params, st.grad(lambda w: ((x @ w) ** 2).mean())(params), state)

    x, w = np.eye(3, dtype=np.float32), np.ones((3, 2), np.float32)
    here, there = (st.tensor(w, device=name) for name in ("cpu", device))
    wanted, _ = st.jit(step)(here, optimizer.init(here), x)
    found, state = st.jit(step)(there, optimizer.init(there), x)
    assert devices((found, state)) == {device}
    np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-6)


def test_a_loop_trains_a_model_where_it_is_and_resumes_there(device: str, tmp_path: Path) -> None:
    trainer = nn.Trainer(loss, st.optim.AdamW(0.02), clip_norm=1.0)
    wanted = trainer.fit(trainer.init(model()), data(8), 8)
    start = trainer.init(model().to(device))
    assert devices(start) == {device}
    trainer.fit(start, data(8), 5, checkpoints=tmp_path, save_every=5)
    found = trainer.fit(trainer.init(model().to(device)), data(8), 8, checkpoints=tmp_path)
    assert devices(found) == {device}
    for x, y in zip(found["model"].parameters(), wanted["model"].parameters(), strict=True):
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-4, atol=1e-6)


def test_a_model_that_is_trained_stays_as_it_was(device: str) -> None:
    own = model().to(device)
    before = own.state_dict()["0.weight"].copy()
    trainer = nn.Trainer(loss, st.optim.SGD(0.1))
    trainer.fit(trainer.init(own), data(3), 3)
    np.testing.assert_array_equal(own.state_dict()["0.weight"], before)


def test_steps_move_their_batches_and_wait_for_nothing(core: FakeCore) -> None:
    """Two arrays of 8 rows, of 4 columns and of 1, go up for each step. Nothing comes down until a loss is read."""
    trainer = nn.Trainer(loss, st.optim.AdamW(0.02))
    seen = []
    state = trainer.fit(trainer.init(model().to(FAKE)), data(4), 4, progress=False)
    core.log.clear()
    trainer.fit(state, data(5), 5, progress=False, on_step=lambda _, metrics: seen.append(metrics["loss"]))
    kinds = Counter(line.partition(" ")[0] for line in core.log)
    assert set(kinds) == {"copy", "patch", "graph"}
    assert kinds["graph"] == 5
    assert Counter(line for line in core.log if line.startswith("copy ")) == {"copy 128": 5, "copy 32": 5, "copy 8": 5}
    assert all(x.device == FAKE for x in seen)
    seen[-1].item()
    assert "sync" in core.log
