"""Kinds of arguments: what an annotation allows, and how a message names it.

The one place that decides what a whole number, a name, a path, a function or a mapping is. An integer is anything with
`__index__` except truth values, and arrives as an `int`.
"""

from __future__ import annotations

import collections.abc
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_LONGEST = 60  # characters of a value in a message
_WORDS = {
    "SymExpr": "a symbolic size", "Tensor": "a tensor", "Value": "a value of a graph",
    "HirValue": "a value of a module", "DType": "an element type", "TensorType": "a type such as f32[2, 3]",
}  # fmt: skip
_ARRAYS = ("ndarray", "StoredArray")  # what stands for anything that can be read as an array


class Wrong(Exception):  # noqa: N818 - a signal between functions of this file
    """A value that is not of its kind; says where inside of it, unless it is the value itself."""


class Kind:
    """What one annotation allows. `take` gives the value as the function gets it, or raises `Wrong`."""

    def __init__(self, words: str, take: Callable[[Any], Any], plain: Iterable[type] = ()) -> None:
        self.words, self.take, self.plain = words, take, frozenset(plain)


def _take_int(value: Any) -> int:
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_") or not hasattr(value, "__index__"):
        raise Wrong
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        raise Wrong from None


def whole_number(value: Any) -> int | None:
    """A value as an `int`, if it is a whole number: truth values, floats and texts are not."""
    try:
        return _take_int(value)
    except Wrong:
        return None


def _take_number(value: Any) -> Any:
    """Numbers as they are; NumPy's as Python's. What only knows its value later, such as a tensor, stays what it is."""
    if isinstance(value, (bool, str, bytes)) or type(value).__name__ in ("bool", "bool_"):
        raise Wrong
    if isinstance(value, (int, float)) or hasattr(value, "__mir_value__"):
        return value
    if not hasattr(value, "__float__") and not hasattr(value, "__index__"):
        raise Wrong
    try:
        return operator.index(value) if hasattr(value, "__index__") and not hasattr(value, "shape") else float(value)
    except (TypeError, ValueError):
        raise Wrong from None


def _take_flag(value: Any) -> bool:
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise Wrong


def _take_path(value: Any) -> Any:
    if isinstance(value, (str, os.PathLike)):
        return value
    raise Wrong


def _take_hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        raise Wrong from None
    return value


def _take_array(value: Any) -> Any:
    """What NumPy can read, as an array; a list of other things is not one."""
    numpy = sys.modules["numpy"]
    if isinstance(value, numpy.ndarray):
        return value
    readable = ("__array__", "__array_interface__", "__dlpack__", "__mir_value__", "__buffer__")
    plain = (bool, int, float, complex, list, tuple, range, memoryview, bytearray)
    if not isinstance(value, plain) and not any(hasattr(value, a) for a in readable):
        raise Wrong
    try:
        made = numpy.asarray(value)
    except (TypeError, ValueError):
        raise Wrong from None
    if made.dtype.kind not in "biufcV":
        raise Wrong
    return made


def _take_function(value: Any) -> Any:
    if not callable(value):
        raise Wrong
    return value


def _only_none(value: Any) -> None:
    if value is not None:
        raise Wrong


_NUMBER = Kind("a number", _take_number, (float, int))
_SIMPLE: dict[Any, Kind] = {
    int: Kind("a whole number", _take_int, (int,)),
    float: _NUMBER,
    bool: Kind("True or False", _take_flag, (bool,)),
    Path: Kind("a path", lambda value: Path(_take_path(value))),
    os.PathLike: Kind("a path", _take_path, (str,)),
    None: Kind("None", _only_none, (type(None),)),
    type(None): Kind("None", _only_none, (type(None),)),
    collections.abc.Callable: Kind("a function", _take_function, (types.FunctionType,)),
    collections.abc.Hashable: Kind("a value that can be a key", _take_hashable, (str, int, bytes)),
}
_ARRAY = Kind("an array", _take_array)


