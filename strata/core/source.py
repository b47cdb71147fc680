"""Functions whose errors name the user's line."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from strata.errors import StrataError
from strata.places import here

FnT = TypeVar("FnT", bound=Callable[..., Any])


def located(fn: FnT) -> FnT:
    """The function, with the user's line added to errors that leave it without one."""

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return fn(*args, **kwargs)
        except StrataError as error:
            if error.place is None:
                error.place = here()
            raise

    return call  # type: ignore[return-value]
