"""Requests that are odd rather than large: bodies in crumbs, pipelines, upgrades, doubled headers, cut streams."""

from __future__ import annotations

import gzip
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from strata.models import Decoder
from strata.models.chat.tools import HERMES, CallParser
from strata.models.detokenize import MOST_HELD, Speech
from strata.serving import Engine, HttpOptions, Server, Service, ask
from strata.serving.api.ollama import OllamaAnswer, OllamaRequest
from strata.serving.api.requests import ChatRequest
from strata.serving.http.app import _Api

Make = Callable[..., Decoder]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def server(decoder: Make) -> Iterator[Server]:
    service = Service(Engine(decoder()), name="tiny")
    with Server(service, port=0, options=HttpOptions(read_timeout=5, write_timeout=5)) as made:
        yield made


def sent(server: Server, text: bytes) -> bytes:
    """All that comes back until the server closes the connection."""
    with socket.create_connection(server.address, timeout=30) as connection:
        found = b""
        try:
            connection.sendall(text)
            while part := connection.recv(1 << 16):
                found += part
        except ConnectionError:  # it was closed before all was sent
            pass
        return found


def request(path: str, body: Any = None, head: str = "") -> bytes:
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n{head}\r\n".encode() + raw


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def chunked(body: bytes, size: int) -> bytes:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return head + b"".join(b"%x\r\n%s\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"


@pytest.mark.parametrize(("length", "size", "expected"), [(1000, 1, 200), (1100, 1, 400), (300_000, 200, 200)])
def test_bodies_do_not_come_in_crumbs(server: Server, length: int, size: int, expected: int) -> None:
    """Each chunk takes the event loop as long as a small request."""
    body = json.dumps({"prompt": "hello", "max_tokens": 1, "user": ""}).encode()
    body = body[:-2] + b"x" * (length - len(body)) + body[-2:]
    assert status(sent(server, chunked(body, size))) == expected
    assert ask(server.url, "/v1/completions", {"prompt": "hello", "max_tokens": 1})["choices"]


def test_lists_and_objects_are_counted(server: Server) -> None:
    for path in ("/v1/completions", "/api/show"):
        answer = sent(server, request(path, b"[" + b"[]," * 200_000 + b"[]]", "Connection: close\r\n"))
        assert status(answer) == 400
        assert b"more than 131072 lists and objects" in answer


def test_no_body_is_read_on_the_event_loop(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    read = _Api._read

    async def noted(self: _Api, asked: Any, raw: bytes, reader: Any) -> Any:
        def where(*given: Any) -> Any:
            seen.append(threading.current_thread().name)
            return reader(*given)

        return await read(self, asked, raw, where)

    monkeypatch.setattr(_Api, "_read", noted)
    assert ask(server.url, "/api/show", {"model": "tiny"})["capabilities"] == ["completion", "tools"]
    assert b"the body is not a JSON object" in sent(server, request("/api/show", [1], "Connection: close\r\n"))
    assert ask(server.url, "/api/show", {"model": "no"}) == {"error": "there is no model 'no'"}
    assert ask(server.url, "/v1/completions", {"prompt": "hello", "max_tokens": 1})["choices"]
    assert seen
    assert all(name.startswith("strata-requests") for name in seen)


def test_paths_do_not_write_lines_of_their_own(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "strata.serving"):
        sent(server, request("/a%0d%0aid=req_forged%20status=200", head="Connection: close\r\n"))
    (line,) = [r.getMessage() for r in caplog.records]
    assert "\n" not in line
    assert "path=/a%0D%0Aid%3Dreq_forged%20status%3D200" in line


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    names = ["/health", "/v1/models", "/nowhere", "/health"] * 20
    text = b"".join(request(name) for name in names[:-1]) + request(names[-1], head="Connection: close\r\n")
    found = sent(server, text)
    assert found.count(b"HTTP/1.1 ") == len(names)
    assert [int(part[:3]) for part in found.split(b"HTTP/1.1 ")[1:]] == [404 if n == "/nowhere" else 200 for n in names]


def test_upgrades_are_not_followed(server: Server) -> None:
    upgrade = (
        "Connection: Upgrade, close\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n"
    )
    assert status(sent(server, request("/health", head=upgrade))) == 200
    assert status(sent(server, request("/v1/completions", head=upgrade))) == 405
    h2c = "Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    assert status(sent(server, request("/health", head=h2c))) == 200
    assert status(sent(server, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")) == 400


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("Host: y\r\n", 400), ("Content-Length: 7\r\n", 400), ("Transfer-Encoding: gzip, chunked\r\n", 400),
        ("Authorization: Bearer a\r\nAuthorization: Bearer b\r\n", 200),
        ("X-Request-Id: a\r\nX-Request-Id: b\r\n", 200),
    ],
)  # fmt: skip
def test_doubled_headers(server: Server, head: str, expected: int) -> None:
    answer = sent(server, request("/health", head=f"{head}Connection: close\r\n"))
    assert status(answer) == expected


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/api/chat"])
def test_streams_that_are_cut_anywhere_leave_nothing(chat_model: Make, path: str) -> None:
    """A client goes away behind each part of a request and of its answer."""
    body: dict[str, Any] = {"stream": True}
    message = {"role": "user", "content": "hello"}
    match path:
        case "/v1/completions":
            body |= {"prompt": "hello", "max_tokens": 30}
        case "/v1/responses":
            body |= {"input": "hello", "max_output_tokens": 30}
        case "/api/chat":
            body |= {"messages": [message], "options": {"num_predict": 30}}
        case _:
            body |= {"messages": [message], "max_tokens": 30, "n": 2}
    text = request(path, body)
    service = Service(Engine(chat_model()), name="tiny")
    with Server(service, port=0) as server:
        engine = service.engine
        assert engine is not None
        for cut in [*range(0, len(text), 23), *[len(text)] * 12]:
            with socket.create_connection(server.address, timeout=30) as connection:
                connection.sendall(text[:cut])
                if cut == len(text):
                    connection.recv(1 + cut * 7 % 900)
        end = time.monotonic() + 30
        while engine.load["running"] or engine.load["waiting"] or server._uvicorn.server_state.connections:
            assert time.monotonic() < end, engine.load
            time.sleep(0.01)
        assert engine.load["free_pages"] == engine.load["pages"]
        assert not service._lock.locked()


def test_arguments_that_are_no_json_reach_clients_of_ollama() -> None:
    parser = CallParser(HERMES)
    parser.push('<tool_call>\n{"name": "f", "arguments": "a text"}\n</tool_call>')
    generation = SimpleNamespace(is_done=True, pieces=lambda start: [], scores=[], prompt_ids=[1], tokens=[2])
    asked = OllamaRequest(ChatRequest(({"role": "user", "content": "x"},)), is_chat=True)
    answer = OllamaAnswer(asked, [generation], "tiny", HERMES)  # type: ignore[list-item]
    (call,) = answer._part("", parser.calls)["message"]["tool_calls"]
    assert call == {"function": {"name": "f", "arguments": "a text"}}


def test_bodies_that_are_coded_are_not_read(server: Server) -> None:
    body = gzip.compress(json.dumps({"prompt": "hello", "max_tokens": 1}).encode())
    for coding in ("gzip", "br", "deflate, gzip"):
        answer = sent(server, request("/v1/completions", body, f"Content-Encoding: {coding}\r\n"))
        assert status(answer) == 415
        assert b"unsupported_content_encoding" in answer
    plain = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    head = "Content-Encoding: identity\r\nConnection: close\r\n"
    assert status(sent(server, request("/v1/completions", plain, head))) == 200


def test_json_is_utf_8(server: Server) -> None:
    """Half of a surrogate pair does not come in by another coding."""
    text = json.dumps({"prompt": "h\u00e9", "max_tokens": 1}, ensure_ascii=False)
    for body, expected in (
        (text.encode(), 200), (text.encode("utf-8-sig"), 200), (text.encode("utf-16"), 400),
        (text.encode("utf-16-le"), 400), (text.encode("latin-1"), 400),
        ('{"prompt": "\ud800"}'.encode("utf-8", "surrogatepass"), 400),
    ):  # fmt: skip
        answer = sent(server, request("/v1/completions", body, "Connection: close\r\n"))
        assert status(answer) == expected
        assert (b'"code":"invalid_json"' in answer) == (expected == 400)


def test_a_method_that_is_not_taken_is_told_which_one_is(server: Server) -> None:
    for path, allowed in (("/v1/completions", {"POST"}), ("/health", {"GET", "HEAD"})):
        answer = sent(server, b"PUT %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
        assert status(answer) == 405
        (line,) = (line for line in answer.split(b"\r\n") if line.lower().startswith(b"allow:"))
        assert {m.strip() for m in line.split(b":")[1].decode().split(",")} == allowed
    assert status(sent(server, request("/nowhere", head="Connection: close\r\n"))) == 404


def test_http_1_0_needs_no_host(server: Server) -> None:
    """As load balancers ask whether the server is there. Later versions need one."""
    for version, head, expected in (
        ("1.0", "", 200), ("1.0", "Host: x\r\n", 200), ("1.0", "Host: evil.example\r\n", 403),
        ("1.0", "Host: a b\r\n", 400), ("1.1", "", 400),
    ):  # fmt: skip
        answer = sent(server, f"GET /health HTTP/{version}\r\n{head}Connection: close\r\n\r\n".encode())
        assert (version, head, status(answer)) == (version, head, expected)


class Torn:
    """A tokenizer whose every text ends with half a character."""

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, ids: list[int], **_: Any) -> str:
        self.longest = max(self.longest, len(ids))
        return "\ufffd" * len(ids)


def test_what_never_becomes_a_character_is_said_as_it_is() -> None:
    """Decoding goes over a bounded number of tokens, however many come."""
    tokenizer = Torn()
    speech = Speech(tokenizer)  # type: ignore[arg-type]
    found = "".join(speech.push(token) for token in range(1000)) + speech.finish()
    assert found == "\ufffd" * 1000
    assert tokenizer.longest <= MOST_HELD + 1


def test_calls_that_are_too_deep_are_no_calls() -> None:
    parser = CallParser(HERMES)
    deep = 100_000
    parser.push('<tool_call>\n{"name": "f", "arguments": ' + "[" * deep + "]" * deep + "}\n</tool_call>")
    assert parser.calls == []
