"""Plans in the disk cache: what a run needs of a plan, in a form that loads in milliseconds.

A stored plan has the buffers, the steps, the texts of the kernels and of the ops that run whole, and the constants. It
does not have the optimised graph, which only explanations need: they plan again, from the program that is at hand
anyway.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import numpy as np

from strata.cache import default_store, digest, last_change, version_of
from strata.config import config, logger
from strata.core import Dim, Symbol, Target, TensorType, as_dtype, parse_dim
from strata.errors import FileError, StrataError
from strata.kernel import StoredKernel, show_kernel
from strata.lir import Io, Lir, LirBuffer, MemoryPlanOptions, Spacing, Step, node_text, unproven_views, verify_plan
from strata.mir import (
    Constant,
    Graph,
    Input,
    Literal,
    Node,
    Param,
    Value,
    leaf_name,
    parse,
    show_field,
    substitute_values,
)

FORMAT = 6
MOST_CONSTANT_BYTES = 64 << 20  # of constants that the program does not have itself; larger plans are made anew
WORTH_SECONDS = 0.02  # plans that are made faster than this are not kept: writing one safely takes about as long
COMPILER = ("core", "kernel", "mir", "ops", "passes", "lir", "backends", "runtime")  # folders that decide a plan
# what reading an entry raises that says other things than its writer would
DAMAGED = (StrataError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError, RecursionError)
_STARTED = time.time()
_TYPE = re.compile(r"(\w+)\[(.*)\]\Z", re.DOTALL)

Planner = Callable[[], Lir]


# ------------------------------------------------------------------------------------------------------------ the cache


def plan_key(graph: Graph, options: str, device: str, target: Target) -> str | None:
    """The key of a program's plan; None where its text does not say all, or the compiler changed while it runs."""
    version = code_version()
    text = graph_digest(graph)
    if version is None or text is None:
        return None
    return digest("plan", str(FORMAT), text, options, device, target.key, config().key_fields(), version)


def stored_plan(key: str | None, graph: Graph, make: Planner) -> tuple[Lir, bool]:
    """A plan from the store, or made and stored; and whether it came from the store."""
    if key is None:
        return make(), False
    found = _read_stored(key, graph, make)
    if found is not None:
        return found, True
    store = default_store()
    with store.making(key):  # another process may have made it while this one waited
        found = _read_stored(key, graph, make)
        if found is not None:
            return found, True
        start = time.perf_counter()
        lir = make()
        data = write_plan(lir, graph) if time.perf_counter() - start >= WORTH_SECONDS else None
        if data is not None:
            about = {"kind": "plan", "name": graph.name, "target": lir.target.key, "made by": lir.made_with}
            store.put(key, data, about)
    return lir, False


def _read_stored(key: str, graph: Graph, make: Planner) -> Lir | None:
    payload = default_store().get(key)
    if payload is None:
        return None
    try:
        return read_plan(payload, graph, lambda: make().graph)
    except DAMAGED as error:
        logger.warning("a stored plan of %r cannot be read and is made again: %s", graph.name, error)
        return None


def code_version() -> str | None:
    """A digest of the compiler; None when a file changed after this process started: its code may be older."""
    return None if last_change() > _STARTED else version_of(*COMPILER)


def graph_digest(graph: Graph) -> str | None:
    """A hash of all that a graph computes; None where a user's function is part of it, which has no text."""
    total = hashlib.sha256()
    numbers: dict[Value, int] = {}

    def add(text: str) -> None:
        total.update(f"{len(text)}:{text}".encode())

    for x in (*graph.inputs, *graph.params):
        numbers[x] = len(numbers)
        add(f"{'param' if isinstance(x.node.op, Param) else 'input'} {leaf_name(x)} {x.type}")
    for node in graph.nodes():
        if isinstance(node.op, (Input, Param)):
            continue
        add(f"{node.op.name}{[numbers[x] for x in node.inputs]}{', '.join(map(str, node.types))}")
        for name, value in node.op.static_fields().items():
            if isinstance(value, Literal):
                add(f"{name} {value.array.dtype.str} {value.array.shape}")
                total.update(np.ascontiguousarray(value.array).reshape(-1).view(np.uint8).data)
            else:
                text = show_field(value)
                if 'Extension"' in text:
                    return None
                add(f"{name} {text}")
        for out in node.outputs:
            numbers[out] = len(numbers)
    add(f"{graph.name} {[numbers[x] for x in graph.results]}")
    add(", ".join(f"{s.name} {s.lo} {s.hi}" for _, s in sorted(graph.symbols().items())))
    return total.hexdigest()


