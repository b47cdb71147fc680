"""Programs as data: leaves and steps that can be replayed on graph values and on tensors, at any sizes.

A step names a front-end function, an op of the registry (`op:name`), a function of `tests.differential.recipes`
(`use:name`) or the gradient of a program (`grad:`), and refers to earlier values by number. Leaves have sizes by name,
so that one program is a static graph, a symbolic one, a lazy expression or a jitted function, and can be run again at
other sizes with other arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import strata.tensor as tensors
from strata import ops
from strata.core import Dim, DType, sym
from strata.mir import REGISTRY, Graph, as_tuple
from tests.differential import recipes
from tests.differential.arrays import draw_array
from tests.differential.pull_back import pulled_back

Shape = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Ref:
    """An earlier value: its number, leaves first."""

    at: int

    def __repr__(self) -> str:
        return f"v{self.at}"


@dataclass(frozen=True, slots=True)
class Size:
    """A size by name, with the value that the program was drawn at and its bounds as a symbol."""

    name: str
    value: int
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Leaf:
    """An input or a parameter. `style` says what numbers it is filled with; `data` are given ones."""

    shape: Shape
    dtype: DType
    style: str = "plain"
    seed: int = 0
    is_param: bool = False
    data: np.ndarray | None = None

    def array(self, sizes: Mapping[str, int]) -> np.ndarray:
        shape = tuple(sizes[d] if isinstance(d, str) else d for d in self.shape)
        if self.data is not None and self.data.shape == shape:
            return self.data
        return draw_array(np.random.default_rng([self.seed, *shape]), shape, self.dtype, self.style)


@dataclass(frozen=True, slots=True)
class Step:
    """One call. `count` results; `exactness` is how they follow from their inputs (see `Drawn`)."""

    name: str
    args: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()
    count: int = 1
    exactness: str = "approximate"

    def refs(self) -> list[int]:
        return sorted({r.at for r in _refs(self.args)} | {r.at for r in _refs([v for _, v in self.options])})

    def __str__(self) -> str:
        given = [_shown(a) for a in self.args] + [f"{k}={_shown(v)}" for k, v in self.options]
        return f"{self.name}({', '.join(given)})"


@dataclass(frozen=True, slots=True)
class Program:
    """Leaves, steps, and the numbers of the values that are results."""

    sizes: tuple[Size, ...]
    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    seed: int = 0
    note: str = field(default="", compare=False)

    # -------------------------------------------------------------------------------------------------------- replaying

    def at(self, values: Mapping[str, int]) -> Program:
        """The same program drawn at other sizes."""
        return replace(self, sizes=tuple(replace(s, value=values.get(s.name, s.value)) for s in self.sizes))

    @property
    def values(self) -> dict[str, int]:
        return {s.name: s.value for s in self.sizes}

    @property
    def is_open(self) -> bool:
        """Whether a size has a name."""
        return any(isinstance(d, str) for leaf in self.leaves for d in leaf.shape)

    def arrays(self) -> dict[str, np.ndarray]:
        return {f"x{i}": leaf.array(self.values) for i, leaf in enumerate(self.leaves)}

    def graph(self, *, symbolic: bool = False) -> Graph:
        """The program as a graph: with numbers for sizes, or with symbols."""
        named: dict[str, Dim] = dict(self.values)
        if symbolic:
            named = {s.name: sym(s.name, s.low, s.high) for s in self.sizes}
        graph = Graph(f"drawn{self.seed}")
        values: list[Any] = []
        for i, leaf in enumerate(self.leaves):
            shape = [named[d] if isinstance(d, str) else d for d in leaf.shape]
            values.append((graph.param if leaf.is_param else graph.input)(f"x{i}", shape, leaf.dtype))
        self.replay(values, ops)
        return graph.outputs(*[values[i] for i in self.outputs])

    def function(self) -> Callable[..., list[Any]]:
        """The program as a function of tensors."""

        def program(*given: Any) -> list[Any]:
            values = list(given)
            self.replay(values, tensors)
            return [values[i] for i in self.outputs]

        return program

    def replay(self, values: list[Any], space: Any) -> None:
        """Append the results of every step, in the namespace of graph values or of tensors."""
        for step in self.steps:
            values += apply_step(step, values, space)

    def needed(self) -> set[int]:
        """Numbers of values that the outputs follow from."""
        made = self.producers()
        found: set[int] = set()
        todo = list(self.outputs)
        while todo:
            at = todo.pop()
            if at in found:
                continue
            found.add(at)
            if at in made:
                todo += made[at].refs()
        return found

    def producers(self) -> dict[int, Step]:
        """The step of each number that is not a leaf's."""
        found: dict[int, Step] = {}
        at = len(self.leaves)
        for step in self.steps:
            for _ in range(step.count):
                found[at] = step
                at += 1
        return found

    def __str__(self) -> str:
        lines = [f"# seed {self.seed} {self.note}".rstrip()]
        lines += [f"size {s.name} = {s.value}  # {s.low}..{'' if s.high is None else s.high}" for s in self.sizes]
        arrays = self.arrays()
        for i, leaf in enumerate(self.leaves):
            kind = "param" if leaf.is_param else "input"
            lines.append(f"v{i} = {kind} {leaf.dtype}[{', '.join(map(str, leaf.shape))}]  # {_short(arrays[f'x{i}'])}")
        at = len(self.leaves)
        for step in self.steps:
            names = ", ".join(f"v{at + k}" for k in range(step.count))
            lines.append(f"{names} = {step}")
            at += step.count
        return "\n".join([*lines, f"return {', '.join(f'v{i}' for i in self.outputs)}"])


