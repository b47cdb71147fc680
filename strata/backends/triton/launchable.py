"""A kernel ready to launch: its Triton programs with their arguments and grids for given sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from strata.backends.offload import Launchable, number
from strata.backends.triton.render import Rendered, TritonProgram, render
from strata.kernel import Kernel


class LaunchableKernel(Launchable):
    """The programs of a kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.rendered: Rendered = render(kernel)
        super().__init__(kernel, self.rendered.scratch)

    def launches(
        self, buffers: Sequence[Any], sizes: Mapping[str, int]
    ) -> Iterator[tuple[TritonProgram, list[Any], list[int], tuple[int, ...]]]:
        """Programs in order, each with its buffers, the sizes that it takes, and its grid; none that has no points."""
        known = self.named(buffers)
        for program in self.rendered.programs:
            grid = tuple(number(d, sizes) for d in program.grid)
            if 0 not in grid:
                yield program, [known[b.name] for b in program.buffers], [number(d, sizes) for d in program.sizes], grid
