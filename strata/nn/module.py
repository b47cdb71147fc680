"""Modules: plain objects whose tensors are leaves of a pytree, with torch's parameter names.

A module can be an argument of `jit`, `grad` and `vmap` like a dict of tensors. Inside such a function it is a copy: a
layer that keeps statistics sets them on the copy, and the function returns the module to hand them out.

    def loss(model, x, y):
        return st.cross_entropy(model(x), y), model        # with has_aux=True
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from reprlib import recursive_repr
from typing import Any, ClassVar, Self

import numpy as np

from strata.config import using
from strata.core import TreeDef, endless, flatten, here, tree_map, unflatten
from strata.errors import OptionError, ShapeError, UnknownNameError
from strata.mir import Value, near
from strata.tensor import Tensor, asarray


class Module:
    """The base of all layers. Attributes that hold tensors, modules, or containers of them, are its parts.

    What is a part stays one; everything else (sizes, rates, functions) is fixed, and must be hashable.
    """

    buffers: ClassVar[tuple[str, ...]] = ()  # parts that training does not change by gradients
    training: bool = True

    def __setattr__(self, name: str, value: Any) -> None:
        parts = self.__dict__.setdefault("_parts", ())
        if name not in parts:
            if _holds_tensors(value):
                self.__dict__["_parts"] = tuple(sorted((*parts, name)))
            self.__dict__.pop("_fixed", None)
        self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__["_parts"] = tuple(p for p in self.__dict__.get("_parts", ()) if p != name)
        self.__dict__.pop("_fixed", None)

    def __tree_flatten__(self) -> tuple[tuple[str, ...], list[Any], tuple[tuple[str, Any], ...]]:
        own = self.__dict__
        parts = own.get("_parts", ())
        fixed = own.get("_fixed")
        if fixed is None:
            names = [k for k in sorted(own) if k not in parts and k != "_parts"]
            fixed = tuple((k, _frozen(own[k])) for k in names)
            if not any(isinstance(own[k], list) for k in names):  # which can change without our knowing
                own["_fixed"] = fixed
        return parts, [own[k] for k in parts], fixed

    @classmethod
    def __tree_unflatten__(cls, keys: tuple[str, ...], parts: list[Any], fixed: tuple[tuple[str, Any], ...]) -> Self:
        made = cls.__new__(cls)
        made.__dict__.update(zip(keys, parts, strict=True))
        made.__dict__.update(fixed)
        made.__dict__["_parts"], made.__dict__["_fixed"] = keys, fixed
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise OptionError(f"{type(self).__name__} has no __call__", code="O280", place=here())

    # names

    def children(self) -> Iterator[tuple[str, Any]]:
        """The parts, with the names that they have in a state dict."""
        for name in self.__dict__.get("_parts", ()):
            yield name, self.__dict__[name]

    def named_tensors(self) -> dict[str, Tensor]:
        """All tensors by their dotted names."""
        return {name: x for name, x, _ in _walked(self)}

    def named_parameters(self) -> dict[str, Tensor]:
        """The tensors that training changes."""
        return {name: x for name, x, buffer in _walked(self) if not buffer}

    def parameters(self) -> list[Tensor]:
        return list(self.named_parameters().values())

    @property
    def num_parameters(self) -> int:
        return sum(int(x.size) for x in self.parameters())

    # state

    def state_dict(self) -> dict[str, np.ndarray]:
        """Arrays by torch's names; they share memory with the tensors."""
        return {name: asarray(x).numpy() for name, x in self.named_tensors().items()}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Self:
        """Take arrays by name, to the devices of the tensors that they replace. With `strict`, names must match; shapes
        always must. Nothing changes if any does not."""
        own = self.named_tensors()
        given = {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}
        missing, extra = [k for k in own if k not in given], [k for k in given if k not in own]
        if strict and (missing or extra):
            name = (missing or extra)[0]
            text = f"has no {name!r}" if missing else f"has {name!r}{near(name, own)}, which the module does not"
            raise UnknownNameError(f"load_state_dict: the state {text}", code="N280", place=here())
        loaded: dict[str, Tensor] = {}
        for name, x in own.items():
            if name in given:
                array = asarray(given[name], device=x.device)
                if array.shape != x.shape:
                    raise ShapeError(
                        f"load_state_dict: {name!r} is {x.type}, got {array.type}", code="S390", place=here()
                    )
                loaded[name] = array if array.dtype is x.dtype else array.cast(x.dtype).realize()
        _assign(self, "", loaded)
        return self

    # modes and types

    def train(self, mode: bool = True) -> Self:
        """Switch dropout and the statistics of batch norm on; `eval` switches them off."""
        for module in list(modules_of(self)):
            module.training = mode
        return self

    def eval(self) -> Self:
        return self.train(False)

    def astype(self, dtype: Any) -> Self:
        """The module with all its float tensors in another type."""
        result: Self = cast_floats(self, dtype)
        return result

    def to(self, device: Any, /) -> Self:
        """The module with all its tensors on a device; those that are there already are shared."""
        result: Self = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, self)
        return result

    @recursive_repr()
    def __repr__(self) -> str:
        inner = ", ".join(f"{k}={v!r}" for k, v in self._shown().items())
        return f"{type(self).__name__}({inner})"

    def _shown(self) -> dict[str, Any]:
        """What the repr says: types of tensors, modules, and fixed attributes."""
        return {
            k: v.type if isinstance(v, Tensor) else v
            for k, v in self.__dict__.items()
            if not k.startswith("_") and v is not None and k != "training"
        }


