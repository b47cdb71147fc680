"""Graphs: named inputs and parameters, results, and walks over values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.arguments import own_checks, untouched
from strata.core import Dim, Symbol, SymExpr, TensorType, as_dtype, check_shape, folded, here, located
from strata.errors import OptionError, ShapeError, SymbolError, TraceError, UnknownNameError
from strata.kinds import counted
from strata.mir.ir import Home, Node, Op, Value, field_symbols, make_node, near
from strata.mir.leaves import Constant, Input, Param, constant, fresh_scope, leaf_name
from strata.mir.origin import origin_of


def has_bytes(name: str) -> bool:
    """Whether a name can be written to a file: half of a surrogate pair cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


class Graph:
    """Named inputs and parameters, and results computed from them. Built once, then never changed.

    Two graphs are equal when their text is, whatever names their scopes have.
    """

    def __init__(self, name: str = "main") -> None:
        if not isinstance(name, str) or not has_bytes(name):
            raise OptionError(f"{name!r} is not a name for a graph", code="O112", place=here())
        self.name = name
        self.scope = fresh_scope()
        self._home = Home(name)
        self.inputs: tuple[Value, ...] = ()
        self.params: tuple[Value, ...] = ()
        self.results: tuple[Value, ...] = ()
        self._order: tuple[tuple[Value, ...], list[Node]] | None = None  # of the nodes, for some results
        self._names: tuple[tuple[Value, ...], tuple[Value, ...], set[str]] = (), (), set()  # of these leaves
        self._text: str | None = None
        self._symbols: dict[str, Symbol] | None = None

    def input(self, name: str, shape: Sequence[Dim] | TensorType, dtype: Any = "f32") -> Value:
        """Declare an input."""
        return self._declare(Input, name, shape, dtype)

    def param(self, name: str, shape: Sequence[Dim] | TensorType, dtype: Any = "f32") -> Value:
        """Declare a parameter: bound once with `set_param`, kept across runs."""
        return self._declare(Param, name, shape, dtype)

    def constant(self, data: Any, dtype: Any = None) -> Value:
        return constant(data, dtype)

    def _declare(self, kind: type[Input | Param], name: str, shape: Sequence[Dim] | TensorType, dtype: Any) -> Value:
        if self.results:
            raise TraceError(
                f"graph {self.name!r} has its outputs: no more inputs can be declared", code="T113", place=here()
            )
        if not isinstance(name, str) or not name or not has_bytes(name):
            raise OptionError(f"graph {self.name!r}: {name!r} is not a name for an input", code="O112", place=here())
        names = self._leaf_names()
        if name in names:
            raise OptionError(
                f"graph {self.name!r} has an input or parameter {name!r} already", code="O113", place=here()
            )
        tensor = shape if isinstance(shape, TensorType) else TensorType(as_dtype(dtype), check_shape(shape))
        made = kind(name, tensor, self.scope)()
        made.node.home = self._home
        if kind is Input:
            self.inputs += (made,)
        else:
            self.params += (made,)
        names.add(name)
        self._names = self.inputs, self.params, names
        return made

    def _leaf_names(self) -> set[str]:
        """The names of its inputs and parameters."""
        inputs, params, names = self._names
        if inputs is not self.inputs or params is not self.params:
            names = {leaf_name(x) for x in (*self.inputs, *self.params)}
        return names

    @own_checks("values")
    def outputs(self, *values: Value) -> Graph:
        """Set the results; the graph is verified and complete from here on."""
        from strata.mir.verify import verify

        flat = [v for x in values for v in (x if isinstance(x, (tuple, list)) else (x,))]
        if not flat:
            raise OptionError(f"graph {self.name!r} needs at least one output", code="O114", place=here())
        for value in flat:
            if not isinstance(value, Value):
                raise TraceError(
                    f"graph {self.name!r}: {type(value).__name__} is not a value of it", code="T114", place=here()
                )
        self.results = tuple(flat)
        self._text = self._symbols = None
        verify(self)
        return self

    @own_checks("values")
    def returning(self, *values: Value) -> Graph:
        """The same inputs and parameters with other results."""
        graph = Graph(self.name)
        graph.scope, graph.inputs, graph.params = self.scope, self.inputs, self.params
        return graph.outputs(*values)

    # ------------------------------------------------------------------------------------------------------------ views

    @untouched
    def nodes(self) -> list[Node]:
        """All nodes that the results need, leaves included, producers first; the order depends on structure only."""
        results = self.results
        if self._order is None or self._order[0] is not results:
            self._order = results, toposort(results)
        return list(self._order[1])

    @untouched
    def symbols(self) -> dict[str, Symbol]:
        """The symbolic sizes of inputs and parameters, and those that only nodes and nested graphs mention, by name."""
        if self._symbols is not None:
            return self._symbols
        found: dict[str, Symbol] = {}
        for leaf in (*self.inputs, *self.params):
            found |= leaf.type.symbols()
        for node in self.nodes():
            for kind in node.types:
                if not kind.is_static:
                    found |= kind.symbols()
            for field in node.op.static_fields().values():
                found |= field_symbols(field)
        if self.results:
            self._symbols = found
        return found

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(leaf_name(x) for x in self.inputs)

    @property
    def param_names(self) -> tuple[str, ...]:
        return tuple(leaf_name(x) for x in self.params)

    def leaf(self, name: str) -> Value:
        """The input or parameter of that name."""
        for x in (*self.inputs, *self.params):
            if leaf_name(x) == name:
                return x
        known = [*self.input_names, *self.param_names]
        raise UnknownNameError(
            f"graph {self.name!r} has no input or parameter {name!r}; "
            f"it has {', '.join(known) or 'none'}{near(name, known)}",
            code="N112", place=here(),
        )  # fmt: skip

    @located
    def bind(self, binding: Mapping[str, Dim]) -> Graph:
        """The graph with symbols replaced by sizes; every shape is inferred again."""
        unknown = set(binding) - set(self.symbols())
        if unknown:
            name = min(unknown)
            raise UnknownNameError(
                f"graph {self.name!r} has no symbolic size {name!r}{near(name, self.symbols())}", code="N113"
            )
        for name, size in binding.items():
            if isinstance(size, bool) or not (isinstance(size, SymExpr) or hasattr(size, "__index__")):
                raise SymbolError(f"graph {self.name!r}: the size {name} cannot be {size!r}", code="S153", place=here())
        result = Graph(self.name)
        known: dict[Value, Value] = {}
        for x in self.inputs:
            known[x] = result.input(leaf_name(x), x.type.bind(binding))
        for x in self.params:
            known[x] = result.param(leaf_name(x), x.type.bind(binding))
        return result.outputs(*substitute_values(self.results, known, lambda o: o.bind(binding)))

    @own_checks("args")
    def call(self, *args: Value) -> tuple[Value, ...]:
        """The results with inputs, then parameters, replaced by values: the graph inlined."""
        leaves = (*self.inputs, *self.params)
        if len(args) != len(leaves):
            missing = ", ".join(leaf_name(x) for x in leaves[len(args) :])
            rest = f"; there is nothing for {missing}" if missing else ""
            raise OptionError(
                f"graph {self.name!r} takes {counted(len(leaves), 'value')}, got {len(args)}{rest}",
                code="O115",
                place=here(),
            )
        for leaf, arg in zip(leaves, args, strict=True):
            if leaf.type != arg.type:
                raise ShapeError(
                    f"graph {self.name!r}: {leaf_name(leaf)} is {leaf.type}, got {arg.type}", code="S106", place=here()
                )
        return substitute_values(self.results, dict(zip(leaves, args, strict=True)))

    def __str__(self) -> str:
        if self._text is None:
            from strata.mir.text import show

            self._text = show(self)
        return self._text

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {len(self.inputs)} inputs, {len(self.params)} params, {len(self.results)} outputs>"

    def _repr_html_(self) -> str:
        return folded(f"graph {self.name}: {len(self.nodes())} nodes", str(self))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Graph) and str(self) == str(other))

    def __hash__(self) -> int:
        return hash(str(self))


