"""How long innocents wait while others attack: each attack beside the same questions asked in peace.

python -m tests.torture.innocents [MODEL] [--attack NAME] [--seconds 1] [--rounds 8]

A process serves a model, by default a tiny random one. An innocent asks short questions one after another: for a while
in peace, then while another process attacks, in many short turns, so that a busy machine slows both. The medians are
compared; and those of the CPU time that the server took, for whomever, while an innocent waited. That is no less than
the work that came in between, and does not depend on what else the machine does.

As many clients who ask for nothing special slow an innocent down, too. They are measured first, with answers of 200
tokens (`honest`) and as long as they may be (`busy`), and are judged like the attacks: none may more than double the
CPU time that passes while an innocent waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torture.serve import ask
from tests.unit.serving.conftest import chat_folder

Attack = Callable[[str, int], Awaitable[None]]
HONEST = ("honest", "busy")
CLIENTS, PAUSE = 4, 0.1  # attackers at a time, and their seconds between two attacks
MOST_REST = 20.0  # seconds until the last attacks are answered
PATH = "/v1/chat/completions"


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}


def asks(*bodies: Any) -> Attack:
    """An attack that sends these requests, again and again."""

    async def attack(host: str, port: int) -> None:
        for body in bodies:
            await ask(host, port, PATH, body)

    return attack


async def vanish(host: str, port: int) -> None:
    """A long answer is asked for, and nobody waits for it."""
    _, writer = await asyncio.open_connection(host, port)
    raw = json.dumps(said("x" * 50, max_tokens=100_000)).encode()
    writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
    await writer.drain()
    await asyncio.sleep(0.2)
    writer.transport.abort()


async def crowd(host: str, port: int) -> None:
    """Ten long answers at once, which are waited for, for a while: with four clients, more than the pages hold."""
    raw = json.dumps(said("x" * 50, max_tokens=100_000, logit_bias={"127": 50})).encode()
    made = [await asyncio.open_connection(host, port) for _ in range(10)]
    for _, writer in made:
        writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
    with suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(reader.read() for reader, _ in made)), 5)
    for _, writer in made:
        writer.transport.abort()


async def dribble(host: str, port: int) -> None:
    """200 connections that send a letter now and then."""
    made = [await asyncio.open_connection(host, port) for _ in range(200)]
    for _ in range(20):
        for _, writer in made:
            writer.write(b"P" if writer.transport.get_write_buffer_size() == 0 else b"")
        await asyncio.sleep(0.1)
    for _, writer in made:
        writer.transport.abort()


async def crumbs(host: str, port: int) -> None:
    """A body of a megabyte in chunks of one byte."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        writer.write(b"1\r\nx\r\n" * 1_000_000)
        await reader.read()
    finally:
        writer.transport.abort()


def endless(number: int) -> dict[str, Any]:
    """A schema that takes minutes to compile, another one each time."""
    return {"allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}{number}.*"} for i in range(24)]}


async def patterns(host: str, port: int) -> None:
    await ask(host, port, PATH, said("hello", **schema(endless(secrets.randbits(32)))))


async def files(host: str, port: int) -> None:
    """Prompts as long as they may be, another one each time."""
    text = " ".join(f"{secrets.randbits(24):06x}" for _ in range(200))
    await ask(host, port, PATH, said(text))


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found, "b": {"anyOf": [found, {"type": "null"}]}}}
    return found


def schema(made: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": made}}}


def attacks() -> dict[str, Attack]:
    """All of them by name."""
    many = {f"p{i}": {"type": "string", "pattern": f"^(a+)+{i}$"} for i in range(200)}
    selves = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/A"} for i in range(100)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {"type": "object", "properties": many}}}
             for i in range(64)]  # fmt: skip
    return {
        "honest": asks(said("hello", max_tokens=200)),  # no attack: what others cost who ask as everyone does
        "busy": asks(said("hello", max_tokens=100_000, ignore_eos=True)),
        "stops": asks(said("hello", stop=["y" * 1000] * 16, max_tokens=200), said("hello", stop=["y" * 10**6])),
        "prompts": asks(said("word " * 1_400_000)),
        "letters": asks(said("x" * 7_000_000)),
        "messages": asks({"messages": [{"role": "user", "content": "<|im_end|>"}] * 100_000}),
        "items": asks({"messages": [1] * 1_000_000}),
        "depth": asks({"messages": eval("[" * 90 + "]" * 90)}),  # noqa: S307 - brackets
        "biases": asks(said("hello", logit_bias={str(i): 1 for i in range(100_000)})),
        "schemas": asks(said("hello", **schema(nested(12))), said("hello", **schema({"properties": many}))),
        "repeats": asks(said("hello", **schema({"type": "string", "pattern": "^((a{1,500}b?){1,500}){1,500}$"}))),
        "tools": asks(said("hello", tools=tools)),
        "selves": asks(said("hello", **schema({"$ref": "#/$defs/A", "$defs": {"A": selves}}))),
        "lists": asks([[]] * 1_000_000),
        "torn": asks(said("hello", logit_bias={"127": 100}, max_tokens=1500, temperature=0)),
        "patterns": patterns,
        "files": files,
        "crumbs": crumbs,
        "vanish": vanish,
        "crowd": crowd,
        "dribble": dribble,
    }  # fmt: skip


