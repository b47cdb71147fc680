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
from strata.torch.random import draws, keep_order
from strata.torch.reports import GraphReport
from strata.torch.strides import lay_inputs
from strata.torch.symbols import SymbolNodes, give_symbols


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

    def partitioner() -> Any:  # it looks at who needs whom as it is made
        return CapabilityBasedPartitioner(gm, Supported(), allows_single_node_partition=True)

    parts = partitioner()
    proposed = parts.propose_partitions()
    drawing = [n for n in gm.graph.nodes if n.op == "call_function" and draws(n)]
    if len(drawing) > 1 and not any(all(n in part.nodes for n in drawing) for part in proposed):
        report.stay({n: "it draws between parts of the graph" for n in drawing if n not in unsupported})
        keep_order(gm, drawing)
        unsupported |= dict.fromkeys(drawing, "")
        parts = partitioner()
        proposed = parts.propose_partitions()
    split = parts.fuse_partitions(proposed)
    known = SymbolNodes(split.graph)
    for node in list(split.graph.nodes):
        part = getattr(split, str(node.target)) if node.op == "call_module" else None
        if isinstance(part, fx.GraphModule) and str(node.target).startswith("fused_"):
            program = _compiled(node, part, known, options, report)
            if program is not None:
                setattr(split, str(node.target), _Ours(program, _is_single(part)))
        known.note(node)
    ours = {name for name, part in split.named_children() if isinstance(part, _Ours)}
    lay_inputs(split, lambda node: node.op == "call_module" and node.target in ours)
    split.recompile()
    return _Timed(split, report)


def _compiled(
    node: fx.Node, part: fx.GraphModule, known: SymbolNodes, options: TorchOptions, report: GraphReport
) -> Any:
    """The program of a part, which a node of the whole calls; None where it stays in torch after all."""
    lost = give_symbols(node, part, known)
    why = f"no argument tells the sizes {', '.join(lost)}" if lost else ""
    if not why:
        made = convert(part, "torch_part")
        why = next(iter(made.unsupported.values()), "")
    if not why:
        try:
            return compile_graph(made, options.session(made.place), report)
        except StrataError as error:
            why = str(error).splitlines()[0]
    report.stay(dict.fromkeys((n for n in part.graph.nodes if n.op == "call_function"), why))
    for n in list(part.graph.nodes):
        remember(n)
    part.recompile()
    return None


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
