"""Control flow and user-defined derivatives for functions on pytrees of tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import update_wrapper, wraps
from typing import Any

from strata import ops
from strata.core import flatten, here, tree_map, unflatten
from strata.errors import OptionError, ShapeError
from strata.kinds import counted
from strata.mir import Value, placeholder
from strata.ops import CustomFn, make_graph, numbered, trace_body, zeros
from strata.tensor.functional import value_of, values_of
from strata.tensor.tensor import Tensor, lowered


def _tree_values(tree: Any, what: str) -> Any:
    return tree_map(lambda x: value_of(x, what), tree)


def tree_tensors(tree: Any) -> Any:
    return tree_map(lambda v: Tensor(v) if isinstance(v, Value) else v, tree)


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    *,
    reverse: bool = False,
    checkpoints: int | None = None,
) -> tuple[Any, Any]:
    """(carry, y) = body(carry, x) over the leading axis of `xs`: the last carry and all y, stacked. Any pytrees.

    With `checkpoints` = K the backward pass keeps K carries instead of one a step and computes the others again; 0,
    like the number of steps, keeps them all.
    """
    carry, ys = ops.scan(
        lowered(body),
        _tree_values(init, "scan"),
        _tree_values(xs, "scan"),
        length,
        reverse=reverse,
        checkpoints=checkpoints,
    )
    return tree_tensors(carry), tree_tensors(ys)


def cond(predicate: Any, then: Callable[..., Any], orelse: Callable[..., Any], *args: Any) -> Any:
    """then(*args) where the predicate, one bool, is true, else orelse(*args); only that branch is computed."""
    if not callable(then) or not callable(orelse):
        raise OptionError("cond: takes a predicate, two functions and their arguments", code="O251", place=here())
    values = _tree_values(list(args), "cond")
    return tree_tensors(ops.cond(value_of(predicate, "cond"), lowered(then), lowered(orelse), *values))


def while_loop(cond: Callable[[Any], Any], body: Callable[[Any], Any], init: Any, max_iter: int | None = None) -> Any:
    """body(body(…body(init))) as long as cond(state) is true; reverse-mode derivatives need `max_iter`."""
    return tree_tensors(ops.while_loop(lowered(cond), lowered(body), _tree_values(init, "while_loop"), max_iter))


def checkpoint(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with a backward pass that computes its intermediate values again instead of keeping them."""

    @wraps(fn, updated=())
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        inner = ops.checkpoint(lowered(lambda *given: fn(*given, **kwargs)))
        return tree_tensors(inner(*_tree_values(list(args), "checkpoint")))

    return checkpointed


# ------------------------------------------------------------------------------------------------------ own derivatives


