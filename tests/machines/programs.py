"""Small programs with their meaning in NumPy, for state machines: results are whole numbers, so that they are exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strata import ops
from strata.core import Dim, sym
from strata.mir import Graph, Value

Arrays = Mapping[str, np.ndarray]
Shape = tuple[int | str, ...]
BOUNDS = {"n": (1, 6), "b": (1, 3)}  # of the symbols


@dataclass(frozen=True)
class Program:
    """A graph and what it computes. Shapes name their symbols; `mixes` are symbols whose places it does not keep apart.

    `feeds` are inputs that an output can become.
    """

    name: str
    inputs: Mapping[str, Shape]
    params: Mapping[str, Shape]
    outputs: tuple[Shape, ...]
    build: Callable[[Mapping[str, Value]], Sequence[Value]]
    meaning: Callable[[Arrays], Sequence[np.ndarray]]
    mixes: frozenset[str] = frozenset()
    feeds: tuple[tuple[str, int], ...] = ()

    @property
    def symbols(self) -> list[str]:
        return sorted({d for shape in self.inputs.values() for d in shape if isinstance(d, str)})

    def graph(self, bounds: Mapping[str, tuple[int, int]] = BOUNDS) -> Graph:
        g = Graph(self.name)

        def dims(shape: Shape) -> tuple[Dim, ...]:
            return tuple(sym(d, *bounds[d]) if isinstance(d, str) else d for d in shape)

        leaves = {name: g.input(name, dims(shape)) for name, shape in self.inputs.items()}
        leaves |= {name: g.param(name, dims(shape)) for name, shape in self.params.items()}
        return g.outputs(*self.build(leaves))

    def expected(self, arrays: Arrays) -> list[np.ndarray]:
        return [np.asarray(a, np.float32) for a in self.meaning(arrays)]


def shaped(shape: Shape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[d] if isinstance(d, str) else d for d in shape)


def whole_numbers(seed: int, shape: Sequence[int]) -> np.ndarray:
    return np.random.default_rng(seed).integers(-3, 4, tuple(shape)).astype(np.float32)


def same(given: Sequence[np.ndarray], wanted: Sequence[np.ndarray], note: object = "") -> None:
    assert len(given) == len(wanted)
    for a, b in zip(given, wanted, strict=True):
        assert a.shape == b.shape, note
        np.testing.assert_array_equal(a, b, err_msg=str(note))


def _twice_scanned(h: Value, w: Value, v: Value) -> Value:
    (made, _) = ops.scan(lambda h, _: (h @ w + v, None), h, length=2)
    return made


PROGRAMS = (
    Program(
        "beside", {"x": ("n",), "y": (3,)}, {"w": ()}, (("n",), (3,)),
        lambda v: (v["x"] * v["w"] + 1.0, v["y"] * v["w"]),
        lambda a: (a["x"] * a["w"] + 1, a["y"] * a["w"]),
    ),
    Program(
        "product", {"x": ("n", 4)}, {"w": (4, 4), "v": (4,)}, (("n", 4), (4, "n"), (4,)),
        lambda v: (v["x"] @ v["w"] + v["v"], (v["x"] * 2.0).T, v["v"] * 3.0),
        lambda a: (a["x"] @ a["w"] + a["v"], (a["x"] * 2).T, a["v"] * 3),
    ),
    Program(
        "state", {"x": ("n",), "s": ("n",)}, {"w": ()}, (("n",), ("n",)),
        lambda v: (v["x"] * v["w"] + v["s"], v["x"] - 1.0),
        lambda a: (a["x"] * a["w"] + a["s"], a["x"] - 1), feeds=(("s", 0), ("s", 1)),
    ),
    Program(
        "sums", {"x": ("n", 2)}, {"w": (2,)}, (("n", 2), (2,)),
        lambda v: (v["x"] * v["w"] - ops.sum(v["x"], 0, keepdims=True), ops.sum(v["x"], 0)),
        lambda a: (a["x"] * a["w"] - a["x"].sum(0, keepdims=True), a["x"].sum(0)), mixes=frozenset("n"),
    ),
    Program(
        "two_axes", {"x": ("b", "n"), "z": ("b",), "y": (2,)}, {"w": ()}, (("b", "n"), ("b",), (2,)),
        lambda v: (v["x"] * v["w"], v["z"] + v["w"], v["y"] - v["w"]),
        lambda a: (a["x"] * a["w"], a["z"] + a["w"], a["y"] - a["w"]),
    ),
    Program(
        "loop", {"x": (2, 2)}, {"w": (2, 2), "v": (2, 2)}, ((2, 2),),
        lambda v: (_twice_scanned(v["x"], v["w"], v["v"]),),
        lambda a: ((a["x"] @ a["w"] + a["v"]) @ a["w"] + a["v"],),
    ),
    Program(
        "sized_parameter", {"x": (2, "n")}, {"w": (2, "n")}, ((2, "n"),),
        lambda v: (v["x"] + v["w"],), lambda a: (a["x"] + a["w"],), mixes=frozenset("n"),
    ),
    Program(
        "still", {"x": (4,), "s": (4,)}, {"w": (4,), "v": ()}, ((4,),),
        lambda v: (v["x"] * v["w"] + v["s"] - v["v"],), lambda a: (a["x"] * a["w"] + a["s"] - a["v"],),
        feeds=(("s", 0),),
    ),
    Program(
        "written", {"c": (6, 2), "x": (1, 2)}, {"w": ()}, ((6, 2), (2,)),
        lambda v: _written(v["c"], v["x"] * v["w"]), lambda a: _numpy_written(a["c"], a["x"] * a["w"]),
        feeds=(("c", 0),),
    ),
)  # fmt: skip


def _written(cache: Value, row: Value) -> tuple[Value, Value]:
    made = ops.dynamic_update_slice(cache, row, (2, 0))
    return made, ops.sum(made, 0)


def _numpy_written(cache: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    made = cache.copy()
    made[2:3] = row
    return made, made.sum(0)
