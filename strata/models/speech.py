"""Streaming detokenisation: text is held back while it may still be half a character or a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from strata.models.tokenizer import Tokenizer


class Speech:
    """The text of one generation. `push` a token, and get what can be said of it; `finish` says the rest."""

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(s for s in ((stop,) if isinstance(stop, str) else stop) if s)
        self._tokens: list[int] = []
        self._start = 0  # of the tokens that a piece is decoded with: some before it, as spaces depend on neighbours
        self._shown = ""
        self._held = ""
        self.stopped = False  # a stop string was found; nothing is said from it on

    def push(self, token: int) -> str:
        """What can be said once this token has come."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens[self._start :])
        if text.endswith("\ufffd"):
            return ""
        piece = text[len(self._shown) :]
        if len(self._tokens) - self._start > 16:
            self._start = len(self._tokens) - 4
            self._shown = self._tokenizer.decode(self._tokens[self._start :])
        else:
            self._shown = text
        return self._before_stop(piece)

    def finish(self) -> str:
        """What was held back; nothing follows it."""
        tail = self._before_stop(self._tokenizer.decode(self._tokens[self._start :])[len(self._shown) :])
        tail, self._held = tail + self._held, ""
        return tail

    def _before_stop(self, piece: str) -> str:
        if self.stopped or not self._stops:
            return "" if self.stopped else piece
        self._held += piece
        places = [self._held.find(s) for s in self._stops if s in self._held]
        if places:
            self.stopped = True
            said, self._held = self._held[: min(places)], ""
            return said
        risky = max((n for s in self._stops for n in range(1, len(s)) if self._held.endswith(s[:n])), default=0)
        end = len(self._held) - risky
        said, self._held = self._held[:end], self._held[end:]
        return said


def said(tokens: Iterable[int], tokenizer: Tokenizer, stop: str | Sequence[str] = ()) -> Iterator[str]:
    """The pieces of text of tokens, up to a stop string."""
    speech = Speech(tokenizer, stop)
    for token in tokens:
        piece = speech.push(token)
        if piece:
            yield piece
        if speech.stopped:
            return
    tail = speech.finish()
    if tail:
        yield tail
