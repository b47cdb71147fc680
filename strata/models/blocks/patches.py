"""Images cut into patches: their projection, positions that are resized to other images, learned tokens."""

from __future__ import annotations

from math import isqrt

from strata.core import Dim, f32
from strata.errors import FileError
from strata.mir import Value
from strata.models.blocks.transformer import TransformerBuilder
from strata.models.weights import Weights, ops


class PatchBuilder(TransformerBuilder):
    """A graph over images that are cut into patches."""

    def __init__(self, name: str, weights: Weights, batch: Dim, size: tuple[int, int], patch: tuple[int, int]) -> None:
        super().__init__(name, weights)
        self.batch, self.size, self.patch = batch, size, patch
        self.grid = size[0] // patch[0], size[1] // patch[1]
        if 0 in self.grid:
            raise FileError(f"images of {size} are smaller than patches of {patch}", code="F140")
        self.pixels = self.graph.input("pixel_values", (batch, 3, *size), f32)

    def patches(self, name: str, hidden: int) -> Value:
        """The patches, projected: [B, patches, H]."""
        high, wide = self.grid
        kernel = self.param(f"{name}.weight", (hidden, 3, *self.patch))
        whole = ops.narrow(ops.narrow(self.pixels, 2, 0, high * self.patch[0]), 3, 0, wide * self.patch[1])
        cut = ops.reshape(whole, (self.batch, 3, high, self.patch[0], wide, self.patch[1]))
        flat = ops.reshape(ops.transpose(cut, (0, 2, 4, 1, 3, 5)), (self.batch, high * wide, -1))
        out = ops.matmul(flat, ops.transpose(ops.reshape(kernel, (hidden, -1)), (1, 0)))
        return out + self.param(f"{name}.bias", (hidden,)) if self.has(f"{name}.bias") else out

    def positions(self, table: Value, first: int, *, antialias: bool = False) -> Value:
        """Positions [N, H] of the first tokens and the patches; those of patches are resized to this image's grid."""
        count, hidden = (d.__index__() for d in table.shape)
        side = isqrt(count - first)
        if self.grid == (side, side):
            return table
        if side * side != count - first:
            raise FileError(
                f"{count - first} positions make no square to resize for images of {self.size}", code="F142"
            )
        square = ops.reshape(ops.narrow(table, 0, first, side * side), (1, side, side, hidden))
        placed = ops.resize(
            ops.transpose(square, (0, 3, 1, 2)), sizes=self.grid, axes=(2, 3), mode="cubic", antialias=antialias,
            cubic_coeff_a=-0.5 if antialias else -0.75, exclude_outside=antialias,
        )  # fmt: skip
        flat = ops.reshape(ops.transpose(placed, (0, 2, 3, 1)), (self.grid[0] * self.grid[1], hidden))
        return ops.concat([ops.narrow(table, 0, 0, first), flat], 0) if first else flat

    def rows(self, name: str, count: int, hidden: int) -> Value:
        """Learned tokens, the same for each image: [B, count, H]."""
        return ops.broadcast_to(self.param(name, (1, count, hidden)), (self.batch, count, hidden))

    def row(self, x: Value, number: int) -> Value:
        """One token of each image: [B, H]."""
        return ops.reshape(ops.narrow(x, 1, number, 1), (self.batch, x.shape[-1]))
