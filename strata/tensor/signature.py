"""The structure of a call's arguments as plain tuples: what `flatten` finds, in a form that hashes at native speed."""

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
        return (kind, keys, fixed, *[outline_arguments(x, leaves) for x in parts])
    if isinstance(tree, (dict, list, tuple)):
        items = [tree[k] for k in sorted(tree, key=str)] if isinstance(tree, dict) else list(tree)
        keys = tuple(sorted(tree, key=str)) if isinstance(tree, dict) else ()
        return (kind, keys, *[outline_arguments(x, leaves) for x in items])
    if is_dataclass(kind) and not getattr(kind, "__tree_leaf__", False):
        dynamic = [f.name for f in fields(kind) if not f.metadata.get("static")]
        static = tuple(getattr(tree, f.name) for f in fields(kind) if f.metadata.get("static"))
        return (kind, static, *[outline_arguments(getattr(tree, name), leaves) for name in dynamic])
    leaves.append(tree)
    return 0
