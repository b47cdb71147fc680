"""A kernel as a driver launches it: its programs, their arguments and grids for given sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from strata.backends.triton.render import Program, Rendered, render
from strata.core import Dim, dim_prod, substitute
from strata.kernel import Kernel


class Made:
    """The programs of a kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.rendered: Rendered = render(kernel)
        self.names = [b.name for b in (*kernel.buffers, *self.rendered.scratch)]

    def scratch(self, sizes: Mapping[str, int]) -> Sequence[int]:
        return [number(dim_prod(b.shape) * b.dtype.itemsize, sizes) for b in self.rendered.scratch]

    def launches(
        self, buffers: Sequence[Any], sizes: Mapping[str, int]
    ) -> Iterator[tuple[Program, list[Any], list[int], tuple[int, ...]]]:
        """Programs in order, each with its buffers, the sizes that it takes, and its grid; none that has no points."""
        known = dict(zip(self.names, buffers, strict=True))
        for program in self.rendered.programs:
            grid = tuple(number(d, sizes) for d in program.grid)
            if 0 not in grid:
                yield program, [known[b.name] for b in program.buffers], [number(d, sizes) for d in program.sizes], grid


def number(dim: Dim, sizes: Mapping[str, int]) -> int:
    value = substitute(dim, sizes)
    assert isinstance(value, int), f"size {dim} is known when a kernel is launched"
    return value
