"""Shape-generic programs: sizes become symbols where the program allows it.

Every size above SMALL is replaced by a symbol, in the types of the leaves, in the fields of the ops and in constants of
one element (equal numbers, and products of sizes of one leaf). Shapes are inferred again on the symbols. The result
stands for the expression only if every inferred type, with the sizes put back, is the type that the expression has; so
whatever was replaced, binding the symbols gives this very expression. Two expressions with the same general form differ
in sizes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from strata.core import Dim, TensorType, dim_prod, sym
from strata.errors import StrataError
from strata.mir import METHODS, Constant, Graph, Node, Op, Value, make_node, origin_of
from strata.tensor.structure_key import Outline

SMALL = 8  # sizes up to this are part of the structure: axes, channels, the taps of a filter
LARGEST = 1 << 40
NEEDS_NUMBERS = (StrataError, TypeError, AssertionError)  # what making code says of a size that it has to know


@dataclass(frozen=True, slots=True)
class General:
    """The general form of an expression, and the sizes that give the expression back."""

    key: tuple[Any, ...]
    graph: Graph
    binding: dict[str, int]


def generalize(
    program: Outline, small: int = SMALL, ranges: Mapping[int, tuple[int, int]] | None = None
) -> General | None:
    """The expression with symbols for sizes above `small`, or None where an op needs to know them.

    With `ranges`, only the sizes in it become symbols, each with its bounds.
    """
    binding, table = _symbols(program, small) if ranges is None else _ranged(program, ranges)
    if not binding and (small > 1 or ranges is not None):
        return None  # with sizes of one only, the form is the expression itself
    try:
        return _rebuild(program, binding, table, small if ranges is None else 1)
    except (StrataError, TypeError):  # an op that needs the number: it cannot count, compare or hash a symbol
        return None


def _ranged(program: Outline, ranges: Mapping[int, tuple[int, int]]) -> tuple[dict[str, int], dict[int, Dim]]:
    """Symbols for the sizes that have a range, and what numbers in fields may stand for."""
    found = {d for handle in program.leaves for d in handle.type.static_shape}
    table: dict[int, Dim] = {}
    binding: dict[str, int] = {}
    for d, (low, high) in sorted(ranges.items()):
        if d > 1 and d in found:  # a size of one is broadcast, and stays what it is
            binding[f"s{len(binding)}"] = d
            table[d] = sym(f"s{len(table)}", max(low, 2), high)
    for handle in program.leaves:
        shape = handle.type.static_shape
        for i in range(len(shape)):
            for j in range(i + 2, len(shape) + 1):
                product = dim_prod([table.get(d, d) for d in shape[i:j]])
                if not isinstance(product, int):
                    table.setdefault(int(dim_prod(shape[i:j])), product)
    return binding, table


def _symbols(program: Outline, small: int) -> tuple[dict[str, int], dict[int, Dim]]:
    """A symbol for each size, in order of appearance, and what numbers in fields may stand for."""
    binding: dict[str, int] = {}
    table: dict[int, Dim] = {}
    for handle in program.leaves:
        for d in handle.type.shape:
            if isinstance(d, int) and d > small and d not in table:
                name = f"s{len(binding)}"
                table[d] = sym(name, small + 1, LARGEST)
                binding[name] = d
    for handle in program.leaves:
        shape = handle.type.static_shape
        for i in range(len(shape)):
            for j in range(i + 2, len(shape) + 1):
                part = [table.get(d, d) for d in shape[i:j]]
                table.setdefault(int(dim_prod(shape[i:j])), dim_prod(part))
    return binding, table


def _rebuild(program: Outline, binding: Mapping[str, int], table: Mapping[int, Dim], small: int) -> General | None:
    graph = Graph("tensors")
    slots: list[Any] = [None] * program.size
    parts: list[Any] = []
    scales = _scales(program.nodes)
    for i, (slot, handle) in enumerate(zip(program.leaf_slots, program.leaves, strict=True)):
        shape = tuple(table.get(d, d) if d > small else d for d in handle.type.static_shape)
        kind = TensorType(handle.type.dtype, shape)
        slots[slot] = graph.input(f"d{i}", kind)
        parts.append(kind)
    for node, (inputs, first) in zip(program.nodes, program.node_slots, strict=True):
        size = _size_of(node.op, table, small)
        if size is not None and node not in scales:
            slots[first] = METHODS["cast"](METHODS["dim_size"](size), node.types[0].dtype)
            parts.append((size, node.types[0].dtype))
            continue
        op = _general_op(node.op, table, small)
        if op is not node.op and op.bind(binding) != node.op:
            return None
        with origin_of(node):
            made = make_node(op, [slots[i] for i in inputs])
        for i, (kind, known) in enumerate(zip(made.types, node.types, strict=True)):
            if kind.bind(binding) != known:
                return None
            slots[first + i] = Value(made, i)
        parts.append((op, inputs))
    graph.outputs(*(slots[r] for r in program.roots))
    if set(graph.symbols()) != set(binding):
        return None
    return General((*parts, program.roots), graph, dict(binding))


def _scales(nodes: Sequence[Node]) -> set[Node]:
    """What scales the scores of an attention: where that is a number, they are one op, which rounds otherwise."""
    found: set[Node] = set()
    seen: set[Node] = set()
    todo = [x.node for node in nodes if node.op.name == "softmax" for x in node.inputs]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op.name in ("add", "where"):
            todo += [x.node for x in node.inputs]
        elif node.op.name in ("multiply", "divide") and any(x.node.op.name == "matmul" for x in node.inputs):
            numbers = [x.node for x in node.inputs if x.type.size == 1]
            while numbers:
                number = numbers.pop()
                if number not in found:
                    found.add(number)
                    numbers += [x.node for x in number.inputs if x.type.size == 1]
    return found


def _size_of(op: Op, table: Mapping[int, Dim], small: int) -> Dim | None:
    """What a number such as the divisor of a mean stands for: it is the size of something."""
    if not isinstance(op, Constant) or op.data.array.shape != () or op.data.array.dtype.kind not in "fi":
        return None
    number = op.data.array.item()
    return table.get(int(number)) if number > small and number == number // 1 and number < LARGEST else None


def _general_op(op: Op, table: Mapping[int, Dim], small: int) -> Op:
    if isinstance(op, Constant):
        return op
    found = {name: _general_field(getattr(op, name), table, small) for name in _size_fields(type(op))}
    changes = {name: value for name, value in found.items() if value is not getattr(op, name)}
    return replace(op, **changes) if changes else op


_SIZE_FIELDS: dict[type[Op], tuple[str, ...]] = {}


def _size_fields(cls: type[Op]) -> tuple[str, ...]:
    """The fields that are sizes, or hold some, as their class says: an axis, a kernel or a count of heads is none."""
    if cls not in _SIZE_FIELDS:
        _SIZE_FIELDS[cls] = tuple(f.name for f in fields(cls) if "Dim" in str(f.type))
    return _SIZE_FIELDS[cls]


def _general_field(value: Any, table: Mapping[int, Dim], small: int) -> Any:
    if type(value) is int and value > small:
        return table.get(value, value)
    if type(value) is tuple:
        made = tuple(_general_field(v, table, small) for v in value)
        return made if any(a is not b for a, b in zip(made, value, strict=True)) else value
    return value
