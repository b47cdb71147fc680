"""A graph as a StableHLO module: ops by the table, by their decomposition, or by their kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from strata.backends.base import ThreadSpread
from strata.backends.stablehlo import (  # noqa: F401 - they fill the table
    contract,
    control,
    linalg,
    movement,
    ordering,
    reductions,
    spectral,
    windows,
)
from strata.backends.stablehlo.build import Hlo, StableHloBuilder, kind
from strata.backends.stablehlo.kernels import lowered
from strata.backends.stablehlo.table import RULES
from strata.core import TensorType, bool_
from strata.mir import Constant, Graph, Input, Op, Param, Value, as_tuple, leaf_name, placeholder, toposort

INLINE = 1 << 16  # bytes of a constant from which it is an argument of its module, and no part of its text


@dataclass
class Text:
    """A module: its text, and the values that it takes and gives, in order."""

    text: str
    takes: tuple[Value, ...]
    gives: tuple[Value, ...]
    is_checked: bool = False  # after them it gives one boolean: whether the run is an error
    has_loop: bool = False  # of which nobody knows how long it runs


def is_native(op: Op) -> bool:
    """Whether an op has a form inside a module, the bodies of loops and branches included."""
    if op.name in RULES:
        return all(_all_native(g) for g in op.static_fields().values() if isinstance(g, Graph))
    return type(op).lower is not Op.lower


def _all_native(graph: Graph) -> bool:
    for node in toposort(graph.results):
        if isinstance(node.op, (Input, Param)) or is_native(node.op):
            continue
        if not node.op.is_composition or not _all_native(_opened(node.op, [x.type for x in node.inputs])):
            return False
    return True


def _opened(op: Op, types: Sequence[TensorType]) -> Graph:
    """What an op is composed of, as a graph."""
    graph = Graph(op.name)
    inputs = [graph.input(f"x{i}", t) for i, t in enumerate(types)]
    return graph.outputs(*as_tuple(op.decompose(*inputs)))


class GraphWriter:
    """Writes the nodes of graphs whose sizes are known."""

    def __init__(self) -> None:
        self.b = StableHloBuilder()
        self._failures: list[list[Hlo]] = [[]]  # of each block, the innermost last

    def fail_if(self, bad: Hlo) -> None:
        self._failures[-1].append(bad)

    def inside(self, write: Callable[[], Sequence[Hlo]]) -> tuple[tuple[Hlo, ...], Hlo]:
        self._failures.append([])
        made = tuple(write())
        return made, self.failed(self._failures.pop())

    def failed(self, flags: Sequence[Hlo] | None = None) -> Hlo:
        """Whether any of the flags is set; those of the outermost block by default."""
        total = self.b.const(value=False, dtype=bool_)
        for flag in self._failures[0] if flags is None else flags:
            total = self.b.same("or", total, flag)
        return total

    @property
    def may_fail(self) -> bool:
        return bool(self._failures[0])

    def graph(self, graph: Graph, inputs: Sequence[Hlo]) -> tuple[Hlo, ...]:
        known = dict(zip((*graph.inputs, *graph.params), inputs, strict=True))
        return self.values(graph.results, known)

    def values(self, roots: Sequence[Value], known: dict[Value, Hlo]) -> tuple[Hlo, ...]:
        """Values computed from known ones."""
        table = dict(known)
        for node in toposort(roots, known):
            made = self.node(node.op, [table[x] for x in node.inputs])
            for value, hlo in zip(node.outputs, made, strict=True):
                table.setdefault(value, hlo)
                expected = (value.type.dtype, value.type.static_shape)
                assert (hlo.dtype, hlo.shape) == expected, f"{node.op.name}: {hlo} is not {value.type}"
        return tuple(table[r] for r in roots)

    def node(self, op: Op, inputs: Sequence[Hlo]) -> tuple[Hlo, ...]:
        """One op."""
        if op.name in RULES:
            return as_tuple(RULES[op.name](self, op, inputs))
        if type(op).lower is not Op.lower:
            return lowered(self.b, op, inputs)
        values = [placeholder(f"x{i}", TensorType(x.dtype, x.shape)) for i, x in enumerate(inputs)]
        return self.values(as_tuple(op.decompose(*values)), dict(zip(values, inputs, strict=True)))


def write_graph(graph: Graph) -> str:
    """A whole graph as one module, all constants in its text, that gives its results and nothing else."""
    return _module(graph.name, (*graph.inputs, *graph.params), graph.results, checked=False)[0]


def write_module(name: str, reads: Sequence[Value], gives: Sequence[Value], spread: ThreadSpread | None = None) -> Text:
    """The module that computes values from others. Constants among them are part of the text, unless they are large."""
    takes = [x for x in reads if not isinstance(x.node.op, Constant) or x.node.op.data.array.nbytes > INLINE]
    text, is_checked = _module(name, takes, gives, checked=True, spread=spread)
    return Text(text, tuple(takes), tuple(gives), is_checked, "stablehlo.while" in text)


def _module(
    name: str, takes: Sequence[Value], gives: Sequence[Value], *, checked: bool, spread: ThreadSpread | None = None
) -> tuple[str, bool]:
    """The text, and whether it gives one boolean after its results: that something in it is an error."""
    writer = GraphWriter()
    b = writer.b
    formals: list[Hlo] = []
    for x in takes:
        wanted = _symbol(leaf_name(x)) if isinstance(x.node.op, (Input, Param)) else ""
        free = wanted and not wanted[0].isdigit() and f"%{wanted}" not in {f.name for f in formals}
        made = Hlo(f"%{wanted}", x.type.dtype, x.type.static_shape)
        formals.append(made if free else b.fresh(x.type.dtype, x.type.static_shape))
    results = writer.values(gives, dict(zip(takes, formals, strict=True)))
    is_checked = checked and writer.may_fail
    if is_checked:
        results += (writer.failed(),)
    arguments = ", ".join(f"{x.name}: {kind(x)}{_cut(v, x, spread)}" for v, x in zip(takes, formals, strict=True))
    kinds = ", ".join(kind(x) for x in results)
    given = ", ".join(f"{kind(x)}{_cut(None, x, spread)}" for x in results)
    lines = [
        f"module @{_symbol(name)}{_together(spread)} {{",
        *_mesh(spread),
        f"  func.func public @main({arguments}) -> ({given}) {{",
        *b.lines,
        f"    return {', '.join(x.name for x in results)} : {kinds}",
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n", is_checked


def _together(spread: ThreadSpread | None) -> str:
    if spread is None:
        return ""
    return f" attributes {{mhlo.num_partitions = {spread.count} : i32, mhlo.num_replicas = 1 : i32}}"


def _mesh(spread: ThreadSpread | None) -> list[str]:
    """The grid of devices that a module runs on, where it is several."""
    if spread is None:
        return []
    axes = ", ".join(f'"{name}"={size}' for name, size in spread.axes)
    return [f"  sdy.mesh @mesh = <[{axes}]>"]


def _cut(value: Value | None, x: Hlo, spread: ThreadSpread | None) -> str:
    """How a value lies on the grid: cut as its name says, else whole on each device."""
    if spread is None:
        return ""
    is_leaf = value is not None and isinstance(value.node.op, (Input, Param))
    cuts = spread.cuts.get(leaf_name(value), ()) if is_leaf and value is not None else ()
    names = [*cuts, *[()] * (x.ndim - len(cuts))]
    parts = ", ".join("{" + ", ".join(f'"{n}"' for n in one) + "}" for one in names)
    return f" {{sdy.sharding = #sdy.sharding<@mesh, [{parts}]>}}"


def _symbol(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in name) or "main"
