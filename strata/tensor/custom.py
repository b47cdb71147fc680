"""custom_op: an op from a Python function of arrays, from the text of a kernel, or from a graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from operator import index
from typing import Any

from strata import ops
from strata.arguments import own_checks
from strata.core import Dim, SymExpr, here, located
from strata.errors import OptionError
from strata.kernel import Kernel, parse_kernel
from strata.mir import Graph, Value
from strata.ops import CustomKernel, Extension, extensions, kernel_text
from strata.tensor.control import CustomDerivative, tree_tensors
from strata.tensor.functional import value_of
from strata.tensor.tensor import Tensor, lowered

Rule = Callable[..., Any]


@located
@own_checks("fn")
def custom_op(
    fn: Callable[..., Any] | str | Kernel | Graph | None = None,
    *,
    name: str | None = None,
    infer: Rule | None = None,
    vjp: Rule | Graph | None = None,
    jvp: Rule | Graph | None = None,
    vmap: Rule | None = None,
    differentiable: bool = True,
) -> Any:
    """An op from a Python function of NumPy arrays, from the text of a kernel (`strata.kernel`), or from a graph.

    A function runs on the host; it reads its arrays during the call, and copies what it keeps. `infer(*types)` gives
    the type of its result, or a tuple of them; without it the result is like the first argument. A kernel and a graph
    become part of the program that they are used in, and say their types themselves; sizes that no argument of a kernel
    shows are keywords of the call: `f(x, N=8)`.
    `vjp(*tensors, out=, ct=)` gives a cotangent or None for each argument, `jvp(*tensors, out=, dx=)` the tangent. For
    kernels and graphs both may be graphs, too, of the arguments, `primal_output` and `d_output`, or `tangent_0`, ….
    """
    if isinstance(fn, (str, Kernel, Graph)):
        given = [word for word, rule in (("infer", infer), ("vmap", vmap)) if rule is not None]
        if given:
            what = "a graph" if isinstance(fn, Graph) else "a kernel"
            raise OptionError(f"custom_op: {given[0]} is not taken with {what}, which says it itself", code="O292")
        if not differentiable and (vjp is not None or jvp is not None):
            raise OptionError("custom_op: a rule is given for what is not differentiable", code="O292")
        body = _graph_body(fn, name) if isinstance(fn, Graph) else _kernel_body(fn, name, flat=not differentiable)
        return body.derived(vjp, jvp)
    for word, rule in (("vjp", vjp), ("jvp", jvp)):
        if isinstance(rule, Graph):
            raise OptionError(f"custom_op: {word} of a Python function is a function, got a graph", code="O292")
    if fn is not None and not callable(fn):
        raise OptionError(
            f"custom_op: takes a function, the text of a kernel or a graph, got {type(fn).__name__}", code="O292"
        )

    def decorate(execute: Callable[..., Any]) -> Callable[..., Any]:
        label = name or str(getattr(execute, "__name__", "custom"))
        extension = Extension(
            label,
            infer=lambda *types, attrs: types[0] if infer is None else infer(*types),
            execute=lambda *arrays, attrs: execute(*arrays),  # noqa: PLW0108 - attrs is dropped
            vjp=None if vjp is None else _tensor_rule(vjp),  # type: ignore[arg-type]
            jvp=None if jvp is None else _tensor_rule(jvp),  # type: ignore[arg-type]
            vmap=None if vmap is None else _tensor_rule(vmap),
            differentiable=differentiable,
        )
        extensions().register(extension)

        @wraps(execute, updated=())
        def apply(*args: Any) -> Any:
            outs = ops.Custom(extension)(*(value_of(a, label) for a in args))
            return Tensor(outs[0]) if len(outs) == 1 else tuple(Tensor(v) for v in outs)

        return apply

    return decorate if fn is None else decorate(fn)


def _tensor_rule(rule: Rule) -> Rule:
    """A rule of tensors as one of graph values; `attrs` is not for these ops."""
    inner = lowered(rule)

    def apply(*inputs: Any, attrs: Any = None, **named: Any) -> Any:
        return inner(*inputs, **{k: tree_tensors(v) for k, v in named.items()})

    return apply


# ------------------------------------------------------------------------------------------------- kernels and graphs


class _CustomBody:
    """A function of values, called with tensors, arrays or values of a graph; the latter give values again."""

    def __init__(self, name: str, made: Callable[..., Sequence[Value]], about: str) -> None:
        self.name, self.made = name, made

        def apply(*args: Any, **sizes: Any) -> Any:
            values = [a if isinstance(a, Value) else value_of(a, name) for a in args]
            outs: Sequence[Any] = made(*values, **sizes)
            if not any(isinstance(a, Value) for a in args):
                outs = [Tensor(v) for v in outs]
            return outs[0] if len(outs) == 1 else tuple(outs)

        apply.__name__ = apply.__qualname__ = name
        apply.__doc__ = about
        self.apply: Callable[..., Any] = located(apply)

    def derived(self, vjp: Rule | Graph | None, jvp: Rule | Graph | None) -> Callable[..., Any]:
        """The function with its own derivatives."""
        if vjp is None and jvp is None:
            return self.apply
        backward = _backward_rule(vjp) if isinstance(vjp, Graph) else vjp
        tangent = _tangent_rule(jvp) if isinstance(jvp, Graph) else jvp

        @wraps(self.apply)
        def call(*args: Any, **sizes: Any) -> Any:
            def plain(*given: Any) -> Any:
                return self.apply(*given, **sizes)

            plain.__name__ = self.name
            made = CustomDerivative(plain)
            if backward is not None:
                made.defvjp(lambda given, out, ct: backward(*given, out=out, ct=ct))
            if tangent is not None:
                made.defjvp(lambda given, dx: (plain(*given), tangent(*given, out=plain(*given), dx=dx)))
            if not any(isinstance(a, Value) for a in args):
                return made(*args)
            return lowered(made)(*args)

        return located(call)


def _kernel_body(source: str | Kernel, name: str | None, *, flat: bool) -> _CustomBody:
    kernel = parse_kernel(source) if isinstance(source, str) else source
    label = kernel.name if name is None else name
    if not label.replace(".", "_").isidentifier() or not label.isascii():
        raise OptionError(f"custom_op: {label!r} cannot name a kernel: use letters, digits, '_' and '.'", code="O292")
    text = kernel_text(kernel.renamed(label))

    def made(*values: Value, **sizes: Any) -> Sequence[Value]:
        known = tuple(sorted((word, _dim(label, word, n)) for word, n in sizes.items()))
        outs: Sequence[Value] = CustomKernel(text, known, flat)(*values)
        return outs

    return _CustomBody(label, made, text)


def _graph_body(graph: Graph, name: str | None) -> _CustomBody:
    if graph.params:
        raise OptionError(
            f"custom_op: graph {graph.name!r} has parameters; its values are its inputs", code="O292", place=here()
        )

    def made(*values: Value) -> Sequence[Value]:
        return graph.call(*values)

    return _CustomBody(name or graph.name, made, str(graph))


def _dim(label: str, word: str, n: Any) -> Dim:
    if isinstance(n, SymExpr):
        return n
    try:
        number = index(n)
    except TypeError:
        number = -1
    if number < 0 or isinstance(n, bool):
        raise OptionError(f"{label}: {word}={n!r} is not a size", code="O291", place=here())
    return number


def _backward_rule(graph: Graph) -> Rule:
    """A graph of the arguments, `primal_output` and `d_output` as a rule; it has a result for each float argument."""

    def rule(*args: Any, out: Any, ct: Any) -> Any:
        table = {**_named("primal_output", out), **_named("d_output", ct)}
        grads = iter(_called(graph, args, table))
        return tuple(next(grads, None) if _value(a).dtype.is_inexact else None for a in args)

    return rule


def _tangent_rule(graph: Graph) -> Rule:
    """A graph of the arguments, `tangent_0`, … and `primal_output` as a rule; it has a result for each float output."""

    def rule(*args: Any, out: Any, dx: Any) -> Any:
        table = {**{f"tangent_{i}": t for i, t in enumerate(dx)}, **_named("primal_output", out)}
        made = _called(graph, args, table)
        return made[0] if len(made) == 1 else tuple(made)

    return rule


def _named(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, tuple):
        return {name: given}
    return {f"{name}_{i}": x for i, x in enumerate(given)}


def _called(graph: Graph, args: Sequence[Any], table: Mapping[str, Any]) -> list[Tensor]:
    names = graph.input_names[len(args) :]
    unknown = [n for n in names if n not in table]
    if unknown:
        raise OptionError(
            f"custom_op: the derivative graph {graph.name!r} has an input {unknown[0]!r}; known: {', '.join(table)}",
            code="O293",
        )
    return [Tensor(v) for v in graph.call(*(_value(x) for x in (*args, *(table[n] for n in names))))]


def _value(x: Any) -> Value:
    return x if isinstance(x, Value) else value_of(x, "custom_op")
