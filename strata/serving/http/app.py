"""The ASGI application: paths, bodies and streams. The event loop only moves bytes; threads do the rest."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from strata.core import read_text
from strata.serving.api.embeddings import Gone
from strata.serving.api.errors import Refused, refusal
from strata.serving.api.ollama import model_entry
from strata.serving.http.guard import Gatekeeper, refuse
from strata.serving.http.options import HttpOptions
from strata.serving.http.pace import ACCEPTED, REFUSED, Pace, Turn
from strata.serving.service import PATHS, Job, Service
from strata.serving.trial import Untried

MOST_ITEMS: Final = 1 << 20  # commas of a body: lists of numbers and objects take more memory than texts
MOST_LISTS: Final = 1 << 17  # lists and objects of a body, which take more time than numbers and texts
MOST_PREPARING: Final = 512  # requests that wait for a thread that reads them
MOST_HELD: Final = 256 << 20  # bytes of bodies that have come and are not read yet, of all requests together
LARGE: Final = 32 << 10  # bytes of a body from which on reading it takes long; others do not wait for it
LINGER: Final = 4  # times the largest body that is thrown away before the connection is closed
HEARTBEAT: Final = 15.0  # seconds of silence after which a stream says that it is still there
JSON_LINES: Final = ("/api/chat", "/api/generate")
T = TypeVar("T")


def make_app(
    service: Service, options: HttpOptions, pool: ThreadPoolExecutor, trials: ThreadPoolExecutor
) -> Gatekeeper:
    """The application around a service; threads of `pool` read requests, the one of `trials` waits for grammars."""
    api = _Api(service, options, pool, trials)
    routes = [
        *(Route(path, api.post, methods=["POST"]) for path in PATHS),
        Route("/", api.page, methods=["GET"]),
        Route("/health", api.health, methods=["GET"]),
        Route("/ready", api.ready, methods=["GET"]),
        Route("/metrics", api.metrics, methods=["GET"]),
        Route("/load", api.load, methods=["GET"]),
        Route("/v1/models", api.models, methods=["GET"]),
        Route("/v1/models/{name:path}", api.model, methods=["GET"]),
        Route("/v1/responses/{number}", api.response, methods=["GET", "DELETE"]),
        Route("/api/tags", api.tags, methods=["GET"]),
        Route("/api/ps", api.tags, methods=["GET"]),
        Route("/api/version", api.version, methods=["GET"]),
        Route("/api/show", api.show, methods=["POST"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _unknown})
    return Gatekeeper(app, options, service.metrics)


async def _unknown(request: Request, error: Exception) -> Response:
    """A path or a method that is not there."""
    assert isinstance(error, HTTPException)
    allowed = (error.headers or {}).get("Allow")
    told = f"{request.method} {request.url.path[:100]}: " + (f"it takes {allowed}" if allowed else "there is nothing")
    headers = {"Allow": allowed} if allowed else None
    return _refused(
        Refused(error.status_code, told, code="method_not_allowed" if allowed else "unknown_url", headers=headers),
        request,
    )


class _Api:
    def __init__(
        self, service: Service, options: HttpOptions, pool: ThreadPoolExecutor, trials: ThreadPoolExecutor
    ) -> None:
        self._service, self._options, self._pool, self._trials = service, options, pool, trials
        self._preparing = self._held = 0
        self._pace, self._trial_pace = Pace(), Pace()

    # ------------------------------------------------------------------------------------------------------- requests

    async def post(self, request: Request) -> Response:
        try:
            job = await self._prepared(request, self._service_job)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the server goes on
            return _refused(refusal(error, self._service.retry_after), request)
        return _Stream(job, request) if job.stream else await self._whole(job, request)

    async def _prepared(self, request: Request, read: Callable[[Request, bytes], T]) -> T:
        """What a thread makes of a request. Large ones take turns, so that time is left for the rest."""
        request.state.held = 0  # bytes of it
        try:
            raw = await self._body(request)
            self._check_room(self._preparing < MOST_PREPARING)
            self._preparing += 1
            try:
                try:
                    return await self._read(request, raw, read)
                except Untried as untried:
                    await self._tried(request, untried)
                    return await self._read(request, raw, read)
            finally:
                self._preparing -= 1
        finally:
            self._held -= request.state.held

    async def _read(self, request: Request, raw: bytes, read: Callable[[Request, bytes], T]) -> T:
        work = asyncio.get_running_loop().run_in_executor
        if len(raw) < LARGE:
            with self._service.courtesy.work():
                return await work(self._pool, read, request, raw)
        async with self._pace.turn() as turn:
            if await request.is_disconnected():
                raise ClientDisconnect
            return await work(self._pool, _timed, turn, lambda: read(request, raw))

    async def _tried(self, request: Request, untried: Untried) -> None:
        """Find out whether a grammar can be followed. Those that wait for this keep nobody else waiting."""
        async with self._trial_pace.turn() as turn:
            if await request.is_disconnected():
                raise ClientDisconnect
            work = asyncio.get_running_loop().run_in_executor
            verdict = await work(self._trials, self._service.trials.judge, untried.grammar)
            turn.is_accepted, turn.seconds = not verdict.wrong, verdict.seconds

    def _check_room(self, there_is: bool) -> None:
        if not there_is:
            raise Refused(429, "too many requests at once", kind="rate_limit_error", code="rate_limit_exceeded",
                          headers={"Retry-After": str(self._service.retry_after)})  # fmt: skip

    async def _body(self, request: Request) -> bytes:
        """The bytes of a request, no more than a request may have."""
        most = self._options.max_body
        coding = request.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            told = f"a body with the Content-Encoding {coding[:100]!r} is not read: send it as it is"
            raise Refused(415, told, code="unsupported_content_encoding", headers={"Connection": "close"})
        said = request.headers.get("content-length", "")
        known = int(said) if said.isascii() and said.isdigit() else 0
        if known > LINGER * most:
            raise _too_large(known, most)
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > LINGER * most:
                break
            await self._pace.let_through(len(part), REFUSED if max(size, known) > most else ACCEPTED)
            if max(size, known) > most:
                parts.clear()  # read to its end, so that the client comes to read the answer
            else:
                parts.append(part)
                self._held += len(part)
                request.state.held += len(part)
                self._check_room(self._held <= MOST_HELD)
        if max(size, known) > most:
            raise _too_large(max(size, known), most)
        return b"".join(parts)

    def _service_job(self, request: Request, raw: bytes) -> Job:
        """In a thread: from bytes to a request on its way."""
        return self._service.start(request.url.path, _parsed(raw), client=request.state.client, tries=False)

    async def _whole(self, job: Job, request: Request) -> Response:
        """The whole answer, unless whoever asked goes away before it is there."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        job.listen(_waker(loop, done.set, lambda: job.is_done))
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(request.receive))
        waiting: asyncio.Future[Any] = asyncio.ensure_future(done.wait())
        try:
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not job.is_done:
                return Response(status_code=499)
            request.state.told = job.describe()
            try:
                with self._service.courtesy.work():
                    body = await loop.run_in_executor(self._pool, lambda: json.dumps(job.whole()).encode())
            except Gone:
                return Response(status_code=499)
            except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the server goes on
                return _refused(refusal(error, self._service.retry_after), request)
            return Response(body, media_type="application/json")
        finally:
            gone.cancel()
            waiting.cancel()
            if not job.is_done:
                job.cancel()

    # -------------------------------------------------------------------------------------------------------- looking

    async def page(self, _: Request) -> Response:
        text = read_text(Path(__file__).with_name("page.html"))
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        headers = {"content-security-policy": policy, "x-frame-options": "DENY", "referrer-policy": "no-referrer"}
        return HTMLResponse(text, headers=headers)

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        ready = self._service.is_ready
        return JSONResponse({"status": "ready" if ready else "stopping"}, 200 if ready else 503)

    async def metrics(self, _: Request) -> Response:
        return PlainTextResponse(self._service.metrics.text(), media_type="text/plain; version=0.0.4")

    async def load(self, _: Request) -> Response:
        return JSONResponse(self._service.load())

    async def models(self, _: Request) -> Response:
        data = [self._service.describe(name) for name in self._service.names]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._service.names:
            told = f"there is no model {name[:100]!r}; known: {', '.join(self._service.names)}"
            return _refused(Refused(404, told, field="model", code="model_not_found"), request)
        return JSONResponse(self._service.describe(name))

    async def response(self, request: Request) -> Response:
        number, client = request.path_params["number"], request.state.client
        found = self._service.remembered(number, client)
        if found is None:
            refused = Refused(404, f"there is no response {number[:100]!r}", code="response_not_found")
            return _refused(refused, request)
        if request.method == "DELETE":
            self._service.forget(number, client)
            return JSONResponse({"id": number, "object": "response", "deleted": True})
        return JSONResponse(found["response"])

    async def tags(self, _: Request) -> Response:
        models = [model_entry(name, self._service.about(name)) for name in self._service.names]
        return JSONResponse({"models": models})

    async def version(self, _: Request) -> Response:
        return JSONResponse({"version": import_module("strata").__version__})

    async def show(self, request: Request) -> Response:
        try:
            name = await self._prepared(request, _shown_name)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told and the server goes on
            return _refused(refusal(error), request)
        if name not in self._service.names:
            return _refused(Refused(404, f"there is no model {name[:100]!r}", code="model_not_found"), request)
        engine = self._service.engines.get(name)
        template = "" if engine is None else engine.model.tokenizer.template or ""
        capabilities = ["embedding"] if engine is None else ["completion", "tools"]
        if engine is not None and engine.model.sees:
            capabilities.append("vision")
        about = {
            "details": model_entry(name, self._service.about(name))["details"],
            "template": template,
            "capabilities": capabilities,
        }
        return JSONResponse({**about, "model_info": {}, "parameters": "", "license": ""})


