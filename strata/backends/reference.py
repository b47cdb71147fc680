"""The `reference` backend: the NumPy interpreter of MIR. An oracle, not fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strata.backends.base import Arrays, Backend, Capabilities, Executable, ProcessorShare, memory_errors
from strata.core import TensorType
from strata.lir import Lir, Step
from strata.mir import Op, evaluate


class ReferenceBackend(Backend):
    """Runs every op by its NumPy meaning."""

    name = "reference"
    capabilities = Capabilities(host_arrays=True, of_processor=ProcessorShare(1 / 8, 1 / 4, 1e-5, 1e-4))  # temporaries

    def takes(self, op: Op, types: Sequence[TensorType] = ()) -> bool:
        return True

    def compile(self, lir: Lir) -> ReferenceExecutable:
        return ReferenceExecutable(lir)


class ReferenceExecutable(Executable):
    def is_host_step(self, at: int, step: Step) -> bool:
        return True

    def run(self, inputs: Arrays, outputs: Arrays, binding: Mapping[str, int], threads: int | None = None) -> None:
        feeds = {name: self.values[name] for name, _ in self.lir.io.params}
        feeds |= {name: a for (name, _), a in zip(self.lir.io.inputs, inputs, strict=True)}
        with memory_errors():
            results = evaluate(self.lir.graph, feeds)
        self.fill(outputs, results)
