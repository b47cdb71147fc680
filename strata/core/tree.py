"""Pytrees: nested dicts, lists, tuples, named tuples and dataclasses, flattened to leaves and rebuilt.

A class takes part with `__tree_flatten__(self)`, which gives (keys, parts, static), and the class method
`__tree_unflatten__(keys, parts, static)`; `static` is a tuple of (name, value) that can be hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import islice
from typing import Any

from strata.errors import OptionError


@dataclass(frozen=True, slots=True)
class TreeDef:
    """The structure of a pytree. A leaf has kind "leaf"; `keys` are dict keys or field names."""

    kind: str  # leaf, none, dict, list, tuple, named, dataclass, object
    cls: type | None = None
    keys: tuple[Any, ...] = ()
    children: tuple[TreeDef, ...] = ()
    static: tuple[tuple[str, Any], ...] = ()  # dataclass fields marked metadata={"static": True}, fixed attributes

    @property
    def num_leaves(self) -> int:
        return 1 if self.kind == "leaf" else sum(c.num_leaves for c in self.children)

    def __str__(self) -> str:
        match self.kind:
            case "leaf":
                return "*"
            case "none":
                return "None"
            case "dict":
                return "{" + ", ".join(f"{k!r}: {c}" for k, c in zip(self.keys, self.children, strict=True)) + "}"
            case "list":
                return "[" + ", ".join(map(str, self.children)) + "]"
            case "tuple":
                return "(" + ", ".join(map(str, self.children)) + ("," if len(self.children) == 1 else "") + ")"
        assert self.cls is not None
        inner = ", ".join(f"{k}={c}" for k, c in zip(self.keys, self.children, strict=True))
        return f"{self.cls.__name__}({inner})"


LEAF = TreeDef("leaf")
_NONE = TreeDef("none")


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeDef]:
    """Leaves in a fixed order (dict keys sorted) and the structure."""
    leaves: list[Any] = []
    try:
        return leaves, _flatten(tree, leaves, is_leaf)
    except RecursionError:
        raise endless(tree) from None


def endless(tree: Any) -> OptionError:
    """The error of a tree that contains itself, or is too deep to be walked over."""
    kind = type(tree).__name__
    return OptionError(f"a {kind} contains itself, or is nested too deeply: it is no tree", code="O132")


def _flatten(tree: Any, leaves: list[Any], is_leaf: Callable[[Any], bool] | None) -> TreeDef:
    if tree is None:
        return _NONE
    if is_leaf is not None and is_leaf(tree):
        leaves.append(tree)
        return LEAF
    if isinstance(tree, dict):
        keys = tuple(sorted(tree, key=str))
        return TreeDef("dict", type(tree), keys, tuple(_flatten(tree[k], leaves, is_leaf) for k in keys))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return TreeDef("named", type(tree), tree._fields, tuple(_flatten(x, leaves, is_leaf) for x in tree))
    if isinstance(tree, (list, tuple)):
        kind = "list" if isinstance(tree, list) else "tuple"
        return TreeDef(kind, children=tuple(_flatten(x, leaves, is_leaf) for x in tree))
    if hasattr(type(tree), "__tree_flatten__"):  # an object that says itself what it is made of
        keys, parts, fixed = tree.__tree_flatten__()
        return TreeDef("object", type(tree), keys, tuple(_flatten(x, leaves, is_leaf) for x in parts), fixed)
    if is_dataclass(tree) and not isinstance(tree, type) and not getattr(tree, "__tree_leaf__", False):
        dynamic = tuple(f.name for f in fields(tree) if not f.metadata.get("static"))
        static = tuple((f.name, getattr(tree, f.name)) for f in fields(tree) if f.metadata.get("static"))
        children = tuple(_flatten(getattr(tree, name), leaves, is_leaf) for name in dynamic)
        return TreeDef("dataclass", type(tree), dynamic, children, static)
    leaves.append(tree)
    return LEAF


def unflatten(treedef: TreeDef, leaves: Sequence[Any]) -> Any:
    """Put leaves back into a structure."""
    if len(leaves) != treedef.num_leaves:
        raise OptionError(f"the structure {treedef} has {treedef.num_leaves} leaves, got {len(leaves)}", code="O130")
    return builder(treedef)(iter(leaves))


def builder(treedef: TreeDef) -> Callable[[Iterator[Any]], Any]:
    """What puts leaves into a structure, made once for one that is needed often: as many leaves as it has are taken."""
    if treedef.kind == "leaf":
        return next
    if treedef.kind == "none":
        return lambda leaves: None
    children = _children(treedef.children)
    keys, static, cls = treedef.keys, treedef.static, treedef.cls
    match treedef.kind:
        case "list":
            return children
        case "tuple":
            return lambda leaves: tuple(children(leaves))
        case "dict" if all(c.kind == "leaf" for c in treedef.children):
            return lambda leaves: dict(zip(keys, leaves))  # takes as many leaves as there are keys
        case "dict":
            return lambda leaves: dict(zip(keys, children(leaves), strict=True))
    assert cls is not None
    if treedef.kind == "named":
        return lambda leaves: cls(*children(leaves))
    if treedef.kind == "object":
        make: Any = cls.__tree_unflatten__  # type: ignore[attr-defined]
        return lambda leaves: make(keys, children(leaves), static)
    return lambda leaves: cls(**dict(zip(keys, children(leaves), strict=True)), **dict(static))


def _children(treedefs: Sequence[TreeDef]) -> Callable[[Iterator[Any]], list[Any]]:
    if all(c.kind == "leaf" for c in treedefs):
        count = len(treedefs)
        return lambda leaves: list(islice(leaves, count))
    makers = [builder(c) for c in treedefs]
    return lambda leaves: [make(leaves) for make in makers]


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply a function leaf by leaf to trees of one structure."""
    leaves, treedef = flatten(tree)
    columns = [leaves]
    for other in rest:
        other_leaves, other_def = flatten(other)
        if other_def != treedef:
            raise OptionError(f"the structures {treedef} and {other_def} differ", code="O131")
        columns.append(other_leaves)
    return unflatten(treedef, [fn(*row) for row in zip(*columns, strict=True)])
