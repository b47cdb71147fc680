"""Quantised weights of safetensors folders: AWQ, GPTQ, compressed-tensors, bitsandbytes, torchao, FP8, MXFP4.

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
from strata.io.mapped import release_pages
from strata.ops import gguf_blocks

Tensors = Mapping[str, Any]
METHODS: Final = ("awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "mxfp4", "torchao")
COMPRESSED: Final = (
    "dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized",
)  # fmt: skip
# how names of parts end that stand for nothing by themselves
PARTS: Final = (
    ".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".weight_global_scale", ".qzeros", ".scales",
    ".scale_packed", ".compressed", ".bitmask", ".absmax",
)  # fmt: skip
AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each four bits of a word
# parts of a layer beside its weight: what is added, and scales that only inputs and results are rounded with
BESIDE: Final = (
    "bias", "input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point",
    "_weight_act_scale", "_weight_act_quant_scale", "_weight_act_quant_zero_point", "_weight_tensor_data_names",
)  # fmt: skip
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
        self.taken: list[np.ndarray] = []  # by the weight that is being made
        self.weights = self._weight_settings()
        told = (settings, *self.weights)
        self.groups = tuple(
            g for s in told for g in (s.get("group_size"), s.get("q_group_size")) if type(g) is int and g > 0
        )
        self.squares = tuple(
            (b[0], b[1]) for s in told for b in (s.get("weight_block_size"), s.get("block_structure"))
            if isinstance(b, list) and len(b) == 2 and all(type(x) is int and x > 0 for x in b)
        )  # fmt: skip

    def _weight_settings(self) -> list[Mapping[str, Any]]:
        """What compressed-tensors says of the weights of each group of modules."""
        if self.method != "compressed-tensors":
            return []
        named = self.settings.get("config_groups")
        groups = [g for g in named.values() if isinstance(g, Mapping)] if isinstance(named, Mapping) else []
        for form in (self.settings.get("format"), *(g.get("format") for g in groups)):
            if form is not None and form not in COMPRESSED:
                raise self.fail(f"the format {form!r}; known are {', '.join(COMPRESSED)}")
        sparsity, transforms = (self.settings.get(f"{what}_config") for what in ("sparsity", "transform"))
        if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
            raise self.fail(f"sparsity_config has the format {sparsity.get('format')!r}; only dense weights are known")
        if isinstance(transforms, Mapping) and transforms.get("config_groups"):
            raise self.fail("transform_config: weights and activations that are rotated are not known")
        return [g["weights"] for g in groups if isinstance(g.get("weights"), Mapping)]

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
                found[f"{base}.weight"] = self._done(reader(base))
            elif ".weight.quant_state.bitsandbytes__" in name:
                base = name.partition(".weight.quant_state.")[0]
                found[f"{base}.weight"] = self._done(self._four_bits(base, name))
            elif self.method == "mxfp4" and name.endswith("_blocks"):
                base = name.removesuffix("_blocks")
                parts = (self.take(f"{base}_{x}", "u8") for x in ("blocks", "scales"))
                found[base] = self._done(self._power_blocks(base, *parts))
        for name in [n for n in self.left if n.endswith(".weight")]:
            base, kind = name.removesuffix(".weight"), as_dtype(self.left[name].dtype).name
            if kind == "i8" or kind in FLOAT8:
                found[name] = self._done(self._scaled(base))
        self._check_rest(found)
        return self.left | found

    def _done(self, made: GgufTensor) -> GgufTensor:
        """A weight that is made of copies: the pages of the file that its parts lie in are not needed any more."""
        for part in self.taken:
            release_pages(part)
        self.taken.clear()
        return made

    def _check_rest(self, found: Mapping[str, Any]) -> None:
        """Refuse what no reader took: numbers would be wrong without it."""
        bases = {name.removesuffix(".weight") for name in found}
        for name, tensor in self.left.items():
            base, _, part = name.rpartition(".")
            outer, _, inner = base.rpartition(".")
            beside = part if base in bases else f"{inner}.{part}" if outer in bases else None
            if name.endswith(PARTS) or (beside is not None and beside not in BESIDE):
                raise self.fail(f"{name!r} is a part of a weight that was not found, or is of another layout")
            kind = as_dtype(tensor.dtype).name
            if beside is None and len(tensor.shape) > 1 and kind in ("i8", *FLOAT8):
                raise self.fail(f"{name!r} is {kind}{list(tensor.shape)}, which is no layout of a weight that is known")

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
        if not array.size:
            raise self.fail(f"{name!r} is empty: {kind}{list(array.shape)}")
        self.taken.append(array)
        return array

    def whole(self, key: str, default: Any) -> int:
        value = self.settings.get(key, default)
        if type(value) is not int:
            raise self.fail(f"{key} is {value!r}, a whole number is wanted")
        return value

    def group(self, name: str, k: int, count: int) -> int:
        """The columns that share a scale in a row of this length; the last group may be shorter."""
        if count == 1:
            return k
        sizes = (*self.groups, *(columns for _, columns in self.squares), *([k // count] if k % count == 0 else []))
        found = next((size for size in sizes if -(-k // size) == count), 0)
        if not found:
            raise self.fail(f"{name!r} has {count} scales for {k} columns, in groups of {sizes or 'no known size'}")
        return found

    def blocks(
        self, name: str, kind: str, codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None,
        order: np.ndarray | None = None, group: int = 0,
    ) -> GgufTensor:  # fmt: skip
        """A matrix from codes u8[N, K], and a scale and a zero point (or what is added) [N, groups] beside them."""
        n, k = codes.shape
        if scale.ndim != 2 or len(scale) != n or not 0 < scale.shape[1] <= k:
            raise self.fail(f"{name!r} [{n}, {k}] has scales {list(scale.shape)}")
        if zero is not None and zero.shape != scale.shape:
            raise self.fail(f"{name!r} has scales {list(scale.shape)} and zero points {list(zero.shape)}")
        group = group or self.group(name, k, scale.shape[1])
        size = next((s for s in gguf_blocks.GROUPS if group % s == 0 and k % s == 0), 0)
        if not size:
            raise self.fail(f"{name!r} has {k} columns in groups of {group}, which are not multiples of {LEAST_GROUP}")
        places = np.arange(k // size) * size // group
        form = gguf_blocks.PACKED[f"{kind}_{size}{SHORT[as_dtype(scale.dtype).name]}"]
        made = np.zeros((n, k // size, form.bytes), np.uint8)
        at = scale.dtype.itemsize

        def spread(x: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(x[:, places])

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
        made[..., at:] = _in_halves(parts) if kind in ("u4", "m4", "nf4", "fp4") else parts
        return GgufTensor(name, form.name, (n, k), made.reshape(n, -1), order)

    # --------------------------------------------------------------------------------------------------------- layouts

    def _awq(self, base: str) -> GgufTensor:
        """Words [K, N/8] of eight columns in their own order; or, for products with vectors, [N, K/8]."""
        bits = self.whole("bits", self.whole("w_bit", 4))
        form = next((f for f in map(self.settings.get, ("version", "format", "checkpoint_format")) if f), "gemm")
        if bits != 4 or str(form).lower() not in ("gemm", "gemv"):
            raise self.fail(f"{bits} bits, version {form!r}; 4, gemm and gemv are known")
        words, zeros = (self.take(f"{base}.{part}", "i32", 2) for part in ("qweight", "qzeros"))
        scales = self.take(f"{base}.scales", "f16 bf16 f32", 2)
        codes, zero = (_fields(x, 4) for x in (words, zeros))
        if str(form).lower() == "gemv":
            return self._awq_rows(base, codes, zero, scales)
        order = np.argsort(AWQ_ORDER)
        codes, zero = (x.reshape(len(x), -1, 8)[..., order].reshape(len(x), -1) for x in (codes, zero))
        if codes.shape[1] != scales.shape[1]:
            raise self.fail(f"{base!r} has words {list(words.shape)} and scales {list(scales.shape)}")
        return self.blocks(base, "u4", codes.T, scales.T, zero.T)

    def _awq_rows(self, base: str, codes: np.ndarray, zero: np.ndarray, scales: np.ndarray) -> GgufTensor:
        """Codes [N, K]; scales and zero points [N, groups] with columns after them that nothing belongs to."""
        group = self.groups[0] if self.groups else codes.shape[1]
        count = -(-codes.shape[1] // group)
        if scales.shape != zero.shape or scales.shape[1] < count:
            raise self.fail(f"{base!r} has {count} groups, scales {list(scales.shape)}, zero points {list(zero.shape)}")
        return self.blocks(base, "u4", codes, scales[:, :count], zero[:, :count], group=group)

    def _gptq(self, base: str) -> GgufTensor:
        """Words [K · bits/32, N] of neighbours along K; rows may belong to groups in any order."""
        form = next((f for f in map(self.settings.get, ("checkpoint_format", "format")) if f), "gptq")
        if form not in ("gptq", "gptq_v2") or self.settings.get("is_marlin_format"):
            raise self.fail(f"the checkpoint format {form!r}; gptq and gptq_v2 are known")
        words, zeros = (self.take(f"{base}.{part}", "i32", 2) for part in ("qweight", "qzeros"))
        scales = self.take(f"{base}.scales", "f16 bf16 f32", 2)
        places = self.take_if(f"{base}.g_idx", "i32 i64", 1)
        bits = self.whole("bits", 4)
        if places is not None and places.size and 32 * len(words) % len(places) == 0:
            bits = 32 * len(words) // len(places)  # of this weight: there may be others of more or fewer
        if bits not in (2, 3, 4, 8):
            raise self.fail(f"{bits} bits; 2, 3, 4 and 8 are known")
        codes, zero = _fields(words.T, bits), _fields(_one_more(zeros, bits) if form == "gptq" else zeros, bits)
        n = len(codes)
        if scales.shape[1] != n or zero.shape[1] != n or len(zero) != len(scales):
            raise self.fail(
                f"{base!r} has words {list(words.shape)}, zero points {list(zeros.shape)}, scales {list(scales.shape)}"
            )
        codes, order, group = self._in_groups(base, codes, places, len(scales))
        return self._unsigned(base, bits, codes, scales.T, zero.T, order, group)

    def _unsigned(
        self, base: str, bits: int, codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, order: np.ndarray | None,
        group: int,
    ) -> GgufTensor:  # fmt: skip
        """Blocks of whole numbers without sign, and of zero points among them."""
        if bits <= 4:
            return self.blocks(base, "u4", codes, scale, zero, order, group)
        return self.blocks(base, "i8", codes ^ 128, scale, zero.astype(np.int16) - 128, order, group)

    def _in_groups(
        self, base: str, codes: np.ndarray, places: np.ndarray | None, groups: int
    ) -> tuple[np.ndarray, np.ndarray | None, int]:
        """Columns so that groups lie together, the order in which elements of x belong to them, and a group's size."""
        if places is None or (places == -1).all():  # not filled in where each column is in its own place
            return codes, None, 0
        counts = (
            np.bincount(places, minlength=groups)
            if groups and places.size and places.min() >= 0 and places.max() < groups
            else np.zeros(0)
        )
        if (
            len(places) != codes.shape[1]
            or not len(counts)
            or not (counts[:-1] == counts[0]).all()
            or not (0 < counts[-1] <= counts[0])
        ):
            raise self.fail(f"{base}.g_idx does not name {groups} groups of the same size")
        order = np.argsort(places, kind="stable").astype(np.int64)
        if (order == np.arange(len(order))).all():
            return codes, None, int(counts[0])
        return codes[:, order], order, int(counts[0])

    def _compressed(self, base: str) -> GgufTensor:
        """Words [N, K · bits/32] of neighbours along K, moved up by half their range; or bytes of two small floats."""
        words = self.take(f"{base}.weight_packed", "i32 u8", 2)
        scale = self.take(f"{base}.weight_scale", "f16 bf16 f32 f8e4m3 u8")
        if words.dtype == np.uint8:
            return self._small_floats(base, words, scale)
        zeros = self.take_if(f"{base}.weight_zero_point", "i32 i8")
        places = self.take_if(f"{base}.weight_g_idx", "i32 i64", 1)
        shape = self.take_if(f"{base}.weight_shape", "i64 i32", 1)
        known = [b for s in self.weights if type(b := s.get("num_bits")) is int and 1 <= b <= 8] or [4]
        columns = int(shape[1]) if shape is not None and len(shape) == 2 else words.shape[1] * 32 // known[0]
        bits = next((b for b in (*known, *range(1, 9)) if -(-columns * b // 32) == words.shape[1]), 0)
        if not bits or scale.dtype == np.uint8:
            raise self.fail(f"{base!r} has {words.shape[1]} words for {columns} columns, scales {scale.dtype}")
        codes = _fields(words, bits)[:, :columns]
        n, middle = len(codes), 1 << bits - 1
        scale = self._spread(base, scale, n, columns)
        if zeros is None:
            zero = np.full(scale.shape, middle, np.uint8)
        elif zeros.dtype == np.int32 and zeros.ndim == 2:
            zero = _fields(zeros.T, bits).T[:n]
        else:
            zero = self._spread(base, (zeros.astype(np.int16) + middle).astype(np.uint8), n, columns)
        codes, order, group = self._in_groups(base, codes, places, scale.shape[1])
        return self._unsigned(base, bits, codes, scale, zero, order, group)

    def _small_floats(self, base: str, pairs: np.ndarray, scale: np.ndarray) -> GgufTensor:
        """4-bit floats [N, K/2], a power of two for 32 of them; or an 8-bit float for 16, and one scale for all."""
        n, k = len(pairs), 2 * pairs.shape[1]
        if scale.dtype == np.uint8:
            return self._power_blocks(base, pairs.reshape(n, -1, 16 if k % 32 == 0 else k // 2), scale)
        whole = self.take(f"{base}.weight_global_scale", "f32")
        size = next((s for s in gguf_blocks.GROUPS if k % s == 0 and s >= 64), 0)
        if not size:
            raise self.fail(f"{base!r} [{n}, {k}] has rows of {k} 4-bit floats, which is not a multiple of 64")
        if whole.size != 1 or scale.shape != (n, k // 16) or as_dtype(scale.dtype).name != "f8e4m3":
            raise self.fail(f"{base!r} [{n}, {k}] has scales {list(scale.shape)} and {list(whole.shape)}")
        form = gguf_blocks.PACKED[f"nvfp4_{size}f"]
        made = np.zeros((n, k // size, form.bytes), np.uint8)
        with np.errstate(divide="ignore"):
            factor = np.float32(1) / whole.reshape(-1)[:1] * np.float32(form.d.times)
        form.d.write(made.reshape(-1, form.bytes), np.broadcast_to(factor, made.shape[0] * made.shape[1]))
        made[..., 4 : 4 + size // 16] = scale.view(np.uint8).reshape(n, k // size, -1)
        made[..., 4 + size // 16 :] = _halves_of_pairs(pairs.reshape(n, k // size, -1))
        return GgufTensor(base, form.name, (n, k), made.reshape(n, -1))

    def _power_blocks(self, base: str, pairs: np.ndarray, scale: np.ndarray) -> GgufTensor:
        """4-bit floats [.., K/32, 16], and the power of two of each 32 [.., K/32]."""
        if pairs.ndim not in (3, 4) or pairs.shape[-1] != 16 or pairs.shape[:-1] != scale.shape:
            raise self.fail(f"{base!r} has blocks {list(pairs.shape)} and scales {list(scale.shape)}")
        made = np.empty((*scale.shape, 17), np.uint8)
        made[..., 0] = scale
        made[..., 1:] = _halves_of_pairs(pairs)
        return GgufTensor(base, "mxfp4", (*scale.shape[:-1], 32 * scale.shape[-1]), made.reshape(*scale.shape[:-1], -1))

    def _scaled(self, base: str) -> GgufTensor:
        """Bytes, whole numbers or floats, [N, K], with a scale for all, for each row, or for each block."""
        codes = self.take(f"{base}.weight", " ".join(("i8", *FLOAT8)), 2)
        inverse = self.take_if(f"{base}.weight_scale_inv", "f16 bf16 f32")
        scale = inverse if inverse is not None else self.take(f"{base}.weight_scale", "f16 bf16 f32 u8")
        if scale.dtype == np.uint8:  # powers of two
            scale = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
        zeros = self.take_if(f"{base}.weight_zero_point", "i8 i32")
        places = self.take_if(f"{base}.weight_g_idx", "i32 i64", 1)
        n, k = codes.shape
        whole = self._spread(base, scale, n, k)
        zero = None if zeros is None else self._spread(base, zeros, n, k)
        kind = FLOAT8.get(as_dtype(codes.dtype).name, "i8")
        raw, order, group = self._in_groups(base, codes.view(np.uint8), places, whole.shape[1])
        return self.blocks(base, kind, raw, whole, zero, order, group)

    def _spread(self, base: str, x: np.ndarray, n: int, k: int) -> np.ndarray:
        """[N, groups] of a number for all, of a column, of groups of a row, or of squares of a matrix."""
        if x.size == 1:
            return np.broadcast_to(x.reshape(1, 1), (n, 1))
        if x.shape in ((n,), (n, 1)):
            return x.reshape(n, 1)
        for rows, columns in self.squares:
            if x.shape == (-(-n // rows), -(-k // columns)):
                return np.repeat(x, min(rows, n), axis=0)[:n]
        if x.ndim == 2 and len(x) == n and x.shape[1]:
            return x
        raise self.fail(f"{base!r} [{n}, {k}] has scales {list(x.shape)}")

    def _bytes_by_row(self, base: str) -> GgufTensor:
        """bitsandbytes' 8 bits: the largest magnitude of each row, at 127."""
        codes = self.take(f"{base}.weight", "i8", 2)
        scale = self.take(f"{base}.SCB", "f32", 1) / np.float32(127)
        form = self.take_if(f"{base}.weight_format", "u8")
        if form is not None and form.any():
            raise self.fail(f"{base!r} has the weight_format {form.reshape(-1).tolist()[:4]}; 0, by rows, is known")
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
        stored = self.take(f"{base}.weight", "u8 i8 f16 bf16 f32 f64")  # any type may stand for its bytes
        flat = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
        if 2 * flat.size != n * k:
            raise self.fail(f"{base!r} has {flat.size} bytes for {list(shape)}")
        values = self.take_if(f"{base}.weight.quant_map", "f32")
        known = gguf_blocks.NF4_VALUES if kind == "nf4" else gguf_blocks.BNB_FP4_VALUES
        if values is not None and (values.shape != (16,) or np.abs(values - np.array(known)).max() > 1e-4):
            raise self.fail(f"{base!r} has a list of values that is not that of {kind}")
        scale = self._absmax(base, state)
        if scale.size != -(-n * k // size):
            raise self.fail(f"{base!r} has {scale.size} scales for {n * k} numbers in blocks of {size}")
        group = next((s for s in gguf_blocks.GROUPS if k % s == 0 and size % s == 0), 0)
        if not group:
            raise self.fail(f"{base!r} has rows of {k} in blocks of {size}, which no multiple of {LEAST_GROUP} divides")
        codes = np.stack([flat >> 4, flat & 15], -1).reshape(n, k)
        return self.blocks(base, kind, codes, scale[np.arange(0, n * k, group) // size].reshape(n, -1), group=group)

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


def _one_more(words: np.ndarray, bits: int) -> np.ndarray:
    """Words whose parts were stored less 1, whole words at once: a part that was 0 has borrowed from the next."""
    if 32 % bits:
        parts = _fields(words, bits) + np.uint8(1)
        single = np.unpackbits(parts[..., None], axis=-1, count=bits, bitorder="little")
        return np.packbits(single.reshape(len(words), -1), axis=-1, bitorder="little").view(np.int32)
    ones = np.uint32(sum(1 << at for at in range(0, 32, bits)))
    return (np.ascontiguousarray(words).view(np.uint32) + ones).view(np.int32)


def _in_halves(codes: np.ndarray) -> np.ndarray:
    """Bytes [.., n/2] of codes [.., n] of four bits: of each 32, the first 16 in the low halves."""
    halves = codes.reshape(*codes.shape[:-1], -1, 2, 16)
    return (halves[..., 0, :] | halves[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)


def _halves_of_pairs(pairs: np.ndarray) -> np.ndarray:
    """The same from bytes that hold two neighbours each, the first in the low half."""
    both = pairs.reshape(*pairs.shape[:-1], -1, 2, 8)
    first, second = both[..., 0, :], both[..., 1, :]
    made = np.empty((*first.shape[:-1], 16), np.uint8)
    made[..., 0::2] = first & 15 | second << 4
    made[..., 1::2] = first >> 4 | second & 0xF0
    return made.reshape(pairs.shape)


def _fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Words [.., n] as fields of `bits` bits, the lowest first, also across words: u8[.., 32 n / bits]."""
    raw = np.ascontiguousarray(words, np.int32).view(np.uint8).reshape(*words.shape[:-1], 4 * words.shape[-1])
    if bits == 8:
        return raw
    if bits == 4:
        return np.stack([raw & 15, raw >> 4], -1).reshape(*words.shape[:-1], -1)
    single = np.unpackbits(raw, axis=-1, bitorder="little")
    count = single.shape[-1] // bits
    parts = single[..., : count * bits].reshape(*words.shape[:-1], count, bits)
    return np.packbits(parts, axis=-1, bitorder="little")[..., 0]