def kind_of(annotation: Any) -> Kind | None:
    """The check that an annotation stands for; None where it allows everything, or says what cannot be checked."""
    try:
        known = _SIMPLE.get(annotation)
    except TypeError:
        return None
    if known is not None:
        return known
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _any_of([kind_of(a) for a in args])
    if origin is typing.Literal:
        return _one_of(args)
    if origin in (typing.Annotated, typing.Final, typing.Required):
        return kind_of(args[0])
    base = origin if origin is not None else annotation
    if not isinstance(base, type):
        return None
    if base in _SIMPLE:  # of a function from something to something, or of a path of texts
        return _SIMPLE[base]
    if base is type:
        return _instance(type)
    if issubclass(base, collections.abc.Mapping):
        return _mapping(*(kind_of(a) for a in args)) if len(args) == 2 else _mapping(None, None)
    if base is tuple and args and args[-1] is not Ellipsis:
        return _fixed(tuple(kind_of(a) for a in args if a != ()))
    if base in _SEQUENCES:
        return _sequence(base, kind_of(args[0]) if args else None)
    if base.__name__ in _ARRAYS:
        return _ARRAY
    if base in (object, complex, Any):
        return None
    if getattr(base, "_is_protocol", False):
        return _instance(base) if getattr(base, "_is_runtime_protocol", False) else None
    return _instance(base)


LIBRARIES = frozenset((*sys.stdlib_module_names, "numpy", "strata"))  # whose classes stand in for none of ours
_KINDS = {"a whole number": "iu", "a number": "fiu", "True or False": "b"}  # of arrays that are sequences of them
_SEQUENCES = (
    list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection,
    collections.abc.Set,
)  # fmt: skip


def _any_of(kinds: list[Kind | None]) -> Kind | None:
    if any(k is None for k in kinds):
        return None
    known = [k for k in kinds if k is not None]

    def take(value: Any) -> Any:
        for kind in known:
            if type(value) in kind.plain:
                return value
        detail = ""
        for kind in known:
            try:
                return kind.take(value)
            except Wrong as wrong:
                detail = detail or str(wrong)
        raise Wrong(detail)

    words = list(dict.fromkeys(k.words for k in known))
    if "a path" in words and "a text" in words:
        words.remove("a text")
    words.sort(key=lambda w: w == "None")
    return Kind(_listed(words), take, {t for k in known for t in k.plain})


def _one_of(choices: tuple[Any, ...]) -> Kind:
    def take(value: Any) -> Any:
        if not any(type(value) is type(c) and value == c for c in choices):
            raise Wrong(near_name(value, [str(c) for c in choices]))
        return value

    return Kind(f"one of {', '.join(map(repr, choices))}", take)


def _instance(cls: type) -> Kind:
    words = {str: "a text", bytes: "bytes", type: "a class"}.get(cls) or _WORDS.get(cls.__name__) or with_article(cls)

    is_ours = cls.__module__.partition(".")[0] == "strata" and not getattr(cls, "_is_protocol", False)

    def take(value: Any) -> Any:
        """Also a stand-in: an object of a class of the caller's own, which knows what it stands in for."""
        if not isinstance(value, cls) and not (is_ours and type(value).__module__.partition(".")[0] not in LIBRARIES):
            raise Wrong
        return value

    return Kind(words, take, () if cls is type else (cls,))


def _mapping(key: Kind | None, item: Kind | None) -> Kind:
    words = "a mapping"
    if key is not None and item is not None:
        words += f" of {_plural(key.words)} to {_plural(item.words)}"

    def is_plain(value: dict[Any, Any]) -> bool:
        return (key is None or all(type(k) in key.plain for k in value)) and (
            item is None or all(type(v) in item.plain for v in value.values())
        )

    def take(value: Any) -> Any:
        if type(value) is dict and is_plain(value):
            return value
        if not isinstance(value, collections.abc.Mapping):
            raise Wrong
        made = {_inside(k, key, "the key "): _inside(v, item, f"{shown(k)}: ") for k, v in value.items()}
        same = all(a is b and made[a] is v for a, (b, v) in zip(made, value.items(), strict=True))
        return value if same else made

    return Kind(words, take)