@dataclass(frozen=True, slots=True)
class Nested:
    """A graph inside of an op, and the numbers of those inputs that stay the same each time that it runs."""

    graph: Graph
    still: range = range(0)

    def opened(self) -> Graph:
        """The graph on its own: what stays the same is a parameter of it."""
        made = Graph(self.graph.name)
        values = []
        for i, (name, x) in enumerate(zip(self.graph.input_names, self.graph.inputs, strict=True)):
            values.append(made.param(name, x.type) if i in self.still else made.input(name, x.type))
        return made.outputs(*self.graph.call(*values))

    def closed(self, graph: Graph) -> Graph:
        """What `opened` gave, or what a pass has made of it, as the op takes it: with inputs only, in their order."""
        made = Graph(graph.name)
        order = self.graph.input_names
        values = {name: made.input(name, graph.leaf(name).type) for name in order}
        return made.outputs(*graph.call(*(values[name] for name in (*graph.input_names, *graph.param_names))))


def toposort(roots: Iterable[Value], stop: Iterable[Value] = ()) -> list[Node]:
    """Nodes below `roots`, producers first, without recursion. Nothing below a value in `stop` is entered."""
    fence = set(stop)
    if not fence:
        return _all_below(roots)
    seen: set[int] = set()
    order: list[Node] = []
    stack: list[tuple[Node, bool]] = []
    for root in reversed([r for r in roots if r not in fence]):
        stack.append((root.node, False))
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        stack.append((node, True))
        stack.extend((x.node, False) for x in reversed(node.inputs) if id(x.node) not in seen and x not in fence)
    return order


def _all_below(roots: Iterable[Value]) -> list[Node]:
    """The same order, where nothing stops it."""
    seen: set[Node] = set()
    order: list[Node] = []
    stack: list[Node | None] = [root.node for root in roots]
    stack.reverse()
    while stack:
        node = stack.pop()
        if node is None:  # what is below the next one is done
            order.append(stack.pop())  # type: ignore[arg-type]
        elif node not in seen:
            seen.add(node)
            stack += (node, None)
            for x in reversed(node.inputs):
                if x.node not in seen:
                    stack.append(x.node)
    return order


def fixed_values(order: Iterable[Node]) -> set[Value]:
    """What depends on parameters and constants only, of nodes in order, and on no size that is a symbol."""
    fixed: set[Value] = set()
    for node in order:
        if isinstance(node.op, (Param, Constant)) or (
            node.inputs
            and all(x in fixed for x in node.inputs)
            and all(t.is_static for t in node.types)
            and not field_symbols(tuple(node.op.static_fields().values()))
        ):
            fixed.update(node.outputs)
    return fixed


def substitute_values(
    roots: Sequence[Value], known: Mapping[Value, Value], change: Callable[[Op], Op] | None = None
) -> tuple[Value, ...]:
    """Rebuild `roots` with some values replaced, and optionally every op changed; what is unaffected is shared."""
    table: dict[Value, Value] = dict(known)
    for node in toposort(roots, known):
        op = change(node.op) if change is not None else node.op
        inputs = tuple(table.get(x, x) for x in node.inputs)
        if op is node.op and all(a is b for a, b in zip(inputs, node.inputs, strict=True)):
            continue
        with origin_of(node):
            made = make_node(op, inputs)
        for i in range(len(node.types)):
            table.setdefault(Value(node, i), Value(made, i))
    return tuple(table.get(r, r) for r in roots)
