"""`strata view`: a page of a program at every stage, of a model file or of a trace."""

from __future__ import annotations

import http.server
import os
import threading
from argparse import Namespace
from pathlib import Path
from typing import Any

from strata.cli import show
from strata.cli.arrays import read_sizes
from strata.viewer import page_for, page_text, view


def view_(options: Namespace) -> None:
    """Write the page, or show it at an address of this machine."""
    sizes = read_sizes(options.size)
    if options.serve is not None:
        _serve(options.model, options.device, sizes, options.serve)
        return
    path = view(options.model, options.output, device=options.device, sizes=sizes or None)
    if options.json:
        show.as_json({"file": os.fspath(path), "bytes": os.path.getsize(path)})
        return
    print(f"{path} ({show.size(os.path.getsize(path))}): open it in a browser")


def _serve(model: str, device: str, sizes: dict[str, int], port: int) -> None:
    """The page at an address of this machine only; made again when the file has changed."""
    with LivePage(model, device, sizes, port) as server:
        print(f"http://127.0.0.1:{server.server_port}/ shows {model}; Ctrl-C ends it", flush=True)
        server.serve_forever()


class LivePage(http.server.ThreadingHTTPServer):
    """One page. A file that changed is read again when the page is asked for."""

    daemon_threads = True

    def __init__(self, model: str, device: str, sizes: dict[str, int], port: int = 0) -> None:
        self._model, self._device, self._sizes = model, device, sizes
        self._made: tuple[Any, bytes] | None = None
        self._lock = threading.Lock()
        self.page()  # a file that cannot be shown is told before there is an address
        super().__init__(("127.0.0.1", port), _Answer)

    def page(self) -> bytes:
        with self._lock:
            stamp = _stamp(Path(self._model))
            if self._made is None or self._made[0] != stamp:
                data = page_for(self._model, device=self._device, sizes=self._sizes or None)
                self._made = stamp, page_text(data).encode()
            return self._made[1]


def _stamp(path: Path) -> Any:
    about = path.stat()
    return about.st_mtime_ns, about.st_size, about.st_ino


class _Answer(http.server.BaseHTTPRequestHandler):
    server: LivePage

    def do_GET(self) -> None:
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if host not in ("127.0.0.1", "localhost") or self.path.partition("?")[0] != "/":
            self.send_error(404)
            return
        body = self.server.page()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not told: there is one reader."""
