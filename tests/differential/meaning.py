"""What a program means: exact numbers, floats in f64, and how near a path has to come.

The oracle is the interpreter over NumPy, in the declared types and in f64. Whole numbers do not rest on it alone: every
step that has an entry in `WRAPS` is computed again with Python's integers and wrapped to its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from strata import ops
from strata.core import DType, as_dtype
from strata.mir import Graph, Value, evaluate_values
from tests.differential.program import Program, Ref, Step

TOLERANCE = {
    "f64": 1e-9,
    "c128": 1e-9,
    "f32": 1e-4,
    "c64": 1e-4,
    "f16": 2e-2,
    "bf16": 8e-2,
    "f8e4m3": 0.3,
    "f8e5m2": 0.5,
}
# By tolerance, so by the narrowest type: what may be squared without an overflow.
LARGEST = {1e-9: 1e150, 1e-4: 1e18, 2e-2: 200.0, 8e-2: 1e18, 0.3: 20.0, 0.5: 200.0}
EXACT, APPROXIMATE, LOOSE = 0, 1, 2


class Violation(AssertionError):  # noqa: N818 - what is found, not what went wrong
    """A path gives something else. `kind` is what stays the same while a program is made smaller."""

    def __init__(self, path: str, kind: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path, self.kind, self.message = path, kind, message


@dataclass(frozen=True, slots=True)
class Result:
    """One output of the oracle."""

    narrow: np.ndarray
    wide: np.ndarray
    grade: int
    dtype: DType
    scale: float
    tolerance: float
    flushes: bool  # it is a product of bf16, whose smallest numbers instructions take for zero


@dataclass(frozen=True, slots=True)
class Meaning:
    """The outputs of a program at its sizes."""

    graph: Graph
    feeds: dict[str, np.ndarray]
    results: tuple[Result, ...]


def meaning_of(program: Program) -> Meaning:
    """Evaluate a program; a broken rule of the interpreter itself is a violation on the path `numpy`."""
    graph, values = values_of(program)
    feeds = program.arrays()
    known = {values[i]: feeds[f"x{i}"] for i in range(len(program.leaves))}
    with np.errstate(all="ignore"):
        narrow = evaluate_values(values, known, {})
        wide = evaluate_values(values, {v: _widened(a) for v, a in known.items()}, {}, wide=True)
    check_wrap(program, narrow)
    grades = grades_of(program, values)
    below = _tolerances(program, values)
    scales = _scales(program, wide)
    flushes = any("matmul" in s.name or s.name in ("use:gram", "use:inner") for s in program.steps)
    results = [
        Result(narrow[i], wide[i], grades[i], values[i].dtype, scales[i], below[i],
               flushes and below[i] == TOLERANCE["bf16"])
        for i in program.outputs
    ]  # fmt: skip
    return Meaning(graph, feeds, tuple(results))


def values_of(program: Program) -> tuple[Graph, list[Value]]:
    """The graph with numbers for sizes, and every value of it."""
    graph = Graph(f"drawn{program.seed}")
    values: list[Any] = []
    for i, leaf in enumerate(program.leaves):
        shape = [program.values[d] if isinstance(d, str) else d for d in leaf.shape]
        values.append((graph.param if leaf.is_param else graph.input)(f"x{i}", shape, leaf.dtype))
    program.replay(values, ops)
    return graph.outputs(*[values[i] for i in program.outputs]), values


def _widened(a: np.ndarray) -> np.ndarray:
    dtype = as_dtype(a.dtype)
    return a.astype(np.float64) if dtype.is_float else a.astype(np.complex128) if dtype.is_complex else a


def grades_of(program: Program, values: Sequence[Value]) -> list[int]:
    """How well each value is known: exactly, but for rounding, or not at all (a jump at a rounded number)."""
    grades = [EXACT] * len(program.leaves)
    for step in program.steps:
        refs = step.refs()
        worst = max([grades[r] for r in refs], default=EXACT)
        made = values[len(grades) : len(grades) + step.count]
        for out in made:
            grades.append(_grade(step, out, worst, [values[r] for r in refs], grades))
    return grades


def _grade(step: Step, out: Value, worst: int, inputs: Sequence[Value], grades: Sequence[int]) -> int:
    exactness = step.exactness
    if exactness == "unknown":
        return LOOSE
    if exactness == "op":
        floats = out.dtype.is_inexact or any(x.dtype.is_inexact for x in inputs)
        exactness = "approximate" if floats else "exact"
        if not out.dtype.is_inexact and floats:
            return EXACT if worst == EXACT and step.name.removeprefix("op:") in DECIDES else LOOSE
    if exactness == "exact":
        return worst if out.dtype.is_inexact or worst == EXACT else LOOSE
    if exactness == "decides":
        return EXACT if worst == EXACT else LOOSE
    if exactness in ("chooses", "looks up"):  # the test or the places are the part that must be exact
        first = step.args[0 if exactness == "chooses" else 1]
        assert isinstance(first, Ref)
        if grades[first.at] != EXACT:
            return LOOSE
        return worst if out.dtype.is_inexact or worst == EXACT else LOOSE
    if not out.dtype.is_inexact:
        return LOOSE
    return max(worst, APPROXIMATE)


DECIDES = frozenset({
    "equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "isnan", "isinf", "signbit", "argmax",
    "argmin", "argsort", "searchsorted", "reduce_any", "reduce_all",
})  # fmt: skip


def _tolerances(program: Program, values: Sequence[Value]) -> list[float]:
    """Of each value, that of the narrowest float that it is made of."""
    found = [TOLERANCE.get(values[i].dtype.name, 0.0) for i in range(len(program.leaves))]
    for step in program.steps:
        below = max([found[r] for r in step.refs()], default=0.0)
        made = values[len(found) : len(found) + step.count]
        found += [max(below, TOLERANCE.get(x.dtype.name, 0.0)) for x in made]
    return found


def _scales(program: Program, wide: Sequence[np.ndarray]) -> list[float]:
    """Of each value, the largest number that it is made of."""
    found: list[float] = []
    steps = program.producers()
    for i, a in enumerate(wide):
        own = _largest(a)
        found.append(max([own, *(found[r] for r in steps[i].refs())] if i in steps else [own]))
    return found


def _largest(a: np.ndarray) -> float:
    if not a.size or a.dtype.kind not in "fc":
        return 1.0
    with np.errstate(all="ignore"):
        sizes = np.abs(a)
    return max(1.0, float(np.max(sizes[np.isfinite(sizes)], initial=0.0)))


# ----------------------------------------------------------------------------------------------------------- comparing


def compare(path: str, got: Sequence[np.ndarray], meaning: Meaning) -> None:
    """A path's outputs against the oracle."""
    for i, (a, want) in enumerate(zip(got, meaning.results, strict=True)):
        where = f"output {i}"
        if a.shape != want.narrow.shape or a.dtype != want.dtype.np:
            raise Violation(
                path, "type", f"{where} is {a.dtype}{list(a.shape)}, not {want.dtype}{list(want.narrow.shape)}"
            )
        if want.grade == LOOSE:
            continue
        if want.grade == EXACT:
            same = _equal(a, want.narrow)
            kind = "exact"
        else:
            same = _near(a, want)
            kind = "near"
        if not same.all():
            at = tuple(int(k[0]) for k in np.nonzero(~same))
            raise Violation(
                path, kind,
                f"{where} at {at}: {a[at]!r}, not {want.narrow[at]!r} (f64: {want.wide[at]!r}); "
                f"{int((~same).sum())} of {a.size} differ",
            )  # fmt: skip


