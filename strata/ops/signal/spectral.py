"""Spectral ops: learnable butterfly stages, log-mel features."""

from __future__ import annotations

import math

import numpy as np

from strata.core import TensorType, f32, f64, floordiv
from strata.mir import METHODS, Op, Sample, Value, constant, draw, function, op, pullback
from strata.ops.base.frontend import Operand, as_value, promoted
from strata.ops.base.movement import concat, narrow, reshape, swapaxes
from strata.ops.elementwise.logic import where
from strata.ops.linalg.matmul import MatMul
from strata.ops.signal.fft import bins_of

LEAST_POWER = 1e-10
DYNAMIC_RANGE = 8.0  # decades below the loudest band of a frame that are kept


@op("fft_butterfly_stage")
class FftButterflyStage(Op):
    """One radix-2 stage on interleaved numbers [B, n, 2], with a gate, an order and a twiddle factor per butterfly.

    Butterfly f joins a = i0 and b = i0 + t with t = 2**stage and i0 = f//t·2t + f mod t: (a + b·w, a - b·w), swapped
    where rev ≥ 0.5, both left as they are where the gate is 0. Gate and order are numbers of any type and have no
    derivative.
    """

    stage: int
    n_fft: int

    dtypes = (f32, f64)

    def infer(
        self, state: TensorType, gate: TensorType, rev: TensorType, tw_re: TensorType, tw_im: TensorType
    ) -> TensorType:
        self.require_dtype(state.dtype in (f32, f64), f"does not take {state}, only f32 and f64", code="D244")
        ok = state.ndim == 3 and state.shape[1:] == (self.n_fft, 2)
        self.require(ok, f"the state must be [B, {self.n_fft}, 2], got {state}", code="S374")
        ok = 0 <= self.stage < self.n_fft.bit_length() and self.n_fft % (2 << self.stage) == 0
        self.require(ok, f"stage {self.stage} does not divide {self.n_fft} points into butterflies", code="S375")
        wanted = TensorType(state.dtype, (self.n_fft // 2,))
        for name, t in (("gate", gate), ("rev", rev), ("tw_re", tw_re), ("tw_im", tw_im)):
            self.require(t.shape == wanted.shape, f"{name} must have {self.n_fft // 2} elements, got {t}", code="S374")
        for name, t in (("tw_re", tw_re), ("tw_im", tw_im)):
            self.require_dtype(t == wanted, f"{name} must be {wanted}, got {t}", code="D103")
        return state

    def numpy(
        self, state: np.ndarray, gate: np.ndarray, rev: np.ndarray, tw_re: np.ndarray, tw_im: np.ndarray
    ) -> np.ndarray:
        out, t = state.copy(), 1 << self.stage
        z = state[..., 0] + 1j * state[..., 1]
        for f in range(self.n_fft // 2):
            if gate[f] == 0:
                continue
            i0 = f // t * 2 * t + f % t
            moved = z[:, i0 + t] * complex(tw_re[f], tw_im[f])
            pair = [z[:, i0] + moved, z[:, i0] - moved]
            for i, value in zip((i0, i0 + t), pair[::-1] if rev[f] >= 0.5 else pair, strict=True):
                out[:, i, 0], out[:, i, 1] = value.real, value.imag
        return out

    def decompose(self, state: Value, gate: Value, rev: Value, tw_re: Value, tw_im: Value) -> Value:
        t = 1 << self.stage
        blocks = self.n_fft // (2 * t)
        sides = reshape(state, (state.shape[0], blocks, 2, t, 2))
        a, b = (reshape(narrow(sides, 2, i, 1), (state.shape[0], blocks, t, 2)) for i in (0, 1))
        per_butterfly = (blocks, t, 1)
        re, im = reshape(tw_re, per_butterfly), reshape(tw_im, per_butterfly)
        b_re, b_im = narrow(b, -1, 0, 1), narrow(b, -1, 1, 1)
        moved = concat([b_re * re - b_im * im, b_re * im + b_im * re], -1)
        order = METHODS["cast"](reshape(rev, per_butterfly), f32)
        swapped = METHODS["greater_equal"](order, constant(0.5, f32))
        idle = METHODS["equal"](reshape(gate, per_butterfly), constant(0, gate.dtype))
        plus, minus = a + moved, a - moved
        top = where(idle, a, where(swapped, minus, plus))
        bottom = where(idle, b, where(swapped, plus, minus))
        return reshape(METHODS["stack"]([top, bottom], 2), state.shape)

    @classmethod
    def samples(cls) -> list[Sample]:
        def case(stage: int, n: int, batch: int = 2, kind: type = np.int32, grad: bool = True) -> Sample:
            gate: np.ndarray = (np.arange(n // 2) % 3).astype(kind)
            rev: np.ndarray = (np.arange(n // 2) % 2).astype(kind)
            return Sample(f32[batch, n, 2], gate, rev, f32[n // 2], f32[n // 2], grad=grad, stage=stage, n_fft=n)

        return [
            case(0, 8),
            case(1, 8),
            case(2, 8),
            case(0, 2, 1),
            case(1, 12, 0),
            case(1, 8, kind=np.float32, grad=False),
        ]


@op("log_mel")
class LogMel(Op):
    """Log-mel features of packed spectra [.., 2·n_fft] under filters [n_mels, n_fft//2 + 1].

    log10 of the filtered power, at least 1e-10 and at most 8 below the loudest band of the same frame, then (l + 4)/4.
    """

    dtypes = (f32, f64)

    def infer(self, spec: TensorType, filters: TensorType) -> TensorType:
        return self._infer(spec, filters)

    def _infer(self, spec: TensorType, filters: TensorType) -> TensorType:
        self.require_dtype(
            spec.dtype in (f32, f64) and filters.dtype is spec.dtype,
            f"needs spectrum and filters both f32 or both f64, got {spec} and {filters}",
            code="D245",
        )
        ok = spec.ndim >= 1 and filters.ndim == 2
        self.require(ok, f"needs [.., 2·n_fft] and [n_mels, bins], got {spec} and {filters}", code="S376")
        extent = spec.shape[-1]
        odd = isinstance(extent, int) and extent % 2 == 1
        self.require(not odd, f"[re.., im..] needs an even last axis, got {spec}", code="S369")
        bins = bins_of(floordiv(extent, 2))
        self.require(
            bins == filters.shape[1],
            f"a spectrum of {floordiv(extent, 2)} points has {bins} bins, the filters have {filters.shape[1]}",
            code="S377",
        )
        self.require(filters.shape[0] != 0, f"needs at least one filter, got {filters}", code="S376")
        return spec.with_shape([*spec.shape[:-1], filters.shape[0]])

    def numpy(self, spec: np.ndarray, filters: np.ndarray) -> np.ndarray:
        n, bins = spec.shape[-1] // 2, filters.shape[1]
        power = np.abs(spec[..., :bins] + 1j * spec[..., n : n + bins]) ** 2
        level = np.log10(np.maximum(np.einsum("mb,...b->...m", filters, power), LEAST_POWER))
        return (np.maximum(level, level.max(-1, keepdims=True) - DYNAMIC_RANGE) + 4) / 4

    def decompose(self, spec: Value, filters: Value) -> Value:
        flat = reshape(spec, (1, *spec.shape)) if spec.ndim == 1 else spec
        half, bins = floordiv(spec.shape[-1], 2), filters.shape[1]
        re, im = narrow(flat, -1, 0, bins), narrow(flat, -1, half, bins)
        power = MatMul()(re * re + im * im, swapaxes(filters, 0, 1))
        least = constant(LEAST_POWER, power.dtype)
        level = METHODS["log"](where(METHODS["less_equal"](power, least), least, power)) * (1.0 / math.log(10.0))
        floor = METHODS["max"](level, -1, keepdims=True) - DYNAMIC_RANGE
        features = (METHODS["maximum"](level, floor) + 4.0) * 0.25
        return reshape(features, (*spec.shape[:-1], filters.shape[0]))

    @classmethod
    def samples(cls) -> list[Sample]:
        wide = np.array([[1e3, 2, 1e-4, 1e-5, 3, 0.5, 0.1, 1e-4, 2e-5, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], np.float32)
        bands = np.array([[1, 0.5, 0], [0, 0, 1], [0, 0.25, 0.5]], np.float32)
        return [
            Sample(f32[3, 8], draw(f32[4, 3], 0.1, 1.0)),
            Sample(f32[2, 2, 10], draw(f32[2, 3], 0.1, 1.0)), Sample(f32[6], draw(f32[5, 2], 0.1, 1.0)),
            Sample(f32[0, 4], draw(f32[3, 2], 0.1, 1.0)),
            Sample(wide, bands, grad=False),
        ]  # fmt: skip


@op("log_mel_backward")
class LogMelBackward(LogMel):
    """The gradient of `log_mel` in the spectrum; a band at the floor of its frame passes its share to the loudest."""

    def infer(self, spec: TensorType, filters: TensorType, dy: TensorType) -> TensorType:
        out = self._infer(spec, filters)
        self.require(dy == out, f"the cotangent must be {out}, got {dy}", code="S377")
        return spec

    def numpy(self, spec: np.ndarray, filters: np.ndarray, dy: np.ndarray) -> np.ndarray:
        n, bins = spec.shape[-1] // 2, filters.shape[1]
        re, im = spec[..., :bins], spec[..., n : n + bins]
        bands = (re * re + im * im) @ filters.T
        level = np.log10(np.maximum(bands, LEAST_POWER))
        loudest = level.max(-1, keepdims=True)
        clamped = level < loudest - DYNAMIC_RANGE
        share = (level == loudest) / (level == loudest).sum(-1, keepdims=True)
        to_level = np.where(clamped, 0, dy / 4) + share * np.where(clamped, dy / 4, 0).sum(-1, keepdims=True)
        to_bands = np.where(bands > LEAST_POWER, to_level / (np.maximum(bands, LEAST_POWER) * np.log(10)), 0)
        to_power = to_bands @ filters
        out = np.zeros_like(spec)
        out[..., :bins], out[..., n : n + bins] = 2 * re * to_power, 2 * im * to_power
        return out

    def decompose(self, spec: Value, filters: Value, dy: Value) -> Value:
        (gradient,) = pullback([LogMel().decompose(spec, filters)], [dy], [spec])
        assert gradient is not None
        return gradient

    @classmethod
    def samples(cls) -> list[Sample]:
        *cases, wide = LogMel.samples()
        shapes = [f32[3, 4], f32[2, 2, 2], f32[5], f32[0, 3]]
        return [
            *(Sample(*c.inputs, t) for c, t in zip(cases, shapes, strict=True)),
            Sample(*wide.inputs, f32[2, 3], grad=False),
        ]


# ------------------------------------------------------------------------------------------------------------ functions


@function()
def fft_butterfly_stage(
    state: Operand, gate: Operand, rev: Operand, tw_re: Operand, tw_im: Operand, *, stage: int, n_fft: int
) -> Value:
    """One radix-2 stage on [B, n_fft, 2] with a gate, an order and a twiddle factor per butterfly."""
    numbers, re, im = promoted(state, tw_re, tw_im)
    return FftButterflyStage(stage, n_fft)(numbers, as_value(gate), as_value(rev), re, im)


@function()
def log_mel(spec: Operand, filters: Operand) -> Value:
    """Log-mel features of packed spectra [.., 2·n_fft] under filters [n_mels, n_fft//2 + 1]."""
    return LogMel()(as_value(spec), as_value(filters))


@function()
def log_mel_backward(spec: Operand, filters: Operand, dy: Operand) -> Value:
    """The gradient of `log_mel` in the spectrum."""
    return LogMelBackward()(as_value(spec), as_value(filters), as_value(dy))
