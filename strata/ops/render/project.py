"""Splats through a camera: from ellipsoids in space to what they are in the picture, exact in perspective.

With v the way from the camera to a splat, P the inverse of its (scaled) covariance, a ray d passes it at
q(d) = min over t of |P^½ (t d - v)|² = (vᵀP v dᵀP d - (dᵀP v)²) / dᵀP d. The numerator is dᵀ[v]ᵀ adj(P) [v] d, [v] the
cross product by v: zero at d = v, so that around the centre of the splat it is a form of two variables, without a
difference of large numbers. Everything here is made of ops that exist, so that derivatives are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strata.mir import Value
from strata.ops.base.creation import zeros
from strata.ops.base.elementwise import maximum, minimum
from strata.ops.base.movement import concat, stack
from strata.ops.elementwise.logic import isfinite, where
from strata.ops.elementwise.math import exp, log, sqrt, tan
from strata.ops.elementwise.numeric import clip
from strata.ops.elementwise.rounding import abs_
from strata.ops.indexing.sorting import argsort
from strata.ops.reduce.reduce import all_, max_

if TYPE_CHECKING:
    from strata.ops.render.splat import Scene

C0, C1 = 0.28209479177387814, 0.4886025119029199  # real spherical harmonics of degree 0 and 1
SMALLEST = 1e-6 / 3  # half of a splat's axis
LONGEST_TURN = 1e3  # of a number of a rotation: its square scales the axes, whose powers must stay numbers
LARGEST_LOG = 11.0  # of a scale: beyond it a splat is as good as everywhere
FARTHEST = 1e5  # half axes from which on a splat covers nothing
NEAREST = 1e-4  # depth in front of the camera
FAR_AWAY = 1e8  # beyond it, squares of distances are too large
NO_LENGTH = 1e-8
NARROWEST = 0.125  # pixels, of a splat's short half axis

Vector = tuple[Value, Value, Value]


def dot(a: Vector, b: Vector) -> Value:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def cross(a: Vector, b: Vector) -> Vector:
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


def normalized(a: Vector) -> Vector:
    """A vector of length 1; of one without a length, (0, 0, 1)."""
    square = dot(a, a)
    has_length = square > NO_LENGTH * NO_LENGTH
    scale = 1.0 / sqrt(where(has_length, square, 1.0))
    return (
        where(has_length, a[0] * scale, 0.0),
        where(has_length, a[1] * scale, 0.0),
        where(has_length, a[2] * scale, 1.0),
    )


@dataclass(frozen=True)
class CameraView:
    """A camera as values: where it is, its axes, pixels of a unit at distance 1, background."""

    position: Vector
    right: Vector
    up: Vector
    forward: Vector
    focal: Value
    near: Value
    far: Value
    background: Value

    @staticmethod
    def of(meta: Value, height: int) -> CameraView:
        """The camera of the first fifteen numbers of `meta`."""
        n = [meta[i] for i in range(12)]
        position = (n[0], n[1], n[2])
        forward = normalized((n[3] - n[0], n[4] - n[1], n[5] - n[2]))
        right = normalized(cross((n[6], n[7], n[8]), forward))
        up = normalized(cross(forward, right))
        focal = 0.5 * height / tan(n[9] * (3.141592653589793 / 360.0))
        return CameraView(position, right, up, forward, focal, n[10], n[11], meta[12:15])

    def seen(self, v: Vector) -> Vector:
        """A direction in the camera's axes."""
        return dot(self.right, v), dot(self.up, v), dot(self.forward, v)


@dataclass(frozen=True)
class Projected:
    """Splats in the picture: what the rasteriser takes, and who is seen."""

    rows: Value  # [N, 16]
    bounds: Value  # [N, 4]
    outlines: Value  # [N, 5]
    order: Value  # ids, nearest first
    valid: Value


@dataclass(frozen=True)
class SplatParts:
    """Splats, one vector for each number: none of them infinite or NaN."""

    position: Vector
    scale: Vector  # half axes times the radius scale
    rotation: tuple[Value, Value, Value, Value]  # w, x, y, z; not normalised
    opacity: Value
    colour: Vector
    is_finite: Value


