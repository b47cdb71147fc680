"""Discrete Fourier transforms of any length, with NumPy's functions and the packed real layout [re.., im..].

One primitive transforms the last axis of complex numbers; its transpose is the opposite transform with the same scale.
The real transforms are separate nodes, so that a backend can halve the work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from strata.core import Dim, DType, SymExpr, TensorType, c64, c128, f32, f64, floordiv, known_le, normalize_axis
from strata.errors import DTypeError, OptionError, ShapeError
from strata.kinds import counted
from strata.mir import METHODS, Sample, UnaryOp, Value, constant, function, op
from strata.ops.base.creation import dim_size
from strata.ops.base.frontend import Operand, as_value, promoted, to_inexact
from strata.ops.base.movement import concat, flip, moveaxis, narrow, pad_constant, reshape
from strata.ops.elementwise.complex import Conj, MakeComplex, Real
from strata.ops.elementwise.logic import cast

SCALES = ("one", "by_n", "ortho")
SHORT = 1024  # real numbers whose bins come from half a transform


def _factor(scale: str, n: int) -> float:
    return {"one": 1.0, "by_n": 1.0 / max(n, 1), "ortho": 1.0 / math.sqrt(max(n, 1))}[scale]


def complex_of(dtype: DType) -> DType:
    """The complex type with parts of this type."""
    return dtype if dtype.is_complex else c128 if dtype is f64 else c64


class Transform(UnaryOp):
    """A Fourier transform along the last axis, then a scale: one, 1/N (by_n) or 1/√N (ortho)."""

    def check(self, x: TensorType, scale: str, ok: bool, wanted: str) -> None:
        self.require(
            scale in SCALES, f"scale is one of {', '.join(SCALES)}, got {scale!r}", code="O273", error=OptionError
        )
        self.require_dtype(ok, f"does not take {x}, only {wanted}", code="D241")
        self.require(x.ndim >= 1, f"needs at least one axis, got {x}", code="S365")
        self.require(x.shape[-1] != 0, f"the last axis of {x} is empty", code="S366")

    def vmap(self, x: Value, *, batched: tuple[bool, ...], size: Dim) -> Value:
        return self(x)


@op("fft")
class Fft(Transform):
    """Σ x·e^(∓2πi·nk/N) over the last axis of complex numbers, times the scale."""

    inverse: bool = False
    scale: str = "one"

    dtypes = (c64, c128)

    def infer(self, x: TensorType) -> TensorType:
        self.check(x, self.scale, x.dtype.is_complex, "c64 and c128")
        return x

    def numpy(self, x: np.ndarray) -> np.ndarray:
        transform = np.fft.ifft if self.inverse else np.fft.fft
        plain = transform(x, norm="forward" if self.inverse else "backward")
        return plain * np.asarray(_factor(self.scale, x.shape[-1]), x.real.dtype)

    def jvp(self, x: Value, *, out: Value, dx: Value) -> Value:
        return self(dx)

    def vjp(self, x: Value, *, out: Value, ct: Value) -> Value:
        return Fft(not self.inverse, self.scale)(ct)

    @classmethod
    def samples(cls) -> list[Sample]:
        return [
            Sample(c64[8]), Sample(c64[2, 3, 6], inverse=True), Sample(c64[7], scale="ortho"),
            Sample(c64[1], inverse=True, scale="by_n"),
            Sample(c64[5, 4], inverse=True, scale="by_n"), Sample(c64[0, 5]), Sample(c128[12], scale="by_n"),
        ]  # fmt: skip


@op("rfft")
class Rfft(Transform):
    """The first N//2 + 1 bins of the transform of real numbers; the others are their conjugates."""

    scale: str = "one"

    dtypes = (f32, f64)

    def infer(self, x: TensorType) -> TensorType:
        self.check(x, self.scale, x.dtype in (f32, f64), "f32 and f64")
        return TensorType(complex_of(x.dtype), (*x.shape[:-1], bins_of(x.shape[-1])))

    def numpy(self, x: np.ndarray) -> np.ndarray:
        return np.fft.rfft(x) * np.asarray(_factor(self.scale, x.shape[-1]), x.dtype)

    def decompose(self, x: Value) -> Value:
        return narrow(Fft(False, self.scale)(cast(x, complex_of(x.dtype))), -1, 0, bins_of(x.shape[-1]))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(f32[8]), Sample(f32[2, 5]), Sample(f64[12], scale="ortho"), Sample(f32[1]),
                Sample(f32[2], scale="by_n"), Sample(f32[0, 4])]  # fmt: skip


