"""An HTTP server for the OpenAI API: completions, chat, embeddings; streaming, limits, graceful shutdown.

    POST /v1/completions, /v1/chat/completions, /v1/embeddings       GET /v1/models, /health, /metrics

A thread for each connection reads and writes; one engine computes for all of them. A request that cannot be answered
gets status 400 and one clear line, one too many 429, a model that cannot do it 404.
"""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Condition, Lock, Thread
from typing import Any, Final, Self

import numpy as np

from strata.errors import OptionError, RequestError, RunError, StrataError
from strata.models import Decoder, Encoder
from strata.serving.engine import Engine, Generation
from strata.serving.limits import Limits
from strata.serving.metrics import Metrics
from strata.serving.record import Record, Recorder
from strata.serving.requests import (
    PATHS,
    ChatRequest,
    EmbeddingRequest,
    Request,
    TextRequest,
    parse_request,
    prompts_of,
)

MOST_BYTES: Final = 16 << 20  # of a request's body
PATIENCE: Final = 60.0  # seconds to wait for the rest of a request
TEXTS_AT_ONCE: Final = 2048  # of an embedding


class Refused(Exception):  # noqa: N818 - it is an answer, not a failure
    """An answer that is an error: a status and a line."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", field: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": field, "code": None}}


def refusal(error: Exception) -> Refused:
    """The answer for an error."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, RunError) and error.code in ("X600", "X602"):
        busy = error.code == "X600"
        return Refused(429 if busy else 503, error.summary, kind="rate_limit_error" if busy else "unavailable_error")
    if isinstance(error, (OptionError, KeyError)) and isinstance(error, StrataError):
        field = error.field if isinstance(error, RequestError) else None
        return Refused(400, error.summary.removeprefix("request: "), field=field)
    summary = error.summary if isinstance(error, StrataError) else f"{type(error).__name__}: {error}"
    return Refused(500, summary, kind="server_error")


