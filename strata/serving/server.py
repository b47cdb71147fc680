"""The HTTP server: uvicorn in a thread, engines in theirs; limits, TLS, a graceful stop and an immediate one.

    POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/embeddings, /v1/rerank
    POST /api/chat, /api/generate, /api/embed (Ollama's)
    GET  /v1/models, /health, /ready, /metrics, and a page at /

A request that cannot be answered gets status 400 and one clear line, one too many 429, a model that cannot do it 404.
"""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from typing import Any, Self

from strata.errors import OptionError, RunError
from strata.serving.http.options import HttpOptions
from strata.serving.service import Service


class Server:
    """An HTTP server around a `Service`, running inside `with server:`; `port` 0 takes a free one."""

    def __init__(
        self, service: Service, *, host: str = "127.0.0.1", port: int = 8000, options: HttpOptions | None = None
    ) -> None:
        self.service, self.options = service, options or HttpOptions()
        uvicorn = _uvicorn()
        from strata.serving.http.app import make_app
        from strata.serving.http.connections import limited_protocol

        self._socket = _bound(host, port)
        self._pool = ThreadPoolExecutor(self.options.workers, "strata-requests")
        self._trials = ThreadPoolExecutor(1, "strata-grammars")
        config = uvicorn.Config(
            make_app(service, self.options, self._pool, self._trials), http=limited_protocol(self.options),
            ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False, server_header=False,
            backlog=1024, h11_max_incomplete_event_size=64 << 10, ssl_certfile=self.options.certificate,
            ssl_keyfile=self.options.private_key, timeout_keep_alive=max(int(self.options.idle_timeout), 1),
            timeout_graceful_shutdown=int(self.options.drain),
        )  # fmt: skip
        try:
            config.load()
        except (OSError, ssl.SSLError, ValueError) as error:
            self._socket.close()
            raise OptionError(f"serve: TLS cannot be used: {error}", code="O623") from None
        self._uvicorn = uvicorn.Server(config)
        self._thread: Thread | None = None
        self._ended = Event()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._socket.getsockname()[:2] if self._socket.fileno() >= 0 else self._where
        return str(host), int(port)

    @property
    def url(self) -> str:
        host, port = self.address
        kind = "http" if self.options.certificate is None else "https"
        return f"{kind}://[{host}]:{port}" if ":" in host else f"{kind}://{host}:{port}"

    def start(self) -> None:
        """Answer requests from now on, in threads."""
        self._where = self.address
        self.service.begin()
        self._thread = Thread(target=self._serve, name="strata-http", daemon=True)
        self._thread.start()
        while not self._uvicorn.started and not self._ended.wait(0.002):
            pass

    def _serve(self) -> None:
        try:
            self._uvicorn.run(sockets=[self._socket])
        finally:
            self._ended.set()

    def close(self, *, drain: bool = True) -> None:
        """Accept no more requests; those in flight are answered, for as long as the options say, or cancelled where
        `drain` is False."""
        if not drain:
            self.abort()
        self._uvicorn.should_exit = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._socket.close()
        self.service.close(drain=False)  # whoever waited has been answered, or was told to go
        for pool in (self._pool, self._trials):
            pool.shutdown(wait=False, cancel_futures=True)

    def abort(self) -> None:
        """Stop at once: what is on its way is cancelled. Another thread may be closing."""
        self._uvicorn.force_exit = self._uvicorn.should_exit = True
        for engine in self.service.engines.values():
            engine.cancel_all()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _uvicorn() -> Any:
    """What serving needs, or what to install: found out before anything is loaded."""
    missing = []
    for name in ("uvicorn", "starlette"):
        try:
            __import__(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise OptionError(
            f"serving needs {' and '.join(missing)}", code="O624", fix="pip install 'strata[serve]'"
        )  # fmt: skip
    import uvicorn

    return uvicorn


def _bound(host: str, port: int) -> socket.socket:
    made = None
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(1024)
        made.setblocking(False)
    except (OSError, OverflowError) as error:
        if made is not None:
            made.close()
        raise OptionError(f"serve: {host}:{port} cannot be listened on: {error}", code="O622") from None
    return made


def ask(
    url: str, path: str, body: Mapping[str, Any], *, timeout: float = 600.0, api_key: str | None = None,
    certificate: str | None = None,
) -> Any:  # fmt: skip
    """Send a request to a server; its answer as data, also where it is an error.

    `certificate` is the file of one that an https server may have, where those of the system do not know it.
    """
    import ssl
    from http.client import HTTPConnection, HTTPSConnection
    from urllib.parse import urlsplit

    place = urlsplit(url)
    connection: HTTPConnection
    if place.scheme == "https":
        try:
            trusted = ssl.create_default_context(cafile=certificate)
        except OSError as error:
            raise OptionError(f"ask: {certificate} is not a certificate: {error}", code="O622") from None
        connection = HTTPSConnection(place.netloc, timeout=timeout, context=trusted)
    else:
        connection = HTTPConnection(place.netloc, timeout=timeout)
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    try:
        connection.request("POST", path, json.dumps(body), headers)
        return json.loads(connection.getresponse().read())
    except (socket.gaierror, ConnectionError) as error:
        raise RunError(f"{url}{path}: {(error.strerror or str(error)).lower()}", code="X603") from None
    finally:
        connection.close()
