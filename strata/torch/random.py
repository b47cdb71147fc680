"""Random ops: torch's own generator fills an input before the program runs, so that seeds mean what they mean in torch.

The draws of a program are made in the order of its ops, with the calls that torch makes, so the bits are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from strata import ops
from strata.core import TensorType, bool_
from strata.mir import Value
from strata.torch.aten.promotion import value
from strata.torch.kinds import torch_dtype
from strata.torch.table import Unsupported

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


def _direct(name: str) -> Any:
    """rand, randn: the shape and the type say all."""

    def rule(build: Any, node: Any, out: TensorType, *args: Any, **options: Any) -> Value:
        _plain(options)
        dtype, make = torch_dtype(out.dtype), getattr(torch, name)
        return build.drawn(node, out, lambda shape: make(shape, dtype=dtype))

    return rule


_draws("rand", "rand_like")(_direct("rand"))
_draws("randn", "randn_like")(_direct("randn"))


@_draws("randint", "randint.low", "randint_like", "randint_like.low_dtype")
def randint(build: Any, node: Any, out: TensorType, *args: Any, **options: Any) -> Value:
    _plain(options)
    numbers = [a for a in args if isinstance(a, int)]
    low, high = (0, numbers[0]) if len(numbers) == 1 else numbers[:2]
    dtype = torch_dtype(out.dtype)
    return build.drawn(node, out, lambda shape: torch.randint(low, high, shape, dtype=dtype))


@_draws("randperm")
def randperm(build: Any, node: Any, out: TensorType, n: Any, **options: Any) -> Value:
    _plain(options)
    dtype = torch_dtype(out.dtype)
    return build.drawn(node, out, lambda shape: torch.randperm(shape[0], dtype=dtype))


@_draws("native_dropout")
def native_dropout(build: Any, node: Any, out: Any, x: Value, p: float, train: bool | None) -> Any:
    if not train:
        return [x, ops.full(x.shape, True, bool_)]
    if p == 1:
        return [x * value(0, x.dtype), ops.full(x.shape, False, bool_)]
    kept = build.drawn(node, TensorType(bool_, x.shape), _kept(p, torch_dtype(x.dtype)))
    scale = value(1 / (1 - p), x.dtype)
    return [x * value(kept, x.dtype) * scale, kept]


def _kept(p: float, dtype: torch.dtype) -> Callable[[tuple[int, ...]], torch.Tensor]:
    return lambda shape: torch.empty(shape, dtype=dtype).bernoulli_(1 - p).to(torch.bool)


@_draws("bernoulli.p")
def bernoulli(build: Any, node: Any, out: TensorType, x: Value, p: float = 0.5, **options: Any) -> Value:
    _plain(options)
    dtype = torch_dtype(out.dtype)
    return build.drawn(node, out, lambda shape: torch.empty(shape, dtype=dtype).bernoulli_(p))


@_draws("uniform")
def uniform(
    build: Any, node: Any, out: TensorType, x: Value, low: float = 0.0, high: float = 1.0, **options: Any
) -> Value:
    _plain(options)
    dtype = torch_dtype(out.dtype)
    return build.drawn(node, out, lambda shape: torch.empty(shape, dtype=dtype).uniform_(low, high))


@_draws("normal_functional")
def normal(
    build: Any, node: Any, out: TensorType, x: Value, mean: float = 0.0, std: float = 1.0, **options: Any
) -> Value:
    _plain(options)
    dtype = torch_dtype(out.dtype)
    return build.drawn(node, out, lambda shape: torch.empty(shape, dtype=dtype).normal_(mean, std))
