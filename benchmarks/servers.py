"""`strata serve` beside llama.cpp's server on the same file, in turns: tokens a second, first tokens, shared prompts.

python -m benchmarks.servers MODEL.gguf --rounds 3

Both are processes of their own with as many threads, slots and tokens of context; xllamacpp is llama.cpp's. Each round
asks both for the same: 16 clients at once, prompts of so many words that all differ. A prompt of 1,000 words is then
asked with several endings: the first time it is read, later the KV cache has it. The answers are those of a server that
keeps no prompts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from strata.serving import LoadTest, ask, run_load
from strata.serving.load import WORDS

CLIENTS, CONTEXT = 16, 512  # tokens of context for each client


@contextmanager
def strata_server(path: str, threads: int, *more: str) -> Iterator[str]:
    """`strata serve`, by its address."""
    command = [sys.executable, "-m", "strata.cli", "serve", path, "--port", "0", "--json", "--log", "none",
               "--threads", str(threads), "--max-requests", str(CLIENTS), *more]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads("".join(process.stdout.readline() for _ in range(4)))["url"]
        finally:
            process.kill()


def _llama_process(path: str, threads: int, told: Any) -> None:
    import xllamacpp

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # it tells about every slot
    os.dup2(quiet, 2)
    settings = xllamacpp.CommonParams()
    settings.model.path = path
    settings.n_parallel, settings.n_ctx, settings.port = CLIENTS, CLIENTS * CONTEXT, 0
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(settings)
    told.send(server.listening_address)
    time.sleep(1 << 20)


@contextmanager
def llama_server(path: str, threads: int) -> Iterator[str]:
    """llama.cpp's server, by its address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_llama_process, args=(path, threads, there), daemon=True)
    process.start()
    try:
        if not here.poll(120):
            raise TimeoutError("llama.cpp's server does not start")
        yield here.recv()
    finally:
        process.kill()


def throughput(urls: dict[str, str], rounds: int, requests: int, tokens: int) -> dict[str, list[dict[str, Any]]]:
    """Reports of all rounds; the first one of each server warms it up and is left out."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
    for at in range(rounds + 1):
        for name, url in urls.items():
            load = LoadTest(url=url, requests=requests if at else 4, clients=CLIENTS, prompt_tokens=tokens,
                            max_tokens=tokens, seed=at)  # fmt: skip
            report = run_load(load)
            if at:
                found[name].append(report)
                first = report["first_token"]["p95"]
                print(f"{name:10} {report['tokens_per_second']:7.1f} tokens/s, first token p95 {first:6.2f} s, "
                      f"{report['failed']} failed", flush=True)  # fmt: skip
    return found


def shared_prefix(path: str, threads: int, words: int, count: int) -> tuple[float, list[float], bool]:
    """Seconds to the first token of a long prompt, of others with the same beginning, and whether the answers are
    those of a server without a prefix cache."""
    rng = random.Random(0)
    common = " ".join(rng.choice(WORDS) for _ in range(words))
    bodies: list[Any] = [{"prompt": f"{common} {WORDS[i]}", "max_tokens": 1, "temperature": 0, "logprobs": 5}
                         for i in range(count)]  # fmt: skip
    said, waits = [], []
    for more in ((), ("--no-prefix-cache",)):
        with strata_server(path, threads, "--context", "2048", *more) as url:
            ask(url, "/v1/completions", {"prompt": "hello there", "max_tokens": 2})
            answers = []
            for body in bodies:
                start = time.perf_counter()
                answers.append(ask(url, "/v1/completions", body)["choices"])
                waits.append(time.perf_counter() - start)
            said.append(answers)
    return waits[0], waits[1:count], said[0] == said[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="words of a prompt, and tokens of an answer")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    with strata_server(options.model, options.threads) as ours, llama_server(options.model, options.threads) as theirs:
        found = throughput({"strata": ours, "llama.cpp": theirs}, options.rounds, options.requests, options.tokens)
    rates = {name: statistics.median(r["tokens_per_second"] for r in rows) for name, rows in found.items()}
    firsts = {name: statistics.median(r["first_token"]["p95"] for r in rows) for name, rows in found.items()}
    print(f"{rates['strata'] / rates['llama.cpp']:.2f} times the tokens a second, first token p95 in "
          f"{firsts['strata'] / firsts['llama.cpp']:.2f} of the time (medians of {options.rounds} rounds)")  # fmt: skip
    first, later, same = shared_prefix(options.model, options.threads, 1000, 4)
    print(f"a prompt of 1,000 words: first token after {first:.2f} s, with another ending after "
          f"{statistics.median(later):.3f} s ({statistics.median(later) / first:.1%}), "
          f"{'the same' if same else 'OTHER'} bits as without a prefix cache")  # fmt: skip
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
