"""Plots and pictures without a plotting package: SVG and PNG for files and notebooks, Braille for a terminal.

plot({"loss": losses}, title="training", x="step", log=True).save("loss.svg")
print(plot({"loss": losses}))
picture(pixels).save("scene.png")
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from strata.errors import OptionError, ShapeError
from strata.viewer.braille import dots, strokes

COLOURS = ("#4477aa", "#cc6677", "#228833", "#b07a00", "#885599", "#117788", "#666666")
WIDE, HIGH, LEFT, RIGHT, TOP, BOTTOM = 640, 340, 62, 16, 34, 46
TEXT_ROWS, TEXT_COLUMNS = 12, 64


@dataclass(frozen=True)
class Curve:
    """A named line of a plot, in f64."""

    name: str
    x: np.ndarray
    y: np.ndarray


@dataclass(frozen=True)
class Plot:
    """Lines or points over two axes. `print` shows it in a terminal, a notebook as SVG, `save` writes it."""

    lines: tuple[Curve, ...]
    title: str
    x: str
    y: str
    log: bool
    points: bool
    labels: tuple[str, ...]

    def svg(self) -> str:
        """The plot as the text of an SVG file."""
        (x0, x1), (y0, y1) = self._range("x"), self._range("y")
        wide, high = WIDE - LEFT - RIGHT, HIGH - TOP - BOTTOM

        def across(x: Any) -> Any:
            return LEFT + wide * (x - x0) / (x1 - x0)

        def down(y: Any) -> Any:
            return TOP + high * (y1 - self._scaled(y)) / (y1 - y0)

        out = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDE}" height="{HIGH}" viewBox="0 0 {WIDE} {HIGH}" '
                'font-family="sans-serif" font-size="12">'
            ),
            '<rect width="100%" height="100%" fill="#fff"/>',
            f'<text x="{LEFT}" y="20" font-size="14" font-weight="bold">{escape(self.title)}</text>',
        ]
        for tick in ticks(x0, x1):
            at = across(tick)
            out.append(f'<path d="M{at:.1f} {TOP}V{HIGH - BOTTOM}" stroke="#e4e4e4"/>')
            out.append(f'<text x="{at:.1f}" y="{HIGH - BOTTOM + 16}" text-anchor="middle">{_short(tick)}</text>')
        for tick in [10.0**t for t in log_ticks(y0, y1)] if self.log else ticks(y0, y1):
            at = down(tick)
            out.append(f'<path d="M{LEFT} {at:.1f}H{WIDE - RIGHT}" stroke="#e4e4e4"/>')
            out.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
        middle = TOP + high / 2
        out.append(f'<path d="M{LEFT} {TOP}V{HIGH - BOTTOM}H{WIDE - RIGHT}" fill="none" stroke="#888"/>')
        out.append(f'<text x="{LEFT + wide / 2}" y="{HIGH - 10}" text-anchor="middle">{escape(self.x)}</text>')
        out.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{escape(self.y)}</text>')
        for i, line in enumerate(self.lines):
            colour = COLOURS[i % len(COLOURS)]
            places = list(zip(across(line.x), down(line.y), strict=True))
            if self.points:
                size, faint = (2, ' opacity="0.4"') if len(places) > 100 else (4, "")
                drawn = "".join(f'<circle cx="{a:.0f}" cy="{b:.0f}" r="{size}"/>' for a, b in places)
                out.append(f'<g fill="{colour}"{faint}>{drawn}</g>')
            else:
                drawn = " ".join(f"{a:.1f},{b:.1f}" for a, b in _thinned(places))
                out.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if self.labels:
            named = self.lines[-1]
            out += [
                f'<text x="{a + 6:.1f}" y="{b + 4:.1f}" font-size="10">{escape(name)}</text>'
                for name, a, b in zip(self.labels, across(named.x), down(named.y), strict=True)
            ]
        if len(self.lines) > 1:
            at = WIDE - RIGHT - 8
            for i, line in reversed(list(enumerate(self.lines))):
                colour = COLOURS[i % len(COLOURS)]
                out.append(f'<text x="{at}" y="20" text-anchor="end" fill="{colour}">{escape(line.name)}</text>')
                at -= 9 + 7 * len(line.name)
        return "\n".join([*out, "</svg>", ""])

    def _repr_svg_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        (x0, x1), (y0, y1) = (self._range(axis, room=0) for axis in "xy")  # its labels are the least and the most
        placed = [((line.x - x0) / (x1 - x0), (self._scaled(line.y) - y0) / (y1 - y0)) for line in self.lines]
        rows = strokes(placed, TEXT_ROWS, TEXT_COLUMNS, joined=not self.points)
        high, low = (_short(10**v if self.log else v) for v in (y1, y0))
        margin = max(len(high), len(low))
        left = [high, *[""] * (TEXT_ROWS - 2), low]
        body = [f"{name:>{margin}} │{row}" for name, row in zip(left, rows, strict=True)]
        ends = _short(x0) + f"{self.x:^{TEXT_COLUMNS - len(_short(x0)) - len(_short(x1))}}" + _short(x1)
        names = ", ".join(line.name for line in self.lines)
        head = f"{self.title}: {names}" if self.title and names else self.title or names
        return "\n".join([head, *body, f"{'':>{margin}} └{'─' * TEXT_COLUMNS}", f"{'':>{margin}}  {ends}"])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as an SVG file."""
        place = Path(path)
        place.write_text(self.svg(), "utf-8")
        return place

    def _scaled(self, y: Any) -> Any:
        return np.log10(y) if self.log else y

    def _range(self, axis: str, room: float = 0.04) -> tuple[float, float]:
        found = np.concatenate([getattr(line, axis) for line in self.lines])
        found = found[np.isfinite(found)]
        if axis == "y":
            found = self._scaled(found)
        low, high = (float(found.min()), float(found.max())) if found.size else (0.0, 1.0)
        around = room * (high - low) if axis == "y" or self.points else 0.0
        return (low - around, high + around) if high > low else (low - 0.5, high + 0.5)


