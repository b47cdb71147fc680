"""Blocks and modules: the program as its author means it, before lowering.

A module is a list of nodes in the order in which they were built. A node applies a block (linear, swiglu_ffn, …), or
one MIR op verbatim, to values of the module. Leaves have names; the others are h0, h1, … and carry a label that
lowering keeps.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NoReturn, TypeVar, dataclass_transform

from strata.core import Dim, Place, TensorType, as_dtype, check_shape, folded, here
from strata.errors import LowerError, OptionError, StrataError, UnknownNameError
from strata.kinds import counted
from strata.mir import METHODS, Deferred, Input, Op, Param, Value, as_tuple, constant, near, placeholder, toposort

POLICIES = ("direct", "fusable")

BLOCKS: dict[str, type[Block]] = {}
BlockT = TypeVar("BlockT", bound="type[Block]")


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True, repr=False)
class Block:
    """A block: fields are its static parameters, and `lower` writes it in MIR.

    The inputs of a block are the positional parameters of `lower`. With `fusable` it emits primitives, which passes can
    match and derivatives go through; without, the fused ops that it stands for.
    """

    name: ClassVar[str] = "?"

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, repr=False)(cls)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.static_fields().items())})"

    def lower(self, *inputs: Any, **policy: Any) -> Any:
        """The block's results as MIR values; `fusable` is the policy."""
        raise NotImplementedError

    def infer(self, inputs: Sequence[HirValue]) -> tuple[TensorType, ...]:
        """The types of the results: those of the lowered block."""
        names = [placeholder(x.text, x.type) for x in inputs]
        return tuple(x.type for x in as_tuple(self.lower(*names, fusable=False)))

    def static_fields(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def label(self) -> str:
        return self.name

    def check_count(self, count: int) -> None:
        low, high = self.arity()
        if not low <= count <= high:
            wanted = counted(low, "input") if low == high else f"{low} to {high} inputs"
            raise LowerError(f"{self.name}: takes {wanted}, got {count}", code="L200", place=here())

    def arity(self) -> tuple[int, int]:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        taken = [p for p in inspect.signature(self.lower).parameters.values() if p.kind in kinds]
        return sum(p.default is p.empty for p in taken), len(taken)


def block(name: str) -> Callable[[BlockT], BlockT]:
    """Register a block class under its text name."""

    def wrap(cls: BlockT) -> BlockT:
        cls.name = name
        BLOCKS[name] = cls
        return cls

    return wrap


class HirLeaf(Block):
    """A named input or parameter of the module."""

    key: str
    type: TensorType

    def infer(self, inputs: Sequence[HirValue]) -> tuple[TensorType, ...]:
        return (self.type,)

    def arity(self) -> tuple[int, int]:
        return 0, 0


class InputLeaf(HirLeaf):
    name: ClassVar[str] = "input"


class ParamLeaf(HirLeaf):
    name: ClassVar[str] = "param"


class Verbatim(Block):
    """One MIR op, as it is."""

    op: Op

    name: ClassVar[str] = "mir"

    def infer(self, inputs: Sequence[HirValue]) -> tuple[TensorType, ...]:
        names = [placeholder(x.text, x.type) for x in inputs]
        return tuple(x.type for x in as_tuple(self.op(*names)))

    def lower(self, *inputs: Value, fusable: bool) -> Any:
        return self.op(*inputs)

    def check_count(self, count: int) -> None:
        """The op's own rule checks its inputs."""

    @property
    def label(self) -> str:
        return self.op.name


@dataclass(frozen=True, slots=True, eq=False)
class HirNode:
    """A block applied to values of its module."""

    id: str
    block: Block
    inputs: tuple[HirValue, ...]
    types: tuple[TensorType, ...]
    label: str
    place: Place | None

    @property
    def is_leaf(self) -> bool:
        return isinstance(self.block, HirLeaf)


class HirValue(Deferred):
    """One result of a node. Takes operators, and every op as a method; each makes MIR nodes in its module."""

    __slots__ = ("module", "node", "slot")

    def __init__(self, module: BlockBuilder, node: HirNode, slot: int = 0) -> None:
        self.module = module
        self.node = node
        self.slot = slot

    @property
    def type(self) -> TensorType:
        return self.node.types[self.slot]

    @property
    def text(self) -> str:
        """The name of a leaf, h3, or h3.1 for a result of several."""
        return self.node.id if len(self.node.types) == 1 else f"{self.node.id}.{self.slot}"

    @property
    def label(self) -> str:
        return self.node.label if len(self.node.types) == 1 else f"{self.node.label}[{self.slot}]"

    def same_as(self, other: object) -> bool:
        """Whether it is the same result of the same node."""
        return isinstance(other, HirValue) and self.node is other.node and self.slot == other.slot

    def _call(self, function: str, *args: Any) -> Any:
        return self.module.call(function, *args)

    def _unknown(self, what: str, fix: str) -> NoReturn:
        raise LowerError(f"{self.text} : {self.type} of a module has no {what}", code="L206", place=here(), fix=fix)

    def __hash__(self) -> int:
        return hash((id(self.node), self.slot))

    def __repr__(self) -> str:
        return f"HirValue({self.text} : {self.type})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in METHODS:
            raise AttributeError(f"a module's value has no method {name!r}{near(name, METHODS)}")
        return lambda *args, **kwargs: self.module.call(name, self, *args, **kwargs)


class BlockBuilder:
    """Nodes in the order they were made, the outputs, and how blocks are lowered. `HirModule` adds the blocks to it."""

    def __init__(self, name: str = "main", fusion: str = "direct") -> None:
        self.name = name
        self.fusion = check_policy(fusion)
        self.nodes: list[HirNode] = []
        self.results: tuple[HirValue, ...] = ()
        self._leaves: dict[str, HirValue] = {}
        self._adopted: dict[Value, HirValue] = {}
        self._count = 0  # of nodes that are not leaves
        self._scope: tuple[str, ...] = ()
        self._name_for_next: str | None = None

    # ---------------------------------------------------------------------------------------------------------- leaves

    def _repr_html_(self) -> str:
        return folded(f"module {self.name}: {len(self.nodes)} blocks", str(self))

    def input(self, name: str, shape: Sequence[Dim] | TensorType, dtype: Any = "f32") -> HirValue:
        """Declare an input."""
        return self._declare(InputLeaf, name, shape, dtype)

    def param(self, name: str, shape: Sequence[Dim] | TensorType, dtype: Any = "f32") -> HirValue:
        """Declare a parameter."""
        return self._declare(ParamLeaf, name, shape, dtype)

    def constant(self, data: Any, dtype: Any = None) -> HirValue:
        """A value that is known now."""
        made = constant(data, dtype).node.op
        return self.apply(Verbatim(made))

    def _declare(self, kind: type[HirLeaf], name: str, shape: Sequence[Dim] | TensorType, dtype: Any) -> HirValue:
        if not isinstance(name, str) or not name:
            raise OptionError(f"module {self.name!r}: {name!r} is not a name for an input", code="O112", place=here())
        if name in self._leaves:
            message = f"module {self.name!r} has an input or parameter {name!r} already"
            raise OptionError(message, code="O113", place=here())
        tensor = shape if isinstance(shape, TensorType) else TensorType(as_dtype(dtype), check_shape(shape))
        node = HirNode(name, kind(name, tensor), (), (tensor,), name, here())
        self.nodes.append(node)
        self._leaves[name] = HirValue(self, node)
        return self._leaves[name]

    # ----------------------------------------------------------------------------------------------------------- nodes

    def apply(self, made: Block, *inputs: Any, label: str | None = None) -> Any:
        """Apply a block. The result is one value, or a tuple when the block has several."""
        values = tuple(self.value(x) for x in inputs)
        made.check_count(len(values))
        try:
            types = made.infer(values)
        except StrataError as error:
            if error.place is None:
                error.place = here()
            if not isinstance(made, Verbatim) and not error.summary.startswith(f"{made.name}:"):
                error.summary = f"{made.name}: {error.summary}"
            raise
        node = HirNode(f"h{self._count}", made, values, types, self._label(made, label), here())
        self.nodes.append(node)
        self._count += 1
        results = tuple(HirValue(self, node, i) for i in range(len(types)))
        return results[0] if len(results) == 1 else results

    def _label(self, made: Block, given: str | None) -> str:
        return ".".join([*self._scope, given or self._name_for_next or made.label])

    def value(self, x: Any) -> HirValue:
        """Anything as a value of this module: its own, graph values (taken over with their leaves), numbers, arrays."""
        if isinstance(x, HirValue):
            if x.module is not self:
                message = f"{x.text} : {x.type} belongs to module {x.module.name!r}, not to {self.name!r}"
                raise LowerError(message, code="L203", place=here())
            return x
        if isinstance(x, Value):
            if x not in self._adopted:
                self.take_over([x], self._adopted)
            return self._adopted[x]
        return self.constant(x)

    def call(self, function: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A front-end function on values of this module: each MIR op that it makes becomes a node."""
        if isinstance(function, str) and function not in METHODS:
            raise UnknownNameError(
                f"there is no function {function!r}{near(function, METHODS)}", code="N110", place=here()
            )
        run = METHODS[function] if isinstance(function, str) else function
        table: dict[Value, HirValue] = {}

        def outer(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(outer(v) for v in x)
            if not isinstance(x, (HirValue, Value)):
                return x
            value = self.value(x)
            name = placeholder(value.text, value.type)
            table[name] = value
            return name

        made = run(*(outer(a) for a in args), **{k: outer(v) for k, v in kwargs.items()})
        flat = [x for x in as_tuple(made if not isinstance(made, list) else tuple(made)) if isinstance(x, Value)]
        self.take_over(flat, table, labels=False)

        def inner(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(inner(v) for v in x)
            return table[x] if isinstance(x, Value) else x

        return inner(made)

    def take_over(self, roots: Sequence[Value], table: dict[Value, HirValue], *, labels: bool = True) -> None:
        """MIR nodes below `roots` as nodes of this module, with the labels they have; `table` grows by them."""
        for node in toposort(roots, list(table)):
            op, inputs = node.op, [table[x] for x in node.inputs]
            if isinstance(op, (Input, Param)):
                kind = InputLeaf if isinstance(op, Input) else ParamLeaf
                table[Value(node, 0)] = self._declare(kind, op.key, op.type, None)
                continue
            results = as_tuple(self.apply(Verbatim(op), *inputs, label=node.origin.block if labels else None))
            table.update(zip(node.outputs, results, strict=True))

    def mir(self, op: Op, *inputs: Any) -> Any:
        """One MIR op, as it is."""
        return self.apply(Verbatim(op), *inputs)

    # ---------------------------------------------------------------------------------------------------------- labels

    def named(self, label: str, build: Callable[[Any], Any]) -> Any:
        """What `build(module)` makes, under its own label."""
        before, self._name_for_next = self._name_for_next, label
        try:
            return build(self)
        finally:
            self._name_for_next = before

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Labels of the nodes made inside begin with `name.`"""
        before, self._scope = self._scope, (*self._scope, name)
        try:
            yield
        finally:
            self._scope = before

    # --------------------------------------------------------------------------------------------------------- outputs

    def outputs(self, *values: Any) -> Any:
        """Set the results."""
        flat = [v for x in values for v in (x if isinstance(x, (tuple, list)) else (x,))]
        if not flat:
            raise OptionError(f"module {self.name!r} needs at least one output", code="O114", place=here())
        self.results = tuple(self.value(x) for x in flat)
        return self

    @property
    def inputs(self) -> tuple[HirValue, ...]:
        return tuple(x for x in self._leaves.values() if isinstance(x.node.block, InputLeaf))

    @property
    def params(self) -> tuple[HirValue, ...]:
        return tuple(x for x in self._leaves.values() if isinstance(x.node.block, ParamLeaf))

    def leaf(self, name: str) -> HirValue:
        """The input or parameter of that name."""
        if name not in self._leaves:
            message = f"module {self.name!r} has no input or parameter {name!r}{near(name, self._leaves)}"
            raise UnknownNameError(message, code="N112", place=here())
        return self._leaves[name]


def check_policy(policy: str) -> str:
    if policy not in POLICIES:
        raise OptionError(f"fusion is 'direct' or 'fusable', got {policy!r}", code="O219", place=here())
    return policy
