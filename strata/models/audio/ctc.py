"""Speech models with a letter for each frame: CTC decoding, and sound of any length in overlapping pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from strata.arguments import own_checks
from strata.core import Table
from strata.errors import FileError, OptionError, ShapeError, UnknownNameError
from strata.mir import Value
from strata.models.audio.sound import RATES, as_samples
from strata.models.audio.transcribe import Segment, Transcript
from strata.models.base import Model, compile_built
from strata.models.config_values import whole
from strata.models.weights import WeightBuilder, read_json
from strata.runtime import CompiledGraph

PIECE = 30  # seconds of sound that go through at once
MARGIN = 2  # seconds on each side of a piece that only inform it
GRID = 4000  # samples: sounds are filled up to multiples, so that near lengths share a graph


@dataclass(frozen=True)
class CtcSettings:
    """How samples are prepared and letters are read."""

    rate: int = 16000
    normalize: bool = True
    uses_mask: bool = False  # whether the model was trained to know where sound ends
    blank: int = 0
    letters: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: Path, settings: Mapping[str, Any]) -> CtcSettings:
        def found(name: str) -> dict[str, Any]:
            return read_json(folder / name) if (folder / name).exists() else {}

        prepared, letters = found("preprocessor_config.json"), found("vocab.json")
        if letters and all(isinstance(v, dict) for v in letters.values()):  # of several languages
            letters = next(iter(letters.values()))
        rate = whole(prepared, "sampling_rate", 16000)
        if rate not in RATES:
            raise FileError(
                f"preprocessor_config.json has sampling_rate = {rate}, which is not a sampling rate", code="F140"
            )
        return cls(
            rate, bool(prepared.get("do_normalize", True)),
            bool(prepared.get("return_attention_mask", settings.get("feat_extract_norm") == "layer")),
            whole(settings, "pad_token_id", 0, least=0),
            {whole(letters, letter, least=0): letter for letter in letters},
        )  # fmt: skip

    def text(self, numbers: list[int]) -> str:
        """Words of letters: "|" is a space, names in angle brackets are nothing."""
        said = (self.letters.get(n, "") for n in numbers if n != self.blank)
        return "".join(" " if x == "|" else "" if x.startswith("<") and x.endswith(">") else x for x in said)


class CtcSpeech(Model):
    """A model over waveforms: `transcribe`, `run` on samples."""

    def __init__(
        self, build: Callable[[int], tuple[WeightBuilder, dict[str, Value]]], frames: Callable[[int], int],
        settings: CtcSettings, *, least: int, stride: int, device: str = "cpu",
    ) -> None:  # fmt: skip
        self._build, self.frames, self.settings, self.device = build, frames, settings, device
        self.least, self.stride = least, stride  # samples of a frame, and from one to the next
        self._graphs: Table[int, tuple[CompiledGraph, tuple[str, ...]]] = Table("sound lengths")

    def graph_for(self, samples: int) -> tuple[CompiledGraph, tuple[str, ...]]:
        """The compiled graph for so many samples, and the names of its results."""

        def make() -> tuple[CompiledGraph, tuple[str, ...]]:
            builder, results = self._build(samples)
            builder.graph.outputs(*results.values())
            return compile_built(builder, self.device), tuple(results)

        return self._graphs.get_or_make(samples, make)

    def check(self) -> None:
        """Refuse weights that are not those of the configuration."""
        self._build(self.least)[0].check()

    @property
    def graph(self) -> CompiledGraph:  # type: ignore[override]
        return self.graph_for(self.settings.rate)[0]

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.graph_for(self.settings.rate)[1]

    @property
    def inputs(self) -> dict[str, str]:
        return {"input_values": "f32[B, N]", "attention_mask": "bool[B, N]"}

    def run(self, **arrays: Any) -> dict[str, np.ndarray]:
        """States and logits of frames: `run(input_values=…)`, with `attention_mask` where sounds differ in length."""
        if not {"input_values"} <= set(arrays) <= set(self.inputs):
            raise OptionError(f"run: takes input_values, got {', '.join(sorted(arrays)) or 'nothing'}", code="O265")
        samples = np.ascontiguousarray(arrays["input_values"], np.float32)
        if samples.ndim != 2 or samples.shape[1] < self.least:
            raise ShapeError(
                f"run: input_values are f32[B, N], N at least {self.least}, got {samples.shape}", code="S600"
            )
        count = self.frames(samples.shape[1])
        given = arrays.get("attention_mask")
        lengths = [samples.shape[1]] * len(samples) if given is None else np.asarray(given).astype(bool).sum(1).tolist()
        kept = np.arange(count) < np.array([self.frames(int(n)) for n in lengths])[:, None]
        graph, names = self.graph_for(samples.shape[1])
        return dict(zip(names, graph.run(input_values=samples, frames_mask=kept), strict=True))

    @own_checks()
    def transcribe(self, sound: Any, *, rate: int | None = None) -> Transcript:
        """The words of a WAV file, or of samples f32[n] with `rate` a second, of any length: the likeliest letters."""
        samples = as_samples(sound, self.settings.rate, rate)
        if len(samples) < self.least:
            return Transcript("", ())
        if self.settings.normalize:
            samples = (samples - samples.mean()) / np.sqrt(samples.var() + np.float32(1e-7))
        letters = np.concatenate([*self._pieces(samples)])
        changed = np.flatnonzero(np.diff(letters, prepend=-1))
        numbers, starts = letters[changed], changed * self.stride / self.settings.rate
        end = round(len(samples) / self.settings.rate, 3)
        spoken = [i for i, n in enumerate(numbers) if n != self.settings.blank]
        text = " ".join(self.settings.text([int(n) for n in numbers]).split())
        if not spoken:
            return Transcript("", ())
        tokens = tuple(int(numbers[i]) for i in spoken)
        return Transcript(text, (Segment(round(float(starts[spoken[0]]), 3), end, text, tokens),))

    def _pieces(self, samples: np.ndarray) -> list[np.ndarray]:
        """The likeliest letter of each frame; long sound goes through in pieces whose margins are left out."""
        size, margin = (n * self.settings.rate // self.stride for n in (PIECE, MARGIN))
        total, found, at = self.frames(len(samples)), [], 0
        while at < total:
            first = max(at - margin, 0)
            end = min(at + size, total)
            last = min(end + margin, total)
            part = samples[first * self.stride : (last - 1) * self.stride + self.least]
            whole_part = np.zeros(-(-len(part) // GRID) * GRID if self.settings.uses_mask else len(part), np.float32)
            whole_part[: len(part)] = part
            mask = (np.arange(len(whole_part)) < len(part))[None]
            results = self.run(input_values=whole_part[None], attention_mask=mask)
            if "logits" not in results:
                raise UnknownNameError("transcribe: the model has no head for letters", code="N600")
            found.append(results["logits"][0, at - first : end - first].argmax(-1))
            at = end
        return found
