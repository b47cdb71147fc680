"""The backend of `torch.compile`: AOTAutograd gives ATen graphs of forward and backward, and both become ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from strata.arguments import untouched
from strata.errors import StrataError
from strata.torch.attention import forget
from strata.torch.convert import Conversion, convert
from strata.torch.meanwhile import Meanwhile, shown
from strata.torch.mended import MENDED, mend
from strata.torch.options import TorchOptions
from strata.torch.program import compile_graph
from strata.torch.reports import REPORTS, GraphReport
from strata.torch.split import run_split
from strata.torch.table import TABLE, overload_name


@cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Torch's decompositions to core ATen, without those of ops that the table has whole."""
    from torch._decomp import core_aten_decompositions

    from strata.torch.random import DRAWS

    found = dict(core_aten_decompositions())
    for op in list(found):
        full = overload_name(op)
        if full in TABLE or full in DRAWS:
            del found[op]
    return found | {op: f for op, f in MENDED.items() if isinstance(op, torch._ops.OpOverload)}


@untouched  # torch calls it
def strata(gm: fx.GraphModule, example_inputs: Any, *, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """`torch.compile(model, backend="strata")`."""
    from torch._dynamo.backends.common import aot_autograd

    chosen = TorchOptions.read(options, kwargs)
    mend(gm)
    return aot_autograd(
        fw_compiler=lambda g, inputs: compile_fx(g, inputs, chosen, "forward"),
        bw_compiler=lambda g, inputs: compile_fx(g, inputs, chosen, "backward"),
        inference_compiler=lambda g, inputs: compile_fx(g, inputs, chosen, "inference"),
        partition_fn=partition,
        decompositions=decompositions(),
    )(gm, example_inputs)


def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """Torch's min-cut partition, once attention's backward pass no longer asks for the sums of its forward pass: ours
    makes them again where it needs them."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    for node in joint.graph.nodes:
        forget(node)
    return min_cut_rematerialization_partition(joint, inputs, **options)


def compile_fx(gm: fx.GraphModule, inputs: Any, options: TorchOptions, kind: str) -> Any:
    """A functional ATen graph as a program, or as several with torch's ops between them."""
    bound = _static_inputs() if kind == "inference" and options.freezes(inputs) else frozenset()
    with _disable_current_modes():  # constants of the graph are real tensors
        return boxed(_compiled(gm, bound, options, kind))


def _compiled(gm: fx.GraphModule, bound: frozenset[int], options: TorchOptions, kind: str) -> Any:
    start = time.perf_counter()
    made = convert(gm, "torch", bound)
    report = REPORTS.add(kind, gm, made.unsupported)
    report.converting = time.perf_counter() - start
    if made.unsupported:
        options.refuse(made.unsupported)
    if options.background:
        return Meanwhile(gm, lambda: _program(gm, made, options, report), report)
    with shown(report.ops):
        return _program(gm, made, options, report)


def _program(gm: fx.GraphModule, made: Conversion, options: TorchOptions, report: GraphReport) -> Any:
    if made.unsupported:
        return run_split(gm, made.unsupported, options, report)
    try:
        return compile_graph(made, options.session(made.place), report)
    except StrataError as error:  # the whole graph stays in torch
        whole = dict.fromkeys((n for n in gm.graph.nodes if n.op == "call_function"), str(error).splitlines()[0])
        options.refuse(whole)
        report.stay(whole)
        return run_split(gm, whole, options, report)


def boxed(program: Callable[[list[Any]], list[Any]]) -> Any:
    """A function that takes its arguments as a list that it may empty, which AOTAutograd asks for by an attribute."""

    def run(args: list[Any]) -> list[Any]:
        return program(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _static_inputs() -> frozenset[int]:
    """Arguments that are parameters and buffers, and that the graph does not change."""
    context = torch._guards.TracingContext.try_get()
    meta = getattr(context, "fw_metadata", None)
    if meta is None:
        return frozenset()
    return frozenset(i for i in meta.static_input_indices or () if not meta.input_info[i].mutates_data)
