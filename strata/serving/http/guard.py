"""Who may ask: Host and Origin, API keys, CORS; and what is noted of each request: an id, a log line, counters."""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final
from urllib.parse import quote

from strata.serving.api.errors import Refused
from strata.serving.http.options import HttpOptions, KeyRing
from strata.serving.metrics import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

logger = logging.getLogger("strata.serving")
OPEN: Final = ("/", "/health", "/ready")  # without a key
_NUMBER: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")  # of a header
_HOST: Final = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::\d{1,5})?|([^:\[\]/\\\s@]+)(?::\d{1,5})?")


class Gatekeeper:
    """Wraps the application: what may not be asked does not reach it."""

    def __init__(self, app: App, options: HttpOptions, metrics: Metrics) -> None:
        self._app, self._options, self._metrics = app, options, metrics
        self._keys = KeyRing(options.api_keys)
        own = {socket.gethostname().lower(), *(h.lower() for h in options.allowed_hosts)}
        self._hosts = own
        self._origins = {o.rstrip("/").lower() for o in options.cors_origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        given = headers.get("x-request-id", "")
        number = given if _NUMBER.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        extra = [(b"x-request-id", number.encode())]
        state = scope.setdefault("state", {})
        state["request_id"], state["client"] = number, (scope.get("client") or ("", 0))[0]
        status, start = 0, time.perf_counter()

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        self._metrics.count("http_requests")
        try:
            try:
                self._check(scope, headers, extra)
            except Refused as refused:
                await refuse(refused, noted, closes=True)
                return
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _answered(204, b"", [], noted)
                return
            await self._app(scope, receive, noted)
        finally:
            self._metrics.count(f"http_{status or 499}")
            self._log(scope, status, time.perf_counter() - start)

    # ---------------------------------------------------------------------------------------------------------- checks

    def _check(self, scope: Scope, headers: dict[str, str], extra: list[tuple[bytes, bytes]]) -> None:
        """Refuse who may not ask; headers for those who may, and for pages that may read why not."""
        if "content-length" in headers and "transfer-encoding" in headers:
            raise Refused(400, "a request has a Content-Length or a Transfer-Encoding, not both", code="invalid_http")
        if "host" in headers or scope.get("http_version") != "1.0":  # load balancers ask so; browsers always name one
            self._check_host(headers.get("host", ""))
        extra += self._check_origin(scope, headers)
        if scope["method"] != "OPTIONS" and self._keys and scope["path"] not in OPEN:
            scope["state"]["client"] = self._check_key(headers)

    def _check_host(self, host: str) -> None:
        found = _HOST.fullmatch(host)
        if found is None:
            raise Refused(400, "the Host of the request is none", code="invalid_host")
        name = (found[1] or found[2]).lower().rstrip(".")
        if self._keys or "*" in self._hosts or "." not in name or name in self._hosts or name.endswith(".localhost"):
            return
        try:
            ipaddress.ip_address(name)
        except ValueError:
            told = f"the Host {name[:100]!r} is not allowed; --allowed-host {name[:100]} allows it"
            raise Refused(403, told, kind="permission_error", code="host_not_allowed") from None

    def _check_origin(self, scope: Scope, headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
        origin = headers.get("origin")
        if origin is None:
            if headers.get("sec-fetch-site") == "cross-site" and scope["method"] != "GET":
                raise Refused(403, "a page of another origin asks", kind="permission_error", code="origin_not_allowed")
            return []
        plain = origin.rstrip("/").lower()
        if plain == f"{scope['scheme']}://{headers.get('host', '').lower()}":
            return []
        if plain in self._origins or "*" in self._origins:
            extra = [
                (b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"Origin"),
                (b"access-control-expose-headers", b"x-request-id, retry-after"),
            ]  # fmt: skip
            if scope["method"] == "OPTIONS":
                wanted = [name.strip() for name in headers.get("access-control-request-headers", "").split(",")]
                names = ", ".join(name for name in wanted if _NAME.fullmatch(name))  # clients have some of their own
                extra += [
                    (b"access-control-allow-methods", b"GET, POST, DELETE"), (b"access-control-max-age", b"600"),
                    (b"access-control-allow-headers", (names or "authorization, content-type").encode()),
                ]  # fmt: skip
            return extra
        told = f"the Origin {origin[:100]!r} is not allowed; --cors-origin {origin[:100]} allows it"
        raise Refused(403, told, kind="permission_error", code="origin_not_allowed")

    def _check_key(self, headers: dict[str, str]) -> str:
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        client = self._keys.client(given) if given else None
        if client is None:
            told = "the API key is not known" if given else "an API key is needed: Authorization: Bearer KEY"
            raise Refused(401, told, kind="authentication_error", code="invalid_api_key",
                          headers={"WWW-Authenticate": "Bearer"})  # fmt: skip
        return client

    # ------------------------------------------------------------------------------------------------------------- log

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        state = scope["state"]
        about = {"id": state["request_id"], "client": state["client"], "method": scope["method"],
                 "path": quote(scope["path"][:200]), "status": status or 499, "seconds": round(seconds, 6)}  # fmt: skip
        about |= state.get("told", {})
        logger.info(" ".join(f"{k}={v}" for k, v in about.items()), extra={"about": about})


class JsonLines(logging.Formatter):
    """Log records as lines of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        about = getattr(record, "about", None) or {"message": record.getMessage()}
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        return json.dumps({"time": when, "level": record.levelname.lower(), **about})


def log_requests(kind: str = "text") -> None:
    """A line for each request on the standard error: as text, or as JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if kind == "json" else logging.Formatter("%(asctime)s %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


async def refuse(refused: Refused, send: Send, *, closes: bool = False) -> None:
    """Send an error."""
    headers = [(k.lower().encode(), v.encode()) for k, v in refused.headers.items()]
    headers.append((b"content-type", b"application/json"))
    if closes:
        headers.append((b"connection", b"close"))
    await _answered(refused.status, json.dumps(refused.body).encode(), headers, send)


async def _answered(status: int, body: bytes, headers: list[tuple[bytes, bytes]], send: Send) -> None:
    size = [] if status == 204 else [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*headers, *size]})
    await send({"type": "http.response.body", "body": body})
