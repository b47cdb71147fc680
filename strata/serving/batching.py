"""The batch of one engine step: a decode token of every running sequence first, then prefill chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from strata.errors import OptionError
from strata.models import PAGE

T = TypeVar("T")
LEAST: Final = 4  # tokens: so few at the end of a prompt would be read by the kernel for single tokens


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
    a multiple of `grain`, and never leaves a rest of `least` tokens or fewer.
    """

    max_tokens: int
    max_entries: int
    grain: int = 1
    least: int = 0

    def __post_init__(self) -> None:
        if min(self.max_tokens, self.max_entries, self.grain) < 1 or self.least < 0:
            raise OptionError(
                f"a step of {self.max_tokens} tokens of {self.max_entries} sequences, cut at {self.grain} and leaving "
                f"more than {self.least}, is never filled", code="O603",
            )  # fmt: skip

    def build(self, decodes: Sequence[T], prefills: deque[Prefill[T]]) -> Batch[T]:
        """The next step. Prompts that are read to their end leave the queue."""
        first = tuple(decodes[: min(self.max_tokens, self.max_entries)])
        room, entries = self.max_tokens - len(first), self.max_entries - len(first)
        pieces: list[PrefillChunk[T]] = []
        while prefills and room > 0 and entries > 0:
            head = prefills[0]
            end = self._end(head, room)
            if end <= head.done:
                break
            pieces.append(PrefillChunk(head.item, head.done, end, end == head.total))
            room, entries = room - (end - head.done), entries - 1
            head.done = end
            if end < head.total:
                break
            prefills.popleft()
        return Batch(first, tuple(pieces))

    def _end(self, head: Prefill[T], room: int) -> int:
        """Where the next chunk of a prompt ends."""
        if head.total - head.done <= room:
            return head.total
        end = (head.done + room) // self.grain * self.grain
        while head.done < end < head.total <= end + self.least:
            end -= self.grain
        return end


def exact_batcher(max_tokens: int, max_entries: int) -> Batcher:
    """A batcher that splits prompts only where no bit of the results changes."""
    if max_tokens < max_entries + 2 * PAGE:
        raise OptionError(
            f"a step of {max_tokens} tokens for {max_entries} sequences leaves no room for prompts", code="O603",
            fix=f"max_tokens={max_entries + 2 * PAGE} or more",
        )  # fmt: skip
    return Batcher(max_tokens, max_entries, PAGE, LEAST)
