"""The `cpu` backend: generated machine code on the processor of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from strata.backends.base import Backend, Capabilities, ProcessorShare, SourceTexts
from strata.backends.llvm.ir.overrides import reads_views, runs_whole, takes_composition
from strata.backends.llvm.jit.compile_workers import many
from strata.backends.llvm.runtime.archive import CpuArchive
from strata.backends.llvm.runtime.executable import CpuExecutable
from strata.config import config
from strata.core import Target, TensorType, available_threads, here
from strata.errors import DeviceError
from strata.lir import Lir
from strata.mir import Graph, Node, Op

if TYPE_CHECKING:
    from strata.backends.llvm.codegen.kernels import Source

NODES_A_MODULE = 4  # of a graph, about


class CpuBackend(Backend):
    """Generated machine code on the processor of this process; plans and bundles also for other processors."""

    name = "cpu"
    capabilities = Capabilities(  # element-wise ops are fused by grouping
        host_arrays=True,
        of_processor=ProcessorShare(1.0, 1.0, 1e-6, 2e-6),
        claims=frozenset({"conv_first", "conv_last"}),
        searches=True,
        keeps_plans=True,
        long_code=True,
        runs_bodies=True,
    )

    def __init__(self, target: Target | None = None) -> None:
        self._target = target

    @property
    def target(self) -> Target:
        return self._target or Target.host()

    @property
    def description(self) -> str:
        return f"{self.target.cpu}, {8 * self.target.vector_bytes}-bit vectors"

    @property
    def archive(self) -> CpuArchive:
        return CpuArchive()

    def takes(self, op: Op, types: Sequence[TensorType] = ()) -> bool:
        return takes_composition(op, types, self.target) or super().takes(op, types)

    def reads_views(self, node: Node) -> bool:
        return reads_views(node)

    def runs_whole(self, node: Node) -> bool:
        return runs_whole(node, self.target)

    def tune(self, lir: Lir, progress: Callable[[int, int], None] | None = None) -> Lir:
        from strata.backends.llvm.runtime.tune import tuned  # only those who search need it

        self._require_host()
        return tuned(lir, self.target, progress)

    def sources(self, lir: Lir) -> SourceTexts:
        """LLVM IR by the name of the kernel; for ops that are not kernels, by their step and function."""
        from strata.backends.llvm.codegen.kernels import op_source, plan_sources  # only those who read it need it

        kernels, ops = plan_sources(lir, self.target)
        made = kernels | {f"step{at} {op.functions[0]}": op_source(op, self.target) for at, op in ops.items()}
        return SourceTexts({name: partial(_module_text, source) for name, source in made.items()})

    def expecting(self, graph: Graph) -> AbstractContextManager[None]:
        return many(len(graph.nodes()) // NODES_A_MODULE, available_threads(config().num_threads))

    def compile(self, lir: Lir) -> CpuExecutable:
        self._require_host()
        return CpuExecutable(lir, self.target)

    def _require_host(self) -> None:
        if self._target is not None and not self._target.runs_on(Target.host()):
            raise DeviceError(f"this processor lacks instructions of {self._target}", code="E102", place=here())


def _module_text(source: Source) -> str:
    usage, module = source.make()
    return f"; {usage}\n{module.text()}" if usage else str(module.text())
