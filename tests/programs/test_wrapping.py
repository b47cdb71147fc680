"""Integers wrap as in NumPy, whatever the path: interpreted, compiled, fused or not, jitted, lazy at first and later.

The meaning is written down once more here, with Python's whole numbers that are wrapped after every step, so that types
of four bits, which NumPy has not, have one too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import strata as st
from strata.core import ALL_DTYPES, DType, as_dtype
from strata.mir import evaluate

INTEGERS = [t for t in ALL_DTYPES if t.is_int]
MANY = 300_000  # elements for which an expression is compiled once it has been computed a few times
TIMES = 24

Expression = Callable[[Any, Any], Any]


def limits(dtype: DType) -> tuple[int, int]:
    low = -(1 << (dtype.bits - 1)) if dtype.kind == "int" else 0
    return low, low + (1 << dtype.bits) - 1


class Whole:
    """An array of whole numbers of a type, which wrap after every step."""

    def __init__(self, numbers: Any, dtype: DType) -> None:
        low, high = limits(dtype)
        wrap = np.frompyfunc(lambda n: (int(n) - low) % (high - low + 1) + low, 1, 1)
        self.numbers, self.dtype = np.asarray(wrap(np.asarray(numbers, dtype=object))), dtype

    def then(self, function: Callable[..., int], *others: Any) -> Whole:
        args = [o.numbers if isinstance(o, Whole) else np.asarray(o, dtype=object) for o in others]
        return Whole(np.frompyfunc(function, 1 + len(args), 1)(self.numbers, *args), self.dtype)

    def test(self, function: Callable[..., bool], other: Any) -> np.ndarray:
        right = other.numbers if isinstance(other, Whole) else other
        return np.frompyfunc(function, 2, 1)(self.numbers, right).astype(bool)

    def astype(self, dtype: str) -> Any:
        kind = as_dtype(dtype)
        return Whole(self.numbers, kind) if kind.is_int else self.array().astype(np.int64 if kind.is_int else kind.np)

    def array(self) -> np.ndarray:
        storage = np.int8 if self.dtype.name == "i4" else np.uint8 if self.dtype.name == "u4" else self.dtype.np
        return self.numbers.astype(storage).astype(self.dtype.np)

    def __add__(self, y: Any) -> Whole:
        return self.then(operator.add, y)

    def __sub__(self, y: Any) -> Whole:
        return self.then(operator.sub, y)

    def __mul__(self, y: Any) -> Whole:
        return self.then(operator.mul, y)

    def __floordiv__(self, y: Any) -> Whole:
        return self.then(lambda a, b: a // b if b else 0, y)

    def __mod__(self, y: Any) -> Whole:
        return self.then(lambda a, b: a % b if b else 0, y)

    def __neg__(self) -> Whole:
        return self.then(operator.neg)

    def __abs__(self) -> Whole:
        return self.then(abs)

    def __invert__(self) -> Whole:
        return self.then(operator.invert)

    def __and__(self, y: Any) -> Whole:
        return self.then(operator.and_, y)

    def __or__(self, y: Any) -> Whole:
        return self.then(operator.or_, y)

    def __xor__(self, y: Any) -> Whole:
        return self.then(operator.xor, y)

    def __lshift__(self, y: Any) -> Whole:
        return self.then(lambda a, b: a << b if 0 <= b < 64 else 0, y)

    def __rshift__(self, y: Any) -> Whole:
        return self.then(lambda a, b: a >> (b if 0 <= b < 64 else 64), y)

    def __pow__(self, y: Any) -> Whole:
        return self.then(_power, y)

    def __lt__(self, y: Any) -> Any:
        return self.test(operator.lt, y)

    def __le__(self, y: Any) -> Any:
        return self.test(operator.le, y)

    def __gt__(self, y: Any) -> Any:
        return self.test(operator.gt, y)

    def __ge__(self, y: Any) -> Any:
        return self.test(operator.ge, y)


def _power(a: int, b: int) -> int:
    """A negative power is the whole part of the quotient; 0 has none, which is 0."""
    if b >= 0:
        return pow(a, b, 1 << 64) if b > 4 else a**b
    return 0 if abs(a) != 1 else a ** (b % 2)


def maximum(x: Any, y: Any) -> Any:
    return x.then(max, y) if isinstance(x, Whole) else st.maximum(x, y)


def minimum(x: Any, y: Any) -> Any:
    return x.then(min, y) if isinstance(x, Whole) else st.minimum(x, y)


def clipped(x: Any, low: int, high: int) -> Any:
    return x.then(lambda a: min(max(a, low), high)) if isinstance(x, Whole) else st.clip(x, low, high)


def chosen(test: Any, x: Any, y: Any) -> Any:
    return Whole(np.where(test, x.numbers, y.numbers), x.dtype) if isinstance(x, Whole) else st.where(test, x, y)


def ordered(x: Any) -> Any:
    return Whole(np.sort(x.numbers), x.dtype) if isinstance(x, Whole) else st.sort(x)


def sign(x: Any) -> Any:
    return x.then(lambda a: (a > 0) - (a < 0)) if isinstance(x, Whole) else st.sign(x)


EXPRESSIONS: dict[str, Expression] = {
    "quotient of a product": lambda x, y: (x * 3) // 3,
    "remainder of a product": lambda x, y: (x * 3) % 3,
    "quotient of a sum": lambda x, y: (x * 4 + y) // 4,
    "remainder of a sum": lambda x, y: (x * 4 + y) % 4,
    "quotient of a difference": lambda x, y: (x - 2) // 2,
    "twice divided": lambda x, y: (x // 3) // 5,
    "twice remaining": lambda x, y: (x % 6) % 3,
    "put together": lambda x, y: (x // 3) * 3 + x % 3,
    "one more is more": lambda x, y: x + 1 > x,
    "one less is less": lambda x, y: x - 1 < x,
    "one more is not less": lambda x, y: x + 1 >= x,
    "difference below 0": lambda x, y: x - y < 0,
    "difference and order": lambda x, y: chosen(x - y > 0, x, y),
    "maximum of one more": lambda x, y: maximum(x + 1, x),
    "minimum of one less": lambda x, y: minimum(x - 1, x),
    "there and back": lambda x, y: (x + y) - y,
    "products compared": lambda x, y: x * 5 > y * 5,
    "negated": lambda x, y: -x,
    "magnitude": lambda x, y: abs(x) if isinstance(x, Whole) else st.abs(x),
    "divided": lambda x, y: x // y,
    "remaining": lambda x, y: x % y,
    "square": lambda x, y: x * x,
    "power": lambda x, y: x ** (y & 3),
    "power of anything": lambda x, y: x**y,
    "shifted up and down": lambda x, y: (x << 1) >> 1,
    "shifted by anything": lambda x, y: x << y,
    "shifted down by anything": lambda x, y: x >> y,
    "complement": lambda x, y: ~x + 1,
    "logic": lambda x, y: (x & y) | (x ^ (y + 1)),
    "clipped": lambda x, y: clipped(x + 1, 1, 3),
    "sign of a difference": lambda x, y: sign(x - y),
    "sum as floats": lambda x, y: (x + y).astype("f32"),
    "sum as i64": lambda x, y: (x + y).astype("i64"),
    "difference as i64": lambda x, y: (x - y).astype("i64") // 2,
    "narrow and wide": lambda x, y: ((x + y).astype("i8") * 2).astype("i64"),
    "four bits and back": lambda x, y: ((x + y).astype("i4") * 3).astype("i64"),
    "in order": lambda x, y: ordered(x + y),
}


def numbers(dtype: DType, rng: np.random.Generator) -> Whole:
    low, high = limits(dtype)
    edges = [low, low + 1, high, high - 1, high // 2, high // 3, 0, 1, 2, 3, *([] if low == 0 else [-1, -2, -3])]
    picked = [edges[i] for i in rng.integers(len(edges), size=64)]
    return Whole(
        picked + [int(rng.integers(low, high, dtype=np.uint64 if low == 0 else np.int64)) for _ in range(9)], dtype
    )


def operands(dtype: DType, rng: np.random.Generator) -> tuple[Whole, Whole]:
    return numbers(dtype, rng), numbers(dtype, rng)


def wanted(expression: Expression, x: Whole, y: Whole) -> np.ndarray:
    made = expression(x, y)
    return made.array() if isinstance(made, Whole) else np.asarray(made)


def all_of(x: Any, y: Any) -> tuple[Any, ...]:
    return tuple(expression(x, y) for expression in EXPRESSIONS.values())


def graph_of(x: Whole, y: Whole) -> st.Graph:
    graph = st.Graph("wraps")
    made = all_of(*(graph.input(n, v.numbers.shape, v.dtype) for n, v in zip("xy", (x, y), strict=True)))
    return graph.outputs(*(m.value if isinstance(m, st.Tensor) else m for m in made))


def check(got: Any, want: np.ndarray, path: str) -> None:
    array = np.asarray(got)
    assert (array.dtype, array.shape) == (want.dtype, want.shape), path
    np.testing.assert_array_equal(array, want, err_msg=path)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_every_path_wraps(dtype: DType, rng: np.random.Generator) -> None:
    x, y = operands(dtype, rng)
    feeds = {"x": x.array(), "y": y.array()}
    tensors = [st.tensor(v) for v in feeds.values()]
    graph = graph_of(x, y)
    paths = {
        "reference": evaluate(graph, feeds),
        "compiled": st.Session("cpu").compile(graph).run(feeds),
        "unfused": st.Session("cpu").compile(graph, options=st.CompileOptions(fusion=False)).run(feeds),
        "jit": [t.numpy() for t in st.jit(all_of)(*tensors)],
        "lazy": [t.numpy() for t in all_of(*tensors)],
    }
    for path, results in paths.items():
        for (name, expression), got in zip(EXPRESSIONS.items(), results, strict=True):
            check(got, wanted(expression, x, y), f"{path}: {name}")


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_expressions_that_are_compiled_after_a_while_keep_their_values(dtype: DType, rng: np.random.Generator) -> None:
    """Large tensors: the first results are NumPy's, later ones are compiled."""
    for name in ("quotient of a product", "one more is more", "maximum of one more", "power of anything"):
        expression = EXPRESSIONS[name]
        x, y = operands(dtype, rng)
        want = np.resize(wanted(expression, x, y), MANY)
        a, b = (st.tensor(np.resize(v.array(), MANY)) for v in (x, y))
        for _ in range(TIMES):
            check(expression(a, b).numpy(), want, name)


