"""Models and training steps leave nothing to the host on `cuda`: the plans of all that we ship, without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import strata as st
from strata import nn
from strata.cli.demo.menu import EXAMPLES
from strata.models import PAGE, PagedCache, Sampler
from strata.models.generating.choosing import DRAW, Chooser
from tests.dry_cuda import DryBackend, dry_cuda
from tests.families import stored
from tests.families.cases import CASES
from tests.programs.test_training_examples import example
from tests.unit.models import encoder_vectors, test_decoder_vectors, test_encoders, test_families
from tests.unit.models.decoder_vectors import prompt

DEVICE = "dry_cuda"


@pytest.fixture(scope="module")
def device() -> Iterator[DryBackend]:
    with dry_cuda(DEVICE) as made:
        yield made


@pytest.fixture
def plans(device: DryBackend) -> DryBackend:
    device.compiled.clear()
    return device


def check(plans: DryBackend) -> None:
    assert plans.compiled, "nothing was compiled for the device"
    assert {name: steps for name, steps in plans.compiled if steps} == {}


@pytest.mark.few(6)
@pytest.mark.parametrize("name", test_decoder_vectors.KNOWN)
def test_decoder_families(name: str, plans: DryBackend, tmp_path: Path) -> None:
    """A prompt, tokens one by one, several at a time; pages where there are some."""
    model = st.load(test_decoder_vectors.folder(tmp_path / "model", name), device=DEVICE)
    ids = prompt()
    list(model.tokens(ids[0].tolist(), 2, Sampler()))
    if name in test_decoder_vectors.PAGED:
        cache = PagedCache(model, 4)
        table = cache.table()
        table.reserve(PAGE + 1)
        cache.step([table], np.ascontiguousarray(ids[:, :3]))
        cache.step([table], np.ascontiguousarray(ids[:, 3:4]))
    check(plans)


@pytest.mark.parametrize("kind", [{}, {"draws": True}, {"draws": True, "filters": True}])
def test_choices_of_tokens(kind: dict[str, bool], plans: DryBackend) -> None:
    """The likeliest, and those that are drawn, by top-k and top-p as well."""
    graph = Chooser(DEVICE).graph(**{"draws": False, **kind})
    feeds = {"logits": np.zeros((8, 1000), np.float32), "rows": np.zeros((8, 3), np.int64)}
    feeds |= {"tokens": np.zeros((9, 1, 1), np.int32)} | ({"draws": np.ones((8, len(DRAW)))} if kind else {})
    graph.run(feeds)
    check(plans)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", encoder_vectors.FAMILIES)
def test_encoder_families(name: str, plans: DryBackend, tmp_path: Path) -> None:
    ids, mask = encoder_vectors.batch()
    model = st.load(test_encoders.folder(tmp_path / "model", name), device=DEVICE)
    model.run(input_ids=ids.astype(np.int32), attention_mask=mask)
    model.embed_ids([list(map(int, row)) for row in ids])
    check(plans)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", CASES)
def test_images_speech_and_encoder_decoders(name: str, plans: DryBackend, tmp_path: Path) -> None:
    case = CASES[name]
    model = st.load(test_families.folder(tmp_path / "model", name), device=DEVICE)
    model.run(**case.inputs(np.random.default_rng(0)))
    if case.tokens:
        for beams in (1, 2):
            stored.generated(model, case, beams)
    check(plans)


def _circuit(circuit: Any) -> None:
    drive = circuit.source(np.arange(1, 31) * circuit.DT)
    circuit.fit(np.zeros(30), drive, steps=2)


def _heat(heat: Any) -> None:
    heat.recover(np.zeros(heat.POINTS), steps=2)


def _fourier(fourier: Any) -> None:
    x = np.linspace(-1.0, 1.0, 16)
    fourier.fit(x, fourier.signal(x), np.arange(1.0, 3.0), steps=2)


def _digits(digits: Any) -> None:
    pytest.importorskip("sklearn")
    digits.train(2)


def _letters(text: Any) -> None:
    model, _ = text.train(steps=2, size=2)
    text.write(model, "import ", count=1)


def _splats(splats: Any) -> None:
    splats.fit(count=30, steps=2, size=32, views=1)


TRAINING: dict[str, Callable[[Any], None]] = {
    "diode_circuit": _circuit, "heat_equation": _heat, "fourier_features": _fourier, "digits": _digits,
    "language_model": _letters, "splats": _splats,
}  # fmt: skip
WITHOUT_TRAINING = {"ocr", "semantic_search", "voice_activity"}  # they load models that are not ours


@pytest.mark.few(2)
@pytest.mark.parametrize("name", TRAINING)
def test_examples(name: str, plans: DryBackend) -> None:
    with st.config.using(device=DEVICE):
        TRAINING[name](example(name))
    check(plans)


def test_a_step_on_the_host_is_found(plans: DryBackend) -> None:
    g = st.Graph("transform")
    g.outputs(st.ops.fft(g.input("x", (3, st.sym("N", 1)), "f32")))
    st.Session(DEVICE).compile(g)
    assert [steps for _, steps in plans.compiled] == [["fft"]]


def test_every_example_that_trains_is_here() -> None:
    assert EXAMPLES.keys() <= TRAINING.keys() | WITHOUT_TRAINING


OPTIMIZERS = [
    kind for kind in vars(st.optim).values()
    if inspect.isclass(kind) and issubclass(kind, st.optim.Optimizer) and kind is not st.optim.Optimizer
]  # fmt: skip


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_optimizers(kind: Any, plans: DryBackend) -> None:
    with st.config.using(device=DEVICE):
        nn.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10),
        )  # fmt: skip
        trainer = nn.Trainer(lambda m, x, y, key: st.cross_entropy(m(x, key), y), kind(1e-3), clip_norm=1.0)
        batch = np.zeros((2, 3, 6, 6), np.float32), np.zeros(2, np.int64)
        trainer.fit(trainer.init(model), iter([batch] * 3), 3)
    check(plans)
