"""Overlapped steps on a device: the next step is launched before the host has read the previous step's tokens.

A request has tokens *ahead*: the device has sampled them in steps that still run, and feeds them to the next step by
itself, but the host does not know them yet. Once they are read, a request may turn out to have ended earlier; tokens
beyond its end are dropped. If only the host can choose a request's tokens (grammars, penalties, scores), it gets the
logits, and no step is launched ahead.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strata.models import PAGE, Chosen, FedRow, FedSteps, TokenDraw, prompt_class, prompt_rows

if TYPE_CHECKING:
    from strata.serving.batching import Batch, PrefillChunk
    from strata.serving.engine import Engine
    from strata.serving.generation import Generation

AHEAD = 1  # steps that are under way while the next one is prepared


@dataclass(slots=True)
class _Asked:
    """A step under way: what it will have chosen, and for whom; None where nobody wants a token."""

    chosen: Chosen
    requests: list[Generation | None]


class OverlappedSteps:
    """What an engine does in a step, where the model's device has memory of its own."""

    def __init__(self, engine: Engine, slots: int, together: int) -> None:
        """Up to so many requests are decoded together."""
        self._engine, self._together = engine, together
        self.steps = FedSteps(engine.cache, slots)
        self._under_way: deque[list[_Asked]] = deque()

    def step(self, batch: Batch[Generation]) -> None:
        """Ask for a step; then read what the one before it has chosen."""
        made: list[_Asked] = []
        self._under_way.append(made)
        for at in range(0, len(batch.decodes), self._together):
            self._decode(batch.decodes[at : at + self._together], made)
        self._prefill(batch.pieces, made)
        self.collect(AHEAD)

    def collect(self, left: int = 0) -> bool:
        """Read what steps have chosen, but for so many of the newest; False where there is none."""
        found = bool(self._under_way)
        while len(self._under_way) > left:
            for asked in self._under_way.popleft():
                self._read(asked)
        return found

    # asking

    def _decode(self, requests: Sequence[Generation], made: list[_Asked]) -> None:
        rows: list[FedRow] = []
        wanted: list[Generation | None] = []
        for request in requests:
            assert request.table is not None
            pending = request.pending
            wants = len(pending) <= 1  # of one that was preempted, what it had said is read again
            rows.append(FedRow(request.table, request.slot, pending[:1], _draw(request) if wants else None))
            wanted.append(request if wants else None)
        if rows:
            self._engine._publish(self._ask(rows, wanted, list(requests), made, prompts=False) or ())

    def _prefill(self, pieces: Sequence[PrefillChunk[Generation]], made: list[_Asked]) -> None:
        """Chunks of prompts, less what others have read by now; those of about one length together."""
        groups: dict[int, list[tuple[PrefillChunk[Generation], int]]] = {}
        coming: set[bytes] = set()  # pages that prompts of these groups will keep
        for piece in pieces:
            request = piece.item
            if request.next_key in coming:
                self._read_groups(groups, made)
                coming.clear()
            start = self._engine._shared_start(piece)
            if start is None:
                continue
            if request.prompt_logprobs is not None:
                self.collect()
                self._engine.host_steps.read_piece(piece)
                continue
            groups.setdefault(prompt_class(piece.end - start), []).append((piece, start))
            coming.update(request.keys[start // PAGE : piece.end // PAGE])
        self._read_groups(groups, made)

    def _read_groups(self, groups: dict[int, list[tuple[PrefillChunk[Generation], int]]], made: list[_Asked]) -> None:
        for tokens, group in groups.items():
            while group:
                count = prompt_rows(len(group), tokens)
                self._read_prompts(group[:count], made)
                del group[:count]
        groups.clear()

    def _read_prompts(self, group: list[tuple[PrefillChunk[Generation], int]], made: list[_Asked]) -> None:
        rows: list[FedRow] = []
        wanted: list[Generation | None] = []
        for piece, start in group:
            request = piece.item
            assert request.table is not None
            wants = piece.is_last and request.max_tokens > 0 and not request.tokens
            ids = request.prompt_ids[start : piece.end]
            rows.append(FedRow(request.table, request.slot if wants else None, ids, _draw(request) if wants else None))
            wanted.append(request if wants else None)
        logits = self._ask(rows, wanted, [piece.item for piece, _ in group], made, prompts=True)
        if logits is None:
            return
        for piece, start in group:
            self._engine._keep_piece(piece, start)
        self._engine._publish(logits)
        for piece, _ in group:
            self._engine._end_piece(piece)

    def _ask(
        self, rows: list[FedRow], wanted: list[Generation | None], requests: list[Generation], made: list[_Asked], *,
        prompts: bool,
    ) -> list[tuple[Generation, np.ndarray]] | None:  # fmt: skip
        """Gives logits of those whose tokens the host chooses; None where the requests failed, and were told so."""
        try:
            chosen = self.steps.prefill(rows) if prompts else self.steps.decode(rows)
            here = [at for at, g in enumerate(wanted) if g is not None and not g.is_chosen_on_device]
            logits = chosen.logits(here) if here else ()
        except Exception as error:  # noqa: BLE001 - whoever waits for the requests is told
            self._engine._fail(requests, error)
            return None
        found = []
        for at, row in zip(here, logits, strict=True):
            request, wanted[at] = wanted[at], None
            assert request is not None
            found.append((request, row[None]))
        for waiting in wanted:
            if waiting is not None:
                waiting.ahead += 1
        made.append(_Asked(chosen, wanted))
        return found

    # reading

    def _read(self, asked: _Asked) -> None:
        requests = [g for g in asked.requests if g is not None]
        if not requests:
            return
        start = time.perf_counter()
        try:
            tokens = asked.chosen.tokens()
        except Exception as error:  # noqa: BLE001 - whoever waits for the requests is told
            self._engine._fail(requests, error)
            return
        self._engine.metrics.observe("wait_microseconds", (time.perf_counter() - start) * 1e6)
        known: list[tuple[Generation, int]] = []
        for request, token in zip(asked.requests, tokens.tolist(), strict=True):
            if request is not None:
                request.ahead -= 1
                if not request.is_done:
                    known.append((request, token))
        self._engine._publish_tokens(known)


def _draw(request: Generation) -> TokenDraw | None:
    """The next random number of a request whose tokens are drawn on the device."""
    sampler = request.sampler
    if not sampler.temperature or not request.is_chosen_on_device:
        return None
    number = float(request.numbers.random())
    return TokenDraw(sampler.temperature, sampler.min_p, number, sampler.top_k, sampler.top_p)
