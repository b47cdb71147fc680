"""Symbolic sizes: bounded integer expressions in canonical form, so that sizes are equal where their terms are.

A size is an `int` or a `SymExpr`. A `SymExpr` is a polynomial with integer coefficients over atoms; an atom is a named
symbol with bounds, or one of `floordiv`, `mod`, `min`, `max` of two sizes. Arithmetic on sizes gives an `int` whenever
the result is constant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from math import gcd, prod
from operator import index
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from strata.config import config
from strata.core.budgets import over_budget
from strata.core.forks import new_rlock
from strata.core.source import located
from strata.errors import OptionError, SymbolError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*\Z")
LONG_PRODUCT = 64  # terms and factors of a product below which none is counted against the budget
MERGED = 16  # pairs of terms that may fall together into one term of a product
MAX_DEPTH = 128  # divisions, remainders, minima and maxima inside each other: walks over sizes are recursive


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named unknown size with inclusive bounds; `hi` None is unbounded."""

    name: str
    lo: int = 0
    hi: int | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class SizeCall:
    """A non-polynomial function of two sizes: floordiv, mod, min or max. Equal calls are one object."""

    kind: str
    a: Dim
    b: Dim
    depth: int  # calls inside each other
    _text: str | None = field(default=None, init=False, repr=False)  # once it was asked for: terms are sorted by text

    def __reduce__(self) -> tuple[Any, ...]:
        return make_call, (self.kind, self.a, self.b)

    def __str__(self) -> str:
        if self._text is None:
            object.__setattr__(self, "_text", self._shown())
        return str(self._text)

    def _shown(self) -> str:
        if self.kind in ("min", "max"):
            return f"{self.kind}({self.a}, {self.b})"
        return f"{_wrap(self.a)} {'//' if self.kind == 'floordiv' else '%'} {_wrap(self.b)}"


Atom = Symbol | SizeCall
Monomial = tuple[Atom, ...]  # sorted by text; a power is a repeated atom; () is the constant term


