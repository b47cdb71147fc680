"""Continuous batching: requests join and leave between steps, and no result depends on the others in its batch.

Each step decodes a token of every running sequence and prefills chunks of new prompts. A request gives the tokens that
it would give alone, bit for bit: rows of a batch do not depend on each other, and prompts are split only between pages.
With quantised weights that holds for up to three at a time. The pages of the KV cache that a request may need are
reserved when it starts, so that none is preempted.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextvars import copy_context
from threading import Condition, Lock, Thread
from typing import Any, Final, Self

import numpy as np

from strata.arguments import own_checks
from strata.errors import OptionError, RunError, StrataError
from strata.models import PAGE, Decoder, PagedCache, PageTable, Sampler, Speech
from strata.serving.adapters import AdapterQueue
from strata.serving.batching import Batch, Prefill, PrefillChunk, exact_batcher
from strata.serving.limits import Limits
from strata.serving.metrics import Metrics

TOGETHER_QUANTIZED: Final = 3  # so many rows have the bits of one
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]


class Generation:
    """A submitted request. Iterate over it to stream the text, or ask for all of it by `text()`."""

    def __init__(
        self, engine: Engine, number: int, ids: Sequence[int], sampler: Sampler, max_tokens: int, speech: Speech,
        adapter: str | None,
    ) -> None:  # fmt: skip
        self.number, self.prompt_ids, self.max_tokens, self.adapter = number, list(ids), max_tokens, adapter
        self.tokens: list[int] = []
        self.finish_reason: str | None = None  # stop, length, cancelled or error; None while it is on its way
        self.error: Exception | None = None
        self.table: PageTable | None = None
        self.started = time.perf_counter()
        self.sampler = sampler
        self.numbers = sampler.stream()
        self.speech = speech
        self._engine = engine
        self._pieces: list[str] = []
        self.wants_end = False

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
        self._check()
        return "".join(self._pieces)

    def __iter__(self) -> Iterator[str]:
        for at in itertools.count():
            self._engine._wait(lambda at=at: self.is_done or len(self._pieces) > at, None)
            if at >= len(self._pieces):
                break
            yield self._pieces[at]
        self._check()

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def rows(self, context: int) -> int:
        """Rows of the KV cache that it may need: the last token is never read."""
        return min(len(self.prompt_ids) + self.max_tokens - 1, context)


class Engine:
    """Continuous batching: generates for many requests at once with one decoder, over a paged KV cache.

    `cache_tokens` is the size of the KV cache, for all requests together. A step computes at most `max_tokens` tokens,
    at most `max_requests` requests; at most `queue` more may wait. `adapters` are LoRA folders by name, which requests
    may ask for. Matmuls of quantised weights with more than three rows differ from those of one in their last bits;
    `exact` decodes three requests at a time there, so that no request depends on the others. Inside `with engine:` a
    thread runs the steps; otherwise whoever waits does.
    """

    @own_checks()
    def __init__(
        self, model: Decoder, *, cache_tokens: int | None = None, max_requests: int = 16, max_tokens: int = 512,
        queue: int = 256, exact: bool = False, adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        metrics: Metrics | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(model, Decoder):
            raise OptionError(f"engine: {type(model).__name__} generates no text", code="O605")
        counts = (max_requests, max_tokens, queue, 1 if cache_tokens is None else cache_tokens)
        if not all(isinstance(n, int) for n in counts) or min(max_requests, max_tokens, counts[3]) < 1 or queue < 0:
            raise OptionError(
                f"engine: max_requests {max_requests!r}, max_tokens {max_tokens!r}, queue {queue!r} and cache_tokens "
                f"{cache_tokens!r} serve nobody", code="O605",
            )  # fmt: skip
        tokens = 4 * model.context if cache_tokens is None else cache_tokens
        self.model = model.adapted(adapters) if adapters else model
        self.cache = PagedCache(self.model, -(-tokens // PAGE))
        self.adapters = tuple(adapters or ())
        self._together = TOGETHER_QUANTIZED if exact and model.is_quantized else max_requests
        self.limits = Limits(max_length=model.context, vocabulary=model.config.vocab)
        self.metrics = metrics or Metrics()
        self.limit = queue
        self._batcher = exact_batcher(max_tokens, max_requests)
        self._waiting: AdapterQueue[Generation] = AdapterQueue(max_requests, known=self.adapters)
        self._reading: deque[Prefill[Generation]] = deque()
        self._running: list[Generation] = []
        self._served: list[Generation] = []  # those of both, and the one whose prompt is being read
        self._numbers = itertools.count(1)
        self._changed = Condition()  # guards all of the above
        self._stepping = Lock()
        self._thread: Thread | None = None
        self._closing = False

    # ------------------------------------------------------------------------------------------------------- requests

    @own_checks()
    def submit(
        self, prompt: Prompt, *, max_tokens: int = 128, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
        min_p: float = 0.0, repetition_penalty: float = 1.0, seed: int | None = None, stop: str | Sequence[str] = (),
        adapter: str | None = None,
    ) -> Generation:  # fmt: skip
        """Queue a request, with the options of `generate`; it starts when the batch and the KV cache have room."""
        sampler = Sampler(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
            seed=seed,
        )  # fmt: skip
        ids = self.model.prompt_ids(prompt)
        speech = Speech(self.model.tokenizer, stop)
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise OptionError(f"generate: max_tokens {max_tokens!r} is no positive number", code="O606")
        made = Generation(self, next(self._numbers), ids, sampler, max_tokens, speech, adapter)
        self._check(made)
        with self._changed:
            if self._closing:
                raise RunError("engine: it is closed", code="X602")
            if len(self._waiting) >= self.limit + self._batcher.max_entries - self._active:
                raise RunError(f"engine: {len(self._waiting)} requests wait already", code="X600")
            self._waiting.put(made, adapter)
            self.metrics.count("requests")
            self.metrics.count("prompt_tokens", len(ids))
            self._changed.notify_all()
        return made

    def _check(self, request: Generation) -> None:
        self.limits.check_ids(request.prompt_ids)
        context = self.model.context
        rows, room = request.rows(context), self.cache.pool.pages * PAGE
        if rows > room:
            raise OptionError(
                f"engine: a request of {rows} tokens is larger than a cache of {room}", code="O607",
                fix=f"Engine(model, cache_tokens={rows})",
            )  # fmt: skip
        self._waiting.check(request.adapter)

    @property
    def _active(self) -> int:
        return len(self._served)

    def _cancel(self, request: Generation) -> None:
        with self._changed:
            request.wants_end = True
            if self._waiting.drop(request):
                self._finish(request, "cancelled")

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
        with self._stepping:
            with self._changed:
                batch = self._next()
            if not batch.tokens:
                return False
            start = time.perf_counter()
            for at in range(0, len(batch.decodes), self._together):
                some = batch.decodes[at : at + self._together]
                self._run(some, np.array([[g.tokens[-1]] for g in some], np.int32))
            for piece in batch.pieces:
                ids = np.asarray([piece.item.prompt_ids[piece.start : piece.end]], np.int32)
                self._run((piece.item,), ids, piece)
            self.metrics.count("steps")
            self.metrics.observe("step_microseconds", (time.perf_counter() - start) * 1e6)
            self.metrics.observe("step_tokens", batch.tokens)
            return True

    def run(self) -> None:
        """Run steps until no request is left."""
        while self.step():
            pass

    def _next(self) -> Batch[Generation]:
        """Admit requests for which there is room, and say what the next step computes."""
        for request in [g for g in self._served if g.wants_end]:
            self._finish(request, "cancelled")
        while (head := self._waiting.head()) is not None and self._active < self._batcher.max_entries:
            adapter, request = head
            if self._active and adapter != self._waiting.active:
                break  # it waits until those with the other adapter are done
            table = self.cache.table()
            if not table.reserve(request.rows(self.model.context)):
                break
            before = self._waiting.active
            self._waiting.pop()
            if adapter != before:
                self.model.use_adapter(adapter)
                self.metrics.count("adapter_swaps")
            request.table = table
            self._served.append(request)
            self._reading.append(Prefill(request, len(request.prompt_ids)))
        self.metrics.set("waiting", len(self._waiting))
        self.metrics.set("active", self._active)
        self.metrics.set("free_pages", self.cache.pool.free)
        return self._batcher.build(self._running, self._reading)

    def _run(
        self, requests: Sequence[Generation], ids: np.ndarray, piece: PrefillChunk[Generation] | None = None
    ) -> None:
        try:
            tables = [g.table for g in requests]
            logits = self.cache.step(tables, ids)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001 - whoever waits for the requests is told
            with self._changed:
                for request in requests:
                    self._finish(request, "error", error)
            return
        if piece is not None and not piece.is_last:
            return
        chosen = [self._choose(g, row) for g, row in zip(requests, logits, strict=True)]
        with self._changed:
            for request, token in zip(requests, chosen, strict=True):
                self._take(request, token)
                if piece is not None and not request.is_done:
                    self._running.append(request)
            self._changed.notify_all()

    def _choose(self, request: Generation, logits: np.ndarray) -> int | StrataError:
        try:
            return request.sampler.choose(logits, [*request.prompt_ids, *request.tokens], request.numbers)
        except StrataError as error:
            return error

    def _take(self, request: Generation, token: int | StrataError) -> None:
        """A token that was chosen, or why none was."""
        if isinstance(token, StrataError):
            self._finish(request, "error", token)
            return
        if token in self.model.tokenizer.eos:
            self._finish(request, "stop")
            return
        if not request.tokens:
            self.metrics.observe("first_token_microseconds", (time.perf_counter() - request.started) * 1e6)
        request.tokens.append(token)
        self.metrics.count("generated_tokens")
        piece = request.speech.push(token)
        if piece:
            request._pieces.append(piece)
        assert request.table is not None
        if request.speech.stopped:
            self._finish(request, "stop")
        elif len(request.tokens) == request.max_tokens or request.table.length >= self.model.context:
            self._finish(request, "length")

    def _finish(self, request: Generation, reason: str, error: Exception | None = None) -> None:
        if request.is_done:
            return
        tail = request.speech.finish()
        if tail:
            request._pieces.append(tail)
        request.error, request.finish_reason = error, reason
        if request.table is not None:
            request.table.release()
        self._served = [g for g in self._served if g is not request]
        self._running = [g for g in self._running if g is not request]
        self._reading = deque(p for p in self._reading if p.item is not request)
        self.metrics.count(f"finished_{reason}")
        self.metrics.observe("request_microseconds", (time.perf_counter() - request.started) * 1e6)
        self._changed.notify_all()

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
            if not drain:
                for request in self._served:
                    request.wants_end = True
                while self._waiting.head() is not None:
                    self._finish(self._waiting.pop(), "cancelled")
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            with self._changed:
                self._thread = None
                self._changed.notify_all()
        else:
            self.run()

    def _work(self) -> None:
        while True:
            try:
                if self.step():
                    continue
            except Exception as error:  # noqa: BLE001 - whoever waits is told, and others can still come
                with self._changed:
                    for request in list(self._served):
                        self._finish(request, "error", error)
            with self._changed:
                if self._closing and not self._active and self._waiting.head() is None:
                    return
                self._changed.wait_for(lambda: self._closing or self._active or self._waiting.head() is not None, 1.0)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
