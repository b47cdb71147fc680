"""The fast path of calls: arguments with a known structure are flattened without describing them again.

A signature is exact, and takes a microsecond for each leaf. A call that differs from an earlier one in nothing but the
elements of its tensors needs none: types, keys and fixed values are compared as they are met. What does not fit, or is
not computed yet, is left to the signature.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import copysign
from operator import itemgetter
from typing import Any

import numpy as np

from strata.config import Config
from strata.core import TensorType
from strata.runtime import USABLE
from strata.tensor.data import Handle
from strata.tensor.signature import exact
from strata.tensor.tensor import Tensor

FIXED = (bool, int, float, str, type(None))  # leaves other than tensors and arrays that are compared
# adds the leaves of a tree to a list; False where the tree has another structure. Leaves are not looked at
Taker = Callable[[Any, list[Any]], bool]


class UnlikeError(Exception):
    """A structure that calls are not compared with."""


class Repeat:
    """The arguments of a call, to compare others with."""

    __slots__ = (
        "_arrays",
        "_count",
        "_fixed",
        "_keywords",
        "_kinds",
        "_takers",
        "_types",
        "_zeros",
        "settings",
        "variant",
    )

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        static: Collection[int],
        kinds: Sequence[TensorType],
        settings: Config,
        variant: Any,
    ) -> None:
        """`static` are arguments that are leaves, whatever they are; `kinds` are the types of tensors and arrays."""
        self._takers = [_add if i in static else _taker(a) for i, a in enumerate(args)]
        self._keywords = _taker(kwargs)
        leaves = self._leaves(args, kwargs) or []
        self._count, self._types = len(leaves), [type(x) for x in leaves]
        self._fixed = [(i, x) for i, x in enumerate(leaves) if type(x) in FIXED]
        self._zeros = [(i, copysign(1.0, x)) for i, x in self._fixed if type(x) is float and not x]
        inputs = [x for x in leaves if type(x) not in FIXED]
        if any(type(x) not in (Tensor, np.ndarray) for x in inputs) or not all(k.is_static for k in kinds):
            raise UnlikeError
        self._kinds = list(kinds)
        self._arrays = any(type(x) is np.ndarray for x in inputs)
        self.settings, self.variant = settings, variant

    def _leaves(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
        if len(args) != len(self._takers):
            return None
        leaves: list[Any] = []
        try:
            for take, tree in zip(self._takers, args, strict=True):
                if not take(tree, leaves):
                    return None
            return leaves if self._keywords(kwargs, leaves) else None
        except KeyError:
            return None

    def inputs(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[np.ndarray], list[Handle | None]] | None:
        """The arrays of a call that is alike, each contiguous, and where tensors keep theirs; None if it is not."""
        leaves = self._leaves(args, kwargs)
        if leaves is None or [type(x) for x in leaves] != self._types:
            return None
        if self._fixed:
            for i, value in self._fixed:
                if leaves[i] != value:
                    return None
            for i, sign in self._zeros:
                if copysign(1.0, leaves[i]) != sign:
                    return None
            leaves = [x for x in leaves if type(x) not in FIXED]
        handles = self._mixed(leaves) if self._arrays else [x._handle or x._held for x in leaves]
        if handles is None or None in handles or [h.type for h in handles] != self._kinds:
            return None
        arrays = []
        for handle in handles:
            array = handle._array
            if array is None or not (handle.is_own or array.flags.num & USABLE == USABLE):
                return None
            arrays.append(array)
        return arrays, handles

    def _mixed(self, leaves: list[Any]) -> list[Any] | None:
        """Of tensors and arrays, the latter as handles of the type that they should have, if they have it."""
        made: list[Any] = []
        for x, kind in zip(leaves, self._kinds, strict=True):
            if type(x) is Tensor:
                made.append(x._handle or x._held)
            elif x.shape == kind.shape and x.dtype == kind.dtype.np:
                made.append(Handle(x, kind))
            else:
                return None
        return made


def _add(tree: Any, leaves: list[Any]) -> bool:
    leaves.append(tree)
    return True


def _taker(tree: Any) -> Taker:
    """How trees of the structure of this one are flattened, in the order of `outline_arguments`."""
    kind = type(tree)
    if kind is Tensor or kind is np.ndarray or (tree is not None and kind in FIXED):
        return _add
    if tree is None:
        return lambda tree, leaves: tree is None
    if kind is dict:
        return _dict_taker(tree)
    if kind is list or kind is tuple or (isinstance(tree, tuple) and hasattr(kind, "_fields")):
        return _sequence_taker(kind, list(tree))
    if hasattr(kind, "__tree_flatten__"):
        return _object_taker(tree)
    raise UnlikeError


def _dict_taker(tree: dict[Any, Any]) -> Taker:
    keys = sorted(tree, key=str)
    if not keys:
        return lambda tree, leaves: type(tree) is dict and not tree
    parts, count = _parts([tree[k] for k in keys]), len(keys)
    pick = itemgetter(*keys) if count > 1 else lambda tree, key=keys[0]: (tree[key],)

    def take(tree: Any, leaves: list[Any]) -> bool:
        return type(tree) is dict and len(tree) == count and parts(pick(tree), leaves)

    return take


def _sequence_taker(kind: Any, items: list[Any]) -> Taker:
    parts, count = _parts(items), len(items)

    def take(tree: Any, leaves: list[Any]) -> bool:
        return type(tree) is kind and len(tree) == count and parts(tree, leaves)

    return take


def _object_taker(tree: Any) -> Taker:
    kind = type(tree)
    keys, items, fixed = tree.__tree_flatten__()
    parts, known = _parts(items), exact(fixed)
    types = [type(v) for _, v in fixed]
    plain = all(t in FIXED and (t is not float or v) for t, (_, v) in zip(types, fixed, strict=True))

    def take(tree: Any, leaves: list[Any]) -> bool:
        if type(tree) is not kind:
            return False
        found, items, static = tree.__tree_flatten__()
        if found != keys or static != fixed:
            return False
        if static is not fixed and ([type(v) for _, v in static] != types if plain else exact(static) != known):
            return False
        return parts(items, leaves)

    return take


def _parts(items: list[Any]) -> Callable[[Any, list[Any]], bool]:
    """For as many trees as there are items."""
    takers = [_taker(x) for x in items]
    if all(take is _add for take in takers):

        def add_all(trees: Any, leaves: list[Any]) -> bool:
            leaves += trees
            return True

        return add_all

    def each(trees: Any, leaves: list[Any]) -> bool:
        for take, tree in zip(takers, trees, strict=True):  # noqa: SIM110 - a loop is quicker than a generator
            if not take(tree, leaves):
                return False
        return True

    return each