@op("irfft")
class Irfft(Transform):
    """The n real numbers whose first n//2 + 1 bins these are; imaginary parts of bin 0 and n/2 do not count."""

    n: Dim
    scale: str = "by_n"

    dtypes = (c64, c128)

    def infer(self, x: TensorType) -> TensorType:
        self.check(x, self.scale, x.dtype.is_complex, "c64 and c128")
        self.require(self.n != 0, "n must be at least 1", code="S366")
        self.require(
            x.shape[-1] == bins_of(self.n),
            f"{self.n} numbers have {bins_of(self.n)} bins, {x} has {x.shape[-1]}",
            code="S367",
        )
        return TensorType(x.dtype.real, (*x.shape[:-1], self.n))

    def numpy(self, x: np.ndarray) -> np.ndarray:
        n = self.n.__index__()
        return np.fft.irfft(x, n, norm="forward") * np.asarray(_factor(self.scale, n), x.real.dtype)

    def decompose(self, x: Value) -> Value:
        mirrored = self.n - bins_of(self.n)  # so that a symbol is left when both are joined
        if mirrored != 0:
            x = concat([x, Conj()(flip(narrow(x, -1, 1, mirrored), -1))], -1)
        return Real()(Fft(True, self.scale)(x))

    @classmethod
    def samples(cls) -> list[Sample]:
        return [Sample(c64[5], n=8), Sample(c64[2, 3], n=5), Sample(c64[7], n=12, scale="ortho"), Sample(c64[1], n=1),
                Sample(c128[2], n=2, scale="one"), Sample(c64[2], n=3), Sample(c64[0, 3], n=4)]  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- norms

NUMPY_NORMS = {
    None: ("one", "by_n"),
    "backward": ("one", "by_n"),
    "ortho": ("ortho", "ortho"),
    "forward": ("by_n", "one"),
}
PACKED_NORMS = {"backward": ("one", "one"), "forward": ("one", "by_n"), "ortho": ("ortho", "ortho")}


def _scale(norm: str | None, *, inverse: bool, what: str) -> str:
    if norm not in NUMPY_NORMS:
        raise OptionError(f"{what}: norm is 'backward', 'ortho' or 'forward', got {norm!r}", code="O274")
    return NUMPY_NORMS[norm][inverse]


def bins_of(n: Dim) -> Dim:
    """How many bins of a real transform of n numbers are not conjugates of others."""
    return floordiv(n, 2) + 1


# --------------------------------------------------------------------------------------------------------------- sizes


def resized(x: Value, n: Dim | None, what: str) -> Value:
    """The last axis cut, or extended with zeros, to n."""
    if n is None or x.shape[-1] == n:
        return x
    if isinstance(n, bool) or not isinstance(n, (int, SymExpr)) or (isinstance(n, int) and n < 1):
        raise OptionError(f"{what}: n is a number of elements, at least 1, got {n!r}", code="O275")
    have = x.shape[-1]
    if known_le(n, have):
        return narrow(x, -1, 0, n)
    if known_le(have, n):
        return pad_constant(x, [(0, 0)] * (x.ndim - 1) + [(0, n - have)])
    raise ShapeError(f"{what}: whether {have} is cut or extended to {n} depends on the symbols", code="S368")


def _to_last(x: Value, axis: int, what: str) -> tuple[Value, int]:
    if x.ndim == 0:
        raise ShapeError(f"{what}: needs at least one axis, got {x.type}", code="S365")
    at = normalize_axis(axis, x.ndim, what)
    return moveaxis(x, at, -1), at