def _attacker(name: str, host: str, port: int, goes_on: Any, busy: Any) -> None:
    """In a process of its own: attacks while the event is set; `busy` clients have not got their answer."""
    attack = attacks()[name]

    async def client() -> None:
        while True:
            if goes_on.is_set():
                busy.value += 1
                with suppress(OSError, TimeoutError, ValueError, IndexError):
                    await attack(host, port)
                busy.value -= 1
            await asyncio.sleep(PAUSE)

    async def all_clients() -> None:
        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    asyncio.run(all_clients())


@dataclass(frozen=True)
class Wait:
    """How long a question took, and the server's CPU time meanwhile."""

    seconds: float
    cpu: float


def cpu_seconds(process: int) -> float:
    """CPU time of a process and all its threads."""
    return time.clock_gettime((~process << 3) | 2)  # the kernel's number of that clock


async def waits(host: str, port: int, process: int, seconds: float) -> list[Wait]:
    """What short questions take, asked one after another."""
    found, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        begun, start = cpu_seconds(process), time.perf_counter()
        answer = await ask(host, port, "/v1/completions", {"prompt": "hello", "max_tokens": 3, "temperature": 0})
        assert "choices" in answer, answer
        found.append(Wait(time.perf_counter() - start, cpu_seconds(process) - begun))
        await asyncio.sleep(0.02)
    return found


def measure(
    name: str, host: str, port: int, process: int, seconds: float, rounds: int
) -> tuple[list[Wait], list[Wait]]:
    """Waits in peace and under attack, in turns."""
    calm: list[Wait] = []
    hurt: list[Wait] = []
    context = multiprocessing.get_context("spawn")
    goes_on, busy = context.Event(), context.Value("i", 0, lock=False)
    attacker = context.Process(target=_attacker, args=(name, host, port, goes_on, busy), daemon=True)
    attacker.start()
    try:
        for _ in range(rounds):
            end = time.monotonic() + MOST_REST
            while busy.value and time.monotonic() < end:
                time.sleep(0.05)
            time.sleep(0.2)
            calm += asyncio.run(waits(host, port, process, seconds))
            goes_on.set()
            end = time.monotonic() + MOST_REST
            while not busy.value and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.3)
            hurt += asyncio.run(waits(host, port, process, seconds))
            goes_on.clear()
    finally:
        attacker.terminate()
        attacker.join(10)
    return calm, hurt


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--attack", action="append", choices=list(attacks()))
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    slow = []
    with tempfile.TemporaryDirectory() as folder:
        made = options.model or str(chat_folder(Path(folder) / "tiny"))
        command = [sys.executable, "-m", "strata.cli", "serve", made, "--port", "0", "--json", "--log", "none",
                   "--timeout", "5", "--context", "2048"]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            url = json.loads("".join(process.stdout.readline() for _ in range(4)))["url"]
            host, port = url.removeprefix("http://").split(":")
            try:
                for name in dict.fromkeys((*HONEST, *(options.attack or attacks()))):
                    calm, hurt = measure(name, host, int(port), process.pid, options.seconds, options.rounds)
                    usual, now = (statistics.median(w.seconds for w in some) for some in (calm, hurt))
                    own, all_ = (statistics.median(w.cpu for w in some) for some in (calm, hurt))
                    print(f"{name:9} usual {usual * 1e3:6.1f} ms, now {now * 1e3:6.1f} ms ({now / usual:4.1f}); CPU "
                          f"{own * 1e3:6.1f} and {all_ * 1e3:6.1f} ms ({all_ / own:4.1f}); worst "
                          f"{max(w.seconds for w in calm) * 1e3:6.0f} and {max(w.seconds for w in hurt) * 1e3:6.0f} ms",
                          flush=True)  # fmt: skip
                    if all_ > 2 * own:
                        slow.append(name)
            finally:
                process.terminate()
    told = "more than twice as long as usual"
    print(f"{', '.join(slow)}: innocents wait {told}" if slow else f"no innocent waits {told}")
    return bool(slow)


if __name__ == "__main__":
    sys.exit(main())
