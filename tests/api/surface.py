"""The public surface as callables, and arguments for them: right ones by annotation and name, and wrong ones.

`callables()` is everything that a user can call: what `strata.__all__` and the public modules name, and the methods of
their classes. `calls(target)` is one call with arguments that fit, and then the same call with each argument replaced
by everything that may be wrong about it.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import signal
import sys
import tempfile
import types
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from strata.errors import StrataError
from strata.mir import METHODS

MODULES = (
    "cache", "config", "distributed", "hir", "io", "io.onnx", "io.stablehlo", "models", "nn", "nn.initial", "nn.optim",
    "ort", "passes", "runtime", "sentence_transformers", "serving", "tensor.random", "tensor.xp", "tensor.xp.linalg",
    "tensor.xp.fft", "testing", "transforms",
)  # fmt: skip


class Odd:
    """A class that can be called with anything, and is nothing that anybody asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


WRONG: dict[str, Any] = {
    "None": None, "object": object(), "text": "zork", "empty text": "", "bytes": b"zork", "list": [1, "a"],
    "empty list": [], "dict": {"zork": 1}, "empty dict": {}, "tuple": (1, 2, 3, 4, 5), "nan": float("nan"),
    "inf": float("inf"), "half": 2.5, "minus one": -1, "huge": 1 << 70, "zero": 0, "flag": True, "complex": 1j,
    "class": Odd, "function": lambda *args, **kwargs: None, "object array": np.array([None, "a"], object),
    "array": np.ones((2, 3)), "NumPy integer": np.int64(2), "NumPy float": np.float32(1.5), "set": {1, 2},
    "iterator": "an iterator", "path": Path("no/such/file"), "slice": slice(1, 2),
}  # fmt: skip
TOO_HOT = {
    "st.Tensor",
    "st.Tensor.of",
    "st.Value",
    "st.Value.same_as",
    "config.config",
    "st.Graph.nodes",
    "st.Graph.symbols",
    "st.TensorType.symbols",
}  # Python tells what does not fit their signature
# for callers who have checked
ON_ARRAYS = re.compile(r"CompiledGraph\.(run_(ready|resident)|takes_over|sized)$|Tensor\.results$|take_over$")
NO_WAY_BACK = re.compile(  # calls that wait for others, run for ever or work on this very process
    r"serving\.(Server|WorkerPool|ask|replay|Service)|distributed\.(connect|run_members|SocketTransport|Thread|Group|Transport|local)"
    r"|ort\.(install|uninstall|set_default_logger)|testing\.|register_backend|passes\.register"
)


@dataclass(frozen=True)
class Target:
    """One public callable: how it is reached, and what makes it, with the object of a method made anew."""

    name: str
    make: Callable[[], Callable[..., Any]]
    signature: inspect.Signature


def graph() -> st.Graph:
    g = st.Graph("g")
    x = g.input("x", (st.sym("batch", 1, 8), 4))
    g.outputs(x @ g.param("w", (4, 2)))
    return g


def module() -> Any:
    m = st.hir.Module("f")
    x = m.input("x", (st.sym("batch", 1, 8), 4), "f32")
    m.outputs(m.linear(x, m.param("w", (4, 4), "f32")))
    return m


def compiled() -> st.CompiledGraph:
    made = st.Session("reference").compile(graph())
    made.set_param("w", np.ones((4, 2), "f4"))
    return made


def ort_session() -> Any:
    file = st.onnx.export(lambda x: x * 2.0, None, np.ones((2, 3), "f4"))
    return st.ort.InferenceSession(file.SerializeToString())


def first_of(*args: Any) -> Any:
    return args[0] if args else st.ones((2,))


