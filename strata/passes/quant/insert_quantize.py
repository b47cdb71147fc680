"""Post-training quantisation: 8-bit values where a calibration has scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata import ops as functions
from strata.mir import Graph, Value, as_tuple
from strata.passes.base import rewrite

ops: Any = functions  # functions are found by name, also where a module has the same one


@dataclass(frozen=True)
class CalibrationEntry:
    """Scales and zero points of one value: for all of it, or for each index along an axis."""

    scales: tuple[float, ...]
    zero_points: tuple[int, ...] = (0,)
    axis: int | None = None

    @staticmethod
    def per_tensor(scale: float, zero_point: int = 0) -> CalibrationEntry:
        return CalibrationEntry((float(scale),), (int(zero_point),))

    @staticmethod
    def per_channel(axis: int, scales: Sequence[float], zero_points: Sequence[int] = (0,)) -> CalibrationEntry:
        return CalibrationEntry(tuple(map(float, scales)), tuple(map(int, zero_points)), axis)

    def applied(self, x: Value) -> Value:
        codes = ops.quantize(x, self.scales, self.zero_points, axis=self.axis)
        made: Value = ops.dequantize(codes, self.scales, self.zero_points, axis=self.axis)
        return made


def insert_q_dq(graph: Graph, record: Mapping[Value, CalibrationEntry]) -> Graph:
    """The graph with every recorded value quantised and dequantised; all its readers, results too, see what comes back.

    Values are the graph's own: leaves, or what its nodes give. A record without entries gives the graph itself.
    """
    if not record:
        return graph

    def change(value: Value, inputs: tuple[Value, ...]) -> Sequence[Value] | None:
        node = value.node
        if not any(v in record for v in node.outputs):
            return None
        made = as_tuple(node.op(*inputs)) if node.inputs else node.outputs
        pairs = zip(node.outputs, made, strict=True)
        return [record[old].applied(new) if old in record else new for old, new in pairs]

    return rewrite(graph, change, "insert_q_dq")
