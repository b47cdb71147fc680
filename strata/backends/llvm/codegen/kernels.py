"""Machine code of kernels: from this process, from the disk cache, or compiled.

What makes code is a large part of this package: it is imported when there is something to make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strata.backends.base import MissingCodeError
from strata.backends.llvm.executor.thread_pool import native_code
from strata.backends.llvm.ir.overrides import NativeOp, native_op
from strata.backends.llvm.jit import jit
from strata.backends.llvm.jit.calling_convention import LoopUsage, MatmulUsage, Usage, read_usage
from strata.backends.llvm.jit.code_cache import Loader
from strata.backends.llvm.jit.compile_workers import current, many
from strata.cache import digest, version_of
from strata.config import config
from strata.core import Table, Target, available_threads
from strata.kernel import Kernel, show_kernel
from strata.lir import Lir, Step

if TYPE_CHECKING:
    from strata.backends.llvm.ir.builder import IrModule

COPY_BYTES = 256 << 10  # of one chunk


@dataclass(frozen=True, eq=False)
class LoadedKernel:
    """Machine code of one kernel, with what a program needs to call it."""

    code: jit.MachineCode
    usage: Usage

    @property
    def loops(self) -> LoopUsage | None:
        return self.usage if isinstance(self.usage, LoopUsage) else None

    @property
    def product(self) -> MatmulUsage | None:
        return self.usage if isinstance(self.usage, MatmulUsage) else None

    def address(self, name: str) -> int:
        return self.code.address(name)

    def packer(self, layout: str) -> int | None:
        """The function that packs a factor in a layout."""
        for name, product in self.product.ways if self.product is not None else ():
            if product.is_packed and product.layout == layout:
                return self.address(f"{name}_pack")
        return None


@dataclass(frozen=True, eq=False)
class Source:
    """What a piece of machine code is made of. `make` gives how it is called (of a kernel) and its module."""

    identity: Any  # equal ones have equal code in this process
    key: Callable[[], str]  # in the store
    make: Callable[[], tuple[str, IrModule]]
    functions: tuple[str, ...]  # none: its usage says which
    about: str


@dataclass(frozen=True, eq=False)
class CodePiece:
    """Loaded machine code and how it is called, of a kernel."""

    code: jit.MachineCode
    usage: Usage | None


def kernel_source(
    kernel: Kernel,
    target: Target,
    step: Step | None = None,
    *,
    kept: Iterable[str] = (),
    convolves: bool = False,
    in_loop: bool = False,
) -> Source:
    """The source of the kernel of a step; some of what it reads is kept from run to run."""
    anonymous = kernel.renamed("kernel")
    kind = "" if step is None or not step.has_slides else f"slides {config().winograd}"
    still = frozenset(kept if kernel.has_reductions else ())
    if still:
        kind += f" kept {' '.join(sorted(still))}"
    if convolves:
        kind += " convolves"
    if in_loop and kernel.has_reductions:
        kind += " loop"
    text = show_kernel(anonymous)

    def make() -> tuple[str, IrModule]:
        from strata.backends.llvm.codegen.compile_batch import emitted

        usage, module = emitted(anonymous, target, step, still, convolves, in_loop)
        return usage.to_text(), module

    return Source((text, target.key, kind), lambda: code_key(f"kernel {kind}", text, target), make, (), text)


def op_source(op: NativeOp, target: Target) -> Source:
    """The source of a hand-written op; equal keys share code."""

    def make() -> tuple[str, IrModule]:
        from strata.backends.llvm.ir.builder import IrModule

        module = IrModule(target.triple)
        op.emit(module)
        return "", module

    return Source(
        (op.key, target.key),
        lambda: code_key(" ".join(op.functions), op.key, target),
        make,
        tuple(op.functions),
        op.key,
    )


def plan_sources(lir: Lir, target: Target, *, in_loop: bool = False) -> tuple[dict[str, Source], dict[int, NativeOp]]:
    """All that a plan has to be made of: kernels by name, and hand-written ops by the number of their step."""
    steps = {s.name: s for s in reversed(lir.schedule)}
    ops = {
        at: made
        for at, step in enumerate(lir.schedule)
        if step.kernel is None and (made := native_op(step.nodes[0], target, step.views, step.bodies)) is not None
    }
    weights = lir.weights
    still = {(s.name, at) for s in lir.schedule for at, x in enumerate(s.inputs) if x in weights}
    convolving = {s.name for s in lir.schedule if s.convolves}
    kernels = {}
    for name, k in lir.kernels.items():
        kept = [b for at, b in enumerate(k.input_names) if (name, at) in still]
        kernels[name] = kernel_source(k, target, steps[name], kept=kept, convolves=name in convolving, in_loop=in_loop)
    return kernels, ops


# ------------------------------------------------------------------------------------------------- from many at a time

_loaded: Table[Any, CodePiece] = Table("code")  # by identity


def as_kernel(piece: CodePiece) -> LoadedKernel:
    assert piece.usage is not None
    return LoadedKernel(piece.code, piece.usage)


def native_pieces(sources: Sequence[Source], target: Target) -> list[CodePiece]:
    """Machine code for all sources: what is missing is made by as many threads as there are cores."""
    known = {source.identity: source for source in sources}
    pieces = _loaded.get_or_make_all(
        [source.identity for source in sources], lambda missing: _made([known[i] for i in missing], target)
    )
    for piece in pieces:
        jit.note(piece.code)
    return pieces


def _made(wanted: Sequence[Source], target: Target) -> list[CodePiece]:
    """Code of sources, from the store or compiled; what cannot be made raises."""
    keys = [source.key() for source in wanted]
    loader = Loader()
    payloads = [loader.stored(key) for key in keys]
    missing = [i for i, payload in enumerate(payloads) if payload is None]
    if missing and jit.is_bundled():
        raise MissingCodeError(wanted[missing[0]].about)
    if missing:
        from strata.backends.llvm.codegen.compile_batch import CompileBatch

        batch = CompileBatch(target)
        with many(len(missing), available_threads(config().num_threads)):
            for i, made in zip(missing, batch.run([(keys[i], wanted[i]) for i in missing]), strict=True):
                payloads[i] = made
            if current() is not None:
                native_code()  # what runs them, by the same means, and what moves results that programs hand on
                copy_code(target)
        loader.made = batch.parts
    pieces = []
    for source, key, payload in zip(wanted, keys, payloads, strict=True):
        assert payload is not None
        head, code = loader.code(key, payload)
        pieces.append(CodePiece(code, None if source.functions else read_usage(head.usage)))
    return pieces


def code_key(kind: str, text: str, target: Target) -> str:
    """The key of machine code in the store."""
    return digest(text, kind, target.key, jit.VERSION, generator_version(), config().key_fields())


def copy_code(target: Target) -> jit.MachineCode:
    """void copy(source, destination, bytes), a block of COPY_BYTES a point; returns at once where both are the same."""
    text = f"""
define void @copy(ptr %arguments, i64 %begin, i64 %end) nounwind {{
entry:
  %source = load ptr, ptr %arguments, align 8
  %p1 = getelementptr i64, ptr %arguments, i64 1
  %destination = load ptr, ptr %p1, align 8
  %p2 = getelementptr i64, ptr %arguments, i64 2
  %bytes = load i64, ptr %p2, align 8
  %same = icmp eq ptr %source, %destination
  br i1 %same, label %done, label %move
move:
  %first = mul i64 %begin, {COPY_BYTES}
  %stop = mul i64 %end, {COPY_BYTES}
  %last = call i64 @llvm.umin.i64(i64 %stop, i64 %bytes)
  %count = sub i64 %last, %first
  %from = getelementptr i8, ptr %source, i64 %first
  %to = getelementptr i8, ptr %destination, i64 %first
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %count, i1 false)
  br label %done
done:
  ret void
}}
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare i64 @llvm.umin.i64(i64, i64)
"""
    return jit.stored_text(text, ["copy"], target)


def generator_version() -> str:
    """A digest of the code that generates code: an entry of the store is never used by another version of it."""
    return version_of("kernel", "backends", "core")
