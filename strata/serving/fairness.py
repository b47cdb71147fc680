"""Requests that have just come are entitled to half of an engine's time, whatever the others ask for.

Requests are *fresh* while they have few tokens, or none, and no more than a chunk of their prompt is left: of those
that may go on, the ones of the lowest level. A step for everyone may take many times as long as one for the fresh
requests alone. Where it does, they have steps of their own in between: the others take part in a step once the fresh
ones have had as much time since the last one as it will give to the others. Time is what steps took lately, not their
number. Where a step for everyone takes less than twice as long, everyone takes part in each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from strata.serving.batching import Batcher, Prefill

if TYPE_CHECKING:
    from strata.serving.generation import Generation

LEVELS: Final = (1, 4, 8)  # tokens with which a request reaches the next level; with the last, it is not fresh any more
MOST_ALONE: Final = 16  # steps of fresh requests in a row: then the others have theirs, whatever was measured


def level(request: Generation) -> int:
    """How much of its answer a request has, as its rank: lower ones go first."""
    return sum(len(request.tokens) >= tokens for tokens in LEVELS)


class FreshTurn(NamedTuple):
    """Who may take part in the next step: rows that are decoded, and prompts."""

    rows: list[Generation]
    prompts: list[Prefill[Generation]]


class FairShare:
    """Decides which steps fresh requests have alone, by the seconds that steps take."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._came: float | None = None  # when the first request with a short prompt came during this step
        self._ahead = 0.0  # seconds that the others have had and the fresh ones have not, while both were there
        self._decode: dict[int, float] = {}  # seconds of decoding so many rows
        self._token = 0.0  # seconds of reading a token of a prompt
        self._step = 0.0  # seconds of the last step for everyone
        self._own: int | None = None  # rows of fresh requests in a step that others take part in
        self._is_alone, self._alone = False, 0  # the step under way; how many in a row
        self._may_end = self._has_ended = False  # early: the step under way, the last one for everyone

    def alone(
        self, rows: Sequence[Generation], prompts: Iterable[Prefill[Generation]], batcher: Batcher, *, spares: bool
    ) -> FreshTurn | None:  # fmt: skip
        """Who takes part in the next step, if that is one of the fresh requests alone. Otherwise, long prompts take no
        part in it where it `spares` the others."""
        short: list[Prefill[Generation]] = []
        long: list[Prefill[Generation]] = []
        for prompt in prompts:
            (short if batcher.is_short(prompt) else long).append(prompt)
        lowest = min((level(g) for g in (*rows, *(p.item for p in short))), default=len(LEVELS))
        own = FreshTurn([], [])
        if lowest < len(LEVELS):
            own.rows.extend(g for g in rows if level(g) == lowest)
            own.prompts.extend(p for p in short if level(p.item) == lowest)
        chunk = batcher.longest if long and not (spares and (rows or short)) else 0
        tokens = sum(p.total - p.done for p in own.prompts)
        ours, theirs = min(tokens, batcher.max_tokens), chunk + sum(p.total - p.done for p in short) - tokens
        is_contended = bool(own.rows or own.prompts) and bool(len(rows) > len(own.rows) or theirs or long)
        self._begin(own, is_contended=is_contended)
        most = min(len(rows), batcher.max_entries)
        alone = self._seconds(len(own.rows))
        more = max(self._seconds(most) - alone, 0.0) + theirs * self._token - alone - ours * self._token
        if self._alone >= MOST_ALONE:
            self._ahead = min(self._ahead, -more)  # a step took much longer than they usually do
        self._is_alone = is_contended and self._ahead + more > 0
        self._alone = self._alone + 1 if self._is_alone else 0
        if self._is_alone:
            return own
        self._ahead = max(self._ahead, min(-more, 0.0))  # nothing is saved up for later
        self._step = 0.0
        self._may_end, self._has_ended = not self._has_ended, False
        return None

    def _begin(self, own: FreshTurn, *, is_contended: bool) -> None:
        """What newcomers waited for while others had their step counts as theirs."""
        came, self._came = self._came, None
        self._own = len(own.rows) if is_contended else None
        if not is_contended:
            self._ahead = 0.0
        elif came is not None and not self._is_alone:
            self._ahead += min(self.clock() - came, self._step)

    def _seconds(self, rows: int) -> float:
        """How long it takes to decode so many rows: as it did, or in proportion to the next number that is known."""
        if not rows or not self._decode:
            return 0.0
        known = rows if rows in self._decode else min(self._decode, key=lambda n: (abs(n - rows), n))
        return self._decode[known] * rows / known

    def decoded(self, rows: int, seconds: float) -> None:
        """So long took the decoding of a step."""
        self._decode[rows] = (self._decode.get(rows, seconds) + seconds) / 2
        own = seconds if self._is_alone else min(self._seconds(self._own or 0), seconds)
        if not self._is_alone:
            self._step += seconds
        if self._own is not None:
            self._ahead += seconds - 2 * own

    def has_read(self, tokens: int, seconds: float, *, is_short: bool) -> None:
        """So long took tokens of a prompt."""
        self._token = seconds / tokens
        if not self._is_alone:
            self._step += seconds
        if self._own is not None:
            self._ahead += -seconds if is_short else seconds

    def comes(self) -> None:
        """A request with a short prompt has come."""
        if self._came is None:
            self._came = self.clock()

    def ends_early(self) -> bool:
        """Whether the rest of a step waits, as a request has come: never of two steps for everyone in a row."""
        ends = self._came is not None and self._may_end and not self._is_alone
        self._has_ended = self._has_ended or ends
        return ends
