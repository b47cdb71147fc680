"""Connections with limits: how many there are, and how long one may take to send a request or to read an answer."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from strata.serving.http.options import HttpOptions

MANY_CHUNKS: Final = 1024
MOST_HEADERS: Final = 64 << 10  # bytes
LEAST_CHUNK: Final = 128  # bytes that a chunk of a body has on average, where there are many


def limited_protocol(options: HttpOptions) -> type[H11Protocol]:
    """uvicorn's HTTP protocol with the limits of a server."""

    class Limited(Connection):
        limits = options

    return Limited


class Connection(H11Protocol):
    """One connection. uvicorn ends those that are idle; those that dribble a request or do not read are ended here."""

    limits: HttpOptions

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.conn = ChunkedConnection(self.config.h11_max_incomplete_event_size or MOST_HEADERS)
        self.since = time.monotonic()
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------------------------------- how many

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reading = self.loop.call_later(self.limits.read_timeout, self._too_slow)
        if len(self.connections) > self.limits.max_connections:
            here = [c for c in self.connections if isinstance(c, Connection) and not c.transport.is_closing()]
            if len(here) > self.limits.max_connections:
                idle = [c for c in here if c is not self and c.is_idle]
                victim = min(idle, key=lambda c: c.since, default=self)  # who has waited longest for nothing
                victim._refuse(503, "there are too many connections", "too_many_connections")

    @property
    def is_idle(self) -> bool:
        """No request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    # ------------------------------------------------------------------------------------------------------- how long

    def data_received(self, data: bytes) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self.limits.read_timeout, self._too_slow)
        self.since = time.monotonic()
        super().data_received(data)
        if not self._is_half_read:
            self._reading = stopped(self._reading)

    @property
    def _is_half_read(self) -> bool:
        """A request has begun to come, and has not come whole."""
        if self.conn.their_state is h11.IDLE:
            return bool(self.conn.trailing_data[0]) or self.cycle is None
        return self.conn.their_state is h11.SEND_BODY

    def _too_slow(self) -> None:
        self._reading = None
        self._refuse(408, "the request takes too long to come", "request_timeout")

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.limits.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._writing = stopped(self._writing)
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading, self._writing = stopped(self._reading), stopped(self._writing)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server stops: a request that has not come whole is not waited for."""
        if self._is_half_read:
            self.transport.close()
        else:
            super().shutdown()

    # ------------------------------------------------------------------------------------------------------- refusals

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, "invalid_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """One answer without asking the application, and the end of the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started:
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
            body = json.dumps({"error": error}).encode()
            reason = {400: "Bad Request", 408: "Request Timeout", 503: "Service Unavailable"}[status]
            head = (
                f"HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
                "connection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


class ChunkedConnection(h11.Connection):
    """HTTP with headers of limited size, whether they come at once or in parts, and with bodies that do not come in
    crumbs: each chunk takes as much time as a small request."""

    def __init__(self, most: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=most)
        self._most = most
        self._chunks = self._bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request | h11.EndOfMessage):
            size = sum(len(name) + len(value) + 4 for name, value in event.headers)
            if isinstance(event, h11.Request):
                size += len(event.target)
            if size > self._most:  # h11 looks at those only that have not come whole
                raise h11.RemoteProtocolError("the headers of the request are too large")
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks += 1
            self._bytes += len(event.data)
            if self._chunks > MANY_CHUNKS and self._bytes < self._chunks * LEAST_CHUNK:
                raise h11.RemoteProtocolError("the chunks of the body are too small")
        return event


def stopped(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """No timer, once this one is stopped."""
    if timer is not None:
        timer.cancel()
    return None
