"""The tensor graph: ops as frozen classes, interned nodes, values and graphs.

A node is an op applied to values. Nodes are interned, so that equal expressions are one object and common
subexpressions never exist. Where a node came from (the user's line, the block, the pass) is kept beside its identity.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, dataclass_transform
from weakref import WeakValueDictionary

import numpy as np

from strata.core import Dim, DType, Place, SymExpr, Symbol, TensorType, as_dtype, check_shape, here, located, substitute, symbols
from strata.errors import (
    DTypeError,
    MissingRuleError,
    OptionError,
    ShapeError,
    StrataError,
    TraceError,
    UnknownNameError,
    VerifyError,
)

if TYPE_CHECKING:
    from strata.kernel import Expr, KernelBuilder, View

Values = "Value | tuple[Value, ...]"


# --------------------------------------------------------------------------------------------------------------- origin


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node came from: the user's line, the HIR block, the pass that made it."""

    place: Place | None = None
    block: str | None = None
    made_by: str | None = None


_origin: ContextVar[Origin | None] = ContextVar("strata_origin", default=None)


@contextmanager
def origin(place: Place | None = None, block: str | None = None, made_by: str | None = None) -> Iterator[None]:
    """Nodes made inside take what is given here; what is not given comes from the enclosing context."""
    outer = _origin.get() or Origin()
    token = _origin.set(Origin(place or outer.place, block or outer.block, made_by or outer.made_by))
    try:
        yield
    finally:
        _origin.reset(token)


@contextmanager
def origin_of(node: Node, made_by: str | None = None) -> Iterator[None]:
    """Nodes made inside stand in for `node` and inherit its origin."""
    with origin(node.origin.place, node.origin.block, made_by or node.origin.made_by):
        yield


def _current_origin() -> Origin:
    known = _origin.get()
    if known is None:
        return Origin(place=here())
    return known if known.place is not None else replace(known, place=here())


# ------------------------------------------------------------------------------------------------------------------- op

OpT = TypeVar("OpT", bound="type[Op]")
FnT = TypeVar("FnT", bound=Callable[..., Any])


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True, repr=False)
class Op:
    """One operation. Fields are its static parameters; methods are its rules.

    `infer` and `numpy` are required. An op that is a composition of others writes `decompose` once and gets `numpy`, `jvp`,
    `vjp`, `vmap` and `lower` from it. Rules see one canonical form: axes are non-negative, dtypes are promoted.

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
    dtypes: ClassVar[str | tuple[DType, ...]] = "float"  # what the first input may be; see testing.check

    def __init_subclass__(cls) -> None:
        """Every subclass is a frozen dataclass of its static parameters, so that families can share fields."""
        dataclass(frozen=True, repr=False)(cls)

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
        """For an op that changes part of its first input: store the changed elements into `out`, which holds that input.

        `inputs` are the others. Such an op is a step of its own, and needs no copy where the first input is not used again.
        """
        self.missing("lower_into")

    @classmethod
    def samples(cls) -> list[Any]:
        return []

    # ------------------------------------------------------------------------------------------------- for op authors

    def require(
        self, ok: bool, message: str, *, code: str | None = None, error: type[StrataError] = ShapeError, fix: str | None = None
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

    # --------------------------------------------------------------------------------------------------------- machinery

    def __call__(self, *inputs: Value) -> Any:
        """Apply to values: one value, or a tuple from an op with several outputs. Errors of `infer` carry the user's line."""
        node = make_node(self, inputs)
        return node.outputs if self.multi_output else Value(node, 0)

    def infer_types(self, types: Sequence[TensorType]) -> tuple[TensorType, ...]:
        low, high = arity(type(self))
        if not low <= len(types) <= high:
            wanted = str(low) if low == high else f"{low} or more" if high == UNLIMITED else f"{low} to {high}"
            raise VerifyError(f"{self.name}: takes {wanted} inputs, got {len(types)}", code="V110")
        return as_tuple(self.infer(*types))

    def static_fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]

    def bind(self, binding: Mapping[str, Dim]) -> Op:
        """The op with symbols in its fields replaced."""
        changes = {name: _bind_field(value, binding) for name, value in self.static_fields().items()}
        changes = {name: v for name, v in changes.items() if v is not getattr(self, name)}
        return replace(self, **changes) if changes else self  # type: ignore[type-var]


