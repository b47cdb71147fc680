"""Work in fresh processes: one that has imported everything and compiled nothing forks a child for each request."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from strata.runtime import AotCache, ModelCompilePipeline, load_compiled
from tests.machines.pipelines import component, scaled


def _aot(folder: str, profile: str, seq: int, factor: int) -> Any:
    """What a pipeline gives for a component, and whether it had to build it."""
    built = []

    def build() -> Any:
        built.append(1)
        return scaled(factor)

    compiled = ModelCompilePipeline("cpu").get_or_specialize_aot(AotCache(folder), component(profile, seq), build)
    x = np.ones((1, seq), np.float32)
    return [compiled.run(x=x)[0].tolist(), bool(built)]


def _bundle(path: str, feeds: dict[str, Any]) -> Any:
    """What a bundle gives for inputs."""
    compiled = load_compiled(path)
    return [a.tolist() for a in compiled.run({n: np.array(a, np.float32) for n, a in feeds.items()})]


WORK: dict[str, Callable[..., Any]] = {"aot": _aot, "bundle": _bundle}
_server: subprocess.Popen[str] | None = None


def in_fresh_process(kind: str, **arguments: Any) -> Any:
    """Have work done by a process that has done nothing before; what it raises is raised here, as text."""
    global _server
    if _server is None or _server.poll() is not None:
        root = Path(__file__).parents[2]
        _server = subprocess.Popen(
            [sys.executable, "-m", "tests.machines.fresh"], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env={**os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip
        atexit.register(_server.kill)
    assert _server.stdin is not None
    assert _server.stdout is not None
    _server.stdin.write(json.dumps([kind, arguments]) + "\n")
    _server.stdin.flush()
    is_good, found = json.loads(_server.stdout.readline())
    assert is_good, found
    return found


def serve() -> None:
    """Answer requests, a line each, by children that end with their answer."""
    for line in sys.stdin:
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        kind, arguments = json.loads(line)
        try:
            answer = [True, WORK[kind](**arguments)]
        except BaseException as error:  # noqa: BLE001 - told to whoever asked
            answer = [False, f"{type(error).__name__}: {error}"]
        os.write(1, (json.dumps(answer) + "\n").encode())
        os._exit(0)


if __name__ == "__main__":
    serve()
