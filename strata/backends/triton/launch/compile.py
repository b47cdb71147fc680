"""Triton text to binaries, by the `triton` package (3.6 and later), which needs neither a GPU nor torch for it.

Binaries are kept in strata's own store, by text, options, target and version.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from typing import Any

from strata.backends.triton.codegen.render import TritonProgram
from strata.backends.triton.launch.jobs import compile_text, parts_of, reason
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

    @property
    def data(self) -> dict[str, Any]:
        """As `jobs.py` takes it."""
        gpu = self.gpu
        return {
            "text": self.text, "name": self.name, "signature": self.signature, "aligned": self.aligned,
            "options": self.options, "kind": gpu.kind, "arch": gpu.arch, "warp": gpu.warp, "overlaps": gpu.overlaps,
        }  # fmt: skip

    def rejected(self, why: str) -> CompileError:
        message = f"Triton rejects kernel {self.name} for {self.gpu}: {why}"
        return CompileError(message, code="C120", operands=(self.text,))


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
    """What Triton makes of a job."""
    _triton()
    try:
        return compile_text(job.data)
    except Exception as error:
        raise job.rejected(reason(error)) from error


def binary_of(made: Any, job: CompileJob | TritonProgram, gpu: Gpu | None = None) -> Binary:
    if not isinstance(job, CompileJob):
        assert gpu is not None
        job = CompileJob.of(job, gpu)
    return Binary(*parts_of(made, job.data))


def _triton() -> Any:
    if not is_installed():
        message = "device 'cuda' is not available: there is no triton package"
        raise DeviceError(message, code="E101", place=here(), fix=INSTALL)
    import triton
    import triton.compiler

    return triton
