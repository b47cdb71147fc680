"""Forward attention: the decode kernel for few queries over a long KV cache, the block kernel for prefill."""

from __future__ import annotations

from strata.backends.llvm.attention.blocks import QueryBlock
from strata.backends.llvm.attention.decode import emit_decode
from strata.backends.llvm.attention.form import Arguments, AttentionSpec, pack_matrix
from strata.backends.llvm.ir.builder import IrModule
from strata.backends.llvm.ir.native import each_point, template


def emit_attention(module: IrModule, spec: AttentionSpec, name: str = "attend") -> tuple[str, str]:
    """Adds both kernels, with the same arguments; returns the names of pack, "" where nothing is packed, and attend."""
    if spec.decode:
        return "", emit_decode(template(module, name), spec)
    if spec.packs_values:
        f = template(module, f"{name}_pack")
        packer = Arguments(f, spec)
        each_point(f, lambda chunk, _: _pack_values(packer, chunk))
    f = template(module, name)
    block = QueryBlock(f, spec)
    each_point(f, lambda chunk, _: block.chunk(chunk))
    return f"{name}_pack" if spec.packs_values else "", name


def _pack_values(arguments: Arguments, kv: str) -> None:
    """The values of a key head as panels over the keys."""
    f, spec, number = arguments.f, arguments.spec, arguments.number
    v = arguments.at("v", *f.divided(kv, spec.kv_heads))
    pack_matrix(f, spec.panels, v, arguments.packed_values(kv), spec.value_dim, arguments.keys, number["v_row"], 1)
