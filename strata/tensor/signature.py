"""Signatures: the structure of a call's arguments as plain tuples that hash quickly."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from strata.tensor.tensor import Tensor


def outline_arguments(tree: Any, leaves: list[Any]) -> Any:
    """The structure of a pytree; its leaves are added to `leaves` in the order of `strata.core.flatten`."""
    kind = type(tree)
    if kind is Tensor or kind is np.ndarray:
        leaves.append(tree)
        return 0
    if kind is list or kind is tuple:
        return (kind, *[outline_arguments(x, leaves) for x in tree])
    if kind is dict:
        keys = tuple(sorted(tree, key=str))
        return (dict, keys, *[outline_arguments(tree[k], leaves) for k in keys])
    if tree is None:
        return None
    if hasattr(kind, "__tree_flatten__"):
        keys, parts, fixed = tree.__tree_flatten__()
        return (kind, keys, exact(fixed), *[outline_arguments(x, leaves) for x in parts])
    if isinstance(tree, (dict, list, tuple)):
        items = [tree[k] for k in sorted(tree, key=str)] if isinstance(tree, dict) else list(tree)
        keys = tuple(sorted(tree, key=str)) if isinstance(tree, dict) else ()
        return (kind, keys, *[outline_arguments(x, leaves) for x in items])
    if is_dataclass(kind) and not getattr(kind, "__tree_leaf__", False):
        dynamic = [f.name for f in fields(kind) if not f.metadata.get("static")]
        static = tuple(getattr(tree, f.name) for f in fields(kind) if f.metadata.get("static"))
        return (kind, exact(static), *[outline_arguments(getattr(tree, name), leaves) for name in dynamic])
    leaves.append(tree)
    return 0


def exact(x: Any) -> Any:
    """A key for what is fixed in a graph. 1, 1.0 and True are equal, as are 0.0 and -0.0, but not what they compute."""
    kind = type(x)
    if isinstance(x, (float, complex)):
        return kind, repr(x)  # NaN, too, which is not equal to itself
    if isinstance(x, np.generic):
        return kind, x.tobytes()
    if isinstance(x, tuple):
        return (kind, *map(exact, x))
    if isinstance(x, frozenset):
        return kind, frozenset(map(exact, x))
    if is_dataclass(x) and not isinstance(x, type) and kind.__hash__ is not None:
        return (kind, x, *[exact(getattr(x, f.name)) for f in fields(x) if f.compare])
    return kind, x
