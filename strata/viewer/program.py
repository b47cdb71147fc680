"""A program at every stage as plain data: graphs, what each pass changed, the plan, kernels, code and memory.

Nodes are interned, so that one table holds the nodes of all stages, and a stage is a list of rows. Rows refer to texts
by number, since layers of a model repeat them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strata.core import Place, TensorType
from strata.errors import StrataError
from strata.hir import HirModule
from strata.kernel import show_kernel
from strata.lir import Lir
from strata.mir import Graph, Node, Value, leaf_name, show_field
from strata.passes import run_passes
from strata.runtime import CompilePipeline

LONGEST_FIELD = 160  # characters; constants are shown by their type
MOST_CODE = 24_000_000  # characters of generated code in a page
SOURCES = ("HIR", "ONNX")  # stages with nodes of another kind: what comes after them is not compared with them
LIKELY_SIZE = 128  # of a symbolic size without an upper bound, where memory is shown


@dataclass(frozen=True, slots=True)
class FileNode:
    """A node of a model file: values have names."""

    op: str
    fields: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    types: tuple[str, ...]
    name: str | None


class ProgramData:
    """Collects a program for the page: `stage` by `stage`, then its `plan`."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.nodes: list[list[Any]] = []
        self.stages: list[dict[str, Any]] = []
        self._rows: dict[Any, int] = {}
        self._kept: list[Any] = []  # a row is found by its node's identity
        self._places: dict[str, str] = {}

    def text(self, text: str | None) -> int:
        """The number of a text; -1 is none."""
        return -1 if text is None else self.texts.setdefault(text, len(self.texts))

    def data(self) -> dict[str, Any]:
        return {"texts": list(self.texts), "nodes": self.nodes, "stages": self.stages, "lines": self._places}

    # stages

    def modules(self, module: HirModule) -> None:
        """The program in blocks, as its author wrote it."""
        rows = [self._block_row(node) for node in module.nodes]
        results = [self._rows[id(x.node)] for x in module.results]
        self._stage("HIR", rows, results, "blocks, as they were written")

    def file(self, name: str, rows: Sequence[FileNode], results: Iterable[str], note: str) -> None:
        """The nodes of a model file, as it has them."""
        at: dict[str, int] = {}
        found = []
        for row in rows:
            inputs = [[at[x], 0] for x in row.inputs if x in at]
            types = [self.text(t) for t in row.types]
            made = [self.text(row.op), self.text(row.fields or None), inputs, types, -1, self.text(row.name), -1]
            at.update(dict.fromkeys(row.outputs, len(self.nodes)))
            found.append(len(self.nodes))
            self.nodes.append(made)
        self._stage(name, found, [at[x] for x in results if x in at], note)

    def graph(self, name: str, graph: Graph, note: str) -> None:
        """A graph; of the one before it, what is gone and what is new."""
        rows = [self.row(node) for node in graph.nodes()]
        self._stage(name, rows, [self.row(x.node) for x in graph.results], note)

    def _stage(self, name: str, rows: list[int], results: list[int], note: str) -> None:
        stage: dict[str, Any] = {"name": name, "nodes": rows, "results": results, "note": note}
        if self.stages and self.stages[-1]["name"] not in SOURCES:
            before = self.stages[-1]["nodes"]
            stage["gone"], stage["new"] = self._difference(before, rows), self._difference(rows, before)
        self.stages.append(stage)

    def _difference(self, rows: Sequence[int], others: Sequence[int]) -> list[int]:
        """Rows whose op and types come more often here than there: an op that only has other inputs is the same."""
        left = Counter(self._kind(row) for row in others)
        left.subtract(self._kind(row) for row in set(rows) & set(others))
        found = []
        shared = set(others)
        for row in rows:
            if row in shared:
                continue
            kind = self._kind(row)
            if left[kind] > 0:
                left[kind] -= 1
            else:
                found.append(row)
        return found

    def _kind(self, row: int) -> tuple[Any, ...]:
        op, fields, _, types, *_ = self.nodes[row]
        return op, fields, tuple(types)

    def row(self, node: Node) -> int:
        """The row of a node: op, fields, inputs, types, line, block, pass."""
        known = self._rows.get(id(node))
        if known is not None:
            return known
        inputs = [[self.row(x.node), x.index] for x in node.inputs]
        fields = node.op.static_fields()
        if node.op.name in ("input", "param"):
            shown = leaf_name(Value(node, 0))
        elif node.op.name == "constant":
            shown = ", ".join(map(_field, fields.values()))
        else:
            shown = ", ".join(f"{k} = {_field(v)}" for k, v in fields.items())
        origin = node.origin
        return self._add(
            node, node.op.name, shown, inputs, node.types, origin.place, origin.block, origin.made_by
        )  # fmt: skip

    def _block_row(self, node: Any) -> int:
        inputs = [[self._rows[id(x.node)], x.slot] for x in node.inputs]
        name = getattr(node.block, "name", type(node.block).__name__)
        shown = ", ".join(f"{k} = {_field(v)}" for k, v in node.block.static_fields().items())
        return self._add(node, name, shown, inputs, node.types, node.place, node.label, None)

    def _add(
        self, node: Any, op: str, fields: str, inputs: list[list[int]], types: Sequence[TensorType],
        place: Place | None, block: str | None, made_by: str | None,
    ) -> int:  # fmt: skip
        at = self._rows[id(node)] = len(self.nodes)
        self._kept.append(node)
        line = None if place is None else place.short
        if place is not None and place.text:
            self._places[place.short] = place.text
        self.nodes.append([
            self.text(op), self.text(fields or None), inputs, [self.text(str(t)) for t in types], self.text(line),
            self.text(block), self.text(made_by),
        ])  # fmt: skip
        return at


