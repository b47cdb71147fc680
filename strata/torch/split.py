"""A graph in parts: programs of ours, and torch's own ops between them where the table has no rule."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from strata.errors import StrataError
from strata.torch.attention import remember
from strata.torch.convert import convert
from strata.torch.options import TorchOptions
from strata.torch.program import compile_graph
from strata.torch.reports import GraphReport


def run_split(
    gm: fx.GraphModule, unsupported: Mapping[fx.Node, str], options: TorchOptions, report: GraphReport
) -> Any:
    """A function that runs the graph, each largest connected part of supported ops as one program."""
    from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
    from torch.fx.passes.operator_support import OperatorSupportBase

    class Supported(OperatorSupportBase):
        def is_node_supported(self, submodules: Any, node: fx.Node) -> bool:
            return node.op == "call_function" and node not in unsupported and not _is_plain_size(node)

    unsupported = {**unsupported, **{made: why for n, why in unsupported.items() for made in remember(n)}}
    parts = CapabilityBasedPartitioner(gm, Supported(), allows_single_node_partition=True)
    split = parts.fuse_partitions(parts.propose_partitions())
    for name, part in list(split.named_children()):
        if not isinstance(part, fx.GraphModule) or not name.startswith("fused_"):
            continue
        made = convert(part, "torch_part")
        if made.unsupported:
            _leave(part)
            continue
        try:
            program = compile_graph(made, options.session(made.place), report)
        except StrataError as error:
            report.stay(dict.fromkeys((n for n in part.graph.nodes if n.op == "call_function"), str(error)))
            _leave(part)
            continue
        setattr(split, name, _Ours(program, _is_single(part)))
    split.recompile()
    return _Timed(split, report)


def _leave(part: fx.GraphModule) -> None:
    """A part that torch runs as it is."""
    for node in list(part.graph.nodes):
        remember(node)
    part.recompile()


def _is_plain_size(node: fx.Node) -> bool:
    return not isinstance(node.target, torch._ops.OpOverload) and not isinstance(
        node.meta.get("val"), (torch.Tensor, tuple, list)
    )


def _is_single(part: fx.GraphModule) -> bool:
    """Whether a part gives its one result by itself."""
    output = next(iter(reversed(part.graph.nodes)))
    return not isinstance(output.args[0], (tuple, list))


class _Ours(torch.nn.Module):
    def __init__(self, program: Any, is_single: bool) -> None:
        super().__init__()
        self.program, self.is_single, self.seconds = program, is_single, 0.0

    def forward(self, *args: Any) -> Any:
        start = time.perf_counter()
        results = self.program(list(args))
        self.seconds += time.perf_counter() - start
        return results[0] if self.is_single else tuple(results)


class _Timed:
    """Counts what torch takes of each call."""

    def __init__(self, split: fx.GraphModule, report: GraphReport) -> None:
        self.split, self.report = split, report
        self.parts = [m for m in split.children() if isinstance(m, _Ours)]

    def __call__(self, args: list[Any]) -> Any:
        ours, start = sum(p.seconds for p in self.parts), time.perf_counter()
        with torch.no_grad():
            results = self.split(*args)
        args.clear()
        self.report.seconds += time.perf_counter() - start - (sum(p.seconds for p in self.parts) - ours)
        self.report.calls += 1
        return list(results) if isinstance(results, (tuple, list)) else results
