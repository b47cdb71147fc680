"""Runtime checks of symbolic sizes: what shape rules assumed is checked when the sizes are known.

Shape rules let a symbol meet a different size, since the symbol may turn out to be that size. Kernels read every
operand at the index of the result, so the sizes must really be equal when they run. A symbol that turns out to be 1 is
broadcast, which takes another program: one where it is the number 1. Rules that look at sizes in other ways, as those
of a slice or of the k best elements, are asked again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.core import Dim, Place, Symbol, parse_dim, substitute, symbols
from strata.errors import StrataError, SymbolError
from strata.mir import Constant, Graph, Node, Value, as_tuple, field_symbols, is_operation, parse

# sizes that a rule is tried with, for one symbol after the other: near the lower bound, unequal, and large
_TRIED = ((0, 0, 0), (1, 1, 1), (7, 3, 5), (1021, 509, 2039), ((1 << 20) + 7, (1 << 20) + 13, (1 << 20) + 33))


@dataclass(frozen=True, slots=True)
class SizeCheck:
    """Two sizes that an op needs to be equal."""

    op: str
    left: Dim
    right: Dim
    place: Place | None
    spreads: bool = False  # the left one may be 1: then it is broadcast

    def run(self, binding: Mapping[str, int]) -> dict[str, int]:
        """The symbols that must be numbers here, since an operand is 1 and broadcast."""
        left, right = substitute(self.left, binding), substitute(self.right, binding)
        if left == right or not (isinstance(left, int) and isinstance(right, int)):
            return {}
        if self.spreads and left == 1:
            return {name: binding[name] for name in symbols(self.left)}
        raise SymbolError(self._message(left, right), code="S156", place=self.place)

    def refused(self, binding: Mapping[str, int]) -> SymbolError:
        """The error where an operand cannot be broadcast."""
        left, right = substitute(self.left, binding), substitute(self.right, binding)
        return SymbolError(self._message(left, right), code="S156", place=self.place)

    def _message(self, left: Dim, right: Dim) -> str:
        return f"{self.op}: sizes {self.left} = {left} and {self.right} = {right} must be equal"


class RuleCheck:
    """An op whose own rule may refuse some sizes: it is asked again when they are known."""

    def __init__(self, applied: Node | str) -> None:
        """A node, or its text from `to_text`, which is read when it is needed."""
        self._applied = applied
        self._called = None if isinstance(applied, str) else called(applied)

    @property
    def node(self) -> Node:
        if isinstance(self._applied, str):
            graph = parse(self._applied)
            self._applied, self._called = graph.results[0].node, graph.name
        return self._applied

    def to_text(self) -> str:
        return node_text(self.node)

    def run(self, binding: Mapping[str, int]) -> None:
        """Raises what the op says of these sizes."""
        node = self.node
        try:
            op, types = node.op.bind(binding), [x.type.bind(binding) for x in node.inputs]
            made = op.infer_types(types)
            if op.looks_at_inputs:
                op.check_inputs(node.inputs, types)
            planned = tuple(t.bind(binding) for t in node.types)
        except StrataError as error:
            error.place = error.place or node.origin.place
            error.rename(self._called or node.op.name, is_operation)
            raise
        if made != planned:
            texts = [", ".join(map(str, types)) for types in (made, planned)]
            raise SymbolError(
                f"{self._called or node.op.name}: gives {texts[0]}, which must be {texts[1]}",
                code="S156",
                place=node.origin.place,
            )

    def may_refuse(self) -> bool:
        """Whether there seem to be sizes that the op refuses: rules compare with numbers and with each other."""
        found: dict[str, Symbol] = field_symbols(tuple(self.node.op.static_fields().values()))
        for x in self.node.inputs:
            found |= x.type.symbols()
        for tried in _TRIED if found else ():
            sizes = {
                name: s.lo + step if s.hi is None else min(s.hi, s.lo + step)
                for (name, s), step in zip(sorted(found.items()), tried * len(found), strict=False)
            }
            try:
                self.run(sizes)
            except StrataError:
                return True
        return False


def called(node: Node) -> str:
    """What the user called, if that is known; else the op that it became."""
    return node.origin.called or node.op.name


def node_text(node: Node) -> str:
    """One op as the text of a graph that applies it to inputs, named after what the user called."""
    graph = Graph(called(node))
    inputs = [x if x in _seen(node) else graph.input(f"x{i}", x.type) for i, x in enumerate(node.inputs)]
    return str(graph.outputs(*as_tuple(node.op(*inputs))))


def _seen(node: Node) -> tuple[Value, ...]:
    """The inputs whose numbers a rule may look at: constants, where it looks at any."""
    return tuple(x for x in node.inputs if isinstance(x.node.op, Constant)) if node.op.looks_at_inputs else ()


class Spread(Exception):  # noqa: N818
    """Some operands are 1 and broadcast; `ones` are the symbols that make them so, `error` what to say otherwise."""

    def __init__(self, ones: Mapping[str, int], error: SymbolError) -> None:
        super().__init__(str(error))
        self.ones, self.error = dict(ones), error


def check_sizes(checks: Sequence[SizeCheck | RuleCheck], binding: Mapping[str, int]) -> None:
    """Raises where sizes do not fit, or Spread where that only takes another program."""
    ones: dict[str, int] = {}
    first: SizeCheck | None = None
    for check in checks:
        if isinstance(check, SizeCheck):
            found = check.run(binding)
            if found:
                first = first or check
                ones |= found
    if first is not None:
        raise Spread(ones, first.refused(binding))
    for check in checks:
        if isinstance(check, RuleCheck):
            check.run(binding)


def size_checks(graph: Graph) -> tuple[SizeCheck | RuleCheck, ...]:
    """What must hold of the sizes of a graph's symbols, beyond their bounds; nothing for a graph without symbols."""
    if not graph.symbols():
        return ()
    found: dict[tuple[Dim, Dim, bool], SizeCheck] = {}
    rules: dict[object, RuleCheck] = {}
    for node in _nodes(graph):
        for left, right, spreads in _pairs(node):
            if left != right and not (isinstance(left, int) and isinstance(right, int)):
                key = left, right, spreads
                found.setdefault(key, SizeCheck(called(node), left, right, node.origin.place, spreads))
        if node.inputs and not _is_aligned(node):
            rules.setdefault((node.op, tuple(x.type for x in node.inputs), _seen(node)), RuleCheck(node))
    return *found.values(), *(rule for rule in rules.values() if rule.may_refuse())


