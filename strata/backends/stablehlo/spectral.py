"""Fourier transforms as StableHLO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from strata.backends.stablehlo.build import Hlo, StableHloBuilder
from strata.backends.stablehlo.table import Results, Writer, rule, types_of


def _transformed(b: StableHloBuilder, kind: str, x: Hlo, n: int, result: Any, scale: str) -> Hlo:
    """The transform of the last axis; StableHLO's inverse ones divide by n, ours by what the scale says."""
    shape = result.static_shape
    if 0 in shape:
        return b.const(0, result.dtype, shape)
    made = b.to("stablehlo.fft", [x], result.dtype, shape, f", type = {kind}, length = [{n}]")
    factor = {"one": 1.0, "by_n": 1.0 / n, "ortho": 1.0 / math.sqrt(n)}[scale] * (n if kind.startswith("I") else 1)
    return made if factor == 1.0 else b.same("multiply", made, b.like(factor, made))


@rule("fft")
def _fft(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    kind = "IFFT" if op.inverse else "FFT"
    return _transformed(w.b, kind, xs[0], xs[0].shape[-1], types_of(op, xs)[0], op.scale)


@rule("rfft")
def _rfft(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return _transformed(w.b, "RFFT", xs[0], xs[0].shape[-1], types_of(op, xs)[0], op.scale)


@rule("irfft")
def _irfft(w: Writer, op: Any, xs: Sequence[Hlo]) -> Results:
    return _transformed(w.b, "IRFFT", xs[0], int(op.n), types_of(op, xs)[0], op.scale)
