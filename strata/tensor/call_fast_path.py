"""The fast path of calls: arguments with a known structure are flattened without describing them again.

A signature is exact, and takes a microsecond for each leaf. A call that differs from an earlier one in nothing but the
elements of its tensors needs none: types, keys and fixed values are compared as they are met. What does not fit, or is
not computed yet, is left to the signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import copysign
from typing import Any

import numpy as np

from strata.backends import HOMES, REPLACED, DeviceArray
from strata.config import Config
from strata.core import TensorType, TreeDef, taker
from strata.runtime import USABLE
from strata.tensor.data import Handle, LooseHandle
from strata.tensor.tensor import Tensor, fresh_tensors

FIXED = (bool, int, float, str, type(None))  # leaves other than tensors and arrays that are compared


class UnlikeError(Exception):
    """A structure that calls are not compared with."""


class Repeat:
    """The arguments of a call, to compare others with."""

    __slots__ = (
        "_args",
        "_arrays",
        "_fixed",
        "_is_resident",
        "_kinds",
        "_kwargs",
        "_types",
        "_zeros",
        "enter",
        "replaced",
        "settings",
        "variant",
    )

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        structure: TreeDef,
        kinds: Sequence[TensorType],
        settings: Config,
        variant: Any,
    ) -> None:
        """`structure` is of both; in it static arguments are leaves. `kinds` are the types of tensors and arrays."""
        self._args, self._kwargs = map(taker, structure.children)
        leaves = self._leaves(args, kwargs)
        if leaves is None:
            raise UnlikeError
        self._types = [type(x) for x in leaves]
        self._fixed = [(i, x) for i, x in enumerate(leaves) if type(x) in FIXED]
        self._zeros = [(i, copysign(1.0, x)) for i, x in self._fixed if type(x) is float and not x]
        inputs = [x for x in leaves if type(x) not in FIXED]
        if any(type(x) not in (Tensor, np.ndarray) for x in inputs) or not all(k.is_static for k in kinds):
            raise UnlikeError
        self._kinds = list(kinds)
        self._arrays = any(type(x) is np.ndarray for x in inputs)
        self.settings, self.variant, self.replaced = settings, variant, len(REPLACED)
        self._is_resident = variant.home is not None and not self._fixed and not self._arrays
        self.enter = self._entry(structure) if self._is_resident and variant.kinds and not variant.donated else None

    def _leaves(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any] | None:
        leaves: list[Any] = []
        try:
            return leaves if self._args(args, leaves) and self._kwargs(kwargs, leaves) else None
        except KeyError:
            return None

    def inputs(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[list[np.ndarray], list[Handle | None]] | None:
        """The arrays of a call that is alike, each contiguous, and where tensors keep theirs; None if it is not."""
        leaves = self._leaves(args, kwargs)
        if leaves is not None and self._is_resident:
            found = self._resident(leaves)
            if found is not None:
                return found
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
        if HOMES:
            return self._on_device(handles)
        arrays = []
        for handle in handles:
            array = handle._array
            if array is None or not (handle.is_own or array.flags.num & USABLE == USABLE):
                return None
            arrays.append(array)
        return arrays, handles

    def _resident(self, leaves: list[Any]) -> tuple[list[Any], list[Any]] | None:
        """The same for tensors that are on the variant's device, all in one loop."""
        home = self.variant.home
        arrays, handles = [], []
        for x, kind in zip(leaves, self._kinds, strict=True):
            handle = x._handle or x._held if type(x) is Tensor else None
            if handle is None or (handle.type is not kind and handle.type != kind):
                return None
            array = handle._array
            if type(array) is not DeviceArray or array.home is not home:
                return None
            arrays.append(array)
            handles.append(handle)
        return arrays, handles

    def _entry(self, structure: TreeDef) -> Callable[[Sequence[Any], dict[str, Any]], Any]:
        """The whole of a call for tensors that are on the variant's device, in one function; it gives None where that
        is not for this call."""
        args, kwargs = structure.children
        is_plain = not kwargs.children and all(child.kind == "leaf" for child in args.children)
        count, kinds, apart = len(args.children), tuple(self._kinds), self._leaves
        variant = self.variant
        home, run, results = variant.home, variant.compiled._enter, variant.kinds
        finish = variant.finisher()

        def enter(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            leaves: Any = args
            if is_plain:
                if kwargs or len(args) != count:
                    return None
            else:
                leaves = apart(args, kwargs)
                if leaves is None:
                    return None
            arrays = []
            for x, kind in zip(leaves, kinds, strict=True):
                if type(x) is not Tensor:
                    return None
                handle = x._handle or x._held
                if handle is None or (handle.type is not kind and handle.type != kind):
                    return None
                array = handle._array
                if type(array) is not DeviceArray or array.home is not home:
                    return None
                arrays.append(array)
            made = run(arrays)
            if made is None:
                return None
            variant.runs += 1
            return finish(fresh_tensors(made, results))

        return enter

    def _on_device(self, handles: list[Handle]) -> tuple[list[Any], list[Any]] | None:
        """The same where there are devices with their own memory: all arrays are in that of the variant."""
        home = self.variant.home
        arrays = []
        for handle in handles:
            array = handle._array
            if type(array) is DeviceArray:
                if array.home is not home:
                    return None
            elif home is not None and type(handle) is not LooseHandle:
                return None
            if array is None or not (type(array) is DeviceArray or handle.is_own or array.flags.num & USABLE == USABLE):
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
                made.append(LooseHandle(x, kind))
            else:
                return None
        return made
