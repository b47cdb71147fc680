"""Targets to plan for without such a device: Metal, MLX, ROCm, TPU, each named with what runs its programs."""

from __future__ import annotations

from collections.abc import Sequence

from strata.backends.base import Backend, Capabilities, Executable
from strata.core import Target, TensorType
from strata.errors import DeviceError
from strata.lir import Lir
from strata.mir import Node, Op

# what runs a target's programs, and what that needs
RUN_BY = {
    "metal": ("wgpu", "pip install 'strata[wgpu]' on a Mac: wgpu reaches its GPU through Metal"),
    "mlx": ("wgpu", "pip install 'strata[wgpu]' on a Mac: wgpu reaches its GPU through Metal"),
    "rocm": ("xla", "pip install 'strata[xla]' and JAX's plugin for ROCm, on a machine with an AMD GPU"),
    "tpu": ("xla", "pip install 'strata[xla]' and JAX's plugin for TPUs, on a machine with one"),
}


class PlannedTarget(Backend):
    """A target by name. It plans; its code is made and run by the device that it names."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def description(self) -> str:
        return f"plans only; device {RUN_BY[self.name][0]!r} runs them"

    def compile(self, lir: Lir) -> Executable:
        raise no_device(self.name)


class MetalTarget(PlannedTarget):
    """GPUs of Apple, by compute shaders."""

    @property
    def target(self) -> Target:
        return Target.shaders()

    def takes(self, op: Op, types: Sequence[TensorType] = ()) -> bool:
        from strata.backends.wgsl.legal import can_lower
        from strata.backends.wgsl.overrides import own_phases

        return can_lower(op, tuple(types)) or (bool(types) and own_phases(op, tuple(types)) is not None)

    def runs_whole(self, node: Node) -> bool:
        from strata.backends.wgsl.legal import can_lower

        return not can_lower(node.op, tuple(x.type for x in node.inputs))

    def sources(self, lir: Lir) -> dict[str, str]:
        from strata.backends.wgsl.backend import shader_text

        return {name: shader_text(kernel) for name, kernel in lir.kernels.items()}


class RocmTarget(PlannedTarget):
    """GPUs of AMD, by Triton kernels."""

    @property
    def target(self) -> Target:
        from strata.backends.triton.target import Gpu

        return Gpu.named("gfx942").target

    def runs_whole(self, node: Node) -> bool:
        from strata.backends.triton.codegen.pairs import takes_pairs

        return not takes_pairs(node.op.name, [x.type.dtype for x in node.inputs])

    def sources(self, lir: Lir) -> dict[str, str]:
        from strata.backends.triton.codegen.render import render

        return {name: str(render(kernel)) for name, kernel in lir.kernels.items()}


class TpuTarget(PlannedTarget):
    """TPUs, by StableHLO modules."""

    capabilities = Capabilities(takes_graphs=True)

    def takes(self, op: Op, types: Sequence[TensorType] = ()) -> bool:
        from strata.backends.stablehlo.emit import is_native

        return is_native(op)

    def runs_whole(self, node: Node) -> bool:
        return True


PLANNED = {"metal": MetalTarget, "mlx": MetalTarget, "rocm": RocmTarget, "tpu": TpuTarget}


def no_device(name: str) -> DeviceError:
    """A target's name is not a device: another device runs its programs."""
    runner, needs = RUN_BY[name]
    return DeviceError(
        f"{name!r} is a target to plan for, not a device; {runner!r} runs its programs", code="E101",
        fix=f"Session({runner!r}), after {needs}",
    )  # fmt: skip
