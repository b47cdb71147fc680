"""Transcription: sound of any length in windows, each decoded to text with times, going on where the last one ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from strata.arguments import own_checks
from strata.errors import OptionError, ShapeError, UnknownNameError
from strata.models.audio.languages import LANGUAGES
from strata.models.audio.mel import MelSettings
from strata.models.audio.sound import as_samples
from strata.models.config_values import mapping, whole
from strata.models.sampling import Sampler
from strata.models.seq2seq.engine import Decoder, Encoder, EncoderDecoder
from strata.models.seq2seq.graphs import CrossSizes
from strata.models.seq2seq.rules import TokenRules
from strata.models.tokenizer import Tokenizer
from strata.models.weights import read_json

STEP = 0.02  # seconds between two times that the model can tell


@dataclass(frozen=True)
class SpeechTokens:
    """The tokens that say what a window holds and what is to be done with it."""

    languages: Mapping[str, int] = field(default_factory=dict)  # by code, such as "en"
    tasks: Mapping[str, int] = field(default_factory=dict)
    no_times: int | None = None  # the times follow it, from 0.00 on
    latest_first: int | None = None  # steps that the first time may be late

    @classmethod
    def from_folder(cls, folder: Path) -> SpeechTokens:
        place = folder / "generation_config.json"
        found = read_json(place) if place.exists() else {}
        codes = mapping(found, "lang_to_id")
        tasks = mapping(found, "task_to_id")
        english = found.get("is_multilingual") is False
        return cls(
            {} if english else {code.strip("<|>"): whole(codes, code, least=0) for code in codes},
            {} if english else {task: whole(tasks, task, least=0) for task in tasks},
            None if found.get("no_timestamps_token_id") is None else whole(found, "no_timestamps_token_id", least=0),
            None if found.get("max_initial_timestamp_index") is None
            else whole(found, "max_initial_timestamp_index", least=0),
        )  # fmt: skip

    def timed(self, ends: Sequence[int]) -> Callable[[np.ndarray, Sequence[int]], np.ndarray]:
        """The rule of times: they come in pairs, do not fall, and come first."""
        assert self.no_times is not None
        first, latest = self.no_times + 1, self.latest_first
        end = min(ends, default=self.no_times)

        def rule(logits: np.ndarray, new: Sequence[int]) -> np.ndarray:
            out = logits.copy()
            out[first - 1] = -np.inf
            is_time = [token >= first for token in new]
            if is_time and is_time[-1]:
                if len(new) < 2 or is_time[-2]:
                    out[first:] = -np.inf
                else:
                    out[:end] = -np.inf
            times = [token for token in new if token >= first]
            if times:
                opens = is_time[-1] and len(new) >= 2 and not is_time[-2]
                out[first : times[-1] + (0 if opens else 1)] = -np.inf
            if not new:
                out[:first] = -np.inf
                if latest is not None:
                    out[first + latest + 1 :] = -np.inf
            chances = out - out.max()
            with np.errstate(divide="ignore"):
                together = np.log(np.exp(chances[first:]).sum())
            if together > chances[:first].max():
                out[:first] = -np.inf
            return out

        return rule


@dataclass(frozen=True, slots=True)
class Segment:
    """Some words, and when they are said, in seconds."""

    start: float
    end: float
    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Transcript:
    """What was said: as one text, and in segments. `language` is that of the sound, where the model knows several."""

    text: str
    segments: tuple[Segment, ...]
    language: str | None = None

    def __str__(self) -> str:
        return self.text


class Whisper(EncoderDecoder):
    """A model of speech: `transcribe` of sound, `run` on features."""

    def __init__(
        self, sizes: CrossSizes, encoder: Encoder, decoder: Decoder, rules: TokenRules,
        tokenizer: Callable[[], Tokenizer], *, mel: MelSettings, frames: int, speech: SpeechTokens,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        super().__init__(sizes, encoder, decoder, rules, tokenizer, device=device)
        self.mel, self.frames, self.speech = mel, frames, speech  # frames of one window

    @property
    def inputs(self) -> dict[str, str]:
        return {
            "input_features": f"f32[B, {self.mel.bands}, {self.frames}]", "decoder_input_ids": "i32[B, S]",
        }  # fmt: skip

    def run(self, **arrays: Any) -> dict[str, np.ndarray]:
        """Logits of every position: `run(input_features=…, decoder_input_ids=…)`."""
        if set(arrays) != set(self.inputs):
            raise OptionError(
                f"run: takes {', '.join(self.inputs)}, got {', '.join(sorted(arrays)) or 'nothing'}", code="O265"
            )
        states, source = self.encode({"input_features": self._windows(arrays["input_features"])})
        return self._decoded(states, source, arrays["decoder_input_ids"])

    def _windows(self, features: Any) -> np.ndarray:
        found = np.ascontiguousarray(features, np.float32)
        if found.ndim != 3 or found.shape[1:] != (self.mel.bands, self.frames):
            raise ShapeError(
                f"features are f32[B, {self.mel.bands}, {self.frames}], got {list(found.shape)}", code="S600"
            )
        return found

    def detect_language(self, source: dict[str, np.ndarray]) -> str:
        """The likeliest language of an encoded window."""
        logits = self.step(self.start(source, 1), np.array([self.rules.start], np.int32))[0]
        return max(self.speech.languages, key=lambda code: logits[self.speech.languages[code]])

    def start_tokens(self, language: str | None, task: str | None, *, times: bool) -> tuple[int, ...]:
        """What the decoder starts with."""
        made = list(self.rules.start)
        if language is not None:
            made.append(self.speech.languages[language])
        if task is not None:
            made.append(self.speech.tasks[task])
        if not times and self.speech.no_times is not None:
            made.append(self.speech.no_times)
        return tuple(made)

    def _language(self, language: str | None) -> str | None:
        """A language by its code."""
        if language is None:
            return None
        known = self.speech.languages
        code = LANGUAGES.get(language.lower(), language.lower().strip("<|>"))
        if code not in known:
            shown = ", ".join(known) or "none: it knows English alone"
            raise UnknownNameError(
                f"transcribe: {language!r} is not a language of the model, which knows {shown}", code="N600"
            )
        return code

    @own_checks()
    def transcribe(
        self, sound: Any, *, rate: int | None = None, language: str | None = None, task: str = "transcribe",
        timestamps: bool = True, beams: int | None = None, temperature: float = 0.0, seed: int | None = None,
        max_tokens: int | None = None, progress: Callable[[float, float], None] | None = None,
    ) -> Transcript:  # fmt: skip
        """The words of a WAV file, or of samples f32[n] with `rate` a second (16000 by default), of any length.

        `language` is a code or an English name, and is found out where it is not given; the task "translate" gives
        English. Without `timestamps`, sound up to the length of a window is one segment. `progress` is told the seconds
        that are done, and how many there are.
        """
        samples = as_samples(sound, self.mel.rate, rate)
        window = self.frames * self.mel.hop
        short = len(samples) <= window
        more = (0, max(window - len(samples), 0))
        features = self.mel.features(np.pad(samples, more, constant_values=np.float32(self.mel.padding)))
        total = -(-len(samples) // self.mel.hop) if short else features.shape[1]
        return self.transcribe_features(
            features, frames=total, language=language, task=task, timestamps=timestamps, beams=beams,
            sampler=Sampler(temperature=temperature, seed=seed), max_tokens=max_tokens, progress=progress,
        )  # fmt: skip

    def transcribe_features(
        self, features: np.ndarray, *, frames: int | None = None, language: str | None = None,
        task: str = "transcribe", timestamps: bool = True, beams: int | None = None, sampler: Sampler | None = None,
        max_tokens: int | None = None, progress: Callable[[float, float], None] | None = None,
    ) -> Transcript:  # fmt: skip
        """The words of log-mel features f32[bands, frames]; `frames` of them are sound, the rest is silence."""
        total = features.shape[1] if frames is None else frames
        code = self._language(language)
        if task not in (self.speech.tasks or {"transcribe": 0}):
            known = ", ".join(self.speech.tasks) or "transcribe"
            raise UnknownNameError(f"transcribe: {task!r} is not a task; known: {known}", code="N600")
        is_long = features.shape[1] > self.frames
        times = self.speech.no_times is not None and (timestamps or is_long)
        chosen, found, seek = sampler or Sampler(), [], 0
        while seek < total:
            if progress is not None:
                progress(seek * self._second, total * self._second)
            size = min(self.frames, total - seek)
            part = features[:, seek : seek + (size if is_long else self.frames)]
            window = np.pad(part, ((0, 0), (0, self.frames - part.shape[1])))
            _, source = self.encode({"input_features": np.ascontiguousarray(window[None])})
            if code is None and self.speech.languages:
                code = self.detect_language(source)
            start = self.start_tokens(code, task if self.speech.tasks else None, times=times)
            rules = replace(self.rules, start=start, more=self.speech.timed(self.rules.ends) if times else None)
            most = self.sizes.positions - len(start) if max_tokens is None else max_tokens
            (tokens,) = self._made(source, most, 1 if chosen.temperature > 0 else beams, chosen, rules)
            made, step = self._segments(tokens, seek, size)
            found += made
            seek += step
        if progress is not None:
            progress(total * self._second, total * self._second)
        kept = tuple(s for s in found if s.text.strip() or s.tokens)
        return Transcript("".join(s.text for s in kept).strip(), kept, code)

    @property
    def _second(self) -> float:
        """Seconds of a frame."""
        return self.mel.hop / self.mel.rate

    def _segments(self, tokens: list[int], seek: int, size: int) -> tuple[list[Segment], int]:
        """The segments of a window's tokens, and how many frames they cover."""
        first = self.sizes.vocab if self.speech.no_times is None else self.speech.no_times + 1
        offset = seek * self._second
        is_time = [t >= first for t in tokens]
        ends_once = is_time[-2:] == [False, True]
        cuts = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
        if not cuts:
            last = next((t - first for t in reversed(tokens) if t > first), None)
            end = size * self._second if last is None else last * STEP
            return [self._segment(tokens, offset, offset + end, first)] if tokens else [], size
        if ends_once:
            cuts.append(len(tokens))
        else:
            cuts[-1] += 1  # the time that opens what was cut off belongs to the last segment
        found, before = [], 0
        for cut in cuts:
            part = tokens[before:cut]
            closing = part[-1] if ends_once or cut != cuts[-1] else part[-2]
            found.append(
                self._segment(part, offset + (part[0] - first) * STEP, offset + (closing - first) * STEP, first)
            )
            before = cut
        if ends_once:
            return found, size
        return found, max(round((tokens[before - 2] - first) * STEP / self._second), 1)

    def _segment(self, tokens: list[int], start: float, end: float, first: int) -> Segment:
        words = [t for t in tokens if t < first]
        return Segment(round(start, 3), round(end, 3), self.tokenizer.decode(words), tuple(tokens))
