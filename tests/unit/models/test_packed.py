"""Quantised safetensors folders: each layout, packed as its own tools pack it, against the numbers it stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from strata.core import f32
from strata.errors import FileError
from strata.io import GgufTensor, load_safetensors, packed_weights, save_safetensors
from strata.models import load
from strata.models.weights import WeightBuilder
from tests.unit.models import decoder_vectors as vectors

HIDDEN, INNER, VOCAB = 128, 256, 64
CONFIG = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "rms_norm_eps": 1e-5,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
SHAPES = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (64, HIDDEN), "self_attn.v_proj": (64, HIDDEN),
          "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
          "mlp.down_proj": (HIDDEN, INNER)}  # fmt: skip
Packed = tuple[dict[str, np.ndarray], np.ndarray]  # tensors by the end of their names, and the numbers [N, K]
NF4 = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
                -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
                0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
                1.0], np.float32)  # fmt: skip


def words(codes: np.ndarray, bits: int) -> np.ndarray:
    """i32[.., n · bits / 32] of codes [.., n], the first in the lowest bits."""
    each = 32 // bits
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, each)
    return (parts << (bits * np.arange(each, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)


def drawn(rng: np.random.Generator, shape: tuple[int, int], group: int, top: int) -> tuple[np.ndarray, ...]:
    """Codes [N, K], scales f16 and zero points [N, K / group]."""
    n, k = shape
    scale = (rng.random((n, k // group)) * 0.01 + 0.005).astype(np.float16)
    return rng.integers(0, top + 1, shape, np.uint8), scale, rng.integers(1, top, (n, k // group))


def wide(x: np.ndarray, k: int) -> np.ndarray:
    return np.repeat(x.astype(np.float32), k // x.shape[1], axis=1)


def dense(codes: np.ndarray, bits: int) -> np.ndarray:
    """i32[N, n · bits / 32] of codes [N, n] as one long number a row, over the ends of words."""
    size = -(-codes.shape[1] * bits // 32) * 4
    rows = [sum(int(c) << bits * i for i, c in enumerate(row)).to_bytes(size, "little") for row in codes]
    return np.frombuffer(b"".join(rows), np.int32).reshape(len(codes), -1)


def ragged(rng: np.random.Generator, shape: tuple[int, int], group: int, top: int) -> tuple[np.ndarray, ...]:
    """The same where the last group of a row may be shorter."""
    n, k = shape
    groups = -(-k // group)
    scale = (rng.random((n, groups)) * 0.01 + 0.005).astype(np.float16)
    return rng.integers(0, top + 1, shape, np.uint8), scale, rng.integers(1, top, (n, groups))


def awq(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes, scale, zero = drawn(rng, shape, 32, 15)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def columns(x: np.ndarray) -> np.ndarray:
        return words(x.reshape(len(x), -1, 8)[..., order].reshape(len(x), -1), 4)

    parts = {"qweight": columns(codes.T), "qzeros": columns(zero.T), "scales": np.ascontiguousarray(scale.T)}
    return parts, (codes - wide(zero, shape[1])) * wide(scale, shape[1])


def awq_rows(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    """The layout for products with vectors: rows of words, and scales filled up to whole words."""
    codes, scale, zero = drawn(rng, shape, 64, 15)
    groups, padded = scale.shape[1], 16
    wide_zero, wide_scale = np.zeros((len(codes), padded), np.int64), np.zeros((len(codes), padded), np.float16)
    wide_zero[:, :groups], wide_scale[:, :groups] = zero, scale
    parts = {"qweight": words(codes, 4), "qzeros": words(wide_zero, 4), "scales": wide_scale}
    return parts, (codes - wide(zero, shape[1])) * wide(scale, shape[1])


def gptq_dense(bits: int, group: int, less: int = 1, *, ordered: bool = False) -> Callable[..., Packed]:
    """Fewer bits, and groups that do not divide the columns; zero points are stored less 1, or as they are."""

    def made(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        codes, scale, zero = ragged(rng, shape, group, (1 << bits) - 1)
        place = np.arange(shape[1]) // group
        place = rng.permutation(place) if ordered else place
        parts = {"qweight": np.ascontiguousarray(dense(codes, bits).T), "qzeros": dense(zero.T - less, bits),
                 "scales": np.ascontiguousarray(scale.T), "g_idx": place.astype(np.int32)}  # fmt: skip
        return parts, (codes - zero[:, place].astype(np.float32)) * scale[:, place].astype(np.float32)

    return made


def gptq_of_two_widths(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    """A file whose `dynamic` settings give some weights 8 bits."""
    return gptq(8 if shape[0] == INNER else 4, ordered=False)(rng, shape)


def borrowed(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    """Zero points of 0, less 1 as whole words."""
    codes, scale, zero = drawn(rng, shape, 64, 15)
    zero[rng.random(zero.shape) < 0.3] = 0
    stored = (words(zero.T, 4).view(np.uint32) - np.uint32(0x11111111)).view(np.int32)
    parts = {"qweight": np.ascontiguousarray(words(codes, 4).T), "qzeros": stored,
             "scales": np.ascontiguousarray(scale.T)}  # fmt: skip
    return parts, (codes - wide(zero, shape[1])) * wide(scale, shape[1])


def gptq(bits: int, ordered: bool) -> Callable[[np.random.Generator, tuple[int, int]], Packed]:
    def made(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        codes, scale, zero = drawn(rng, shape, 64, (1 << bits) - 1)
        k = shape[1]
        place = rng.permutation(np.arange(k) // 64) if ordered else np.arange(k) // 64
        parts = {"qweight": np.ascontiguousarray(words(codes, bits).T), "qzeros": words(zero.T - 1, bits),
                 "scales": np.ascontiguousarray(scale.T), "g_idx": place.astype(np.int32)}  # fmt: skip
        return parts, (codes - zero[:, place].astype(np.float32)) * scale[:, place].astype(np.float32)

    return made


def compressed(bits: int, symmetric: bool) -> Callable[[np.random.Generator, tuple[int, int]], Packed]:
    def made(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        top = (1 << bits) - 1
        codes, scale, zero = drawn(rng, shape, 128, top)
        narrow = scale.astype(ml_dtypes.bfloat16)
        parts = {"weight_packed": words(codes, bits), "weight_scale": narrow, "weight_shape": np.array(shape)}
        if symmetric:
            zero = np.full_like(zero, (top + 1) // 2)
        else:
            parts["weight_zero_point"] = np.ascontiguousarray(words(zero.T, bits).T)
        return parts, (codes - wide(zero, shape[1])) * wide(narrow, shape[1])

    return made


def compressed_dense(bits: int, groups: str) -> Callable[..., Packed]:
    """Any number of bits, with one scale for all, for a row, or for groups whose last is shorter."""

    def made(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        group = {"tensor": shape[1], "channel": shape[1], "group": 96}[groups]
        codes, scale, _ = ragged(rng, shape, group, (1 << bits) - 1)
        scale = scale[:1] if groups == "tensor" else scale
        place = np.arange(shape[1]) // group
        parts = {"weight_packed": dense(codes, bits), "weight_shape": np.array(shape),
                 "weight_scale": scale.reshape(-1) if groups == "tensor" else scale}  # fmt: skip
        return parts, (codes - np.float32(1 << bits - 1)) * scale[:, place].astype(np.float32)

    return made


def one_zero_point(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    """One scale and one zero point for a whole matrix, the zero point with its sign."""
    codes, scale = rng.integers(0, 16, shape, np.uint8), np.array([3e-3], np.float32)
    parts = {"weight_packed": dense(codes, 4), "weight_shape": np.array(shape), "weight_scale": scale,
             "weight_zero_point": np.array([-3], np.int8)}  # fmt: skip
    return parts, (codes - np.float32(5)) * scale


def bytes_in_order(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    """Bytes whose columns belong to groups in any order."""
    codes = rng.integers(-127, 128, shape).astype(np.int8)
    place = rng.permutation(np.arange(shape[1]) // 64)
    scale = (rng.random((shape[0], shape[1] // 64)) * 1e-3 + 1e-3).astype(np.float32)
    parts: dict[str, np.ndarray] = {"weight": codes, "weight_scale": scale, "weight_g_idx": place.astype(np.int32)}
    return parts, codes.astype(np.float32) * scale[:, place]


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def pairs(codes: np.ndarray) -> np.ndarray:
    """Two neighbours to a byte, the first in the low half."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def nvfp4(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    """4-bit floats, an 8-bit one for each 16 of them, and a divisor for all."""
    codes = rng.integers(0, 16, shape, np.uint8)
    scale = (rng.random((shape[0], shape[1] // 16)) * 200 + 1).astype(ml_dtypes.float8_e4m3fn)
    whole = np.array([3000.0], np.float32)
    parts = {"weight_packed": pairs(codes), "weight_scale": scale, "weight_global_scale": whole}
    return parts, FP4[codes] * wide(scale, shape[1]) / whole


def mxfp4(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes, power = rng.integers(0, 16, shape, np.uint8), rng.integers(117, 122, (shape[0], shape[1] // 32), np.uint8)
    whole = np.exp2(power.astype(np.float32) - 127)
    return {"weight_packed": pairs(codes), "weight_scale": power}, FP4[codes] * wide(whole, shape[1])


def mxfp8(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes = (rng.standard_normal(shape) * 10).astype(ml_dtypes.float8_e4m3fn)
    power = rng.integers(115, 120, (shape[0], shape[1] // 32), np.uint8)
    whole = np.exp2(power.astype(np.float32) - 127)
    return {"weight": codes, "weight_scale": power}, codes.astype(np.float32) * wide(whole, shape[1])


def squares(size: int, name: str) -> Callable[..., Packed]:
    """8-bit floats with a scale for each square, which need not divide the sides."""

    def made(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        codes = (rng.standard_normal(shape) * 10).astype(ml_dtypes.float8_e4m3fn)
        scale = (rng.random((-(-shape[0] // size), -(-shape[1] // size))) * 0.01).astype(np.float32)
        whole = scale[np.arange(shape[0])[:, None] // size, np.arange(shape[1]) // size]
        return {"weight": codes, name: scale}, codes.astype(np.float32) * whole

    return made


def one_scale(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes, scale = rng.integers(-127, 128, shape).astype(np.int8), np.array([1.5e-3], ml_dtypes.bfloat16)
    return {"weight": codes, "weight_scale": scale}, codes * scale.astype(np.float32)


def floats_in_other_types(kind: str, size: int) -> Callable[..., Packed]:
    """4-bit floats whose bytes are stored as 16-bit floats, in blocks that may go over the ends of rows."""

    def made(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
        values = NF4 if kind == "nf4" else np.concatenate([BNB_FP4, -BNB_FP4])
        codes, largest = rng.integers(0, 16, shape, np.uint8), rng.random(-(-shape[0] * shape[1] // size)) * 0.1
        halves = codes.reshape(-1, 2)
        state = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": shape}
        stored = np.ascontiguousarray(halves[:, 0] << 4 | halves[:, 1]).view(ml_dtypes.bfloat16)
        parts = {"weight": stored[:, None], "weight.absmax": largest.astype(np.float32), "weight.quant_map": values}
        parts[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        numbers = values[codes].reshape(-1) * np.repeat(largest.astype(np.float32), size)[: codes.size]
        return parts, numbers.reshape(shape)

    return made


BNB_FP4 = np.array([0, 0.0052083333, 2 / 3, 1, 1 / 3, 0.5, 1 / 6, 0.25], np.float32)


def whole_bytes(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes = rng.integers(-127, 128, shape).astype(np.int8)
    scale = (rng.random((shape[0], 1)) * 1e-3 + 1e-3).astype(np.float32)
    return {"weight": codes, "weight_scale": scale}, codes * scale


def float8(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes = (rng.standard_normal(shape) * 10).astype(ml_dtypes.float8_e4m3fn)
    scale = (rng.random((shape[0], 1)) * 0.01).astype(ml_dtypes.bfloat16)
    return {"weight": codes, "weight_scale": scale}, codes.astype(np.float32) * scale.astype(np.float32)


def float8_squares(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes = (rng.standard_normal(shape) * 10).astype(ml_dtypes.float8_e4m3fn)
    scale = (rng.random((-(-shape[0] // 128), shape[1] // 128)) * 0.01).astype(np.float32)
    whole = np.repeat(np.repeat(scale, 128, 0)[: shape[0]], 128, 1)
    return {"weight": codes, "weight_scale_inv": scale}, codes.astype(np.float32) * whole


def normal_floats(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    """Blocks of 64, whose scales are quantised in blocks of 256."""
    codes = rng.integers(0, 16, shape, np.uint8)
    count, table = codes.size // 64, np.sort(rng.random(256)).astype(np.float32)
    small, nested = rng.integers(0, 256, count, np.uint8), (rng.random(-(-count // 256)) * 0.05).astype(np.float32)
    absmax = table[small] * np.repeat(nested, 256)[:count] + np.float32(0.05)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": shape, "nested_blocksize": 256,
             "nested_dtype": "float32", "nested_offset": float(np.float32(0.05))}  # fmt: skip
    pairs = codes.reshape(-1, 2)
    parts = {"weight": (pairs[:, :1] << 4 | pairs[:, 1:]), "weight.absmax": small, "weight.quant_map": NF4,
             "weight.nested_absmax": nested, "weight.nested_quant_map": table,
             "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8)}  # fmt: skip
    return parts, NF4[codes] * np.repeat(absmax, 64).reshape(shape)


def eight_bits(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes, scale = rng.integers(-127, 128, shape).astype(np.int8), (rng.random(shape[0]) * 0.2).astype(np.float32)
    return {"weight": codes, "SCB": scale}, codes * (scale / 127)[:, None]


def torchao(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes = rng.integers(-8, 8, shape).astype(np.int8)
    groups = (shape[1] // 32, shape[0])
    scale, middle = ((rng.random(groups) * 0.01).astype(ml_dtypes.bfloat16) for _ in range(2))
    raw = codes.view(np.uint8)
    parts = {"_weight_qdata": (raw[:, 1::2] << 4 | raw[:, ::2] & 15), "_weight_scale": scale,
             "_weight_zero_point": middle}  # fmt: skip
    return parts, codes * wide(scale.T, shape[1]) + wide(middle.T, shape[1])


CT = {"quant_method": "compressed-tensors"}


def groups_of(form: str, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' settings of one group of modules."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    rest = {"ignore": ["lm_head", "re:.*gate$"], "sparsity_config": {"format": "dense"}, "kv_cache_scheme": None}
    return {**CT, "format": form, "config_groups": groups, **rest}


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[..., Packed]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 64}, gptq(4, False)),
    "gptq act-order": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}, gptq(4, True)),
    "gptq 8": ({"quant_method": "gptq", "bits": 8, "group_size": 64}, gptq(8, True)),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMV"}, awq_rows),
    "gptq 2": ({"quant_method": "gptq", "bits": 2, "group_size": 32}, gptq_dense(2, 32)),
    "gptq 3": ({"quant_method": "gptq", "bits": 3, "group_size": 64, "sym": False}, gptq_dense(3, 64)),
    "gptq 4, the last group short": ({"quant_method": "gptq", "bits": 4, "group_size": 96}, gptq_dense(4, 96)),
    "gptq 4, act-order, the last group short": (
        {"quant_method": "gptq", "bits": 4, "group_size": 96, "desc_act": True}, gptq_dense(4, 96, ordered=True)),
    "gptq 4, a scale a row": ({"quant_method": "gptq", "bits": 4, "group_size": -1}, gptq_dense(4, 1 << 20)),
    "gptq version 2": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2"}, gptq_dense(4, 64, 0)),
    "gptq of two widths": (
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {"+:.*(gate|up)_proj": {"bits": 8}}},
        gptq_of_two_widths),
    "gptq with zero points of 0": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False}, borrowed),
    "compressed int4, one scale": (groups_of("pack-quantized", num_bits=4), compressed_dense(4, "tensor")),
    "compressed int3": (groups_of("pack-quantized", num_bits=3), compressed_dense(3, "channel")),
    "compressed int6 in groups": (
        groups_of("pack-quantized", num_bits=6, group_size=96), compressed_dense(6, "group")),
    "compressed int4, one zero point": (groups_of("pack-quantized", num_bits=4, symmetric=False), one_zero_point),
    "compressed int8, act-order": (groups_of("int-quantized", num_bits=8, group_size=64), bytes_in_order),
    "compressed int8, one scale": (groups_of("int-quantized", num_bits=8), one_scale),
    "compressed fp8 in squares": (
        groups_of("float-quantized", num_bits=8, block_structure=[128, 128]), squares(128, "weight_scale")),
    "compressed nvfp4": (groups_of("nvfp4-pack-quantized", num_bits=4, group_size=16), nvfp4),
    "compressed mxfp4": (groups_of("mxfp4-pack-quantized", num_bits=4, group_size=32), mxfp4),
    "compressed mxfp8": (groups_of("mxfp8-quantized", num_bits=8, group_size=32), mxfp8),
    "fp8 in squares that do not divide": (
        {"quant_method": "fp8", "weight_block_size": [96, 96]}, squares(96, "weight_scale_inv")),
    "bitsandbytes nf4 in other types": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True}, floats_in_other_types("nf4", 64)),
    "bitsandbytes fp4 over rows": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True}, floats_in_other_types("fp4", 512)),
    "compressed int4": (CT, compressed(4, True)),
    "compressed int4 with zero points": (CT, compressed(4, False)),
    "compressed int8 in words": (CT, compressed(8, False)),
    "compressed int8": (CT, whole_bytes),
    "compressed fp8": (CT, float8),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, float8_squares),
    "bitsandbytes nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, normal_floats),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, eight_bits),
    "torchao int4": ({"quant_method": "torchao", "quant_type": {"default": "int4_weight_only"}}, torchao),
}  # fmt: skip


def model_tensors(make: Callable[..., Packed], rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """A small Llama, packed, and as the numbers that it stands for."""
    packed: dict[str, Any] = {"model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)}
    packed["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for i in range(2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            packed[f"model.layers.{i}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    plain = dict(packed)
    for i in range(2):
        for name, shape in SHAPES.items():
            parts, numbers = make(rng, shape)
            base = f"model.layers.{i}.{name}"
            plain[f"{base}.weight"] = numbers.astype(np.float32)
            packed |= {f"{base}.{end}": np.ascontiguousarray(part) for end, part in parts.items()}
    return packed, plain


def saved(folder: Path, tensors: dict[str, Any], **more: Any) -> Path:
    folder.mkdir()
    save_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **more}))
    return folder


@pytest.mark.few(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_the_numbers(layout: str, tmp_path: Path, rng: np.random.Generator) -> None:
    settings, make = LAYOUTS[layout]
    packed, plain = model_tensors(make, rng)
    for name, found in packed_weights(packed, settings).items():
        if isinstance(found, GgufTensor):
            np.testing.assert_allclose(found.dequantize(), plain[name], rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(found, plain[name])
    model = load(saved(tmp_path / "packed", packed, quantization_config=settings))
    assert model.is_quantized
    ids = np.arange(12, dtype=np.int32)[None]
    wanted = load(saved(tmp_path / "plain", plain)).run(input_ids=ids)["logits"]
    got = model.run(input_ids=ids)["logits"]
    assert np.linalg.norm(got - wanted) <= 2e-4 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "quip"}, "quantised by 'quip'; known are awq"),
        ({"quant_method": "gptq", "bits": 5}, "5 bits; 2, 3, 4 and 8 are known"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint format 'marlin'"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "checkpoint format"),
        ({"quant_method": "awq", "version": "gemv_fast"}, "version 'gemv_fast'"),
        ({"quant_method": "awq", "checkpoint_format": "llm-awq"}, "version 'llm-awq'"),
        ({**CT, "format": "marlin-24"}, "the format 'marlin-24'"),
        ({**CT, "config_groups": {"group_0": {"format": "mxfp6-pack-quantized"}}}, "the format 'mxfp6-pack-quantized'"),
        ({**CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config has the format"),
        ({**CT, "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transform_config"),
        ("int4", "quantization_config = 'int4'"),
    ],
)
def test_what_is_not_known_is_named(settings: Any, said: str, rng: np.random.Generator) -> None:
    packed, _ = model_tensors(awq, rng)
    with pytest.raises(FileError, match=said):
        packed_weights(packed, settings)


@pytest.mark.parametrize(
    ("layout", "name", "array", "said"),
    [
        ("torchao int4", "mlp.up_proj._weight_act_pre_scale", np.ones(HIDDEN, np.float32), "is a part of a weight"),
        ("awq", "mlp.up_proj.pre_quant_scale", np.ones(HIDDEN, np.float32), "is a part of a weight"),
        ("bitsandbytes nf4", "mlp.up_proj.weight.outliers", np.ones(4, np.float32), "is a part of a weight"),
        ("compressed nvfp4", "mlp.up_proj.weight_g_idx", np.zeros(HIDDEN, np.int32), "is a part of a weight"),
        ("fp8", "mlp.experts.gate_up_proj", np.zeros((2, 4, 8), ml_dtypes.float8_e4m3fn), r"is f8e4m3\[2, 4, 8\]"),
        ("compressed int8", "mlp.experts.down_proj", np.zeros((2, 4, 8), np.int8), r"is i8\[2, 4, 8\]"),
    ],
)
def test_what_no_layout_has_is_named(
    layout: str, name: str, array: np.ndarray, said: str, rng: np.random.Generator
) -> None:
    settings, make = LAYOUTS[layout]
    packed, _ = model_tensors(make, rng)
    base = "model.layers.0.mlp.up_proj"
    beside = {f"{base}.{end}": np.ones(1, np.float32) for end in ("input_scale", "output_scale", "bias")}
    beside[f"{base}.input_zero_point"] = beside["model.layers.0.self_attn.k_zero_point"] = np.zeros(1, np.int8)
    assert packed_weights(packed | beside, settings)
    with pytest.raises(FileError, match=f"model.layers.0.{name}' {said}"):
        packed_weights(packed | {f"model.layers.0.{name}": array}, settings)


@pytest.mark.parametrize("layout", ["gptq", "bitsandbytes nf4", "compressed fp8", "compressed mxfp4"])
def test_the_file_does_not_stay_in_memory_beside_the_blocks(
    layout: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("only Linux tells which pages of a file are in memory")
    settings, make = LAYOUTS[layout]
    parts, _ = make(rng, (1024, 1024))
    tensors = {f"{i}.up_proj.{end}": np.ascontiguousarray(part) for i in range(8) for end, part in parts.items()}
    save_safetensors(tmp_path / "model.safetensors", tensors)
    file = load_safetensors(tmp_path / "model.safetensors")
    found = packed_weights(file, settings)
    assert all(isinstance(t, GgufTensor) for t in found.values())
    resident, is_ours = 0, False
    for line in smaps.read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = line.endswith(str(tmp_path / "model.safetensors"))
        elif is_ours and line.startswith("Rss:"):
            resident += int(line.split()[1]) << 10
    assert resident < (tmp_path / "model.safetensors").stat().st_size / 4


def test_weights_that_are_read_together_are_in_memory_once(rng: np.random.Generator) -> None:
    settings, make = LAYOUTS["compressed fp8"]
    packed, plain = model_tensors(make, rng)
    weights = packed_weights(packed, settings)
    builder = WeightBuilder("layer", weights)
    x = builder.graph.input("x", (1, HIDDEN), f32)
    names = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    builder.linears(x, names, (HIDDEN, 64, 64), HIDDEN)
    (rows,) = builder.bound.values()
    for name in names:
        tensor = weights[f"{name}.weight"]
        assert np.shares_memory(tensor.data, rows)
        np.testing.assert_allclose(tensor.dequantize(), plain[f"{name}.weight"], rtol=1e-5, atol=1e-6)


def with_order(base: Packed, place: np.ndarray) -> Packed:
    """GPTQ's parts of a matrix whose columns belong to groups in this order."""
    parts, numbers = base
    groups = np.argsort(place, kind="stable")
    codes = np.empty_like(numbers)
    codes[:, groups] = numbers  # columns of one group lie together in the numbers
    words_of = parts["qweight"].view(np.uint32)
    nibbles = (words_of[:, None, :] >> (4 * np.arange(8, dtype=np.uint32))[None, :, None] & 15).reshape(len(place), -1)
    moved = np.empty_like(nibbles)
    moved[groups] = nibbles
    packed = words(np.ascontiguousarray(moved.T), 4).T
    return {**parts, "qweight": np.ascontiguousarray(packed), "g_idx": place.astype(np.int32)}, codes