def _as_complex(x: Operand) -> Value:
    value = to_inexact(as_value(x))
    return value if value.dtype.is_complex else cast(_at_least_single(value), complex_of(_at_least_single(value).dtype))


def _at_least_single(x: Value) -> Value:
    return cast(x, f32) if x.dtype.is_float and x.dtype.bits < 32 else x


def _as_real(x: Operand, what: str) -> Value:
    value = to_inexact(as_value(x))
    if value.dtype.is_complex:
        raise DTypeError(
            f"{what}: needs real numbers, got {value.type}", code="D242", fix="fft(x), which takes complex ones"
        )
    return _at_least_single(value)


# ------------------------------------------------------------------------------------------------------------ functions


def _one_axis(x: Operand, n: Dim | None, axis: int, norm: str | None, *, inverse: bool) -> Value:
    what = "ifft" if inverse else "fft"
    last, at = _to_last(_as_complex(x), axis, what)
    return moveaxis(Fft(inverse, _scale(norm, inverse=inverse, what=what))(resized(last, n, what)), -1, at)


@function("fft_axis")
def fft(x: Operand, n: Dim | None = None, axis: int = -1, norm: str | None = None) -> Value:
    """Fourier transform along an axis, cut or extended with zeros to n; `norm` as in NumPy."""
    return _one_axis(x, n, axis, norm, inverse=False)


@function()
def ifft(x: Operand, n: Dim | None = None, axis: int = -1, norm: str | None = None) -> Value:
    """Inverse Fourier transform along an axis; `norm` as in NumPy."""
    return _one_axis(x, n, axis, norm, inverse=True)


@function()
def rfft(x: Operand, n: Dim | None = None, axis: int = -1, norm: str | None = None) -> Value:
    """The n//2 + 1 bins of the Fourier transform of real numbers that are not conjugates of others."""
    last, at = _to_last(_as_real(x, "rfft"), axis, "rfft")
    return moveaxis(Rfft(_scale(norm, inverse=False, what="rfft"))(resized(last, n, "rfft")), -1, at)


@function()
def irfft(x: Operand, n: Dim | None = None, axis: int = -1, norm: str | None = None) -> Value:
    """Real numbers from the bins of `rfft`; n is 2·(bins - 1) unless given."""
    last, at = _to_last(_as_complex(x), axis, "irfft")
    length = (last.shape[-1] - 1) * 2 if n is None else n
    if isinstance(length, int) and length < 1:
        raise OptionError(f"irfft: n is a number of elements, at least 1, got {length!r}", code="O275")
    bins = resized(last, bins_of(length), "irfft")
    return moveaxis(Irfft(length, _scale(norm, inverse=True, what="irfft"))(bins), -1, at)


_SWAPPED = {None: "forward", "backward": "forward", "ortho": "ortho", "forward": "backward"}


def _swap(norm: str | None, what: str) -> str:
    _scale(norm, inverse=False, what=what)
    return _SWAPPED[norm]


@function()
def hfft(x: Operand, n: Dim | None = None, axis: int = -1, norm: str | None = None) -> Value:
    """The real transform of a signal whose other half is the conjugate of this one."""
    return irfft(Conj()(_as_complex(x)), n, axis, _swap(norm, "hfft"))


@function()
def ihfft(x: Operand, n: Dim | None = None, axis: int = -1, norm: str | None = None) -> Value:
    """The inverse of `hfft`."""
    return Conj()(rfft(x, n, axis, _swap(norm, "ihfft")))


def _axes_and_sizes(
    x: Value, s: Sequence[Dim] | None, axes: Sequence[int] | None, what: str
) -> list[tuple[int, Dim | None]]:
    """Which axes to transform, and their lengths, as NumPy reads `s` and `axes`."""
    if axes is None:
        axes = range(x.ndim) if s is None else range(x.ndim - len(s), x.ndim)
    places = [normalize_axis(a, x.ndim, what) for a in axes]
    sizes: list[Dim | None] = [None] * len(places) if s is None else list(s)
    if len(sizes) != len(places):
        raise OptionError(f"{what}: {counted(len(sizes), 'length')} for {len(places)} axes", code="O276")
    return list(zip(places, sizes, strict=True))


