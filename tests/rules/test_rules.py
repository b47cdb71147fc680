"""Both sides of every rewrite rule agree on random inputs of every element type that the rule takes.

Instances are generated from the patterns themselves: of any type first, then the same ones of all types. A rule that
does not take a type declines, or its ops do. Inputs have the extremes of their type: where integers wrap, and where
floats are infinite, NaN, denormal or a zero with a sign.
"""

import importlib
import itertools
import pkgutil
import zlib
from dataclasses import fields
from functools import lru_cache

import numpy as np
import pytest

import strata.passes
from strata.core import ALL_DTYPES, as_dtype, bf16, bool_, f16, f32, f64, i8, i32, i64
from strata.errors import StrataError
from strata.mir import REGISTRY, Constant, Graph, constant, evaluate
from strata.ops import cast
from strata.passes import PassContext, Pattern, RuleSet
from strata.passes.match import PatternVariable

INSTANCES = 6  # of each rule
TRIALS = 60_000  # random instances tried for them; most patterns fit within a hundred
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.5, 3e-39, 1e-310, 6e-8]
DIMS = (1, 2, 3, 4)
TOLERANCE = {
    "f64": 1e-12, "c128": 1e-12, "f32": 1e-6, "c64": 1e-6, "f16": 2e-3, "bf16": 2e-2, "f8e4m3": 0.13, "f8e5m2": 0.26,
}  # fmt: skip


