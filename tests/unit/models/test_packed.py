"""Quantised safetensors folders: each layout, packed as its own tools pack it, against the numbers it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from strata.errors import FileError
from strata.io import GgufTensor, packed_weights, save_safetensors
from strata.models import load

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


def awq(rng: np.random.Generator, shape: tuple[int, int]) -> Packed:
    codes, scale, zero = drawn(rng, shape, 32, 15)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def columns(x: np.ndarray) -> np.ndarray:
        return words(x.reshape(len(x), -1, 8)[..., order].reshape(len(x), -1), 4)

    parts = {"qweight": columns(codes.T), "qzeros": columns(zero.T), "scales": np.ascontiguousarray(scale.T)}
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
LAYOUTS: dict[str, tuple[dict[str, Any], Callable[..., Packed]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 64}, gptq(4, False)),
    "gptq act-order": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}, gptq(4, True)),
    "gptq 8": ({"quant_method": "gptq", "bits": 8, "group_size": 64}, gptq(8, True)),
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
        ({"quant_method": "gptq", "bits": 3}, "3 bits; 4 and 8 are known"),
        ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
        ("int4", "quantization_config = 'int4'"),
    ],
)
def test_what_is_not_known_is_named(settings: Any, said: str, rng: np.random.Generator) -> None:
    packed, _ = model_tensors(awq, rng)
    with pytest.raises(FileError, match=said):
        packed_weights(packed, settings)


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
    del packed[f"{base}.qzeros"]
    with pytest.raises(FileError, match=r"there is no 'model\.layers\.0\.mlp\.up_proj\.qzeros'"):
        packed_weights(packed, settings)
