"""Files in and out: safetensors, GGUF, NumPy, ONNX, StableHLO, images. Parsers are bounded, nothing is executed."""

from importlib import import_module
from typing import Any

from strata.arguments import public_names
from strata.io.gguf import GgufFile, GgufTensor, load_gguf, quantized_tensor, save_gguf, undecodable
from strata.io.image import decode_image, load_image
from strata.io.mapped import release_pages
from strata.io.npz import load_npy, load_npz
from strata.io.packed import packed_weights
from strata.io.safetensors import TensorFile, load_safetensors, save_safetensors

public_names(globals())


def __getattr__(name: str) -> Any:
    """Formats that need much of their own are loaded when they are first used."""
    if name in ("onnx", "stablehlo"):
        return import_module(f"strata.io.{name}")
    raise AttributeError(f"strata.io has no name {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "onnx", "stablehlo"})