class UnaryOp(Op):
    """An op with one input: `dx` and the result of `vjp` are plain values rather than tuples."""


UNLIMITED = 1 << 30
_ARITY: dict[type[Op], tuple[int, int]] = {}


def arity(op_class: type[Op]) -> tuple[int, int]:
    """Least and greatest number of inputs, from the signature of `infer`, or of `numpy` where that one takes any number."""
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
    if isinstance(value, Graph):
        known = {name: binding[name] for name in value.symbols() if name in binding}
        return value.bind(known) if known else value
    return value


def _field_symbols(value: Any) -> dict[str, Symbol]:
    if isinstance(value, SymExpr):
        return symbols(value)
    if isinstance(value, tuple):
        found: dict[str, Symbol] = {}
        for v in value:
            found |= _field_symbols(v)
        return found
    return value.symbols() if isinstance(value, (TensorType, Graph)) else {}


def as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


class Registry:
    """Op classes by name. One is shared by the whole package; a test or a plug-in may hold its own."""

    def __init__(self) -> None:
        self._ops: dict[str, type[Op]] = {}

    def add(self, name: str, cls: type[Op]) -> None:
        if name in self._ops and self._ops[name].__qualname__ != cls.__qualname__:
            raise OptionError(f"op {name!r} is registered twice: {self._ops[name].__qualname__} and {cls.__qualname__}")
        self._ops[name] = cls

    def __getitem__(self, name: str) -> type[Op]:
        if name not in self._ops:
            raise UnknownNameError(f"no op is named {name!r}{near(name, self._ops)}", code="N110")
        return self._ops[name]

    def __contains__(self, name: object) -> bool:
        return name in self._ops

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._ops))

    def __len__(self) -> int:
        return len(self._ops)

    def classes(self) -> list[type[Op]]:
        return [self._ops[name] for name in self]


REGISTRY = Registry()