# -------------------------------------------------------------------------------------------------------------- writing


def write_plan(lir: Lir, source: Graph | None = None) -> bytes | None:
    """A plan as bytes: a line of JSON, then constants that `source` does not have; None if they are too large."""
    blobs = _Blobs(_source_constants(source))
    head = {"format": FORMAT, **_written(lir, blobs)}
    if blobs.size > MOST_CONSTANT_BYTES and source is not None:
        return None
    return json.dumps(head).encode() + b"\n" + b"".join(blobs.parts)


class _Blobs:
    """Constants that are stored with a plan: those that the program does not have itself."""

    def __init__(self, known: Mapping[Literal, int]) -> None:
        self.known, self.parts, self.size = known, list[bytes](), 0

    def add(self, array: np.ndarray) -> list[Any]:
        name = Literal(array)
        if name in self.known:
            return ["source", self.known[name]]
        data = np.ascontiguousarray(array).tobytes()
        self.parts.append(data)
        self.size += len(data)
        return [as_dtype(array.dtype).name, list(array.shape), self.size - len(data), len(data)]


def _written(lir: Lir, blobs: _Blobs) -> dict[str, Any]:
    """A plan as data; plans inside of its steps likewise."""
    texts: dict[str, int] = {}
    nodes: dict[str, int] = {}

    def number(table: dict[str, int], text: str) -> int:
        return table.setdefault(text, len(table))

    steps = [
        [
            s.name, s.inputs, s.outputs, s.label, s.phase, s.updates,
            None if s.kernel is None else number(texts, show_kernel(s.kernel)),
            None if (kept := s.slides if s.kernel is not None else s.nodes[0]) is None
            else number(nodes, node_text(kept)),
            None if s.views is None else [[str(v.start), [str(d) for d in v.strides]] for v in s.views],
            s.convolves, s.generates, s.schedule, [_written(body, blobs) for body in s.bodies],
        ]
        for s in lir.schedule
    ]  # fmt: skip
    return {
        "name": lir.name,
        "made with": lir.made_with,
        "memory": [lir.memory.mode, lir.memory.alignment],
        "symbols": {s.name: [s.lo, s.hi] for s in lir.symbols.values()},
        "inputs": [[leaf_name(x), str(x.type)] for x in lir.graph.inputs],
        "params": [[leaf_name(x), str(x.type)] for x in lir.graph.params],
        "buffers": [[b.name, str(b.type), b.role, b.key, b.birth, b.death, b.alias] for b in lir.buffers],
        "steps": steps,
        "kernels": list(texts),
        "nodes": list(nodes),
        "io": [lir.io.inputs, lir.io.params, lir.io.outputs],
        "constants": [blobs.add(array) for array in lir.constants],
    }


def _source_constants(source: Graph | None) -> dict[Literal, int]:
    if source is None:
        return {}
    return {literal: i for i, literal in enumerate(_literals(source))}


def _literals(source: Graph) -> list[Literal]:
    return [n.op.data for n in source.nodes() if isinstance(n.op, Constant)]


# -------------------------------------------------------------------------------------------------------------- reading


class StoredGraph(Graph):
    """The boundary of a graph whose inside is only read, or made again, when somebody looks at it."""

    def __init__(self, name: str, whole: Callable[[], Graph]) -> None:
        self._whole = whole
        self._results: tuple[Value, ...] | None = None
        super().__init__(name)
        self._results = None

    @property
    def results(self) -> tuple[Value, ...]:
        if self._results is None:
            whole = self._whole()
            own = {leaf_name(x): x for x in (*self.inputs, *self.params)}
            known = {x: own[leaf_name(x)] for x in (*whole.inputs, *whole.params) if leaf_name(x) in own}
            self._results = substitute_values(whole.results, known)
        return self._results

    @results.setter
    def results(self, values: tuple[Value, ...]) -> None:
        self._results = values

    def _declared(self, inputs: list[tuple[str, TensorType]], params: list[tuple[str, TensorType]]) -> None:
        self.inputs = tuple(Input(n, t, self.scope)() for n, t in inputs)
        self.params = tuple(Param(n, t, self.scope)() for n, t in params)

    def symbols(self) -> dict[str, Symbol]:
        assert self._symbols is not None
        return self._symbols


