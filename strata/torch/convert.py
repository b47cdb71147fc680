"""From an FX graph of ATen ops to a graph of ours.

Torch has worked out the type of every result (`node.meta["val"]`), sizes that are symbols included; a rule of the table
says how it is computed. An op without a rule is noted with its reason, and the walk goes on behind it, so that one walk
finds all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from strata import ops
from strata.core import Dim, SymExpr, TensorType, symbols, u8
from strata.errors import StrataError
from strata.kinds import with_article
from strata.mir import Graph, Value, constant, placeholder
from strata.torch import aten as _rules  # noqa: F401 - fills the table
from strata.torch.aten.linalg import CHECKS
from strata.torch.aten.promotion import value
from strata.torch.kinds import TorchSizes, is_ragged, memory_order, stride_order, to_array, torch_dtype
from strata.torch.random import DRAWS
from strata.torch.results import AnyResult, Passed, Result, SizeResult, Views
from strata.torch.table import Checked, Later, Unsupported, find, overload_name

# What a rule may raise on arguments that it was not written for: the op stays in torch, with this as the reason.
REASONS = (Unsupported, StrataError, TypeError, ValueError, KeyError, IndexError, NotImplementedError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class TensorInput:
    """An input that is an argument of the call, its axes in the order in which they lie in memory."""

    name: str
    at: int
    order: tuple[int, ...] | None  # None: as they are


@dataclass(frozen=True, slots=True)
class Length:
    """An input whose length is a number among the arguments: how a size reaches the program that no tensor has."""

    name: str
    at: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """An input that torch's generator fills before the program runs."""

    name: str
    shape: tuple[Dim, ...]
    draw: Callable[[tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of sizes, which a call may have to fulfil; `told` is torch's message about one that does not."""

    holds: Callable[[Any, Any], bool]
    left: Dim
    right: Dim
    told: str = ""


@dataclass(slots=True)
class Conversion:
    """What came out: a graph, where its inputs come from and where its results go; or why not."""

    graph: Graph | None = None
    params: list[TensorInput] = field(default_factory=list)
    inputs: list[TensorInput | Length | Drawn] = field(default_factory=list)
    results: list[AnyResult] = field(default_factory=list)
    extra: int = 0  # results behind those of the graph: memory that some of these are views of
    sizes: list[tuple[str, int, int]] = field(default_factory=list)  # symbol, argument, axis (-1: the argument itself)
    conditions: list[Condition] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)  # torch's errors, each for a truth value behind the results
    place: torch.device | None = None  # where its tensors are; None: it has none
    unsupported: dict[fx.Node, str] = field(default_factory=dict)


Fill = Callable[[torch.Tensor], torch.Tensor]  # draws into a tensor, or gives one of its shape
DEVICES = ("cpu", "cuda")
COMPARISONS = (operator.ge, operator.le, operator.gt, operator.lt, operator.eq, operator.ne)
DIVISIONS = ("floor_divide", "remainder", "fmod", "div")  # that torch refuses for integers, by zero
OF_SIZES = ("aten::_assert_scalar.default", "aten::sym_constrain_range_for_size.default")


@dataclass(frozen=True, slots=True)
class _Token:
    """What puts ops with effects in order; torch gives none at run time, and takes what it gave."""

    at: int


class _Absent:
    """In place of a value that could not be made."""


@dataclass(frozen=True, slots=True)
class Subgraph:
    """A graph that is an argument of a higher-order op, as a function of values."""

    walk: _Walk
    gm: fx.GraphModule

    def __call__(self, *given: Any) -> list[Any]:
        """What it gives, made of ops around the values; what it cannot be made of ends it."""
        return self.walk.inside(self.gm, given)


class _Walk:
    def __init__(self, name: str, bound: frozenset[int], names: Mapping[int, str], ranges: Any, plain: bool) -> None:
        self.graph = Graph(name)
        self.names, self.plain = names, plain
        self.bound = bound
        self.sizes = TorchSizes(ranges)
        self.env: dict[fx.Node, Any] = {}
        self.made = Conversion()
        self.numbers: list[tuple[fx.Node, int]] = []  # arguments that are sizes
        self.place: torch.device | None = None  # where all tensors are
        self.checks: dict[Value, str] = {}  # truth values that are errors, in torch's words
        self.depth = 0  # of graphs inside this one

    # ---------------------------------------------------------------------------------------------------------- inputs

    def argument(self, node: fx.Node, at: int) -> Any:
        kept = node.meta.get("val")
        if node.users and all(_is_ordered(user) and user.args[0] is node for user in node.users):
            return _Token(at)
        if isinstance(kept, torch.SymInt):
            if not is_ragged(kept):
                self.numbers.append((node, at))
            return _Absent()
        if not isinstance(kept, torch.Tensor):
            return kept if isinstance(kept, (int, float, bool)) else _Absent()
        if type(kept) not in (torch.Tensor, _fake()) or not self._is_plain(kept):
            return _Absent()
        try:
            kind = self.sizes.type(kept)
        except Unsupported:
            return _Absent()
        order = memory_order(kept)
        if self.plain or order == tuple(range(kept.dim())):
            order = None
        shape = kind.shape if order is None else tuple(kind.shape[i] for i in order)
        is_param = at in self.bound and kind.is_static
        declare = self.graph.param if is_param else self.graph.input
        name = self.names.get(at, node.name)
        given = TensorInput(name, at, order)
        (self.made.params if is_param else self.made.inputs).append(given)
        made = declare(name, shape, kind.dtype)
        for axis, d in enumerate(kind.shape):
            if isinstance(d, SymExpr) and len(symbols(d)) == 1 and str(d) in symbols(d):
                self.made.sizes.append((str(d), at, axis))
        if order is None:
            return made
        return ops.transpose(made, tuple(order.index(i) for i in range(len(order))))

    def drawn(self, node: fx.Node, kind: TensorType, fill: Fill, dtype: torch.dtype | None = None) -> Value:
        """Numbers that torch draws into a tensor of a type, by `fill`: in the order in which torch's lies in memory."""
        self._outermost("numbers are drawn")
        kept: Any = node.meta.get("val")
        order = memory_order(kept[-1] if isinstance(kept, (tuple, list)) else kept)
        if self.plain or order is None or order == tuple(range(kind.ndim)):
            order = None
        name, chosen = f"{node.name}_drawn", dtype or torch_dtype(kind.dtype)
        shape = kind.shape if order is None else tuple(kind.shape[i] for i in order)
        back = None if order is None else tuple(order.index(i) for i in range(kind.ndim))

        def draw(shape: tuple[int, ...]) -> torch.Tensor:
            room = torch.empty(shape, dtype=chosen)
            return fill(room) if order is None or back is None else fill(room.permute(back)).permute(order)

        self.made.inputs.append(Drawn(name, shape, draw))
        made = self.graph.input(name, shape, kind.dtype)
        return made if back is None else ops.transpose(made, back)

    def _outermost(self, what: str) -> None:
        """Of what happens beside the values there is no trace in a graph that runs several times, or not at all."""
        if self.depth:
            raise Unsupported(f"{what} in a graph inside")

    # ----------------------------------------------------------------------------------------------------------- nodes

    def inside(self, gm: fx.GraphModule, given: Sequence[Any]) -> list[Any]:
        """The results of a graph inside this one, for the values given."""
        arguments = iter(given)
        self.depth += 1
        try:
            for node in gm.graph.nodes:
                match node.op:
                    case "placeholder":
                        self.env[node] = next(arguments)
                    case "get_attr":
                        self.env[node] = self.attribute(gm, str(node.target))
                    case "call_function":
                        self.env[node] = self._named(node)
                    case "output":
                        results = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
                        return [self._read(x) if isinstance(x, fx.Node) else x for x in results]
                    case other:
                        raise Unsupported(f"a node of kind {other} in a graph inside")
        finally:
            self.depth -= 1
        raise Unsupported("a graph without an end")

    def _named(self, node: fx.Node) -> Any:
        """A call in a graph inside: what is told of it names it, since a report names the op that the graph is for."""
        try:
            return self.call(node)
        except REASONS as reason:
            told = " ".join(str(reason).split())
            raise Unsupported(
                told if "in a graph inside" in told else f"{node.target} in a graph inside: {told}"
            ) from None

    def attribute(self, gm: fx.GraphModule, path: str) -> Any:
        """A constant of the graph, or a graph that is an argument of an op."""
        found: Any = gm
        for part in path.split("."):
            found = getattr(found, part)
        if isinstance(found, fx.GraphModule):
            return Subgraph(self, found)
        if isinstance(found, torch.Tensor) and found.device.type in DEVICES and not _is_fake(found):
            return constant(to_array(found.cpu()).copy())
        return _Absent()

    def call(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            return self._item(node)
        kept = node.meta.get("val")
        if isinstance(kept, (torch.SymInt, int)) and not isinstance(kept, bool):
            return self._size(kept)
        if isinstance(kept, torch.SymBool) and node.target in COMPARISONS:
            (left, right), _ = self._arguments(node)
            return Condition(node.target, left, right)
        if _called(node) in CHECKS:  # our own op has raised, if there is a reason to
            return [self.env[node.args[0]]] if _is_ordered(node) else None  # type: ignore[index]
        out = self._kind(kept)
        args, options = self._arguments(node)
        if overload_name(node.target) in OF_SIZES:
            if isinstance(args[0], Condition):
                self._outermost("a condition on sizes")
                self.made.conditions.append(replace(args[0], told=str(args[1])))
            elif not isinstance(args[0], (int, SymExpr)):
                raise Unsupported("a condition on data")
            return None
        draw = DRAWS.get(overload_name(node.target))
        if draw is not None:
            return draw(self, node, out, *args, **options)
        entry = find(node.target)
        if entry is None:
            raise Unsupported("no rule")
        if entry.overload == "aten::as_strided.default":
            base = node.args[0].meta["val"]  # type: ignore[union-attr]
            if not base.is_contiguous() or base.storage_offset() != 0:
                raise Unsupported("a view of a tensor that does not lie in order")
        self._note_divisor(entry.overload, out, args)
        made = entry.rule(out, *args, **options)
        if isinstance(made, Checked):
            made = self.checked(made)
        if isinstance(made, list):
            read = {user.args[1] for user in node.users if user.target is operator.getitem}
            if any(isinstance(m, Later) and m.readers and i not in read for i, m in enumerate(made)):
                raise Unsupported("nobody asks how it went: it may not raise")
        return self._checked(made, out)

    def _note_divisor(self, overload: str, out: Any, args: Sequence[Any]) -> None:
        """On the host, torch refuses to divide integers by zero."""
        name = overload.partition("::")[2].partition(".")[0]
        if name not in DIVISIONS or not isinstance(out, TensorType) or not out.dtype.is_int or self._is_on_device():
            return
        by = args[1]
        if isinstance(by, Value):  # of no elements, none is divided
            self._outermost("integers are divided")
            by = by if out.is_static and 0 not in out.shape else ops.broadcast_to(by, out.shape)
            self.checks[ops.any(ops.equal(by, 0))] = "ZeroDivisionError"
        elif isinstance(by, SymExpr):
            self._outermost("integers are divided by a size")
            self.made.conditions.append(Condition(operator.ne, by, 0, "ZeroDivisionError"))
        elif by == 0:
            raise Unsupported("a division of integers by zero")

    def checked(self, of: Checked) -> Any:
        """What a rule made, once its check is noted."""
        if not self._is_on_device():
            self._outermost("values are checked")
            self.checks[of.fails] = of.told
        elif of.needed:
            raise Unsupported("nothing looks at a check of its values")
        return of.made

    def _is_on_device(self) -> bool:
        return self.plain or (self.place is not None and self.place.type != "cpu")

    def _item(self, node: fx.Node) -> Any:
        whole = self.env[node.args[0]]  # type: ignore[index]
        if isinstance(whole, _Absent):
            return self._stand_in(node)
        at: Any = node.args[1]
        part = whole[at]
        if isinstance(part, Later):
            if part.readers and not all(_called(user) in part.readers for user in node.users):
                raise Unsupported("the program reads how it went")
            part = self._checked(part.make(), self._kind(node.meta.get("val")))
            whole[at] = part
        return part

    def _size(self, kept: Any) -> Any:
        try:
            return self.sizes.dim(kept)
        except Unsupported:
            return _Absent()

    def _kind(self, kept: Any) -> Any:
        if isinstance(kept, torch.Tensor):
            if not self._is_plain(kept):
                raise Unsupported(f"a tensor that is not dense, or not in this memory: {kept.layout}, {kept.device}")
            return self.sizes.type(kept)
        if isinstance(kept, (tuple, list)):
            return tuple(None if k is None or isinstance(k, (int, torch.SymInt)) else self._kind(k) for k in kept)
        if kept is None:
            return None
        raise Unsupported(f"a result that is {with_article(type(kept))}")

    def _is_plain(self, t: torch.Tensor) -> bool:
        """Whether a tensor is dense, and in the memory that the others are in: the host's, or that of one GPU."""
        if t.layout is not torch.strided or t.is_quantized or t.device.type not in DEVICES:
            return False
        if self.place is None:
            self.place = self.made.place = t.device
        return t.device == self.place

    def _arguments(self, node: fx.Node) -> tuple[Any, Any]:
        args = fx.node.map_aggregate(node.args, lambda a: self._read(a) if isinstance(a, fx.Node) else a)
        options = fx.node.map_aggregate(node.kwargs, lambda a: self._read(a) if isinstance(a, fx.Node) else a)
        return args, options

    def _read(self, node: fx.Node) -> Any:
        made = self.env[node]
        if isinstance(made, _Absent):
            raise Unsupported("an operand that only torch has")
        return made

    def _checked(self, made: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            assert isinstance(made, (tuple, list)), out
            return [
                m if m is None or o is None or isinstance(m, Later) else self._checked(m, o)
                for m, o in zip(made, out, strict=True)
            ]
        if out is None:
            return None
        made = value(made, out.dtype)
        if made.shape != out.shape:
            if made.ndim == len(out.shape) and not _differ(made.shape, out.shape):
                return made
            made = ops.broadcast_to(made, out.shape)
        return made

    def _stand_in(self, node: fx.Node) -> Any:
        """What an op that stays in torch gives, so that those behind it can be looked at."""
        try:
            kind = self._kind(node.meta.get("val"))
        except Unsupported:
            return _Absent()
        return placeholder(node.name, kind) if isinstance(kind, TensorType) else _Absent()

    # --------------------------------------------------------------------------------------------------------- results

    def finish(self, gm: fx.GraphModule, output: fx.Node, places: dict[fx.Node, int]) -> None:
        self._find_sizes()
        values: list[Value] = []
        at: dict[fx.Node, int] = {}
        given: Any = output.args[0]
        results = list(given) if isinstance(given, (tuple, list)) else [given]
        views = self._views(results, places)
        for number, x in enumerate(results + views.bases):
            if not isinstance(x, fx.Node):
                self.made.results.append(None if x is None else SizeResult(x))
                continue
            if x in places and not self.plain:
                self.made.results.append(Passed(places[x]))
                continue
            made = self.env[x]
            if isinstance(made, _Token):
                self.made.results.append(Passed(made.at))
                continue
            if isinstance(made, (int, SymExpr)):
                self.made.results.append(SizeResult(made))
                continue
            if made is None:
                self.made.results.append(None)
                continue
            if number in views.of:
                self.made.results.append(views.of[number])
                continue
            order: tuple[int, ...] | None = stride_order(x.meta["val"])
            if self.plain or order == tuple(range(made.ndim)):
                order = None
            else:
                made = ops.transpose(made, order)
            source = _aliased(x)  # results that are not one tensor in torch have memory of their own, equal or not
            if source not in at:
                at[source] = len(values)
                values.append(made)
            self.made.results.append(Result(at[source], order))
        self.made.extra = len(views.bases)
        self.made.checks = list(self.checks.values())
        if values or self.checks:
            self.made.graph = self.graph.outputs(*values, *self.checks)

    def _views(self, results: list[Any], places: dict[fx.Node, int]) -> Views:
        """Results that are views; one whose place is no size that the call knows ends the graph."""
        views = Views([] if self.plain else results, self.sizes, places)
        known = {name for name, _, _ in self.made.sizes}
        for view in views.of.values():
            for d in (*view.size, *view.stride, view.offset, *getattr(view, "strides", ())):
                if isinstance(d, SymExpr) and not known.issuperset(symbols(d)):
                    raise Unsupported(f"a view of size {d}, which no argument tells")
        return views

    def _find_sizes(self) -> None:
        """TorchSizes that no tensor has along an axis come as the length of an input of their own."""
        seen = {name for name, _, _ in self.made.sizes}
        for node, at in self.numbers:
            kept = node.meta["val"]
            try:
                dim = self.sizes.dim(kept)
            except Unsupported:
                continue
            name = str(dim)
            if not isinstance(dim, SymExpr) or name not in symbols(dim) or name in seen:
                continue
            seen.add(name)
            self.made.sizes.append((name, at, -1))
            self.made.inputs.append(Length(node.name, at))
            self.graph.input(node.name, (dim,), u8)


def _called(node: fx.Node) -> str:
    """The overload that a node calls, also one with effects that come in order."""
    return overload_name(node.args[1] if _is_ordered(node) else node.target)


def _is_ordered(node: fx.Node) -> bool:
    return node.target is torch.ops.higher_order.with_effects


def _aliased(node: fx.Node) -> fx.Node:
    """The node whose tensor this one is."""
    while node.op == "call_function" and overload_name(node.target) in ("aten::alias.default", "aten::detach.default"):
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.op == "placeholder":
            break
        node = source
    return node


def _differ(a: Sequence[Dim], b: Sequence[Dim]) -> bool:
    return any(isinstance(x, int) and isinstance(y, int) and x != y for x, y in zip(a, b, strict=True))


def _fake() -> type:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


def convert(
    gm: fx.GraphModule, name: str = "torch", bound: frozenset[int] = frozenset(),
    names: Mapping[int, str] | None = None, ranges: Mapping[str, Any] | None = None, plain: bool = False,
) -> Conversion:  # fmt: skip
    """The graph of a module of ATen ops.

    `bound` are arguments that stay the same from call to call; `names` are theirs, where the nodes' will not do;
    `ranges` are bounds of symbols. With `plain`, arrays lie in the order of their axes and all results are
    computed.
    """
    builder = _Walk(name, bound, names or {}, ranges, plain)
    places: dict[fx.Node, int] = {}
    unsupported = builder.made.unsupported
    for node in gm.graph.find_nodes(op="placeholder"):
        builder.sizes.give(node.meta.get("val"))
    for node in gm.graph.nodes:
        match node.op:
            case "placeholder":
                places[node] = len(places)
                builder.env[node] = builder.argument(node, places[node])
                kept = node.meta.get("val")
                if isinstance(builder.env[node], _Absent) and isinstance(kept, torch.SymInt) and not is_ragged(kept):
                    builder.env[node] = builder._size(kept)
            case "get_attr":
                builder.env[node] = builder.attribute(gm, str(node.target))
            case "call_function":
                try:
                    builder.env[node] = builder.call(node)
                except REASONS as reason:
                    unsupported[node] = " ".join(str(reason).split())[:200]
                    builder.env[node] = builder._stand_in(node)
            case "output":
                if not unsupported and not _lost(node, builder.env, places):
                    try:
                        builder.finish(gm, node, places)
                    except Unsupported as reason:
                        unsupported[node] = str(reason)
                elif not unsupported:
                    unsupported[node] = "a result that is neither a tensor nor a size"
            case other:
                unsupported[node] = f"a node of kind {other}"
                builder.env[node] = builder._stand_in(node)
    return builder.made


def _lost(output: fx.Node, env: dict[fx.Node, Any], places: dict[fx.Node, int]) -> bool:
    """Whether a result was never made, though every op has a rule."""
    return any(isinstance(env.get(x), _Absent) and x not in places for x in output.all_input_nodes)


def _is_fake(t: torch.Tensor) -> bool:
    return isinstance(t, _fake())
