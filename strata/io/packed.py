"""Quantised weights of safetensors folders: AWQ, GPTQ, compressed-tensors, bitsandbytes, torchao, FP8.

Each layout is brought, bit for bit, into blocks that matmuls read as they are: codes of 4 or 8 bits along a row, with
the scale and the zero point of their group before them. Nothing is dequantised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from strata.core import as_dtype
from strata.errors import FileError
from strata.io.gguf import GgufTensor
from strata.ops import gguf_blocks

Tensors = Mapping[str, Any]
METHODS: Final = ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "torchao")
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each four bits of a word
SHORT: Final = {"f16": "h", "bf16": "b", "f32": "f"}
FLOAT8: Final = {"f8e4m3": "e4m3", "f8e5m2": "e5m2"}
LEAST_GROUP: Final = gguf_blocks.GROUPS[-1]


def packed_weights(tensors: Tensors, settings: Any) -> dict[str, Any]:
    """The tensors of a folder, with those of a quantiser as blocks under the names of their weights.

    `settings` is `quantization_config` of config.json.
    """
    if not isinstance(settings, Mapping):
        raise FileError(f"the configuration has quantization_config = {settings!r}", code="F140")
    method = settings.get("quant_method")
    if method not in METHODS:
        raise FileError(f"the weights are quantised by {method!r}; known are {', '.join(METHODS)}", code="F157")
    return _Packed(tensors, settings, str(method)).made()


class _Packed:
    """One folder on its way: tensors are taken away as they are used."""

    def __init__(self, tensors: Tensors, settings: Mapping[str, Any], method: str) -> None:
        self.left, self.settings, self.method = dict(tensors), settings, method

    def made(self) -> dict[str, Any]:
        readers: dict[str, Callable[[str], GgufTensor]] = {
            ".qweight": self._awq if self.method == "awq" else self._gptq, ".weight_packed": self._compressed,
            "._weight_qdata": self._torchao, ".SCB": self._bytes_by_row,
        }  # fmt: skip
        found: dict[str, Any] = {}
        for name in list(self.left):
            base, reader = next(
                ((name.removesuffix(e), r) for e, r in readers.items() if name.endswith(e)), (name, None)
            )
            if reader is not None:
                found[f"{base}.weight"] = reader(base)
            elif ".weight.quant_state.bitsandbytes__" in name:
                base = name.partition(".weight.quant_state.")[0]
                found[f"{base}.weight"] = self._four_bits(base, name)
        for name in [n for n in self.left if n.endswith(".weight")]:
            base, kind = name.removesuffix(".weight"), as_dtype(self.left[name].dtype).name
            if kind == "i8" or kind in FLOAT8:
                found[name] = self._scaled(base)
        return self.left | found

    # --------------------------------------------------------------------------------------------------------- helpers

    def fail(self, message: str) -> FileError:
        return FileError(f"{self.method}: {message}", code="F157")

    def take(self, name: str, kinds: str, rank: int | None = None) -> np.ndarray:
        found = self.take_if(name, kinds, rank)
        if found is None:
            raise self.fail(f"there is no {name!r}")
        return found

    def take_if(self, name: str, kinds: str, rank: int | None = None) -> np.ndarray | None:
        """A tensor of one of some types, which is then done with."""
        found = self.left.pop(name, None)
        if found is None:
            return None
        array = np.asarray(found)
        kind = as_dtype(array.dtype).name
        if kind not in kinds.split() or (rank is not None and array.ndim != rank):
            axes = "" if rank is None else f" of {rank} axes"
            raise self.fail(f"{name!r} is {kind}{list(array.shape)}, not one of {kinds}{axes}")
        return array

    def whole(self, key: str, default: Any) -> int:
        value = self.settings.get(key, default)
        if type(value) is not int:
            raise self.fail(f"{key} is {value!r}, a whole number is wanted")
        return value

    def blocks(
        self, name: str, kind: str, codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None,
        order: np.ndarray | None = None,
    ) -> GgufTensor:  # fmt: skip
        """A matrix from codes u8[N, K], and a scale and a zero point (or what is added) [N, groups] beside them."""
        n, k = codes.shape
        if scale.ndim != 2 or len(scale) != n or not scale.shape[1] or k % scale.shape[1]:
            raise self.fail(f"{name!r} [{n}, {k}] has scales {list(scale.shape)}")
        if zero is not None and zero.shape != scale.shape:
            raise self.fail(f"{name!r} has scales {list(scale.shape)} and zero points {list(zero.shape)}")
        group = k // scale.shape[1]
        size = next((s for s in gguf_blocks.GROUPS if group % s == 0), 0)
        if not size:
            raise self.fail(f"{name!r} has groups of {group}, which are not a multiple of {LEAST_GROUP}")
        form = gguf_blocks.PACKED[f"{kind}_{size}{SHORT[as_dtype(scale.dtype).name]}"]
        made = np.zeros((n, k // size, form.bytes), np.uint8)
        at = scale.dtype.itemsize

        def spread(x: np.ndarray) -> np.ndarray:
            return np.repeat(np.ascontiguousarray(x), group // size, axis=1)

        made[..., :at] = spread(scale)[..., None].view(np.uint8)
        if kind == "m4":
            assert zero is not None
            made[..., at : 2 * at] = spread(zero.astype(scale.dtype))[..., None].view(np.uint8)
            at *= 2
        elif kind in ("u4", "i8"):
            if zero is not None:
                made[..., at] = spread(zero.astype(np.int8 if kind == "i8" else np.uint8)).view(np.uint8)
            at += 1
        parts = codes.reshape(n, k // size, size)
        if kind in ("u4", "m4", "nf4", "fp4"):
            halves = parts.reshape(n, k // size, size // 32, 2, 16)
            parts = (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(n, k // size, size // 2)
        made[..., at:] = parts
        return GgufTensor(name, form.name, (n, k), made.reshape(n, -1), order)

    # --------------------------------------------------------------------------------------------------------- layouts

    def _awq(self, base: str) -> GgufTensor:
        """Words [K, N/8] of eight columns in an order of their own."""
        if self.whole("bits", self.whole("w_bit", 4)) != 4 or self.settings.get("version", "gemm") not in (
            "gemm",
            "GEMM",
        ):
            raise self.fail(
                f"{self.settings.get('bits')} bits, version {self.settings.get('version')!r}; 4, gemm is known"
            )
        words, zeros = (self.take(f"{base}.{part}", "i32", 2) for part in ("qweight", "qzeros"))
        scales = self.take(f"{base}.scales", "f16 bf16 f32", 2)
        codes, zero = (_nibbles(x)[..., np.argsort(AWQ_ORDER)].reshape(len(x), -1) for x in (words, zeros))
        if codes.shape[1] != scales.shape[1]:
            raise self.fail(f"{base!r} has words {list(words.shape)} and scales {list(scales.shape)}")
        return self.blocks(base, "u4", codes.T, scales.T, zero.T)

    def _gptq(self, base: str) -> GgufTensor:
        """Words [K · bits/32, N] of neighbours along K; rows may belong to groups in any order."""
        bits = self.whole("bits", 4)
        if bits not in (4, 8):
            raise self.fail(f"{bits} bits; 4 and 8 are known")
        words, zeros = (self.take(f"{base}.{part}", "i32", 2) for part in ("qweight", "qzeros"))
        scales = self.take(f"{base}.scales", "f16 bf16 f32", 2)
        places = self.take_if(f"{base}.g_idx", "i32 i64", 1)
        each = 32 // bits
        codes = _fields(words.T, bits).reshape(words.shape[1], -1)  # [N, K]
        shift = 0 if self.settings.get("checkpoint_format") == "gptq_v2" else 1
        zero = _fields(zeros, bits).reshape(len(zeros), -1).astype(np.int16) + shift  # [groups, N]
        n, k = codes.shape
        if scales.shape[1] != n or zero.shape[1] != n or len(words) * each != k:
            raise self.fail(
                f"{base!r} has words {list(words.shape)}, zero points {list(zeros.shape)}, scales {list(scales.shape)}"
            )
        codes, order = self._in_groups(base, codes, places, len(scales))
        if bits == 4:
            return self.blocks(base, "u4", codes, scales.T, zero.T, order)
        return self.blocks(base, "i8", codes ^ 128, scales.T, zero.T - 128, order)

    def _in_groups(
        self, base: str, codes: np.ndarray, places: np.ndarray | None, groups: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Columns so that groups lie together, and the order in which elements of x belong to them."""
        if places is None or not groups or codes.shape[1] % groups:
            return codes, None
        counts = (
            np.bincount(places, minlength=groups)
            if places.size and places.min() >= 0 and places.max() < groups
            else None
        )
        if len(places) != codes.shape[1] or counts is None or (counts != len(places) // groups).any():
            raise self.fail(f"{base}.g_idx does not name {groups} groups of the same size")
        order = np.argsort(places, kind="stable").astype(np.int64)
        if (order == np.arange(len(order))).all():
            return codes, None
        return codes[:, order], order

    def _compressed(self, base: str) -> GgufTensor:
        """Words [N, K/8], or [N, K/4], of neighbours along K, moved up by half their range."""
        words = self.take(f"{base}.weight_packed", "i32 u8", 2)
        scale = self.take(f"{base}.weight_scale", "f16 bf16 f32 f8e4m3 u8", 2)
        if words.dtype == np.uint8:
            raise self.fail(f"{base!r} is packed in bytes; 4-bit floats with two scales are not known")
        zeros = self.take_if(f"{base}.weight_zero_point", "i32 i8", 2)
        places = self.take_if(f"{base}.weight_g_idx", "i32 i64", 1)
        shape = self.take_if(f"{base}.weight_shape", "i64 i32", 1)
        columns = int(shape[1]) if shape is not None and len(shape) == 2 else words.shape[1] * 8
        bits = 4 if words.shape[1] * 8 == columns else 8
        if words.shape[1] * (32 // bits) != columns:
            raise self.fail(f"{base!r} has {words.shape[1]} words for {columns} columns; 4 and 8 bits are known")
        codes = _fields(words, bits).reshape(len(words), -1)
        middle = 1 << bits - 1
        if zeros is None:
            zero = np.full(scale.shape, middle, np.int16)
        elif zeros.dtype == np.int32:
            zero = _fields(zeros.T, bits).reshape(zeros.shape[1], -1).T[: len(codes)].astype(np.int16)
        else:
            zero = zeros.astype(np.int16) + middle
        codes, order = self._in_groups(base, codes, places, scale.shape[1])
        if bits == 4:
            return self.blocks(base, "u4", codes, scale, zero, order)
        return self.blocks(base, "i8", codes ^ 128, scale, zero - middle, order)

    def _scaled(self, base: str) -> GgufTensor:
        """Bytes, whole numbers or floats, [N, K], with a scale for all, for each row, or for each block."""
        codes = self.take(f"{base}.weight", " ".join(("i8", *FLOAT8)), 2)
        kinds = "f16 bf16 f32"
        inverse = self.take_if(f"{base}.weight_scale_inv", kinds)
        scale = inverse if inverse is not None else self.take(f"{base}.weight_scale", kinds)
        zeros = self.take_if(f"{base}.weight_zero_point", "i8 i32")
        self.left.pop(f"{base}.input_scale", None)
        n, k = codes.shape
        whole = self._spread(base, scale, n, k)
        zero = None if zeros is None else self._spread(base, zeros, n, k)
        kind = FLOAT8.get(as_dtype(codes.dtype).name, "i8")
        return self.blocks(base, kind, codes.view(np.uint8), whole, zero)

    def _spread(self, base: str, x: np.ndarray, n: int, k: int) -> np.ndarray:
        """[N, groups] of a number for all, of a column, of groups of a row, or of squares of a matrix."""
        if x.size == 1:
            return np.broadcast_to(x.reshape(1, 1), (n, 1))
        if x.shape in ((n,), (n, 1)):
            return x.reshape(n, 1)
        sizes = self.settings.get("weight_block_size")
        if isinstance(sizes, list) and len(sizes) == 2 and all(type(s) is int and s > 0 for s in sizes):
            rows, columns = sizes
            if x.shape == (-(-n // rows), -(-k // columns)) and k % columns == 0:
                return np.repeat(x, rows, axis=0)[:n]
        if x.ndim == 2 and len(x) == n and x.shape[1] and k % x.shape[1] == 0:
            return x
        raise self.fail(f"{base!r} [{n}, {k}] has scales {list(x.shape)}")

    def _bytes_by_row(self, base: str) -> GgufTensor:
        """bitsandbytes' 8 bits: the largest magnitude of each row, at 127."""
        codes = self.take(f"{base}.weight", "i8", 2)
        scale = self.take(f"{base}.SCB", "f32", 1) / np.float32(127)
        self.left.pop(f"{base}.weight_format", None)
        return self.blocks(base, "i8", codes.view(np.uint8), scale[:, None])

    def _four_bits(self, base: str, state_name: str) -> GgufTensor:
        """bitsandbytes' 4 bits: a list of values, scaled by the largest magnitude of a block of the whole matrix."""
        raw = self.take(state_name, "u8")
        try:
            state = json.loads(raw.tobytes())
            kind, size, shape = state["quant_type"], int(state["blocksize"]), tuple(map(int, state["shape"]))
        except (ValueError, KeyError, TypeError) as error:
            raise self.fail(f"{state_name!r} cannot be read: {error!r}") from None
        if kind not in ("nf4", "fp4") or len(shape) != 2 or min(shape) < 1 or size < 1:
            raise self.fail(
                f"{base!r} is {kind!r} of the shape {list(shape)} in blocks of {size}; nf4 and fp4 are known"
            )
        n, k = shape
        flat = self.take(f"{base}.weight", "u8").reshape(-1)
        if 2 * flat.size != n * k or k % size:
            raise self.fail(f"{base!r} has {flat.size} bytes in blocks of {size} for {list(shape)}")
        self.left.pop(f"{base}.weight.quant_map", None)
        scale = self._absmax(base, state)
        if scale.size != n * k // size:
            raise self.fail(f"{base!r} has {scale.size} scales for {n * k // size} blocks")
        codes = np.stack([flat >> 4, flat & 15], -1).reshape(n, k)
        return self.blocks(base, kind, codes, scale.reshape(n, k // size))

    def _absmax(self, base: str, state: Mapping[str, Any]) -> np.ndarray:
        """The scales of blocks, which may be quantised themselves."""
        found = self.take(f"{base}.weight.absmax", "f32 u8", 1)
        if found.dtype == np.float32:
            return found
        table, largest = (self.take(f"{base}.weight.nested_{part}", "f32", 1) for part in ("quant_map", "absmax"))
        size, offset = state.get("nested_blocksize"), state.get("nested_offset", 0.0)
        if type(size) is not int or size < 1 or not isinstance(offset, (int, float)) or len(table) != 256:
            raise self.fail(f"{base!r} has nested blocks of {size!r}, moved by {offset!r}, of {len(table)} values")
        if len(largest) != -(-len(found) // size):
            raise self.fail(f"{base!r} has {len(largest)} nested scales for {len(found)} blocks of {size}")
        whole = np.repeat(largest, size)[: len(found)]
        return (table[found] * whole + np.float32(offset)).astype(np.float32)

    def _torchao(self, base: str) -> GgufTensor:
        """Codes with a sign: two to a byte, with a scale and the middle of each group [groups, N]; or bytes."""
        codes = self.take(f"{base}._weight_qdata", " ".join(("i8", "u8", *FLOAT8)), 2)
        scale = self.take(f"{base}._weight_scale", "f16 bf16 f32")
        zero = self.take_if(f"{base}._weight_zero_point", "f16 bf16 f32 i8")
        for part in ("act_scale", "tensor_data_names"):
            self.left.pop(f"{base}._weight_{part}", None)
        n = len(codes)
        kind = FLOAT8.get(as_dtype(codes.dtype).name, "i8")
        if zero is None or zero.dtype == np.int8:
            whole = self._spread(base, scale, n, codes.shape[1])
            middle = None if zero is None else self._spread(base, zero, n, codes.shape[1])
            return self.blocks(base, kind, codes.view(np.uint8), whole, middle)
        if scale.ndim != 2 or scale.shape[1] != n or zero.shape != scale.shape:
            raise self.fail(f"{base!r} has {n} rows, scales {list(scale.shape)} and middles {list(zero.shape)}")
        nibbles = codes.view(np.uint8)
        pairs = np.stack([nibbles & 15, nibbles >> 4], -1).reshape(n, -1) ^ 8
        wide = scale.T.astype(np.float32)
        return self.blocks(base, "m4", pairs, wide, zero.T.astype(np.float32) - 8 * wide)


def _nibbles(words: np.ndarray) -> np.ndarray:
    """The four-bit parts of words, the lowest first: u8[.., 8]."""
    return _fields(words, 4)


def _fields(words: np.ndarray, bits: int) -> np.ndarray:
    """The parts of words of so many bits, the lowest first: u8[.., 32 / bits]."""
    raw = np.ascontiguousarray(words, np.int32).view(np.uint8).reshape(*words.shape, 4)
    if bits == 8:
        return raw
    return np.stack([raw & 15, raw >> 4], -1).reshape(*words.shape, 8)
