"""Derivatives and batching of Python functions on pytrees of tensors.

A function is traced on placeholders, the rules of its ops are applied, and the placeholders are replaced by the real
arguments: the result is lazy like any tensor, and transforms nest freely.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from strata.core import Dim, TreeDef, dim_prod, flatten, here, unflatten
from strata.errors import DTypeError, OptionError, ShapeError, TraceError
from strata.kinds import counted, with_article
from strata.mir import Value, batch, constant, fresh_scope, placeholder, pullback, pushforward, substitute_values
from strata.ops import iota, zeros
from strata.tensor.creation import asarray
from strata.tensor.tensor import Tensor
from strata.transforms import tidy


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function traced on some of its arguments: placeholders, the values they stand for, and flat results."""

    names: list[Value]
    values: list[Value]
    results: list[Value]
    structure: TreeDef
    aux: Any

    def substitute(self, values: Sequence[Value]) -> list[Tensor]:
        """Expressions on placeholders as tensors on the real arguments."""
        known = dict(zip(self.names, self.values, strict=True))
        return [Tensor(v) for v in substitute_values(tidy(values), known)]

    def restore(self, tensors: Sequence[Any]) -> Any:
        return unflatten(self.structure, tensors)


def value_of(x: Any, what: str) -> Value:
    """The graph value of one leaf of a pytree."""
    if isinstance(x, str) or callable(x):
        raise TraceError(f"{what}: {with_article(type(x))} is not a tensor", code="T208", place=here())
    return asarray(x).value


def values_of(tree: Any, what: str) -> tuple[list[Value], TreeDef]:
    leaves, structure = flatten(tree)
    return [value_of(x, what) for x in leaves], structure


def trace_call(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    picks: Sequence[int],
    what: str,
    *,
    has_aux: bool,
) -> FunctionCall:
    """Run `fn` with placeholders for the leaves of the arguments in `picks`; the others go in as they are."""
    _need_function(fn, what)
    for i in picks:
        if not -len(args) <= i < len(args):
            raise OptionError(f"{what}: argument {i} does not exist, {len(args)} were given", code="T209", place=here())
    values, structure = values_of([args[i] for i in picks], what)
    scope = fresh_scope()
    names = [placeholder(f"{_name(fn)}.{i}", v.type, scope) for i, v in enumerate(values)]
    given = list(args)
    for i, arg in zip(picks, unflatten(structure, [Tensor(n) for n in names]), strict=True):
        given[i] = arg
    result, aux = fn(*given, **kwargs), None
    if has_aux:
        if not isinstance(result, tuple) or len(result) != 2:
            raise OptionError(f"{what}: with has_aux the function must return (result, aux)", code="T210", place=here())
        result, aux = result
    results, shape = values_of(result, what)
    return FunctionCall(names, values, results, shape, aux)


def _need_function(fn: Any, what: str) -> None:
    if not callable(fn):
        raise OptionError(f"{what}: takes a function, got {type(fn).__name__}", code="T211", place=here())


def _name(fn: Any) -> str:
    return str(getattr(fn, "__name__", type(fn).__name__)).replace("<lambda>", "lambda")


def _or_zeros(x: Value | None, like: Value) -> Value:
    return zeros(like.shape, like.dtype) if x is None else x


def _upright(x: Value) -> Value:
    """(A B)ᵀ as Bᵀ Aᵀ: the gradient of a weight that is used transposed comes out in the weight's own layout."""
    node = x.node
    if node.op.name != "transpose" or x.ndim != 2 or node.op.static_fields()["perm"] != (1, 0):
        return x
    inner = node.inputs[0].node
    if inner.op.name != "matmul":
        return x
    a, b = (_flipped(v) for v in inner.inputs)
    product: Value = b @ a
    return product


def _flipped(x: Value) -> Value:
    if x.node.op.name == "transpose" and x.node.op.static_fields()["perm"] == (1, 0):
        return x.node.inputs[0]
    return x.T