def read_plan(data: bytes, source: Graph | None, whole: Callable[[], Graph], target: Target | None = None) -> Lir:
    """The plan that `write_plan` wrote; a damaged one raises."""
    text, _, blobs = data.partition(b"\n")
    head = json.loads(text)
    if head["format"] != FORMAT:
        raise FileError(f"the plan has format {head['format']}, this version reads {FORMAT}", code="F402")
    literals = _literals(source) if source is not None else []
    return _read(head, whole, lambda row: _read_constant(row, literals, blobs), target or Target.host())


def _read(
    head: dict[str, Any], whole: Callable[[], Graph], constant: Callable[[list[Any]], np.ndarray], target: Target
) -> Lir:
    symbols = {name: Symbol(name, lo, hi) for name, (lo, hi) in head["symbols"].items()}
    kind_of = _TypeReader(symbols)
    graph = StoredGraph(head["name"], whole)
    graph._symbols = symbols
    graph._declared([(n, kind_of(t)) for n, t in head["inputs"]], [(n, kind_of(t)) for n, t in head["params"]])
    kernels = [StoredKernel.of(text) for text in head["kernels"]]
    nodes = [StoredNode(text) for text in head["nodes"]]
    buffers = tuple(
        LirBuffer(name, kind_of(kind), role, key, birth, death, alias)
        for name, kind, role, key, birth, death, alias in head["buffers"]
    )
    steps = tuple(
        _with_bodies(_read_step(row[:-1], kernels, nodes, symbols), row[-1], constant, target) for row in head["steps"]
    )
    inputs, params, outputs = head["io"]
    io = Io(tuple((a, b) for a, b in inputs), tuple((a, b) for a, b in params), tuple(outputs))
    constants = tuple(map(constant, head["constants"]))
    memory = MemoryPlanOptions(*head["memory"])
    return Lir(graph, target, buffers, steps, io, constants, (), head["made with"], memory)


def _with_bodies(
    step: StoredStep, heads: list[Any], constant: Callable[[list[Any]], np.ndarray], target: Target
) -> StoredStep:
    """A step with the plans inside of it; their graphs are those of its op."""

    def graph(number: int) -> Graph:
        return step.nodes[0].op.nested()[number].opened()

    bodies = tuple(_read(head, partial(graph, i), constant, target) for i, head in enumerate(heads))
    object.__setattr__(step, "bodies", bodies)
    return step


def check_plan(lir: Lir) -> str:
    """Refuse a plan from elsewhere that breaks the rules of every plan, or whose boundary is not its graph's.

    Returns why it must be made again all the same: what cannot be proven is not trusted; nothing where it can be used.
    """
    for s in lir.symbols.values():
        if type(s.lo) is not int or s.lo < 0 or not (s.hi is None or (type(s.hi) is int and s.hi >= s.lo)):
            raise FileError(f"the plan has a size {s.name!r} from {s.lo!r} to {s.hi!r}", code="F402")
    types = {b.name: b.type for b in lir.buffers}
    leaves = [(leaf_name(x), x.type) for x in (*lir.graph.inputs, *lir.graph.params)]
    for (name, kind), (bound, buffer) in zip(leaves, (*lir.io.inputs, *lir.io.params), strict=True):
        if name != bound or types[buffer] != kind:
            raise FileError(f"the plan binds {bound!r} : {types[buffer]} to {name!r} : {kind}", code="F402")
    for b in lir.buffers:
        if not isinstance(b.name, str) or type(b.birth) is not int or type(b.death) is not int:
            raise FileError(f"the plan has a buffer {b.name!r} from {b.birth!r} to {b.death!r}", code="F402")
        if b.role == "constant" and (type(b.key) is not int or not 0 <= b.key < len(lir.constants)):
            raise FileError(f"the plan has no constant {b.key!r}", code="F402")
        held = lir.constants[b.key] if b.role == "constant" and isinstance(b.key, int) else None
        if held is not None and (held.shape != b.type.shape or as_dtype(held.dtype) != b.type.dtype):
            raise FileError(f"constant {b.key} of the plan is {held.dtype}{held.shape}, not {b.type}", code="F402")
    for step in lir.schedule:
        if not all(isinstance(x, str) for x in (step.name, step.label, step.phase)):
            raise FileError(f"a step of the plan is called {step.name!r}, {step.label!r}", code="F402")
    for step in lir.schedule:
        for body in step.bodies:
            check_plan(body)
    verify_plan(lir)
    unproven = unproven_views(lir)
    return f"where {', '.join(unproven)} reads is not known before it runs" if unproven else ""


