"""vmap over values: the driver. A batched value has its batch axis first; unbatched values are shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strata.core import Dim, located
from strata.mir.graph import toposort
from strata.mir.ir import METHODS, Op, Value, as_tuple, make_node
from strata.mir.leaves import placeholder
from strata.mir.origin import origin_of


@located
def batch(outputs: Sequence[Value], batched: Mapping[Value, Value], size: Dim) -> list[Value]:
    """`outputs` with the values in `batched` replaced by batched ones. Every result has the batch axis first."""
    table = batch_values(outputs, batched, size)
    return [table[x] if x in table else _spread(x, size) for x in outputs]


def batch_values(
    outputs: Sequence[Value], batched: Mapping[Value, Value], size: Dim, shared: Mapping[Value, Value] | None = None
) -> dict[Value, Value]:
    """The batched values below `outputs`. `shared` replaces values without giving them a batch axis."""
    table: dict[Value, Value] = dict(batched)
    plain: dict[Value, Value] = dict(shared or {})
    for node in toposort(outputs, [*batched, *plain]):
        flags = tuple(x in table for x in node.inputs)
        inputs = tuple(table[x] if x in table else plain.get(x, x) for x in node.inputs)
        if not any(flags):
            if inputs != node.inputs:
                with origin_of(node):
                    made = make_node(node.op, inputs)
                plain.update(zip(node.outputs, made.outputs, strict=True))
            continue
        with origin_of(node, made_by="vmap"):
            outs = as_tuple(node.op.vmap(*inputs, batched=flags, size=size))
        for value, out in zip(node.outputs, outs, strict=True):
            assert out.shape == (size, *value.shape), (
                f"vmap of {node.op.name} gave {out.type}, expected {(size, *value.shape)}"
            )
            table.setdefault(value, out)
    table_or_plain = {x: plain[x] for x in outputs if x not in table and x in plain}
    return table | {x: _spread(v, size) for x, v in table_or_plain.items()}


def _spread(x: Value, size: Dim) -> Value:
    return METHODS["broadcast_to"](x, (size, *x.shape))


def batch_decomposition(op: Op, inputs: Sequence[Value], batched: Sequence[bool], size: Dim) -> list[Value]:
    """The vmap rule of a composition: batch its decomposition."""
    names = [placeholder(f"x{i}", x.type.with_shape(x.shape[1:]) if b else x.type)
             for i, (x, b) in enumerate(zip(inputs, batched, strict=True))]  # fmt: skip
    outs = as_tuple(op.decompose(*names))
    rows = [(name, x, b) for name, x, b in zip(names, inputs, batched, strict=True)]
    table = batch_values(outs, {n: x for n, x, b in rows if b}, size, shared={n: x for n, x, b in rows if not b})
    return [table[x] if x in table else _spread(x, size) for x in outs]