def near(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'exp'?` when a known name is close."""
    import difflib

    found = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def op(name: str, registry: Registry = REGISTRY) -> Callable[[OpT], OpT]:
    """Register an op class under its text name."""

    def wrap(cls: OpT) -> OpT:
        cls.name = name
        registry.add(name, cls)
        return cls

    return wrap


# ---------------------------------------------------------------------------------------------------------------- nodes


class Node:
    """An op applied to values. Made by `make_node` only; two equal nodes are one object."""

    __slots__ = ("__weakref__", "inputs", "op", "origin", "serial", "types")

    def __init__(self, op: Op, inputs: tuple[Value, ...], types: tuple[TensorType, ...], origin: Origin) -> None:
        self.op = op
        self.inputs = inputs
        self.types = types
        self.origin = origin
        self.serial = next(_serials)

    @property
    def outputs(self) -> tuple[Value, ...]:
        return tuple(Value(self, i) for i in range(len(self.types)))

    def __repr__(self) -> str:
        return f"<{self.op.name} : {', '.join(map(str, self.types))}>"


_INTERNED: WeakValueDictionary[Any, Node] = WeakValueDictionary()
_serials = itertools.count()


def next_serial() -> int:
    """A number above that of every node made so far: nodes made from here on are newer."""
    return next(_serials)


def make_node(op: Op, inputs: Sequence[Value]) -> Node:
    """The one node for an op and its inputs. Types are inferred when it is first made."""
    for x in inputs:
        if not isinstance(x, Value):
            raise TraceError(f"{op.name}: expected a graph value, got {type(x).__name__}", code="T110", place=here())
    key = (op, *((id(x.node), x.index) for x in inputs))
    node = _INTERNED.get(key)
    if node is not None:
        return node
    try:
        types = op.infer_types([x.type for x in inputs])
    except StrataError as error:
        if error.place is None:
            error.place = _current_origin().place
        if not error.operands:
            error.operands = tuple(describe_operand(x) for x in inputs)
        raise
    node = Node(op, tuple(inputs), types, _current_origin())
    return _INTERNED.setdefault(key, node)


def describe_operand(x: Value) -> str:
    """`x : f32[32, 128]   made at train.py:38 by reshape`"""
    op = x.node.op
    if isinstance(op, Leaf):
        return f"{op.label} : {x.type}   {op.name}"
    place = x.node.origin.place
    return f"{op.name} : {x.type}" + (f"   made at {place.short}" if place else "")


METHODS: dict[str, Callable[..., Any]] = {}


class Value:
    """One output of a node. Takes operators, and every op as a method."""

    __slots__ = ("index", "node")
    __array_priority__: ClassVar[int] = 1000
    __array_ufunc__ = None  # NumPy defers to our reflected operators

    def __init__(self, node: Node, index: int = 0) -> None:
        self.node = node
        self.index = index

    @property
    def type(self) -> TensorType:
        return self.node.types[self.index]

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return len(self.type.shape)

    def __eq__(self, other: object) -> bool:
        """Identity of the expression, not an element-wise comparison: use `.equal(y)` for that."""
        return isinstance(other, Value) and self.node is other.node and self.index == other.index

    def __hash__(self) -> int:
        return hash((id(self.node), self.index))

    def __repr__(self) -> str:
        return f"Value({self.node.op.name} : {self.type})"

    def __bool__(self) -> bool:
        raise TraceError(
            f"a {self.type} value of a graph has no truth value while the graph is built",
            code="T111", place=here(), fix="where(condition, a, b), or cond(condition, f, g)",
        )  # fmt: skip

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("a rank-0 value has no length", code="S105", place=here())
        return self.shape[0].__index__()

    def __iter__(self) -> Iterator[Value]:
        return (self[i] for i in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in METHODS:
            raise AttributeError(f"a graph value has no method {name!r}{near(name, METHODS)}")
        method = METHODS[name]
        return lambda *args, **kwargs: method(self, *args, **kwargs)

    @property
    def T(self) -> Value:  # noqa: N802 - NumPy's name
        return METHODS["transpose"](self)

    def __getitem__(self, index: Any) -> Value:
        return METHODS["getitem"](self, index)

    if TYPE_CHECKING:  # set below, from a table

        def __add__(self, other: Any) -> Value: ...
        def __radd__(self, other: Any) -> Value: ...
        def __sub__(self, other: Any) -> Value: ...
        def __rsub__(self, other: Any) -> Value: ...
        def __mul__(self, other: Any) -> Value: ...
        def __rmul__(self, other: Any) -> Value: ...
        def __truediv__(self, other: Any) -> Value: ...
        def __rtruediv__(self, other: Any) -> Value: ...
        def __floordiv__(self, other: Any) -> Value: ...
        def __rfloordiv__(self, other: Any) -> Value: ...
        def __mod__(self, other: Any) -> Value: ...
        def __rmod__(self, other: Any) -> Value: ...
        def __pow__(self, other: Any) -> Value: ...
        def __rpow__(self, other: Any) -> Value: ...
        def __matmul__(self, other: Any) -> Value: ...
        def __rmatmul__(self, other: Any) -> Value: ...
        def __and__(self, other: Any) -> Value: ...
        def __rand__(self, other: Any) -> Value: ...
        def __or__(self, other: Any) -> Value: ...
        def __ror__(self, other: Any) -> Value: ...
        def __xor__(self, other: Any) -> Value: ...
        def __rxor__(self, other: Any) -> Value: ...
        def __lshift__(self, other: Any) -> Value: ...
        def __rlshift__(self, other: Any) -> Value: ...
        def __rshift__(self, other: Any) -> Value: ...
        def __rrshift__(self, other: Any) -> Value: ...
        def __lt__(self, other: Any) -> Value: ...
        def __le__(self, other: Any) -> Value: ...
        def __gt__(self, other: Any) -> Value: ...
        def __ge__(self, other: Any) -> Value: ...
        def __neg__(self) -> Value: ...
        def __abs__(self) -> Value: ...
        def __invert__(self) -> Value: ...


def _operator(dunder: str, method: str) -> None:
    def forward(self: Value, other: Any) -> Value:
        return METHODS[method](self, other)

    def reflected(self: Value, other: Any) -> Value:
        return METHODS[method](other, self)

    setattr(Value, f"__{dunder}__", forward)
    setattr(Value, f"__r{dunder}__", reflected)


for _dunder, _method in {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "power", "matmul": "matmul", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}.items():  # fmt: skip
    _operator(_dunder, _method)


def _unary_operator(dunder: str, method: str) -> None:
    setattr(Value, f"__{dunder}__", lambda self, *other: METHODS[method](self, *other))


for _dunder, _method in {
    "neg": "negative", "abs": "abs", "invert": "bitwise_not", "lt": "less", "le": "less_equal", "gt": "greater",
    "ge": "greater_equal",
}.items():  # fmt: skip
    _unary_operator(_dunder, _method)


def function(*names: str) -> Callable[[FnT], FnT]:
    """Register a front-end function: public as `st.ops.<name>` and as a method of values.

    Its own name is always included; a trailing underscore, which keeps a builtin visible in its module, is dropped.
    """

    def wrap(fn: FnT) -> FnT:
        public = fn.__name__.rstrip("_")

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return fn(*args, **kwargs)
            except StrataError as error:
                if error.place is None:
                    error.place = here()
                error.rename(public, _is_operation)
                raise

        for name in (public, *names):
            METHODS[name] = call
        return call  # type: ignore[return-value]

    return wrap


def _is_operation(name: str) -> bool:
    return name in METHODS or name in REGISTRY


# --------------------------------------------------------------------------------------------------------------- leaves


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


class Input(Leaf):
    """A named input. `scope` tells the inputs of different graphs apart."""

    key: str
    type: TensorType
    scope: int
    name: ClassVar[str] = "input"

    def infer(self) -> TensorType:
        return self.type


class Param(Leaf):
    """A named parameter: bound once, kept across runs."""

    key: str
    type: TensorType
    scope: int
    name: ClassVar[str] = "param"

    def infer(self) -> TensorType:
        return self.type


class Literal:
    """An immutable array that can be a field of an op: equal when dtype, shape and bytes are."""

    __slots__ = ("_hash", "array")

    def __init__(self, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array).reshape(array.shape)
        if array.flags.writeable:
            array = array.copy()
            array.flags.writeable = False
        self.array = array
        self._hash = hash((array.dtype.str, array.shape, array.tobytes()))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Literal)
            and self._hash == other._hash
            and self.array.dtype == other.array.dtype
            and self.array.shape == other.array.shape
            and self.array.tobytes() == other.array.tobytes()
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Literal({self.array.dtype}, {self.array.shape})"


@op("constant")
class Constant(Op):
    """A value known when the graph is built."""

    data: Literal

    differentiable = False

    def infer(self) -> TensorType:
        return TensorType(as_dtype(self.data.array.dtype), self.data.array.shape)

    def numpy(self, *arrays: np.ndarray) -> np.ndarray:
        return self.data.array

    def vmap(self, *inputs: Value, batched: tuple[bool, ...], size: Dim) -> Any:
        return METHODS["broadcast_to"](self(), (size, *self.infer().shape))


def constant(data: Any, dtype: Any = None) -> Value:
    """A constant value from anything NumPy can read. Python floats become f32 and ints i64 unless a dtype is given."""
    if dtype is None and not isinstance(data, (np.ndarray, np.generic)):
        probe = np.asarray(data)
        dtype = {"f": "f32", "c": "c64", "i": "i64", "b": "bool"}.get(probe.dtype.kind)
        array = probe
    else:
        array = np.asarray(data)
    if dtype is not None:
        array = array.astype(as_dtype(dtype).np)
    as_dtype(array.dtype)
    return Constant(Literal(array))()


_scopes = itertools.count(1)


def fresh_scope() -> int:
    return next(_scopes)


def placeholder(name: str, type: TensorType, scope: int | None = None) -> Value:
    """An input that belongs to no graph yet; rules and traces build on these."""
    return Input(name, type, fresh_scope() if scope is None else scope)()


# --------------------------------------------------------------------------------------------------------------- graphs


class Graph:
    """Named inputs and parameters, and results computed from them. Built once, then never changed.

    Two graphs are equal when their text is, whatever names their scopes have.
    """

    def __init__(self, name: str = "main") -> None:
        self.name = name
        self.scope = fresh_scope()
        self.inputs: tuple[Value, ...] = ()
        self.params: tuple[Value, ...] = ()
        self.results: tuple[Value, ...] = ()
        self._text: str | None = None
        self._symbols: dict[str, Symbol] | None = None

    def input(self, name: str, shape: Sequence[Dim] | TensorType, dtype: Any = "f32") -> Value:
        """Declare an input."""
        value = self._declare(Input, name, shape, dtype)
        self.inputs += (value,)
        return value

    def param(self, name: str, shape: Sequence[Dim] | TensorType, dtype: Any = "f32") -> Value:
        """Declare a parameter: bound once with `set_param`, kept across runs."""
        value = self._declare(Param, name, shape, dtype)
        self.params += (value,)
        return value

    def constant(self, data: Any, dtype: Any = None) -> Value:
        return constant(data, dtype)

    def _declare(self, kind: type[Input] | type[Param], name: str, shape: Sequence[Dim] | TensorType, dtype: Any) -> Value:
        if self.results:
            raise TraceError(f"graph {self.name!r} has its outputs: no more inputs can be declared", code="T113", place=here())
        if not isinstance(name, str) or not name:
            raise OptionError(f"graph {self.name!r}: {name!r} is not a name for an input", code="O112", place=here())
        if any(name == leaf_name(x) for x in (*self.inputs, *self.params)):
            raise OptionError(f"graph {self.name!r} has an input or parameter {name!r} already", code="O113", place=here())
        tensor = shape if isinstance(shape, TensorType) else TensorType(as_dtype(dtype), check_shape(shape))
        return kind(name, tensor, self.scope)()

    def outputs(self, *values: Value) -> Graph:
        """Set the results; the graph is verified and complete from here on."""
        from strata.mir.verify import verify

        flat = [v for x in values for v in (x if isinstance(x, (tuple, list)) else (x,))]
        if not flat:
            raise OptionError(f"graph {self.name!r} needs at least one output", code="O114", place=here())
        for value in flat:
            if not isinstance(value, Value):
                raise TraceError(f"graph {self.name!r}: {type(value).__name__} is not a value of it", code="T114", place=here())
        self.results = tuple(flat)
        self._text = self._symbols = None
        verify(self)
        return self

    def returning(self, *values: Value) -> Graph:
        """The same inputs and parameters with other results."""
        graph = Graph(self.name)
        graph.scope, graph.inputs, graph.params = self.scope, self.inputs, self.params
        return graph.outputs(*values)

    # ------------------------------------------------------------------------------------------------------------ views

    def nodes(self) -> list[Node]:
        """All nodes that the results need, leaves included, producers first; the order depends on structure only."""
        return toposort(self.results)

    def symbols(self) -> dict[str, Symbol]:
        """The symbolic sizes of the inputs and parameters, and those that only nodes and nested graphs mention, by name."""
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
                found |= _field_symbols(field)
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
            f"graph {self.name!r} has no input or parameter {name!r}{near(name, known)}; it has {', '.join(known) or 'none'}",
            code="N112", place=here(),
        )  # fmt: skip

    @located
    def bind(self, binding: Mapping[str, Dim]) -> Graph:
        """The graph with symbols replaced by sizes; every shape is inferred again."""
        unknown = set(binding) - set(self.symbols())
        if unknown:
            name = sorted(unknown)[0]
            raise UnknownNameError(f"graph {self.name!r} has no symbolic size {name!r}{near(name, self.symbols())}", code="N113")
        result = Graph(self.name)
        known: dict[Value, Value] = {}
        for x in self.inputs:
            known[x] = result.input(leaf_name(x), x.type.bind(binding))
        for x in self.params:
            known[x] = result.param(leaf_name(x), x.type.bind(binding))
        return result.outputs(*substitute_values(self.results, known, lambda o: o.bind(binding)))

    def call(self, *args: Value) -> tuple[Value, ...]:
        """The results with inputs, then parameters, replaced by values: the graph inlined."""
        leaves = (*self.inputs, *self.params)
        if len(args) != len(leaves):
            raise OptionError(f"graph {self.name!r} takes {len(leaves)} values, got {len(args)}", code="O115", place=here())
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

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Graph) and str(self) == str(other))

    def __hash__(self) -> int:
        return hash(str(self))


def leaf_name(x: Value) -> str:
    """The name of an input or parameter."""
    leaf = x.node.op
    assert isinstance(leaf, (Input, Param))
    return leaf.key


def toposort(roots: Iterable[Value], stop: Iterable[Value] = ()) -> list[Node]:
    """Nodes below `roots`, producers first, without recursion. Nothing below a value in `stop` is entered."""
    fence = set(stop)
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