class Service:
    """Requests and answers of the OpenAI API as plain data; the server puts HTTP around it.

    `generator` generates text and `embedder` computes embeddings; at least one of them is given.
    """

    def __init__(
        self, generator: Engine | Decoder | None = None, embedder: Encoder | None = None, *, name: str = "strata",
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        if generator is None and embedder is None:
            raise OptionError("serve: there is no model", code="O622")
        self.engine = Engine(generator) if isinstance(generator, Decoder) else generator
        self.embedder, self.name, self.recorder = embedder, name, recorder
        self.metrics = self.engine.metrics if self.engine is not None else Metrics()
        self.limits = Limits(max_batch=TEXTS_AT_ONCE)
        self._numbers = count(1)
        self._embedding = Lock()
        self._settings = copy_context()  # such as the number of threads

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        """The whole answer to a request, streamed or not."""
        start = time.perf_counter()
        request = self._parsed(path, body)
        if isinstance(request, EmbeddingRequest):
            made = self._embedded(request)
        else:
            generations = self._submitted(request)
            try:
                made = self._whole(request, generations)
            finally:
                _end(generations)  # where an earlier one failed; those that are done stay as they are
        self._record(path, body, made, start)
        return made

    def respond(self, path: str, body: Any) -> dict[str, Any] | Iterator[dict[str, Any]]:
        """The answer to a request; for a streamed one, an iterator of its parts."""
        request = self._parsed(path, body)
        if isinstance(request, EmbeddingRequest) or not request.stream:
            return self.answer(path, body)
        return self._streamed(path, body, request, self._submitted(request))

    @property
    def names(self) -> tuple[str, ...]:
        """Names that requests may give as their model: the served one, and its adapters."""
        return (self.name, *(self.engine.adapters if self.engine is not None else ()))

    def _parsed(self, path: str, body: Any) -> Request:
        request = parse_request(path, body)
        if request.model is not None and request.model not in self.names:
            raise Refused(404, f"there is no model {request.model!r}; there are {', '.join(self.names)}", field="model")
        return request

    def _record(self, path: str, body: Any, answer: dict[str, Any], start: float) -> None:
        if self.recorder is not None:
            self.recorder.write(Record(path, body, answer, round(time.perf_counter() - start, 6)))

    # ------------------------------------------------------------------------------------------------------ generation

    def _submitted(self, request: TextRequest | ChatRequest) -> list[Generation]:
        """All that a request asks for is on its way, or nothing of it."""
        if self.engine is None:
            raise Refused(404, f"{self.name} makes no texts; /v1/embeddings gives vectors")
        options = request.options
        if request.model in self.engine.adapters and options.adapter is None:
            options = replace(options, adapter=request.model)
        made: list[Generation] = []
        try:
            for prompt in prompts_of(request):
                for choice in range(request.choices):
                    made.append(self.engine.submit(prompt, **options.arguments(choice)))
        except Exception:
            _end(made)
            raise
        return made

    def _head(self, request: TextRequest | ChatRequest, *, streamed: bool) -> dict[str, Any]:
        chat = isinstance(request, ChatRequest)
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if chat else "text_completion"
        number = f"{'chatcmpl' if chat else 'cmpl'}-{next(self._numbers)}"
        return {"id": number, "object": kind, "created": int(time.time()), "model": self.name}

    def _whole(self, request: TextRequest | ChatRequest, generations: list[Generation]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for i, generation in enumerate(generations):
            text = generation.text()
            said: dict[str, Any] = {"index": i, "finish_reason": _reason(generation), "logprobs": None}
            if isinstance(request, ChatRequest):
                said["message"] = {"role": "assistant", "content": text}
            else:
                said["text"] = text
            choices.append(said)
        usage = _usage(generations, request.choices)
        return {**self._head(request, streamed=False), "choices": choices, "usage": usage}

    def _streamed(
        self, path: str, body: Any, request: TextRequest | ChatRequest, generations: list[Generation]
    ) -> Iterator[dict[str, Any]]:
        head, chat = self._head(request, streamed=True), isinstance(request, ChatRequest)
        start = time.perf_counter()

        def part(index: int, text: str | None, reason: str | None) -> dict[str, Any]:
            said: dict[str, Any] = {"index": index, "finish_reason": reason, "logprobs": None}
            if chat:
                said["delta"] = {} if text is None else {"content": text}
            else:
                said["text"] = text or ""
            return {**head, "choices": [said]}

        try:
            for i, generation in enumerate(generations):
                if chat:
                    first = part(i, "", None)
                    first["choices"][0]["delta"]["role"] = "assistant"
                    yield first
                for piece in generation:
                    yield part(i, piece, None)
                yield part(i, None, _reason(generation))
            if request.usage_in_stream:
                yield {**head, "choices": [], "usage": _usage(generations, request.choices)}
            self._record(path, body, self._whole(request, generations), start)
        finally:
            _end(generations)  # where whoever asked has gone

    # ------------------------------------------------------------------------------------------------------ embeddings

    def _embedded(self, request: EmbeddingRequest) -> dict[str, Any]:
        if self.embedder is None:
            raise Refused(404, f"{self.name} gives no vectors; serve an encoder")
        self.limits.check_batch(len(request.texts))
        with self._embedding:
            start = time.perf_counter()
            vectors = self._settings.run(self.embedder.embed, list(request.texts))
            self.metrics.count("embedded_texts", len(vectors))
            self.metrics.observe("embedding_microseconds", (time.perf_counter() - start) * 1e6)
            tokens = sum(map(len, self.embedder.tokenizer.encode_batch(request.texts, self.embedder.limit)))

        def shown(vector: np.ndarray) -> Any:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode() if request.base64 else vector.tolist()

        data = [{"object": "embedding", "index": i, "embedding": shown(v)} for i, v in enumerate(vectors)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "model": self.name, "data": data, "usage": usage}


def _end(generations: list[Generation]) -> None:
    for generation in generations:
        generation.cancel()


def _reason(generation: Generation) -> str:
    return generation.finish_reason if generation.finish_reason in ("stop", "length") else "stop"


def _usage(generations: list[Generation], choices: int) -> dict[str, int]:
    """A prompt counts once, however many choices are made of it."""
    read, made = sum(len(g.prompt_ids) for g in generations[::choices]), sum(len(g.tokens) for g in generations)
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    server: _Http

    def log_message(self, *_: Any) -> None:
        """Nothing is printed: /metrics counts."""

    def do_GET(self) -> None:
        service = self.server.service
        match self.path.partition("?")[0]:
            case "/health":
                self._send(200, {"status": "ok"})
            case "/v1/models":
                self._send(
                    200, {"object": "list", "data": [{"id": service.name, "object": "model", "owned_by": "strata"}]}
                )
            case "/metrics":
                self._send(200, service.metrics.text(), "text/plain; version=0.0.4")
            case path:
                self._refuse(Refused(405 if path in PATHS else 404, f"GET {path}: there is nothing"))

    def do_POST(self) -> None:
        with self.server.busy():
            self._post(self.path.partition("?")[0])

    def _post(self, path: str) -> None:
        service = self.server.service
        service.metrics.count("http_requests")
        try:
            body = self._body()
            found = service.respond(path, body)
            if isinstance(found, dict):
                self._send(200, found)
            else:
                self._stream(found)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the server goes on
            self._refuse(refusal(error))

    def _body(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit():
            self.close_connection = True
            raise Refused(411, "the request says no Content-Length")
        if int(length) > MOST_BYTES:
            self.close_connection = True
            raise Refused(413, f"the body of {length} bytes is larger than {MOST_BYTES}")
        raw = self.rfile.read(int(length))
        if self.path.partition("?")[0] not in PATHS:
            raise Refused(404, f"POST {self.path}: there is nothing; there are {', '.join(PATHS)}")
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"the body is no JSON: {str(error).splitlines()[0]}") from None

    def _refuse(self, refused: Refused) -> None:
        self.server.service.metrics.count(f"http_{refused.status}")
        try:
            self._send(refused.status, refused.body)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    def _send(self, status: int, body: Any, kind: str = "application/json") -> None:
        raw = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(raw)

    def _stream(self, parts: Iterator[dict[str, Any]]) -> None:
        """Server-sent events, each a line of JSON; the last one says that it is done."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            for part in parts:
                self._event(json.dumps(part))
            self._event("[DONE]")
        except (ConnectionError, TimeoutError):
            parts.close()  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - the status is sent already: the error becomes an event
            self._event(json.dumps(refusal(error).body))

    def _event(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    service: Service

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._busy = 0
        self._changed = Condition()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """While a request is answered."""
        with self._changed:
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def wait_idle(self, timeout: float) -> bool:
        """Until all requests that have come are answered."""
        with self._changed:
            return self._changed.wait_for(lambda: self._busy == 0, timeout)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is nobody's mistake."""


class Server:
    """An HTTP server around a `Service`, running inside `with server:`; `port` 0 takes a free one."""

    def __init__(self, service: Service, *, host: str = "127.0.0.1", port: int = 8000) -> None:
        self.service = service
        try:
            self._http = _Http((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise OptionError(f"serve: {host}:{port} cannot be listened on: {error}", code="O622") from None
        self._http.service = service
        self._thread: Thread | None = None

    @property
    def url(self) -> str:
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}"

    def start(self) -> None:
        """Answer requests from now on, in threads."""
        if self.service.engine is not None:
            self.service.engine.start()
        self._thread = Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self, *, drain: bool = True) -> None:
        """Accept no more requests; those in flight are answered, or cancelled where `drain` is False."""
        if self._thread is not None:
            self._http.shutdown()
            self._thread.join()
            self._thread = None
        if self.service.engine is not None:
            self.service.engine.close(drain=drain)
        self._http.wait_idle(PATIENCE)
        self._http.server_close()
        if self.service.recorder is not None:
            self.service.recorder.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask(url: str, path: str, body: Mapping[str, Any], *, timeout: float = 600.0) -> Any:
    """Send a request to a server; its answer as data, also where it is an error."""
    from http.client import HTTPConnection
    from urllib.parse import urlsplit

    connection = HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())
    except (socket.gaierror, ConnectionError) as error:
        raise RunError(f"{url}{path}: {(error.strerror or str(error)).lower()}", code="X603") from None
    finally:
        connection.close()