def _parsed(raw: bytes) -> Any:
    """The JSON of a body."""
    if raw.count(b",") > MOST_ITEMS:
        raise Refused(400, f"the body has more than {MOST_ITEMS} items", code="invalid_json")
    if raw.count(b"[") + raw.count(b"{") > MOST_LISTS:
        raise Refused(400, f"the body has more than {MOST_LISTS} lists and objects", code="invalid_json")
    try:
        body = json.loads(raw.decode("utf-8-sig"))
        if b"\\" in raw and b"\\u" in raw:  # one byte is looked for much faster than two
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Refused(400, "the body has half of a surrogate pair, which is not a character",
                      code="invalid_json") from None  # fmt: skip
    except (ValueError, RecursionError) as error:
        told = f"the body is not JSON: {str(error).splitlines()[0]}"
        raise Refused(400, told, code="invalid_json") from None
    return body


def _shown_name(_: Request, raw: bytes) -> str:
    """The model that /api/show is asked for."""
    body = _parsed(raw)
    if not isinstance(body, dict):
        raise Refused(400, "the body is not a JSON object", code="invalid_type")
    return str(body.get("model") or body.get("name")).removesuffix(":latest")


def _timed(turn: Turn, read: Callable[[], T]) -> T:
    """In a thread: what is read, and how long that took."""
    begun = time.thread_time()
    try:
        made = read()
        turn.is_accepted = True
        return made
    finally:
        turn.seconds = time.thread_time() - begun


