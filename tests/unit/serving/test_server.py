"""The server over a loopback connection: answers, streams, refusals, limits, and how it ends."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.errors import OptionError, RunError
from strata.models import Decoder, Encoder
from strata.serving import Engine, Recorder, Server, Service, ask, read_records, replay
from tests.unit.serving.conftest import Letters, random_llama

Make = Callable[..., Decoder]
pytestmark = pytest.mark.filterwarnings("ignore")
CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def server(decoder: Make, tmp_path: Path) -> Iterator[Server]:
    engine = Engine(decoder(), max_requests=3)
    with Server(Service(engine, name="tiny", recorder=Recorder(tmp_path / "log.jsonl")), port=0) as made:
        yield made


@contextmanager
def connect(server: Server) -> Iterator[HTTPConnection]:
    with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=60)) as made:
        yield made


def events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """The parts of a stream, up to the one that says that it is done."""
    with connect(server) as connection:
        connection.request("POST", path, json.dumps({**body, "stream": True}))
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        lines = answer.read().decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def test_texts(server: Server, decoder: Make) -> None:
    model = decoder()
    found = ask(server.url, TEXT, {"model": "tiny", "prompt": ["hello", "you"], "max_tokens": 5, "temperature": 0})
    assert [c["text"] for c in found["choices"]] == [model.generate(p, max_tokens=5) for p in ("hello", "you")]
    assert [c["index"] for c in found["choices"]] == [0, 1]
    assert {c["finish_reason"] for c in found["choices"]} == {"length"}
    assert (found["object"], found["model"]) == ("text_completion", "tiny")
    details = found["usage"].pop("prompt_tokens_details")
    assert (found["usage"], details) == (
        {"prompt_tokens": 8, "completion_tokens": 10, "total_tokens": 18}, {"cached_tokens": 0}
    )  # fmt: skip
    hot = {"prompt": [5, 6], "max_tokens": 4, "seed": 3, "n": 3}
    found = ask(server.url, TEXT, hot)
    wanted = [model.generate([5, 6], max_tokens=4, temperature=1.0, seed=3 + i) for i in range(3)]
    assert [c["text"] for c in found["choices"]] == wanted
    assert found["usage"]["prompt_tokens"] == 2


def test_chat_whole_and_in_parts(server: Server, decoder: Make) -> None:
    text = decoder().generate(Letters().chat(HELLO), max_tokens=7)
    body = {"messages": HELLO, "max_tokens": 7, "temperature": 0}
    found = ask(server.url, CHAT, body)
    assert found["object"] == "chat.completion"
    assert found["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
    parts = events(server, CHAT, {**body, "stream_options": {"include_usage": True}})
    assert {p["object"] for p in parts} == {"chat.completion.chunk"}
    assert len({p["id"] for p in parts}) == 1
    assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(p["choices"][0]["delta"].get("content", "") for p in parts[:-1]) == text
    assert parts[-2]["choices"][0]["finish_reason"] == "length"
    assert parts[-1]["usage"] == found["usage"]
    texts = events(server, TEXT, {"prompt": "hello", "max_tokens": 4, "temperature": 0, "stop": text[40:] or "~"})
    assert "".join(p["choices"][0]["text"] for p in texts) == decoder().generate("hello", max_tokens=4)


def test_many_at_once(server: Server, decoder: Make) -> None:
    model = decoder()
    prompts = [f"prompt {i}" * (1 + i % 3) for i in range(12)]

    def one(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
        if len(prompt) % 2:
            return "".join(p["choices"][0]["text"] for p in events(server, TEXT, body))
        return str(ask(server.url, TEXT, body)["choices"][0]["text"])

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(one, prompts))
    assert found == [model.generate(p, max_tokens=6) for p in prompts]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (TEXT, b"{", 400, "the body is not JSON"),
        (TEXT, b"[" * 100000, 400, "the body is not JSON"),
        (TEXT, b"\xff\xfe", 400, "the body is not JSON"),
        (TEXT, {"prompt": ""}, 400, "a prompt is a text"),
        (TEXT, {"prompt": "x" * 161}, 400, "161 tokens are more than 160"),
        (TEXT, {"prompt": [500]}, 400, "token 500 at position 0 is outside the vocabulary of 128"),
        (TEXT, {"prompt": "x", "adapter": "fr"}, 400, "there is no adapter 'fr'; known: none"),
        (TEXT, {"prompt": "x", "colour": "red"}, 400, "there is no field 'colour'"),
        (TEXT, {"prompt": ["x", "y" * 161], "stream": True}, 400, "161 tokens"),
        (CHAT, {"messages": []}, 400, "messages is a list"),
        (CHAT, {"messages": HELLO, "model": "gpt"}, 404, "there is no model 'gpt'; known: tiny"),
        (CHAT, {"messages": [{**HELLO[0], "mood": "good"}]}, 400, "there is no field 'messages[0].mood'"),
        (TEXT, b'{"prompt": "\\ud800"}', 400, "half of a surrogate pair"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\udc00"}]}', 400, "half of a surrogate pair"),
        (VECTORS, {"input": "x"}, 404, "tiny gives no vectors"),
        ("/v1/nothing", {}, 404, "POST /v1/nothing: there is nothing"),
    ],
)
def test_refusals(server: Server, path: str, body: Any, status: int, message: str) -> None:
    with connect(server) as connection:
        for _ in range(2):  # the connection stays usable
            connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body))
            answer = connection.getresponse()
            found = json.loads(answer.read())
            assert answer.status == status
            assert message in found["error"]["message"]
            assert "\n" not in found["error"]["message"]
    idle(server)


def idle(server: Server) -> None:
    """Soon nothing is computed any more, and all pages are free."""
    engine = server.service.engine
    assert engine is not None
    with engine._changed:
        assert engine._changed.wait_for(lambda: not engine._active, 30)
    assert engine.cache.pool.free == engine.cache.pool.pages


def test_bodies_without_a_length_or_too_long(server: Server) -> None:
    for head, status in (("", 400), ("Content-Length: 99999999999\r\n", 413), ("Content-Length: ²\r\n", 400)):
        with socket.create_connection(server.address, timeout=10) as raw:
            raw.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode())
            assert raw.recv(64).split()[1] == str(status).encode()


def test_what_can_be_looked_at(server: Server) -> None:
    ask(server.url, TEXT, {"prompt": "x", "max_tokens": 2})
    found = {}
    with connect(server) as connection:
        for path in ("/health", "/v1/models", "/metrics", "/nothing", TEXT):
            connection.request("GET", path)
            answer = connection.getresponse()
            found[path] = answer.status, answer.read().decode()
    assert found["/health"] == (200, '{"status":"ok"}')
    assert json.loads(found["/v1/models"][1])["data"][0]["id"] == "tiny"
    assert "strata_generated_tokens 2\n" in found["/metrics"][1]
    assert (found["/nothing"][0], found[TEXT][0]) == (404, 405)


def test_a_full_queue_answers_429(decoder: Make) -> None:
    engine = Engine(decoder(), max_requests=1, queue=0)
    service = Service(engine)
    with Server(service, port=0) as server:
        begun, go = Event(), Event()
        step = engine.cache.step

        def slow(*arguments: Any, **more: Any) -> Any:
            begun.set()
            go.wait(30)
            return step(*arguments, **more)

        engine.cache.step = slow  # type: ignore[method-assign]
        with ThreadPoolExecutor(1) as threads:
            first = threads.submit(ask, server.url, TEXT, {"prompt": "x", "max_tokens": 3})
            assert begun.wait(30)
            found = ask(server.url, TEXT, {"prompt": "x", "max_tokens": 3})
            go.set()
            assert "wait already" in found["error"]["message"]
            assert found["error"]["type"] == "rate_limit_error"
            assert len(first.result()["choices"]) == 1


def test_who_goes_away_is_no_longer_served(server: Server) -> None:
    with socket.create_connection(server.address, timeout=10) as raw:
        body = json.dumps({"prompt": "x", "max_tokens": 150, "stream": True}).encode()
        raw.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        assert raw.recv(10)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closes at once
    assert ask(server.url, TEXT, {"prompt": "y", "max_tokens": 3})["choices"]
    idle(server)


def test_closing_answers_what_has_come(decoder: Make) -> None:
    server = Server(Service(decoder()), port=0)
    server.start()
    engine = server.service.engine
    assert engine is not None
    go, step = Event(), engine.cache.step

    def held(*given: Any, **named: Any) -> Any:
        go.wait(60)
        return step(*given, **named)

    engine.cache.step = held  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, server.url, TEXT, {"prompt": "x", "max_tokens": 60}) for _ in range(4)]
        while engine._active + len(engine._waiting) < 4:
            assert not any(a.done() for a in asked)
            time.sleep(0.005)
        go.set()
        server.close()
        assert [a.result()["usage"]["completion_tokens"] for a in asked] == [60] * 4
    with pytest.raises(RunError, match="connection refused"):
        ask(server.url, TEXT, {"prompt": "x"})


def test_what_was_asked_can_be_asked_again(server: Server, tmp_path: Path) -> None:
    ask(server.url, TEXT, {"prompt": "hello", "max_tokens": 5, "seed": 1})
    events(server, CHAT, {"messages": HELLO, "max_tokens": 5, "temperature": 0})
    records = list(read_records(tmp_path / "log.jsonl"))
    assert [r.path for r in records] == [TEXT, CHAT]
    assert records[1].answer["choices"][0]["message"]["role"] == "assistant"
    assert replay(tmp_path / "log.jsonl", server.service.answer) == []
    other = replay(tmp_path / "log.jsonl", lambda path, body: server.service.answer(path, {**body, "max_tokens": 4}))
    assert len(other) == 4  # the two, and the two that asking again had added


class Words(Encoder):
    """An encoder that counts letters, so that vectors are tested without weights."""

    limit = 64

    def __init__(self) -> None:
        self._tokenizer = self  # type: ignore[assignment]
        self.config = SimpleNamespace(vocab=1 << 20, labels=0)  # type: ignore[assignment]
        self.pooling, self.normalize, self._folder = "mean", True, None

    def encode_batch(self, texts: Any, limit: int | None = None) -> list[list[int]]:
        return [[ord(c) for c in text[:limit]] for text in texts]

    def embed_ids(self, ids: Any, progress: Any = None, **_: Any) -> np.ndarray:
        if progress is not None:
            progress(len(ids), len(ids))
        return np.array([[len(i), i.count(ord("a"))] for i in ids], np.float32)


def test_vectors() -> None:
    with Server(Service(embedder=Words(), name="words"), port=0) as server:
        found = ask(server.url, VECTORS, {"input": ["banana", "x"]})
        assert [d["embedding"] for d in found["data"]] == [[6, 3], [1, 0]]
        assert found["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
        found = ask(server.url, VECTORS, {"input": "banana", "encoding_format": "base64"})
        assert np.frombuffer(base64.b64decode(found["data"][0]["embedding"]), "<f4").tolist() == [6, 3]
        assert "makes no texts" in ask(server.url, TEXT, {"prompt": "x"})["error"]["message"]
        many = ask(server.url, VECTORS, {"input": ["x"] * 3000})
        assert "3000 at once are more than 2048" in many["error"]["message"]
        for long in ("a" * 65, [97] * 65):
            told = ask(server.url, VECTORS, {"input": ["x", long]})["error"]
            assert told["code"] == "context_length_exceeded"
            assert "more than the 64 tokens that the model reads" in told["message"]
        assert ask(server.url, VECTORS, {"input": "a" * 65, "truncate": True})["data"][0]["embedding"] == [64, 64]
        assert ask(server.url, "/api/embed", {"input": "a" * 65})["embeddings"] == [[64, 64]]
        assert "more than the 64" in ask(server.url, "/api/embed", {"input": "a" * 65, "truncate": False})["error"]


def test_mistakes() -> None:
    with pytest.raises(OptionError, match="there is no model"):
        Service()
    with Server(Service(embedder=Words()), port=0) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(OptionError, match=f"127.0.0.1:{port} cannot be listened on"):
            Server(server.service, port=port)


def test_the_command_serves_until_a_signal(decoder: Make, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_folder(folder)
    command = [sys.executable, "-m", "strata.cli", "serve", str(folder), "--port", "0", "--json", "--context", "64"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = json.loads("".join(process.stdout.readline() for _ in range(4)))
            assert found["model"] == "model"
            answer = ask(found["url"], TEXT, {"prompt": "a b c", "max_tokens": 3, "temperature": 0})
            assert answer["usage"]["prompt_tokens"] == 3
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_the_command_tells_mistakes_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from strata.cli import main

    tiny_folder(tmp_path / "model")
    capfd.readouterr()
    for words, message in (
        (["nowhere.gguf"], "nowhere.gguf"), ([str(tmp_path / "model")] * 2, "there is a model 'model' already"),
        ([str(tmp_path / "model"), "--adapter", "fr"], "NAME=FOLDER is needed"),
        ([str(tmp_path / "model"), "--port", "99999"], "cannot be listened on"),
    ):  # fmt: skip
        assert main(["serve", *words]) == 2
        error = capfd.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def tiny_folder(folder: Path) -> None:
    """A random model with a tokenizer of words, as users have them on disk."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    folder.mkdir()
    random_llama(folder)
    words = {w: i for i, w in enumerate(["<unk>", *"abcdefghijklmnopqrstuvwxyz"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.save(str(folder / "tokenizer.json"))
    assert os.listdir(folder)


@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_tokens_in_a_stream(chat_model: Callable[[], Decoder], echo: bool) -> None:
    """They are places in the text, also of tokens that show half a character or nothing, as in a whole answer."""
    with Server(Service(Engine(chat_model()), name="tiny"), port=0) as server:
        for seed in range(20):
            body = {"prompt": "é!", "max_tokens": 40, "seed": seed, "logprobs": 1, "echo": echo, "n": 2}
            whole = ask(server.url, TEXT, body)["choices"]
            parts = [c for p in events(server, TEXT, body) for c in p["choices"]]
            for choice in whole:
                mine = [c for c in parts if c["index"] == choice["index"]]
                text, marks = "".join(c["text"] for c in mine), choice["logprobs"]
                assert text == choice["text"]
                for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
                    assert [x for c in mine if c["logprobs"] for x in c["logprobs"][name]] == marks[name]
                assert marks["text_offset"] == sorted(marks["text_offset"])
                assert marks["text_offset"][-1] <= len(text)
                if not any("\ufffd" in t or t.startswith("<|") for t in marks["tokens"]):
                    places = zip(marks["tokens"], marks["text_offset"], strict=True)
                    assert all(text.startswith(t, at) for t, at in places)
