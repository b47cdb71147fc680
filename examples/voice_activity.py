"""When does somebody speak? A voice-activity model over a WAV file, 32 ms at a time, with the state it keeps.

    pip install --no-deps silero-vad
    python examples/voice_activity.py [FOLDER [SOUND.wav]]

Without a file, two "words" are made of vowels, with noise, a beep and silence around them. FOLDER/voice_activity.svg
shows the sound and how sure the model is of a voice.
"""

from __future__ import annotations

import importlib.util
import sys
import wave
from pathlib import Path

import numpy as np

import strata as st
from strata.viewer import plot

RATE, STEP, BEFORE = 16000, 512, 64  # samples a second, of a step, and of the step before that the model sees again
FORMANTS = {  # Hz, width, strength: what makes a vowel that vowel
    "a": [(730, 60, 1.0), (1090, 70, 0.6), (2440, 120, 0.25)], "e": [(530, 50, 1.0), (1840, 90, 0.5), (2480, 120, 0.3)],
    "i": [(270, 50, 1.0), (2290, 100, 0.5), (3010, 150, 0.3)], "o": [(570, 50, 1.0), (840, 70, 0.5), (2410, 120, 0.1)],
    "u": [(300, 50, 1.0), (870, 70, 0.4), (2240, 120, 0.1)],
}  # fmt: skip


def vowel(letter: str, pitch: float, seconds: float) -> np.ndarray:
    """Harmonics of a falling pitch, as loud as the formants let them through."""
    t = np.arange(int(seconds * RATE)) / RATE
    height = pitch * (1.1 - 0.1 * t / seconds + 0.08 * np.sin(2 * np.pi * 3.1 * t))
    phase, sound = 2 * np.pi * np.cumsum(height) / RATE, np.zeros(len(t))
    for k in range(1, 60):
        gain = sum(a / (1 + ((k * height - centre) / width) ** 2) for centre, width, a in FORMANTS[letter])
        sound += gain * np.sin(k * phase) * (k * height < 7000) / k**0.3
    return sound * np.minimum(1, np.minimum(t / 0.03, (seconds - t) / 0.05))


def example(seed: int = 0) -> np.ndarray:
    """Silence, a word, silence, a higher word, silence, a beep; all with a little noise."""
    rng = np.random.default_rng(seed)
    words = [np.concatenate([vowel(c, pitch, rng.uniform(0.14, 0.19)) for c in letters])
             for letters, pitch in (("aieou", 120), ("oaeia", 190))]  # fmt: skip
    beep = 0.8 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    pauses = [np.zeros(int(s * RATE)) for s in (1.0, 1.2, 1.0, 0.5)]
    sound = np.concatenate([pauses[0], words[0], pauses[1], words[1], pauses[2], beep, pauses[3]])
    return sound / np.abs(sound).max() * 0.6 + 0.003 * rng.standard_normal(len(sound))


def read_wav(path: Path) -> np.ndarray:
    """A WAV file of 16 bits as one channel between -1 and 1."""
    with wave.open(str(path)) as file:
        if file.getframerate() != RATE or file.getsampwidth() != 2:
            raise SystemExit(f"{path}: {file.getframerate()} Hz of {8 * file.getsampwidth()} bits, not {RATE} Hz of 16")
        data = np.frombuffer(file.readframes(file.getnframes()), np.int16).reshape(-1, file.getnchannels())
    return data.mean(1) / 32768


def voice(sound: np.ndarray) -> np.ndarray:
    """How likely a voice is, for each step."""
    spec = importlib.util.find_spec("silero_vad")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("the model is not installed: pip install --no-deps silero-vad")
    model = st.load(Path(spec.submodule_search_locations[0]) / "data/silero_vad.onnx")
    state, seen, found = np.zeros((2, 1, 128), np.float32), np.zeros((1, BEFORE), np.float32), []
    for at in range(0, len(sound) - STEP + 1, STEP):
        seen = np.concatenate([seen[:, -BEFORE:], sound[None, at : at + STEP].astype(np.float32)], axis=1)
        odds, state = model.run(input=seen, state=state, sr=np.array(RATE))
        found.append(odds.item())
    return np.array(found)


def main(out: Path = Path(), file: Path | None = None) -> None:
    sound = example() if file is None else read_wav(file)
    odds = voice(sound)
    rise = np.flatnonzero(np.diff(np.concatenate([[0], odds > 0.5, [0]]))) * STEP / RATE
    loud = np.abs(sound[: len(odds) * STEP]).reshape(-1, STEP).max(1)
    time = (np.arange(len(odds)) + 0.5) * STEP / RATE
    made = plot({"voice": (time, odds), "loudness": (time, loud)}, title="voice activity", x="seconds")
    print(made, "\n")
    for start, end in zip(rise[::2], rise[1::2], strict=True):
        print(f"voice from {start:.2f} to {end:.2f} s")
    made.save(out / "voice_activity.svg")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
