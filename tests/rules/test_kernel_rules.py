"""Every rewrite of scalar expressions keeps their values: random expressions of every element type, at its extremes.

An expression is built twice: by `apply`, which rewrites what it can, and value by value in NumPy, which rewrites
nothing. Data and indices take turns as leaves, so that what holds for indices, which never wrap, is tried on data.
"""

import numpy as np
import pytest

from strata.core import ALL_DTYPES, bool_, i4, i64, sym, u4
from strata.kernel import SCALARS, Axis, Buffer, Const, Kernel, Load, Size, Store, interpret, linear, normalize
from strata.kernel.ir import apply, as_data, as_index
from strata.kernel.scalars import cast_array

INTEGERS = [t for t in ALL_DTYPES if t.is_int]
PROGRAMS, STEPS, ROW = 60, 12, 24
FLOATS = [0.0, -0.0, 1.0, -1.0, 0.5, -1.5, 2.0, np.inf, -np.inf, np.nan, 3e-39, 1e-310, 6e-8, 65504.0, 1e30]


def limits(dtype):
    low = -(1 << (dtype.bits - 1)) if dtype.kind == "int" else 0
    return low, low + (1 << dtype.bits) - 1


def extremes(dtype):
    """Numbers of a type around which it wraps, rounds or overflows."""
    if dtype.is_bool:
        return [False, True]
    if dtype.is_int:
        low, high = limits(dtype)
        near = {low, low + 1, high, high - 1, high // 2, high // 3, 0, 1, 2, 3, *(() if low == 0 else (-1, -2, -3))}
        return sorted(n for n in near if low <= n <= high)
    if dtype.is_complex:
        return [complex(a, b) for a in FLOATS[:6] for b in FLOATS[:6]]
    return FLOATS


def numbers(dtype, rng, shape):
    pool = np.array(extremes(dtype), dtype=object)
    drawn = pool[rng.integers(len(pool), size=shape)]
    with np.errstate(all="ignore"):
        if dtype.bits == 4:
            return drawn.astype(np.int8).astype(dtype.np)
        return drawn.astype(np.complex128 if dtype.is_complex else dtype.np).astype(dtype.np)


def exactly(name, args, dtype):
    """One function in NumPy, in the type itself; four bits in a byte, wrapped."""
    wide = [
        a.astype(np.int8 if dtype is i4 else np.uint8) if dtype in (i4, u4) and a.dtype == dtype.np else a for a in args
    ]
    with np.errstate(all="ignore"):
        made = np.asarray(SCALARS[name].numpy(*wide))
    return made if made.dtype == np.bool_ or dtype not in (i4, u4) else made.astype(np.int64).astype(dtype.np)


def same(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind in "iub" or a.dtype in (i4.np, u4.np):
        return np.array_equal(a, b)
    nan = np.isnan(a) & np.isnan(b)
    kind = np.complex128 if a.dtype.kind == "c" else np.float64
    x, y = a.astype(kind), b.astype(kind)
    signs = np.ones(x.shape, bool) if kind is np.complex128 else np.signbit(x) == np.signbit(y)
    return bool(np.all(nan | ((x == y) & signs)))


BINARY = {
    "int": ("add", "sub", "mul", "floordiv", "mod", "truncdiv", "rem", "min", "max", "and", "or", "xor", "shl", "shr"),
    "float": ("add", "sub", "mul", "div", "min", "max"),
    "complex": ("add", "sub", "mul"),
    "bool": ("and", "or", "xor"),
}
UNARY = {"int": ("neg", "abs", "not", "sign"), "float": ("neg", "abs"), "complex": ("neg", "conj"), "bool": ("not",)}
TESTS = ("lt", "le", "gt", "ge", "eq", "ne")


class Program:
    """Values that are known twice: as expressions, and as arrays over one axis."""

    def __init__(self, dtype, rng):
        self.dtype, self.rng = dtype, rng
        self.kind = "int" if dtype.is_int else dtype.kind
        self.axis = Axis("i", ROW)
        self.buffers = [Buffer(n, dtype, (ROW,)) for n in "xy"]
        self.arrays = [numbers(dtype, rng, ROW) for _ in self.buffers]
        self.values = [(Load(b, (self.axis,)), a) for b, a in zip(self.buffers, self.arrays, strict=True)]
        place = self.axis if dtype is i64 and rng.integers(2) else None
        if place is not None:  # an index as a number, which wraps from then on
            self.values.append((as_data(place), np.arange(ROW)))
            self.values.append((as_data(place * 3 + 1), np.arange(ROW) * 3 + 1))

    def pick(self):
        if self.rng.integers(3) == 0:
            number = extremes(self.dtype)[int(self.rng.integers(len(extremes(self.dtype))))]
            with np.errstate(all="ignore"):
                array = np.asarray(number).astype(np.int8 if self.dtype is i4 else self.dtype.np).astype(self.dtype.np)
            return Const(array, self.dtype), np.full(ROW, array)
        return self.values[int(self.rng.integers(len(self.values)))]

    def step(self):
        draw = int(self.rng.integers(10))
        a, b = self.pick(), self.pick()
        if draw < 6:
            name = str(self.rng.choice(BINARY[self.kind]))
            made = apply(name, a[0], b[0]), exactly(name, (a[1], b[1]), self.dtype)
        elif draw < 7:
            name = str(self.rng.choice(UNARY[self.kind]))
            if self.dtype.is_complex and name == "abs":
                return
            made = apply(name, a[0]), exactly(name, (a[1],), self.dtype)
        elif draw < 9 and not self.dtype.is_complex and not self.dtype.is_bool:
            name = str(self.rng.choice(TESTS))
            test = apply(name, a[0], b[0]), exactly(name, (a[1], b[1]), self.dtype)
            c, d = self.pick(), self.pick()
            made = apply("select", test[0], c[0], d[0]), np.where(test[1], c[1], d[1])
        else:
            through = ALL_DTYPES[int(self.rng.integers(len(ALL_DTYPES)))]
            made = a[0].cast(through).cast(self.dtype), cast_array(cast_array(a[1], through), self.dtype)
        assert made[0].dtype is self.dtype
        self.values.append((made[0], np.asarray(made[1]).astype(self.dtype.np)))

    def kernel(self, value):
        out = Buffer("out", self.dtype, (ROW,))
        return Kernel("k", tuple(self.buffers), (out,), (Store(out, (self.axis,), (self.axis,), value),))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_rewritten_expressions_have_the_values_of_numpy(dtype, rng):
    for _ in range(PROGRAMS):
        program = Program(dtype, rng)
        for _ in range(STEPS):
            program.step()
        for expression, wanted in program.values[-4:]:
            kernel = program.kernel(expression)
            for form in (kernel, normalize(kernel)):
                (got,) = interpret(form, program.arrays)
                assert same(got, wanted), f"{kernel}\n{program.arrays}\n{got}\n{wanted}"


@pytest.mark.parametrize("name", ["add", "sub", "mul", "neg"])
def test_a_linear_form_never_opens_data(name):
    """What the algebra of indices can be applied to says so itself: data is one atom, whatever it is made of."""
    x, i = Load(Buffer("x", i64, (8,)), (Axis("i", 8),)), Axis("i", 8)
    for node in (x, as_data(i), as_data(Size(sym("n", 0)))):
        args = (node,) if name == "neg" else (node, Const(1 << 62, i64))
        made = apply(name, *args)
        assert not made.is_index
        assert linear(made).terms == {made: 1}


def test_indices_are_told_from_data():
    i, n = Axis("i", 8), Size(sym("n", 0))
    x = Load(Buffer("x", i64, (8,)), (i,))
    assert (i * 3 + n).is_index
    assert not (x + i).is_index
    assert as_index(x).is_index
    assert as_index(as_data(i)) is i
    assert as_data(as_index(x)) is x
    assert not i.cast(bool_).cast(i64).is_index
    assert Load(Buffer("y", i64, (8,)), (x,)).index == (as_index(x),)


@pytest.mark.parametrize("extent", [8, sym("n", 0), sym("n", 0, 5)], ids=str)
def test_numbers_that_are_indices_are_computed_as_indices_where_they_fit(extent):
    """Ranges, masks and positions keep their plain addresses; what may wrap stays as it is."""
    i, j = Axis("i", extent), Axis("j", extent)
    a, b = as_data(i), as_data(j)
    assert as_index(a * 4 + 3) is i * 4 + 3
    assert apply("ge", a, b) is apply("ge", i, j)
    assert as_index((a * 4 + b % 4) // 4) is i
    assert not as_index(a * (1 << 62) // 3).args[0].args[0].is_index
