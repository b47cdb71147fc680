"""A request on its way through the engine: prompt, tokens so far, their text and scores, and who waits for them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.arguments import untouched
from strata.errors import RunError, StrataError
from strata.models import NgramDraft, PageTable, Sampler, Speech, log_probabilities, page_keys

if TYPE_CHECKING:
    from strata.models.generating.prompts import SeenImages
    from strata.models.grammar import Matcher
    from strata.serving.engine import Engine


@dataclass(frozen=True)
class TokenScore:
    """The logarithm of the probability that a token had, and those of the likeliest ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def score(logits: np.ndarray, token: int, top: int) -> TokenScore:
    """The score of a token that follows logits f32[V]."""
    logs = log_probabilities(logits)
    best: list[int] = []
    if top:
        some = np.argpartition(logs, -min(top, len(logs)))[-top:]
        best = some[np.lexsort((some, -logs[some]))].tolist()
    return TokenScore(token, float(logs[token]), tuple((i, float(logs[i])) for i in best))


class Generation:
    """A submitted request. Iterate over it to stream the text, or ask for all of it by `text()`."""

    def __init__(
        self, engine: Engine, number: int, ids: Sequence[int], sampler: Sampler, max_tokens: int, speech: Speech,
        adapter: str | None = None, *, client: str = "", priority: int = 0, logprobs: int | None = None,
        prompt_logprobs: int | None = None, matcher: Matcher | None = None, ignore_eos: bool = False,
        seen: SeenImages | None = None,
    ) -> None:  # fmt: skip
        self.number, self.prompt_ids, self.max_tokens, self.adapter = number, list(ids), max_tokens, adapter
        self.client, self.priority = client, priority
        self.tokens: list[int] = []
        self.scores: list[TokenScore] = []  # of the tokens, where `logprobs` were asked for
        self.prompt_scores: list[TokenScore | None] = []  # of the prompt's, where `prompt_logprobs` were
        self.finish_reason: str | None = None  # stop, length, cancelled or error; None while it is on its way
        self.error: Exception | None = None
        self.table: PageTable | None = None
        self.started = time.perf_counter()
        self.first_token: float | None = None  # seconds until it came
        self.cached_tokens = 0  # of the prompt, that were in the KV cache already
        self.sampler = sampler
        self.numbers = sampler.stream()
        self.speech = speech
        self.logprobs, self.prompt_logprobs = logprobs, prompt_logprobs
        self.ignore_eos = ignore_eos
        self.wants_end = False
        self.last_step = 0  # in which it took part
        self.preempted = 0  # the step before which it was
        self.seen = seen  # what tokens of the prompt show
        self.keys = page_keys(self.prompt_ids, adapter, seen)
        self.ending: tuple[str, Exception | None] | None = None
        self.slot: int | None = None  # of its last token on a device with memory of its own
        self.ahead = 0  # tokens that steps under way there will have chosen
        self.is_chosen_on_device = sampler.is_simple and matcher is None and logprobs is None
        self._matcher = matcher
        self._engine = engine
        self._history = list(ids)
        self._pieces: list[tuple[str, int]] = []  # a text, and how many tokens there were when it was said
        self._listeners: list[Callable[[], None]] = []
        self._draft: NgramDraft | None = None
        self._drafted = self._accepted = 0

    # ------------------------------------------------------------------------------------------------ who waits for it

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None

    def cancel(self) -> None:
        """Cancel it; text that was generated stays."""
        self._engine._cancel(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done; False if that takes longer than `timeout` seconds."""
        return self._engine._wait(lambda: self.is_done, timeout)

    def text(self, timeout: float | None = None) -> str:
        """The whole text; waits until it is done."""
        if not self.wait(timeout):
            raise RunError(f"generate: request {self.number} took longer than {timeout} s", code="X601")
        self.check()
        return "".join(piece for piece, _ in self._pieces)

    def __iter__(self) -> Iterator[str]:
        for at in itertools.count():
            self._engine._wait(lambda at=at: self.is_done or len(self._pieces) > at, None)
            if at >= len(self._pieces):
                break
            yield self._pieces[at][0]
        self.check()

    def pieces(self, start: int = 0) -> list[tuple[str, int]]:
        """The pieces of text from the one with this number on, each with the number of tokens behind it."""
        return self._pieces[start:]

    def listen(self, listener: Callable[[], None]) -> None:
        """Call this, in the engine's thread, whenever there is more text and when it is done."""
        self._listeners.append(listener)
        if self.is_done:
            listener()

    def notify(self) -> None:
        for listener in self._listeners:
            listener()

    def check(self) -> None:
        """Raise what it failed with."""
        if self.error is not None:
            raise self.error

    # ------------------------------------------------------------------------- what the engine does between two steps

    @property
    def pending(self) -> list[int]:
        """Tokens that are chosen, or were before it was preempted, and not in the KV cache."""
        assert self.table is not None
        return self._history[self.table.length :]

    @property
    def next_key(self) -> bytes | None:
        """Of the page of its prompt that is read next; None where that is not a whole one."""
        assert self.table is not None
        at, within = divmod(self.table.length, self.table.pool.tokens)
        return self.keys[at] if not within and at < len(self.keys) else None

    @untouched
    def can_go_on(self, context: int) -> bool:
        """Whether it may need a token beyond those that are chosen, and those that steps under way choose."""
        return len(self.tokens) + self.ahead < self.max_tokens and len(self._history) + self.ahead <= context

    @untouched
    def push(self, logits: np.ndarray, ends: Sequence[int], context: int) -> int | None:
        """Choose the next token and say what can be said; None where it ends with it, for the reason in `ending`."""
        try:
            left = min(self.max_tokens, context - len(self.prompt_ids)) - len(self.tokens)
            allowed = None if self._matcher is None else self._matcher.allowed(left)
            token = self.sampler.choose(
                logits, self._history, self.numbers, start=len(self.prompt_ids), allowed=allowed
            )
            if token in ends and not self.ignore_eos:
                self.ending = ("stop", None)
                return None
            if self._matcher is not None:
                self._matcher.take(token)
            if self.logprobs is not None:
                self.scores.append(score(logits, token, self.logprobs))
        except StrataError as error:
            self.ending = ("error", error)
            return None
        return self._said(token, context)

    @untouched
    def take(self, token: int, ends: Sequence[int], context: int) -> int | None:
        """As `push`, of a token that the device has chosen; -1 is none."""
        if token < 0:
            self.ending = ("error", RunError("generate: the logits have a NaN or an infinity", code="X220"))
            return None
        if token in ends and not self.ignore_eos:
            self.ending = ("stop", None)
            return None
        return self._said(token, context)

    def _said(self, token: int, context: int) -> int | None:
        if self.first_token is None:
            self.first_token = time.perf_counter() - self.started
        self.tokens.append(token)
        self._history.append(token)
        if self._draft is not None:
            self._draft.extend((token,))
        piece = self.speech.push(token)
        if piece:
            self._pieces.append((piece, len(self.tokens)))
        if self.speech.stopped or (self._matcher is not None and self._matcher.is_done):
            self.ending = ("stop", None)
        elif len(self.tokens) >= self.max_tokens or len(self._history) > context:
            self.ending = ("length", None)
        return None if self.ending is not None else token

    def finish(self, reason: str, error: Exception | None) -> None:
        """The last piece of text, and why it ended."""
        tail = self.speech.finish()
        if tail:
            self._pieces.append((tail, len(self.tokens)))
        self.error, self.finish_reason = error, reason
        self._draft = None

    def drafted(self, count: int) -> list[int]:
        """Tokens that may come next: what a grammar leaves no choice about, or what came when this was said before."""
        count = min(count, self.max_tokens - len(self.tokens) - 1)
        if count < 1:
            return []
        if self._matcher is not None:
            forced = self._matcher.forced()
            if forced:
                return forced[:count]
        if self._drafted >= 32 and self._accepted * 5 < self._drafted:  # looking costs little, judging does not
            return []
        if self._draft is None:
            self._draft = NgramDraft()
            self._draft.extend(self._history)
        return self._draft.draft(count)

    def judged(self, drafted: int, accepted: int) -> None:
        """How many of the drafted tokens were right."""
        self._drafted += drafted
        self._accepted += accepted

    def keep_pages(self, start: int, end: int) -> None:
        """Let others share the whole pages of the prompt between two tokens, which were read in one chunk."""
        assert self.table is not None
        size = self.table.pool.tokens
        for page in range(-(-start // size), min(end // size, len(self.keys))):
            self.table.pool.keep(self.table.pages[page], self.keys[page])

    def describe(self) -> dict[str, Any]:
        """What a log says about it."""
        return {
            "prompt_tokens": len(self.prompt_ids), "cached_tokens": self.cached_tokens, "tokens": len(self.tokens),
            "finish_reason": self.finish_reason,
        }  # fmt: skip