class SymExpr:
    """A size that is not known yet. Immutable; `==` is structural; never compares equal to an int."""

    __slots__ = ("_hash", "_text", "terms")
    __array_priority__: ClassVar[int] = 1000

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        self._hash = hash(terms)
        self._text: str | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SymExpr) and self._hash == other._hash and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:  # hashes are those of a process
        return SymExpr, (self.terms,)

    def __str__(self) -> str:
        if self._text is None:
            self._text = _show(self.terms)
        return self._text

    __repr__ = __str__

    def __add__(self, other: Dim) -> Dim:
        if isinstance(other, int):  # the constant is the last term, so that the order stays
            *before, (mono, constant) = self.terms
            if mono:
                return SymExpr((*self.terms, ((), int(other)))) if other else self
            total_constant = ((), constant + other)
            return SymExpr((*before, total_constant) if total_constant[1] else tuple(before))
        if not _is_dim(other):
            return NotImplemented
        total = dict(_terms(self))
        for mono, coeff in _terms(other):
            total[mono] = total.get(mono, 0) + coeff
        return _make(total)

    __radd__ = __add__

    def __mul__(self, other: Dim) -> Dim:
        if isinstance(other, int):
            return SymExpr(tuple((mono, coeff * other) for mono, coeff in self.terms)) if other else 0
        if not _is_dim(other):
            return NotImplemented
        ours, theirs = tuple(_terms(self)), tuple(_terms(other))
        if len(ours) * len(theirs) > LONG_PRODUCT:
            _require_terms(len(ours) * len(theirs) // MERGED, self, other)
        total: dict[Monomial, int] = {}
        for mono_a, coeff_a in ours:
            for mono_b, coeff_b in theirs:
                mono = tuple(sorted(mono_a + mono_b, key=str))
                total[mono] = total.get(mono, 0) + coeff_a * coeff_b
        longest = max(map(len, total), default=0)
        if len(total) * longest > LONG_PRODUCT:
            _require_terms(max(len(total), MERGED * longest), self, other)
        return _make(total)

    __rmul__ = __mul__

    def __neg__(self) -> Dim:
        return self * -1

    def __sub__(self, other: Dim) -> Dim:
        return self + (other * -1) if _is_dim(other) else NotImplemented

    def __rsub__(self, other: Dim) -> Dim:
        return (self * -1) + other if _is_dim(other) else NotImplemented

    def __floordiv__(self, other: Dim) -> Dim:
        return floordiv(self, other) if _is_dim(other) else NotImplemented

    def __rfloordiv__(self, other: Dim) -> Dim:
        return floordiv(other, self) if _is_dim(other) else NotImplemented

    def __mod__(self, other: Dim) -> Dim:
        return mod(self, other) if _is_dim(other) else NotImplemented

    def __rmod__(self, other: Dim) -> Dim:
        return mod(other, self) if _is_dim(other) else NotImplemented

    def __lt__(self, other: Dim) -> bool:
        return self._compare("<", self + 1, other)

    def __le__(self, other: Dim) -> bool:
        return self._compare("<=", self, other)

    def __gt__(self, other: Dim) -> bool:
        return self._compare(">", other + 1, self)

    def __ge__(self, other: Dim) -> bool:
        return self._compare(">=", other, self)

    def _compare(self, sign: str, low: Dim, high: Dim) -> bool:
        """Whether low <= high, if it is the same for every value of the symbols."""
        if known_le(low, high):
            return True
        if known_le(high + 1, low):
            return False
        other = high if sign in ("<", "<=") else low if sign == ">=" else low - 1
        raise SymbolError(f"whether {self} {sign} {other} is not known yet", code="S151")

    def __bool__(self) -> bool:
        raise SymbolError(f"the size {self} is not known yet, so it has no truth value", code="S151")

    def __index__(self) -> int:
        raise SymbolError(f"the size {self} is symbolic; a number is needed here", code="S152")


Dim = int | SymExpr


def _is_dim(x: object) -> bool:
    """True for sizes and NumPy's integers; a float or a string is not silently cut to a whole number."""
    return isinstance(x, SymExpr) or (hasattr(x, "__index__") and not hasattr(x, "__len__"))


def _plain(x: Dim) -> Dim:
    """A size whose number, if it is one, is Python's own."""
    return x if isinstance(x, (SymExpr, int)) else index(x)


def _terms(x: Dim) -> Iterable[tuple[Monomial, int]]:
    if isinstance(x, SymExpr):
        return x.terms
    return (((), int(x)),) if x else ()


def _require_terms(count: int, a: Dim, b: Dim) -> None:
    """Refuse a product that has more terms, or many more factors in one of them, than a size may have."""
    if count > config().max_terms:
        shown = " times ".join(str(x)[:40] + " …" * (len(str(x)) > 40) for x in (a, b))
        raise over_budget("max_terms", count, f"a size: {shown}, multiplied out, has at least {count} terms")


def _make(total: Mapping[Monomial, int]) -> Dim:
    kept = {mono: coeff for mono, coeff in total.items() if coeff}
    if not kept:
        return 0
    if set(kept) == {()}:
        return kept[()]
    ordered = sorted(kept.items(), key=lambda item: (-len(item[0]), [str(a) for a in item[0]]))
    return SymExpr(tuple(ordered))


def from_atom(atom: Atom) -> SymExpr:
    """A symbol, or a function of two sizes, as a size."""
    return SymExpr((((atom,), 1),))


def _call(kind: str, a: Dim, b: Dim) -> SymExpr:
    return from_atom(make_call(kind, a, b))


def make_call(kind: str, a: Dim, b: Dim) -> SizeCall:
    """A call that knows how deep it is; one that is too deep to be walked over is refused."""
    key = kind, a, b
    found = _calls.get(key)
    if found is not None:
        return found
    depth = 1 + max(_depth(a), _depth(b))
    if depth > MAX_DEPTH:
        raise SymbolError(f"a size has more than {MAX_DEPTH} divisions, remainders, minima or maxima inside each other",
                          code="S159")  # fmt: skip
    with _calls_lock:
        return _calls.setdefault(key, SizeCall(kind, a, b, depth))


_calls: WeakValueDictionary[tuple[str, Dim, Dim], SizeCall] = WeakValueDictionary()  # those that some size holds
_calls_lock = new_rlock()


def _depth(x: Dim) -> int:
    if not isinstance(x, SymExpr):
        return 0
    return max((a.depth for mono, _ in x.terms for a in mono if isinstance(a, SizeCall)), default=0)


def _show(terms: tuple[tuple[Monomial, int], ...]) -> str:
    parts: list[str] = []
    for mono, coeff in terms:
        is_factor = len(mono) > 1 or coeff != 1
        factors = [
            f"({a})" if is_factor and isinstance(a, SizeCall) and a.kind in ("floordiv", "mod") else str(a)
            for a in mono
        ]
        if abs(coeff) != 1 or not mono:
            factors.insert(0, str(abs(coeff)))
        sign = "-" if coeff < 0 else "+"
        parts += [sign, "*".join(factors)]
    head = "-" if parts[0] == "-" else ""
    return head + " ".join(parts[1:])


def _wrap(x: Dim) -> str:
    simple = isinstance(x, int) or (
        len(x.terms) == 1 and x.terms[0][1] == 1 and len(x.terms[0][0]) == 1 and isinstance(x.terms[0][0][0], Symbol)
    )
    return str(x) if simple else f"({x})"


@located
def sym(name: str, lo: int = 1, hi: int | None = None) -> SymExpr:
    """A named symbolic size with inclusive bounds."""
    if not _NAME.match(name) or name in ("min", "max"):
        raise OptionError(f"{name!r} cannot name a size: use letters, digits, '_' and '.'", code="O110")
    if lo < 0 or (hi is not None and hi < lo):
        raise OptionError(f"size {name}: bounds {lo}..{hi} are not an interval of sizes", code="O111")
    return from_atom(Symbol(name, lo, hi))


def bounds(x: Dim) -> tuple[int, int | None]:
    """Inclusive bounds; an upper bound of None is unbounded; without a provable lower one it is 0, as for any size."""
    lo, hi = _interval(x)
    return (0 if lo is None else lo), hi


@lru_cache(maxsize=4096)  # long sizes have the same parts many times
def _interval(x: Dim) -> tuple[int | None, int | None]:
    if isinstance(x, int):
        return x, x
    lo: int | None = 0
    hi: int | None = 0
    for mono, coeff in x.terms:
        low, high = _monomial_interval(mono)
        if coeff < 0:
            low, high = high, low
        lo = None if lo is None or low is None else lo + coeff * low
        hi = None if hi is None or high is None else hi + coeff * high
    return lo, hi


def _monomial_interval(mono: Monomial) -> tuple[int | None, int | None]:
    if len(mono) == 1:
        return _atom_interval(mono[0])
    lo: int | None = 1
    hi: int | None = 1
    for atom in mono:
        low, high = _atom_interval(atom)
        if low is None or low < 0 or lo is None:
            return None, None
        lo = lo * low
        hi = None if hi is None or high is None else hi * high
    return lo, hi


def _atom_interval(atom: Atom) -> tuple[int | None, int | None]:
    if isinstance(atom, Symbol):
        return atom.lo, atom.hi
    (alo, ahi), (blo, bhi) = _interval(atom.a), _interval(atom.b)
    match atom.kind:
        case "min":
            known = [h for h in (ahi, bhi) if h is not None]
            return (None if alo is None or blo is None else min(alo, blo)), (min(known) if known else None)
        case "max":
            lows = [v for v in (alo, blo) if v is not None]
            return (max(lows) if lows else None), (None if ahi is None or bhi is None else max(ahi, bhi))
        case "mod":
            return 0, (None if bhi is None else bhi - 1)
        case _:
            if blo is None or blo < 1:
                return None, None
            low = None if alo is None else (alo // bhi if bhi is not None and alo >= 0 else min(alo // blo, 0))
            return low, (None if ahi is None else (ahi // blo if ahi >= 0 else ahi // (bhi or ahi)))


def known_le(a: Dim, b: Dim) -> bool:
    """True when a ≤ b for every value of the symbols."""
    hi = _interval(a - b)[1]
    return hi is not None and hi <= 0


def known_positive(a: Dim) -> bool:
    """True when a ≥ 1 for every value of the symbols."""
    lo = _interval(a)[0]
    return lo is not None and lo >= 1


def floordiv(a: Dim, b: Dim) -> Dim:
    """a // b, rounding down, exact where it can be seen."""
    a, b = _plain(a), _divisor(a, b)
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if b == 1 or a == 0:
        return a
    quotient = divide_exactly(a, b)
    if quotient is not None:
        return quotient
    if isinstance(b, int) and isinstance(a, SymExpr):
        whole = {m: c // b for m, c in a.terms if c % b == 0}
        rest = {m: c for m, c in a.terms if c % b}
        if whole and rest:
            return _make(whole) + floordiv(_make(rest), b)
    low, high = _interval(a)
    if isinstance(b, int) and low is not None and low >= 0 and high is not None and high < b:
        return 0
    return _call("floordiv", a, b)


def mod(a: Dim, b: Dim) -> Dim:
    """a % b with the sign of b."""
    a, b = _plain(a), _divisor(a, b)
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    if divide_exactly(a, b) is not None:
        return 0
    if isinstance(b, int) and isinstance(a, SymExpr):
        rest = {m: c for m, c in a.terms if c % b}
        if len(rest) < len(a.terms):
            return mod(_make(rest), b)
    low, high = _interval(a)
    if isinstance(b, int) and low is not None and low >= 0 and high is not None and high < b:
        return a
    return _call("mod", a, b)


def _divisor(a: Dim, b: Dim) -> Dim:
    b = _plain(b)
    if isinstance(b, int) and b == 0:
        raise OptionError(f"size {a}: division by zero", code="O112")
    return b


def divide_exactly(a: Dim, b: Dim) -> Dim | None:
    """a / b when b divides every term of a, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    divisor = tuple(_terms(b))
    if len(divisor) != 1:
        return 1 if a == b else None
    mono_b, coeff_b = divisor[0]
    result: dict[Monomial, int] = {}
    for mono, coeff in _terms(a):
        rest = list(mono)
        for atom in mono_b:
            if atom not in rest:
                return None
            rest.remove(atom)
        if coeff % coeff_b:
            return None
        result[tuple(rest)] = coeff // coeff_b
    return _make(result)


def dim_min(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    a, b = sorted((a, b), key=str)  # first, so that a tie goes the same way for (a, b) and (b, a)
    if known_le(a, b):
        return a
    if known_le(b, a):
        return b
    return _call("min", a, b)


def dim_max(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    a, b = sorted((a, b), key=str)  # first, so that a tie goes the same way for (a, b) and (b, a)
    if known_le(a, b):
        return b
    if known_le(b, a):
        return a
    return _call("max", a, b)


def dim_spread(count: Dim, step: int) -> Dim:
    """From the first to the last of `count` elements that are `step` apart, both included; 0 where there is none."""
    if step == 1 or count == 0:
        return count
    span = (count - 1) * step + 1
    return span if known_positive(count) else dim_max(span, 0)


def dim_prod(dims: Iterable[Dim]) -> Dim:
    numbers: int = 1
    rest: Dim | None = None
    for d in dims:
        if not isinstance(d, SymExpr):
            numbers *= d
        else:
            rest = d if rest is None else rest * d
    return numbers if rest is None else rest * numbers


def symbols(x: Dim) -> dict[str, Symbol]:
    """The symbols in a size, by name."""
    found: dict[str, Symbol] = {}
    _note_symbols(x, found, set())
    return found


def _note_symbols(x: Dim, found: dict[str, Symbol], seen: set[int]) -> None:
    """Add the symbols in a size: what it has several times is looked at once."""
    if not isinstance(x, SymExpr) or id(x) in seen:
        return
    seen.add(id(x))
    for mono, _ in x.terms:
        for atom in mono:
            if isinstance(atom, Symbol):
                found.setdefault(atom.name, atom)
            else:
                _note_symbols(atom.a, found, seen)
                _note_symbols(atom.b, found, seen)


def substitute(x: Dim, binding: Mapping[str, Dim]) -> Dim:
    """Replace symbols by sizes; unknown symbols stay. A value outside its symbol's bounds is an error."""
    if not isinstance(x, SymExpr):
        return x
    return dim_sum(dim_prod([_substitute_atom(atom, binding) for atom in mono]) * coeff for mono, coeff in x.terms)


def dim_sum(parts: Iterable[Dim]) -> Dim:
    """The sum of sizes."""
    total: dict[Monomial, int] = {}
    for part in parts:
        for mono, coeff in _terms(part):
            total[mono] = total.get(mono, 0) + coeff
    return _make(total)


_CALLS = {"floordiv": floordiv, "mod": mod, "min": dim_min, "max": dim_max}


def _substitute_atom(atom: Atom, binding: Mapping[str, Dim]) -> Dim:
    if isinstance(atom, SizeCall):
        return _CALLS[atom.kind](substitute(atom.a, binding), substitute(atom.b, binding))
    if atom.name not in binding:
        return from_atom(atom)
    value = _plain(binding[atom.name])
    if isinstance(value, int) and (value < atom.lo or (atom.hi is not None and value > atom.hi)):
        raise SymbolError(
            f"size {atom.name} = {value} is outside its bounds {atom.lo}..{'' if atom.hi is None else atom.hi}",
            code="S153",
        )
    return value


def solve_for(pattern: Dim, value: int) -> tuple[str, int] | None:
    """The one symbol of `pattern` and the value that makes it equal `value`, where pattern is c*symbol + d."""
    if not isinstance(pattern, SymExpr):
        return None
    linear = [(m, c) for m, c in pattern.terms if m]
    offset = sum(c for m, c in pattern.terms if not m)
    if len(linear) != 1 or len(linear[0][0]) != 1 or not isinstance(linear[0][0][0], Symbol):
        return None
    (mono, coeff) = linear[0]
    symbol = mono[0]
    assert isinstance(symbol, Symbol)
    if (value - offset) % coeff:
        return None
    return symbol.name, (value - offset) // coeff


def common_divisor(x: Dim) -> int:
    """The largest int that divides x whatever its symbols are; 0 for 0."""
    return reduce(gcd, (c for _, c in _terms(x)), 0)


def static_prod(dims: Iterable[Dim]) -> int | None:
    """The product of sizes, or None when one of them is symbolic."""
    values: list[Any] = list(dims)
    return prod(values) if all(isinstance(d, int) for d in values) else None
