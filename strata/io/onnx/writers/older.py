"""ONNX export: nodes as older opsets have them: attributes in place of inputs, several nodes in place of one."""

from __future__ import annotations

from typing import Any

import numpy as np

from strata.io.onnx.exporter import Exporter, before


@before(14, "Reshape")
def _reshape(e: Exporter, op: str, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
    """A zero takes the size of the input. One that is known stays a zero, which needs the newer form."""
    shape = e.known(inputs[1])
    if shape is None or shape.all():
        attributes = {k: v for k, v in attributes.items() if k != "allowzero"}
    e.node(op, inputs, outputs, attributes)


@before(18, "ReduceMax", "ReduceMin", "ReduceProd")
@before(13, "ReduceSum")
def _reduce(e: Exporter, op: str, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
    """Axes are an attribute; none of them are all."""
    axes = e.known(inputs[1])
    if axes is None:
        e.node(op, inputs, outputs, attributes)
    elif not axes.size:
        e.node("Identity", inputs[:1], outputs, {})
    else:
        e.node(op, inputs[:1], outputs, {"axes": axes.tolist(), "keepdims": attributes["keepdims"]})


@before(15, "Shape")
def _shape(e: Exporter, op: str, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
    """All sizes, and a slice of them."""
    ends = [e.array([attributes[k]], np.int64) for k in ("start", "end")]
    whole = e.fresh()
    e.node(op, inputs, [whole], {})
    _slice(e, "Slice", [whole, *ends, e.array([0], np.int64)], outputs, {})


@before(10, "Slice")
def _slice(e: Exporter, op: str, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
    """Ends are attributes, and steps are 1."""
    ends = [e.known(x) for x in inputs[1:]]
    plain = len(ends) < 4 or (ends[3] is not None and bool((ends[3] == 1).all()))
    if e.opset >= 10 or not plain or any(x is None for x in ends):
        e.node(op, inputs, outputs, attributes)
        return
    said = zip(("starts", "ends", "axes"), ends, strict=False)
    e.node(op, inputs[:1], outputs, {k: x.tolist() for k, x in said if x is not None})


@before(11, "Pad")
def _pad(e: Exporter, op: str, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
    """How many and which number are attributes."""
    pads, fill = (e.known(x) for x in inputs[1:3])
    if pads is None or fill is None:
        e.node(op, inputs, outputs, attributes)
    else:
        e.node(op, inputs[:1], outputs, {"pads": pads.tolist(), "value": float(fill)})


@before(12, "GreaterOrEqual", "LessOrEqual")
def _or_equal(e: Exporter, op: str, inputs: list[str], outputs: list[str], attributes: dict[str, Any]) -> None:
    parts = [e.add(op.removesuffix("OrEqual"), inputs), e.add("Equal", inputs)]
    e.node("Or", parts, outputs, attributes)
