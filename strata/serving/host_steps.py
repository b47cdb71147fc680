"""Steps on a device whose memory is the host's: the host reads logits and chooses tokens before it asks for the next.

Decodes go together. What is judged is computed sequence by sequence: drafted tokens, and tokens that a preempted
request had said before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from strata.serving.batching import LEAST
from strata.serving.generation import score

if TYPE_CHECKING:
    from strata.serving.batching import Batch, PrefillChunk
    from strata.serving.engine import Engine
    from strata.serving.generation import Generation

SPECULATE_UP_TO: Final = 2  # sequences in a step: with more, the matmuls are busy without drafts
SCORED: Final = 64  # tokens of a prompt that are read in one step if all their logits are wanted


class HostSteps:
    """What an engine does in a step, where the host chooses all tokens."""

    def __init__(self, engine: Engine, together: int) -> None:
        """Up to so many requests are decoded together."""
        self._engine, self._together = engine, together

    def step(self, batch: Batch[Generation]) -> None:
        """Decode, then read prompts; what is left of them waits where a request comes that goes first."""
        engine, fair = self._engine, self._engine.fair
        start = fair.clock()
        if batch.decodes:
            self._decode(batch.decodes)
            fair.decoded(len(batch.decodes), fair.clock() - start)
        parts = [part for piece in batch.pieces for part in engine._batcher.parts(piece)]
        for at, part in enumerate(parts):
            if (at or batch.decodes) and fair.ends_early():
                engine._put_back(parts[at:])
                return
            start, tokens = fair.clock(), part.end - part.start
            is_short = len(part.item.prompt_ids) - part.start <= engine._batcher.longest
            self.read_piece(part)
            fair.has_read(tokens, fair.clock() - start, is_short=is_short)

    def _decode(self, requests: Sequence[Generation]) -> None:
        alone: list[tuple[Generation, list[int]]] = []
        together: list[Generation] = []
        for request in requests:
            pending = request.pending
            if len(pending) > 1:  # it was preempted: what it had said is read again
                alone.append((request, pending[: min(self._engine._judged, len(pending) - 1)]))
            elif self._engine._speculates and len(requests) <= SPECULATE_UP_TO:
                assert request.table is not None
                room = min(request.table.capacity, self._engine.model.context) - request.table.length - 1
                draft = request.drafted(min(self._engine._judged - 1, room))
                alone.append((request, [*pending, *draft])) if draft else together.append(request)
            else:
                together.append(request)
        for at in range(0, len(together), self._together):
            some = together[at : at + self._together]
            logits = self._computed(some, np.array([g.pending for g in some], np.int32))
            if logits is not None:
                self._engine._publish([(g, row[None]) for g, row in zip(some, logits, strict=True)])
        for request, ids in alone:
            self._decode_some(request, ids)

    def _decode_some(self, request: Generation, ids: list[int]) -> None:
        """Several tokens of one sequence: said before, or the last one and a draft of what follows."""
        table = request.table
        assert table is not None
        start, again = table.length, len(request.pending) > 1
        logits = self._computed([request], np.array([ids], np.int32), every=not again)
        if logits is None or again:
            return
        found = self._engine._publish([(request, logits[0])], drafts={request: ids[1:]})
        if not request.is_done:
            table.length = start + found[request]  # what was not accepted is written over
        request.judged(len(ids) - 1, found[request] - 1)
        self._engine.metrics.count("drafted_tokens", len(ids) - 1)
        self._engine.metrics.count("accepted_tokens", found[request] - 1)

    def read_piece(self, piece: PrefillChunk[Generation]) -> None:
        """Read a chunk of a prompt, and choose a token behind the last one."""
        request, start = piece.item, self._engine._shared_start(piece)
        if start is None:
            return
        if request.prompt_logprobs is not None:
            logits = self._scored(request, piece.end)
        else:
            logits = self._computed([request], np.asarray([request.prompt_ids[start : piece.end]], np.int32))
        if logits is None:
            return
        self._engine._keep_piece(piece, start)
        if piece.is_last and request.max_tokens and not request.tokens:
            self._engine._publish([(request, logits)])
        self._engine._end_piece(piece)

    def _scored(self, request: Generation, end: int) -> np.ndarray | None:
        """A chunk of a prompt whose tokens are scored by what came before them."""
        table, top = request.table, request.prompt_logprobs
        assert table is not None
        assert top is not None
        logits = None
        while table.length < end:
            start = table.length
            stop = end if end - start <= SCORED + LEAST else start + SCORED
            logits = self._computed([request], np.asarray([request.prompt_ids[start:stop]], np.int32), every=True)
            if logits is None:
                return None
            if not request.prompt_scores:
                request.prompt_scores.append(None)  # nothing comes before the first
            following = request.prompt_ids[start + 1 : stop + 1]
            request.prompt_scores += [score(row, t, top) for row, t in zip(logits[0], following, strict=False)]
        return None if logits is None else logits[0][-1:]

    def _computed(self, requests: Sequence[Generation], ids: np.ndarray, *, every: bool = False) -> np.ndarray | None:
        """Logits of these requests; None where they failed, and were told so."""
        try:
            tables: Any = [g.table for g in requests]
            return self._engine.cache.step(tables, ids, every=True) if every else self._engine.cache.step(tables, ids)
        except Exception as error:  # noqa: BLE001 - whoever waits for the requests is told
            self._engine._fail(requests, error)
            return None
