"""Continuous batching: requests join and leave between steps, and no result depends on the others in its batch.

Each step decodes a token of every running sequence and prefills chunks of new prompts. A request gives the tokens that
it would give alone, bit for bit: rows of a batch do not depend on each other, and prompts are split only between pages.
With quantised weights that holds for up to three at a time.

Pages of the KV cache are taken as tokens come. Those of a prompt are kept when it was read: a later prompt with the
same beginning shares them. Where no page is left, the request that came last gives its own back and is preempted; when
it goes on, its prompt is read again and its tokens are decoded again, by the kernels that made them, to the same bits.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from threading import Condition, Lock, Thread
from typing import Any, Final, Self

import numpy as np

from strata.arguments import own_checks
from strata.backends import backend_for
from strata.errors import OptionError, RequestError, RunError
from strata.kinds import counted
from strata.models import PAGE, Decoder, Grammar, PagedCache, Sampler, Speech
from strata.serving.adapters import AdapterQueue
from strata.serving.batching import LEAST, Batch, Prefill, PrefillChunk, exact_batcher
from strata.serving.courtesy import Courtesy
from strata.serving.fairness import FairShare
from strata.serving.generation import Generation
from strata.serving.host_steps import HostSteps
from strata.serving.limits import ON_DEVICE, ON_HOST, Limits, usual_tokens
from strata.serving.metrics import Metrics
from strata.serving.overlap import OverlappedSteps
from strata.serving.turns import (
    ADMITTED,
    IN_TURNS,
    KEPT_FREE,
    PATIENCE,
    in_turn,
    is_young,
    next_turns,
    who_makes_room,
    who_makes_room_for,
)

TOGETHER: Final = 4  # rows of one sequence that have the bits of one: drafted tokens are judged so many at a time
TOGETHER_QUANTIZED: Final = 3
SPARED: Final = 2  # steps of the others, for each chunk of a long prompt
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class Engine:
    """Continuous batching: generates for many requests at once with one decoder, over a paged KV cache.

    `cache_tokens` is the size of the KV cache, for all requests together. A step computes at most `max_tokens` tokens
    of at most `max_requests` requests: more on a device with memory of its own, where nobody says otherwise; where more
    run, those that were given least come first; at most `queue` wait. `adapters` are LoRA folders by name, which
    requests may ask for. Matmuls of quantised weights with more than three rows differ from those of one in their last
    bits; `exact` decodes three requests at a time there, so that no request depends on the others. `prefix_cache` keeps
    the pages of prompts for others with the same beginning; `speculate` drafts tokens from what was said before, and
    takes none that the model would not have chosen. With `kv_bits=8` the KV cache takes a quarter of the memory:
    numbers are rounded to 8 bits, with a scale for each token and head, and no result depends on when that was; with
    16, they are bf16. Inside `with engine:` a thread runs the steps; otherwise whoever waits does.
    """

    @own_checks()
    def __init__(
        self, model: Decoder, *, cache_tokens: int | None = None, max_requests: int | None = None,
        max_tokens: int | None = None, queue: int = 256, exact: bool = False,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None, metrics: Metrics | None = None,
        prefix_cache: bool = True, speculate: bool = True, kv_bits: int | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(model, Decoder):
            raise OptionError(f"engine: {type(model).__name__} generates no text", code="O605")
        home = backend_for(model.device).home
        usual = ON_DEVICE if home is not None else ON_HOST
        max_requests = usual.requests if max_requests is None else max_requests
        max_tokens = max(usual.tokens, max_requests + 4 * PAGE) if max_tokens is None else max_tokens
        counts = (max_requests, max_tokens, queue, 1 if cache_tokens is None else cache_tokens)
        if not all(isinstance(n, int) for n in counts) or min(max_requests, max_tokens, counts[3]) < 1 or queue < 0:
            raise OptionError(
                f"engine: max_requests {max_requests!r}, max_tokens {max_tokens!r}, queue {queue!r} and cache_tokens "
                f"{cache_tokens!r} serve nobody", code="O605",
            )  # fmt: skip
        tokens = usual_tokens(model, home, usual.contexts, kv_bits) if cache_tokens is None else cache_tokens
        self.model = model.adapted(adapters) if adapters else model
        self.cache = PagedCache(self.model, -(-tokens // PAGE), bits=kv_bits)
        self.adapters = tuple(adapters or ())
        together = TOGETHER_QUANTIZED if exact and model.is_quantized else max_requests
        self.host_steps = HostSteps(self, together)
        fed = self.cache.is_fed
        self._overlap = OverlappedSteps(self, ADMITTED * max_requests, together) if fed else None
        self._judged = TOGETHER_QUANTIZED if model.is_quantized else TOGETHER
        goes_back = not model.has_state  # a recurrent state is that of the last token only
        self._shares, self._speculates = prefix_cache and goes_back, speculate and goes_back
        if home is not None:  # its kernels for one token and for several differ in their last bits
            self._judged, self._speculates = 1, False
        self.limits = Limits(max_length=model.context, vocabulary=model.config.vocab)
        self.metrics = metrics or Metrics()
        self.limit = queue
        self.courtesy = Courtesy()  # to what other threads do for requests
        self.fair = FairShare()
        self._batcher = exact_batcher(max_tokens, max_requests, usual.chunks)
        self._waiting: AdapterQueue[Generation] = AdapterQueue(max_requests, known=self.adapters)
        self._reading: deque[Prefill[Generation]] = deque()
        self._running: list[Generation] = []
        self._served: list[Generation] = []  # those of both, in the order in which they were let in
        self._preempted: list[Generation] = []  # they gave their pages back, and come before all that wait
        self._numbers = itertools.count(1)
        self._steps = 0
        self._spared = SPARED  # steps since a long prompt took part in one
        self._changed = Condition()  # guards all of the above
        self._stepping = Lock()
        self._thread: Thread | None = None
        self._closing = False

    def warm_up(self) -> None:
        """Compile and load what the first request needs, so that it does not wait for it.

        What judges drafts is compiled by the engine's thread when it first has nothing to do.
        """
        if self._overlap is not None:
            self._overlap.steps.warm_up(self._batcher.max_entries)
        else:
            self.model.graph_for(every=False, layout=self.cache.layout)
        assert self.model.tokenizer is not None

    # ------------------------------------------------------------------------------------------------------- requests

    @own_checks()
    def submit(
        self, prompt: Prompt, *, max_tokens: int = 128, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        min_p: float = 0.0, repetition_penalty: float = 1.0, seed: int | None = None, stop: str | Sequence[str] = (),
        adapter: str | None = None, frequency_penalty: float = 0.0, presence_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None, logprobs: int | None = None, prompt_logprobs: int | None = None,
        grammar: Grammar | None = None, tools: Sequence[Mapping[str, Any]] | None = None, show_special: bool = False,
        ignore_eos: bool = False, client: str = "", priority: int = 0,
    ) -> Generation:  # fmt: skip
        """Queue a request, with the options of `generate`; it starts when the batch and the KV cache have room.

        `logprobs` asks for the scores of its tokens and of so many others, `prompt_logprobs` of the prompt's.
        `grammar` is what the text has to follow, `tools` are for the chat template. Clients take turns; a lower
        `priority` comes first.
        """
        sampler = Sampler(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
            seed=seed, frequency_penalty=frequency_penalty, presence_penalty=presence_penalty,
            logit_bias=logit_bias or {},
        )  # fmt: skip
        read = self.model.read_prompt(prompt, tools=tools, limit=self.model.context)
        ids = read.ids
        speech = Speech(self.model.tokenizer, stop, special=show_special)
        if not isinstance(max_tokens, int) or max_tokens < (0 if prompt_logprobs is not None else 1):
            raise OptionError(f"generate: max_tokens {max_tokens!r} is not a positive number", code="O606")
        self._check(ids, adapter)
        matcher = None if grammar is None else grammar.matcher(self.model.tokenizer, self.model.config.vocab)
        made = Generation(
            self, next(self._numbers), ids, sampler, max_tokens, speech, adapter, client=client, priority=priority,
            logprobs=logprobs, prompt_logprobs=prompt_logprobs, matcher=matcher, ignore_eos=ignore_eos,
            seen=read.seen,
        )  # fmt: skip
        with self._changed:
            if self._closing:
                raise RunError("engine: it is closed", code="X602")
            self._make_room(client)
            self._waiting.put(made, adapter, client=client, priority=priority, cost=len(ids))
            if len(ids) <= self._batcher.longest:
                self.fair.comes()
            self.metrics.count("requests")
            self.metrics.count("prompt_tokens", len(ids))
            self._changed.notify_all()
        return made

    def _make_room(self, client: str) -> None:
        """Room in the queue: where it is full, that of a client with more requests there than this one has."""
        count = len(self._waiting)
        if count < self.limit + max(self._batcher.max_entries - self._active, 0):
            return
        full = RunError(f"engine: {count} requests wait already", code="X600")
        largest = self._waiting.newest_of_largest()
        if largest is None or self._waiting.count_of(largest[0]) <= self._waiting.count_of(client) + 1:
            raise full
        self._waiting.drop(largest[1])
        self._finish(largest[1], "error", full)

    def _check(self, ids: Sequence[int], adapter: str | None) -> None:
        self.limits.check_ids(ids)
        room = self.cache.pool.pages * PAGE
        if len(ids) > room:
            error = RequestError(
                f"engine: a prompt of {counted(len(ids), 'token')} is larger than a cache of {room}", code="O607",
                fix=f"Engine(model, cache_tokens={len(ids)})",
            )  # fmt: skip
            error.reason = "context_length_exceeded"
            raise error
        self._waiting.check(adapter)

    @property
    def _active(self) -> int:
        return len(self._served)

    @property
    def load(self) -> dict[str, int]:
        """What it has to do now: requests that run and wait, pages of the KV cache, free ones, and kept prompts."""
        pool = self.cache.pool
        return {"running": self._active, "waiting": len(self._waiting) + len(self._preempted), "pages": pool.pages,
                "free_pages": pool.free, "kept_pages": pool.kept}  # fmt: skip

    @property
    def is_closing(self) -> bool:
        """Whether it accepts no more requests."""
        return self._closing

    @property
    def _has_work(self) -> bool:
        return bool(self._served or self._preempted or len(self._waiting))

    def _cancel(self, request: Generation) -> None:
        with self._changed:
            request.wants_end = True
            if self._waiting.drop(request):
                self._finish(request, "cancelled")
            self._changed.notify_all()

    def _wait(self, done: Any, timeout: float | None) -> bool:
        """Until `done()`: the engine's thread does the work, or this one."""
        end = None if timeout is None else time.monotonic() + timeout
        while not done():
            if end is not None and time.monotonic() >= end:
                return False
            if self._thread is not None:
                with self._changed:
                    self._changed.wait_for(
                        lambda: done() or self._thread is None, None if end is None else end - time.monotonic()
                    )
            else:
                self.step()
        return True

    # ----------------------------------------------------------------------------------------------------------- work

    def step(self) -> bool:
        """Compute one step of the batch; False when there is nothing to do."""
        overlap = self._overlap
        with self._stepping:
            with self._changed:
                is_short = self._is_short
            if overlap is not None and is_short:
                overlap.collect()  # some may end, and none is preempted whose tokens are not known
            with self._changed:
                batch = self._next()
            if not batch.tokens:
                return overlap is not None and overlap.collect()
            start = time.perf_counter()
            if overlap is not None:
                overlap.step(batch)
            else:
                self.host_steps.step(batch)
            self.metrics.count("steps")
            self.metrics.observe("step_microseconds", (time.perf_counter() - start) * 1e6)
            self.metrics.observe("step_tokens", batch.tokens)
            return True

    def run(self) -> None:
        """Run steps until no request is left."""
        while self.step():
            pass

    # ---------------------------------------------------------------------------- who takes part in the next step

    def _next(self) -> Batch[Generation]:
        """Let requests in for which there is room, and say what the next step computes."""
        for request in [g for g in (*self._served, *self._preempted) if g.wants_end]:
            self._finish(request, "cancelled")
        self._let_all_in()
        for request in list(self._running):
            if request.table is not None and not request.is_done:  # others have not made room by it
                self._grow(request)
        for name, value in self.load.items():
            self.metrics.set("active" if name == "running" else name, value)
        ready = [g for g in self._running if g.can_go_on(self.model.context)]
        most = self._batcher.max_entries - (1 if self._reading and self._batcher.max_entries > 1 else 0)
        reading = deque(in_turn(self._reading, lambda p: p.item.client))
        spares = self._spared < SPARED
        alone = None  # on a device, many rows take hardly longer than one
        if self._overlap is None and (alone := self.fair.alone(ready, reading, self._batcher, spares=spares)):
            ready, reading = alone.rows, deque(alone.prompts)
        chosen = next_turns(ready, most, self._batcher.max_entries, self._steps)
        self._steps += 1
        for request in chosen:
            request.last_step = self._steps
            self._waiting.charge(request.client, 1)
        batch = self._batcher.build(chosen, reading, spares=spares)
        self._reading = deque(p for p in self._reading if p.done < p.total) if alone else reading
        if not alone:
            self._spared = 0 if any(not p.is_last for p in batch.pieces) else self._spared + 1
        return batch

    @property
    def _is_short(self) -> bool:
        """Whether a request may have to be preempted in the next step."""
        head = self._waiting.head()
        wanted = len(self._running) + (0 if head is None else len(head[1].prompt_ids) // PAGE + 1)
        is_full = head is not None and self._active >= ADMITTED * self._batcher.max_entries
        return is_full or self.cache.pool.free <= wanted or self._waited_long

    @property
    def _waited_long(self) -> bool:
        """Whether the first of those that were preempted goes before others now."""
        return bool(self._preempted) and self._steps - self._preempted[0].preempted > PATIENCE

    def _let_all_in(self) -> None:
        """Let in those that were preempted, who leave pages free for new ones until they waited long; and new ones."""
        while self._preempted:
            request = self._preempted[0]
            kept = 0 if self._waited_long or not self._served else self.cache.pool.pages // KEPT_FREE
            if self._let_in(request, kept):
                self._preempted.pop(0)
            elif not self._waited_long:
                break
            elif not self._preempt_for(request):
                if self._fits_after_young(request):
                    return  # those that come now wait until the young ones are done
                break
        while (young := next(filter(is_young, self._preempted), None)) is not None and self._let_in(young):
            self._preempted.remove(young)
        while (head := self._waiting.head()) is not None:
            if self._let_in(head[1]):
                self._waiting.pop()
            elif not self._preempt_for(head[1]):
                return

    def _fits_after_young(self, request: Generation) -> bool:
        """Whether there will be room for one that was preempted as soon as all young ones are done."""
        taken = sum(len(g.table.pages) for g in self._served if g.table is not None and not is_young(g))
        tokens = len(request.prompt_ids) + len(request.tokens)
        return taken + -(-tokens // PAGE) + self._batcher.max_entries <= self.cache.pool.pages

    def _preempt_for(self, request: Generation) -> bool:
        """Preempt one for a request that there was no room for; False where none has to make room for it."""
        if request.adapter != self._waiting.active:
            return False
        if not request.tokens and len(request.prompt_ids) * KEPT_FREE > self.cache.pool.pages * PAGE:
            return False
        found = who_makes_room_for(request, self._served, self._batcher.max_entries)
        if found is None or found.ahead:
            return False
        self._preempt(found)
        return True

    def _let_in(self, request: Generation, kept: int = 0) -> bool:
        """Start a request if there is room for its prompt, a page for each that a step takes, and pages to be kept."""
        entries = self._batcher.max_entries
        if self._active >= ADMITTED * entries or sum(map(is_young, self._served)) >= IN_TURNS * entries:
            return False
        active = self._waiting.active
        if self._active and request.adapter != active:
            return False  # it waits until those with the other adapter are done
        table = self.cache.table()
        request.table = table
        table.seen = request.seen
        self._share(request, len(request.prompt_ids))
        request.cached_tokens = max(request.cached_tokens, table.length)
        tokens = len(request.prompt_ids) + len(request.tokens)
        missing = -(-(tokens - table.capacity) // PAGE)
        if missing + min(self._active, entries) + kept > self.cache.pool.free or not table.reserve(tokens):
            table.release()
            request.table = None
            if not self._active and request.tokens:  # alone, and the KV cache is too small for it
                self._finish(request, "length")
            return False
        if request.adapter != active:
            self.model.use_adapter(request.adapter)
            self.metrics.count("adapter_swaps")
            self._waiting.active = request.adapter
        self._served.append(request)
        if self._overlap is not None:
            request.slot = self._overlap.steps.take_slot()
        self._reading.append(Prefill(request, len(request.prompt_ids), table.length))
        return True

    def _share(self, request: Generation, end: int) -> None:
        """Take pages of the prompt, up to a token, from others that began with the same tokens.

        What is left of the prompt is not so short that it would be read by the kernel for single tokens.
        """
        table = request.table
        assert table is not None
        if not self._shares or request.prompt_logprobs is not None or table.length % PAGE:
            return
        most = min((len(request.prompt_ids) - LEAST - 1) // PAGE, end // PAGE)
        before = table.length
        for at in range(before // PAGE, most):
            if not table.adopt(request.keys[at]):
                break
        self.metrics.count("prefix_hit_tokens", table.length - before)

    def _grow(self, request: Generation) -> None:
        """Pages for the next tokens of a running request; others make room."""
        assert request.table is not None
        while not request.table.reserve(min(request.table.length + self._judged, self.model.context)):
            if request.table.reserve(request.table.length + 1):
                return
            if self._active == 1:
                self._finish(request, "length")  # the KV cache is full of it
                return
            found = who_makes_room(self._served)
            self._preempt(found)
            if found is request:
                return

    def _preempt(self, request: Generation) -> None:
        assert request.table is not None
        request.table.release()
        request.table, request.preempted = None, self._steps
        self._leave(request)
        self._preempted = sorted([*self._preempted, request], key=lambda g: g.number)
        self.metrics.count("preemptions")

    # ------------------------------------------------------------------------------------------------------ prefill

    def _put_back(self, pieces: Sequence[PrefillChunk[Generation]]) -> None:
        """Chunks of prompts that a step has not come to are read later, before others."""
        with self._changed:
            first = {piece.item.number: piece for piece in reversed(pieces) if piece.item.table is not None}
            left = [Prefill(p.item, len(p.item.prompt_ids), p.start) for p in reversed(first.values())]
            self._reading = deque([*left, *(p for p in self._reading if p.item.number not in first)])

    def _shared_start(self, piece: PrefillChunk[Generation]) -> int | None:
        """Where a chunk of a prompt starts, less what others have read by now; None where nothing is left."""
        request = piece.item
        table = request.table
        assert table is not None
        with self._changed:
            before = table.length
            self._share(request, piece.end)
            if not request.preempted:
                request.cached_tokens += table.length - before
        return None if table.length >= piece.end else table.length

    def _keep_piece(self, piece: PrefillChunk[Generation], start: int) -> None:
        """Keep the pages of a chunk for others."""
        if self._shares and piece.item.prompt_logprobs is None:
            with self._changed:
                piece.item.keep_pages(start, piece.end)

    def _end_piece(self, piece: PrefillChunk[Generation]) -> None:
        """Behind the last chunk of its prompt, a request runs."""
        request = piece.item
        with self._changed:
            if piece.is_last and request.max_tokens == 0:
                self._finish(request, "length")
            elif piece.is_last and not request.is_done and request.table is not None:
                self._running.append(request)

    # ------------------------------------------------------------------------------------------------------- results

    def _fail(self, requests: Sequence[Generation], error: Exception) -> None:
        """Tell requests what went wrong."""
        with self._changed:
            for request in requests:
                self._finish(request, "error", error)

    def _publish(
        self, rows: Sequence[tuple[Generation, np.ndarray]], drafts: Mapping[Generation, list[int]] | None = None
    ) -> dict[Generation, int]:
        """Choose tokens from logits [n, V] of each request: one, and one more for each drafted token that is right.

        Says how many of each were chosen. Nobody waits for this: what is said is published when all is chosen.
        """
        ends, context = self.model.tokenizer.eos, self.model.context
        found: dict[Generation, int] = {}
        for request, logits in rows:
            draft = (drafts or {}).get(request, [])
            before = len(request.tokens)
            for at, row in enumerate(logits):
                token = request.push(row, ends, context)
                if token is None or at >= len(draft) or token != draft[at]:
                    break
            found[request] = max(len(request.tokens) - before, 1)
            self.metrics.count("generated_tokens", len(request.tokens) - before)
            self._first(request, before)
        self._told([request for request, _ in rows])
        return found

    def _publish_tokens(self, rows: Sequence[tuple[Generation, int]]) -> None:
        """Take tokens that the device has chosen, one of each request."""
        ends, context = self.model.tokenizer.eos, self.model.context
        count = 0
        for request, token in rows:
            before = len(request.tokens)
            request.take(token, ends, context)
            count += len(request.tokens) - before
            self._first(request, before)
        self.metrics.count("generated_tokens", count)
        self._told([request for request, _ in rows])

    def _first(self, request: Generation, before: int) -> None:
        if not before and request.first_token is not None:
            self.metrics.observe("first_token_milliseconds", request.first_token * 1e3)

    def _told(self, requests: Sequence[Generation]) -> None:
        """Let those who wait know what was said, and what has ended."""
        with self._changed:
            for request in requests:
                if request.ending is not None:
                    self._finish(request, *request.ending)
            self._changed.notify_all()
        for request in requests:
            if not request.is_done:
                request.notify()

    def _leave(self, request: Generation) -> None:
        if request.slot is not None and self._overlap is not None:
            self._overlap.steps.give_slot(request.slot)
            request.slot = None
        self._served = [g for g in self._served if g is not request]
        self._running = [g for g in self._running if g is not request]
        self._reading = deque(p for p in self._reading if p.item is not request)

    def _finish(self, request: Generation, reason: str, error: Exception | None = None) -> None:
        if request.is_done:
            return
        if request.table is not None:
            request.table.release()
        self._leave(request)
        self._preempted = [g for g in self._preempted if g is not request]
        request.finish(reason, error)
        self.metrics.count(f"finished_{reason}")
        self.metrics.observe("request_milliseconds", (time.perf_counter() - request.started) * 1e3)
        self._changed.notify_all()
        request.notify()

    # ---------------------------------------------------------------------------------------------------------- thread

    def start(self) -> None:
        """Run steps in a thread from now on."""
        if self._thread is None:
            self._closing = False
            settings = copy_context()  # such as the number of threads
            self._thread = Thread(target=settings.run, args=(self._work,), name="strata-engine", daemon=True)
            self._thread.start()

    def close(self, *, drain: bool = True) -> None:
        """Accept no more requests, and stop the thread: when all are done, or with running ones cancelled
        (`drain=False`)."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if not drain:
            self.cancel_all()
        if self._thread is not None:
            self._thread.join()
            with self._changed:
                self._thread = None
                self._changed.notify_all()
        else:
            self.run()

    def cancel_all(self) -> None:
        """Cancel every request: those that wait at once, those that run after their step."""
        with self._changed:
            for request in (*self._served, *self._preempted):
                request.wants_end = True
            while (head := self._waiting.head()) is not None:
                self._waiting.drop(head[1])
                self._finish(head[1], "cancelled")
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            try:
                start = time.perf_counter()
                if self.step():
                    self.courtesy.wait(time.perf_counter() - start)
                    continue
                if self._speculates and not self._closing:
                    self.model.graph_for(every=True, layout=self.cache.layout)
            except Exception as error:  # noqa: BLE001 - whoever waits is told, and others can still come
                with self._changed:
                    for request in list(self._served):
                        self._finish(request, "error", error)
            with self._changed:
                if self._closing and not self._has_work:
                    return
                self._changed.wait_for(lambda: self._closing or self._has_work, 1.0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
