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

from strata.backends.triton.codegen.render import TritonProgram
from strata.backends.triton.target import Gpu
from strata.cache import default_store, digest
from strata.core import here
from strata.errors import CompileError, DeviceError

VERSION = "triton-binary-3"  # of how binaries are made and called
INSTALL = "pip install 'strata[cuda]'"


@dataclass(frozen=True, slots=True)
class Binary:
    """Machine code for a GPU, and what a launch has to know of it."""

    code: bytes
    entry: str
    threads: int  # of a program
    shared_bytes: int
    arguments: int  # that the code takes: those of the text, then pointers to memory that Triton may want, or null
    scratch_bytes: int = 0  # of that memory, for each program of a launch: descriptors of the copy engine

    def pack(self) -> bytes:
        numbers = [self.threads, self.shared_bytes, self.arguments, self.scratch_bytes]
        head = json.dumps([self.entry, *numbers]).encode()
        return len(head).to_bytes(4, "little") + head + self.code

    @staticmethod
    def unpack(data: bytes) -> Binary:
        size = int.from_bytes(data[:4], "little")
        return Binary(data[4 + size :], *json.loads(data[4 : 4 + size]))


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


@dataclass(frozen=True, slots=True)
class CompileJob:
    """All that the binary of a program depends on, as plain data: other processes can do it."""

    text: str
    name: str
    signature: dict[str, str]
    aligned: int  # arguments, the first so many, are addresses of whole lines
    warps: int
    stages: int
    gpu: Gpu

    @staticmethod
    def of(program: TritonProgram, gpu: Gpu) -> CompileJob:
        return CompileJob(
            program.text(), program.name, program.signature, len(program.buffers), program.warps, program.stages, gpu
        )

    @property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"num_warps": self.warps, "enable_fp_fusion": True}
        if self.gpu.kind == "cuda":
            options["num_stages"] = self.stages
        return options

    @property
    def key(self) -> str:
        """Of its binary in the store."""
        return digest(VERSION, self.text, str(self.signature), str(self.options), self.gpu.key, triton_version())

    def dump(self) -> str:
        return json.dumps([self.text, self.name, self.signature, self.aligned, self.warps, self.stages, str(self.gpu)])

    @staticmethod
    def load(line: str) -> CompileJob:
        text, name, signature, aligned, warps, stages, gpu = json.loads(line)
        return CompileJob(text, name, signature, aligned, warps, stages, Gpu.named(gpu))


def compile_program(program: TritonProgram, gpu: Gpu) -> Binary:
    """The binary of a program for a GPU, from the store if it has been made before."""
    job = CompileJob.of(program, gpu)
    found = default_store().get(job.key)
    if found is not None:
        return Binary.unpack(found)
    made = binary_of(run_job(job), job)
    keep(job, made)
    return made


def keep(job: CompileJob, binary: Binary) -> None:
    """Put a binary into the store."""
    about = {"kind": "triton", "name": job.name, "target": job.gpu.key, "made by": triton_version()}
    default_store().put(job.key, binary.pack(), about)


def compiled(program: TritonProgram, gpu: Gpu) -> Any:
    """What Triton makes of a program: its `asm` has the text of every stage."""
    return run_job(CompileJob.of(program, gpu))


def run_job(job: CompileJob) -> Any:
    triton = _triton()
    from triton.backends.compiler import GPUTarget

    gpu = job.gpu
    function = function_of(waiting(job.text, job.name) if gpu.overlaps else job.text, job.name)
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(job.aligned)}
    form = triton.compiler.ASTSource
    if function.is_gluon():
        from triton.experimental.gluon import _runtime

        form = _runtime.GluonASTSource
    source = form(fn=function, signature=job.signature, constexprs={}, attrs=aligned)
    target = GPUTarget(gpu.kind, gpu.arch, gpu.warp)
    try:
        with tempfile.TemporaryDirectory(prefix="strata-triton-") as folder, _cache_folder(folder):
            return triton.compile(source, target=target, options=job.options)
    except Exception as error:
        message = f"Triton rejects kernel {job.name} for {gpu}: {_reason(error)}"
        raise CompileError(message, code="C120", operands=(job.text,)) from error


def waiting(text: str, name: str) -> str:
    """A program that waits for the launch before it before it does anything, and lets the next one be brought up."""
    text = text.replace("import triton\n", "import triton\nfrom triton.language.extra import cuda\n", 1)
    begin = "    cuda.gdc_wait()\n    cuda.gdc_launch_dependents()\n"
    return re.sub(rf"(?m)^(def {name}\(.*\):\n)", lambda found: found[1] + begin, text, count=1)


def binary_of(made: Any, job: CompileJob | TritonProgram, gpu: Gpu | None = None) -> Binary:
    gpu = job.gpu if isinstance(job, CompileJob) else gpu
    assert gpu is not None
    code = made.asm["cubin" if gpu.kind == "cuda" else "hsaco"]
    count = len(job.signature)
    if gpu.kind == "cuda":
        entry = re.search(r"\.entry [^(]*\(([^)]*)\)", made.asm["ptx"])
        assert entry is not None, "Triton's code has an entry"
        count = entry[1].count(".param")
    threads = int(made.metadata.num_warps) * gpu.warp
    scratch = int(getattr(made.metadata, "global_scratch_size", 0) or 0)
    return Binary(code, made.metadata.name, threads, int(made.metadata.shared), count, scratch)


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