def cast_floats(tree: Any, dtype: Any) -> Any:
    """A pytree with its float tensors in another type; integers and keys stay as they are."""
    return tree_map(lambda x: x.cast(dtype) if isinstance(x, Tensor) and x.dtype.is_float else x, tree)


@contextmanager
def beside(tree: Any) -> Iterator[None]:
    """In the block, new tensors are made on the device of a pytree's tensors, where those are not on the host."""
    devices = (x.device for x in flatten(tree)[0] if isinstance(x, Tensor))
    device = next((x for x in devices if x != "cpu"), None)
    if device is None:
        yield
    else:
        with using(device=str(device)):
            yield


def trainable(tree: Any) -> list[bool]:
    """For each leaf, in the order of `flatten`, whether training changes it: floats that are no buffers."""
    leaves, structure = flatten(tree)
    return [
        not is_buffer and (not hasattr(x, "dtype") or asarray(x).dtype.is_float)
        for x, is_buffer in zip(leaves, _buffers(structure, False), strict=True)
    ]


def _buffers(structure: TreeDef, inside: bool) -> Iterator[bool]:
    """For each leaf, whether it is a buffer of a module, or inside of one."""
    if structure.kind == "leaf":
        yield inside
    own = getattr(structure.cls, "buffers", ()) if structure.kind == "object" else ()
    for key, child in zip(structure.keys or repeat(None), structure.children, strict=False):
        yield from _buffers(child, inside or key in own)


def modules_of(tree: Any) -> Iterator[Module]:
    """The modules in a pytree, outer ones first."""
    try:
        yield from _modules(tree)
    except RecursionError:
        raise endless(tree) from None


def _modules(tree: Any) -> Iterator[Module]:
    if isinstance(tree, Module):
        yield tree
    for _, part in _items(tree):
        yield from _modules(part)


def _holds_tensors(x: Any) -> bool:
    try:
        return _holds(x)
    except RecursionError:
        raise endless(x) from None


def _holds(x: Any) -> bool:
    return isinstance(x, (Tensor, Module, Value, np.ndarray)) or any(_holds(part) for _, part in _items(x))


def _frozen(x: Any) -> Any:
    return tuple(_frozen(v) for v in x) if isinstance(x, list) else x


def _items(x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, Module):
        yield from x.children()
    elif isinstance(x, dict):
        yield from ((str(k), v) for k, v in x.items())
    elif isinstance(x, (list, tuple)):
        yield from ((str(i), v) for i, v in enumerate(x))


def _walked(x: Module) -> list[tuple[str, Any, bool]]:
    """All tensors of a module: name, tensor, and whether it is a buffer."""
    try:
        return list(_walk(x, ""))
    except RecursionError:
        raise endless(x) from None


def _walk(x: Any, prefix: str, buffer: bool = False) -> Iterator[tuple[str, Any, bool]]:
    for name, part in _items(x):
        is_buffer = buffer or (isinstance(x, Module) and name in type(x).buffers)
        if isinstance(part, Tensor):
            yield f"{prefix}{name}", part, is_buffer
        elif part is not None:
            yield from _walk(part, f"{prefix}{name}.", is_buffer)


def _assign(x: Any, prefix: str, loaded: Mapping[str, Tensor]) -> None:
    for name, part in _items(x):
        full = f"{prefix}{name}"
        if not isinstance(part, Tensor):
            _assign(part, f"{full}.", loaded)
        elif full in loaded:
            if isinstance(x, Module):
                setattr(x, name, loaded[full])
            elif isinstance(x, dict):
                x[name] = loaded[full]
            else:
                part.value = loaded[full].value


__all__ = ["Module", "cast_floats", "modules_of", "trainable", "unflatten"]
