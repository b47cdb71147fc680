"""Gradients of drawn programs: programs themselves, which go all ways; beside differences, where these are smooth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from strata.core import as_dtype, f32, f64
from strata.errors import MissingRuleError, StrataError
from strata.mir import evaluate
from tests.differential.meaning import APPROXIMATE, EXACT, Violation, grades_of, values_of
from tests.differential.program import Program, Ref, Step, without_unused

# Steps whose slope jumps: on rounded numbers, one path may be on this side and one on the other.
JUMPS = frozenset({
    "abs", "adaptive_max_pool1d", "argmax", "argmin", "argsort", "celu", "clip", "cummax", "cummin", "elu",
    "equal", "floor_divide", "fmod", "hard_sigmoid", "hard_swish", "hardshrink", "hardtanh", "leaky_relu", "max",
    "max_pool1d", "maximum", "min", "minimum", "norm", "relu", "relu6", "remainder", "selu", "softshrink", "sort",
    "threshold", "topk", "use:branches", "use:looked_up", "use:loss", "use:nested", "use:pairs", "use:placed",
    "use:pooled", "use:ranked", "use:until",
})  # fmt: skip
# Ops whose gradient is by definition not that of the function.
NOT_ITS_OWN = frozenset({
    "fake_quantize", "fake_quantize_lsq", "quantize_dequantize", "stop_gradient", "dequantize", "quantize", "custom_fn",
    "round", "rint",
})  # fmt: skip
STEP = 1e-5


def differentiated(program: Program) -> Program | None:
    """The outputs of a program and their gradients for its leaves, in one step; None where it has none."""
    try:
        _, values = values_of(program)
    except StrataError:
        return None
    outputs = tuple(i for i in program.outputs if values[i].dtype.is_inexact and i >= len(program.leaves))
    if not outputs:
        return None
    base = without_unused(replace(program, outputs=outputs))
    count = sum(leaf.dtype.is_inexact for leaf in base.leaves)
    if not count or any(leaf.style not in ("plain", "ids", "positive") for leaf in base.leaves):
        return None  # where numbers overflow, derivatives are infinity less infinity
    first = len(base.leaves)
    step = Step("grad:", tuple(Ref(i) for i in range(first)), (("of", base),), len(outputs) + count, _exactness(base))
    numbers = tuple(range(first, first + step.count))
    made = replace(base, steps=(step,), outputs=numbers, note=f"gradient {base.note}")
    try:
        values_of(made)
    except MissingRuleError:
        return None
    return made


def base_of(program: Program) -> Program | None:
    """The program whose gradient this is."""
    first = program.steps[0] if program.steps else None
    return dict(first.options)["of"] if first is not None and first.name == "grad:" else None


def _exactness(base: Program) -> str:
    """Whether it is known on which side of every jump the program is."""
    grades = grades_of(base, values_of(base)[1])
    rounded = any(
        grades[r] != EXACT for step in base.steps if step.name in JUMPS or step.exactness == "op" for r in step.refs()
    )
    rounded |= any(g > APPROXIMATE for g in grades)
    return "unknown" if rounded else "approximate"


def check_differences(program: Program) -> None:
    """Along one direction, the gradient is the slope of the program, wherever both sides have the same slope."""
    base = base_of(program)
    if base is None or any(v.dtype.is_inexact and v.dtype not in (f32, f64) for v in values_of(base)[1]):
        return  # f64 is rounded on the way; of complex numbers, halves of slopes are meant
    if not NOT_ITS_OWN.isdisjoint(step.name.removeprefix("op:") for step in base.steps):
        return
    feeds = {n: a.astype(np.float64) if as_dtype(a.dtype).is_float else a for n, a in program.arrays().items()}
    wide = [f"x{i}" for i, leaf in enumerate(base.leaves) if leaf.dtype.is_float]
    rng = np.random.default_rng([base.seed, 5])
    along = {name: rng.standard_normal(feeds[name].shape) for name in wide}
    with np.errstate(all="ignore"):
        try:
            grads = evaluate(program.graph(), feeds, wide=True)[len(base.outputs) :]
            low, here, high = (
                _loss(base, {**feeds, **{n: feeds[n] + k * STEP * along[n] for n in wide}}) for k in (-1, 0, 1)
            )
        except StrataError:
            return
        slope = sum(float(np.sum(g * along[name])) for g, name in zip(grads, wide, strict=True))
        before, after = (here - low) / STEP, (high - here) / STEP
    size = max(1.0, abs(before), abs(here))
    if not np.isfinite([before, after, here]).all() or abs(before - after) > 1e-2 * size or abs(here) > 1e6:
        return  # a jump, or too steep for a difference; a small bend lies between both slopes
    if not min(before, after) - 1e-3 * size <= slope <= max(before, after) + 1e-3 * size:
        raise Violation("differences", "slope", f"the gradient says {slope}, differences {before} and {after}")


def _loss(base: Program, feeds: dict[str, np.ndarray]) -> float:
    """The weighted sum that `pulled_back` differentiates."""
    total = 0.0
    for y in evaluate(base.graph(), feeds, wide=True):
        places = sum((i * (axis + 1) for axis, i in enumerate(np.indices(y.shape))), np.zeros(y.shape, np.int64))
        total += float(np.sum(y * (places % 4 - 1.5)))
    return total
