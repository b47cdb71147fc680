"""Arguments of public functions, checked by what their signatures say.

`public` makes a function, or every method of a class, refuse a wrong call before it does anything: an unknown, missing
or surplus argument, and a value that is not of the annotated kind (see `strata.kinds`). What an annotation does not
say, such as a range, the function checks itself.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import sys
import types
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from strata.errors import ArgumentError, StrataError
from strata.kinds import LIBRARIES, Kind, Wrong, counted, kind_of, near_name, shown
from strata.places import here

T = TypeVar("T")


# -------------------------------------------------------------------------------------------------------- one signature


class Signature:
    """The kinds of a function's parameters, and what is said about a call that does not fit them."""

    def __init__(self, fn: Callable[..., Any], name: str, *, bound: bool) -> None:
        self.name, self.bound = name, bound
        self.signature = inspect.signature(fn)
        raw, own = inspect.unwrap(fn), getattr(fn, "__own_checks__", None)
        scope = dict(vars(sys.modules[raw.__module__])) if raw.__module__ in sys.modules else {}
        scope |= getattr(raw, "__globals__", {})
        self.positional: list[tuple[str, Kind | None]] = []
        self.named: dict[str, Kind | None] = {}
        self.rest: tuple[str, Kind | None] | None = None
        self.others: tuple[str, Kind | None] | None = None
        for i, p in enumerate(self.signature.parameters.values()):
            is_free = (bound and i == 0) or (own is not None and (not own or p.name in own))
            kind = None if is_free else _resolved(p.annotation, p.default, scope)
            if p.kind is p.VAR_POSITIONAL:
                self.rest = p.name, kind
            elif p.kind is p.VAR_KEYWORD:
                self.others = p.name, kind
            else:
                if p.kind is not p.KEYWORD_ONLY:
                    self.positional.append((p.name, kind))
                if p.kind is not p.POSITIONAL_ONLY:
                    self.named[p.name] = kind
        self.kinds = [kind for _, kind in self.positional]

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the function gets them. Raises what the caller is told about one that is of another kind."""
        changed: list[Any] | None = None
        for i, (value, kind) in enumerate(zip(args, self.kinds, strict=False)):
            if kind is not None and type(value) not in kind.plain:
                taken = self._taken(self.positional[i][0], value, kind)
                if taken is not value:
                    changed = list(args) if changed is None else changed
                    changed[i] = taken
        if self.rest is not None and self.rest[1] is not None:
            for i in range(len(self.kinds), len(args)):
                taken = self._taken(f"*{self.rest[0]}", args[i], self.rest[1])
                if taken is not args[i]:
                    changed = list(args) if changed is None else changed
                    changed[i] = taken
        if kwargs:
            kwargs = {name: self._named(name, value) for name, value in kwargs.items()}
        return (args if changed is None else tuple(changed)), kwargs

    def _named(self, name: str, value: Any) -> Any:
        if name in self.named:
            kind = self.named[name]
        elif self.others is not None:
            kind = self.others[1]
        else:
            return value  # the call says that there is no such argument
        return value if kind is None or type(value) in kind.plain else self._taken(name, value, kind)

    def _taken(self, name: str, value: Any, kind: Kind) -> Any:
        try:
            return kind.take(value)
        except Wrong as wrong:
            detail = str(wrong)
            got = f"got {shown(value)}" if not detail else f"got {shown(value)}: {detail}"
            raise ArgumentError(f"{self.name}: {name} is {kind.words}, {got}", code="O101", place=here()) from None

    def misfit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgumentError | None:
        """What is wrong with the names and the number of arguments, if anything is."""
        try:
            self.signature.bind(*args, **kwargs)
        except TypeError as error:
            known = [n for n in self.named if not (self.bound and n == self.positional[0][0])]
            unknown = next((n for n in kwargs if n not in self.named and self.others is None), None)
            if unknown is not None:
                takes = f"; it takes {', '.join(known)}" if known else "; it takes none by name"
                message = f"{self.name} has no argument {unknown!r}{near_name(unknown, known) or takes}"
                return ArgumentError(message, code="O102", place=here())
            given = len(args) - self.bound
            if self.rest is None and given > (most := len(self.positional) - self.bound):
                return too_many(self.name, most, given)
            said = str(error)
            if "missing" in said:
                return ArgumentError(
                    f"{self.name} needs the argument {said.split(chr(39))[1]!r}", code="O104", place=here()
                )
            return ArgumentError(f"{self.name}: {said}", code="O104", place=here())
        return None

    def failure(self, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> ArgumentError | None:
        """What a function that only computes says about arguments that it failed on; not of an error of the user's."""
        if _went_through_user(error.__traceback__):
            return None
        given = self.signature.bind(*args, **kwargs).arguments
        values = ", ".join(f"{name} = {shown(value)}" for name, value in given.items())
        return ArgumentError(f"{self.name}: {error}, for {values}", code="O105", place=here())


