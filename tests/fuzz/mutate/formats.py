"""The formats by name; a module is imported when its format is asked for, so that each needs only its own packages."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from tests.fuzz.mutate.base import Format

# name: module, class, packages that it needs beside strata's own
FORMATS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "onnx": ("onnx_models", "Onnx", ("onnx",)),
    "gguf": ("weights", "Gguf", ()),
    "safetensors": ("weights", "Safetensors", ()),
    "bundle": ("bundles", "Bundle", ()),
    "tokenizer": ("tokenizers", "Tokenizers", ("tokenizers", "jinja2")),
    "config": ("configs", "Configs", ()),
    "graph": ("texts", "Graphs", ()),
    "kernel": ("kernels", "Kernels", ()),
    "lir": ("texts", "Plans", ()),
    "hir": ("texts", "Modules", ()),
    "npz": ("weights", "Npz", ()),
    "packed": ("packed", "Packed", ()),
    "adapter": ("adapters", "Adapters", ()),
    "family": ("families", "Families", ()),
}


def missing(name: str) -> tuple[str, ...]:
    """The packages that a format needs and that are not installed."""
    return tuple(package for package in FORMATS[name][2] if find_spec(package) is None)


def format_named(name: str) -> Format:
    module, kind, _ = FORMATS[name]
    made: Format = getattr(import_module(f"tests.fuzz.mutate.{module}"), kind)()
    return made
