"""Every way from a program to its results. A path gives arrays, or the class of the error that it raises."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np

import strata.tensor as tensors
from strata.backends import register_backend
from strata.config import using
from strata.core import substitute
from strata.errors import MissingRuleError, ShapeError, StrataError, SymbolError
from strata.mir import Graph, parse
from strata.ops.reduce.reduce import ReduceSum
from strata.runtime import CompiledGraph, CompileOptions, Session
from strata.tensor import data, lazy_cache
from tests.backends.guard_pages import run_guarded
from tests.differential.gradients import base_of, check_differences, differentiated
from tests.differential.meaning import Meaning, Violation, bits_of, compare, meaning_of, same_bits
from tests.differential.program import Program, without_unused

MAIN = (
    "reference", "graph", "lazy", "later", "jit", "unfused", "threads", "symbolic", "specialised", "bucketed", "vmap",
    "text", "guarded", "process", "bits", "gradient",
)  # fmt: skip
# No ways of their own: `process` repeats programs elsewhere, `bits` compares those with symbols in every bit, and
# `gradient` goes the other ways with the gradient of a program.
TOGETHER = ("process", "bits", "gradient")
DEVICES = ("xla", "wgpu", "triton", "cuda")
PATHS = (*MAIN, *DEVICES)
# Of paths that take long, one program in so many goes there.
RARE = {
    "guarded": 12,
    "unfused": 3,
    "threads": 3,
    "text": 5,
    "process": 1,
    "xla": 4,
    "triton": 2,
    "reference": 2,
    "gradient": 3,
}

FEW = 4  # paths: then every program takes all of them

Arrays = Sequence[np.ndarray]


def compiled(graph: Graph, feeds: dict[str, np.ndarray], device: str = "cpu", **options: object) -> CompiledGraph:
    made = Session(device).compile(graph, CompileOptions(**options))  # type: ignore[arg-type]
    made.set_params({n: feeds[n] for n in made.params})
    return made


def run(made: CompiledGraph, feeds: dict[str, np.ndarray]) -> Arrays:
    return made.run({n: feeds[n] for n in made.inputs})


@contextmanager
def compiling_at_once() -> Iterator[None]:
    """Lazy expressions are compiled when they are first met."""
    lazy_cache.clear()
    with patch.object(lazy_cache, "compile_price", lambda nodes: -1.0):
        yield


class Run:
    """One program on its paths."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.feeds = program.arrays()
        self._opened: CompiledGraph | None = None

    @property
    def opened(self) -> CompiledGraph:
        """Compiled once with symbols for its sizes."""
        if self._opened is None:
            self._opened = compiled(self.program.graph(symbolic=True), self.feeds)
        return self._opened

    # ------------------------------------------------------------------------------------------------------------ paths

    def reference(self) -> Arrays:
        return run(compiled(self.program.graph(), self.feeds, "reference"), self.feeds)

    def graph(self) -> Arrays:
        return run(compiled(self.program.graph(), self.feeds), self.feeds)

    def unfused(self) -> Arrays:
        return run(compiled(self.program.graph(), self.feeds, fusion=False), self.feeds)

    def threads(self) -> Arrays:
        with using(num_threads=2):
            return run(compiled(self.program.graph(), self.feeds), self.feeds)

    def given(self) -> list[tensors.Tensor]:
        """The inputs; nothing is known of what other ways have computed, not even of constants."""
        data._realized.clear()
        return [tensors.asarray(a.copy()) for a in self.feeds.values()]

    def lazy(self) -> Arrays:
        made = self.program.function()(*self.given())
        tensors.realize(*made)
        return [x.numpy() for x in made]

    def later(self) -> Arrays:
        with compiling_at_once():
            return self.lazy()

    def jit(self) -> Arrays:
        return [x.numpy() for x in tensors.jit(self.program.function())(*self.given())]

    def symbolic(self) -> Arrays:
        return run(self.opened, self.feeds)

    def specialised(self) -> Arrays:
        graph = self.program.graph(symbolic=True)
        binding = {n: v for n, v in self.program.values.items() if n in graph.symbols()}
        return run(compiled(graph, self.feeds, dim_binding=binding), self.feeds)

    def bucketed(self) -> Arrays:
        buckets: dict[int, dict[int, list[int]]] = {}
        for i, leaf in enumerate(self.program.leaves):
            for axis, d in enumerate(leaf.shape):
                if isinstance(d, str):
                    high = next(s.high for s in self.program.sizes if s.name == d)
                    buckets.setdefault(i, {})[axis] = [max(64, self.program.values[d]) if high is None else high]
        return [x.numpy() for x in tensors.jit(self.program.function(), buckets=buckets)(*self.given())]

    def text(self) -> Arrays:
        """The graph written down and read back."""
        return run(compiled(parse(str(self.program.graph())), self.feeds), self.feeds)

    def guarded(self) -> Arrays:
        """Between pages that nobody may touch, with symbols for sizes where there are any."""
        feeds = {name: a.copy() for name, a in self.feeds.items()}
        return run_guarded(self.program.graph(symbolic=self.program.is_open), feeds, "cpu")

    def device(self, name: str) -> Arrays:
        if name == "triton":
            from strata.backends.triton.backend import interpreted

            register_backend("triton_interpreter", interpreted())
            name = "triton_interpreter"
        return run(compiled(self.program.graph(), self.feeds, name), self.feeds)


