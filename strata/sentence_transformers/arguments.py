"""Arguments as sentence-transformers takes them: names that it had before, prompts by name, devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, TypeVar

from strata.errors import ArgumentError, OptionError, UnknownNameError
from strata.places import here

FnT = TypeVar("FnT", bound=Callable[..., Any])


def renamed(**names: str) -> Callable[[FnT], FnT]:
    """Take arguments by the names that they had, too: `renamed(sentences="inputs")`."""

    def wrap(fn: FnT) -> FnT:
        order = list(signature(fn).parameters)

        @wraps(fn)
        def call(*args: Any, **options: Any) -> Any:
            for old, new in names.items():
                if old not in options:
                    continue
                if new in options or len(args) > order.index(new):
                    message = f"{fn.__name__}: {old} and {new} are two names of one argument, and both are given"
                    raise ArgumentError(message, code="O102", place=here())
                options[new] = options.pop(old)
            return fn(*args, **options)

        return call  # type: ignore[return-value]

    return wrap


def chosen_prompt(prompts: Mapping[str, str], usual: str | None, name: str | None, prompt: str | None) -> str:
    """What is put before texts: a prompt, that of a name, or that which a model puts there by itself."""
    if prompt is not None:
        return prompt
    name = usual if name is None else name
    if name is None:
        return ""
    if name not in prompts:
        raise no_prompt(prompts, name)
    return prompts[name]


def no_prompt(prompts: Mapping[str, str], name: str) -> UnknownNameError:
    return UnknownNameError(
        f"the model has no prompt {name!r}; it has {', '.join(prompts) or 'none'}", code="N720", place=here()
    )


def require_device(own: str, given: str | Sequence[str] | None) -> None:
    """Refuse a device that the model is not on."""
    asked = [given] if isinstance(given, str) else list(given or ())
    other = next((d for d in asked if str(d).partition(":")[0] != own.partition(":")[0]), None)
    if other is not None:
        raise OptionError(
            f"the model is on {own!r}, and device is {other!r}",
            code="O721",
            place=here(),
            fix="device=… when it is made",
        )
