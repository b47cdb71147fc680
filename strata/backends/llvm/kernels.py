"""Machine code of kernels: from the process, from the disk store, or made, on all cores."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from strata.backends.llvm import jit
from strata.backends.llvm.builder import Module
from strata.backends.llvm.compile import Lowered, lower_phases
from strata.backends.llvm.conv_first_steps import PlanesPlan, emit_planes_kernel, find_planes, plan_planes_kernel
from strata.backends.llvm.conv_steps import (
    ConvPlan,
    emit_convolution_kernel,
    find_convolution,
    plan_convolution_kernel,
)
from strata.backends.llvm.emit import emit_kernel
from strata.backends.llvm.makers import current, many
from strata.backends.llvm.matrix import emit_matrix, find_contraction, plan_matrix
from strata.backends.llvm.overrides import NativeOp
from strata.backends.llvm.parts import Head, Loader, Split, split
from strata.backends.llvm.pool import native_code
from strata.backends.llvm.usage import Loops, Product, Usage, read_usage
from strata.cache import digest
from strata.config import config
from strata.core import Target, available_threads, new_lock
from strata.kernel import Kernel, Reduce, postorder, show_kernel
from strata.lir import Step

CODE_LIMIT = 2048  # pieces of code kept loaded in the process, least recently used dropped first
COPY_BYTES = 256 << 10  # of one chunk


@dataclass(frozen=True, eq=False)
class NativeKernel:
    """Machine code of one kernel, with what a program needs to call it."""

    code: jit.Code
    usage: Usage

    @property
    def loops(self) -> Loops | None:
        return self.usage if isinstance(self.usage, Loops) else None

    @property
    def product(self) -> Product | None:
        return self.usage if isinstance(self.usage, Product) else None

    def address(self, name: str) -> int:
        return self.code.address(name)


@dataclass(frozen=True, eq=False)
class Source:
    """What a piece of machine code is made of. `make` gives how it is called (of a kernel) and its module."""

    identity: Any  # equal ones have equal code in this process
    key: Callable[[], str]  # in the store
    make: Callable[[], tuple[str, Module]]
    functions: tuple[str, ...]  # none: its usage says which
    about: str


@dataclass(frozen=True, eq=False)
class Piece:
    """Loaded machine code and how it is called, of a kernel."""

    code: jit.Code
    usage: Usage | None


def kernel_source(kernel: Kernel, target: Target, step: Step | None = None, *, is_fresh: bool = False) -> Source:
    """The source of the kernel of a step; fresh where none of the matrices that it reads stays from run to run."""
    anonymous = replace(kernel, name="kernel")
    kind = "" if step is None or step.slides is None else f"slides {config().winograd}"
    if is_fresh and any(isinstance(e, Reduce) for e in postorder(kernel.roots)):
        kind += " fresh"
    text = cache(lambda: show_kernel(anonymous))

    def make() -> tuple[str, Module]:
        usage, module = _emitted(anonymous, target, step, is_fresh)
        return usage.to_text(), module

    return Source((anonymous, target.key, kind), lambda: code_key(f"kernel {kind}", text(), target), make, (), text())


def op_source(op: NativeOp, target: Target) -> Source:
    """The source of a hand-written op; equal keys share code."""

    def make() -> tuple[str, Module]:
        module = Module(target.triple)
        op.emit(module)
        return "", module

    return Source(
        (op.key, target.key),
        lambda: code_key(" ".join(op.functions), op.key, target),
        make,
        tuple(op.functions),
        op.key,
    )


def _emitted(kernel: Kernel, target: Target, step: Step | None, is_fresh: bool) -> tuple[Usage, Module]:
    """A kernel as a convolution, a product of matrices, or loops."""
    module = Module(target.triple)
    convolution = convolution_plan(kernel, target, step) if step is not None else None
    if convolution is not None:
        emit_convolution_kernel(module, convolution)
        return Product.of(convolution), module
    planes = planes_plan(kernel, target, step) if step is not None else None
    if planes is not None:
        emit_planes_kernel(module, planes)
        return Product.of(planes), module
    found = find_contraction(kernel) if not kernel.schedule else None
    matrix = plan_matrix(found, kernel.name, target, is_fresh=is_fresh) if found is not None else None
    if matrix is not None:
        emit_matrix(module, matrix)
        return Product.of(matrix), module
    phases, scratch = lower_phases(kernel, target)
    for lowered in phases:
        emit_kernel(module, lowered.kernel, lowered.nest, lowered.schedule, target)
    *before, last = map(_loops_of, phases)
    return replace(last, before=tuple(before), scratch=tuple((b.name, b.type.nbytes) for b in scratch)), module


def _loops_of(lowered: Lowered) -> Loops:
    kernel = lowered.kernel
    buffers = tuple(b.name for b in kernel.buffers)
    return Loops(buffers, tuple(kernel.symbols().values()), lowered.points, lowered.grain)


def convolution_plan(kernel: Kernel, target: Target, step: Step) -> ConvPlan | None:
    """The kernel as a convolution, unless it is a plain product of matrices."""
    found = find_convolution(kernel, step)
    matrix = find_contraction(kernel) if found is not None else None
    if found is None or (matrix is not None and not matrix.batch):
        return None
    return plan_convolution_kernel(found, kernel.name, target)


def planes_plan(kernel: Kernel, target: Target, step: Step) -> PlanesPlan | None:
    """The kernel as a convolution with channels first."""
    found = find_planes(kernel, step)
    return None if found is None else plan_planes_kernel(found, kernel.name, target)


# ------------------------------------------------------------------------------------------------- from many at a time

_loaded: OrderedDict[Any, Future[Piece]] = OrderedDict()  # by identity
_loaded_lock = new_lock()


def native_kernel(kernel: Kernel, target: Target, step: Step | None = None) -> NativeKernel:
    """The machine code of the kernel of a step; equal kernels are compiled once per process."""
    return as_kernel(native_pieces([kernel_source(kernel, target, step)], target)[0])


def as_kernel(piece: Piece) -> NativeKernel:
    assert piece.usage is not None
    return NativeKernel(piece.code, piece.usage)


def native_pieces(sources: Sequence[Source], target: Target) -> list[Piece]:
    """Machine code for all sources: what is missing is made by as many threads as there are cores."""
    futures: list[Future[Piece]] = []
    mine: list[tuple[Source, Future[Piece]]] = []
    with _loaded_lock:
        for source in sources:
            future = _loaded.get(source.identity)
            if future is None:
                future = _loaded[source.identity] = Future()
                mine.append((source, future))
            _loaded.move_to_end(source.identity)
            futures.append(future)
        while len(_loaded) > max(CODE_LIMIT, len(sources)):
            _loaded.popitem(last=False)
    try:
        _complete(mine, target)
    finally:
        _give_up(mine)
    pieces = [_result(source, future, target) for source, future in zip(sources, futures, strict=True)]
    for piece in pieces:
        jit.note(piece.code)
    return pieces


def _result(source: Source, future: Future[Piece], target: Target) -> Piece:
    try:
        return future.result()
    except CancelledError:  # another thread failed at something that it wanted too
        return native_pieces([source], target)[0]


def _complete(wanted: Sequence[tuple[Source, Future[Piece]]], target: Target) -> None:
    """Give futures their code; what cannot be made raises."""
    keys = [source.key() for source, _ in wanted]
    loader = Loader()
    payloads = [loader.stored(key) for key in keys]
    missing = [i for i, payload in enumerate(payloads) if payload is None]
    batch = _Batch(target)
    with many(len(missing), available_threads(config().num_threads)):
        for i, made in zip(missing, batch.run([(keys[i], wanted[i][0]) for i in missing]), strict=True):
            payloads[i] = made
        if current() is not None:
            native_code()  # what runs them, by the same means
    loader.made = batch.parts
    for (source, future), key, payload in zip(wanted, keys, payloads, strict=True):
        assert payload is not None
        head, code = loader.code(key, payload)
        future.set_result(Piece(code, None if source.functions else read_usage(head.usage)))


def _give_up(wanted: Sequence[tuple[Source, Future[Piece]]]) -> None:
    """Let whoever waits for code that could not be made try for himself."""
    for source, future in wanted:
        if not future.done():
            with _loaded_lock:
                _loaded.pop(source.identity, None)
            future.cancel()


class _Batch:
    """Code that is made at the same time. Sources that come to the same text are compiled once, and so are parts."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.parts: dict[str, bytes] = {}  # entries by key
        self._made_once: dict[str, Future[bytes]] = {}
        self._lock = new_lock()

    def run(self, wanted: Sequence[tuple[str, Source]]) -> list[bytes]:
        threads = available_threads(config().num_threads)
        if threads == 1 or len(wanted) < 2:
            return [self._made(key, source) for key, source in wanted]
        # one thread more than cores: while one waits for its turn of Python, another is inside LLVM
        with ThreadPoolExecutor(min(threads + 1, len(wanted)), "strata-compile") as pool:
            jobs = [pool.submit(copy_context().run, self._made, key, source) for key, source in wanted]
            try:
                return [job.result() for job in jobs]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _made(self, key: str, source: Source) -> bytes:
        """An entry, made or waited for, and then its parts: no lock is taken while another is held."""
        known: list[Split] = []

        def make() -> bytes:
            head, divided = self._divided(source)
            known.append(divided)
            return head.to_line() + self._object(divided.text)

        payload = jit.made(key, make, self._about("kernel", source.about))
        for name, part in Head.of(payload).parts.items():
            self.parts[part] = self._once(part, partial(self._part, name, part, source, known))
        return payload

    def _divided(self, source: Source) -> tuple[Head, Split]:
        usage, module = source.make()
        functions = source.functions or read_usage(usage).functions
        divided = split(module, functions[1:])
        own = tuple(name for name in functions if name not in divided.parts)
        exports = tuple(name for name in functions if name in divided.parts)
        return Head(usage, own, divided.keys(self._target), exports), divided

    def _part(self, name: str, key: str, source: Source, known: list[Split]) -> bytes:
        found = jit.stored(key)
        if found is not None:
            return found
        if not known:  # another process made the entry, and not yet its parts
            known.append(self._divided(source)[1])
        part, keys = known[0].parts[name], known[0].keys(self._target)
        head = Head("", (name,), {called: keys[called] for called in part.calls}, ()).to_line()
        return jit.made(key, lambda: head + self._object(part.text), self._about("part", name))

    def _object(self, text: str) -> bytes:
        return self._once(text, lambda: jit.compile_text(text, self._target))

    def _about(self, kind: str, text: str) -> dict[str, str]:
        return {"kind": kind, "text": text[:4000], "target": self._target.key, "made by": jit.VERSION}

    def _once(self, key: str, make: Callable[[], bytes]) -> bytes:
        """What the first one made that came with this key."""
        with self._lock:
            future = self._made_once.get(key)
            is_first = future is None
            if future is None:
                future = self._made_once[key] = Future()
        if is_first:
            try:
                future.set_result(make())
            except BaseException as error:  # noqa: BLE001 - for all that wait for it
                future.set_exception(error)
        return future.result()


def _forget_unfinished() -> None:
    """In the child of a fork no other thread is left that could finish."""
    for identity in [i for i, future in _loaded.items() if not future.done()]:
        del _loaded[identity]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_unfinished)


def code_key(kind: str, text: str, target: Target) -> str:
    """The key of machine code in the store."""
    return digest(text, kind, target.key, jit.VERSION, generator_version(), config().key_fields())


def copy_code(target: Target) -> jit.Code:
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


@cache
def generator_version() -> str:
    """A digest of the code that generates code: an entry of the store is never used by another version of it."""
    package = Path(__file__).parents[2]
    files = sorted(
        [
            *(package / "kernel").glob("*.py"),
            *(package / "backends" / "llvm").glob("*.py"),
            *(package / "core").glob("*.py"),
        ]
    )
    return digest(*(f.read_bytes() for f in files))
