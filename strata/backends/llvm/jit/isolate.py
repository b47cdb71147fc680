"""Modules on which LLVM may crash, compiled in a separate process.

LLVM ends the process when it cannot select an instruction. What the emitters write for the processors that they know
never does that; an intrinsic that the target lacks, inline assembly or code for another kind of processor may.
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from strata.backends.llvm.jit.worker_process import Child, Died
from strata.core import Target, new_lock
from strata.errors import CompileError

SECONDS = 120  # for one module
TRIES = 3  # to start a process
_INTRINSIC = re.compile(r"@llvm\.(\w+)([\w.]*)")
_WORDS = {word: re.compile(rf"\b{word}\b") for word in ("asm", "vscale")}  # assembly, vectors of unknown length
# instructions of one kind of processor that the emitters use, and the features that have them
KNOWN: Final[dict[str, tuple[str, ...]]] = {
    "x86.sse2.pause": (),
    "x86.sse2.pmadd.wd": (),
    "x86.avx2.pmadd.wd": ("avx2",),
    "x86.avx512.pmaddw.d.512": ("avx512bw",),
    "x86.vgf2p8affineqb.512": ("gfni", "avx512f"),
    "x86.avx512.permvar.sf.512": ("avx512f",),
    "x86.avx512.vpermi2var.pd.512": ("avx512f",),
    "x86.avx512.mask.range.ps.512": ("avx512dq",),
    "x86.avx512.mask.range.pd.512": ("avx512dq",),
    "x86.avx512.min.ps.512": ("avx512f",),
    "x86.avx512.rcp14.ps.512": ("avx512f",),
    "x86.avx512.rcp14.pd.512": ("avx512f",),
    "x86.avx512.rsqrt14.ps.512": ("avx512f",),
    "x86.avx512.vpdpbusd.256": ("avx512vnni", "avx512vl"),
    "x86.avx512.vpdpbusd.512": ("avx512vnni",),
    **{
        f"x86.avx512.mask.{name}.{kind}.{width}": ("avx512f", "avx512vl")
        for name in ("scalef", "getexp", "getmant")
        for kind in ("ps", "pd")
        for width in (128, 256, 512)
    },
    "x86.avx512.vpdpwssd.512": ("avx512vnni",),
    "x86.avx512bf16.mask.cvtneps2bf16.128": ("avx512bf16", "avx512vl"),
    "x86.avx512bf16.cvtneps2bf16.256": ("avx512bf16", "avx512vl"),
    "x86.avx512bf16.cvtneps2bf16.512": ("avx512bf16",),
    "x86.avx512bf16.dpbf16ps.512": ("avx512bf16",),
    "x86.avx512.mask.cvtpd2ps.512": ("avx512f",),
    "x86.avx512.mask.fixupimm.ps.512": ("avx512f",),
    "aarch64.hint": ("neon",),
}
# the other families are plain arithmetic and memory, which LLVM splits until the target has it
_UNUSUAL: Final = frozenset((
    "aarch64", "amdgcn", "amdgpu", "arm", "asan", "bpf", "call", "coro", "eh", "experimental", "gc", "gcread", "gcroot",
    "gcwrite", "get", "hexagon", "instrprof", "loongarch", "matrix", "mips", "nvvm", "objc", "ppc", "preserve",
    "ptrauth", "r600", "read_register", "riscv", "s390", "spv", "stackrestore", "stacksave", "swift", "threadlocal",
    "ve", "vp", "wasm", "write_register", "x86", "xcore",
))  # fmt: skip


def is_unusual(text: str, target: Target) -> bool:
    """Whether LLVM may fail to find instructions for a module."""
    if target.triple != Target.host().triple:
        return True
    if any(word in text and pattern.search(text) for word, pattern in _WORDS.items()):
        return True
    for family, rest in set(_INTRINSIC.findall(text)):
        if family in _UNUSUAL:
            needs = KNOWN.get(f"{family}{rest}")
            if needs is None or not all(target.has(feature) for feature in needs):
                return True
    return False


def isolated_object(text: str, target: Target, level: int) -> bytes:
    """The object file of a module, made in another process; CompileError where LLVM gave up."""
    for _ in range(TRIES):
        try:
            is_good, made = _answer(text, target, level)
        except (OSError, subprocess.SubprocessError) as error:
            raise CompileError(f"no process could be started to compile unusual code: {error}", code="C122") from None
        except Died as death:
            if death.said or death.was_ready:
                raise CompileError(f"LLVM has no code for {target.name}: {_reason(death.said)}", code="C122") from None
            continue  # it was stopped before it began, as by a system that was asleep
        if is_good:
            return made
        raise CompileError(f"LLVM has no code for {target.name}: {_reason(made)}", code="C122")
    raise CompileError(f"no process that compiles unusual code was ready, {TRIES} times", code="C122")


class _Kept:
    """A process that compiles one module after the other, as long as it lives."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.child: Child | None = None

    def close(self) -> None:
        if self.child is not None:
            self.child.close()
            self.child = None


_kept: ContextVar[_Kept | None] = ContextVar("strata_kept_process", default=None)


@contextmanager
def one_process() -> Iterator[None]:
    """Modules compiled inside share a process: most of the time of a single one goes into its start."""
    kept = _Kept()
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)
        with kept.lock:
            kept.close()


def _answer(text: str, target: Target, level: int) -> tuple[bool, bytes]:
    kept = _kept.get() or _Kept()
    with kept.lock:
        child = kept.child = kept.child or Child(is_heard=True)
        limit = threading.Timer(SECONDS, child.process.kill)
        limit.start()
        is_alive = False
        try:
            answer = child.object_code(text, target, level)
            is_alive = kept is _kept.get()
            return answer
        finally:
            limit.cancel()
            if not is_alive:
                kept.close()


def _reason(output: bytes) -> str:
    """The line that says what is wrong."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line.lower()]
    return (telling or lines or ["it said nothing"])[0].removeprefix("LLVM ERROR: ")
