"""Lazy code generation: machine code is made when a program first runs; until then it costs a plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from strata.backends import Executable
from strata.lir import Lir

if TYPE_CHECKING:
    from strata.runtime.execute.compiled import CompiledGraph


class DeferredExecutable(Executable):
    """Stands for an executable until it is asked for something that only that can do."""

    def __init__(self, lir: Lir, make: Callable[[], Executable]) -> None:
        super().__init__(lir)
        self._make, self._made = make, None
        self._params: dict[str, np.ndarray] = {}
        self._owner: weakref.ref[CompiledGraph] | None = None

    _made: Executable | None

    def serve(self, owner: CompiledGraph) -> None:
        """The graph that goes on with the real executable once there is one."""
        self._owner = weakref.ref(owner)

    @property
    def made(self) -> Executable:
        """The real one, with the parameters so far."""
        with self.lock:
            if self._made is None:
                made = self._make()
                for name, array in self._params.items():
                    made.set_param(name, array)
                self._made = made
            return self._made

    def set_param(self, name: str, array: np.ndarray) -> None:
        with self.lock:
            self._params[name] = array
            if self._made is not None:
                self._made.set_param(name, array)

    def part(self, other: Self) -> None:
        super().part(other)
        self._params = dict(other._params)
        self._made = None if other._made is None else other._made.clone()
        self._owner = None

    def run(self, inputs: Any, outputs: Any, binding: Mapping[str, int], threads: int | None = None) -> None:
        made = self.made
        owner = self._owner() if self._owner is not None else None
        if owner is not None:
            with owner._lock:
                if owner._executable is self:  # it may have parted from its clones meanwhile
                    owner._use(made)
        made.run(inputs, outputs, binding, threads)

    def run_observed(self, inputs: Any, outputs: Any, binding: Any, threads: int | None, tell: Any) -> None:
        self.made.run_observed(inputs, outputs, binding, threads, tell)

    @property
    def observes_steps(self) -> bool:  # type: ignore[override]  # what is a fact of others is one of the real one
        return self.made.observes_steps

    @property
    def host_steps(self) -> list[str]:
        return self.made.host_steps

    @property
    def packed_bytes(self) -> int:
        return 0 if self._made is None else self._made.packed_bytes

    @property
    def scratch_bytes(self) -> int | None:
        return None if self._made is None else self._made.scratch_bytes

    @property
    def workspace_bytes(self) -> int | None:
        return self.made.workspace_bytes

    def limit_scratch(self, limit: int) -> None:
        self.made.limit_scratch(limit)

    def stablehlo(self, binding: Mapping[str, int] | None = None) -> str | None:
        return self.made.stablehlo(binding)
