"""Complex numbers as pairs of reals: an equivalent kernel over buffers of twice the length.

Triton has no complex numbers. Every complex value becomes two real ones, and every complex element two elements side by
side, as they lie in memory anyway. Sums of complex products become sums of real ones, so that complex matmuls
are tiles too. Products over an axis are left out: their parts depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from strata.core import DType, dim_prod, i64
from strata.errors import CompileError
from strata.kernel import (
    Axis,
    Buffer,
    Const,
    Expr,
    Kernel,
    Load,
    Reduce,
    Scalar,
    Scan,
    Store,
    apply,
    postorder,
    rebuild,
)

Pair = tuple[Expr, Expr]


def without_complex(kernel: Kernel) -> Kernel:
    """A normalized kernel with pairs of real numbers in place of complex ones; itself where it has none."""
    nodes = postorder(kernel.roots)
    if not any(n.dtype.is_complex for n in nodes) and not any(b.dtype.is_complex for b in kernel.buffers):
        return kernel
    done: dict[Expr, Expr | Pair] = {}
    for node in nodes:
        done[node] = _pair(node, done) if _touches(node) else rebuild(node, tuple(_one(done[x]) for x in node.inputs))
    stores: list[Store] = []
    for store in kernel.stores:
        (index,) = (_one(done[i]) for i in store.index)
        value = done[store.value]
        if isinstance(value, tuple):
            buffer = _real(store.buffer)
            places = (index * Const(2, i64), index * Const(2, i64) + Const(1, i64))
            stores += [Store(buffer, store.axes, (at,), part) for at, part in zip(places, value, strict=True)]
        else:
            stores.append(replace(store, index=(index,), value=value))
    inputs, outputs = tuple(map(_real, kernel.inputs)), tuple(map(_real, kernel.outputs))
    return replace(kernel, inputs=inputs, outputs=outputs, stores=tuple(stores))


def _touches(node: Expr) -> bool:
    return node.dtype.is_complex or any(x.dtype.is_complex for x in node.inputs)


def _one(value: Expr | Pair) -> Expr:
    assert isinstance(value, Expr), "a complex value is where a real one is expected"
    return value


def _two(value: Expr | Pair) -> Pair:
    assert isinstance(value, tuple), "a real value is where a complex one is expected"
    return value


def _real(buffer: Buffer) -> Buffer:
    if not buffer.dtype.is_complex:
        return buffer
    return Buffer(buffer.name, buffer.dtype.real, (dim_prod(buffer.shape) * 2,))


def _pair(node: Expr, done: dict[Expr, Expr | Pair]) -> Expr | Pair:
    match node:
        case Const(value, dtype):
            number = complex(value)
            return Const(number.real, dtype.real), Const(number.imag, dtype.real)
        case Load(buffer, (index,), where):
            at = _one(done[index]) * Const(2, i64)
            condition = None if where is None else _one(done[where])
            return tuple(Load(_real(buffer), (at + Const(k, i64),), condition) for k in (0, 1))  # type: ignore[return-value]
        case Reduce("sum", axes, body):
            return _summed(axes, body, done)
        case Scan("sum", axis, body, position, exclusive):
            parts = _two(done[body])
            a, b = (Scan("sum", axis, part, _one(done[position]), exclusive) for part in parts)
            return a, b
        case Scalar(name, args) if name in _TABLE:
            return _TABLE[name](node, [done[a] for a in args])
    raise CompileError(f"{node!r} of complex numbers has no Triton form", code="C130")


def _summed(axes: tuple[Axis, ...], body: Expr, done: dict[Expr, Expr | Pair]) -> Pair:
    if isinstance(body, Scalar) and body.name == "mul":
        (a, b), (c, d) = (_two(done[x]) for x in body.args)
        sums = [Reduce("sum", axes, x * y) for x, y in ((a, c), (b, d), (a, d), (b, c))]
        return sums[0] - sums[1], sums[2] + sums[3]
    re, im = _two(done[body])
    return _total(axes, re), _total(axes, im)


def _total(axes: tuple[Axis, ...], part: Expr) -> Expr:
    """Sums of sums stay sums, whatever joins them."""
    match part:
        case Scalar("add" | "sub" as name, (Reduce("sum") as a, Reduce("sum") as b)):
            return apply(name, Reduce("sum", axes, a), Reduce("sum", axes, b))
    return Reduce("sum", axes, part)


# functions


def _each(name: str) -> Callable[[Scalar, list[Expr | Pair]], Pair]:
    def make(_: Scalar, args: list[Expr | Pair]) -> Pair:
        parts = list(zip(*(_two(a) for a in args), strict=True))
        return apply(name, *parts[0]), apply(name, *parts[1])

    return make


def _mul(_: Scalar, args: list[Expr | Pair]) -> Pair:
    (a, b), (c, d) = map(_two, args)
    return a * c - b * d, a * d + b * c


def _div(_: Scalar, args: list[Expr | Pair]) -> Pair:
    """Smith's method: scaled by the larger component of the divisor, so that squares cannot overflow."""
    (a, b), (c, d) = map(_two, args)
    zero = Const(0, a.dtype)
    larger = abs(c) >= abs(d)
    big, small = apply("select", larger, c, d), apply("select", larger, d, c)
    ratio = apply("select", big.eq(zero), zero, small / big)
    scale = big + small * ratio
    re = apply("select", larger, a, b) + apply("select", larger, b, a) * ratio
    im = apply("select", larger, b - a * ratio, b * ratio - a)
    return re / scale, im / scale


