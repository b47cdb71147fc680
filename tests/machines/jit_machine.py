"""jit beside the functions themselves: values that compare equal and are not the same, closures, defaults, keywords."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import strata


@dataclass(frozen=True)
class One:
    """Two classes of equal fields."""

    value: Any


@dataclass(frozen=True)
class Other:
    """The other."""

    value: Any


class Loud(str):
    """A string that is not quite one."""

    __slots__ = ()


class Level(IntEnum):
    """Numbers by name."""

    NONE = 0
    ONE = 1


class Switch(Enum):
    """Names that are equal to nothing else."""

    ONE = 1


PLAIN = [
    0, 1, 2, True, False, 0.0, -0.0, 1.0, 2.0, float("nan"), float("inf"), 1j, complex(1, -0.0), None, "", "1", "f32",
    Loud("1"), strata.float32, strata.float64, strata.int32, (1,), (True,), (1.0,), (0.0,), (-0.0,), ((1,), 2),
    (1, (2,)), [1], [True], [1.0], {"a": 1}, {"a": True}, {"a": 1.0}, {"b": 1}, 1 << 40, -1, ...,
]  # fmt: skip
VALUES = st.sampled_from(range(len(PLAIN)))
ARRAYS = [
    np.float32(1), np.float64(1), np.int64(1), np.int32(1), np.bool_(True), np.float32(-0.0), np.array(1, "f4"),
    np.array([1.0, 2.0], "f4"), np.array([1, 2], "i4"),
]  # fmt: skip


ONES = [
    1, True, 1.0, 1 + 0j, np.float64(1), np.float32(1), np.int64(1), np.uint8(1), np.bool_(True), Level.ONE, Switch.ONE,
    Fraction(1), Decimal(1), 0, False, 0.0, -0.0, np.float64(0), np.float64(-0.0), Level.NONE, "1", b"1", None,
]  # fmt: skip
HOLDERS: list[Callable[[Any], Any]] = [
    lambda v: v, lambda v: (v,), lambda v: (v, (v,)), lambda v: frozenset({v}), lambda v: (frozenset({(v,)}), "x"), One,
    Other, lambda v: One((v,)), lambda v: slice(None, v),
]  # fmt: skip
if sys.version_info < (3, 12):  # before, a slice has no hash
    HOLDERS.pop()


def mark(value: Any) -> float:
    """A number for a value and its class."""
    if isinstance(value, (list, tuple, frozenset)):
        text = f"{type(value).__name__}{[mark(v) for v in value]}"
    elif isinstance(value, dict):
        text = f"dict{[(k, mark(v)) for k, v in value.items()]}"
    elif isinstance(value, (One, Other)):
        text = f"{type(value).__name__}{mark(value.value)}"
    else:
        text = f"{type(value).__name__}{value!r}"
    return float(zlib.crc32(text.encode()) % 9973)


def body(x: Any, value: Any = 1, *rest: Any, mode: Any = "a", flag: Any = True) -> Any:
    return x * mark(value) + mark(rest) - mark((mode, flag))


def with_number(x: Any, value: Any) -> Any:
    return x * value


def with_default(default: Any) -> Callable[..., Any]:
    def made(x: Any, value: Any = default) -> Any:
        return x + mark(value)

    return made


def with_cell(cell: Any) -> Callable[..., Any]:
    def made(x: Any) -> Any:
        return x - mark(cell)

    return made


def bits(result: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(result)
    return array.dtype.str, array.shape, array.tobytes()


class JitMachine(RuleBasedStateMachine):
    """Jitted functions beside plain ones; the same functions are called through a whole history."""

    slice = 15

    @initialize(most=st.sampled_from([None, 2]), size=st.sampled_from([1, 3]))
    def start(self, most: int | None, size: int) -> None:
        options: dict[str, Any] = {} if most is None else {"max_variants": most, "on_miss": "compile"}
        self.jitted = strata.jit(body, **options)
        self.static = strata.jit(body, static_argnums=(1, 2), **options)
        self.number = strata.jit(with_number)
        self.array = np.arange(1, size + 1).astype("f4")
        self.x = strata.tensor(self.array)
        self.made: list[tuple[Callable[..., Any], Callable[..., Any]]] = []

    def same(self, jitted: Callable[..., Any], plain: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        assert bits(jitted(self.x, *args, **kwargs)) == bits(plain(self.x, *args, **kwargs)), (args, kwargs)

    @rule(value=VALUES, wrap=st.sampled_from([lambda v: v, One, Other]))
    def positional(self, value: int, wrap: Callable[[Any], Any]) -> None:
        given = PLAIN[value]
        if wrap is not One and wrap is not Other:
            self.same(self.jitted, body, given)
        elif type(given) not in (list, dict):
            self.same(self.jitted, body, wrap(given))

    @rule(value=VALUES, mode=VALUES, flag=VALUES, turned=st.booleans())
    def keywords(self, value: int, mode: int, flag: int, turned: bool) -> None:
        given = {"mode": PLAIN[mode], "flag": PLAIN[flag], "value": PLAIN[value]}
        self.same(self.jitted, body, **(dict(reversed(given.items())) if turned else given))

    @rule(values=st.lists(VALUES, max_size=3))
    def several(self, values: list[int]) -> None:
        self.same(self.jitted, body, *(PLAIN[v] for v in values))

    @rule(
        value=st.sampled_from(ONES), other=st.sampled_from(ONES), holder=st.sampled_from(HOLDERS),
        outer=st.sampled_from(HOLDERS[:3]),
    )  # fmt: skip
    def fixed(self, value: Any, other: Any, holder: Callable[[Any], Any], outer: Callable[[Any], Any]) -> None:
        self.same(self.static, body, outer(holder(value)), other)

    @rule()
    def defaults(self) -> None:
        self.same(self.jitted, body)

    @rule(value=st.sampled_from([v for v in PLAIN if isinstance(v, (int, float)) and v != 1 << 40]))
    def in_a_product(self, value: Any) -> None:
        self.same(self.number, with_number, value)

    @rule(value=st.sampled_from(range(len(ARRAYS))))
    def of_numpy(self, value: int) -> None:
        if ARRAYS[value].ndim == 0 or len(self.array) in (1, 2):
            self.same(self.number, with_number, ARRAYS[value])

    @rule(value=VALUES, factory=st.sampled_from([with_default, with_cell]))
    def make(self, value: int, factory: Callable[[Any], Callable[..., Any]]) -> None:
        plain = factory(PLAIN[value])
        self.made.append((strata.jit(plain), plain))

    @rule()
    def call_all(self) -> None:
        for jitted, plain in self.made:
            self.same(jitted, plain)