def apply_step(step: Step, values: Sequence[Any], space: Any) -> list[Any]:
    """The results of one step on graph values or tensors."""
    args = [_filled(a, values) for a in step.args]
    options = {k: _filled(v, values) for k, v in step.options}
    kind, _, name = step.name.rpartition(":")
    if kind == "op":
        made = _apply_op(REGISTRY[name](**options), args, space)
    elif kind == "grad":
        made = pulled_back(options["of"], args, space)
    elif kind == "use":
        made = getattr(recipes, name)(space, *args, **options)
    elif name == "getitem":
        made = args[0][args[1]]
    else:
        made = getattr(space, name)(*args, **options)
    found = list(made) if isinstance(made, (tuple, list)) else [made]
    assert len(found) == step.count, f"{step} gives {len(found)} values"
    return found


def _apply_op(op: Any, args: Sequence[Any], space: Any) -> Any:
    if space is ops:
        return op(*args)
    return tuple(tensors.Tensor(v) for v in as_tuple(op(*[x.value for x in args])))


def _filled(x: Any, values: Sequence[Any]) -> Any:
    if isinstance(x, Ref):
        return values[x.at]
    if type(x) is tuple:
        return tuple(_filled(v, values) for v in x)
    return [_filled(v, values) for v in x] if type(x) is list else x


def _refs(x: Any) -> list[Ref]:
    if isinstance(x, Ref):
        return [x]
    return [r for v in x for r in _refs(v)] if type(x) in (tuple, list) else []


def _shown(x: Any) -> str:
    text = repr(x).replace("\n", " ")
    return text if len(text) < 120 else text[:117] + "..."


def _short(array: np.ndarray) -> str:
    shown = np.array2string(array.reshape(-1)[:8], separator=", ", max_line_width=200)
    return f"{shown[:-1]}, …]" if array.size > 8 else shown


def without_unused(program: Program) -> Program:
    """Only the leaves and steps that the outputs need."""
    needed = program.needed()
    at = len(program.leaves)
    leaves = [i for i in range(at) if i in needed]
    table = {old: now for now, old in enumerate(leaves)}
    steps: list[Step] = []
    for step in program.steps:
        here = range(at, at + step.count)
        at += step.count
        if not any(i in needed for i in here):
            continue
        steps.append(renamed(step, table))
        for i in here:
            table[i] = len(table)
    return replace(
        program,
        leaves=tuple(program.leaves[i] for i in leaves),
        steps=tuple(steps),
        outputs=tuple(table[i] for i in program.outputs),
    )


def renamed(step: Step, table: dict[int, int]) -> Step:
    return replace(step, args=_mapped(step.args, table), options=_mapped(step.options, table))


def _mapped(x: Any, table: dict[int, int]) -> Any:
    if isinstance(x, Ref):
        return Ref(table[x.at])
    if type(x) is tuple:
        return tuple(_mapped(v, table) for v in x)
    return [_mapped(v, table) for v in x] if type(x) is list else x
