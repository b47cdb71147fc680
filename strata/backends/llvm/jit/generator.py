"""LLVM's code generator, called from several threads at once.

llvmlite holds one lock around every call. LLVM itself needs none as long as a context and a target machine serve one
thread at a time, so the few functions that turn text into an object are called here directly. Short ones keep Python's
own lock: to take it again could mean to wait for another thread's turn of Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite.binding import ffi

from strata.core import Target
from strata.errors import CompileError

_Message = ctypes.c_char_p
_Handle = ctypes.c_void_p
_free: dict[tuple[str, int], list[llvm.TargetMachine]] = {}  # machines that no thread uses


class Rejected(Exception):  # noqa: N818 - becomes a CompileError with the line that it is about
    """LLVM's message about a module that is not well formed."""


def object_code(text: str, target: Target, level: int) -> bytes:
    """The object file of a module; Rejected where it is not well formed."""
    with _parsed(text) as module:
        return _emitted(_functions(), module, target, level)


def check(text: str) -> None:
    """Rejected where a module is not well formed."""
    with _parsed(text):
        pass


@contextmanager
def _parsed(text: str) -> Iterator[Any]:
    """A module in its own context."""
    call = _functions()
    message = _Message()
    context = call.create_context()
    module = call.parse(context, text.encode(), ctypes.byref(message))
    try:
        if message.value or call.verify(module, ctypes.byref(message)):
            raise Rejected((message.value or b"the module is not well formed").decode(errors="replace"))
        yield module
    finally:
        if module:
            call.dispose_module(module)
        call.dispose_context(context)
        if message.value is not None:
            call.dispose_message(message)


def _emitted(call: _Functions, module: Any, target: Target, level: int) -> bytes:
    key = (f"{target.triple} {target.cpu} {target.feature_text}", level)
    machines = _free.setdefault(key, [])
    try:
        machine = machines.pop()  # a list: popping is atomic
    except IndexError:
        machine = machine_for(target, level)
    message = _Message()
    memory = call.emit(ctypes.cast(machine._ptr, _Handle), module, 1, ctypes.byref(message))
    machines.append(machine)
    if not memory:
        raise Rejected((message.value or b"no code could be made").decode(errors="replace"))
    try:
        return ctypes.string_at(call.start(memory), call.size(memory))
    finally:
        call.dispose_memory(memory)


def machine_for(target: Target, level: int) -> llvm.TargetMachine:
    """A code generator for a target, for one thread."""
    initialize()
    try:
        kind = llvm.Target.from_triple(target.triple)
    except RuntimeError as error:
        raise CompileError(f"LLVM has no code for {target.triple!r}: {error}", code="C122") from None
    return kind.create_target_machine(
        cpu=target.cpu, features=target.feature_text, opt=level, reloc="pic", codemodel="small", jit=False
    )


@cache
def initialize() -> None:
    """All that LLVM must be told once."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()


class _Functions:
    """The functions of llvmlite's library that are used here, with their types."""

    def __init__(self) -> None:
        initialize()
        long, short = ctypes.CDLL(ffi.lib._name), ctypes.PyDLL(ffi.lib._name)
        text = ctypes.POINTER(_Message)
        self.create_context = _typed(short.LLVMPY_ContextCreate, _Handle)
        self.dispose_context = _typed(long.LLVMPY_ContextDispose, None, _Handle)
        self.parse = _typed(long.LLVMPY_ParseAssembly, _Handle, _Handle, ctypes.c_char_p, text)
        self.verify = _typed(short.LLVMPY_VerifyModule, ctypes.c_int, _Handle, text)
        self.emit = _typed(long.LLVMPY_TargetMachineEmitToMemory, _Handle, _Handle, _Handle, ctypes.c_int, text)
        self.start = _typed(short.LLVMPY_GetBufferStart, _Handle, _Handle)
        self.size = _typed(short.LLVMPY_GetBufferSize, ctypes.c_size_t, _Handle)
        self.dispose_memory = _typed(short.LLVMPY_DisposeMemoryBuffer, None, _Handle)
        self.dispose_module = _typed(long.LLVMPY_DisposeModule, None, _Handle)
        self.dispose_message = _typed(short.LLVMPY_DisposeString, None, _Message)


def _typed(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


@cache
def _functions() -> _Functions:
    return _Functions()
