"""Steps of functions that are made of several ops: a table of what each takes, and of how it is called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from strata.core import f32, f64
from tests.differential.program import Ref, Step

Options = dict[str, Any]
Arguments = tuple[tuple[Any, ...], Options]


@dataclass(frozen=True)
class Call:
    """A function: the types and ranks that it takes, and its arguments behind the first one."""

    name: str
    kinds: str = "f"  # f floats, w whole numbers, c complex, s f32 and f64 alone
    ranks: tuple[int, int] = (0, 9)
    arguments: Callable[[np.random.Generator, Any], Arguments] = lambda rng, x: ((), {})
    exactness: str = "approximate"
    count: int = 1
    plain: bool = False  # only of small numbers: others overflow in some order

    def takes(self, x: Any, style: str) -> bool:
        dtype = x.dtype
        kind = "f" if dtype.is_float else "c" if dtype.is_complex else "b" if dtype.is_bool else "w"
        fits = kind in self.kinds or ("s" in self.kinds and dtype in (f32, f64))
        return fits and self.ranks[0] <= x.ndim <= self.ranks[1] and (style == "plain" or not self.plain)


def axis_of(rng: np.random.Generator, x: Any) -> int:
    return int(rng.integers(-x.ndim, x.ndim))


def along(**more: Any) -> Callable[[np.random.Generator, Any], Arguments]:
    return lambda rng, x: ((), {"axis": axis_of(rng, x), **more})


def given(*choices: tuple[Any, ...]) -> Callable[[np.random.Generator, Any], Arguments]:
    return lambda rng, x: (choices[int(rng.integers(len(choices)))], {})


def _two_axes(rng: np.random.Generator, x: Any) -> Arguments:
    first, second = (int(i) for i in rng.permutation(x.ndim)[:2])
    return (int(rng.integers(-3, 4)), first, second), {}


def _norm(rng: np.random.Generator, x: Any) -> Arguments:
    order = (None, 1, 2, 3, 0, np.inf, -np.inf)[int(rng.integers(7))]
    return (order, axis_of(rng, x), bool(rng.integers(2))), {}


PLAIN_FUNCTIONS = (
    "asin", "acos", "atanh", "asinh", "acosh", "tan", "sinh", "exp2", "log2", "log10", "erfc", "elu", "selu", "mish",
    "hard_swish", "hard_sigmoid", "log_sigmoid", "logit", "quick_gelu", "softsign", "tanhshrink", "celu",
)  # fmt: skip
PADS = ("constant", "edge", "reflect", "symmetric", "wrap")
POOLS = ("max", "avg", "lp", "adaptive_avg", "adaptive_max")
EXACT_FUNCTIONS = ("relu6", "hardtanh", "nan_to_num")

CALLS: tuple[Call, ...] = (
    *(Call(name) for name in PLAIN_FUNCTIONS),
    *(Call(name, exactness="exact") for name in EXACT_FUNCTIONS),
    Call("lgamma", plain=True),
    Call("digamma", plain=True),
    Call("rint", exactness="decides"),
    Call("hardshrink", exactness="decides"),
    Call("heaviside", arguments=given((0.5,), (0.0,)), exactness="decides"),
    Call("leaky_relu", arguments=given((0.1,), (0.01,))),
    Call("threshold", arguments=given((0.5, -1.0), (0.0, 2.0)), exactness="decides"),
    Call("softshrink"),
    Call("bitwise_count", "w", exactness="exact"),
    Call("gcd", "w", arguments=given((6,), (4,), (0,)), exactness="exact"),
    Call("lcm", "w", arguments=given((1,), (3,)), exactness="exact"),
    Call("angle", "c"),
    # along an axis
    Call("diff", "fw", (1, 9), lambda rng, x: ((int(rng.integers(1, 3)), axis_of(rng, x)), {})),
    Call("norm", "f", (1, 9), _norm, plain=True),
    Call("normalize", "f", (1, 9), along(), plain=True),
    Call("softmin", "f", (1, 9), along()),
    Call("instance_norm", "f", (3, 4), plain=True),
    Call("group_norm", "f", (2, 4), given((1,), (2,)), plain=True),
    Call("use:likeness", "f", (1, 9), lambda rng, x: ((axis_of(rng, x),), {}), plain=True),
    Call("use:halves", "fwcb", (1, 9), lambda rng, x: ((axis_of(rng, x),), {}), "exact"),
    Call("use:gated", "f", (1, 9), lambda rng, x: ((axis_of(rng, x),), {})),
    Call("use:ranked", "fw", (1, 9), lambda rng, x: ((axis_of(rng, x),), {}), "decides"),
    Call("use:batch_normal", "f", (2, 4), plain=True),
    Call("cumsum", "f", (1, 9), along(exclusive=True)),
    Call("cumsum", "fw", (1, 9), along(reverse=True)),
    # moves
    Call("triu", "fwcb", (2, 9), given((0,), (1,), (-2,)), "exact"),
    Call("tril", "fwcb", (2, 9), given((2,), (-1,)), "exact"),
    Call("diagonal", "fwcb", (2, 9), _two_axes, "exact"),
    Call("trace", "fw", (2, 9), _two_axes),
    Call("moveaxis", "fwcb", (1, 9), lambda rng, x: ((axis_of(rng, x), axis_of(rng, x)), {}), "exact"),
    Call("use:padded", "fwcb", (1, 4), given(*((m, w) for m in PADS for w in (1, 1, 4))), "exact"),
    Call("use:put", "fwcb", (1, 9), given(("none",), ("add",)), plain=True),
    Call("use:marked", "w", (0, 2), given((4,), (1,)), "exact"),
    Call("use:refolded", "fwcb", (1, 9), given((True,), (False,)), "exact"),
    Call("use:grid", "fw", (1, 1), exactness="exact"),
    Call("use:crossed", "fw", (1, 9), plain=True),
    Call("kron", "fw", (1, 2), lambda rng, x: ((np.arange(1, 3).astype(x.dtype.np),), {}), plain=True),
    Call("use:outer_sum", "fw", (1, 2), plain=True),
    # windows
    Call("use:pooled", "s", (2, 3), given(*((kind,) for kind in POOLS)), plain=True),
    Call("use:folded", "s", (2, 2), given((2,), (3,)), plain=True),
    Call("use:convolved_2d", "s", (3, 3), given((1, 1), (2, 1), (1, 2)), plain=True),
    Call("use:spread_by_weights", "s", (3, 3), given((1,), (2,)), plain=True),
    Call("use:resized", "s", (2, 3), given(("nearest",), ("linear",)), plain=True),
    # products
    Call("use:attention", "f", (2, 3), given((False, 1), (True, 1), (False, 2)), plain=True),
    Call("use:scaled_attention", "s", (2, 3), plain=True),
    Call("use:attended_by_size", "f", (2, 3), given((True,), (False,)), plain=True),
    Call("use:recurrent", "s", (2, 3), given(("rnn",), ("gru",), ("lstm",)), plain=True),
    Call("use:looked_up", "s", (2, 2), plain=True),
    Call("use:loss", "s", (2, 2), given(("cross_entropy",), ("mse",), ("huber",), ("kl",)), plain=True),
    Call("use:solved", "s", (2, 2), plain=True),
    Call("use:spectrum", "s", (1, 3), given(("fft",), ("rfft",), ("irfft",)), plain=True),
    # control flow
    Call("use:counted", "fw", (0, 9), given((0,), (1,), (3,)), "exact", plain=True),
    Call("use:until", "s", (1, 9), plain=True),
    Call("use:steps", "fw", (0, 9), given((0,), (1,), (4,)), "exact", 2, plain=True),
    Call("use:pairs", "s", (1, 3), given((False,), (True,)), count=3, plain=True),
    Call("use:nested", "s", (2, 3), plain=True, count=2),
    Call("use:branches", "s", (1, 3), count=2, plain=True),
    Call("use:remembered", "s", (1, 3), plain=True),
)  # fmt: skip


def composed_step(rng: np.random.Generator, at: int, x: Any, style: str) -> Step | None:
    """A call of one of the functions that take a value."""
    found = [c for c in CALLS if c.takes(x, style)]
    if not found:
        return None
    call = found[int(rng.integers(len(found)))]
    args, options = call.arguments(rng, x)
    exactness = call.exactness
    if exactness == "approximate" and x.dtype.is_int:
        exactness = "exact"
    if call.count == 1 and exactness == "exact" and call.name.startswith("use:") and x.dtype.is_inexact:
        exactness = "approximate" if call.name in ("use:counted", "use:steps") else exactness
    return Step(call.name, (Ref(at), *args), tuple(options.items()), call.count, exactness)
