"""Packed weights: each in the order in which its matmul reads it, packed once, all of a plan's in one block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from strata.backends.llvm.executor.arena import LINE, Arena, address_of
from strata.backends.llvm.jit.calling_convention import MatmulUsage
from strata.backends.llvm.runtime.kernel_steps import product_arguments
from strata.backends.llvm.runtime.program import Argument, NativeProgram, ProgramStep, region_table


@dataclass
class PackedWeight:
    """A weight that some matmuls of a plan read packed alike."""

    source: str  # its buffer
    product: MatmulUsage
    offset: int  # in the memory that all share
    memory: Arena | None = None

    @property
    def layout(self) -> str:
        return self.product.layout

    @property
    def size(self) -> int:
        size = self.product.packed_bytes
        assert isinstance(size, int)
        return size


class PackedWeights:
    """The packed weights of a plan, in the order in which they were noted."""

    def __init__(self) -> None:
        self._weights: list[PackedWeight] = []
        self._bytes = 0
        self._shared: Arena | None = None  # memory of all of them, until all have been packed

    def copy(self) -> PackedWeights:
        """The same weights, packed where they are; those that are packed from now on are packed for one of both."""
        made = PackedWeights()
        made._weights, made._bytes = [replace(weight) for weight in self._weights], self._bytes
        return made

    def __iter__(self) -> Iterator[PackedWeight]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def held_bytes(self) -> int:
        return sum(w.memory.size for w in self._weights if w.memory is not None)

    def place(self, source: str, product: MatmulUsage) -> int | None:
        """The number of a weight."""
        alike = (i for i, w in enumerate(self._weights) if (w.source, w.layout) == (source, product.layout))
        return next(alike, None)

    def note(self, source: str, product: MatmulUsage) -> None:
        """A weight that a matmul will read; one of symbolic size cannot be packed ahead."""
        if self.place(source, product) is None and isinstance(product.packed_bytes, int):
            weight = PackedWeight(source, product, self._bytes)
            self._weights.append(weight)
            self._bytes += -(-weight.size // LINE) * LINE

    def pack(self, weight: PackedWeight, array: np.ndarray, packer: int) -> None:
        """Pack an array with the machine code at an address."""
        product = weight.product
        store = self._store_for(weight)
        arguments = product_arguments(
            product.pack_arguments,
            lambda _: Argument(0, 0),
            {product.factor: weight.source},
            Argument(1, 0),
            product,
        )
        program = NativeProgram((ProgramStep("pack", arguments, product.pack_points, 1),), 2).bind({"pack": packer})
        program.run(region_table([address_of(array), store.address]))
        weight.memory = store

    def _store_for(self, weight: PackedWeight) -> Arena:
        """The first time a part of what all of them share: together they are in huge pages, alone few would be."""
        if weight.memory is not None:
            return Arena(weight.size)  # runs that are going on read the one before
        whole = self._shared or Arena(self._bytes)
        others = any(w.memory is None for w in self._weights if w is not weight)
        self._shared = whole if others else None  # its parts keep it from then on
        return whole.part(weight.offset, weight.size)