@pytest.mark.parametrize("fusion", [True, False])
def test_ranges_wrap_once_they_are_numbers(fusion: bool) -> None:
    """An index of the kernel is data as soon as it is an element: 0, 1, 2, … times a large number wraps."""
    graph = st.Graph("range")
    n = st.sym("n", 0)
    x = graph.input("x", (n,), st.i64)
    count = st.ops.arange(n)
    graph = graph.outputs((count * 2**62) // 2**60 + x, count * 2**62 * 2 + 1 > count, (count + x) % 3)
    compiled = st.Session("cpu").compile(graph, options=st.CompileOptions(fusion=fusion))
    for size in (1, 5, 40):
        i, data = np.arange(size), np.full(size, 2**63 - 1)
        want = (i * 2**62) // 2**60 + data, i * np.int64(-(2**63)) + 1 > i, (i + data) % 3
        for got, right in zip(compiled.run(x=data), want, strict=True):
            np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (3, 0), (5, 3)], ids=str)
@pytest.mark.parametrize("name", ["i4", "u4"])
def test_four_bits_of_any_size(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """Also none, and odd counts: a byte each, whose upper half says nothing."""
    dtype = as_dtype(name)
    x = rng.integers(*limits(dtype), shape, endpoint=True).astype(np.int8)
    stored = x.astype(dtype.np)
    dirty = (x.astype(np.uint8) | 0xA0).view(np.int8).view(dtype.np) if x.size else stored
    for form in (stored, dirty):
        for path in (lambda f: f, st.jit):
            np.testing.assert_array_equal(path(lambda t: t + t)(st.tensor(form)).numpy(), Whole(2 * x, dtype).array())
            np.testing.assert_array_equal(
                path(lambda t: st.sort(t, axis=0))(st.tensor(form)).numpy().astype(np.int8), np.sort(x, 0)
            )
            np.testing.assert_array_equal(path(lambda t: t.astype("i32"))(st.tensor(form)).numpy(), x)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_products_of_matrices_wrap(dtype: DType, rng: np.random.Generator) -> None:
    """Sums of bytes are i32; others have the type of their factors."""
    x, y = (numbers(dtype, rng).numbers[:60].reshape(s) for s in ((6, 10), (10, 6)))
    made = as_dtype("i32") if dtype.name == "i8" else dtype
    want = Whole(x.dot(y), made).array()
    a, b = (Whole(v, dtype).array() for v in (x, y))
    for path in (lambda f: f, st.jit):
        check(path(lambda p, q: p @ q)(st.tensor(a), st.tensor(b)).numpy(), want, "product")


ORDERS: dict[str, Callable[[Any], Any]] = {
    "sort": st.sort,
    "descending": lambda x: st.sort(x, descending=True),
    "argsort": st.argsort,
    "topk": lambda x: st.topk(x, 5)[0],
    "smallest": lambda x: st.topk(x, 5, largest=False)[0],
    "searchsorted": lambda x: st.searchsorted(st.sort(x), x),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "argmax": lambda x: st.argmax(x, 0),
    "argmin": lambda x: st.argmin(x, 0),
    "cummax": lambda x: st.cummax(x, 0)[0],
    "less": lambda x: x < x[::-1],
    "clip": lambda x: st.clip(x, 1, 5),
    "median": lambda x: st.sort(x)[x.shape[0] // 2],
    "unique": st.xp.unique_values,
}


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("name", ORDERS)
def test_order_is_that_of_the_numbers(name: str, dtype: DType, rng: np.random.Generator) -> None:
    x = numbers(dtype, rng)
    numbers_ = np.array([int(n) for n in x.numbers], np.uint64 if dtype.name == "u64" else np.int64)
    up = np.sort(numbers_, kind="stable")
    wants: dict[str, Callable[[], Any]] = {
        "sort": lambda: up, "descending": lambda: up[::-1],
        "argsort": lambda: np.argsort(numbers_, kind="stable"), "topk": lambda: up[::-1][:5],
        "smallest": lambda: up[:5], "searchsorted": lambda: np.searchsorted(up, numbers_),
        "max": numbers_.max, "min": numbers_.min, "argmax": numbers_.argmax, "argmin": numbers_.argmin,
        "cummax": lambda: np.maximum.accumulate(numbers_), "less": lambda: numbers_ < numbers_[::-1],
        "clip": lambda: np.clip(numbers_, 1, 5), "median": lambda: up[len(numbers_) // 2],
        "unique": lambda: np.unique(numbers_),
    }  # fmt: skip
    want = wants[name]()
    paths = [lambda f: f] if name == "unique" else [lambda f: f, st.jit]
    for path in paths:
        got = path(ORDERS[name])(st.tensor(x.array())).numpy()
        np.testing.assert_array_equal(got.astype(np.asarray(want).dtype), want)
