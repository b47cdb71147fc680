"""The registry of hand-written kernels: what the loop generator cannot express (sorts, FFTs, loops).

A family registers a function for its op with `@override("name")`. It is given a node and a target, and returns a
`NativeOp`, or None where it has nothing for these types; the op then runs as its loops say, or on the host, and
reports say so. The machine code of a native op depends on types only: sizes are known when a program is bound, and go
in as arguments. So do the tables that a size asks for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from strata.core import Dim, SymExpr, Target, TensorType, symbols
from strata.lir import Lir, Spacing
from strata.mir import Node, Op

if TYPE_CHECKING:
    from strata.backends.llvm.ir.builder import IrModule

# an argument of a call: ("input", i), ("output", i), ("input_at", (i, bytes from its start)), ("output_at", …),
# ("workspace", bytes from its start), ("number", size), ("table", array kept alive by the executable),
# ("pointer", native address), ("pool", 0) and ("threads", 0) to run other programs with, ("status", 0): the words of
# strata.backends.llvm.ir.status
Slot = tuple[str, Any]
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class NativeCall:
    """One function of the module over a number of points: `void function(ptr arguments, i64 begin, i64 end)`."""

    function: str
    slots: Sequence[Slot]
    points: int = 1
    grain: int = 1


@dataclass(frozen=True)
class Planned:
    """What an op does for given sizes: calls in order, and the bytes of workspace that they share."""

    calls: Sequence[NativeCall]
    workspace: int = 0
    keep: Any = None  # what must stay alive as long as the calls may run


@dataclass(frozen=True, eq=False)
class Holding:
    """What an op does with inputs that stay the same from run to run: it keeps them in its own form.

    `hold` is told their values, by number, before anything is planned. Of those that are only read in the op's own form
    (`held`), no other is needed.
    """

    hold: Callable[[int, np.ndarray], None]
    held: frozenset[int]
    packed_bytes: Callable[[], int]


@dataclass(frozen=True, eq=False)
class NativeOp:
    """An op as machine code and a way to call it. `key` decides the code: equal keys share it."""

    key: str
    emit: Callable[[IrModule], None]
    functions: tuple[str, ...]
    plan: Callable[[Sizes], Planned]
    holding: Holding | None = None
    again: Callable[[], NativeOp] | None = None  # a copy that holds the same values until it is told others


Maker = Callable[[Node, Target], NativeOp | None]
_MAKERS: dict[str, Maker] = {}
_WHOLE: set[str] = set()
_VIEWS: set[str] = set()
_BODIES: set[str] = set()
_COMPOSITIONS: dict[str, Callable[..., bool]] = {}
_NUMBERS: dict[str, Callable[..., Sequence[Dim]]] = {}
# modules of this folder, and the ops that they register; each is imported when one of its ops is first met
FAMILIES: dict[str, tuple[str, ...]] = {
    "ir.native": ("barrier", "concat"),
    "attention.steps": ("attention", "attention_backward"),
    "conv.gradient": ("conv_last_backward_weight",),
    "control.loops": ("cond", "scan", "while"),
    "control.open_sizes": ("conv", "conv_backward_weight", "conv_first", "conv_last"),
    "quant.gguf_matmul": ("dequant_matmul",),
    "quant.gguf_grouped": ("dequant_grouped_matmul",),
    "fft.complex": ("fft",),
    "quant.grouped_matmul": ("grouped_matmul",),
    "ir.bounds_check": ("checked_ids",),
    "linalg.ops": (
        "cholesky", "det", "eigh", "lu", "qr", "slogdet", "solve", "svd", "triangular_solve",
    ),
    "attention.paged_steps": ("paged_attention",),
    "conv.pool_gradient": ("pool_backward",),
    "natives.recurrence": ("cummax", "cummin", "linear_recurrence", "logcumsumexp"),
    "fft.real": ("irfft", "rfft"),
    "natives.scatter": ("scatter_add", "scatter_elements", "scatter_nd"),
    "natives.search": ("searchsorted",),
    "natives.sort": ("argsort", "sort", "topk"),
    "natives.trees": ("tree_leaves",),
    "natives.splat_bin": ("splat_bin",),
    "natives.splat_raster": ("splat_raster", "splat_raster_backward"),
}  # fmt: skip
_FAMILY_OF = {name: family for family, names in FAMILIES.items() for name in names}


def override(
    *names: str,
    whole: bool = False,
    views: bool = False,
    bodies: bool = False,
    instead_of_parts: Callable[..., bool] | None = None,
    numbers: Callable[[Any, Sequence[TensorType]], Sequence[Dim]] | None = None,
) -> Callable[[Any], Any]:
    """Register the maker of one op, or of several.

    With `whole`, it is preferred to the loops that the op lowers to. With `views`, inputs are read in place, and
    the maker is given their spacing; with `bodies`, it is given the plans of the graphs inside of the op.
    `instead_of_parts` says of a composition on given types that it is not to be decomposed. `numbers` lists the sizes
    that code is generated for: where one of them is a symbol, that is done when its value is known
    (`control.open_sizes`), and inputs are read as they are.
    """

    def wrap(maker: Any) -> Any:
        for name in names:
            _MAKERS[name] = maker
            if whole:
                _WHOLE.add(name)
            if views:
                _VIEWS.add(name)
            if bodies:
                _BODIES.add(name)
            if instead_of_parts is not None:
                _COMPOSITIONS[name] = instead_of_parts
            if numbers is not None:
                _NUMBERS[name] = numbers
        return maker

    return wrap


@cache
def _load(name: str) -> None:
    """Import the family of an op, if it has one."""
    if name in _FAMILY_OF:
        importlib.import_module(f"strata.backends.llvm.{_FAMILY_OF[name]}")


def open_sizes(op: Op, types: Sequence[TensorType]) -> frozenset[str]:
    """The symbols in sizes of an op that must be numbers when its code is generated."""
    _load(op.name)
    dims = _NUMBERS[op.name](op, types) if op.name in _NUMBERS else ()
    return frozenset(name for d in dims if isinstance(d, SymExpr) for name in symbols(d))


def native_op(
    node: Node, target: Target, views: Sequence[Spacing] | None = None, bodies: Sequence[Lir] = ()
) -> NativeOp | None:
    """The hand-written form of a node, if there is one. `views` and `bodies` are those of its step."""
    _load(node.op.name)
    if open_sizes(node.op, [x.type for x in node.inputs]):
        made: NativeOp = importlib.import_module("strata.backends.llvm.control.open_sizes").open_step(node, target)
        return made
    maker: Any = _MAKERS.get(node.op.name)
    if maker is None:
        return None
    if node.op.name in _BODIES:
        return maker(node, target, bodies)
    return maker(node, target, views) if node.op.name in _VIEWS else maker(node, target)


def takes_composition(op: Op, types: Sequence[TensorType], target: Target) -> bool:
    """Whether a composition runs as one hand-written step."""
    _load(op.name)
    accepts = _COMPOSITIONS.get(op.name)
    return accepts is not None and len(types) > 0 and accepts(op, types, target)


def reads_views(node: Node) -> bool:
    """Whether a node's hand-written step reads its inputs in place."""
    _load(node.op.name)
    return node.op.name in _VIEWS and not open_sizes(node.op, [x.type for x in node.inputs])


def runs_whole(node: Node, target: Target) -> bool:
    """Whether a node that has a lowering is better as a separate step."""
    _load(node.op.name)
    return node.op.name in _WHOLE and native_op(node, target) is not None
