"""Random programs over every dtype: the same seed draws the same program.

Each family of steps is a method that proposes a step for a value, or None where it does not fit. A step is kept when
graph values of the drawn sizes take it. Sizes are 0 and 1 as often as others, and arrays are filled with the numbers at
which arithmetic wraps, overflows or is not a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from strata import ops
from strata.core import (
    ALL_DTYPES,
    DType,
    bf16,
    bool_,
    c64,
    c128,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i4,
    i8,
    i16,
    i32,
    i64,
    sym,
    u4,
    u8,
    u16,
    u32,
    u64,
)  # fmt: skip
from strata.errors import StrataError
from strata.mir import Graph
from tests.differential.catalogue import catalogue_step
from tests.differential.composed import composed_step
from tests.differential.program import Leaf, Program, Ref, Size, Step, apply_step, without_unused

FLOATS = (f32, f32, f32, f64, f16, bf16)
WHOLE = (i64, i32, i16, i8, u64, u32, u16, u8, i4, u4)
SIZES = (0, 1, 1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 70, 300)
MOST = 6000  # elements of a value


class Drawer:
    """A program under construction: its steps, and their values at the drawn sizes and with symbols."""

    def __init__(self, seed: int, length: int | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.seed = seed
        self.sums = self.chance(5)  # mostly sums of floats: their order must not depend on what is known of sizes
        self.style = "plain" if self.sums else self.pick("plain", "plain", "extreme", "finite")
        kinds = (FLOATS, WHOLE, WHOLE, (*FLOATS, *WHOLE, bool_), ALL_DTYPES, (c64, c128, f32))
        self.kinds = (f32, f32, f64) if self.sums else self.pick(*kinds)
        self.length = length or int(self.rng.integers(1, 9))
        self.sizes = [self.size(i) for i in range(2)]
        self.numbers = [self.pick(1, 2, 3, 3, 5, 7), self.pick(2, 3, 4, 10)]  # few, so that algebra meets them again
        self.is_broken = False  # the last step is refused
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.values: list[Any] = []
        self.symbolic: list[Any] = []
        self._graphs = Graph("numbers"), Graph("symbols")
        self.named: dict[str, Any] = {s.name: sym(s.name, s.low, s.high) for s in self.sizes}

    # ---------------------------------------------------------------------------------------------------------- drawing

    def pick(self, *values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def chance(self, one_in: int = 2) -> bool:
        return bool(self.rng.integers(one_in) == 0)

    def size(self, number: int) -> Size:
        value = int(self.rng.choice(SIZES))
        low = min(value, self.pick(0, 0, 0, 1))
        high = self.pick(value, max(value, 8), 40, 64, None)
        return Size("nm"[number], value, low, None if high is None else max(high, value, 1))

    def leaf(self, dtype: DType | None = None, shape: tuple[Any, ...] | None = None, style: str | None = None) -> int:
        kind = dtype or self.pick(*self.kinds)
        if shape is None:
            rank = self.pick(0, 1, 1, 2, 2, 2, 3)
            fixed = (1, 2, 3, int(self.rng.choice(SIZES)))
            shape = tuple(self.pick("n", "n", "m", *fixed) for _ in range(rank))
        is_param = self.chance(4) and not any(isinstance(d, str) for d in shape)
        leaf = Leaf(shape, kind, style or self.style, int(self.rng.integers(1 << 30)), is_param)
        number = len(self.leaves)
        assert not self.steps, "leaves come before steps"
        drawn, named = self._graphs
        values = {s.name: s.value for s in self.sizes}
        self.values.append(drawn.input(f"x{number}", [values[d] if isinstance(d, str) else d for d in shape], kind))
        self.symbolic.append(
            named.input(f"x{number}", [self.named[d] if isinstance(d, str) else d for d in shape], kind)
        )
        self.leaves.append(leaf)
        return number

    def axis(self, at: int) -> int:
        return int(self.rng.integers(self.values[at].ndim))

    def beside(self, at: int) -> int:
        """A value that goes with another element by element, at every size."""
        x = self.symbolic[at]
        fits = [
            i for i, y in enumerate(self.symbolic)
            if y.dtype is x.dtype and y.ndim <= x.ndim
            and all(a in (1, b) for a, b in zip(y.shape, x.shape[x.ndim - y.ndim :], strict=True))
        ]  # fmt: skip
        return int(self.pick(*fits))

    def ids(self, largest_rank: int = 2) -> int | None:
        found = [i for i, y in enumerate(self.values) if y.dtype in (i32, i64) and y.ndim <= largest_rank]
        return self.pick(*found) if found else None

    # ------------------------------------------------------------------------------------------------------------ steps

    def unary(self, at: int) -> Step | None:
        x = self.values[at]
        ref = (Ref(at),)
        if x.dtype.is_bool:
            return Step("logical_not", ref, exactness="exact")
        if x.dtype.is_int:
            return Step(self.pick("negative", "abs", "square", "sign", "bitwise_invert"), ref, exactness="exact")
        if x.dtype.is_complex:
            name = self.pick("negative", "conj", "abs", "exp", "square", "real", "imag", "sqrt", "sign")
            return Step(name, ref, exactness="exact" if name in ("negative", "conj", "real", "imag") else "approximate")
        if self.chance(3):
            return Step(self.pick("negative", "abs", "relu"), ref, exactness="exact")
        if self.chance(3):
            return Step(self.pick("floor", "ceil", "round", "trunc", "sign", "isnan", "isinf", "signbit", "isfinite"),
                        ref, exactness="decides")  # fmt: skip
        return Step(
            self.pick("tanh", "sin", "square", "sigmoid", "exp", "log", "sqrt", "erf", "gelu", "silu", "reciprocal",
                      "rsqrt", "log1p", "expm1", "cos", "softplus", "atan", "cosh"), ref,
        )  # fmt: skip

    def binary(self, at: int) -> Step | None:
        x = self.values[at]
        refs = (Ref(at), Ref(self.beside(at)))
        if self.chance():
            refs = refs[::-1]
        if x.dtype.is_bool:
            return Step(self.pick("logical_and", "logical_or", "logical_xor"), refs, exactness="exact")
        if x.dtype.is_int:
            names = ("add", "subtract", "multiply", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor")
            return Step(self.pick(*names), refs, exactness="exact")
        if x.dtype.is_complex:
            return Step(self.pick("add", "subtract", "multiply", "divide"), refs)
        if self.chance(3):
            return Step(self.pick("maximum", "minimum", "copysign"), refs, exactness="exact")
        return Step(self.pick("add", "subtract", "multiply", "divide", "hypot", "atan2", "logaddexp"), refs)

    def with_number(self, at: int) -> Step | None:
        """Arithmetic beside a Python number, which algebra likes to fold."""
        x, ref = self.values[at], Ref(at)
        number: Any = self.pick(*self.numbers)
        if x.dtype.is_float:
            number = self.pick(float(number), 0.5, -1.0, 0.0, 1.0)
            if self.chance(5) and self.style == "extreme":
                number = self.pick(float("inf"), float("-inf"))
            if self.chance(4):
                return Step(self.pick("floor_divide", "remainder", "fmod"), (ref, number or 2.0), exactness="decides")
            name = self.pick("add", "multiply", "subtract", "divide", "maximum", "minimum")
            exactness = "exact" if name in ("maximum", "minimum") else "approximate"
            return Step(name, self.pick((ref, number), (number, ref)), exactness=exactness)
        if not x.dtype.is_int:
            return None
        name = self.pick(
            "add", "add", "subtract", "multiply", "multiply", "floor_divide", "remainder", "fmod", "maximum", "minimum",
            "bitwise_left_shift", "bitwise_right_shift", "less", "greater_equal", "clip", "power",
        )  # fmt: skip
        if "shift" in name:
            return Step(name, (ref, self.pick(0, 1, x.dtype.bits - 1)), exactness="exact")
        if name == "clip":
            return Step(name, (ref, 0, number), exactness="exact")
        if name in ("floor_divide", "remainder", "fmod", "power"):
            return Step(name, (ref, number), exactness="exact")
        return Step(name, self.pick((ref, number), (ref, number), (number, ref)), exactness="exact")

    def divided(self, at: int) -> Step | None:
        """Whole-number division by what is never zero."""
        x = self.values[at]
        if not x.dtype.is_int:
            return None
        other = [i for i, leaf in enumerate(self.leaves) if leaf.style == "positive" and leaf.dtype is x.dtype
                 and self.symbolic[i].shape in ((), x.shape)]  # fmt: skip
        if not other:
            return None
        return Step(self.pick("floor_divide", "remainder"), (Ref(at), Ref(self.pick(*other))), exactness="exact")

    def compare(self, at: int) -> Step | None:
        refs = (Ref(at), Ref(self.beside(at)))
        names = ("equal", "not_equal")
        if not self.values[at].dtype.is_complex and not self.values[at].dtype.is_bool:
            names += ("less", "less_equal", "greater", "greater_equal")
        return Step(self.pick(*names), refs, exactness="decides")

    def choose(self, at: int) -> Step | None:
        tests = [i for i, v in enumerate(self.symbolic) if v.dtype is bool_ and v.shape == self.symbolic[at].shape]
        if not tests:
            return self.compare(at)
        return Step("use:chosen", (Ref(self.pick(*tests)), Ref(at)), exactness="chooses")

    def convert(self, at: int) -> Step | None:
        x = self.values[at]
        to = self.pick(*ALL_DTYPES)
        if x.dtype.is_complex and not to.is_complex:
            return None
        return Step("cast", (Ref(at), to), exactness="decides" if not to.is_inexact else "exact")

    def move(self, at: int) -> Step | None:
        x, ref = self.values[at], Ref(at)
        if x.ndim == 0:
            return Step("use:flat", (ref,), exactness="exact")
        axis = self.axis(at)
        pads = tuple((int(self.rng.integers(3)), int(self.rng.integers(3))) for _ in range(x.ndim))
        perm = tuple(int(p) for p in self.rng.permutation(x.ndim))
        choices: list[tuple[str, tuple[Any, ...]]] = [
            ("flip", (ref, axis)), ("transpose", (ref, perm)), ("use:flat", (ref,)), ("use:spread", (ref, 2)),
            ("concat", ([ref, ref], axis)), ("stack", ([ref, ref], axis)), ("insert_axis", (ref, axis)),
            ("roll", (ref, int(self.rng.integers(-4, 5)), axis)), ("roll", (ref, int(self.rng.integers(-40, 40)))),
            ("repeat", (ref, 2, axis)), ("tile", (ref, tuple(self.pick(1, 2) for _ in range(x.ndim)))),
            ("pad", (ref, pads)), ("getitem", (ref, self.index(x))), ("getitem", (ref, self.index(x))),
            ("use:merge", (ref, min(axis, x.ndim - 2))) if x.ndim > 1 else ("flip", (ref, axis)),
            ("tril", (ref,)) if x.ndim > 1 else ("flip", (ref, axis)),
        ]  # fmt: skip
        name, args = self.pick(*choices)
        return Step(name, args, exactness="exact")

    def index(self, x: Any) -> tuple[Any, ...]:
        """Slices with any start, stop and step: they are cut to the size that there is."""

        def one() -> slice:
            start, stop = (self.pick(None, None, int(self.rng.integers(-5, 6))) for _ in range(2))
            return slice(start, stop, self.pick(None, None, 2, 3, -1, -2, -3))

        return tuple(one() for _ in range(x.ndim))

    def reduce(self, at: int) -> Step | None:
        x = self.values[at]
        if x.ndim == 0:
            return None
        axis: Any = self.pick(self.axis(at), self.axis(at), None)
        options = (("axis", axis), ("keepdims", self.chance()))
        if x.dtype.is_bool:
            return Step(self.pick("any", "all"), (Ref(at),), options, exactness="exact")
        if x.dtype.is_int:
            return Step(self.pick("sum", "prod", "max", "min"), (Ref(at),), options, exactness="exact")
        if x.dtype.is_complex:
            return Step(self.pick("sum", "prod") if self.style == "plain" else "sum", (Ref(at),), options)
        if self.chance(3):
            return Step(self.pick("max", "min"), (Ref(at),), options, exactness="exact")
        if self.style == "plain" and self.chance(5):  # else what overflows and what is 0 meet in some order
            return Step("prod", (Ref(at),), options)
        return Step(self.pick("sum", "mean", "var", "std", "logsumexp"), (Ref(at),), options)

    def along(self, at: int) -> Step | None:
        """Functions of a whole axis that keep its length."""
        x = self.values[at]
        if x.ndim == 0 or x.dtype.is_bool or x.dtype.is_complex:
            return None
        axis = (("axis", self.axis(at)),)
        if x.dtype.is_int or self.chance(3):
            if self.chance(4):
                return Step(self.pick("cummax", "cummin"), (Ref(at),), axis, count=2, exactness="decides")
            name = self.pick("sort", *(("cumsum", "cumprod") if x.dtype.is_int else ()))
            return Step(name, (Ref(at),), axis, exactness="exact")
        if self.chance(4):
            return Step("use:centred", (Ref(at), axis[0][1]))
        return Step(
            self.pick("softmax", "log_softmax", "cumsum", "layer_norm", "rms_norm", "logcumsumexp"), (Ref(at),), axis
        )

    def order(self, at: int) -> Step | None:
        x = self.values[at]
        if x.ndim == 0 or x.dtype.is_complex:
            return None
        axis = self.axis(at)
        if self.chance(4):
            return Step("topk", (Ref(at), self.pick(1, 2), axis), count=2, exactness="decides")
        if self.chance(4) and x.ndim == 1:
            return Step("use:placed", (Ref(at), Ref(self.beside(at))), exactness="decides")
        return Step(self.pick("argsort", "argmax", "argmin"), (Ref(at),), (("axis", axis),), exactness="decides")

    def look_up(self, at: int) -> Step | None:
        x = self.values[at]
        ids = self.ids()
        if x.ndim == 0:
            return None
        if ids is None or self.chance(3):
            listed = [int(i) for i in self.rng.integers(0, 3, self.pick(1, 2, 3))]
            return Step("take", (Ref(at), listed), (("axis", self.axis(at)),), exactness="exact")
        rows, places = self.symbolic[at].shape[:1], self.symbolic[ids].shape
        if places == rows and not x.dtype.is_bool and self.chance():
            exactness = "exact" if x.dtype.is_int else "approximate"
            return Step("scatter_add", (Ref(at), Ref(ids), 5), exactness=exactness)
        return Step("gather", (Ref(at), Ref(ids)), exactness="looks up")

    def product(self, at: int) -> Step | None:
        x = self.values[at]
        exactness = "exact" if x.dtype.is_int else "approximate"
        if x.ndim < 2 or x.dtype.is_bool:
            return None
        if self.chance(3) and x.ndim == 2:
            return Step(
                "use:inner", (Ref(at), self.pick("ij,ij->", "ij,ij->i", "ij,kj->ki", "ij,ik->jk")), exactness=exactness
            )
        return Step("use:gram", (Ref(at), self.chance()), exactness=exactness)

    def window(self, at: int) -> Step | None:
        x = self.values[at]
        if x.ndim != 3 or x.dtype not in (f32, f64):
            return None
        if self.chance(3):
            return Step("use:convolved", (Ref(at), self.pick(1, 2)))
        if self.chance():
            return Step("max_pool1d", (Ref(at), 2), (("stride", self.pick(1, 2)), ("padding", 1)), exactness="exact")
        return Step("avg_pool1d", (Ref(at), 2), (("stride", 1), ("padding", 1)))

    def loop(self, at: int) -> Step | None:
        x = self.values[at]
        if x.ndim == 0 or x.dtype.is_bool:
            return None
        if x.dtype.is_int:
            return Step("use:counting", (Ref(at),), count=2, exactness="exact")
        return Step("use:running", (Ref(at), self.chance()), count=2)

    def branch(self, at: int) -> Step | None:
        tests = [i for i, v in enumerate(self.symbolic) if v.dtype is bool_]
        if not tests or self.values[at].dtype.is_bool:
            return None
        if self.values[at].dtype in (f8e4m3, f8e5m2):
            return None
        return Step("use:either", (Ref(self.pick(*tests)), Ref(at)), exactness="chooses")

    def update(self, at: int) -> Step | None:
        x = self.values[at]
        return Step("use:replaced", (Ref(at), self.pick(0, 1, 2)), exactness="exact") if x.ndim else None

    def random(self, at: int) -> Step | None:
        if at >= len(self.leaves):
            return None  # only the shape counts: what else is refused on the way would be left out
        kind = self.pick("bits", "whole", "floats")
        exactness = "approximate" if kind == "floats" else "exact"
        return Step("use:drawn", (Ref(at), int(self.rng.integers(1 << 20)), kind), exactness=exactness)

    def composed(self, at: int) -> Step | None:
        return composed_step(self.rng, at, self.values[at], self.style)

    # --------------------------------------------------------------------------------------------------------- building

    def add(self, step: Step) -> bool:
        """Keep a step that the drawn sizes take and, where it names no number of them, the symbols too."""
        try:
            made = apply_step(step, self.values, ops)
        except StrataError:
            return self.refuse(step)
        if any(int(x.type.size) > MOST for x in made):
            return False
        try:
            self.symbolic += apply_step(step, self.symbolic, ops)
        except StrataError:
            return False  # whether two sizes agree is not known
        self.values += made
        self.steps.append(step)
        return True

    def refuse(self, step: Step) -> bool:
        """Now and then, a step that these sizes do not take ends the program: it is refused on every path."""
        if self.chance(4) and self.steps:
            self.is_broken = True
            self.steps.append(step)
        return False

    def build(self) -> Program:
        for _ in range(self.pick(1, 2, 2, 3)):
            self.leaf()
        if self.chance(3):
            self.leaf(self.pick(i64, i32), self.pick((3,), ("n",), (2, 2)), "ids")
        if self.chance(3):
            self.leaf(bool_)
        if self.chance(3):
            first = self.leaves[0]
            if first.dtype.is_int:
                self.leaf(first.dtype, self.pick((), first.shape), "positive")
        families: tuple[Callable[[int], Step | None], ...] = (
            self.unary, self.binary, self.binary, self.with_number, self.with_number, self.divided, self.compare,
            self.choose, self.convert, self.move, self.move, self.move, self.reduce, self.reduce, self.along,
            self.order, self.look_up, self.product, self.window, self.loop, self.branch, self.update, self.random,
            self.composed, self.composed, self.composed,
        )  # fmt: skip
        if self.sums:
            families = (
                self.unary, self.binary, self.binary, self.with_number, self.move, self.move, self.reduce, self.reduce,
                self.reduce, self.along, self.product,
            )  # fmt: skip
        tries = 0
        while len(self.steps) < self.length and tries < 40 and not self.is_broken:
            tries += 1
            at = int(self.pick(*range(max(0, len(self.values) - 5), len(self.values)), 0))
            step = self.pick(*families)(at)
            if step is not None:
                self.add(step)
        count = len(self.values) + self.is_broken
        outputs = dict.fromkeys([count - 1, int(self.rng.integers(count)), int(self.rng.integers(count))])
        made = Program(tuple(self.sizes), tuple(self.leaves), tuple(self.steps), tuple(outputs), self.seed)
        return without_unused(made)


def draw_program(seed: int) -> Program:
    """The program of a seed: of front-end functions, or around one op of the registry."""
    if seed % 4 == 3:
        made = catalogue_step(seed)
        if made is not None:
            return made
    return Drawer(seed).build()
