"""A load test of a server that speaks OpenAI's completions: rates, latencies with percentiles, a plot."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from strata.errors import OptionError

WORDS: Final = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system",
    "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money",
)  # fmt: skip
PARTS: Final = (0.5, 0.9, 0.95, 0.99)
MOST_TOLD: Final = 1 << 16  # bytes of a refusal that are read


@dataclass(frozen=True, kw_only=True)
class LoadTest:
    """What a load test asks for. With a `rate`, requests come at random times, so many a second on average; without,
    each of `clients` sends the next when the last is answered."""

    url: str
    requests: int = 64
    clients: int = 16
    rate: float | None = None
    prompt_tokens: int = 64  # about: words of a prompt
    max_tokens: int = 64
    shared: int = 0  # words at the beginning of every prompt that are the same
    model: str | None = None
    api_key: str | None = None
    seed: int = 0
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if min(self.requests, self.clients, self.prompt_tokens, self.max_tokens) < 1 or self.shared < 0:
            raise OptionError("load: requests, clients and tokens are at least 1", code="O627")
        if self.rate is not None and not self.rate > 0:
            raise OptionError(f"load: a rate of {self.rate} a second is none", code="O627")
        if urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).hostname:
            raise OptionError(f"load: {self.url!r} is not an address of a server", code="O627")


@dataclass(frozen=True)
class Timing:
    """One request: seconds to the first text and to the last, tokens, and what went wrong."""

    first: float
    total: float
    tokens: int
    error: str | None = None


def run_load(load: LoadTest) -> dict[str, Any]:
    """Ask as the load says, and report."""
    start = time.perf_counter()
    samples = asyncio.run(_run(load))
    return report(samples, time.perf_counter() - start)


async def _run(load: LoadTest) -> list[Timing]:
    rng = random.Random(load.seed)
    common = " ".join(rng.choice(WORDS) for _ in range(load.shared))
    own = max(load.prompt_tokens - load.shared, 1)
    prompts = [f"{common} {' '.join(rng.choice(WORDS) for _ in range(own))}".strip() for _ in range(load.requests)]
    if load.rate is not None:
        waits, at = [], 0.0
        for _ in prompts:
            waits.append(at)
            at += rng.expovariate(load.rate)

        async def later(prompt: str, wait: float) -> Timing:
            await asyncio.sleep(wait)
            return await _ask(load, prompt)

        return list(await asyncio.gather(*(later(p, w) for p, w in zip(prompts, waits, strict=True))))
    left, found = iter(prompts), []

    async def client() -> None:
        for prompt in left:
            found.append(await _ask(load, prompt))

    await asyncio.gather(*(client() for _ in range(load.clients)))
    return found


async def _ask(load: LoadTest, prompt: str) -> Timing:
    start = time.perf_counter()
    try:
        async with asyncio.timeout(load.timeout):
            return await _asked(load, prompt, start)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
        passed = time.perf_counter() - start
        return Timing(passed, passed, 0, f"{type(error).__name__}: {error}"[:200])


async def _asked(load: LoadTest, prompt: str, start: float) -> Timing:
    place = urlsplit(load.url)
    secure = ssl.create_default_context() if place.scheme == "https" else None
    port = place.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(place.hostname, port, ssl=secure)
    try:
        body: dict[str, Any] = {
            "prompt": prompt, "max_tokens": load.max_tokens, "temperature": 0, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if load.model is not None:
            body["model"] = load.model
        raw = json.dumps(body).encode()
        head = [f"POST {place.path.rstrip('/').removesuffix('/v1')}/v1/completions HTTP/1.1", f"Host: {place.netloc}",
                "Content-Type: application/json", f"Content-Length: {len(raw)}", "Connection: close"]  # fmt: skip
        if load.api_key is not None:
            head.append(f"Authorization: Bearer {load.api_key}")
        writer.write("\r\n".join([*head, "", ""]).encode() + raw)
        await writer.drain()
        status = (await reader.readline()).split()
        first, tokens, error = 0.0, 0, None
        if len(status) < 2 or status[1] != b"200":
            told = b""
            while len(told) < MOST_TOLD and (more := await reader.read(MOST_TOLD)):
                told += more
            return Timing(0.0, time.perf_counter() - start, 0, _refusal(told))
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            part = json.loads(line[6:])
            if "error" in part:
                error = str(part["error"])[:200]
            if any(c.get("text") for c in part.get("choices", ())):
                first = first or time.perf_counter() - start
                tokens += 1  # where a server does not say how many there were
            tokens = max(tokens, (part.get("usage") or {}).get("completion_tokens", 0))
        total = time.perf_counter() - start
        return Timing(first or total, total, tokens, error)
    finally:
        writer.close()


def _refusal(told: bytes) -> str:
    """What an answer that is an error says, without its head: of the same errors one is shown."""
    body = told.partition(b"\r\n\r\n")[2].decode("utf-8", "replace").strip()
    try:
        return str(json.loads(body)["error"]["message"])[:200]
    except (ValueError, LookupError, TypeError):
        return body[-200:] or "the answer says nothing"


def report(samples: Sequence[Timing], seconds: float) -> dict[str, Any]:
    """Rates and percentiles of requests that were answered, and how many were not."""
    good = [s for s in samples if s.error is None]
    per_token = [(s.total - s.first) / (s.tokens - 1) for s in good if s.tokens > 1]
    tokens = sum(s.tokens for s in good)
    return {
        "requests": len(samples), "failed": len(samples) - len(good), "seconds": seconds, "tokens": tokens,
        "requests_per_second": len(good) / seconds, "tokens_per_second": tokens / seconds,
        "first_token": percentiles([s.first for s in good]), "per_token": percentiles(per_token),
        "total": percentiles([s.total for s in good]),
        "errors": list(dict.fromkeys(s.error for s in samples if s.error is not None))[:5],
    }  # fmt: skip


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Values that so many percent are not above."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{round(p * 100)}": ordered[min(int(p * len(ordered)), len(ordered) - 1)] for p in PARTS}


def plot_load(found: dict[str, Any], width: int = 640, height: int = 200) -> str:
    """Percentiles of the first token, of each token and of the whole as bars, in an SVG."""
    try:
        rows = [(kind, name, float(value)) for kind in ("first_token", "per_token", "total")
                for name, value in found[kind].items()]  # fmt: skip
        title = f"{found['requests']} requests, {found['tokens_per_second']:.1f} tokens/s, {found['failed']} failed"
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise OptionError(f"plot_load: this is not a report of run_load: {error!r}", code="O627") from None
    if min(width, height) < 1:
        raise OptionError(f"plot_load: {width} by {height} pixels show nothing", code="O627")
    most = max((value for *_, value in rows), default=1.0) or 1.0
    step = height / max(len(rows), 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + 24}" font-family="sans-serif">'
    ]
    lines.append(f'<text x="4" y="16" font-size="13">{title}</text>')
    for i, (kind, name, value) in enumerate(rows):
        y = 24 + i * step
        size = (width - 260) * value / most
        colour = {"first_token": "#4477aa", "per_token": "#66ccee", "total": "#228833"}[kind]
        lines.append(f'<text x="4" y="{y + step * 0.7:.1f}" font-size="11">{kind} {name}</text>')
        lines.append(f'<rect x="110" y="{y:.1f}" width="{size:.1f}" height="{step * 0.8:.1f}" fill="{colour}"/>')
        lines.append(f'<text x="{116 + size:.1f}" y="{y + step * 0.7:.1f}" font-size="11">{value * 1e3:.1f} ms</text>')
    return "\n".join([*lines, "</svg>", ""])
