"""One kernel of several ops: the values it stores, the nodes computed in it, and its expression."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strata.core import Dim, dim_prod, substitute, symbols
from strata.kernel import Axis, Expr, Kernel, KernelBuilder, Reduce, Scan, View, as_stored, postorder
from strata.lir.traits import is_inline_constant, traits
from strata.mir import Constant, Input, Node, Op, Param, Value, as_tuple

if TYPE_CHECKING:
    from strata.passes import FusionLimits

MAX_DEPTH = 96  # of inlined producers: bounds the depth of expression building
TYPICAL_SIZE = 128  # stands in for a symbol when sizes are compared
MOST_OPS = 2048  # of one kernel: compilers take a time that grows with the square of a block's length


@dataclass(eq=False)
class FusionGroup:
    """One kernel: the values it stores, the nodes computed in it, the stored values it reads."""

    roots: list[Value]
    nodes: list[Node] = field(default_factory=list)
    reads: list[Value] = field(default_factory=list)
    kernel: Kernel | None = None  # None: a host step, or not built yet
    updates: dict[Value, Value] = field(default_factory=dict)  # roots that start as another value, and that value
    sources: list[Value] = field(default_factory=list)  # of a step of one op: what each input is read from
    is_closed: bool = False  # the kernel of an op that is not to be part of another
    maker: KernelOf | None = None  # of a kernel that is not built yet

    @property
    def read_values(self) -> list[Value]:
        """What must be in memory: what the kernel reads, and what its updates start from."""
        return list(dict.fromkeys([*self.reads, *self.updates.values()]))

    def build(self) -> None:
        """Make the kernel, if there is one to make."""
        if self.maker is not None:
            self.kernel, self.maker = self.maker.kernel(), None

    @property
    def label(self) -> str:
        names = [n.op.called for n in self.nodes]
        return " + ".join(dict.fromkeys(names)) if len(names) < 12 else f"{names[0]} … {names[-1]} ({len(names)} ops)"


def typical(size: Dim) -> int:
    """A number to compare sizes by, where some are symbolic: what is larger for any value of a symbol is larger."""
    usual = {s.name: max(s.lo, min(s.hi or TYPICAL_SIZE, TYPICAL_SIZE)) for s in symbols(size).values()}
    return int(substitute(size, usual))


def is_allowed(group: FusionGroup, limits: FusionLimits | None) -> bool:
    """Whether a kernel is within the limits of its ops and of its buffers."""
    return limits is None or limits.allow(len(group.nodes), len(group.read_values), len(group.roots))


def beyond_limits(group: FusionGroup, limits: FusionLimits | None) -> dict[Value, str]:
    """What to store so that a kernel reads fewer buffers: the part that reads the most of those it may read."""
    if limits is None or is_allowed(group, limits):
        return {}
    outside, roots = set(group.read_values), set(group.roots)
    below: dict[Value, set[Value]] = {x: {x} for x in outside}
    for node in group.nodes:
        read = set().union(*(below.get(x, ()) for x in node.inputs))
        below |= {x: read for x in node.outputs if x not in outside}
    parts = {x: len(read) for x, read in below.items() if x not in outside and x not in roots}
    fitting = {x: n for x, n in parts.items() if 1 < n <= limits.most_inputs}
    chosen = [max(fitting, key=lambda x: fitting[x])] if fitting else list(parts)
    return dict.fromkeys(chosen, f"its kernel would read {len(outside)} buffers, {limits.most_inputs} are the limit")


@dataclass
class Built:
    """The kernel of a recipe, and what keeps it from being one: places of values that must be stored, and why."""

    kernel: Kernel
    wrong: list[tuple[int, str]]


class Recipes:
    """Kernels of the plan of one graph by what they are built from: the layers of a model are built once."""

    def __init__(self, is_shared: Callable[[Value], bool]) -> None:
        self.is_shared = is_shared  # others read it too: sizes decide whether it is stored
        self.kernels: dict[tuple[Hashable, ...], Built] = {}
        self._numbers: dict[Op, int] = {}
        self._by_id: dict[int, int] = {}  # numbers of ops
        self._sums: dict[int, bool] = {}  # by the ids of nodes

    def number(self, op: Op) -> int:
        """Of an op of the graph, the same for equal ones."""
        found = self._by_id.get(id(op))
        if found is None:
            found = self._by_id[id(op)] = self._numbers.setdefault(op, len(self._numbers))
        return found

    def sums(self, node: Node) -> bool:
        """Whether a node of the graph reduces, or runs along an axis."""
        found = self._sums.get(id(node))
        if found is None:
            what = traits(node)
            found = self._sums[id(node)] = what.reduces or what.scans
        return found


class KernelOf:
    """The kernel of some roots: first what is computed in it and what it reads; its expression when it is asked for."""

    def __init__(self, stored: set[Value], group: FusionGroup, recipes: Recipes) -> None:
        self.stored, self.group, self.recipes = stored, group, recipes
        self.depth = 0  # of what was added last; above MAX_DEPTH, no expression is built
        self.sums = False  # whether something is reduced, or runs along an axis
        self.values: list[Value] = []  # that are computed in the kernel; their places in the recipe are their numbers
        self.places: dict[Value, Hashable] = {}  # of inputs: -1, -2, …; of numbers: that of the op, and what it is
        self.recipe: list[Hashable] = []
        self.parts: list[_Added] = []

    def add(self, roots: list[Value]) -> None:
        order = self._inline_order(roots)
        self._note(order)
        aligned = _aligned(order, roots)
        self.depth = _depth(order, aligned)
        self.recipe += (ADDED, *(self.places[x] for x in roots))
        self.parts.append(_Added(order, roots, [] if self.depth > MAX_DEPTH else aligned, self.depth > MAX_DEPTH))

    def add_update(self, root: Value) -> None:
        """A root that is its first input with some elements changed."""
        node = root.node
        self.group.updates[root] = node.inputs[0]
        inner = list(node.inputs[1:])
        order = self._inline_order(inner, frozenset(inner) & self.stored)
        self._note(order)
        self.recipe += (UPDATED, root.type, self.recipes.number(node.op), *(self.places[x] for x in inner))
        self.group.nodes.append(node)
        self.parts.append(_Added(order, [root], []))

    def _note(self, order: list[Node]) -> None:
        for node in order:
            self.recipe.append((self.recipes.number(node.op), *[self.places[x] for x in node.inputs]))
            if traits(node).sums:
                self.recipe.append(tuple(self.recipes.is_shared(x) for x in node.inputs))
            for value in node.outputs:
                self.places[value] = len(self.values)
                self.values.append(value)
            self.sums = self.sums or self.recipes.sums(node)
        self.group.nodes += order

    def _inline_order(self, roots: list[Value], outside: frozenset[Value] = frozenset()) -> list[Node]:
        """Nodes computed in this kernel, producers first; leaves and stored values become inputs on the way."""
        order: list[Node] = []
        state: dict[int, bool] = {}
        stack: list[tuple[Node, bool]] = []
        own = set(roots) - outside
        for root in reversed(roots):
            if root in own and not isinstance(root.node.op, (Input, Param, Constant)):
                stack.append((root.node, False))
            elif root not in self.places:
                self._enter(root)
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
                continue
            if id(node) in state:
                continue
            state[id(node)] = True
            stack.append((node, True))
            for x in reversed(node.inputs):
                if x in self.places:
                    continue
                if isinstance(x.node.op, (Input, Param, Constant)) or (x in self.stored and x not in own):
                    self._enter(x)
                else:
                    stack.append((x.node, False))
        return order

    def _enter(self, x: Value) -> None:
        """A value from outside: a number, or a buffer that the kernel reads."""
        if is_inline_constant(x.node) and x not in self.stored:
            self.places[x] = NUMBER, self.recipes.number(x.node.op)
        else:
            self.group.reads.append(x)
            self.places[x] = -len(self.group.reads)
            self.recipe.append(x.type)

    # the expression

    def kernel(self) -> Kernel:
        return self._built().kernel

    def problems(self) -> dict[Value, str]:
        """Values whose reduction would run more than once per row here."""
        return {self.values[place]: why for place, why in self._built().wrong} if self.sums else {}

    def _built(self) -> Built:
        key = tuple(self.recipe)
        found = self.recipes.kernels.get(key)
        if found is None:
            made = _Expressions(self)
            wrong = [(self._place_of(value), why) for value, why in made.problems().items()]
            found = self.recipes.kernels[key] = Built(made.k.build(), wrong)
        return found

    def _place_of(self, value: Value) -> int:
        place = self.places[value]
        assert isinstance(place, int)
        return place


ADDED, UPDATED, NUMBER = "add", "update", "number"  # in recipes


@dataclass(frozen=True)
class _Added:
    """Roots that are added together: the nodes behind them, and the values that are read at their very index."""

    order: list[Node]
    roots: list[Value]
    aligned: list[Value]
    is_too_deep: bool = False


class _Expressions:
    """The expressions of a kernel, and what keeps it from being one."""

    def __init__(self, made: KernelOf) -> None:
        self.group, self.is_shared = made.group, made.recipes.is_shared
        self.k = KernelBuilder("kernel")
        self.views: dict[Value, View] = {}
        self.makers: dict[Expr, Value] = {}
        self.stores: list[tuple[tuple[Expr, ...], Expr, Value]] = []
        for at, x in enumerate(made.group.reads):
            self.views[x] = self.k.input(f"in{at}", x.type)
        for x, place in made.places.items():
            if isinstance(place, tuple):
                self.views[x] = self._constant(x)
        for part in made.parts:
            for node in part.order:
                for value in node.outputs:
                    self.views[value] = self._view_of(value, node)
            if part.roots[0] in made.group.updates:
                self._update(part.roots[0])
            elif not part.is_too_deep:
                self._add(part)

    def _add(self, part: _Added) -> None:
        built: set[tuple[Expr, ...]] = set()
        for root in part.roots:
            axes = self.k.axes(root.shape)
            if axes not in built:  # of roots of one shape once
                built.add(axes)
                for value in part.aligned:
                    if value.shape == root.shape:
                        self.views[value][axes]  # remembered: no expression is built by deep recursion
            computed: Expr = self.views[root][axes]
            kept = as_stored(computed)
            self.k.output(self._next_output(), root.type, lambda index, kept=kept: kept)  # type: ignore[misc]
            self.stores.append((axes, computed, root))

    def _update(self, root: Value) -> None:
        before = len(self.k.build().stores)
        out = self.k.output_buffer(self._next_output(), root.type)
        root.node.op.lower_into(self.k, out, *(self.views[x] for x in root.node.inputs[1:]))
        self.stores += [(s.axes, s.value, root) for s in self.k.build().stores[before:]]

    def _next_output(self) -> str:
        return f"out{len(self.k.build().outputs)}"

    def _constant(self, x: Value) -> View:
        assert isinstance(x.node.op, Constant)
        number = self.k.const(x.node.op.data.array.reshape(-1)[0], x.dtype)
        return self.k.view(x.type, lambda index: number)

    def _view_of(self, value: Value, node: Node) -> View:
        what = traits(node)

        def read(index: tuple[Expr, ...]) -> Expr:
            inputs = [self._terms(x) if what.sums and self.is_shared(x) else self.views[x] for x in node.inputs]
            expr = as_tuple(node.op.lower(self.k, index, *inputs))[value.index]
            if what.reduces or what.scans:
                for e in postorder([expr]):
                    if isinstance(e, (Reduce, Scan)):
                        self.makers.setdefault(e, value)
            return self.k.rounded(expr)

        return self.k.view(value.type, read)

    def _terms(self, x: Value) -> View:
        """A value that is summed up, and may be stored for others that read it: the same terms in both cases."""
        view = self.views[x]
        return self.k.view(x.type, lambda index: self.k.rounded_product(view[index]))

    def problems(self) -> dict[Value, str]:
        """Values whose reduction would run more than once per row here."""
        if not self.makers:  # nothing is reduced
            return {}
        wrong: dict[Value, str] = {}
        own = set(self.group.roots)
        products = {v for n in self.group.nodes if traits(n).contracts for v in n.outputs}
        beside: dict[Value, str] = {}  # other sums, which are fine where the matmul goes elsewhere
        for axes, value, root in self.stores:
            prefixes = [frozenset(axes[:n]) for n in range(len(axes) + 1)]
            for e in postorder([value]):
                alone = len(own) == 1 and self.makers.get(e) in own  # then the store itself can run in the scan's order
                if isinstance(e, Scan) and not alone and not _goes_along(e, axes):
                    wrong[self.makers[e]] = "its reader does not read it in order"
                    continue
                if not isinstance(e, (Reduce, Scan)) or self.makers.get(e) == root:
                    continue
                if products and self.makers[e] not in products:
                    beside[self.makers[e]] = "its reader is a contraction"
                sized = frozenset(a for a in e.free if a.extent != 1)
                unit = frozenset(a for a in axes if isinstance(a, Axis) and a.extent == 1)
                if not any(sized | unit == p | unit for p in prefixes):
                    wrong[self.makers[e]] = "its rows are not the leading axes of its reader"
                elif typical(dim_prod([a.extent for a in sized])) > typical(self.makers[e].type.size):
                    wrong[self.makers[e]] = "its reader, in other axes, would compute its rows again and again"
        wrong |= self._crossing_scans()
        return wrong if products & wrong.keys() else beside | wrong

    def _crossing_scans(self) -> dict[Value, str]:
        """Running reductions along several axes: one loop cannot go along all of them."""
        scans = [e for e in postorder([value for _, value, _ in self.stores]) if isinstance(e, Scan)]
        if len({e.position for e in scans}) < 2:
            return {}
        makers = {self.makers[e]: "another value of the kernel runs along another axis" for e in scans}
        own = set(self.group.roots)
        return {maker: why for maker, why in makers.items() if maker not in own} or makers


def _goes_along(scan: Scan, axes: Sequence[Expr]) -> bool:
    """Whether a running reduction is read at every place of one of these axes, and not in a part of it."""
    at = scan.position
    return at in axes and isinstance(at, Axis) and at.extent == scan.axis.extent


def _aligned(order: Sequence[Node], roots: Sequence[Value]) -> list[Value]:
    """Values that roots read, element by element, at the very index of the root, producers first."""
    found = set(roots)
    for node in reversed(order):
        if node.op.elementwise and len(node.types) == 1 and node.outputs[0] in found:
            found.update(x for x in node.inputs if x.shape == node.types[0].shape)
    return [value for node in order for value in node.outputs if value in found]


def _depth(order: Sequence[Node], aligned: Sequence[Value]) -> int:
    """The longest way through values that are not built one after the other."""
    steps = set(aligned)
    depth: dict[Value, int] = {}
    for node in order:
        below = max((1 if x in steps else 1 + depth[x] for x in node.inputs if x in depth), default=0)
        depth.update(dict.fromkeys(node.outputs, below))
    return max(depth.values(), default=0)
