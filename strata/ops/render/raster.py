"""Tiles of splats: which splats each tile of a picture sees, compositing front to back, and its gradient.

A splat is a row of sixteen numbers, in pixels around its centre (u, v): at δ = (x - u, y - v) it has

    q = (n00 δx² + 2 n01 δx δy + n11 δy²) / (1 + 2 (p1 δx + p2 δy) + P00 δx² + 2 P01 δx δy + P11 δy²)

and adds opacity · exp(-q/2) of its colour: u, v, n00, n01, n11, p1, p2, P00, P01, P11, opacity, red, green, blue, 0, 0.
That is exact for an ellipsoid in perspective; see `strata.ops.render.project`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from strata.core import Dim, TensorType, as_dtype, bool_, f32, i32, i64
from strata.errors import OptionError
from strata.mir import Graph, Op, Sample, Value, as_tuple, evaluate, op
from strata.ops.base.creation import dim_size, iota, zeros
from strata.ops.base.elementwise import maximum, minimum
from strata.ops.base.movement import broadcast_to, concat, insert_axis, reshape, stack
from strata.ops.control.looping import while_loop
from strata.ops.elementwise.logic import cast, equal, where
from strata.ops.elementwise.math import exp, sqrt
from strata.ops.indexing.indexing import gather
from strata.ops.indexing.scattering import scatter_add
from strata.ops.reduce.cumulative import cumsum
from strata.ops.reduce.reduce import max_, sum_

COLUMNS = 16  # of a splat's row
TINY = 1e-8
MOST_SCENES = 64  # of a batch, that are written out
SLACK = 1e-6  # of the ellipse, when a tile is asked whether it touches it


class WholeScene(Op):
    """Ops on whole scenes: a batch of scenes is one after the other, each as fast as alone."""

    dtypes = (f32,)

    def numpy(self, *arrays: np.ndarray) -> Any:
        """The meaning of the parts, put together once for each kind of arrays."""
        graph = _whole(self, tuple(TensorType(as_dtype(a.dtype), a.shape) for a in arrays))
        made = evaluate(graph, {f"x{i}": a for i, a in enumerate(arrays)})
        return tuple(made) if self.multi_output else made[0]

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim, **_: Any) -> Any:
        if not isinstance(size, int) or not 0 < size <= MOST_SCENES:
            return super().vmap(*inputs, batched=batched, size=size)
        made = [as_tuple(self(*(x[i] if b else x for x, b in zip(inputs, batched, strict=True)))) for i in range(size)]
        outs = tuple(stack(list(column), 0) for column in zip(*made, strict=True))
        return outs if self.multi_output else outs[0]


@lru_cache(maxsize=32)
def _whole(op: Op, types: tuple[TensorType, ...]) -> Graph:
    graph = Graph(op.name)
    return graph.outputs(*as_tuple(op.decompose(*(graph.input(f"x{i}", t) for i, t in enumerate(types)))))


class Tiled(WholeScene):
    """What ops on a picture of tiles share."""

    width: int
    height: int
    tile: int

    @property
    def columns(self) -> int:
        return -(-self.width // self.tile)

    @property
    def rows(self) -> int:
        return -(-self.height // self.tile)

    @property
    def tiles(self) -> int:
        return self.columns * self.rows

    def check_sizes(self) -> None:
        for name in ("width", "height", "tile"):
            value = getattr(self, name)
            self.require(
                isinstance(value, int) and value >= 1, f"{name} is {value!r}, at least 1 pixel", code="O279",
                error=OptionError,
            )  # fmt: skip

    def check_kind(self, what: str, given: TensorType, wanted: TensorType) -> None:
        self.require_dtype(given.dtype is wanted.dtype, f"{what} is {given}, expected {wanted}", code="D103")
        same = given.ndim == wanted.ndim and all(map(_alike, given.shape, wanted.shape))
        self.require(same, f"{what} is {given}, expected {wanted}", code="S290")


def _alike(a: Dim, b: Dim) -> bool:
    return a == b


@op("splat_bin")
class SplatBin(Tiled):
    """Lists of splats by tile, nearest first.

    Takes outlines [N, 5], the centre and the matrix xx, xy, yy of each ellipse; ids in the order of distance; which
    splats are seen at all. Gives: ids of the splats of every tile, tile after tile; where each tile's begin and end;
    and, to find the entries of one splat again, the place in that list of each entry in the order in which they were
    made (splat by splat, nearest first), with the first of each splat. Entries beyond `max_entries` are dropped.
    """

    max_entries: int

    multi_output = True
    differentiable = False

    def infer(self, outlines: TensorType, order: TensorType, seen: TensorType) -> tuple[TensorType, ...]:
        self.check_sizes()
        count = outlines.shape[0] if outlines.ndim else 0
        self.require(outlines.ndim == 2 and outlines.shape[1] == 5, f"outlines are [N, 5], got {outlines}", code="S290")
        self.require_dtype(outlines.dtype.is_float, f"outlines are floats, got {outlines}", code="D104")
        self.require(self.max_entries >= 1, f"max_entries is {self.max_entries}, at least 1", code="O279",
                     error=OptionError)  # fmt: skip
        self.check_kind("order", order, i64[count])
        self.check_kind("seen", seen, bool_[count])
        return i32[self.max_entries], i32[self.tiles, 2], i32[self.max_entries], i32[count + 1]

    def numpy(self, outlines: np.ndarray, order: np.ndarray, seen: np.ndarray) -> tuple[np.ndarray, ...]:
        entries: list[tuple[int, int]] = []  # tile, splat
        starts = np.zeros(len(outlines) + 1, np.int32)
        for rank, splat in enumerate(order):
            if 0 <= splat < len(seen) and seen[splat]:
                for tile in self._touched(*outlines[splat].astype(np.float64)):
                    if len(entries) < self.max_entries:
                        entries.append((tile, int(splat)))
            starts[rank + 1] = len(entries)
        by_tile = sorted(range(len(entries)), key=lambda e: entries[e][0])
        ids, places = np.zeros(self.max_entries, np.int32), np.zeros(self.max_entries, np.int32)
        ranges = np.zeros((self.tiles, 2), np.int32)
        for place, entry in enumerate(by_tile):
            tile, splat = entries[entry]
            ids[place], places[entry] = splat, place
            if ranges[tile, 1] == 0:
                ranges[tile] = place, place
            ranges[tile, 1] = place + 1
        return ids, ranges, places, starts

    def _touched(self, cx: float, cy: float, xx: float, xy: float, yy: float) -> Iterator[int]:
        """Tiles whose box meets the ellipse, row by row: strips of it have one span of columns each."""
        size, grown = self.tile, (1 + SLACK) ** 0.5
        high, wide = np.sqrt(yy) * grown, np.sqrt(xx) * grown
        narrow = np.sqrt(max(xx - xy * xy / yy, 0.0)) * grown
        for row in range(self.rows):
            low, top = max(row * size - cy, -high), min((row + 1) * size - cy, high)
            if low > top:
                continue
            tip = xy / np.sqrt(xx) * grown  # where the ellipse is farthest to the right
            ends = []
            for sign in (-1.0, 1.0):
                y = min(max(sign * tip, low), top)
                ends.append(xy / yy * y + sign * narrow * np.sqrt(max(1 - (y / high) ** 2, 0.0)))
            left, right = cx + max(ends[0], -wide), cx + min(ends[1], wide)
            first, last = (np.floor(np.fmin(np.fmax(end / size, -1), self.columns)) for end in (left, right))
            for column in range(max(int(first), 0), min(int(last), self.columns - 1) + 1):
                yield row * self.columns + column

    def decompose(self, outlines: Value, order: Value, seen: Value) -> tuple[Value, ...]:
        count, size = outlines.shape[0], float(self.tile)
        sorted_outlines = gather(outlines, order)
        kind = outlines.dtype
        cx, cy, xx, xy, yy = (reshape(sorted_outlines[:, i], (count, 1)) for i in range(5))
        grown = (1 + SLACK) ** 0.5
        high, wide = sqrt(yy) * grown, sqrt(xx) * grown
        narrow = sqrt(maximum(xx - xy * xy / yy, 0.0)) * grown
        rows = reshape(cast(iota((self.rows,), 0, i32), kind), (1, self.rows))
        low = maximum(rows * size - cy, -high)
        top = minimum((rows + 1.0) * size - cy, high)
        tip = xy / sqrt(xx) * grown

        def end(sign: float) -> Value:
            y = minimum(maximum(tip * sign, low), top)
            return xy / yy * y + narrow * sqrt(maximum(1.0 - (y / high) * (y / high), 0.0)) * sign

        left, right = cx + maximum(end(-1.0), -wide), cx + minimum(end(1.0), wide)
        columns = reshape(cast(iota((self.columns,), 0, i32), kind), (1, 1, self.columns))
        first = insert_axis((left / size).floor(), -1)
        last = insert_axis((right / size).floor(), -1)
        inside = (columns >= first) & (columns <= last) & insert_axis(low <= top, -1)
        touched = reshape(inside, (count, self.tiles)) & reshape(gather(seen, order), (count, 1))
        flat = cast(reshape(touched, (count * self.tiles,)), i64)
        number = cumsum(flat, 0)  # of entries up to here
        kept = reshape((flat > 0) & (number <= self.max_entries), (count, self.tiles))
        made = reshape(cast(kept, i64), (count * self.tiles,))
        entry = cumsum(made, 0) - made
        by_tile = cast(kept, i64)
        within = cumsum(by_tile, 0) - by_tile  # entries of the tile before this one
        per_tile = sum_(by_tile, 0)
        begins = cumsum(per_tile, 0) - per_tile
        place = reshape(within + begins, (count * self.tiles,))
        # what is not kept goes to one more row, which is cut off
        spare = self.max_entries
        at = where(made > 0, place, spare)
        splat = reshape(broadcast_to(reshape(order, (count, 1)), (count, self.tiles)), (count * self.tiles,))
        ids = scatter_add(where(made > 0, splat, 0), at, spare + 1)[:spare]
        places = scatter_add(where(made > 0, place, 0), where(made > 0, entry, spare), spare + 1)[:spare]
        empty = equal(per_tile, 0)
        ranges = stack([where(empty, 0, begins), where(empty, 0, begins + per_tile)], 1)
        starts = concat([zeros((1,), i64), cumsum(sum_(by_tile, 1), 0)], 0)
        return cast(ids, i32), cast(ranges, i32), cast(places, i32), cast(starts, i32)

    @classmethod
    def samples(cls) -> list[Sample]:
        def case(count: int, seed: int, most: int, **sizes: int) -> Sample:
            rng = np.random.default_rng(seed)
            a = rng.uniform(-3, 3, (count, 2, 2))
            s = a @ a.transpose(0, 2, 1) + np.eye(2) * 0.3
            centre = rng.uniform(-2, 14, (count, 2))
            outlines = np.stack([centre[:, 0], centre[:, 1], s[:, 0, 0], s[:, 0, 1], s[:, 1, 1]], 1)
            return Sample(
                outlines.astype(np.float32), rng.permutation(count).astype(np.int64), rng.random(count) < 0.8,
                max_entries=most, **sizes, grad=False,
            )  # fmt: skip

        return [
            case(5, 0, 24, width=12, height=9, tile=4), case(4, 1, 5, width=8, height=8, tile=3),
            case(0, 2, 3, width=5, height=4, tile=4), case(1, 3, 4, width=1, height=1, tile=16),
        ]  # fmt: skip


class Composited(Tiled):
    """Compositing of splats: what forward and backward share."""

    cutoff: float
    """Contributions below this opacity are none."""
    threshold: float
    """A pixel is done when less than this part of the background shines through."""
    max_steps: int
    """Splats that a pixel may take; 0: any number."""

    def check_scene(self, splats: TensorType, bounds: TensorType, background: TensorType, *lists: TensorType) -> None:
        self.check_sizes()
        self.require(
            splats.ndim == 2 and splats.shape[1] == COLUMNS, f"splats are [N, {COLUMNS}], got {splats}", code="S290"
        )
        self.require_dtype(splats.dtype.is_float, f"splats are floats, got {splats}", code="D104")
        kind, count = splats.dtype, splats.shape[0]
        self.check_kind("bounds", bounds, TensorType(kind, (count, 4)))
        self.check_kind("background", background, TensorType(kind, (3,)))
        ids, ranges, places, starts, order = lists
        self.require(ids.ndim == 1, f"ids are [M], got {ids}", code="S290")
        self.check_kind("ids", ids, i32[ids.shape[0]])
        self.check_kind("ranges", ranges, i32[self.tiles, 2])
        self.check_kind("places", places, i32[ids.shape[0]])
        self.check_kind("starts", starts, i32[count + 1])
        self.check_kind("order", order, i64[count])

    def lists_of(self, ids: np.ndarray, ranges: np.ndarray, count: int) -> list[np.ndarray]:
        """Ids of the splats of every tile. What leads outside the list or the splats is the nearest inside."""
        bounds = np.clip(ranges, 0, len(ids) if count else 0)
        known = np.clip(ids, 0, max(count - 1, 0))
        return [known[begin:end] for begin, end in bounds]

    def pixels(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        """Columns and rows of the pixels of a tile that are in the picture."""
        row, column = divmod(t, self.columns)
        y, x = np.mgrid[row * self.tile : (row + 1) * self.tile, column * self.tile : (column + 1) * self.tile]
        inside = (y < self.height) & (x < self.width)
        return x[inside], y[inside]

    def goes_on(self, through: np.ndarray, taken: np.ndarray) -> np.ndarray:
        """Which pixels take one more splat."""
        return (through >= self.threshold) & ((taken < self.max_steps) | (self.max_steps == 0))

    def hits(self, splat: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, ...]:
        """Offsets, q, the denominator, and what a splat covers of each pixel: 0 below the cutoff."""
        dx, dy = x + 0.5 - splat[0], y + 0.5 - splat[1]
        over = splat[2] * dx * dx + 2 * splat[3] * dx * dy + splat[4] * dy * dy
        under = 1 + 2 * (splat[5] * dx + splat[6] * dy)
        under = under + splat[7] * dx * dx + 2 * splat[8] * dx * dy + splat[9] * dy * dy
        front = 1 + splat[5] * dx + splat[6] * dy > 0
        q = over / under
        alpha = splat[10] * np.exp(-0.5 * q)
        return dx, dy, q, under, np.where(front & (alpha >= self.cutoff), alpha, 0.0)


@op("splat_raster")
class SplatRaster(Composited):
    """A picture [height, width, 4] of splats: linear red, green and blue over the background, and opacity.

    Takes splats [N, 16], the boxes of pixels outside of which they are not seen (left, right, top, bottom), the
    background [3], and what `splat_bin` gives, with the order. A pixel takes splats front to back.
    """

    def infer(
        self, splats: TensorType, bounds: TensorType, background: TensorType, ids: TensorType, ranges: TensorType,
        places: TensorType, starts: TensorType, order: TensorType,
    ) -> TensorType:  # fmt: skip
        self.check_scene(splats, bounds, background, ids, ranges, places, starts, order)
        return splats.with_shape((self.height, self.width, 4))

    def numpy(self, splats: np.ndarray, bounds: Any, background: np.ndarray, *lists: np.ndarray) -> np.ndarray:
        picture = np.empty((self.height, self.width, 4), splats.dtype)
        for t, ids in enumerate(self.lists_of(lists[0], lists[1], len(splats))):
            x, y = self.pixels(t)
            light, through, taken = np.zeros((len(x), 3)), np.ones(len(x)), np.zeros(len(x), int)
            for splat in splats[ids].astype(np.float64):
                alpha = self.hits(splat, x, y)[-1]
                goes_on = self.goes_on(through, taken)
                weight = np.where(goes_on, through * alpha, 0.0)
                light += weight[:, None] * splat[11:14]
                through = through - weight
                taken += goes_on & (alpha > 0)
            picture[y, x, :3] = light + through[:, None] * background
            picture[y, x, 3] = 1 - through
        return picture

    def decompose(self, splats: Value, bounds: Value, background: Value, *lists: Value) -> Value:
        scene = _Scene(self, splats, *lists[:2])
        shape = (self.tiles, self.tile * self.tile)

        def step(state: Any) -> Any:
            k, light, through, taken = state
            found = scene.entry(k)
            weight = where(scene.goes_on(through, taken) & found.hit, through * found.alpha, 0.0)
            colours = stack([insert_axis(c, -1) * weight for c in found.colour], -1)
            counted = taken + cast(weight > 0.0, taken.dtype)
            return k + 1, light + colours, through - weight, counted

        kind = splats.dtype
        start = (
            zeros((), i32), zeros((*shape, 3), kind), zeros(shape, kind) + 1.0, zeros(shape, i32),
        )  # fmt: skip
        _, light, through, _ = while_loop(lambda state: state[0] < scene.longest, step, start, scene.most)
        colour = light + insert_axis(through, -1) * background
        return scene.picture(concat([colour, insert_axis(1.0 - through, -1)], -1))

    def vjp(self, *inputs: Value, out: Value, ct: Value, **_: Any) -> tuple[Value | None, ...]:
        fields = self.static_fields()
        d_splats = SplatRasterBackward(**fields)(*inputs, out, ct)
        through = 1.0 - out[:, :, 3:]
        return (d_splats, None, sum_(through * ct[:, :, :3], (0, 1)), *[None] * 5)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(*arrays, **fields, rtol=1e-5) for arrays, fields in scenes()]


@op("splat_raster_backward")
class SplatRasterBackward(Composited):
    """The gradient of `splat_raster` in the splats, of its inputs, its result and the result's cotangent.

    With w the light that passes until a splat, c its colour, g the cotangent: the splat's opacity at a pixel has the
    gradient w (c · g) - (what lies behind it) / (1 - opacity). What lies behind is the whole less what came so far.
    """

    def infer(
        self, splats: TensorType, bounds: TensorType, background: TensorType, ids: TensorType, ranges: TensorType,
        places: TensorType, starts: TensorType, order: TensorType, out: TensorType, ct: TensorType,
    ) -> TensorType:  # fmt: skip
        self.check_scene(splats, bounds, background, ids, ranges, places, starts, order)
        picture = splats.with_shape((self.height, self.width, 4))
        self.check_kind("out", out, picture)
        self.check_kind("ct", ct, picture)
        return splats

    def numpy(self, splats: np.ndarray, bounds: Any, background: np.ndarray, *others: np.ndarray) -> np.ndarray:
        out, ct = others[5], others[6]
        made = np.zeros(splats.shape)
        for t, ids in enumerate(self.lists_of(others[0], others[1], len(splats))):
            x, y = self.pixels(t)
            g, ga = ct[y, x, :3].astype(np.float64), ct[y, x, 3].astype(np.float64)
            behind = g @ background.astype(np.float64) - ga
            whole = np.sum(out[y, x, :3] * g, 1) - ga * (1 - out[y, x, 3].astype(np.float64))
            through, taken, so_far = np.ones(len(x)), np.zeros(len(x), int), np.zeros(len(x))
            for which in ids:
                splat = splats[which].astype(np.float64)
                dx, dy, q, under, alpha = self.hits(splat, x, y)
                alpha = np.where(self.goes_on(through, taken), alpha, 0.0)
                weight, colour = through * alpha, g @ splat[11:14]
                then, taken, so_far = through - weight, taken + (alpha > 0), so_far + weight * colour
                rest = np.where(
                    self.goes_on(then, taken), (whole - so_far) / np.maximum(1 - alpha, TINY), through * behind
                )
                d_alpha = np.where(alpha > 0, through * colour - rest, 0.0)
                made[which] += _splat_gradient(splat, dx, dy, q, under, alpha, d_alpha, weight @ g)
                through = then
        return made.astype(splats.dtype)

    def decompose(self, splats: Value, bounds: Value, background: Value, *others: Value) -> Value:
        ids, ranges = others[:2]
        out, ct = others[5], others[6]
        scene = _Scene(self, splats, ids, ranges)
        light, opacity = scene.in_tiles(out[:, :, :3]), scene.in_tiles(out[:, :, 3])
        g, ga = scene.in_tiles(ct[:, :, :3]), scene.in_tiles(ct[:, :, 3])
        behind = sum_(g * background, -1) - ga
        whole = sum_(light * g, -1) - ga * (1.0 - opacity)

        def step(state: Any) -> Any:
            k, made, through, taken, so_far = state
            found = scene.entry(k)
            hit = scene.goes_on(through, taken) & found.hit
            alpha = where(hit, found.alpha, 0.0)
            weight = through * alpha
            colour = sum(
                (g[:, :, i] * insert_axis(c, -1) for i, c in enumerate(found.colour)), start=zeros((), g.dtype)
            )
            then, counted, after = through - weight, taken + cast(hit, taken.dtype), so_far + weight * colour
            last = ~scene.goes_on(then, counted)
            rest = where(last, through * behind, (whole - after) / maximum(1.0 - alpha, TINY))
            d_alpha = where(hit, through * colour - rest, 0.0)
            rows = _gradient_rows(found, alpha, d_alpha, [sum_(weight * g[:, :, i], -1) for i in range(3)])
            added = made + scatter_add(rows, found.ids, splats.shape[0])
            return k + 1, added, then, counted, after

        shape, kind = (self.tiles, self.tile * self.tile), splats.dtype
        start = (
            zeros((), i32), zeros(splats.shape, kind), zeros(shape, kind) + 1.0, zeros(shape, i32), zeros(shape, kind),
        )  # fmt: skip
        return while_loop(lambda state: state[0] < scene.longest, step, start, scene.most)[1]

    @classmethod
    def samples(cls) -> list[Sample]:
        found = []
        for arrays, fields in scenes():
            out = SplatRaster(**fields).numpy(*arrays)
            ct = np.random.default_rng(7).standard_normal(out.shape).astype(out.dtype)
            found.append(Sample(*arrays, out, ct, **fields, grad=False))
        return found


def _splat_gradient(
    splat: np.ndarray, dx: np.ndarray, dy: np.ndarray, q: np.ndarray, under: np.ndarray, alpha: np.ndarray,
    d_alpha: np.ndarray, d_colour: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """The gradient of one splat's row, of the gradients of its opacity at pixels and of its colour."""
    d_over = -0.5 * alpha * d_alpha / under
    d_under = -d_over * q
    made = np.zeros(COLUMNS)
    made[0] = -np.sum(
        d_over * 2 * (splat[2] * dx + splat[3] * dy) + d_under * 2 * (splat[5] + splat[7] * dx + splat[8] * dy)
    )
    made[1] = -np.sum(
        d_over * 2 * (splat[3] * dx + splat[4] * dy) + d_under * 2 * (splat[6] + splat[8] * dx + splat[9] * dy)
    )
    made[2:5] = np.sum(d_over * dx * dx), np.sum(d_over * 2 * dx * dy), np.sum(d_over * dy * dy)
    made[5:7] = np.sum(d_under * 2 * dx), np.sum(d_under * 2 * dy)
    made[7:10] = np.sum(d_under * dx * dx), np.sum(d_under * 2 * dx * dy), np.sum(d_under * dy * dy)
    made[10] = np.sum(d_alpha * np.exp(-0.5 * q))
    made[11:14] = d_colour
    return made


