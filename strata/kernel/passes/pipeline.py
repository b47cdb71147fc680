"""The order of kernel rewrites, and nothing else.

    processor_phases   cut_stores → normalize → split_reductions: what runs one after the other
    loops_of           as_bits → unroll_short_reductions → unroll_short_rows → columns_first → make_nest
    device_form        normalize → as_bits: what GPUs' code is made from; they split by their own limits

A backend matches matmuls, convolutions, pools and attention in the normal form, before any of the later rewrites.
"""

from __future__ import annotations

from strata.kernel.ir import Kernel
from strata.kernel.nest import LoopBlock, make_nest
from strata.kernel.order import USUAL, Machine
from strata.kernel.passes.bitcast_moves import as_bits
from strata.kernel.passes.hoist_gather import columns_first
from strata.kernel.passes.interleave import unroll_short_rows
from strata.kernel.passes.normalize import normalize
from strata.kernel.passes.short_sums import unroll_short_reductions
from strata.kernel.passes.split import Phases, split_reductions
from strata.kernel.passes.split_predicates import cut_stores


def processor_phases(kernel: Kernel, machine: Machine = USUAL) -> Phases:
    """Normalized kernels to be run one after the other on a processor, and the memory between them."""
    parts = cut_stores(kernel, machine)
    if len(parts) > 1:
        return Phases(tuple(map(normalize, parts)))
    return split_reductions(normalize(parts[0]), machine=machine)


def loops_of(normal: Kernel, machine: Machine = USUAL) -> tuple[Kernel, LoopBlock]:
    """A normalized kernel in the form that code is made from, and its nest, whose loops schedules are about."""
    ready = columns_first(unroll_short_rows(unroll_short_reductions(as_bits(normal), machine)))
    return ready, make_nest(ready)


def device_form(kernel: Kernel) -> Kernel:
    """A kernel in the form that programs of GPUs are made from."""
    return as_bits(normalize(kernel))