OF_GRADIENTS = ("reference", "graph", "later", "jit", "symbolic", "specialised", "bucketed", "vmap", "bits")
BITS = (
    "graph",
    "threads",
    "symbolic",
    "specialised",
    "bucketed",
    "later",
    "jit",
    "text",
    "guarded",
)  # compiled: equal in every bit
WITH_SYMBOLS = ("symbolic", "specialised")  # graphs that are made with symbols
OPEN = ("symbolic", "specialised", "bucketed")
FACTORS = frozenset(
    {"svd", "eigh", "qr", "lu", "cholesky", "solve", "triangular_solve", "pinv", "det", "slogdet", "adjugate"}
)
Outcome = Arrays | type[Exception]


def check(program: Program, paths: Sequence[str] = MAIN) -> None:
    """Raise a Violation where a path disagrees with the meaning, or a compiled one with another in its bits."""
    ways = Run(program)
    meaning = _meaning(program)
    first: dict[tuple[bool, bool], tuple[str, Arrays]] = {}
    has_params = any(leaf.is_param for leaf in program.leaves)
    opens = program.is_open and _opens(program)
    for path in paths:
        if path in TOGETHER or (path in OPEN and not opens):
            continue
        if len(paths) > FEW and program.seed // 4 % RARE.get(path, 1):
            continue
        if path == "guarded" and program.is_open and not opens:
            continue
        if path == "vmap":
            _check_rows(program, meaning)
            continue
        got = _outcome(lambda: ways.device(path) if path in DEVICES else getattr(ways, path)())  # noqa: B023
        try:
            judge(path, got, meaning)
        except Violation:
            if not isinstance(got, type) or not isinstance(meaning, type) or len(program.outputs) == 1:
                raise
            for i in program.outputs:  # of several errors one is first: which one may differ
                check(without_unused(replace(program, outputs=(i,))), paths)
            return
        if path in BITS and not isinstance(got, type):
            if path in OPEN and "bits" not in paths:
                continue
            key = has_params and path in ("later", "jit", "bucketed")  # where parameters are inputs like others
            known = first.setdefault((key, _sums_otherwise(program) and path in WITH_SYMBOLS), (path, got))
            same_bits(path, known[0], got, known[1])
    if "symbolic" in paths and opens:
        _check_sizes(program, ways, in_bits="bits" in paths)
    if "gradient" in paths and (len(paths) <= FEW or program.seed // 4 % RARE["gradient"] == 0):
        _check_gradient(program, (*OF_GRADIENTS, *(p for p in paths if p in DEVICES)))


def _check_gradient(program: Program, paths: Sequence[str]) -> None:
    """The gradient of a program, which is another program, its ways; and beside differences."""
    made = differentiated(program)
    if made is None:
        return
    try:
        check(made, paths)
        check_differences(made)
    except Violation as found:
        raise Violation(f"gradient {found.path}", found.kind, found.message) from None


def _opens(program: Program) -> bool:
    """Whether the program takes symbols: ops of the registry, and their gradients, may want some sizes as numbers."""
    if not any(step.exactness == "op" for step in (base_of(program) or program).steps):
        return True
    try:
        Session("cpu").compile(program.graph(symbolic=True))
    except (ShapeError, SymbolError, MissingRuleError):
        return False
    except StrataError:
        return True  # no refusal: it is found on the path itself
    return True


def digest(program: Program) -> str:
    """The bits of the results of a program: compiled with numbers, and with symbols, for sizes."""
    ways = Run(program)
    found = hashlib.sha256()
    for path in ("graph", *(("symbolic",) if program.is_open and _opens(program) else ())):
        got = _outcome(getattr(ways, path))
        found.update(got.__name__.encode() if isinstance(got, type) else b"".join(map(bits_of, got)))
    return found.hexdigest()[:16]


def _check_sizes(program: Program, ways: Run, *, in_bits: bool) -> None:
    """One compile at the smallest, the largest and other values of its sizes; at one of them, it has the bits of a
    compile for these numbers."""
    rng = np.random.default_rng([program.seed, 2])
    chosen: list[dict[str, int]] = [{s.name: s.low for s in program.sizes}]
    for _ in range(2):
        highs = {s.name: min(40, 40 if s.high is None else s.high) for s in program.sizes}
        chosen.append({s.name: int(rng.choice([s.low, *range(s.low, min(highs[s.name], s.low + 4) + 1), highs[s.name]]))
                       for s in program.sizes})  # fmt: skip
    made = _outcome(lambda: ways.opened)
    if isinstance(made, type) or not _any_numbers(program):
        return  # it was judged already, or has numbers that an op wants
    also = int(rng.integers(len(chosen)))
    for number, values in enumerate(chosen):
        other = program.at(values)
        feeds = other.arrays()
        got, meaning = _outcome(lambda: run(ways.opened, feeds)), _meaning(other)  # noqa: B023
        if len(program.outputs) == 1 or not isinstance(got, type) or not isinstance(meaning, type):
            judge(f"symbolic at {values}", got, meaning)  # of several errors one is first: which one may differ
        if in_bits and number == also and not isinstance(got, type) and not _sums_otherwise(other):
            known = _outcome(Run(other).graph)
            if not isinstance(known, type):
                same_bits(f"symbolic at {values}", "graph", got, known)


def _sums_otherwise(program: Program) -> bool:
    """Whether its gradient sums over a symbol that is 1, and with a number does not: it undoes a broadcast there."""
    if base_of(program) is None or 1 not in program.values.values():
        return False
    numbers, symbols = (program.graph(symbolic=opened) for opened in (False, True))
    if any(node.op.nested() for node in symbols.nodes()):
        return True
    return _sums_of_one(numbers, {}) != _sums_of_one(symbols, program.values)


def _sums_of_one(graph: Graph, values: dict[str, int]) -> int:
    """How many axes of one element sums go over, for some values of symbols."""
    found = 0
    for node in graph.nodes():
        if isinstance(node.op, ReduceSum):
            found += sum(substitute(node.inputs[0].shape[axis], values) == 1 for axis in node.op.axes)
    return found


def _any_numbers(program: Program) -> bool:
    """Whether its meaning is settled for all numbers: factors of a matrix have signs, and may not exist."""
    names = {step.name.removeprefix("op:") for step in program.steps}
    return names.isdisjoint(FACTORS) and all(leaf.data is None for leaf in program.leaves)


def _check_rows(program: Program, meaning: Meaning | type[Exception]) -> None:
    """A batch of two, of which the second row has other numbers."""
    second = replace(program, leaves=tuple(replace(leaf, seed=leaf.seed + 1) for leaf in program.leaves))
    both = [np.stack([a, b]) for a, b in zip(program.arrays().values(), second.arrays().values(), strict=True)]
    got = _outcome(lambda: [x.numpy() for x in tensors.vmap(program.function())(*map(tensors.asarray, both))])
    if got is MissingRuleError:
        return
    for row, wanted in enumerate((meaning, _meaning(second))):
        judge(f"vmap row {row}", got if isinstance(got, type) else [a[row] for a in got], wanted)


def _meaning(program: Program) -> Meaning | type[Exception]:
    try:
        return meaning_of(program)
    except StrataError as error:
        return type(error)


def _outcome(path: Callable[[], Any]) -> Any:
    try:
        with np.errstate(all="ignore"):
            return path()
    except Violation:
        raise
    except Exception as error:  # noqa: BLE001 - what is raised is the outcome
        return type(error)


def judge(path: str, got: Outcome, meaning: Meaning | type[Exception]) -> None:
    """Results against results, an error against an error of the same class."""
    if isinstance(got, type) or isinstance(meaning, type):
        a = got.__name__ if isinstance(got, type) else "an answer"
        b = meaning.__name__ if isinstance(meaning, type) else "an answer"
        alike = (
            isinstance(got, type)
            and isinstance(meaning, type)
            and (issubclass(got, meaning) or issubclass(meaning, got))
        )
        if not alike:
            raise Violation(path, f"{a} for {b}", f"gives {a} where the interpreter gives {b}")
        return
    compare(path, got, meaning)