def _too_large(size: int, most: int) -> Refused:
    told = f"the body of {size} bytes is larger than {most}"
    return Refused(413, told, code="request_too_large", headers={"Connection": "close"})


def _refused(refused: Refused, request: Request) -> Response:
    """An error in OpenAI's shape; clients of Ollama read a line."""
    is_line = request.url.path.startswith("/api/")
    return JSONResponse(refused.line if is_line else refused.body, refused.status, headers=refused.headers)


def _waker(
    loop: asyncio.AbstractEventLoop, wake: Callable[[], Any], when: Callable[[], bool] = lambda: True
) -> Callable[[], None]:
    """A listener for other threads that wakes up the event loop."""

    def listener() -> None:
        if when():
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:  # the loop has ended
                pass

    return listener


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Stream(Response):
    """Parts of an answer as they come: server-sent events, or lines of JSON for Ollama's clients."""

    def __init__(self, job: Job, request: Request) -> None:
        super().__init__()
        self._job, self._request = job, request
        self._lines = request.url.path in JSON_LINES
        self._named = request.url.path == "/v1/responses"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = b"application/x-ndjson" if self._lines else b"text/event-stream"
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send_all(send, gone)
        finally:
            gone.cancel()
            self._job.cancel()  # what is done stays as it is
            self._request.state.told = self._job.describe()

    async def _send_all(self, send: Send, gone: asyncio.Future[Any]) -> None:
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        self._job.listen(_waker(loop, news.set))
        while not gone.done():
            news.clear()
            done = self._job.is_done
            try:
                text = "".join(map(self._framed, self._job.parts()))
            except Exception as error:  # noqa: BLE001 - the status is sent already: the error becomes an event
                refused = refusal(error)
                text, done = self._framed(refused.line if self._lines else {**refused.body, "type": "error"}), True
            if done and not self._lines and not self._named:
                text += "data: [DONE]\n\n"
            if text:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            if done:
                await send({"type": "http.response.body", "body": b""})
                return
            waiting: asyncio.Future[Any] = asyncio.ensure_future(news.wait())
            try:
                await asyncio.wait({waiting, gone}, timeout=HEARTBEAT, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
            if not news.is_set() and not gone.done() and not self._lines:
                await send({"type": "http.response.body", "body": b": \n\n", "more_body": True})

    def _framed(self, part: dict[str, Any]) -> str:
        text = json.dumps(part)
        if self._lines:
            return f"{text}\n"
        return f"event: {part['type']}\ndata: {text}\n\n" if self._named else f"data: {text}\n\n"


__all__ = ["make_app", "refuse"]