@function()
def fftn(
    x: Operand, s: Sequence[Dim] | None = None, axes: Sequence[int] | None = None, norm: str | None = None
) -> Value:
    """Fourier transform along several axes; all by default."""
    value = _as_complex(x)
    for axis, n in _axes_and_sizes(value, s, axes, "fftn"):
        value = fft(value, n, axis, norm)
    return value


@function()
def ifftn(
    x: Operand, s: Sequence[Dim] | None = None, axes: Sequence[int] | None = None, norm: str | None = None
) -> Value:
    """Inverse Fourier transform along several axes; all by default."""
    value = _as_complex(x)
    for axis, n in _axes_and_sizes(value, s, axes, "ifftn"):
        value = ifft(value, n, axis, norm)
    return value


@function()
def rfftn(
    x: Operand, s: Sequence[Dim] | None = None, axes: Sequence[int] | None = None, norm: str | None = None
) -> Value:
    """Fourier transform of real numbers along several axes, half of the bins along the last of them."""
    value = _as_real(x, "rfftn")
    *rest, (last, n) = _axes_and_sizes(value, s, axes, "rfftn")
    value = rfft(value, n, last, norm)
    for axis, size in rest:
        value = fft(value, size, axis, norm)
    return value


@function()
def irfftn(
    x: Operand, s: Sequence[Dim] | None = None, axes: Sequence[int] | None = None, norm: str | None = None
) -> Value:
    """The inverse of `rfftn`."""
    value = _as_complex(x)
    *rest, (last, n) = _axes_and_sizes(value, s, axes, "irfftn")
    for axis, size in rest:
        value = ifft(value, size, axis, norm)
    return irfft(value, n, last, norm)


def _two_axes(name: str, whole: Any) -> Any:
    def apply(
        x: Operand, s: Sequence[Dim] | None = None, axes: Sequence[int] = (-2, -1), norm: str | None = None
    ) -> Value:
        return whole(x, s, axes, norm)

    apply.__name__ = apply.__qualname__ = name
    apply.__doc__ = f"`{whole.__name__}` over the last two axes."
    return function()(apply)


fft2 = _two_axes("fft2", fftn)
ifft2 = _two_axes("ifft2", ifftn)
rfft2 = _two_axes("rfft2", rfftn)
irfft2 = _two_axes("irfft2", irfftn)


@function()
def fft_packed(x: Operand, inverse: bool = False, norm: str = "backward") -> Value:
    """Transform of the last axis of complex numbers, or of real numbers packed as [re_0.., im_0..] (2N of them).

    Here `norm` names where 1/N goes, and neither direction has it under "backward": forward × 1 and inverse × 1
    (backward), 1 and 1/N (forward), 1/√N both (ortho). `fft` and `ifft` have NumPy's names.
    """
    if norm not in PACKED_NORMS:
        raise OptionError(f"fft_packed: norm is 'backward', 'forward' or 'ortho', got {norm!r}", code="O274")
    value = to_inexact(as_value(x))
    transform = Fft(bool(inverse), PACKED_NORMS[norm][bool(inverse)])
    return transform(value) if value.dtype.is_complex else pack(transform(unpack(value, "fft_packed")))


def unpack(x: Value, what: str) -> Value:
    """Complex numbers from the packed layout [re.., im..] of the last axis."""
    if x.ndim == 0 or (isinstance(x.shape[-1], int) and x.shape[-1] % 2):
        raise ShapeError(f"{what}: [re.., im..] needs an even last axis, got {x.type}", code="S369")
    half = floordiv(x.shape[-1], 2)
    value = _at_least_single(x)
    return MakeComplex()(narrow(value, -1, 0, half), narrow(value, -1, half, half))


def pack(x: Value) -> Value:
    """Complex numbers as [re.., im..] along the last axis."""
    return concat([METHODS["real"](x), METHODS["imag"](x)], -1)