class WholeNumbers:
    """The parameters of a function that are whole numbers, or sequences of them: a wrong value may get through these
    without a failure, as Python computes with truth values, and iterates over texts.

    Only plain values of other types are looked at, so a call without any costs nothing worth saying.
    """

    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        self.fn, self.name = fn, name

    @functools.cached_property
    def _signature(self) -> Signature:
        made = Signature(self.fn, self.name, bound=False)
        made.positional = [(n, _if_whole(kind)) for n, kind in made.positional]
        made.named = {n: _if_whole(kind) for n, kind in made.named.items()}
        made.kinds = [kind for _, kind in made.positional]
        made.rest = made.others = None
        return made

    def taken(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as the function gets them: integers of NumPy as those of Python."""
        if _has(_INTEGERS, args, kwargs):
            return self._signature.take(args, kwargs)
        return args, kwargs

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse arguments that a call got through with, though they are of another kind."""
        if _has(_LOOSE, args, kwargs):
            self._signature.take(args, kwargs)


_INTEGERS: frozenset[type] = frozenset(np.dtype(c).type for c in "bBhHiIlLqQ")
_LOOSE: frozenset[type] = frozenset((bool, float, str, *(np.dtype(c).type for c in "?efdg")))


def _has(types: frozenset[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not (types.isdisjoint(map(type, args)) and types.isdisjoint(map(type, kwargs.values())))


def _if_whole(kind: Kind | None) -> Kind | None:
    """A kind of whole numbers, asked of plain values only; None for another."""
    if kind is None or "whole number" not in kind.words:
        return None

    def take(value: Any) -> Any:
        return kind.take(value) if type(value) in _LOOSE or type(value) in _INTEGERS else value

    return Kind(kind.words, take, kind.plain)


def too_many(name: str, most: int, given: int) -> ArgumentError:
    """What is told about surplus arguments."""
    message = f"{name} takes {counted(most, 'argument')} by position, got {given}"
    return ArgumentError(message, code="O103", place=here())


def _resolved(annotation: Any, default: Any, scope: dict[str, Any]) -> Kind | None:
    if isinstance(annotation, str):
        annotation = _evaluated(annotation, scope)
    if annotation is inspect.Parameter.empty:
        return None
    kind = kind_of(annotation)
    if kind is None or default is inspect.Parameter.empty or type(default) in kind.plain:
        return kind
    return _or_default(kind, default)


def _evaluated(annotation: str, scope: dict[str, Any]) -> Any:
    """What an annotation of this package says, with the names that only type checkers import."""
    while True:
        try:
            return eval(annotation, scope)  # noqa: S307 - our own source
        except NameError as error:
            missing = error.name or ""
            found = _imported_for_types(missing, scope)
            if found is None or missing in scope:
                return Any
            scope[missing] = found
        except (TypeError, AttributeError):
            return Any


_IMPORT = re.compile(r"from (strata[\w.]*) import (\([^)]*\)|[^\n]*)")


def _imported_for_types(name: str, scope: dict[str, Any]) -> Any:
    """What a name stands for that a module imports under TYPE_CHECKING, if the module that has it is loaded."""
    source = "".join(linecache.getlines(scope.get("__file__") or ""))
    for module, names in _IMPORT.findall(source):
        if name in re.findall(r"\w+", names):
            return getattr(sys.modules.get(module), name, None)
    return None


def _or_default(kind: Kind, default: Any) -> Kind:
    """A default may be of another kind than what can be given: it can be given, too."""

    def take(value: Any) -> Any:
        return value if value is default else kind.take(value)

    return Kind(kind.words, take, kind.plain)


# ----------------------------------------------------------------------------------------------------- public functions


def public(target: T, *, name: str | None = None, of_values: bool = False, late: bool = False) -> T:
    """A function that refuses wrong calls; of a class, the constructor and every public method that it defines.

    A function `of_values` only computes with its arguments: whatever it fails with is told as a mistake in them. With
    `late`, arguments are looked at after a failure only.
    """
    if isinstance(target, type):
        for cls in target.__mro__:
            if cls.__module__.partition(".")[0] == "strata" and "__arguments_checked__" not in cls.__dict__:
                _guard_class(cls, of_values=of_values)
        return target
    fn: Any = target
    if not isinstance(fn, (types.FunctionType, functools._lru_cache_wrapper)) or hasattr(fn, "__arguments_checked__"):
        return target
    if late:
        hot(fn)
    return _guarded(fn, name or fn.__name__, bound=False, of_values=of_values)  # type: ignore[return-value]


def hot(fn: T) -> T:
    """A function, or class, that is called too often to look at arguments first: they are looked at after it failed."""
    fn.__is_hot__ = True  # type: ignore[attr-defined]
    return fn


def untouched(fn: T) -> T:
    """A function that is called even more often: it is left as it is, and tells wrong calls itself."""
    fn.__arguments_checked__ = True  # type: ignore[attr-defined]
    return fn


def signed(like: Callable[..., Any]) -> Callable[[T], T]:
    """A function that is left as it is, and takes whatever it is given so that it can tell; its signature as shown."""

    def mark(fn: T) -> T:
        fn.__signature__ = inspect.signature(like)  # type: ignore[attr-defined]
        return untouched(fn)

    return mark


def own_checks(*names: str) -> Callable[[T], T]:
    """A function, or a class by its constructor, that checks the kinds of these arguments (of all, if none
    is named) itself, in better words."""

    def mark(fn: T) -> T:
        fn.__own_checks__ = frozenset(names)  # type: ignore[attr-defined]
        return fn

    return mark


def public_names(
    scope: dict[str, Any], home: str | None = None, *, of_values: bool = False, late: bool = False
) -> None:
    """Guard every function and class of a namespace that is defined in its package, or in that of `home`."""
    package = home or scope["__name__"]
    for name, value in list(scope.items()):
        module = getattr(value, "__module__", None)
        if name.startswith("_") or not isinstance(module, str) or not f"{module}.".startswith(f"{package}."):
            continue
        if isinstance(value, (type, types.FunctionType)):
            scope[name] = public(value, of_values=of_values, late=late)


def _guard_class(cls: type, *, of_values: bool = False) -> None:
    if issubclass(cls, BaseException):
        return
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name not in ("__init__", "__call__", "__contains__"):
            continue
        shown_name = cls.__name__ if name == "__init__" else f"{cls.__name__}.{name}"
        fn = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if not isinstance(fn, types.FunctionType) or hasattr(fn, "__arguments_checked__"):
            continue
        if name == "__init__" and "__own_checks__" in vars(cls):
            own_checks(*vars(cls)["__own_checks__"])(fn)
        if "__is_hot__" in vars(cls):
            hot(fn)
        made = _guarded(fn, shown_name, bound=not isinstance(member, staticmethod), of_values=of_values)
        setattr(cls, name, type(member)(made) if isinstance(member, (classmethod, staticmethod)) else made)
    cls.__arguments_checked__ = True  # type: ignore[attr-defined]


FOREIGN = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError)  # what a wrong argument may end in


def _guarded(fn: Callable[..., Any], name: str, *, bound: bool, of_values: bool = False) -> Callable[..., Any]:
    """The function with its checks. What they need is made by the first call, as imports are to cost nothing."""
    known: Signature | None = None

    @functools.wraps(fn)
    def after(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except StrataError as error:
            if error.place is None:
                error.place = here()
            raise
        except FOREIGN as error:
            wrong = wrong_call(fn, name, args, kwargs, error, bound=bound, of_values=of_values)
            if wrong is None:
                raise
            raise wrong from (error if of_values else None)

    @functools.wraps(fn)
    def before(*args: Any, **kwargs: Any) -> Any:
        nonlocal known
        if known is None:
            known = Signature(fn, name, bound=bound)
        args, kwargs = known.take(args, kwargs)
        try:
            return fn(*args, **kwargs)
        except StrataError as error:
            if error.place is None:
                error.place = here()
            raise
        except FOREIGN as error:
            wrong = known.misfit(args, kwargs) or (known.failure(args, kwargs, error) if of_values else None)
            if wrong is None:
                raise
            raise wrong from (error if of_values else None)

    says = {str(a) for p, a in inspect.unwrap(fn).__annotations__.items() if p != "return"}
    made = after if not says - {"Any", "object"} or hasattr(fn, "__is_hot__") else before
    made.__arguments_checked__ = True  # type: ignore[attr-defined]
    return made


def wrong_call(
    fn: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception,
    *, bound: bool = False, of_values: bool = False,
) -> ArgumentError | None:  # fmt: skip
    """What is wrong with the arguments of a call that failed; None where the call is as the signature says."""
    signature = Signature(fn, name, bound=bound)
    misfit = signature.misfit(args, kwargs)
    if misfit is not None:
        return misfit
    try:
        signature.take(args, kwargs)
    except ArgumentError as found:
        return found
    return signature.failure(args, kwargs, error) if of_values else None


def refused(fn: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ArgumentError:
    """What a method that is `signed` says about arguments that do not fit."""
    wrong = wrong_call(fn, name, args, kwargs, TypeError(), bound=True)
    assert wrong is not None, "the arguments fit"
    return wrong


def _went_through_user(trace: TracebackType | None) -> bool:
    """Whether an exception came through a function of the user, below the frame that caught it."""
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] not in LIBRARIES:
            return True
        trace = trace.tb_next
    return False
