"""Every sample with all of its arrays between pages that nobody may touch: a load or store past an end dies.

`python -m tests.backends.guard_pages [--device cpu:avx2] [--only conv] [--every 16]` goes through the catalogue, with
constant sizes, with a symbolic one and with all inputs but the first as parameters. Scratch memory is guarded too, and
filled with other bytes for each run, so that a result made from memory that nobody wrote is seen.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import mmap
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import strata.ops  # noqa: F401 - fills the registry
from strata.backends.llvm.executor import arena as arena_module
from strata.backends.llvm.executor.arena import Arena
from strata.backends.llvm.runtime import executable as executable_module
from strata.backends.llvm.runtime import packed_weights as packed_module
from strata.core import Target, sym
from strata.errors import StrataError
from strata.mir import Graph, Value, as_tuple, evaluate
from strata.runtime import CompiledGraph, CompileOptions, Session
from strata.testing.backend_suite import SampleCase, cases, compare
from strata.testing.check import build, type_of

PAGE = mmap.PAGESIZE
DEVICES = [f"cpu:{n}" for n in ("host", "avx2", "baseline") if Target.named(n).runs_on(Target.host())]
FORMS = ("constant", "symbolic", "params")
SIZES = (0, 1, 2, 3, 17)  # of a symbol, beside the sample's own and the next ones
FILLS = (0x00, 0xFF, 0x5A)  # of scratch memory and results: 0xFF bytes are NaNs

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded_bytes(size: int, at_end: bool, align: int = 1) -> np.ndarray:
    """Memory between two pages that nobody may touch: it ends where the second begins, or begins where the first ends.

    With `align`, the start is at a multiple of so many bytes, and a shorter gap before the second page remains.
    """
    pages = max(1, -(-size // PAGE))
    memory = mmap.mmap(-1, (pages + 2) * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = np.frombuffer(memory, np.uint8)
    start = int(raw.__array_interface__["data"][0])
    for edge in (start, start + (pages + 1) * PAGE):
        assert _libc.mprotect(edge, PAGE, 0) == 0
    first = PAGE + (pages * PAGE - size) // align * align if at_end else PAGE
    return raw[first : first + size]


def guarded(array: np.ndarray, at_end: bool) -> np.ndarray:
    """A copy of an array between two such pages."""
    made = guarded_bytes(array.nbytes, at_end).view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


class GuardedArena(Arena):
    """Scratch memory that ends where nobody may read, with bytes that no kernel wrote."""

    fill = FILLS[0]

    def __init__(self, size: int, alignment: int = arena_module.LINE) -> None:
        self.size = max(size, 64)
        self.bytes = guarded_bytes(self.size, at_end=True, align=alignment)
        self.bytes[...] = self.fill
        self.address = int(self.bytes.__array_interface__["data"][0])


@contextlib.contextmanager
def guarded_scratch(fill: int) -> Iterator[None]:
    """Arenas are guarded meanwhile."""
    GuardedArena.fill = fill
    modules: list[Any] = [arena_module, executable_module, packed_module]
    for module in modules:
        module.Arena = GuardedArena
    try:
        yield
    finally:
        for module in modules:
            module.Arena = Arena


def graph_of(case: SampleCase, form: str) -> Graph | None:
    """The case as a graph: sizes as numbers, one size as a symbol, or all inputs but the first as parameters."""
    op, arrays = build(case.op, case.sample), case.arrays()
    types = [type_of(a) for a in arrays]
    if form == "symbolic":
        sizes = sorted({d for t in types for d in t.static_shape if d > 1})
        for size in reversed(sizes):
            shapes = [[sym("S", 0) if d == size else d for d in t.shape] for t in types]
            with contextlib.suppress(StrataError):
                graph = Graph(f"opened{size}")
                inputs = [graph.input(f"x{i}", t.with_shape(s)) for i, (t, s) in enumerate(zip(types, shapes))]
                return graph.outputs(*as_tuple(op(*inputs)))
        return None
    if form == "params" and len(arrays) < 2:
        return None
    graph = Graph("guarded")
    values: list[Value] = []
    for i, t in enumerate(types):
        values.append(graph.param(f"x{i}", t) if form == "params" and i else graph.input(f"x{i}", t))
    return graph.outputs(*as_tuple(op(*values)))


def run_guarded(graph: Graph, feeds: Mapping[str, np.ndarray], device: str, threads: int = 1) -> list[np.ndarray]:
    """Results of a graph, equal bits wherever its arrays lie and whatever was in memory before."""
    compiled = Session(device).compile(graph, CompileOptions(threads=threads))
    first: list[np.ndarray] | None = None
    params = set(compiled.params)
    for fill in FILLS:
        at_end = fill != 0x5A
        with guarded_scratch(fill):
            placed = {name: guarded(a, at_end) for name, a in feeds.items()}
            for name in params:
                compiled.set_param(name, placed[name])
            _forget_arenas(compiled)
            inputs = {name: a for name, a in placed.items() if name not in params}
            wanted = compiled.run({name: a for name, a in feeds.items() if name not in params})
            _forget_arenas(compiled)
            out = [_unwritten(a, fill, at_end) for a in wanted]
            compiled.run_into(inputs, out)
        for name, a in feeds.items():
            assert a.tobytes() == placed[name].tobytes(), f"{name} was changed"
        results = [a.copy() for a in out]
        first = first or results
        for a, b, c in zip(first, results, wanted, strict=True):
            assert _bits(a) == _bits(b) == _bits(c), f"results depend on what was in memory: {a} {b} {c}"
    assert first is not None
    return first


def _unwritten(like: np.ndarray, fill: int, at_end: bool) -> np.ndarray:
    memory = guarded_bytes(like.nbytes, at_end)
    memory[...] = fill
    return memory.view(like.dtype).reshape(like.shape)


def _bits(a: np.ndarray) -> bytes:
    """NaNs are as good as each other."""
    return np.nan_to_num(a, nan=77.0).tobytes() if a.dtype.kind in "fc" else a.tobytes()


def _forget_arenas(compiled: CompiledGraph) -> None:
    """The next run takes scratch memory that is new."""
    executable: Any = compiled._executable
    executable.arenas = arena_module.ArenaPool()
    executable._bound.clear()
    executable._only = None


def check_case(case: SampleCase, device: str) -> None:
    """One sample in all forms."""
    arrays = case.arrays()
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    for form in FORMS:
        graph = graph_of(case, form)
        if graph is None:
            continue
        print("form", form, flush=True)
        if form == "symbolic":
            check_sizes(case, graph, feeds, device)
            continue
        compare_all(graph, feeds, run_guarded(graph, feeds, device), f"{case.name} {form}")


def compare_all(graph: Graph, feeds: Mapping[str, np.ndarray], results: list[np.ndarray], name: str) -> None:
    wanted = evaluate(graph, feeds, wide=True)
    for got, want, out in zip(results, wanted, graph.results, strict=True):
        compare(got, want, out.type.with_shape(got.shape), name)


def check_sizes(case: SampleCase, graph: Graph, feeds: Mapping[str, np.ndarray], device: str) -> None:
    """One symbolic graph at many sizes, where nothing may be read beside its arrays.

    Values are compared at the sample's own size: elements over again are no sorted list, and no regular matrix.
    """
    own = int(graph.name.removeprefix("opened"))
    for size in (own, own - 1, own + 1, *SIZES):
        resized = {name: _resized(a, own, size) for name, a in feeds.items()}
        try:
            graph.bind({"S": size})
        except StrataError:
            continue  # a rule of the op refuses the size
        try:
            results = run_guarded(graph, resized, device)
        except StrataError:
            if size == own:
                return  # an op that wants its sizes as numbers
            continue  # elements over again have no inverse, no root, …
        if size == own:
            compare_all(graph, resized, results, f"{case.name} at {size}")


def _resized(a: np.ndarray, old: int, new: int) -> np.ndarray:
    """Axes of one size at another, their elements over again."""
    for axis, n in enumerate(a.shape):
        if n == old:
            a = np.take(a, np.arange(new) % old, axis)
    return np.ascontiguousarray(a)


def _child(device: str, first: int, only: str, every: int) -> None:
    faulthandler.enable()
    for at, case in enumerate(cases()):
        if at < first or at % every or only not in case.name:
            continue
        print("case", at, case.name, flush=True)
        try:
            check_case(case, device)
        except Exception as error:  # noqa: BLE001 - every failure counts, whatever it is
            print("wrong", case.name, type(error).__name__, str(error)[:400].replace("\n", " | "), flush=True)


def sweep(device: str, only: str = "", every: int = 1) -> Iterator[str]:
    """Which samples of the catalogue die or give something else."""
    first: int | None = 0
    while first is not None:
        command = [sys.executable, "-m", "tests.backends.guard_pages", "--device", device, "--child", str(first)]
        first = None
        command += ["--only", only, "--every", str(every)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            last = ["case", "none"]
            for line in child.stdout:
                match line.split():
                    case ["wrong", *_]:
                        yield f"{device} {line.rstrip()}"
                    case ["case", at, *_] as last:
                        first = int(at) + 1
                    case ["form", form]:
                        last = [*last[:3], form]
        if child.returncode == 0:
            return
        yield f"{device} died: {' '.join(last)}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.backends.guard_pages", description=__doc__)
    parser.add_argument("--device", action="append", help="cpu:avx2, …; all that this processor runs by default")
    parser.add_argument("--only", default="", help="samples with this in their name")
    parser.add_argument("--every", type=int, default=1, help="one sample in so many")
    parser.add_argument("--child", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    devices = options.device or DEVICES
    if options.child is not None:
        _child(devices[0], options.child, options.only, options.every)
        return 0
    failed = 0
    for device in devices:
        for line in sweep(device, options.only, options.every):
            failed += 1
            print(line, flush=True)
    print(f"{failed} samples leave their arrays" if failed else "every sample stays inside its arrays")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
