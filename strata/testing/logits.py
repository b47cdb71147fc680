"""Comparison with reference numbers: largest error, relative error, cosine between rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from strata.core import as_dtype
from strata.errors import RunError, ShapeError


@dataclass(frozen=True)
class Tolerance:
    """How far numbers may be apart: an element by `absolute` or `relative`, and the cosine of a row above `cosine`."""

    absolute: float
    relative: float
    cosine: float


STRICT: Final = Tolerance(1e-4, 1e-3, 0.9999)
LOOSE_F16: Final = Tolerance(5e-2, 5e-2, 0.999)


@dataclass(frozen=True)
class Agreement:
    """How far apart two arrays are; true where they agree."""

    absolute: float  # the largest difference
    relative: float  # the largest, beside the wanted number
    cosine: float  # the least of all rows
    same_choice: float  # part of the rows whose largest element is the same
    wrong: tuple[int, ...] | None  # the first element that is too far off
    agrees: bool

    def __bool__(self) -> bool:
        return self.agrees

    def __str__(self) -> str:
        place = "" if self.wrong is None else f", first wrong at {list(self.wrong)}"
        word = "agree" if self.agrees else "differ"
        return (
            f"{word}: largest difference {self.absolute:.3g}, relative {self.relative:.3g}, least cosine "
            f"{self.cosine:.6f}, same choice in {self.same_choice:.1%}{place}"
        )


def compare_logits(found: Any, wanted: Any, tolerance: Tolerance = STRICT) -> Agreement:
    """Compare rows of numbers, such as logits [.., V], with those of a reference; NaN or infinity raises RunError."""
    a, b = _floats(found), _floats(wanted)
    if a.shape != b.shape:
        raise ShapeError(f"compare_logits: {list(a.shape)} and {list(b.shape)} cannot be compared", code="S600")
    check_finite("found", found)
    check_finite("wanted", wanted)
    if a.size == 0:
        return Agreement(0.0, 0.0, 1.0, 1.0, None, True)
    rows = (-1, a.shape[-1] if a.ndim else 1)
    one, two = a.reshape(rows), b.reshape(rows)
    gap = np.abs(a - b)
    with np.errstate(divide="ignore", invalid="ignore"):
        beside = np.where(gap == 0, 0.0, gap / np.abs(b))
        lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(two, axis=1)
        angles = np.where(lengths > 0, (one * two).sum(1) / lengths, 1.0)
    # a row of zeros has no angle: it is right where both are
    angles = np.where((lengths == 0) & (one != two).any(1), 0.0, angles)
    far = (gap > tolerance.absolute) & (beside > tolerance.relative)
    wrong = tuple(int(i) for i in np.argwhere(far)[0]) if far.any() else None
    cosine = float(angles.min())
    return Agreement(
        float(gap.max()), float(beside.max()), cosine, float((one.argmax(1) == two.argmax(1)).mean()), wrong,
        wrong is None and cosine >= tolerance.cosine,
    )  # fmt: skip


def check_finite(label: str, array: Any) -> None:
    """Raise RunError where an array has a NaN or an infinity: which, and where the first one is."""
    given = np.asarray(array)
    wide = given if given.dtype.kind in "fc" else given.astype(np.float64)
    bad = ~np.isfinite(wide)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        value = wide[at]
        kind = "NaN" if np.isnan(value) else "an infinity"
        raise RunError(f"{label}: {kind} at {list(at)} of {as_dtype(given.dtype)}{list(given.shape)}", code="X402")


def _floats(array: Any) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