def _field(value: Any) -> str:
    """A field as it is printed, but never the elements of an array."""
    array = getattr(value, "array", None)
    if array is not None:
        return f"array of {array.dtype}{list(array.shape)}" if array.size > 8 else str(array.tolist())
    if isinstance(value, Graph):
        return f"graph of {len(value.nodes())} nodes"
    try:
        text = show_field(value)
    except StrataError:
        text = str(value)
    return text if len(text) <= LONGEST_FIELD else f"{text[: LONGEST_FIELD - 1]}…"


# ---------------------------------------------------------------------------------------------------------- all stages


def program_data(
    pipeline: CompilePipeline, program: Any, sizes: Mapping[str, int] | None = None, made: ProgramData | None = None
) -> dict[str, Any]:
    """Every stage of a program under a pipeline, after those that were collected already."""
    made = made or ProgramData()
    if isinstance(program, HirModule):
        made.modules(program)
    graph = pipeline.lower(program)
    made.graph("graph", graph, "as it was written")
    current = graph
    for one in pipeline.passes:
        changed, records = run_passes([one], current, pipeline.context)
        if changed is not current:
            seconds = sum(r.seconds for r in records)
            note = f"{len(current.nodes())} → {len(changed.nodes())} nodes, {seconds * 1e3:.1f} ms"
            made.graph(str(one), changed, note)
        current = changed
    lir = pipeline.plan(current)
    made.graph("optimised", lir.graph, "what is planned")
    return {"kind": "program", "name": graph.name, **plan_data(made, lir, pipeline, sizes), **made.data()}


# ------------------------------------------------------------------------------------------------------------- the plan


def plan_data(
    made: ProgramData, lir: Lir, pipeline: CompilePipeline, sizes: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Steps, buffers, memory, kernels and their code."""
    binding = likely_sizes(lir, sizes)
    offsets, arena = _placed(lir, binding)
    buffers = [
        {
            "name": b.name, "type": str(b.type), "role": b.role, "key": b.key, "birth": b.birth, "death": b.death,
            "bytes": _bytes(b.type, binding), "offset": offsets.get(b.alias or b.name),
        }
        for b in lir.buffers
    ]  # fmt: skip
    steps = [
        {
            "name": s.name, "label": s.label, "phase": s.phase, "inputs": list(s.inputs), "outputs": list(s.outputs),
            "nodes": [made.row(n) for n in s.nodes], "where": "host" if s.kernel is None else "kernel",
        }
        for s in lir.schedule
    ]  # fmt: skip
    cuts = [[made.row(c.producer), None if c.consumer is None else made.row(c.consumer), c.reason] for c in lir.cuts]
    return {
        "device": pipeline.device, "target": str(lir.target.name), "sizes": dict(binding), "arena": arena,
        "buffers": buffers, "steps": steps, "cuts": cuts,
        "kernels": {name: show_kernel(kernel) for name, kernel in lir.kernels.items()},
        "code": _code(pipeline, lir),
    }  # fmt: skip


def likely_sizes(lir: Lir, sizes: Mapping[str, int] | None) -> dict[str, int]:
    """Sizes to show memory for: those given, else the upper bound, else a common one within the bounds."""
    found = {}
    for name, symbol in lir.symbols.items():
        usual = symbol.hi if symbol.hi is not None and symbol.hi <= LIKELY_SIZE else max(symbol.lo, LIKELY_SIZE)
        found[name] = (sizes or {}).get(name, usual)
    return found


def _placed(lir: Lir, binding: Mapping[str, int]) -> tuple[Mapping[str, int], dict[str, int] | None]:
    try:
        placement = lir.placement(binding)
    except StrataError:  # sizes of the data: known when it runs
        return {}, None
    return placement.offsets, {
        "size": placement.arena_size,
        "bound": placement.lower_bound,
        "apart": placement.unshared,
    }


def _bytes(kind: TensorType, binding: Mapping[str, int]) -> int | None:
    count = kind.bind(binding).nbytes
    return count if isinstance(count, int) else None


def _code(pipeline: CompilePipeline, lir: Lir) -> dict[str, str]:
    """The text of each kernel's code, as long as the page stays small."""
    found: dict[str, str] = {}
    left = MOST_CODE
    for name, text in _texts(pipeline.backend.sources(lir)):
        left -= len(text)
        found[name] = text if left > 0 else f"{len(text):,} characters: more than fits into this page"
    return found


def _texts(sources: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    for name in sources:
        try:
            yield name, sources[name]
        except StrataError as error:
            yield name, f"no text: {error}"
