"""What tests of emitters compile: each text once, since specifications that differ often have the same one."""

from __future__ import annotations

from strata.backends.llvm.ir.builder import IrModule
from strata.backends.llvm.jit.jit import MachineCode, compile_and_load
from strata.core import Target


def compiled(module: IrModule, target: Target, *names: str) -> MachineCode:
    """The named functions of a module. What is emitted alike for two targets of one width is compiled for the first."""
    text = module.text()
    key = (text, names, target.vector_bytes)
    if key not in _loaded:
        _loaded[key] = compile_and_load(text, names, target)
    return _loaded[key]


_loaded: dict[tuple[str, tuple[str, ...], int], MachineCode] = {}