@dataclass(frozen=True)
class Picture:
    """An image. `print` shows it in a terminal, a notebook as PNG, `save` writes it."""

    pixels: np.ndarray  # u8 of (height, width, 3)

    def png(self) -> bytes:
        """The bytes of a PNG file."""
        high, wide = self.pixels.shape[:2]
        above = np.concatenate([np.zeros_like(self.pixels[:1]), self.pixels[:-1]])
        body = b"".join(b"\2" + row.tobytes() for row in self.pixels - above)  # differences from the row above
        parts = [(b"IHDR", struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(body, 9))]
        packed = [
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in [*parts, (b"IEND", b"")]
        ]
        return b"\x89PNG\r\n\x1a\n" + b"".join(packed)

    def _repr_png_(self) -> bytes:
        return self.png()

    def __str__(self) -> str:
        grey = self.pixels @ np.array([0.299, 0.587, 0.114])
        low, high = float(grey.min()), float(grey.max())
        even = (grey - low) * (255 / (high - low)) if high > low else grey
        return "\n".join(dots(even, dark=0.5 if even.mean() < 128 else 0.75))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as a PNG file."""
        place = Path(path)
        place.write_bytes(self.png())
        return place


def plot(
    lines: Mapping[str, Any],
    *,
    title: str = "",
    x: str = "",
    y: str = "",
    log: bool = False,
    points: bool = False,
    labels: Sequence[str] = (),
) -> Plot:
    """A plot of named lines: numbers, or a pair of x and y. `log` scales y, `points` draws no lines between them,
    `labels` name the points of the last line. Values that are not finite, or not positive with `log`, are left out."""
    made = []
    for name, values in lines.items():
        given = values if isinstance(values, tuple) else (None, values)
        if len(given) != 2:
            raise ShapeError(
                f"plot: line {name!r} is a tuple of {len(given)}; numbers, or a pair of x and y, are drawn"
            )
        ys = _numbers(name, given[1])
        xs = np.arange(len(ys), dtype=np.float64) if given[0] is None else _numbers(name, given[0])
        if len(xs) != len(ys):
            raise ShapeError(f"plot: line {name!r} has {len(xs)} x and {len(ys)} y")
        kept = np.isfinite(xs) & np.isfinite(ys) & ((ys > 0) | (not log))
        made.append(Curve(str(name), xs, ys) if kept.all() else Curve(str(name), xs[kept], ys[kept]))
    if not made:
        raise OptionError("plot: there are no lines")
    if labels and len(labels) != len(made[-1].x):
        raise ShapeError(f"plot: {len(labels)} labels for {len(made[-1].x)} points of {made[-1].name!r}")
    return Plot(tuple(made), str(title), str(x), str(y), bool(log), bool(points), tuple(map(str, labels)))


def picture(pixels: Any, *, scale: int = 1) -> Picture:
    """An image from (height, width) or (height, width, 3): u8, or numbers between 0 and 1. `scale` repeats pixels."""
    given = np.asarray(pixels)
    if given.ndim not in (2, 3) or (given.ndim == 3 and given.shape[2] != 3) or given.size == 0:
        raise ShapeError(f"picture: pixels are {list(given.shape)}, not [height, width] or [height, width, 3]")
    if given.dtype != np.uint8:
        given = (np.clip(_numbers("pixels", given.reshape(-1)).reshape(given.shape), 0, 1) * 255 + 0.5).astype(np.uint8)
    if given.ndim == 2:
        given = np.repeat(given[:, :, None], 3, 2)
    return Picture(np.repeat(np.repeat(given, scale, 0), scale, 1))


def bars(values: Mapping[str, float], shown: Mapping[str, str] | None = None, columns: int = 40) -> str:
    """Bars for a terminal, one a line, with their numbers after them."""
    most = max([*values.values(), 1e-300])
    wide = max(map(len, values), default=0)
    lines = []
    for name, value in values.items():
        eighths = round(8 * columns * max(value, 0.0) / most)
        bar = "█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")
        lines.append(f"{name:<{wide}}  {bar or '▏'} {(shown or {}).get(name, _short(value))}")
    return "\n".join(lines)


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers between two."""
    step = 10 ** math.floor(math.log10((high - low) / count))
    step *= next(f for f in (1, 2, 5, 10) if (high - low) / (step * f) <= count)
    return [step * i for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two exponents; with less than two of them, round numbers between."""
    whole = [float(i) for i in range(math.ceil(low), math.floor(high) + 1)]
    if len(whole) >= 2:
        return whole[:: math.ceil(len(whole) / 6)]
    return [math.log10(t) for t in ticks(10**low, 10**high, 5) if t > 0]


def _numbers(name: str, values: Any) -> np.ndarray:
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise OptionError(f"plot: {name!r} is not a list of numbers") from None
    if found.ndim != 1:
        raise ShapeError(f"plot: {name!r} has shape {list(found.shape)}; a line is a list of numbers")
    return found


def _thinned(places: list[Any], most: int = 600) -> list[Any]:
    """At most this many places, the last one among them."""
    step = max(1, math.ceil(len(places) / most))
    return places[::step] + (places[-1:] if step > 1 and (len(places) - 1) % step else [])


def _short(value: float) -> str:
    return (
        f"{value:.4g}"
        if value == 0 or 1e-3 <= abs(value) < 1e5
        else f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    )