BASES: dict[str, Callable[[], Any]] = {  # an object of each class whose constructor needs more than its signature says
    "Graph": graph, "Module": module, "CompiledGraph": compiled, "Session": lambda: st.Session("reference"),
    "Device": lambda: st.Device("reference"), "CompilePipeline": lambda: st.CompilePipeline("reference"),
    "CompileResult": lambda: st.CompilePipeline("reference").compile(graph()), "Tensor": lambda: st.ones((2, 3)),
    "Value": lambda: st.Graph("v").input("x", (2, 3)), "Plan": lambda: st.ones((2, 3)).prepare(),
    "Variable": lambda: st.Variable("N", 1, 64), "CompileCache": lambda: st.CompileCache("reference", 4),
    "BucketedCompileCache": lambda: st.BucketedCompileCache("reference", [range(1, 5), range(5, 9)]),
    "DynamicDimCompileCache": lambda: st.DynamicDimCompileCache("reference", 4),
    "ModelCompilePipeline": lambda: st.ModelCompilePipeline("reference"), "AotCache": lambda: st.AotCache("aot"),
    "ModelVariant": lambda: st.ModelVariant(2, 4), "ModelComponent": lambda: st.ModelComponent(st.ModelVariant(2, 4)),
    "TensorType": lambda: st.TensorType(st.f32, (2, 3)), "DType": lambda: st.f32,
    "Target": lambda: st.Target.named("baseline"), "Config": st.Config,
    "CompileOptions": st.CompileOptions, "Jitted": lambda: st.jit(lambda x: x + 1.0),
    "DiskStore": lambda: st.cache.DiskStore(Path("store"), 1 << 20), "Optimizer": lambda: st.optim.SGD(0.1),
    "Explanation": lambda: compiled().explain(), "MemoryReport": lambda: compiled().memory,
    "SGD": lambda: st.optim.SGD(0.1), "Adam": lambda: st.optim.Adam(0.1), "AdamW": lambda: st.optim.AdamW(0.1),
    "Lion": lambda: st.optim.Lion(0.1), "Linear": lambda: st.nn.Linear(3, 2),
    "Sampler": st.models.Sampler, "InferenceSession": ort_session, "IOBinding": lambda: ort_session().io_binding(),
    "SessionOptions": st.ort.SessionOptions, "RunOptions": st.ort.RunOptions,
    "OrtValue": lambda: st.ort.OrtValue.ortvalue_from_numpy(np.ones((2, 3), "f4")),
}  # fmt: skip
BY_KIND: dict[str, Callable[[], Any]] = {  # what fits, by a word in an annotation; the first that is in it
    "CompileOptions": st.CompileOptions, "CompiledGraph": compiled, "CompileResult": BASES["CompileResult"],
    "ModelComponent": BASES["ModelComponent"], "ModelVariant": BASES["ModelVariant"], "Graph": graph, "Module": module,
    "Callable": lambda: lambda *args, **kwargs: None, "Build": lambda: graph, "Mapping": dict, "dict": dict,
    "str": lambda: "x", "PathLike": lambda: "file", "Path": lambda: Path("file"), "Tensor": lambda: st.ones((2, 3)),
    "Value": BASES["Value"], "ndarray": lambda: np.ones((2, 3), "f4"), "bool": lambda: True,
    "Sequence": lambda: (0,), "tuple": lambda: (1, 2), "int": lambda: 1, "float": lambda: 0.5, "Dim": lambda: 2,
}  # fmt: skip
BY_NAME: dict[str, Callable[[], Any]] = {
    "device": lambda: "reference", "dtype": lambda: "f32", "shape": lambda: (2, 3), "axis": lambda: 0,
    "key": lambda: 2, "program": graph, "source": graph, "model": graph, "params": dict, "wrt": lambda: ["w"],
    "path": lambda: "file", "fn": lambda: first_of, "f": lambda: first_of,
    "feeds": lambda: {"x": np.ones((2, 4), "f4")}, "precision": lambda: None, "passes": lambda: None,
}  # fmt: skip


def fitting(p: inspect.Parameter) -> Any:
    """An argument that a parameter may well take."""
    if p.name in BY_NAME:
        return BY_NAME[p.name]()
    said = p.annotation if isinstance(p.annotation, str) else getattr(p.annotation, "__name__", "")
    for word, make in BY_KIND.items():
        if re.search(rf"\b{word}\b", said):
            return make()
    return st.ones((2, 3))


def callables() -> Iterator[Target]:
    """Every public callable, once."""
    for target in _all():
        if not ON_ARRAYS.search(target.name):
            yield target


def _all() -> Iterator[Target]:
    seen: set[int] = set()
    for prefix, name, value in _names():
        if id(value) in seen or NO_WAY_BACK.search(f"{prefix}.{name}"):
            continue
        seen.add(id(value))
        yield from _targets(f"{prefix}.{name}", value)
    for name in sorted(METHODS):
        for kind, base in (("Tensor", BASES["Tensor"]), ("Value", BASES["Value"])):
            yield Target(f"{kind}.{name}", partial(_method, base, name), _without_self(METHODS[name]))
        yield Target(f"st.{name}", partial(getattr, st, name), inspect.signature(METHODS[name]))


def _names() -> Iterator[tuple[str, str, Any]]:
    for name in st.__all__:
        value = getattr(st, name)
        if not isinstance(value, types.ModuleType) or callable(value):
            yield "st", name, value
    for module_name in MODULES:
        found: Any = st
        for part in module_name.split("."):
            found = getattr(found, part)
        names = getattr(found, "__all__", None) or [n for n in dir(found) if not n.startswith("_")]
        for name in names:
            value = getattr(found, name)
            home = str(getattr(value, "__module__", ""))
            if not isinstance(value, types.ModuleType) and home.startswith((f"strata.{module_name}", "strata.ops.")):
                yield module_name, name, value


