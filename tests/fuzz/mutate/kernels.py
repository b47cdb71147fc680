"""Mutated texts of kernels and schedules: each is refused with a StrataError, or computes what the interpreter says."""

from __future__ import annotations

import faulthandler
import random
import re
import tempfile
from collections import Counter
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

import strata as st
from strata.backends.llvm.codegen.compile import compile_kernel, lower
from strata.config import using
from strata.core import ALL_DTYPES, Target, f16, f64, i32, substitute, sym
from strata.errors import StrataError
from strata.kernel import REDUCTIONS, SCALARS, Kernel, contained, interpret, parse_kernel, show_kernel
from strata.kernel.ir import all_axes
from strata.ops import CustomKernel, kernel_text
from tests.fuzz.mutate.base import Files, Format
from tests.fuzz.mutate.changes import change_text, text_bytes
from tests.unit.kernel import samples

HANGS = 60.0  # seconds after which a mutant counts as hung: where is printed, and the run ends
MOST_POINTS = 1 << 18  # of all axes together: larger kernels are not run
MOST_LINES = 60
SIZES = (1, 2, 3, 5, 17, 40)
NUMBERS = ("0", "1", "2", "3", "4", "7", "8", "16", "17", "31", "64", "-1", "-2", "1000", "4096", "2147483648",
           "4294967296", "9223372036854775807", "-9223372036854775808", "9223372036854775808")  # fmt: skip
FLOATS = ("0.0", "-0.0", "1.0", "0.5", "1e30", "-3.5", "nan", "inf", "-inf", "1e-45", "1e400")
LINES = (
    "schedule parallel 1 grain 4", "axis q in 3", "size Q in 1..4", "%99 = add(i0, 1)",
    "store y[i0, i1] = %0 over i0, i1",
    "%98 = sum %0 over i1", "%97 = argmax %0 over i1", "%96 = scan max %0 over i1 before i0", "}", "{", "", "# nothing",
)  # fmt: skip
ACTIONS = (
    "parallel {n} grain {m}", "vectorise {n} by {m}", "tile {n} by {m} blocks {m} x {m}", "exchange {n} by {m}",
    "stage {n}", "delay {n} beside {n}", "nontemporal {b}", "prefetch {b} along {n}",
    "prefetch {b} along {n} ahead {m}",
    "prefetch {b} along {n} ahead {m} to 2",
)  # fmt: skip


@cache
def seeds() -> tuple[str, ...]:
    """Texts of sound kernels: symbolic and static, every kind of node."""
    rows, columns = sym("R"), sym("C", 0, 4096)
    made = [
        samples.softmax(rows, columns), samples.softmax(7, 33, f16), samples.layernorm(rows, 24),
        samples.reduction((rows, columns), (0,)), samples.reduction((5, 9, 4), (0, 2), "max", f64),
        samples.reduction((rows, 7), (1,), "argmax"), samples.reduction((rows, 7), (1,), "prod", i32),
        samples.transpose((rows, columns), (1, 0)), samples.transpose((4, 40, 50), (0, 2, 1)),
        samples.gather(rows, columns, 8), samples.pad(rows, columns, 2, 3), samples.merge_heads(2, 3, rows, 16),
        samples.matmul(rows, 8, columns), samples.concatenate(rows, columns, 4),
        samples.cumulative(rows, columns, 1), samples.cumulative(6, 9, 0, reverse=True, exclusive=True),
    ]  # fmt: skip
    return (*(show_kernel(s.kernel) for s in made), *_PLAIN)