def rule_sets():
    """Every RuleSet of the passes, by module and name."""
    for info in pkgutil.walk_packages(strata.passes.__path__, "strata.passes."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if isinstance(value, RuleSet):
                yield f"{info.name.rpartition('.')[2]}.{name}", value


CASES = [(f"{where}.{rule.name}", rule) for where, rules_ in rule_sets() for rule in rules_.rules]


class Instance:
    """A graph that a pattern matches, built from random types and fields."""

    def __init__(self, rng, dtype=None):
        self.rng = rng
        self.graph = Graph("instance")
        self.bound = {}
        drawn = [f32, f64, f16, bf16, i8, i32, i64, bool_][
            rng.choice(8, p=[0.35, 0.2, 0.08, 0.07, 0.07, 0.08, 0.08, 0.07])
        ]
        self.dtype = drawn if dtype is None else dtype
        self.base = tuple(int(d) for d in rng.choice(DIMS, int(rng.integers(0, 4))))

    def build(self, pattern):
        match pattern:
            case PatternVariable(name):
                return self.bound[name] if name in self.bound else self.leaf(name)
            case Pattern("constant", inputs):
                return constant(float(self.rng.integers(1, 5)), self.dtype) if inputs else None
            case Pattern():
                inputs = [self.build(p) for p in pattern.inputs]
                cls = REGISTRY[pattern.op]
                given = {key: self.field(key, wanted, inputs) for key, wanted in pattern.fields}
                free = {name: self.draw(name, inputs) for name in (f.name for f in fields(cls)) if name not in given}
                return cls(**given, **free)(*inputs)
            case _:
                shape = self.base if self.rng.integers(2) else ()
                return constant(np.full(shape, pattern), self.dtype)

    def leaf(self, name):
        if name in ("a", "b", "c") and self.rng.integers(2):
            made = constant(float(self.rng.integers(1, 5)), self.dtype)
        else:
            dtype = bool_ if name == "c" and self.rng.integers(2) else self.dtype
            made = self.graph.input(name, self.shape(), dtype)
        self.bound[name] = made
        return made

    def shape(self):
        """The common shape, one that broadcasts to it, or a related one."""
        base, rng = self.base, self.rng
        choices = [base, base, base, base[1:], base[-1:], (), tuple(1 if rng.integers(2) else d for d in base)]
        choices += [(base[-1], int(rng.choice(DIMS))) if base else (), (int(rng.choice(DIMS)),)]
        return choices[int(rng.integers(len(choices)))]

    def field(self, key, wanted, inputs):
        if not isinstance(wanted, PatternVariable):
            return wanted
        if wanted.name not in self.bound:
            self.bound[wanted.name] = self.draw(key, inputs)
        return self.bound[wanted.name]

    def draw(self, key, inputs):
        """A value for a field, by its name."""
        rng, x = self.rng, inputs[0]
        match key:
            case "axis":
                return int(rng.integers(max(x.ndim, 1)))
            case "axes":
                return (x.ndim - 1,) if rng.integers(2) else (int(rng.integers(max(x.ndim, 1))),)
            case "perm":
                return tuple(int(p) for p in rng.permutation(x.ndim))
            case "eps":
                return 1e-5
            case "dtype":
                return ALL_DTYPES[int(rng.integers(len(ALL_DTYPES)))]
            case "shape":
                size = int(np.prod(x.shape))
                choices = [
                    (size,),
                    (2, *x.shape),
                    (*x.shape[:-1], 1),
                    (size // max(1, x.shape[-1] if x.ndim else 1), *x.shape[-1:]),
                ]
                choices += [tuple(3 if d == 1 else d for d in x.shape), x.shape[::-1]]
                return choices[int(rng.integers(len(choices)))]
            case "start":
                return (*(0,) * (x.ndim - 1), (x.shape[-1] // 2) * int(rng.integers(2)))
            case "stop":
                return (*x.shape[:-1], x.shape[-1] if rng.integers(2) else x.shape[-1] // 2)
            case "step":
                return (1,) * x.ndim
        raise AssertionError(f"no values are known for the field {key!r}: add them here")


def changed(rule, rng, dtype=None):
    """A graph that the rule changes, and what it makes of it; None where the drawn types do not fit."""
    trial = Instance(rng, dtype)
    try:
        root = trial.build(rule.pattern)
        graph = trial.graph.outputs(root)
    except (StrataError, IndexError, TypeError, ValueError):
        return None
    if isinstance(root.node.op, Constant):
        return None
    made = RuleSet([rule])(graph, PassContext(exact=False, verify_each=True))
    return None if made is graph else (graph, made)


@lru_cache(maxsize=256)
def fitting(rule_number, seed):
    """Seeds of instances that a rule changes."""
    rule = CASES[rule_number][1]
    found = []
    for trial in range(TRIALS):
        if changed(rule, np.random.default_rng((seed, trial))) is not None:
            found.append((seed, trial))
            if len(found) == INSTANCES:
                return found
    raise AssertionError(f"{len(found)} instances of {rule.name} in {TRIALS} trials")


def instances(number, seed, dtype=None):
    """Graphs that a rule changes, with what it makes of them; of one type, those of the same form that it takes."""
    for chosen in fitting(number, seed):
        rng = np.random.default_rng(chosen)
        found = changed(CASES[number][1], rng, dtype)
        if found is not None:
            yield *found, rng


def numbers(dtype, shape, rng, special):
    if dtype.is_bool:
        return rng.random(shape) < 0.5
    if dtype.is_int:
        low = -(1 << (dtype.bits - 1)) if dtype.is_signed else 0
        high = low + (1 << dtype.bits) - 1
        edges = np.array([low, low + 1, high, high - 1, 0, 1, 2, high // 3, *([-1] if low else [])], dtype=object)
        array = edges[rng.integers(len(edges), size=shape)]
        return np.asarray(array).astype(np.int8 if dtype.name == "i4" else dtype.np)
    array = rng.standard_normal(shape)
    if special:
        array = np.where(rng.random(shape) < 0.4, rng.choice(SPECIAL, shape), array)
    return array + 1j * numbers(dtype.real, shape, rng, special) if dtype.is_complex else array


def arrays(graph, rng, special):
    feeds = {}
    for x in (*graph.inputs, *graph.params):
        with np.errstate(all="ignore"):
            feeds[x.node.op.key] = np.asarray(numbers(x.dtype, x.type.static_shape, rng, special)).astype(x.dtype.np)
    return feeds


def products(graph):
    """The types of matrix products: NumPy's library adds in another order for other shapes."""
    return {n.types for n in graph.nodes() if n.op.name == "matmul"}


def same_bits(a, b):
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind == "c":
        return same_bits(a.real, b.real) and same_bits(a.imag, b.imag)
    if not as_dtype(a.dtype).is_float:
        return np.array_equal(a, b)
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.array_equal(a, b, equal_nan=True) and bool(np.all(np.isnan(a) | (np.signbit(a) == np.signbit(b))))


def check(number, graph, made, rng):
    """Bit for bit where the rule is exact. In half precision one op rounds once, several round each: it may differ."""
    name, rule = CASES[number]
    for dtype in (x.dtype for x in graph.results):
        is_half = dtype.is_float and dtype.bits < 32 and not name.startswith("simplify.")
        bitwise = rule.exact and not is_half and products(made) <= products(graph)
        for _ in range(3):
            feeds = arrays(graph, rng, special=bitwise)
            for old, new in zip(evaluate(graph, feeds), evaluate(made, feeds), strict=True):
                if bitwise or not dtype.is_inexact:
                    assert same_bits(old, new), f"{graph}\n{made}\n{feeds}\n{old}\n{new}"
                else:
                    close = TOLERANCE[dtype.name]
                    wide = [np.asarray(a).astype(np.complex128) for a in (new, old)]
                    np.testing.assert_allclose(*wide, rtol=close * 4, atol=close * 4, err_msg=f"{graph}\n{made}")


NUMBERS = pytest.mark.parametrize("number", range(len(CASES)), ids=[n for n, _ in CASES])


@pytest.fixture
def form(request, number):
    """A seed that all tests of a rule share: instances are found once."""
    return zlib.crc32(f"{request.config.getoption('--seed')}:{CASES[number][0]}".encode())


@NUMBERS
def test_both_sides_agree(number, form):
    for graph, made, rng in instances(number, form):
        check(number, graph, made, rng)


@NUMBERS
def test_both_sides_agree_in_every_type(number, form):
    for dtype in ALL_DTYPES:
        for graph, made, rng in instances(number, form, dtype):
            check(number, graph, made, rng)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_casts_of_casts_agree_in_every_pair_of_types(dtype, rng):
    rule = next(rule for name, rule in CASES if name.endswith(".cast_of_cast"))
    for inner, outer in itertools.product(ALL_DTYPES, ALL_DTYPES):
        graph = Graph("casts")
        x = graph.input("x", (40,), dtype)
        graph = graph.outputs(cast(cast(x, inner), outer))
        made = RuleSet([rule])(graph, PassContext())
        feeds = arrays(graph, rng, special=True)
        if made is not graph:
            old, new = evaluate(graph, feeds)[0], evaluate(made, feeds)[0]
            assert same_bits(old, new), f"{dtype} {inner} {outer}\n{feeds}\n{old}\n{new}"


@NUMBERS
def test_types_stay(number, form):
    for graph, made, _ in itertools.islice(instances(number, form), 2):
        assert [x.type for x in graph.results] == [x.type for x in made.results]


def test_every_set_was_found():
    assert {name.split(".")[0] for name, _ in CASES} == {"simplify"}
