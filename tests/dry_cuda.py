"""A `cuda` that plans everything and computes nothing: for asking what programs leave to the host, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from strata.backends import register_backend, registry
from strata.backends.driver import DeviceDriver, Launchable
from strata.backends.offload import OffloadExecutable
from strata.backends.resident import HOMES
from strata.backends.triton.backend import TritonBackend
from strata.backends.triton.target import Gpu
from strata.kernel import Kernel
from strata.lir import Lir


class DryDriver(DeviceDriver):
    """Takes every kernel, and runs none. What is read is 0."""

    has_parts = has_arena = has_guards = True

    def __init__(self) -> None:
        super().__init__()
        self._next = 1 << 12

    def make(self, kernel: Kernel) -> Launchable:
        return _Idle(kernel)

    def make_rendered(self, rendered: Any) -> Launchable:
        return _Idle(rendered.kernel, rendered.scratch)

    def allocate(self, size: int) -> int:
        self._next += size + (-size % 256)
        return self._next - size

    def part(self, place: int, offset: int) -> int:
        return place + offset

    def read(self, buffer: int, array: np.ndarray) -> None:
        array[...] = 0

    def release(self, buffer: int) -> None: ...

    def write(self, buffer: int, array: np.ndarray) -> None: ...

    def copy(self, source: int, target: int, size: int) -> None: ...

    def launch(self, made: Any, buffers: Sequence[Any], sizes: Mapping[str, int]) -> None: ...

    def finish(self) -> None: ...


class _Idle(Launchable):
    def guarded(self) -> _Idle:
        return self


class DryBackend(TritonBackend):
    """The plans of `cuda`, and the steps of each that the host has to do."""

    def __init__(self, name: str) -> None:
        super().__init__(name, Gpu.named("sm_90"), DryDriver())
        self.compiled: list[tuple[str, list[str]]] = []

    def compile(self, lir: Lir) -> OffloadExecutable:
        made = super().compile(lir)
        self.compiled.append((lir.name, made.host_steps))
        return made


@contextmanager
def dry_cuda(name: str) -> Iterator[DryBackend]:
    """The device under a name, for a while."""
    made = DryBackend(name)
    register_backend(name, made)
    try:
        yield made
    finally:
        registry._made.pop(name)
        HOMES.remove(made.home)
