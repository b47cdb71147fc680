"""Random ops: torch's own generator fills an input before the program runs, so that seeds mean what they mean in torch.

The draws of a program are made in the order of its ops, with the calls that torch makes, so the bits are torch's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from strata import ops
from strata.core import TensorType, bool_, f32, f64
from strata.mir import Value
from strata.torch.aten.losses import outside
from strata.torch.aten.promotion import value
from strata.torch.kinds import torch_dtype
from strata.torch.table import Checked, Unsupported, overload_name

DRAWS: dict[str, Callable[..., Any]] = {}


def _draws(*overloads: str) -> Callable[[Any], Any]:
    def wrap(rule: Any) -> Any:
        for name in overloads:
            DRAWS[f"aten::{name if '.' in name else name + '.default'}"] = rule
        return rule

    return wrap


def _plain(options: dict[str, Any]) -> None:
    if options.get("generator") is not None:
        raise Unsupported("a generator of its own")


def _direct(fill: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """rand, randn: the shape and the type say all."""

    def rule(build: Any, node: Any, out: TensorType, *args: Any, **options: Any) -> Value:
        _plain(options)
        return build.drawn(node, out, fill)

    return rule


_draws("rand", "rand_like")(_direct(torch.Tensor.uniform_))
_draws("randn", "randn_like")(_direct(torch.Tensor.normal_))


@_draws("randint", "randint.low", "randint_like", "randint_like.low_dtype")
def randint(build: Any, node: Any, out: TensorType, *args: Any, **options: Any) -> Value:
    _plain(options)
    numbers = [a for a in args if isinstance(a, int)]
    low, high = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    return build.drawn(node, out, lambda t: t.random_(low, high))


@_draws("randperm")
def randperm(build: Any, node: Any, out: TensorType, n: Any, **options: Any) -> Value:
    _plain(options)
    return build.drawn(node, out, lambda t: torch.randperm(len(t), dtype=t.dtype, device=t.device))


@_draws("native_dropout")
def native_dropout(build: Any, node: Any, out: Any, x: Value, p: float, train: bool | None) -> Any:
    if not train:
        return [x, ops.full(x.shape, True, bool_)]
    if p == 1:
        return [x * value(0, x.dtype), ops.full(x.shape, False, bool_)]
    kept = build.drawn(node, TensorType(bool_, x.shape), lambda t: t.bernoulli_(1 - p).bool(), torch_dtype(x.dtype))
    scale = value(1 / (1 - p), x.dtype)
    return [x * value(kept, x.dtype) * scale, kept]


@_draws("bernoulli.p")
def bernoulli(build: Any, node: Any, out: TensorType, x: Value, p: float = 0.5, **options: Any) -> Value:
    _plain(options)
    return build.drawn(node, out, lambda t: t.bernoulli_(p))


@_draws("bernoulli", "bernoulli.Tensor")
def bernoulli_of_each(build: Any, node: Any, out: TensorType, x: Value, p: Value | None = None, **options: Any) -> Any:
    """Each element with a probability of its own, drawn as torch draws it."""
    _plain(options)
    chances = x if p is None else p
    chances = chances if chances.dtype is f64 else value(chances, f32)
    drawn = build.drawn(node, TensorType(chances.dtype, out.shape), torch.Tensor.uniform_)
    told = "Expected p_in >= 0 && p_in <= 1 to be true, but got false."
    return build.checked(Checked(value(ops.less(drawn, chances), out.dtype), outside(chances), told))


def _filled(name: str, *defaults: float) -> Any:
    """A draw that `t.<name>_(...)` makes, whatever was there before."""

    def rule(build: Any, node: Any, out: TensorType, x: Value, *args: float, **options: Any) -> Value:
        generator, named = options.pop("generator", None), tuple(options.values())
        _plain({"generator": generator})
        given = (*args, *named, *defaults[len(args) + len(named) :])
        return build.drawn(node, out, lambda t: getattr(t, f"{name}_")(*given))

    return rule


_draws("uniform")(_filled("uniform", 0.0, 1.0))
_draws("normal_functional")(_filled("normal", 0.0, 1.0))
_draws("exponential")(_filled("exponential", 1.0))
_draws("cauchy")(_filled("cauchy", 0.0, 1.0))
_draws("log_normal")(_filled("log_normal", 1.0, 2.0))
_draws("geometric")(_filled("geometric"))


@_draws("normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor")
def normal(build: Any, node: Any, out: TensorType, mean: Any, std: Any = 1.0, **options: Any) -> Value:
    _plain(options)
    if isinstance(std, Value):
        drawn = build.drawn(node, out, torch.Tensor.normal_)
        wrong = ops.any(ops.logical_not(ops.greater_equal(std, value(0, std.dtype))))
        made = drawn * value(std, out.dtype) + value(mean, out.dtype)
        return build.checked(Checked(made, wrong, "normal expects all elements of std >= 0.0"))
    drawn = build.drawn(node, out, lambda t: t.normal_(0.0, std))
    return drawn + value(mean, out.dtype)


def draws(node: fx.Node) -> bool:
    """Whether an op takes numbers from torch's generator."""
    target = node.target
    if overload_name(target) in DRAWS:
        return True
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags
    return isinstance(target, torch._ops.HigherOrderOperator) and "rng_state" in target.name()


class _After(torch.nn.Module):
    """An op that runs after another one."""

    def __init__(self, target: Callable[..., Any]) -> None:
        super().__init__()
        self.target = target

    def forward(self, earlier: Any, *args: Any, **options: Any) -> Any:
        return self.target(*args, **options)


def keep_order(gm: fx.GraphModule, nodes: list[fx.Node]) -> None:
    """Make ops that draw run in their order, whatever is done to the graph: each depends on the one before it."""
    earlier = nodes[0]
    for at, node in enumerate(nodes[1:]):
        name = f"drawn_{at}"
        gm.add_submodule(name, _After(node.target))  # type: ignore[arg-type]
        with gm.graph.inserting_before(node):
            if isinstance(earlier.meta["val"], (tuple, list)):  # users of tuples take them apart
                first = gm.graph.call_function(operator.getitem, (earlier, 0))
                first.meta["val"] = earlier.meta["val"][0]
                earlier = first
            made = gm.graph.call_module(name, (earlier, *node.args), dict(node.kwargs))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)
        earlier = made
