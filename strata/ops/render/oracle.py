"""The meaning of Gaussian splats in NumPy: splat by splat and pixel by pixel, as the method is usually described.

It shares no formula with `strata.ops.render.project`: outlines are fitted through five points of the silhouette, rays
are brought into the frame of each splat. Slow, in f64, for tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np

C0, C1 = 0.28209479177387814, 0.4886025119029199
LONGEST_TURN = 1e3  # of a number of a rotation that is drawn


def normalized(v: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(v)
    return v / length if length > 1e-8 else np.array([0.0, 0.0, 1.0])


class Camera:
    """Where a picture is taken from."""

    def __init__(self, meta: np.ndarray, width: int, height: int) -> None:
        self.position, self.near, self.far, self.background = meta[0:3], meta[10], meta[11], meta[12:15]
        forward = normalized(meta[3:6] - meta[0:3])
        right = normalized(np.cross(meta[6:9], forward))
        self.axes = np.stack([right, normalized(np.cross(forward, right)), forward])
        self.focal = 0.5 * height / np.tan(np.radians(meta[9]) / 2)
        self.width, self.height = width, height

    def seen(self, p: np.ndarray) -> np.ndarray:
        return (p - self.position) @ self.axes.T

    def pixel(self, p: np.ndarray) -> np.ndarray:
        x, y, z = self.seen(p).T
        return np.stack([self.focal * x / z + self.width / 2, self.focal * y / z + self.height / 2], -1)

    def rays(self) -> np.ndarray:
        """Directions of length 1 through the middles of pixels, [height, width, 3]."""
        y, x = np.mgrid[: self.height, : self.width] + 0.5
        local = np.stack([(x - self.width / 2) / self.focal, (y - self.height / 2) / self.focal, np.ones_like(x)], -1)
        world = local @ self.axes
        return world / np.linalg.norm(world, axis=-1, keepdims=True)


def turned(v: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Rᵀv of a quaternion w, x, y, z that need not have length 1."""
    w, axis = q[0], q[1:]
    return v + 2 * np.cross(np.cross(v, axis) + w * v, axis)


def colours(op: Any, camera: Camera, p: np.ndarray, rgb: np.ndarray, sh: np.ndarray) -> np.ndarray:
    base = sh[:, 0] if sh.shape[1] else np.zeros_like(rgb)
    if not np.any(np.abs(base) > 1e-8):
        base = (np.clip(rgb, 0, 1) - 0.5) / C0
    made = 0.5 + C0 * base
    for i in range(len(p)):
        x, y, z = normalized(camera.position - p[i])
        for k, factor in enumerate((-C1 * y, C1 * z, -C1 * x), 1):
            if k < sh.shape[1]:
                made[i] += factor * sh[i, k]
    return made


def outline(op: Any, camera: Camera, p: np.ndarray, half: np.ndarray, q: np.ndarray) -> tuple[Any, float] | None:
    """Centre and matrix of the ellipse that a splat's silhouette is, and its longest half axis; None: not seen."""
    frame = np.stack([turned(e, q) for e in np.eye(3)], 1) / half[:, None]  # to the unit sphere
    if abs(np.linalg.det(frame * half[:, None])) <= 1e-6:
        return None
    eye = frame @ (camera.position - p)
    distance = np.linalg.norm(eye)
    points = None
    if distance > 1:
        axis = eye / distance
        side = normalized(np.cross(axis, np.eye(3)[np.argmin(np.abs(axis))]))
        other = np.cross(axis, side)
        angle = 2 * np.pi * np.arange(5) / 5
        ring = np.cos(angle)[:, None] * side + np.sin(angle)[:, None] * other
        points = p + (axis / distance + np.sqrt(1 - 1 / distance**2) * ring) @ np.linalg.inv(frame).T
        if np.any(camera.seen(points)[:, 2] <= 0):
            points = None
    if points is None:
        x, y, z = camera.seen(p)
        reach, f, w, h = half.max(), camera.focal, camera.width / 2, camera.height / 2
        meets = abs(x) * f - w * z <= reach * np.hypot(f, w) and abs(y) * f - h * z <= reach * np.hypot(f, h)
        meets = meets and camera.near - reach <= z <= camera.far + reach
        size = float(max(camera.width, camera.height))
        return ((w, h, np.eye(2) / size**2), size) if meets else None
    pixels = camera.pixel(points)
    low, high = pixels.min(0), pixels.max(0)
    middle, unit = (low + high) / 2, np.maximum((high - low) / 2, 1e-9)
    u, v = ((pixels - middle) / unit).T
    try:  # a u² + b u v + c v² + d u + e v = 1
        a, b, c, d, e = np.linalg.solve(np.stack([u * u, u * v, v * v, u, v], 1), np.ones(5))
    except np.linalg.LinAlgError:
        return None
    m = np.array([[a, b / 2], [b / 2, c]])
    centre = -0.5 * np.linalg.solve(m, [d, e])
    m = m / (1 + centre @ m @ centre) / np.outer(unit, unit)
    if not np.all(np.isfinite(m)) or m[0, 0] <= 1e-10 or m[1, 1] <= 1e-10 or np.linalg.det(m) <= 1e-12:
        return None
    long, short = 1 / np.sqrt(np.linalg.eigvalsh(m))
    if short < 0.125:
        return None
    cx, cy = centre * unit + middle
    return (cx, cy, m), float(long)


