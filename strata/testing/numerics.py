"""Measured errors of ops in ulp; docs/numerics.md is its report.

`python -m strata.testing.numerics` writes the page; devices can be named after it. A bound is what was measured on
many inputs, rounded up with a margin; a test measures a slice of them anew.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from strata import ops as _functions
from strata.core import DType, as_dtype
from strata.mir import Graph
from strata.runtime import Session

Array = np.ndarray[Any, Any]
_ops: Any = _functions
DTYPES = ("f32", "f64", "f16", "bf16")
MARGIN = 1.5  # what was measured, times this, in halves of a unit
LEAST = 0.51  # of functions that are not rounded in one step
COUNT = 20_000

HEADER = """# Numerics

Bounds on errors, in units in the last place (ulp) of the result's type: 1.5 times the measured errors, written by
`make numerics`; a test measures a part of them again. The true value is computed in 80-bit floats from the same inputs.
0.5 means correctly rounded; f16 and bf16 are computed in f32 and rounded once, after each op.

Functions of one element are measured relative to the true result. The terms of a sum may cancel each other, so sums are
measured relative to the sum of magnitudes, and norms relative to 1 where an element is smaller.

Sums are computed in blocks, in an order that depends only on how the terms lie in memory and on the processor's vector
width, not on which sizes were known, on threads, or on other rows. Norms and variances correct for the rounding of
their mean, so that rows far from zero keep their digits.

