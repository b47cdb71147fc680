"""The training loop: accumulation, mixed precision, and checkpoints that survive being killed."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import strata as st
from strata import nn
from strata.errors import FileError, OptionError


def model():
    nn.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss(m, x, y):
    return ((m(x) - y) ** 2).mean()


def data(steps, size=8):
    rng = np.random.default_rng(1)
    for _ in range(steps):
        x = rng.standard_normal((size, 4)).astype("f")
        yield x, x.sum(1, keepdims=True)


def losses(trainer, steps=40):
    seen = []
    trainer.fit(trainer.init(model()), data(steps), steps, on_step=lambda i, m: seen.append(m["loss"].item()))
    return seen


def test_it_learns():
    seen = losses(nn.Trainer(loss, st.optim.Adam(0.02)), 150)
    assert np.mean(seen[-10:]) < 0.1 * np.mean(seen[:5])


def test_accumulation_is_the_whole_batch():
    whole = losses(nn.Trainer(loss, st.optim.Adam(0.02)))
    parts = losses(nn.Trainer(loss, st.optim.Adam(0.02), accumulate=4))
    np.testing.assert_allclose(parts, whole, rtol=1e-3)
    with pytest.raises(OptionError, match="does not split into 3 parts"):
        losses(nn.Trainer(loss, st.optim.Adam(0.02), accumulate=3), 1)


def test_mixed_precision_follows_full_precision():
    whole = losses(nn.Trainer(loss, st.optim.Adam(0.02)))
    for precision, scale in (("bf16", None), ("f16", nn.LossScale(2.0**8))):
        trainer = nn.Trainer(loss, st.optim.Adam(0.02), precision=precision, loss_scale=scale)
        np.testing.assert_allclose(losses(trainer), whole, rtol=0.2, atol=0.05)


def test_an_overflow_changes_nothing_but_the_scale():
    trainer = nn.Trainer(loss, st.optim.SGD(0.01), precision="f16", loss_scale=nn.LossScale(2.0**15, interval=2))
    state = trainer.init(model())
    before = {k: v.copy() for k, v in state["model"].state_dict().items()}
    x = np.full((8, 4), 6e4, "f")
    state, metrics = trainer.step(state, (x, np.full((8, 1), -6e4, "f")))
    assert metrics["scale"].item() == 2.0**14
    for name, array in state["model"].state_dict().items():
        np.testing.assert_array_equal(array, before[name])
    for batch in data(2):
        state, metrics = trainer.step(state, batch)
    assert metrics["scale"].item() == 2.0**15
    assert state["optimizer"]["count"].item() == 2


def test_keys_statistics_and_clipping():
    class Net(nn.Module):
        def __init__(self):
            self.norm, self.drop, self.out = nn.BatchNorm(4), nn.Dropout(0.5), nn.Linear(4, 1)

        def __call__(self, x, key):
            return self.out(self.drop(self.norm(x), key))

    def noisy(m, x, y, key):
        return ((m(x, key) - y) ** 2).mean(), m

    trainer = nn.Trainer(noisy, st.optim.AdamW(0.01), clip_norm=0.1, accumulate=2)
    state = trainer.init(Net())
    for batch in data(3):
        state, metrics = trainer.step(state, batch)
    assert (state["model"].norm.running_var != 1.0).any().item()
    assert metrics["grad_norm"].item() > 0


def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path):
    trainer = nn.Trainer(loss, st.optim.AdamW(0.02))
    whole = trainer.fit(trainer.init(model()), data(20), 20)
    trainer.fit(trainer.init(model()), data(20), 7, checkpoints=tmp_path, save_every=5)
    assert nn.latest(tmp_path).step == 7
    rest = trainer.fit(trainer.init(model()), data(20), 20, checkpoints=tmp_path, save_every=5, keep=2)
    for a, b in zip(whole["model"].parameters(), rest["model"].parameters(), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert sorted(p.name for p in tmp_path.glob("*.json")) == ["step-00000015.json", "step-00000020.json"]


def test_damaged_checkpoints_are_passed_over(tmp_path):
    tree = {"a": st.tensor([1.0, 2.0]), "b": [st.tensor(3)]}
    for step in (1, 2, 3):
        nn.save_checkpoint(tmp_path, step, tree, {"note": step})
    (tmp_path / "step-00000003.json").write_text("{")
    data_file = tmp_path / "step-00000002.safetensors"
    data_file.write_bytes(data_file.read_bytes()[:-1])
    found = nn.latest(tmp_path)
    assert (found.step, found.extra) == (1, {"note": 1})
    loaded = found.load(tree)
    assert loaded["a"].tolist() == [1.0, 2.0]
    assert loaded["b"][0].item() == 3
    assert nn.leaf_names(tree) == ["a", "b.0"]
    with pytest.raises(FileError, match="has no 'c'"):
        found.load({"c": st.tensor(1.0)})
    with pytest.raises(FileError, match=r"'a' is f32\[2\], it must be f32\[3\]"):
        found.load({"a": st.zeros((3,))})
    assert nn.latest(tmp_path / "nowhere") is None


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a signal that cannot be caught")
def test_a_killed_run_leaves_a_checkpoint(tmp_path):
    script = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_train import *
        trainer = nn.Trainer(loss, st.optim.AdamW(0.02))
        trainer.fit(trainer.init(model()), data(10**6), 10**6, checkpoints={str(tmp_path)!r}, save_every=1)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], env=dict(os.environ))
    deadline = time.time() + 60
    while not (len(list(tmp_path.glob("*.json"))) >= 2) and time.time() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    found = nn.latest(tmp_path)
    assert found is not None
    assert json.loads(found.manifest.read_text())["step"] == found.step
    trainer = nn.Trainer(loss, st.optim.AdamW(0.02))
    state = found.load(trainer.init(model()))
    assert state["optimizer"]["count"].item() == found.step


def test_mistakes():
    with pytest.raises(OptionError, match="precision"):
        nn.Trainer(loss, st.optim.SGD(0.1), precision="i8")
    with pytest.raises(OptionError, match="accumulate"):
        nn.Trainer(loss, st.optim.SGD(0.1), accumulate=0)