def fftfreq(n: int, d: float = 1.0, dtype: Any = f32) -> Value:
    """The frequency of each bin of `fft`; the bin n/2 is negative."""
    _positive(n, "fftfreq")
    return constant(np.fft.fftfreq(n, d), dtype)


def rfftfreq(n: int, d: float = 1.0, dtype: Any = f32) -> Value:
    """The frequency of each bin of `rfft`."""
    _positive(n, "rfftfreq")
    return constant(np.fft.rfftfreq(n, d), dtype)


def _positive(n: Any, what: str) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise OptionError(f"{what}: n is a number of elements, at least 1, got {n!r}", code="O275")


def _rolled(x: Operand, axes: int | Sequence[int] | None, *, inverse: bool, what: str) -> Value:
    value = as_value(x)
    chosen = range(value.ndim) if axes is None else [axes] if isinstance(axes, int) else axes
    for axis in chosen:
        at = normalize_axis(axis, value.ndim, what)
        size = value.shape[at]
        half = floordiv(size + 1, 2)  # elements before the middle; the other count after it
        first = size - half if inverse else half
        if size != 0 and size != 1:
            value = concat([narrow(value, at, first, size - first), narrow(value, at, 0, first)], at)
    return value


@function()
def fftshift(x: Operand, axes: int | Sequence[int] | None = None) -> Value:
    """Frequency 0 moved to the middle of axes."""
    return _rolled(x, axes, inverse=False, what="fftshift")


@function()
def ifftshift(x: Operand, axes: int | Sequence[int] | None = None) -> Value:
    """The inverse of `fftshift`."""
    return _rolled(x, axes, inverse=True, what="ifftshift")


