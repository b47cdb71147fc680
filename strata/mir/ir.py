"""Ops as frozen classes; interned nodes; values.

A node is an op applied to values. Nodes are interned, so that equal expressions are one object and common
subexpressions never exist. Where a node came from (the user's line, the block, the pass) is kept beside its identity.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, dataclass_transform
from weakref import WeakValueDictionary

import numpy as np

from strata.core import Dim, DType, Symbol, SymExpr, TensorType, here, new_rlock, substitute, symbols
from strata.errors import (
    DTypeError,
    MissingRuleError,
    ShapeError,
    StrataError,
    TraceError,
    UnknownNameError,
    VerifyError,
)
from strata.mir.deferred import METHODS, Deferred, is_operand
from strata.mir.origin import Origin, current_origin
from strata.mir.registry import REGISTRY, Registry, near
from strata.places import is_comparison, is_users

if TYPE_CHECKING:
    from strata.kernel import Expr, Kernel, KernelBuilder
    from strata.mir.graph import Graph, Nested

OpT = TypeVar("OpT", bound="type[Op]")


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True, repr=False)
class Op:
    """One operation. Fields are its static parameters; methods are its rules.

    `infer` and `numpy` are required. An op that is a composition of others writes `decompose` once and gets `numpy`,
    `jvp`, `vjp`, `vmap` and `lower` from it. Rules see one canonical form: axes are non-negative, dtypes are promoted.

    jvp(*inputs, out, dx)        tangent of the output; `dx` has a tangent or None (known zero) for each input
    vjp(*inputs, out, ct)        a cotangent or None for each input
    vmap(*inputs, batched, size) the op on inputs whose leading axis is a batch axis where `batched` says so; outputs
                                 all have the batch axis first
    lower(k, index, *inputs)     the output element at `index` as a kernel expression

    `out` and `ct` are one value, or tuples on ops with `multi_output`. See UnaryOp for ops with one input.
    """

    name: ClassVar[str] = "?"
    multi_output: ClassVar[bool] = False
    differentiable: ClassVar[bool] = True
    elementwise: ClassVar[bool] = False
    commutative: ClassVar[bool] = False
    pure: ClassVar[bool] = True  # same inputs, same outputs: may be interned, folded, moved
    looks_at_inputs: ClassVar[bool] = False  # `check_inputs` has something to say
    dtypes: ClassVar[str | tuple[DType, ...]] = "float"  # what the first input may be; see testing.check

    def __init_subclass__(cls) -> None:
        """Every subclass is a frozen dataclass of its static parameters, so that families can share fields."""
        if _own_fields(cls):  # others inherit all that a dataclass has; to make it again takes most of an import
            dataclass(frozen=True, repr=False)(cls)
            if any("float" in str(f.type) for f in fields(cls)):
                cls.__eq__ = _alike  # type: ignore[assignment, method-assign]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.static_fields().items())})"

    # The base signatures are open, so that an op may name its inputs one by one.

    def infer(self, *types: Any, **_: Any) -> Any:
        self.missing("infer")

    def numpy(self, *arrays: Any, **_: Any) -> Any:
        if self.decompose.__func__ is Op.decompose:  # type: ignore[attr-defined]
            self.missing("numpy")
        from strata.mir.interp import evaluate_decomposition

        return evaluate_decomposition(self, arrays)

    def decompose(self, *inputs: Any, **_: Any) -> Any:
        self.missing("decompose")

    def jvp(self, *inputs: Any, out: Any, dx: Any, **_: Any) -> Any:
        self._need_decomposition("jvp")
        from strata.mir.differentiate import pushforward

        outs = as_tuple(self.decompose(*inputs))
        tangents = dx if isinstance(dx, tuple) else (dx,)
        return self._unwrap(pushforward(outs, inputs, tangents))

    def vjp(self, *inputs: Any, out: Any, ct: Any, **_: Any) -> Any:
        self._need_decomposition("vjp")
        from strata.mir.differentiate import pullback_once

        outs = as_tuple(self.decompose(*inputs))
        grads = pullback_once(outs, as_tuple(ct), inputs)
        return grads[0] if isinstance(self, UnaryOp) else tuple(grads)

    def vmap(self, *inputs: Any, batched: tuple[bool, ...], size: Dim, **_: Any) -> Any:
        self._need_decomposition("vmap")
        from strata.mir.batching import batch_decomposition

        return self._unwrap(batch_decomposition(self, inputs, batched, size))

    def lower(self, k: KernelBuilder, index: tuple[Expr, ...], *inputs: Any, **_: Any) -> Any:
        self.missing("lower")

    def lower_into(self, k: KernelBuilder, out: Any, *inputs: Any) -> None:
        """For an op that changes part of its first input: store the changed elements into `out`, which holds it.

        `inputs` are the others. Such an op is a separate step, and needs no copy where the first is not used again.
        """
        self.missing("lower_into")

    def own_kernel(self, *types: TensorType) -> Kernel | None:
        """For an op with `lower` that is not to be part of another kernel, for inputs of these types: its own."""
        return None

    def check_inputs(self, inputs: Sequence[Value], types: Sequence[TensorType]) -> None:
        """Reject inputs of these types by what else is known of them, as the numbers of a constant."""

    def nested(self) -> tuple[Nested, ...]:
        """The graphs that run inside of the op: bodies of loops, branches."""
        return ()

    def with_nested(self, graphs: Sequence[Graph]) -> Op:
        """The op with others in place of the graphs that `nested` gives."""
        return self

    @property
    def called(self) -> str:
        """The op's name in reports: custom ops have names that users gave."""
        return self.name

    def matched(self, got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Results with what the op leaves free, as signs of vectors, chosen as in others they are compared with."""
        return got

    def spread_shapes(self, *inputs: Any) -> Sequence[tuple[Sequence[Dim], Sequence[Dim]]]:
        """Shapes of operands that are broadcast, with those they are broadcast to; element-wise ops need not say."""
        return ()

    @classmethod
    def samples(cls) -> list[Any]:
        return []

    # ------------------------------------------------------------------------------------------------- for op authors

    def require(
        self,
        ok: bool,
        message: str,
        *,
        code: str | None = None,
        error: type[StrataError] = ShapeError,
        fix: str | None = None,
    ) -> None:
        """Reject the inputs of `infer` unless `ok`; the message starts with the op's name."""
        if not ok:
            raise error(f"{self.name}: {message}", code=code, fix=fix)

    def require_dtype(self, ok: bool, message: str, *, code: str | None = None) -> None:
        self.require(ok, message, code=code, error=DTypeError)

    def missing(self, rule: str) -> NoReturn:
        has = [r for r in ("infer", "numpy", "jvp", "vjp", "vmap", "lower") if self.has_rule(r)]
        raise MissingRuleError(f"{self.name} has no {rule} rule; it has {', '.join(has)}", code="R201")

    @classmethod
    def has_rule(cls, rule: str) -> bool:
        """Whether a rule is written, or follows from `decompose`."""
        if getattr(cls, rule) is not getattr(Op, rule):
            return True
        return cls.decompose is not Op.decompose and rule in ("numpy", "jvp", "vjp", "vmap", "lower")

    @property
    def is_composition(self) -> bool:
        return type(self).decompose is not Op.decompose

    def _need_decomposition(self, rule: str) -> None:
        if not self.is_composition:
            self.missing(rule)

    def _unwrap(self, outs: Sequence[Any]) -> Any:
        return tuple(outs) if self.multi_output else outs[0]

    # -------------------------------------------------------------------------------------------------------- machinery

    def __call__(self, *inputs: Value) -> Any:
        """Apply to values: one value, or a tuple of several outputs. Errors of `infer` carry the user's line."""
        node = make_node(self, inputs)
        return node.outputs if self.multi_output else Value(node, 0)

    def infer_types(self, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
        low, high = arity(type(self))
        if not low <= len(types) <= high:
            wanted = str(low) if low == high else f"{low} or more" if high == UNLIMITED else f"{low} to {high}"
            wanted += " input" if wanted == "1" else " inputs"
            raise VerifyError(f"{self.name}: takes {wanted}, got {len(types)}", code="V110")
        return as_tuple(self.infer(*types))

    def static_fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def bind(self, binding: Mapping[str, Dim]) -> Op:
        """The op with symbols in its fields replaced."""
        changes = {name: _bind_field(value, binding) for name, value in self.static_fields().items()}
        changes = {name: v for name, v in changes.items() if v is not getattr(self, name)}
        return replace(self, **changes) if changes else self


def _own_fields(cls: type) -> list[str]:
    """Names that a class itself declares as fields."""
    declared = inspect.get_annotations(cls)
    return [name for name, kind in declared.items() if not str(kind).startswith(("ClassVar", "typing.ClassVar"))]


def _alike(self: Op, other: object) -> bool:
    """Equality of ops with numbers among their fields: 0.0 and -0.0 are equal, and still make different ops."""
    if self is other:
        return True
    if type(other) is not type(self):
        return NotImplemented
    mine, theirs = self.__dict__, other.__dict__
    return mine == theirs and all(_same(v, theirs[name]) for name, v in mine.items() if type(v) in (float, tuple))


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) and (not isinstance(a, float) or bool(a) or str(a) == str(float(b)))


def _refuse(self: Op, name: str, value: object = None) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


Op.__setattr__ = Op.__delattr__ = _refuse  # type: ignore[assignment, method-assign] # also where there is no field


class UnaryOp(Op):
    """An op with one input: `dx` and the result of `vjp` are plain values rather than tuples."""


UNLIMITED = 1 << 30
_ARITY: dict[type[Op], tuple[int, int]] = {}


def arity(op_class: type[Op]) -> tuple[int, int]:
    """Least and greatest number of inputs, from the signature of `infer`, or of `numpy` where that takes any number."""
    if op_class not in _ARITY:
        low, high = _positions(op_class.infer)
        least, most = _positions(op_class.numpy) if high == UNLIMITED else (low, high)
        _ARITY[op_class] = (max(low, least), most)
    return _ARITY[op_class]


def _positions(rule: Callable[..., Any]) -> tuple[int, int]:
    low = high = 0
    for parameter in list(inspect.signature(rule).parameters.values())[1:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            return low, UNLIMITED
        high += 1
        low += parameter.default is parameter.empty
    return low, high


def _bind_field(value: Any, binding: Mapping[str, Dim]) -> Any:
    if isinstance(value, SymExpr):
        return substitute(value, binding)
    if isinstance(value, tuple):
        bound = tuple(_bind_field(v, binding) for v in value)
        return bound if any(a is not b for a, b in zip(bound, value, strict=True)) else value
    if isinstance(value, TensorType):
        return value.bind(binding) if value.symbols() else value
    if hasattr(value, "bind") and hasattr(value, "symbols"):  # a nested graph
        known = {name: binding[name] for name in value.symbols() if name in binding}
        return value.bind(known) if known else value
    return value


def field_symbols(value: Any) -> dict[str, Symbol]:
    if isinstance(value, SymExpr):
        return symbols(value)
    if isinstance(value, tuple):
        found: dict[str, Symbol] = {}
        for v in value:
            found |= field_symbols(v)
        return found
    return value.symbols() if hasattr(value, "symbols") else {}  # a type, or a nested graph


def as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def op(name: str, registry: Registry = REGISTRY) -> Callable[[OpT], OpT]:
    """Register an op class under its text name."""

    def wrap(cls: OpT) -> OpT:
        cls.name = name
        registry.add(name, cls)
        return cls

    return wrap


# ---------------------------------------------------------------------------------------------------------------- nodes


@dataclass(frozen=True, eq=False, slots=True)
class Home:
    """The graph that declared an input: one object for each graph that a user writes."""

    name: str


class Node:
    """An op applied to values. Made by `make_node` only; two equal nodes are one object."""

    __slots__ = ("__weakref__", "home", "inputs", "op", "origin", "serial", "types")

    home: Home | None  # of the graph whose inputs it depends on, where it depends on any

    def __init__(self, op: Op, inputs: tuple[Value, ...], types: tuple[TensorType, ...], origin: Origin) -> None:
        self.op = op
        self.inputs = inputs
        self.types = types
        self.origin = origin
        self.home = None
        self.serial = next(_serials)

    @property
    def outputs(self) -> tuple[Value, ...]:
        if len(self.types) == 1:
            return (Value(self, 0),)
        return tuple(Value(self, i) for i in range(len(self.types)))

    def __repr__(self) -> str:
        return f"<{self.op.name} : {', '.join(map(str, self.types))}>"


_INTERNED: WeakValueDictionary[Any, Node] = WeakValueDictionary()
_first = new_rlock()  # of several threads that make the same node, one is first
_serials = itertools.count()


def next_serial() -> int:
    """A number above that of every node made so far: nodes made from here on are newer."""
    return next(_serials)


def make_node(op: Op, inputs: Sequence[Value]) -> Node:
    """The one node for an op and its inputs. Types are inferred when it is first made."""
    for x in inputs:
        if not isinstance(x, Value):
            raise TraceError(f"{op.name}: expected a graph value, got {type(x).__name__}", code="T110", place=here())
    key = (op, *[(id(x.node), x.index) for x in inputs])
    node = _INTERNED.get(key)
    if node is not None:
        return node
    try:
        types = op.infer_types([x.type for x in inputs])
        if op.looks_at_inputs:
            op.check_inputs(inputs, [x.type for x in inputs])
    except StrataError as error:
        if error.place is None:
            error.place = current_origin().place
        if not error.operands:
            error.operands = tuple(describe_operand(x) for x in inputs)
        error.applied = op, tuple(x.type for x in inputs)
        raise
    node = Node(op, tuple(inputs), types, current_origin())
    for x in inputs:
        home = x.node.home
        if home is not None and home is not node.home:
            if node.home is not None:
                _refuse_mix(op, inputs)
            node.home = home
    with _first:
        return _INTERNED.setdefault(key, node)


def _refuse_mix(op: Op, inputs: Sequence[Value]) -> NoReturn:
    """Values of two graphs never meet in one: `inputs` have them."""
    first = next(x for x in inputs if x.node.home is not None)
    second = next(x for x in inputs if x.node.home not in (None, first.node.home))
    assert first.node.home is not None
    assert second.node.home is not None
    raise TraceError(
        f"{op.name}: one operand is a value of graph {first.node.home.name!r}, another of graph "
        f"{second.node.home.name!r}",
        code="T115", place=current_origin().place, operands=tuple(describe_operand(x) for x in inputs),
        fix="declare what it needs as an input of the same graph, or put one graph into the other with graph.call(...)",
    )  # fmt: skip


def describe_operand(x: Value) -> str:
    """`x : f32[32, 128]   made at train.py:38 by reshape`"""
    op = x.node.op
    if isinstance(op, Leaf):
        return f"{op.label} : {x.type}   {op.name}"
    place = x.node.origin.place
    return f"{op.name} : {x.type}" + (f"   made at {place.short}" if place else "")


class Value(Deferred):
    """One output of a node. Takes operators, and every op as a method."""

    __slots__ = ("index", "node")

    def __init__(self, node: Node, index: int = 0) -> None:
        self.node = node
        self.index = index

    @property
    def type(self) -> TensorType:
        return self.node.types[self.index]

    def __eq__(self, other: object) -> Any:
        """As all that is deferred; on one level, since look-ups of values are most of the work of passes."""
        if is_users[(frame := sys._getframe(1)).f_code.co_filename] and is_comparison(frame):
            return METHODS["equal"](self, other) if is_operand(other) else NotImplemented
        return isinstance(other, Value) and self.node is other.node and self.index == other.index

    def __hash__(self) -> int:
        return id(self.node) + self.index

    def __repr__(self) -> str:
        return f"Value({self.node.op.name} : {self.type})"

    def same_as(self, other: object) -> bool:
        """Whether it is the same expression."""
        return isinstance(other, Value) and self.node is other.node and self.index == other.index

    def _call(self, function: str, *args: Any) -> Any:
        return METHODS[function](*args)

    def _unknown(self, what: str, fix: str) -> NoReturn:
        raise TraceError(
            f"a {self.type} value of a graph has no {what} while the graph is built", code="T111", place=here(), fix=fix
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in METHODS:
            raise AttributeError(f"a graph value has no method {name!r}{near(name, METHODS)}")
        method = METHODS[name]
        return lambda *args, **kwargs: method(self, *args, **kwargs)


class Leaf(Op):
    """An op without inputs whose value comes from outside the graph."""

    differentiable = True

    @property
    def label(self) -> str:
        return str(getattr(self, "key", self.name))

    def numpy(self, *arrays: np.ndarray) -> np.ndarray:
        raise UnknownNameError(f"{self.name} {self.label!r} has no value", code="N111")

    def jvp(self, *inputs: Value, out: Any, dx: Any) -> Any:
        return None

    def vjp(self, *inputs: Value, out: Any, ct: Any) -> Any:
        return ()

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Any:
        raise TraceError(f"{self.name} {self.label!r} reached a vmap rule: only batched inputs may", code="T112")
