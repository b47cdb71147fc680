"""Reverse mode on graphs: gradients, vector-Jacobian products, Jacobians by rows."""

from __future__ import annotations

from strata.arguments import own_checks
from strata.core import dim_prod, located
from strata.errors import OptionError
from strata.mir import Graph, Value, batch, placeholder, pullback
from strata.transforms.derive import Names, basis, chosen, derive, one_like, one_output, or_zeros, require_graph
from strata.transforms.tidy import tidy


@own_checks("graph")
@located
def grad_with_loss(graph: Graph, wrt: Names = None) -> Graph:
    """`<name>_grad`: the loss and its gradients, times the extra input `d_output` (shaped like the loss, usually 1)."""
    require_graph(graph, "grad")
    names = chosen(graph, wrt, "grad")
    one_output(graph, "grad")
    new = derive(graph, "grad")
    (loss,) = new.outputs
    seed = new.add_input("d_output", loss)
    leaves = [new.leaf(n) for n in names]
    grads = [or_zeros(g, x) for g, x in zip(pullback([loss], [seed], leaves), leaves, strict=True)]
    return new.graph.outputs(*tidy([loss, *grads]))


@own_checks("graph")
@located
def grad(graph: Graph, wrt: Names = None) -> Graph:
    """`<name>_grad`: gradients of the one output, times the extra input `d_output`."""
    both = grad_with_loss(graph, wrt)
    return both.returning(*both.results[1:])


@own_checks("graph")
@located
def value_and_grad(graph: Graph, wrt: Names = None) -> Graph:
    """The loss, one number, and its gradients; no extra input."""
    require_graph(graph, "value_and_grad")
    names = chosen(graph, wrt, "value_and_grad")
    one_output(graph, "value_and_grad")
    new = derive(graph, "grad")
    (loss,) = new.outputs
    if loss.shape != () or not loss.dtype.is_float:
        raise OptionError(
            f"value_and_grad: the loss must be one float, it is {loss.type}", code="O262", fix="transforms.vjp"
        )
    leaves = [new.leaf(n) for n in names]
    grads = [or_zeros(g, x) for g, x in zip(pullback([loss], [one_like(loss)], leaves), leaves, strict=True)]
    return new.graph.outputs(*tidy([loss, *grads]))


@own_checks("graph")
@located
def vjp(graph: Graph, wrt: Names = None) -> Graph:
    """All outputs, then gradients; the extra inputs `d_output` (or `d_output_0`, `d_output_1`, …) weigh them."""
    require_graph(graph, "vjp")
    names = chosen(graph, wrt, "vjp")
    new = derive(graph, "vjp")
    single = len(new.outputs) == 1
    seeds: list[Value | None] = []
    for i, out in enumerate(new.outputs):
        seeds.append(new.add_input("d_output" if single else f"d_output_{i}", out) if out.dtype.is_inexact else None)
    leaves = [new.leaf(n) for n in names]
    grads = [or_zeros(g, x) for g, x in zip(pullback(new.outputs, seeds, leaves), leaves, strict=True)]
    return new.graph.outputs(*tidy([*new.outputs, *grads]))


@own_checks("graph")
@located
def jacrev(graph: Graph, wrt: Names = None) -> Graph:
    """Jacobians row by row in reverse mode: for each output, for each name, shaped output.shape + input.shape."""
    require_graph(graph, "jacrev")
    names = chosen(graph, wrt, "jacrev")
    new = derive(graph, "jacrev")
    leaves = [new.leaf(n) for n in names]
    found: list[Value] = []
    for out in new.outputs:
        seed = placeholder("seed", out.type)
        rows = [or_zeros(g, x) for g, x in zip(pullback([out], [seed], leaves), leaves, strict=True)]
        spread = batch(rows, {seed: basis(out)}, dim_prod(out.shape))
        found += [r.reshape((*out.shape, *x.shape)) for r, x in zip(spread, leaves, strict=True)]
    return new.graph.outputs(*tidy(found))