def _size(a: Expr, b: Expr) -> Expr:
    """The distance from 0, without overflow."""
    one, zero = Const(1, a.dtype), Const(0, a.dtype)
    x, y = abs(a), abs(b)
    big, small = apply("max", x, y), apply("min", x, y)
    ratio = apply("select", big.eq(zero), zero, small / big)
    size = big * apply("sqrt", one + ratio * ratio)
    infinite = apply("or", apply("isinf", a), apply("isinf", b))
    return apply("select", infinite, Const(float("inf"), a.dtype), size)


def _abs(_: Scalar, args: list[Expr | Pair]) -> Expr:
    return _size(*_two(args[0]))


def _exp(_: Scalar, args: list[Expr | Pair]) -> Pair:
    re, im = _two(args[0])
    e = apply("exp", re)
    return e * apply("cos", im), apply("select", im.eq(Const(0, im.dtype)), im, e * apply("sin", im))


def _log(_: Scalar, args: list[Expr | Pair]) -> Pair:
    re, im = _two(args[0])
    return apply("log", _size(re, im)), apply("atan2", im, re)


def _sqrt(_: Scalar, args: list[Expr | Pair]) -> Pair:
    re, im = _two(args[0])
    zero, half = Const(0, re.dtype), Const(0.5, re.dtype)
    root = apply("sqrt", (_size(re, im) + abs(re)) * half)
    other = apply("select", root.eq(zero), zero, abs(im) / (root + root))
    right = re >= zero
    return apply("select", right, root, other), apply("copysign", apply("select", right, other, root), im)


def _test(name: str, join: str) -> Callable[[Scalar, list[Expr | Pair]], Expr]:
    def make(_: Scalar, args: list[Expr | Pair]) -> Expr:
        first, second = zip(*(_two(a) for a in args), strict=True)
        return apply(join, apply(name, *first), apply(name, *second))

    return make


def _cast(node: Scalar, args: list[Expr | Pair]) -> Expr | Pair:
    value, dtype = args[0], node.dtype
    if isinstance(value, tuple):
        re, im = value
        if dtype.is_bool:
            return apply("or", _is_not_zero(re), _is_not_zero(im))
        return (re.cast(dtype.real), im.cast(dtype.real)) if dtype.is_complex else re.cast(dtype)
    return value.cast(dtype.real), Const(0, dtype.real)


def _is_not_zero(x: Expr) -> Expr:
    return x.ne(Const(0, x.dtype))


def _select(_: Scalar, args: list[Expr | Pair]) -> Pair:
    condition, (a, b), (c, d) = _one(args[0]), _two(args[1]), _two(args[2])
    return apply("select", condition, a, c), apply("select", condition, b, d)


_TABLE: Final[dict[str, Callable[[Scalar, list[Expr | Pair]], Expr | Pair]]] = {
    "add": _each("add"),
    "sub": _each("sub"),
    "neg": _each("neg"),
    "mul": _mul,
    "div": _div,
    "abs": _abs,
    "exp": _exp,
    "log": _log,
    "sqrt": _sqrt,
    "eq": _test("eq", "and"),
    "ne": _test("ne", "or"),
    "isnan": _test("isnan", "or"),
    "isinf": _test("isinf", "or"),
    "isfinite": _test("isfinite", "and"),
    "real": lambda _, args: _two(args[0])[0],
    "imag": lambda _, args: _two(args[0])[1],
    "complex": lambda _, args: (_one(args[0]), _one(args[1])),
    "conj": lambda _, args: (_two(args[0])[0], -_two(args[0])[1]),
    "select": _select,
    "cast": _cast,
}


def takes_pairs(name: str, dtypes: list[DType]) -> bool:
    """Whether an op on these types has a kernel of pairs."""
    return name not in ("reduce_prod", "cumprod") or not any(d.is_complex for d in dtypes)
