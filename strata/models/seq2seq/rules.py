"""What a folder's generation settings forbid or force: tokens, repetitions, the first and the last one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from strata.errors import FileError
from strata.models.config_values import real, whole
from strata.models.generating.filters import ngram_ends
from strata.models.weights import read_json

LogitRule = Callable[[np.ndarray, Sequence[int]], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class TokenRules:
    """How tokens are made from logits. Lengths count new tokens, without those that the decoder starts with."""

    start: tuple[int, ...]  # what the decoder starts with
    ends: tuple[int, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    forced_first: int | None = None
    forced_last: int | None = None
    no_repeat: int = 0  # runs of so many tokens do not come twice
    suppress: tuple[int, ...] = ()
    suppress_first: tuple[int, ...] = ()
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    more: LogitRule | None = None

    def with_penalties(self, penalised: Callable[..., np.ndarray]) -> TokenRules:
        """These rules, then penalties of a sampler, which are given all tokens and how many were there at the start."""
        count, more = len(self.start), self.more

        def both(logits: np.ndarray, new: Sequence[int]) -> np.ndarray:
            left = logits if more is None else more(logits, new)
            return penalised(left, [*self.start, *new], start=count)

        return replace(self, more=both)

    def allowed(self, logits: np.ndarray, start: Sequence[int], new: Sequence[int], most: int) -> np.ndarray:
        """Logits f32[V] after the rules, for the token after these; `most` new tokens are made at most."""
        forced = None
        if not new and self.forced_first is not None:
            forced = self.forced_first
        if len(new) == most - 1 and self.forced_last is not None:
            forced = self.forced_last
        if forced is not None:
            out = np.full_like(logits, -np.inf)
            out[forced] = 0
            return out
        gone = list(self.suppress)
        if not new:
            gone += self.suppress_first
        if len(new) < self.min_tokens:
            gone += self.ends
        if self.no_repeat:
            gone += ngram_ends([*start, *new], self.no_repeat)
        if gone:
            logits = logits.copy()
            logits[[g for g in gone if g < len(logits)]] = -np.inf
        return logits if self.more is None else self.more(logits, new)


def folder_rules(folder: Path, found: Mapping[str, Any], start: int | None = None) -> TokenRules:
    """From generation_config.json, and from config.json where that is silent."""
    own = read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    known = {**found, **{k: v for k, v in own.items() if v is not None}}
    first = whole(known, "decoder_start_token_id", start, least=0)
    stopping = known.get("early_stopping")
    longest = whole(known, "max_length", 0, least=0)
    return TokenRules(
        start=(first,), ends=token_ids(known, "eos_token_id"),
        max_tokens=whole(known, "max_new_tokens", longest - 1 if longest > 1 else 0, least=0) or None,
        min_tokens=max(whole(known, "min_length", 0, least=0) - 1, whole(known, "min_new_tokens", 0, least=0), 0),
        forced_first=next(iter(token_ids(known, "forced_bos_token_id")), None),
        forced_last=next(iter(token_ids(known, "forced_eos_token_id")), None),
        no_repeat=whole(known, "no_repeat_ngram_size", 0, least=0),
        suppress=token_ids(known, "suppress_tokens"), suppress_first=token_ids(known, "begin_suppress_tokens"),
        beams=whole(known, "num_beams", 1), length_penalty=real(known, "length_penalty", 1.0, positive=False),
        early_stopping=stopping if stopping is True or stopping == "never" else False,
    )  # fmt: skip


def token_ids(found: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A token, a list of tokens, or none."""
    value = found.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(v) is int and v >= -1 for v in values):
        raise FileError(f"the configuration has {key} = {value!r}, token ids are needed", code="F140")
    return tuple(v for v in values if v >= 0)
