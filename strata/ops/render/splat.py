"""Gaussian splatting: a scene of ellipsoids rendered to a picture, prepared for it, and its gradient.

The contract: rotations are quaternions (w, x, y, z), used as they are given; opacities are opacities from 0 to 1, no
logits; scales are logarithms. What is behind the camera, too thin, or not a number is not drawn, and has no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from strata.core import Dim, TensorType, f32
from strata.errors import OptionError, ShapeError
from strata.kinds import whole_number
from strata.mir import Sample, Value, function, op, pullback_once
from strata.ops.base.creation import iota, zeros
from strata.ops.base.elementwise import maximum, power
from strata.ops.base.frontend import Operand, as_value, promoted, same_shape
from strata.ops.base.movement import concat, reshape, stack
from strata.ops.elementwise.logic import cast, where
from strata.ops.elementwise.math import sqrt
from strata.ops.indexing.indexing import gather
from strata.ops.indexing.sorting import argsort, searchsorted
from strata.ops.reduce.reduce import max_
from strata.ops.render import oracle
from strata.ops.render.project import (
    CameraView,
    Projected,
    cross,
    dot,
    finite_parts,
    project,
    project_axes,
    rotated_axes,
)
from strata.ops.render.raster import SplatBin, SplatRaster, WholeScene

META = 23
GAMMA = 2.2
NO_ENTRIES = 4294967295.0  # where the list of an empty tile begins, in a prepared scene
PARAMETERS = 11


class GaussianSplats(WholeScene):
    """What renderers share: the picture, and how splats are cut off."""

    width: int = 64
    height: int = 64
    tile_size: int = 16
    radius_scale: float = 1.6
    alpha_cutoff: float = 1 / 255
    max_splat_steps: int = 32
    transmittance_threshold: float = 0.01
    max_list_entries: int = 576

    @property
    def columns(self) -> int:
        return -(-self.width // self.tile_size)

    @property
    def rows(self) -> int:
        return -(-self.height // self.tile_size)

    @property
    def tiles(self) -> int:
        return self.columns * self.rows

    def check_fields(self) -> None:
        for name in ("width", "height", "tile_size", "max_list_entries", "max_splat_steps"):
            self._check_field(name, whole_number(getattr(self, name)) is not None, "a whole number")
        for name in ("width", "height", "tile_size", "max_list_entries"):
            self._check_field(name, getattr(self, name) >= 1, "at least 1")
        for name in ("radius_scale", "alpha_cutoff"):
            self._check_field(name, getattr(self, name) > 0, "above 0")
        self._check_field("max_splat_steps", self.max_splat_steps >= 0, "0 (no limit) or more")
        self._check_field("transmittance_threshold", 0 <= self.transmittance_threshold < 1, "from 0 to 1")

    def _check_field(self, name: str, ok: bool, wanted: str) -> None:
        self.require(ok, f"{name} is {getattr(self, name)!r}, not {wanted}", code="O279", error=OptionError)

    def rasterize(self, made: Projected, background: Value, lists: tuple[Value, ...], order: Value) -> Value:
        """The picture [height, width, 4]: linear light, then gamma."""
        raster = SplatRaster(
            self.width, self.height, self.tile_size, self.alpha_cutoff, self.transmittance_threshold,
            self.max_splat_steps,
        )  # fmt: skip
        linear = raster(made.rows, made.bounds, background, *lists, order)
        light = power(maximum(linear[:, :, :3], 0.0), GAMMA)
        return concat([light, linear[:, :, 3:]], 2)


@dataclass(frozen=True)
class Scene:
    """The inputs of a renderer as rows."""

    op: GaussianSplats
    positions: Value
    log_scales: Value
    rotations: Value
    opacities: Value
    colors: Value
    sh: Value
    meta: Value
    coefficients: int

    @staticmethod
    def of(op: Any, *inputs: Value) -> Scene:
        positions, log_scales, rotations, opacities, colors, sh, meta = inputs
        count = opacities.shape[0]
        return Scene(
            op, reshape(positions, (count, 3)), reshape(log_scales, (count, 3)), reshape(rotations, (count, 4)),
            opacities, reshape(colors, (count, 3)), reshape(sh, (count, op.sh_coefficients, 3)), meta,
            op.sh_coefficients,
        )  # fmt: skip

    @cached_property
    def camera(self) -> CameraView:
        return CameraView.of(self.meta, self.op.height)

    def binned(self) -> tuple[Projected, tuple[Value, ...]]:
        made, op = project(self), self.op
        lists = SplatBin(op.width, op.height, op.tile_size, op.max_list_entries)(made.outlines, made.order, made.valid)
        return made, lists


class SplatScene(GaussianSplats):
    """Ops that take a scene: positions [3N], log scales [3N], rotations [4N], opacities [N], colours [3N],
    spherical harmonics [3N · coefficients], and the camera, background and settings as 23 numbers. Where these
    repeat a field, the field counts."""

    sh_coefficients: int = 0

    def check_inputs_of_scene(self, *types: TensorType) -> Dim:
        self.check_fields()
        self._check_field("sh_coefficients", self.sh_coefficients >= 0, "0 or more")
        positions, opacities = types[0], types[3]
        self.require_dtype(positions.dtype.is_float, f"positions are floats, got {positions}", code="D104")
        self.require(opacities.ndim == 1, f"opacities are [N], got {opacities}", code="S291")
        count = opacities.shape[0]
        wanted = (
            ("positions", 3 * count), ("log_scales", 3 * count), ("rotations", 4 * count), ("opacities", count),
            ("colors", 3 * count), ("sh", 3 * count * self.sh_coefficients), ("meta", META),
        )  # fmt: skip
        for (name, size), given in zip(wanted, types, strict=True):
            kind = TensorType(positions.dtype, (size,))
            self.require_dtype(given.dtype is positions.dtype, f"{name} is {given}, expected {kind}", code="D103")
            self.require(same_shape(given.shape, kind.shape), f"{name} is {given}, expected {kind}", code="S291")
        return count


@op("gaussian_splat_render")
class GaussianSplatRender(SplatScene):
    """The picture of a scene, [height · width · 4]: red, green, blue with gamma 2.2, and opacity."""

    def infer(
        self, positions: TensorType, log_scales: TensorType, rotations: TensorType, opacities: TensorType,
        colors: TensorType, sh: TensorType, meta: TensorType,
    ) -> TensorType:  # fmt: skip
        self.check_inputs_of_scene(positions, log_scales, rotations, opacities, colors, sh, meta)
        return positions.with_shape((self.height * self.width * 4,))

    def numpy(self, *arrays: np.ndarray) -> np.ndarray:
        return oracle.render(self, *arrays)

    def decompose(self, *inputs: Value) -> Value:
        scene = Scene.of(self, *inputs)
        made, lists = scene.binned()
        picture = self.rasterize(made, scene.camera.background, lists, made.order)
        return reshape(picture, (self.height * self.width * 4,))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(*arrays, **fields, rtol=1e-4) for arrays, fields in small_scenes()]


@op("gaussian_splat_render_backward")
class GaussianSplatRenderBackward(SplatScene):
    """The gradient of a picture in the scene, of the scene and the picture's cotangent [height · width · 4].

    One after the other: positions 3N, log scales 3N, rotations 4N, opacities N, colours 3N, harmonics 3N · max(1,
    coefficients). It is the exact gradient of what is rendered.
    """

    def infer(
        self, positions: TensorType, log_scales: TensorType, rotations: TensorType, opacities: TensorType,
        colors: TensorType, sh: TensorType, meta: TensorType, ct: TensorType,
    ) -> TensorType:  # fmt: skip
        count = self.check_inputs_of_scene(positions, log_scales, rotations, opacities, colors, sh, meta)
        picture = positions.with_shape((self.height * self.width * 4,))
        self.require(ct == picture, f"ct is {ct}, expected {picture}", code="S291")
        return positions.with_shape((count * (14 + 3 * max(self.sh_coefficients, 1)),))

    def decompose(self, *inputs: Value) -> Value:
        scene, ct = inputs[:7], inputs[7]
        picture = GaussianSplatRender(**self.static_fields()).decompose(*scene)
        grads = pullback_once((picture,), (ct,), scene[:6])
        count = scene[3].shape[0]  # which flat sizes follow from: one that is given may be a number
        sizes = [count * width for width in (3, 3, 4, 1, 3, 3 * max(self.sh_coefficients, 1))]
        if self.sh_coefficients == 0:
            grads = [*grads[:5], None]
        parts = [zeros((n,), ct.dtype) if g is None else reshape(g, (n,)) for g, n in zip(grads, sizes, strict=True)]
        return concat(parts, 0)

    @classmethod
    def samples(cls) -> list[Sample]:
        found = []
        for arrays, fields in small_scenes()[1:2]:
            size = fields["width"] * fields["height"] * 4
            ct = np.random.default_rng(3).standard_normal(size).astype(np.float32)
            found.append(Sample(*arrays, ct, **fields, grad=False))
        return found


@op("gaussian_splat_prepare")
class GaussianSplatPrepare(SplatScene):
    """A scene made ready for `gaussian_splat_rasterize`, as one vector.

    Colour and opacity 4N, who is seen N, places of the camera in the splats' frames 3N, inverse scales 3N, rotations
    4N, ids by tile, begin and end of each tile's, rays 3 · height · width, and eleven settings; N is at least 1.
    """

    def infer(
        self, positions: TensorType, log_scales: TensorType, rotations: TensorType, opacities: TensorType,
        colors: TensorType, sh: TensorType, meta: TensorType,
    ) -> TensorType:  # fmt: skip
        count = self.check_inputs_of_scene(positions, log_scales, rotations, opacities, colors, sh, meta)
        rest = self.max_list_entries + 2 * self.tiles + 3 * self.height * self.width + PARAMETERS
        return positions.with_shape((15 * (max(count, 1) if isinstance(count, int) else count) + rest,))

    def decompose(self, *inputs: Value) -> Value:
        scene = Scene.of(self, *inputs)
        camera, kind = scene.camera, scene.positions.dtype
        made, (ids, ranges, *_) = scene.binned()
        parts = finite_parts(scene, camera)
        way = [c - p for c, p in zip(camera.position, parts.position, strict=True)]
        seen = camera.seen((way[0], way[1], way[2]))
        axes = rotated_axes(parts.rotation, camera)
        inverse = [1.0 / (3.0 * s) for s in parts.scale]
        local = [dot(a, seen) * i for a, i in zip(axes, inverse, strict=True)]
        count = scene.opacities.shape[0]
        columns = [
            stack([*parts.colour, parts.opacity], 1), stack([cast(made.valid, kind)], 1), stack(local, 1),
            stack(inverse, 1), stack(list(parts.rotation), 1),
        ]  # fmt: skip
        flat = [reshape(x, (x.shape[0] * x.shape[1],)) for x in columns]
        if count == 0:
            flat = [zeros((x.shape[1],), kind) for x in columns]
        empty = (ranges[:, 1] - ranges[:, 0]) <= 0
        begins = where(empty, NO_ENTRIES, cast(ranges[:, 0], kind))
        spans = stack([begins, where(empty, 0.0, cast(ranges[:, 1], kind))], 1)
        numbers = [self.width, self.height, self.tile_size, self.columns, self.alpha_cutoff,
                   self.transmittance_threshold]  # fmt: skip
        settings = [as_value(np.asarray(numbers, kind.np)), camera.background,
                    as_value(np.asarray([self.max_splat_steps, 0], kind.np))]  # fmt: skip
        return concat([*flat, cast(ids, kind), reshape(spans, (2 * self.tiles,)), self._rays(camera), *settings], 0)

    def _rays(self, camera: CameraView) -> Value:
        """Directions through the middles of pixels, in the world."""
        kind = camera.focal.dtype
        x = (cast(iota((1, self.width), 1, f32), kind) + 0.5 - 0.5 * self.width) / camera.focal
        y = (cast(iota((self.height, 1), 0, f32), kind) + 0.5 - 0.5 * self.height) / camera.focal
        scale = 1.0 / sqrt(x * x + y * y + 1.0)
        world = [(camera.right[i] * x + camera.up[i] * y + camera.forward[i]) * scale for i in range(3)]
        return reshape(stack(world, 2), (self.height * self.width * 3,))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(*arrays, **fields, rtol=1e-4) for arrays, fields in small_scenes()[1:2]]


@op("gaussian_splat_rasterize")
class GaussianSplatRasterize(GaussianSplats):
    """The picture [height · width · 4] of a scene that `gaussian_splat_prepare` made ready, with its camera."""

    def infer(self, prepared: TensorType, meta: TensorType) -> TensorType:
        self.check_fields()
        self.require_dtype(prepared.dtype.is_float, f"a prepared scene has floats, got {prepared}", code="D104")
        self.require(meta == prepared.with_shape((META,)), f"meta is {meta}, expected {META} numbers", code="S291")
        size = prepared.shape[0] if prepared.ndim == 1 else None
        rest = self._rest
        ok = isinstance(size, int) and size >= rest + 15 and (size - rest) % 15 == 0
        self.require(
            ok, f"a prepared scene of this picture has {rest} numbers and 15 for each splat, got {prepared}",
            code="S291",
        )  # fmt: skip
        return prepared.with_shape((self.height * self.width * 4,))

    @property
    def _rest(self) -> int:
        return self.max_list_entries + 2 * self.tiles + 3 * self.height * self.width + PARAMETERS

    def decompose(self, prepared: Value, meta: Value) -> Value:
        count = (int(prepared.shape[0]) - self._rest) // 15
        camera = CameraView.of(meta, self.height)
        at = 0

        def take(width: int) -> list[Value]:
            nonlocal at
            rows = reshape(prepared[at : at + count * width], (count, width))
            at += count * width
            return [rows[:, i] for i in range(width)]

        red, green, blue, opacity = take(4)
        drawn = take(1)[0] > 0.5
        local, inverse, q = take(3), take(3), take(4)
        ids = cast(prepared[at : at + self.max_list_entries], f32)
        spans = reshape(prepared[at + self.max_list_entries : at + self.max_list_entries + 2 * self.tiles], (-1, 2))
        axes = rotated_axes((q[0], q[1], q[2], q[3]), camera)
        planes = (cross(axes[1], axes[2]), cross(axes[2], axes[0]), cross(axes[0], axes[1]))
        det = dot(axes[0], planes[0])
        safe = where(drawn, det, 1.0)
        offsets = [where(drawn, a / i, 0.0) / safe for a, i in zip(local, inverse, strict=True)]
        away = [-(planes[0][k] * offsets[0] + planes[1][k] * offsets[1] + planes[2][k] * offsets[2]) for k in range(3)]
        scale = tuple(1.0 / (3.0 * where(drawn, i, 1.0)) for i in inverse)
        made = project_axes(
            self, camera, (away[0], away[1], away[2]), scale, axes, opacity, (red, green, blue), drawn,  # type: ignore[arg-type]
        )  # fmt: skip
        lists, order = _by_splat(ids, spans, count)
        picture = self.rasterize(made, camera.background, lists, order)
        return reshape(picture, (self.height * self.width * 4,))

    @classmethod
    def samples(cls) -> list[Sample]:
        found = []
        for arrays, fields in small_scenes()[:1]:
            prepared = GaussianSplatPrepare(**fields).numpy(*arrays)
            rest = {k: v for k, v in fields.items() if k != "sh_coefficients"}
            found.append(Sample(prepared, arrays[6], **rest, grad=False))
        return found


def _by_splat(ids: Value, spans: Value, count: int) -> tuple[tuple[Value, ...], Value]:
    """The lists of a prepared scene as the rasteriser takes them, with the entries of each splat found again."""
    from strata.core import i32, i64

    is_empty = spans[:, 1] <= spans[:, 0]
    ranges = cast(where(stack([is_empty, is_empty], 1), 0.0, spans), i32)
    used = max_(ranges)
    numbers = cast(ids, i32)
    place = iota((ids.shape[0],), 0, i32)
    owner = where(place < used, numbers, count)
    by_owner = argsort(owner)
    starts = searchsorted(gather(owner, by_owner), iota((count + 1,), 0, i32))
    order = iota((count,), 0, i64)
    return (numbers, ranges, cast(by_owner, i32), cast(starts, i32)), order


def small_scenes() -> list[tuple[list[np.ndarray], dict[str, Any]]]:
    """Small scenes for samples: inputs of `gaussian_splat_render`, and fields."""
    cases = (
        (3, 0, {"width": 6, "height": 5, "tile_size": 4, "sh_coefficients": 0, "max_list_entries": 32}),
        (4, 1, {"width": 5, "height": 6, "tile_size": 8, "sh_coefficients": 4, "max_list_entries": 32,
                "max_splat_steps": 0}),
        (0, 2, {"width": 3, "height": 3, "tile_size": 4, "sh_coefficients": 1, "max_list_entries": 4}),
    )  # fmt: skip
    found = []
    for count, seed, fields in cases:
        rng = np.random.default_rng(seed)
        rotations = rng.standard_normal((count, 4))
        rotations /= np.linalg.norm(rotations, axis=1, keepdims=True)
        n: Any = fields["sh_coefficients"]
        meta = [0, 0.2, -3, 0, 0, 0, 0, 1, 0, 50, 0.1, 100, 0.2, 0.3, 0.4, *[0] * 8]
        arrays = [
            rng.uniform(-0.6, 0.6, 3 * count), rng.uniform(-1.8, -1.0, 3 * count), rotations.reshape(-1),
            rng.uniform(0.3, 0.9, count), rng.uniform(0, 1, 3 * count), rng.uniform(-0.5, 0.5, 3 * count * n),
            np.asarray(meta),
        ]  # fmt: skip
        found.append(([np.asarray(a, np.float32) for a in arrays], fields))
    return found


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def splat_camera(
    position: Any, target: Any, up: Any = (0.0, 1.0, 0.0), *, fov: float = 60.0, near: float = 0.01,
    far: float = 1000.0, background: Any = (0.0, 0.0, 0.0),
) -> Value:  # fmt: skip
    """A camera for `splat_render`: where it is, what it looks at, what is up; `fov` is its height in degrees."""
    parts = [as_value(np.asarray(x, np.float32)) if not isinstance(x, Value) else x for x in (position, target, up)]
    shade = background if isinstance(background, Value) else as_value(np.asarray(background, np.float32))
    for name, part in zip(("position", "target", "up", "background"), (*parts, shade), strict=True):
        if part.shape != (3,):
            raise ShapeError(f"splat_camera: {name} has 3 numbers, got {part.type}", code="S291")
    if not 0 < fov < 180:
        raise OptionError(f"splat_camera: fov is {fov!r}, not above 0 and below 180 degrees", code="O279")
    lens = as_value(np.asarray([fov, near, far], np.float32))
    return concat([*promoted(*parts, lens, shade), zeros((8,), parts[0].dtype)], 0)


@function()
def splat_render(
    positions: Operand, log_scales: Operand, rotations: Operand, opacities: Operand, colors: Operand | None = None,
    sh: Operand | None = None, *, camera: Operand, width: int = 64, height: int = 64, tile_size: int = 16,
    radius_scale: float = 1.6, alpha_cutoff: float = 1 / 255, max_splat_steps: int = 32,
    transmittance_threshold: float = 0.01, max_list_entries: int | None = None,
) -> Value:  # fmt: skip
    """The picture [height, width, 4] of N Gaussian splats; differentiable in everything, the camera too.

    positions, log_scales [N, 3], rotations [N, 4] as (w, x, y, z), opacities [N] from 0 to 1, colors [N, 3] or
    harmonics sh [N, coefficients, 3], camera from `splat_camera`. `max_list_entries` bounds the pairs of a tile and a
    splat: 16 a splat by default.
    """
    given = promoted(positions, log_scales, rotations, opacities, camera)
    if given[3].ndim != 1:
        raise ShapeError(f"splat_render: opacities is {given[3].type}, expected one number for each splat", code="S291")
    count = given[3].shape[0]
    kind = given[0].dtype
    if colors is None and sh is None:
        raise OptionError("splat_render: needs colors, sh or both", code="O279")
    plain = zeros((count, 3), kind) if colors is None else cast(as_value(colors), kind)
    harmonics = zeros((count, 0, 3), kind) if sh is None else cast(as_value(sh), kind)
    wanted = (("positions", given[0], (count, 3)), ("log_scales", given[1], (count, 3)),
              ("rotations", given[2], (count, 4)), ("opacities", given[3], (count,)),
              ("colors", plain, (count, 3)))  # fmt: skip
    for name, x, shape in wanted:
        if not same_shape(x.shape, shape):
            raise ShapeError(f"splat_render: {name} is {x.type}, expected {TensorType(kind, shape)}", code="S291")
    if harmonics.ndim != 3 or not same_shape(harmonics.shape, (count, harmonics.shape[1], 3)):
        raise ShapeError(f"splat_render: sh is {harmonics.type}, expected [N, coefficients, 3]", code="S291")
    coefficients = int(harmonics.shape[1])
    most = max_list_entries if max_list_entries is not None else max(576, 16 * count) if isinstance(count, int) else 576
    flat = [reshape(x, (-1,)) if x.ndim > 1 else x for x in (given[0], given[1], given[2], given[3], plain)]
    last = reshape(harmonics, (count * coefficients * 3,))
    made = GaussianSplatRender(
        width, height, tile_size, radius_scale, alpha_cutoff, max_splat_steps, transmittance_threshold, most,
        coefficients,
    )(*flat, last, given[4])  # fmt: skip
    return reshape(made, (height, width, 4))
