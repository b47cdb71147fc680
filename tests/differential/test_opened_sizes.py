"""One size of an op's sample as a symbol, alone, with its equals, or with its multiples: the others are checked against
it when it is bound. An op answers as it does for numbers, or refuses the shapes; it never makes an ill-typed graph."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import numpy as np
import pytest

from strata import ops
from strata.core import as_dtype, f32, sym
from strata.errors import ShapeError, StrataError, SymbolError
from strata.mir import Graph, Op, Sample, as_tuple
from strata.runtime import CompiledGraph, Session
from strata.testing.check import build
from tests.differential.catalogue import catalogue

Opened = dict[tuple[int, int], int]  # input and axis: how many of the symbol the size is
SLICE = 96
SCENE = {(0, 0): 3, (1, 0): 3, (2, 0): 4, (3, 0): 1, (4, 0): 3, (5, 0): 12}  # sizes of Gaussians, by their number
SURE: dict[str, list[Opened]] = {  # ops that were wrong once, with ways beside those of all ops
    "batch_norm_inference": [], "dot_general": [], "gated_delta_net": [], "layer_norm": [],
    "gaussian_splat_prepare": [], "gaussian_splat_render": [], "gaussian_splat_render_backward": [SCENE],
}  # fmt: skip


def ways(arrays: list[np.ndarray]) -> Iterator[Opened]:
    sizes = [((i, k), d) for i, a in enumerate(arrays) for k, d in enumerate(a.shape) if d > 1]
    for at, _ in sizes:
        yield {at: 1}
    for unit in sorted({d for _, d in sizes}):
        yield {at: 1 for at, d in sizes if d == unit}
        yield {at: d // unit for at, d in sizes if d % unit == 0}


def compiled(op: Op, arrays: list[np.ndarray], opened: Opened) -> CompiledGraph:
    g, n = Graph("opened"), sym("n", 0)
    shapes = [
        tuple(opened[i, k] * n if (i, k) in opened else d for k, d in enumerate(a.shape)) for i, a in enumerate(arrays)
    ]
    values = [g.input(f"x{i}", as_dtype(a.dtype)[s]) for i, (a, s) in enumerate(zip(arrays, shapes, strict=True))]
    return Session("cpu").compile(g.outputs(*as_tuple(op(*values))))


def check_opened(op: Op, sample: Sample, opened: Opened) -> bool:
    """Compare, where the op does not refuse; gives whether it took the shapes."""
    arrays = sample.arrays()
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}

    def run(made: CompiledGraph) -> list[np.ndarray]:
        return made.run({name: feeds[name] for name in made.inputs})

    try:
        got = run(compiled(op, arrays, opened))
    except (ShapeError, SymbolError):
        return False
    for x, y in zip(got, run(compiled(op, arrays, {})), strict=True):
        assert x.shape == y.shape
        if x.dtype.kind in "iub":
            np.testing.assert_array_equal(x, y)
        else:
            tiny = 4 * float(np.finfo(x.dtype).eps) if x.dtype.kind in "fc" else 2e-2
            largest = float(np.max(np.abs(y), initial=1, where=np.isfinite(y)))
            np.testing.assert_allclose(x, y, rtol=tiny, atol=tiny * largest, equal_nan=True)
    return True


def drawn(names: tuple[str, ...] = ()) -> Iterator[tuple[Op, Sample, Opened]]:
    for cls, sample in catalogue():
        if not names or cls.name in names:
            arrays = sample.arrays()
            try:
                op = build(cls, sample)
                op.infer_types([as_dtype(a.dtype)[a.shape] for a in arrays])
            except StrataError:
                continue
            for opened in ways(arrays):
                yield op, sample, opened


@pytest.mark.parametrize("name", SURE)
def test_a_size_that_meets_a_number(name: str) -> None:
    chosen = list(drawn((name,)))
    chosen += [(*chosen[0][:2], opened) for opened in SURE[name]]
    assert sum(check_opened(*case) for case in chosen) > 0


def test_a_slice_of_all_ops() -> None:
    first, taken = secrets.randbelow(SLICE), 0
    for number, (op, sample, opened) in enumerate(drawn()):
        if number % SLICE == first:
            print(number, op, [a.shape for a in sample.arrays()], opened)
            taken += check_opened(op, sample, opened)
    assert taken > 20


def test_no_queries_of_a_symbolic_batch() -> None:
    from strata.ops import Attention

    rng = np.random.default_rng(0)
    shapes = {"q": (2, 1, 0, 2), "k": (2, 1, 2, 2), "v": (2, 1, 2, 2)}
    feeds = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    g, n = Graph("none"), sym("n", 0)
    values = [g.input(name, f32[n, *shape[1:]]) for name, shape in shapes.items()]
    made = Session("cpu").compile(g.outputs(*as_tuple(Attention(1, 1, 2)(*values))))
    assert made.run(feeds)[0].shape == shapes["q"]


def test_a_reshape_to_a_size_that_may_differ_is_refused() -> None:
    g, n = Graph("rows"), sym("n", 0)
    with pytest.raises(ShapeError, match="has 9 elements"):
        ops.reshape(g.input("x", f32[9]), (n, 3))