def finite_parts(scene: Scene, camera: CameraView) -> SplatParts:
    """The parameters of splats. One that has NaN, infinity or a rotation out of all proportion is not drawn, and what
    stands for it is harmless."""
    columns = [
        [x[:, i] for i in range(width)]
        for x, width in ((scene.positions, 3), (scene.log_scales, 3), (scene.rotations, 4), (scene.colors, 3))
    ]
    opacities = scene.opacities
    lists = [*columns, [opacities]]
    harmonics: list[list[Value]] = []
    if scene.coefficients:
        harmonics = [[scene.sh[:, k, c] for c in range(3)] for k in range(scene.coefficients)]
        lists += harmonics[:4]
    good = isfinite(opacities)
    for some in lists:
        for x in some:
            good = good & isfinite(x)
    for x in columns[2]:
        good = good & (abs_(x) <= LONGEST_TURN)
    safe = [[where(good, x, 0.0) for x in some] for some in lists]
    p, ls, q, rgb = safe[:4]
    s0, s1, s2 = (maximum(scene.op.radius_scale * exp(clip(x, None, LARGEST_LOG)), SMALLEST) for x in ls)
    position = (p[0], p[1], p[2])
    colour = _colour(position, rgb, safe[5:], camera)
    return SplatParts(position, (s0, s1, s2), (q[0], q[1], q[2], q[3]), clip(safe[4][0], 0.0, 1.0), colour, good)


def _colour(position: Vector, rgb: list[Value], sh: list[list[Value]], camera: CameraView) -> Vector:
    """Colours seen from the camera: harmonics of degree 0 and 1, or the plain colours where no splat has any."""
    plain = [(clip(c, 0.0, 1.0) - 0.5) * (1 / C0) for c in rgb]
    if not sh:
        base, bands = plain, []
    else:
        has_none = all_(stack([max_abs(c) for c in sh[0]], 0) <= NO_LENGTH)
        base = [where(has_none, p, c) for p, c in zip(plain, sh[0], strict=True)]
        bands = sh[1:4]
    made = [0.5 + C0 * c for c in base]
    if bands:
        way = tuple(a - b for a, b in zip(camera.position, position, strict=True))
        x, y, z = normalized(way)  # type: ignore[arg-type]
        for factor, band in zip((-C1 * y, C1 * z, -C1 * x), bands, strict=False):
            made = [m + factor * c for m, c in zip(made, band, strict=True)]
    return made[0], made[1], made[2]


def max_abs(x: Value) -> Value:
    """The largest magnitude of a vector; 0 of none."""
    return max_(concat([abs_(x), zeros((1,), x.dtype)], 0))


def rotated_axes(q: tuple[Value, Value, Value, Value], camera: CameraView) -> tuple[Vector, Vector, Vector]:
    """The rows of Rᵀ, in the camera's axes: v ↦ v + 2 ((v × q + w v) × q)."""
    w, x, y, z = q
    rest = 1.0 - 2.0 * (x * x + y * y + z * z)
    rows = (
        (rest + 2.0 * x * x, 2.0 * (x * y + w * z), 2.0 * (x * z - w * y)),
        (2.0 * (x * y - w * z), rest + 2.0 * y * y, 2.0 * (y * z + w * x)),
        (2.0 * (x * z + w * y), 2.0 * (y * z - w * x), rest + 2.0 * z * z),
    )
    a, b, c = (camera.seen(row) for row in rows)
    return a, b, c


def symmetric(weights: list[Value], rows: tuple[Vector, ...]) -> tuple[Value, ...]:
    """Σ w r rᵀ as xx, xy, xz, yy, yz, zz."""
    pairs = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))
    made = []
    for i, j in pairs:
        total = weights[0] * rows[0][i] * rows[0][j]
        for w, row in zip(weights[1:], rows[1:], strict=True):
            total = total + w * row[i] * row[j]
        made.append(total)
    return tuple(made)


def project(scene: Scene) -> Projected:
    """What each splat is in the picture."""
    op, camera = scene.op, scene.camera
    parts = finite_parts(scene, camera)
    offset = tuple(p - c for p, c in zip(parts.position, camera.position, strict=True))
    where_seen = camera.seen(offset)  # type: ignore[arg-type]
    return project_axes(
        op, camera, where_seen, parts.scale, rotated_axes(parts.rotation, camera), parts.opacity, parts.colour,
        parts.is_finite,
    )  # fmt: skip