def _targets(name: str, value: Any) -> Iterator[Target]:
    if not inspect.isclass(value):
        if callable(value) and type(value).__name__ != "DType":
            yield Target(name, lambda: value, inspect.signature(value))
        return
    if issubclass(value, BaseException) or type(value).__name__ == "EnumType":
        return
    if value.__init__ is not object.__init__:
        yield Target(name, lambda: value, inspect.signature(value))
    for member, fn in inspect.getmembers(value):
        if member.startswith("_") and member not in ("__call__", "__contains__"):
            continue
        static = inspect.getattr_static(value, member)
        if inspect.isbuiltin(fn):
            continue
        if isinstance(static, (staticmethod, classmethod)):
            yield Target(f"{name}.{member}", partial(getattr, value, member), inspect.signature(fn))
        elif isinstance(static, types.FunctionType) and value.__name__ in BASES and name != "nn.Module":
            yield Target(f"{name}.{member}", partial(_method, BASES[value.__name__], member), _without_self(fn))


def _method(base: Callable[[], Any], name: str) -> Any:
    return getattr(base(), name)


def _without_self(fn: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(fn)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def calls(target: Target) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What is wrong, and the arguments of a call that is wrong in that way; the first call is meant to be right."""
    parameters = [p for p in target.signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p for p in parameters if p.default is p.empty]

    def call(changed: str | None = None, value: Any = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = [], {}
        for p in parameters:
            given = value if p.name == changed else fitting(p) if p in needed else None
            if p.name != changed and p not in needed:
                continue
            if p.kind is p.POSITIONAL_ONLY or (p in needed and p.kind is p.POSITIONAL_OR_KEYWORD):
                args.append(given)
            else:
                kwargs[p.name] = given
        return tuple(args), kwargs

    right = call()
    yield "as it is meant", *right
    for p in parameters:
        for kind, value in WRONG.items():
            if kind == "huge" and p.name in ("repeat", "repeats", "num_layers"):
                continue  # what takes that long is what was asked for
            given = iter(()) if kind == "iterator" else value
            yield f"{p.name} is {kind}", *call(p.name, given)
    if needed:
        yield "nothing given", (), {}
    yield "an unknown name", right[0], {**right[1], "zork": 1}
    named = [p for p in parameters if p.kind is not p.POSITIONAL_ONLY]
    if named:
        yield "a misspelt name", right[0], {**right[1], f"{named[-1].name}z": 1}
    yield "much too many", (*right[0], *[1] * 20), right[1]


MISFITS = ("nothing given", "an unknown name", "a misspelt name", "much too many")


class Stuck(Exception):  # noqa: N818 - not an error of the package
    """A call that goes on for longer than a wrong call may."""


SECONDS = 60.0  # a call that goes on, not a slow machine
THINNED = 5  # of the calls in the usual run, one in so many


def wrong_answers(target: Target, *, every: bool = True) -> list[str]:
    """What a public callable answers to wrong calls that is not a success, nor an error that tells the caller."""
    told: list[str] = []
    for i, (what, args, kwargs) in enumerate(calls(target)):
        if not every and (zlib.crc32(target.name.encode()) + i) % THINNED and i > 0:
            continue
        if target.name in TOO_HOT and what in MISFITS:
            continue
        answer = _answer(target.make(), args, kwargs)
        if answer:
            told.append(f"{target.name}, {what}: {answer}")
    return told


def _answer(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What is wrong with the answer of one call."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            with _limited():
                fn(*args, **kwargs)
        except StrataError as error:
            if not isinstance(error, _CLASSIC):
                return f"{type(error).__name__} is not a class that Python has for it"
            if f"{Path(__file__).name}:" not in str(error):
                return f"no line of the caller in {error!s}"
        except Exception as error:  # noqa: BLE001 - whatever else comes out is what is looked for
            return f"{type(error).__name__}: {error}"
    return None


_CLASSIC = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, MemoryError, OSError)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Python's own signal ends a call that goes on; where there is none, it goes on."""

    def stop(*_: object) -> None:
        raise Stuck(f"it takes longer than {SECONDS:g} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main(pattern: str = "") -> int:
    """Every call of every public callable whose name has the pattern: `python -m tests.api.surface 'nn\\.'`."""
    found = count = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        st.config.using(cache_dir=f"{folder}/cache"),
    ):
        for target in callables():
            if re.search(pattern, target.name):
                count += 1
                for told in wrong_answers(target):
                    found += 1
                    print(told)
    print(f"{count} callables, {found} wrong answers")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