def write_checks(checks: Sequence[SizeCheck | RuleCheck]) -> dict[str, Any]:
    """Checks as data, for files beside a plan."""
    sizes = [[c.op, str(c.left), str(c.right), c.spreads] for c in checks if isinstance(c, SizeCheck)]
    return {"checks": sizes, "rules": [c.to_text() for c in checks if isinstance(c, RuleCheck)]}


def read_checks(kept: Mapping[str, Any], known: Mapping[str, Symbol]) -> tuple[SizeCheck | RuleCheck, ...]:
    """The checks that `write_checks` wrote; they do not know where in a program they come from."""
    sizes = [
        SizeCheck(str(op), parse_dim(left, known), parse_dim(right, known), None, spreads is True)
        for op, left, right, spreads in kept["checks"]
    ]
    return (*sizes, *(RuleCheck(str(text)) for text in kept["rules"]))


def _nodes(graph: Graph) -> Iterator[Node]:
    """The nodes of a graph and of the bodies inside it."""
    for node in graph.nodes():
        yield node
        for value in node.op.static_fields().values():
            if isinstance(value, Graph):
                yield from _nodes(value)


def _is_aligned(node: Node) -> bool:
    """Whether sizes that must be equal are all that an op asks for."""
    return node.op.elementwise or node.op.name in ("broadcast_to", "matmul")


def _pairs(node: Node) -> list[tuple[Dim, Dim, bool]]:
    """Sizes of a node's operands beside those they must equal, and whether 1 will do."""
    if node.op.name == "matmul":
        x, y = (v.shape for v in node.inputs)
        batch = node.types[0].shape[:-2]
        return [(x[-1], y[-2], False), *_aligned(x[:-2], batch), *_aligned(y[:-2], batch)]
    if _is_aligned(node):
        out = node.types[0].shape
        return [pair for v in node.inputs for pair in _aligned(v.shape, out)]
    spread = node.op.spread_shapes(*(x.type for x in node.inputs))
    return [pair for shape, full in spread for pair in _aligned(shape, full)]


def _aligned(shape: Sequence[Dim], out: Sequence[Dim]) -> list[tuple[Dim, Dim, bool]]:
    tail = out[len(out) - len(shape) :]
    return [(d, o, True) for d, o in zip(shape, tail, strict=True) if d != 1]