class _TypeReader:
    """Types from their text; equal texts are read once."""

    def __init__(self, symbols: Mapping[str, Symbol]) -> None:
        self._symbols, self._known = symbols, dict[str, TensorType]()

    def __call__(self, text: str) -> TensorType:
        if text not in self._known:
            match = _TYPE.match(text)
            if not match:
                raise FileError(f"{text!r} is not a type", code="F402")
            dims = tuple(parse_dim(part, self._symbols) for part in split_outside(match[2]))
            self._known[text] = TensorType(as_dtype(match[1]), dims)
        return self._known[text]


def split_outside(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    return [p for p in [*parts, text[start:].strip()] if p]


class StoredNode:
    """An op as text, which is read once for all steps that have it: layers of a model are alike."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def node(self) -> Node:
        return parse(self.text).results[0].node


class StoredStep(Step):
    """A step whose op is read from its text when somebody asks for it: to run stored code nobody does."""

    __slots__ = ("_convolves", "_generates", "_stored")

    def __getattr__(self, name: str) -> Any:  # of a field that was not read yet
        if name != "nodes":
            raise AttributeError(name)
        nodes = () if self._stored is None else (self._stored.node,)
        object.__setattr__(self, "nodes", nodes)
        return nodes

    @property
    def has_slides(self) -> bool:
        if self.kernel is not None and hasattr(self, "_stored"):
            return self._stored is not None
        return super().has_slides

    @property
    def convolves(self) -> bool:
        return self._convolves if hasattr(self, "_convolves") else super().convolves

    @property
    def generates(self) -> bool:
        return self._generates if hasattr(self, "_generates") else super().generates


def _read_step(
    row: list[Any], kernels: list[StoredKernel], nodes: list[StoredNode], symbols: Mapping[str, Symbol]
) -> StoredStep:
    name, inputs, outputs, label, phase, updates, kernel, node, views, convolves, generates, schedule = row

    def dim(text: str) -> Dim:
        return parse_dim(text, symbols)

    spaced = (
        None
        if views is None
        else tuple(Spacing(dim(start), tuple(dim(d) for d in strides)) for start, strides in views)
    )
    step = StoredStep(
        name, tuple(inputs), tuple(outputs), label, None if kernel is None else kernels[kernel],
        (), phase, tuple((made, start) for made, start in updates), spaced, schedule=schedule,
    )  # fmt: skip
    object.__delattr__(step, "nodes")
    object.__setattr__(step, "_stored", None if node is None else nodes[node])
    object.__setattr__(step, "_convolves", bool(convolves))
    object.__setattr__(step, "_generates", bool(generates))
    return step


def _read_constant(row: list[Any], literals: list[Literal], blobs: bytes) -> np.ndarray:
    if row[0] == "source":
        return literals[row[1]].array
    name, shape, at, size = row
    dtype = as_dtype(name).np
    if at < 0 or at + size > len(blobs) or size != dtype.itemsize * int(np.prod(shape, dtype=np.int64)):
        raise FileError("the plan's constants are damaged", code="F402")
    return np.frombuffer(blobs, np.uint8, size, at).copy().view(dtype).reshape(shape)