def _gradient_rows(found: _ListEntry, alpha: Value, d_alpha: Value, d_colour: list[Value]) -> Value:
    """The same for the splat of every tile, [tiles, 16]."""
    dx, dy, s = found.dx, found.dy, [insert_axis(c, -1) for c in found.row]
    d_over = -0.5 * alpha * d_alpha / found.under
    d_under = -d_over * found.q

    def total(x: Value) -> Value:
        return sum_(x, -1)

    du = d_over * 2.0 * (s[2] * dx + s[3] * dy) + d_under * 2.0 * (s[5] + s[7] * dx + s[8] * dy)
    dv = d_over * 2.0 * (s[3] * dx + s[4] * dy) + d_under * 2.0 * (s[6] + s[8] * dx + s[9] * dy)
    columns = [
        -total(du), -total(dv), total(d_over * dx * dx), total(d_over * 2.0 * dx * dy), total(d_over * dy * dy),
        total(d_under * 2.0 * dx), total(d_under * 2.0 * dy), total(d_under * dx * dx),
        total(d_under * 2.0 * dx * dy), total(d_under * dy * dy), total(d_alpha * exp(-0.5 * found.q)), *d_colour,
    ]  # fmt: skip
    blank = zeros(columns[0].shape, columns[0].dtype)
    return stack([*columns, blank, blank], 1)


