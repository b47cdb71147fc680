"""The examples, run small and held against SciPy, closed forms, or what anyone would expect of them."""

from __future__ import annotations

import importlib.util
import wave
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import strata as st
from strata.cli.demo.menu import EXAMPLES

ROOT = Path(__file__).parents[2]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"examples/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_circuit_follows_scipy_and_its_parameters_are_found() -> None:
    from scipy.integrate import solve_ivp

    circuit = example("diode_circuit")
    time = np.arange(1, circuit.STEPS + 1) * circuit.DT
    drive = circuit.source(time)
    true = {k: st.asarray(np.float64(v)) for k, v in circuit.TRUE.items()}
    voltage = st.jit(circuit.simulate)(true, drive).numpy()
    r, i0 = circuit.TRUE["resistance"], circuit.TRUE["current"]

    def slope(t: float, v: np.ndarray) -> np.ndarray:
        diode = i0 * (np.exp(v / circuit.THERMAL) - 1)
        return ((circuit.source(np.float64(t)) - v) / r - diode) / circuit.CAPACITY

    exact = solve_ivp(slope, (0, time[-1]), [0.0], method="BDF", t_eval=time, rtol=1e-8, atol=1e-10).y[0]
    assert np.abs(voltage - exact).max() < 0.03  # backward Euler is of first order
    found, losses = circuit.fit(voltage, drive)
    assert losses[-1] < 1e-3 * losses[0]
    assert found["resistance"] == pytest.approx(r, rel=0.02)
    assert found["current"] == pytest.approx(i0, rel=0.1)


def test_the_circuit_gradient_is_that_of_differences() -> None:
    circuit = example("diode_circuit")
    drive = circuit.source(np.arange(1, 31) * circuit.DT)

    @st.jit
    def loss(logs: st.Tensor) -> st.Tensor:
        params = {"resistance": logs[0].exp(), "current": logs[1].exp()}
        return circuit.simulate(params, st.asarray(drive)).square().sum()

    at = np.log([1.2e3, 2e-9])
    gradient = st.grad(loss)(st.asarray(at)).numpy()
    for i in range(2):
        shift = np.eye(2)[i] * 1e-5
        slope = (loss(at + shift).item() - loss(at - shift).item()) / 2e-5
        assert gradient[i] == pytest.approx(slope, rel=1e-5)


def test_heat_decays_as_its_modes_and_can_be_run_backwards() -> None:
    heat = example("heat_equation")
    modes = {1: 1.0, 2: -0.3, 3: 0.5}
    final = st.jit(heat.evolve)(heat.exact(modes, 0.0)).numpy()
    np.testing.assert_allclose(final, heat.exact(modes, heat.END), atol=5e-4)
    start, losses = heat.recover(final)
    assert losses[-1] < 1e-5 * losses[0]
    assert np.abs(start - heat.exact(modes, 0.0)).max() < 0.02


def test_fourier_features_reach_the_least_squares_fit() -> None:
    fourier = example("fourier_features")
    x = np.sort(np.random.default_rng(0).uniform(-2, 2, fourier.SAMPLES))
    frequencies = np.arange(1, fourier.FEATURES + 1) * np.pi / 2
    weights, losses = fourier.fit(x, fourier.signal(x), frequencies)
    table = fourier.features(st.asarray(x), st.asarray(frequencies)).numpy()
    best = np.linalg.lstsq(table, fourier.signal(x), rcond=None)[0]
    floor = np.mean((table @ best - fourier.signal(x)) ** 2)
    assert losses[-1] == pytest.approx(floor, rel=0.01)
    np.testing.assert_allclose(weights, best, atol=0.02)


def test_digits_are_learnt() -> None:
    pytest.importorskip("sklearn")
    _, accuracy = example("digits").train(300)
    assert accuracy > 0.94


def test_splats_learn_a_scene_from_its_pictures() -> None:
    made = example("splats").fit(count=300, steps=24, size=32, views=2)
    assert np.mean(made["losses"][-2:]) < 0.75 * made["losses"][0]
    assert made["picture"].shape == made["aim"].shape == (32, 32, 3)


def test_a_language_model_learns_to_spell() -> None:
    """Better than the letters' frequencies alone."""
    text = example("language_model")
    letters = text.corpus()
    share = np.bincount(letters, minlength=len(text.ALPHABET)) / len(letters)
    entropy = -(share[share > 0] * np.log(share[share > 0])).sum()
    model, losses = text.train(steps=60, size=4)
    assert np.mean(losses[-5:]) < 0.95 * entropy
    said = text.write(model, "import ", count=8)
    assert said.startswith("import ")
    assert len(said) == 15
    assert said == text.write(model, "import ", count=8)


def test_vowels_are_read_from_a_wav_file(tmp_path: Path) -> None:
    voice = example("voice_activity")
    sound = voice.example()
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, 2, voice.RATE, 0, "NONE", "NONE"))
        file.writeframes((sound * 32767).astype(np.int16).tobytes())
    np.testing.assert_allclose(voice.read_wav(tmp_path / "a.wav"), sound, atol=1e-4)
    pitch = np.abs(np.fft.rfft(voice.vowel("a", 120.0, 0.5)))
    assert 100 < np.argmax(pitch[:100]) * 2 < 140  # the pitch is the lowest strong harmonic


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_an_example_is_short_and_has_a_picture(name: str) -> None:
    lines = (ROOT / f"examples/{name}.py").read_text("utf-8").splitlines()
    assert len(lines) < 100
    pictures = [p for p in (ROOT / "docs/gallery").glob(f"{name}.*") if p.suffix in (".png", ".svg")]
    assert len(pictures) == 1
    assert pictures[0].stat().st_size < 60_000
    page = (ROOT / "docs/gallery.md").read_text("utf-8")
    assert f"gallery/{pictures[0].name}" in page
    assert f"examples/{name}.py" in page