def _is_plausible(seen: Vector, scale: Vector, reach: Value, focal: Value) -> Value:
    """Whether a splat is in front of the camera, not too far to compute with, and not certainly too thin to be drawn:
    the short axis of what is seen is no longer than the middle one of the splat."""
    x, y, z = seen
    s0, s1, s2 = scale
    is_here = (z > NEAREST) & (maximum(maximum(abs_(x), abs_(y)), z) < FAR_AWAY)
    middle = maximum(minimum(s0, s1), minimum(maximum(s0, s1), s2))
    return is_here & (middle * sqrt(reach) * focal * (z * z + x * x + y * y) >= 0.2 * NARROWEST * z * z * z)


def project_axes(
    op: object, camera: CameraView, seen: Vector, scale: Vector, axes: tuple[Vector, Vector, Vector], opacity: Value,
    colour: Vector, drawn: Value,
) -> Projected:  # fmt: skip
    """The same for splats whose places and axes are given as the camera sees them."""
    width, height = op.width, op.height  # type: ignore[attr-defined]
    cutoff = op.alpha_cutoff  # type: ignore[attr-defined]
    focal = camera.focal
    visible = opacity >= cutoff
    reach = maximum(2.0 * log(where(visible, opacity, 1.0) / cutoff), 0.0)  # κ²
    drawn = drawn & visible & _is_plausible(seen, scale, reach, focal)
    # what is not drawn stands for itself as something harmless, so that its gradient is 0 and not NaN
    x, y, z = where(drawn, seen[0], 0.0), where(drawn, seen[1], 0.0), where(drawn, seen[2], 1.0)
    scale = (where(drawn, scale[0], 1.0), where(drawn, scale[1], 1.0), where(drawn, scale[2], 1.0))
    mx, my = x / z, y / z
    planes = (cross(axes[1], axes[2]), cross(axes[2], axes[0]), cross(axes[0], axes[1]))
    s0, s1, s2 = scale
    squares = [s * s for s in scale]
    cxx, cxy, cxz, cyy, cyz, czz = symmetric(squares, planes)
    qxx, qxy, qxz, qyy, qyz, qzz = symmetric(
        [squares[1] * squares[2], squares[0] * squares[2], squares[0] * squares[1]], axes
    )
    # the numerator, around the centre
    j00 = cyy - 2.0 * my * cyz + my * my * czz
    j11 = cxx - 2.0 * mx * cxz + mx * mx * czz
    j01 = mx * cyz + my * cxz - cxy - mx * my * czz
    # the denominator, over its value at the centre
    gx, gy, gz = qxx * mx + qxy * my + qxz, qxy * mx + qyy * my + qyz, qxz * mx + qyz * my + qzz
    at_centre = gx * mx + gy * my + gz
    inverse = 1.0 / (focal * focal * at_centre)
    over = z * z * inverse
    u, v = focal * mx + 0.5 * width, focal * my + 0.5 * height
    blank = 0.0 * opacity
    rows = [
        u, v, over * j00, over * j01, over * j11, focal * gx * inverse, focal * gy * inverse,
        qxx * inverse, qxy * inverse, qyy * inverse, opacity, *colour, blank, blank,
    ]  # fmt: skip

    # who is seen, and where
    det = dot(axes[0], planes[0])
    scaled = reach / where(abs_(det) > 1e-6, det * det, 1.0)
    outline = _outline(op, focal, (x, y, z), scaled, (cxx, cxy, cxz, cyy, cyz, czz), (j00, j01, j11))
    # a splat around the camera covers the picture, if the sphere around it meets what the camera sees
    is_met = _meets_view(op, camera, (x, y, z), sqrt(reach) * maximum(maximum(s0, s1), s2))
    is_small = sqrt(reach) * minimum(minimum(s0, s1), s2) < FARTHEST
    valid = drawn & is_small & (abs_(det) > 1e-6) & where(outline.is_near, is_met, outline.is_inside)
    outlines = [where(valid, o, 1.0) for o in outline.numbers]
    bounds = _box(op, outlines, outline.is_near)
    distance = sqrt(x * x + y * y + z * z)
    order = argsort(where(valid, distance, float("inf")))
    return Projected(stack(rows, 1), stack(bounds, 1), stack(outlines, 1), order, valid)


