"""Vectors along the lines of planes: lanes inside a line, every n-th element, which lines a window sees, tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strata.backends.llvm.ir.builder import IrFunction, Value, lanes_of, vector, vector_constant


def every(f: IrFunction, type_: str, parts: Sequence[str], start: int) -> str:
    """Of some neighbouring vectors, every n-th element from one on."""
    if len(parts) == 1:
        return parts[0]
    first, second, *rest = parts
    lanes = lanes_of(type_)
    places = range(start, start + lanes * len(parts), len(parts))
    found = f.shuffle(type_, first, second, [at if at < 2 * lanes else 0 for at in places])
    for number, part in enumerate(rest, 2):
        picks = [lanes + at % lanes if at >= number * lanes else lane for lane, at in enumerate(places)]
        found = f.shuffle(type_, found, part, picks)
    return found


def lanes_inside(f: IrFunction, lanes: int, start: Value, size: Value) -> str:
    """Lanes of consecutive positions that lie in a line of a size."""
    word = vector("i32", lanes)
    first, limit = (f.splat(word, f.convert("trunc", "i64", v, "i32")) for v in (start, size))
    at = f.binary("add", word, first, vector_constant("i32", range(lanes)))
    return f.compare("ult", word, at, limit)


def seen(count: int, taps: int, stride: int, dilation: int) -> dict[int, list[tuple[int, int]]]:
    """What neighbouring places see, from the first tap of the first one on: who sees it, through which tap."""
    found: dict[int, list[tuple[int, int]]] = {}
    for place in range(count):
        for tap in range(taps):
            found.setdefault(place * stride + tap * dilation, []).append((place, tap))
    return dict(sorted(found.items()))


def in_tiles(
    f: IrFunction, top: Value, bottom: Value, heights: Sequence[int], tile: Callable[[str, int], None]
) -> None:
    """tile(first line, height) for lines from top to bottom: as many of the tallest as fit, then shorter ones."""
    y: Value = top
    for height in heights:
        end = f.add(y, f.mul(f.op(f"udiv i64 {f.sub(bottom, y)}, {height}"), height))
        f.loop(y, end, height, [], lambda line, _, height=height: tile(line, height))  # type: ignore[misc]
        y = end
