"""What tests of emitters compile: each text once, since specifications that differ often have the same one."""

from __future__ import annotations

from strata.backends.llvm.ir.builder import Module
from strata.backends.llvm.jit.jit import Code, compile_and_load
from strata.core import Target


def compiled(module: Module, target: Target, *names: str) -> Code:
    """The named functions of a module. What is emitted alike for two targets of one width is compiled for the first."""
    text = module.text()
    key = (text, names, target.vector_bytes)
    if key not in _loaded:
        _loaded[key] = compile_and_load(text, names, target)
    return _loaded[key]


_loaded: dict[tuple[str, tuple[str, ...], int], Code] = {}