_PLAIN = (
    """kernel @weave(a: i64[N], b: i64[N]) -> y: i64[2*N] {
  size N in 0..64
  axis i0 in N
  %0 = a[i0]
  %1 = b[i0]
  %2 = mul(i0, 2)
  %3 = add(%2, 1)
  store y[%2] = %0 over i0
  store y[%3] = %1 over i0
}""",
    """kernel @bits(x: u8[N, 3], z: c64[N]) -> y: u16[N, 3], w: f32[N], b: bool[N, 3] {
  size N in 0..64
  axis i0 in N
  axis i1 in 3
  %0 = x[i0, i1]
  %1 = cast.u16(%0)
  %2 = shl(%1, 3:u16)
  %3 = xor(%2, 21:u16)
  %4 = z[i0]
  %5 = abs(%4)
  %6 = lt(%0, 9:u8)
  store y[i0, i1] = %3 over i0, i1
  store w[i0] = %5 over i0
  store b[i0, i1] = %6 over i0, i1
}""",
    """kernel @sides(x: f32[N + 2]) -> y: f32[N] {
  size N in 0..64
  axis i0 in N
  %0 = x[i0]
  %1 = add(i0, 2)
  %2 = x[%1]
  %3 = mod(%1, 2)
  %4 = eq(%3, 0)
  %5 = select(%4, %0, %2)
  %6 = gt(%5, 0.0:f32)
  %7 = floordiv(%1, 2)
  %8 = x[%7] where %6
  %9 = max(%8, %5)
  store y[i0] = %9 over i0
}""",
)


def mutant(random_: random.Random) -> str:
    """A text that was changed in one to four places."""
    text = random_.choice(seeds())
    if random_.random() < 0.25:
        text = _with_schedule(text, random_)
    for _ in range(random_.choice((0, 1, 1, 1, 2, 2, 3, 4))):
        text = random_.choice(_CHANGES)(text, random_)
    return text


def _with_schedule(text: str, random_: random.Random) -> str:
    """The rules' own schedule, perhaps changed, or one that somebody made up."""
    kernel = parse_kernel(text)
    actions = str(lower(kernel, Target.host()).schedule).split("; ") if random_.random() < 0.7 else []
    for _ in range(random_.randint(0, 3)):
        buffer = random_.choice([*(b.name for b in kernel.buffers), "nobody"])
        made = random_.choice(ACTIONS)
        while "{n}" in made or "{m}" in made:
            made = made.replace("{n}", str(random_.randint(0, 4)), 1)
            made = made.replace("{m}", random_.choice(("0", "1", "2", "4", "8", "16", "3", "64", "100000")), 1)
        actions.insert(random_.randint(0, len(actions)), made.replace("{b}", buffer))
    if random_.random() < 0.2:
        random_.shuffle(actions)
    if random_.random() < 0.2 and actions:
        actions.pop()
    head, *rest = text.split("\n")
    return "\n".join([head, f"  schedule {'; '.join(actions)}", *rest])


def _change_number(text: str, random_: random.Random) -> str:
    return _one(re.compile(r"(?<![\w%.])-?\d+\b(?![:.])"), text, random_, lambda _: random_.choice(NUMBERS))


def _change_constant(text: str, random_: random.Random) -> str:
    return _one(re.compile(r"[-\w.+]+(?=:[a-z])"), text, random_, lambda _: random_.choice((*FLOATS, *NUMBERS)))


def _change_type(text: str, random_: random.Random) -> str:
    names = [t.name for t in ALL_DTYPES]
    return _one(re.compile(rf"\b(?:{'|'.join(names)})\b"), text, random_, lambda _: random_.choice(names))


def _change_function(text: str, random_: random.Random) -> str:
    """Mostly to one that takes as many arguments."""

    def other(found: re.Match[str]) -> str:
        known = SCALARS.get(found[0])
        any_ = known is None or random_.random() < 0.2
        return random_.choice([n for n, f in SCALARS.items() if any_ or (known and f.arity == known.arity)])

    return _one(re.compile(r"(?<== )\w+(?=[.(])"), text, random_, other)


def _change_reduction(text: str, random_: random.Random) -> str:
    kinds = "|".join(REDUCTIONS)
    return _one(re.compile(rf"\b(?:{kinds})\b(?= %)"), text, random_, lambda _: random_.choice(REDUCTIONS))


def _change_value(text: str, random_: random.Random) -> str:
    values = re.findall(r"%\d+|\bi\d\b|\br\d\w\b", text) or ["%0"]
    return _one(re.compile(r"%\d+|\bi\d\b|\br\d\w\b"), text, random_, lambda _: random_.choice(values))


