"""Range analysis: which i64 values fit 32-bit registers. Nearly all of them are indices.

Sizes and extents of a launch are checked against `MOST`, so that sums and products of few of them are known to fit.
"""

from __future__ import annotations

from collections.abc import Iterable

from strata.core import Dim, bounds, i64
from strata.kernel import Axis, Const, Expr, Reduce, Scalar, Size, postorder

MOST = 1 << 28
"""Of the extent of an axis, and of a symbolic size."""

_LOW, _HIGH = -(1 << 31), (1 << 31) - 1
_LEAST = -(1 << 63)
Range = tuple[int, int]


def extent_range(dim: Dim) -> Range:
    """Between what numbers a size is."""
    if isinstance(dim, int):
        return dim, dim
    low, high = bounds(dim)
    return low, MOST if high is None else min(high, MOST)


class Bounds:
    """Ranges of the integers below some expressions."""

    def __init__(self, roots: Iterable[Expr] = ()) -> None:
        self._known: dict[Expr, Range | None] = {}
        for node in postorder(roots):  # inputs first: chains may be thousands of nodes deep
            self.range(node)

    def fits(self, node: Expr) -> bool:
        """Whether an i64 value is a number of 32 bits."""
        found = self.range(node)
        return found is not None and found[0] >= _LOW and found[1] <= _HIGH

    def range(self, node: Expr) -> Range | None:
        """Inclusive; None where nothing is known."""
        if node not in self._known:
            found = self._find(node)
            wraps = found is not None and (found[0] < _LEAST or found[1] > -_LEAST - 1)
            self._known[node] = None if wraps else found
        return self._known[node]

    def _find(self, node: Expr) -> Range | None:
        match node:
            case Const(value, dtype) if dtype.is_int:
                return int(value.real), int(value.real)
            case Axis(_, extent):
                return 0, max(0, extent_range(extent)[1] - 1)
            case Size(dim):
                low, high = extent_range(dim)
                return low, high
            case Reduce("argmax" | "argmin", axes, _):
                count = 1
                for axis in axes:
                    count *= extent_range(axis.extent)[1]
                return 0, max(0, count - 1)
            case Scalar(name, args):
                return self._scalar(name, args, node)
        return None

    def _scalar(self, name: str, args: tuple[Expr, ...], node: Scalar) -> Range | None:
        if name == "cast":
            source = args[0].dtype
            if source.is_bool:
                return 0, 1
            if not source.is_int or node.dtype is not i64 or source.bits >= 64:
                return None
            return _type_range(source.kind, source.bits)
        if node.dtype is not i64:
            return None
        if name == "select":
            return _hull(self.range(args[1]), self.range(args[2]))
        ranges = [self.range(a) for a in args]
        if name in ("index", "data"):
            return ranges[0]
        if name in ("min", "max"):
            return _min_max(name, ranges[0], ranges[1])
        if name == "mod" and ranges[1] is not None and ranges[1][0] > 0:
            return 0, ranges[1][1] - 1
        if any(r is None for r in ranges):
            return None
        (a, b), *rest = [r for r in ranges if r is not None]
        match name:
            case "add":
                return a + rest[0][0], b + rest[0][1]
            case "sub":
                return a - rest[0][1], b - rest[0][0]
            case "neg":
                return -b, -a
            case "abs":
                return 0, max(abs(a), abs(b))
            case "mul":
                corners = [x * y for x in (a, b) for y in rest[0]]
                return min(corners), max(corners)
            case "floordiv" if rest[0][0] > 0:
                corners = [x // y for x in (a, b) for y in rest[0]]
                return min(corners), max(corners)
        return None


def _type_range(kind: str, bits: int) -> Range:
    return (0, (1 << bits) - 1) if kind == "uint" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def _hull(a: Range | None, b: Range | None) -> Range | None:
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))


def _min_max(name: str, a: Range | None, b: Range | None) -> Range | None:
    wide = (-(1 << 63), (1 << 63) - 1)
    x, y = a or wide, b or wide
    choose = min if name == "min" else max
    found = choose(x[0], y[0]), choose(x[1], y[1])
    return None if found == wide else found
