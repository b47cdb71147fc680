"""Programs around one op of the registry: any sample's fields, with other numbers, dtypes and a symbolic size.

A new op is covered as soon as it has samples.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

import strata.ops  # noqa: F401 - fills the registry
from strata.core import as_dtype
from strata.errors import StrataError
from strata.mir import REGISTRY, Draw, Op, Sample
from strata.testing.check import build, claimed_dtypes
from tests.differential.program import Leaf, Program, Ref, Size, Step

# Ops whose samples only make sense with their own arrays: codes, keys, tokens, bodies of loops.
AS_THEY_ARE = frozenset({"custom", "custom_fn", "custom_kernel", "while", "cond", "scan", "constant", "checkpoint"})

# Families whose ops give the same for any way to compute them, also where numbers overflow or are none.
PLAIN_MEANING = (
    "arrange", "complex", "elementwise", "indexing", "logic", "math", "movement", "numeric", "reduce", "rounding",
    "scattering", "sorting", "subscript",
)  # fmt: skip


@cache
def catalogue() -> list[tuple[type[Op], Sample]]:
    """Every op with every sample of small arrays."""
    found = []
    for cls in REGISTRY.classes():
        if cls.name in AS_THEY_ARE or not cls.pure:
            continue
        for sample in cls.samples():
            if sample.inputs and sum(a.size for a in sample.arrays()) < 5000:
                found.append((cls, sample))
    return found


DEFINED = {"eigh": (0,), "svd": (1,)}  # outputs that have one value: vectors may point either way


def catalogue_step(seed: int) -> Program | None:
    """One op on leaves like its sample's; draws take other numbers, and the first dtype another that the op claims."""
    rng = np.random.default_rng([seed, 1])
    known = catalogue()
    cls, sample = known[int(rng.integers(len(known)))]
    arrays = sample.arrays()
    first = as_dtype(arrays[0].dtype)
    allowed = [first, *(t for t in claimed_dtypes(cls) if t.kind == first.kind or (t.is_int and first.is_int))]
    dtype = allowed[int(rng.integers(len(allowed)))]
    sizes = sorted({d for a in arrays for d in a.shape if d > 1})
    opened = int(rng.choice(sizes)) if sizes and rng.integers(2) else None
    leaves: list[Leaf] = []
    for given, a in zip(sample.inputs, arrays, strict=True):
        shape = tuple("n" if d == opened else d for d in a.shape)
        kind = dtype if as_dtype(a.dtype) is first else as_dtype(a.dtype)
        free = isinstance(given, Draw) and given.low is None and not given.distinct
        simple = cls.__module__.rpartition(".")[2] in PLAIN_MEANING
        styles = ("plain", "finite", "extreme") if simple else ("plain",)
        style = styles[int(rng.integers(len(styles)))] if free else "plain"
        with np.errstate(all="ignore"):
            data = None if free and kind.is_int is False else a.astype(kind.np)
        leaves.append(Leaf(shape, kind, style, int(rng.integers(1 << 30)), False, data))
    fields: tuple[tuple[str, Any], ...] = tuple(sample.fields.items())
    count = _count(cls, sample, leaves, {"n": opened or 1})
    if count is None:
        return None
    step = Step(f"op:{cls.name}", tuple(Ref(i) for i in range(len(leaves))), fields, count, "op")
    size = (Size("n", opened, 0, None),) if opened else ()
    outputs = tuple(len(leaves) + i for i in DEFINED.get(cls.name, range(count)))
    return Program(size, tuple(leaves), (step,), outputs, seed, note=cls.name)


def _count(cls: type[Op], sample: Sample, leaves: list[Leaf], sizes: dict[str, int]) -> int | None:
    types = [leaf.dtype[tuple(sizes[d] if isinstance(d, str) else d for d in leaf.shape)] for leaf in leaves]
    try:
        return len(build(cls, sample).infer_types(types))
    except StrataError:
        return None