def _sequence(base: type, item: Kind | None) -> Kind:
    words = "a set" if base in (set, frozenset, collections.abc.Set) else "a sequence"
    if item is not None:
        words += f" of {_plural(item.words)}"
    lazily = base is collections.abc.Iterable
    in_order = base in (list, tuple, collections.abc.Sequence)

    def take(value: Any) -> Any:
        if isinstance(value, (str, bytes, collections.abc.Mapping)) or not _is_iterable(value):
            raise Wrong
        if isinstance(value, Iterator):
            if lazily:
                return value
            value = tuple(value)
        elif in_order and not hasattr(type(value), "__getitem__"):  # a set, or keys of a mapping
            value = tuple(value)
        if item is None:
            return value
        if hasattr(value, "dtype"):
            if getattr(value.dtype, "kind", "") in _KINDS.get(item.words, "") and value.ndim == 1:
                return value
            listed = getattr(value, "tolist", None)  # which what is not computed yet lacks
            if listed is None:
                raise Wrong
            value = listed()
        if item.plain and set(map(type, value)) <= item.plain:
            return value
        made = [_inside(v, item, f"item {i}: ") for i, v in enumerate(value)]
        if all(a is b for a, b in zip(made, value, strict=True)):
            return value
        return made if isinstance(value, list) else tuple(made)

    return Kind(words, take)


def _is_iterable(value: Any) -> bool:
    if not hasattr(type(value), "__iter__"):
        return False
    shape = getattr(value, "shape", None)
    return shape is None or len(shape) > 0


def _fixed(items: tuple[Kind | None, ...]) -> Kind:
    described = [k.words if k is not None else "a value" for k in items]
    words = f"{counted(len(items))} ({', '.join(described)})"

    def take(value: Any) -> Any:
        if isinstance(value, (str, bytes, collections.abc.Mapping)) or not _is_iterable(value):
            raise Wrong
        given = tuple(value)
        if len(given) != len(items):
            raise Wrong
        made = tuple(_inside(v, k, f"item {i}: ") for i, (v, k) in enumerate(zip(given, items, strict=True)))
        return value if all(a is b for a, b in zip(made, given, strict=True)) else made

    return Kind(words, take)


def _inside(value: Any, kind: Kind | None, where: str) -> Any:
    if kind is None or type(value) in kind.plain:
        return value
    try:
        return kind.take(value)
    except Wrong as wrong:
        raise Wrong(str(wrong) or f"{where}{shown(value)} is not {kind.words}") from None


# --------------------------------------------------------------------------------------------------------------- words


def shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, type) or callable(value):
        return str(getattr(value, "__qualname__", None) or f"a {type(value).__name__}")
    shape = getattr(value, "shape", None)
    if shape is not None and not isinstance(value, str):
        return f"{with_article(type(value))} of shape {shape}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a value that cannot even be shown
        return with_article(type(value))
    if text.startswith("<"):
        return with_article(type(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def near_name(name: Any, known: Iterable[str]) -> str:
    found = get_close_matches(str(name), list(known), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def with_article(cls: type) -> str:
    return f"{'an' if cls.__name__[0] in 'AEIOUaeiou' else 'a'} {cls.__name__}"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _plural(words: str) -> str:
    known = {
        "a whole number": "whole numbers", "a number": "numbers", "a text": "names", "True or False": "flags",
        "a path": "paths", "an array": "arrays", "a function": "functions", "bytes": "bytes",
    }  # fmt: skip
    if words in known:
        return known[words]
    for article in ("a ", "an "):
        if words.startswith(article) and " " not in words[len(article) :]:
            return f"{words[len(article) :]}s"
    return f"({words})"


def counted(n: int, what: str = "value") -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
