"""From LLVM IR text to machine code in this process.

Text is parsed, verified and compiled to an object file without middle-end passes: the emitters write unrolled SSA,
which those passes would only re-read. Objects hold no absolute addresses, so they can be stored and loaded by any
later process. The code generator is a large library: it is loaded when there is something to compile."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from strata.backends.llvm.jit.compile_workers import current
from strata.backends.llvm.jit.elf_loader import link
from strata.cache import default_store, digest
from strata.core import Target, new_lock
from strata.errors import CompileError, DeviceError

_LINE = re.compile(r"<string>:(\d+):(\d+): error: (.*)|:(\d+):(\d+): error: (.*)")
_counter = itertools.count()
_lock = new_lock()  # around the linker

NO_GENERATOR = "no code generator"  # a slim install runs bundles: the code in them says what made it


def _version() -> str:
    try:
        import llvmlite
    except ModuleNotFoundError:
        return NO_GENERATOR
    return f"llvmlite {llvmlite.__version__}"


VERSION = _version()  # part of the key of every stored object
HAS_GENERATOR = VERSION != NO_GENERATOR


def adopt(version: str) -> None:
    """Take code of a version as our own, where nothing here could make other code."""
    global VERSION
    VERSION = version


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MachineCode:
    """Loaded machine code. Its functions stay callable as long as this object lives."""

    object_code: bytes
    _tracker: Any
    _names: tuple[str, ...]
    key: str = ""  # of the entry in the store that it came from or went to
    head: bytes = b""  # what stands before the code in that entry
    parts: tuple[MachineCode, ...] = ()  # code that it calls
    exports: Mapping[str, MachineCode] = field(default_factory=dict)  # functions that are parts

    def address(self, name: str) -> int:
        """The address of an exported function."""
        if name in self.exports:
            return self.exports[name].address(name)
        return int(self._tracker[name])

    def addresses(self) -> dict[str, int]:
        return {name: self.address(name) for name in (*self._names, *self.exports)}


def compile_text(text: str, target: Target, *, level: int = 2) -> bytes:
    """Object code for a module; CompileError shows the line that LLVM rejects. Threads may compile at the same time."""
    if not HAS_GENERATOR:
        raise DeviceError(
            "the code generator is not installed: this install runs the code of bundles", code="E101",
            fix="pip install llvmlite",
        )  # fmt: skip
    from strata.backends.llvm.jit.isolate import is_unusual, isolated_object

    is_plain = not is_unusual(text, target)
    makers = current() if is_plain else None
    if makers is not None:
        from strata.backends.llvm.jit.worker_process import Died

        try:
            is_good, made = makers.object_code(text, target, level)
        except Died as death:
            if death.was_ready:  # it may have been this module
                return isolated_object(text, target, level)
        else:
            if not is_good:
                raise _describe(text, made.decode(errors="replace"))
            return made
    from strata.backends.llvm.jit.generator import Rejected, check, object_code

    try:
        if is_plain:
            return object_code(text, target, level)
        check(text)
    except Rejected as error:
        raise _describe(text, str(error)) from None
    return isolated_object(text, target, level)


def assembly(text: str, target: Target, *, level: int = 2) -> str:
    """The assembly of a module, to read."""
    from llvmlite import binding

    from strata.backends.llvm.jit.generator import machine_for

    module = binding.parse_assembly(text)
    return str(machine_for(target, level).emit_assembly(module))


def load(
    object_code: bytes, names: Sequence[str], key: str = "", parts: Mapping[str, MachineCode] | None = None
) -> MachineCode:
    """Links object code into the process and exports the named functions. `parts` are code that it calls, by name."""
    called = {name: part.address(name) for name, part in (parts or {}).items()}
    kept = tuple((parts or {}).values())
    if _elsewhere.get() and machine_of_object(object_code) not in ("", Target.host().triple.partition("-")[0]):
        return MachineCode(object_code, dict.fromkeys(names, 0), tuple(names), key, parts=kept)
    linked = link(object_code, names, called)
    if linked is not None:
        return MachineCode(object_code, linked, tuple(names), key, parts=kept)
    from llvmlite import binding

    with _lock:
        builder = binding.JITLibraryBuilder().add_object_img(object_code).add_current_process()
        for name, address in called.items():
            builder = builder.import_symbol(name, address)
        for name in names:
            builder = builder.export_symbol(name)
        try:
            tracker = builder.link(_engine(), f"strata{next(_counter)}")
        except RuntimeError as error:
            raise CompileError(f"object code cannot be linked: {error}", code="C121") from None
    return MachineCode(object_code, tracker, tuple(names), key, parts=kept)


def compile_and_load(text: str, names: Sequence[str], target: Target | None = None, *, level: int = 2) -> MachineCode:
    return load(compile_text(text, target or Target.host(), level=level), names)


# ---------------------------------------------------------------------------------------------------------- the store

_record: ContextVar[dict[str, bytes] | None] = ContextVar("strata_code_record", default=None)
_bundled: ContextVar[Mapping[str, bytes] | None] = ContextVar("strata_bundled_code", default=None)


def stored(key: str) -> bytes | None:
    """Machine code by its key, from the bundle that is being loaded or from the store."""
    entries = _bundled.get()
    return entries[key] if entries is not None and key in entries else default_store().get(key)


def is_bundled() -> bool:
    """Whether a bundle is being loaded, so that no code may be made of what its plan says."""
    return _bundled.get() is not None


def made(key: str, make: Callable[[], bytes], about: Mapping[str, Any]) -> bytes:
    """Make an entry once: other processes that want it meanwhile wait for it."""
    store = default_store()
    with store.making(key):
        data = store.get(key)
        if data is None:
            data = make()
            store.put(key, data, about)
    return data


_texts: dict[str, MachineCode] = {}  # by key; they stay loaded, since addresses in them are kept without them


def stored_text(text: str, names: Sequence[str], target: Target) -> MachineCode:
    """Code of a text that is fixed by our version, through the store; loaded once, whichever thread asks first."""
    key = digest(text, target.key, VERSION)
    code = _texts.get(key)
    if code is None:
        data = stored(key)
        if data is None:
            about = {"kind": "text", "target": target.key, "made by": VERSION}
            data = made(key, lambda: compile_text(text, target), about)
        code = _texts.setdefault(key, load(data, names, key))
    note(code)
    return code


def note(code: MachineCode) -> None:
    """Tell a recording about code that is in use."""
    record = _record.get()
    if record is not None:
        record[code.key] = code.head + code.object_code
        for part in code.parts:
            note(part)


@contextmanager
def recording() -> Iterator[dict[str, bytes]]:
    """Collects the machine code that executables made inside use, by key."""
    record: dict[str, bytes] = {}
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


_elsewhere: ContextVar[bool] = ContextVar("strata_code_elsewhere", default=False)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Code for another kind of processor is made inside, to be kept and not loaded: its functions have no address."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


_MACHINES = {  # where the three kinds of object files say what they are for
    (b"\x7fELF", 18, b"\x3e\x00"): "x86_64", (b"\x7fELF", 18, b"\xb7\x00"): "aarch64",
    (b"\xcf\xfa\xed\xfe", 4, b"\x07\x00\x00\x01"): "x86_64", (b"\xcf\xfa\xed\xfe", 4, b"\x0c\x00\x00\x01"): "aarch64",
    (b"", 0, b"\x64\x86"): "x86_64", (b"", 0, b"\x64\xaa"): "aarch64",
}  # fmt: skip


def machine_of_object(data: bytes) -> str:
    """The kind of processor that object code is for; nothing where it is not known."""
    for (magic, at, mark), machine in _MACHINES.items():
        if data.startswith(magic) and data[at : at + len(mark)] == mark:
            return machine
    return ""


@contextmanager
def bundled(entries: Mapping[str, bytes]) -> Iterator[None]:
    """Machine code that executables made inside find before the store."""
    token = _bundled.set(entries)
    try:
        yield
    finally:
        _bundled.reset(token)


@cache
def _engine() -> Any:
    from llvmlite import binding

    from strata.backends.llvm.jit.generator import machine_for

    host = Target.host()
    # the older linker puts code and constants of an object anywhere, which can be further apart than ARM code reaches
    engine = binding.create_lljit_compiler(machine_for(host, 2), use_jit_link=host.has("neon"))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))  # outlives all code, whatever the order of a shutdown is
    return engine


def _describe(text: str, message: str) -> CompileError:
    """Puts the rejected line under LLVM's message."""
    found = _LINE.search(message)
    if not found:
        return CompileError(f"LLVM rejects the generated module: {message.strip()}", code="C120")
    number = int(found[1] or found[4])
    reason = found[3] or found[6]
    lines = text.splitlines()
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    return CompileError(f"LLVM rejects line {number} of the generated module: {reason}", code="C120", operands=(line,))