def _with_aux(call: FunctionCall, values: Sequence[Value]) -> tuple[list[Tensor], Any]:
    """Results on the real arguments, and the aux tree with its tensors treated alike."""
    leaves, structure = flatten(call.aux)
    traced = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    tensors = call.substitute([*values, *(leaves[i].value for i in traced)])
    for i, t in zip(traced, tensors[len(values) :], strict=True):
        leaves[i] = t
    return tensors[: len(values)], unflatten(structure, leaves)


def _picks(argnums: int | Sequence[int]) -> list[int]:
    return [argnums] if isinstance(argnums, int) else list(argnums)


def value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that gives (fn(...), gradients); fn returns one float, or (float, aux) with `has_aux`."""
    _need_function(fn, "grad")

    @wraps(fn, updated=())
    def both(*args: Any, **kwargs: Any) -> Any:
        picks = _picks(argnums)
        call = trace_call(fn, args, kwargs, picks, "grad", has_aux=has_aux)
        for name in call.names:
            if not name.dtype.is_inexact:
                raise DTypeError(
                    f"grad: an argument has a {name.type} leaf: derivatives exist for floats only",
                    code="T203",
                    place=here(),
                )
        if len(call.results) != 1 or call.results[0].shape != () or not call.results[0].dtype.is_float:
            got = ", ".join(str(r.type) for r in call.results) or "nothing"
            raise ShapeError(f"grad: {_name(fn)} must return one float, it returns {got}", code="S355", place=here())
        (loss,) = call.results
        grads = pullback([loss], [constant(1, loss.dtype)], call.names)
        flat = [_upright(_or_zeros(g, x)) for g, x in zip(grads, call.names, strict=True)]
        (value, *found), aux = _with_aux(call, [loss, *flat])
        tree = unflatten(flatten([args[i] for i in picks])[1], found)
        gradients = tree[0] if isinstance(argnums, int) else tuple(tree)
        return ((value, aux), gradients) if has_aux else (value, gradients)

    return both


def grad(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that gives the gradient of `fn` with respect to the arguments `argnums` (and aux with `has_aux`).

    For a complex argument z it is the derivative with respect to the conjugate of z, half of what PyTorch gives.
    """
    both = value_and_grad(fn, argnums, has_aux)

    @wraps(fn, updated=())
    def gradient(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return gradient


def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """fn(*primals) and the function from a cotangent of that result to cotangents of the primals."""
    call = trace_call(fn, primals, {}, range(len(primals)), "vjp", has_aux=has_aux)
    results, aux = _with_aux(call, call.results)
    structure = flatten(list(primals))[1]

    def pull(cotangent: Any) -> Any:
        seeds, shape = values_of(cotangent, "vjp")
        _same_structure("vjp: the cotangent", shape, call.structure)
        weights = [c if r.dtype.is_inexact else None for c, r in zip(seeds, call.results, strict=True)]
        _same_types(
            "vjp: the cotangent", [w for w in weights if w is not None], [r for r in call.results if r.dtype.is_inexact]
        )
        grads = pullback(call.results, weights, call.names)
        flat = [_or_zeros(g, x) for g, x in zip(grads, call.names, strict=True)]
        return tuple(unflatten(structure, call.substitute(flat)))

    out = call.restore(results)
    return (out, pull, aux) if has_aux else (out, pull)


def jvp(fn: Callable[..., Any], primals: Any, tangents: Any, has_aux: bool = False) -> Any:
    """fn's result and its directional derivative; a tuple of primals is several arguments, anything else is one."""
    args, directions = _arguments(primals), _arguments(tangents)
    call = trace_call(fn, args, {}, range(len(args)), "jvp", has_aux=has_aux)
    seeds, shape = values_of(list(directions), "jvp")
    _same_structure("jvp: the tangents", shape, flatten(list(args))[1])
    _same_types("jvp: the tangents", seeds, call.names)
    known = [s if n.dtype.is_inexact else None for s, n in zip(seeds, call.names, strict=True)]
    douts = [_or_zeros(d, r) for d, r in zip(pushforward(call.results, call.names, known), call.results, strict=True)]
    tensors, aux = _with_aux(call, [*call.results, *douts])
    out, tangent = call.restore(tensors[: len(douts)]), call.restore(tensors[len(douts) :])
    return (out, tangent, aux) if has_aux else (out, tangent)


def _arguments(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) and not hasattr(x, "_fields") else (x,)


def _same_structure(what: str, given: TreeDef, wanted: TreeDef) -> None:
    if given != wanted:
        raise OptionError(f"{what} has the structure {given}, it must be {wanted}", code="T212", place=here())


def _same_types(what: str, given: Sequence[Value], wanted: Sequence[Value]) -> None:
    for x, y in zip(given, wanted, strict=True):
        if x.type != y.type:
            raise ShapeError(f"{what} must be {y.type}, got {x.type}", code="S356", place=here())


def hvp(fn: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    """The Hessian of `fn`, which gives one float, times a direction: forward over reverse."""
    count = len(_arguments(primals))
    gradient = grad(fn, tuple(range(count)) if isinstance(primals, tuple) else 0)
    return jvp(gradient, primals, tangents)[1]


# ------------------------------------------------------------------------------------------------------------- batching


def vmap(fn: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Any]:
    """A function that maps `fn` over an axis of its arguments.

    `in_axes` is one axis for all arguments, or a tuple with an axis, None (shared), or a tree of these for each.
    `out_axes` says where the new axis goes in the results; None asks for a result that does not depend on it.
    """
    _need_function(fn, "vmap")

    @wraps(fn, updated=())
    def mapped(*args: Any, **kwargs: Any) -> Any:
        values, structure = values_of(list(args), "vmap")
        axes = _spread_axes(in_axes, args)
        size = _batch_size(values, axes)
        scope = fresh_scope()
        rows: dict[Value, Value] = {}
        inner: list[Tensor] = []
        for i, (x, axis) in enumerate(zip(values, axes, strict=True)):
            if axis is None:
                inner.append(Tensor(x))
                continue
            front = x.moveaxis(axis, 0)
            name = placeholder(f"{_name(fn)}.{i}", front.type.with_shape(front.shape[1:]), scope)
            rows[name] = front
            inner.append(Tensor(name))
        results, shape = values_of(fn(*unflatten(structure, inner), **kwargs), "vmap")
        outs = batch(results, rows, size)
        places = _prefix_leaves(out_axes, shape, "out_axes")
        return unflatten(shape, [_place(x, plain, at) for x, plain, at in zip(outs, results, places, strict=True)])

    return mapped


def _place(x: Value, plain: Value, axis: Any) -> Tensor:
    if axis is None:
        return Tensor(x[0])
    if not -(plain.ndim + 1) <= axis <= plain.ndim:
        raise ShapeError(
            f"vmap: out_axes {axis} does not exist in a result with {plain.ndim + 1} axes", code="S357", place=here()
        )
    return Tensor(x.moveaxis(0, axis))


def _spread_axes(in_axes: Any, args: Sequence[Any]) -> list[Any]:
    """An axis or None for each leaf of the arguments."""
    per_argument = list(in_axes) if isinstance(in_axes, (tuple, list)) else [in_axes] * len(args)
    if len(per_argument) != len(args):
        raise OptionError(
            f"vmap: in_axes has {len(per_argument)} entries for {counted(len(args), 'argument')}",
            code="T213",
            place=here(),
        )
    return [
        a
        for axis, arg in zip(per_argument, args, strict=True)
        for a in _prefix_leaves(axis, flatten(arg)[1], "in_axes")
    ]


def _prefix_leaves(prefix: Any, structure: TreeDef, what: str) -> list[Any]:
    """A tree of axes, or one axis for a whole subtree, spread over the leaves of a structure."""
    if prefix is None or isinstance(prefix, int):
        return [prefix] * structure.num_leaves
    if structure.kind == "dict" and isinstance(prefix, dict) and set(prefix) == set(structure.keys):
        parts = [prefix[k] for k in structure.keys]
    elif (
        structure.kind in ("list", "tuple", "named")
        and isinstance(prefix, (list, tuple))
        and len(prefix) == len(structure.children)
    ):
        parts = list(prefix)
    else:
        raise OptionError(f"vmap: {what} {prefix!r} does not fit the structure {structure}", code="T213", place=here())
    return [a for part, child in zip(parts, structure.children, strict=True) for a in _prefix_leaves(part, child, what)]


def _batch_size(values: Sequence[Value], axes: Sequence[Any]) -> Dim:
    size: Dim | None = None
    first = ""
    for x, axis in zip(values, axes, strict=True):
        if axis is None:
            continue
        if not -x.ndim <= axis < x.ndim:
            raise ShapeError(f"vmap: axis {axis} does not exist in {x.type}", code="S357", place=here())
        if size is None:
            size, first = x.shape[axis], f"axis {axis} of {x.type}"
        elif size != x.shape[axis]:
            raise ShapeError(
                f"vmap: batch sizes differ, {first} has {size} and axis {axis} of {x.type} has {x.shape[axis]}",
                code="S358", place=here(),
            )  # fmt: skip
    if size is None:
        raise OptionError("vmap: at least one argument needs an axis in in_axes", code="T213", place=here())
    return size


# ------------------------------------------------------------------------------------------------------------ Jacobians


def _basis(like: Value) -> Value:
    count = dim_prod(like.shape)
    square = iota((count, count), 0).equal(iota((count, count), 1)).cast(like.dtype)
    result: Value = square.reshape((count, *like.shape))
    return result


def jacfwd(fn: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """The Jacobian, column by column: for each result a tree like the argument, shaped result.shape + leaf.shape."""
    return _jacobian(fn, argnums, "jacfwd", _columns)


def jacrev(fn: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Callable[..., Any]:
    """The Jacobian, row by row: for each result a tree like the argument, shaped result.shape + leaf.shape."""
    return _jacobian(fn, argnums, "jacrev", _rows)


def _jacobian(
    fn: Callable[..., Any], argnums: int | Sequence[int], what: str, blocks: Callable[[FunctionCall], list[list[Value]]]
) -> Callable[..., Any]:
    _need_function(fn, what)

    @wraps(fn, updated=())
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        picks = _picks(argnums)
        call = trace_call(fn, args, kwargs, picks, what, has_aux=False)
        structure = flatten([args[i] for i in picks])[1]
        rows = []
        for row in blocks(call):
            tree = unflatten(structure, call.substitute(row))
            rows.append(tree[0] if isinstance(argnums, int) else tuple(tree))
        return call.restore(rows)

    return jacobian


def _columns(call: FunctionCall) -> list[list[Value]]:
    columns: list[list[Value]] = []
    for x in call.names:
        direction = placeholder("direction", x.type)
        douts = pushforward(call.results, [x], [direction])
        flat = [_or_zeros(d, r) for d, r in zip(douts, call.results, strict=True)]
        spread = batch(flat, {direction: _basis(x)}, dim_prod(x.shape))
        columns.append(
            [d.moveaxis(0, -1).reshape((*r.shape, *x.shape)) for d, r in zip(spread, call.results, strict=True)]
        )
    return [[column[i] for column in columns] for i in range(len(call.results))]


def _rows(call: FunctionCall) -> list[list[Value]]:
    rows: list[list[Value]] = []
    for r in call.results:
        seed = placeholder("seed", r.type)
        grads = [_or_zeros(g, x) for g, x in zip(pullback([r], [seed], call.names), call.names, strict=True)]
        spread = batch(grads, {seed: _basis(r)}, dim_prod(r.shape))
        rows.append([g.reshape((*r.shape, *x.shape)) for g, x in zip(spread, call.names, strict=True)])
    return rows
