"""Triton's compiler as a program of its own: it imports nothing of strata, and `workers.py` runs several of it.

A worker reads a job from each line of its input and answers each with a line: what a binary is made of, or what went
wrong. It is ready in a tenth of the time that strata takes to be imported.
"""

from __future__ import annotations

import base64
import hashlib
import json
import linecache
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_KEPT = 512  # modules that are remembered


def compile_text(job: dict[str, Any]) -> Any:
    """What Triton makes of a program: its `asm` has the text of every stage."""
    import triton
    import triton.compiler
    from triton.backends.compiler import GPUTarget

    text, name, kind = job["text"], job["name"], job["kind"]
    function = function_of(waiting(text, name) if job["overlaps"] else text, name)
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(job["aligned"])}
    form = triton.compiler.ASTSource
    if function.is_gluon():
        from triton.experimental.gluon import _runtime

        form = _runtime.GluonASTSource
    source = form(fn=function, signature=job["signature"], constexprs={}, attrs=aligned)
    with tempfile.TemporaryDirectory(prefix="strata-triton-") as folder, _cache_folder(folder):
        return triton.compile(source, target=GPUTarget(kind, job["arch"], job["warp"]), options=job["options"])


def parts_of(made: Any, job: dict[str, Any]) -> list[Any]:
    """Code, entry, threads, bytes of shared memory, arguments of the code, bytes of scratch for each program."""
    count = len(job["signature"])
    if job["kind"] == "cuda":
        entry = re.search(r"\.entry [^(]*\(([^)]*)\)", made.asm["ptx"])
        assert entry is not None, "Triton's code has an entry"
        count = entry[1].count(".param")
    code = made.asm["cubin" if job["kind"] == "cuda" else "hsaco"]
    threads = int(made.metadata.num_warps) * job["warp"]
    scratch = int(getattr(made.metadata, "global_scratch_size", 0) or 0)
    return [code, made.metadata.name, threads, int(made.metadata.shared), count, scratch]


def waiting(text: str, name: str) -> str:
    """A program that waits for the launch before it before it does anything, and lets the next one be brought up."""
    text = text.replace("import triton\n", "import triton\nfrom triton.language.extra import cuda\n", 1)
    begin = "    cuda.gdc_wait()\n    cuda.gdc_launch_dependents()\n"
    return re.sub(rf"(?m)^(def {name}\(.*\):\n)", lambda found: found[1] + begin, text, count=1)


def function_of(text: str, name: str) -> Any:
    """The function that a text defines. Triton reads its source again, so that it must be where `inspect` looks."""
    return _module(text)[name]


def reason(error: BaseException) -> str:
    """The last line of what Triton says."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).strip()


@cache
def _modules() -> dict[str, dict[str, Any]]:
    return {}


def _module(text: str) -> dict[str, Any]:
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    known = _modules()
    if key not in known:
        if len(known) >= _KEPT:
            oldest = next(iter(known))
            del known[oldest]
            linecache.cache.pop(f"<strata-triton-{oldest}>", None)
        file = f"<strata-triton-{key}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        space: dict[str, Any] = {"__name__": f"strata_triton_{key}"}
        exec(compile(text, file, "exec"), space)  # noqa: S102 - a text that the renderer wrote
        known[key] = space
    return known[key]


@contextmanager
def _cache_folder(folder: str) -> Iterator[None]:
    """Triton's own cache is not used: its files would be kept twice."""
    from triton import knobs

    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = folder
        knobs.compilation.disable_line_info = True  # of a text that is in no file
        yield


def main() -> None:
    """Answer jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what Triton and its libraries print is no answer
    for line in sys.stdin:
        job = json.loads(line)
        try:
            code, *rest = parts_of(compile_text(job), job)
            answer: list[Any] = [base64.b64encode(code).decode(), *rest]
        except Exception as error:  # noqa: BLE001 - whatever Triton raises, the next job may be fine
            answer = [reason(error)]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
