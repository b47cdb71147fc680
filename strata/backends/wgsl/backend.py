"""The `wgpu` backend: plans on a GPU, with kernels as WGSL compute shaders."""

from __future__ import annotations

from collections.abc import Sequence

from strata.backends.base import Capabilities, ProcessorShare
from strata.backends.checks import CHECKS
from strata.backends.offload import OffloadBackend
from strata.backends.ordering import is_plain
from strata.backends.wgsl.adapter import CompiledShader, WgpuDriver, open_device
from strata.backends.wgsl.legal import can_lower
from strata.backends.wgsl.overrides import own_phases
from strata.backends.wgsl.phases import phases_of, phases_of_all
from strata.backends.wgsl.render import render
from strata.backends.wgsl.values import HELD
from strata.core import Target, TensorType
from strata.kernel import Kernel
from strata.lir import Lir, Step
from strata.mir import Node, Op


class WgpuBackend(OffloadBackend):
    """Any GPU that wgpu reaches: `wgpu` is the one it would choose, `wgpu:1` the second of its list."""

    name = "wgpu"

    driver: WgpuDriver

    def __init__(self, number: int = 0) -> None:
        super().__init__(open_device(number), f"wgpu:{number}" if number else "wgpu")
        self.capabilities = Capabilities(
            claims=frozenset({"expand", "loops"}),
            most_buffers=self.driver.most_buffers,
            runs_bodies=True,
            of_processor=ProcessorShare() if self.driver.is_software else None,
        )

    @property
    def target(self) -> Target:
        return Target.shaders()

    @property
    def description(self) -> str:
        return self.driver.name

    def takes(self, op: Op, types: Sequence[TensorType] = ()) -> bool:
        most = self.capabilities.most_buffers
        if most is not None and len(types) >= most:
            return False
        if can_lower(op, tuple(types)) or self.takes_bodies(op):
            return True
        if op.name in CHECKS:
            return all(t.dtype.name in HELD for t in types)
        return bool(types) and own_phases(op, tuple(types)) is not None

    def runs_whole(self, node: Node) -> bool:
        """Ops on types that shaders do not hold run on the host."""
        return not can_lower(node.op, tuple(x.type for x in node.inputs))

    def sources(self, lir: Lir) -> dict[str, str]:
        halves = self.driver.has_halves
        return {name: shader_text(kernel, halves=halves) for name, kernel in lir.kernels.items()}

    def launchable(self, step: Step) -> CompiledShader | None:
        """Shaders for a step of one op that has no lowering."""
        (node,) = step.nodes
        types = tuple(x.type for x in node.inputs)
        plain = step.views is None or all(map(is_plain, step.views, types))
        phases = own_phases(node.op, types) if plain else None
        return self.driver.make_phases(*phases_of_all(phases)) if phases is not None else None


def shader_text(kernel: Kernel, *, halves: bool = False) -> str:
    """All shaders of a kernel, in the order in which they run; with `halves`, for a GPU that has f16 in memory."""
    return "\n".join(render(phase, halves=halves).text for phase in phases_of(kernel).kernels)
