"""Quantisation schemes of weights: how a matrix W[K, N] is stored, with codecs on arrays.

int8/bs    i8[K, N], scale f32[⌈K/bs⌉, N]                  q·s
int8a/bs   i8[K, N], scale and zero point f32[⌈K/bs⌉, N]    (q - z)·s
int4/bs    u8[⌈K·N/2⌉], scale and zero point as above       (u - z)·s; element p·N + j in the low half of a byte when
even fp8e4m3    u8[K, N], scale f32[N] or f32[1]                dec(byte)·s; likewise fp8e5m2
nvfp4/16   u8[⌈K·N/2⌉], scale u8[⌈K/16⌉, N] (e4m3), f32[1]  fp4(nibble)·e4m3(s)·g
gguf_q4k…  u8[N · K/elements · bytes], W stored as [N, K]   see gguf_blocks; a codebook beside it, where it has one
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from strata.core import DType, f32, i8, u8
from strata.errors import OptionError, ShapeError
from strata.mir import VALUE_TYPES
from strata.ops.quant import gguf_blocks
from strata.ops.quant.gguf_codebooks import codebook

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
KINDS = ("int8", "int8a", "int4", "fp8e4m3", "fp8e5m2", "nvfp4")
SIDES = {"int8": ("scale",), "int8a": ("scale", "zero"), "int4": ("scale", "zero"), "fp8e4m3": ("scale",), "fp8e5m2":
("scale",), "nvfp4": ("scale", "global")}  # fmt: skip


@dataclass(frozen=True)
class Scheme:
    """One scheme: a kind, and for blocked integers the number of rows that share a scale."""

    kind: str
    block_size: int = 0

    def __post_init__(self) -> None:
        if self.kind.startswith("gguf_"):
            name = f"gguf_{gguf_blocks.block_format(self.kind).name}"
            object.__setattr__(self, "kind", name)
            object.__setattr__(self, "block_size", gguf_blocks.block_format(name).elements)
            return
        if self.kind not in KINDS:
            raise OptionError(f"scheme: {self.kind!r} is not one of {', '.join(KINDS)}, gguf_…", code="O239")
        if self.kind == "nvfp4":
            object.__setattr__(self, "block_size", 16)
        blocked = self.kind.startswith("int")
        if blocked and self.block_size < 1:
            raise OptionError(f"scheme: {self.kind} needs a block size, as in {self.kind}/32", code="O239")
        if not blocked and self.kind != "nvfp4" and self.block_size:
            raise OptionError(f"scheme: {self.kind} has no block size, got {self.block_size}", code="O239")

    def to_text(self) -> str:
        return f"{self.kind}/{self.block_size}" if self.kind.startswith(("int", "nv")) else self.kind

    @classmethod
    def from_text(cls, text: str) -> Scheme:
        kind, _, size = text.partition("/")
        if size and not re.fullmatch(r"[0-9]{1,9}", size):
            raise OptionError(f"scheme: {text!r} has no whole block size", code="O239")
        return cls(kind, int(size) if size else 0)

    def __str__(self) -> str:
        return self.to_text()

    @property
    def is_gguf(self) -> bool:
        return self.kind.startswith("gguf_")

    @property
    def sides(self) -> tuple[str, ...]:
        """What is stored beside the codes: scale, zero, global, or a codebook that all matrices share."""
        if self.is_gguf:
            return ("book",) if gguf_blocks.block_format(self.kind).book else ()
        return SIDES[self.kind]

    @property
    def book(self) -> np.ndarray | None:
        """The codebook of a block format that has one."""
        name = gguf_blocks.block_format(self.kind).book if self.is_gguf else ""
        return codebook(name) if name else None

    @property
    def storage(self) -> DType:
        return i8 if self.kind in ("int8", "int8a") else u8

    @property
    def bits(self) -> float:
        """Bits an element, without side tensors."""
        if self.is_gguf:
            form = gguf_blocks.block_format(self.kind)
            return form.bytes * 8 / form.elements
        return 4 if self.kind in ("int4", "nvfp4") else 8

    def code_count(self, k: int, n: int) -> int:
        """Elements of the stored codes of one matrix."""
        if self.is_gguf:
            form = gguf_blocks.block_format(self.kind)
            if k % form.elements:
                raise ShapeError(f"scheme {self}: K = {k} is not a multiple of {form.elements}", code="S277")
            return n * (k // form.elements) * form.bytes
        return -(-k * n // 2) if self.bits == 4 else k * n

    def side_shapes(self, k: int, n: int) -> tuple[tuple[int, ...], ...]:
        """The shapes of the side tensors of one matrix."""
        if self.book is not None:
            return (self.book.shape,)
        blocks = (-(-k // self.block_size), n) if self.block_size else (n,)
        return tuple((1,) if side == "global" else blocks for side in self.sides)

    # ------------------------------------------------------------------------------------------------------- on arrays

    def decode(self, codes: np.ndarray, *sides: np.ndarray, k: int, n: int) -> np.ndarray:
        """W[K, N] in f32, or in f64 when the side tensors are."""
        if self.is_gguf:
            form = gguf_blocks.block_format(self.kind)
            rows = np.asarray(codes, np.uint8).reshape(n, k // form.elements * form.bytes)
            return np.ascontiguousarray(gguf_blocks.decode(rows, self.kind).T)
        q = self._numbers(codes, k, n)
        if self.kind.startswith("fp8"):
            return q * _wide(sides[0])
        block: np.ndarray = np.arange(k) // self.block_size
        if self.kind == "nvfp4":
            scale = np.asarray(sides[0]).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            return q * np.nan_to_num(scale, nan=0.0)[block] * _wide(sides[1]).reshape(())
        zero = _wide(sides[1])[block] if len(sides) > 1 and self.kind != "int8" else np.float32(0)
        return (q - zero) * _wide(sides[0])[block]

    def _numbers(self, codes: np.ndarray, k: int, n: int) -> np.ndarray:
        """The codes as numbers [K, N], before scales."""
        flat = np.asarray(codes).reshape(-1)
        if self.kind in ("int8", "int8a"):
            return flat.astype(np.float32).reshape(k, n)
        if self.kind.startswith("fp8"):
            kind = ml_dtypes.float8_e4m3fn if self.kind == "fp8e4m3" else ml_dtypes.float8_e5m2
            return flat.view(kind).astype(np.float32).reshape(k, n)
        halves = np.stack([flat & 15, flat >> 4], -1).reshape(-1)[: k * n].reshape(k, n)
        return halves.astype(np.float32) if self.kind == "int4" else FP4[halves]

    def encode(self, w: np.ndarray) -> tuple[np.ndarray, ...]:
        """Codes and side tensors that approximate W[K, N]."""
        w = np.asarray(w, np.float32)
        if w.ndim != 2:
            raise ShapeError(f"scheme {self}: a matrix has 2 axes, got shape {w.shape}", code="S277")
        k, n = w.shape
        self.code_count(k, n)
        if self.is_gguf:
            return (gguf_blocks.encode(w.T, self.kind).reshape(-1),)
        if self.kind.startswith("fp8"):
            kind, high = (
                (ml_dtypes.float8_e4m3fn, 448.0) if self.kind == "fp8e4m3" else (ml_dtypes.float8_e5m2, 57344.0)
            )
            scale = _safe(np.abs(w).max(0, initial=0) / high)
            return (w / scale).astype(kind).view(np.uint8), scale
        size = self.block_size
        padded = np.pad(w, ((0, -k % size), (0, 0)), mode="edge" if k else "constant").reshape(-1, size, n)
        if self.kind == "nvfp4":
            return self._encode_nvfp4(w, padded)
        if self.kind == "int8":
            scale = _safe(np.abs(padded).max(1, initial=0) / 127)
            return np.clip(np.rint(w / _rows(scale, k, size)), -127, 127).astype(np.int8), scale
        top, bottom = (255, -128) if self.kind == "int8a" else (15, 0)
        low, high = np.minimum(padded.min(1, initial=0), 0), np.maximum(padded.max(1, initial=0), 0)
        scale = _safe((high - low) / top)
        zero = np.rint(bottom - low / scale).astype(np.float32)
        q = np.clip(np.rint(w / _rows(scale, k, size)) + _rows(zero, k, size), bottom, bottom + top)
        return (q.astype(np.int8) if self.kind == "int8a" else _pack(q.astype(np.uint8))), scale, zero

    def _encode_nvfp4(self, w: np.ndarray, padded: np.ndarray) -> tuple[np.ndarray, ...]:
        peak = np.abs(padded).max(1, initial=0)
        whole = np.float32(max(float(peak.max(initial=0)) / (6 * 448), 1e-30))
        scale = (peak / 6 / whole).astype(ml_dtypes.float8_e4m3fn)
        steps = w / _rows(_safe(scale.astype(np.float32) * whole), w.shape[0], 16)
        magnitude = np.abs(steps)[..., None] - FP4[:8]
        code = np.abs(magnitude).argmin(-1).astype(np.uint8) | np.where(steps < 0, 8, 0).astype(np.uint8)
        return _pack(code), scale.view(np.uint8), np.array([whole], np.float32)


def _wide(x: np.ndarray) -> np.ndarray:
    array = np.asarray(x)
    return array if array.dtype == np.float64 else array.astype(np.float32)


def _safe(scale: np.ndarray) -> np.ndarray:
    return np.where(scale > 0, scale, 1).astype(np.float32)


def _rows(x: np.ndarray, k: int, size: int) -> np.ndarray:
    return x[np.arange(k) // size]


def _pack(codes: np.ndarray) -> np.ndarray:
    flat = codes.reshape(-1)
    flat = np.pad(flat, (0, len(flat) % 2))
    return (flat[0::2] | flat[1::2] << 4).astype(np.uint8)


def as_scheme(x: Scheme | str) -> Scheme:
    return x if isinstance(x, Scheme) else Scheme.from_text(x)


def side_dtype(scheme: Scheme, side: str) -> DType:
    """The element type of a side tensor."""
    if side == "book":
        return i8
    return u8 if scheme.kind == "nvfp4" and side == "scale" else f32


VALUE_TYPES["Scheme"] = Scheme.from_text
