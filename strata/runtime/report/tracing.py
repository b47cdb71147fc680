"""Traces: what was compiled and what ran, when, on which thread; files for Perfetto and Chrome.

    with strata.trace("run.json"):
        compiled.run(x=array)

The file is the JSON array of the trace event format. Compile phases nest in the thread that compiles. A run is a span
with its steps inside it; the work of pool threads on a step appears under those threads' own numbers.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from strata.arguments import public
from strata.core import as_dtype, here, new_lock
from strata.errors import FileError, OptionError
from strata.lir import Step
from strata.runtime.report.observe import OBSERVERS, operand

if TYPE_CHECKING:
    from strata.runtime.execute.compiled import CompiledGraph

MOST_EVENTS = 2_000_000  # kept in memory; a longer trace ends early and says so


@public
class Tracer:
    """Collects events until it is written."""

    def __init__(self, values: bool = False) -> None:
        """With `values`, spans of steps say the ranges of what they read and made; runs are slower for it."""
        self.events: list[dict[str, Any]] = []
        self._values = values
        self.dropped = 0
        self._pid = os.getpid()
        self._start = time.perf_counter_ns()
        self._lock = new_lock()
        self._names: dict[int, str] = {}
        self._run = threading.local()  # what the run of a thread is: others go on beside it
        self._rows: WeakKeyDictionary[CompiledGraph, dict[Any, Mapping[str, Any]]] = WeakKeyDictionary()

    def add(self, name: str, category: str, begin: int, end: int, thread: int | None = None, **args: Any) -> None:
        """One span; times in nanoseconds of the performance counter."""
        tid = threading.get_native_id() if thread is None else thread
        if tid not in self._names:
            known = threading.current_thread().name if thread is None else f"worker {thread}"
            self._names[tid] = known
        event = {
            "name": name, "cat": category, "ph": "X", "ts": (begin - self._start) / 1e3,
            "dur": max(0, end - begin) / 1e3, "pid": self._pid, "tid": tid, "args": args,
        }  # fmt: skip
        with self._lock:
            if len(self.events) < MOST_EVENTS:
                self.events.append(event)
            else:
                self.dropped += 1

    # as an observer of runs

    def begin(self, compiled: CompiledGraph, binding: Mapping[str, int], arrays: Sequence[Any]) -> None:
        self._run.sizes = dict(binding)
        self._run.ranges = {}

    def step(self, compiled: CompiledGraph, at: int, begin: int, end: int, spans: Sequence[Any], read: Any) -> None:
        args = self._describe(compiled, at)
        own = threading.get_native_id()
        step = compiled._lir.schedule[at]
        if self._values:
            # what was read may have been written over since: ranges are taken when a value is made
            known: dict[str, Any] = self._run.ranges
            for name in step.read_buffers:
                array = None if name in known else operand(compiled, name, read)
                if array is not None:
                    known[name] = range_of(array)
            inputs = {name: known[name] for name in step.read_buffers if name in known}
            outputs = {n: range_of(read(n)) for n in step.outputs}
            known.update(outputs)
            args = {**args, "inputs": inputs, "outputs": outputs}
        self.add(step.label, "kernel" if step.kernel is not None else "op", begin, end, **args)
        for thread, start, stop in spans:
            if thread != own:
                self.add(step.label, "kernel", start, stop, thread, **args)

    def end(self, compiled: CompiledGraph, begin: int, end: int) -> None:
        self.add(f"run {compiled.name}", "run", begin, end, sizes=dict(self._run.sizes))

    def _describe(self, compiled: CompiledGraph, at: int) -> Mapping[str, Any]:
        from strata.runtime.report.profile import bytes_of, flops_of, shapes_of

        rows = self._rows.setdefault(compiled, {})
        key = (at, tuple(self._run.sizes.items()))
        found = rows.get(key)
        if found is None:
            lir = compiled._lir
            step = lir.schedule[at]
            found = rows[key] = {
                "step": step.name,
                "shapes": shapes_of(lir, step, self._run.sizes),
                "bytes": bytes_of(lir, step, self._run.sizes),
                "flops": flops_of(step, self._run.sizes),
                **_attention(step),
            }
        return found

    # writing

    def write(self, path: str | Path) -> None:
        """The file, whole or not at all."""
        about = {"cat": "__metadata", "ph": "M", "ts": 0, "pid": self._pid}
        head: list[dict[str, Any]] = [{"name": "process_name", **about, "tid": 0, "args": {"name": "strata"}}]
        head += [
            {"name": "thread_name", **about, "tid": tid, "args": {"name": name}} for tid, name in self._names.items()
        ]
        if self.dropped:
            head.append(
                {
                    "name": f"{self.dropped} events left out",
                    "cat": "trace",
                    "ph": "i",
                    "s": "g",
                    "ts": 0,
                    "pid": self._pid,
                    "tid": 0,
                }
            )
        with self._lock:
            events = [*head, *sorted(self.events, key=lambda e: (e["ts"], -e["dur"]))]
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{self._pid}")
        try:
            temporary.write_text("[\n" + ",\n".join(json.dumps(e) for e in events) + "\n]\n", "utf-8")
            os.replace(temporary, path)
        except OSError as error:
            raise FileError(f"the trace cannot be written: {error}", code="F401", place=here()) from None


def range_of(array: np.ndarray) -> dict[str, Any]:
    """The least and the largest finite number of an array, and how many are not finite."""
    kind, size = str(as_dtype(array.dtype)), int(array.size)
    numbers = np.abs(array) if array.dtype.kind == "c" else array
    if numbers.dtype.kind not in "biuf":
        numbers = numbers.astype(np.float32)  # bf16 and the like
    whole = numbers.dtype.kind in "biu"
    finite = numbers if whole else numbers[np.isfinite(numbers)]
    found: dict[str, Any] = {"type": f"{kind}{list(array.shape)}"}
    if finite.size:
        low, high = (finite.min(), finite.max())
        found |= {"min": int(low), "max": int(high)} if whole else {"min": float(low), "max": float(high)}
    if not whole and finite.size != size:
        found |= {"nan": int(np.isnan(numbers).sum()), "inf": int(np.isinf(numbers).sum())}
    return found


def _attention(step: Step) -> dict[str, str]:
    """How an attention step masks and scales, where it is one."""
    node = next((n for n in step.nodes if n.op.name.startswith("attention")), None)
    if node is None:
        return {}
    return {"attention": ", ".join(f"{name}={value}" for name, value in node.op.static_fields().items())}


_active: list[Tracer] = []


@public
class trace:  # noqa: N801 - used as a block, like a function
    """Trace all compiles and runs of this process inside the block, from every thread, into a file.

    With `values`, the span of each kernel has the ranges of its inputs and outputs: least and largest number, NaN and
    infinities. `attention` spans say how they mask and scale.
    """

    def __init__(self, path: str | os.PathLike[str], *, values: bool = False) -> None:
        self._values = values
        self.path = Path(path) if isinstance(path, (str, os.PathLike)) else Path()
        if self.path.is_dir() or not self.path.parent.is_dir():
            raise OptionError(f"trace: {path!r} is not the path of a file that can be made", code="O404", place=here())
        self._tracer: Tracer | None = None

    def __enter__(self) -> Tracer:
        self._tracer = Tracer(self._values)
        _active.append(self._tracer)
        OBSERVERS.append(self._tracer)
        return self._tracer

    def __exit__(self, *_: object) -> None:
        assert self._tracer is not None
        OBSERVERS.remove(self._tracer)
        _active.remove(self._tracer)
        self._tracer.write(self.path)


class _Phase:
    """`with phase("plan"):` is a span in every active trace, and next to nothing without one."""

    @contextmanager
    def __call__(self, name: str, category: str = "compile", **args: Any) -> Iterator[None]:
        if not _active:
            yield
            return
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, begin, time.perf_counter_ns(), category, **args)

    def add(self, name: str, begin: int, end: int, category: str = "compile", **args: Any) -> None:
        for tracer in _active:
            tracer.add(name, category, begin, end, **args)


phase = _Phase()