def _change_name(text: str, random_: random.Random) -> str:
    words = re.findall(r"\b[a-zA-Z]\w*\b", text)
    return _one(re.compile(r"\b[a-zA-Z]\w*\b"), text, random_, lambda _: random_.choice(words))


def _change_lines(text: str, random_: random.Random) -> str:
    lines = text.split("\n")
    a, b = random_.randrange(len(lines)), random_.randrange(len(lines))
    match random_.randrange(5):
        case 0:
            lines.pop(a)
        case 1 if len(lines) < MOST_LINES:
            lines.insert(a, lines[b])
        case 2:
            lines[a], lines[b] = lines[b], lines[a]
        case 3:
            lines.insert(a, "  " + random_.choice(LINES))
        case _:
            lines[a] += random_.choice((" where true", " over i0", " # more", ", i0", "]", "("))
    return "\n".join(lines)


def _change_character(text: str, random_: random.Random) -> str:
    at = random_.randrange(len(text) + 1)
    kept = text[at + 1 :] if random_.random() < 0.5 else text[at:]
    return text[:at] + random_.choice("[](){},.:%@-+*/#é\t 0123xiyRN=>") + kept


def _one(pattern: re.Pattern[str], text: str, random_: random.Random, change: Any) -> str:
    found = list(pattern.finditer(text))
    if not found:
        return text
    chosen = random_.choice(found)
    return text[: chosen.start()] + change(chosen) + text[chosen.end() :]


_CHANGES = (
    _change_number, _change_constant, _change_type, _change_function, _change_function, _change_function,
    _change_reduction, _change_reduction, _change_value, _change_value, _change_name, _change_lines, _change_character,
)  # fmt: skip


def check(text: str, random_: random.Random, target: str = "host") -> str:
    """What became of a text: refused, large or equal; AssertionError where results differ."""
    try:
        kernel = parse_kernel(kernel_text(text))
    except StrataError:
        return "refused"
    sizes = _sizes(kernel, random_)
    if sizes is None:
        return "large"
    try:
        arrays = [_array(b, sizes, random_) for b in kernel.inputs]
    except StrataError:  # a division by a size that is 0
        return "refused"
    safe = contained(kernel)
    expected = interpret(safe, arrays, sizes)
    got = (
        compile_kernel(safe, Target.named(target))(*arrays, sizes=sizes)
        if target != "host"
        else _run(kernel, arrays, sizes)
    )
    for result, want in zip(got, expected, strict=True):
        _compare(result, want, safe)
    return "equal"


def _run(kernel: Kernel, arrays: list[Any], sizes: dict[str, int]) -> list[Any]:
    """Through the whole compiler, as `custom_op` does it."""
    g = st.Graph("fuzz")
    inputs = [
        g.input(f"x{i}", a.shape, str(b.dtype)) for i, (a, b) in enumerate(zip(arrays, kernel.inputs, strict=True))
    ]
    g.outputs(*CustomKernel(show_kernel(kernel), tuple(sizes.items()), flat=True)(*inputs))
    made = st.Session("cpu").compile(g)
    assert not made.host_steps
    return list(made.run({f"x{i}": a for i, a in enumerate(arrays)}))


def _sizes(kernel: Kernel, random_: random.Random) -> dict[str, int] | None:
    """Numbers for the symbols; None where the kernel would be too large to be run."""
    known = {}
    for name, symbol in kernel.symbols().items():
        fitting = [n for n in (0, *SIZES) if symbol.lo <= n and (symbol.hi is None or n <= symbol.hi)]
        if not fitting:
            return None
        known[name] = random_.choice(fitting)
    axes = dict.fromkeys((*(a for s in kernel.stores for a in s.axes), *all_axes(kernel.roots)))
    extents = [[int(substitute(d, known)) for d in (a.extent,)] for a in axes]
    extents += [[int(substitute(d, known)) for d in b.shape] for b in kernel.buffers]
    points = prod(max(n, 1) for e in extents[: len(axes)] for n in e)
    return known if max([points, *(prod(e) for e in extents)]) <= MOST_POINTS else None