@dataclass(frozen=True, slots=True)
class _Outline:
    """The ellipse around a splat in the picture; where the camera is inside the splat, the whole picture."""

    numbers: list[Value]  # its centre u and v, and its covariance uu, uv, vv, in pixels
    is_near: Value  # the camera is inside
    is_inside: Value  # it is neither too thin nor too large, and overlaps the picture


def _outline(
    op: object, focal: Value, place: Vector, scaled: Value, covariance: tuple[Value, ...], conic: Vector
) -> _Outline:
    """The outline of q ≤ κ², by the dual conic; `scaled` is κ² over the squared determinant of the axes."""
    width, height = op.width, op.height  # type: ignore[attr-defined]
    x, y, z = place
    cxx, cxy, cxz, cyy, cyz, czz = covariance
    j00, j01, j11 = conic
    depth = z * z - scaled * czz
    is_near = depth <= 0.0  # the camera is inside, or the outline goes behind it
    under = where(is_near, 1.0, depth * depth)
    outline_xx = (scaled * z * z * j11 - scaled * scaled * (cxx * czz - cxz * cxz)) / under
    outline_yy = (scaled * z * z * j00 - scaled * scaled * (cyy * czz - cyz * cyz)) / under
    outline_xy = (scaled * scaled * (cxz * cyz - cxy * czz) - scaled * z * z * j01) / under
    first = where(is_near, 1.0, depth)
    cu = focal * (x * z - scaled * cxz) / first + 0.5 * width
    cv = focal * (y * z - scaled * cyz) / first + 0.5 * height
    sxx, sxy, syy = (focal * focal * s for s in (outline_xx, outline_xy, outline_yy))
    half, gap = 0.5 * (sxx + syy), 0.5 * (sxx - syy)
    spread = sqrt(maximum(gap * gap + sxy * sxy, 0.0))
    long, short = sqrt(maximum(half + spread, 0.0)), sqrt(maximum(half - spread, 0.0))
    area = maximum(sxx * syy - sxy * sxy, 0.0)
    is_usable = (short >= NARROWEST) & isfinite(area) & (area < 1e12) & (sxx < 1e10 * area) & (syy < 1e10 * area)
    radius = long + 1.0
    nearest_x, nearest_y = clip(cu, 0.0, float(width)) - cu, clip(cv, 0.0, float(height)) - cv
    overlaps = nearest_x * nearest_x + nearest_y * nearest_y <= radius * radius
    whole = float(max(width, height)) ** 2
    numbers = [
        where(is_near, 0.5 * width, cu), where(is_near, 0.5 * height, cv), where(is_near, whole, sxx),
        where(is_near, 0.0, sxy), where(is_near, whole, syy),
    ]  # fmt: skip
    return _Outline(numbers, is_near, is_usable & overlaps)


def _meets_view(op: object, camera: CameraView, place: Vector, radius: Value) -> Value:
    """Whether a sphere meets what the camera sees."""
    width, height = op.width, op.height  # type: ignore[attr-defined]
    focal = camera.focal
    x, y, z = place
    sides = [
        abs_(x) * focal - 0.5 * width * z <= radius * sqrt(focal * focal + (0.5 * width) ** 2),
        abs_(y) * focal - 0.5 * height * z <= radius * sqrt(focal * focal + (0.5 * height) ** 2),
        z >= camera.near - radius, z <= camera.far + radius,
    ]  # fmt: skip
    return sides[0] & sides[1] & sides[2] & sides[3]


def _box(op: object, outlines: list[Value], is_near: Value) -> list[Value]:
    """Left, right, top and bottom of an outline in pixels; the whole picture where the camera is inside."""
    width, height = op.width, op.height  # type: ignore[attr-defined]
    ex, ey = sqrt(outlines[2]), sqrt(outlines[4])
    margin = 0.01  # of a pixel, for what was rounded
    bounds = [
        outlines[0] - ex - 0.5 - margin, outlines[0] + ex + margin,
        outlines[1] - ey - 0.5 - margin, outlines[1] + ey + margin,
    ]  # fmt: skip
    bounds[0], bounds[2] = where(is_near, 0.0, bounds[0]), where(is_near, 0.0, bounds[2])
    bounds[1] = where(is_near, float(width), bounds[1])
    bounds[3] = where(is_near, float(height), bounds[3])
    return bounds
