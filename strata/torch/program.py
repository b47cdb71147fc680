"""A converted graph, compiled, as a function of torch tensors: their memory goes in, results come back as tensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from strata.config import using
from strata.core import SymExpr, substitute
from strata.errors import RunError
from strata.runtime import CompiledGraph, Session
from strata.torch.convert import Conversion, Drawn, Length, TensorInput
from strata.torch.kinds import to_array, to_tensor
from strata.torch.reports import GraphReport
from strata.torch.results import given
from strata.torch.writes import available, watch

LINALG = ("X200", "X201", "X202")  # what torch has an error of its own for: matrices that are singular, and the like
SMALL = 1 << 16  # bytes of a parameter that is compared whole in every call
PROBES = 64  # places that are looked at of a larger one where the system does not tell of writes


class TorchProgram:
    """Called with a list of tensors and numbers, which it empties, as AOTAutograd calls what a backend gives it."""

    def __init__(self, made: Conversion, session: Session) -> None:
        assert made.graph is not None
        self.inputs, self.params, self.results = tuple(made.inputs), tuple(made.params), tuple(made.results)
        self.extra = made.extra
        self.sizes = tuple(made.sizes)
        self.conditions = tuple(made.conditions)
        self.checks = made.checks
        self.graph = made.graph
        with using(check_indices=True):
            self.compiled: CompiledGraph = session.compile(made.graph)
        self._bound: list[Any] | None = None
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> list[Any]:
        if self.params:
            self._bind(args)
        if self.conditions:
            self._check(args)
        binding: dict[str, int] | None = None
        arrays: list[np.ndarray] = []
        for source in self.inputs:
            if type(source) is TensorInput:
                arrays.append(_memory(args[source.at], source.order))
            elif type(source) is Length:
                arrays.append(np.empty(int(args[source.at]), np.uint8))
            else:
                assert isinstance(source, Drawn)
                if binding is None:
                    binding = self._binding(args)
                arrays.append(to_array(source.draw(tuple(size_of(d, binding) for d in source.shape))))
        outputs = self._run(lambda: self.compiled.run_ready(arrays))
        if self.checks:
            *outputs, flags = *outputs[: -len(self.checks)], outputs[-len(self.checks) :]
            for told, fails in zip(self.checks, flags, strict=True):
                if fails:
                    raise RuntimeError(told)
        results = self._results([to_tensor(x) for x in outputs], args)
        args.clear()
        return results

    def _check(self, args: Sequence[Any]) -> None:
        """Conditions on sizes, told as torch tells them."""
        if self.conditions:
            binding = self._binding(args)
            for c in self.conditions:
                if not c.holds(size_of(c.left, binding), size_of(c.right, binding)):
                    raise RuntimeError(c.told)

    def _run(self, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        try:
            return run()
        except RunError as error:
            if error.code in LINALG:
                raise torch.linalg.LinAlgError(str(error)) from None
            raise

    def _results(self, made: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        found = given(self.results, made, args, lambda: self._binding(args))
        return found[: len(found) - self.extra] if self.extra else found

    def _binding(self, args: Sequence[Any]) -> dict[str, int]:
        return _sizes(self.sizes, args)

    # ----------------------------------------------------------------------------------------------------- parameters

    def _bind(self, args: Sequence[Any]) -> None:
        """Give the program the parameters, unless it has them as they are.

        A change is seen by the tensor, its memory, its version, or what is in it: code that writes through `.data`, an
        array of NumPy or a pointer leaves no other trace. Where one has changed, all are read again.
        """
        bound = self._bound
        if bound is not None and self._is_bound(args, bound):
            return
        with self._lock:
            given = [args[source.at] for source in self.params]
            fresh = self._noted(given)  # first: a write from now on is seen
            for source, t in zip(self.params, given, strict=True):
                self.compiled.set_param(source.name, self._read(t, source.order))
            self._bound = fresh

    def _is_bound(self, args: Sequence[Any], bound: Sequence[Any]) -> bool:
        for source, (t, pointer, version, seen, now_in) in zip(self.params, bound, strict=True):
            now = args[source.at]
            if (
                (now is not t and now.data_ptr() != pointer)
                or _version(now) != version
                or now.data_ptr() != pointer
                or (seen.is_written() if now_in is None else seen != now_in)
            ):
                return False
        return True

    def _noted(self, given: Sequence[Any]) -> list[Any]:
        """What a change of each is seen by. The system watches the larger ones. The others are compared, and so is
        memory that may be written behind its back, by another process or a GPU."""
        memories = [_bytes(t) for t in given]
        can_watch = [m.nbytes > SMALL and not t.is_pinned() for t, m in zip(given, memories, strict=True)]
        ready = [(m.data, t.data_ptr()) for t, m, can in zip(given, memories, can_watch, strict=True) if can]
        watches = iter(watch(ready))
        noted: list[Any] = []
        for t, memory, can in zip(given, memories, can_watch, strict=True):
            known = t, t.data_ptr(), _version(t)
            if can and (seen := next(watches)) is not None:
                noted.append((*known, seen, None))
            elif can and not available() and not t.is_shared():
                words = memory[: memory.size // 8 * 8].view(np.uint64)
                probe = words[:: words.size // PROBES]
                noted.append((*known, probe.copy().data, probe.data))
            else:
                noted.append((*known, bytearray(memory), memory.data))
        return noted

    def _read(self, t: Any, order: tuple[int, ...] | None) -> Any:
        return _memory(t, order)


def _version(t: Any) -> int | None:
    """How often torch has written to a tensor; of one of inference mode it keeps no count."""
    return None if t.is_inference() else t._version


def _bytes(t: Any) -> np.ndarray:
    """The memory from the first element of a tensor to its last."""
    t = t.detach()
    steps = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
    room = torch.empty(0, dtype=torch.uint8)
    start, size = t.storage_offset() * t.itemsize, steps * t.itemsize
    made: np.ndarray = room.set_(t.untyped_storage(), start, (size,), (1,)).numpy()
    return made


def _memory(t: Any, order: tuple[int, ...] | None) -> np.ndarray:
    array = to_array(t if order is None else t.permute(order))
    return array if array.flags.num & 0x101 == 0x101 else np.ascontiguousarray(array).reshape(array.shape)


def _sizes(where: Sequence[tuple[str, int, int]], args: Sequence[Any]) -> dict[str, int]:
    return {name: int(args[at] if axis < 0 else args[at].shape[axis]) for name, at, axis in where}


def size_of(d: Any, binding: dict[str, int]) -> Any:
    """A size for the symbols of a call."""
    return substitute(d, binding) if isinstance(d, SymExpr) else d


class CudaProgram(TorchProgram):
    """A program whose tensors are in a GPU's memory: read, and written, where they are, in the order of torch's stream.

    Whether a parameter has changed is known by its memory and its version: looking at its elements would wait.
    """

    def __init__(self, made: Conversion, session: Session) -> None:
        super().__init__(made, session)
        self.place = made.place

    def __call__(self, args: list[Any]) -> list[Any]:
        if self.params:
            self._bind(args)
        self._check(args)
        binding = self._binding(args)
        feeds: dict[str, Any] = {}
        for source in self.inputs:
            if isinstance(source, TensorInput):
                t = args[source.at].detach()
                feeds[source.name] = (t if source.order is None else t.permute(source.order)).contiguous()
            elif isinstance(source, Length):
                feeds[source.name] = np.empty(int(args[source.at]), np.uint8)
            else:
                with torch.device(self.place or "cuda"):
                    feeds[source.name] = source.draw(tuple(size_of(d, binding) for d in source.shape))
        outputs = self._run(lambda: self.compiled.run(feeds))
        made = [x if isinstance(x, torch.Tensor) else torch.from_numpy(x).to(self.place) for x in outputs]
        results = self._results(made, args)
        args.clear()
        return results

    def _is_bound(self, args: Sequence[Any], bound: Sequence[Any]) -> bool:
        for source, (t, pointer, version) in zip(self.params, bound, strict=True):
            now = args[source.at]
            if now.data_ptr() != pointer or version is None or _version(now) != version:
                return False
            del t  # kept, so that its memory is nobody else's
        return True

    def _noted(self, given: Sequence[Any]) -> list[Any]:
        return [(t, t.data_ptr(), _version(t)) for t in given]

    def _read(self, t: Any, order: tuple[int, ...] | None) -> Any:
        given = t.detach()
        return (given if order is None else given.permute(order)).contiguous()


def compile_graph(made: Conversion, session: Session, report: GraphReport | None = None) -> Any:
    """The program of a conversion; one that computes nothing only passes its arguments on."""
    if made.graph is None:
        return _Passing(made)
    start = time.perf_counter()
    kind = TorchProgram if made.place is None or made.place.type == "cpu" else CudaProgram
    program = kind(made, session)
    if report is not None:
        report.made(program.compiled, time.perf_counter() - start)
    return program


class _Passing:
    def __init__(self, made: Conversion) -> None:
        self.made = made

    def __call__(self, args: list[Any]) -> list[Any]:
        return given(self.made.results, (), args, lambda: _sizes(self.made.sizes, args))