class CustomDerivative:
    """A function with its own derivatives, set by `defvjp` and `defjvp`; a mode that is not set follows `fn`."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        if not callable(fn):
            raise OptionError(f"takes a function, got {type(fn).__name__}", code="T211", place=here())
        update_wrapper(self, fn, updated=())
        self.fn = fn
        self.backward: Callable[..., Any] | None = None
        self.tangent: Callable[..., Any] | None = None
        self._in_rule: ContextVar[bool] = ContextVar("in_rule", default=False)

    def defvjp(self, *rules: Callable[..., Any]) -> Callable[..., Any]:
        """backward(args, out, ct) → cotangents; or forward(*args) → (out, saved), backward(saved, ct) → cotangents."""
        if len(rules) == 1:
            (backward,) = rules
            self.backward = backward
        elif len(rules) == 2:
            forward, saved_backward = rules
            self.backward = lambda args, out, ct: saved_backward(forward(*args)[1], ct)
        else:
            raise OptionError(f"defvjp: takes one rule or two, got {len(rules)}", code="T214", place=here())
        return rules[-1]

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """rule(primals, tangents) → (out, tangent of out)."""
        self.tangent = rule
        return rule

    def __call__(self, *args: Any) -> Any:
        if self._in_rule.get():  # a rule may call the function; what it gets is the plain one
            return self.fn(*args)
        values, structure = values_of(list(args), self._name)
        traced = trace_body(lowered(self.fn), unflatten(structure, values), self._name)
        ops.require_no_traced_captures(traced.captures, self._name)
        leaves = [*numbered("a", traced.inputs), *numbered("k", traced.captures)]
        forward = make_graph(self._name, leaves, traced.results)
        token = self._in_rule.set(True)
        try:
            backward = None if self.backward is None else self._backward_graph(traced, leaves, structure)
            tangent = None if self.tangent is None else self._tangent_graph(traced, leaves, structure)
        finally:
            self._in_rule.reset(token)
        outs = CustomFn(forward, backward, tangent)(*values, *traced.captures)
        return tree_tensors(traced.restore(outs))

    @property
    def _name(self) -> str:
        return str(getattr(self.fn, "__name__", "function")).replace("<lambda>", "lambda")

    def _suffixed(self, name: str, results: Any) -> list[str]:
        return [name] if len(results) == 1 else [f"{name}_{i}" for i in range(len(results))]

    def _backward_graph(self, traced: Any, leaves: Any, structure: Any) -> Any:
        assert self.backward is not None
        args = tree_tensors(unflatten(structure, traced.inputs))
        outs = [placeholder("out", r.type) for r in traced.results]
        cts = [placeholder("ct", r.type) for r in traced.results]
        given = self.backward(tuple(args), tree_tensors(traced.restore(outs)), tree_tensors(traced.restore(cts)))
        found = _one_each(given, args, structure, f"{self._name}: the backward rule")
        results = [
            zeros(x.shape, x.dtype) if g is None else g
            for x, g in zip([v for _, v in leaves], [*found, *[None] * len(traced.captures)], strict=True)
            if x.dtype.is_inexact
        ]
        self._check_types(results, [v for _, v in leaves if v.dtype.is_inexact])
        names = [*zip(self._suffixed("primal_output", outs), outs, strict=True)]
        names += [(n, c) for n, c in zip(self._suffixed("d_output", cts), cts, strict=True) if c.dtype.is_inexact]
        return make_graph(f"{self._name}_vjp", [*leaves, *names], results)

    def _tangent_graph(self, traced: Any, leaves: Any, structure: Any) -> Any:
        assert self.tangent is not None
        tangents = [placeholder("t", v.type) for v in traced.inputs]
        args, directions = (tree_tensors(unflatten(structure, v)) for v in (traced.inputs, tangents))
        pair = self.tangent(tuple(args), tuple(directions))
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise OptionError(f"{self._name}: the tangent rule must return (out, tangent)", code="T215", place=here())
        douts, _ = values_of(pair[1], self._name)
        wanted = [r for r in traced.results if r.dtype.is_inexact]
        kept = [d for d, r in zip(douts, traced.results, strict=True) if r.dtype.is_inexact]
        self._check_types(kept, wanted)
        names = [(f"tangent_{i}", t) for i, t in enumerate(tangents) if t.dtype.is_inexact]
        extra = [(f"tangent_{i}", placeholder("t", v.type)) for i, (_, v) in enumerate(leaves) if i >= len(tangents)]
        names += [(n, v) for n, v in extra if v.dtype.is_inexact]
        return make_graph(f"{self._name}_jvp", [*leaves, *names], kept)

    def _check_types(self, given: Any, wanted: Any) -> None:
        for x, y in zip(given, wanted, strict=True):
            if x.type != y.type:
                raise ShapeError(
                    f"{self._name}: a derivative rule gave {x.type}, it must be {y.type}", code="S359", place=here()
                )


def _one_each(given: Any, args: Any, structure: Any, what: str) -> list[Value | None]:
    """A value or None for each leaf of the arguments, from a tuple with an entry, perhaps None, for each argument."""
    entries = list(given) if isinstance(given, (tuple, list)) else [given]
    if len(entries) != len(args):
        raise OptionError(
            f"{what} gave {counted(len(entries), 'cotangent')} for {counted(len(args), 'argument')}",
            code="T216",
            place=here(),
        )
    found: list[Value | None] = []
    for entry, child in zip(entries, structure.children, strict=True):
        leaves, shape = flatten(entry)
        if entry is None:
            found += [None] * child.num_leaves
        elif shape == child:
            found += [value_of(x, what) for x in leaves]
        else:
            raise OptionError(f"{what} gave the structure {shape} for an argument {child}", code="T216", place=here())
    return found


def custom_vjp(fn: Callable[..., Any]) -> CustomDerivative:
    """A function whose gradient is set by `fn.defvjp(...)`; tangents follow `fn`, unless `fn.defjvp` is set, too."""
    return CustomDerivative(fn)


def custom_jvp(fn: Callable[..., Any]) -> CustomDerivative:
    """A function whose tangent is set by `fn.defjvp(...)`; gradients follow `fn`, unless `fn.defvjp` is set, too."""
    return CustomDerivative(fn)
