"""A server under clients that vanish: nothing may be left behind, and whoever stays is answered.

python -m tests.torture.serve --requests 10000 --connections 1000

A process serves a tiny random model. Connections that do nothing stay open beside it; clients send requests, whole or
cut, streamed or not, and go away at any time. Then memory, threads, files and pages are compared with the start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.unit.serving.conftest import chat_folder

CLIENTS = 64


def state(process: int) -> dict[str, int]:
    """Memory in KiB, threads and open files of a process."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text("utf-8").splitlines())
    return {"memory": int(lines["VmRSS"].split()[0]), "threads": int(lines["Threads"]),
            "files": len(os.listdir(f"/proc/{process}/fd"))}  # fmt: skip


async def ask(host: str, port: int, path: str, body: Any = None) -> Any:
    reader, writer = await asyncio.open_connection(host, port)
    raw = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    writer.write(
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\nConnection: close\r\n\r\n".encode()
    )
    writer.write(raw)
    found = await reader.read()
    writer.close()
    return json.loads(found.split(b"\r\n\r\n", 1)[1])


async def vanish(host: str, port: int, rng: random.Random) -> None:
    """One request whose client may go away at any time."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        body = {"messages": [{"role": "user", "content": "x" * rng.randrange(1, 200)}], "stream": rng.random() < 0.5,
                "max_tokens": rng.randrange(1, 40)}  # fmt: skip
        if rng.random() < 0.1:
            body["response_format"] = {"type": "json_object"}
        raw = json.dumps(body).encode()
        text = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw
        writer.write(text[: rng.randrange(len(text))] if rng.random() < 0.1 else text)
        await writer.drain()
        if rng.random() < 0.7:
            async with asyncio.timeout(rng.random()):
                await reader.read(rng.randrange(1, 2000))
    except (OSError, TimeoutError):
        pass
    finally:
        writer.transport.abort()


async def attack(host: str, port: int, process: int, requests: int, connections: int) -> bool:
    await ask(host, port, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 40})
    rng = random.Random(0)
    for _ in range(200):
        await vanish(host, port, rng)
    await asyncio.sleep(2)
    before = state(process)
    idle = [await asyncio.open_connection(host, port) for _ in range(connections)]
    left, waits = iter(range(requests)), []

    async def client(number: int) -> None:
        own = random.Random(number)
        for _ in left:
            await vanish(host, port, own)

    async def innocent() -> None:
        while True:
            start = time.perf_counter()
            found = await ask(host, port, "/v1/completions", {"prompt": "hello", "max_tokens": 3})
            waits.append((time.perf_counter() - start, "choices" in found))
            if "choices" not in found:
                print(f"an innocent got {str(found)[:300]}")
            await asyncio.sleep(0.5)

    other = asyncio.create_task(innocent())
    await asyncio.gather(*(client(i) for i in range(CLIENTS)))
    other.cancel()
    for _, writer in idle:
        writer.transport.abort()
    load: dict[str, Any] = {}
    for _ in range(120):
        await asyncio.sleep(0.5)
        load = (await ask(host, port, "/load"))["models"]["tiny"]
        if not load["running"] and not load["waiting"] and state(process)["files"] <= before["files"] + 2:
            break
    after = state(process)
    waits.sort()
    print(f"before {before}, after {after}, pages {load['free_pages']} of {load['pages']} free")
    answered = sum(ok for _, ok in waits)
    print(f"innocents: {len(waits)} asked, {answered} answered, p50 {waits[len(waits) // 2][0]:.3f} s, "
          f"worst {waits[-1][0]:.3f} s")  # fmt: skip
    return (
        load["free_pages"] == load["pages"] and after["files"] <= before["files"] + 2
        and after["threads"] <= before["threads"] + 8 and after["memory"] <= before["memory"] + (64 << 10)
        and all(ok for _, ok in waits)
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = chat_folder(Path(folder) / "tiny")
        command = [sys.executable, "-m", "strata.cli", "serve", str(made), "--port", "0", "--json", "--log", "none",
                   "--timeout", "5", "--queue", "1000", "--context", "512"]  # fmt: skip
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            url = json.loads("".join(process.stdout.readline() for _ in range(4)))["url"]
            host, port = url.removeprefix("http://").split(":")
            try:
                good = asyncio.run(attack(host, int(port), process.pid, options.requests, options.connections))
            finally:
                process.terminate()
    print("nothing is left behind" if good else "something is left behind")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