@function()
def frames(x: Operand, frame: int, hop: int) -> Value:
    """Overlapping pieces of the last axis: [.., T] → [.., 1 + (T - frame)//hop, frame]."""
    value = as_value(x)
    for name, n in (("frame", frame), ("hop", hop)):
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise OptionError(f"frames: {name} is a number of elements, at least 1, got {n!r}", code="O275")
    length = value.shape[-1] if value.ndim else 0
    if known_le(length + 1, frame):
        raise ShapeError(f"frames: {value.type} is shorter than a frame of {frame}", code="S370")
    count = floordiv(length - frame, hop) + 1
    if count == 1:  # the hop may be far longer than what there is
        return reshape(narrow(value, -1, 0, frame), (*value.shape[:-1], 1, frame))
    parts = -(-frame // hop)  # a frame spans this many pieces of `hop` elements
    wanted = (count + parts - 1) * hop
    fits = resized(value, wanted, "frames") if isinstance(length, int) else _fit(value, wanted, parts * hop - frame)
    pieces = reshape(fits, (*value.shape[:-1], count + parts - 1, hop))
    joined = concat([narrow(pieces, -2, i, count) for i in range(parts)], -1)
    return narrow(joined, -1, 0, frame)


def _fit(x: Value, wanted: Dim, extra: int) -> Value:
    """The last axis of unknown length extended by enough zeros, then cut."""
    wide = pad_constant(x, [(0, 0)] * (x.ndim - 1) + [(0, extra)])
    return narrow(wide, -1, 0, wanted)


@function()
def stft(
    x: Operand,
    frame: int,
    hop: int,
    *,
    window: Operand | None = None,
    center: bool = False,
    pad_mode: str = "constant",
    packed: bool = True,
) -> Value:
    """Short-time Fourier transform of real signals [.., T].

    Packed: [frames, .., 2·(frame//2 + 1)] with real parts first, no window and no centring unless asked for. Otherwise
    complex [.., frame//2 + 1, frames], as torch gives it. `center` pads frame//2 elements on both sides, as `pad` does.
    """
    value = _as_real(x, "stft")
    if center:
        value = METHODS["pad"](value, [(0, 0)] * (value.ndim - 1) + [(frame // 2, frame // 2)], mode=pad_mode)
    pieces = frames(value, frame, hop)
    if window is not None:
        weights = cast(as_value(window), value.dtype)
        if weights.ndim != 1 or weights.shape[0] != frame:
            raise ShapeError(f"stft: the window must have {frame} elements, got {weights.type}", code="S371")
        pieces = pieces * weights
    bins = Rfft()(pieces)
    return moveaxis(pack(bins), -2, 0) if packed else moveaxis(bins, -1, -2)


def hann_window(n: int, periodic: bool = True, dtype: Any = f32) -> Value:
    """The raised cosine window of n elements."""
    _positive(n, "hann_window")
    period = n if periodic else max(n - 1, 1)
    return constant(0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n) / period) if n > 1 else np.ones(1), dtype)


@function()
def fft_conv1d(x: Operand, y: Operand) -> Value:
    """Full convolution of the last axes through Fourier transforms: la + lb - 1 elements."""
    a, b = (_as_real(v, "fft_conv1d") for v in promoted(x, y))
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(f"fft_conv1d: needs at least one axis, got {a.type} and {b.type}", code="S365")
    n = a.shape[-1] + b.shape[-1] - 1
    return irfft(rfft(a, n) * rfft(b, n), n)


@function()
def psd(x: Operand) -> Value:
    """Power of each bin of `rfft` over the last axis of N elements, divided by N."""
    value = _as_real(x, "psd")
    bins = rfft(value)
    power = Real()(bins) * Real()(bins) + METHODS["imag"](bins) * METHODS["imag"](bins)
    n = value.shape[-1]
    return power / (cast(dim_size(n), power.dtype) if isinstance(n, SymExpr) else float(n))


def _is_short(n: Dim) -> bool:
    return isinstance(n, int) and 0 < n <= SHORT


def _mirrored(bins: Value, n: Dim, axis: int) -> Value:
    """All n bins of real numbers from the first half: those that are real are so exactly."""
    count = n - bins_of(n)
    return concat([bins, Conj()(flip(narrow(bins, axis, 1, count), axis))], axis) if count != 0 else bins


@function()
def onnx_dft(
    x: Operand, dft_length: Dim | None = None, axis: int = -2, inverse: bool = False, onesided: bool = False
) -> Value:
    """ONNX DFT: the last axis holds a real number, or a real and an imaginary part; the inverse divides by N.

    One-sided: the forward transform keeps the bins that are not conjugates of others; the inverse takes those bins and
    gives real numbers (last axis of size 1).
    """
    value = to_inexact(as_value(x))
    if value.ndim < 2 or value.shape[-1] not in (1, 2):
        raise ShapeError(
            f"onnx_dft: needs [.., 1] or [.., 2] with a signal axis before it, got {value.type}", code="S372"
        )
    at = normalize_axis(axis, value.ndim, "onnx_dft")
    if at == value.ndim - 1:
        raise ShapeError(
            "onnx_dft: the last axis holds real and imaginary parts, it cannot be transformed", code="S372"
        )
    parts = [reshape(narrow(value, -1, i, 1), value.shape[:-1]) for i in range(value.shape[-1])]
    if onesided and inverse:
        signal = MakeComplex()(*parts) if len(parts) == 2 else _as_complex(parts[0])
        return METHODS["insert_axis"](irfft(signal, dft_length, at), -1)
    if onesided:
        if len(parts) == 2:
            raise ShapeError(f"onnx_dft: a one-sided transform needs real numbers, got {value.type}", code="S372")
        bins = rfft(parts[0], dft_length, at)
    elif len(parts) == 1 and not inverse and _is_short(value.shape[at] if dft_length is None else dft_length):
        bins = _mirrored(rfft(parts[0], dft_length, at), value.shape[at] if dft_length is None else dft_length, at)
    else:
        signal = MakeComplex()(*parts) if len(parts) == 2 else _as_complex(parts[0])
        bins = ifft(signal, dft_length, at) if inverse else fft(signal, dft_length, at)
    return METHODS["stack"]([METHODS["real"](bins), METHODS["imag"](bins)], -1)