def _array(buffer: Any, sizes: dict[str, int], random_: random.Random) -> Any:
    shape = [int(substitute(d, sizes)) for d in buffer.shape]
    rng = np.random.default_rng(random_.getrandbits(32))
    if buffer.dtype.is_bool:
        return rng.integers(0, 2, shape).astype(np.bool_)
    if buffer.dtype.is_int:
        return rng.integers(0 if buffer.dtype.kind == "uint" else -4, 8, shape).astype(buffer.dtype.np)
    real = rng.integers(-12, 13, shape) / 4  # exact in every float type
    return (real + 1j * rng.integers(-12, 13, shape) / 4 if buffer.dtype.is_complex else real).astype(buffer.dtype.np)


def _compare(got: Any, want: Any, kernel: Kernel) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.dtype.kind in "iub":
        assert _near(got, want, kernel), f"{kernel}\n{got}\n{want}"
        return
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    a, b = got.astype(wide), want.astype(wide)
    small = {2: 2e-2, 1: 0.3}.get(got.dtype.itemsize, 1e-4)
    scale = float(np.max(np.abs(b[np.isfinite(b)]), initial=0.0))
    with np.errstate(all="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= small * np.abs(b) + small * min(scale, 1e30))
    assert _mostly(same, kernel), f"{kernel}\n{a}\n{b}"


_STEPS = (
    "floor", "ceil", "trunc", "round", "floordiv", "truncdiv", "mod", "rem", "sign", "eq", "ne", "lt", "le", "gt", "ge",
    "cast", "arg", "bitcast",
)  # fmt: skip
_INEXACT = re.compile(
    r"= (?:exp|log|sin|cos|tan|a?sinh?|a?cosh?|a?tanh?|erf|erfc|pow|gelu|sigmoid|lgamma|rsqrt|sqrt|div|sum|prod)"
)


def _mostly(same: Any, kernel: Kernel) -> bool:
    """All elements; where something steps, an ulp may take a few of them to the other side."""
    return bool(same.all()) or (_jumps(kernel) and same.mean() > 0.9)


def _near(got: Any, want: Any, kernel: Kernel) -> bool:
    return _mostly(got == want, kernel)


def _jumps(kernel: Kernel) -> bool:
    """Whether a step, or the place of the best, comes after a function that is not exact."""
    text = show_kernel(kernel)
    return _INEXACT.search(text) is not None and any(f"= {name}" in text for name in _STEPS)


class Kernels(Format):
    """Texts of kernels; one in eight of those that are sound is compiled and compared with the interpreter."""

    name = "kernel"

    def prepare(self, folder: Path) -> None:
        for text in seeds():
            assert check(text, random.Random(0)) == "equal", text

    def mutant(self, rng: random.Random) -> Files:
        text = mutant(rng) if rng.random() < 0.7 else change_text(rng.choice(seeds()), rng, tuple(SCALARS))
        return {"x.kernel": text_bytes(text, rng)}

    def attempt(self, folder: Path, rng: random.Random) -> str:
        text = (folder / "x.kernel").read_bytes().decode("utf-8", "surrogatepass")
        if rng.random() < 0.125:
            return check(text, rng)
        kernel_text(text)
        return "read"


def run(count: int, seed: int, *, target: str = "host") -> Counter[str]:
    """Tries mutants against the interpreter; the text of the one that fails is part of the error."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, using(cache_dir=folder), np.errstate(all="ignore"):
        for n in range(seed, seed + count):
            random_ = random.Random(n)
            text = mutant(random_)
            faulthandler.dump_traceback_later(HANGS, exit=True)
            try:
                found[check(text, random_, target)] += 1
            except Exception as error:
                raise AssertionError(f"seed {n}: {type(error).__name__}: {error}\n{text}") from error
            finally:
                faulthandler.cancel_dump_traceback_later()
    return found
