"""Forward mode on graphs: Jacobian-vector products, Hessian-vector products, Jacobians by columns."""

from __future__ import annotations

from strata.arguments import own_checks
from strata.core import dim_prod, located
from strata.mir import Graph, batch, placeholder, pushforward
from strata.transforms.derive import Names, basis, chosen, derive, or_zeros, require_graph
from strata.transforms.reverse import grad_with_loss
from strata.transforms.tidy import tidy


@own_checks("graph")
@located
def jvp(graph: Graph, names: Names = None) -> Graph:
    """`<name>_jvp`: all outputs, then their tangents; extra inputs `tangent_<name>`."""
    require_graph(graph, "jvp")
    picked = chosen(graph, names, "jvp")
    new = derive(graph, "jvp")
    leaves = [new.leaf(n) for n in picked]
    tangents = [new.add_input(f"tangent_{n}", x) for n, x in zip(picked, leaves, strict=True)]
    douts = pushforward(new.outputs, leaves, tangents)
    return new.graph.outputs(*new.outputs, *(or_zeros(d, x) for d, x in zip(douts, new.outputs, strict=True)))


@own_checks("graph")
@located
def hvp(graph: Graph, wrt: Names = None) -> Graph:
    """Forward over reverse: the loss, gradients, ⟨gradient, v⟩, and the Hessian times v = `tangent_<name>`."""
    require_graph(graph, "hvp")
    names = chosen(graph, wrt, "hvp")
    result = jvp(grad_with_loss(graph, names), names)
    result.name = f"{graph.name}_hvp"
    return result


@own_checks("graph")
@located
def jacfwd(graph: Graph, wrt: Names = None) -> Graph:
    """Jacobians column by column in forward mode: for each output, for each name, shaped output.shape + input.shape."""
    require_graph(graph, "jacfwd")
    names = chosen(graph, wrt, "jacfwd")
    new = derive(graph, "jacfwd")
    columns = []
    for name in names:
        x = new.leaf(name)
        tangent = placeholder("tangent", x.type)
        douts = [or_zeros(d, out) for d, out in zip(pushforward(new.outputs, [x], [tangent]), new.outputs, strict=True)]
        spread = batch(douts, {tangent: basis(x)}, dim_prod(x.shape))
        moved = [d.moveaxis(0, -1) for d in spread]
        columns.append([d.reshape((*out.shape, *x.shape)) for d, out in zip(moved, new.outputs, strict=True)])
    return new.graph.outputs(*tidy([column[i] for i in range(len(new.outputs)) for column in columns]))
