"""Pytrees: nested dicts, lists, tuples, named tuples and dataclasses, flattened to leaves and rebuilt.

A class takes part with `__tree_flatten__(self)`, which gives (keys, parts, static), and the class method
`__tree_unflatten__(keys, parts, static)`; `static` is a tuple of (name, value) that can be hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np

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


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """Leaves in a fixed order (dict keys sorted) and the structure."""
    return _walked(tree, _structure)


def signature(tree: Any) -> tuple[list[Any], Any]:
    """The same leaves, and the structure as plain tuples, which hash quickly; what is fixed in it is told exactly."""
    return _walked(tree, _key)


def _walked(tree: Any, walk: Callable[[Any, list[Any]], Any]) -> tuple[list[Any], Any]:
    leaves: list[Any] = []
    try:
        return leaves, walk(tree, leaves)
    except RecursionError:
        raise endless(tree) from None


def endless(tree: Any) -> OptionError:
    """The error of a tree that contains itself, or is too deep to be walked over."""
    kind = type(tree).__name__
    return OptionError(f"a {kind} contains itself, or is nested too deeply: it is not a tree", code="O132")


@lru_cache(maxsize=1024)
def _kind_of(cls: type) -> str:
    """What trees of a class are, as `TreeDef` calls it."""
    if cls is type(None):
        return "none"
    if issubclass(cls, dict):
        return "dict"
    if issubclass(cls, (list, tuple)):
        return "list" if issubclass(cls, list) else "named" if hasattr(cls, "_fields") else "tuple"
    if hasattr(cls, "__tree_flatten__"):  # its objects say themselves what they are made of
        return "object"
    return "dataclass" if is_dataclass(cls) and not getattr(cls, "__tree_leaf__", False) else "leaf"


def _walker(node: Callable[..., Any], leaf: Any, none: Any) -> Callable[[Any, list[Any]], Any]:
    """What adds the leaves of a tree to a list, and gives its structure in these terms."""

    def walk(tree: Any, leaves: list[Any]) -> Any:
        cls: Any = type(tree)
        kind = _kind_of(cls)
        if kind == "leaf":
            leaves.append(tree)
            return leaf
        if kind == "none":
            return none
        keys: tuple[Any, ...] = ()
        static: tuple[tuple[str, Any], ...] = ()
        parts: Any = tree
        if kind == "list" or kind == "tuple":
            cls = None
        elif kind == "dict":
            keys = tuple(sorted(tree, key=str))
            parts = [tree[k] for k in keys]
        elif kind == "object":
            keys, parts, static = tree.__tree_flatten__()
        elif kind == "dataclass":
            keys, parts, static = _fields_of(tree)
        else:
            keys = tree._fields
        return node(kind, cls, keys, tuple([walk(x, leaves) for x in parts]), static)

    return walk


def _fields_of(tree: Any) -> tuple[tuple[str, ...], list[Any], tuple[tuple[str, Any], ...]]:
    """Of a dataclass, as `__tree_flatten__` gives them."""
    keys = tuple(f.name for f in fields(tree) if not f.metadata.get("static"))
    static = tuple((f.name, getattr(tree, f.name)) for f in fields(tree) if f.metadata.get("static"))
    return keys, [getattr(tree, name) for name in keys], static


_structure = _walker(TreeDef, LEAF, _NONE)
_key = _walker(
    lambda kind, cls, keys, children, static: (kind, cls, keys, children, exact(static) if static else ()), 0, None
)


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
    late = {f.name for f in fields(cls) if not f.init}  # set by the class, or by whoever has it
    if not late:
        return lambda leaves: cls(**dict(zip(keys, children(leaves), strict=True)), **dict(static))

    def rebuilt(leaves: Iterator[Any]) -> Any:
        given = {**dict(zip(keys, children(leaves), strict=True)), **dict(static)}
        made = cls(**{name: x for name, x in given.items() if name not in late})
        for name in late:
            object.__setattr__(made, name, given[name])
        return made

    return rebuilt


def _children(treedefs: Sequence[TreeDef]) -> Callable[[Iterator[Any]], list[Any]]:
    if all(c.kind == "leaf" for c in treedefs):
        count = len(treedefs)
        return lambda leaves: list(islice(leaves, count))
    makers = [builder(c) for c in treedefs]
    return lambda leaves: [make(leaves) for make in makers]


# adds the leaves of a tree to a list; False or a KeyError where the tree has another structure
Taker = Callable[[Any, list[Any]], bool]


def taker(treedef: TreeDef) -> Taker:
    """What takes trees of one structure apart, made once for one that comes often. Leaves are not looked at."""
    if treedef.kind == "leaf":
        return _take_leaf
    if treedef.kind == "none":
        return lambda tree, leaves: tree is None
    parts, count, keys = _parts_taker(treedef.children), len(treedef.children), treedef.keys
    if treedef.kind in ("object", "dataclass"):
        return _object_taker(treedef, parts)
    cls: Any = treedef.cls or {"list": list, "tuple": tuple}[treedef.kind]
    if not count:
        return lambda tree, leaves: type(tree) is cls and not tree
    pick: Any = None
    if treedef.kind == "dict":
        pick = itemgetter(*keys) if count > 1 else lambda tree: (tree[keys[0]],)

    def take(tree: Any, leaves: list[Any]) -> bool:
        if type(tree) is not cls or len(tree) != count:
            return False
        items = tree if pick is None else pick(tree)
        if parts is not None:
            return parts(items, leaves)
        leaves += items
        return True

    return take


def _take_leaf(tree: Any, leaves: list[Any]) -> bool:
    leaves.append(tree)
    return True


def _parts_taker(treedefs: Sequence[TreeDef]) -> Taker | None:
    """For as many trees as there are structures; None where all are leaves."""
    takers = [taker(c) for c in treedefs]
    if all(take is _take_leaf for take in takers):
        return None

    def each(trees: Any, leaves: list[Any]) -> bool:
        for take, tree in zip(takers, trees, strict=True):  # noqa: SIM110 - a loop is quicker than a generator
            if not take(tree, leaves):
                return False
        return True

    return each


def _object_taker(treedef: TreeDef, parts: Taker | None) -> Taker:
    cls: Any = treedef.cls
    keys, fixed, known = treedef.keys, treedef.static, exact(treedef.static)
    split = cls.__tree_flatten__ if treedef.kind == "object" else _fields_of
    types = [type(v) for _, v in fixed]
    plain = all(
        t in (bool, int, float, str, type(None)) and (t is not float or v)
        for t, (_, v) in zip(types, fixed, strict=True)
    )

    def take(tree: Any, leaves: list[Any]) -> bool:
        if type(tree) is not cls:
            return False
        found, items, static = split(tree)
        if found != keys or static != fixed:
            return False
        if static is not fixed and ([type(v) for _, v in static] != types if plain else exact(static) != known):
            return False
        if parts is not None:
            return parts(items, leaves)
        leaves += items
        return True

    return take


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