def least_on_box(m: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
    """The least value of δᵀmδ over a box."""
    if np.all(low <= 0) and np.all(high >= 0):
        return 0.0
    found = []
    for axis in (0, 1):
        for fixed in (low[axis], high[axis]):
            other = 1 - axis
            free = np.clip(-m[axis, other] * fixed / m[other, other], low[other], high[other])
            delta = np.empty(2)
            delta[axis], delta[other] = fixed, free
            found.append(delta @ m @ delta)
    return float(min(found))


def render(op: Any, positions: np.ndarray, log_scales: np.ndarray, rotations: np.ndarray, opacities: np.ndarray,
           rgb: np.ndarray, sh: np.ndarray, meta: np.ndarray) -> np.ndarray:  # fmt: skip
    """A picture [height, width, 4], gamma and all."""
    count, kind = len(opacities), positions.dtype
    p, ls, q = (x.astype(np.float64).reshape(count, w) for x, w in ((positions, 3), (log_scales, 3), (rotations, 4)))
    colour = rgb.astype(np.float64).reshape(count, 3)
    harmonics = sh.astype(np.float64).reshape(count, op.sh_coefficients, 3)
    opacity = opacities.astype(np.float64)
    good = np.isfinite(
        np.concatenate(
            [p, ls, q, colour, harmonics[:, :4].reshape(count, 3 * min(op.sh_coefficients, 4)), opacity[:, None]], 1
        )
    )
    drawn = good.all(1) & (np.abs(q) <= LONGEST_TURN).all(1)
    p, ls, q, colour, harmonics, opacity = (
        np.where(drawn.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0) for x in (p, ls, q, colour, harmonics, opacity)
    )
    camera = Camera(meta.astype(np.float64), op.width, op.height)
    seen_colour, opacity = colours(op, camera, p, colour, harmonics), np.clip(opacity, 0, 1)
    sigma = np.maximum(op.radius_scale * np.exp(np.minimum(ls, 11.0)), 1e-6 / 3)
    inverse = 1 / (3 * sigma)
    reach = np.sqrt(np.maximum(0, 2 * np.log(np.maximum(opacity, op.alpha_cutoff) / op.alpha_cutoff)))
    distance = np.linalg.norm(p - camera.position, axis=1)
    outlines: dict[int, Any] = {}
    for i in range(count):
        half = np.maximum(sigma[i] * reach[i], 1e-12)
        if not drawn[i] or opacity[i] < op.alpha_cutoff or camera.seen(p[i])[2] <= 1e-4 or half.min() >= 1e5:
            continue
        found = outline(op, camera, p[i], half, q[i])
        if found is not None:
            (cx, cy, _), radius = found
            gap = np.array([np.clip(cx, 0, op.width) - cx, np.clip(cy, 0, op.height) - cy])
            if np.linalg.norm(gap) <= radius + 1:
                outlines[i] = found[0]
    size, columns, rows = op.tile_size, -(-op.width // op.tile_size), -(-op.height // op.tile_size)
    lists: list[list[int]] = [[] for _ in range(columns * rows)]
    entries = 0
    for i in sorted(outlines, key=lambda i: distance[i]):
        cx, cy, m = outlines[i]
        for tile in range(columns * rows):
            corner = np.array([tile % columns, tile // columns]) * size - [cx, cy]
            if least_on_box(m, corner, corner + size) <= 1 + 1e-6 and entries < op.max_list_entries:
                lists[tile].append(i)
                entries += 1
    rays = camera.rays()
    picture = np.empty((op.height, op.width, 4))
    local = np.array([turned(camera.position - p[i], q[i]) * inverse[i] for i in range(count)]).reshape(count, 3)
    for y in range(op.height):
        for x in range(op.width):
            light, through, hits = np.zeros(3), 1.0, 0
            for i in lists[y // size * columns + x // size]:
                s = 3 / reach[i] if reach[i] > 0 else 3e12
                origin, way = s * local[i], s * turned(rays[y, x], q[i]) * inverse[i]
                square = way @ way
                t = -(way @ origin) / square if square > 1e-10 else 0.0
                if t <= 0:
                    continue
                closest = origin + t * way
                alpha = opacity[i] * np.exp(-0.5 * reach[i] ** 2 * (closest @ closest))
                if alpha < op.alpha_cutoff:
                    continue
                light, through, hits = light + through * alpha * seen_colour[i], through * (1 - alpha), hits + 1
                if through < op.transmittance_threshold or hits == op.max_splat_steps:
                    break
            picture[y, x, :3] = np.maximum(light + through * camera.background, 0) ** 2.2
            picture[y, x, 3] = 1 - through
    return picture.reshape(-1).astype(kind)
