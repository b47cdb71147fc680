"""A kernel ready to launch: its Triton programs with their arguments and grids for given sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from strata.backends.driver import Launchable
from strata.backends.recipe import number
from strata.backends.triton.codegen.render import Rendered, TritonProgram


class LaunchableKernel(Launchable):
    """The programs of a kernel."""

    def __init__(self, rendered: Rendered) -> None:
        self.rendered = rendered
        super().__init__(self.rendered.kernel, self.rendered.scratch)
        self.writes_over = len(self.rendered.programs) == 1  # an element is read by the program that writes it
        self._guarded: LaunchableKernel | None = None

    def guarded(self) -> LaunchableKernel:
        if self._guarded is None:
            self._guarded = self.again(self.rendered.guarded())
        return self._guarded

    def again(self, rendered: Rendered) -> LaunchableKernel:
        """Other programs, made in the same way."""
        return LaunchableKernel(rendered)

    def launches(
        self, buffers: Sequence[Any], sizes: Mapping[str, int]
    ) -> Iterator[tuple[TritonProgram, list[Any], list[int], tuple[int, ...]]]:
        """Programs in order, each with its buffers, the sizes that it takes, and its grid; none that has no points."""
        known = self.named(buffers)
        for program in self.rendered.programs_for(number(self.rendered.rows, sizes)):
            grid = tuple(number(d, sizes) for d in program.grid)
            if 0 not in grid:
                yield program, [known[b.name] for b in program.buffers], [number(d, sizes) for d in program.sizes], grid
