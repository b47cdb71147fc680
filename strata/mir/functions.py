"""Front-end functions: public as `st.ops.<name>` and as methods of values."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from strata.arguments import FOREIGN, WholeNumbers, wrong_call
from strata.core import here
from strata.errors import StrataError
from strata.mir.deferred import METHODS
from strata.mir.origin import calling
from strata.mir.registry import REGISTRY

FnT = TypeVar("FnT", bound=Callable[..., Any])


def function(*names: str) -> Callable[[FnT], FnT]:
    """Register a front-end function: public as `st.ops.<name>` and as a method of values.

    Its own name is always included; a trailing underscore, which keeps a builtin visible in its module, is dropped.
    """

    def wrap(fn: FnT) -> FnT:
        public = fn.__name__.rstrip("_")
        numbers = WholeNumbers(fn, public)

        @wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            outermost = calling.set(public) if calling.get() is None else None
            try:
                if outermost is None:
                    return fn(*args, **kwargs)
                args, kwargs = numbers.taken(args, kwargs)
                result = fn(*args, **kwargs)
                numbers.check(args, kwargs)  # what fn refuses itself, it refuses in better words
                return result
            except StrataError as error:
                if error.place is None:
                    error.place = here()
                error.rename(public, is_operation)
                raise
            except FOREIGN as error:
                wrong = wrong_call(fn, public, args, kwargs, error, of_values=True)
                if wrong is None:
                    raise
                raise wrong from error
            finally:
                if outermost is not None:
                    calling.reset(outermost)

        for name in (public, *names):
            METHODS[name] = call
        return call  # type: ignore[return-value]

    return wrap


def is_operation(name: str) -> bool:
    """Whether an op or a front-end function has this name."""
    return name in METHODS or name in REGISTRY