def _equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        same = a == b
        return np.asarray(same | ((a != a) & (b != b)) if as_dtype(a.dtype).is_inexact else same)


def _near(a: np.ndarray, want: Result) -> np.ndarray:
    """Near the f64 value, wherever the interpreter in the declared type is near it too."""
    kind = np.complex128 if want.dtype.is_complex else np.float64
    with np.errstate(all="ignore"):
        got, narrow, wide = a.astype(kind), want.narrow.astype(kind), want.wide.astype(kind)
        close = want.tolerance * (np.abs(wide) + want.scale)
        spread = np.abs(narrow - wide)
        settled = (spread <= close) | (narrow == wide)
        good = (np.abs(got - wide) <= close + 4 * spread) | (got == wide) | (np.isnan(got) & np.isnan(wide))
        if want.scale > LARGEST[want.tolerance]:  # a product may have overflowed on the way
            settled &= np.isfinite(got) & np.isfinite(narrow) & np.isfinite(wide)
        if want.flushes:
            settled &= np.isfinite(narrow) & np.isfinite(wide)
        if want.dtype.is_complex:  # what an infinity or NaN makes of the other part is nobody's rule
            settled &= np.isfinite(narrow) & np.isfinite(wide)
    return np.asarray(good | ~settled)


def same_bits(path: str, other: str, got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> None:
    """Two compiled paths: every bit, but for those of NaNs."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.shape == b.shape and a.dtype == b.dtype:
            if bits_of(a) == bits_of(b):
                continue
            flat, two = a.reshape(-1), b.reshape(-1)
            at = next(k for k in range(flat.size) if bits_of(flat[k : k + 1]) != bits_of(two[k : k + 1]))
            said = f"{flat[at]!r} and {two[at]!r} at {at}"
        else:
            said = f"{a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}"
        raise Violation(f"{path} / {other}", "bits", f"output {i} differs in bits: {said}")


def bits_of(a: np.ndarray) -> bytes:
    if as_dtype(a.dtype).is_complex:
        a = np.ascontiguousarray(a).view(as_dtype(a.dtype).real.np)
    if as_dtype(a.dtype).is_float:
        with np.errstate(all="ignore"):
            a = np.where(a != a, np.array(np.nan, a.dtype), a)
    return a.tobytes()


# ------------------------------------------------------------------------------------------- whole numbers, once more


def _wrapped(made: np.ndarray, dtype: DType) -> np.ndarray:
    """Python's integers in so many bits."""
    if dtype.is_bool:
        return made.astype(bool)
    info = ml_dtypes.iinfo(dtype.np)
    low, count = int(info.min), 1 << dtype.bits
    if not made.size:
        return np.zeros(made.shape, dtype.np)
    inside = np.frompyfunc(lambda x: (int(x) - low) % count + low, 1, 1)(made)
    return np.asarray(inside, dtype=object).astype(np.int64 if low < 0 else np.uint64).astype(dtype.np)


def _fmod(a: Any, b: Any) -> Any:
    return np.sign(a) * (np.abs(a) % np.abs(b))


def _sum(a: np.ndarray, axis: Any = None, keepdims: bool = False) -> Any:
    return np.sum(a, axis=axis, keepdims=keepdims, initial=0)


def _prod(a: np.ndarray, axis: Any = None, keepdims: bool = False) -> Any:
    return np.prod(a, axis=axis, keepdims=keepdims, initial=1)


def _cumsum(a: np.ndarray, axis: int, exclusive: bool = False, reverse: bool = False) -> Any:
    turned = np.flip(a, axis) if reverse else a
    made = np.cumsum(turned, axis) - (turned if exclusive else 0)
    return np.flip(made, axis) if reverse else made


def _gram(a: np.ndarray, turned: bool) -> Any:
    b = np.swapaxes(a, -1, -2)
    x, y = (b, a) if turned else (a, b)
    return np.sum(x[..., :, :, None] * y[..., None, :, :], axis=-2, initial=0)


WRAPS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "subtract": lambda a, b: a - b, "multiply": lambda a, b: a * b,
    "negative": lambda a: -a, "square": lambda a: a * a, "abs": np.abs, "sign": np.sign,
    "maximum": np.maximum, "minimum": np.minimum, "floor_divide": lambda a, b: a // b, "remainder": lambda a, b: a % b,
    "fmod": _fmod,
    "power": lambda a, b: a**b, "clip": lambda a, low, high: np.minimum(np.maximum(a, low), high),
    "bitwise_and": lambda a, b: a & b, "bitwise_or": lambda a, b: a | b,
    "bitwise_xor": lambda a, b: a ^ b, "bitwise_invert": lambda a: -a - 1,
    "bitwise_left_shift": lambda a, b: a * 2**b, "bitwise_right_shift": lambda a, b: a // 2**b,
    "less": lambda a, b: a < b, "less_equal": lambda a, b: a <= b, "greater": lambda a, b: a > b,
    "greater_equal": lambda a, b: a >= b, "equal": lambda a, b: a == b, "not_equal": lambda a, b: a != b,
    "sum": _sum, "prod": _prod, "cumsum": _cumsum, "sort": np.sort,
    "cumprod": np.cumprod, "argsort": lambda a, axis: np.argsort(a, axis, kind="stable"),
    "argmax": np.argmax, "argmin": np.argmin,
    "max": lambda a, axis=None, keepdims=False: np.max(a, axis=axis, keepdims=keepdims),
    "min": lambda a, axis=None, keepdims=False: np.min(a, axis=axis, keepdims=keepdims),
    "cast": lambda a, to: a, "roll": np.roll, "flip": np.flip, "transpose": np.transpose, "pad": np.pad,
    "getitem": lambda a, index: a[index], "use:gram": _gram,
    "concat": np.concatenate, "stack": np.stack,
    "repeat": np.repeat, "tile": np.tile, "take": lambda a, ids, axis: np.take(a, ids, axis, mode="clip"),
    "use:chosen": lambda test, a: np.where(test, a, 0), "use:flat": lambda a: a.reshape(-1), "tril": np.tril,
}  # fmt: skip


def check_wrap(program: Program, arrays: Sequence[np.ndarray]) -> None:
    """Every step on whole numbers again, with Python's integers."""
    at = len(program.leaves)
    for step in program.steps:
        rule = WRAPS.get(step.name)
        kinds = [as_dtype(arrays[i].dtype) for i in (*step.refs(), at)]
        if rule is not None and all(not k.is_inexact for k in kinds):
            want = arrays[at]
            try:
                made = rule(*[_python(a, arrays) for a in step.args], **dict(step.options))
            except (IndexError, ValueError, OverflowError):
                made = None  # NumPy has no answer for an empty axis
            if made is not None:
                got = _wrapped(np.asarray(made, dtype=object), kinds[-1])
                if got.shape != want.shape or not np.array_equal(got, want):
                    raise Violation("numpy", step.name, f"{step}: the interpreter says {want}, Python's integers {got}")
        at += step.count


def _python(x: Any, arrays: Sequence[np.ndarray]) -> Any:
    if isinstance(x, Ref):
        found = arrays[x.at]
        return (
            found
            if found.dtype == bool
            else found.astype(np.int64 if as_dtype(found.dtype).is_signed else np.uint64).astype(object)
        )
    return [_python(v, arrays) for v in x] if type(x) is list else x
