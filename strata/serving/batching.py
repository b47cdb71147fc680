"""The batch of one engine step: a decode token of every running sequence first, then prefill chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from strata.errors import OptionError
from strata.models import PAGE

T = TypeVar("T")
LEAST: Final = 4  # tokens: so few at the end of a prompt would be read by the kernel for single tokens
LEAST_CHUNK: Final = 4  # pages of a long prompt beside others: shorter ones take more time for each token


@dataclass
class Prefill(Generic[T]):
    """A prompt to prefill: `total` tokens, of which `done` are in the KV cache."""

    item: T
    total: int
    done: int = 0


@dataclass(frozen=True)
class PrefillChunk(Generic[T]):
    """A chunk of a prefill: tokens `start` to `end` of a prompt."""

    item: T
    start: int
    end: int
    is_last: bool


@dataclass(frozen=True)
class Batch(Generic[T]):
    """The work of one step: sequences to decode, and prefill chunks."""

    decodes: tuple[T, ...]
    pieces: tuple[PrefillChunk[T], ...]

    @property
    def tokens(self) -> int:
        return len(self.decodes) + sum(p.end - p.start for p in self.pieces)


@dataclass(frozen=True)
class Batcher:
    """Fills steps of at most `max_tokens` tokens of at most `max_entries` sequences.

    Decodes come first, one token for each running sequence, in their order; then prefills, whole while they fit. The
    first that does not fit is split, and its rest stays at the head of the queue; those behind it wait. It is split at
    a multiple of `grain`, and never leaves a rest of `least` tokens or fewer. With a `chunk`, prompts of which more
    than that is left do not keep others waiting: unless it is alone, the first of them has a chunk of a step, and the
    short ones have the rest.
    """

    max_tokens: int
    max_entries: int
    grain: int = 1
    least: int = 0
    chunk: int | None = None

    def __post_init__(self) -> None:
        is_short = self.chunk is not None and self.chunk < 2 * self.grain
        if min(self.max_tokens, self.max_entries, self.grain) < 1 or self.least < 0 or is_short:
            raise OptionError(
                f"a step of {self.max_tokens} tokens of {self.max_entries} sequences, cut at {self.grain} and leaving "
                f"more than {self.least}, is never filled" if not is_short else
                f"a chunk of {self.chunk} tokens, cut at {self.grain}, is never filled", code="O603",
            )  # fmt: skip

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt that is short, and of a chunk of one that is not."""
        return self.chunk or self.max_tokens

    def is_short(self, prompt: Prefill[T]) -> bool:
        """Whether what is left of a prompt does not keep others waiting."""
        return prompt.total - prompt.done <= self.longest

    def parts(self, piece: PrefillChunk[T]) -> list[PrefillChunk[T]]:
        """A chunk of a prompt in parts that are no longer than the longest short one, or hardly."""
        found, start = [], piece.start
        while piece.end - start > self.longest + self.least:
            end = (start + self.longest) // self.grain * self.grain
            found.append(PrefillChunk(piece.item, start, end, False))
            start = end
        return [*found, PrefillChunk(piece.item, start, piece.end, piece.is_last)]

    def build(self, decodes: Sequence[T], prefills: deque[Prefill[T]], *, spares: bool = False) -> Batch[T]:
        """The next step. Prompts that are read to their end leave the queue. If it `spares` the others, long prompts
        take no part in it."""
        first = tuple(decodes[: min(self.max_tokens, self.max_entries)])
        room, entries = self.max_tokens - len(first), self.max_entries - len(first)
        chunk = self.longest
        long = [p for p in prefills if self.chunk is not None and not self.is_short(p)]
        if not long or (not first and len(prefills) == 1):
            pieces = self._cut(prefills, room, entries)
        else:
            short = [p for p in prefills if not any(p is other for other in long)]
            kept = 0 if spares and (first or short) else min(chunk, -(-room // 2))
            pieces = self._cut(short, room - kept, entries - (kept > 0))
            if kept:
                left = room - sum(p.end - p.start for p in pieces)
                pieces += self._cut(long[:1], min(left, chunk), entries - len(pieces))
        for _ in range(len(prefills)):
            head = prefills.popleft()
            if head.done < head.total:
                prefills.append(head)
        return Batch(first, tuple(pieces))

    def _cut(self, prefills: Iterable[Prefill[T]], room: int, entries: int) -> list[PrefillChunk[T]]:
        """Chunks of prompts in their order, of which the last one may not be the last of its prompt."""
        pieces: list[PrefillChunk[T]] = []
        for head in prefills:
            if room <= 0 or len(pieces) >= entries:
                break
            end = self._end(head, room)
            if end <= head.done:
                break
            pieces.append(PrefillChunk(head.item, head.done, end, end == head.total))
            room -= end - head.done
            head.done = end
            if end < head.total:
                break
        return pieces

    def _end(self, head: Prefill[T], room: int) -> int:
        """Where the next chunk of a prompt ends."""
        if head.total - head.done <= room:
            return head.total
        end = (head.done + room) // self.grain * self.grain
        while head.done < end < head.total <= end + self.least:
            end -= self.grain
        return end


def exact_batcher(max_tokens: int, max_entries: int, chunks: int = 4) -> Batcher:
    """A batcher that splits prompts only where no bit of the results changes; a long one has one in `chunks` of the
    tokens of a step."""
    if max_tokens < max_entries + 2 * PAGE:
        raise OptionError(
            f"a step of {max_tokens} tokens for {max_entries} sequences leaves no room for prompts", code="O603",
            fix=f"max_tokens={max_entries + 2 * PAGE} or more",
        )  # fmt: skip
    chunk = max(max_tokens // chunks // PAGE, LEAST_CHUNK) * PAGE
    return Batcher(max_tokens, max_entries, PAGE, LEAST, chunk)
