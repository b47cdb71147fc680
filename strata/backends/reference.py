"""The `reference` backend: the NumPy interpreter of MIR behind the interface of a backend. An oracle, not fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from strata.core import Target, TensorType, here
from strata.errors import OutOfMemoryError, StrataError
from strata.lir import Lir
from strata.mir import Node, Op, evaluate


class ReferenceBackend:
    """Runs every op by its NumPy meaning."""

    name = "reference"

    @property
    def target(self) -> Target:
        return Target.named("baseline")

    def takes(self, op: Op, types: Sequence[TensorType] = ()) -> bool:
        return True

    def reads_views(self, node: Node) -> bool:
        return False

    def runs_whole(self, node: Node) -> bool:
        return False

    def compile(self, lir: Lir) -> ReferenceExecutable:
        return ReferenceExecutable(lir)


class ReferenceExecutable:
    def __init__(self, lir: Lir) -> None:
        self.lir = lir
        self._params: dict[str, np.ndarray] = {}

    @property
    def host_steps(self) -> list[str]:
        return [s.label for s in self.lir.schedule]

    def set_param(self, name: str, array: np.ndarray) -> None:
        self._params[name] = array

    def clone(self) -> ReferenceExecutable:
        made = ReferenceExecutable(self.lir)
        made._params = dict(self._params)
        return made

    def run(
        self,
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        binding: Mapping[str, int],
        threads: int | None = None,
    ) -> None:
        feeds = dict(self._params) | {name: a for (name, _), a in zip(self.lir.io.inputs, inputs, strict=True)}
        try:
            results = evaluate(self.lir.graph, feeds)
        except MemoryError as error:
            raise error if isinstance(error, StrataError) else OutOfMemoryError(f"{error}", place=here()) from None
        for out, result in zip(outputs, results, strict=True):
            out[...] = result
