"""Activations by the names that configurations have for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata.errors import FileError
from strata.mir import Value
from strata.models.config_values import text
from strata.models.weights import ops

SQUARED = "relu2"  # the square of relu, which is no activation of its own
ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh", "gelu_python": "gelu", "quick_gelu": "quick_gelu", "relu": "relu", SQUARED: SQUARED,
    "silu": "silu", "swish": "silu", "tanh": "tanh", "relu6": "relu6", "sigmoid": "sigmoid",
    "leaky_relu": "leaky_relu", "mish": "mish", "linear": "linear",
}  # fmt: skip


def activation_of(found: Mapping[str, Any], key: str = "hidden_act", default: str = "gelu") -> str:
    """The activation that a configuration names, under our name for it."""
    name = text(found, key, default)
    if name not in ACTIVATIONS:
        raise FileError(f"the configuration has {key} = {name!r:.60}, none of {', '.join(ACTIVATIONS)}", code="F140")
    return ACTIVATIONS[name]


def activated(x: Value, kind: str) -> Value:
    """A value behind one of the activations."""
    if kind == "linear":
        return x
    if kind == SQUARED:
        x = ops.relu(x)
        return x * x
    found: Value = ops.activation(x, kind)
    return found
