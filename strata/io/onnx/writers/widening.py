"""ONNX export: nodes for element types that ONNX does not give them: a wider type takes their place, between casts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from onnx import TensorProto, defs, helper

from strata.io.onnx.dtypes import NAMES

T = TensorProto
_WHOLE = (T.INT32, T.INT64, T.DOUBLE)
WIDER: Mapping[int, Sequence[int]] = {
    T.BOOL: (T.INT32, T.FLOAT), T.INT8: _WHOLE, T.UINT8: _WHOLE, T.INT16: _WHOLE, T.UINT16: _WHOLE,
    T.INT32: _WHOLE[1:], T.UINT32: _WHOLE[1:], T.BFLOAT16: (T.FLOAT,), T.FLOAT16: (T.FLOAT,), T.FLOAT: (T.DOUBLE,),
}  # fmt: skip
"""Types that hold all numbers of one, the narrowest first; integers wrap when they are cast back."""


def types_of(graph: Any, outer: Mapping[str, int]) -> dict[str, int]:
    """The element types of a graph's values, once they have been inferred."""
    kinds = dict(outer)
    for port in (*graph.input, *graph.value_info, *graph.output):
        if port.type.tensor_type.elem_type:
            kinds.setdefault(port.name, port.type.tensor_type.elem_type)
    return kinds | {t.name: t.data_type for t in graph.initializer}


def widened(graph: Any, kinds: Mapping[str, int], opset: int, fresh: Callable[[], str]) -> list[Any]:
    """The nodes of a graph, of which those that do not take the types of their inputs have casts around them."""
    found: list[Any] = []
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                inside = widened(attribute.g, types_of(attribute.g, kinds), opset, fresh)
                del attribute.g.node[:]
                attribute.g.node.extend(inside)
        found.extend(_wide(node, kinds, opset, fresh))
    return found


def _wide(node: Any, kinds: Mapping[str, int], opset: int, fresh: Callable[[], str]) -> Iterator[Any]:
    schema = defs.get_schema(node.op_type, opset)
    wide = {}
    for constraint in schema.type_constraints:
        letter, allowed = constraint.type_param_str, constraint.allowed_type_strs
        names = [x for x, port in zip(node.input, _ports(schema.inputs)) if port.type_str == letter]
        given = {kinds.get(x, 0) for x in names if x}
        if len(given) != 1 or _said(*given) in allowed:
            continue
        other = next((k for k in WIDER.get(given.pop(), ()) if _said(k) in allowed), None)
        if other is not None:
            wide[letter] = other
    for i, port in zip(range(len(node.input)), _ports(schema.inputs)):
        if port.type_str in wide and node.input[i]:
            name = fresh()
            yield helper.make_node("Cast", [node.input[i]], [name], to=wide[port.type_str])
            node.input[i] = name
    back = []
    for i, port in zip(range(len(node.output)), _ports(schema.outputs)):
        if port.type_str in wide and node.output[i] in kinds:
            name, kept = fresh(), node.output[i]
            back.append(helper.make_node("Cast", [name], [kept], to=kinds[kept]))
            node.output[i] = name
    yield node
    yield from back


def _ports(ports: Sequence[Any]) -> Iterator[Any]:
    """Formal inputs or outputs; the last one stands for all that come behind it."""
    yield from ports
    while ports:
        yield ports[-1]


def _said(kind: int) -> str:
    return f"tensor({NAMES.get(kind, 'undefined')})"
