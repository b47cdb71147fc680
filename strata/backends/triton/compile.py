"""Triton text to binaries. The only module that uses the `triton` package (3.6 and later).

Nothing of it needs a GPU or torch. Binaries are kept in strata's own store, by text, options, target and version.
"""

from __future__ import annotations

import importlib.util
import json
import linecache
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from strata.backends.triton.render import TritonProgram
from strata.backends.triton.target import Gpu
from strata.cache import default_store, digest
from strata.core import here
from strata.errors import CompileError, DeviceError

VERSION = "triton-binary-1"  # of how binaries are made and called
INSTALL = "pip install 'strata[cuda]'"


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code for a GPU, and what a launch has to know of it."""

    code: bytes
    entry: str
    threads: int  # of a program
    shared_bytes: int
    arguments: int  # that the code takes: those of the text, then pointers to memory that Triton may want, or null

    def pack(self) -> bytes:
        head = json.dumps([self.entry, self.threads, self.shared_bytes, self.arguments]).encode()
        return len(head).to_bytes(4, "little") + head + self.code

    @staticmethod
    def unpack(data: bytes) -> Binary:
        size = int.from_bytes(data[:4], "little")
        entry, threads, shared, arguments = json.loads(data[4 : 4 + size])
        return Binary(data[4 + size :], entry, threads, shared, arguments)


def is_installed() -> bool:
    """Whether there is a `triton` package; it is not imported for the answer."""
    return importlib.util.find_spec("triton") is not None


def triton_version() -> str:
    return str(_triton().__version__)


def is_interpreting() -> bool:
    """Whether functions are interpreted in this process: Triton reads TRITON_INTERPRET=1 when it is imported."""
    _triton()
    import triton.language as tl

    return type(tl.sum).__name__ == "InterpretedFunction"


def compile_program(program: TritonProgram, gpu: Gpu) -> Binary:
    """The binary of a program for a GPU, from the store if it has been made before."""
    text = program.text()
    options = options_of(program, gpu)
    key = digest(VERSION, text, str(program.signature), str(options), gpu.key, triton_version())
    store = default_store()
    found = store.get(key)
    if found is not None:
        return Binary.unpack(found)
    made = binary_of(compiled(program, gpu), program, gpu)
    about = {"kind": "triton", "name": program.name, "target": gpu.key, "made by": triton_version()}
    store.put(key, made.pack(), about)
    return made


def options_of(program: TritonProgram, gpu: Gpu) -> dict[str, Any]:
    options: dict[str, Any] = {"num_warps": program.warps, "enable_fp_fusion": True}
    if gpu.kind == "cuda":
        options["num_stages"] = program.stages
    return options


def compiled(program: TritonProgram, gpu: Gpu) -> Any:
    """What Triton makes of a program: its `asm` has the text of every stage."""
    triton = _triton()
    from triton.backends.compiler import GPUTarget

    function = function_of(program.text(), program.name)
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(program.buffers))}
    source = triton.compiler.ASTSource(fn=function, signature=program.signature, constexprs={}, attrs=aligned)
    target = GPUTarget(gpu.kind, gpu.arch, gpu.warp)
    try:
        with tempfile.TemporaryDirectory(prefix="strata-triton-") as folder, _cache_folder(folder):
            return triton.compile(source, target=target, options=options_of(program, gpu))
    except Exception as error:
        message = f"Triton rejects kernel {program.name} for {gpu}: {_reason(error)}"
        raise CompileError(message, code="C120", operands=(program.function,)) from error


def binary_of(made: Any, program: TritonProgram, gpu: Gpu) -> Binary:
    code = made.asm["cubin" if gpu.kind == "cuda" else "hsaco"]
    count = len(program.signature)
    if gpu.kind == "cuda":
        entry = re.search(r"\.entry [^(]*\(([^)]*)\)", made.asm["ptx"])
        assert entry is not None, "Triton's code has an entry"
        count = entry[1].count(".param")
    if getattr(made.metadata, "global_scratch_size", 0):
        raise CompileError(f"kernel {program.name} asks for memory beside its buffers", code="C120")
    threads = int(made.metadata.num_warps) * gpu.warp
    return Binary(code, made.metadata.name, threads, int(made.metadata.shared), count)


def function_of(text: str, name: str) -> Any:
    """The function that a text defines. Triton reads its source again, so that it must be where `inspect` looks."""
    return _module(text)[name]


@cache
def _modules() -> dict[str, dict[str, Any]]:
    return {}


def _module(text: str) -> dict[str, Any]:
    key = digest(text)[:16]
    known = _modules()
    if key not in known:
        if len(known) >= 512:
            oldest = next(iter(known))
            del known[oldest]
            linecache.cache.pop(f"<strata-triton-{oldest}>", None)
        file = f"<strata-triton-{key}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        space: dict[str, Any] = {"__name__": f"strata_triton_{key}"}
        exec(compile(text, file, "exec"), space)  # noqa: S102 - a text that the renderer wrote
        known[key] = space
    return known[key]


def _reason(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).strip()


@contextmanager
def _cache_folder(folder: str) -> Iterator[None]:
    """Triton's own cache is not used: its files would be kept twice."""
    from triton import knobs

    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = folder
        knobs.compilation.disable_line_info = True  # of a text that is in no file
        yield


def _triton() -> Any:
    if not is_installed():
        message = "device 'cuda' is not available: there is no triton package"
        raise DeviceError(message, code="E101", place=here(), fix=INSTALL)
    import triton
    import triton.compiler

    return triton
