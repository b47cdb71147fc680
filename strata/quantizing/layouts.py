"""Layouts of quantised folders: int8 and fp8 (compressed-tensors), 4 bits with AWQ's scales, and GPTQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np

from strata.io import GgufTensor, packed_weights
from strata.quantizing.calibrate import Activations

AWQ_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)
STEPS: Final = 20  # scales that are tried for each group of matmuls
DAMPING: Final = 0.01  # of the mean of a product's diagonal, that is added to it
BLOCK: Final = 128  # columns whose errors are moved on at once
Array = np.ndarray


def channel_int8(w: Array) -> dict[str, Array]:
    """Whole numbers with a scale for each row."""
    scale = np.abs(w).max(-1, keepdims=True) / np.float32(127)
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    return {"weight": np.clip(np.rint(w / scale), -127, 127).astype(np.int8), "weight_scale": scale}


def channel_fp8(w: Array) -> dict[str, Array]:
    """8-bit floats with a scale for each row."""
    scale = np.abs(w).max(-1, keepdims=True) / np.float32(448)
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    return {"weight": (w / scale).astype(ml_dtypes.float8_e4m3fn), "weight_scale": scale}


# ------------------------------------------------------------------------------------------------------- 4 bits


def affine(w: Array, group: int, least: int = 0) -> tuple[Array, Array, Array]:
    """Codes u8[N, K], scales f16 and zero points u8 [N, K / group]: all numbers between the ends, and 0."""
    parts = w.reshape(len(w), -1, group)
    low, high = np.minimum(parts.min(-1), 0), np.maximum(parts.max(-1), 0)
    scale = np.maximum((high - low) / 15, 1e-6).astype(np.float16)
    wide = scale.astype(np.float32)
    zero = np.clip(np.rint(-low / wide), least, 15)
    codes = np.clip(np.rint(parts / wide[..., None]) + zero[..., None], 0, 15)
    return codes.reshape(w.shape).astype(np.uint8), scale, zero.astype(np.uint8)


def decoded(codes: Array, scale: Array, zero: Array) -> Array:
    group = codes.shape[1] // scale.shape[1]
    return (codes - np.repeat(zero.astype(np.float32), group, 1)) * np.repeat(scale.astype(np.float32), group, 1)


def words(codes: Array) -> Array:
    """i32[.., n / 8] of codes [.., n] of 4 bits, the first in the lowest."""
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)
    return (parts << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)


def awq_parts(w: Array, group: int) -> dict[str, Array]:
    codes, scale, zero = affine(w, group)

    def columns(x: Array) -> Array:
        return words(x.reshape(len(x), -1, 8)[..., AWQ_ORDER].reshape(len(x), -1))

    return {"qweight": columns(codes.T), "qzeros": columns(zero.T), "scales": np.ascontiguousarray(scale.T)}


def awq_scaled(weights: Mapping[str, Array], acts: Activations, group: int, offset: float) -> dict[str, Array]:
    """The weights with columns that matter made larger, and what comes before them smaller by as much."""
    made = dict(weights)
    layers = sorted({int(name.split(".")[1]) for name in weights if name.startswith("layers.")})
    for layer in layers:
        at = f"layers.{layer}."
        _fold(made, acts, f"{at}input_layernorm", [f"{at}self_attn.{p}_proj" for p in "qkv"], group, offset)
        both = [f"{at}mlp.gate_proj", f"{at}mlp.up_proj"]
        before = (
            "pre_feedforward_layernorm"
            if f"{at}pre_feedforward_layernorm.weight" in made
            else "post_attention_layernorm"
        )
        _fold(made, acts, f"{at}{before}", both, group, offset)
        _fold(made, acts, f"{at}mlp.up_proj", [f"{at}mlp.down_proj"], group, 0.0)
    return made


def _fold(made: dict[str, Array], acts: Activations, before: str, names: list[str], group: int, offset: float) -> None:
    size, importance = acts.magnitude(names[0]), acts.importance(names[0])
    whole = all(f"{n}.weight" in made for n in (*names, before))
    if size is None or importance is None or not whole or f"{before}.bias" in made:
        return
    matrices = [made[f"{n}.weight"] for n in names]
    if any(m.shape[1] % group for m in matrices):
        return
    best, chosen = np.inf, np.ones_like(size)
    for power in np.linspace(0, 1, STEPS, endpoint=False):
        s = np.maximum(size, 1e-6) ** np.float32(power)
        s = (s / np.sqrt(s.max() * s.min())).astype(np.float32)
        error = sum(float((((decoded(*affine(m * s, group)) / s - m) ** 2) * importance).sum()) for m in matrices)
        if error < best:
            best, chosen = error, s
    for name, matrix in zip(names, matrices, strict=True):
        made[f"{name}.weight"] = matrix * chosen
    earlier = made[f"{before}.weight"]
    if earlier.ndim == 1:
        made[f"{before}.weight"] = (earlier + np.float32(offset)) / chosen - np.float32(offset)
    else:
        made[f"{before}.weight"] = earlier / chosen[:, None]


def gptq_parts(w: Array, product: Array | None, group: int) -> dict[str, Array]:
    """Codes chosen column by column, each one's error moved on to those that come after it."""
    codes, scale, zero = affine(w, group, 1) if product is None else _gptq(w, product, group)
    places = (np.arange(w.shape[1]) // group).astype(np.int32)
    return {
        "qweight": np.ascontiguousarray(words(codes).T), "qzeros": words(zero.T - 1),
        "scales": np.ascontiguousarray(scale.T), "g_idx": places,
    }  # fmt: skip


def _gptq(w: Array, product: Array, group: int) -> tuple[Array, Array, Array]:
    k = w.shape[1]
    h = product.astype(np.float64)
    unused = np.diag(h) == 0
    h[unused, unused] = 1
    h[np.diag_indices(k)] += DAMPING * np.diag(h).mean()
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    left = w.astype(np.float64)
    left[:, unused] = 0
    codes = np.zeros(w.shape, np.uint8)
    scales, zeros = np.zeros((len(w), k // group), np.float16), np.zeros((len(w), k // group), np.uint8)
    for start in range(0, k, BLOCK):
        stop = min(start + BLOCK, k)
        errors = np.zeros((len(w), stop - start))
        for i in range(start, stop):
            if i % group == 0:
                _, scale, zero = affine(left[:, i : i + group].astype(np.float32), group, 1)  # files hold it less one
                scales[:, i // group], zeros[:, i // group] = scale[:, 0], zero[:, 0]
            s, z = scales[:, i // group].astype(np.float64), zeros[:, i // group].astype(np.float64)
            code = np.clip(np.rint(left[:, i] / s) + z, 0, 15)
            codes[:, i] = code
            error = (left[:, i] - (code - z) * s) / upper[i, i]
            left[:, i:stop] -= np.outer(error, upper[i, i:stop])
            errors[:, i - start] = error
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return codes, scales, zeros


# ---------------------------------------------------------------------------------------------------------- folders


def settings_of(kind: str, group: int, ignored: list[str]) -> dict[str, Any]:
    """`quantization_config` of a format."""
    if kind == "int4-awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True,
                "modules_to_not_convert": ignored}  # fmt: skip
    if kind == "gptq":
        return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": False,
                "checkpoint_format": "gptq", "lm_head": False}  # fmt: skip
    number = "int" if kind == "int8" else "float"
    weights = {"num_bits": 8, "type": number, "symmetric": True, "strategy": "channel", "dynamic": False}
    return {
        "quant_method": "compressed-tensors", "format": f"{number}-quantized", "quantization_status": "compressed",
        "ignore": ignored, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }  # fmt: skip


def as_blocks(parts: Mapping[str, Array], settings: Mapping[str, Any]) -> GgufTensor:
    """The weight that parts of a layout stand for."""
    found = packed_weights({f"w.{end}": part for end, part in parts.items()}, settings)["w.weight"]
    assert isinstance(found, GgufTensor)
    return found
