"""Linear, embedding, normalisation, dropout, sequential layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from typing import Any, ClassVar

import strata.tensor as tensors
from strata.core import here
from strata.errors import OptionError
from strata.nn import initial
from strata.nn.module import Module
from strata.tensor import Tensor, ones, random, zeros

ops: Any = tensors


class Linear(Module):
    """x Wᵀ + b, with W [out, in]."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, key: Any = None, dtype: Any = "f32"
    ) -> None:
        first, second = random.split(initial.key_or_next(key))
        self.weight = initial.kaiming_uniform(first, (out_features, in_features), dtype)
        self.bias = initial.uniform(second, (out_features,), 1 / sqrt(max(1, in_features)), dtype) if bias else None

    def __call__(self, x: Any) -> Tensor:
        y: Tensor = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class Embedding(Module):
    """Rows of a table by number."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, key: Any = None, dtype: Any = "f32") -> None:
        self.weight = initial.normal(initial.key_or_next(key), (num_embeddings, embedding_dim), 1.0, dtype)

    def __call__(self, ids: Any) -> Tensor:
        rows: Tensor = ops.embedding(ids, self.weight)
        return rows


def _shape(size: int | Sequence[int]) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)


class LayerNorm(Module):
    """Zero mean and unit variance over the last axes."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        dtype: Any = "f32",
    ) -> None:
        self.shape, self.eps = _shape(normalized_shape), eps
        self.weight = ones(self.shape, dtype).realize() if elementwise_affine else None
        self.bias = zeros(self.shape, dtype).realize() if elementwise_affine and bias else None

    def __call__(self, x: Any) -> Tensor:
        axes = -1 if len(self.shape) == 1 else tuple(range(-len(self.shape), 0))
        y: Tensor = ops.layer_norm(x, self.weight, self.bias, axis=axes, eps=self.eps)
        return y


class RMSNorm(Module):
    """Unit root mean square over the last axis."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float = 1e-6, *, dtype: Any = "f32") -> None:
        self.shape, self.eps = _shape(normalized_shape), eps
        self.weight = ones(self.shape, dtype).realize()

    def __call__(self, x: Any) -> Tensor:
        axes = -1 if len(self.shape) == 1 else tuple(range(-len(self.shape), 0))
        y: Tensor = ops.rms_norm(x, self.weight, axis=axes, eps=self.eps)
        return y


class BatchNorm(Module):
    """Batch norm of [N, C, …] for any number of axes after the channels.

    In training it uses the statistics of the batch and moves its own towards them: on the module it is called on, which
    inside `jit` and `grad` is a copy, so return the module to keep them.
    """

    buffers: ClassVar[tuple[str, ...]] = ("running_mean", "running_var")

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True, *, dtype: Any = "f32"
    ) -> None:
        self.eps, self.momentum = eps, momentum
        self.weight = ones((num_features,), dtype).realize() if affine else None
        self.bias = zeros((num_features,), dtype).realize() if affine else None
        self.running_mean = zeros((num_features,), dtype).realize()
        self.running_var = ones((num_features,), dtype).realize()

    def __call__(self, x: Any) -> Tensor:
        given = (x, self.weight, self.bias, self.running_mean, self.running_var)
        if not self.training:
            y: Tensor = ops.batch_norm(*given, eps=self.eps)
            return y
        y, self.running_mean, self.running_var = ops.batch_norm(
            *given, training=True, momentum=self.momentum, eps=self.eps
        )
        return y


BatchNorm1d = BatchNorm2d = BatchNorm3d = BatchNorm


class GroupNorm(Module):
    """Zero mean and unit variance over groups of channels of [N, C, …]."""

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, *, dtype: Any = "f32"
    ) -> None:
        if num_channels % num_groups:
            raise OptionError(
                f"GroupNorm: {num_channels} channels do not split into {num_groups} groups", code="O281", place=here()
            )
        self.num_groups, self.eps = num_groups, eps
        self.weight = ones((num_channels,), dtype).realize() if affine else None
        self.bias = zeros((num_channels,), dtype).realize() if affine else None

    def __call__(self, x: Any) -> Tensor:
        y: Tensor = ops.group_norm(x, self.num_groups, self.weight, self.bias, eps=self.eps)
        return y


class Dropout(Module):
    """Zero elements at random in training; the key says which, and is asked for at every call."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, x: Any, key: Any = None) -> Any:
        if not self.training or self.p == 0:
            return x
        if key is None:
            raise OptionError("Dropout: in training a call needs a key", code="O282", place=here(), fix="layer(x, key)")
        return ops.dropout(x, key, self.p)


class Activation(Module):
    """An element-wise function as a layer."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, x: Any) -> Tensor:
        y: Tensor = getattr(x, self.name)()
        return y


def _activation(name: str) -> Callable[[], Activation]:
    return lambda: Activation(name)


ReLU, GELU, SiLU, Tanh, Sigmoid = (_activation(n) for n in ("relu", "gelu", "silu", "tanh", "sigmoid"))


class Function(Module):
    """Any function as a layer."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn

    def __call__(self, x: Any) -> Any:
        return self.fn(x)


class Flatten(Module):
    """All axes after the first as one."""

    def __call__(self, x: Any) -> Tensor:
        y: Tensor = x.reshape((x.shape[0], -1))
        return y


class Sequential(Module):
    """Layers in a row; functions count as layers. A key is split among the layers that take one."""

    def __init__(self, *layers: Any) -> None:
        self.layers = [layer if isinstance(layer, Module) else Function(layer) for layer in layers]

    def children(self) -> Iterator[tuple[str, Any]]:
        """As in torch, layers are called by their place alone."""
        yield from ((str(i), layer) for i, layer in enumerate(self.layers))

    def __call__(self, x: Any, key: Any = None) -> Any:
        takers = [i for i, layer in enumerate(self.layers) if isinstance(layer, (Dropout, Sequential))]
        keys = random.split(key, len(takers)) if key is not None and takers else None
        for i, layer in enumerate(self.layers):
            x = layer(x, keys[takers.index(i)]) if keys is not None and i in takers else layer(x)
        return x

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, i: int) -> Any:
        return self.layers[i]
