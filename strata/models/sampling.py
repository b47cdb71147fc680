"""Sampling the next token from logits: temperature, top-k, top-p, min-p, typical, cutoffs, XTC, DRY, mirostat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from strata.arguments import hot
from strata.core import here
from strata.errors import ArgumentError, DTypeError, OptionError, RunError, ShapeError
from strata.kinds import shown
from strata.models.generating.filters import (
    SampleStream,
    dry_penalties,
    heaviest,
    likely,
    ngram_ends,
    phrase_ends,
    surprising,
    typical,
    without_top,
)


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How tokens are chosen. A temperature of 0 takes the most likely one.

    Kept are the `top_k` largest, of these the shortest prefix by falling probability that reaches `top_p`, of these all
    with at least `min_p` times the largest probability. `repetition_penalty` divides the positive logits of tokens that
    occurred, and multiplies the negative ones. `frequency_penalty` is subtracted from the logit of a token for each
    time that it was generated, `presence_penalty` once if it was; `logit_bias` adds to the logits of tokens. With
    `no_repeat_ngram_size`, no run of so many tokens comes twice. `suppress_tokens` never come, `begin_suppress_tokens`
    not as the first new token, and `bad_words_ids` are runs of tokens that do not come. Before there are `min_tokens`
    new ones, no token of `ends` comes; `generate` knows what these are.

    `typical_p` keeps the tokens that are about as surprising as is to be expected, up to this mass. `epsilon_cutoff`
    drops those with a smaller share; `eta_cutoff` does, too, and drops fewer where shares are spread widely. XTC, with
    `xtc_probability`, drops all but the least likely of the tokens that have a share of `xtc_threshold`. DRY subtracts
    `dry_multiplier` · `dry_base` ** (n - `dry_allowed_length`) from the logit of a token that would continue a
    repetition of n tokens, which ends at `dry_breakers`. Mirostat, with a `mirostat_tau` above 0, keeps the surprise of
    tokens near so many bits; `mirostat_eta` is how fast it learns.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    no_repeat_ngram_size: int = 0
    suppress_tokens: Sequence[int] = ()
    begin_suppress_tokens: Sequence[int] = ()
    bad_words_ids: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    ends: Sequence[int] = ()
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_breakers: Sequence[int] = ()
    mirostat_tau: float = 0.0
    mirostat_eta: float = 0.1
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0

    def __post_init__(self) -> None:
        def check(ok: bool, message: str) -> None:
            if not ok:
                raise OptionError(f"generate: {message}", code="O236")

        check(self.temperature >= 0, f"temperature {self.temperature} is negative")
        check(self.top_k >= 0, f"top_k {self.top_k} is negative")
        check(0 < self.top_p <= 1, f"top_p {self.top_p} is not in (0, 1]")
        check(0 <= self.min_p <= 1, f"min_p {self.min_p} is not in 0..1")
        check(self.repetition_penalty > 0, f"repetition_penalty {self.repetition_penalty} is not positive")
        check(self.seed is None or self.seed >= 0, f"seed {self.seed} is negative")
        for name in ("frequency_penalty", "presence_penalty"):
            check(abs(getattr(self, name)) <= 100, f"{name} {getattr(self, name)} is not within -100 to 100")
        check(self.no_repeat_ngram_size >= 0, f"no_repeat_ngram_size {self.no_repeat_ngram_size} is negative")
        check(self.min_tokens >= 0, f"min_tokens {self.min_tokens} is negative")
        for name in ("suppress_tokens", "begin_suppress_tokens", "ends"):
            check(min(getattr(self, name), default=0) >= 0, f"{name} has a negative token")
        check(all(w and min(w) >= 0 for w in self.bad_words_ids), "bad_words_ids has an empty or a negative one")
        check(0 < self.typical_p <= 1, f"typical_p {self.typical_p} is not in (0, 1]")
        for name in ("epsilon_cutoff", "eta_cutoff"):
            check(0 <= getattr(self, name) < 1, f"{name} {getattr(self, name)} is not in [0, 1)")
        for name in ("xtc_probability", "xtc_threshold"):
            check(0 <= getattr(self, name) <= 1, f"{name} {getattr(self, name)} is not in 0..1")
        check(0 <= self.dry_multiplier <= 1e6, f"dry_multiplier {self.dry_multiplier} is not within 0 to 1e6")
        check(1 <= self.dry_base <= 1e6, f"dry_base {self.dry_base} is not within 1 to 1e6")
        check(self.dry_allowed_length >= 1, f"dry_allowed_length {self.dry_allowed_length} is not positive")
        check(0 <= self.mirostat_tau <= 1e3, f"mirostat_tau {self.mirostat_tau} is not within 0 to 1000")
        check(0 < self.mirostat_eta <= 1, f"mirostat_eta {self.mirostat_eta} is not in (0, 1]")
        bias = next(((k, v) for k, v in self.logit_bias.items() if not (k >= 0 and abs(v) <= 1e6)), None)
        check(bias is None, f"logit_bias {bias} is not a token with a number")

    @property
    def is_fixed(self) -> bool:
        """Whether the same logits after the same tokens always have the same probabilities."""
        return not (self.xtc_probability or self.mirostat_tau)

    @property
    def is_simple(self) -> bool:
        """Whether a token follows from one row of logits by temperature, `top_k`, `top_p` and `min_p` alone: devices
        choose such ones."""
        plain = self.repetition_penalty == 1.0 and self.typical_p == 1.0 and not self.logit_bias and self.is_fixed
        return plain and not (
            self.epsilon_cutoff
            or self.eta_cutoff
            or self.frequency_penalty
            or self.presence_penalty
            or self.dry_multiplier
            or self.no_repeat_ngram_size
            or self.suppress_tokens
            or self.begin_suppress_tokens
            or self.bad_words_ids
            or self.min_tokens
        )

    def stream(self) -> SampleStream:
        """The random numbers of one generation: the same for the same seed."""
        return SampleStream(np.random.Philox(self.seed))

    @hot
    def choose(
        self, logits: np.ndarray, before: Sequence[int], numbers: np.random.Generator, *, start: int = 0,
        allowed: np.ndarray | None = None,
    ) -> int:  # fmt: skip
        """The next token after `before`, from logits f32[V]: of those `allowed`, bool[V].

        The first `start` tokens are the prompt, which frequency and presence do not count.
        """
        logits, best = self._penalised(logits, before, start, allowed)
        if self.temperature == 0:
            return best
        ids, weights = self._kept(logits, float(logits[best]))
        if self.xtc_probability and numbers.random() < self.xtc_probability:
            keep = without_top(weights, self.xtc_threshold)
            ids, weights = ids[keep], weights[keep]
        if self.mirostat_tau and isinstance(numbers, SampleStream):
            most = 2 * self.mirostat_tau if numbers.surprise is None else numbers.surprise
            keep = surprising(weights, most)
            ids, weights = ids[keep], weights[keep]
        running = np.cumsum(weights)
        place = int(np.searchsorted(running, numbers.random() * running[-1], side="right"))
        place = min(place, len(ids) - 1)
        if self.mirostat_tau and isinstance(numbers, SampleStream):
            bits = -float(np.log2(weights[place] / running[-1]))
            numbers.surprise = most - self.mirostat_eta * (bits - self.mirostat_tau)
        return int(ids[place])

    def probabilities(self, logits: np.ndarray, before: Sequence[int], *, start: int = 0) -> np.ndarray:
        """What `choose` draws from, f64[V]; all of it on one token at a temperature of 0."""
        logits, best = self._penalised(logits, before, start)
        found = np.zeros(len(logits))
        if self.temperature == 0:
            found[best] = 1.0
            return found
        ids, weights = self._kept(logits, float(logits[best]))
        found[ids] = weights / weights.sum()
        return found

    def likeliest(
        self, logits: np.ndarray, before: Sequence[int], count: int, *, start: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """So many of the likeliest tokens after penalties, the first of equal ones first, and their shares of all."""
        logits, best = self._penalised(logits, before, start)
        weights = np.exp(logits.astype(np.float64) - float(logits[best]))
        order = np.argsort(-weights, kind="stable")[:count]
        return order, weights[order] / weights.sum()

    def _penalised(
        self, logits: np.ndarray, before: Sequence[int], start: int = 0, allowed: np.ndarray | None = None
    ) -> tuple[np.ndarray, int]:
        """Logits after penalties and biases, and the token with the largest."""
        logits = self.penalised(logits, before, start=start)
        if allowed is not None:
            logits = np.where(allowed, logits, np.asarray(-np.inf, logits.dtype))
        best = int(logits.argmax())
        if not np.isfinite(logits[best]):
            raise RunError(
                f"generate: the logits have a NaN or an infinity, {logits[best]} at token {best}", code="X220"
            )
        return logits, best

    @hot
    def penalised(self, logits: np.ndarray, before: Sequence[int], *, start: int = 0) -> np.ndarray:
        """Logits, or their logarithms of probabilities, after penalties and biases: themselves where there are none."""
        _check_logits(logits)
        if self.repetition_penalty != 1.0 and before:
            seen = np.unique(np.asarray(before))
            logits = logits.copy()
            old = logits[seen]
            logits[seen] = np.where(old > 0, old / self.repetition_penalty, old * self.repetition_penalty)
        if (self.frequency_penalty or self.presence_penalty) and len(before) > start:
            seen, counts = np.unique(np.asarray(before[start:]), return_counts=True)
            logits = logits.copy()
            logits[seen] -= (self.frequency_penalty * counts + self.presence_penalty).astype(logits.dtype)
        if self.dry_multiplier and before:
            fields = (self.dry_multiplier, self.dry_base, self.dry_allowed_length, self.dry_breakers)
            logits = logits.copy()
            for token, penalty in dry_penalties(before, *fields).items():
                logits[token] -= penalty
        if self.logit_bias:
            logits = logits.copy()
            for token, bias in self.logit_bias.items():
                if token < len(logits):
                    logits[token] += bias
        gone = [t for t in self._forbidden(before, len(before) - start) if t < len(logits)]
        if gone:
            logits = logits.copy()
            logits[gone] = -np.inf
        return logits

    def _forbidden(self, before: Sequence[int], count: int) -> list[int]:
        """The tokens that may not come now, after so many new ones."""
        found = [*self.suppress_tokens, *phrase_ends(before, self.bad_words_ids)]
        if count < 1:
            found += self.begin_suppress_tokens
        if count < self.min_tokens:
            found += self.ends
        if self.no_repeat_ngram_size:
            found += ngram_ends(before, self.no_repeat_ngram_size)
        return found

    def _kept(self, logits: np.ndarray, high: float) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that may be chosen, and their weights."""
        ids = np.arange(len(logits))
        if 0 < self.top_k < len(logits):
            edge = np.partition(logits, -self.top_k)[-self.top_k]
            equal = np.flatnonzero(logits == edge)  # of these, the first
            above = np.flatnonzero(logits > edge)
            ids = np.sort(np.concatenate([above, equal[: self.top_k - len(above)]]))
        weights = np.exp((logits[ids].astype(np.float64) - high) / max(self.temperature, 1e-6))
        if self.top_p < 1:
            keep = heaviest(weights, self.top_p)
            ids, weights = ids[keep], weights[keep]
        if self.min_p > 0:
            ids, weights = ids[weights >= self.min_p], weights[weights >= self.min_p]
        if self.typical_p < 1:
            keep = typical(weights, self.typical_p)
            ids, weights = ids[keep], weights[keep]
        for cutoff, by_entropy in ((self.epsilon_cutoff, False), (self.eta_cutoff, True)):
            if cutoff > 0:
                keep = likely(weights, cutoff, by_entropy=by_entropy)
                ids, weights = ids[keep], weights[keep]
        return ids, weights


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Logarithms of the probabilities of all tokens, f32[V], before anything is penalised or left out."""
    _check_logits(logits)
    x = logits.astype(np.float64)
    x -= x.max()
    return (x - np.log(np.exp(x).sum())).astype(np.float32)


def _check_logits(logits: np.ndarray) -> None:
    if not isinstance(logits, np.ndarray):
        raise ArgumentError(
            f"logits are one row of numbers as an array, got {shown(logits)}", code="O101", place=here()
        )
    if logits.ndim != 1 or not logits.size:
        raise ShapeError(f"logits are one row of numbers, got {logits.shape}", code="S600", place=here())
    if logits.dtype.kind not in "fiuV":  # V: bf16, say
        raise DTypeError(f"logits are real numbers, got {logits.dtype}", code="D104", place=here())
