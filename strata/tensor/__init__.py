"""The lazy tensor, and functions of tensors: creation, derivatives, batching, control flow, jit.

Every front-end function of `strata.ops` is here too, on tensors: `strata.tensor.softmax(x)`, `x.softmax()`. The package
itself can be called: `strata.tensor([1.0, 2.0])` makes a tensor.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from strata.arguments import public_names, signed
from strata.mir import METHODS, near
from strata.tensor import random
from strata.tensor.control import checkpoint, cond, custom_jvp, custom_vjp, scan, while_loop
from strata.tensor.creation import (
    arange,
    asarray,
    empty,
    empty_like,
    eye,
    full,
    full_like,
    iota,
    linspace,
    ones,
    open_array,
    tensor,
    tri,
    zeros,
)
from strata.tensor.custom import custom_op
from strata.tensor.functional import grad, hvp, jacfwd, jacrev, jvp, value_and_grad, vjp, vmap
from strata.tensor.jit import Jitted, jit
from strata.tensor.plan import Plan
from strata.tensor.tensor import Tensor, prepare, prepare_with, realize, realize_with, wrapped
from strata.tensor.variable import Variable

globals().update({_n: wrapped(_n) for _n in METHODS if isinstance(globals().get(_n), ModuleType)})  # `repeat`
public_names(globals(), "strata.tensor.creation", of_values=True)
public_names(globals(), "strata.ops", of_values=True, late=True)
public_names(globals())
public_names(vars(random), "strata.ops.random", of_values=True, late=True)


def __getattr__(name: str) -> Any:
    if name in METHODS:
        return wrapped(name)
    if name == "xp":
        return import_module("strata.tensor.xp")
    raise AttributeError(f"strata.tensor has no function {name!r}{near(name, METHODS)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *METHODS, "xp"})


def _called(self: ModuleType, data: Any, dtype: Any = None, *, device: Any = None) -> Tensor:
    return tensor(data, dtype, device=device)


class _Package(ModuleType):
    @signed(_called)
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return tensor(*args, **kwargs)


sys.modules[__name__].__class__ = _Package