Of two zeros, minimum and maximum give the second, as NumPy does; ARM's instructions give the one with the right sign.
Matmuls of bf16 treat numbers below the smallest normal one as zero on processors with bf16 products (AVX512-BF16):
times an infinity, they give NaN.
"""


@dataclass(frozen=True)
class Measured:
    """A function, its true value in wide floats, what errors are relative to, and inputs to try."""

    name: str
    made: Callable[..., Any]
    true: Callable[..., Array]
    shapes: Sequence[tuple[int, ...]] = ((COUNT,),)
    low: float = -8.0
    high: float = 8.0
    scale: Callable[..., Array] | None = None


def _row_scale(x: Array) -> Array:
    return np.ones(x.shape)


def _softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _layer_norm(x: Array) -> Array:
    return np.asarray((x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + np.longdouble(1e-5)))


def _unary(name: str, low: float = -8.0, high: float = 8.0, true: Callable[..., Array] | None = None) -> Measured:
    return Measured(name, getattr(_ops, name), true or getattr(np, name), low=low, high=high)


def _rows(
    name: str, made: Callable[..., Any], true: Callable[..., Array], scale: Callable[..., Array] | None = None
) -> list[Measured]:
    """A function of rows, at several lengths."""
    return [Measured(f"{name} of {n}", made, true, ((16, n),), scale=scale) for n in (5, 64, 1000)]


def _far(name: str, made: Callable[..., Any], true: Callable[..., Array], scale: Any = None) -> Measured:
    """The same of rows far from zero."""
    return Measured(f"{name} of 1000 around 1000", made, true, ((16, 1000),), 998.0, 1002.0, scale)


def _product(k: int) -> Measured:
    shapes = ((17, k), (k, 19))
    return Measured(f"matmul over {k}", _ops.matmul, np.matmul, shapes, scale=lambda a, b: np.abs(a) @ np.abs(b))


def _sum(x: Any) -> Any:
    return _ops.sum(x, axis=-1)


def _mean(x: Any) -> Any:
    return _ops.mean(x, axis=-1)


def _cumsum(x: Any) -> Any:
    return _ops.cumsum(x, axis=-1)


def _var(x: Any) -> Any:
    return _ops.var(x, axis=-1)


PAIR = ((COUNT,), (COUNT,))
TABLE = (
    _unary("exp"), _unary("exp2"), _unary("expm1"), _unary("log", 1e-3, 50), _unary("log2", 1e-3, 50),
    _unary("log1p", -0.9, 50), _unary("sqrt", 0, 50), _unary("rsqrt", 1e-3, 50, lambda x: 1 / np.sqrt(x)),
    _unary("sin"), _unary("cos"), _unary("tan", -1.5, 1.5), _unary("tanh"), _unary("sinh"), _unary("cosh"),
    _unary("sigmoid", true=lambda x: 1 / (1 + np.exp(-x))), _unary("reciprocal", 0.01, 9),
    Measured("add", _ops.add, np.add, PAIR, scale=lambda a, b: np.abs(a) + np.abs(b)),
    Measured("multiply", _ops.multiply, np.multiply, PAIR), Measured("divide", _ops.divide, np.divide, PAIR, 0.1, 9.0),
    *_rows("sum", _sum, lambda x: x.sum(-1), lambda x: np.abs(x).sum(-1)),
    *_rows("mean", _mean, lambda x: x.mean(-1), lambda x: np.abs(x).mean(-1)),
    *_rows("cumsum", _cumsum, lambda x: x.cumsum(-1), lambda x: np.abs(x).cumsum(-1)),
    *_rows("var", _var, lambda x: x.var(-1)), _far("var", _var, lambda x: x.var(-1)),
    *_rows("softmax", _ops.softmax, _softmax),
    *_rows("layer_norm", _ops.layer_norm, _layer_norm, _row_scale),
    _far("layer_norm", _ops.layer_norm, _layer_norm, _row_scale),
    *map(_product, (5, 64, 1000)),
)  # fmt: skip
EXACT = ("sqrt", "add", "multiply", "divide", "reciprocal")  # correctly rounded


def ulp(scale: Array, dtype: DType) -> Array:
    """The distance of neighbours at a size, in a type; that of the smallest normal number at least."""
    digits = {"f32": 23, "f64": 52, "f16": 10, "bf16": 7}[dtype.name]
    least = {"f32": -126, "f64": -1022, "f16": -14, "bf16": -126}[dtype.name]
    _, exponent = np.frexp(np.maximum(np.abs(scale), np.ldexp(np.longdouble(1), least)))
    return np.asarray(np.ldexp(np.longdouble(1), exponent - 1 - digits))


def measure(item: Measured, dtype: DType, device: str = "cpu", seed: int = 0) -> float:
    """The largest error of a function on random inputs, in ulp."""
    rng = np.random.default_rng(seed)
    arrays = [rng.uniform(item.low, item.high, shape).astype(dtype.np) for shape in item.shapes]
    graph = Graph("numerics")
    values = [graph.input(f"x{i}", a.shape, dtype) for i, a in enumerate(arrays)]
    compiled = Session(device).compile(graph.outputs(item.made(*values)))
    (got,) = compiled.run({f"x{i}": a for i, a in enumerate(arrays)})
    wide = [np.asarray(a, np.float64).astype(np.longdouble) for a in arrays]
    with np.errstate(all="ignore"):
        want = np.asarray(item.true(*wide))
        error = np.abs(np.asarray(got, np.float64).astype(np.longdouble) - want)
        scale = np.maximum(np.abs(want), item.scale(*wide)) if item.scale is not None else want
    return float((error / ulp(scale, dtype)).max(initial=0.0))


def bound(name: str, error: float) -> float:
    """What is promised where an error was measured; what is rounded in two steps may be a little over the half."""
    if error <= 0.5 and name in EXACT:
        return 0.5
    return LEAST if error <= LEAST else ceil(2 * MARGIN * error) / 2


def rows(devices: Sequence[str]) -> Iterator[str]:
    """The lines of the table."""
    for device in devices:
        yield f"\n## {device}\n"
        yield "| op | " + " | ".join(DTYPES) + " |"
        yield "|---|" + "---|" * len(DTYPES)
        for item in TABLE:
            errors = [max(measure(item, as_dtype(d), device, seed) for seed in range(3)) for d in DTYPES]
            bounds = [bound(item.name, error) for error in errors]
            yield f"| {item.name} | " + " | ".join(f"{b:g}" for b in bounds) + " |"


def read_bounds(text: str) -> dict[tuple[str, str, str], float]:
    """Bounds by device, op and type, from the page."""
    found: dict[tuple[str, str, str], float] = {}
    device = ""
    for line in text.splitlines():
        if match := re.match(r"## (\S+)$", line):
            device = match[1]
        cells = [c.strip() for c in line.strip("| ").split("|")]
        if device and len(cells) == 1 + len(DTYPES) and re.match(r"[\d.]+$", cells[1]):
            found |= {(device, cells[0], d): float(c) for d, c in zip(DTYPES, cells[1:], strict=True)}
    return found


def page() -> Path:
    """Where the page lies in a checkout."""
    return Path(__file__).parents[2] / "docs" / "numerics.md"


def main(devices: Sequence[str]) -> None:
    page().write_text(HEADER + "\n".join(rows(devices or ["cpu"])) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
