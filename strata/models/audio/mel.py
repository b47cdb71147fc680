"""Log-mel features of speech as Whisper takes them: 25 ms windows every 10 ms, bands on the mel scale of Slaney."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from strata.errors import FileError
from strata.models.audio.sound import RATES
from strata.models.config_values import real, refuse, whole
from strata.models.weights import read_json

LONGEST = 1 << 16  # samples of a window


@dataclass(frozen=True)
class MelSettings:
    """How samples become features."""

    bands: int = 80
    rate: int = 16000
    window: int = 400
    hop: int = 160
    padding: float = 0.0  # what follows sound that is shorter than a window

    @classmethod
    def from_folder(cls, folder: Path, bands: int) -> MelSettings:
        found: dict[str, Any] = {}
        if (folder / "preprocessor_config.json").exists():
            found = read_json(folder / "preprocessor_config.json")
        refuse(found, "dither")
        made = cls(
            whole(found, "feature_size", bands), whole(found, "sampling_rate", 16000), whole(found, "n_fft", 400),
            whole(found, "hop_length", 160), real(found, "padding_value", 0.0, positive=False),
        )  # fmt: skip
        if made.bands != bands or max(made.window, made.hop) > LONGEST or made.rate not in RATES:
            raise FileError(
                f"preprocessor_config.json has {made.bands} bands, windows of {made.window} samples, {made.hop} apart, "
                f"at {made.rate} Hz; the model has {bands} bands", code="F140",
            )  # fmt: skip
        return made

    @cached_property
    def filters(self) -> np.ndarray:
        """Triangles of equal area over the spectrum, f32[bands, bins]."""
        bins = np.linspace(0, self.rate / 2, self.window // 2 + 1)
        edges = _hertz(np.linspace(_mel(0.0), _mel(8000.0), self.bands + 2))
        width = np.diff(edges)
        slopes = edges[:, None] - bins
        rising, falling = -slopes[:-2] / width[:-1, None], slopes[2:] / width[1:, None]
        triangles = np.maximum(0, np.minimum(rising, falling))
        return (triangles * (2.0 / (edges[2:] - edges[:-2]))[:, None]).astype(np.float32)

    def features(self, samples: np.ndarray) -> np.ndarray:
        """f32[bands, frames] of samples, a frame for each hop: of the log of the power in each band."""
        from scipy import fft

        half = self.window // 2
        reflected = np.pad(samples, half, mode="reflect") if len(samples) > half else np.pad(samples, half)
        count = len(samples) // self.hop
        turn = 2 * np.pi * np.arange(self.window) / self.window
        window = (0.5 - 0.5 * np.cos(turn)).astype(np.float32)
        frames = np.lib.stride_tricks.sliding_window_view(reflected, self.window)[:: self.hop][:count]
        power = np.empty((self.bands, count), np.float32)
        for at in range(0, count, 4096):  # of long recordings, some at a time
            spectrum = fft.rfft(frames[at : at + 4096] * window, axis=-1)
            power[:, at : at + 4096] = self.filters @ (spectrum.real**2 + spectrum.imag**2).T
        log = np.log10(np.maximum(power, np.float32(1e-10)))
        return (np.maximum(log, log.max(initial=-10.0) - np.float32(8)) + np.float32(4)) / np.float32(4)


def _mel(hertz: Any) -> Any:
    """Slaney's scale: linear up to 1 kHz, then logarithmic."""
    hertz = np.asarray(hertz, float)
    high = 15.0 + np.log(np.maximum(hertz, 1e-9) / 1000.0) * (27.0 / np.log(6.4))
    return np.where(hertz >= 1000.0, high, 3.0 * hertz / 200.0)


def _hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel >= 15.0, 1000.0 * np.exp(np.log(6.4) / 27.0 * (mel - 15.0)), 200.0 * mel / 3.0)
