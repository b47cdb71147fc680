"""Streaming detokenisation: text is held back while it may still be half a character or a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from strata.models.tokenizer import Tokenizer

MOST_HELD: Final = 64  # tokens that may be half a character; behind so many they are said as they are


class _StopString:
    """A stop string that is looked for letter by letter, in time linear in the text (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found = 0  # letters at the end of the text so far that the stop string begins with
        self._shorter = [0]  # for each prefix that was found, the longest of its ends that is a prefix, too

    def push(self, letter: str) -> bool:
        """Whether the stop string ends with this letter."""
        at = self._longer(self.found, letter)
        if len(self._shorter) < at:  # the table is no longer than what was found, so that it costs no more than that
            self._shorter.append(self._longer(self._shorter[-1], self.text[at - 1]))
        self.found = at if at < len(self.text) else self._shorter[at - 1]
        return at == len(self.text)

    def _longer(self, at: int, letter: str) -> int:
        """How much is found with one more letter, where so much was."""
        while at and self.text[at] != letter:
            at = self._shorter[at - 1]
        return at + (self.text[at] == letter)


class Speech:
    """The text of one generation. `push` a token, and get what can be said of it; `finish` says the rest.

    `special` shows special tokens as text, too, such as those around a tool call.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Sequence[str] = (), *, special: bool = False) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._stops = [_StopString(s) for s in ((stop,) if isinstance(stop, str) else stop) if s]
        self._tokens: list[int] = []
        self._start = 0  # of the tokens that a piece is decoded with: some before it, as spaces depend on neighbours
        self._shown = ""
        self._held = ""
        self.stopped = False  # a stop string was found; nothing is said from it on

    def push(self, token: int) -> str:
        """What can be said once this token has come."""
        self._tokens.append(token)
        text = self._decode()
        if text.endswith("\ufffd") and len(self._tokens) - self._start <= MOST_HELD:
            return ""
        piece = text[len(self._shown) :]
        if len(self._tokens) - self._start > 16:
            self._start = len(self._tokens) - (0 if text.endswith("\ufffd") else 4)
            self._shown = self._decode()
        else:
            self._shown = text
        return self._before_stop(piece)

    def finish(self) -> str:
        """What was held back; nothing follows it."""
        tail = self._before_stop(self._decode()[len(self._shown) :])
        tail, self._held = tail + self._held, ""
        return tail

    def _decode(self) -> str:
        return self._tokenizer.decode(self._tokens[self._start :], skip_special=not self._special)

    def _before_stop(self, piece: str) -> str:
        if self.stopped or not self._stops:
            return "" if self.stopped else piece
        text = self._held + piece
        for at, letter in enumerate(piece, len(self._held) + 1):
            ended = [len(s.text) for s in self._stops if s.push(letter)]
            if ended:
                self.stopped, self._held = True, ""
                return text[: at - max(ended)]
        end = len(text) - max(s.found for s in self._stops)
        self._held = text[end:]
        return text[:end]


def streamed_text(
    tokens: Iterable[int], tokenizer: Tokenizer, stop: str | Sequence[str] = (), *, special: bool = False
) -> Iterator[str]:
    """The pieces of text of tokens, up to a stop string."""
    speech = Speech(tokenizer, stop, special=special)
    for token in tokens:
        piece = speech.push(token)
        if piece:
            yield piece
        if speech.stopped:
            return
    tail = speech.finish()
    if tail:
        yield tail