class _ListEntry:
    """The splat that stands at one place of every tile's list, at the pixels of the tiles."""

    def __init__(self, op: Composited, row: list[Value], ids: Value, there: Value, x: Value, y: Value) -> None:
        self.row, self.ids, self.colour = row, ids, row[11:14]
        s = [insert_axis(c, -1) for c in row]
        self.dx, self.dy = x + 0.5 - s[0], y + 0.5 - s[1]
        over = s[2] * self.dx * self.dx + 2.0 * s[3] * self.dx * self.dy + s[4] * self.dy * self.dy
        tilt = s[5] * self.dx + s[6] * self.dy
        bent = s[7] * self.dx * self.dx + 2.0 * s[8] * self.dx * self.dy + s[9] * self.dy * self.dy
        self.under = 1.0 + 2.0 * tilt + bent
        self.q = over / self.under
        self.alpha = s[10] * exp(-0.5 * self.q)
        self.hit = insert_axis(there, -1) & (1.0 + tilt > 0.0) & (self.alpha >= op.cutoff)


class _Scene:
    """Splats by tile, in graph ops: every tile's list is gone through at the same time."""

    def __init__(self, op: Composited, splats: Value, ids: Value, ranges: Value) -> None:
        self.op, self.splats = op, splats
        last = maximum(cast(dim_size(splats.shape[0]), i32) - 1, 0)
        self.ids = minimum(maximum(ids, 0), last)
        ranges = minimum(maximum(ranges, 0), cast(dim_size(ids.shape[0]), i32))
        self.most = ids.shape[0] if isinstance(ids.shape[0], int) else None  # steps, for derivatives of derivatives
        self.begin, self.end = ranges[:, 0], ranges[:, 1]
        self.longest = max_(self.end - self.begin) if op.tiles else zeros((), i32)
        kind, size = splats.dtype, op.tile
        pixel = iota((op.tile * op.tile,), 0, i32)
        tile = iota((op.tiles,), 0, i32)
        row, column = tile // op.columns, tile % op.columns
        self.x = cast(reshape(column * size, (op.tiles, 1)) + reshape(pixel % size, (1, size * size)), kind)
        self.y = cast(reshape(row * size, (op.tiles, 1)) + reshape(pixel // size, (1, size * size)), kind)

    def entry(self, k: Value) -> _ListEntry:
        at = self.begin + k
        there = at < self.end
        ids = gather(self.ids, where(there, at, 0))
        # an empty scene has no row to read: what is not there is not used
        rows = gather(concat([self.splats, zeros((1, COLUMNS), self.splats.dtype)], 0), ids)
        return _ListEntry(self.op, [rows[:, i] for i in range(COLUMNS)], ids, there, self.x, self.y)

    def goes_on(self, through: Value, taken: Value) -> Value:
        lit = through >= self.op.threshold
        return lit if self.op.max_steps == 0 else lit & (taken < self.op.max_steps)

    def picture(self, tiles: Value) -> Value:
        """[tiles, pixels, channels] as a picture."""
        op, channels = self.op, tiles.shape[-1]
        split = reshape(tiles, (op.rows, op.columns, op.tile, op.tile, channels))
        whole = reshape(split.transpose((0, 2, 1, 3, 4)), (op.rows * op.tile, op.columns * op.tile, channels))
        return whole[: op.height, : op.width]

    def in_tiles(self, picture: Value) -> Value:
        """A picture, [height, width] or with channels, as [tiles, pixels]; zeros beyond its edges."""
        op, rest = self.op, picture.shape[2:]
        below, right = op.rows * op.tile - op.height, op.columns * op.tile - op.width
        kind = picture.dtype
        padded = concat([picture, zeros((below, op.width, *rest), kind)], 0) if below else picture
        if right:
            padded = concat([padded, zeros((op.rows * op.tile, right, *rest), kind)], 1)
        split = reshape(padded, (op.rows, op.tile, op.columns, op.tile, *rest))
        order = (0, 2, 1, 3, *(4 + i for i in range(len(rest))))
        return reshape(split.transpose(order), (op.tiles, op.tile * op.tile, *rest))


def scenes() -> list[tuple[list[np.ndarray], dict[str, Any]]]:
    """Small scenes for samples: inputs of `splat_raster`, and fields."""
    cases: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (4, 0, {"width": 7, "height": 5, "tile": 4, "cutoff": 1 / 255, "threshold": 0.01, "max_steps": 0}),
        (6, 1, {"width": 8, "height": 8, "tile": 8, "cutoff": 0.05, "threshold": 0.2, "max_steps": 0}),
        (5, 2, {"width": 6, "height": 6, "tile": 3, "cutoff": 1 / 255, "threshold": 0.01, "max_steps": 2}),
        (0, 3, {"width": 3, "height": 2, "tile": 4, "cutoff": 1 / 255, "threshold": 0.01, "max_steps": 0}),
    )
    found = []
    for count, seed, fields in cases:
        rng = np.random.default_rng(seed)
        a = rng.uniform(-0.7, 0.7, (count, 2, 2))
        n = a @ a.transpose(0, 2, 1) + np.eye(2) * 0.15
        splats = np.zeros((count, COLUMNS))
        splats[:, 0] = rng.uniform(0, fields["width"], count)
        splats[:, 1] = rng.uniform(0, fields["height"], count)
        splats[:, 2], splats[:, 3], splats[:, 4] = n[:, 0, 0], n[:, 0, 1], n[:, 1, 1]
        splats[:, 5:7] = rng.uniform(-0.02, 0.02, (count, 2))
        splats[:, 7], splats[:, 9] = rng.uniform(0.001, 0.01, (2, count))
        splats[:, 10:14] = rng.uniform(0.2, 0.9, (count, 4))
        reach = np.sqrt(2 * np.log(np.maximum(splats[:, 10], 0.2) / fields["cutoff"]))
        inverse = np.linalg.inv(n)
        outlines = np.stack([splats[:, 0], splats[:, 1], inverse[:, 0, 0], inverse[:, 0, 1], inverse[:, 1, 1]], 1)
        outlines[:, 2:] *= 2 * (reach**2)[:, None]  # more than they cover
        half = np.sqrt(outlines[:, [2, 2, 4, 4]]) * [-1, 1, -1, 1]
        bounds = np.stack([outlines[:, 0], outlines[:, 0], outlines[:, 1], outlines[:, 1]], 1) + half + [-1, 1, -1, 1]
        order = rng.permutation(count).astype(np.int64)
        bin_ = SplatBin(fields["width"], fields["height"], fields["tile"], max(8 * count, 4))
        lists = bin_.numpy(outlines, order, np.ones(count, bool))
        background = rng.uniform(0, 1, 3)
        floats = [a.astype(np.float32) for a in (splats, bounds, background)]
        found.append(([*floats, *lists, order], fields))
    return found
