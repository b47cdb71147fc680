"""Transformer layers by the names of their weights: attention and feed-forward, norms before or after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata.errors import FileError
from strata.mir import Value
from strata.models.blocks.activations import activated, activation_of
from strata.models.config_values import MOST, whole
from strata.models.weights import WeightBuilder, ops


@dataclass(frozen=True, kw_only=True)
class LayerNames:
    """How the weights of a layer are called; `at` has the layer's number open."""

    at: str
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.out_proj"
    norm1: str = "self_attn_layer_norm"
    up: str = "fc1"
    down: str = "fc2"
    norm2: str = "final_layer_norm"


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """The sizes of a stack of layers. `is_pre` says that norms come before attention and feed-forward, not after."""

    hidden: int
    layers: int
    heads: int
    inner: int
    eps: float = 1e-5
    activation: str = "gelu"
    is_pre: bool = True

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise FileError(f"the configuration has {self.hidden} features for {self.heads} heads", code="F140")


def half_sizes(
    found: Mapping[str, Any], *, layers: int, heads: int, inner: int, hidden: int, activation: str = "gelu",
    is_pre: bool = True,
) -> tuple[LayerSizes, LayerSizes]:  # fmt: skip
    """The sizes of an encoder and its decoder, by the names that BART has for them; the numbers are defaults."""

    def half(name: str) -> LayerSizes:
        return LayerSizes(
            hidden=whole(found, "d_model", hidden), layers=whole(found, f"{name}_layers", layers), is_pre=is_pre,
            heads=whole(found, f"{name}_attention_heads", heads), inner=whole(found, f"{name}_ffn_dim", inner),
            activation=activation_of(found, "activation_function", activation),
        )  # fmt: skip

    return half("encoder"), half("decoder")


class TransformerBuilder(WeightBuilder):
    """A graph of transformer layers under construction."""

    def attended(
        self, x: Value, at: str, names: LayerNames, sizes: LayerSizes, *, memory: Value | None = None,
        **fields: Any,
    ) -> Value:  # fmt: skip
        """Attention of x [B, S, H] to itself or to a memory, projected; `fields` are those of `ops.attention`."""
        h, source = sizes.hidden, x if memory is None else memory
        q = self.linear(x, at + names.q, h, h)
        k, v = (self.linear(source, at + name, h, h) for name in (names.k, names.v))
        mixed = ops.attention(q, k, v, num_heads=sizes.heads, kv_heads=sizes.heads, layout="bsd", **fields)
        return self.linear(mixed, at + names.o, h, h)

    def feed_forward(self, x: Value, at: str, names: LayerNames, sizes: LayerSizes) -> Value:
        inner = activated(self.linear(x, at + names.up, sizes.inner, sizes.hidden), sizes.activation)
        return self.linear(inner, at + names.down, sizes.hidden, sizes.inner)

    def layer(self, x: Value, number: int, names: LayerNames, sizes: LayerSizes, **fields: Any) -> Value:
        """Attention and feed-forward, each added to what goes in, and normalised before or after."""
        at = names.at.format(number)
        for norm, block in ((names.norm1, self.attended), (names.norm2, self.feed_forward)):
            more = fields if block == self.attended else {}
            if sizes.is_pre:
                x = x + self.scaled(
                    block(self.layer_norm(x, at + norm, sizes.hidden, sizes.eps), at, names, sizes, **more),
                    at, norm, sizes,
                )  # fmt: skip
            else:
                x = self.layer_norm(x + block(x, at, names, sizes, **more), at + norm, sizes.hidden, sizes.eps)
        return x

    def scaled(self, x: Value, at: str, norm: str, sizes: LayerSizes) -> Value:
        """What a layer adds, times a learned factor where the family has one."""
        del at, norm, sizes
        return x

    def stack(self, x: Value, names: LayerNames, sizes: LayerSizes, **fields: Any) -> Value:
        for i in range(sizes.layers):
            x = self.layer(x, i, names, sizes, **fields)
        return x

    def classified(self, x: Value, name: str = "classifier") -> dict[str, Value]:
        """Logits of labels, where the weights have a head for them."""
        if not self.has(f"{name}.weight"):
            return {}
        return {"logits": self.linear(x, name, int(self.weights[f"{name}.weight"].shape[0]), x.shape[-1].__index__())}


def pair(found: Mapping[str, Any], key: str, default: int | None = None, *, most: int = MOST) -> tuple[int, int]:
    """A height and a width: one number for both, or a list of two."""
    value = found.get(key)
    if isinstance(value, list) and len(value) == 2:
        return whole({key: value[0]}, key, most=most), whole({key: value[1]}, key, most=most)
    size = whole(found, key, default, most=most)
    return size, size
