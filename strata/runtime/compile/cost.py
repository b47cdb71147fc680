"""A rough cost model: what a graph costs on a device, and which device it should run on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strata.backends import CostModel, backend_for
from strata.core import Dim, bounds, here, located
from strata.errors import CompileError, DeviceError
from strata.mir import Graph, Leaf, Node
from strata.runtime.compile.device import devices
from strata.runtime.compile.dispatch import as_graph, dispatch_report
from strata.runtime.report.profile import measured_machine


def cost_model(device: str) -> CostModel:
    """The backend's own model, or one measured or assumed for its kind."""
    backend = backend_for(device)
    if backend.cost_model is not None:
        return backend.cost_model
    share = backend.capabilities.of_processor
    if share is None:  # a device that we know nothing about: a small GPU behind a bus
        return CostModel(device, 2e12, 2e11, 1e-5, 5e-5, 1e10)
    machine = measured_machine()
    speeds = share.flops * machine.flops_per_second, share.bandwidth * machine.bytes_per_second
    return CostModel(device, *speeds, share.dispatch_seconds, share.roundtrip_seconds)


def estimate_graph_cost(graph: Graph, model: CostModel) -> float:
    """Seconds for one run; symbolic sizes at their upper bounds, or 64 where they have none."""
    moved = sum(_bytes(x.type.nbytes) for x in (*graph.inputs, *graph.results))
    total = model.roundtrip_seconds + moved / model.transfer_bytes_per_second
    return total + sum(node_cost(node, model) for node in graph.nodes())


def node_cost(node: Node, model: CostModel) -> float:
    """Seconds for one op: the larger of its arithmetic and its traffic, and one dispatch."""
    if isinstance(node.op, Leaf) or not node.inputs:
        return 0.0
    traffic = sum(_bytes(x.type.nbytes) for x in node.inputs) + sum(_bytes(t.nbytes) for t in node.types)
    return max(node_flops(node) / model.flops_per_second, traffic / model.bytes_per_second) + model.dispatch_seconds


def node_flops(node: Node) -> float:
    out = float(_bytes(node.types[0].size))
    op: Any = node.op
    match node.op.name:
        case "matmul":
            return 2.0 * out * _bytes(node.inputs[0].type.shape[-1])
        case "attention":
            sizes = op.sizes(*(x.type for x in node.inputs[:3]))
            pairs = _bytes(sizes.batch) * _bytes(op.num_heads) * _bytes(sizes.queries) * _bytes(sizes.keys)
            return 4.0 * pairs * _bytes(op.head_dim)
        case name if name.startswith("conv"):
            weights = node.inputs[1].type
            return 2.0 * out * _bytes(weights.size) / max(1, _bytes(weights.shape[0]))
        case _:
            return out


def _bytes(dim: Dim) -> int:
    if isinstance(dim, int):
        return dim
    high = bounds(dim)[1]
    return high if high is not None else 64


@located
def pick_device(
    graph: Any,
    models: Mapping[str, CostModel] | Sequence[str] | None = None,
    *,
    exclude: Sequence[str] = ("reference",),
) -> str:
    """The device with the least estimated time among those that can run all of the graph, and hold it."""
    program = as_graph(graph)
    if isinstance(models, Mapping):
        known = dict(models)
    else:
        known = {
            name: cost_model(name) for name in (models if models is not None else devices()) if name not in exclude
        }
    needed = sum(_bytes(x.type.nbytes) for x in (*program.inputs, *program.params, *program.results))
    costs: dict[str, float] = {}
    reasons = []
    for name, model in known.items():
        if model.memory_bytes is not None and needed > model.memory_bytes:
            reasons.append(f"{name} has {model.memory_bytes:,} bytes, {needed:,} are needed")
            continue
        try:
            report = dispatch_report(program, name)
        except (CompileError, DeviceError) as error:
            reasons.append(f"{name}: {error.summary}")
            continue
        if not report.compile_ready:
            reasons.append(f"{name} cannot run {report.unsupported[0].op}")
            continue
        costs[name] = estimate_graph_cost(program, model)
    if not costs:
        raise DeviceError(
            f"no device can run {program.name!r}: {'; '.join(reasons) or 'none is known'}", code="E401", place=here()
        )
    return min(costs, key=lambda name: costs[name])