@pytest.mark.parametrize("is_shared", [True, False])
def test_experts_in_orders_of_their_own_stay_blocks(is_shared: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    """The two matrices that read one input have one order, in files of GPTQ; where they do not, they are widened."""
    settings, experts = LAYOUTS["gptq act-order"][0], 3
    plain: dict[str, Any] = {"model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)}
    at = "model.layers.0."
    for norm in ("model.norm", f"{at}input_layernorm", f"{at}post_attention_layernorm"):
        plain[f"{norm}.weight"] = np.ones(HIDDEN, np.float32)
    for norm in ("q_norm", "k_norm"):
        plain[f"{at}self_attn.{norm}.weight"] = np.ones(32, np.float32)
    for name in ("q", "k", "v", "o"):
        shape = SHAPES[f"self_attn.{name}_proj"]
        plain[f"{at}self_attn.{name}_proj.weight"] = rng.standard_normal(shape).astype(np.float32) / 10
    plain[f"{at}mlp.gate.weight"] = rng.standard_normal((experts, HIDDEN)).astype(np.float32)
    packed = dict(plain)
    for expert in range(experts):
        place = rng.permutation(np.arange(HIDDEN) // 64)
        for name in ("gate_proj", "up_proj", "down_proj"):
            place = place if is_shared and name != "down_proj" else rng.permutation(place)
            parts, numbers = with_order(gptq(4, ordered=False)(rng, (HIDDEN, HIDDEN)), place)
            base = f"{at}mlp.experts.{expert}.{name}"
            plain[f"{base}.weight"] = numbers.astype(np.float32)
            packed |= {f"{base}.{end}": part for end, part in parts.items()}
    sizes = dict(model_type="qwen3_moe", num_hidden_layers=1, num_experts=experts, num_experts_per_tok=2,
                 moe_intermediate_size=HIDDEN, head_dim=32, norm_topk_prob=True)  # fmt: skip
    model = load(saved(tmp_path / "packed", packed, **sizes, quantization_config=settings), context=32)
    kinds = [w.kind for n, w in model.weights().items() if ".experts." in n and isinstance(w, GgufTensor)]
    assert kinds == ["u4_64h"] * (2 if is_shared else 1)
    ids = np.arange(12, dtype=np.int32)[None]
    wanted = load(saved(tmp_path / "plain", plain, **sizes), context=32).run(input_ids=ids)["logits"]
    assert np.linalg.norm(model.run(input_ids=ids)["logits"] - wanted) <= 2e-4 * np.linalg.norm(wanted)


def test_parts_that_do_not_fit_are_named(rng: np.random.Generator) -> None:
    settings, make = LAYOUTS["gptq act-order"]
    packed, _ = model_tensors(make, rng)
    base = "model.layers.0.mlp.up_proj"
    for broken, said in (
        ({f"{base}.scales": np.ones((2, 3), np.float16)}, "up_proj"),
        ({f"{base}.g_idx": np.full(HIDDEN, -5, np.int32)}, "g_idx does not name"),
        ({f"{base}.qzeros": np.zeros((2, 2), np.float32)}, "is f32"),
    ):
        with pytest.raises(FileError, match=said):
            packed_weights(packed | broken, settings)
    for name, form, said in (("fp8", np.zeros((2, 3, 4), np.float32), "has scales"), ("compressed int8", None, "")):
        settings, make = LAYOUTS[name]
        of_bytes, _ = model_tensors(make, rng)
        if form is not None:
            with pytest.raises(FileError, match=said):
                packed_weights(of_bytes | {f"{base}.weight_scale_inv": form}, settings)
        else:
            of_bytes[f"{base}.weight"] = np.zeros((INNER, HIDDEN), np.float32)
            with pytest.raises(FileError, match=r"up_proj\.weight_scale' is a part of a weight"):
                packed_weights(of_bytes, settings)
    settings, make = LAYOUTS["bitsandbytes int8"]
    rows, _ = model_tensors(make, rng)
    assert packed_weights(rows | {f"{base}.weight_format": np.zeros((), np.uint8)}, settings)
    with pytest.raises(FileError, match=r"weight_format \[2\]"):
        packed_weights(rows | {f"{base}.weight_format": np.array(2, np.uint8)}, settings)
    settings = LAYOUTS["gptq act-order"][0]
    del packed[f"{base}.qzeros"]
    with pytest.raises(FileError, match=r"there is no 'model\.layers\.0\.mlp\.up_proj\.qzeros'"):
        packed_weights(packed, settings)


def test_a_gpt_oss_with_experts_in_4_bits(tmp_path: Path, rng: np.random.Generator) -> None:
    """The layout that it is published in: blocks and powers of two beside each other, other weights plain."""
    kept = json.loads(vectors.FILE.read_text("utf-8"))["gpt_oss"]
    config = {**kept["config"], "intermediate_size": 64}
    packed: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    for name, shape in vectors.unpacked(kept["weights"]).items():
        sizes = tuple({40: 64, 80: 128}.get(n, n) for n in shape) if ".experts." in name else shape
        if ".experts." not in name or name.endswith("bias"):
            packed[name] = plain[name] = vectors.weight(name, sizes)
            continue
        experts, k, n = sizes
        codes, power = rng.integers(0, 16, (experts, n, k), np.uint8), rng.integers(122, 126, (experts, n, k // 32))
        packed[f"{name}_blocks"] = np.ascontiguousarray(pairs(codes)).reshape(experts, n, k // 32, 16)
        packed[f"{name}_scales"] = power.astype(np.uint8)
        numbers = FP4[codes] * np.repeat(np.exp2(power - 127.0), 32, -1)
        plain[name] = np.ascontiguousarray(numbers.swapaxes(1, 2)).astype(np.float32)
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    found = packed_weights(packed, settings)
    kinds = {t.kind for t in found.values() if isinstance(t, GgufTensor)}
    assert kinds == {"mxfp4"}
    model = load(saved(tmp_path / "packed", packed, **config, quantization_config=settings))
    assert model.is_quantized
    ids = np.arange(3, 15, dtype=np.int32)[None]
    wanted = load(saved(tmp_path / "plain", plain, **config)).run(input_ids=ids)["logits"]
    got = model.run(input_ids=ids)["logits"]
    assert np.linalg.norm(got - wanted) <= 2e-4 * np.linalg.norm(wanted)
    broken = next(name for name in packed if name.endswith("_scales"))
    with pytest.raises(FileError, match="has blocks"):
        packed_weights(packed | {broken: packed[broken][:1]}, settings)
    del packed[broken]
    with pytest.raises(FileError, match="there is no"):
        packed_weights(packed, settings)


def test_a_square_larger_than_its_matrix(rng: np.random.Generator) -> None:
    """Its scale is that of all rows, whatever the settings say of its height."""
    codes = rng.standard_normal((64, 128)).astype(ml_dtypes.float8_e4m3fn)
    tensors = {"a.weight": codes, "a.weight_scale_inv": np.array([[0.5, 2.0]], np.float32)}
    for height in (100, 10**9, 10**30):
        made = packed_weights(tensors, {"quant_method": "fp8", "weight_block_size": [height, 64]})["a.weight"]
        wanted = codes.astype(np.float32) * np.repeat(np.array([0.5, 2.0], np.float32), 64)
        np.testing.assert_array_equal(made.dequantize(), wanted)
