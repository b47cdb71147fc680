"""Sound files, log-mel features, and transcription from a file."""

from __future__ import annotations

import io
import json
import struct
import wave
from pathlib import Path

import numpy as np
import pytest

import strata as st
from strata.cli import main
from strata.errors import FileError, OptionError, ShapeError, UnknownNameError
from strata.models.audio.mel import MelSettings
from strata.models.audio.sound import as_samples, decode_wav, resampled
from tests.families import stored
from tests.unit.models.test_families import folder


def wav(samples: np.ndarray, rate: int = 16000, channels: int = 1, bits: int = 16) -> bytes:
    """A file as Python's own module writes it."""
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(bits // 8)
        file.setframerate(rate)
        wide = np.round(samples * (2.0 ** (bits - 1) - 1)).astype("<i4")
        if bits == 8:
            file.writeframes((wide + 128).astype(np.uint8).tobytes())
        else:
            file.writeframes(wide.view(np.uint8).reshape(-1, 4)[:, : bits // 8].tobytes())
    return held.getvalue()


@pytest.mark.parametrize("bits", [8, 16, 24, 32])
def test_samples_of_every_width(bits: int, rng: np.random.Generator) -> None:
    samples = rng.uniform(-0.9, 0.9, 500)
    found, rate = decode_wav(wav(samples, 8000, bits=bits))
    assert rate == 8000
    np.testing.assert_allclose(found, samples, atol=1.6 / 2 ** (bits - 1) + 1e-6)


def test_channels_are_averaged_and_rates_changed(rng: np.random.Generator) -> None:
    both = rng.uniform(-0.5, 0.5, (300, 2))
    found, _ = decode_wav(wav(both.reshape(-1), channels=2))
    np.testing.assert_allclose(found, both.mean(1), atol=1e-4)
    tone = np.sin(2 * np.pi * 440 * np.arange(8000) / 8000).astype(np.float32)
    wanted = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    np.testing.assert_allclose(resampled(tone, 8000, 16000)[200:-200], wanted[200:-200], atol=5e-3)
    assert as_samples(np.array([16384, -32768], np.int16), 16000).tolist() == [0.5, -1.0]
    assert as_samples(both.T, 16000).shape == as_samples(both, 16000).shape == (300,)


def test_files_that_are_no_sound(tmp_path: Path) -> None:
    good = wav(np.zeros(10))
    header = struct.pack("<HHIIHH", 2, 1, 16000, 0, 0, 4)
    compressed = good[:12] + b"fmt " + struct.pack("<I", 16) + header + b"data" + struct.pack("<I", 0)
    for data, told in (
        (b"RIFX" + good[4:], "does not begin with its header"),
        (good[:30], "has 16 bytes, the file has 10"),
        (good[:36], "there is no format, or no sound"),
        (compressed, "format 2 with 4 bits"),
        (good[:22] + b"\0\0" + good[24:], "0 channels"),
    ):
        with pytest.raises(FileError, match=told):
            decode_wav(data)
    with pytest.raises(FileError, match="cannot be read"):
        as_samples(tmp_path / "none.wav", 16000)
    with pytest.raises(ShapeError, match="not finite"):
        as_samples(np.array([0.0, np.nan]), 16000)
    with pytest.raises(ShapeError, match="sound is a WAV file"):
        as_samples(np.zeros((2, 3, 4)), 16000)


@pytest.mark.parametrize("setting", [{"feature_size": 81}, {"n_fft": 1 << 30}, {"sampling_rate": 1 << 30}])
def test_settings_of_features_that_make_no_sense(setting: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(setting), "utf-8")
    with pytest.raises(FileError, match="the model has 80 bands"):
        MelSettings.from_folder(tmp_path, 80)


def test_short_sound_is_followed_by_the_padding_value(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = folder(tmp_path / "model", "whisper")
    (place / "preprocessor_config.json").write_text(json.dumps({"feature_size": 16, "padding_value": -0.25}), "utf-8")
    model, samples, seen = st.load(place), rng.standard_normal(3000).astype(np.float32), []
    monkeypatch.setattr(model, "transcribe_features", lambda features, **_: seen.append(features))
    model.transcribe(samples)
    padded = np.full(64 * 160, -0.25, np.float32)
    padded[:3000] = samples
    np.testing.assert_array_equal(seen[0], MelSettings(bands=16).features(padded))


def test_noise_is_not_added(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"dither": 0.1}', "utf-8")
    with pytest.raises(FileError, match=r"dither = 0\.1"):
        MelSettings.from_folder(tmp_path, 80)


def test_features_are_those_of_the_formula(rng: np.random.Generator) -> None:
    """Against a plain loop in f64."""
    settings, samples = MelSettings(bands=20), rng.standard_normal(1600).astype(np.float32)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(400) / 400)
    padded = np.pad(samples.astype(np.float64), 200, mode="reflect")
    rows = [np.abs(np.fft.rfft(padded[160 * i : 160 * i + 400] * window)) ** 2 for i in range(10)]
    log = np.log10(np.maximum(settings.filters.astype(np.float64) @ np.array(rows).T, 1e-10))
    wanted = (np.maximum(log, log.max() - 8) + 4) / 4
    np.testing.assert_allclose(settings.features(samples), wanted, atol=2e-6)
    assert settings.filters.shape == (20, 201)
    assert (settings.filters.sum(1) > 0).all()


def test_a_file_is_transcribed(tmp_path: Path, rng: np.random.Generator) -> None:
    model = st.load(folder(tmp_path / "model", "whisper"))
    samples = rng.uniform(-0.5, 0.5, 4 * 64 * 160 + 1234)
    (tmp_path / "said.wav").write_bytes(wav(samples))
    told: list[tuple[float, float]] = []
    found = model.transcribe(tmp_path / "said.wav", language="en", progress=lambda a, b: told.append((a, b)))
    again = model.transcribe(samples.astype(np.float32), language="english")
    assert found.segments == tuple(sorted(found.segments, key=lambda s: s.start))
    assert len(found.segments) > 1
    assert found.language == again.language == "en"
    assert told[-1][0] == told[-1][1] == pytest.approx(len(samples) // 160 / 100)
    assert str(found) == found.text == "".join(s.text for s in found.segments).strip()
    assert len(again.segments) > 1
    short = model.transcribe(samples[:3000].astype(np.float32), beams=2, max_tokens=5)
    assert short.language in ("en", "de", "fr")
    for options, told_as in (
        ({"language": "klingon"}, "'klingon' is not a language"),
        ({"task": "sing"}, "'sing' is not a task"),
    ):
        with pytest.raises(UnknownNameError, match=told_as):
            model.transcribe(samples, **options)
    with pytest.raises(OptionError, match="takes input_features"):
        model.run(zork=1)
    with pytest.raises(ShapeError, match="features are"):
        model.run(input_features=stored.features(60)[None], decoder_input_ids=[[1]])


def test_the_command(tmp_path: Path, rng: np.random.Generator, capsys: pytest.CaptureFixture[str]) -> None:
    model, place = folder(tmp_path / "model", "whisper"), tmp_path / "said.wav"
    place.write_bytes(wav(rng.uniform(-0.5, 0.5, 20000)))
    wanted = st.load(model).transcribe(place, language="de")
    assert main(["transcribe", str(model), str(place), "--language", "german", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["text"], found["language"], len(found["segments"])) == (wanted.text, "de", len(wanted.segments))
    assert main(["transcribe", str(model), str(place), "--language", "de", "--srt"]) == 0
    assert capsys.readouterr().out.startswith("1\n00:00:0")
    assert main(["transcribe", str(model), str(place), "--language", "de", "--timestamps"]) == 0
    assert capsys.readouterr().out.startswith("[00:0")
    assert main(["transcribe", str(model), str(tmp_path / "none.wav")]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_letters_of_frames(tmp_path: Path, rng: np.random.Generator) -> None:
    """Greedy CTC: equal letters in a row are one, blanks are none; pieces of long sound fit together."""
    place = folder(tmp_path / "model", "wav2vec2, norms first")
    letters = {"<pad>": 0, "|": 1, **{chr(96 + i): i for i in range(2, 20)}}
    (place / "vocab.json").write_text(json.dumps(letters), "utf-8")
    model = st.load(place)
    samples = rng.uniform(-0.5, 0.5, 3000).astype(np.float32)
    normed = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)
    best = model.run(input_values=normed[None])["logits"][0].argmax(-1)
    kept = [int(n) for i, n in enumerate(best) if n and (i == 0 or n != best[i - 1])]
    found = model.transcribe(samples)
    assert list(found.segments[0].tokens) == kept
    assert found.text == " ".join("".join({1: " "}.get(n, chr(96 + n)) for n in kept).split())
    assert model.transcribe(samples[:3]).text == ""
    with pytest.raises(ShapeError, match="input_values are"):
        model.run(input_values=samples[None, :3])
