"""The manifest of a plan: names, types and sizes of inputs, parameters and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strata.core import Dim, TensorType
from strata.lir.ir import ALIGNMENT, Lir
from strata.lir.memory import byte_size


@dataclass(frozen=True, slots=True)
class Binding:
    """One name at the boundary. Inputs, parameters and results live outside the arena, in the caller's memory."""

    name: str
    buffer: str
    type: TensorType
    byte_size: int

    @property
    def dtype(self) -> str:
        return self.type.dtype.name

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape


@dataclass(frozen=True)
class BindingManifest:
    """The boundary of a plan, in the order of declaration."""

    graph: str
    arena_size: int
    alignment: int
    inputs: tuple[Binding, ...]
    params: tuple[Binding, ...]
    outputs: tuple[Binding, ...]

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(b.name for b in self.inputs)

    @property
    def param_names(self) -> tuple[str, ...]:
        return tuple(b.name for b in self.params)

    def param_byte_size(self, name: str) -> int:
        return next(b.byte_size for b in self.params if b.name == name)

    @property
    def total_param_bytes(self) -> int:
        return sum(b.byte_size for b in self.params)

    def weight_blocks(self) -> dict[str, tuple[str, ...]]:
        """Parameters grouped by what stands before the first dot of their names, sorted."""
        blocks: dict[str, list[str]] = {}
        for name in sorted(self.param_names):
            blocks.setdefault(name.partition(".")[0], []).append(name)
        return {block: tuple(names) for block, names in sorted(blocks.items())}

    def weight_layout(self) -> dict[str, tuple[int, int]]:
        """Offset and bytes of every parameter in one block of weights, by sorted name; plans can share it."""
        layout: dict[str, tuple[int, int]] = {}
        at = 0
        for binding in sorted(self.params, key=lambda b: b.name):
            layout[binding.name] = (at, binding.byte_size)
            at += -(-binding.byte_size // ALIGNMENT) * ALIGNMENT
        return layout


def manifest(lir: Lir, binding: Mapping[str, Dim] | None = None) -> BindingManifest:
    """The manifest of a plan for sizes, or at the upper bounds of its symbols."""

    def entry(name: str, buffer: str) -> Binding:
        found = lir.buffer(buffer)
        kind = found.type.bind(binding) if binding else found.type
        return Binding(name, buffer, kind, byte_size(found, binding))

    return BindingManifest(
        lir.name,
        lir.placement(binding).arena_size,
        lir.memory.alignment,
        tuple(entry(name, buffer) for name, buffer in lir.io.inputs),
        tuple(entry(name, buffer) for name, buffer in lir.io.params),
        tuple(entry(f"output{i}", buffer) for i, buffer in enumerate(lir.io.outputs)),
    )
